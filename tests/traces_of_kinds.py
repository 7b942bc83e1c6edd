"""Small recordings of every kind, drawn at random: what a replay may meet."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from traces.acceptance.synthetic import EOS, Bursty, synthetic_trace
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace

Kind = Literal["tails", "bare", "unobserved", "by start", "by start, ending", "by start, bare"]
KINDS: tuple[Kind, ...] = (
    "tails", "bare", "unobserved", "by start", "by start, ending", "by start, bare",
)  # fmt: skip


def random_trace(kind: Kind, seed: int, max_gamma: int, first: int = 1) -> Trace:
    """A recording of a few requests of uneven lengths, some of which end with EOS."""
    rng = np.random.default_rng(seed)
    if kind.startswith("by start"):
        return _by_start(rng, max_gamma, first, kind)
    made = synthetic_trace(
        Bursty(0.9, 0.3), requests=4, tokens=int(rng.integers(1, 40)), eos_fraction=0.5,
        seed=seed, concentration=4.0 if kind == "tails" else None, max_gamma=max_gamma,
        prompt_length=int(rng.integers(0, 90)),
    )  # fmt: skip
    columns: dict[str, Any] = dict(made.columns)
    if kind == "tails":
        # Drafts that end with an EOS of the drafter's own, on the path and after a mismatch.
        wrong = (columns["match"] != MATCH) & (rng.random(len(made)) < 0.1)
        columns["draft_token"] = np.where(wrong, EOS, columns["draft_token"])
    if kind == "unobserved":
        hidden = rng.random(len(made)) < 0.03
        columns["match"] = np.where(hidden, UNKNOWN, columns["match"]).astype(np.int8)
    return Trace(columns, made.requests, made.max_gamma, {**made.meta, "first": first})


def _by_start(rng: np.random.Generator, max_gamma: int, first: int, kind: Kind) -> Trace:
    requests: list[Request] = []
    rows: list[dict[str, Any]] = []
    for r in range(4):
        ended: Literal["eos", "length"] = "eos" if rng.random() < 0.5 else "length"
        tokens = int(rng.integers(1, 30))
        limit = tokens + (int(rng.integers(0, 9)) if ended == "eos" else 0)
        requests.append(Request(str(r), "made-up", int(rng.integers(0, 70)), tokens, limit, ended))
        for t in range(tokens):
            # Drafts that end are all verified, those of heads all as long as there are heads.
            length = max_gamma if "ending" not in kind else int(rng.integers(1, max_gamma + 1))
            length = 1 if "bare" in kind else length
            accepted = min(int(rng.geometric(0.4)) - 1, max_gamma if "bare" in kind else length)
            nothing = "ending" in kind and "bare" not in kind and rng.random() < 0.3
            if nothing:
                length, accepted = 1, 0
            for k in range(length):
                rows.append({
                    "request": r, "position": t, "offset": k, "accepted": 0 if k else accepted,
                    "match": MATCH if k < accepted else MISMATCH,
                    "draft_token": -1 if nothing else EOS if rng.random() < 0.05 else 7,
                    "draft_logprob": np.log(rng.uniform(0.05, 1)),
                    "draft_entropy": rng.uniform(0, 3), "draft_top1": rng.uniform(2, 4),
                    "draft_top2": rng.uniform(0, 2), "draft_logsumexp": 4.2,
                    "draft_top10_logprob": np.log(rng.uniform(0.1, 1)),
                })  # fmt: skip
    names = ("request", "position", "offset", "accepted", "match") if "bare" in kind else rows[0]
    columns = {n: np.array([row[n] for row in rows]) for n in names}
    for name, values in columns.items():
        columns[name] = values.astype(np.float32 if values.dtype.kind == "f" else np.int32)
    meta = {
        "first": first, "eos_token_ids": [EOS], "vocab_size": 50, "drafts": "medusa",
        "drafts_end": "ending" in kind,
        "finds_nothing": "ending" in kind and "bare" not in kind,
        "takes_verified": bool(rng.random() < 0.5),
    }  # fmt: skip
    return Trace(columns, requests, max_gamma, meta)
