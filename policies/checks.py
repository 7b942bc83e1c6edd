"""`check_policy`: the contract that every draft-length policy keeps, yours included.

In the spirit of scikit-learn's ``check_estimator``: call it on an instance in a test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from policies.batch.base import BatchPolicy, Policy, SingleStream
from policies.core import SIGNALS, DraftPolicy, Load, Round, own_copy, speculate
from policies.guard import Guarded, length_from
from policies.guard import PolicyError as PolicyError  # noqa: PLC0414
from policies.lengths.basic import Oracle
from policies.spec import parameters
from policies.together import Member, together_of
from policies.wrapper import Wrapper, unwrapped

LONGEST_DRAFT = 4096
"""A policy still drafting after this many tokens in one round is taken to have no end."""


SEQUENCES = 64
"""Sequences of the scripted batch, of 1 token, 2 tokens and so on."""


VOCABULARY = 1000
"""Size of the vocabulary that the scripted streams tell of."""


class NamedValues(SimpleNamespace):
    """The values of a drafted token, and no others."""

    known: ClassVar[str] = f"a draft signal ({', '.join(SIGNALS)})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PolicyError(f"reads {name!r}, which is not {self.known}")


class ScriptedDecoder:
    """A decoder that needs no model: signals and verdicts come from a seed.

    The signals of a token depend on its position and offset alone, and the run of
    accepted tokens on the position, so two policies that act alike see one stream.
    ``accept`` is the acceptance probability of each token; 1 accepts all.
    """

    _POOL = 256

    def __init__(
        self, seed: int, tokens: int, reads: Iterable[str], accept: float = 0.7, eos: bool = True
    ) -> None:
        rng = np.random.default_rng(seed)
        self._prob = rng.beta(4, 1, self._POOL).tolist()
        self._other = rng.exponential(1.0, (3, self._POOL)).tolist()
        self._ends = (rng.random(self._POOL) < 0.01 * eos).tolist()
        self._runs = (rng.geometric(1 - accept, self._POOL) - 1).tolist() if accept < 1 else []
        self._reads = frozenset(reads)
        self.remaining, self.position = tokens, 0

    def declare(self, reads: Iterable[str]) -> None:
        """Give from now on tokens with these signals only."""
        self._reads = frozenset(reads)

    @property
    def load(self) -> Load:
        """A single stream after a prompt of 10 tokens."""
        return Load(1, 10 + self.position, self._run())

    def draft(self, so_far: Sequence[Any]) -> Any:
        """Return a token with random signals; now and then it is EOS."""
        n = len(so_far)
        if n >= LONGEST_DRAFT:
            raise PolicyError(f"drafted {n} tokens in one round: keep_drafting never stops")
        i = (7 * self.position + 31 * n) % self._POOL
        prob, (entropy, logit_margin, part) = self._prob[i], (v[i] for v in self._other)
        known = NamedValues(
            ends=self._ends[i], token_id=i, prob=prob, entropy=0.5 * entropy,
            logit_margin=3 * logit_margin, prob_margin=prob / (1 + part),
            top_prob=max(prob, part), raw_prob=prob * part,
            top10_prob=max(prob, part) ** 0.5,
        )  # fmt: skip
        return Guarded(known, self._reads)

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept the scripted run and move on."""
        accepted = min(len(draft), self._run())
        emitted = min(accepted + 1, self.remaining)
        self.position += emitted
        self.remaining -= emitted
        return accepted

    def _run(self) -> int:
        longest = self.remaining - 1
        return min(longest, self._runs[self.position % self._POOL]) if self._runs else longest


