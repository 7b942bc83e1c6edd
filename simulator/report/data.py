"""Everything the page shows, as plain values: computed here, drawn and re-priced there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.hardware import scaling_words
from simulator.pricing import price
from simulator.report import ratio_model
from simulator.serving import ClosedLoop, Limits, Scenario, sweep
from simulator.summary import prompt_speedups, summarize, summarize_by_category, to_rows
from simulator.tune import default_batches, fixed_logs, price_grid, tune_vllm
from simulator.tune.costs import DEFAULT_LENGTHS
from simulator.tune.served import RIVALS
from simulator.validation import compare, verdict
from traces.latency import LatencyTable
from traces.measured import MeasuredRuns
from traces.rounds import RoundLog
from traces.trace import Trace

SERVED_TOKENS = 6000
"""Simulated tokens of one serving run, which keeps the curves cheap."""
SERVED_BATCHES = 6


def report_data(
    trace: Trace,
    latency: LatencyTable,
    logs: Sequence[RoundLog],
    *,
    measured: MeasuredRuns | None = None,
    serve: bool = True,
    resamples: int = 2000,
) -> dict[str, Any]:
    """The page's data; parameters as of `simulator.report.build_report`."""
    ranked = _ranked(logs, latency, resamples)
    by_name = {log.policy: log for log in logs}
    c, v, known = ratio_model.measured_ratios(trace, latency)
    fixed = ratio_model.fixed_histograms(trace)
    sliders = ratio_model.sliders(trace, c, v, list(fixed))
    for row in ranked:
        row["histogram"] = ratio_model.histogram(by_name[row["policy"]])
    return {
        "about": _about(trace, latency, c, v, known),
        "policies": ranked,
        "categories": _categories(trace, logs, latency, resamples),
        "validation": None if measured is None else _validation(logs, latency, measured),
        "fixed": {"gammas": list(fixed), "histograms": list(fixed.values())},
        "sliders": sliders,
        "tilt": ratio_model.tilted(trace, sliders["alpha"]["values"], list(fixed)),
        **_batches(trace, latency, serve),
    }


def _about(trace: Trace, latency: LatencyTable, c: float, v: float, known: bool) -> dict[str, Any]:
    meta = {**trace.meta}
    device = latency.meta.get("device") or meta.get("device")
    return {
        "target": _model(meta.get("target")),
        "draft": _model(meta.get("draft")),
        "device": "not a device: constant latencies" if latency.is_constant else str(device or "-"),
        "dtype": str(meta.get("dtype") or latency.meta.get("dtype") or "-"),
        "mode": str(latency.meta.get("mode") or "-"),
        "versions": ", ".join(f"{k} {w}" for k, w in dict(meta.get("versions") or {}).items()),
        "prompts": len(trace.requests),
        "tokens": trace.tokens,
        "categories": len({r.category for r in trace.requests}),
        "sampling": trace.sampling.label,
        "max_gamma": trace.max_gamma,
        "alpha": ratio_model.recorded_alpha(trace),
        "c": c, "v": v, "ratios_measured": known,
        "scaled": scaling_words(latency),
    }  # fmt: skip


def _model(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value or "-")
    name = next((value[k] for k in ("name", "id", "model", "path") if value.get(k)), "?")
    size = value.get("parameters")
    parts = [str(value["architecture"])] if value.get("architecture") else []
    if value.get("layers"):
        parts.append(f"{value['layers']} layer{'s' if value['layers'] != 1 else ''}")
    if size:
        parts.append(f"{size / 1e9:.2f} B" if size >= 1e9 else f"{size / 1e6:.1f} M parameters")
    # A local folder says nothing to the reader beyond its last part.
    short = str(name).rstrip("/").rsplit("/", 1)[-1]
    return f"{short} ({', '.join(parts)})" if parts else short


