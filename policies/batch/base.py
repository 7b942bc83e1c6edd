"""Policies that decide once for a whole batch, and the interface an engine drives them by.

Single-stream policies (`policies.core.DraftPolicy`) run per request, unchanged, in any
batch.  A `BatchPolicy` sees every sequence of the iteration at once.  An engine calls,
per decode iteration over B sequences and always in the same sequence order::

    caps = policy.plan_each(ids, loads)            # (B,) draft-length cap of each sequence
    while some sequence may still draft:           # under its cap, its limit and no EOS
        if not policy.keep_drafting(drafts):       # drafts: B lists, some maybe finished
            break
        one batched draft step                     # appends to every list that may grow
    lengths = policy.allot(drafts)                 # (B,) how many tokens of each to verify
    one verification of sum(lengths) + B tokens
    policy.observe(outcomes)                       # (B,) one Round each

Drafting costs what was drafted, verification what was allotted.  One instance serves one engine for
a whole run: ``fresh()`` is called once per run, not per request.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from policies.core import DraftPolicy, Load, Round, bound_of
from policies.guard import lengths_from
from policies.spec import Checked
from policies.vectorised import VectorisedPlan, own_word, plan_of
from policies.wrapper import Wrapper, unwrapped

B = TypeVar("B", bound="BatchPolicy")


class IterationCost(Protocol):
    """Seconds of one iteration, for policies that weigh gain against cost.

    A policy sees no clock: the profiled cost is passed to its constructor.
    """

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Return seconds of `draft_length` batched draft steps and one verification.

        ``verify_tokens`` counts all sequences together, the ``batch`` tokens that are no
        drafts included; ``context`` is the mean cached tokens per sequence.
        """


@dataclass(frozen=True)
class TextbookCost:
    """Constant draft step and target pass (Leviathan et al. 2023, Theorem 3.8), seconds.

    The defaults are ratios (a draft step costs a tenth of a target pass), which is all
    that an argmax of tokens per second needs; `per_token` adds a cost of each verified
    token beyond the first, and `verify` is the cost of a pass that verifies drafts over one that
    does not.  Every iteration runs at least `always` draft steps.
    """

    target: float = 1.0
    draft: float = 0.1
    per_token: float = 0.0
    verify: float = 1.0
    always: int = 0

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        target = self.target * (self.verify if verify_tokens > batch else 1.0)
        draft = self.draft * max(draft_length, self.always)
        return draft + target + self.per_token * (verify_tokens - 1)


class Planned(NamedTuple):
    """Draft lengths alike for all sequences of an iteration."""

    passes: int
    """Tokens drafted, at most."""
    verified: int
    """Most tokens of the draft that are verified."""


