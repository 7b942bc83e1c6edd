"""``draftsim profile --engine``: a serving engine's latency table, measured in its environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands.common.output import note
from commands.common.progress import progress_bar
from profiler.engines.bench import Grid
from profiler.engines.engine import EngineOptions, find_engine
from profiler.engines.measure import EngineTable
from traces.errors import DraftsimError
from traces.store.files import write_latency


def profile_engine(name: str, options: EngineOptions, out: Path, minutes: float) -> None:
    """Measure the engine, and write ``latency.parquet`` into the run folder.

    What is not needed for a table is measured only as long as there are `minutes` left.
    """
    kind = find_engine(name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DraftsimError(f"cannot make the run folder {out}: {error.strerror}") from None
    end = time.monotonic() + 60 * minutes
    note(f"starting {name} with {options.target}")
    engine = kind.start(options)
    say_slow_dtype(engine.meta)
    measured = EngineTable(
        engine, Grid(), out / "engine-checkpoint", left_s=lambda: end - time.monotonic()
    )
    with progress_bar() as progress:
        task = progress.add_task("measuring iterations", total=measured.blocks)
        table = measured.run(lambda: progress.advance(task))
    write_latency(table, out / "latency.parquet")
    errors = [abs(entry["error"]) for entry in table.meta["held_out"]]
    worst = f"; held-out cells within {max(errors):.1%} before points were added" if errors else ""
    note(f"wrote {out / 'latency.parquet'}: {len(table.cells)} cells{worst}")
    if measured.left_out:
        note(
            f"{measured.left_out} more visits to cells (again, where disturbed, or between others) "
            f"did not fit into {minutes:g} minutes: --minutes gives more"
        )


def say_slow_dtype(meta: Mapping[str, Any]) -> None:
    """A warning where the processor has no instructions for the engine's number format."""
    import torch

    if meta["device"] != "cpu" or meta["dtype"] != "bfloat16":
        return
    if not any(known for name, known in torch.cpu.get_capabilities().items() if "bf16" in name):
        note(
            "warning: this processor has no bfloat16 instructions, and takes several times as long "
            "as for float32: --dtype float32 measures, and serves, what it is good at"
        )
