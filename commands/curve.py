"""``draftsim curve``: acceptance lengths at other draft lengths, from a few measured ones."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.configured import MOST_LENGTH
from commands.common.drafted import FORMS, LONGEST, load_positions
from commands.common.options import batch_sizes
from commands.common.output import JsonOption, OutOption, emit, note
from traces.digits import counted, three_digits
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHOWN = (
    "curve", "k", "measured", "hazard", "low", "high", "inside", "iid", "two_state",
    "hazard_error",
)  # fmt: skip


def curve(
    acceptance: Annotated[
        list[str], typer.Argument(metavar="ACCEPTANCE...", help=f"One or more curves: {FORMS}.")
    ],
    given: Annotated[
        str | None,
        typer.Option(
            metavar="K,...",
            help="Use only the acceptance lengths measured at these K. Default: K = 1, 2, 3 if a "
            "curve has more, else all.",
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="K,...", help="Draft lengths to predict. Default: up to 8."),
    ] = None,
    level: Annotated[float, typer.Option(min=0.5, max=0.999, help="Level of the intervals.")] = 0.8,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Predict acceptance lengths at draft lengths that were not measured.

    The chance that a position is accepted, once those before it were, is fitted and extended. Two
    other models are printed next to it: one rate for all positions, and easy and hard stretches.
    Acceptance lengths that a file holds and --given leaves out judge the prediction.
    """
    from simulator.aggregate.acceptance import extended

    rows: list[dict[str, Any]] = []
    for name, lengths in _curves(acceptance).items():
        if given is None:
            used = [n for n in (1, 2, 3) if n in lengths] if max(lengths) > 3 else sorted(lengths)
            used = used or sorted(lengths)
        else:
            used = batch_sizes("--given", given, MOST_LENGTH)
        if missing := [n for n in used if n not in lengths]:
            raise DraftsimError(f"{name} has no length at K = {missing[0]}: see --given")
        asked = (
            [n for n in range(1, max(LONGEST, *lengths) + 1) if n not in used]
            if k is None else batch_sizes("--k", k, MOST_LENGTH)
        )  # fmt: skip
        if not asked:
            raise DraftsimError(f"{name}: --given holds every K up to {max(used)}: name others "
                                "with --k")  # fmt: skip
        rows += [{"curve": name, **row} for row in extended(lengths, used, asked, level)]
    shown = [n for n in SHOWN if any(row[n] is not None for row in rows)]
    if json is None:
        note(headline(rows, level))
    emit("curve", rows, json, show=shown, out=out)
    for line in _judged(rows, level):
        note(line)


def _curves(texts: list[str]) -> Mapping[str, dict[int, float]]:
    from simulator.aggregate.acceptance import is_curves, read_curves

    found: dict[str, dict[int, float]] = {}
    for text in texts:
        if is_curves(text) and "#" not in text:
            found |= read_curves(text)
        else:
            found[text] = dict(load_positions(text).known)
    return found


def headline(rows: Sequence[Mapping[str, Any]], level: float) -> str:
    """Return the first curve's acceptance lengths at its first and last draft length, as told."""
    mine = [row for row in rows if row["curve"] == rows[0]["curve"]]
    ends = mine[:: max(len(mine) - 1, 1)][:2]
    said = "; ".join(
        f"K = {row['k']}: {three_digits(row['hazard'])} tokens per round "
        f"({three_digits(row['low'])} to {three_digits(row['high'])})" for row in ends
    )  # fmt: skip
    others = len({row["curve"] for row in rows}) - 1
    more = f"; and {counted(others, 'more curve')}" if others else ""
    return f"{rows[0]['curve']}: {said}, {level:.0%} intervals{more}"


def _judged(rows: list[dict[str, Any]], level: float) -> list[str]:
    """Return lines on how the predictions compare with what was measured."""
    told = [row for row in rows if row["measured"] is not None]
    if not told:
        return []
    errors = {
        name: median(abs(row[f"{name}_error"]) for row in told)
        for name in ("hazard", "iid", "two_state")
    }
    inside = sum(row["inside"] for row in told)
    return [
        f"{inside} of {len(told)} measured lengths are in their {level:.0%} intervals",
        "median error: "
        + ", ".join(f"{name.replace('_', '-')} {error:.1%}" for name, error in errors.items()),
    ]
