"""Why SpecBound's Table 1 and our pair put its systems in another order, from the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.papers.quantities import SPECBOUND
from simulator.papers.rows import EXPERIMENT, Row
from simulator.published import SPECBOUND_1

MODEL = "Vicuna-7B"
"""The model whose lines hold most systems."""


def order_rows(found: Sequence[Row]) -> list[Row]:
    """Each system's place by speedup among those that the paper and our pair both have.

    Parameters
    ----------
    found:
        Rows of `simulator.papers.systems.system_rows`.

    A speedup is tokens a round (CR) over what a round costs, in steps of plain decoding (CR / SD).
    So the ratio of two speedups falls into the ratio of tokens and that of costs: a row's note
    gives both, and says which is further from 1.
    """
    ours: dict[str, dict[str, float]] = {}
    for row in found:
        if row.row.startswith("our pair, ") and row.ours is not None:
            ours.setdefault(row.row.removeprefix("our pair, "), {})[row.column] = row.ours
    theirs = {method: line for (model, method), line in SPECBOUND_1.items() if model == MODEL}
    both = [method for method in theirs if {"CR", "SD"} <= {*ours.get(method, ())}]
    by_theirs = sorted(both, key=lambda method: -theirs[method].overall)
    by_ours = sorted(both, key=lambda method: -ours[method]["SD"])
    rows = []
    for method in by_theirs:
        line, own = theirs[method], ours[method]
        rate = sum(line.compression) / len(line.compression)
        tokens, whole = own["CR"] / rate, own["SD"] / line.overall
        rounds = whole / tokens
        worse = "tokens" if abs(math.log(tokens)) > abs(math.log(rounds)) else "what a round costs"
        note = (
            f"{whole:.2f} of {MODEL}'s speedup: {tokens:.2f} by tokens a round ({own['CR']:.2f} "
            f"for {rate:.2f}), {rounds:.2f} by what a round costs ({own['CR'] / own['SD']:.2f} "
            f"steps for {rate / line.overall:.2f}); above all by {worse}"
        )
        place, printed = by_ours.index(method) + 1, by_theirs.index(method) + 1
        rows.append(
            Row(SPECBOUND, f"order, {method}", "place", printed, place, EXPERIMENT, note)
        )  # fmt: skip
    return rows
