"""Errors of the cost model for published passes that it was not fitted to.

Every run is predicted from others:

* an unquantised model from the study's other models, or from other GPUs if one model ran on
  several;
* a quantised model from the study's unquantised runs, with the unpacking cost of other studies (of
  the study's other models, if no other study has such kernels);
* a wider pass from the narrowest and the other widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from policies.arrays import Floats
from simulator.hardware.roofline import (
    FORMATS,
    SHAPES,
    LaunchMode,
    Observation,
    Roofline,
    Unpacking,
    WeightFormat,
)
from simulator.published import (
    CONTEXT,
    GAMMATUNE,
    GAMMATUNE_MS,
    QUANTISED,
    SPECBOUND_3,
    SPECBOUND_4,
    STUDIES,
    PublishedRun,
    PublishedStudy,
)
from traces.operators.devices import DEVICES

PLAIN = "bf16"
ALONE = 8
"""Tokens of a pass that llama.cpp's matrix-vector kernels take (``MMVQ_MAX_BATCH_SIZE``)."""
Left = tuple[tuple[str, PublishedRun], ...]
"""Runs to leave out, each with its study's name."""


def observed(run: PublishedRun) -> Observation:
    """Return a published run of an unquantised model as an `Observation`."""
    return Observation(SHAPES[run.model], 1, run.new_tokens, run.context, run.seconds)


def plain_model(study: PublishedStudy, device: str, left: Left = ()) -> Roofline:
    """Return the unquantised passes of a study on a device, from its runs there but those left out.

    Eager: what the host launches a layer, the rest as known of other studies.  Graph: the share
    of the bandwidth that is reached and, with three models or more, what is left between kernels.
    Where the study has no such runs on the device, those of its other devices are used.

    Raises LookupError where it has none at all.
    """
    plain = frozenset(run for name, run in left if name == study.name and run.weights == PLAIN)
    return _plain_model(study.name, device, plain)


