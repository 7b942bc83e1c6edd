"""The columns of a trace's long table and of its request table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from traces.acceptance.sampling import Sampling

Array = npt.NDArray[Any]

MATCH, MISMATCH, UNKNOWN = 1, 0, -1

MOST_DRAFTED = 4096
"""Most tokens drafted in one round, in any file that is read."""
MOST_TOKENS = 10_000_000
"""Most tokens of one prompt or output, in any file that is read."""

COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("int32", "row of the request table"),
    "position": ("int32", "output position t, 0 = first generated token"),
    "offset": (
        "int16",
        "0 on the path; k for token k of the off-path tail, or of a draft that begins here",
    ),
    "match": ("int8", "1 accepted by lossless verification, 0 rejected, -1 not recorded"),
    "token": ("int32", "the true output token x_t; -1 in tails"),
    "draft_token": ("int32", "token the draft proposes; -1 not recorded"),
    "draft_logprob": ("float32", "log-probability of draft_token as sampled, nats (greedy: T = 1)"),
    "draft_raw_logprob": (
        "float32",
        "log-probability of draft_token at T = 1 without top-p, nats; only if drawn otherwise",
    ),
    "draft_top1": ("float32", "draft's largest raw logit"),
    "draft_top2": ("float32", "draft's second largest raw logit"),
    "draft_logsumexp": ("float32", "log-sum-exp of the draft's raw logits (T = 1)"),
    "draft_top10_logprob": (
        "float32",
        "log-probability of the draft's likeliest token among its ten likeliest (T = 1), nats",
    ),
    "draft_entropy": ("float32", "entropy of the draft's full distribution at T = 1, nats"),
    "draft_path_logprob": (
        "float32",
        "draft's log-probability of x_t as sampled; -inf if top-p cuts it",
    ),
    "target_token": ("int32", "target's argmax after the same prefix"),
    "target_top1": ("float32", "target's largest raw logit"),
    "target_top2": ("float32", "target's second largest raw logit"),
    "target_logsumexp": ("float32", "log-sum-exp of the target's raw logits (T = 1)"),
    "target_entropy": ("float32", "entropy of the target's full distribution at T = 1, nats"),
    "target_draft_logit": ("float32", "target's raw logit of draft_token"),
    "target_draft_rank": ("int32", "rank of draft_token under the target, 0 = argmax"),
    "target_path_logprob": ("float32", "target's log-probability of x_t as sampled"),
    "accepted": (
        "int16",
        "tokens accepted in a round that begins here (acceptance by start); 0 in tails",
    ),
    "overlap": ("float32", "sum over v of min(target, draft) as sampled"),
}
"""Name -> (numpy dtype, meaning) of the long table."""

KEYS = ("request", "position", "offset", "match")
SIGNAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "token_id": ("draft_token",),
    "prob": ("draft_logprob",),
    "entropy": ("draft_entropy",),
    "logit_margin": ("draft_top1", "draft_top2"),
    "prob_margin": ("draft_top1", "draft_top2", "draft_logsumexp"),
    "top_prob": ("draft_top1", "draft_logsumexp"),
    "raw_prob": ("draft_raw_logprob",),
    "top10_prob": ("draft_top10_logprob",),
}
"""Draft signal -> columns it is computed from, unless `signal_columns` says otherwise."""


def signal_columns(signal: str, sampling: Sampling) -> tuple[str, ...]:
    """Return the columns that `signal` is computed from in a recording drawn under `sampling`."""
    same = (signal == "top_prob" and sampling.greedy) or (signal == "raw_prob" and sampling.plain)
    return SIGNAL_COLUMNS["prob" if same else signal]


@dataclass(frozen=True)
class Request:
    """One recorded sequence, without its per-position rows."""

    id: str
    """Id in the prompts' file, or else the place in it."""
    category: str
    """Kind of prompt, by which rows are grouped; empty if none was given."""
    prompt_length: int
    """Prompt tokens."""
    tokens: int
    """Output tokens recorded, EOS included."""
    max_new_tokens: int
    """Output limit; drafts are no longer than what remains of it."""
    ended: Literal["eos", "length"]
    """Why the output ends: the target's end-of-sequence token, or the limit."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the prompt, which lookups search; None if they were not recorded."""
    wall_s: float | None = None
    """Measured seconds of decoding without speculation; None if they were not measured."""
