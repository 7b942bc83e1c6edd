"""Drafters on the target's features: chains (EAGLE, EAGLE-3, MTP), and one pass for all tokens.

P-EAGLE, DFlash, DSpark and PARD draft all tokens of a round in one pass (`Parallel`).  Mask tokens
follow the last true token, and one pass over what was verified and the masks gives every drafted
token.  So its cost hardly depends on the draft length, and a policy saves verification alone by
cutting drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import ClassVar, Self

import numpy as np

from policies.spec import describe_spec, parameter, whole, within
from traces.acceptance.synthetic import drawn_chances, logits_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import DRAFTER, ONE_PASS, Calls
from traces.replay.rounds import RoundLog
from traces.sources.as_draft import (
    in_an_engine,
    model_of,
    one_pass,
    standing_in,
    with_drafter,
    with_passes_alone,
)
from traces.sources.base import Source, eos_of, tokens_ahead, true_tokens
from traces.sources.recording import LOGITS, Recordings
from traces.sources.starts.sources import StartRecording, StartSource, others


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
        if not mine:
            raise DraftsimError(
                f"no drafter of the source {self.name} is recorded: {self.record} records one"
            )
        have = ", ".join(f"{k} ({r.meta['kind']})" for k, r in mine.items())
        found = (
            "several recorded drafters fit"
            if fitting
            else "no recorded drafter has the name or kind"
        )
        raise DraftsimError(
            f"{found} {self.model or self.name} (there are: {have}): name one, "
            f"{self.name}:model=NAME, or record it with {self.record}"
        )

    def drafter(self, recordings: Recordings) -> str:
        """Return the drafter, whose passes are timed under the name of its recording."""
        return self.recorded(recordings)

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


class Eagle(OnFeatures, StartSource):
    """A drafter that continues the target's features (arXiv:2401.15077, 2503.01840, 2412.19437).

    Its keys and values of this round's tokens come from its own outputs instead of features, so a
    draft depends on where its round began.  The first pass of a round reads the tokens verified
    since the one before; the others one token each, or, with several MTP modules, which run in
    turn, the same tokens again.
    """

    name = "eagle"
    takes_verified = True
    record = "`draftsim profile sources --source eagle:model=DIR`"
    what = "EAGLE, EAGLE-3 or MTP drafter on the target's features, as a chain; exact"

    def by_passes(self, recordings: Recordings) -> bool:
        """Return True unless several modules run in turn."""
        return int(recordings[self.recorded(recordings)].meta["modules"]) == 1

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Return the passes of each module, over what it has not read of the others' tokens."""
        return [_passes(log, DRAFTER, turn) for turn in range(int(recording.meta["modules"]))]

    def unlike_a_draft_model(self, recordings: Recordings) -> str | None:
        """Return why several modules are unlike a draft model; None for one."""
        if self.by_passes(recordings):
            return None
        return "its modules run in turn, each over tokens that the others have seen"

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with the passes of its module, or of the engine that drafted with it."""
        name = model_of(self, recordings)
        if (latency.meta.get("engine") or {}).get("own_drafter"):
            return in_an_engine(latency, str(self.recording(recordings).meta["model"]), name)
        return with_drafter(latency, name)


def _passes(log: RoundLog, kind: int, offset: int, masks: int = 0) -> Calls:
    """Return a pass of each round that drafts more than `offset` tokens.

    It reads what was verified since the pass before, the tokens drafted so far, and `masks`.
    """
    ran = np.flatnonzero(log.rounds["draft_forwards"] > offset)
    position, request = (log.rounds[n][ran].astype(np.int64) for n in ("position", "request"))
    before = np.append(0, position[:-1])
    before[np.diff(request, prepend=-1) > 0] = 0
    prompt = np.array([r.prompt_length for r in log.requests], dtype=np.int64)[request]
    read = np.minimum(position - before + offset, prompt + position - 1)
    return Calls.of(kind, ran, read + masks)


@dataclass(eq=False)
class Parallel(OnFeatures, StartSource):
    """A one-pass drafter, recorded by draft position or given by its acceptance alone.

    P-EAGLE (arXiv:2602.01469) and DSpark (arXiv:2607.05147) read the target's features, PARD
    (arXiv:2504.18583) is a draft model with mask tokens.

    Parameters
    ----------
    model:
        Folder or name of a recorded drafter, as `OnFeatures` has it.
    acceptance:
        Chance that the tokens up to each draft position are all accepted, as vLLM logs it by
        position: it does not rise.  The drafts are then drawn along the target's recorded output,
        independently in every round, and the pass costs what the draft model's does over as many
        tokens.
    concentration:
        How much the confidence of a drawn token tells: every token's probability of acceptance
        is drawn from a Beta distribution with its position's chance as the mean and this
        concentration, and is the probability that policies read.  None: it is the position's
        chance, and tells no more.
    k:
        Mask tokens of a pass, hence the longest draft.  None: as many as recorded, or as
        `acceptance` has positions.
    seed:
        Seed of the drawn drafts.

    Raises ValueError for impossible values, or `acceptance` together with `model`.
    """

    name = "parallel"
    one_pass = True
    unlike = None
    takes_verified = True
    drafts_end = True
    record = "`draftsim profile sources --source parallel:model=DIR`"
    what = (
        "one-pass drafter (P-EAGLE, DFlash, DSpark, PARD): recorded, or drawn from "
        "acceptance=[0.8,0.6,...] by position"
    )

    acceptance: Sequence[float] | None = None
    concentration: float | None = None
    k: int | None = parameter(None, whole, 1)
    seed: int = parameter(0, whole, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceptance is None and self.concentration is not None:
            raise ValueError("concentration belongs to acceptance=[...]: give that too")
        if self.acceptance is not None:
            _check(self.acceptance, self.model, self.k)
            vars(self)["fidelity"] = "approximate"  # its drafts are drawn
        if self.concentration is not None and not 0 < self.concentration < np.inf:
            raise ValueError(f"concentration is {self.concentration}, expected > 0 or none")

    @property
    def key(self) -> str:
        """Name of its recording, or of the drafts drawn for it."""
        return super().key if self.acceptance is None else describe_spec(self, self.name)

    def recorded(self, recordings: Recordings) -> str:
        """Name of its recording, or of the one drawn (`completed`); DraftsimError if none fits."""
        return super().recorded(recordings) if self.acceptance is None else self.key

    def label(self, recordings: Recordings) -> str:
        """Return the name on the command line."""
        return super().label(recordings) if self.acceptance is None else self.key

    def drafter(self, recordings: Recordings) -> str:
        """Return its own passes, or the draft model's where its acceptance alone is known."""
        return super().drafter(recordings) if self.acceptance is None else "draft"

    def longest(self, trace: Trace, recordings: Recordings) -> int:
        """Return the number of masks."""
        return self.k or int(self.recording(recordings).offsets)

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Return one pass for every round that drafts."""
        return [_passes(log, ONE_PASS, 0, self.width(recording) - 1)]

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with a draft of one pass."""
        width = self.width(self.recording(recordings))
        own = one_pass(latency, self.drafter(recordings), width)
        return standing_in(
            latency, with_passes_alone(latency.cells), own, model_of(self, recordings)
        )

    def completed(self, trace: Trace, recordings: Recordings) -> Recordings:
        """Add the drafts that `acceptance` describes, drawn along `trace`."""
        if self.acceptance is None or self.key in recordings:
            return recordings
        drawn = drawn_starts(trace, self.acceptance, self.concentration, self.seed)
        return {**recordings, self.key: drawn}

    def for_decoding(self, recordings: Recordings) -> Source:
        """Return the source with its drafter's folder, and as many masks as were recorded."""
        if self.acceptance is not None:
            return self
        own = replace(self, k=self.k or self.recording(recordings).offsets)
        return OnFeatures.for_decoding(own, recordings)


