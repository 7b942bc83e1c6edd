"""Sources recorded by (start, offset): parallel heads, mask tokens, trees, skipped layers.

Parallel heads see the state after the last verified token alone; a layer-skipping drafter attends
to its own inexact states of this round's tokens.  Either way the draft from one start is one chain,
whatever the length policy, so (start, offset) holds everything.  Such a source is replayed as a
trace by start (`Trace.by_start`), and the calls of its rounds follow from the rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from policies.arrays import Ints
from policies.spec import parameter, whole
from traces.acceptance.synthetic import ORDINARY
from traces.acceptance.trace import MOST_DRAFTED, Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import CALL_KINDS, HEAD, LAYER, PASS, Calls
from traces.replay.rounds import Fidelity, RoundLog
from traces.sources.as_draft import (
    heads,
    laid_out,
    model_of,
    skipping,
    standing_in,
    with_passes_alone,
)
from traces.sources.base import DRAFTER_SIGNALS, Source, eos_of, tokens_ahead, true_tokens
from traces.sources.recording import DRAWN, LOGITS, Layout, Recordings, SourceRecording
from traces.store.header import PathLike, check, is_whole

HEADS, HYDRA = (CALL_KINDS.index((model, "forward")) for model in ("heads", "hydra"))
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


def others(wanted: Ints, ends: Collection[int]) -> Ints:
    """Return tokens other than `wanted` that are not among `ends`."""
    eos = np.array(sorted(ends), dtype=np.int64)
    free = np.setdiff1d(np.arange(ORDINARY, ORDINARY + 2 + len(eos)), eos)
    return np.asarray(np.where(wanted == free[0], free[1], free[0]))


class StartSource(Source):
    """A source recorded by (start, offset)."""

    signals: ClassVar[frozenset[str]] = DRAFTER_SIGNALS
    unlike: ClassVar[str | None] = WIDER
    sampled = True
    chained = True
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

    def check(self, trace: Trace, recordings: Recordings, first: int) -> None:
        """Raise DraftsimError for other requests or settings, or fewer heads, than recorded."""
        recording = self.recording(recordings)
        recording.check_follows(self.recorded(recordings), trace, first)
        if self.k is not None and self.k > recording.offsets:
            raise DraftsimError(
                f"{self.k} heads were asked for and {recording.offsets} recorded: lower k, or "
                "train and record more"
            )

    def width(self, recording: StartRecording) -> int:
        """Return the longest draft that it makes from a recording."""
        return recording.offsets if self.k is None else self.k

    def tokens(self, trace: Trace, recording: StartRecording) -> Ints:
        """Return the tokens drafted from every start, (starts, `width`); -1 after the last."""
        drafted: Ints = recording["token"][:, : self.width(recording)]
        return drafted

    def drafts_along(self, trace: Trace, recordings: Recordings) -> Trace:
        """Return the outputs with the chains recorded from every start."""
        self.check(trace, recordings, 1)
        recording = self.recording(recordings)
        drafted = self.tokens(trace, recording)
        signals = recording.drafted(np.s_[:, : self.width(recording)])
        meta = {
            "drafts": self.label(recordings), "drafter": model_of(self, recordings),
            "takes_verified": self.takes_verified,
            # Modules that run in turn draft a token each.
            "drafts_end": self.drafts_end or recording.meta.get("modules", 1) > 1,
        }  # fmt: skip
        if self.fidelity != "exact":
            meta["fidelity"] = self.fidelity
        # A draft that ended with EOS holds nothing more; one that never was holds its blanks.
        return laid_out(trace, drafted, (drafted >= 0) | (drafted[:, :1] < 0), signals, meta)


def heads_run(log: RoundLog) -> list[Calls]:
    """Return one run of all heads in every round that drafts."""
    return [Calls.of(HEADS, np.flatnonzero(log.rounds["draft_forwards"]))]


@dataclass(eq=False)
class HeadsSource(StartSource):
    """Heads on the target's last state; ``k`` of them are used (None: all)."""

    unlike = None
    drafts_end = True
    k: int | None = parameter(None, whole, 1)

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Count the heads, which run once in every round that drafts."""
        return heads_run(log)

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with all heads as the first pass of a round."""
        own, name = heads(latency, "heads"), model_of(self, recordings)
        return standing_in(latency, with_passes_alone(latency.cells), own, name)


class Blockwise(HeadsSource):
    """Blockwise parallel decoding: a feed-forward block per offset (arXiv:1811.03115)."""

    name = "blockwise"
    what = "blockwise heads (arXiv:1811.03115) on the frozen target, greedy acceptance"


class Medusa(HeadsSource):
    """Medusa-1 heads: a residual block per offset (arXiv:2401.10774), drafted as a chain."""

    name = "medusa"
    what = "Medusa-1 heads (arXiv:2401.10774) as a chain, sharing the target's output projection"


class SpecDec(HeadsSource):
    """One-pass drafter that also sees the last emitted token, after Spec-Drafter.

    arXiv:2203.16487 trains an independent non-autoregressive encoder-decoder; here the
    drafter reads the target's state and the token's embedding.
    """

    name = "specdec"
    what = "one-pass drafter after Spec-Drafter (arXiv:2203.16487), reading the target's state"


