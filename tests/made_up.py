"""A small pair of made-up language models: its recording, and a decoder that really runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from policies.core import Load
from policies.rules.base import VerifyRule
from traces.acceptance.trace import Request, Trace

V, GAMMA, LENGTH = 10, 6, 24
EOS = 0


@cache
def observe(context: tuple[int, ...]) -> dict[str, Any]:
    """Columns of the draft's proposal after `context`, from two made-up language models."""
    rng = np.random.default_rng([11, *context])
    target = rng.normal(0, rng.uniform(0.3, 3), V)
    draft = target + rng.normal(0, rng.uniform(0.1, 2), V)
    proposal = int(draft.argmax())
    sides: dict[str, Any] = {}
    for side, logits in (("draft", draft), ("target", target)):
        best = np.sort(logits)[::-1]
        lse = np.log(np.exp(logits).sum())
        sides |= {
            f"{side}_top1": best[0], f"{side}_top2": best[1], f"{side}_logsumexp": lse,
            f"{side}_entropy": lse - np.exp(logits - lse) @ logits,
        }  # fmt: skip
    values = sides | {
        "draft_logprob": draft[proposal] - sides["draft_logsumexp"],
        "draft_top10_logprob": -np.log(np.exp(np.sort(draft)[::-1][:10] - draft.max()).sum()),
        "target_draft_logit": target[proposal],
    }
    return {name: float(np.float32(value)) for name, value in values.items()} | {
        "draft_token": proposal,
        "target_token": int(target.argmax()),
        "match": int(proposal == target.argmax()),
        "target_draft_rank": int((target > target[proposal]).sum()),
    }


def record(prompts: Sequence[int], eos: Sequence[int] = ()) -> Trace:
    """Greedy recording of the made-up pair, with tails; one prompt token per request."""
    rows: list[dict[str, Any]] = []
    requests = []
    for r, prompt in enumerate(prompts):
        output: list[int] = []
        while len(output) < LENGTH and not (output and output[-1] in eos):
            context, t = (prompt, *output), len(output)
            seen = observe(context)
            output.append(seen["target_token"])
            rows.append({"request": r, "position": t, "offset": 0, "token": output[-1], **seen})
            for offset in range(1, 1 if seen["match"] else min(GAMMA, LENGTH - 1 - t)):
                if seen["draft_token"] in eos:
                    break
                context = (*context, seen["draft_token"])
                seen = observe(context)
                rows.append({"request": r, "position": t, "offset": offset, "token": -1, **seen})
        ended: Literal["eos", "length"] = "eos" if output[-1] in eos else "length"
        requests.append(Request(str(prompt), "made-up", 1, len(output), LENGTH, ended))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    kinds = {"request": np.int32, "position": np.int32, "offset": np.int16, "match": np.int8}
    for name, values in columns.items():
        default = np.float32 if values.dtype.kind == "f" else np.int32
        columns[name] = values.astype(kinds.get(name, default))
    meta = {"target": {"vocab_size": V}, "eos_token_ids": list(eos)}
    return Trace(columns, requests, GAMMA, meta)


class MadeUpDecoder:
    """Really decodes the made-up pair under a rule, from any prefix."""

    def __init__(self, prefix: Sequence[int], rule: VerifyRule, eos: Sequence[int] = ()) -> None:
        self.context = tuple(prefix)
        self.rule, self.eos = rule, eos
        self.rejected: list[tuple[int, int]] = []

    @property
    def position(self) -> int:
        return len(self.context) - 1

    @property
    def remaining(self) -> int:
        return 0 if self.position and self.context[-1] in self.eos else LENGTH - self.position

    @property
    def load(self) -> Load:
        return Load(1, len(self.context))

    def draft(self, so_far: Sequence[Any]) -> Any:
        seen = observe((*self.context, *(t.token_id for t in so_far)))
        top1, top2, lse = (seen[f"draft_{n}"] for n in ("top1", "top2", "logsumexp"))
        return SimpleNamespace(
            token_id=seen["draft_token"], ends=seen["draft_token"] in self.eos,
            prob=math.exp(seen["draft_logprob"]), entropy=seen["draft_entropy"],
            logit_margin=top1 - top2, prob_margin=math.exp(top1 - lse) - math.exp(top2 - lse),
            top_prob=math.exp(seen["draft_logprob"]), raw_prob=math.exp(seen["draft_logprob"]),
            top10_prob=math.exp(seen["draft_top10_logprob"]),
        )  # fmt: skip

    def verify(self, draft: Sequence[Any]) -> int:
        tokens = [t.token_id for t in draft]
        seen = [observe((*self.context, *tokens[:i])) for i in range(len(tokens) + 1)]
        scores = [
            SimpleNamespace(
                match=bool(s["match"]), token=s["target_token"], top1=s["target_top1"],
                top2=s["target_top2"], logsumexp=s["target_logsumexp"],
                entropy=s["target_entropy"], draft_logit=s["target_draft_logit"],
                draft_rank=s["target_draft_rank"],
            )
            for s in seen[:-1]
        ]  # fmt: skip
        accepted = self.rule.accept(draft, scores)
        own = seen[accepted]["target_token"]
        if accepted < len(draft):
            self.rejected.append((tokens[accepted], own))
        for token in (*tokens[:accepted], own):
            if self.remaining > 0:
                self.context = (*self.context, token)
        return accepted


PROMPTS = range(1, 9)
TRACE = record(PROMPTS)


def without(trace: Trace, *names: str, **meta: Any) -> Trace:
    columns = {k: v for k, v in trace.columns.items() if k not in names}
    return Trace(columns, trace.requests, trace.max_gamma, {**trace.meta, **meta})
