"""Reading Spec-Bench result files (hemingkx/Spec-Bench, ``model_answer/*.jsonl``).

A file holds one row a question: per turn ``decoding_steps``, ``new_tokens`` and
``wall_time``, and ``accept_lengths`` flat over the turns, each value accepted + 1.  In the
files of draft models and of plain decoding the values of a turn sum to its ``new_tokens``
exactly: the first round includes the prompt, so decoding begins at output position 0.
How many tokens were drafted is not in the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from policies.basic import Fixed
from policies.core import DraftPolicy, Load, Round
from policies.huggingface import HFHeuristic
from policies.registry import parse_policy
from traces.errors import DraftsimError, FileError
from traces.logs import LoggedRound, logged_trace, matches, read_json_rows
from traces.schema import Request
from traces.trace import Trace


class _Turn(NamedTuple):
    """One generate() call of the log."""

    where: str
    """File line, question and turn, for error messages."""
    question: str
    turn: int
    category: str
    tokens: int
    wall_s: float
    lengths: list[int]
    """Accepted + 1 of each round."""


def import_specbench(
    file: str | os.PathLike[str],
    baseline: str | os.PathLike[str] | None = None,
    draft_lengths: str = "none",
    max_new_tokens: int = 1024,
) -> Trace:
    """A trace of the matches that a Spec-Bench result file tells of; each turn is a request.

    Parameters
    ----------
    file:
        The result file of a speculative method.
    baseline:
        The file of plain decoding of the same questions.  Gives each request its
        ``wall_s`` (the turn's seconds per token times this file's tokens, as the two
        outputs can differ in length) and ``meta["baseline"]``: ``target_s``, the median
        over turns of the seconds per token, ``spread_s``, half the interquartile range,
        ``per_token_s`` over everything, and ``speedup``, the ratio of the two
        throughputs in tokens per second.
    draft_lengths:
        What is known of the length of each draft.

        * ``none``: nothing, so the target's own token of every round is unknown: it may
          have replaced a wrong draft or followed a right one.
        * ``at-least:N``: every draft had N tokens or more, so a round that accepted
          fewer was rejected.  ``at-least:1`` holds for any draft model.
        * ``fixed:N``: N tokens each.
        * ``hf-heuristic:N``: as `policies.huggingface.HFHeuristic` with gamma N chooses;
          its parameters may follow as in ``hf-heuristic:gamma=5,persist=persistent``.
          Turns are separate calls: N begins anew in each (schedule
          ``heuristic_transient``) unless ``persist=persistent`` (``heuristic``).

        A log that accepted more than was drafted contradicts the last two.  With ``none``
        and ``at-least`` the ends of longer runs are hidden, so survival estimates and
        imputation by hazard are refused (`Trace.impute` offers ``rejected``).
    max_new_tokens:
        Limit of a turn; a shorter one ended with EOS.

    Where a turn ended with EOS and a draft of known length reached it, the log does not
    tell a drafted EOS from a rejected draft; the position is taken as a mismatch, which
    emits the same tokens.

    Raises
    ------
    FileError
        If a file is damaged or contradicts itself or `draft_lengths`, naming row,
        question, turn and round.
    DraftsimError
        If `draft_lengths` is none of the above.
    """
    lengths = _draft_lengths(draft_lengths)
    turns = _read(file)
    first = _first(turns)
    plain = None if baseline is None else _per_token(baseline, turns)
    requests, match = [], []
    for turn in turns:
        limit = max(max_new_tokens, turn.tokens)
        ended: Literal["eos", "length"] = "length" if turn.tokens == limit else "eos"
        known = matches(lengths(turn, limit, first), turn.tokens, first)
        wall_s = None if plain is None else plain[turn.question, turn.turn] * turn.tokens
        name = f"{turn.question}/{turn.turn}"
        requests.append(Request(name, turn.category, 0, turn.tokens, limit, ended, wall_s=wall_s))
        match.append(known)
    tokens, wall_s = sum(t.tokens for t in turns), sum(t.wall_s for t in turns)
    rounds = sum(len(t.lengths) for t in turns)
    meta: dict[str, Any] = {
        "kind": "specbench",
        "source": os.path.basename(os.fspath(file)),
        "first": first,
        "draft_lengths": draft_lengths,
        "draft_lengths_known": not draft_lengths.startswith(("none", "at-least")),
        "prompt_lengths_known": False,
        "sampling": {"temperature": 0.0},
        "measured": {
            "tokens": tokens, "rounds": rounds, "wall_s": wall_s,
            "per_round": sum(sum(t.lengths) for t in turns) / rounds,
            "request_wall_s": [t.wall_s for t in turns],
        },
    }  # fmt: skip
    if baseline is not None:
        meta["baseline"] = _baseline(baseline, tokens / wall_s)
    return logged_trace(requests, match, meta)


_Lengths = Callable[[_Turn, int, int], list[LoggedRound]]


def _draft_lengths(text: str) -> _Lengths:
    """The reading of `draft_lengths`: a turn, its token limit and `first` to rounds."""
    name, _, body = text.partition(":")
    try:
        if name == "none" and not body:
            return lambda turn, limit, first: [LoggedRound(v - 1, 0) for v in turn.lengths]
        if name in ("at-least", "fixed") and body:
            count = int(body)
            if name == "fixed":
                return _Replayed(Fixed(count))
            if count < 1:
                raise ValueError(f"N is {count}, expected >= 1")
            return lambda turn, limit, first: _at_least(turn, limit, first, count)
        if name == "hf-heuristic" and body:
            policy = HFHeuristic(int(body)) if body.isdigit() else parse_policy(text)
            if policy.reads:
                raise ValueError("a confidence threshold needs signals that the log does not hold")
            return _Replayed(policy)
    except ValueError as error:
        raise DraftsimError(f"--draft-lengths {text}: {error}") from error
    raise DraftsimError(
        f"--draft-lengths is {text!r}: expected none, at-least:N, fixed:N or hf-heuristic:N"
    )


def _at_least(turn: _Turn, limit: int, first: int, count: int) -> list[LoggedRound]:
    rounds, position = [], first
    for value in turn.lengths:
        rounds.append(LoggedRound(value - 1, min(count, limit - position - 1)))
        position += value
    return rounds


class _Replayed:
    """Draft lengths found by running the policy that made the log over its outcomes."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        self._shared = policy.fresh()

    def __call__(self, turn: _Turn, limit: int, first: int) -> list[LoggedRound]:
        policy = self._shared if self.policy.learns_across_requests else self.policy.fresh()
        rounds, position = [], first
        for number, value in enumerate(turn.lengths, 1):
            policy.begin_round(Load(1, position))
            draft: list[None] = []
            while len(draft) < limit - position - 1 and policy.keep_drafting(draft):
                draft.append(None)
            accepted, drafted = value - 1, len(draft)
            if accepted > drafted:
                raise FileError(
                    f"{turn.where}, round {number}: {accepted} drafts were accepted where "
                    f"{type(self.policy).__name__} drafts {drafted}, so another policy made this "
                    "log: give its own --draft-lengths, or none"
                )
            emitted = min(value, turn.tokens - position)
            policy.observe(Round(position, drafted, accepted, emitted, drafted, 1), draft)
            rounds.append(LoggedRound(accepted, drafted))
            position += value
        return rounds


