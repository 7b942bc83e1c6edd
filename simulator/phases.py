"""Phases of an answer (thinking, answer, tool call): speculation by phase.

A phase is a category of output positions.  It begins with a marker in the output and ends with
another; the positions outside all of them are the answer's.  Drafts are accepted more often in
some phases than in others, so that a workload with longer thinking has another speedup.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools
from simulator.pricing import Priced
from simulator.summary import summarize_runs, to_rows
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.sources.base import true_tokens

ANSWER = "answer"
"""The phase of positions outside all others."""


@dataclass(frozen=True)
class Phase:
    """A named part of an output between two markers, which belong to it.

    A marker is text, or a token id written ``#ID``.  Without ``begin`` the phase begins with the
    output, as thinking does where a chat template ends with its opening tag.

    Raises DraftsimError for an empty name or end.
    """

    name: str
    begin: str
    end: str

    def __post_init__(self) -> None:
        if not self.name or not self.end or self.name == ANSWER:
            raise DraftsimError(
                f"phase {self.name!r} from {self.begin!r} to {self.end!r}: expected a name other "
                f"than {ANSWER!r} and an end"
            )

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Return the phase that ``NAME=BEGIN..END`` describes.

        >>> Phase.parse("thinking=<think>..</think>")
        Phase(name='thinking', begin='<think>', end='</think>')
        """
        name, equals, markers = text.partition("=")
        begin, dots, end = markers.partition("..")
        if not equals or not dots:
            raise DraftsimError(f"phase {text!r}: expected NAME=BEGIN..END")
        return cls(name.strip(), begin, end)


def _token(marker: str) -> int | None:
    digits = marker.removeprefix("#")
    return int(digits) if marker.startswith("#") and digits.isdigit() else None


class _Output:
    """One output, searched for markers."""

    def __init__(self, tokens: Sequence[int], decode: Callable[[int], str] | None) -> None:
        self.tokens = tokens
        texts = [] if decode is None else [decode(token) for token in tokens]
        self.text = "".join(texts)
        self.starts = list(accumulate(map(len, texts), initial=0))[: len(texts)]

    def find(self, marker: str, start: int) -> tuple[int, int] | None:
        """Return the tokens [first, after) of the next `marker` from token `start` on.

        An empty marker is found only at the output's first token.
        """
        if not marker:
            return None if start else (0, 0)
        token = _token(marker)
        if token is not None:
            where = next((i for i in range(start, len(self.tokens)) if self.tokens[i] == token), -1)
            return None if where < 0 else (where, where + 1)
        if start >= len(self.tokens):
            return None
        at = self.text.find(marker, self.starts[start])
        if at < 0:
            return None
        first = bisect_right(self.starts, at) - 1
        return max(first, start), bisect_right(self.starts, at + len(marker) - 1)


def phases_of(
    trace: Trace, phases: Sequence[Phase], decode: Callable[[int], str] | None = None
) -> npt.NDArray[np.int64]:
    """Return the phase of every output position, (positions,): 0 is the answer, i the i-th phase.

    ``decode`` gives the text of a token; only phases whose markers are text need it.  A phase
    whose end does not come lasts to the output's end.

    Raises DraftsimError if the trace holds no output tokens, or a marker needs ``decode``.
    """
    markers = [marker for phase in phases for marker in (phase.begin, phase.end)]
    if decode is None and any(marker and _token(marker) is None for marker in markers):
        raise DraftsimError("markers that are text need a tokenizer: give --tokenizer DIR")
    tokens = true_tokens(trace, sampled=True)
    found = np.zeros(len(tokens), dtype=np.int64)
    bounds = trace.request_starts.tolist()
    for begin, stop in pairwise(bounds):
        output = _Output(tokens[begin:stop], decode)
        at = 0
        while at < stop - begin:
            ahead = [
                (*where, number) for number, phase in enumerate(phases, 1)
                if (where := output.find(phase.begin, at)) is not None
            ]  # fmt: skip
            if not ahead:
                break
            first, inside, number = min(ahead, key=itemgetter(0))
            closed = output.find(phases[number - 1].end, inside)
            after = stop - begin if closed is None else closed[1]
            found[begin + first : begin + after] = number
            at = max(after, at + 1)
    return found


def phase_rows(
    runs: Sequence[Priced], trace: Trace, phases: Sequence[Phase], found: npt.NDArray[np.int64],
    resamples: int = 2000,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row for each phase that occurs and each of `runs`, plain decoding first.

    A round counts, with all its tokens and seconds, in the phase in which it begins: a run none of
    whose rounds begins in a phase has no row of it, nor has a phase in which no step of plain
    decoding begins, as before the first token that decoding emits.  Columns are
    those of `simulator.summary.summarize`, with ``phase`` and ``share``, the phase's part of the
    output tokens.  ``runs`` follow the outputs of `trace` (no lossy rules); ``found`` is of
    `phases_of`.
    """
    starts = trace.request_starts
    rows = []
    for number, name in enumerate([ANSWER, *(phase.name for phase in phases)]):
        share = float((found == number).mean()) if len(found) else 0.0
        parts = []
        for run in runs:
            rounds = run.log.rounds
            at = starts[rounds["request"]] + rounds["position"]
            parts.append(_within(run, found[at] == number))
        if share and len(parts[0].log):
            begun = [part for part in parts if len(part.log)]
            summary = to_rows(summarize_runs(begun, resamples=resamples))
            rows += [{"phase": name, "share": share, **row} for row in summary]
    return rows


def _within(run: Priced, keep: Bools) -> Priced:
    """Return the rounds of `run` that `keep` names, (rounds,), with their seconds."""
    log = replace(run.log, rounds=run.log.rounds[keep], recorded_calls=None, mismatched=None)
    return replace(
        run, log=log, draft_s=run.draft_s[keep], verify_s=run.verify_s[keep],
        signal_s=run.signal_s[keep], host_s=run.host_s[keep],
    )  # fmt: skip
