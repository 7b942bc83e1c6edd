"""Where a check keeps what it has run, until it is done, and which check that is of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiler.models.loading import Pair
from profiler.recording.checkpoint import Checkpoint
from profiler.recording.folder import digest_of
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog
from traces.store.identity import identity

PLACE = ".validate"


def check_options(
    pair: Pair, trace: Trace, logs: Sequence[RoundLog], repeats: int, **more: Any
) -> dict[str, Any]:
    """What a check is made under: pair and device, what is decoded, and every arm.

    `logs` are the arms' replays.  Their rounds tell what names do not: a policy's own file, or a
    source's recording, that has changed since.
    """
    return {
        "meta": pair.meta, "trace": identity(trace.meta), "sampling": trace.sampling.meta,
        "requests": [request.id for request in logs[0].requests], "repeats": repeats,
        "arms": [(log.policy, log.source, _digest(log)) for log in logs], **more,
    }  # fmt: skip


def _digest(log: RoundLog) -> str:
    calls = b"" if log.calls is None else log.calls.tobytes()
    return hashlib.sha256(log.rounds.tobytes() + calls).hexdigest()[:16]


@contextmanager
def unfinished(
    run: Path, options: Mapping[str, Any], total: int, say: Callable[[str], None]
) -> Iterator[Checkpoint]:
    """What the check with these options, stopped earlier, has kept in the run folder.

    Each check has a folder of its own there, which is gone when the block is left in the regular
    way, or with nothing in it.  `say` is told what the check goes on from, of `total` runs, and
    if it begins while another is unfinished.
    """
    kept = Checkpoint(run / f"{PLACE}-{digest_of(options)}", options)
    others = [path for path in sorted(run.glob(f"{PLACE}-*")) if path != kept.folder]
    if steps := len(kept.names()):
        done = steps * len(options["arms"])
        say(f"goes on with {done} of {total} runs done: remove {kept.folder} to begin anew")
    elif others:
        say(
            f"{others[0]} keeps the runs of an unfinished check with other options: repeat that "
            "one to go on with it, or remove the folder; this one begins anew"
        )
    try:
        yield kept
    except BaseException:
        if not kept.names():
            kept.close()
        raise
    kept.close()
