"""Prices of rounds: from a round log and a latency table to the time of every round.

A round is a list of calls (`RoundLog.calls`), and its time is the sum of theirs (`seconds`).  What
runs besides adds or alters calls, one function each, in the order of `ADDED`.  A round of a draft
model costs

* a draft pass per drafted token: the first over ``catch_up`` tokens, the others over one, and the
  next few take longer than later ones (`LatencyTable.settling_s`),
* in an engine that runs the drafter in every step (cells of phase ``along``), a first draft pass
  over all tokens that the step verifies, because it comes after them, and one where nothing is
  drafted,
* the signals of each drafted token, if the policy reads any,
* one target pass over ``drafted + 1`` tokens,
* host time per round and per drafted token, and removing rejected tokens from the caches,
* what only some runs do (`extras_of`), which is part of the host time: judging the drafted tokens
  under a lossy rule, drawing and rejecting them if the output is sampled.

A step without speculation is the same sum with ``drafted = 0``, so both sides of a speedup are
priced alike.  If the engine always drafts (`traces.replay.calls`), rounds without drafts pay its
passes, too.  Decode time is the sum over rounds; prefill is separate.

For another source, its recorded calls replace the draft passes, and the target's pass if they
include verification.  A drafter on the target's features is priced like a draft model.  The steps
of a full batch are priced as rounds whose sizes are means (`simulator.whatif.batching`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats, Ints
from policies.rules.base import VerifyRule
from policies.rules.registry import RULES
from traces.acceptance.sampling import GREEDY, Sampling
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED
from traces.latency.table import PHASES, SERVER, Estimate, LatencyTable
from traces.replay.calls import CALL_KINDS, OWN, Calls, Sizes, distinct, passes_always
from traces.replay.layout import caught_up
from traces.replay.rounds import ROUND_DTYPE, RoundLog
from traces.store.identity import ROLES


class PassCount(NamedTuple):
    """Model passes priced, and how many of them lay between or outside measured cells."""

    passes: int
    interpolated: int
    extrapolated: int

    @classmethod
    def of(cls, origin: npt.NDArray[np.int8], counts: Ints | None = None) -> PassCount:
        """Return the count of passes read with these origins, each `counts` times (default: 1)."""
        by_origin = np.bincount(origin, counts, EXTRAPOLATED + 1)
        return cls(int(by_origin.sum()), int(by_origin[INTERPOLATED]), int(by_origin[EXTRAPOLATED]))

    def __add__(self, other: object) -> PassCount:
        if not isinstance(other, PassCount):
            return NotImplemented
        return PassCount(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def outside(self) -> float:
        """Share of the passes that were read outside the measured cells."""
        return self.extrapolated / max(self.passes, 1)


NO_PASSES = PassCount(0, 0, 0)


@dataclass(frozen=True, eq=False)
class Priced:
    """Seconds of every round of `log`; arrays of shape (rounds,), `prefill_s` (requests,)."""

    log: RoundLog
    latency: LatencyTable
    batch: int
    draft_s: Floats
    verify_s: Floats
    signal_s: Floats
    host_s: Floats
    decode_passes: PassCount
    """Passes that the rounds took."""
    extras: frozenset[str] = frozenset()
    """Phases that only some runs have (`extras_of`), as these rounds do."""

    def __repr__(self) -> str:
        return f"<Priced {self.log.policy}: {self.total_s:.4g} s after prefill, {self.log!r}>"

    @cached_property
    def round_s(self) -> Floats:
        """Seconds of each round, shape (rounds,)."""
        return self.draft_s + self.verify_s + self.signal_s + self.host_s

    @cached_property
    def decode_s(self) -> Floats:
        """Seconds of each request after its prefill, shape (requests,)."""
        return self.log.per_request(self.round_s)

    @cached_property
    def _prefill(self) -> tuple[Floats, PassCount]:
        """Seconds of each request's prompt, and the passes that read them."""
        prompts = np.array([r.prompt_length for r in self.log.requests], dtype=np.int64)
        total_s, passes = np.zeros(len(prompts)), NO_PASSES
        for model in _readers(self.log, _drafter(self.log, self.latency)):
            if self.latency.has(model, "prefill"):
                read = Calls(model, "prefill", np.arange(len(prompts)), prompts)
                found, count = seconds(read, self.latency, self.batch)
                total_s, passes = total_s + found, passes + count
        return total_s, passes

    @property
    def prefill_s(self) -> Floats:
        """Seconds of each request's prompt, shape (requests,).

        Read when asked: prompts longer than were measured need a fit, and the fit a library that
        takes longer to import than most logs to price.
        """
        return self._prefill[0]

    @property
    def prefill_passes(self) -> PassCount:
        """The passes that read the prompts."""
        return self._prefill[1]

    @property
    def passes(self) -> PassCount:
        """All passes, those that read the prompts among them."""
        return self.prefill_passes + self.decode_passes

    @property
    def wall_s(self) -> Floats:
        """Seconds of each request, prefill included, shape (requests,)."""
        return self.decode_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """Decode seconds over all requests."""
        return float(self.decode_s.sum())

    @property
    def outside(self) -> float:
        """Share of the decoding passes that were read outside the measured cells."""
        return self.decode_passes.outside

    def outside_with(self, prefill: bool) -> float:
        """Return `outside`, the passes that read the prompts counted as well if `prefill`."""
        return self.passes.outside if prefill else self.outside

    def unpriced(self, latency: LatencyTable, prefill: bool = False) -> list[str]:
        """Return what ran at no cost because `latency` lacks its cells, as served rows name it."""
        models = _readers(self.log, self.log.drafter)
        missing = missing_parts(latency, self.extras)
        if prefill:
            missing += [f"{m} prefill" for m in models if not latency.has(m, "prefill")]
        return missing


