"""The loop of speculative decoding and the few types it speaks in.

Nothing here knows a clock, a model or a file.  `drafting` asks a policy when to stop
drafting, and its caller for tokens.  `speculate` answers it from a decoder, and yields one
`Round` per verification.  The decoder is either a recorded trace or a pair of real models;
because the loop and the policy are the same objects in both, a difference between
a prediction and a measurement is a difference of cost, never of logic.

`policies.together` runs the same loop for several sequences.  `traces.replay.vectorised` computes
the same rounds from arrays, without asking the policy token by token, because a sweep makes
thousands of replays.  `tests/test_one_loop.py` checks that all three agree.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from policies.guard import SIGNALS as SIGNALS  # noqa: PLC0414
from policies.guard import Guarded, PolicyError, length_from
from policies.spec import Checked

P = TypeVar("P", bound="DraftPolicy")


class DraftToken(Protocol):
    """One drafted token with what the draft side knows about it, and nothing else.

    A decoder on a device may fetch the signals lazily: reading one can force the
    host to wait for the device, so a policy names the signals it reads in
    `DraftPolicy.reads` and pays for those alone.
    """

    token_id: int
    """Vocabulary id of the token."""
    prob: float
    """Probability with which the draft drew this token, after temperature and top-p."""
    entropy: float
    """Entropy of the draft's full next-token distribution at T = 1, in nats."""
    logit_margin: float
    """Largest minus second largest raw logit of the draft."""
    prob_margin: float
    """Largest minus second largest probability of the draft at T = 1."""
    top_prob: float
    """Largest probability of the draft's softmax at T = 1, before any top-p."""
    raw_prob: float
    """Probability of this token in the draft's softmax at T = 1, before any top-p."""
    top10_prob: float
    """Largest probability at T = 1 over the draft's ten likeliest tokens alone (llama.cpp)."""
    ends: bool
    """True if drafting must end after this token (the draft proposed EOS)."""


class Load(NamedTuple):
    """The engine's state when a round begins, as far as a policy may know it."""

    batch: int
    """Sequences decoded together in this iteration."""
    context: int
    """Tokens in this sequence's target cache (prompt + output so far)."""
    run_length: int | None = None
    """Drafts that would be accepted from here; only a recording has it, only `Oracle` reads it."""
    scheduled: int | None = None
    """Requests of the step before, prompts included.  At its end vLLM's scheduler has the drafts of
    this step made, before it knows which requests leave and arrive.  None: `batch` are all."""


class Round(NamedTuple):
    """One draft-verify round: its outcome and the work it cost, in counts."""

    position: int
    """Output tokens emitted before this round."""
    drafted: int
    """Tokens sent to verification, n."""
    accepted: int
    """Leading drafted tokens the verification rule accepted, A."""
    emitted: int
    """Tokens appended to the output: A + 1, fewer only where the sequence ends."""
    draft_forwards: int
    """Draft passes, including those whose token was not sent to verification."""
    catch_up: int
    """Tokens that the first draft pass processed (2 after a fully accepted round)."""


