"""Speculative decoding with two real models, behind the same contract as a recording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.core import Load
from profiler.runner import Runner
from profiler.signals import log_probs_at, signals
from traces.errors import DraftsimError


class ModelToken:
    """A token just drafted; its signals come to the host only when somebody reads one."""

    __slots__ = ("_eos", "_logits", "_temperature", "_values", "device_id")

    def __init__(
        self, device_id: Tensor, logits: Tensor, temperature: float, eos: frozenset[int] | None
    ) -> None:
        self.device_id = device_id  # (1,)
        self._logits = logits  # (1, vocab)
        self._temperature = temperature
        self._eos = eos
        self._values: tuple[float, ...] | None = None

    @property
    def logits(self) -> Tensor:
        """Raw draft logits, (1, vocab)."""
        return self._logits

    def _fetch(self) -> tuple[float, ...]:
        # One transfer for all signals: the wait costs more than the numbers.
        if self._values is None:
            log_prob = log_probs_at(self._logits, self.device_id, self._temperature)
            parts = [signals(self._logits).stack()[0], log_prob, self.device_id.float()]
            self._values = tuple(torch.cat(parts).tolist())
        return self._values

    @property
    def token_id(self) -> int:
        """Vocabulary id."""
        return int(self.device_id)

    @property
    def prob(self) -> float:
        """Probability the draft gave the token, at the sampling temperature."""
        # exp in float64 of a float32, exactly as Trace.signal derives it.
        return math.exp(self._fetch()[4])

    @property
    def entropy(self) -> float:
        """Entropy at T = 1, nats."""
        return self._fetch()[3]

    @property
    def logit_margin(self) -> float:
        """Top-1 minus top-2 raw logit."""
        top1, top2, *_ = self._fetch()
        return top1 - top2

    @property
    def prob_margin(self) -> float:
        """Top-1 minus top-2 probability at T = 1."""
        top1, top2, lse, *_ = self._fetch()
        return math.exp(top1 - lse) - math.exp(top2 - lse)

    @property
    def ends(self) -> bool:
        """Whether the draft proposed EOS (never, where nobody watches for it)."""
        return self._eos is not None and self.token_id in self._eos


class ModelDecoder:
    """Decodes one prompt with a draft and a target model (`policies.core.Decoder`).

    Construction prefills both models.  With ``first=1`` the prefill's own token is
    emitted, as engines do; with ``first=0`` the first verification processes the prompt
    together with the first draft, as transformers' assisted generation does.

    Parameters
    ----------
    target, draft:
        Runners over a shared vocabulary; their caches are overwritten.
    prompt:
        (prompt_tokens,) token ids.
    max_new_tokens:
        Output limit.
    eos:
        Ids that end the output.
    temperature:
        0: greedy matching.  Above 0: lossless rejection sampling (Leviathan et al.,
        2211.17192, Alg. 1) at that temperature, with random numbers from `generator`.
    watch_eos:
        Stop drafting at a drafted EOS, which makes the host wait for every token.
    run_lengths:
        Known matches ahead of each output position, for the oracle policy.

    Raises
    ------
    DraftsimError
        If the prompt is empty or does not fit, or a model produces NaN.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        prompt: Tensor,
        max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        first: int = 1,
        watch_eos: bool = True,
        run_lengths: Sequence[int] | None = None,
    ) -> None:
        length = int(prompt.shape[0])
        check_prompt(length, max_new_tokens, target, draft)
        self._target, self._draft = target, draft
        self._eos, self._watch = eos, (eos if watch_eos and eos else None)
        self._temperature, self._generator = temperature, generator
        self._limit, self._prompt, self._runs = max_new_tokens, length, run_lengths
        self.output: list[int] = []
        # The true tokens, and how many of them each model's cache holds.  What a model
        # has not seen is fed to it before anything else: that is the catch-up.
        self._sequence = torch.cat([prompt, prompt.new_empty(max_new_tokens)])
        self._in_target = 0
        self._in_draft = 0
        if first:
            draft.forward(prompt, 0, keep=1)
            self._in_draft = length
            self.verify([])

    @property
    def position(self) -> int:
        """Output tokens emitted so far."""
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens to the limit, 0 after EOS."""
        if self.output and self.output[-1] in self._eos:
            return 0
        return self._limit - len(self.output)

    @property
    def load(self) -> Load:
        """A single stream; the run length where the output is known beforehand."""
        at = len(self.output)
        run = None
        if self._runs is not None:
            run = min(self._runs[at], self._limit - at - 1)
        return Load(1, self._prompt + at, run)

    def draft(self, so_far: Sequence[Any]) -> ModelToken:
        """One draft pass over what the draft has not seen, then its next proposal."""
        if so_far:
            feed = so_far[-1].device_id
        else:
            feed = self._sequence[self._in_draft : self._prompt + len(self.output)]
        logits = self._draft.forward(feed, self._in_draft, keep=1)
        self._in_draft += feed.shape[0]
        return ModelToken(self._pick(logits), logits, self._temperature, self._watch)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """One target pass over the draft; emits the accepted tokens and one of its own."""
        known, count = self._prompt + len(self.output), len(draft)
        pending = self._sequence[self._in_target : known]
        drafted = torch.cat([pending[:0], *(t.device_id for t in draft)])  # (count,)
        logits = self._target.forward(
            torch.cat([pending, drafted]), self._in_target, keep=count + 1
        )  # (count + 1, vocab)
        accepted, emitted, tokens = self._verdict(draft, drafted, logits)
        self._sequence[known : known + accepted + 1] = emitted
        # Rejected tokens leave both caches by being forgotten: their slots are rewritten.
        self._in_target = known + accepted
        self._in_draft = min(self._in_draft, known + accepted)
        for token in tokens:
            self.output.append(token)
            if token in self._eos:
                break
        return accepted

    def _verdict(
        self, draft: Sequence[Any], drafted: Tensor, logits: Tensor
    ) -> tuple[int, Tensor, list[int]]:
        """Tokens accepted, and the tokens emitted: on the device, and on the host."""
        if self._temperature > 0:
            accepted, emitted = self._sample_verdict(draft, drafted, logits)
            return accepted, emitted, emitted.tolist()
        return self._compare(drafted, logits)

    def _compare(self, drafted: Tensor, logits: Tensor) -> tuple[int, Tensor, list[int]]:
        """Greedy matching: leading drafted tokens that are the target's argmax."""
        count = drafted.shape[0]
        picks = logits.argmax(-1)  # (count + 1,)
        # One transfer per round: the verdict and the tokens together.
        both = torch.cat([drafted, picks]).tolist()
        accepted = 0
        while accepted < count and both[accepted] == both[count + accepted]:
            accepted += 1
        return accepted, picks[: accepted + 1], both[count : count + accepted + 1]

    def _pick(self, logits: Tensor) -> Tensor:
        if self._temperature == 0:
            return logits.argmax(-1)
        return self._sample(torch.softmax(logits.float() / self._temperature, -1)[0])

    def _sample(self, probs: Tensor) -> Tensor:
        # Exponential race: a draw without the host synchronisation of multinomial.
        noise = torch.empty_like(probs).exponential_(generator=self._generator)
        return (probs / noise).argmax(-1, keepdim=True)

    def _sample_verdict(
        self, draft: Sequence[Any], drafted: Tensor, logits: Tensor
    ) -> tuple[int, Tensor]:
        """Rejection sampling: accept with min(1, target/draft), else draw the residual."""
        target = torch.softmax(logits.float() / self._temperature, -1)  # (count + 1, vocab)
        count = len(draft)
        if not count:
            return 0, self._sample(target[0])
        proposal = torch.softmax(
            torch.cat([t.logits for t in draft]).float() / self._temperature, -1
        )
        index = drafted[:, None]
        ratio = (target[:-1].gather(1, index) / proposal.gather(1, index))[:, 0]
        coins = torch.rand(count, generator=self._generator, device=ratio.device)
        accepted = int((coins < ratio).long().cumprod(0).sum())
        left = target[accepted]
        if accepted < count:
            left = (left - proposal[accepted]).clamp(min=0)
        return accepted, torch.cat([drafted[:accepted], self._sample(left)])


def check_prompt(length: int, max_new_tokens: int, *runners: Runner) -> None:
    """Raise if a prompt and its output cannot fit the models' contexts."""
    if length == 0:
        raise DraftsimError("the prompt is empty: give at least one token")
    for runner in runners:
        room = min(runner.max_positions, runner.cache.slots)
        if length + max_new_tokens > room:
            raise DraftsimError(
                f"a prompt of {length} tokens and {max_new_tokens} new ones exceed the context of "
                f"{room}: shorten the prompt or lower --max-new-tokens"
            )


def greedy(target: Runner, prompt: Tensor, max_new_tokens: int, eos: frozenset[int]) -> list[int]:
    """The target's own greedy output, one token at a time: the reference and baseline."""
    check_prompt(int(prompt.shape[0]), max_new_tokens, target)
    output: list[int] = []
    feed, start = prompt, 0
    while len(output) < max_new_tokens and not (output and output[-1] in eos):
        logits = target.forward(feed, start, keep=1)
        start += feed.shape[0]
        feed = logits.argmax(-1)
        output.append(int(feed))
    return output
