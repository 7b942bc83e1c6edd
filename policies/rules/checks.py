"""`check_rule`: the contract that every verification rule keeps, yours included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policies.checks import NamedValues
from policies.guard import SCORES, SIGNALS, Guarded, PolicyError, length_from
from policies.rules.base import VerifyRule

VOCAB, ROUNDS = 20, 60
"""Tokens of the vocabulary that rounds are drawn from, and rounds of a check."""


class NamedScores(NamedValues):
    """The values of a target score, and no others."""

    known = f"a target score ({', '.join(SCORES)})"


def sample_round(
    rng: np.random.Generator, length: int, temperature: float = 0.0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return random but coherent draft signals and target scores of one round.

    Both sides are computed from full random distributions over `VOCAB` tokens, so
    every relation between the fields that real models keep holds here too.  At
    temperature 0 the draft is the drafter's argmax; at 1 it is a draw, with a coin.
    """
    draft, scores = [], []
    for _ in range(length):
        theirs = rng.normal(0, rng.uniform(0.3, 4), VOCAB)
        mine = theirs + rng.normal(0, rng.uniform(0.1, 2), VOCAB)
        target, drafter = softmax(theirs), softmax(mine)
        greedy = temperature == 0
        token = int(mine.argmax()) if greedy else int(rng.choice(VOCAB, p=drafter))
        best = int(theirs.argmax())
        coin = rng.random() < target[token] / drafter[token]
        top_mine, top_theirs = np.sort(mine)[::-1], np.sort(theirs)[::-1]
        sorted_mine = np.sort(drafter)[::-1]
        draft.append(
            {
                "token_id": token,
                "prob": float(drafter[token]),
                "entropy": entropy(drafter),
                "logit_margin": float(top_mine[0] - top_mine[1]),
                "prob_margin": float(sorted_mine[0] - sorted_mine[1]),
                "top_prob": float(sorted_mine[0]),
                "raw_prob": float(drafter[token]),
                "top10_prob": float(sorted_mine[0] / sorted_mine[:10].sum()),
                "ends": False,
            }
        )
        scores.append(
            {
                "match": bool(token == best if greedy else coin),
                "token": best,
                "top1": float(top_theirs[0]),
                "top2": float(top_theirs[1]),
                "logsumexp": float(np.log(np.exp(theirs).sum())),
                "entropy": entropy(target),
                "draft_logit": float(theirs[token]),
                "draft_rank": int((theirs > theirs[token]).sum()),
            }
        )
    return draft, scores


def softmax(logits: Any) -> Any:
    """Return probabilities of raw logits at T = 1."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def entropy(probs: Any) -> float:
    """Return entropy in nats."""
    return float(-(probs * np.log(probs)).sum())


def check_rule(rule: VerifyRule) -> None:
    """Put `rule` through the contract of `VerifyRule`; the rule itself is left as it was.

    A copy is driven over random rounds, at the first temperature of 0 and 1 that
    `begin_run` accepts.  Checked: it accepts between none and all of the tokens; reads
    only declared signals and scores; is deterministic given its state; judges a token by
    those before it alone, up to its declared `look_ahead`; accepts exactly the leading
    matches if it calls itself lossless; and a copy shares no state with the original.

    Raises
    ------
    PolicyError
        Naming the rule and the part of the contract that it breaks, or what it raises.
    """
    unknown = sorted(({*rule.reads} - {*SIGNALS}) | ({*rule.needs} - {*SCORES}))
    try:
        _require(not unknown, f"declares unknown signals or scores: {', '.join(unknown)}")
        _require(rule.look_ahead >= 0, f"has a look_ahead of {rule.look_ahead}, expected >= 0")
        _check(rule)
    except PolicyError as error:
        raise error.by(rule) from None
    except Exception as error:
        raise PolicyError(f"raised {type(error).__name__}: {error}").by(rule) from error


def _check(rule: VerifyRule) -> None:
    temperature, rng = _temperature(rule), np.random.default_rng(0)
    cases = [sample_round(rng, int(rng.integers(1, 13)), temperature) for _ in range(ROUNDS)]

    first, second = _started(rule, temperature), _started(rule, temperature)
    _require(first is not rule, "returns the prototype from fresh(): two runs would share state")
    for one in (first, second):
        _require(_accept(one, [], []) == 0, "accepted tokens of an empty draft")
    for draft, scores in cases:
        before = first.fresh()
        accepted = _accept(first, draft, scores)
        _require(
            accepted == _accept(second, draft, scores),
            "is not deterministic: two copies in the same state disagree",
        )
        if rule.lossless:
            matches = [score["match"] for score in scores]
            leading = matches.index(False) if False in matches else len(matches)
            _require(
                accepted == leading,
                f"calls itself lossless but accepted {accepted}, leading matches: {leading}",
            )
        _check_prefixes(before, draft, scores, accepted)
    untouched, again = _started(rule, temperature), _started(rule, temperature)
    for draft, scores in cases:
        _accept(again.fresh(), draft, scores)
    for draft, scores in cases:
        _require(
            _accept(untouched, draft, scores) == _accept(again, draft, scores),
            "shares state with its copies: fresh() must copy all of it",
        )


def _temperature(rule: VerifyRule) -> float:
    try:
        rule.fresh().begin_run(VOCAB, 0.0)
    except ValueError:
        rule.fresh().begin_run(VOCAB, 1.0)
        return 1.0
    return 0.0


def _started(rule: VerifyRule, temperature: float) -> VerifyRule:
    mine = rule.fresh()
    mine.begin_run(VOCAB, temperature)
    return mine


def _accept(
    rule: VerifyRule, draft: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]
) -> int:
    accepted = rule.accept(
        [Guarded(NamedValues(**values), rule.reads) for values in draft],
        [Guarded(NamedScores(**values), rule.needs, "needs") for values in scores],
    )
    return length_from("accept", accepted, len(draft))


def _check_prefixes(
    before: VerifyRule, draft: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]],
    accepted: int,
) -> None:  # fmt: skip
    for count in range(len(draft) + 1):
        seen = min(len(draft), count + before.look_ahead)
        part = _accept(before.fresh(), draft[:seen], scores[:seen])
        _require(
            min(part, count) == min(accepted, count),
            f"decides on the first {count} tokens by tokens more than look_ahead="
            f"{before.look_ahead} after them",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PolicyError(message)