def _first(turns: list[_Turn]) -> int:
    """Where decoding began: 0 if the rounds of every turn emit all its tokens, else 1."""
    missing = {turn.tokens - sum(turn.lengths) for turn in turns}
    if max(missing) <= 0:
        bad = [t for t in turns if sum(t.lengths) - t.tokens >= t.lengths[-1]]
        if not bad:
            return 0
    elif missing == {1}:
        return 1
    else:
        bad = [t for t in turns if t.tokens > sum(t.lengths)]
    turn = bad[0]
    raise FileError(
        f"{turn.where}: accept_lengths sum to {sum(turn.lengths)} for new_tokens={turn.tokens}: "
        "a round is missing or one too many; use an unedited result file"
    )


def _read(file: str | os.PathLike[str]) -> list[_Turn]:
    turns = []
    for where, row in zip(*read_json_rows(file), strict=True):
        question = str(row.get("question_id", "?"))
        at = f"{where}, question {question}"
        choices = row.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            raise FileError(f"{at}: has no choices[0]: expected a Spec-Bench result file")
        steps, tokens = (_integers(at, choice, name) for name in ("decoding_steps", "new_tokens"))
        lengths = _integers(at, choice, "accept_lengths")
        walls = choice.get("wall_time")
        if not isinstance(walls, list) or not all(_is_seconds(w) for w in walls):
            raise FileError(f"{at}: wall_time is no list of positive seconds: use an unedited file")
        if not len(steps) == len(tokens) == len(walls) or not steps:
            raise FileError(
                f"{at}: decoding_steps, new_tokens and wall_time have {len(steps)}, {len(tokens)} "
                f"and {len(walls)} turns: use an unedited result file"
            )
        if sum(steps) != len(lengths):
            raise FileError(
                f"{at}: accept_lengths has {len(lengths)} rounds, decoding_steps says "
                f"{sum(steps)}: use an unedited result file"
            )
        begin = 0
        for i, count in enumerate(steps):
            name, category = f"{at}, turn {i + 1}", str(row.get("category", ""))
            mine = lengths[begin : begin + count]
            turns.append(_Turn(name, question, i + 1, category, tokens[i], float(walls[i]), mine))
            begin += count
    return turns


def _integers(at: str, choice: Mapping[str, Any], name: str) -> list[int]:
    values = choice.get(name)
    if not isinstance(values, list) or not all(type(v) is int and v >= 1 for v in values):
        raise FileError(
            f"{at}: {name} is no list of whole numbers >= 1: expected a Spec-Bench result file"
        )
    return values


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(value) < float("inf")  # type: ignore[arg-type]


def _per_token(
    baseline: str | os.PathLike[str], turns: list[_Turn]
) -> dict[tuple[str, int], float]:
    """Seconds per token of plain decoding, by question and turn."""
    plain = {(t.question, t.turn): t.wall_s / t.tokens for t in _read(baseline)}
    for turn in turns:
        if (turn.question, turn.turn) not in plain:
            raise FileError(
                f"{baseline}: has no question {turn.question}, turn {turn.turn}: give the baseline "
                "of the same questions"
            )
    return plain


def _baseline(baseline: str | os.PathLike[str], throughput: float) -> dict[str, Any]:
    turns = _read(baseline)
    each = [t.wall_s / t.tokens for t in turns]
    low, high = np.quantile(each, [0.25, 0.75])
    per_token = sum(t.wall_s for t in turns) / sum(t.tokens for t in turns)
    return {
        "source": os.path.basename(os.fspath(baseline)),
        "target_s": median(each),
        "spread_s": float(high - low) / 2,
        "per_token_s": per_token,
        "speedup": throughput * per_token,
    }
