"""``draftsim calibrate-memory``: a correction memory for CSD from recorded disagreements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.drafted import load_recording
from commands.common.options import TraceOption
from commands.common.output import note, placed_as, placed_recording
from policies.rules.memory import OnlineCorrectionMemory
from simulator.chosen import load_policies
from traces.errors import DraftsimError
from traces.replay.corrections import calibrated, split_requests
from traces.store.files import write_trace
from traces.store.recordings import DEFAULT_TRACE
from traces.store.writing import write_atomically


def calibrate_memory(
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", callback=placed_as(b"PK"), help="Memory file to write (.npz)."
        ),
    ],
    trace: TraceOption = DEFAULT_TRACE,
    policy: Annotated[
        str, typer.Option(metavar="P", help="Length policy whose rejections are counted.")
    ] = "fixed:gamma=6",
    split: Annotated[
        float,
        typer.Option(
            help="Share of the prompts of each category to calibrate on: above 0, at most 1."
        ),
    ] = 1.0,
    rest: Annotated[
        Path | None,
        typer.Option(
            metavar="T",
            callback=placed_recording,
            help="Also write the trace of the other prompts.",
        ),
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Keep at most this many pairs. Default: no limit.")
    ] = None,
) -> None:
    """Count the corrections of a recorded run, for the rule csd (`--verify csd --memory FILE`).

    Prompts are read in the order of the trace, which decides the pairs that a bounded memory keeps.
    With --split below 1 the memory can be tried on prompts that it has not seen (--rest).
    """
    if not 0 < split <= 1:
        raise DraftsimError(f"--split is {split:g}, expected above 0 and at most 1")
    recording = load_recording(trace, None, by_ratio=True, one=False)
    if recording.source is not None:
        raise DraftsimError(
            f"a correction memory needs a draft model, and {trace} drafts with "
            f"{recording.trace.source}: name a recording of a draft model with --trace"
        )
    recorded = recording.trace
    train, others = split_requests(recorded, split)
    if rest is not None and not others:
        raise DraftsimError(f"--rest: no prompt is left with --split {split:g}: lower it")
    [(name, chosen)] = load_policies([policy], recorded, say=note)
    memory = calibrated(recorded.select(train), chosen, OnlineCorrectionMemory(capacity))
    write_atomically(out, memory.content())
    growth = f"{memory.sizes[0]} pairs after the first, {memory.sizes[-1]} after all"
    note(f"wrote {out}: {len(train)} prompts under {name}, {growth}, {memory.evictions} evicted")
    if rest is not None:
        write_trace(recorded.select(others), rest)
        note(f"wrote {rest}: the other {len(others)} prompts")
