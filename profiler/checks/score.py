"""Which prompts an output solves, by exact match of its final number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from profiler.checks.differences import output_of, solves
from profiler.models.loading import Pair
from profiler.prompts import Prompt
from traces.acceptance.trace import Trace

ANSWERS, SOLVED = "answers", "solved"
"""Provenance of a trace: the number that solves a prompt, and the prompts it solves; by id."""


class Score(NamedTuple):
    """Counts of the prompts with a numeric answer: all, solved, and cut at the limit."""

    scored: int
    solved: int
    cut: int

    def __str__(self) -> str:
        """Return the score in words."""
        cut = f"; {self.cut} cut at the token limit" if self.cut else ""
        return f"solves {self.solved} of the {self.scored} prompts with a numeric answer{cut}"


def answers_to(trace: Trace, prompts: Iterable[Prompt] = ()) -> dict[str, str]:
    """Return the numbers that solve the requests of `trace`, by id.

    A number of `prompts` counts before the recorded one, if id and category are the request's.
    """
    known = {request.id: request.category for request in trace.requests}
    recorded = {id: n for id, n in trace.meta.get(ANSWERS, {}).items() if id in known}
    own = {p.id: p.answer for p in prompts if known.get(p.id) == p.category}
    return recorded | {id: number for id, number in own.items() if number is not None}


def solved_by(pair: Pair, trace: Trace, answers: Mapping[str, str]) -> list[str]:
    """Return ids of the requests that the recorded outputs solve."""
    return [
        request.id
        for i, request in enumerate(trace.requests)
        if solves(pair, output_of(trace, i), request.ended, answers.get(request.id))
    ]


def score(pair: Pair, trace: Trace, answers: Mapping[str, str]) -> Score:
    """Return how many of the requests that have an answer the recorded outputs solve."""
    cut = sum(r.ended != "eos" for r in trace.requests if r.id in answers)
    return Score(len(answers), len(solved_by(pair, trace, answers)), cut)
