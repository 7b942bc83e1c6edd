"""Drafts that depend on where the round began: recorded for every start.

Parallel heads see the state after the last verified token alone; a layer-skipping drafter attends
to its own inexact states of this round's tokens.  Either way the draft from one start is one chain,
whatever the length policy, so (start, offset) holds everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from traces.acceptance.schema import MOST_DRAFTED
from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.sources.as_draft import laid_out, model_of
from traces.sources.base import DRAFTER_SIGNALS, Source, SourceReplay, leading
from traces.sources.recording import DRAWN, LOGITS, Layout, Recordings, SourceRecording
from traces.store.header import PathLike, check, is_whole

WIDER = "its verification is wider than its draft"


class StartRecording(SourceRecording):
    """The drafts of a source from every start of every request of one trace.

    A row per output position, requests in turn. The arrays, (starts, offsets) each: ``token``, -1
    where the chain had ended with EOS; ``rank`` of the true token under the drafter's logits, 0 =
    top, -1 if it is not ranked, for trees of candidates; `traces.sources.recording.LOGITS`. In
    ``meta`` are, where the replay needs it, ``layers``: those that a layer-skipping drafter runs,
    or those of the target whose pass carries mask tokens.
    """

    kind = "starts"
    said = "recording of drafts by start"

    @property
    def offsets(self) -> int:
        """Longest draft recorded."""
        return int(self["token"].shape[1])

    @property
    def header(self) -> dict[str, Any]:
        """The longest draft."""
        return {"offsets": self.offsets}

    @classmethod
    def layout(cls, header: Mapping[str, Any]) -> Layout:
        """Return the arrays of drafts up to the longest."""
        row = (int(header["offsets"]),)
        floats = dict.fromkeys((*LOGITS, *DRAWN), ("float32", row))
        return {"token": ("int32", row), "rank": ("int32", row), **floats}

    @classmethod
    def checked(cls, path: PathLike, header: Mapping[str, Any]) -> dict[str, Any]:
        """Check the longest draft."""
        offsets = header.get("offsets")
        check(path, "offsets", offsets, is_whole(offsets, 1, MOST_DRAFTED), f"1 to {MOST_DRAFTED}")
        return {}


class StartSource(Source):
    """A source recorded by (start, offset)."""

    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS
    unlike: ClassVar[str | None] = WIDER
    recorded_as = StartRecording
    takes_verified: ClassVar[bool] = False
    """True if every round's first pass reads all that was verified since the one before."""
    drafts_end: ClassVar[bool] = False
    """True if a draft ends where the recorded one does."""
    k: int | None = None
    """Longest draft that it makes; None: as recorded."""

    def longest(self, trace: Trace, recordings: Recordings) -> int | None:
        """Return the longest chain recorded, or the trace's bound if a draft ends by itself."""
        offsets = int(self.recording(recordings).offsets)
        return trace.max_gamma if self.drafts_end else offsets

    def drafts_along(self, trace: Trace, recordings: Recordings) -> Trace:
        """Return the outputs with the chains recorded from every start."""
        recording = self.recording(recordings)
        self.open(trace, recordings, 1)  # refuses a recording of other requests, or settings
        most = recording.offsets
        if self.k is not None:
            self.open(trace, recordings, 1)(0)  # refuses more heads than there are
            most = self.k
        drafted = recording["token"][:, :most]
        # Drawn greedily, a token is the likeliest.
        likeliest = recording["top1"] - recording["logsumexp"]
        found = {n: recording.arrays.get(n, likeliest)[:, :most] for n in (*DRAWN, *LOGITS)}
        signals = {f"draft_{n.replace('log_', 'log')}": values for n, values in found.items()}
        meta = {
            "drafts": self.label(recordings), "drafter": model_of(self, recordings),
            "takes_verified": self.takes_verified, "drafts_end": self.drafts_end,
        }  # fmt: skip
        # A draft that ended with EOS holds nothing more; one that never was holds its blanks.
        return laid_out(trace, drafted, (drafted >= 0) | (drafted[:, :1] < 0), signals, meta)


class StartReplay(SourceReplay):
    """One recorded request, drafted from (start, offset) rows, of which `Source.k` are used."""

    sampled = True

    def __init__(
        self, trace: Trace, request: int, recording: StartRecording, first: int,
        source: StartSource,
    ) -> None:  # fmt: skip
        super().__init__(trace, request, first)
        self.recording = recording
        self.row0 = recording.request_starts[request]
        self._tokens = recording["token"]
        if source.k is not None and source.k > recording.offsets:
            raise DraftsimError(
                f"{source.k} heads were asked for and {recording.offsets} recorded: lower k, or "
                "train and record more"
            )
        self.width = recording.offsets if source.k is None else source.k

    def run_length(self) -> int:
        """Return the number of leading drafts from here that are right."""
        row = self._tokens[self.row0 + self.position, : self.width].tolist()
        return leading(row, self.output[self.position :])

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the next token recorded from here; None when they are used up."""
        if not so_far:
            self.begin_draft()
        return self.token(len(so_far)) if len(so_far) < self.width else None

    def begin_draft(self) -> None:
        """Count the calls that a draft begins with: none."""

    def check_tail(self, offset: int) -> None:
        """Raise TailError if no draft was recorded at this offset."""
        if offset >= self.width:
            raise TailError(
                f"the policy drafted {offset + 1} tokens at position {self.position} of "
                f"request {self.info.id!r}, and {self.width} were recorded: lower its maximum, "
                "or record longer drafts"
            )

    def token(self, offset: int) -> RecordedToken:
        """Return the recorded draft at this offset from here."""
        at = self.row0 + self.position, offset
        token = int(self._tokens[at])
        # In the order of a token's fields.
        return RecordedToken(token, token in self.eos, *self.recording.columns[at].tolist())
