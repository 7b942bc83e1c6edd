"""The random choices of sampled decoding with early exits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from policies.core import DraftToken, Load
from profiler.decoding.single import ModelToken, check_prompt
from profiler.features.heads import Adapter, AdapterRunner, ExitHeads, log_confidence
from profiler.models.sampling import coupled, draw, probs
from profiler.models.stack import LayerRunner
from traces.acceptance.sampling import GREEDY, Sampling
from traces.replay.calls import ADAPTER, EXIT_HEAD, CallCounter, LayerLedger
from traces.sources.exits.early_exit import EarlyExit, Kangaroo, verified
from traces.sources.exits.recording import depth_layers, log_threshold, temperature, usable_exits


class Draws(Protocol):
    """The random draws of a sampled decoder."""

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn; not greedily."""
        ...

    def first(self, logits: Tensor) -> Tensor:
        """The token that the prefill emits, from logits (1, vocab); (1,)."""
        ...

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """The token that exit `at` drafts at an output position after `so_far`; (1,)."""
        ...

    def settle(
        self, drafted: Tensor, proposals: Tensor, logits: Tensor, position: int
    ) -> tuple[int, list[int]]:
        """Verify a round that began at an output position.

        ``drafted`` (count,) tokens from the raw logits ``proposals`` (count, vocab); ``logits``
        (positions, vocab) of the target, as many positions or one more.  Returns the number
        of accepted tokens and the tokens emitted.
        """
        ...


class RandomDraws:
    """Lossless rejection sampling (Leviathan et al., 2211.17192, Alg. 1) from a generator.

    ``sampling`` is not greedy; `generator` None is torch's global one.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator | None = None) -> None:
        if sampling.greedy:
            raise ValueError(f"temperature is {sampling.temperature:g}, expected above 0")
        self.sampling, self.generator = sampling, generator

    def first(self, logits: Tensor) -> Tensor:
        """A draw from the target."""
        return draw(probs(logits, self.sampling), self.generator)

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """A draw from the exit head."""
        del at, position, so_far
        return draw(probs(logits, self.sampling), self.generator)

    def settle(
        self, drafted: Tensor, proposals: Tensor, logits: Tensor, position: int
    ) -> tuple[int, list[int]]:
        """Toss a coin per drafted token, and draw from the residual after the first that fails."""
        del position
        count = drafted.shape[0]
        target, proposal = (probs(rows, self.sampling) for rows in (logits, proposals))
        index = drafted[:, None]
        ratio = target[:count].gather(1, index) / proposal.gather(1, index)
        coins = torch.rand(count, generator=self.generator, device=ratio.device)
        accepted = int((coins < ratio[:, 0]).long().cumprod(0).sum())
        tokens = drafted[:accepted]
        if accepted < target.shape[0]:
            left = target[accepted : accepted + 1]
            if accepted < count:
                left = (left - proposal[accepted]).clamp(min=0)
            tokens = torch.cat([tokens, draw(left, self.generator)])
        return accepted, tokens.tolist()


class SharedDraws:
    """One coin and one noise per row, whichever exit the row takes."""

    def __init__(
        self, rows: int, vocab_size: int, generator: torch.Generator | None, device: Any
    ) -> None:
        shape = (rows, vocab_size)
        self._noise = torch.empty(shape, device=device).exponential_(generator=generator)
        self._coins = torch.rand(rows, generator=generator, device=device)

    def tokens(self, head: Tensor, truth: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return one sampled token per row of `head` (rows, vocab), or `truth` if it is known."""
        if truth is None:
            return (head / self._noise).argmax(-1)
        emitted, target = truth
        match, residual = coupled(head, target, emitted, self._coins)
        return torch.where(match, emitted, (residual / self._noise).argmax(-1))


