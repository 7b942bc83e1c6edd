"""Reading Spec-Bench result files (hemingkx/Spec-Bench, ``model_answer/*.jsonl``).

A file holds one row a question: per turn ``decoding_steps``, ``new_tokens`` and
``wall_time``, and ``accept_lengths`` flat over the turns, each value accepted + 1.  In the
files of draft models and of plain decoding the values of a turn sum to its ``new_tokens``
exactly: the first round includes the prompt, so decoding begins at output position 0.
The file does not hold the draft lengths.
Source of the format: hemingkx/Spec-Bench, ``evaluation/eval.py``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from traces.acceptance.schema import Request
from traces.acceptance.trace import Trace
from traces.errors import FileError
from traces.importers.base import Importer, Options, Progress
from traces.importers.bounds import MOST_COUNT, MOST_DRAFTED, MOST_TOKENS, is_seconds, label, wholes
from traces.importers.rows import LoggedTurn, matches, only_file, read_json_rows
from traces.importers.schedules import infer, is_known, reading


class _Log(NamedTuple):
    """A result file."""

    turns: list[_Turn]
    models: list[str]
    """Every ``model_id``."""
    left_out: list[str]
    """Turns that failed, and why."""


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

    def logged(self, max_new_tokens: int) -> LoggedTurn:
        """Return the turn as schedules read it."""
        accepted = [value - 1 for value in self.lengths]
        limit = max(max_new_tokens, self.tokens)
        return LoggedTurn(self.where, self.tokens, limit, accepted, self.wall_s)


def import_specbench(
    file: str | os.PathLike[str],
    baseline: str | os.PathLike[str] | None = None,
    draft_lengths: str = "infer",
    max_new_tokens: int = 1024,
    progress: Progress = lambda *_: None,
) -> Trace:
    """Return a trace of the matches that a Spec-Bench result file tells of; each turn is a request.

    Parameters
    ----------
    file:
        The result file of a speculative method that drafts a chain.
    baseline:
        The file of plain decoding of the same questions.  Gives each request its
        ``wall_s`` (the turn's seconds per token times this file's tokens, as the two
        outputs can differ in length) and ``meta["baseline"]``: ``target_s``, the median
        over turns of the seconds per token, ``spread_s``, half the interquartile range,
        ``per_token_s`` over everything, and ``speedup``, the ratio of the two
        throughputs in tokens per second.
    draft_lengths:
        Schedule of the draft lengths: see `traces.importers.schedules.reading`.
        ``infer`` takes the known schedule that fits the log, and ``none`` if
        none or several fit; ``meta["draft_lengths_found"]`` says which.  Turns are separate
        calls: a schedule starts again in each unless its policy learns across requests.

        A log that accepted more than was drafted contradicts a schedule.  With ``none`` and
        ``at-least`` the ends of longer runs are hidden, so survival estimates and imputation
        by hazard are refused (`traces.acceptance.survival.impute` offers ``rejected``).
    max_new_tokens:
        Limit of a turn; a shorter one ended with EOS.
    progress:
        Told how far the search for a schedule has come.

    Raises
    ------
    FileError
        If a file is damaged or contradicts itself or `draft_lengths`, naming row, question,
        turn and round; if it is a log without speculation, or of a method that drafts trees.
    DraftsimError
        If `draft_lengths` is not one of the above.

    Notes
    -----
    Where a turn ended with EOS and a draft of known length reached it, the log does not
    tell a drafted EOS from a rejected draft; the position is taken as a mismatch, which
    emits the same tokens.  Turns that failed (``ERROR``, or no tokens) are left out and
    named in ``meta["left_out"]``.
    """
    read = None if draft_lengths == "infer" else reading(draft_lengths)
    log = _read(file)
    _check_chain(file, log)
    if max(max(t.lengths) for t in log.turns) == 1 and draft_lengths in ("infer", "none"):
        raise FileError(
            f"{file}: is a log without speculation, no round of it accepted a draft: name the "
            "speculative method's file, and this one as --baseline"
        )
    first = _first(log.turns)
    turns = [t.logged(max_new_tokens) for t in log.turns]
    meta: dict[str, Any] = {}
    if read is None:
        found = infer(turns, first, progress)
        draft_lengths, read = found.text, reading(found.text)
        meta = {"draft_lengths_found": found.said(), "draft_lengths_fit": list(found.fits)}
    plain = None if baseline is None else _per_token(baseline, log.turns)
    requests, match = [], []
    for turn, logged in zip(log.turns, turns, strict=True):
        ended: Literal["eos", "length"] = "length" if turn.tokens == logged.limit else "eos"
        wall_s = None if plain is None else plain[turn.question, turn.turn] * turn.tokens
        name = f"{turn.question}/{turn.turn}"
        requests.append(
            Request(name, turn.category, 0, turn.tokens, logged.limit, ended, wall_s=wall_s)
        )
        match.append(matches(read(logged, first), turn.tokens, first))
    tokens, wall_s = sum(t.tokens for t in log.turns), sum(t.wall_s for t in log.turns)
    rounds = sum(len(t.lengths) for t in log.turns)
    meta |= {
        "kind": "specbench",
        "source": os.path.basename(os.fspath(file)),
        "first": first,
        "draft_lengths": draft_lengths,
        "draft_lengths_known": is_known(draft_lengths),
        "prompt_lengths_known": False,
        "left_out": log.left_out,
        "sampling": {"temperature": 0.0},
        "measured": {
            "tokens": tokens, "rounds": rounds, "wall_s": wall_s,
            "per_round": sum(sum(t.lengths) for t in log.turns) / rounds,
            "request_wall_s": [t.wall_s for t in log.turns],
        },
    }  # fmt: skip
    if baseline is not None:
        meta["baseline"] = _baseline(baseline, tokens / wall_s)
    return Trace.without_tails(requests, None, meta, match=np.concatenate(match))


class SpecBench(Importer):
    """Spec-Bench's ``model_answer/*.jsonl``."""

    name = "specbench"
    summary = "Spec-Bench result file of a method that drafts a chain"
    takes = ("baseline", "draft_lengths", "max_new_tokens")

    def sniff(self, text: str) -> bool:
        return '"accept_lengths"' in text and '"decoding_steps"' in text

    def read(self, files: Sequence[Path], options: Options) -> Trace:
        file = only_file(self.name, files)
        return import_specbench(
            file, options.baseline, options.draft_lengths, options.max_new_tokens,
            options.progress,
        )  # fmt: skip


