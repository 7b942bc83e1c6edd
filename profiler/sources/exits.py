"""Real decoding by early exit, what all sources' decoders share, and their random choices."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from policies.core import Load
from profiler.decoding.single import DraftStep, Emitting, ModelToken, check_prompt
from profiler.features.heads import (
    Adapter,
    AdapterRunner,
    ExitHeads,
    ParallelHeads,
    log_confidence,
)
from profiler.latency.table import Block, Step
from profiler.models.sampling import TokenVerdict, pick, verify_greedily, verify_sampled
from profiler.models.stack import LayerRunner
from profiler.sources.exit_record import ExitRecorder
from profiler.sources.latency import LayerRounds
from profiler.sources.start_record import RecordOptions, SourceRecorder
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import ADAPTER, EXIT_HEAD, CallCounter, LayerCounter
from traces.sources.base import Source
from traces.sources.early_exit import EarlyExit, Kangaroo, verified
from traces.sources.exit_recording import depth_layers, log_threshold, temperature, usable_exits


class Draws:
    """The random draws of a sampled decoder: lossless rejection sampling from torch's generator."""

    def __init__(self, sampling: Sampling, generator: torch.Generator | None = None) -> None:
        if sampling.greedy:
            raise ValueError(f"temperature is {sampling.temperature:g}, expected above 0")
        self.sampling, self.generator = sampling, generator

    def first(self, logits: Tensor) -> Tensor:
        """Return the token that the prefill emits, from logits (1, vocab); (1,)."""
        return pick(logits, self.sampling, self.generator)

    def propose(self, logits: Tensor, at: int, position: int, so_far: Sequence[Any]) -> Tensor:
        """Return the token that exit `at` drafts at an output position after `so_far`; (1,)."""
        return pick(logits, self.sampling, self.generator)

    def settle(
        self, drafted: Tensor, proposals: Tensor, logits: Tensor, position: int
    ) -> TokenVerdict:
        """Verify a round that began at an output position; see `verify_sampled`."""
        return verify_sampled(drafted, proposals, logits, self.sampling, self.generator)


class Begin(NamedTuple):
    """Where a decoding begins."""

    prompt: Tensor
    """(prompt_tokens,) ids."""
    limit: int
    """Most output tokens."""
    eos: frozenset[int] = frozenset()
    """Ids that end the output."""
    draws: Draws | None = None
    """The random choices of sampled decoding; None decodes greedily."""


Modules = Mapping[str, Any]
"""Modules trained for a target, by the name of the recording that each makes (`Source.key`)."""
HEADS = ("early-exit", *ParallelHeads.KINDS, "space")
"""Modules that have a digest of their weights."""
ROOM = 25
"""Cache slots that decoders need besides the text."""


