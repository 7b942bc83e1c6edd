"""A target taken apart: single layers, their states, and its output head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.models.runner import Runner
from traces.errors import DraftsimError


class LayerRunner(Runner):
    """Runs any layers of a decoder-only model over any slots.

    Works for decoders laid out as Llama, Mistral and Qwen are in transformers: an inner
    model with ``embed_tokens``, ``layers``, ``norm`` and ``rotary_emb``.

    Raises DraftsimError if the model is laid out otherwise, or running its layers one by one does
    not give the logits of its own forward pass.
    """

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        inner = getattr(model, "model", None)
        parts = ("embed_tokens", "layers", "norm", "rotary_emb")
        if missing := [name for name in parts if not hasattr(inner, name)]:
            raise DraftsimError(
                f"{type(model).__name__} has no {', '.join(missing)} to run its layers one by one "
                "with: early exit and heads work for Llama, Mistral and Qwen models"
            )
        assert inner is not None
        self._inner = inner
        self._head = model.get_output_embeddings()
        self._layers = list(inner.layers)
        try:
            self._check()
        except (AttributeError, TypeError, ValueError) as error:  # called in another way
            raise DraftsimError(
                f"{type(model).__name__} cannot run its layers one by one ({error}): early exit "
                "and heads work for Llama, Mistral and Qwen models"
            ) from None

    @torch.inference_mode()
    def _check(self) -> None:
        """Compute the positions' states; check that the layers one by one are the model."""
        like = self._inner.embed_tokens(torch.zeros(1, dtype=torch.long, device=self.device))
        cos, sin = self._inner.rotary_emb(like, position_ids=self._positions)
        self.rotary: tuple[Tensor, Tensor] = cos, sin
        """Cosines and sines of every slot's position, (1, slots, head_dim) each."""
        count = min(5, self.cache.slots, self.max_positions)
        ids = torch.arange(count, device=self.device) % self.vocab_size
        whole = self.forward(ids, 0)
        hidden = self.run_layers(self.embed(ids), 0, range(self.layers))
        error = float((self.logits(hidden) - whole).abs().max() / whole.abs().max())
        if not error < 1e-2:
            raise DraftsimError(
                f"{type(self.model).__name__} run layer by layer differs from its own forward "
                f"pass (by {error:.2g} of the largest logit): early exit and heads do not work "
                "with it"
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return states before the first layer: (tokens,) ids -> (tokens, hidden)."""
        states: Tensor = self._inner.embed_tokens(tokens)
        return states

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the output head's input: (tokens, hidden) states after the last layer, normed."""
        states: Tensor = self._inner.norm(hidden)
        return states

    def project(self, normed: Tensor) -> Tensor:
        """Return the output head alone: (tokens, hidden) -> (tokens, vocab)."""
        logits: Tensor = self._head(normed.to(self._head.weight.dtype))
        return logits[..., : self.vocab_size]  # the draft model may have fewer tokens

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and output head: (tokens, hidden) -> (tokens, vocab)."""
        return self.project(self.normed(hidden))

    @torch.inference_mode()
    def forward_with_states(
        self, tokens: Tensor, start: int, depths: Sequence[int] = (), *,
        mask: Tensor | None = None, positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run one ordinary pass: logits (tokens, vocab), and states of the tokens.

        These are the head's input, (tokens, hidden).  With ``depths`` they are the states after
        that many layers each, fewer than there are, (tokens, hidden x depths).  ``mask`` and
        ``positions`` as in `Runner.forward`.
        """
        seen: list[Tensor] = []
        watched = [self._layers[depth] for depth in depths] or [self._head]
        hooks = [
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
            for module in watched
        ]
        try:
            logits = self.forward(tokens, start, mask=mask, positions=positions)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.cat([states[0] for states in seen], -1)

    def states(self, tokens: Tensor, start: int, depths: Sequence[int] = ()) -> Tensor:
        """Return the states of `forward_with_states`, by no more layers than that takes."""
        parts = [*self.through(self.embed(tokens), start, depths or (self.layers,))]
        return torch.cat(parts, -1) if depths else self.normed(parts[0])

    def through(
        self, hidden: Tensor, start: int, depths: Sequence[int], **where: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield the states after each of some depths, ascending; ``where`` as for `run_layers`."""
        at = 0
        for depth in depths:
            hidden = self.run_layers(hidden, start, range(at, depth), **where)
            yield hidden
            at = depth

    def run_layers(
        self,
        hidden: Tensor,
        start: int,
        which: Sequence[int],
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run the layers `which` (0 = the first) over the tokens in slots ``start ...``.

        Parameters
        ----------
        hidden: (tokens, hidden) states before the first of the layers.
        start: first slot; slots before it are attended to at each layer.
        mask, positions: as in `Runner.forward`.

        Returns (tokens, hidden) states after the last of the layers.
        """
        stop = start + hidden.shape[0]
        masks = self._placed(start, stop, mask)
        if positions is None:
            at, cos, sin = (t[:, start:stop] for t in (self._positions, *self.rotary))
        else:
            at, cos, sin = positions[None], *(t[:, positions] for t in self.rotary)
        states = hidden[None]
        for i in which:
            out = self._layers[i](
                states, position_ids=at,
                attention_mask=masks[self._kinds[i]] if self._kinds else masks,
                position_embeddings=(cos, sin), past_key_values=self.cache, use_cache=True,
            )  # fmt: skip
            states = out[0] if isinstance(out, tuple) else out
        result: Tensor = states[0]
        return result