class Hydra(HeadsSource):
    """Hydra's heads in turn (arXiv:2402.05109): each also reads the tokens drafted so far."""

    name = "hydra"
    what = "Hydra's heads (arXiv:2402.05109) as a chain, sharing the target's output projection"

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Count one head for every drafted token."""
        forwards = log.rounds["draft_forwards"].astype(np.int64)
        return [Calls.of(HYDRA, np.arange(len(forwards)), 1, forwards)]

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with a head as the pass of every drafted token."""
        own, name = heads(latency, "hydra", in_turn=True), model_of(self, recordings)
        return standing_in(latency, with_passes_alone(latency.cells), own, name)


@dataclass(eq=False)
class Space(StartSource):
    """SPACE: mask tokens after every candidate draft while it is verified (arXiv:2402.11809).

    The paper tunes the target for it; here the target is frozen and the mask tokens'
    embeddings alone are trained.  ``k`` is the number of masks used (None: all recorded).
    """

    name = "space"
    what = "SPACE (arXiv:2402.11809) with trained mask embeddings and a frozen target"
    drafts_end = True
    k: int | None = parameter(None, whole, 1)

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Count one pass a round, over the last token, the draft, and the masks after each."""
        width = (log.rounds["drafted"].astype(np.int64) + 1) * (self.width(recording) + 1)
        return [Calls.of(PASS, np.arange(len(width)), width, verify=True)]


class MedusaTree(StartSource):
    """Medusa's tree: every combination of the `top` best candidates of each head.

    Acceptance under greedy verification follows from the rank of the true token under each
    head.  ``tops`` gives the candidates per head; the tree has as many nodes as their
    combinations (Medusa's own trees are pruned, and cheaper).
    """

    name = "medusa-tree"
    what = (
        "Medusa's tree of candidates (arXiv:2401.10774): acceptance from recorded ranks, "
        "unpruned, and not compared with a real decoder"
    )
    fidelity: ClassVar[Fidelity] = "approximate"
    drafts_end = True

    def __init__(self, tops: Sequence[int] = (4, 2, 1)) -> None:
        if not tops:
            raise ValueError("tops is empty, expected the candidates of at least one head")
        for top in tops:
            whole("tops", top, 1)
        self.tops, self.k = tops, len(tops)

    @property
    def key(self) -> str:
        """The heads are Medusa's."""
        return Medusa.name

    def tokens(self, trace: Trace, recording: StartRecording) -> Ints:
        """Return a level of the tree as one token: the true one if the tree holds it."""
        drafted, width = super().tokens(trace, recording), len(self.tops)
        wanted = tokens_ahead(true_tokens(trace, sampled=True), trace.request_ends, width)
        rank = recording["rank"][:, :width]
        held = (wanted >= 0) & (rank >= 0) & (rank < np.array(self.tops))
        # Levels go on after a head's end token where another candidate is the true one.
        going = np.where(drafted < 0, others(wanted, eos_of(trace)), drafted)
        return np.where(held, wanted, going)

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Count the heads, and a pass over all nodes down to the levels verified."""
        nodes = 1 + np.append(0, np.cumsum(np.cumprod(self.tops)))[log.rounds["drafted"]]
        return [*heads_run(log), Calls.of(PASS, np.arange(len(nodes)), nodes, verify=True)]


class LayerSkip(StartSource):
    """Draft & Verify: the target drafts with some layers left out (arXiv:2309.08168).

    Its draft states are inexact, so a draft depends on where its round began; they are
    recomputed by the verification.  ``skip`` names the layers left out, 1 = the first.
    """

    name = "layer-skip"
    what = "Draft & Verify (arXiv:2309.08168): inexact states, hence recorded by (start, offset)"
    unlike = None
    runs_layers = True

    def __init__(self, skip: Sequence[int] | None = None) -> None:
        for layer in skip or ():
            whole("skip", layer, 1)
        self.skip = skip

    def recording(self, recordings: Recordings) -> Any:
        """Return its recording; DraftsimError if there is none, or it skips other layers."""
        found = super().recording(recordings)
        recorded = found.meta.get("skip")
        if self.skip is not None and list(self.skip) != list(recorded or ()):
            raise DraftsimError(
                f"layers {list(self.skip)} were to be skipped and {recorded} were recorded: "
                "record these, or leave skip out"
            )
        return found

    def counted(self, log: RoundLog, recording: StartRecording) -> list[Calls]:
        """Count the kept layers and the output head, for every drafted token."""
        forwards = log.rounds["draft_forwards"].astype(np.int64)
        layers, every = int(recording.meta["layers"]), np.arange(len(forwards))
        return [
            Calls.of(LAYER, every, 1, forwards * layers),
            Calls.of(HEAD, every, 1, forwards),
        ]

    def for_decoding(self, recordings: Recordings) -> Source:
        """Return the source with the layers that were skipped."""
        return LayerSkip(self.recording(recordings).meta["skip"])

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with the kept layers and the head as a pass."""
        own = skipping(latency, int(self.recording(recordings).meta["layers"]))
        return standing_in(latency, latency.cells, own, model_of(self, recordings))