class DraftPolicy(Checked, ABC):
    """Decides when to stop drafting.  Subclass it and define `keep_drafting`.

    An instance is a prototype, never touched by a run: a run takes one copy at its start
    (`for_run`), and from that one policy per request (`fresh`)::

        mine = policy.for_run()
        for decoder in requests:
            rounds = list(speculate(decoder, mine.fresh()))

    So state must live in the attributes.  A policy that is to remember across requests sets
    ``learns_across_requests = True``: the run's copy then serves all its requests, in their
    order, is told where each begins (`begin_request`), and is gone with the run.
    """

    reads: tuple[str, ...] = ()
    """The draft signals the policy reads, of `SIGNALS`; each may cost a device sync.  Set on
    the class, or on an instance whose parameters leave some of them unread."""
    learns_across_requests: bool = False
    shared: ClassVar[tuple[str, ...]] = ()
    """Attributes that copies share: what never changes and is costly to copy, such as a cost."""

    reads_load: bool = True
    """True if `begin_round`, where a policy defines it, looks at the batch or the context: then
    a request's rounds depend on who shares its iterations, and serving asks at every step."""

    def longest_draft(self) -> int | None:
        """Return the most tokens that a draft may have; None if the policy sets no bound.

        The default is the first of the attributes ``longest``, ``gamma_max``, the largest of
        ``gammas``, and ``gamma`` that is set.  Engines reserve cache for this many tokens, and
        cut a policy without a bound.
        """
        return bound_of(self)

    def begin_run(self, vocab_size: int | None) -> None:
        """Begin a run, on its own copy, with the target's vocabulary size; None: not known."""

    @abstractmethod
    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        """Return True if one more token is to be drafted after `draft`, the tokens of this round.

        Asked before every token, the first included (`draft` is then empty).
        """

    def submit(self, draft: Sequence[Any]) -> int:
        """Return how many of the drafted tokens go to verification; the rest are wasted."""
        return len(draft)

    def begin_round(self, load: Load) -> None:
        """Prepare for a round, before its first `keep_drafting`."""

    def decides_by_load(self) -> bool:
        """Return True if draft lengths depend on the other requests that run (`begin_round`)."""
        return self.reads_load and type(self).begin_round is not DraftPolicy.begin_round

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        """Learn from a round: called after verification with its outcome and submitted tokens."""

    def begin_request(self) -> None:
        """Prepare for a request, before its first `begin_round`."""

    def for_run(self: P) -> P:
        """Return the copy that serves one run, from its first request to its last."""
        return self.copy()

    def fresh(self: P) -> P:
        """Return the policy of the next request: a copy, or itself if it learns across them."""
        mine = self if self.learns_across_requests else self.copy()
        mine.begin_request()
        return mine

    def copy(self: P) -> P:
        """Return an independent copy, except for the attributes in `shared`."""
        kept = (vars(self).get(name) for name in self.shared)
        return copy.deepcopy(self, {id(value): value for value in kept if value is not None})


def bound_of(policy: Any) -> int | None:
    """Return the longest draft by the attributes of `policy` (`longest_draft`)."""
    for name in ("longest", "gamma_max", "gammas", "gamma"):
        if (longest := longest_of(getattr(policy, name, None))) is not None:
            return longest
    return None


def longest_of(value: Any) -> int | None:
    """Return the largest draft length of `value`, one or several; None if it counts no tokens.

    A gamma may also be a share, or anything else.
    """
    values: list[Any] = list(value) if isinstance(value, list | tuple) and value else [value]
    counts = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return int(max(values)) if counts else None


def own_copy(policy: P, vocab_size: int | None) -> P:
    """Return a run's own copy of the caller's `policy`, told the target's vocabulary size."""
    mine = policy.for_run()
    mine.begin_run(vocab_size)
    return mine


class Decoder(Protocol):
    """A sequence being decoded: where drafted tokens and verdicts come from.

    The loop wraps each token that it shows a policy; the wrapper refuses signals that the policy
    does not declare.  A decoder with a method ``declare(reads)``, called before the first round,
    checks this in its own tokens.  A decoder sets ``takes_verified = True`` if its drafter reads
    all verified tokens again (the target's features instead of its own).
    """

    @property
    def position(self) -> int:
        """Output tokens emitted so far."""

    @property
    def remaining(self) -> int:
        """Output tokens this sequence may still emit; 0 once it has ended."""

    @property
    def load(self) -> Load:
        """State of the engine, for `DraftPolicy.begin_round`."""

    def draft(self, so_far: Sequence[Any]) -> Any:
        """Propose one token after the output so far and the tokens drafted this round.

        It is a `DraftToken`, or None if the source has nothing (more) to propose: a lookup without
        a match, heads used up, a token that did not exit early.
        """

    def verify(self, draft: Sequence[Any]) -> int:
        """Check `draft`, extend the output, and return how many tokens were accepted."""


