"""Full runs of a source on the device, to hold replays and predictions against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from profiler.models.stack import LayerRunner
from profiler.sources.adapter_decoder import KangarooDecoder
from profiler.sources.base import SourceDecoder
from profiler.sources.drafters import default_skip
from profiler.sources.draws import Draws, RandomDraws
from profiler.sources.early_exit import EarlyExitDecoder
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
        By request, the random choices of a sampled run (`profiler.sources.draws`); None draws
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
        begin = (prompt, limit, self._eos)
        if isinstance(source, LookupSource):
            kind = CALL_KINDS.index((source.name, "forward"))
            lookup = source.lookup(self._eos, lambda: served_before(self.trace, request))
            return LookupDecoder(self.target, lookup, kind, *begin)
        if isinstance(source, Kangaroo):
            if self.modules.adapter is None:
                raise DraftsimError("no adapter for this target: train one first")
            return KangarooDecoder(self.target, self.modules.adapter, source, *begin)
        draws: Draws | None = None
        if not sampling.greedy:
            draws = self._draws(request) if self._draws else RandomDraws(sampling)
        if isinstance(source, EarlyExit):
            if self.modules.exits is None:
                raise DraftsimError("no exit heads for this target: train some first")
            return EarlyExitDecoder(self.target, self.modules.exits, source, *begin, draws)
        if isinstance(source, Heads):
            heads = self.modules.heads(source.name)
            return HeadsDecoder(self.target, heads, *begin, k=source.k)
        if isinstance(source, Space):
            if self.modules.masks is None:
                raise DraftsimError("no mask embeddings for this target: train some first")
            return SpaceDecoder(self.target, self.modules.masks, *begin, k=source.k)
        if isinstance(source, LayerSkip):
            skip = default_skip(self.target.layers) if source.skip is None else source.skip
            return LayerSkipDecoder(self.target, skip, *begin)
        if isinstance(source, Eagle2):
            return self._tree(source, *begin)
        if isinstance(source, Eagle):
            return FeatureDecoder(self.target, self.modules.drafter(source), *begin, draws)
        if isinstance(source, Parallel) and source.k is not None and source.acceptance is None:
            drafter = self.modules.drafter(source)
            return ParallelDecoder(self.target, drafter, *begin, width=source.k)
        if isinstance(source, Parallel):
            raise DraftsimError(
                f"{source.key!r} is really decoded by a drafter and a number of masks: name both, "
                "or its recording, as in parallel:model=DIR,k=8"
            )
        raise DraftsimError(f"{source.name!r} is replayed alone: it has no real decoder")

    def _tree(
        self, source: Eagle2, prompt: torch.Tensor, limit: int, eos: frozenset[int]
    ) -> SourceDecoder:
        """Grows the target's cache where the tree needs more room than other sources."""
        if source.depth is None or source.topk is None:
            raise DraftsimError(
                "a tree is really grown to a depth, with a number of nodes: name them, or its "
                "recording, as in eagle2:depth=6,topk=10"
            )
        if (slots := self.trace.longest + source.budget + 1) > self.target.cache.slots:
            self.target = LayerRunner(self.target.model, slots)
        return TreeDecoder(
            self.target, self.modules.drafter(source), prompt, limit, eos, budget=source.budget,
            topk=source.topk, depth=source.depth,
        )  # fmt: skip

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