def autoregressive(log: RoundLog) -> RoundLog:
    """Return plain decoding of the requests of `log`: one round of one token after another."""
    lengths = np.array([max(r.tokens - log.first, 0) for r in log.requests], dtype=np.int64)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    rounds = np.zeros(int(lengths.sum()), dtype=ROUND_DTYPE)
    rounds["request"] = np.repeat(np.arange(len(lengths)), lengths)
    step = np.arange(len(rounds)) - starts
    rounds["position"] = step + log.first
    rounds["emitted"] = 1
    rounds["catch_up"] = step + 1
    return RoundLog(
        rounds, log.requests, "autoregressive", source="none", verify=log.verify,
        fidelity="exact", first=log.first, sampling=log.sampling,
    )  # fmt: skip


def price(log: RoundLog, latency: LatencyTable, *, batch: int = 1) -> Priced:
    """Price every round of `log` with measured or assumed latencies.

    Where decoding began at output position 0, the first target pass is the prefill over
    prompt and drafts and the first draft pass the draft's prefill; the time of the prompt
    alone is then booked as prefill and the rest as decoding.

    Parameters
    ----------
    log:
        Rounds of plain decoding, of a draft model, or of another source with its calls.
    latency:
        Target and draft latencies.  Host phases it lacks cost nothing (`Priced.unpriced`); without
        prefill cells prefill costs nothing either, and a first pass counts as any other.
    batch:
        Identical sequences decoded in step; the seconds are those of the shared passes.

    Raises
    ------
    DraftsimError
        If the log lacks the calls of its source, the table lacks the cells of a part that
        ran, or ``batch < 1``.
    """
    log = always_drafted(log, passes_always(latency))
    drafter = _drafter(log, latency)
    by_model = log.drafter != "draft" or log.source in ("draft-model", "none")
    if log.recorded_calls is None and not by_model:
        raise DraftsimError(
            f"rounds drafted by {log.source!r} have another cost than a draft model's passes, and "
            "this log does not hold their calls: replay them with `replay_source`"
        )
    if batch < 1:
        raise DraftsimError(f"batch is {batch}, expected at least 1")
    rounds = log.rounds
    drafted, forwards, accepted = (
        rounds[name].astype(np.int64) for name in ("drafted", "draft_forwards", "accepted")
    )
    judging = None if log.mismatched is None else judging_phase(log)
    extras = extras_of(log.reads, judging, log.sampling)
    calls = [c._replace(model=drafter) if c.model == OWN else c for c in log.calls]
    parts, passes = priced(
        Ran(
            log, drafter, calls, forwards, drafted, np.maximum(log.context - 1, 0),
            # The last drafted token was never fed to the draft model: its cache holds one fewer.
            accepted < drafted, (accepted < forwards - 1) & (log.recorded_calls is None),
            np.flatnonzero(rounds["position"] == 0), extras,
        ),
        latency, batch,
    )  # fmt: skip
    return Priced(log, latency, batch, *parts, passes, extras)


