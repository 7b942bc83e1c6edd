"""`check_rule`: the contract that every verification rule keeps, yours included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.core import SIGNALS
from policies.rules.base import SCORES, VerifyRule

VOCAB = 20


class RuleError(ValueError):
    """A rule breaks the contract; the message says which part and how."""


@dataclass(frozen=True)
class NamedValues:
    """One drafted token, or one score of one: the named values and no others."""

    values: dict[str, Any]
    allowed: frozenset[str]
    side: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _require(name in self.allowed, f"the rule read the {self.side} {name!r} undeclared")
        return self.values[name]


def sample_round(
    rng: np.random.Generator, length: int, temperature: float = 0.0, *, vocab_size: int = VOCAB
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return random but coherent draft signals and target scores of one round.

    Both sides are computed from full random distributions over `vocab_size` tokens, so
    every relation between the fields that real models keep holds here too.  At
    temperature 0 the draft is the drafter's argmax; at 1 it is a draw, with a coin.
    """
    draft, scores = [], []
    for _ in range(length):
        theirs = rng.normal(0, rng.uniform(0.3, 4), vocab_size)
        mine = theirs + rng.normal(0, rng.uniform(0.1, 2), vocab_size)
        target, drafter = softmax(theirs), softmax(mine)
        greedy = temperature == 0
        token = int(mine.argmax()) if greedy else int(rng.choice(vocab_size, p=drafter))
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


def check_rule(rule: VerifyRule, *, seed: int = 0, rounds: int = 60) -> None:
    """Put `rule` through the contract of `VerifyRule`; the rule itself is left as it was.

    A copy is driven over random rounds, at the first temperature of 0 and 1 that
    `begin_run` accepts.  Checked: it accepts between none and all of the tokens; reads
    only declared signals and scores; is deterministic given its state; judges a token by
    those before it alone, up to its declared `look_ahead`; accepts exactly the leading
    matches if it calls itself lossless; and a copy shares no state with the original.

    Raises
    ------
    RuleError
        Naming the part of the contract that the rule breaks, or what it raises.
    """
    name = type(rule).__name__
    unknown = sorted(({*rule.reads} - {*SIGNALS}) | ({*rule.needs} - {*SCORES}))
    _require(not unknown, f"{name} declares unknown signals or scores: {', '.join(unknown)}")
    _require(rule.look_ahead >= 0, f"{name}: look_ahead is {rule.look_ahead}, expected >= 0")
    try:
        _check(rule, seed, rounds)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(f"{name} raised {type(error).__name__}: {error}") from error


def _check(rule: VerifyRule, seed: int, rounds: int) -> None:
    name, temperature = type(rule).__name__, _temperature(rule)
    rng = np.random.default_rng(seed)
    cases = [_case(rule, rng, int(rng.integers(1, 13)), temperature) for _ in range(rounds)]

    first, second = _started(rule, temperature), _started(rule, temperature)
    _require(
        first is not rule, f"{name}: fresh() returned the prototype: two runs would share state"
    )
    _require(_accept(first, [], []) == 0, f"{name} accepted tokens of an empty draft")
    _require(_accept(second, [], []) == 0, f"{name} accepted tokens of an empty draft")
    for draft, scores in cases:
        before = first.fresh()
        accepted = _accept(first, draft, scores)
        _require(
            accepted == _accept(second, draft, scores),
            f"{name} is not deterministic: two copies in the same state disagree",
        )
        if rule.lossless:
            matches = [s.values["match"] for s in scores]
            leading = matches.index(False) if False in matches else len(matches)
            _require(
                accepted == leading,
                f"{name} calls itself lossless but accepted {accepted}, leading matches: {leading}",
            )
        _check_prefixes(before, draft, scores, accepted)
    untouched, again = _started(rule, temperature), _started(rule, temperature)
    for draft, scores in cases:
        driven = again.fresh()
        _accept(driven, draft, scores)
    for draft, scores in cases:
        _require(
            _accept(untouched, draft, scores) == _accept(again, draft, scores),
            f"{name}: driving a copy changed the original: fresh() must copy all state",
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


def _case(
    rule: VerifyRule, rng: np.random.Generator, length: int, temperature: float
) -> tuple[tuple[NamedValues, ...], tuple[NamedValues, ...]]:
    draft, scores = sample_round(rng, length, temperature)
    reads, needs = frozenset(rule.reads), frozenset(rule.needs)
    return (
        tuple(NamedValues(values, reads, "signal") for values in draft),
        tuple(NamedValues(values, needs, "score") for values in scores),
    )


def _accept(rule: VerifyRule, draft: Sequence[Any], scores: Sequence[Any]) -> int:
    accepted = rule.accept(draft, scores)
    name = type(rule).__name__
    whole = isinstance(accepted, int | np.integer)
    _require(whole, f"{name}.accept returned {accepted!r}, expected an int")
    _require(
        0 <= accepted <= len(draft),
        f"{name} accepted {accepted} of {len(draft)} tokens, expected 0..{len(draft)}",
    )
    return accepted


def _check_prefixes(
    before: VerifyRule, draft: Sequence[Any], scores: Sequence[Any], accepted: int
) -> None:
    for count in range(len(draft) + 1):
        seen = min(len(draft), count + before.look_ahead)
        part = _accept(before.fresh(), draft[:seen], scores[:seen])
        _require(
            min(part, count) == min(accepted, count),
            f"{type(before).__name__}: whether the first {count} tokens are accepted depends on "
            f"tokens more than look_ahead={before.look_ahead} after them",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuleError(message)
