"""The loads of ``draftsim validate --engine``: closed loops, rates, and the times of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.inputs import batch_sizes, positive_numbers
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.engines.engine import Engine
    from simulator.serving import Scenario
    from simulator.serving.arrivals import Arrivals


def named_loads(
    load: str | None, rate: str | None, file: Path | None = None
) -> dict[str, Arrivals]:
    """Loads by name: ``closed:4``, ``rate:2.5``, ``arrivals:FILE`` for the times of a file.

    Raises DraftsimError naming what is wrong with the options, or with the file.
    """
    from simulator.serving import ArrivalFile, ArrivalTimes, ClosedLoop, Poisson

    kind, _, sizes = (load or ("" if rate or file else "closed:1,4,8,16")).partition(":")
    if load is not None and kind != "closed":
        raise DraftsimError(
            f"--load is {load!r}, expected closed:N,...; open loads are --rate and --arrivals"
        )
    found: dict[str, Arrivals] = {}
    if kind:
        found |= {f"closed:{n}": ClosedLoop(n) for n in batch_sizes("--load", sizes)}
    if rate:
        found |= {f"rate:{r:g}": Poisson(r) for r in positive_numbers("--rate", rate)}
    if file:
        timed = ArrivalFile(file)
        _ = timed.rows  # read now: refused before an engine is started
        found[f"arrivals:{file.name}"] = ArrivalTimes(timed)
    return found


def scenario_of(arrivals: Arrivals, engine: Engine, requests: int, seed: int) -> Scenario:
    """`requests` requests of a load, within the limits of the engine that takes them."""
    from simulator.serving import Limits, Scenario

    limits = Limits(
        engine.options.max_batch, engine.options.token_budget, kv_blocks=engine.blocks,
        block_size=engine.block_size,
    )  # fmt: skip
    return Scenario(
        arrivals, limits, requests, warmup=0.0, seed=seed,
        drafter_loaded=engine.options.own_drafter,
    )  # fmt: skip
