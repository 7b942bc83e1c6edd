"""A grid over a recording: its axes, the sweep that they make, and what has to be said of it.

`draftsim sweep` and `draftsim.sweep` ask in the same way: `load_recording`, `grid_sweep`,
`Sweep.run`, `answer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from simulator.chosen import swept_policies
from simulator.hardware.roofline import WeightFormat
from simulator.hardware.scaling import said_calibrate
from simulator.recording import Recording, check_carried
from simulator.unmeasured import free_hosts, said_free, said_outside
from simulator.whatif.cells import Prices, fitting, said_scaled
from simulator.whatif.sweep import Sweep
from traces.aliases import Say, silent
from traces.latency.table import BATCH_FREE_SAID
from traces.operators.devices import find_device


@dataclass(frozen=True)
class Axes:
    """The axes of a grid, with how each is read.

    Attributes
    ----------
    c, verify_ratio:
        Time of a draft pass, and of a verification, over that of a target pass.
    alpha, tilt:
        Acceptance rates; none: as recorded.  How the recording is changed to them (`Sweep`).
    gamma:
        Draft lengths for every policy that has one.
    batch:
        Sequences decoded together.
    context:
        Prompt tokens; None is as recorded.
    gpus, weights:
        GPUs, and formats of the models' weights by role, that the latencies are extrapolated to.
    always_draft:
        Draft passes in every round (`traces.replay.calls.drafting_always`).
    """

    c: Sequence[float] = ()
    alpha: Sequence[float] = ()
    gamma: Sequence[int] = ()
    batch: Sequence[int] = (1,)
    context: Sequence[int | None] = (None,)
    gpus: Sequence[str] = ()
    weights: Mapping[str, WeightFormat] = field(default_factory=dict)
    verify_ratio: float = 1.0
    tilt: str = "coupled"
    always_draft: int = 0

    @property
    def by_ratio(self) -> bool:
        """True if cost ratios alone can price the grid."""
        return bool(self.c) and not self.gpus and not self.weights


def grid_sweep(
    recording: Recording, policies: Sequence[str] | None, axes: Axes, *, resamples: int = 200,
    seed: int = 0, say: Say = silent,
) -> Sweep:  # fmt: skip
    """Return the sweep of a recording over `axes`.

    Parameters
    ----------
    policies:
        Names (`swept_policies`).
    resamples, seed:
        Those of `Sweep`.
    say:
        Told how well the recording can be changed to other acceptance rates, what was extrapolated
        to another GPU, and what is not fitted.

    Raises
    ------
    DraftsimError
        If a table does not know such batches or cannot be extrapolated, or as `Sweep`.
    """
    largest = max(axes.batch, default=1)
    tables = recording.swept(axes.c, largest)
    if axes.gpus or axes.weights:
        check_carried(recording.source, recording.recordings, recording.one_pass)
    gpus = tuple(dict.fromkeys(find_device(str(name)).name for name in axes.gpus))
    prices = Prices(
        axes.c, tables, axes.context, axes.verify_ratio, gpus, axes.weights, axes.always_draft
    )
    chosen = swept_policies(policies, axes.gamma, recording.trace, say)
    sweep = Sweep(
        recording.trace, chosen, prices, axes.alpha, axes.batch, method=axes.tilt,
        resamples=resamples, seed=seed,
    )  # fmt: skip
    carried = said_calibrate([at.table for at in prices.tables], largest)
    for line in [*said_tilt(sweep), *said_scaled(prices), *carried]:
        say(line)
    return sweep


@dataclass(frozen=True, eq=False)
class GridAnswer:
    """The rows of a grid that fit into memory, and what has to be said of them.

    Attributes
    ----------
    rows:
        Those of the sweep's table whose cache fits.
    assumed:
        Names of the latencies that are taken to cost the same at every batch.
    first:
        Lines on what was assumed or left out.
    outside:
        Lines on passes outside the measured sizes.
    notes:
        Lines on acceptance rates that were not tried, and on what costs nothing.
    """

    rows: pd.DataFrame
    assumed: tuple[str, ...]
    first: tuple[str, ...]
    outside: tuple[str, ...]
    notes: tuple[str, ...]


def answer(sweep: Sweep, table: pd.DataFrame) -> GridAnswer:
    """Return what the `table` of a sweep answers; DraftsimError if no batch's cache fits."""
    runner, largest = sweep.runner, max(sweep.batches)
    prices = runner.prices
    assumed = [n for n, at in prices.latencies.items() if at.said_batch_free(largest)]
    assumed += ["ratio"] * (largest > 1 and bool(prices.ratios))
    fit, large = fitting(table, prices, runner.trace)
    policies = [runner.policies[name] for name in sweep.policies]
    lacks = free_hosts((at.table for at in prices.tables), policies, runner.trace.sampling)
    return GridAnswer(
        fit, tuple(assumed), (*([said_assumed(assumed, prices)] if assumed else []), *large),
        tuple(said_outside(fit[["policy", "batch", "context", "outside"]].to_dict("records"))),
        (*said_untried(sweep, fit), *said_free(lacks)),
    )  # fmt: skip


def said_assumed(assumed: Sequence[str], prices: Prices) -> str:
    """Return what costs nothing at the latencies `assumed`; name them if `prices` has others."""
    said = f"assumed to cost nothing: {BATCH_FREE_SAID}"
    if len(assumed) == len(prices.latencies) + bool(prices.ratios):
        return said
    names = ["cost ratios" if name == "ratio" else name for name in assumed]
    return f"{said}, at the costs of {' and '.join(names)}"


def said_tilt(sweep: Sweep) -> list[str]:
    """Return lines on the measured error of tilting to another acceptance."""
    if sweep.error is None:
        return []
    said = ["acceptance is reweighted to --alpha, so the rows are approximate"]
    for error, kind in (
        (sweep.error.lengths, "that read no signal"),
        (sweep.error.signals, "that read signals"),
    ):
        if error.comparisons:
            said.append(
                f"  policies {kind}: the median error of a speedup is {error.median:.1%} (worst "
                f"{error.worst:.1%}, i.i.d. {error.iid_median:.1%}), from {error.comparisons} "
                f"comparisons of groups of these prompts; {error.per_logit:.1%} per unit of "
                "logit(alpha)"
            )
        else:
            said.append(f"  policies {kind}: error unknown, because these prompts are too alike")
    return said


def said_untried(sweep: Sweep, rows: pd.DataFrame) -> list[str]:
    """Return a line on the acceptance rates that lie outside the measured range of tilting."""
    tilted = rows[(rows["source"] == "tilted") & ~rows["tilt_tried"]]
    if sweep.error is None or not sweep.error.lengths.comparisons or tilted.empty:
        return []
    rates = sorted(set(tilted["alpha_asked"]))
    asked = ", ".join(f"{r:.3g}" for r in rates if len(rates) < 9) or "see tilt_tried"
    unknown = ", and unknown where no draft or every draft is accepted"
    return [
        f"{len(rates)} of {rows['alpha_asked'].nunique()} acceptance rates ({asked}) lie outside "
        "the measured range of changes: tilt_error is extrapolated there"
        f"{unknown if tilted['tilt_error'].isna().any() else ''}"
    ]
