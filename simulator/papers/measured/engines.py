"""Engines at several draft lengths and loads, and engines' acceptance by position."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.aggregate.hazard import emitted_at
from simulator.papers.measured.ladder import cycle_at
from simulator.papers.measured.rows import Evidence, evidence, ranked
from simulator.published import ENGINE_STUDIES, MINICPM, EngineStudy

ONE, ELSEWHERE = "plain and one length", "plain and one length here, all lengths at another load"
FIRST = "the first two positions"


def engine_rows() -> list[Evidence]:
    """Every study's runs from as few of them as say anything."""
    rows: list[Evidence] = []
    for study in ENGINE_STUDIES:
        for load, runs in study.runs.items():
            if all(run.emitted is not None for run in runs.values()):
                rows += _lengths(study, load)
            elif load != min(study.runs):
                rows += _elsewhere(study, load)
    return [*rows, *_positions()]


def _lengths(study: EngineStudy, load: int) -> Iterator[Evidence]:
    """Each length from each other: its tokens a round are known, and so is a round's time."""
    runs = study.runs[load]
    plain = runs[0].tokens_per_s
    for given, run in runs.items():
        if not given:
            continue
        assert run.emitted is not None
        cycle = run.emitted / (run.tokens_per_s / plain)
        rows = []
        for asked, other in runs.items():
            if asked in (0, given):
                continue
            speed = emitted_at({given: run.emitted}, asked).scaled(
                plain / cycle_at({given: cycle}, asked)
            )
            rows.append(evidence(
                study.name, f"{ONE}: {given}", f"tokens/s at length {asked}", speed.value,
                other.tokens_per_s, (speed.low, speed.high), plain,
            ))  # fmt: skip
        yield from ranked(rows, [plain, run.tokens_per_s])


def _elsewhere(study: EngineStudy, load: int) -> Iterator[Evidence]:
    """Lengths at a load from one of them there, and from all at the smallest load.

    A round emits as much at every load.  With the tokens of a round unknown, the speeds at the
    smallest load only say how much more time than tokens a longer draft takes there; at the
    other load the drafts are taken to be as dear.
    """
    alone, here = study.runs[min(study.runs)], study.runs[load]
    given = min(n for n in here if n)
    rows = [
        evidence(
            study.name, f"{ELSEWHERE}: length {given} at {load} streams",
            f"tokens/s of {load} streams at length {asked}",
            here[given].tokens_per_s * alone[asked].tokens_per_s / alone[given].tokens_per_s,
            run.tokens_per_s, plain=here[0].tokens_per_s,
        )
        for asked, run in here.items() if asked not in (0, given)
    ]  # fmt: skip
    yield from ranked(rows, [here[0].tokens_per_s, here[given].tokens_per_s])


def _positions() -> Iterator[Evidence]:
    """Later positions' acceptance from the first two, by the acceptance family."""
    known = {n: 1 + sum(MINICPM.accepted[:n]) for n in (1, 2)}
    for n in range(3, len(MINICPM.accepted) + 1):
        found = emitted_at(known, n)
        yield evidence(
            MINICPM.name, f"{FIRST}: {MINICPM.accepted[0]:g} and {MINICPM.accepted[1]:g}",
            f"tokens a round of {n}", found.value, 1 + sum(MINICPM.accepted[:n]),
            (found.low, found.high),
        )  # fmt: skip
