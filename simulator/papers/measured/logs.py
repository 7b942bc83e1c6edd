"""Logs of whole benchmarks on GPUs: one half of the turns is predicted from the other.

Both halves are taken in turn, by question, so that each is of every category.  What a round takes
is fitted to the one half's turns; the other half's seconds are predicted once from its own rounds,
which tests the cost alone, and once from its tokens alone, which is what a user knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from simulator.papers.measured.rows import Evidence, evidence, ranked
from traces.errors import DraftsimError
from traces.latency.nonnegative import non_negative
from traces.store.text import json_lines

EAGLE = ("eagle_logs/llama-2-chat-70b-ea.jsonl", "eagle_logs/llama-2-chat-70b-base.jsonl")
SPECBENCH = (
    "specbench_logs/vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl",
    "specbench_logs/vicuna-7b-v1.3-vanilla-float16-temp-0.0.jsonl",
)
EAGLE_STUDY = "EAGLE, Llama-2-70B, four A100 (SafeAILab/EAGLE, Apache-2.0)"
SPECBENCH_STUDY = "Spec-Bench, Vicuna-7B + 68M (yukiki-jc/Spec-Bench, Apache-2.0)"
COST, BEFOREHAND = "half the turns, and the others' rounds", "half the turns"


class LogTurns(NamedTuple):
    """Turns of a log, one entry each."""

    question: npt.NDArray[np.int64]
    category: npt.NDArray[np.str_]
    rounds: Floats
    tokens: Floats
    seconds: Floats

    def only(self, which: npt.NDArray[np.bool_]) -> LogTurns:
        """Return some of the turns."""
        return LogTurns(
            self.question[which], self.category[which], self.rounds[which], self.tokens[which],
            self.seconds[which],
        )  # fmt: skip


def log_rows(folder: Path, needed: bool = True) -> list[Evidence]:
    """Return rows of the logs found in `folder`, laid out as `EAGLE` and `SPECBENCH` name them.

    Raises
    ------
    DraftsimError
        If it holds neither pair of logs and they are `needed`, or one is damaged.
    """
    rows: list[Evidence] = []
    if (eagle := read_eagle(folder)) is not None:
        rows += _halves(EAGLE_STUDY, *eagle, categories=False)
    if all((folder / name).is_file() for name in SPECBENCH):
        both = [_specbench(_read(folder / name)) for name in SPECBENCH]
        rows += _halves(SPECBENCH_STUDY, *both, categories=True)
    if not rows and needed:
        raise DraftsimError(
            f"--logs {folder}: holds neither {EAGLE[0]} nor {SPECBENCH[0]} together with its plain "
            "run: name the folder that holds them"
        )
    return rows


def read_eagle(folder: Path) -> tuple[LogTurns, LogTurns] | None:
    """Read EAGLE's turns with speculation and without; None if `folder` does not hold both logs.

    Raises DraftsimError if one is damaged.
    """
    if not all((folder / name).is_file() for name in EAGLE):
        return None
    spec, plain = (_read(folder / name) for name in EAGLE)
    return _eagle(spec), _eagle(plain, plain=True)


def _halves(study: str, spec: LogTurns, plain: LogTurns, *, categories: bool) -> Iterator[Evidence]:
    odd = np.isin(spec.question, np.unique(spec.question)[1::2])
    for name, known in (("even questions", ~odd), ("odd questions", odd)):
        given, asked = spec.only(known), spec.only(~known)
        same = np.isin(plain.question, given.question)
        step = _fit(plain.only(same), plain.only(same).tokens)
        round_s = _fit(given, given.rounds)
        per_round = given.tokens.sum() / given.rounds.sum()
        others = plain.only(~same)
        plain_s = _seconds(step, others.tokens, others.tokens).sum()
        yield evidence(
            study, f"{COST}: {name}", "seconds of plain decoding", plain_s, others.seconds.sum()
        )
        cost = _seconds(round_s, asked.rounds, asked.tokens)
        yield evidence(
            study, f"{COST}: {name}", "seconds with speculation", cost.sum(), asked.seconds.sum()
        )
        kind = f"{COST}, by category" if categories else COST
        yield from ranked(list(_speedups(
            study, f"{kind}: {name}", asked, cost, _seconds(step, asked.tokens, asked.tokens),
            others, categories,
        )))  # fmt: skip
        guess = _seconds(round_s, asked.tokens / per_round, asked.tokens)
        yield from ranked(list(_speedups(
            study, f"{BEFOREHAND}: {name}", asked, guess,
            _seconds(step, asked.tokens, asked.tokens), others, False,
        )))  # fmt: skip


def _speedups(
    study: str, given: str, asked: LogTurns, spec_s: Floats, plain_s: Floats, plain: LogTurns,
    categories: bool,
) -> Iterator[Evidence]:  # fmt: skip
    """Yield speed over plain decoding's, of all turns and by category: tokens/s over tokens/s."""
    names = ["all", *sorted(set(asked.category.tolist()))] if categories else ["all"]
    for name in names:
        mine = np.full(len(asked.tokens), True) if name == "all" else asked.category == name
        theirs = np.full(len(plain.tokens), True) if name == "all" else plain.category == name
        measured = (asked.tokens[mine].sum() / asked.seconds[mine].sum()) / (
            plain.tokens[theirs].sum() / plain.seconds[theirs].sum()
        )
        predicted = plain_s[mine].sum() / spec_s[mine].sum()
        yield evidence(
            study, given, f"speedup, {name}", float(predicted), float(measured), plain=1.0
        )