class Ran(NamedTuple):
    """Rounds of one sequence, or steps of a batch, whose sizes are means; arrays (rounds,)."""

    log: RoundLog
    """The rounds, or those that the steps were put together from."""
    drafter: str
    """Model of the latency table that drafts."""
    calls: list[Calls]
    """Passes and other work of the source, and the verification."""
    forwards: Ints
    """Draft passes, or drafted tokens."""
    drafted: Sizes
    """Drafted tokens that are verified."""
    cached: Sizes
    """Tokens in the target's cache before the verification.

    The last token emitted is in no cache yet: it is the first the next pass processes.
    """
    rejected: Bools
    """True if drafted tokens leave the target's cache."""
    unread: Bools
    """True if tokens that the drafter has read leave a cache of its own."""
    begins: Ints = np.zeros(0, np.int64)
    """The rounds that read the prompt, at output position 0."""
    extras: frozenset[str] = frozenset()
    """Phases that only some runs have (`extras_of`)."""

    @property
    def by_passes(self) -> bool:
        """True if drafts are passes of a model, False if their calls were recorded."""
        return self.log.recorded_calls is None


def priced(
    ran: Ran, latency: LatencyTable, batch: int
) -> tuple[tuple[Floats, Floats, Floats, Floats], PassCount]:
    """Return seconds of drafting, verification, signals and the host, (rounds,) each.

    Also returns the count of passes.  Raises DraftsimError if the table lacks the cells of a call.
    """
    for add in ADDED:
        ran = add(ran, latency)
    draft_s, verify_s, signal_s, host_s = np.zeros((4, len(ran.forwards)))
    passes = NO_PASSES
    for calls in ran.calls:
        found, count = seconds(calls, latency, batch)
        passes += count
        parts = {"": verify_s if calls.verify else draft_s, "read": signal_s}
        part = parts.get(PHASES[calls.phase].per, host_s)
        part += np.bincount(calls.round, found, len(part))
    # A prompt may be measured to take longer than with its drafts.
    return (draft_s, np.maximum(verify_s, 0.0), signal_s, host_s), passes


def in_first_rounds(ran: Ran, latency: LatencyTable) -> Ran:
    """Replace the first passes of rounds that read the prompt by the models' prefill.

    The prompt alone is booked as prefill (`Priced.prefill_s`).
    """
    if not len(ran.begins):
        return ran

    def begun(own: Calls) -> Calls:
        read = own.verify or (own.phase == "catch_up" and ran.by_passes)
        if not (read and latency.has(own.model, "prefill")):
            return own
        return _kept(own, ~np.isin(own.round, ran.begins))

    calls = [begun(own) for own in ran.calls]
    if latency.has("target", "prefill"):
        prompts = np.array([r.prompt_length for r in ran.log.requests], dtype=np.int64)
        alone = prompts[ran.log.rounds["request"][ran.begins]]
        with_drafts = alone + ran.drafted[ran.begins]
        calls += [
            Calls("target", "prefill", ran.begins, with_drafts, verify=True),
            Calls("target", "prefill", ran.begins, alone, times=-1, verify=True),
        ]
    return ran._replace(calls=calls)


def in_every_step(ran: Ran, latency: LatencyTable) -> Ran:
    """Let a drafter that runs along with the target read all that every step verifies.

    It takes a pass in every step.  So a single pass whose token is not verified was not asked for.
    """
    if ran.log.is_plain or not (ran.by_passes and latency.has(ran.drafter, "along")):
        return ran
    asked = np.where((ran.forwards < 2) & (ran.drafted == 0), 0, ran.forwards)

    def along(own: Calls) -> Calls:
        if own.phase != "catch_up":
            return own
        of = own.round[asked[own.round] > 0]
        return own._replace(round=of, new_tokens=ran.drafted[of] + 1, context=ran.cached[of])

    idle = np.flatnonzero(asked == 0)
    took = Calls(ran.drafter, "along", idle, ran.drafted[idle] + 1, ran.cached[idle])
    return ran._replace(calls=[*map(along, ran.calls), took], forwards=asked)


