"""The inputs that commands share: finding recordings, and turning text into policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.bounds import MOST_BATCH
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from policies.rules.base import VerifyRule
    from simulator.chosen import Say
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

TRACE_VARIABLE = "DRAFTSIM_TRACE"
"""The environment variable that names another."""


class Defaulted(str):
    """The name of a recording that a command takes because the user named none."""

    option = "--trace"
    """The option that would have named one."""


def as_named(context: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Mark a recording that comes by default: a callback of the options that name one."""
    source = context.get_parameter_source(str(param.name))
    if source is None or source.name != "DEFAULT":
        return value
    name = Defaulted(value)
    name.option = f"--{param.name}"
    return name


TraceOption = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="T",
        envvar=TRACE_VARIABLE,
        callback=as_named,
        help="Trace file, run folder, or recording's name.",
    ),
]
LatencyOption = Annotated[
    str | None,
    typer.Option(
        "--latency",
        metavar="L",
        help="Latency file, run folder, bundled recording's name, GPU/TARGET[@tpN][+DRAFT] "
        "composed from measured operators (a100/llama-2-70b@tp4+llama-2-7b), or "
        "const:target=S,draft=S[,verify=S] in seconds. Default: the trace's own.",
    ),
]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="FILE|P,P,..",
        help="Instead of --trace: chances that the first 1, 2, ... drafted tokens are all accepted "
        "(0.76,0.60,0.43), or a server's /metrics (BEFORE,AFTER), its benchmark's result, or "
        "counts of `draftsim import`. Takes --latency.",
    ),
]
OtherAcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        metavar="FILE|P,P,..",
        help="Predict for this acceptance instead of the runs' own: chances that the first 1, 2, "
        "... drafted tokens are all accepted (0.76,0.60,0.43), a server's /metrics "
        "(BEFORE,AFTER), or a benchmark's result.",
    ),
]
AssumeOption = Annotated[
    bool,
    typer.Option(
        "--assume-batch-free",
        help="Where the latencies know one batch size: take every other to cost the same.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="P",
        help="name[:key=value,...], FILE.py:Class[:...] for a policy of your own, or the name "
        "of a paper's method; repeatable; all = every policy (`draftsim list --policies`).",
    ),
]

VerifyOption = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="RULE",
        help="Verify rule, name[:key=value,...]; lossless where none is named.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the code that a model's folder brings; read it first."
    ),
]
MemoryOption = Annotated[
    Path | None,
    typer.Option(
        "--memory",
        metavar="FILE",
        help="Correction memory of `draftsim calibrate-memory`, for csd.",
    ),
]


def load_latency(
    name: str | None, trace_name: str, assume_batch_free: bool = False, say: Say | None = None
) -> LatencyTable:
    """Return the latency table called `name`, by default the one recorded with the trace.

    ``say`` is told how the table is known; by default that is a note.
    Raises DraftsimError if the trace is a file by itself, as of a log, and none is named.
    """
    from commands.common.output import note
    from traces.store.recordings import find_latency, folder_of

    if name is None and folder_of(trace_name) is None:
        raise DraftsimError(
            f"{trace_name} says nothing of what passes cost: name latencies with --latency, a run "
            "folder, a recording (`draftsim list`) or const:target=SECONDS,draft=SECONDS"
        )
    table = find_latency(name if name is not None else trace_name)
    if said := table.meta.get("said"):
        (say or note)(str(said))
    return table.assumed_batch_free() if assume_batch_free else table


def load_policies(
    texts: Sequence[str] | None,
    trace: Trace,
    *,
    signals: frozenset[str] | None = None,
    max_gamma: int | None = None,
    say: bool = True,
    lacking: dict[str, DraftPolicy] | None = None,
) -> list[tuple[str, DraftPolicy]]:
    """Return the policies of `simulator.chosen.load_policies`, with its notes if `say`."""
    from commands.common.output import note
    from simulator import chosen

    return chosen.load_policies(
        texts, trace, signals=signals, max_gamma=max_gamma,
        say=note if say else chosen.silent, lacking=lacking,
    )  # fmt: skip


