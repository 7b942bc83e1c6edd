"""Rows of a log, and what the rounds and the seconds of a finished run imply."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import half_iqr
from policies.json_text import JSONError, parse_json
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace
from traces.errors import FileError
from traces.store.text import is_seconds, json_lines, read_text, wholes

LocatedRow = tuple[str, dict[str, Any]]
"""File and line or entry, for error messages, and the JSON object there."""


class LoggedTurn(NamedTuple):
    """One decoded request of a log: a turn of a question."""

    where: str
    """File, row and turn, for error messages."""
    question: str
    turn: int
    """Number of the turn, from 1."""
    category: str
    rounds: int
    """Verifications."""
    tokens: int
    """Output tokens; 0 if a log of plain decoding does not count them."""
    wall_s: float
    """Measured seconds of decoding it."""
    accepted: Sequence[int] = ()
    """Accepted drafts of each round; empty if the log holds no rounds."""
    limit: int = 0
    """Token limit that the request was decoded under."""

    @property
    def emitted(self) -> int:
        """Tokens that the rounds emit: the accepted ones, and one more each."""
        return sum(self.accepted) + self.rounds


class LoggedRound(NamedTuple):
    """One round of a log."""

    accepted: int
    drafted: int
    """Tokens that are known to have been drafted, at least."""


def matches(rounds: Sequence[LoggedRound], tokens: int, first: int = 0) -> npt.NDArray[np.int8]:
    """Return per output position whether the draft matched, shape (tokens,), as far as is known.

    A round at s with A accepted says that s ... s + A - 1 matched.  Position s + A was
    emitted by the target: a mismatch if a draft stood there, that is if more than A were
    drafted; otherwise it is the bonus, never drafted and so unknown, as are the
    positions before `first`.  Positions beyond `tokens` are dropped.
    """
    match = np.full(tokens + sum(r.accepted + 1 for r in rounds), UNKNOWN, dtype=np.int8)
    start = first
    for accepted, drafted in rounds:
        match[start : start + accepted] = MATCH
        if drafted > accepted:
            match[start + accepted] = MISMATCH
        start += accepted + 1
    return match[:tokens]


def trace_of(
    requests: Sequence[Request], rounds: Sequence[Sequence[LoggedRound]], meta: Mapping[str, Any]
) -> Trace:
    """Return the trace of requests with these rounds, from output position ``meta["first"]`` on."""
    first = int(meta["first"])
    match = [matches(own, r.tokens, first) for r, own in zip(requests, rounds, strict=True)]
    return Trace.without_tails(requests, None, meta, match=np.concatenate(match))


NO_NAME = "?"
"""Question of a turn whose row names none."""


def check_once(file: Path, turns: Sequence[LoggedTurn]) -> None:
    """Raise FileError if a turn of a question occurs more than once."""
    keys = Counter((turn.question, turn.turn) for turn in turns if turn.question != NO_NAME)
    if keys and (again := keys.most_common(1)[0])[1] > 1:
        (question, number), times = again
        raise FileError(
            f"{file}: holds question {question}, turn {number} {times} times: import one run of "
            "the questions at a time"
        )


def baseline_of(
    file: Path, plain: Sequence[LoggedTurn], turns: Sequence[LoggedTurn]
) -> dict[str, Any]:
    """Return the speed of plain decoding of the same questions, and the speedup of `turns` over it.

    ``target_s`` is the median over turns of the seconds per token, ``spread_s`` half their
    interquartile range, ``per_token_s`` the seconds per token over everything, and ``speedup`` the
    ratio of the two throughputs in tokens per second.

    Raises FileError if one of the `turns` is not in `file`, which holds the `plain` ones.
    """
    known = {(turn.question, turn.turn) for turn in plain}
    for turn in turns:
        if (turn.question, turn.turn) not in known:
            raise FileError(
                f"{file}: has no question {turn.question}, turn {turn.turn}: give the baseline of "
                "the same questions"
            )
    asked = {(turn.question, turn.turn) for turn in turns}
    plain = [turn for turn in plain if (turn.question, turn.turn) in asked]
    each = [turn.wall_s / turn.tokens for turn in plain]
    per_token = sum(turn.wall_s for turn in plain) / sum(turn.tokens for turn in plain)
    throughput = sum(turn.tokens for turn in turns) / sum(turn.wall_s for turn in turns)
    return {
        "source": file.name, "target_s": median(each), "spread_s": float(half_iqr(each)),
        "per_token_s": per_token, "speedup": throughput * per_token,
    }  # fmt: skip


def choices_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ``choices`` of a response or an answer; {} for one that is no object."""
    choices = row.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice if isinstance(choice, dict) else {} for choice in choices]


def turns_of(at: str, row: Mapping[str, Any], most: Mapping[str, int]) -> tuple[Any, ...]:
    """Return the first choice of a row, and lists with a value a turn: counts, and ``wall_time``.

    ``most``: how large the counts can be, by name.  Raises FileError if a list is missing, holds
    anything else, or has another length than the others.
    """
    choice = next(iter(choices_of(row)), {})
    if any(name not in choice for name in (*most, "wall_time")):
        names = ", ".join([*most, "wall_time"])
        raise FileError(f"{at}: has no choices[0] with {names}: expected a file of this format")
    counts = [wholes(at, name, choice.get(name), most=n) for name, n in most.items()]
    walls = choice.get("wall_time")
    if not isinstance(walls, list) or not all(is_seconds(w) for w in walls):
        raise FileError(f"{at}: wall_time is no list of positive seconds: use an unedited file")
    lengths = [len(values) for values in (*counts, walls)]
    if len({*lengths}) > 1 or not walls:
        *others, last = lengths
        raise FileError(
            f"{at}: {', '.join(most)} and wall_time have {', '.join(map(str, others))} and {last} "
            "turns: use an unedited result file"
        )
    return choice, *counts, [float(w) for w in walls]


def head(text: str) -> set[str]:
    """Return the columns that the first line of a CSV file names."""
    return {name.strip().strip('"').lower() for name in text.partition("\n")[0].split(",")}


def only_file(name: str, files: Sequence[Path]) -> Path:
    """Return the one file of a format that takes one; FileError for several."""
    if len(files) != 1:
        raise FileError(f"{name} takes one file, not {len(files)}: import them one at a time")
    return files[0]


def read_json_rows(path: str | os.PathLike[str], text: str | None = None) -> list[LocatedRow]:
    """Return the objects of a JSON or JSON Lines file, each with where it is from.

    ``text``: the file's text, if it was read before.  Raises FileError if the file is missing, is
    no text, or a line is not a JSON object.
    """
    text = read_text(path) if text is None else text
    try:
        document = parse_json(text)
    except JSONError:
        lines = json_lines(path, text, "is it truncated? copy the file again")
        found = [(f"{path} line {number}", item) for number, item in lines]
    else:
        items = document if isinstance(document, list) else [document]
        found = [(f"{path} entry {i}", item) for i, item in enumerate(items, 1)]
    if not found:
        raise FileError(f"{path}: holds no rows: expected JSON or JSON Lines")
    for where, item in found:
        if not isinstance(item, dict):
            raise FileError(f"{where}: is no JSON object: expected one object a row")
    return found
