"""Stage ``latency``: tables of real architectures with random weights, eager and graphed.

Writes ``latency.parquet``, one table whose models are named ``pair/mode/model``, and
``latency.json`` with everything that is no cell: interpolation errors, parts, clocks, what
was left out and why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from profiler.architectures import PAIRS, PairShape
from profiler.suite.environment import Ledger, Workplace, clocks, write_results
from profiler.suite.grids import Grids
from profiler.suite.pair_latency import PairMeasurement
from profiler.suite.passes import MODES
from profiler.suite.pieces import RANKS
from traces.errors import DraftsimError
from traces.files import write_latency
from traces.latency import CELL_COLUMNS, LatencyTable

UNPAIRED = 0.4
"""What a target without a draft is given of a pair's time: no policy is predicted from it."""


def run_latency(place: Workplace, pairs: Sequence[str] | None = None) -> None:
    """Measure the pairs named (all by default) in both modes.

    Raises DraftsimError for an unknown pair, or where nothing at all could be measured.
    """
    chosen = chosen_pairs(pairs, place.quick)
    ledger = Ledger(place, "latency", {"pairs": [p.name for p in chosen]})
    notes: list[str] = []
    late: list[str] = []
    before = clocks(place.device)
    units = {p.name: [f"{p.name}.{mode}" for mode in MODES] for p in chosen}
    todo = [p for p in chosen if any(unfinished(ledger.get(name)) for name in units[p.name])]
    for i, pair in enumerate(todo):
        share = place.left * weight(pair) / sum(weight(other) for other in todo[i:])
        if place.left < (0 if place.quick else 10):
            notes.append(f"{pair.name}: no time left")
            late.append(pair.name)
            continue
        if (why := place.lacks_memory(pair)) is not None:
            notes.append(why)
            place.say(why)
            continue
        if (models := build_or_none(place, pair, notes)) is None:
            continue
        _measure_pair(place, pair, models, share, ledger)
        del models
        place.release()
        late += [name for name in units[pair.name] if unfinished(ledger.get(name))]
        _write(place, ledger, notes, before)
    if not ledger.units:
        raise DraftsimError("nothing was measured: " + "; ".join(notes))
    _write(place, ledger, notes, before)
    ledger.close(late)


def unfinished(unit: dict[str, Any] | None) -> bool:
    """Whether a unit is missing, or pieces of it for want of time."""
    return unit is None or bool(unit.get("unfinished"))


def chosen_pairs(names: Sequence[str] | None, quick: bool) -> list[PairShape]:
    """The pairs by name; DraftsimError for one that is not known."""
    if unknown := [n for n in names or () if n not in PAIRS]:
        raise DraftsimError(f"--pairs {unknown[0]!r} is not one of {', '.join(PAIRS)}")
    chosen = [PAIRS[n] for n in names or PAIRS]
    return [p.miniature() for p in chosen] if quick else chosen


def build_pair(place: Workplace, pair: PairShape) -> tuple[Any, Any]:
    """Target and draft (or None) with random weights on the device."""
    torch.manual_seed(0)
    target = pair.target.build(place.device, place.dtype)
    return target, pair.draft.build(place.device, place.dtype) if pair.draft else None


def build_or_none(place: Workplace, pair: PairShape, notes: list[str]) -> tuple[Any, Any] | None:
    """Target and draft; None and a note that names a smaller pair if the memory is too small."""
    try:
        models = build_pair(place, pair)
    except torch.OutOfMemoryError:
        models = None
    if models is None:
        # Not inside the handler: there the error's own frames hold what was built.
        place.release()
        notes.append(f"{pair.name}: out of memory while it was built; {place.advice()}")
        place.say(notes[-1])
    else:
        place.say(f"{pair.name}: built")
    return models


def weight(pair: PairShape) -> float:
    """What measuring a pair takes, relative to others.

    Layers set the time of an eager pass and of a capture, parameters that of a graphed pass;
    whole rounds run the draft several times; and the smallest passes are run more often.
    """
    layers = pair.target.layers + 2 * (pair.draft.layers if pair.draft else 0)
    cost = 10 + layers + pair.parameters / 1e9
    return cost if pair.draft else UNPAIRED * cost


def _measure_pair(
    place: Workplace, pair: PairShape, models: tuple[Any, Any], share: float, ledger: Ledger
) -> None:
    """Both modes, rank by rank: neither is complete before the other has what is needed."""
    begin = time.monotonic()
    grids = Grids(place.quick)
    modes = {
        mode: PairMeasurement(place, pair, mode, models, grids, begin + share, kept)
        for mode in MODES if unfinished(kept := ledger.get(f"{pair.name}.{mode}"))
    }  # fmt: skip
    before = {mode: clocks(place.device) for mode in modes}
    spent = dict.fromkeys(modes, 0.0)
    for rank in RANKS:
        for k, (mode, measured) in enumerate(modes.items()):
            now = time.monotonic()
            measured.deadline = now + (begin + share - now) / (len(modes) - k)
            measured.run(rank)
            spent[mode] += time.monotonic() - now
            state = [before[mode], clocks(place.device)]
            unit = {**measured.unit(), "clocks": state, "seconds": spent[mode]}
            ledger.put(f"{pair.name}.{mode}", unit)
    for mode, measured in modes.items():
        off = 100 * measured.unit()["random_error"].get("median", float("nan"))
        left = measured.unfinished
        cut = f"; not in time: {', '.join(left)}" if left else ""
        place.say(
            f"{pair.name}.{mode}: {len(measured.cells)} cells, {off:.1f} % off at points at "
            f"random{cut}"
        )


def _write(place: Workplace, ledger: Ledger, notes: Sequence[str], before: dict[str, str]) -> None:
    rows, units = [], {}
    for name, unit in ledger.units.items():
        pair, mode = name.rsplit(".", 1)
        rows += [[f"{pair}/{mode}/{row[0]}", *row[1:]] for row in unit["cells"]]
        units[name] = {k: v for k, v in unit.items() if k != "cells"}
    if rows:
        frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
        shapes = {p.name: shapes_of(p) for p in chosen_pairs(None, place.quick)}
        meta = {"kind": "measured", "attention": "sdpa", "shapes": shapes, **place.meta()}
        write_latency(LatencyTable(frame, meta), place.out / "latency.parquet")
    write_results(
        place.out / "latency.json",
        {
            "stage": "latency", "meta": place.meta(), "left_out": list(notes),
            "clocks": [before, clocks(place.device)], "units": units,
        },
    )  # fmt: skip


def shapes_of(pair: PairShape) -> dict[str, Any]:
    """What a model of the cost needs to know of both architectures."""
    both = {"target": pair.target, "draft": pair.draft}
    return {
        role: {
            "name": a.name, "source": a.source, "layers": a.layers, "parameters": a.parameters,
            "hidden_size": a.hidden_size, "vocab_size": a.vocab_size, "tied": a.tied,
            "kv_values": a.kv_values,
        }
        for role, a in both.items() if a is not None
    }  # fmt: skip
