"""Costs of a search: seconds of every fixed draft length by batch, context and prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.arrays import Floats
from policies.batch.base import SingleStream
from policies.batch.tables import BatchTable
from policies.lengths.basic import Fixed
from simulator.pricing import Priced, autoregressive, price
from simulator.targets import Targets
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

DEFAULT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
RESTING = BatchTable([[1, 1, 0]])
"""K = 0 at every batch: nothing is drafted, and the draft model reads along."""


@dataclass(frozen=True, eq=False)
class PricedOptions:
    """Options priced at one batch and context.

    ``tokens`` (those that count) and ``seconds`` per option and prompt, shape (options,
    prompts); ``within``, the share of prompts that meet the targets, and ``outside``, the
    share of passes read outside the measured cells, per option.
    """

    batch: int
    context: int | None
    tokens: Floats
    seconds: Floats
    within: Floats
    outside: Floats


def rising(name: str, values: Sequence[int]) -> list[int]:
    """Return the values in order, each once.  Raises DraftsimError if one is below 1."""
    out = sorted(set(values))
    if out[0] < 1:
        raise DraftsimError(f"{name} holds {out[0]}, expected whole numbers >= 1")
    return out


def longest_seen(trace: Trace) -> int | None:
    """Return the longest draft whose last verdict an imputed log holds; None if nothing is imputed.

    Longer drafts were imputed from shorter ones, which is not enough to choose a setting.
    """
    imputed = trace.meta.get("imputed")
    return None if imputed is None else imputed.get("longest_seen")


def longest_draft(trace: Trace) -> int | None:
    """Return the longest draft that the recording can answer for; None if any."""
    bounds = [b for b in (trace.max_gamma, longest_seen(trace)) if b is not None]
    return min(bounds, default=None)


def fixed_logs(
    trace: Trace, lengths: Sequence[int] = DEFAULT_LENGTHS
) -> tuple[RoundLog, dict[int, RoundLog]]:
    """Return no speculation, and the trace replayed at each fixed draft length that it holds.

    Length 0 is an engine with a draft model that reads every token (`RESTING`), unlike no
    speculation, which has no draft model.

    Raises
    ------
    DraftsimError
        If a length is negative or none remains, or the outputs are too short for a round.
    """
    most = longest_draft(trace)
    kept = sorted({k for k in lengths if most is None or k <= most})
    if not kept or kept[0] < 0:
        raise DraftsimError(f"draft lengths are {list(lengths)}, expected 0 to {most}")
    policies = {k: Fixed(k) if k else SingleStream(RESTING) for k in kept}
    named = [(f"K={k}", policy) for k, policy in policies.items()]
    logs = dict(zip(policies, replay_many(trace, named), strict=True))
    first = logs[kept[0]]
    if not len(first):
        raise DraftsimError("no output is longer than its first token: nothing to tune on")
    return autoregressive(first), logs


def default_contexts(latency: LatencyTable, longest: int) -> list[int]:
    """Return the contexts that the target's passes were measured at.

    The outermost are moved inwards, so that a round of `longest` drafts stays between them.
    """
    cells = latency.cells
    own = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]
    low, high = int(own["context"].min()), int(own["context"].max())
    inside = (low + 2, max(high - longest - 2, low + 2))
    return sorted({int(np.clip(c, *inside)) for c in own["context"]})


def price_grid(
    logs: Sequence[RoundLog],
    latency: LatencyTable,
    batch: int = 1,
    context: int | None = None,
    slo: Targets | None = None,
) -> PricedOptions:
    """Price every log at one batch; `context` holds every round at that many cached tokens.

    Raises
    ------
    DraftsimError
        As in `simulator.pricing.price`.
    """
    runs = [price(_held_at(log, context), latency, batch=batch) for log in logs]
    seconds = np.stack([run.decode_s for run in runs])
    emitted = np.stack([run.log.per_request(run.log.rounds["emitted"]) for run in runs])
    meets = np.stack([_meets(run, slo) for run in runs])
    # Reading the prompts counts where the time to the first token does.
    prompts_count = slo is not None and slo.ttft_s < float("inf")
    return PricedOptions(
        batch, context, emitted * meets, seconds,
        np.array([m[e > 0].mean() if (e > 0).any() else 1.0
                  for m, e in zip(meets, emitted, strict=True)]),
        np.array([run.outside_with(prompts_count) for run in runs]),
    )  # fmt: skip


def _held_at(log: RoundLog, context: int | None) -> RoundLog:
    """Return the log with every round at `context` tokens in the target's cache."""
    if context is None:
        return log
    rounds = log.rounds.copy()
    # Position 0 would mean that the round processes the prompt.
    rounds["position"] = 1
    requests = [
        replace(r, prompt_length=max(context - 1, 0), prompt_ids=None) for r in log.requests
    ]
    return replace(log, rounds=rounds, requests=requests)


def _meets(run: Priced, slo: Targets | None) -> Floats:
    emitted = run.log.per_request(run.log.rounds["emitted"])
    if slo is None:
        return np.ones(len(emitted))
    first_s = run.prefill_s
    if slo.ttft_s < float("inf"):
        # Requests come one by one: a prompt is not read together with all others of the batch.
        fewest = int(min(run.latency.grid("target", "forward").batches))
        first_s = price(run.log, run.latency, batch=min(fewest, run.batch)).prefill_s
    # Prefill emits the first token, unless a round does; one without a price is no prefill.
    if run.log.first == 0 or not run.latency.has("target", "prefill"):
        first_s = first_s + run.decode_s / np.maximum(run.log.per_request(np.ones(len(run.log))), 1)
    late = first_s > slo.ttft_s
    if slo.tpot_s < float("inf"):
        late |= run.decode_s > slo.tpot_s * emitted
    return np.asarray(~late, dtype=np.float64)
