"""Drafters on the target's features: EAGLE, EAGLE-3 and MTP modules; here, drafting a chain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import PurePath
from typing import Any, ClassVar, Self

from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import DRAFTER, Counted
from traces.replay.rounds import RoundLog
from traces.sources.base import Drafter, Recordings, Source, SourceReplay
from traces.sources.starts.as_draft import in_an_engine, in_the_drafts_place, model_of
from traces.sources.starts.recording import ByStart, StartRecording, StartReplay, StartSource

RECORD = "`draftsim profile --source eagle:model=DIR`"


class OnFeatures(Source):
    """A source whose drafter reads the target's features (arXiv:2401.15077, sec. 3.1).

    ``model`` is the drafter's folder, or names a recorded one: by its folder's own name, or its
    kind (eagle, eagle3, mtp) where that is the only one.  None: the only one recorded.
    """

    prefix: ClassVar[str]
    """Beginning of its recordings' names."""
    record: ClassVar[str]
    """Option that records it, for messages."""

    def __init__(self, model: str | None = None) -> None:
        self.model = model

    @abstractmethod
    def found(self, recordings: Recordings) -> Mapping[str, ByStart]:
        """Return the recordings of such sources, by name."""

    @property
    def key(self) -> str:
        """Name of the recording of the drafter in the folder ``model``."""
        return self.prefix + PurePath(self.model or "").name

    @abstractmethod
    def recording(self, recordings: Recordings) -> ByStart:
        """Return the recording that ``model`` names; DraftsimError unless there is exactly one."""

    def recorded(self, recordings: Recordings) -> str:
        """Name of the recording that ``model`` names; DraftsimError if none or several fit."""
        mine = self.found(recordings)
        if self.model is not None and self.key in mine:
            return self.key
        fitting = [k for k, r in mine.items() if self.model in (None, r.meta["kind"])]
        if len(fitting) == 1:
            return fitting[0]
        have = (f"{k.removeprefix(self.prefix)} ({r.meta['kind']})" for k, r in mine.items())
        raise DraftsimError(
            f"{len(fitting)} recorded drafters are what {self.model or 'no model'} names "
            f"(there are: {', '.join(have) or 'none'}): name one, {self.name}:model=NAME, or "
            f"record it with {self.record}"
        )

    def label(self, recordings: Recordings) -> str:
        """As it is named on the command line: by its folder's own name."""
        return f"{self.name}:model={self.recorded(recordings).removeprefix(self.prefix)}"

    def of(self, model: str) -> Self:
        """The same source with another drafter."""
        other = copy(self)
        other.model = model
        return other

    def with_each(self, recordings: Recordings) -> list[Self]:
        """The same source with each recorded drafter of the kind ``model``, by name."""
        mine = self.found(recordings).items()
        return [self.of(k.removeprefix(self.prefix)) for k, r in mine
                if r.meta["kind"] == self.model]  # fmt: skip


class Eagle(OnFeatures, StartSource):
    """A drafter that continues the target's features (arXiv:2401.15077, 2503.01840, 2412.19437).

    Its keys and values of this round's tokens come from its own outputs instead of features, so a
    draft depends on where its round began.  The first pass of a round reads the tokens verified
    since the one before; the others one token each, or, with several MTP modules, which run in
    turn, the same tokens again.
    """

    name = "eagle"
    prefix = "eagle."
    takes_verified = True
    record = RECORD
    what = "EAGLE, EAGLE-3 or MTP drafter on the target's features, as a chain; exact"

    def found(self, recordings: Recordings) -> Mapping[str, StartRecording]:
        """The recorded chains."""
        return recorded_drafters(recordings)

    def recording(self, recordings: Recordings) -> StartRecording:
        """The one that ``model`` names; DraftsimError if there is none, or more than one."""
        return recordings.starts[self.recorded(recordings)]

    def drafter(self, recordings: Recordings) -> Drafter:
        """Its passes are timed under the name of its recording."""
        key = self.recorded(recordings)
        return Drafter(key, int(recordings.starts[key].meta["modules"]) == 1)

    def longest(self, trace: Trace, recordings: Recordings) -> int:
        """Return the longest chain recorded."""
        del trace
        return self.recording(recordings).offsets

    def unlike_a_draft_model(self, recordings: Recordings) -> str | None:
        """Return why several modules are unlike a draft model; None for one."""
        if self.drafter(recordings).by_passes:
            return None
        return "its modules run in turn, each over tokens that the others have seen"

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with the passes of its module, or of the engine that drafted with it."""
        name = model_of(self, recordings)
        if (latency.meta.get("engine") or {}).get("own_drafter"):
            return in_an_engine(latency, str(self.recording(recordings).meta["model"]), name)
        return in_the_drafts_place(latency, name)

    def replay(
        self, trace: Trace, request: int, recording: StartRecording, first: int
    ) -> SourceReplay:
        """The chain over the recorded rows."""
        return EagleReplay(trace, request, recording, first)


def recorded_drafters(recordings: Recordings) -> dict[str, StartRecording]:
    """The recorded chains of drafters on features, by name."""
    return {k: r for k, r in recordings.starts.items() if k.startswith(Eagle.prefix)}


class EagleReplay(StartReplay):
    """A pass per drafted token, of which a round's first takes in what was verified."""

    takes_verified = True

    def __init__(
        self, trace: Trace, request: int, recording: StartRecording, first: int = 1
    ) -> None:
        super().__init__(trace, request, recording, first)
        self._turns = int(recording.meta["modules"])
        # Output tokens known when a module last ran; the prefill runs them all.
        self._ran = [0] * self._turns

    @property
    def by_passes(self) -> bool:
        """Return True if every drafted token is a pass (`traces.sources.base.Drafter`)."""
        return self._turns == 1

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """The next token of the chain from here; None when the modules are used up."""
        offset = len(so_far)
        if offset >= self.width and self.width == self._turns > 1:
            return None
        self.check_tail(offset)
        width = 1
        if not offset or self._turns > 1:
            width = self.position - self._ran[offset] + offset
            width = min(width, self.info.prompt_length + self.position - 1)
            self._ran[offset] = self.position
        self.calls.add(DRAFTER, width)
        return self.token(offset)

    def charge(self, submitted: int) -> int:
        """An ordinary verification over the draft and the last token."""
        return submitted + 1

    def chained(self, log: RoundLog) -> list[Counted] | None:
        """Only passes of the drafter, where a token is one."""
        del log
        return [] if self.by_passes else None