def _design(steps: Floats, tokens: Floats) -> Floats:
    """Return a turn's own time, its steps, and its steps over the context that grows with the
    output.
    """
    return np.stack([np.ones_like(steps), steps, steps * tokens / 2], axis=1)


def _fit(turns: LogTurns, steps: Floats) -> Floats:
    """Return seconds of a turn, of a step, and of a step per token in the cache; none negative."""
    weight = 1 / turns.seconds[:, None]
    return non_negative(_design(steps, turns.tokens) * weight, np.ones(len(steps)))


def _seconds(fitted: Floats, steps: Floats, tokens: Floats) -> Floats:
    return np.asarray(_design(steps, tokens) @ fitted)


def _eagle(rows: Sequence[dict[str, object]], *, plain: bool = False) -> LogTurns:
    """Return EAGLE's log: ``idxs`` counts rounds, or in plain decoding tokens."""
    found: list[tuple[object, ...]] = []
    for row in rows:
        choice = _choice(row)
        for steps, tokens, seconds in zip(
            choice["idxs"], choice["new_tokens"], choice["wall_time"], strict=True
        ):
            count = steps + 1
            found.append((row["question_id"], "all", count, count if plain else tokens, seconds))
    return _turns(found)


def _specbench(rows: Sequence[dict[str, object]]) -> LogTurns:
    found: list[tuple[object, ...]] = []
    for row in rows:
        choice = _choice(row)
        for steps, tokens, seconds in zip(
            choice["decoding_steps"], choice["new_tokens"], choice["wall_time"], strict=True
        ):
            found.append((row["question_id"], row.get("category", "all"), steps, tokens, seconds))
    return _turns(found)


def _choice(row: dict[str, object]) -> dict[str, list[float]]:
    choices = row["choices"]
    assert isinstance(choices, list)
    choice: dict[str, list[float]] = choices[0]
    return choice


def _turns(found: Sequence[tuple[object, ...]]) -> LogTurns:
    question, category, rounds, tokens, seconds = zip(*found, strict=True)
    return LogTurns(
        np.array(question, dtype=np.int64), np.array(category, dtype=str),
        *(np.array(column, dtype=float) for column in (rounds, tokens, seconds)),
    )  # fmt: skip


def _read(path: Path) -> list[dict[str, object]]:
    try:
        rows = [row for _, row in json_lines(path)]
        _choice(rows[0])
    except (OSError, ValueError, KeyError, IndexError, AssertionError) as error:
        raise DraftsimError(f"cannot read the log {path}: {error}") from None
    return rows
