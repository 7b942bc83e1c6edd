"""Which prompts an output solves, by exact match of its final number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from profiler.checks.differences import output_of, solves
from profiler.models.loading import Pair
from profiler.prompts import Prompt
from traces.acceptance.trace import Trace

ANSWERS, SOLVED = "answers", "solved"
"""Provenance of a trace: the number that solves a prompt, and the prompts it solves; by id."""


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


def score(pair: Pair, trace: Trace, answers: Mapping[str, str]) -> str:
    """Say how many of the requests that have an answer the recorded outputs solve."""
    solved = len(solved_by(pair, trace, answers))
    cut = sum(r.ended != "eos" for r in trace.requests if r.id in answers)
    also = f"; {cut} cut at the token limit" if cut else ""
    return f"solves {solved} of the {len(answers)} prompts with a numeric answer{also}"
