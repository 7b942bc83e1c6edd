"""Stage ``latency``: tables of real architectures with random weights, in every mode.

Writes ``latency.parquet``, one table whose models are named ``pair/mode/model``, and
``latency.json`` with everything that is no cell: interpolation errors, what
was left out and why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from profiler.models.architectures import PAIRS, PairShape
from profiler.models.graphs import compiler_missing
from profiler.suite import COMPILED, KERNELS, MODES
from profiler.suite.environment import COMPLETE, Findings, Units, Workplace, is_unfinished
from profiler.suite.pair import FULL, QUICK, RANKS, PairMeasurement, profile_rounds
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, as_cells
from traces.store.files import read_latency, write_latency


def run_latency(
    place: Workplace, pairs: Sequence[str] | None = None, modes: Sequence[str] | None = None,
    *, profile: bool = False,
) -> Units:  # fmt: skip
    """Measure the pairs named (all by default) in the modes named (likewise).

    With ``profile`` the kernels of some rounds are kept too.  What pairs measured before left in
    the folder stays.  Returns what was left undone.

    Raises DraftsimError for an unknown pair, for a folder of another device, or where nothing could
    be measured.
    """
    chosen = chosen_pairs(pairs, place.quick)
    units = Units(place, "latency", rows="cells")
    how = modes_here(units, modes)
    named_of = {p.name: [f"{p.name}.{mode}" for mode in how] for p in chosen}
    asked = {name for names in named_of.values() for name in names}
    units.join(asked, "latency.parquet", _rows)
    todo = [p for p in chosen if any(is_unfinished(units.get(name)) for name in named_of[p.name])]
    with units.closing(lambda: _write(units)):
        for i, pair in enumerate(todo):
            share = place.left * weight(pair) / sum(weight(other) for other in todo[i:])
            if place.left < (0 if place.quick else 10):
                units.late[pair.name] = "no time left"
                continue
            if (models := build_or_none(units, pair)) is None:
                continue
            try:
                _measure_pair(place, pair, models, share, units, how)
            finally:
                for name in named_of[pair.name]:
                    note_missing(units, name, units.get(name))
            if profile:
                _profile(units, pair, models, how)
            del models
            place.unsettle()
            _write(units)
        if units.status == COMPLETE and not any(map(units.get, asked)):
            raise DraftsimError("nothing was measured: " + "; ".join(units.notes))
    units.close()
    return units


def _profile(units: Units, pair: PairShape, models: tuple[Any, Any], how: Sequence[str]) -> None:
    place = units.place
    if pair.draft is None:
        units.limit(
            f"{pair.name}, profile", f"{pair.name} has no draft model: no rounds to profile"
        )
        return
    for mode in how:
        with units.noting(f"{pair.name}.{mode}, profile"):
            place.say(f"wrote {profile_rounds(place, pair.name, mode, models).name}")
        place.release()


def modes_here(units: Units, modes: Sequence[str] | None) -> list[str]:
    """Return the modes asked for that this device runs; why not the others, in `units`."""
    asked = [mode for mode in MODES if mode in (modes or MODES)]
    if COMPILED in asked and (why := compiler_missing(units.place.device)) is not None:
        units.limit(COMPILED, f"mode {COMPILED} left out, nothing compiles here: {why}")
        asked.remove(COMPILED)
    if not asked:
        raise DraftsimError("nothing was measured: " + "; ".join(units.notes))
    return asked


def note_missing(units: Units, name: str, unit: Findings | None) -> None:
    """Note the missing parts of a measurement (`PairMeasurement.unit`) as failed or late."""
    if unit is None:
        units.late[name] = "no time left"
        return
    failed = unit.get("failed") or {}
    units.failed.update({f"{name}, {part}": why for part, why in failed.items()})
    if late := [part for part in unit.get("unfinished", ()) if part not in failed]:
        units.late[name] = f"no time left for {', '.join(late)}"


def _rows(path: Path) -> dict[str, list[list[Any]]]:
    """Return the cells in a folder's table, by unit."""
    found: dict[str, list[list[Any]]] = {}
    for model, *rest in read_latency(path).cells.values.tolist():
        pair, mode, name = model.split("/")
        found.setdefault(f"{pair}.{mode}", []).append([name, *rest])
    return found


def chosen_pairs(names: Sequence[str] | None, quick: bool) -> list[PairShape]:
    """Return the pairs by name; DraftsimError for one that is not known."""
    if unknown := [n for n in names or () if n not in PAIRS]:
        raise DraftsimError(f"--pairs {unknown[0]!r} is not one of {', '.join(PAIRS)}")
    chosen = [PAIRS[n] for n in names or PAIRS]
    return [p.miniature() for p in chosen] if quick else chosen


