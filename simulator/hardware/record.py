"""How far off the cost model was from published passes that it had not seen.

Every run is predicted from others: an unquantised model's passes from the study's other models, or
where one model ran on several GPUs from the other GPUs; a quantised model's from the study's
unquantised runs and what unpacking took in other studies, or where none has such kernels, of the
study's other models; a wider pass from the narrowest and the other widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from simulator.hardware.formats import FORMATS
from simulator.hardware.kernels import PLAIN, Left, evidence_for, plain_model, unpacking
from simulator.hardware.roofline import Mode
from simulator.hardware.shapes import SHAPES
from simulator.published import STUDIES, Run, Study

OWN, LIBRARY = "its unquantised runs", "the library's other models"


class Predicted(NamedTuple):
    """A published run and what the model says of it."""

    study: Study
    run: Run
    seconds: float
    given: str

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.seconds / self.run.seconds - 1

    @property
    def label(self) -> str:
        """Model, format, and where they are not the usual, tokens a pass and context."""
        run = self.run
        wide = f", {run.new_tokens} tokens a pass" if run.new_tokens > 1 else ""
        far = f", context {run.context}" if run.context > 1024 else ""
        return f"{run.model.rpartition('/')[2]} {run.weights}{wide}{far}"


@cache
def predictions(mode: Mode) -> tuple[Predicted, ...]:
    """Every published run of a mode that can be predicted from others."""
    return tuple(row for study in STUDIES if study.mode == mode for row in _of(study))


@cache
def by_library() -> tuple[Predicted, ...]:
    """Runs of a format that other studies read with another library, from this library's alone.

    What is launched for a quantised matrix is the library's choice, so that another's runs say
    little.  Who knows which one a server has can do as well as this; `predictions` are made by
    those who do not.
    """
    found: list[Predicted] = []
    for study in (s for s in STUDIES if s.libraries):
        own = dict(study.libraries)
        for run in (r for r in study.runs if r.weights in own):
            rows = evidence_for(FORMATS[run.weights], study.mode)
            others = [(s.name, r) for s, r in rows if dict(s.libraries).get(r.weights)
                      != own[run.weights]]  # fmt: skip
            mine = [r for r in study.runs if r.weights != PLAIN and r.model == run.model]
            if others and any(s is study and r not in mine for s, r in rows):
                left = (*others, *_names(study, mine))
                found += _predicted(study, run, left, f"{OWN}, unpacking from {LIBRARY}")
    return tuple(found)


def _of(study: Study) -> Iterator[Predicted]:
    for run in study.runs:
        yield from _predicted(study, run, *_left(study, run))


def _predicted(study: Study, run: Run, left: Left, given: str) -> Iterator[Predicted]:
    try:
        model = plain_model(study, run.device, left)
    except LookupError:
        return  # the only run of its kind
    form = FORMATS[run.weights]
    shape = SHAPES[run.model].kept_as(form, unpacking(form, study.mode, left))
    yield Predicted(
        study, run, float(model.seconds(shape, 1, run.new_tokens, run.context)), given
    )  # fmt: skip


def _left(study: Study, run: Run) -> tuple[Left, str]:
    """What must not be seen to predict a run, and what is."""
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


def _names(study: Study, runs: list[Run]) -> Left:
    return tuple((study.name, run) for run in runs)


def passes(mode: Mode, quantised: bool) -> list[Predicted]:
    """The predicted passes over one token, of formats that are quantised or are not."""
    return [
        row for row in predictions(mode)
        if row.run.new_tokens == 1 and FORMATS[row.run.weights].quantised == quantised
    ]  # fmt: skip


def ratio_errors(mode: Mode, quantised: bool) -> list[float]:
    """Relative errors of cost ratios c, of pairs of runs that could be draft and target.

    One study's, the one at least three times the other, the target in the format asked for.  What
    is common to both models' errors cancels, as it does in a speedup.
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
    """Relative errors of what more tokens make of a pass, by published runs over 1, 2, ..."""
    rows = [r for r in predictions("graph") if FORMATS[r.run.weights].quantised == quantised]
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
    """The factor that a further error of the kind stays within at `level`, by those seen.

    The conformal quantile of their logarithms' sizes: with n of them, the one that
    ceil((n + 1) level) of n + 1 are no larger than; the largest where there are too few.
    """
    sizes = np.sort(np.abs(np.log1p(np.array(relative))))
    place = min(len(sizes), int(np.ceil((len(sizes) + 1) * level)))
    return float(np.exp(sizes[place - 1]))