def settling(ran: Ran, latency: LatencyTable) -> Ran:
    """Add what a round's next draft passes take longer than later ones."""
    if not (ran.by_passes and latency.has(ran.drafter, "settling")):
        return ran
    later = [own for own in ran.calls if own.advancing]
    longer = [Calls(ran.drafter, "settling", own.round, own.times) for own in later]
    return ran._replace(calls=[*ran.calls, *longer])


def host_phases(ran: Ran, latency: LatencyTable) -> Ran:
    """Add what a round is charged by itself, whatever its passes (`LatencyKind.per`)."""
    calls = list(ran.calls)
    for phase, of in PHASES.items():
        if of.per in PER and charged(phase, ran.extras):
            for model, times in PER[of.per](ran).items():
                if latency.has(model, phase):
                    own = np.flatnonzero(times)
                    many = times[own].astype(np.int64)
                    calls.append(Calls(model, phase, own, ran.drafted[own], times=many))
    return ran._replace(calls=calls)


ADDED: tuple[Callable[[Ran, LatencyTable], Ran], ...] = (
    in_first_rounds, in_every_step, settling, host_phases,
)  # fmt: skip
"""Functions that add or alter calls, for all that runs besides a source and the verification."""

PER: dict[str, Callable[[Ran], dict[str, Ints | Bools]]] = {
    "round": lambda ran: dict.fromkeys(ROLES, np.ones_like(ran.forwards)),
    "drafted": lambda ran: dict.fromkeys(ROLES, ran.forwards),
    "read": lambda ran: dict.fromkeys(ROLES, ran.forwards),
    "verdict": lambda ran: {"target": np.ones_like(ran.forwards)},
    "rollback": lambda ran: {"target": ran.rejected, ran.drafter: ran.unread},
}
"""How often a round is charged for a phase, by its model (`LatencyKind.per`)."""


def _kept(calls: Calls, which: Bools) -> Calls:
    """Return those calls that `which` names, (calls,)."""
    return Calls._make(
        values[which] if isinstance(values, np.ndarray) else values for values in calls
    )


def seconds(calls: Calls, latency: LatencyTable, batch: int) -> tuple[Floats, PassCount]:
    """Return seconds of calls, shape (calls,), and their count as passes.

    Phases of the host are no passes.  Raises DraftsimError if the table lacks the cells of a pass;
    its message names them.
    """
    model, phase, of = calls.model, calls.phase, calls.round
    per = PHASES[phase].per
    if not len(of):
        return np.zeros(0), NO_PASSES
    if phase == "settling":
        return latency.settling_s(model, batch, calls.new_tokens), NO_PASSES
    if per == "verdict":
        drafted = np.asarray(calls.new_tokens)
        known = judging_seconds(latency, phase, batch, math.ceil(drafted.max()))
        return np.interp(drafted, np.arange(len(known)), known), NO_PASSES
    count = np.broadcast_to(calls.times, of.shape)
    if per:
        return count * scalar_seconds(latency, model, phase, batch), NO_PASSES
    model, phase = _cells(latency, model, phase)
    width, context = (np.broadcast_to(v, of.shape) for v in (calls.new_tokens, calls.context))
    if calls.advancing:
        return _advancing(latency, model, phase, batch, context, count)
    if not calls.attends:
        context = np.clip(context, *latency.grid(model, phase).contexts).astype(np.int64)
    read = read_each(latency, model, batch, width, context, phase)
    return count * read.seconds, PassCount.of(read.origin, np.maximum(count, 0))


def _cells(latency: LatencyTable, model: str, phase: str) -> tuple[str, str]:
    """Return (model, phase) of the cells that calls are read from; DraftsimError if there are none.

    Where layers were timed by themselves, those taken apart from a pass are not read.
    """
    apart = ("exit", "layer") if (model, phase) == ("target", "layer") else (model, phase)
    found = latency.cells_for(*apart)
    if latency.has(*found):
        return found
    if found[1] == "forward" and model in ROLES:
        latency.grid(*found)  # says which models there are
    raise DraftsimError(
        f"latency table has no {phase!r} cells of {model!r}, which these rounds ran: `draftsim "
        "profile sources --exit-layers` measures them"
    )


