"""Report page about a recording: everything that it shows, and its HTML.

`report_data` computes plain values.  `render` returns the page: one HTML file with its style,
script and data inside, which draws and re-prices these values.

The page's sliders carry priced rounds over to other cost ratios: drafting costs in proportion to c
and verifying drafts to v, in target passes; what else rounds take stays
(`simulator.ratios.carried_sums`).  At the pair's own ratios the page's curves are its tables.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from policies.arrays import Floats
from policies.lengths.basic import Fixed
from policies.registry import PLAIN, is_bound
from simulator import summary
from simulator.bootstrap import gain, resamples, standard_errors
from simulator.hardware.scaling import bounds_of, bounds_words, scaling_words
from simulator.palette import COLOURS
from simulator.pricing import always_drafted, autoregressive, price
from simulator.ratios import OwnRatios, carried_sums, own_ratios
from simulator.recording import Recording
from simulator.serving import sweep
from simulator.tune import costs
from simulator.tune.served import REPLICATIONS, check_seed, closed_load, rivals
from simulator.tune.vllm import tune_vllm
from simulator.unmeasured import said_free
from simulator.validation import compare, verdict
from simulator.whatif.ranking import (
    BEST_FIXED,
    FITTED,
    Ranking,
    is_fixed,
    lossless,
    winner,
    with_best_fixed,
)
from simulator.whatif.tilt import Tilter, acceptance
from simulator.whatif.tilt_fidelity import tilt_errors
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.digits import counted, three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import passes_always
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.methods import said_of
from traces.store.engine_runs import MeasuredRuns

Sums = list[float]

APART = 1.25
"""Least ratio of two contexts that are both shown."""
MOST_GAMMA = 12
"""Longest fixed draft length that the page has curves of, unless a longer one is the best."""
ALPHAS = (*(round(0.05 * i, 2) for i in range(20)), 0.98)
"""Stops of the acceptance slider; the recording is tilted to all but 0."""
SHOWN = 5e-4
"""Relative differences below which a page of tenths of a percent shows none."""


def report_data(
    trace: Trace,
    latency: LatencyTable,
    logs: Sequence[RoundLog],
    *,
    notes: Mapping[str, str] | None = None,
    measured: MeasuredRuns | None = None,
    pair: Mapping[str, str] | None = None,
    said: Sequence[str] = (),
    serve: bool = True,
    resamples: int = 2000,
    progress: Say = silent,
) -> dict[str, Any]:
    """Return the data of the page about a recording, which `render` shows.

    ``logs`` are replays of `trace`, one per policy and source, with ``notes`` on policies; the best
    fixed draft length is added.  ``measured`` runs are compared with predictions.  ``pair`` names
    ``target`` and ``draft``, if the trace does not in full.  ``said`` are lines on whose acceptance
    and costs these are.  With `serve`, batches are served in simulated time where the table has
    measured some.  ``progress`` is told what comes next.

    Raises DraftsimError if there is no log, or as in the computations for the page.
    """
    if not logs:
        raise DraftsimError("no round log was given: name at least one policy")
    progress("pricing policies")
    told = notes or {}
    if not any(BEST_FIXED in parts(text) for text in told.values()):
        found = with_best_fixed(
            Ranking(list(logs), told), latency, trace.max_gamma,
            lambda some: list(replay_many(trace, some)), True,
        )  # fmt: skip
        logs, told = found.logs, found.notes
    best = next(int(n.partition("=")[2]) for n, text in told.items() if BEST_FIXED in parts(text))
    own = own_ratios(trace, latency, best)
    sums = carried(trace, latency, own)
    rows = ranked(logs, latency, told, resamples, sums, trace.source)
    fixed = logs_by_length(trace, best)
    stops = sliders(trace, own.ratio, own.verify, list(fixed), best)
    progress("other acceptance rates")
    moved = tilted(trace, latency, own, stops["alpha"]["values"], list(fixed))
    progress("batches, contexts and serving")
    served = loads(trace, latency, serve, resamples)
    progress("categories and checks")
    return {
        "about": {
            **_about(trace, latency, own), **(pair or {}), "best_fixed": best, "said": list(said),
            "free": said_free({what for row in rows for what in row["unpriced"]} - {"judging"}),
        },
        "policies": rows,
        "headline": headline(rows, logs, latency, resamples, list(fixed.values())),
        "categories": _categories(trace, logs, latency, resamples),
        "validation": measured and _validation(
            # A rule fitted here is not the one that ran unfitted under the same name.
            [log for log in logs if log.source == trace.source and told.get(log.policy) != FITTED],
            latency, measured,
        ),
        "fixed": {"gammas": list(fixed), "sums": [sums(log) for log in fixed.values()]},
        "sliders": stops,
        "tilt": None if isinstance(moved, str) else moved,
        "untilted": moved if isinstance(moved, str) else None,
        **served,
    }  # fmt: skip


def render(data: dict[str, Any], title: str) -> str:
    """Return the page of `report_data` as HTML that needs no other file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    environment.filters.update(
        speedup=lambda value: "–" if value is None else three_digits(value), percent=_percent,
        signed=lambda value: "–" if value is None else f"{100 * value:+.1f}%",
        figure=lambda value: f"{value:.3g}", named=_named,
    )  # fmt: skip
    return environment.from_string(_asset("page.html")).render(
        title=title,
        data=data,
        style=Markup(_asset("page.css")),
        script=Markup(
            _asset("charts.js")
            + "".join(_asset(n).replace('"use strict";\n', "", 1) for n in ("maps.js", "page.js"))
        ),
        # "</script>" inside a name must not end the element.
        json=Markup(
            json.dumps({**data, "colours": COLOURS}, allow_nan=False, separators=(",", ":"))
            .replace("<", "\\u003c")
        ),
    )  # fmt: skip


