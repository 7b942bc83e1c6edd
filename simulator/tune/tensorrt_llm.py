"""TensorRT-LLM's ``draft_len_schedule`` and acceptance window, and Dynamo's mocker rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.aggregate.positions import of_survival, of_trace
from simulator.pricing import extras_of
from simulator.serving.cost import TableCost
from simulator.tune.costs import DEFAULT_LENGTHS, longest_draft
from simulator.tune.formats import BY_BATCH
from simulator.tune.settings import Tuned
from simulator.tune.vllm import tune_vllm
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.latency.table import LatencyTable

WINDOW = (8, 1000)
"""Fewest and most completed requests of an acceptance window."""
SURE = 4.0
"""Standard errors between the expected acceptance and the threshold of a window."""


def tune_tensorrt_llm(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    **options: Any,
) -> Tuned:
    """Search ``draft_len_schedule``, and set the gate by acceptance.

    The search is that of `tune_vllm`, repeated with shorter drafts until the smallest batch size
    has the longest, which TensorRT-LLM requires.  Nothing is drafted beyond the schedule's last
    batch size.  ``acceptance_length_threshold`` is the number of accepted tokens per iteration
    below which drafts lose at every batch size searched.  ``acceptance_window`` is the number of
    requests needed to distinguish the recorded acceptance of every scheduled K from it; if one is
    too close, there is no gate.  Options and errors are those of `tune_vllm`.
    """
    kept, shortened = sorted(set(lengths)), False
    while True:
        found = tune_vllm(
            trace, latency, batches, lengths=kept, engine="tensorrt-llm", **options
        )  # fmt: skip
        if found.document is None:
            return replace(found, engine="tensorrt-llm")
        table = found.document[BY_BATCH]
        first, longest = table[0][-1], max(row[-1] for row in table)
        if first == longest:
            break
        shorter = [k for k in kept if k <= max(first, 1)]
        kept, shortened = (shorter if shorter != kept else [0]), True
    more = []
    if shortened:
        more.append(
            f"drafts of more than {counted(max(kept), 'token')} are left out: TensorRT-LLM wants "
            "the longest draft at the smallest batch size"
        )
    while table[-1][-1] == 0:
        table = table[:-1]
    schedule = {str(high): k for _, high, k in table}
    document: dict[str, Any] = {"max_draft_len": first, "draft_len_schedule": schedule}
    drafted = {
        row["batch"]: k for row in found.rows for low, high, k in table
        if low <= row["batch"] <= high and k
    }  # fmt: skip
    document |= _gate(trace, latency, drafted)
    more.append(
        "K = 0 is priced with a draft pass, as in vLLM; TensorRT-LLM may skip it"
        if any(row[-1] == 0 for row in table) else
        f"beyond batch {table[-1][1]} nothing is drafted"
    )  # fmt: skip
    warnings = [*found.warnings, *more]
    return replace(found, engine="tensorrt-llm", document=document, warnings=warnings)


def _gate(trace: Trace, latency: LatencyTable, drafted: Mapping[int, int]) -> Mapping[str, Any]:
    """Return the window and the threshold; empty if acceptance is not clearly above it at every K.

    ``drafted`` is K by batch size, where it is above 0.  One threshold holds for all loads, so a
    short draft must exceed it as well: what one K accepts at most is K.
    """
    extras = extras_of(sampling=trace.sampling)
    cost, plain = (TableCost(latency, extras, speculates) for speculates in (True, False))
    held = float(np.mean([r.prompt_length + r.tokens / 2 for r in trace.requests]))
    needed = min(cost(b, k, b * (k + 1), held) / plain(b, 0, b, held) for b, k in drafted.items())
    threshold, windows = max(needed - 1, 0.0), [WINDOW[0]]
    for k in set(drafted.values()):
        log = of_trace("", trace, k).log
        assert log is not None
        rounds = log.per_request(np.ones(len(log)))
        means = log.per_request(log.rounds["accepted"])[rounds > 0] / rounds[rounds > 0]
        expected = float(means.mean())
        if expected <= threshold or not threshold:
            return {}
        spread = float(means.std(ddof=1)) if len(means) > 1 else expected
        windows.append(math.ceil((SURE * spread / (expected - threshold)) ** 2))
    if max(windows) > WINDOW[1]:
        return {}
    return {
        "acceptance_window": max(windows), "acceptance_length_threshold": round(threshold, 3),
    }  # fmt: skip


MOST_DYNAMO = 5
"""Longest draft that Dynamo's mocker knows."""


def tune_dynamo(
    trace: Trace,
    latency: LatencyTable,
    batches: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    **options: Any,
) -> Tuned:
    """Return the acceptance that Dynamo's mocker is to draw, at the best draft length.

    ``aic_nextn`` is one K for all loads, chosen as `tune_vllm` says of ``one_length``.
    ``aic_nextn_accept_rates`` are the chances of each token, given that those before it were
    accepted.  Options and errors are those of `tune_vllm`.
    """
    most = min(MOST_DYNAMO, longest_draft(trace) or MOST_DYNAMO)
    found = tune_vllm(
        trace, latency, batches, lengths=[k for k in lengths if k <= most], engine="dynamo",
        one_length=True, **options,
    )  # fmt: skip
    if found.document is None:
        return replace(found, engine="dynamo")
    k = found.document["num_speculative_tokens"]
    # Acceptance that was given is known better than by the rounds drawn from it.
    given = trace.meta["survival"][:k] if trace.meta.get("kind") == "acceptance" else None
    found_by = of_trace("", trace, k) if given is None else of_survival("", given)
    rates = np.nan_to_num(found_by.rates)
    document = {
        "aic_nextn": k, "aic_nextn_accept_rates": ",".join(f"{rate:.4f}" for rate in rates),
    }  # fmt: skip
    return replace(found, engine="dynamo", document=document)