TREES = (
    "medusa", "eagle", "hydra", "recycling", "rest", "samd", "sam-decoding", "lookahead", "lade",
    "clover", "amphista", "opt-tree", "sequoia", "glide", "ouroboros",
)  # fmt: skip
"""Methods of Spec-Bench that verify several branches at once, as their files' model_id names."""


def _check_chain(file: str | os.PathLike[str], log: _Log) -> None:
    """Raise FileError if the log is of a method that drafts trees."""
    for model in log.models:
        parts = set(re.split(r"[^a-z0-9]+", model.lower()))
        for tree in TREES:
            if tree in parts or any(p.startswith(tree) and p[len(tree) :].isdigit() for p in parts):
                raise FileError(
                    f"{file}: model_id {model!r} names {tree}, which verifies several branches in "
                    "a round: what a chain of drafts would have had accepted is not in its log; "
                    "import one of a method that drafts a chain"
                )


def _first(turns: list[_Turn]) -> int:
    """Return where decoding began: 0 if the rounds of every turn emit all its tokens, else 1."""
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


_LISTS = {
    "decoding_steps": (0, MOST_COUNT), "new_tokens": (0, MOST_TOKENS),
    "accept_lengths": (1, MOST_DRAFTED + 1),
}  # fmt: skip
"""Lists of a choice, and the least and the most that they hold."""


def _read(file: str | os.PathLike[str]) -> _Log:
    turns: list[_Turn] = []
    models: dict[str, None] = {}
    left_out: list[str] = []
    for where, row in read_json_rows(file):
        question = label(where, "question_id", row.get("question_id"), "?")
        at = f"{where}, question {question}"
        choices = row.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            raise FileError(f"{at}: has no choices[0]: expected a Spec-Bench result file")
        models[label(at, "model_id", row.get("model_id"))] = None
        category = label(at, "category", row.get("category"))
        steps, tokens, lengths = (
            wholes(at, name, choice.get(name), *span) for name, span in _LISTS.items()
        )
        walls, texts = choice.get("wall_time"), choice.get("turns")
        if not isinstance(walls, list) or not all(is_seconds(w) for w in walls):
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
            name = f"{at}, turn {i + 1}"
            mine = lengths[begin : begin + count]
            begin += count
            # Where generation failed, Spec-Bench writes this instead of the text, with the numbers
            # of the turn before.
            failed = isinstance(texts, list) and i < len(texts) and texts[i] == "ERROR"
            if failed or not (count and tokens[i]):
                left_out.append(f"{name}: {'failed' if failed else 'no tokens'}")
                continue
            turns.append(_Turn(name, question, i + 1, category, tokens[i], float(walls[i]), mine))
    keys = Counter((turn.question, turn.turn) for turn in turns)
    if keys and (again := keys.most_common(1)[0])[1] > 1:
        (question, number), times = again
        raise FileError(
            f"{file}: holds question {question}, turn {number} {times} times: import one run of "
            "the questions at a time"
        )
    if not turns:
        raise FileError(f"{file}: every turn of it failed: decode the questions again")
    return _Log(turns, list(models), left_out)


def _per_token(
    baseline: str | os.PathLike[str], turns: list[_Turn]
) -> dict[tuple[str, int], float]:
    """Return seconds per token of plain decoding, by question and turn."""
    plain = {(t.question, t.turn): t.wall_s / t.tokens for t in _read(baseline).turns}
    for turn in turns:
        if (turn.question, turn.turn) not in plain:
            raise FileError(
                f"{baseline}: has no question {turn.question}, turn {turn.turn}: give the baseline "
                "of the same questions"
            )
    return plain


def _baseline(baseline: str | os.PathLike[str], throughput: float) -> dict[str, Any]:
    turns = _read(baseline).turns
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