def slider(values: Sequence[float], start: float) -> dict[str, Any]:
    """Return stops of a slider, `start` among them; ``start`` in the result is its index."""
    others = {_significant(v) for v in values} - {_significant(start)}
    stops = sorted(others | {start})
    return {"values": stops, "start": stops.index(start)}


def sliders(trace: Trace, c: float, v: float, gammas: Sequence[int], gamma: int) -> dict[str, Any]:
    """Return the four sliders of the page; every stop is a number that Python and page share."""
    alpha = acceptance(trace)
    return {
        "c": slider(np.geomspace(0.005, 1, 60).tolist(), c),
        "v": slider([1 + 0.05 * i for i in range(41)], v),
        "alpha": slider(ALPHAS, _significant(alpha)),
        "gamma": {"values": list(gammas), "start": list(gammas).index(gamma)},
    }


def logs_by_length(trace: Trace, best: int = 1) -> dict[int, RoundLog]:
    """Return the trace at fixed lengths 1 to 12, as far as the recording goes, and at `best`."""
    most = min(MOST_GAMMA, trace.max_gamma or MOST_GAMMA)
    return _at_lengths(trace, sorted({*range(1, most + 1), best}))


def _at_lengths(trace: Trace, gammas: Sequence[int]) -> dict[int, RoundLog]:
    policies = {f"fixed:gamma={g}": Fixed(g) for g in gammas}
    return dict(zip(gammas, replay_many(trace, policies), strict=True))


def carried(trace: Trace, latency: LatencyTable, own: OwnRatios) -> Callable[[RoundLog], Sums]:
    """Return the function that makes the sums of a log of `trace`, as the page holds them."""
    plain = price(autoregressive(_at_lengths(trace, (1,))[1]), latency)

    def sums(log: RoundLog) -> Sums:
        return list(carried_sums(price(log, latency), plain, own, log.source == trace.source))

    return sums


def tilted(
    trace: Trace, latency: LatencyTable, own: OwnRatios, stops: Sequence[float],
    gammas: Sequence[int],
) -> dict[str, Any] | str:  # fmt: skip
    """Return per alpha stop, tokens and rounds of every gamma on the tilted recording.

    If it cannot be tilted, return the reason.  Each entry of ``rounds`` holds the fields of
    `simulator.ratios.RatioSums`; each of ``error`` the relative error to expect of a speedup and
    whether a shift as large was measured, or None if no prompts differ enough to measure one.
    """
    recorded = _significant(acceptance(trace))
    wanted = [a for a in stops if 0 < a < 1]
    found, sums = [], carried(trace, latency, own)  # plain decoding drafts nothing: alike in all
    try:
        tilter = Tilter(trace)
        for alpha, shift in zip(wanted, tilter.shifts(wanted), strict=True):
            # At its own rate the recording speaks for itself.
            other = trace if alpha == recorded else tilter.shifted(float(shift))
            found.append([sums(log) for log in _at_lengths(other, gammas).values()])
        error = tilt_errors(trace).lengths  # fixed lengths read no signal
    except DraftsimError as failed:
        return str(failed).partition(":")[0]  # without the remedy, which is a command's
    known = error.comparisons > 0
    off = [
        [error.at(a, tilter.alpha), error.tried(a, tilter.alpha)] if known else None for a in wanted
    ]
    return {"alphas": wanted, "rounds": found, "error": off}


def _significant(value: float) -> float:
    """Return the stop of a slider at `value`; only the pair's own has all of its digits."""
    return float(f"{value:.3g}")