class SourceDecoder(Emitting, ABC):
    """The real side of a draft source: how it is decoded, and what records it.

    An instance is a sequence that is being decoded, with its calls (`policies.core.Decoder`).  The
    classes in `profiler.sources.run.REAL` take the target (whose cache is overwritten), the
    source's module, the source, and `Begin`.
    """

    sampled: ClassVar[bool] = False
    """True if it decodes sampled outputs."""
    recorded_sampled: ClassVar[bool] = False
    """True if it is recorded along sampled outputs, too."""
    recorder: ClassVar[Any]
    """Makes its `SourceRecorder` of the target, the trace, its module and `RecordOptions`."""
    cells: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(model, phase) of the cells of the latency table that only its module has."""

    @classmethod
    def module(cls, modules: Modules, source: Source) -> Any:
        """Return what was trained for `source`; DraftsimError if nothing was."""
        if source.key not in modules:
            raise DraftsimError(f"no {source.key!r} module for this target: train one first")
        return modules[source.key]

    @classmethod
    def room(cls, source: Any, modules: Modules) -> int:
        """Return the cache slots that decoding needs besides the text."""
        return ROOM

    @classmethod
    def asked(cls, how: RecordOptions, source: Any, gamma: int) -> RecordOptions:
        """Return `how`, extended by what recording for drafts of `source` up to `gamma` needs."""
        return how

    @classmethod
    def fits(cls, found: Any, module: Any, how: RecordOptions) -> bool:
        """Return True if the recording `found` holds what is to be recorded."""
        return True

    @classmethod
    def extended(cls, how: RecordOptions, found: Any) -> RecordOptions:
        """Return `how`, extended by what the recording `found` of the same outputs holds."""
        return how

    @classmethod
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        """Return the fields of its recording's provenance that identify the drafter's weights."""
        return {"heads": digest_of_weights(*(modules.get(name) for name in HEADS))}

    @classmethod
    def depth(cls, module: Any) -> int | None:
        """Return the layers of the target that every draft runs first; None if it runs none."""
        return None

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: Any) -> Iterator[Block]:
        """Yield the rounds that time its passes; cells are named by the recording's `name`."""
        return iter(())

    def __init__(self, target: Any, begin: Begin) -> None:
        self._prompt = int(begin.prompt.shape[0])
        super().__init__(self._prompt, begin.limit, begin.eos)
        check_prompt(self._prompt, begin.limit, target)
        self._target, self._draws, self.calls = target, begin.draws, CallCounter()
        self._last = begin.prompt[-1:]  # (1,) the last true token

    @property
    def _slot(self) -> int:
        """Slot of the last true token, which no pass has processed yet."""
        return self._prompt + len(self.output) - 1

    @property
    def load(self) -> Load:
        """A single stream."""
        return self.load_in(1)

    @abstractmethod
    def draft(self, so_far: Sequence[Any]) -> Any:
        """Return the proposal after the output so far and `so_far`; None where there is none."""

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Check `draft`, extend the output, and return how many tokens were accepted.

        By default one pass of the target reads the last token and the draft.
        """
        return self._settle(draft, self._target.forward(self._fed(draft), self._slot))[0]

    def _emit_first(self, logits: Tensor) -> None:
        """Emit the prefill's token, given its logits (1, vocab)."""
        self._last = logits.argmax(-1) if self._draws is None else self._draws.first(logits)
        self.extend(self._last.tolist())

    def _token(self, logits: Tensor, so_far: Sequence[Any] = (), at: int = 0) -> ModelToken:
        """Return the token drafted from logits (1, vocab) after `so_far`, by exit `at`."""
        if self._draws is None:
            return ModelToken(DraftStep(logits, logits.argmax(-1)), eos=self.eos)
        drawn = self._draws.propose(logits, at, len(self.output), so_far)
        return ModelToken(DraftStep(logits, drawn, self._draws.sampling), eos=self.eos)

    def _fed(self, draft: Sequence[Any]) -> Tensor:
        """Return the last true token and the draft, (1 + count,)."""
        return torch.cat([self._last, *(t.device_id for t in draft)])

    def _proposals(self, draft: Sequence[Any]) -> list[Tensor]:
        """Return the logits that each token was drawn from, (1, vocab) each."""
        return [t.logits for t in draft]

    def _settle(self, draft: Sequence[Any], logits: Tensor) -> tuple[int, Tensor]:
        """End a round: verify `draft` by the target's logits (positions, vocab), and emit.

        Returns the number of accepted tokens, and the tokens emitted.
        """
        drafted = self._fed(draft)[1:]
        if self._draws is None:
            accepted, emitted, tokens = verify_greedily(drafted, logits)
        else:
            proposals = torch.cat([logits[:0], *self._proposals(draft)])
            accepted, emitted, tokens = self._draws.settle(
                drafted, proposals, logits, len(self.output)
            )
        self._last = emitted[-1:]
        self.calls.end_round()
        self.extend(tokens)
        return accepted, emitted


