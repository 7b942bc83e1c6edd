"""Real decoding by early exit: layers run when they are needed, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.single import ModelToken, check_prompt
from profiler.features.heads import Adapter, ExitHeads, log_confidence
from profiler.models.stack import LayerRunner
from profiler.sources.base import SourceDecoder
from profiler.sources.draws import Draws
from traces.acceptance.sampling import GREEDY, Sampling
from traces.replay.calls import EXIT_HEAD, LayerLedger
from traces.sources.exits.early_exit import EarlyExit, verified
from traces.sources.exits.recording import depth_layers, log_threshold, temperature, usable_exits


class ExitToken(ModelToken):
    """A drafted token that knows at which layer it exited."""

    __slots__ = ("exit_layer",)

    def __init__(
        self, device_id: Tensor, logits: Tensor, sampling: Sampling, eos: frozenset[int],
        exit_layer: int,
    ) -> None:  # fmt: skip
        super().__init__(device_id, logits, sampling, eos or None)
        self.exit_layer = exit_layer


class EarlyExitDecoder(SourceDecoder):
    """Decodes one prompt, drafting by early exit of the target (`policies.core.Decoder`).

    The processed positions of a round keep their states at the depth they have reached.  A
    deeper token first brings the positions before it to its own depth, in the same calls.

    Parameters
    ----------
    target:
        Its cache is overwritten.
    heads:
        Exit heads of this target.
    source:
        Threshold, annealing, depth bound and layers.
    prompt, max_new_tokens, eos:
        (prompt_tokens,) ids; output limit; ids that end the output.
    draws:
        The random choices of sampled decoding; None decodes greedily.
    """

    def __init__(
        self, target: LayerRunner, heads: ExitHeads | Adapter, source: EarlyExit, prompt: Tensor,
        max_new_tokens: int, eos: frozenset[int] = frozenset(), draws: Draws | None = None,
    ) -> None:  # fmt: skip
        check_prompt(int(prompt.shape[0]), max_new_tokens, target)
        super().__init__(int(prompt.shape[0]), max_new_tokens, eos)
        self._target, self._heads, self._source = target, heads, source
        self._draws = draws
        self._deepest = depth_layers(source.depth, target.layers)
        self._threshold = log_threshold(source.tau)
        self._exits = [
            (at, heads.layers[at], temperature(source.omega, heads.layers[at], target.layers))
            for at in usable_exits(heads.layers, self._deepest, source.layers)
        ]
        self._ledger = LayerLedger(target.layers, self.calls)
        self._states: list[Tensor] = []  # (1, hidden) each: the positions of this round
        logits = self._prefill(prompt)
        self._last = logits.argmax(-1) if draws is None else draws.first(logits)  # (1,)
        self._emit(self._last.tolist())

    def _prefill(self, prompt: Tensor) -> Tensor:
        """Return the target's logits after the prompt, (1, vocab)."""
        return self._target.forward(prompt, 0, keep=1)

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ExitToken | None:
        """Run the last token until a head is confident; None at the depth bound."""
        assert isinstance(self._heads, ExitHeads)
        self._enter(so_far[-1].device_id if so_far else self._last)
        for at, layer, heat in self._exits:
            self._run(self._ledger.deepen(layer))
            logits = self._target.project(self._heads.states(at, self._states[-1]))  # (1, vocab)
            self.calls.add(EXIT_HEAD, 1)
            if float(log_confidence(logits, heat)) >= self._threshold:
                return self._token(logits, at, layer, so_far)
        self._run(self._ledger.deepen(self._deepest))
        return None

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run what the processed positions still lack, and compare."""
        positions = verified(len(self._states), len(draft), self._source.bonus)
        del self._states[positions:]
        while len(self._states) < positions:
            at = len(self._states)
            self._enter(draft[at - 1].device_id if at else self._last, count=False)
        self._run(self._ledger.finish(positions))
        logits = self._target.logits(torch.cat(self._states))  # (positions, vocab)
        self._states.clear()
        if self._draws is None:
            picks = logits.argmax(-1)
            accepted, tokens = self._compare([t.device_id for t in draft], picks)
            self._last = picks[len(tokens) - 1][None]
        else:
            drafted = torch.cat([self._last[:0], *(t.device_id for t in draft)])
            proposals = torch.cat([logits[:0], *(t.logits for t in draft)])
            accepted, tokens = self._draws.settle(drafted, proposals, logits, len(self.output))
            self._last = self._last.new_tensor(tokens[-1:])
        self.calls.end_round()
        self._emit(tokens)
        return accepted

    def _token(self, logits: Tensor, at: int, layer: int, so_far: Sequence[Any]) -> ExitToken:
        if self._draws is None:
            return ExitToken(logits.argmax(-1), logits, GREEDY, self.eos, layer)
        drawn = self._draws.propose(logits, at, len(self.output), so_far)
        return ExitToken(drawn, logits, self._draws.sampling, self.eos, layer)

    def _enter(self, token: Tensor, *, count: bool = True) -> None:
        self._states.append(self._target.embed(token))
        if count:
            self._ledger.enter()

    def _run(self, segments: list[tuple[int, int, int]]) -> None:
        """Run layers first..last - 1 over the newest `width` positions, segment by segment."""
        base = self._prompt + len(self.output) - 1  # slot of the last true token
        for first, last, width in segments:
            begin = len(self._states) - width
            hidden = self._target.run_layers(
                torch.cat(self._states[begin:]), base + begin, range(first, last)
            )
            self._states[begin:] = hidden.split(1)