def loads(trace: Trace, latency: LatencyTable, serve: bool, draws: int) -> dict[str, Any]:
    """Return ``batches``, ``contexts`` and ``serving``; None where nothing was measured."""
    sizes = latency.usual_batches
    if len(sizes) < 2:
        return {"batches": None, "contexts": None, "serving": None}
    plain, logs = costs.fixed_logs(trace, [k for k in costs.DEFAULT_LENGTHS if k])
    weights = resamples(len(trace.requests), draws, 0)
    priced = [plain, *logs.values()]
    return {
        "batches": {
            "batches": list(sizes), "lengths": list(logs),
            **_bounded(speedups(priced, latency, sizes, [None], weights)[:, :, 0]),
        },
        "contexts": by_context(priced, list(logs), latency, sizes, weights),
        "serving": serving(trace, latency, sizes) if serve else None,
    }  # fmt: skip


def speedups(
    logs: Sequence[RoundLog], latency: LatencyTable, sizes: Sequence[int],
    contexts: Sequence[int | None], weights: Floats,
) -> Floats:  # fmt: skip
    """Return the speedup of each fixed length, and its bounds: (3, batches, contexts, lengths).

    `logs` are plain decoding and the fixed lengths.  A context of None is the recorded one.
    The bounds of one prompt are NaN.
    `weights` are those of `simulator.bootstrap.resamples`.
    """
    found = []
    for batch, context in product(sizes, contexts):
        grid = costs.price_grid(logs, latency, batch, context)
        plain, *options = np.stack([grid.tokens, grid.seconds], axis=1)
        found.append(np.array([gain(own, plain, weights) for own in options]).T)
    return np.stack(found, axis=1).reshape(3, len(sizes), len(contexts), -1)


