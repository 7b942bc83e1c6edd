"""What commands share: finding recordings, and turning text into policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from traces.latency import LatencyTable
    from traces.rounds import RoundLog
    from traces.trace import Trace

BUNDLED = "bundled"
"""The recording used where none is named: the pair that comes with the project."""

TraceOption = Annotated[
    str,
    typer.Option(
        "--trace", metavar="T", help="Trace file, run folder, or bundled recording's name."
    ),
]
LatencyOption = Annotated[
    str | None,
    typer.Option(
        "--latency",
        metavar="L",
        help="Latency file, run folder, bundled recording's name, or "
        "const:target=S,draft=S[,verify=S] in seconds. Default: the trace's own.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", metavar="P", help="name[:key=value,...]; repeatable; all = every policy."
    ),
]


def load_trace(name: str) -> Trace:
    """The trace `name` stands for; unknown positions are imputed, and the result marked."""
    import numpy as np

    from traces.recordings import find_trace
    from traces.trace import UNKNOWN

    trace = find_trace(name)
    if not np.any(trace.columns["match"] == UNKNOWN):
        return trace
    try:
        return trace.impute(0)
    except DraftsimError:
        # A log without draft lengths: full accepts look like rejections, a lower bound.
        return trace.impute(0, "rejected")


def load_latency(name: str | None, trace_name: str) -> LatencyTable:
    """The latency table `name` stands for, by default the one recorded with the trace."""
    from traces.recordings import find_latency

    return find_latency(name if name is not None else trace_name)


def load_policies(
    texts: Sequence[str] | None, trace: Trace, latency: LatencyTable | None = None
) -> list[tuple[str, DraftPolicy]]:
    """(name, policy) of each text; none or ``all`` stand for every policy of the trace.

    With ``all``, policies that read signals the trace lacks are left out.
    Raises DraftsimError naming what is wrong with a text.
    """
    from policies.registry import describe, parse_policy, policy_names

    del latency
    names = list(texts or ["all"])
    every = "all" in names
    if every:
        names = [n for n in names if n != "all"] + policy_names("single")
    vocab = (trace.meta.get("target") or {}).get("vocab_size")
    chosen: list[tuple[str, Any]] = []
    for text in names:
        try:
            policy = parse_policy(text, max_gamma=trace.max_gamma, vocab_size=vocab)
        except ValueError as error:
            raise DraftsimError(str(error)) from None
        if every and text in policy_names("single") and not set(policy.reads) <= trace.signals:
            continue
        name = describe(policy)
        if name not in dict(chosen):
            chosen.append((name, policy))
    return chosen


def replay_all(
    trace: Trace, policies: Sequence[tuple[str, DraftPolicy]], first: int = 1
) -> list[RoundLog]:
    """Replay every policy over the trace."""
    from traces.replay import replay

    return [replay(trace, policy, name=name, first=first) for name, policy in policies]