def drafting(
    willing: Callable[[list[Any]], bool], room: int, draft: list[Any], seen: list[Any],
    reads: Collection[str] = (), more: Callable[[list[Any]], Any] | None = None,
) -> Iterator[list[Any]]:  # fmt: skip
    """Draft one round: yield `draft` wherever it wants a token, which the caller appends to it.

    Drafting ends once the draft has `room` tokens, its last token proposes EOS, the policy is not
    `willing` to go on, or there is no token.  For a single sequence `more` can give each token
    (None: there is none).  Then nothing is yielded, which saves a resumption per token.

    `willing` gets `seen`.  It is `draft` itself if its tokens refuse signals that the policy does
    not declare.  Else it is another list, which is filled with guarded tokens that have only the
    signals in `reads`.
    """
    count = 0
    while count < room and willing(seen):
        if more is None:
            yield draft
            if len(draft) == count:
                return
            token = draft[-1]
        else:
            token = more(draft)
            if token is None:
                return
            draft.append(token)
        count += 1
        if seen is not draft:
            seen.append(Guarded(token, reads))
        if token.ends:
            return


def speculate(decoder: Decoder, policy: DraftPolicy) -> Iterator[Round]:
    """Decode one sequence to its end, yielding a `Round` per verification.

    `policy` is used as it is: callers pass what the run's copy gives as ``fresh()``
    (`DraftPolicy`).  The draft is capped
    at ``remaining - 1`` tokens, since verification always emits one of its own
    (transformers caps at ``max_length - cur_len - 1`` alike), and ends early when the
    draft proposes EOS.

    Raises
    ------
    PolicyError
        If the policy reads a signal that it does not declare, or submits less than nothing, or more
        than its draft.
    """
    # Looked up once: this loop is the inner loop of every offline study.
    keep_drafting, observe = policy.keep_drafting, policy.observe
    kind = type(policy)
    begin_round = policy.begin_round if kind.begin_round is not DraftPolicy.begin_round else None
    submit = policy.submit if kind.submit is not DraftPolicy.submit else None
    draft_one, verify = decoder.draft, decoder.verify
    # A decoder that is told what the policy declares gives tokens without the rest by itself.
    declare = getattr(decoder, "declare", None)
    if declare is not None:
        declare(policy.reads)
    takes_verified = getattr(decoder, "takes_verified", False)
    catch_up = 1
    try:
        while (remaining := decoder.remaining) > 0:
            position = decoder.position
            if begin_round is not None:
                begin_round(decoder.load)
            draft: list[Any] = []
            seen: list[Any] = draft if declare is not None else []
            for _ in drafting(keep_drafting, remaining - 1, draft, seen, policy.reads, draft_one):
                pass
            forwards = len(draft)
            if submit is not None:
                drafted = length_from("submit", submit(seen), forwards)
                del draft[drafted:], seen[drafted:]
            drafted = len(draft)
            accepted = verify(draft)
            emitted = decoder.position - position
            # As Round(...), without the Python function that a named tuple's constructor is.
            counts = position, drafted, accepted, emitted, forwards, catch_up
            outcome = tuple.__new__(Round, counts)
            observe(outcome, seen)
            yield outcome
            catch_up = caught_up(catch_up, forwards, accepted, takes_verified)
    except PolicyError as error:
        raise error.by(policy) from None


def caught_up(catch_up: int, forwards: int, accepted: int, takes_verified: bool) -> int:
    """Return the tokens that the first draft pass after a round has to process.

    ``catch_up`` is their number for the round itself.  With a pass per drafted token, the last one
    was never processed, so after a fully accepted round the next first pass takes it together with
    the bonus token.  A drafter that ``takes_verified`` tokens has processed none of them.
    """
    if not forwards:
        return catch_up + 1
    processed = 0 if takes_verified else min(accepted, forwards - 1)
    return accepted - processed + 1
