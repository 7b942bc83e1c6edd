"""Rows that need no model: the papers' formulas and averages on their own numbers."""

from __future__ import annotations

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


def quantity_rows() -> list[Row]:
    """Return every row of the kind ``same quantity``."""
    return [
        *specbound_cells(), *specbound_fits(), *specbound_overall(), *specbound_ratios(),
        *gammatune_costs(), *gammatune_means(), *cmasd_speed(), *csd_gains(),
    ]  # fmt: skip


def specbound_cells() -> list[Row]:
    """Return the 24 SD cells by eq. 5 with one fitted depth fraction per model and gamma = CR."""
    rows, inside = [], 0
    for model in MODELS:
        line = SPECBOUND_1[model, "SpecBound"]
        fit = _fit([model], wasted=0.0, outlier=False)
        ours = specbound.speedup_from_compression(line.compression, line.compression, fit.depth)
        for task, published, value in zip(TASKS, line.speedup, ours.tolist(), strict=True):
            residual = value / published - 1
            good = abs(residual) <= PASS_BAND
            inside += good
            note = (
                f"eq. 5, gamma = CR, depth fraction {fit.depth:.3f}: residual {residual:+.1%}, "
                f"{'within' if good else 'outside'} {PASS_BAND:.0%}"
            )
            label, column = f"{model} SpecBound", f"{task} SD"
            rows.append(Row(SPECBOUND, label, column, published, value, QUANTITY, note))
    share = Row(
        SPECBOUND, "SpecBound, all models", f"cells within {PASS_BAND:.0%} of eq. 5", None,
        float(inside), QUANTITY, f"of {len(rows)}",
    )  # fmt: skip
    return [*rows, share]


def specbound_fits() -> list[Row]:
    """Return depth fractions that eq. 5 needs, for no or one wasted position."""
    fits = [
        (wasted, label, name, models, False)
        for wasted, label in ((0.0, "gamma = CR"), (1.0, "gamma = CR + 1"))
        for name, models in (*((m, [m]) for m in MODELS), ("all models", MODELS))
    ]
    fits.append((0.0, "gamma = CR, all 24", "all models", MODELS, True))
    rows = []
    for wasted, label, name, models, outlier in fits:
        fit = _fit(models, wasted, outlier)
        said = ", without the RAG outlier" if OUTLIER[0] in models else ""
        if outlier:
            said = ": one depth for all models does not reproduce the table"
        note = f"RMSE {fit.rmse:.3f}, mean error {fit.mape:.1%}, R2 {fit.r_squared:.2f}{said}"
        column = f"depth fraction, {label}"
        rows.append(Row(SPECBOUND, f"{name} SpecBound", column, None, fit.depth, QUANTITY, note))
    return rows


def specbound_overall() -> list[Row]:
    """Return the overall column as the plain mean of the six tasks."""
    return [
        Row(
            SPECBOUND, f"{model} {name}", "Overall SD", line.overall, float(np.mean(line.speedup)),
            QUANTITY, "mean of the six tasks",
        )
        for (model, name), line in SPECBOUND_1.items()
    ]  # fmt: skip


def specbound_ratios() -> list[Row]:
    """Return the table 3's improvements from its own columns, and the means of Tables 2 and 4."""
    rows = []
    for name, inverse in (
        ("Per-token latency (ms)", True), ("Throughput (tokens/s)", False),
        ("End-to-End Latency (s)", True),
    ):  # fmt: skip
        plain, ours = (SPECBOUND_3.number(name, c) for c in ("AR_base", "SpecBound"))
        ratio = plain / ours if inverse else ours / plain
        given = SPECBOUND_3.value(name, "improvement")
        rows.append(
            Row(SPECBOUND_3.name, name, "improvement", given, ratio, QUANTITY, "ratio of columns")
        )
    for table in (SPECBOUND_2, SPECBOUND_4):
        for name, values in table.cells.items():
            *tasks, overall = (v for v in values if v is not None)
            mean, column = float(np.mean(tasks)), "Overall (of its tasks)"  # not our experiments
            note = "mean of the six tasks"
            rows.append(Row(table.name, name, column, overall, mean, QUANTITY, note))
    return rows


