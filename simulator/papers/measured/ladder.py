"""Draft lengths of one pair on one GPU: some are given, the others predicted.

A round's tokens come from the hazard by position (`simulator.aggregate.hazard`), its time from
the line that begins at a plain step, a round of no drafts, and is nearest to the cycle times given:
what drafting and verifying one more token adds.  llama.cpp verifies more than 8 tokens with another
kernel than fewer, so cycles on the same side of that are asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations

from simulator.aggregate.hazard import Interval, emitted_at
from simulator.hardware.kernels import ALONE
from simulator.papers.measured.rows import Evidence, evidence, ranked
from simulator.published import CLASSES, RTX3090, RTX3090_PLAIN, Length

TWO, ONE = "plain and two lengths", "plain and one length"


def ladder_rows(named: str = "") -> list[Evidence]:
    """Every length of the RTX 3090's ladder from every two others, and from every single one.

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
    """A round over a plain step, on the line from a plain step nearest to the known ones."""
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
        _row(study, named, f"tokens/s at length {n}",
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
            _row(study, f"{named.replace(':', f', {name}:')}", f"speedup at length {n}, {name}",
                 _family(totals, n).scaled(1 / cycles[n]), speeds[n], 1.0)
            for n in others
        ]  # fmt: skip
        yield from ranked(rows, [1.0, *(speeds[n] for n in given)])


def _same_kernel(known: Mapping[int, float], length: int) -> Mapping[int, float]:
    """Those whose verification, of the draft and one token, runs the kernel of `length`'s."""
    near = {n: k for n, k in known.items() if (n < ALONE) == (length < ALONE)}
    return near or known


def _row(
    study: str, given: str, quantity: str, predicted: Interval, measured: float, plain: float
) -> Evidence:
    interval = (predicted.low, predicted.high)
    return evidence(study, given, quantity, predicted.value, measured, interval, plain)


@cache
def _family(totals: tuple[tuple[int, float], ...], length: int) -> Interval:
    return emitted_at(dict(totals), length)
