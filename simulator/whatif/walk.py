"""Replays that go from round to round, for policies whose draft lengths can be looked up.

`traces.replay.decoder.replay` asks a policy before every token.  Where what stops a draft is its
length or a test of one token at a time, the length that a draft from each position would
have is known from the recording at once, and a replay is a walk along these lengths.  The
rounds are the same, round by round; any other policy is replayed as usual.

So the rules of the loop (`policies.core.speculate`: the cap, EOS, what is accepted and emitted, the
catching up) stand here a second time, as arrays over all positions.  They stay apart from it
because a sweep replays thousands of settings: ``benchmarks/bench_replay.py`` measures what that
saves, and `tests/test_one_loop.py` holds the two together, policy by policy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.basic import Autoregressive, Fixed
from policies.cmasd import CMASD
from policies.core import DraftPolicy, Round
from policies.entropy import SVIP
from policies.gammatune import GammaTune, GammaTunePlus
from policies.huggingface import Confidence, HFHeuristic
from policies.registry import describe
from traces.acceptance.schema import MATCH
from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.replay.decoder import fidelity_of, own_policy, replay
from traces.replay.rounds import ROUND_DTYPE, RoundLog

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNBOUNDED = np.iinfo(np.int32).max


class Plan(NamedTuple):
    """How long a policy drafts.

    ``stop``: length of a draft from each on-path position, the signals' doing, shape
    (positions,); ``adapts``: the policy also has a cap that follows its observations.
    """

    stop: Ints
    adapts: bool = False


class Walker:
    """Replays over one trace.

    Parameters
    ----------
    trace:
        The recording; what is derived from it serves every policy.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._first = trace.first
        self._confidence: dict[tuple[Any, ...], npt.NDArray[np.float64]] = {}
        starts = trace.request_starts
        self.positions = int(starts[-1])
        match = trace.columns["match"][trace.on_path]
        self._known = not trace.open_ended.any()
        tokens = np.diff(starts)
        self._begins, self._ends = starts[:-1].tolist(), starts[1:].tolist()
        self._end = np.repeat(starts[1:], tokens)
        position = np.arange(self.positions) - np.repeat(starts[:-1], tokens)
        limit = np.repeat([r.max_new_tokens for r in trace.requests], tokens)
        self._runs = np.asarray(trace.run_lengths, dtype=np.int64)
        self._most = np.minimum(limit - position - 1, self._to_eos(match))
        if trace.drafts_end:
            rows = np.diff(np.append(trace.on_path, len(trace)))
            self._most = np.minimum(self._most, rows)

    def replay(self, policy: DraftPolicy, name: str | None = None) -> RoundLog:
        """The log of `traces.replay.decoder.replay`; raises what it raises."""
        trace = self.trace
        name = name or describe(policy)
        policy = own_policy(trace, policy)
        plan = PLANS.get(type(policy))
        planned = None
        if plan is not None and self._known and set(policy.reads) <= trace.signals:
            planned = plan(self, policy)
        found = None if planned is None else self._rounds(planned, policy)
        if found is None:
            return replay(trace, policy, name=name)
        lossless = "rejection-sampling" if trace.temperature > 0 else "exact"
        return RoundLog(
            found, trace.requests, name, source=trace.source, drafter=trace.drafter,
            verify=lossless, fidelity=fidelity_of(trace), reads=policy.reads, first=self._first,
        )  # fmt: skip

    def stop_where(self, triggers: Bools) -> Ints:
        """Draft lengths if a draft ends with the first token of `triggers`, shape (rows,)."""
        count = len(triggers)
        rows = np.where(triggers, np.arange(count), count + UNBOUNDED)
        nearest = np.minimum.accumulate(rows[::-1])[::-1]
        return np.asarray(nearest[self.trace.on_path] - self.trace.on_path + 1, dtype=np.int64)

    def at_most(self, length: int) -> Ints:
        """Draft lengths that no signal decides, shape (positions,)."""
        return np.full(self.positions, length, dtype=np.int64)

    def confidence(self, policy: CMASD) -> npt.NDArray[np.float64]:
        """CM-ASD's confidence of every row, shape (rows,), kept for its other windows."""
        key = (policy.beta, tuple(policy.weights), policy.entropy_sign, policy.vocab_size)
        if key not in self._confidence:
            trace = self.trace
            fields = [
                trace.signal(n).tolist() if n in trace.signals else repeat(0.0, len(trace))
                for n in ("entropy", "logit_margin", "prob_margin")
            ]
            self._confidence[key] = np.array(
                [
                    policy.confidence(RecordedToken(-1, False, 0.0, *values))
                    for values in zip(*fields, strict=True)
                ]
            )
        return self._confidence[key]

    def _to_eos(self, match: npt.NDArray[Any]) -> Ints:
        """Draft lengths at which the draft itself ends the output, shape (positions,)."""
        trace = self.trace
        last = trace.request_starts[1:] - 1
        accepted = last[[r.ended == "eos" for r in trace.requests]]
        accepted = accepted[match[accepted] == MATCH]
        if trace.signals:
            ends = np.zeros(len(trace), dtype=bool)
            if "draft_token" in trace.columns:
                eos = trace.meta.get("eos_token_ids") or []
                ends = np.isin(trace.columns["draft_token"], eos)
            ends[trace.on_path[accepted]] = True
            return self.stop_where(ends)
        # Without signals a draft ends the output only where it matches all the way there.
        there = np.zeros(self.positions, dtype=bool)
        there[accepted] = True
        until = self._end - np.arange(self.positions)
        return np.where(there[self._end - 1] & (self._runs >= until), until, UNBOUNDED)

    def _rounds(self, plan: Plan, policy: DraftPolicy) -> npt.NDArray[Any] | None:
        stop = np.minimum(self._most, plan.stop)
        walk = self._adaptive if plan.adapts else self._steady
        visited, drafted = walk(stop, policy)
        if self.trace.signals and not self._within_tails(visited, drafted):
            return None  # the usual replay says where it leaves the recording
        accepted = np.minimum(drafted, self._runs[visited])
        rounds = np.empty(len(visited), dtype=ROUND_DTYPE)
        rounds["request"] = np.searchsorted(self._ends, visited, side="right")
        rounds["position"] = visited - np.asarray(self._begins, dtype=np.int64)[rounds["request"]]
        rounds["drafted"] = rounds["draft_forwards"] = drafted
        rounds["accepted"] = accepted
        rounds["emitted"] = np.minimum(visited + accepted + 1, self._end[visited]) - visited
        rounds["catch_up"] = _catch_up(rounds, self.trace.takes_verified)
        return rounds

    def _steady(self, stop: Ints, policy: DraftPolicy) -> tuple[Ints, Ints]:
        """(on-path positions, tokens drafted) of every round, lengths as they stand."""
        del policy
        step = np.minimum(stop, self._runs) + 1
        after = np.minimum(np.arange(self.positions) + step, self._end).tolist()
        visited = []
        for begin, end in zip(self._begins, self._ends, strict=True):
            at = min(begin + self._first, end)
            while at < end:
                visited.append(at)
                at = after[at]
        places = np.array(visited, dtype=np.int64)
        return places, stop[places]

    def _adaptive(self, stop: Ints, policy: DraftPolicy) -> tuple[Ints, Ints]:
        """As `_steady`, with a cap that the policy chooses after every round."""
        lengths, runs = stop.tolist(), self._runs.tolist()
        sure = _SureDrafts()
        shared = policy.for_run()
        visited, drafted = [], []
        for begin, end in zip(self._begins, self._ends, strict=True):
            # These policies change by assignment alone: a shallow copy is a fresh one, and quick.
            mine = shared if shared.learns_across_requests else copy.copy(shared)
            mine.begin_request()
            at, cap = min(begin + self._first, end), 1
            keep, observe = mine.keep_drafting, mine.observe
            while at < end:
                longest = lengths[at]
                count = cap = _cap(keep, cap, longest, sure)
                accepted = runs[at] if runs[at] < count else count
                after = min(at + accepted + 1, end)
                visited.append(at)
                drafted.append(count)
                observe(Round(at - begin, count, accepted, after - at, count, 1), ())
                at = after
        return np.array(visited, dtype=np.int64), np.array(drafted, dtype=np.int64)

    def _within_tails(self, visited: Ints, drafted: Ints) -> bool:
        """Whether the drafts stay within the recorded tails."""
        trace = self.trace
        bounds = np.append(trace.on_path, len(trace))
        if trace.by_start:
            return bool((trace.on_path[visited] + drafted <= bounds[visited + 1]).all())
        ahead = visited + self._runs[visited]
        end = np.where(ahead < self._end[visited], ahead + 1, self._end[visited])
        return bool((trace.on_path[visited] + drafted <= bounds[end]).all())


