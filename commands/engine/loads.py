"""The loads of ``draftsim validate --engine``: closed loops, rates, and the times of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from commands.common.options import batch_sizes, positive_numbers
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.engines.engine import Engine
    from profiler.engines.loads import Job
    from simulator.serving import Scenario
    from simulator.serving.arrivals import Arrivals
    from traces.acceptance.trace import Trace


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


def drawn(
    loads: Mapping[str, Arrivals], engine: Engine, trace: Trace, requests: int, seed: int
) -> tuple[dict[str, Scenario], dict[str, list[Job]]]:
    """Return for each load its scenario and the requests that the simulator draws."""
    from profiler.engines.loads import Job

    scenarios = {
        load: scenario_of(arrivals, engine, requests, seed) for load, arrivals in loads.items()
    }
    jobs = {
        load: [
            Job(j.sequence, j.arrival_s, j.output_tokens)
            for j in s.arrivals.jobs(trace, generator_of(seed), requests)
        ]
        for load, s in scenarios.items()
    }
    return scenarios, jobs


def generator_of(seed: int) -> np.random.Generator:
    """The generator that `simulator.serving.simulate` draws the first run's requests from."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0]))


class Turn(NamedTuple):
    """An arm's run of a load: what it is kept under, and what is said as it begins."""

    name: str
    repeat: int
    load: str
    text: str
    said: str


def in_turn(loads: Sequence[str], arms: Sequence[str], repeats: int) -> Iterator[Turn]:
    """Loads and arms in the order they run: arms rotate with the repeat.

    Of more repeats, the first ones are those of fewer.
    """
    for repeat in range(repeats):
        first = repeat % len(arms)
        for i, load in enumerate(loads):
            for text in (*arms[first:], *arms[:first]):
                name = f"{repeat:03d}-{i:02d}-{arms.index(text):02d}"
                said = f"{load} under {text}, repeat {repeat + 1}"
                yield Turn(name, repeat, load, text, said)