def _ranked(logs: Sequence[RoundLog], latency: LatencyTable, draws: int) -> list[dict[str, Any]]:
    """Policies by speedup, the fastest first, with the prompts that each slows down."""
    rows = to_rows(summarize(logs, latency, resamples=draws))[1:]
    for row, log in zip(rows, logs, strict=True):
        own = prompt_speedups(log, latency)
        row["oracle"] = row["policy"].partition(":")[0] == "oracle"
        row["below"] = float(np.mean(own[np.isfinite(own)] < 1))
        run = price(log, latency)
        row["outside"] = run.passes.extrapolated / max(run.passes.passes, 1)
    return sorted(rows, key=lambda row: -(row["speedup"] or 0.0))


def _categories(
    trace: Trace, logs: Sequence[RoundLog], latency: LatencyTable, draws: int
) -> dict[str, Any] | None:
    """Speedups by category; None where there is one category alone."""
    sizes: dict[str, int] = {}
    for request in trace.requests:
        sizes[request.category] = sizes.get(request.category, 0) + 1
    if len(sizes) < 2:
        return None
    rows = to_rows(summarize_by_category(logs, latency, resamples=draws))
    kept = ("category", "policy", "speedup", "speedup_lo", "speedup_hi")
    return {
        "names": list(sizes),
        "prompts": list(sizes.values()),
        "rows": [{k: r[k] for k in kept} for r in rows if r["policy"] != "autoregressive"],
    }


def _validation(
    logs: Sequence[RoundLog], latency: LatencyTable, measured: MeasuredRuns
) -> dict[str, Any] | None:
    """Predicted against measured seconds of the arms that were replayed here too."""
    from simulator.pricing import autoregressive

    own = {log.policy: log for log in (autoregressive(logs[0]), *logs)}
    times = measured.times[measured.times["policy"].isin(list(own))]
    if times.empty:
        return None
    rows = compare([price(log, latency) for log in own.values()], times)
    said = verdict(rows)
    left_out = sorted(set(measured.times["policy"]) - set(own))
    return {
        "rows": to_rows(rows),
        "median_error": said.median_error,
        "worst_error": said.worst_error,
        "worst_policy": said.worst_policy,
        "misranked": len(said.misranked),
        "ranked_pairs": said.ranked_pairs,
        "wrong_sign": list(said.wrong_sign),
        "sign_arms": said.sign_arms,
        "left_out": left_out,
    }


def _batches(trace: Trace, latency: LatencyTable, serve: bool) -> dict[str, Any]:
    """Speedup of every fixed length at every measured batch, and serving curves."""
    sizes = default_batches(latency)
    if len(sizes) < 2:
        return {"batches": None, "serving": None}
    plain, logs = fixed_logs(trace, [k for k in DEFAULT_LENGTHS if k])
    grids = [price_grid([plain, *logs.values()], latency, b) for b in sizes]
    speedup = [(g.tokens.sum(axis=1) / g.seconds.sum(axis=1)).tolist() for g in grids]
    batches = {
        "batches": sizes,
        "lengths": list(logs),
        "speedup": [[s / row[0] for s in row[1:]] for row in speedup],
    }
    if not serve:
        return {"batches": batches, "serving": None}
    tuned = tune_vllm(trace, latency, sizes, draws=400)
    some = sorted({sizes[round(i)] for i in np.linspace(0, len(sizes) - 1, SERVED_BATCHES)})
    loads = [
        Scenario(
            ClosedLoop(b), Limits(max_batch=b), max_tokens=SERVED_TOKENS,
            requests=max(2 * b, len(trace.requests)),
        ) for b in some
    ]  # fmt: skip
    rows = sweep(trace, latency, {**RIVALS, "tuned": tuned.policy}, loads)
    table = (tuned.document or {}).get("num_speculative_tokens_per_batch_size")
    names = list(dict.fromkeys(r["policy"] for r in rows))
    kept = [
        {
            "policy": r["policy"], "batch": r["batch"], "throughput_tok_s": r["throughput_tok_s"],
            "tpot_s": r["tpot_s"]["mean"],
        } for r in rows
    ]  # fmt: skip
    return {"batches": batches, "serving": {"rows": kept, "table": table, "policies": names}}