class ExitDecoder(SourceDecoder):
    """Decodes one prompt, drafting after some layers of the target.  Define `draft`.

    The processed positions of a round keep their states at the depth they have reached.  A
    deeper token first brings the positions before it to its own depth, in the same calls.
    """

    @classmethod
    def depth(cls, module: Any) -> int | None:
        """Return the layers up to the first exit."""
        return int(module.layers[0])

    def __init__(self, target: LayerRunner, source: EarlyExit, begin: Begin) -> None:
        super().__init__(target, begin)
        self._source = source
        self._layers_run = LayerCounter(target.layers, self.calls)
        self._states: list[Tensor] = []  # (1, hidden) each: the positions of this round
        self._emit_first(self._prefill(begin.prompt))

    def _prefill(self, prompt: Tensor) -> Tensor:
        """Return the target's logits after the prompt, (1, vocab)."""
        logits: Tensor = self._target.forward(prompt, 0, keep=1)
        return logits

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run what the processed positions still lack, and compare."""
        positions = verified(len(self._states), len(draft), self._source.bonus)
        del self._states[positions:]
        while len(self._states) < positions:
            at = len(self._states)
            self._enter(draft[at - 1].device_id if at else self._last, count=False)
        self._run(self._layers_run.finish(positions))
        logits = self._target.logits(torch.cat(self._states))  # (positions, vocab)
        self._states.clear()
        return self._settle(draft, logits)[0]

    def _enter(self, token: Tensor, *, count: bool = True) -> None:
        self._states.append(self._target.embed(token))
        if count:
            self._layers_run.enter()

    def _run(self, segments: list[tuple[int, int, int]]) -> None:
        """Run layers first..last - 1 over the newest `width` positions, segment by segment."""
        for first, last, width in segments:
            begin = len(self._states) - width
            hidden = self._target.run_layers(
                torch.cat(self._states[begin:]), self._slot + begin, range(first, last)
            )
            self._states[begin:] = hidden.split(1)


class EarlyExitDecoder(ExitDecoder):
    """Decodes one prompt, drafting by early exit of the target."""

    sampled = recorded_sampled = True

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        gamma = max((s.gamma_max for s in how.settings), default=1)
        runner = LayerRunner(target, ExitRecorder.slots_needed(trace.longest, gamma))
        chance = torch.Generator(runner.device).manual_seed(how.seed)
        return ExitRecorder(runner, module, how.settings, sampling=trace.sampling, generator=chance)

    @classmethod
    def asked(cls, how: RecordOptions, source: Any, gamma: int) -> RecordOptions:
        """Return `how` with the source's setting, followed up to the longest draft asked for."""
        lengths = {key._replace(gamma_max=1): key.gamma_max for key in how.settings}
        own = source.setting(1)
        lengths[own] = max(lengths.get(own, 0), gamma)
        settings = tuple(key._replace(gamma_max=most) for key, most in lengths.items())
        return replace(how, settings=settings)

    @classmethod
    def fits(cls, found: Any, module: Any, how: RecordOptions) -> bool:
        return set(how.settings) <= set(found.settings)

    @classmethod
    def extended(cls, how: RecordOptions, found: Any) -> RecordOptions:
        return replace(how, settings=tuple(dict.fromkeys((*found.settings, *how.settings))))

    def __init__(
        self, target: LayerRunner, heads: ExitHeads, source: EarlyExit, begin: Begin
    ) -> None:
        self._heads, self._deepest = heads, depth_layers(source.depth, target.layers)
        self._threshold = log_threshold(source.tau)
        self._exits = [
            (at, heads.layers[at], temperature(source.omega, heads.layers[at], target.layers))
            for at in usable_exits(heads.layers, self._deepest, source.layers)
        ]
        super().__init__(target, source, begin)

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Run the last token until a head is confident; None at the depth bound."""
        self._enter(so_far[-1].device_id if so_far else self._last)
        for at, layer, heat in self._exits:
            self._run(self._layers_run.deepen(layer))
            logits = self._target.project(self._heads.states(at, self._states[-1]))  # (1, vocab)
            self.calls.add(EXIT_HEAD, 1)
            if float(log_confidence(logits, heat)) >= self._threshold:
                return self._token(logits, so_far, at)
        self._run(self._layers_run.deepen(self._deepest))
        return None


class KangarooDecoder(ExitDecoder):
    """Decodes one prompt, drafting by the adapter.

    A position enters the adapter's keys and values when something is drafted after it, or, being
    the last of a fully accepted draft, together with the next that does.
    """

    cells = (("adapter", "forward"),)

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        runner = LayerRunner(target, ExitRecorder.slots_needed(trace.longest, how.tail))
        return ExitRecorder(runner, module, [Kangaroo().setting(how.tail)], (0.0,))

    @classmethod
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        return {**super().provenance(module, modules), "adapter": digest_of_weights(module)}

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: Any) -> Iterator[Block]:
        target, runner = rounds.target, AdapterRunner(module, rounds.target)
        runner.run(rounds.states, 0)

        def adapt(width: int, context: int) -> Step:
            apart = list(rounds.states[:width].split(1))

            def run() -> object:
                return target.project(runner.run(torch.cat(apart), context)[-1:]).argmax(-1)

            return Step("adapter", "forward", width, context, run)

        return rounds.by(adapt)

    def __init__(
        self, target: LayerRunner, adapter: Adapter, source: Kangaroo, begin: Begin
    ) -> None:
        self._adapter, self._exit = AdapterRunner(adapter, target), adapter.layer
        self._pending: list[Tensor] = []  # (1, hidden) each: exit states the adapter lacks
        super().__init__(target, source, begin)

    @torch.inference_mode()
    def _prefill(self, prompt: Tensor) -> Tensor:
        target = self._target
        early, last = target.through(target.embed(prompt), 0, (self._exit, target.layers))
        self._adapter.run(early, 0)
        logits: Tensor = target.logits(last[-1:])
        return logits

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken:
        """Run the last token to the exit, and the adapter over what it lacks."""
        self._enter(so_far[-1].device_id if so_far else self._last)
        self._run(self._layers_run.deepen(self._exit))
        width = len(self._pending)
        slot = self._slot + len(self._states) - width
        states = self._adapter.run(torch.cat(self._pending), slot)
        self._pending.clear()
        logits = self._target.project(states[-1:])
        self.calls.add(ADAPTER, width)
        return self._token(logits)

    def verify(self, draft: Sequence[Any]) -> int:
        """Verify as every exit does; what was refused leaves nothing for the adapter to take in."""
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


def digest_of_weights(*modules: torch.nn.Module | None) -> str:
    """Return a digest of the weights of `modules`, those that are not None."""
    made = hashlib.sha256()
    for module in modules:
        if module is not None:
            for name, weights in sorted(module.state_dict().items()):
                made.update(name.encode() + weights.detach().float().cpu().numpy().tobytes())
    return made.hexdigest()[:16]
