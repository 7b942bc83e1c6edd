"""Everything the page shows, as plain values: computed here, drawn and re-priced there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulator.hardware import scaling_words
from simulator.pricing import price
from simulator.ratios import OwnRatios, own_ratios
from simulator.report import ratio_model
from simulator.report.loads import loads
from simulator.report.ranked import headline, ranked, with_best_fixed
from simulator.summary import summarize_by_category, to_rows
from simulator.validation import compare, verdict
from simulator.whatif.ranking import BEST_FIXED, FITTED
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.store.measured import MeasuredRuns


def report_data(
    trace: Trace,
    latency: LatencyTable,
    logs: Sequence[RoundLog],
    *,
    notes: Mapping[str, str] | None = None,
    measured: MeasuredRuns | None = None,
    pair: Mapping[str, str] | None = None,
    serve: bool = True,
    resamples: int = 2000,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The page's data; parameters as of `simulator.report.build_report`."""
    progress("pricing policies")
    logs, said = with_best_fixed(trace, latency, logs, notes or {})
    best = next(int(n.partition("=")[2]) for n, text in said.items() if text == BEST_FIXED)
    own = own_ratios(trace, latency, best)
    sums = ratio_model.carried(trace, latency, own)
    rows = ranked(logs, latency, said, resamples, sums, trace.source)
    fixed = ratio_model.fixed_lengths(trace)
    sliders = ratio_model.sliders(trace, own.ratio, own.verify, list(fixed), best)
    progress("other acceptance rates")
    tilted = ratio_model.tilted(trace, latency, own, sliders["alpha"]["values"], list(fixed))
    progress("batches, contexts and serving")
    served = loads(trace, latency, serve, resamples)
    progress("categories and checks")
    return {
        "about": {**_about(trace, latency, own), **(pair or {}), "best_fixed": best},
        "policies": rows,
        "headline": headline(rows, logs, latency, resamples, list(fixed.values())),
        "categories": _categories(trace, logs, latency, resamples),
        "validation": None
        if measured is None
        else _validation(
            # A rule fitted here is not the one that ran unfitted under the same name.
            [log for log in logs if log.source == trace.source and said.get(log.policy) != FITTED],
            latency,
            measured,
        ),
        "fixed": {"gammas": list(fixed), "sums": [sums(log) for log in fixed.values()]},
        "sliders": sliders,
        "tilt": tilted,
        **served,
    }


def _about(trace: Trace, latency: LatencyTable, own: OwnRatios) -> dict[str, Any]:
    meta = {**trace.meta}
    device = latency.meta.get("device") or meta.get("device")
    return {
        "target": model_name(meta.get("target")),
        "draft": model_name(meta.get("draft")) if "drafts" not in meta else trace.source,
        "drafter": trace.source if "drafts" in meta else "the draft model",
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
        "c": own.ratio, "v": own.verify,
        "scaled": scaling_words(latency),
    }  # fmt: skip


def model_name(value: Any) -> str:
    """Return a model's name, architecture and size, as far as its provenance tells them."""
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
    kept = ("category", "policy", "source", "speedup", "speedup_lo", "speedup_hi")
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