class _WatchedPolicy(Wrapper, DraftPolicy):
    """Passes every call on to a policy and checks what comes back."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        vars(self)["reads"] = policy.reads

    def begin_round(self, load: Load) -> None:
        self.policy.begin_round(load)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        answer = self._same(draft, "keep_drafting", lambda: self.policy.keep_drafting(draft))
        if not isinstance(answer, bool | np.bool_):
            raise PolicyError(f"keep_drafting returned {answer!r}, expected a bool")
        return bool(answer)

    def submit(self, draft: Sequence[Any]) -> int:
        count = self._same(draft, "submit", lambda: self.policy.submit(draft))
        return length_from("submit", count, len(draft))

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self._same(draft, "observe", lambda: self.policy.observe(outcome, draft))

    @staticmethod
    def _same(draft: Sequence[Any], method: str, call: Callable[[], Any]) -> Any:
        before = list(draft)
        result = call()
        if len(before) != len(draft) or any(a is not b for a, b in zip(before, draft, strict=True)):
            raise PolicyError(f"{method} changed the draft it was given")
        return result


class _ScriptedMember(Member):
    """A sequence of a scripted batch."""

    def __init__(self, decoder: ScriptedDecoder) -> None:
        super().__init__(id(decoder))
        self.decoder = decoder

    @property
    def remaining(self) -> int:
        return self.decoder.remaining


def check_policy(policy: Policy) -> None:
    """Drive copies of `policy` through scripted streams and check the contract.

    Checked: parameters are stored under their own names; only declared signals are
    read, and `Load.run_length`, which only a recording holds, by subclasses of the oracle alone;
    `keep_drafting` gives a bool, ends every round and leaves the draft alone;
    `submit` gives 0 to ``len(draft)``; no draft is longer than `longest_draft`; two copies
    under the same stream act the same; a run leaves its prototype as it was, and what is
    learnt crosses requests only if ``learns_across_requests`` says so; empty drafts,
    single-token outputs, drafts cut by EOS or by the limit, all-accepted and all-rejected
    streams are survived, and batches whose sequences end one after another.  A batch policy is
    driven as `policies.batch.base.SingleStream`, too.

    Raises
    ------
    PolicyError
        Naming the policy and what it broke.
    """
    one = SingleStream(policy) if isinstance(policy, BatchPolicy) else policy
    pristine = copy.deepcopy(one)
    try:
        for check in (_parameters_stored, _signals_known):
            check(copy.deepcopy(pristine))
        for check in (_edges, _deterministic, _foresees_nothing, _independent, _within_its_bound):
            check(own_copy(pristine, VOCABULARY))
        _in_batches(copy.deepcopy(pristine))
    except PolicyError as error:
        raise error.by(policy) from None
    except Exception as error:
        raise PolicyError(f"raised {type(error).__name__}: {error}").by(policy) from error


def _drive(policy: DraftPolicy, seed: int, tokens: int = 60, **script: Any) -> list[Round]:
    """Return the rounds of one scripted request under `policy`, as it is."""
    return list(
        speculate(ScriptedDecoder(seed, tokens, policy.reads, **script), _WatchedPolicy(policy))
    )


def _parameters_stored(policy: DraftPolicy) -> None:
    inner = unwrapped(policy)
    known = parameters(type(inner))
    for name, parameter in known.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PolicyError(f"takes *{name}: name every parameter of the constructor")
        if not hasattr(inner, name):
            raise PolicyError(f"does not store its parameter {name!r} under that name")
        if parameter.default is parameter.empty:
            raise PolicyError(f"has no default for its parameter {name!r}")
    values = {name: getattr(inner, name) for name in known}
    rebuilt = type(inner)(**values)
    for name, value in values.items():
        if getattr(rebuilt, name) != value:
            raise PolicyError(f"stores its parameter {name!r} changed: rebuilding differs")


def _signals_known(policy: DraftPolicy) -> None:
    for name in policy.reads:
        if name not in SIGNALS:
            raise PolicyError(f"declares the signal {name!r}, expected one of {', '.join(SIGNALS)}")


def _edges(policy: DraftPolicy) -> None:
    for tokens in (1, 2, 3, 60):
        for accept in (0.0, 0.5, 1.0):
            mine = copy.deepcopy(policy)
            rounds = _drive(mine, seed=tokens, tokens=tokens, accept=accept)
            if sum(r.emitted for r in rounds) != tokens:
                raise PolicyError(f"did not emit {tokens} tokens")
    # The longest draft anything asks for, with tokens that keep coming.
    endless = ScriptedDecoder(7, 10 * LONGEST_DRAFT, policy.reads, accept=0.9, eos=False)
    for _ in islice(speculate(endless, _WatchedPolicy(copy.deepcopy(policy))), 50):
        pass
    empty = copy.deepcopy(policy)
    watched = _WatchedPolicy(empty)
    for position in range(20):
        watched.begin_round(Load(1, 10 + position, 0))
        watched.keep_drafting([])
        watched.submit([])
        watched.observe(Round(position, 0, 0, 1, 0, 1), [])
    _drive(empty, seed=8)


def _deterministic(policy: DraftPolicy) -> None:
    one, two = copy.deepcopy(policy), copy.deepcopy(policy)
    for seed in range(5):
        if _drive(one.fresh(), seed) != _drive(two.fresh(), seed):
            raise PolicyError("is not deterministic: two copies act differently on one stream")


class _RealDecoder(ScriptedDecoder):
    """A scripted stream that does not tell how far its drafts match, as real decoding does not."""

    @property
    def load(self) -> Load:
        return super().load._replace(run_length=None)


def _foresees_nothing(policy: DraftPolicy) -> None:
    if isinstance(unwrapped(policy), Oracle):
        return  # recommended by no command
    one, two = copy.deepcopy(policy), copy.deepcopy(policy)
    for seed in range(5):
        told = _drive(one.fresh(), seed)
        real = _RealDecoder(seed, 60, policy.reads)
        try:
            same = list(speculate(real, _WatchedPolicy(two.fresh()))) == told
        except (TypeError, ValueError):  # of a run length that is None
            same = False
        if not same:
            raise PolicyError(
                "drafts by load.run_length, which only a recording knows: for a bound, subclass "
                "policies.lengths.basic.Oracle"
            )


def _independent(policy: DraftPolicy) -> None:
    run = policy.for_run()
    if run is policy or not isinstance(run, DraftPolicy):
        raise PolicyError("for_run() does not return a copy: a run would teach its caller's policy")
    mine = run.fresh()
    if policy.learns_across_requests:
        if mine is not run:
            raise PolicyError("learns across requests, but fresh() does not return itself")
    elif mine is run or not isinstance(mine, DraftPolicy):
        raise PolicyError("does not learn across requests, but fresh() does not return a copy")
    if _run(policy) != _run(policy):
        raise PolicyError("remembers earlier runs: for_run() must copy all state")
    if policy.learns_across_requests:
        return
    reference = [_drive(run.fresh(), seed) for seed in range(5)]
    for seed in range(5, 15):
        _drive(run.fresh(), seed)
    if reference != [_drive(run.fresh(), seed) for seed in range(5)]:
        raise PolicyError(
            "remembers earlier requests: its copies share state, or set learns_across_requests"
        )


def _within_its_bound(policy: DraftPolicy) -> None:
    if (bound := policy.longest_draft()) is None:
        return
    for accept in (0.7, 0.98):
        endless = ScriptedDecoder(7, 10 * LONGEST_DRAFT, policy.reads, accept=accept, eos=False)
        for r in islice(speculate(endless, copy.deepcopy(policy)), 50):
            if r.draft_forwards > bound:
                raise PolicyError(
                    f"drafted {r.draft_forwards} tokens, but its longest draft is {bound}: set an "
                    "attribute gamma_max, or define longest_draft()"
                )


def _in_batches(policy: DraftPolicy) -> None:
    prototype = policy.policy if isinstance(policy, SingleStream) else policy
    if _batch(prototype) != _batch(prototype):
        raise PolicyError("is not deterministic: two copies act differently in one batch")


def _batch(policy: Policy) -> list[Round]:
    """Return the rounds of a batch that begins with `SEQUENCES` and ends with one."""
    together = together_of(policy, vocab_size=VOCABULARY, guarded=True)
    members = [
        _ScriptedMember(ScriptedDecoder(seed, seed, together.reads))
        for seed in range(1, SEQUENCES + 1)
    ]

    def load(member: _ScriptedMember) -> Load:
        return member.decoder.load._replace(batch=len(members))

    def more(active: Sequence[_ScriptedMember]) -> list[Any]:
        return [member.decoder.draft(member.draft) for member in active]

    for member in members:
        together.join(member)
    found: list[Round] = []
    while members:
        together.draft(members, load, more)
        rounds = []
        for member in members:
            position, accepted = member.decoder.position, member.decoder.verify(member.draft)
            rounds.append(member.settled(position, accepted, member.decoder.position - position))
        together.observe(members, rounds)
        found += rounds
        for member in members:
            if not member.remaining:
                together.leave(member)
        members = [member for member in members if member.remaining]
    return found


def _run(policy: DraftPolicy) -> list[list[Round]]:
    """Return a run of several requests under a copy of `policy`."""
    mine = policy.for_run()
    return [_drive(mine.fresh(), seed) for seed in range(10)]