class BatchPolicy(Checked, ABC):
    """Decides draft lengths for every sequence of an iteration together.

    Subclass it and define `plan`; every other method has a default.  State lives in the
    attributes, as in `DraftPolicy`.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """The draft signals the policy reads, of `policies.core.SIGNALS`."""

    def longest_draft(self) -> int | None:
        """Return the most tokens that a draft may have; None if the policy sets no bound.

        The default reads the attributes that `policies.core.DraftPolicy.longest_draft` does.
        """
        return bound_of(self)

    @property
    def planned(self) -> int | None:
        """Draft length in force for all sequences since the last plan; None: there is no such."""
        return None

    def planned_at(self, scheduled: int) -> Planned | None:
        """Return the draft lengths after every iteration of `scheduled` requests
        (`policies.core.Load`).

        Return None, for every number of requests, if they depend on anything else: an engine then
        asks the methods below at every step.  `planned_of` asks this one.
        """
        return None

    @abstractmethod
    def plan(self, loads: Sequence[Load]) -> int:
        """Return the draft-length cap shared by every sequence this iteration; 0 = plain decoding.

        `loads` has one entry per sequence; each carries the batch size and its context.
        """

    def plan_each(self, requests: Sequence[Hashable], loads: Sequence[Load]) -> Sequence[int]:
        """Cap of each sequence; `requests` names them.  Default: `plan` for all alike."""
        return [self.plan(loads)] * len(loads)

    def keep_drafting(self, drafts: Sequence[Sequence[Any]]) -> bool:
        """Return True if one more batched draft step is to run; asked before each, the first
        included.

        ``drafts[i]`` holds the tokens sequence i drafted this iteration; one that reached
        its cap, its limit or EOS no longer grows.
        """
        return True

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        """Return how many leading tokens of each draft to verify, 0 to ``len(drafts[i])``."""
        return [len(draft) for draft in drafts]

    def observe(self, outcomes: Sequence[Round]) -> None:
        """Take in one `Round` per sequence after verification."""

    def fresh(self: B) -> B:
        """Return an independent copy for one run; a cost or an estimator is shared, not copied."""
        shared = (vars(self).get("cost"), vars(self).get("estimator"))
        return copy.deepcopy(self, {id(s): s for s in shared if s is not None})


Policy = DraftPolicy | BatchPolicy
"""A policy of draft lengths: for each request, or for a batch."""


def planned_of(policy: BatchPolicy, scheduled: int) -> Planned | None:
    """Return what `policy` plans at that many requests if its own class says so; else None."""
    planned: Planned | None = own_word(policy, "planned_at", scheduled)
    return planned


class KeptInStep(BatchPolicy):
    """A policy of an engine whose draft model reads every token, even if nothing is drafted.

    vLLM (v1/spec_decode/llm_base_proposer.py) and SGLang 0.5.23
    (srt/speculative/eagle_worker_v2.py) run one draft pass in every iteration, so that the draft's
    cache is complete when drafting begins again.  K = 0 is then a draft pass whose token is not
    verified.  A subclass calls `draft_up_to` when it is made.  Without ``in_step``, the draft model
    does not run at K = 0, and catches up later.
    """

    in_step: bool

    def draft_up_to(self, longest: int) -> None:
        """Take `longest` as the largest K that `plan` may give.  In step it is at least 1."""
        self.longest = max(longest, 1) if self.in_step else longest
        self._verified = 0

    @property
    def planned(self) -> int:
        return self._verified

    def passes_of(self, length: int) -> int:
        """Return the draft passes of an iteration whose K is `length`."""
        return max(length, 1) if self.in_step else length

    def plan_each(self, requests: Sequence[Hashable], loads: Sequence[Load]) -> Sequence[int]:
        self._verified = self.plan(loads)
        return [self.passes_of(self._verified)] * len(requests)

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        return [min(len(draft), self._verified) for draft in drafts]


def caps_of(
    policy: BatchPolicy, longest: int | None, requests: Sequence[Hashable], loads: Sequence[Load]
) -> list[int]:
    """Return the draft-length caps that `policy` plans.

    Raises PolicyError unless each is a number of tokens up to `longest`, the policy's own bound.
    """
    return lengths_from("plan", policy.plan_each(requests, loads), [longest] * len(loads))


def decides_together(policy: Policy) -> bool:
    """Return True if the rounds of one sequence may decide on the drafts of another.

    So it is where a class asks all drafts in `BatchPolicy.keep_drafting` or `BatchPolicy.allot`, or
    learns from all outcomes in `BatchPolicy.observe`, unless the number of requests decides alone
    (`planned_of`).  A policy that wraps another is judged by the one inside.
    """
    policy = unwrapped(policy)
    if not isinstance(policy, BatchPolicy) or planned_of(policy, 1) is not None:
        return False
    own, one = type(policy), (BatchPolicy.allot, KeptInStep.allot)
    asks = own.keep_drafting is not BatchPolicy.keep_drafting or own.allot not in one
    return asks or own.observe is not BatchPolicy.observe


class SingleStream(Wrapper, DraftPolicy):
    """A batch policy driven as a single-stream one: a batch of one sequence.

    It lives as long as the engine, so it learns across requests.  The wrapped policy decides if
    the trigger token is kept.
    """

    policy: BatchPolicy
    learns_across_requests = True

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self._cap, self._longest = 0, policy.longest_draft()
        self._request = 0
        vars(self)["reads"] = policy.reads  # narrower than any class-wide declaration

    def longest_draft(self) -> int | None:
        return self.policy.longest_draft()

    def copy(self) -> SingleStream:
        return SingleStream(self.policy.fresh())

    def begin_request(self) -> None:
        self._request += 1

    def begin_round(self, load: Load) -> None:
        self._cap = caps_of(self.policy, self._longest, (self._request,), (load,))[0]

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self._cap and self.policy.keep_drafting((draft,))

    def submit(self, draft: Sequence[Any]) -> int:
        return self.policy.allot((draft,))[0]

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self.policy.observe((outcome,))

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        return plan_of(self.policy, batch)
