"""Small recordings drawn at random, of every shape that a replay can meet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Request, Trace

EOS = 0


def random_trace(seed: int, alpha: float, max_gamma: int, signals: bool) -> Trace:
    """A small vocabulary, so that EOS is drafted rightly, wrongly and off the path."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, ...]] = []
    requests = []
    for i in range(3):
        limit = int(rng.integers(1, 25))
        ended = "eos" if rng.random() < 0.5 else "length"
        tokens = int(rng.integers(1, limit + 1)) if ended == "eos" else limit
        path = rng.integers(1, 4, tokens)
        if ended == "eos":
            path[-1] = EOS
        requests.append(Request(str(i), "", 5, tokens, limit, ended))  # type: ignore[arg-type]
        for t, token in enumerate(path):
            match = int(rng.random() < alpha)
            wrong = int((token + rng.integers(1, 4)) % 4)
            rows.append((i, t, 0, match, token if match else wrong))
            if not match:
                rows += [(i, t, k, 0, int(rng.integers(0, 4))) for k in range(1, max_gamma)]
    names = ("request", "position", "offset", "match", "draft_token")
    columns = {name: np.array(c) for name, c in zip(names, zip(*rows, strict=True), strict=True)}
    if signals:
        return Trace(columns, requests, max_gamma, {"eos_token_ids": [EOS]})
    on_path = columns["offset"] == 0
    plain = {name: values[on_path] for name, values in columns.items() if name in names[:4]}
    return Trace(plain, requests)


def trace_by_start(seed: int, alpha: float, offsets: int, verified: bool, ends: bool) -> Trace:
    """Every start has a draft of its own, of `offsets` tokens or up to its EOS.

    ``verified``: the drafter takes in all that was verified; ``ends``: no draft is longer, and at
    some starts there is none.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, ...]] = []
    requests = []
    for i in range(3):
        tokens = int(rng.integers(1, 25))
        eos = bool(rng.random() < 0.5)
        path = rng.integers(1, 4, tokens)
        path[-1] = EOS if eos else path[-1]
        limit = tokens + int(rng.integers(0, 9)) if eos else tokens
        requests.append(Request(str(i), "", 5, tokens, limit, "eos" if eos else "length"))
        for t in range(tokens):
            if ends and rng.random() < 0.3:
                rows.append((i, t, 0, False, 0, -1, -1.0, -3.0, 1.0))
                continue
            right = min(int(rng.geometric(1 - alpha)) - 1, offsets, tokens - t)
            draft = [int(token) for token in path[t : t + right]]
            if len(draft) < offsets and EOS not in draft:
                after = int(path[t + right]) if t + right < tokens else 0
                draft.append((after + int(rng.integers(1, 4))) % 4)
            while len(draft) < offsets and EOS not in draft:
                draft.append(int(rng.integers(0, 4)))
            for k, token in enumerate(draft):
                top, second = -rng.exponential(0.5), -3 - rng.exponential(1.0)
                rows.append((i, t, k, k < right, 0 if k else right, token, top, second,
                             rng.exponential(1.0)))  # fmt: skip
    names = ("request", "position", "offset", "match", "accepted", "draft_token", "draft_top1",
             "draft_top2", "draft_entropy")  # fmt: skip
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    columns["draft_logsumexp"] = np.zeros(len(rows))
    columns["draft_logprob"] = columns["draft_top1"]
    columns["draft_top10_logprob"] = columns["draft_top1"] / 2
    meta = {
        "eos_token_ids": [EOS], "vocab_size": 4, "drafts": "made-up",
        "takes_verified": verified, "drafts_end": ends, "finds_nothing": ends,
    }  # fmt: skip
    return Trace(columns, requests, offsets, meta)


def bursty_trace(seed: int, eos: float, signals: bool) -> Trace:
    """Easy and hard stretches, and signals that tell what will match."""
    return synthetic_trace(
        Bursty(0.95, 0.3), requests=6, tokens=40, eos_fraction=eos, seed=seed,
        concentration=5.0 if signals else None,
    )  # fmt: skip


def beginning(trace: Trace, first: int) -> Trace:
    """`trace`, decoded from output position `first` on."""
    return replace(trace, meta={**trace.meta, "first": first})


seeds = st.integers(0, 10**6)
recordings = st.builds(
    beginning,
    st.one_of(
        st.builds(bursty_trace, seeds, st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
        st.builds(random_trace, seeds, st.floats(0, 1), st.integers(1, 9), st.booleans()),
        st.builds(trace_by_start, seeds, st.floats(0, 0.95), st.integers(1, 9), st.booleans(),
                  st.booleans()),
    ),
    st.integers(0, 3),
)  # fmt: skip
"""Any of these: with and without signals, with EOS and without, from the first token or later."""