def _advancing(
    latency: LatencyTable, model: str, phase: str, batch: int, start: Sizes, count: Ints
) -> tuple[Floats, PassCount]:
    """Return seconds of `count` passes over consecutive contexts from `start` on, (calls,) each.

    A running sum prices any span.
    """
    whole = np.floor(start).astype(np.int64)
    between = start - whole
    low, high = int(whole.min()), int((whole + count).max()) + 1
    span = latency.estimate(model, phase, batch=batch, context=np.arange(low, high))
    begin = whole - low
    found = _spans(span.seconds, begin, begin + count)
    if between.any():  # passes are linear from one token of context to the next
        found += between * (span.seconds[begin + count] - span.seconds[begin])
        begin = begin + (between > 0)
    return found, PassCount(
        int(count.sum()),
        *(int(_spans(span.origin == o, begin, begin + count).sum())
          for o in (INTERPOLATED, EXTRAPOLATED)),
    )  # fmt: skip


def _spans(values: npt.NDArray[np.generic], begin: Ints, end: Ints) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(running[end] - running[begin])


def read_each(
    latency: LatencyTable, model: str, batch: int, width: Sizes, context: Sizes, phase: str
) -> Estimate:  # fmt: skip
    """Return the pass of each element; equal (width, context) in whole tokens are read once."""
    if width.dtype.kind == "f" or context.dtype.kind == "f":  # means, few of which are equal
        return latency.estimate(model, phase, batch=batch, new_tokens=width, context=context)
    scale = int(context.max()) + 1
    keys, inverse = distinct(np.asarray(width * scale + context, dtype=np.int64))
    read = latency.estimate(
        model, phase, batch=batch, new_tokens=keys // scale, context=keys % scale
    )
    return Estimate(read.seconds[inverse], read.origin[inverse])


def always_drafted(log: RoundLog, passes: int) -> RoundLog:
    """Return the rounds of `log` in an engine that runs `passes` draft passes or more in each.

    Verified and accepted tokens stay the same.  The drafter is always up to date, so its first pass
    reads one token, or two if all that it had read was accepted; one that takes verified tokens
    reads all that the last round emitted.  Plain decoding and the rounds of sources with calls of
    their own are left alone.
    """
    if not passes or log.is_plain or log.recorded_calls is not None:
        return log
    rounds = log.rounds.copy()
    forwards = np.maximum(rounds["draft_forwards"], passes)
    begins = np.diff(rounds["request"], prepend=-1) != 0
    unread = caught_up(begins, forwards, rounds["accepted"], log.takes_verified)
    rounds["draft_forwards"] = forwards
    rounds["catch_up"] = np.minimum(rounds["catch_up"], unread)
    return replace(log, rounds=rounds)


def _drafter(log: RoundLog, latency: LatencyTable) -> str:
    """Return the model of `latency` whose passes draft."""
    return log.drafter if log.drafter == "draft" else latency.drafter(log.drafter)


def _readers(log: RoundLog, drafter: str) -> tuple[str, ...]:
    """Return the models that read the prompts: the target, and a drafter that is not part of it."""
    recorded = log.recorded_calls
    if recorded is None:
        own = bool(log.rounds["draft_forwards"].any())
    else:
        own = any(CALL_KINDS[kind][0] == OWN for kind in np.unique(recorded["kind"]))
    return ("target", drafter) if own else ("target",)


def extras_of(
    reads: Collection[str] = (), judging: str | None = None, sampling: Sampling = GREEDY
) -> frozenset[str]:
    """Return the phases of a run that not all runs have (`LatencyKind.extra`).

    Parameters
    ----------
    reads:
        Draft signals that the policy reads.
    judging:
        Phase of a lossy rule's verdicts (`rule_phase`); None: verification is lossless.
    sampling:
        How the output is drawn.
    """
    drawn = [] if sampling.greedy else ["draw", "toss"]
    drawn = [f"{phase}_top_p" for phase in drawn] if sampling.top_p < 1 else drawn
    return frozenset([*(["signal"] if reads else []), *([judging] if judging else []), *drawn])


def charged(phase: str, extras: Collection[str]) -> bool:
    """Return True if a run with these `extras` is charged for a phase."""
    return not PHASES[phase].extra or phase in extras