def gammatune_costs() -> list[Row]:
    """Return cost ratio, break-even and limit of the speedup by eq. 6 from Table 1's latencies."""
    rows = []
    for name, (target, draft) in PAIRS.items():
        times = (GAMMATUNE_1.number(m, "ms per token") for m in (target, draft))
        ratio = gammatune.cost_ratio(*times)
        even, most = gammatune.break_even_proportion(ratio), gammatune.speedup(1.0, 5, ratio)
        rows += [
            Row(GAMMATUNE_1.name, name, column, None, value, QUANTITY, note)
            for column, value, note in (
                ("c = T_target / T_draft", ratio, "the text says typically 4 to 10"),
                ("break-even acceptance rate (eq. 6)", even, ""),
                ("largest speedup at gamma = 5 (eq. 6)", most, "every draft accepted"),
            )
        ]
    return rows


def gammatune_means() -> list[Row]:
    """Return Table 2's averages from its pairs: means, and root mean squares of the sds."""
    rows = []
    for method, values in GAMMATUNE_2.cells.items():
        numbers = np.array(values, dtype=float)
        pairs = numbers[:-2].reshape(-1, 2)
        rows += [
            Row(
                GAMMATUNE_2.name, method, "average_mean (of its pairs)", float(numbers[-2]),
                float(pairs[:, 0].mean()), QUANTITY, "mean of the four pairs",
            ),
            Row(
                GAMMATUNE_2.name, method, "average_sd (of its pairs)", float(numbers[-1]),
                float(np.sqrt((pairs[:, 1] ** 2).mean())), QUANTITY,
                f"root mean square of the four; their mean is {pairs[:, 1].mean():.3f}",
            ),
        ]  # fmt: skip
    return rows


def cmasd_speed() -> list[Row]:
    """Return Table III's speed from its accepted tokens, at one cost per round for all variants."""
    variants = [row for row in CMASD_3.cells if CMASD_3.value(row, "td_ms") is not None]
    tokens, speed = (
        np.array([CMASD_3.number(v, c) for v in variants]) for c in ("Tok", "Speed")
    )  # fmt: skip
    # Least squares of speed = tokens / cost over the variants, in cost's inverse.
    per_token = float((tokens @ speed) / (tokens @ tokens))
    return [
        Row(
            CMASD_3.name, variant, "Speed (from Tok)", float(s), float(t * per_token), QUANTITY,
            f"Tok at {1 / per_token:.2f} beam-5 steps a round, the best constant; printed "
            f"Speed / Tok is {s / t:.2f}",
        )
        for variant, t, s in zip(variants, tokens, speed, strict=True)
    ]  # fmt: skip


def csd_gains() -> list[Row]:
    """Return CSD's gains over its baselines."""
    rows = []
    for name, given in CSD_GAINS.items():
        ours, base, plain = (CSD_MAIN.number(name, c) for c in ("CSD", "SpecDecode", "Vanilla"))
        if name.endswith("Speedup"):
            gain, note = 100 * (ours / base - 1), "percent over SpecDecode"
        else:
            gain, note = ours - plain, f"points over Vanilla; {ours - base:+.1f} over SpecDecode"
        rows.append(Row(CSD_MAIN.name, name, "gain", given, gain, QUANTITY, note))
    return rows


def _fit(models: list[str], wasted: float, outlier: bool) -> specbound.DepthFit:
    cells = [
        (rate, speed)
        for line in ((model, *SPECBOUND_1[model, "SpecBound"][:2]) for model in models)
        for task, rate, speed in zip(TASKS, *line[1:], strict=True)
        if outlier or (line[0], task) != OUTLIER
    ]
    rates, speeds = zip(*cells, strict=True)
    return specbound.fit_depth(rates, speeds, wasted)