class SourceDecoder(ABC):
    """A sequence that is being decoded greedily, and the calls it took.

    ``prompt_tokens``: length of the prompt; the output is limited to `max_new_tokens`.
    """

    def __init__(self, prompt_tokens: int, max_new_tokens: int, eos: frozenset[int]) -> None:
        self.output: list[int] = []
        self.calls = CallCounter()
        self.eos = eos
        self._prompt, self._limit = prompt_tokens, max_new_tokens

    @property
    def position(self) -> int:
        """Output tokens emitted so far."""
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens to the limit, 0 after EOS."""
        if self.output and self.output[-1] in self.eos:
            return 0
        return self._limit - len(self.output)

    @property
    def load(self) -> Load:
        """A single stream."""
        return Load(1, self._prompt + len(self.output), None)

    @abstractmethod
    def draft(self, so_far: Sequence[Any]) -> DraftToken | None:
        """The proposal after the output so far and `so_far`; None where there is none."""

    @abstractmethod
    def verify(self, draft: Sequence[Any]) -> int:
        """Check `draft`, extend the output, and return how many tokens were accepted."""

    def _emit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.output.append(token)
            if token in self.eos:
                break

    @staticmethod
    def _compare(drafted: Sequence[Tensor], picks: Tensor) -> tuple[int, list[int]]:
        """Leading drafted tokens that are the target's, and the tokens to emit.

        ``picks`` (positions,): the target's own tokens; with no position after the last drafted
        token, a full match emits the draft alone.
        """
        count = sum(part.shape[0] for part in drafted)
        both = torch.cat([*drafted, picks]).tolist()
        tokens: list[int] = both[count:]
        accepted = 0
        while accepted < min(count, len(tokens)) and both[accepted] == tokens[accepted]:
            accepted += 1
        return accepted, tokens[: accepted + 1]


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


class KangarooDecoder(EarlyExitDecoder):
    """Decodes one prompt, drafting by the adapter (`policies.core.Decoder`).

    A position enters the adapter's keys and values when something is drafted after it, or, being
    the last of a fully accepted draft, together with the next that does.

    Parameters as in `EarlyExitDecoder`, with an adapter instead of the heads.
    """

    def __init__(
        self, target: LayerRunner, adapter: Adapter, source: Kangaroo, prompt: Tensor,
        max_new_tokens: int, eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._adapter, self._exit = AdapterRunner(adapter, target), adapter.layer
        self._pending: list[Tensor] = []  # (1, hidden) each: exit states the adapter lacks
        super().__init__(target, adapter, source, prompt, max_new_tokens, eos)

    @torch.inference_mode()
    def _prefill(self, prompt: Tensor) -> Tensor:
        target = self._target
        hidden = target.run_layers(target.embed(prompt), 0, range(self._exit))
        self._adapter.run(hidden, 0)
        hidden = target.run_layers(hidden, 0, range(self._exit, target.layers))
        return target.logits(hidden[-1:])

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ExitToken:
        """Run the last token to the exit, and the adapter over what it lacks."""
        self._enter(so_far[-1].device_id if so_far else self._last)
        self._run(self._ledger.deepen(self._exit))
        width = len(self._pending)
        slot = self._prompt + len(self.output) - 1 + len(self._states) - width
        states = self._adapter.run(torch.cat(self._pending), slot)
        self._pending.clear()
        logits = self._target.project(states[-1:])
        self.calls.add(ADAPTER, width)
        return ExitToken(logits.argmax(-1), logits, GREEDY, self.eos, self._exit)

    def verify(self, draft: Sequence[Any]) -> int:
        """As early exit does; what was refused leaves nothing for the adapter to take in."""
        accepted = super().verify(draft)
        if accepted < len(draft):
            self._pending.clear()
        return accepted

    def _run(self, segments: list[tuple[int, int, int]]) -> None:
        for first, last, width in segments:
            if first < self._exit <= last:
                super()._run([(first, self._exit, width)])
                self._pending.append(self._states[-1])
                first = self._exit  # noqa: PLW2901
            if first < last:
                super()._run([(first, last, width)])
