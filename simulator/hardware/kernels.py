"""What published runs tell of kernels: launches outside of layers, and the cost of unpacking.

Nothing here is fitted to a run that it predicts: every function takes the runs to leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from simulator.hardware.formats import FORMATS, Unpacking, WeightFormat
from simulator.hardware.roofline import Mode, Observation, Roofline
from simulator.hardware.shapes import SHAPES
from simulator.published import STUDIES, Run, Study
from traces.operators.devices import DEVICES

Floats = npt.NDArray[np.float64]

PLAIN = "bf16"
ALONE = 8
"""Tokens of a pass that llama.cpp's matrix-vector kernels take (``MMVQ_MAX_BATCH_SIZE``)."""
Left = tuple[tuple[str, Run], ...]
"""Runs to leave out, each with its study's name."""


def observed(run: Run) -> Observation:
    """A published run of an unquantised model as the cost model's fit takes it."""
    return Observation(SHAPES[run.model], 1, run.new_tokens, run.context, run.seconds)


def plain_model(study: Study, device: str, left: Left = ()) -> Roofline:
    """The unquantised passes of a study on a device, from its runs there but those left out.

    Eager: what the host launches a layer, the rest as known of other studies.  Graph: the share
    of the bandwidth that is reached and, with three models or more, what is left between kernels.
    Where the study has no such runs on the device, those of its other devices stand for them.

    Raises LookupError where it has none at all.
    """
    plain = frozenset(run for name, run in left if name == study.name and run.weights == PLAIN)
    return _plain_model(study.name, device, plain)


@lru_cache(maxsize=256)
def _plain_model(name: str, device: str, left: frozenset[Run]) -> Roofline:
    study = next(s for s in STUDIES if s.name == name)
    runs = [r for r in study.runs if r.weights == PLAIN and r.new_tokens == 1 and r not in left]
    near = [r for r in runs if r.device == device] or runs
    if not near:
        raise LookupError(name)
    if study.mode == "eager":
        start = Roofline(DEVICES[device], "eager", 0.0, outside=outside_launches(name))
        return start.fitted([observed(r) for r in near], ("layer_s",))
    fits = []
    for place in dict.fromkeys(r.device for r in near):
        own = [r for r in near if r.device == place]
        several = len({r.model for r in own}) > 2
        start = Roofline(DEVICES[place], "graph", 0.0, 1e-5 if several else 0.0)
        free = ("layer_s", "memory_share") if several else ("memory_share",)
        fits.append(start.fitted([observed(r) for r in own], free))
    share = float(np.exp(np.mean([np.log(fit.memory_share) for fit in fits])))
    return replace(fits[0].on(DEVICES[device]), memory_share=share)


@lru_cache(maxsize=64)
def outside_launches(without: str = "") -> float:
    """Launches outside of the layers, in layers' worth, of a host that launches every kernel.

    Embedding, positions, masks, the last norm, the output projection, choosing a token.  Fitted
    to the eager studies but the one called `without`, each with layers of its own speed, where
    launches decide: by the data sheet at most half of a pass is memory and arithmetic.
    """
    from scipy.optimize import least_squares

    studies = [s for s in STUDIES if s.mode == "eager" and s.name != without]
    groups = [
        [(SHAPES[r.model].layers, r.seconds) for r in s.runs
         if r.weights == PLAIN and _roof_s(r) <= r.seconds / 2]
        for s in studies
    ]  # fmt: skip

    def misses(x: Floats) -> Floats:
        return np.concatenate([
            [np.log((layers + x[0]) / seconds) + speed for layers, seconds in group]
            for speed, group in zip(x[1:], groups, strict=True)
        ])  # fmt: skip

    start = [1.0, *(np.log(1e-3) for _ in groups)]
    low = [0.0, *(-np.inf for _ in groups)]
    return float(least_squares(misses, start, bounds=(low, np.inf)).x[0])


def _roof_s(run: Run) -> float:
    shape = SHAPES[run.model]
    return float(Roofline(DEVICES[run.device]).roof_s(shape, 1, run.new_tokens, run.context))


def unpacking(form: WeightFormat, mode: Mode, left: Left = ()) -> Unpacking:
    """What passes over a format cost beyond its bytes, from published runs but those left out.

    In graphs the formats that the same kernels read are fitted together; eager hosts launch
    another number of kernels for each.  A format without published runs costs its bytes alone.
    """
    return _unpacking(form, mode, left) if form.quantised else Unpacking()


def evidence_for(form: WeightFormat, mode: Mode) -> list[tuple[Study, Run]]:
    """The published runs that tell of a format's unpacking."""
    return [
        (study, run) for study in STUDIES if study.mode == mode
        for run in study.runs if _same(FORMATS[run.weights], form, mode)
    ]  # fmt: skip


def _same(one: WeightFormat, other: WeightFormat, mode: Mode) -> bool:
    if mode == "graph" and other.kernels:
        return one.kernels == other.kernels
    return one.name == other.name


@lru_cache(maxsize=256)
def _unpacking(form: WeightFormat, mode: Mode, left: Left) -> Unpacking:
    from scipy.optimize import nnls

    rows = [(s, r) for s, r in evidence_for(form, mode) if (s.name, r) not in left]
    if not rows:
        return Unpacking()
    if mode == "eager":
        extra = [_more_launches(study, run, left) for study, run in rows]
        return Unpacking(launches=max(-0.5, float(np.median(extra))))
    columns, gaps = zip(*(_beyond_bytes(study, run, left) for study, run in rows), strict=True)
    scale = np.array([[1.0 / run.seconds] for _, run in rows])
    found, _ = nnls(np.array(columns) * scale, np.array(gaps) * scale[:, 0])
    layer_s, weight_ops, token_ops, tile_ops = map(float, found)
    alone = ALONE if form.kernels == "llama.cpp" else None
    return Unpacking(layer_s, 0.0, weight_ops, token_ops, alone, tile_ops)


def _more_launches(study: Study, run: Run, left: Left) -> float:
    model = plain_model(study, run.device, left)
    layers = SHAPES[run.model].layers
    return (run.seconds / model.layer_s - model.outside) / layers - 1


def _beyond_bytes(study: Study, run: Run, left: Left) -> tuple[Sequence[float], float]:
    """Layers and operations of a run, and its seconds beyond those of bytes and launches."""
    shape = SHAPES[run.model].kept_as(FORMATS[run.weights])
    model = _kin(study, run, left)
    by_bytes = float(model.seconds(shape, 1, run.new_tokens, run.context))
    work = shape.weights / model.device.vector_flops
    few = run.new_tokens <= ALONE
    one_by_one = work * (run.new_tokens - 1) if few else 0.0
    return (shape.layers, work, one_by_one, 0.0 if few else work), run.seconds - by_bytes


def _kin(study: Study, run: Run, left: Left) -> Roofline:
    """The unquantised model of a study, or of another of its engine where it has none."""
    for one in (study, *(s for s in STUDIES if s.engine == study.engine)):
        try:
            return plain_model(one, run.device, left)
        except LookupError:
            continue
    raise LookupError(study.name)
