"""Full runs of a source on the device, to hold replays and predictions against."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from profiler.models.stack import LayerRunner
from profiler.sources.drafters import default_skip
from profiler.sources.exits import (
    Draws,
    EarlyExitDecoder,
    KangarooDecoder,
    RandomDraws,
    SourceDecoder,
)
from profiler.sources.feature_decoder import FeatureDecoder, ParallelDecoder
from profiler.sources.modules import Modules
from profiler.sources.start_decoders import (
    HeadsDecoder,
    LayerSkipDecoder,
    LookupDecoder,
    SpaceDecoder,
)
from profiler.sources.tree_decoder import TreeDecoder
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import CALL_KINDS, Call, pack_calls
from traces.replay.rounds import RoundLog
from traces.sources.base import Source, prompt_tokens
from traces.sources.exits.early_exit import EarlyExit, Kangaroo
from traces.sources.lookups.sources import LookupSource, served_before
from traces.sources.replay import check_signals
from traces.sources.starts.features import Eagle
from traces.sources.starts.parallel import Parallel
from traces.sources.starts.sources import Heads, LayerSkip, Space
from traces.sources.starts.trees import Eagle2

T = TypeVar("T")


class SourceRun(NamedTuple):
    """Rounds, outputs and decode seconds (after prefill) per request, shape (requests,)."""

    log: RoundLog
    outputs: list[list[int]]
    wall_s: npt.NDArray[np.float64]


class SourceRunner:
    """Really decodes the requests of a trace with any source.

    Parameters
    ----------
    target:
        The model whose output `trace` holds.
    trace:
        Its prompts are decoded again, sampled as it was; its outputs serve as the datastore
        of retrieval.
    modules:
        Trained modules of this target.
    draws:
        By request, the random choices of a sampled run (`profiler.sources.exits`); None draws
        from torch's global generator.
    """

    def __init__(
        self, target: Any, trace: Trace, modules: Modules | None = None,
        draws: Callable[[int], Draws] | None = None,
    ) -> None:  # fmt: skip
        wide = 25 * (1 + (modules.masks.k if modules and modules.masks else 0))
        self.target = LayerRunner(target, trace.longest + wide)
        self.trace, self.modules, self._draws = trace, modules or Modules(), draws
        self._eos = frozenset(trace.meta.get("eos_token_ids") or ())

    def decoder(self, source: Source, request: int) -> SourceDecoder:
        """Return a decoder after the prefill of one request.

        Raises
        ------
        DraftsimError
            If the source has no real decoder (under the trace's sampling), or its heads were
            not trained.
        """
        sampling = self.trace.sampling
        if not sampling.greedy and type(source) not in (EarlyExit, Eagle):
            raise DraftsimError(
                f"{source.name!r} is decoded greedily alone: give a trace of temperature 0"
            )
        limit = self.trace.requests[request].max_new_tokens
        prompt = torch.tensor(prompt_tokens(self.trace, request), device=self.target.device)
        for kind, make in DECODERS.items():
            if isinstance(source, kind):
                return make(self, source, request, (prompt, limit, self._eos))
        raise DraftsimError(f"{source.name!r} is replayed alone: it has no real decoder")

    def drawn(self, request: int) -> Draws | None:
        """Return the random choices of a sampled run of `request`; None if it is greedy."""
        sampling = self.trace.sampling
        if sampling.greedy:
            return None
        return self._draws(request) if self._draws else RandomDraws(sampling)

    def run(
        self, source: Source, policy: DraftPolicy, requests: Sequence[int] | None = None
    ) -> SourceRun:
        """Decode requests (None: all) with `source` under `policy`, in recording order."""
        check_signals(policy, source)
        chosen = range(len(self.trace.requests)) if requests is None else requests
        shared = own_copy(policy, self.target.vocab_size)
        rounds: list[list[Round]] = []
        calls: list[list[list[Call]]] = []
        outputs: list[list[int]] = []
        wall_s = np.zeros(len(chosen))
        for k, i in enumerate(chosen):
            decoder = self.decoder(source, i)
            mine = shared.fresh()
            self._wait()
            begin = time.perf_counter()
            rounds.append(list(speculate(decoder, mine)))
            self._wait()
            wall_s[k] = time.perf_counter() - begin
            calls.append(decoder.calls.rounds)
            outputs.append(decoder.output)
        log = RoundLog(
            RoundLog.pack(rounds), [self.trace.requests[i] for i in chosen],
            type(policy).__name__, source=source.name, reads=policy.reads,
            verify="rejection-sampling" if self.trace.temperature > 0 else "exact",
            calls=pack_calls(calls),
        )  # fmt: skip
        return SourceRun(log, outputs, wall_s)

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


Begin = tuple[torch.Tensor, int, frozenset[int]]
"""Prompt, output limit, and the ids that end an output."""


def _trained(part: T | None, what: str, remedy: str = "train some first") -> T:
    if part is None:
        raise DraftsimError(f"no {what} for this target: {remedy}")
    return part


def _lookup(of: SourceRunner, source: LookupSource, request: int, begin: Begin) -> SourceDecoder:
    kind = CALL_KINDS.index((source.name, "forward"))
    lookup = source.lookup(begin[2], lambda: served_before(of.trace, request))
    return LookupDecoder(of.target, lookup, kind, *begin)


def _kangaroo(of: SourceRunner, source: Kangaroo, _: int, begin: Begin) -> SourceDecoder:
    adapter = _trained(of.modules.adapter, "adapter", "train one first")
    return KangarooDecoder(of.target, adapter, source, *begin)


def _early_exit(of: SourceRunner, source: EarlyExit, request: int, begin: Begin) -> SourceDecoder:
    exits = _trained(of.modules.exits, "exit heads")
    return EarlyExitDecoder(of.target, exits, source, *begin, of.drawn(request))


def _heads(of: SourceRunner, source: Heads, _: int, begin: Begin) -> SourceDecoder:
    return HeadsDecoder(of.target, of.modules.heads(source.name), *begin, k=source.k)


def _space(of: SourceRunner, source: Space, _: int, begin: Begin) -> SourceDecoder:
    masks = _trained(of.modules.masks, "mask embeddings")
    return SpaceDecoder(of.target, masks, *begin, k=source.k)


def _layer_skip(of: SourceRunner, source: LayerSkip, _: int, begin: Begin) -> SourceDecoder:
    skip = default_skip(of.target.layers) if source.skip is None else source.skip
    return LayerSkipDecoder(of.target, skip, *begin)


def _tree(of: SourceRunner, source: Eagle2, _: int, begin: Begin) -> SourceDecoder:
    """Grow the target's cache where the tree needs more room than other sources."""
    if source.depth is None or source.topk is None:
        raise DraftsimError(
            "a tree is really grown to a depth, with a number of nodes: name them, or its "
            "recording, as in eagle2:depth=6,topk=10"
        )
    if (slots := of.trace.longest + source.budget + 1) > of.target.cache.slots:
        of.target = LayerRunner(of.target.model, slots)
    return TreeDecoder(
        of.target, of.modules.drafter(source), *begin, budget=source.budget, topk=source.topk,
        depth=source.depth,
    )  # fmt: skip


def _on_features(of: SourceRunner, source: Eagle, request: int, begin: Begin) -> SourceDecoder:
    return FeatureDecoder(of.target, of.modules.drafter(source), *begin, of.drawn(request))


def _parallel(of: SourceRunner, source: Parallel, _: int, begin: Begin) -> SourceDecoder:
    if source.k is None or source.acceptance is not None:
        raise DraftsimError(
            f"{source.key!r} is really decoded by a drafter and a number of masks: name both, "
            "or its recording, as in parallel:model=DIR,k=8"
        )
    return ParallelDecoder(of.target, of.modules.drafter(source), *begin, width=source.k)


DECODERS: Mapping[type[Source], Callable[[SourceRunner, Any, int, Begin], SourceDecoder]] = {
    LookupSource: _lookup, Kangaroo: _kangaroo, EarlyExit: _early_exit, Heads: _heads,
    Space: _space, LayerSkip: _layer_skip, Eagle2: _tree, Eagle: _on_features,
    Parallel: _parallel,
}  # fmt: skip
"""The real decoder of every kind of source; a subclass comes before its base."""
