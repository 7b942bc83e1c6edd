"""Causes of differences between a real run and its replay: a text that diverged, another round.

A pass over several tokens sums in another order than a pass over one, so in low precision
the logits differ in their last bits.  That changes an outcome where two logits nearly tie,
or where a signal nearly equals a policy's threshold.

Where the target's own logits nearly tie, the output can go on with another token: the text
*diverged*.  From that position on the recording says nothing about the request, so nothing
after it is compared (`Divergence`, `traces.replay.rounds.before`).

Outputs of prompts with a numeric answer are scored by exact match of their last number (`solves`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from policies.core import Round
from profiler.models.loading import Pair
from profiler.prompts import Prompt
from traces.acceptance.trace import Trace
from traces.replay.quality import solved
from traces.replay.rounds import RoundLog, before
from traces.store.outputs import NEAR, Divergence

NEAR_FEATURES = 16.0
"""Units within which tokens of a drafter on the target's features count as tied, instead of `NEAR`:
those features are rounded differently, too."""
ANSWERS, SOLVED = "answers", "solved"
"""Provenance of a trace: the number that solves a prompt, and the prompts it solves; by id."""


def output_of(trace: Trace, request: int) -> list[int]:
    """Return the recorded output of a request."""
    starts = trace.request_starts
    rows = trace.on_path[starts[request] : starts[request + 1]]
    tokens: list[int] = np.asarray(trace.columns["token"])[rows].tolist()
    return tokens


def units(top1: npt.ArrayLike, top2: npt.ArrayLike, dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Return the margin of two logits in units in the last place of `top1` in `dtype`."""
    first = np.asarray(top1, dtype=np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(first), 1e-30)))
    last_place = torch.finfo(dtype).eps * 2.0**exponent
    return np.asarray((first - np.asarray(top2, dtype=np.float64)) / last_place)


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first position at which two outputs differ; None if they are the same.

    >>> first_difference([5, 6, 7], [5, 6, 8]), first_difference([5], [5, 6])
    (2, 1)
    """
    both = itertools.zip_longest(output, expected)
    return next((t for t, (a, b) in enumerate(both) if a != b), None)


def divergence(
    trace: Trace, request: int, output: Sequence[int], dtype: torch.dtype,
    expected: Sequence[int] | None = None,
) -> Divergence | None:  # fmt: skip
    """Return where the output of a request diverged from `expected`; None if it did not.

    ``expected`` is the recorded output by default.  Recorded logits are used as far as it, or
    `output`, equals the recorded text.
    """
    recorded = output_of(trace, request) if "token" in trace.columns else []
    text = recorded if expected is None else expected
    at = first_difference(output, text)
    if at is None:
        return None
    found = Divergence(
        trace.requests[request].id, at, *(t[at] if at < len(t) else None for t in (output, text))
    )
    known = [*recorded[: at + 1]] in ([*text[: at + 1]], [*output[: at + 1]])
    if not known or at >= len(recorded):
        return found
    row = trace.on_path[int(trace.request_starts[request]) + at]
    top1, top2 = (
        float(trace.columns[name][row]) if name in trace.columns else np.nan
        for name in ("target_top1", "target_top2")
    )
    if not np.isfinite([top1, top2]).all():
        return found
    return found._replace(
        target_top1=top1, target_top2=top2, target_units=float(units(top1, top2, dtype))
    )


def divergences(
    trace: Trace, outputs: Iterable[Sequence[int]], dtype: torch.dtype
) -> dict[int, Divergence]:
    """Return the divergences from the recorded outputs, by request."""
    found = {i: divergence(trace, i, output, dtype) for i, output in enumerate(outputs)}
    return {i: one for i, one in found.items() if one is not None}


def comparable(positions: Mapping[int, int], requests: int, learns: bool) -> dict[int, int]:
    """Return the position up to which rounds are compared, by request.

    Requests that are compared to their end are left out.  ``positions`` are those of divergences,
    by request.  If the policy `learns` across requests, one that differs changes all that follow.
    """
    until = dict(positions)
    if learns and until:
        until |= dict.fromkeys(range(min(until) + 1, requests), -1)
    return until


def draft_ties(
    real: RoundLog, replayed: RoundLog, trace: Trace, dtype: torch.dtype,
    until: Mapping[int, int],
) -> dict[int, int]:  # fmt: skip
    """Return the requests whose rounds first differ at a near-tie of the draft model.

    There it proposed another token than recorded, after the same text.  The value is the output
    position at which that round begins.

    ``until``: by request, the position at which its text diverged; nothing after it is looked at.
    """
    found = {}
    for i in range(len(trace.requests)):
        pairs = (pair for pair in _paired(real, replayed, i, until) if _differ(*pair))
        a, b = next(pairs, (None, None))
        if a is not None and b is not None:
            # The first drafted token that only one of the two has right, if they differ in that.
            at = int(trace.request_starts[i]) + b.position + min(a.accepted, b.accepted)
            if _closest(trace, "draft", trace.on_path[at : at + 1], dtype) <= NEAR:
                found[i] = b.position
    return found


def explain(
    real: RoundLog,
    replayed: RoundLog,
    outputs: Sequence[Sequence[int]],
    trace: Trace,
    dtype: torch.dtype,
    drafted: Trace | None = None,
) -> list[dict[str, Any]]:
    """Return the first difference of every request that differs, and its cause.

    ``drafted``: the recording of the draft source, if it is not `trace`'s own draft model.

    Causes: ``target near a tie`` and ``draft near a tie`` (margins within `NEAR` units in
    the drafted span, for drafters on the target's features `NEAR_FEATURES`); ``signal at a
    threshold``: the draft length differs, which after equal outcomes only a signal can have
    caused; else ``unexplained``.
    """
    found = []
    for i in range(len(trace.requests)):
        mine, theirs = (log.of_request(i) for log in (real, replayed))
        at = _first_difference(mine, theirs, outputs[i], output_of(trace, i))
        if at is None:
            continue
        a, b = mine[min(at, len(mine) - 1)], theirs[min(at, len(theirs) - 1)]
        first = int(trace.request_starts[i]) + b.position
        last = min(first + max(a.drafted, b.drafted) + 1, int(trace.request_starts[i + 1]))
        rows = trace.on_path[first:last]
        target = _closest(trace, "target", rows, dtype)
        of, near = trace if drafted is None else drafted, NEAR
        if of.by_start:
            # The draft from this round's start follows in the rows after it.
            ends = np.append(of.on_path, len(of))[first : first + 2]
            rows = np.arange(ends[0], min(ends[1], ends[0] + last - first))
            near = NEAR_FEATURES
        draft = _closest(of, "draft", rows, dtype)
        if target <= NEAR:
            cause = "target near a tie"
        elif draft <= near:
            cause = "draft near a tie"
        elif real.reads and a.drafted != b.drafted:
            cause = "signal at a threshold"
        else:
            cause = "unexplained"
        found.append(
            {
                "policy": real.policy, "request": trace.requests[i].id, "round": at,
                "position": b.position, "cause": cause,
                "target_units": target, "draft_units": draft,
            }
        )  # fmt: skip
    return found


def _closest(trace: Trace, side: str, rows: npt.NDArray[np.int64], dtype: torch.dtype) -> float:
    """Return the smallest margin of a model's two likeliest tokens, in units in the last place."""
    first, second = (trace.columns[f"{side}_{top}"][rows] for top in ("top1", "top2"))
    return float(units(first, second, dtype).min(initial=np.inf))


def _first_difference(
    mine: Sequence[Round], theirs: Sequence[Round], output: Sequence[int], recorded: Sequence[int]
) -> int | None:
    """Return the index of the first round whose outcome or tokens differ."""
    for k, (a, b) in enumerate(itertools.zip_longest(mine, theirs)):
        if a is None or b is None or _differ(a, b):
            return k
        span = slice(b.position, b.position + b.emitted)
        if list(output[span]) != list(recorded[span]):
            return k
    return None


def rounds_differ(
    real: RoundLog, replayed: RoundLog, until: Mapping[int, int] | None = None
) -> int:
    """Count the rounds whose (drafted, accepted) differ; unequal numbers of rounds differ too.

    ``until``: by request, the position at which its text diverged; nothing after it is compared.
    """
    pairs = (_paired(real, replayed, i, until or {}) for i in range(len(real.requests)))
    return sum(_differ(a, b) for own in pairs for a, b in own)


def _differ(a: Round | None, b: Round | None) -> bool:
    return a is None or b is None or (a.drafted, a.accepted) != (b.drafted, b.accepted)


def _paired(
    real: RoundLog, replayed: RoundLog, request: int, until: Mapping[int, int]
) -> Iterator[tuple[Round | None, Round | None]]:
    """Return the rounds of one request that compare, in pairs; None where one has no more."""
    both = [log.of_request(request) for log in (real, replayed)]
    if request in until:
        both = [before(rounds, until[request]) for rounds in both]
    return itertools.zip_longest(both[0], both[1])


class Texts:
    """The outputs of real runs and those of `trace`, by run.

    Parameters
    ----------
    outputs: Token ids by policy and request; a policy that is not in it decoded no text of its own.
    dtype: Number format that the models ran in.
    learners: Policies that remember earlier requests.
    """

    def __init__(
        self, trace: Trace, outputs: Mapping[str, Sequence[Sequence[int]]], dtype: str,
        learners: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.trace, self.outputs, self.dtype = trace, outputs, getattr(torch, dtype)
        self.learners, count = learners, len(trace.requests)
        self.diverged = {name: divergences(trace, own, self.dtype) for name, own in outputs.items()}
        found = {i for own in self.diverged.values() for i in own}
        self.left_out = found if len(found) < count else set()
        """Requests whose seconds are compared under no policy, so that all are of the same texts.

        Where every request diverged under some policy none would remain, and none is left out.
        """

    def times(self, times: pd.DataFrame) -> pd.DataFrame:
        """Return the measured times of the requests that are not left out."""
        ids = [self.trace.requests[i].id for i in self.left_out]
        return times[~times["request"].isin(ids)].reset_index(drop=True)

    def compared(
        self, rows: pd.DataFrame, real: Mapping[str, RoundLog], replayed: Mapping[str, RoundLog],
        draft_model: bool = False,
    ) -> pd.DataFrame:  # fmt: skip
        """Return `rows` with the comparison of their rounds and texts.

        ``rounds_differ`` counts rounds up to a divergence, ``texts_diverged`` the requests whose
        text diverged.  In the JSON, ``diverged`` names position, both tokens and the recorded
        logits of each, and ``requests_left_out`` is the number of requests whose seconds are not
        compared.

        Where the `draft_model` drafted, ``drafts_diverged`` counts the requests whose text is the
        recorded one, and in which it proposed another token at a near-tie: their rounds are
        compared up to there, too.
        """
        names = list(rows["policy"])
        diverged = [self.diverged.get(name, {}) for name in names]
        differ, ties = [], []
        for name, own in zip(names, diverged, strict=True):
            until, tied = self._until(real[name], replayed[name], own, draft_model)
            differ.append(rounds_differ(real[name], replayed[name], until))
            ties.append(tied)
        rows = rows.assign(rounds_differ=differ)
        if not self.outputs:
            return rows
        rows = with_diverged(rows, [[*own.values()] for own in diverged], len(self.left_out))
        if draft_model:
            rows.insert([*rows.columns].index("texts_diverged") + 1, "drafts_diverged", ties)
        return rows

    def _until(
        self, real: RoundLog, replayed: RoundLog, diverged: Mapping[int, Divergence],
        draft_model: bool,
    ) -> tuple[dict[int, int], int]:  # fmt: skip
        """Return the position up to which each request compares, and how many drafts diverged."""
        count, learns = len(self.trace.requests), real.policy in self.learners
        positions = {i: one.position for i, one in diverged.items()}
        until = comparable(positions, count, learns)
        if not draft_model or real.policy not in self.outputs:
            return until, 0
        ties = draft_ties(real, replayed, self.trace, self.dtype, until)
        if learns and ties:
            ties = {min(ties): ties[min(ties)]}  # what follows was learnt from other rounds
        # The round of the tie has another draft: those before it compare.
        before_ties = {i: begin - 1 for i, begin in ties.items()}
        return comparable(positions | before_ties, count, learns), len(ties)


def with_diverged(
    rows: pd.DataFrame, diverged: Sequence[Sequence[Divergence]], left_out: int
) -> pd.DataFrame:
    """Return `rows` with the columns about each row's divergences."""
    counts = [len(own) for own in diverged]
    listed: Any = [[one._asdict() for one in own] for own in diverged]
    cells = pd.Series(listed, index=rows.index, dtype=object)
    rows = rows.assign(diverged=cells, requests_left_out=left_out)
    rows.insert([*rows.columns].index("rounds_differ") + 1, "texts_diverged", counts)
    return rows


def answers_to(trace: Trace, prompts: Iterable[Prompt] = ()) -> dict[str, str]:
    """Return the numbers that solve the requests of `trace`, by id.

    A number of `prompts` counts before the recorded one, if id and category are the request's.
    """
    known = {request.id: request.category for request in trace.requests}
    recorded = {id: n for id, n in trace.meta.get(ANSWERS, {}).items() if id in known}
    own = {p.id: p.answer for p in prompts if known.get(p.id) == p.category}
    return recorded | {id: number for id, number in own.items() if number is not None}


def solves(pair: Pair, tokens: Sequence[int], ended: str | None, answer: str | None) -> bool | None:
    """Return True if an output ends in the number `answer`; None if its prompt has none.

    An output that its token limit cut counts as False: its last number is an intermediate one.
    """
    if answer is None:
        return None
    # A special token may have a number in its name.
    text = pair.tokenizer.decode(tokens, skip_special_tokens=True)
    return ended == "eos" and solved(text, answer)


def solved_by(pair: Pair, trace: Trace, answers: Mapping[str, str]) -> list[str]:
    """Return ids of the requests that the recorded outputs solve."""
    return [
        request.id
        for i, request in enumerate(trace.requests)
        if solves(pair, output_of(trace, i), request.ended, answers.get(request.id))
    ]


def score(pair: Pair, trace: Trace, answers: Mapping[str, str]) -> str:
    """Say how many of the requests that have an answer the recorded outputs solve."""
    count = len(solved_by(pair, trace, answers))
    cut = sum(r.ended != "eos" for r in trace.requests if r.id in answers)
    also = f"; {cut} cut at the token limit" if cut else ""
    return f"solves {count} of the {len(answers)} prompts with a numeric answer{also}"
