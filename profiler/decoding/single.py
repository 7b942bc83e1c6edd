"""Speculative decoding of a sequence with two real models: decoder, tokens, verdict of a rule.

The decoder has the same contract as a recording.

The numbers are those the recorder keeps (`profiler.models.sampling`), so that a rule decides in a
real round as it does in a replay of that round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.core import Load
from policies.guard import Guarded, PolicyError, guarded
from policies.rules.base import VerifyRule
from profiler.models.runner import Runner
from profiler.models.sampling import (
    TokenVerdict,
    draw,
    log_probs_at,
    pick,
    residual,
    scored,
    top10_log_prob,
    toss,
    verify_greedily,
    verify_sampled,
)
from profiler.models.sampling import drafted as numbers_of
from traces.acceptance.sampling import GREEDY, Sampling
from traces.errors import DraftsimError
from traces.replay.ruled import RecordedScore

ENDS = "ends"
"""The attribute of a drafted token that any rule may read."""
ShownRound = tuple[list[list[Any]], list[list[Any]]]
"""The signals and scores that a rule could read in one verification: of every drafted token those
that it declares and `ENDS`, of every target score those that it needs."""


class Emitting:
    """A sequence that is being decoded, as far as its output goes.

    Parameters
    ----------
    prompt_tokens: Tokens before the output.
    limit: Most output tokens.
    eos: Ids that end the output.
    run_lengths: Known matches ahead of each output position, for the oracle policy.
    """

    def __init__(
        self, prompt_tokens: int, limit: int, eos: frozenset[int],
        run_lengths: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.limit, self.eos = limit, eos
        self.output: list[int] = []
        self._prompt_tokens, self._runs = prompt_tokens, run_lengths

    @property
    def position(self) -> int:
        """Output tokens emitted so far."""
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens to the limit, 0 after EOS."""
        if self.output and self.output[-1] in self.eos:
            return 0
        return self.limit - len(self.output)

    def load_in(self, batch: int) -> Load:
        """Return the state of an engine that decodes `batch` sequences."""
        at, run = len(self.output), None
        if self._runs is not None:
            # An output that diverged from the known one may be longer.
            run = min(self._runs[at], self.limit - at - 1) if at < len(self._runs) else 0
        return Load(batch, self._prompt_tokens + at, run)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens`, up to an EOS."""
        for token in tokens:
            self.output.append(token)
            if token in self.eos:
                break


class ModelDecoder(Emitting):
    """Decodes one prompt with a draft and a target model (`policies.core.Decoder`).

    Construction prefills both models.  With ``first=1`` the prefill's own token is
    emitted, as engines do; with ``first=0`` the first verification processes the prompt
    together with the first draft, as transformers' assisted generation does.

    Parameters
    ----------
    target, draft:
        Runners over a shared vocabulary; their caches are overwritten.
    prompt:
        (prompt_tokens,) token ids; of the source text, if the models are encoder-decoders.
    max_new_tokens:
        Output limit.
    eos:
        Ids that end the output.
    sampling:
        Greedy matching; or else lossless rejection sampling (Leviathan et al., 2211.17192,
        Alg. 1) between both models' distributions under it, as transformers does it, with
        random numbers from `generator`.
    rule:
        A lossy verification rule, which decides instead of the lossless one.  It is used as it is:
        callers that decode several prompts share one, in their order, and call its ``begin_run``
        before and its ``end_request`` in between.
    watch_eos:
        Stop drafting at a drafted EOS, which makes the host wait for every token.
    run_lengths:
        Known matches ahead of each output position, for the oracle policy.

    Attributes
    ----------
    output:
        Token ids emitted so far.
    mismatched:
        Under a rule: per round, the emitted drafted tokens that the target would not have
        emitted after the tokens before them.
    log_probs:
        Under a rule: the target's log-probability of each output token at T = 1, nats.
    shown:
        Under a rule: per verification, the signals and scores that it could read (`judge_again`).

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
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        first: int = 1,
        watch_eos: bool = True,
        run_lengths: Sequence[int] | None = None,
        rule: VerifyRule | None = None,
    ) -> None:
        length = int(prompt.shape[0])
        check_prompt(length, max_new_tokens, target, draft)
        # The source text of an encoder-decoder is encoded once, and is no part of the sequence.
        draft.begin(prompt)
        prompt = target.begin(prompt)
        self._target, self._draft = target, draft
        super().__init__(length, max_new_tokens, eos, run_lengths)
        self._watch = eos if watch_eos else frozenset()
        self._sampling, self._generator = sampling, generator
        self._prompt = int(prompt.shape[0])
        self._rule = rule
        self.mismatched: list[int] = []
        self.log_probs: list[float] = []
        self.shown: list[ShownRound] = []
        # The true tokens, and how many of them each model's cache holds.  What a model
        # has not seen is fed to it before anything else: that is the catch-up.
        self._sequence = torch.cat([prompt, prompt.new_empty(max_new_tokens)])
        self._in_target = 0
        self._in_draft = 0
        if first:
            draft.forward(prompt, 0, keep=1)
            self._in_draft = self._prompt
            self.verify([])
            self.mismatched.clear()

    @property
    def load(self) -> Load:
        """A single stream; the run length where the output is known beforehand."""
        return self.load_in(1)

    def draft(self, so_far: Sequence[Any]) -> ModelToken:
        """Run one draft pass over what the draft has not seen, then its next proposal."""
        if so_far:
            feed = so_far[-1].device_id
        else:
            feed = self._sequence[self._in_draft : self._prompt + len(self.output)]
        logits = self._draft.forward(feed, self._in_draft, keep=1)
        self._in_draft += feed.shape[0]
        own = pick(logits, self._sampling, self._generator)
        return ModelToken(DraftStep(logits, own, self._sampling), eos=self._watch)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one target pass over the draft; emits the accepted tokens and one of its own."""
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
        self.extend(tokens)
        return accepted

    def _verdict(self, draft: Sequence[Any], drafted: Tensor, logits: Tensor) -> TokenVerdict:
        if self._rule is not None:
            return self._judge(self._rule, draft, drafted, logits)
        if self._sampling.greedy:
            return verify_greedily(drafted, logits)
        return verify_sampled(*self._drawn(draft, drafted, logits))

    def _drawn(
        self, draft: Sequence[Any], drafted: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Sampling, torch.Generator | None]:
        """Return the arguments of `toss` for a drawn draft."""
        proposals = torch.cat([logits[:0], *(t.logits for t in draft)])
        return drafted, proposals, logits, self._sampling, self._generator

    def _judge(
        self, rule: VerifyRule, draft: Sequence[Any], drafted: Tensor, logits: Tensor
    ) -> TokenVerdict:
        """Return the rule's verdict; its refusals are corrected as lossless verification does."""
        target = proposal = coins = None
        if not self._sampling.greedy:
            target, proposal, coins = toss(*self._drawn(draft, drafted, logits))
        seen = judge(rule, draft, drafted, logits, self._sampling, coins)
        count, kept = len(draft), seen.accepted
        if target is not None and proposal is not None:
            left = target[kept : kept + 1]
            # A token that only the rule refused leaves no residual to draw from.
            if kept < count and seen.mismatched[kept]:
                left = residual(left, proposal[kept])
            own = draw(left, self._generator)
            emitted = torch.cat([drafted[:kept], own])
            own_log_prob = float(log_probs_at(logits[kept : kept + 1], own, GREEDY))
            tokens = emitted.tolist()
        else:
            emitted = torch.cat([drafted[:kept], logits[kept : kept + 1].argmax(-1)])
            own_log_prob = seen.pick_log_probs[kept]
            tokens = [*(int(t.token_id) for t in draft[:kept]), seen.picks[kept]]
        ends = [i for i, token in enumerate(tokens) if token in self.eos]
        stop = ends[0] + 1 if ends else kept + 1
        self.shown.append((
            [[getattr(token, name) for name in (*rule.reads, ENDS)] for token in draft],
            [[getattr(score, name) for name in rule.needs] for score in seen.scores],
        ))  # fmt: skip
        self.mismatched.append(sum(seen.mismatched[: min(kept, stop)]))
        self.log_probs += [*seen.log_probs[:kept], own_log_prob][:stop]
        return kept, emitted, tokens


def check_prompt(length: int, max_new_tokens: int, *runners: Runner) -> None:
    """Raise if a prompt and its output cannot fit the models' contexts."""
    if length == 0:
        raise DraftsimError("the prompt is empty: give at least one token")
    for runner in runners:
        runner.check_room(length, max_new_tokens)


class DraftStep:
    """The tokens of one draft pass, copied to the host as a whole when first read.

    ``logits`` (rows, vocab) raw; ``picks`` (rows,) the target ids drafted under `sampling`; ``own``
    (rows,) the same tokens in the vocabulary of the logits, if that is another.
    """

    def __init__(
        self, logits: Tensor, picks: Tensor, sampling: Sampling = GREEDY, own: Tensor | None = None
    ) -> None:
        self.logits, self.picks, self.sampling = logits, picks, sampling
        self._own = picks if own is None else own

    @cached_property
    def ids(self) -> list[int]:
        """Proposed token of each row."""
        ids: list[int] = self.picks.tolist()
        return ids

    @cached_property
    def values(self) -> list[Sequence[float]]:
        """`profiler.models.sampling.Drafted` of each row."""
        # One transfer for all signals: the wait costs more than the numbers.
        numbers = numbers_of(self.logits, self._own, self.sampling).stack()  # (rows, 7)
        values: list[Sequence[float]] = numbers.tolist()
        return values

    @cached_property
    def top10(self) -> list[float]:
        """`profiler.models.sampling.top10_log_prob` of each row."""
        top10: list[float] = top10_log_prob(self.logits).tolist()
        return top10


class ModelToken:
    """A token just drafted for one row; reading a signal fetches those of the whole pass.

    ``eos``: ids that end a draft; none if EOS is not watched for.
    """

    __slots__ = ("_eos", "_row", "_step")

    def __init__(self, step: DraftStep, row: int = 0, eos: Collection[int] = ()) -> None:
        self._step, self._row, self._eos = step, row, eos

    def fill(self, token_id: int, values: Sequence[float]) -> None:
        """Take the id that a shared transfer brought, and the signals unless empty.

        The token is the only one of its pass.
        """
        self._step.ids = [token_id]
        if values:
            vars(self._step).setdefault("values", [values])

    @property
    def device_id(self) -> Tensor:
        """The token for the next pass, (1,)."""
        return self._step.picks[self._row : self._row + 1]

    @property
    def logits(self) -> Tensor:
        """Raw draft logits, (1, vocab)."""
        return self._step.logits[self._row : self._row + 1]

    def _fetch(self) -> Sequence[float]:
        return self._step.values[self._row]

    @property
    def token_id(self) -> int:
        """Vocabulary id."""
        return self._step.ids[self._row]

    @property
    def ends(self) -> bool:
        """Return True if the draft proposed EOS (never, if EOS is not watched for)."""
        return bool(self._eos) and self.token_id in self._eos

    # Derived in float64 from float32, exactly as Trace.signal does.

    @property
    def prob(self) -> float:
        """Probability the draft drew the token with (T = 1 if greedy)."""
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
    def top_prob(self) -> float:
        """Largest probability at T = 1."""
        return math.exp(self._fetch()[5])

    @property
    def raw_prob(self) -> float:
        """Probability of the token at T = 1 without top-p."""
        return math.exp(self._fetch()[6])

    @property
    def top10_prob(self) -> float:
        """Largest probability at T = 1 over the ten likeliest tokens alone."""
        return math.exp(self._step.top10[self._row])


class RuleVerdict(NamedTuple):
    """The result of a rule for one verification pass."""

    accepted: int
    """Leading drafted tokens that stand."""
    mismatched: list[bool]
    """Per drafted token, whether the target would have emitted another one."""
    log_probs: list[float]
    """The target's log-probability of every drafted token at T = 1, nats."""
    picks: list[int]
    """The target's argmax at every position, one more than drafted."""
    pick_log_probs: list[float]
    """And its log-probability."""
    scores: list[RecordedScore]
    """The target scores that the rule could read."""


def judge(
    rule: VerifyRule,
    draft: Sequence[Any],
    drafted: Tensor,
    logits: Tensor,
    sampling: Sampling,
    coins: Tensor | None = None,
) -> RuleVerdict:
    """Let `rule` decide on a round, with one transfer to the host.

    Parameters
    ----------
    draft, drafted: The drafted tokens, and their ids on the device, (count,).
    logits: The target's raw logits, (count + 1, vocab).
    sampling: Sampling settings of the draft's probabilities.
    coins: (count,) outcomes of rejection sampling, which are then the lossless verdicts; None for
        greedy decoding, where they are whether the token is the argmax.
    """
    count = drafted.shape[0]
    own = scored(logits, torch.cat([drafted, drafted.new_zeros(1)]))
    # float64 holds every token id and every float32 as it is.
    numbers = torch.stack([column.double() for column in own], dim=1)  # (count + 1, 7)
    verdicts = drafted == own.token[:count] if coins is None else coins
    pad = numbers.new_zeros(1)
    parts = [numbers, torch.cat([drafted, pad])[:, None], torch.cat([verdicts, pad])[:, None]]
    reads_signals = bool(set(rule.reads) - {"token_id"})
    real = [t for t in draft if hasattr(t, "fill")] if reads_signals else []
    if real and len(real) == count:
        proposal = torch.cat([t.logits for t in real])  # (count, vocab)
        side = numbers_of(proposal, drafted, sampling).stack()  # (count, 7)
        parts.append(torch.cat([side, torch.zeros_like(side[:1])]))
    rows = torch.cat([part.double() for part in parts], dim=1).tolist()
    score = guarded(RecordedScore, rule.needs, "needs")
    scores = []
    for token, row in zip(draft, rows, strict=False):
        pick, top1, top2, lse, entropy, logit, rank, drafted_id, match = row[:9]
        scores.append(score((match == 1, int(pick), top1, top2, lse, entropy, logit, int(rank))))
        if hasattr(token, "fill"):
            token.fill(int(drafted_id), tuple(row[9:]))
    return RuleVerdict(
        _accepted(rule, draft, scores),
        [row[8] != 1 for row in rows[:count]],
        [row[5] - row[3] for row in rows[:count]],
        [int(row[0]) for row in rows],
        [row[1] - row[3] for row in rows],
        scores,
    )


def judge_again(rule: VerifyRule, shown: ShownRound) -> None:
    """Let `rule` decide once more on a round of an earlier run, so that it learns the same."""
    tokens, scores = (
        [SimpleNamespace(**dict(zip(names, values, strict=True))) for values in each]
        for names, each in zip(((*rule.reads, ENDS), rule.needs), shown, strict=True)
    )
    rule.accept(tokens, scores)


def _accepted(rule: VerifyRule, draft: Sequence[Any], scores: Sequence[Any]) -> int:
    try:
        return rule.accept([Guarded(token, rule.reads) for token in draft], scores)
    except PolicyError as error:
        raise error.by(rule) from None