class _SureDrafts(dict[int, list[RecordedToken]]):
    """By length, drafts of tokens that no test of a token would stop at."""

    token = RecordedToken(-1, False, 1.0, 0.0, float("inf"), 1.0, 1.0, 1.0)

    def __missing__(self, length: int) -> list[RecordedToken]:
        made = self[length] = [self.token] * length
        return made


def _cap(
    keep: Callable[[Sequence[RecordedToken]], bool], guess: int, most: int,
    sure: _SureDrafts,
) -> int:  # fmt: skip
    """The length up to `most` at which the policy itself stops, sought from `guess`."""
    length = min(guess, most)
    if keep(sure[length]):
        while length < most and keep(sure[length]):
            length += 1
    else:
        while length > 0 and not keep(sure[length - 1]):
            length -= 1
    return length


def _catch_up(rounds: npt.NDArray[Any], anew: bool) -> Ints:
    """Tokens each round's first draft pass catches up on (see `policies.core.speculate`)."""
    forwards, accepted = (rounds[n].astype(np.int64) for n in ("draft_forwards", "accepted"))
    left = accepted + 1 if anew else accepted - np.minimum(accepted, forwards - 1) + 1
    # A request begins one token behind, and every round without a draft adds one.
    index = np.arange(len(rounds))
    begins = np.diff(rounds["request"], prepend=-1) != 0
    anchors = begins | np.roll(forwards > 0, 1)
    anchor = np.maximum.accumulate(np.where(anchors, index, 0))
    behind = np.where(begins[anchor], 1, left[anchor - 1])
    return np.asarray(behind + index - anchor)