def build_pair(place: Workplace, pair: PairShape) -> tuple[Any, Any]:
    """Return target and draft (or None) with random weights on the device."""
    torch.manual_seed(0)
    target = pair.target.build(place.device, place.dtype)
    return target, pair.draft.build(place.device, place.dtype) if pair.draft else None


def build_or_none(units: Units, pair: PairShape) -> tuple[Any, Any] | None:
    """Return target and draft; None, noted in `units`, if the memory is too small."""
    place = units.place
    if (why := place.lacks_memory(pair)) is not None:
        units.limit(pair.name, why)
        return None
    try:
        models = build_pair(place, pair)
    except torch.OutOfMemoryError:
        models = None
    if models is None:
        # Not inside the handler: there the error's own frames hold what was built.
        place.release()
        units.limit(pair.name, f"{pair.name}: out of memory while it was built; {place.advice()}")
    else:
        place.settle()
        place.say(f"{pair.name}: built")
    return models


def weight(pair: PairShape) -> float:
    """Return the relative cost of measuring a pair.

    Layers set the time of an eager pass and of a capture, parameters that of a graphed pass;
    whole rounds run the draft several times; and the smallest passes are run more often.
    """
    layers = pair.target.layers + 2 * (pair.draft.layers if pair.draft else 0)
    cost = 10 + layers + pair.parameters / 1e9
    return cost if pair.draft else 0.4 * cost  # a target without a draft predicts no policy


def _measure_pair(
    place: Workplace, pair: PairShape, models: tuple[Any, Any], share: float, units: Units,
    how: Sequence[str],
) -> None:  # fmt: skip
    """Measure all modes rank by rank, so that every mode has its important parts first."""
    begin = time.monotonic()
    plan = QUICK if place.quick else FULL
    kept = {mode: units.get(f"{pair.name}.{mode}") for mode in how}
    modes = {
        mode: PairMeasurement(place, pair, mode, models, plan, begin + share, unit)
        for mode, unit in kept.items() if is_unfinished(unit)
    }  # fmt: skip
    spent = {mode: (unit or {}).get("seconds", 0.0) for mode, unit in kept.items()}
    for rank in RANKS:
        for k, (mode, measured) in enumerate(modes.items()):
            now = time.monotonic()
            measured.deadline = now + (begin + share - now) / (len(modes) - k)
            try:
                measured.run(rank)
            finally:
                # Also where the driver took no more work: what was measured before stands.
                spent[mode] += time.monotonic() - now
                unit = {**measured.unit(), "seconds": spent[mode]}
                units.put(f"{pair.name}.{mode}", unit)
    for mode, measured in modes.items():
        off = 100 * measured.unit()["random_error"].get("median", float("nan"))
        left = [name for name in measured.unfinished if name not in measured.failed]
        cut = f"; not in time: {', '.join(left)}" if left else ""
        cut += f"; FAILED: {', '.join(measured.failed)}" if measured.failed else ""
        place.say(
            f"{pair.name}.{mode}: {len(measured.cells)} cells, {off:.1f}% off at points at "
            f"random{cut}"
        )


def named_cells(rows: Sequence[Sequence[Any]], pair: str, mode: str) -> list[list[Any]]:
    """Return cells of a pair in a mode, named as in the table of several."""
    return [[f"{pair}/{mode}/{row[0]}", *row[1:]] for row in rows]


def write_cells(
    place: Workplace, rows: Sequence[Sequence[Any]], shapes: Mapping[str, Any], file: str
) -> None:
    """Write `rows` of cells as the latency table `file`.  ``shapes``: by pair, its models'."""
    meta = {
        "kind": "measured", "estimator": "mean", "attention": "sdpa", "shapes": dict(shapes),
        "kernels": KERNELS, **place.meta(),
    }  # fmt: skip
    write_latency(LatencyTable(as_cells(rows), meta), place.out / file)


def _write(units: Units) -> None:
    place = units.place
    rows = [
        row for name, unit in units.units.items()
        for row in named_cells(unit["cells"], *name.rsplit(".", 1))
    ]  # fmt: skip
    if rows:
        shapes = {p.name: shapes_of(p) for p in chosen_pairs(None, place.quick)}
        write_cells(place, rows, shapes, "latency.parquet")
    units.write()


def shapes_of(pair: PairShape) -> dict[str, Any]:
    """Return the sizes of both architectures that a cost model needs."""
    both = {"target": pair.target, "draft": pair.draft}
    return {
        role: {**a.meta(), "name": a.name, "source": a.hub}
        for role, a in both.items() if a is not None
    }  # fmt: skip