def judging_phase(log: RoundLog) -> str:
    """Return the phase that the verdicts of a lossy run cost (`rule_phase`), by the rule's name
    where the rule itself was not kept.
    """
    return rule_phase(log.rule or RULES.get(log.verify.partition(":")[0]))


def rule_phase(rule: VerifyRule | type[VerifyRule] | None) -> str:
    """Return the phase of `traces.latency.table.PHASES` that the verdicts of a lossy rule cost.

    It follows from what the rule reads.
    """
    reads = set(rule.reads) if rule is not None else set()
    return "judge_signals" if reads - {"token_id"} else "judge"


def missing_parts(latency: LatencyTable, extras: Collection[str]) -> list[str]:
    """Return the host's parts that a run at `latency` would have and the table has not.

    A textbook table that names no verdicts or draws takes them to be free.
    """
    phases = {"host_round": "host_round"} | {
        phase: of.extra for phase, of in PHASES.items()
        if phase in extras and (of.per == "read" or not latency.is_constant)
    }  # fmt: skip
    found = (n for phase, n in phases.items() if not any(latency.has(m, phase) for m in ROLES))
    return list(dict.fromkeys(found))


def judging_seconds(latency: LatencyTable, phase: str, batch: int, longest: int) -> Floats:
    """Return seconds of the verdicts on 0, 1, ..., `longest` drafted tokens of each sequence.

    At a batch that was not measured they are those of the nearest one with as many tokens in all.
    Zero where the table has no cells of this phase.
    """
    lengths = np.arange(longest + 1)
    if not latency.has("target", phase):
        return np.zeros(longest + 1)
    cells = latency.cells[latency.cells["phase"] == phase]
    nearest = int(np.clip(batch, cells["batch"].min(), cells["batch"].max()))
    drafted = np.maximum((lengths + 1) * batch / nearest - 1, 0)
    return latency.seconds("target", phase, batch=nearest, new_tokens=drafted)


def scalar_seconds(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    """Return seconds at `batch` of a phase that was measured at one number of tokens and one
    context.

    0 where the table lacks the phase.
    """
    # Many logs, and every engine of a search, read the same cells of a table that never changes.
    known = _scalars.setdefault(latency, {})
    seconds = known.get((model, phase, batch))
    if seconds is None:
        seconds = _scalar(latency, model, phase, batch) if latency.has(model, phase) else 0.0
        known[model, phase, batch] = seconds
    return seconds


_scalars: WeakKeyDictionary[LatencyTable, dict[tuple[str, str, int], float]] = WeakKeyDictionary()


def _scalar(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    cells = latency.cells
    own = cells[(cells["model"] == model) & (cells["phase"] == phase)]
    # Read at the size it was measured at, whatever the context.
    sizes = {"new_tokens": int(own["new_tokens"].iloc[0]), "context": int(own["context"].iloc[0])}
    nearest = int(np.clip(batch, own["batch"].min(), own["batch"].max()))
    return float(latency.seconds(model, phase, batch=nearest, **sizes))


class Host(NamedTuple):
    """The host's seconds at one batch size, and a server's own."""

    round_s: float
    """Seconds of each iteration, the server's own time around it included."""
    draft_s: float
    """Seconds of each draft step, with signals if the policy reads any."""
    target_rollback_s: float
    draft_rollback_s: float
    iteration_s: float
    """The server's own time around an iteration over as many requests."""
    request_s: float
    """The server's own time around a request that ends with as many running, itself included."""


def host_at(latency: LatencyTable, extras: Collection[str], batch: int) -> Host:
    """Return the host's seconds at `batch`; phases that the table lacks cost nothing.

    ``extras`` are the phases of the run that not all runs have (`extras_of`).
    """

    def total(pers: Collection[str], *models: str) -> float:
        kinds = [n for n, of in PHASES.items() if of.per in pers and charged(n, extras)]
        return sum(scalar_seconds(latency, m, phase, batch) for phase in kinds for m in models)

    rollbacks = (scalar_seconds(latency, model, "rollback", batch) for model in ROLES)
    around = [total([per], SERVER) for per in ("step", "request")]
    return Host(
        total(["round"], *ROLES) + around[0], total(["drafted", "read"], *ROLES), *rollbacks,
        *around,
    )  # fmt: skip
