"""Rows that need no model: the papers' formulas and averages on their own numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.formulas import gammatune, specbound
from simulator.papers.ours import QUANTITY, Row
from simulator.published import (
    CMASD_3,
    CSD_GAINS,
    CSD_MAIN,
    GAMMATUNE_1,
    GAMMATUNE_2,
    SPECBOUND_1,
    SPECBOUND_2,
    SPECBOUND_3,
    SPECBOUND_4,
    TASKS,
)

SPECBOUND = "SpecBound Table 1"
PASS_BAND = 0.10
"""Largest |residual| of a cell that counts as reproduced."""
OUTLIER = ("Codellama-13B-Instruct", "RAG")
"""The cell whose cost per round is out of line with its model's others."""
MODELS = [model for model, method in SPECBOUND_1 if method == "SpecBound"]
PAIRS = {
    "vicuna-13b + 160m": ("lmsys/vicuna-13b-v1.5", "double7/vicuna-160m"),
    "vicuna-7b + 68m": ("lmsys/vicuna-7b-v1.5", "double7/vicuna-68m"),
    "llama-70b + 8b": ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B"),
    "llama-8b + 1b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct"),
}
"""GammaTune's pairs, target first."""


PaperCell = tuple[str, str, str, float | None, float, str]
"""Table, row, column, the published number and the computed one, and a note."""


def quantity_rows() -> list[Row]:
    """Return every row of the kind ``same quantity``."""
    parts = (
        specbound_cells, specbound_fits, specbound_overall, specbound_ratios, gammatune_costs,
        gammatune_means, cmasd_speed, csd_gains,
    )  # fmt: skip
    return [Row(*cell[:5], QUANTITY, cell[5]) for part in parts for cell in part()]


def specbound_cells() -> Iterator[PaperCell]:
    """Yield the 24 SD cells by eq. 5 with one fitted depth fraction per model and gamma = CR."""
    cells = inside = 0
    for model in MODELS:
        line = SPECBOUND_1[model, "SpecBound"]
        fit = _fit([model], wasted=0.0, outlier=False)
        ours = specbound.speedup_from_compression(line.compression, line.compression, fit.depth)
        for task, published, value in zip(TASKS, line.speedup, ours.tolist(), strict=True):
            residual = value / published - 1
            good = abs(residual) <= PASS_BAND
            cells, inside = cells + 1, inside + good
            note = (
                f"eq. 5, gamma = CR, depth fraction {fit.depth:.3f}: residual {residual:+.1%}, "
                f"{'within' if good else 'outside'} {PASS_BAND:.0%}"
            )
            yield SPECBOUND, f"{model} SpecBound", f"{task} SD", published, value, note
    column = f"cells within {PASS_BAND:.0%} of eq. 5"
    yield SPECBOUND, "SpecBound, all models", column, None, float(inside), f"of {cells}"


def specbound_fits() -> Iterator[PaperCell]:
    """Yield depth fractions that eq. 5 needs, for no or one wasted position."""
    fits = [
        (wasted, label, name, models, False)
        for wasted, label in ((0.0, "gamma = CR"), (1.0, "gamma = CR + 1"))
        for name, models in (*((m, [m]) for m in MODELS), ("all models", MODELS))
    ]
    fits.append((0.0, "gamma = CR, all 24", "all models", MODELS, True))
    for wasted, label, name, models, outlier in fits:
        fit = _fit(models, wasted, outlier)
        said = ", without the RAG outlier" if OUTLIER[0] in models else ""
        if outlier:
            said = ": one depth for all models does not reproduce the table"
        note = f"RMSE {fit.rmse:.3f}, mean error {fit.mape:.1%}, R2 {fit.r_squared:.2f}{said}"
        yield SPECBOUND, f"{name} SpecBound", f"depth fraction, {label}", None, fit.depth, note


def specbound_overall() -> Iterator[PaperCell]:
    """Yield the overall column as the plain mean of the six tasks, of Tables 1, 2 and 4."""
    for (model, name), line in SPECBOUND_1.items():
        label, mean = f"{model} {name}", float(np.mean(line.speedup))
        yield SPECBOUND, label, "Overall SD", line.overall, mean, "mean of the six tasks"
    for table in (SPECBOUND_2, SPECBOUND_4):
        for name, values in table.cells.items():
            *tasks, overall = (v for v in values if v is not None)
            mean, column = float(np.mean(tasks)), "Overall (of its tasks)"  # not our experiments
            yield table.name, name, column, overall, mean, "mean of the six tasks"


