"""A drafter with the keys and values of one sequence, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.features.base import FeatureDrafter
from profiler.models.cache import SlotCache
from traces.errors import DraftsimError


class DrafterRunner:
    """Runs entries of one sequence, any slots rewritten at will; an entry's slot is its position.

    ``slots``: entries that its cache has room for, branches of trees included; ``batch``:
    sequences of as many entries, for `run_batch`.
    """

    def __init__(self, drafter: FeatureDrafter, slots: int, batch: int = 1) -> None:
        self.drafter = drafter
        self.cache = SlotCache(drafter.modules_in_turn, slots, batch)
        self._rows = torch.arange(batch, device=drafter.device)[:, None]
        positions = torch.arange(slots, device=drafter.device)
        self._causal = torch.ones(slots, slots, dtype=torch.bool, device=drafter.device).tril_()
        self._cos, self._sin = drafter.rotary(positions[None])

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, fused: Tensor, start: int, *, module: int = 0,
        mask: Tensor | None = None, positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run entries in the slots ``start ...``; slots before are attended to.

        Parameters
        ----------
        tokens: (entries,) target ids, each the token after its feature.
        fused: (entries, hidden): `FeatureDrafter.fuse` of features, or what an earlier call
            returned for the next.
        module: which of the drafter's modules in turn.
        mask: (entries, start + entries) for trees; causal if None.
        positions: (entries,) for trees; slots if None.

        Returns
        -------
        The head's input, and what replaces the next feature; (entries, hidden) each.
        """
        stop = start + tokens.shape[0]
        if stop > self.cache.slots:
            raise DraftsimError(f"{stop} entries do not fit the cache of {self.cache.slots} slots")
        self.cache.place(start)
        if mask is None:
            mask = self._causal[start:stop, :stop]
        at = slice(start, stop) if positions is None else positions
        states, feature = self.drafter.step(
            self.drafter.embed(tokens)[None], fused[None],
            (self._cos[:, at], self._sin[:, at]), mask[None, None], self.cache, module,
        )  # fmt: skip
        return states[0], feature[0]

    @torch.inference_mode()
    def run_batch(
        self, tokens: Tensor, fused: Tensor, start: int, *, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """As `run`, of (batch, entries) tokens and (batch, entries, hidden), each causal."""
        batch, count = tokens.shape
        stop = start + count
        places = torch.arange(start, stop, device=tokens.device).expand(batch, count)
        self.cache.place_ragged(self._rows[:batch], places, stop)
        at = slice(start, stop)
        return self.drafter.step(
            self.drafter.embed(tokens), fused, (self._cos[:, at], self._sin[:, at]),
            self._causal[at, :stop][None, None], self.cache, module,
        )  # fmt: skip