def drawn_starts(
    trace: Trace, acceptance: Sequence[float], concentration: float | None = None, seed: int = 0
) -> StartRecording:
    """Draw drafts with this acceptance by position from every start of `trace` (see `Parallel`).

    A draft holds the true tokens up to its first miss, and from there on others that end nothing.
    Raises DraftsimError if the trace holds no output tokens.
    """
    true = np.array(true_tokens(trace, sampled=True), dtype=np.int64)
    rng = np.random.default_rng(seed)
    survived = np.asarray(acceptance, dtype=np.float64)
    before = np.concatenate([[1.0], survived[:-1]])
    hazard = np.divide(survived, before, out=np.zeros_like(survived), where=before > 0)
    shape = len(true), len(survived)
    chance = np.broadcast_to(hazard, shape)
    if concentration is not None:
        chance = drawn_chances(chance, concentration, rng)
    right = np.cumprod(rng.random(shape) < chance, axis=1).astype(bool)
    wanted, eos = tokens_ahead(true, trace.request_ends, len(survived)), eos_of(trace)
    token = np.where(right & (wanted >= 0), wanted, others(wanted, eos))
    ended = np.isin(token, sorted(eos))
    token[ended.cumsum(axis=1) - ended > 0] = -1
    # Nothing drafts the prompt's own token.
    token[trace.columns["position"][trace.on_path] == 0] = -1
    logits = logits_of(chance)
    signals = {name: logits[f"draft_{name}"] for name in LOGITS}
    rank = np.where(wanted < 0, -1, np.where(token == wanted, 0, 1)).astype(np.int32)
    meta = {"acceptance": list(map(float, acceptance)), "sampling": trace.sampling.meta}
    arrays = {"token": token.astype(np.int32), "rank": rank, **signals}
    return StartRecording(arrays, tuple(trace.request_starts.tolist()), meta)


def _check(acceptance: Sequence[float], model: str | None, k: int | None) -> None:
    if model is not None:
        raise ValueError("model and acceptance are both given: name one of them")
    if not acceptance:
        raise ValueError("acceptance is empty, expected a chance for each draft position")
    for chance in acceptance:
        within("acceptance", chance, 0, 1)
    if any(later > earlier for earlier, later in pairwise(acceptance)):
        raise ValueError(
            f"acceptance {list(acceptance)} rises: it is the chance that all tokens up to a "
            "position are accepted, as vLLM logs it; multiply conditional rates up"
        )
    if k is not None and k > len(acceptance):
        raise ValueError(f"k is {k} and acceptance has {len(acceptance)} positions: lower k")
