"""Engines at several draft lengths and loads, and engines' acceptance by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations

from simulator.aggregate.hazard import Interval, emitted_at
from simulator.hardware.formats import FORMATS
from simulator.hardware.record import ALONE, by_library, check_published, predictions
from simulator.papers.measured.rows import Evidence, evidence, ranked
from simulator.published import (
    CLASSES,
    ENGINE_STUDIES,
    GAMMATUNE,
    RTX3090,
    RTX3090_PLAIN,
    EngineStudy,
    Length,
    published_rows,
)

TWO, ONE = "plain and two lengths", "plain and one length"


def ladder_rows(named: str = "") -> list[Evidence]:
    """Return every length of the RTX 3090's ladder from every two others, and from every single
    one.

    Only of drafters whose study's name contains `named`: these rows take longest of all studies'.
    """
    rows = []
    for drafter, ladder in RTX3090.items():
        study = f"RTX 3090 llama.cpp 27B 4-bit, {drafter}"
        if named.lower() not in study.lower():
            continue
        for count, kind in ((2, TWO), (1, ONE)):
            for given in combinations(sorted(ladder), count):
                text = f"{kind}: {' and '.join(map(str, given))}"
                rows += list(_predicted(study, text, ladder, given))
    return rows


def cycle_at(known: Mapping[int, float], length: int) -> float:
    """Return a round over a plain step, on the line from a plain step nearest to the known ones."""
    slope = sum(n * (k - 1) for n, k in known.items()) / sum(n * n for n in known)
    return 1 + slope * length


def _predicted(
    study: str, named: str, ladder: Mapping[int, Length], given: Sequence[int]
) -> Iterator[Evidence]:
    known = {n: ladder[n].cycle for n in given}
    others = [n for n in ladder if n not in given]
    cycles = {n: cycle_at(_same_kernel(known, n), n) for n in others}
    totals = tuple((n, ladder[n].emitted) for n in given)
    rows = [
        evidence(study, named, f"tokens/s at length {n}",
                 _family(totals, n).scaled(RTX3090_PLAIN / cycles[n]), ladder[n].tokens_per_s,
                 RTX3090_PLAIN)
        for n in others
    ]  # fmt: skip
    yield from ranked(rows, [RTX3090_PLAIN, *(ladder[n].tokens_per_s for n in given)])
    for k, name in enumerate(CLASSES):
        # Cycles are the same for every class; so its gain says what a round of it emits.
        speeds = {n: 1 + ladder[n].gains[k] / 100 for n in ladder}
        totals = tuple((n, min(n + 1.0, speeds[n] * ladder[n].cycle)) for n in given)
        rows = [
            evidence(study, named.replace(":", f", {name}:"), f"speedup at length {n}, {name}",
                     _family(totals, n).scaled(1 / cycles[n]), speeds[n], 1.0)
            for n in others
        ]  # fmt: skip
        yield from ranked(rows, [1.0, *(speeds[n] for n in given)])


def _same_kernel(known: Mapping[int, float], length: int) -> Mapping[int, float]:
    """Return the lengths whose verification, of the draft and one token, runs `length`'s kernel."""
    near = {n: k for n, k in known.items() if (n < ALONE) == (length < ALONE)}
    return near or known


@cache
def _family(totals: tuple[tuple[int, float], ...], length: int) -> Interval:
    return emitted_at(dict(totals), length)


ELSEWHERE = "plain and one length here, all lengths at another load"
FIRST = "the first two positions"


def engine_rows() -> list[Evidence]:
    """Return predictions of every study's runs from the fewest of them that determine it."""
    rows: list[Evidence] = []
    for study in ENGINE_STUDIES:
        for load, runs in study.runs.items():
            if all(run.emitted is not None for run in runs.values()):
                rows += _lengths(study, load)
            elif load != min(study.runs):
                rows += _elsewhere(study, load)
    return [*rows, *_positions()]


def _lengths(study: EngineStudy, load: int) -> Iterator[Evidence]:
    """Yield the prediction of each draft length from each other one, given its tokens a round."""
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
                study.name, f"{ONE}: {given}", f"tokens/s at length {asked}", speed,
                other.tokens_per_s, plain,
            ))  # fmt: skip
        yield from ranked(rows, [plain, run.tokens_per_s])


def _elsewhere(study: EngineStudy, load: int) -> Iterator[Evidence]:
    """Yield lengths at a load from one of them there, and from all at the smallest load.

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
            run.tokens_per_s, here[0].tokens_per_s,
        )
        for asked, run in here.items() if asked not in (0, given)
    ]  # fmt: skip
    yield from ranked(rows, [here[0].tokens_per_s, here[given].tokens_per_s])


def _positions() -> Iterator[Evidence]:
    """Yield later positions' acceptance from the first two, by the acceptance family."""
    rows = list(published_rows("positions"))
    accepted = [float(row["accepted"]) for row in rows]
    known = {n: 1 + sum(accepted[:n]) for n in (1, 2)}
    for n in range(3, len(accepted) + 1):
        yield evidence(
            rows[0]["study"], f"{FIRST}: {accepted[0]:g} and {accepted[1]:g}",
            f"tokens a round of {n}", emitted_at(known, n), 1 + sum(accepted[:n]),
        )  # fmt: skip


GIVEN = {
    "GammaTune 1, ms": ("GammaTune Table 1", "data sheet and the table's other models"),
    "SpecBound 3, ms": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
    "SpecBound 4, 3090/H800": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
}


def roofline_rows() -> list[Evidence]:
    """Return `check_published` and `predictions` as rows of evidence; quantised models apart."""
    groups: dict[str, list[Evidence]] = {}
    for row in check_published().to_dict("records"):
        study, given = GIVEN[str(row["table"])]
        if "quantised" in str(row["kind"]):
            given += ", quantised"
        quantity = f"{str(row['table']).partition(', ')[2]}, {row['row']}"
        groups.setdefault(str(row["table"]), []).append(
            evidence(study, given, quantity, float(row["ours"]), float(row["published"]))
        )
    for one in (*predictions("eager"), *by_library(), *predictions("graph")):
        if one.study is GAMMATUNE:
            continue  # above
        given = f"data sheet; {one.given}"
        if FORMATS[one.run.weights].quantised:
            given = given.replace("its unquantised", "quantised from its unquantised")
        if one.run.new_tokens > 1:
            given += ", wider"
        groups.setdefault(f"{one.study.name}, {given}", []).append(evidence(
            one.study.name, given, f"ms, {one.label}, {one.run.device}", 1e3 * one.seconds,
            1e3 * one.run.seconds,
        ))  # fmt: skip
    return [row for rows in groups.values() for row in ranked(rows)]
