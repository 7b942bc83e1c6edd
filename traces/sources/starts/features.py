"""Drafters on the target's features: EAGLE, EAGLE-3 and MTP modules; here, drafting a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, Self

from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import DRAFTER, Counted
from traces.replay.rounds import RoundLog
from traces.sources.as_draft import in_an_engine, model_of, with_drafter
from traces.sources.base import Drafter, Source
from traces.sources.recording import Recordings
from traces.sources.starts.recording import StartRecording, StartReplay, StartSource


@dataclass(eq=False)
class OnFeatures(Source):
    """A source whose drafter reads the target's features (arXiv:2401.15077, sec. 3.1).

    ``model`` is the drafter's folder, or names a recorded one: by its folder's own name, or its
    kind (eagle, eagle3, mtp) where that is the only one.  None: the only one recorded.
    """

    one_pass: ClassVar[bool] = False
    """True if its drafter drafts all tokens of a round in one pass."""
    model: str | None = None

    @property
    def key(self) -> str:
        """Name of the recording of the drafter in the folder ``model``."""
        return f"{self.name}.{PurePath(self.model or '').name}"

    def found(self, recordings: Recordings) -> Recordings:
        """Return the recordings of such sources, by the drafter's name."""
        mine = f"{self.name}."
        return {k.removeprefix(mine): r for k, r in recordings.items() if k.startswith(mine)}

    def recorded(self, recordings: Recordings) -> str:
        """Name of the recording that ``model`` names; DraftsimError if none or several fit."""
        mine = self.found(recordings)
        if self.model is not None and self.key in recordings:
            return self.key
        fitting = [k for k, r in mine.items() if self.model in (None, r.meta["kind"])]
        if len(fitting) == 1:
            return f"{self.name}.{fitting[0]}"
        have = (f"{k} ({r.meta['kind']})" for k, r in mine.items())
        raise DraftsimError(
            f"{len(fitting)} recorded drafters are what {self.model or 'no model'} names "
            f"(there are: {', '.join(have) or 'none'}): name one, {self.name}:model=NAME, or "
            f"record it with {self.record}"
        )

    def label(self, recordings: Recordings) -> str:
        """Return the name on the command line: by its folder's own name."""
        return f"{self.name}:model={self.recorded(recordings).removeprefix(f'{self.name}.')}"

    def for_decoding(self, recordings: Recordings) -> Source:
        """Return the source with the folder that its drafter was recorded from."""
        if Path(self.model or "").is_dir():
            return self
        return replace(self, model=str(self.recording(recordings).meta["model"]))

    def with_each(self, recordings: Recordings) -> Sequence[Self]:
        """Return the same source with each recorded drafter of the kind ``model``, by name."""
        mine = self.found(recordings).items()
        kind = self.model
        return [replace(self, model=k) for k, r in mine if r.meta["kind"] == kind] or [self]


class EagleReplay(StartReplay):
    """A pass per drafted token, of which a round's first takes in what was verified."""

    takes_verified = True

    def __init__(
        self, trace: Trace, request: int, recording: StartRecording, first: int, source: Eagle
    ) -> None:
        super().__init__(trace, request, recording, first, source)
        self._turns = int(recording.meta["modules"])
        # Output tokens known when a module last ran; the prefill runs them all.
        self._ran = [0] * self._turns

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the next token of the chain from here; None when the modules are used up."""
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

    def chained(self, log: RoundLog) -> list[Counted] | None:
        """Count passes of the drafter alone, where a token is one."""
        return [] if self._turns == 1 else None


class Eagle(OnFeatures, StartSource):
    """A drafter that continues the target's features (arXiv:2401.15077, 2503.01840, 2412.19437).

    Its keys and values of this round's tokens come from its own outputs instead of features, so a
    draft depends on where its round began.  The first pass of a round reads the tokens verified
    since the one before; the others one token each, or, with several MTP modules, which run in
    turn, the same tokens again.
    """

    name = "eagle"
    replays = EagleReplay
    takes_verified = True
    record = "`draftsim profile --source eagle:model=DIR`"
    what = "EAGLE, EAGLE-3 or MTP drafter on the target's features, as a chain; exact"

    def drafter(self, recordings: Recordings) -> Drafter:
        """Return the drafter, whose passes are timed under the name of its recording."""
        key = self.recorded(recordings)
        return Drafter(key, int(recordings[key].meta["modules"]) == 1)

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
        return with_drafter(latency, name)