@lru_cache(maxsize=256)
def _plain_model(name: str, device: str, left: frozenset[PublishedRun]) -> Roofline:
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
    """Return launches outside of layers, in layers' worth, of a host that launches each kernel.

    Embedding, positions, masks, the last norm, the output projection, choosing a token.  Fitted
    to the eager studies but the one called `without`, each with layers of its own speed, where
    launches decide: by the data sheet at most half of a pass is memory and arithmetic.
    """
    from scipy.optimize import least_squares

    studies = [s for s in STUDIES if s.mode == "eager" and s.name != without]
    groups = [
        [(SHAPES[r.model].layers, r.seconds) for r in s.runs
         if r.weights == PLAIN and Roofline(DEVICES[r.device]).roof_s(
             SHAPES[r.model], 1, r.new_tokens, r.context) <= r.seconds / 2]
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


def evidence_for(form: WeightFormat, mode: LaunchMode) -> list[tuple[PublishedStudy, PublishedRun]]:
    """Return the published runs from which a format's unpacking cost follows."""
    return [
        (study, run) for study in STUDIES if study.mode == mode
        for run in study.runs if _same(FORMATS[run.weights], form, mode)
    ]  # fmt: skip


def _same(one: WeightFormat, other: WeightFormat, mode: LaunchMode) -> bool:
    if mode == "graph" and other.kernels:
        return one.kernels == other.kernels
    return one.name == other.name


@lru_cache(maxsize=256)
def unpacking(form: WeightFormat, mode: LaunchMode, left: Left = ()) -> Unpacking:
    """Return the cost of passes over a format beyond its bytes, from published runs but `left`.

    In graphs, formats that the same kernels read are fitted together.  In eager mode each format is
    fitted by itself, because the number of launches differs.  A format without published runs costs
    only its bytes.
    """
    from scipy.optimize import nnls

    rows = [(s, r) for s, r in evidence_for(form, mode) if (s.name, r) not in left]
    if not (rows and form.quantised):
        return Unpacking()
    if mode == "eager":
        extra = []
        for study, run in rows:
            model = plain_model(study, run.device, left)
            launches = run.seconds / model.layer_s - model.outside
            extra.append(launches / SHAPES[run.model].layers - 1)
        return Unpacking(launches=max(-0.5, float(np.median(extra))))
    columns, gaps = zip(*(_beyond_bytes(study, run, left) for study, run in rows), strict=True)
    scale = np.array([[1.0 / run.seconds] for _, run in rows])
    found, _ = nnls(np.array(columns) * scale, np.array(gaps) * scale[:, 0])
    layer_s, weight_ops, token_ops, tile_ops = map(float, found)
    alone = ALONE if form.kernels == "llama.cpp" else None
    return Unpacking(layer_s, 0.0, weight_ops, token_ops, alone, tile_ops)


def _beyond_bytes(
    study: PublishedStudy, run: PublishedRun, left: Left
) -> tuple[Sequence[float], float]:
    """Return layers and operations of a run, and its seconds beyond those of bytes and launches."""
    shape = SHAPES[run.model].kept_as(FORMATS[run.weights])
    model = _kin(study, run, left)
    by_bytes = float(model.seconds(shape, 1, run.new_tokens, run.context))
    work = shape.weights / model.device.vector_flops
    few = run.new_tokens <= ALONE
    one_by_one = work * (run.new_tokens - 1) if few else 0.0
    return (shape.layers, work, one_by_one, 0.0 if few else work), run.seconds - by_bytes


def _kin(study: PublishedStudy, run: PublishedRun, left: Left) -> Roofline:
    """Return the unquantised model of a study, or of another study of its engine."""
    for one in (study, *(s for s in STUDIES if s.engine == study.engine)):
        try:
            return plain_model(one, run.device, left)
        except LookupError:
            continue
    raise LookupError(study.name)


OWN, LIBRARY = "its unquantised runs", "the library's other models"


class Predicted(NamedTuple):
    """A published run and its prediction."""

    study: PublishedStudy
    run: PublishedRun
    seconds: float
    given: str

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.seconds / self.run.seconds - 1

    @property
    def label(self) -> str:
        """Model and format, and tokens per pass and context if they are unusual."""
        run = self.run
        wide = f", {run.new_tokens} tokens a pass" if run.new_tokens > 1 else ""
        far = f", context {run.context}" if run.context > 1024 else ""
        return f"{run.model.rpartition('/')[2]} {run.weights}{wide}{far}"


@cache
def predicted_runs(mode: LaunchMode) -> tuple[Predicted, ...]:
    """Return every published run of a mode that can be predicted from others."""
    return tuple(
        row
        for study in STUDIES if study.mode == mode
        for run in study.runs
        for row in _predicted(study, run, *_left(study, run))
    )  # fmt: skip


@cache
def by_library() -> tuple[Predicted, ...]:
    """Return runs of a format that others read with another library, from this library's alone.

    The library decides which kernels run for a quantised matrix, so runs of another library say
    little.  These are the errors if the server's library is known; `predicted_runs` assumes that it
    is not.
    """
    found: list[Predicted] = []
    for study in (s for s in STUDIES if s.libraries):
        own = study.libraries
        for run in (r for r in study.runs if r.weights in own):
            rows = evidence_for(FORMATS[run.weights], study.mode)
            others = [
                (s.name, r) for s, r in rows if s.libraries.get(r.weights) != own[run.weights]
            ]
            mine = [r for r in study.runs if r.weights != PLAIN and r.model == run.model]
            if others and any(s is study and r not in mine for s, r in rows):
                left = (*others, *_names(study, mine))
                found += _predicted(study, run, left, f"{OWN}, unpacking from {LIBRARY}")
    return tuple(found)


def _predicted(
    study: PublishedStudy, run: PublishedRun, left: Left, given: str
) -> Iterator[Predicted]:
    try:
        model = plain_model(study, run.device, left)
    except LookupError:
        return  # the only run of its kind
    form = FORMATS[run.weights]
    shape = SHAPES[run.model].kept_as(form, unpacking(form, study.mode, left))
    yield Predicted(
        study, run, float(model.seconds(shape, 1, run.new_tokens, run.context)), given
    )  # fmt: skip


def _left(study: PublishedStudy, run: PublishedRun) -> tuple[Left, str]:
    """Return the runs that must not be used to predict a run, and those that may."""
    form = FORMATS[run.weights]
    if not form.quantised:
        if run.new_tokens > 1:
            return (), "one token a pass"
        several = len({r.device for r in study.runs if r.weights == PLAIN}) > 1
        same = [r for r in study.runs if (r.device if several else r.model)
                == (run.device if several else run.model)]  # fmt: skip
        return _names(study, same), "its other GPUs" if several else "its other models"
    rows = evidence_for(form, study.mode)
    if run.new_tokens > 1 or any(r.new_tokens > 1 for r in study.runs):
        same = [r for r in study.runs if r.new_tokens == run.new_tokens and r.weights != PLAIN]
        return _names(study, same), f"{OWN} and other widths"
    if any(s.engine != study.engine or (study.mode == "eager" and s is not study) for s, _ in rows):
        mine = [r for s, r in rows if s is study]
        return _names(study, mine), f"{OWN}, unpacking from other studies"
    several = len({r.device for r in study.runs}) > 1
    mine = [r for r in study.runs if r.weights != PLAIN
            and (r.device == run.device if several else r.model == run.model)]  # fmt: skip
    what = "other GPUs" if several else "other models"
    return _names(study, mine), f"{OWN}, unpacking from {what}"


def _names(study: PublishedStudy, runs: list[PublishedRun]) -> Left:
    return tuple((study.name, run) for run in runs)


def passes(mode: LaunchMode, quantised: bool) -> list[Predicted]:
    """Return the predicted passes over one token, of quantised or of unquantised formats."""
    return [
        row for row in predicted_runs(mode)
        if row.run.new_tokens == 1 and FORMATS[row.run.weights].quantised == quantised
    ]  # fmt: skip


def ratio_errors(mode: LaunchMode, quantised: bool) -> list[float]:
    """Return relative errors of cost ratios c, for pairs of runs that could be draft and target.

    Both runs are of one study, one model is at least three times as large as the other, and the
    target has the format asked for.  Errors common to both models cancel, as in a speedup.
    """
    targets = passes(mode, quantised)
    drafts = {id(r): r for q in (False, quantised) for r in passes(mode, q)}
    return [
        (1 + small.error) / (1 + large.error) - 1
        for large in targets for small in drafts.values()
        if small.study is large.study and small.run.device == large.run.device
        and SHAPES[large.run.model].weights > 3 * SHAPES[small.run.model].weights
    ]  # fmt: skip


def width_errors(quantised: bool) -> list[float]:
    """Return relative errors of what more tokens make of a pass, by published runs."""
    rows = [r for r in predicted_runs("graph") if FORMATS[r.run.weights].quantised == quantised]
    one = {_series(r): r.error for r in rows if r.run.new_tokens == 1}
    if not quantised:  # the run over one token is given, and met
        one = {_series(r): 0.0 for r in rows if r.run.new_tokens > 1}
    return [
        (1 + row.error) / (1 + one[_series(row)]) - 1
        for row in rows if row.run.new_tokens > 1 and _series(row) in one
    ]  # fmt: skip


def _series(row: Predicted) -> tuple[str, str, str]:
    return row.study.name, row.run.model, row.run.device


def reach(relative: list[float], level: float) -> float:
    """Return the factor that bounds a further error of this kind with probability `level`.

    It is the conformal quantile of the known errors' absolute logarithms: of n, the one of rank
    ceil((n + 1) level), or the largest if there are too few.
    """
    sizes = np.sort(np.abs(np.log1p(np.array(relative))))
    place = min(len(sizes), int(np.ceil((len(sizes) + 1) * level)))
    return float(np.exp(sizes[place - 1]))


DEPTH, WIDTH = 0.3, 4
"""SpecBound's draft phase as a share of the layers, and positions a round: the two devices'
speedups differ by what a pass of that width costs on each."""


def check_published(fitted: Roofline | None = None) -> pd.DataFrame:
    """Return published latencies and speedups with the model's; ``error`` is ours / published - 1.

    Parameters
    ----------
    fitted:
        An eager model fitted to a measured table, carried over to each paper's device
        (kind ``scaled``).  Without one the launches are fitted to GammaTune's other
        unquantised models (kind ``left out``: the row itself never enters its own fit) and
        all of them serve the SpecBound rows (kind ``fitted elsewhere``).

    Notes
    -----
    Times are milliseconds (GammaTune 1, SpecBound 3); SpecBound 4 gives the speedup on the
    RTX 3090 over that on the H800.
    """
    rows: list[tuple[object, ...]] = []
    h100 = DEVICES["h100"]
    for name, published in GAMMATUNE_MS.items():
        own = [run for run in GAMMATUNE.runs if run.model == name]
        model = (
            fitted.on(h100) if fitted else plain_model(GAMMATUNE, "h100", _names(GAMMATUNE, own))
        )
        shape = SHAPES[name].kept_as(FORMATS[QUANTISED.get(name, "bf16")])
        ours = 1e3 * float(model.seconds(shape, context=CONTEXT))
        kind = "scaled" if fitted else "left out"
        if name in QUANTISED:
            kind += ", quantised"
        rows.append(("GammaTune 1, ms", name, "h100", published, ours, kind))
    everyone = fitted or plain_model(GAMMATUNE, "h100")
    kind = "scaled" if fitted else "fitted elsewhere"
    vicuna = SHAPES["lmsys/vicuna-7b-v1.5"]
    h800, rtx = everyone.on(DEVICES["h800"]), everyone.on(DEVICES["rtx-3090"])
    ours = 1e3 * float(h800.seconds(vicuna, context=CONTEXT))
    published = SPECBOUND_3.number("Per-token latency (ms)", "AR_base")
    rows.append(("SpecBound 3, ms", "AR", "h800", published, ours, kind))

    def round_cost(model: Roofline) -> float:
        """Return a round over a plain step (SpecBound, eq. 3, at the width's measured cost)."""
        one, wide = (
            float(model.seconds(vicuna, new_tokens=n, context=CONTEXT)) for n in (1, WIDTH)
        )
        return WIDTH * DEPTH + (1 - DEPTH) * wide / one

    ratio = round_cost(h800) / round_cost(rtx)
    rows += [
        (
            "SpecBound 4, 3090/H800", task, "rtx-3090",
            SPECBOUND_4.number("RTX 3090", task) / SPECBOUND_4.number("H800", task), ratio, kind,
        )
        for task in SPECBOUND_4.columns
    ]  # fmt: skip
    columns = ["table", "row", "device", "published", "ours", "kind"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.insert(5, "error", frame["ours"] / frame["published"] - 1)
    return frame


class PublishedError(NamedTuple):
    """Absolute relative errors of the cost model against published figures."""

    median: float
    worst: float
    figures: int
    devices: tuple[str, ...]


def published_error(fitted: Roofline | None = None, quantised: bool = False) -> PublishedError:
    """Return the error of the model against published passes of its kind.

    It covers passes of the launch mode of `fitted` (by default eager), of weights that are
    `quantised` or not (`simulator.hardware.record.passes`).  Eager mode also covers
    `check_published`, where an eager model is extrapolated to each paper's device.
    """
    eager = fitted is None or fitted.mode == "eager"
    return _published_error(fitted if eager else None, "eager" if eager else "graph", quantised)


@cache
def _published_error(fitted: Roofline | None, mode: LaunchMode, quantised: bool) -> PublishedError:
    rows = [
        (abs(row.error), row.run.device) for row in passes(mode, quantised)
        if row.study is not GAMMATUNE  # below
    ]  # fmt: skip
    if mode == "eager" and not quantised:
        papers = check_published(fitted)
        papers = papers[~papers["kind"].str.contains("quantised")]
        rows += list(zip(papers["error"].abs(), papers["device"], strict=True))
    found, devices = zip(*rows, strict=True)
    return PublishedError(
        float(np.median(found)), max(found), len(found), tuple(sorted(set(devices)))
    )