def specbound_ratios() -> Iterator[PaperCell]:
    """Yield the table 3's improvements from its own columns."""
    for name, inverse in (
        ("Per-token latency (ms)", True), ("Throughput (tokens/s)", False),
        ("End-to-End Latency (s)", True),
    ):  # fmt: skip
        plain, ours = (SPECBOUND_3.number(name, c) for c in ("AR_base", "SpecBound"))
        ratio = plain / ours if inverse else ours / plain
        given = SPECBOUND_3.value(name, "improvement")
        yield SPECBOUND_3.name, name, "improvement", given, ratio, "ratio of columns"


def gammatune_costs() -> Iterator[PaperCell]:
    """Yield cost ratio, break-even and limit of the speedup by eq. 6 from Table 1's latencies."""
    for name, (target, draft) in PAIRS.items():
        times = (GAMMATUNE_1.number(m, "ms per token") for m in (target, draft))
        ratio = gammatune.cost_ratio(*times)
        even, most = gammatune.break_even_proportion(ratio), gammatune.speedup(1.0, 5, ratio)
        for column, value, note in (
            ("c = T_target / T_draft", ratio, "the text says typically 4 to 10"),
            ("break-even acceptance rate (eq. 6)", even, ""),
            ("largest speedup at gamma = 5 (eq. 6)", most, "every draft accepted"),
        ):
            yield GAMMATUNE_1.name, name, column, None, value, note


def gammatune_means() -> Iterator[PaperCell]:
    """Yield Table 2's averages from its pairs: means, and root mean squares of the sds."""
    for method, values in GAMMATUNE_2.cells.items():
        *each, mean, sd = map(float, np.array(values, dtype=float))
        means, sds = np.array(each[::2]), np.array(each[1::2])
        rms = float(np.sqrt((sds**2).mean()))
        for column, published, ours, note in (
            ("average_mean (of its pairs)", mean, float(means.mean()), "mean of the four pairs"),
            ("average_sd (of its pairs)", sd, rms,
             f"root mean square of the four; their mean is {sds.mean():.3f}"),
        ):  # fmt: skip
            yield GAMMATUNE_2.name, method, column, published, ours, note


def cmasd_speed() -> Iterator[PaperCell]:
    """Yield Table III's speed from its accepted tokens, at one cost per round for all variants."""
    variants = [row for row in CMASD_3.cells if CMASD_3.value(row, "td_ms") is not None]
    tokens, speed = (
        np.array([CMASD_3.number(v, c) for v in variants]) for c in ("Tok", "Speed")
    )  # fmt: skip
    # Least squares of speed = tokens / cost over the variants, in cost's inverse.
    per_token = float((tokens @ speed) / (tokens @ tokens))
    for variant, t, s in zip(variants, tokens.tolist(), speed.tolist(), strict=True):
        note = (
            f"Tok at {1 / per_token:.2f} beam-5 steps a round, the best constant; printed "
            f"Speed / Tok is {s / t:.2f}"
        )
        yield CMASD_3.name, variant, "Speed (from Tok)", s, t * per_token, note


def csd_gains() -> Iterator[PaperCell]:
    """Yield CSD's gains over its baselines."""
    for name, given in CSD_GAINS.items():
        ours, base, plain = (CSD_MAIN.number(name, c) for c in ("CSD", "SpecDecode", "Vanilla"))
        if name.endswith("Speedup"):
            gain, note = 100 * (ours / base - 1), "percent over SpecDecode"
        else:
            gain, note = ours - plain, f"points over Vanilla; {ours - base:+.1f} over SpecDecode"
        yield CSD_MAIN.name, name, "gain", given, gain, note


def _fit(models: list[str], wasted: float, outlier: bool) -> specbound.DepthFit:
    cells = [
        (rate, speed)
        for line in ((model, *SPECBOUND_1[model, "SpecBound"][:2]) for model in models)
        for task, rate, speed in zip(TASKS, *line[1:], strict=True)
        if outlier or (line[0], task) != OUTLIER
    ]
    rates, speeds = zip(*cells, strict=True)
    return specbound.fit_depth(rates, speeds, wasted)