def by_context(
    logs: Sequence[RoundLog], lengths: Sequence[int], latency: LatencyTable,
    sizes: Sequence[int], weights: Floats,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the best fixed length at every batch and context and its speedup, (batches, contexts).

    None where passes were measured at one context alone.
    """
    measured = costs.default_contexts(latency, max(lengths))
    if len(measured) < 2:
        return None
    # An engine's steps have as many contexts as requests, most of them nearly alike.
    apart = measured[:1]
    for context in measured[1:]:
        if context >= APART * apart[-1]:
            apart.append(context)
    places = np.linspace(0, len(apart) - 1, min(len(apart), 8))  # no more columns fit
    contexts = [apart[round(i)] for i in places]
    found = speedups(logs, latency, sizes, contexts, weights)
    best = found[0].argmax(axis=-1)
    return {
        "batches": list(sizes), "contexts": contexts, "length": np.array(lengths)[best].tolist(),
        **_bounded(np.take_along_axis(found, best[None, :, :, None], axis=-1)[..., 0]),
    }  # fmt: skip


def _bounded(found: Floats) -> dict[str, Any]:
    known = found.astype(object)
    known[np.isnan(found)] = None
    return dict(zip(("speedup", "low", "high"), known.tolist(), strict=True))


def serving(trace: Trace, latency: LatencyTable, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the throughput and latency of the tuned table and its rivals in full engines.

    The loads are those of ``draftsim tune --check``.  ``deploy`` holds, by batch served, what
    the search says to run there, ``on``, or ``off`` where no speculation is faster, and the draft
    length of the table.
    """
    tuned = tune_vllm(trace, latency, sizes, draws=400)
    at = {row["batch"]: row for row in tuned.rows}
    some = sorted({sizes[round(i)] for i in np.linspace(0, len(sizes) - 1, 6)})
    scenarios = [
        replace(closed_load(trace, b, None, check_seed(0), latency), replications=REPLICATIONS)
        for b in some
    ]
    others = rivals(costs.longest_draft(trace))
    policies = others if tuned.document is None else {**others, "tuned": tuned.policy}
    rows = sweep(trace, latency, policies, scenarios)
    kept = [
        {
            "policy": r["policy"], "batch": r["batch"], "throughput_tok_s": r["throughput_tok_s"],
            "tpot_s": r["tpot_s"]["mean"],
        } for r in rows
    ]  # fmt: skip
    return {
        "rows": kept,
        "policies": list(policies),
        "deploy": [
            {"batch": b, **{key: at[b][key] for key in ("deploy", "setting")}} for b in some
        ],
        "table": (tuned.document or {}).get("num_speculative_tokens_per_batch_size"),
    }


def ranked(
    logs: Sequence[RoundLog], latency: LatencyTable, notes: Mapping[str, str], draws: int,
    sums: Callable[[RoundLog], list[float]], own: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows by speedup, the fastest first, with the share of prompts that each slows down.

    ``own`` is the source that the recording drafts with, which `notes` are about.  Keys in addition
    to those of a summary: ``name`` tells the row from all others; ``sums`` is what the page's
    sliders compute with; ``at_own`` is said of a policy at the pair's own cost ratios, ``always``
    at any, ``note`` both; ``fitted`` policies were fitted to the pair's own costs, and would decide
    otherwise at others; ``own`` rows are drafted by that source.
    """
    plain, *runs = summary.price_all(logs, latency)
    rows = summary.to_rows(summary.summarize_runs([plain, *runs], resamples=draws))[1:]
    names = [row["policy"] for row in rows]
    for row, run, same in zip(
        rows, runs, summary.degenerate([run.log for run in runs]), strict=True
    ):
        slowed = summary.speedups_over(plain, run)
        again = names.count(row["policy"]) > 1
        row["name"] = f"{row['policy']} ({row['source']})" if again else row["policy"]
        row["at_own"] = notes.get(row["policy"]) if row["source"] == own else None
        what = said_of(row["policy"], lossless(row["verify"]))
        row["always"] = "; ".join(filter(None, (what, same))) or None
        row["note"] = "; ".join(filter(None, (row["at_own"], row["always"]))) or None
        row["fitted"] = says(row, FITTED)
        row["own"] = row["source"] == own
        row["oracle"] = is_bound(row["policy"])
        row["below"] = float(np.mean(slowed[np.isfinite(slowed)] < 1))
        row["outside"] = run.outside  # the page's speedups leave prefill out
        row["unpriced"] = run.unpriced(latency)
        row["sums"] = sums(run.log)
    return sorted(rows, key=lambda row: -(row["speedup"] or 0.0))


def parts(note: str | None) -> list[str]:
    """Return what a note says, one by one."""
    return (note or "").split("; ")


def says(row: Mapping[str, Any], what: str) -> bool:
    """Return True if the note of a row at the pair's own ratios says `what`."""
    return what in parts(row["at_own"])


def headline(
    rows: Sequence[Mapping[str, Any]], logs: Sequence[RoundLog], latency: LatencyTable, draws: int,
    constant: Sequence[RoundLog],
) -> dict[str, Any]:  # fmt: skip
    """Return the recommended policy (`winner`), and how it compares with the best fixed length.

    Keys: ``policy``, the index of its row in `rows`; ``fixed``, that of the best fixed
    length; ``gain`` with ``gain_lo`` and ``gain_hi``, the ratio of the first's tokens per second
    to the second's and its paired interval over prompts (None with one prompt);
    ``told_apart``, whether that interval leaves out 1; and ``same``, whether all of it would be
    shown as no difference, as where a fitted rule comes out as that very length.  Where the
    best fixed length is itself the fastest, it is compared with the fastest policy of the same
    drafter that adapts its length, ``next``; otherwise None.  A policy whose rounds are those of
    one of the `constant` lengths or of a fixed length in `logs`, or that never drafts, does not
    adapt.  ``faster`` says whether
    any policy of that drafter is faster than no speculation.
    """
    fixed = next(i for i, row in enumerate(rows) if says(row, BEST_FIXED))
    found = winner(rows)
    top = fixed if found is None else found
    by_row = {(log.policy, log.source, log.verify): log for log in logs}
    own = [by_row[row["policy"], row["source"], row["verify"]] for row in rows]
    still = {always_drafted(log, passes_always(latency)).rounds.tobytes() for log in constant}
    still |= {log.rounds.tobytes() for log in logs if is_fixed(log)}
    rest = [
        i for i, (row, log) in enumerate(zip(rows, own, strict=True))
        if row["source"] == rows[fixed]["source"] and not row["oracle"]
        and log.rounds.tobytes() not in still and log.rounds["drafted"].any()
    ]  # fmt: skip
    second = rest[0] if top == fixed and rest else None
    drafted = [row for row in rows if row["own"]]
    first = winner(drafted)
    other = fixed if second is None else second
    _, run, rival = summary.price_all([own[top], own[other]], latency)
    [(value, low, high)] = summary.gains_over(rival, [run], resamples=draws)
    known = bool(np.isfinite([low, high]).all())
    return {
        "policy": top, "fixed": fixed, "next": second,
        "faster": first is not None and drafted[first]["speedup"] > 1,
        "gain": value, "gain_lo": low if known else None,
        "gain_hi": high if known else None, "told_apart": known and not low <= 1 <= high,
        "same": max(abs(n - 1) for n in (value, low, high) if np.isfinite(n)) < SHOWN,
    }  # fmt: skip


def against_fixed(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of `report_data` with the recommended one's gain over the best fixed length.

    Keys in addition to those of `ranked`: ``against``, ``gain``, ``gain_lo`` and ``gain_hi``, as in
    `simulator.whatif.ranking.ranked_rows`; None where the best fixed length is recommended.
    """
    head, rows = data["headline"], data["policies"]
    gains = dict.fromkeys(("gain", "gain_lo", "gain_hi"))
    if head["policy"] != head["fixed"]:
        gains = {name: head[name] for name in gains}
    fixed = rows[head["fixed"]]["policy"]
    return [{**row, **gains, "against": fixed} for row in rows]


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
        "reach": standard_errors(len(trace.requests)),
        "tokens": trace.tokens,
        "sampling": trace.sampling.label,
        "alpha": acceptance(trace),
        "c": own.ratio, "v": own.verify,
        "scaled": scaling_words(latency), "costs": _costs(latency),
    }  # fmt: skip


def _costs(latency: LatencyTable) -> str:
    """Return the kind of latencies, by how they are known."""
    if latency.is_constant:
        return "constant latencies"
    if "composed" in latency.meta:
        return "composed latencies"
    return "scaled latencies" if latency.meta.get("scaled") else "measured latencies"


def model_name(value: Any) -> str:
    """Return a model's name, architecture and size, as far as its provenance tells them."""
    if not isinstance(value, Mapping):
        return str(value or "-")
    name = next((value[k] for k in ("name", "id", "model", "path") if value.get(k)), "?")
    size = value.get("parameters")
    parts = [str(value["architecture"])] if value.get("architecture") else []
    if value.get("layers"):
        parts.append(counted(value["layers"], "layer"))
    if size:
        weights = f"{size / 1e9:.2f} B" if size >= 1e9 else f"{size / 1e6:.1f} M"
        parts.append(f"{weights} parameters")
    # A local folder says nothing to the reader beyond its last part.
    short = str(name).rstrip("/").rsplit("/", 1)[-1]
    return f"{short} ({', '.join(parts)})" if parts else short


def _categories(
    trace: Trace, logs: Sequence[RoundLog], latency: LatencyTable, draws: int
) -> dict[str, Any] | None:
    """Return speedups by category; None where there is one category alone."""
    sizes = Counter(request.category for request in trace.requests)
    if len(sizes) < 2:
        return None
    rows = summary.to_rows(summary.summarize(logs, latency, resamples=draws, by_category=True))
    kept = ("category", "policy", "source", "speedup", "speedup_lo", "speedup_hi")
    return {
        "names": list(sizes),
        "prompts": list(sizes.values()),
        "rows": [{k: r[k] for k in kept} for r in rows if r["policy"] != PLAIN],
    }


def _validation(
    logs: Sequence[RoundLog], latency: LatencyTable, measured: MeasuredRuns
) -> dict[str, Any] | None:
    """Return predicted against measured seconds of the policies that were replayed here too."""
    own = {log.policy: log for log in (autoregressive(logs[0]), *logs)}
    times = measured.times[measured.times["policy"].isin(list(own))]
    times = times[times["verify"] == times["policy"].map({n: log.verify for n, log in own.items()})]
    if times.empty:
        return None
    rows = compare([price(log, latency) for log in own.values()], times)
    left_out = sorted(set(measured.times["policy"]) - set(own))
    return {**verdict(rows)._asdict(), "rows": summary.to_rows(rows), "left_out": left_out}


def names_of(recording: Recording) -> Mapping[str, str]:
    """Return the names that the page gives to a recording's target and drafter.

    Those in the trace may say only the model's role.
    """
    found = {role: model_name(about) for role, about in recording.models.items() if about}
    if recording.source is not None:
        found["draft"] = recording.trace.source
    return found


def carried_spans(logs: Sequence[RoundLog], latency: LatencyTable) -> dict[str, str]:
    """Return by policy the speedup at the latencies' bounds; empty for measured ones."""
    bounds = bounds_of(latency)
    if bounds is None:
        return {}

    spans = {log.policy: sorted(summary.speedup(log, table) for table in bounds) for log in logs}
    return {
        policy: f"{low:.2f} to {high:.2f} {bounds_words(latency)}"
        for policy, (low, high) in spans.items()
    }


def _asset(name: str) -> str:
    return files("simulator.report").joinpath(name).read_text(encoding="utf-8")


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def _named(policy: str) -> Markup:
    """Return a policy's name that may break after its marks, and not within its words."""
    return Markup(re.sub(r"([:,=_])", r"\1<wbr>", str(escape(policy))))