def _fixed(walker: Walker, policy: Fixed) -> Plan:
    return Plan(walker.at_most(policy.gamma))


def _never(walker: Walker, policy: Autoregressive) -> Plan:
    del policy
    return Plan(walker.at_most(0))


def _confidence(walker: Walker, policy: Confidence) -> Plan | None:
    if policy.roc_update != "off":
        return None
    below = _below(walker, "prob", policy.confidence_threshold)
    return Plan(np.minimum(below, policy.gamma))


def _heuristic(walker: Walker, policy: HFHeuristic) -> Plan | None:
    if policy.roc_update != "off":
        return None
    return Plan(_below(walker, "prob", policy.confidence_threshold), adapts=True)


def _gammatune(walker: Walker, policy: GammaTune) -> Plan:
    del policy
    return Plan(walker.at_most(UNBOUNDED), adapts=True)


def _gammatune_plus(walker: Walker, policy: GammaTunePlus) -> Plan:
    return Plan(_below(walker, "top_prob", policy.threshold), adapts=True)


def _svip(walker: Walker, policy: SVIP) -> Plan:
    unsure = np.sqrt(policy.scale * walker.trace.signal("entropy")) > policy.threshold
    return Plan(np.minimum(walker.stop_where(unsure), policy.gamma_max))


def _cmasd(walker: Walker, policy: CMASD) -> Plan | None:
    if policy.window != "causal":
        return None
    confidence = np.append(walker.confidence(policy), np.zeros(policy.gamma_max))
    steps = np.arange(1, policy.gamma_max + 1)
    sums = np.cumsum(confidence[walker.trace.on_path[:, None] + steps - 1], axis=1)
    window = (policy.alpha * (sums / steps) * policy.gamma_max).astype(np.int64)
    reached = steps >= np.clip(window, policy.gamma_min, policy.gamma_max)
    return Plan(np.asarray(reached.argmax(axis=1) + 1, dtype=np.int64))


def _below(walker: Walker, signal: str, threshold: float) -> Ints:
    """Draft lengths if a token whose `signal`, a probability, is below `threshold` is the last."""
    if not threshold:
        return walker.at_most(UNBOUNDED)
    return walker.stop_where(walker.trace.signal(signal) < threshold)


PLANS: Mapping[type[DraftPolicy], Callable[[Walker, Any], Plan | None]] = {
    Autoregressive: _never, Fixed: _fixed, Confidence: _confidence, HFHeuristic: _heuristic,
    GammaTune: _gammatune, GammaTunePlus: _gammatune_plus, SVIP: _svip, CMASD: _cmasd,
}  # fmt: skip
"""Of these very types: a subclass may decide otherwise."""
