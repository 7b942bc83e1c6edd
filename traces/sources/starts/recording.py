"""Drafts that depend on where the round began: recorded for every start.

Parallel heads see the state after the last verified token alone; a layer-skipping drafter attends
to its own inexact states of this round's tokens.  Either way the draft from one start is one chain,
whatever the length policy, so (start, offset) holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from traces.acceptance.sampling import Sampling
from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.sources.base import DRAFTER_SIGNALS, Recordings, Source, SourceReplay
from traces.sources.columns import DRAWN, Floats, check_shapes, read_columns

WIDER = "its verification is wider than its draft"
START_SIGNALS = ("top1", "top2", "logsumexp", "entropy")


@dataclass(frozen=True, eq=False)
class StartRecording:
    """The drafts of a source from every start of every request of one trace.

    Parameters
    ----------
    token:
        (starts, offsets) int32; one row per output position, requests in turn.  -1 where the
        chain had ended with EOS.
    signals:
        `START_SIGNALS`, (starts, offsets) float32 each: of the drafter's logits at T = 1.
    rank:
        (starts, offsets) int32: rank of the true token under the drafter's logits, 0 = top,
        -1 if it is not ranked; for trees of candidates.
    request_starts:
        First row of each request, and the number of rows at the end.
    meta:
        Provenance, and where the replay needs it ``layers``: those a layer-skipping drafter
        runs, or those of the target whose pass carries mask tokens.

    log_prob, raw_log_prob:
        (starts, offsets) float32 along sampled outputs: that the token was drawn with, and its
        own at T = 1 without top-p; None along greedy ones.

    Raises
    ------
    DraftsimError
        If the arrays disagree.
    """

    token: npt.NDArray[np.int32]
    signals: Mapping[str, npt.NDArray[np.float32]]
    rank: npt.NDArray[np.int32]
    request_starts: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    log_prob: npt.NDArray[np.float32] | None = None
    raw_log_prob: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        drawn = {name: getattr(self, name) for name in DRAWN}
        by_draft: dict[str, Any] = {"token": self.token, "rank": self.rank, **self.signals, **drawn}
        shape = self.request_starts[-1], self.offsets
        check_shapes("recording of drafts by start", {n: (v, shape) for n, v in by_draft.items()})

    @cached_property
    def columns(self) -> Floats:
        """(starts, offsets, 6): what policies read of each draft (`read_columns`)."""
        drawn = self.log_prob, self.raw_log_prob
        return read_columns(self.signals, *(drawn if all(v is not None for v in drawn) else ()))

    @property
    def offsets(self) -> int:
        """Longest draft recorded."""
        return int(self.token.shape[1])

    @property
    def sampling(self) -> Sampling:
        """How the outputs and drafts that it follows were drawn."""
        return Sampling.of(self.meta.get("sampling"))


class StartSource(Source):
    """A source recorded by (start, offset)."""

    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS
    unlike: ClassVar[str | None] = WIDER
    takes_verified: ClassVar[bool] = False
    """True if every round's first pass reads all that was verified since the one before."""
    drafts_end: ClassVar[bool] = False
    """True if a draft ends where the recorded one does."""
    k: int | None = None
    """Longest draft that it makes; None: as recorded."""

    @property
    def key(self) -> str:
        """Name of its recording."""
        return self.name

    def recording(self, recordings: Recordings) -> StartRecording:
        """The source's own among `recordings`; DraftsimError if it is not there."""
        recording = recordings.starts.get(self.key)
        if recording is None:
            have = ", ".join(sorted(recordings.starts)) or "none"
            raise DraftsimError(
                f"no recording of {self.key!r} drafts (there are: {have}): record them with "
                "`draftsim profile --exit-layers`"
            )
        return recording

    def longest(self, trace: Trace, recordings: Recordings) -> int | None:
        """Return the trace's own bound: no head drafts more than there are of it."""
        self.recording(recordings)
        return trace.max_gamma

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with its passes instead of the draft model's.

        Raises DraftsimError if the table lacks them.
        """
        raise NotImplementedError

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Needs the source's own recording of the same requests."""
        recording = self.recording(recordings)
        check_follows(self.key, recording, trace, first)
        return lambda request: self.replay(trace, request, recording, first)

    def replay(
        self, trace: Trace, request: int, recording: StartRecording, first: int
    ) -> SourceReplay:
        """The decoder of one request."""
        raise NotImplementedError


class ByStart(Protocol):
    """A recording of what was drafted from every start of the requests of one trace."""

    @property
    def request_starts(self) -> tuple[int, ...]:
        """First row of each request, and the number of rows at the end."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How the outputs that it follows were drawn."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """Provenance, and what the replay needs to know."""
        ...


def check_follows(key: str, recording: ByStart, trace: Trace, first: int) -> None:
    """Raise DraftsimError unless the recording named `key` can be replayed along `trace`."""
    if first < 1:
        raise DraftsimError(f"{key} is recorded after the prefill: replay with first=1")
    if np.diff(recording.request_starts).tolist() != [r.tokens for r in trace.requests]:
        raise DraftsimError(
            f"the recording of {key!r} drafts is of other requests than the trace: record both "
            "in one run"
        )
    if recording.sampling != trace.sampling:
        raise DraftsimError(
            f"the recording of {key!r} drafts is of outputs decoded {recording.sampling.label}, "
            f"and the trace's were {trace.sampling.label}: record both in one run"
        )


class StartReplay(SourceReplay):
    """One recorded request, drafted from (start, offset) rows.

    ``width`` heads can be used; None takes all that were recorded.
    """

    sampled = True

    def __init__(
        self, trace: Trace, request: int, recording: StartRecording, first: int,
        width: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(trace, request, first)
        self.recording = recording
        self.row0 = recording.request_starts[request]
        if width is not None and width > recording.offsets:
            raise DraftsimError(
                f"{width} heads were asked for and {recording.offsets} recorded: lower k, or "
                "train and record more"
            )
        self.width = recording.offsets if width is None else width

    def run_length(self) -> int:
        """Leading drafts from here that are right."""
        row = self.recording.token[self.row0 + self.position, : self.width].tolist()
        run = 0
        for token, true in zip(row, self.output[self.position :], strict=False):
            if token != true:
                break
            run += 1
        return run

    def check_tail(self, offset: int) -> None:
        """Raise TailError if no draft was recorded at this offset."""
        if offset >= self.width:
            raise TailError(
                f"the policy drafted {offset + 1} tokens at position {self.position} of "
                f"request {self.info.id!r}, and {self.width} were recorded: lower its maximum, "
                "or record longer drafts"
            )

    def token(self, offset: int) -> RecordedToken:
        """The recorded draft at this offset from here."""
        record, at = self.recording, (self.row0 + self.position, offset)
        token = int(record.token[at])
        prob, entropy, margin, prob_margin, top, raw = record.columns[at].tolist()
        return RecordedToken(
            token, token in self.eos, prob, entropy, margin, prob_margin, top_prob=top,
            raw_prob=raw,
        )  # fmt: skip