def load_rule(text: str | None, trace: Trace, memory: Path | None = None) -> VerifyRule | None:
    """The rule `text` describes, for the pair of `trace`; None where none is named.

    ``memory`` is the file of a calibrated memory.  Raises DraftsimError naming what is wrong.
    """
    from policies.rules.context import CSD
    from policies.rules.memory import OnlineCorrectionMemory
    from policies.rules.registry import parse_rule

    if text is None:
        if memory is not None:
            raise DraftsimError("--memory belongs to a rule that has one: add --verify csd")
        return None
    try:
        table = None if memory is None else OnlineCorrectionMemory.load(memory)
        rule = parse_rule(text, memory=table)  # a run tells the rule its vocabulary
    except ValueError as error:
        raise DraftsimError(str(error)) from None
    if memory is not None and not isinstance(rule, CSD):
        raise DraftsimError(f"--memory belongs to a rule that has one, not {text!r}: --verify csd")
    return rule


def one_rule(
    texts: Sequence[str] | None, verify: str | None
) -> tuple[list[str] | None, str | None]:
    """Return policies and rule for a command that verifies all policies alike.

    Methods that have one lossy rule in common give it (`traces.sources.methods.same_rule`).
    """
    from commands.common.output import note
    from traces.sources.methods import same_rule

    policies, rule = same_rule(texts, verify)
    if rule != verify:
        pairs = zip(texts or (), policies or (), strict=True)
        parts = [f"{text} is {own}" for text, own in pairs if text != own]
        note(f"{', '.join(parts)}, verified by {rule}")
    return policies, rule


def load_method(
    name: str, trace: Trace, memory: Path | None = None
) -> tuple[str, DraftPolicy, VerifyRule | None]:
    """(policy's text, policy, rule) of a method that drafts with a draft model: a name in
    `traces.sources.methods.METHODS`, or ``POLICY+RULE``."""
    from traces.sources.methods import method, method_of, resolved
    from traces.sources.registry import DRAFT_MODEL

    chosen = method_of(name) or method(name)
    if chosen.source not in (DRAFT_MODEL, "none"):
        raise DraftsimError(
            f"method {name!r} drafts with {chosen.source}, whose replay is exact: see `simulate`"
        )
    chosen = resolved(chosen, trace)
    [(text, policy)] = load_policies([chosen.policy], trace)
    learns = chosen.rule.partition(":")[0] in ("csd", "csd-ocm")
    return text, policy, load_rule(chosen.rule, trace, memory if learns else None)


def replay_all(
    trace: Trace,
    policies: Sequence[tuple[str, DraftPolicy]],
    first: int | None = None,
    rule: VerifyRule | None = None,
) -> list[RoundLog]:
    """Replay every policy over the trace; `first` as in `traces.replay.run.replay`."""
    from traces.replay.vectorised import replay_many

    return list(replay_many(trace, policies, rule=rule, first=first))


def say_memory(logs: Sequence[RoundLog]) -> None:
    """Note how a learning rule's memory grew over the requests, in their order."""
    from commands.common.output import note

    for log in logs:
        table = getattr(log.rule, "table", None)
        if table is not None and table.sizes and table.sizes[-1]:
            note(
                f"{log.policy} / {log.verify}: memory of {table.sizes[0]} pairs after the first "
                f"request, {table.sizes[-1]} after {len(table.sizes)}, {table.evictions} evicted"
            )


def batch_sizes(option: str, text: str, most: int = MOST_BATCH) -> list[int]:
    """Read whole numbers from 1 to `most`, commas between.

    Raises DraftsimError naming `option` if `text` is anything else.
    """
    sizes = [int(size) for size in positive_numbers(option, text, int)]
    if max(sizes) > most:
        raise DraftsimError(f"{option} holds {max(sizes)}, expected at most {most}")
    return sizes


def positive_numbers(option: str, text: str, kind: type[int] | type[float] = float) -> list[float]:
    """The positive numbers of `text`, commas between; DraftsimError naming `option` if not so."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise DraftsimError(f"{option} is {text!r}, expected {what} with commas between") from None
    for value in values:
        if not 0 < value < float("inf"):
            raise DraftsimError(f"{option} holds {value}, expected positive finite numbers")
    return [float(v) for v in values]
