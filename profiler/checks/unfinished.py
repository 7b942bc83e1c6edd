"""Storage for the finished runs of a check that is not complete yet."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from profiler.recording.run import digest_of
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog
from traces.store.checkpoint import Checkpoint
from traces.store.identity import identity

if TYPE_CHECKING:
    from profiler.models.loading import Pair

PLACE, DONE = ".validate", ".validated"
"""Beginnings of the names of folders that keep real runs: of an unfinished command, and of a check
that more repeats may be added to."""


def check_options(
    pair: Pair, trace: Trace, logs: Sequence[RoundLog], repeats: int, **more: Any
) -> dict[str, Any]:
    """Return the conditions of a check: pair and device, what is decoded, and every arm.

    `logs` are the arms' replays.  Their rounds show changes that names do not: another version of a
    policy's file, or of a source's recording.  Runs of two versions are never mixed, because one of
    them may decode faster.
    """
    return {
        "version": version(), "meta": pair.meta, "trace": identity(trace.meta),
        "sampling": trace.sampling.meta, "repeats": repeats,
        "requests": [request.id for request in trace.requests],
        "arms": [(log.policy, log.source, _digest(log)) for log in logs], **more,
    }  # fmt: skip


def rule_conditions(rule: VerifyRule) -> dict[str, Any]:
    """Return the conditions that a lossy rule adds: itself, and the memory that it begins with."""
    table = getattr(rule, "table", None)
    memory = (
        None if table is None else digest_of({"pairs": table.items(), "capacity": table.capacity})
    )
    return {"rule": describe_rule(rule), "memory": memory}


def version(name: str = "draftsim") -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    return next((found.version for found in distributions(name=name)), None)


def _digest(log: RoundLog) -> str:
    calls = b"" if log.calls is None else log.calls.tobytes()
    return hashlib.sha256(log.rounds.tobytes() + calls).hexdigest()[:16]


@contextmanager
def unfinished(
    run: Path, options: Mapping[str, Any], total: int, say: Callable[[str], None],
    together: int = 1, grows: bool = False,
) -> Iterator[Checkpoint]:  # fmt: skip
    """Yield the runs that an interrupted check with these options kept in the run folder.

    Each check has its own folder there, which is removed when the block is left normally, or with
    nothing in it.  `say` receives a line on how many of `total` runs are kept (`together` at a
    time), and one if this check begins while another is unfinished.

    With `grows` the `options` do not include the repeats, and the runs of a finished check stay
    until another check begins: the same check with a larger `total` continues after them.
    """
    name = digest_of(options)
    place, done_with = run / f"{PLACE}-{name}", run / f"{DONE}-{name}"
    if grows:
        for path in run.glob(f"{DONE}-*"):
            if path == done_with and len(Checkpoint(path, options).names()) * together < total:
                path.rename(place)
            else:
                shutil.rmtree(path)
    kept = Checkpoint(place, options)
    others = [path for path in sorted(run.glob(f"{PLACE}-*")) if path != kept.folder]
    if steps := len(kept.names()):
        done = min(steps * together, total)
        say(f"continues after {done} of {total} runs: remove {kept.folder} to start again")
    elif others:
        say(
            f"{others[0]} keeps unfinished runs with other options: repeat that command to "
            "continue them, or remove the folder; these runs start from the beginning"
        )
    try:
        yield kept
    except BaseException:
        if not kept.names():
            kept.close()
        raise
    if not grows:
        kept.close()
        return
    place.rename(done_with)
    say(f"{done_with} keeps these runs: the same command with more --repeats continues after them")
