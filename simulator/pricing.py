"""Prices of rounds: from a round log and a latency table to the time of every round.

A round of a draft model costs

* a draft pass per drafted token: the first over ``catch_up`` tokens, the others over one, and the
  next few take longer than later ones (`LatencyTable.settling_s`),
* in an engine that runs the drafter in every step (cells of phase ``along``), a first draft pass
  over all tokens that the step verifies, because it comes after them, and one where nothing is
  drafted,
* the signals of each drafted token, if the policy reads any,
* one target pass over ``drafted + 1`` tokens,
* host time per round and per drafted token, and removing rejected tokens from the caches,
* under a lossy rule, judging the drafted tokens, which is part of the host time.

A step without speculation is the same sum with ``drafted = 0``, so both sides of a speedup are
priced alike.  If the engine always drafts (`traces.replay.calls`), rounds without drafts pay its
passes, too.  Decode time is the sum over rounds; prefill is separate.

For another source, its recorded calls replace the draft passes, and the target's pass if they
include verification.  A drafter on the target's features is priced like a draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats, Ints
from policies.rules.base import VerifyRule
from policies.rules.registry import RULES
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED
from traces.latency.table import SERVER, Estimate, LatencyTable
from traces.replay.calls import (
    CALL_KINDS,
    DRAFTER,
    DRAFTER_TREE,
    LAYER,
    ONE_PASS,
    always_drafted,
    distinct,
    passes_always,
)
from traces.replay.rounds import ROUND_DTYPE, RoundLog

Sizes = Floats | Ints

FALLBACKS = {
    ("exit", "head"): ("target", "head"),
    ("exit", "layer"): ("target", "layer"),
    ("target", "pass"): ("target", "forward"),
    ("target", "tree"): ("target", "pass"),
}
"""Where a part was not measured by itself, the nearest that was."""


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
    left_out: tuple[str, ...] = ()
    """Parts that ran and for which a measured table has no cells: the seconds lack them."""

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
                seconds, count = pass_seconds(
                    self.latency, model, self.batch, prompts, np.zeros_like(prompts), "prefill"
                )
                total_s, passes = total_s + seconds, passes + count
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
        missing = missing_hosts(latency, bool(self.log.reads))
        if prefill:
            missing += [f"{m} prefill" for m in models if not latency.has(m, "prefill")]
        return [*missing, *self.left_out]


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
        fidelity="exact", first=log.first,
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
        Target and draft latencies.  Host phases it lacks cost nothing; without prefill
        cells prefill costs nothing either, and a first pass counts as any other.  Judging
        under a lossy rule that a measured table lacks is named in `Priced.left_out`.
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
    if log.calls is None and log.drafter == "draft" and log.source not in ("draft-model", "none"):
        raise DraftsimError(
            f"rounds drafted by {log.source!r} have another cost than a draft model's passes, and "
            "this log does not hold their calls: replay them with `replay_source`"
        )
    if batch < 1:
        raise DraftsimError(f"batch is {batch}, expected at least 1")
    rounds, context = log.rounds, log.context
    drafted = rounds["drafted"].astype(np.int64)
    along = runs_along(log, latency, drafter)
    forwards = asked_passes(rounds["draft_forwards"].astype(np.int64), drafted, along)
    accepted = rounds["accepted"].astype(np.int64)
    calls, passes = log.calls, NO_PASSES

    # The last token emitted is in no cache yet: it is the first the next pass processes.
    cached = np.maximum(context - 1, 0)
    width, verify_s = drafted + 1, np.zeros(len(log))
    prompted = (rounds["position"] == 0) & latency.has("target", "prefill")
    if prompted.any():
        prompts = np.array([r.prompt_length for r in log.requests], dtype=np.int64)
        prompt = prompts[rounds["request"][prompted]]
        (with_drafts, count), (prompt_s, _) = (
            pass_seconds(latency, "target", batch, tokens, np.zeros_like(tokens), "prefill")
            for tokens in (prompt + drafted[prompted], prompt)
        )
        verify_s[prompted] = np.maximum(with_drafts - prompt_s, 0.0)
        passes += count
    if calls is not None and calls["verify"].any():
        verify_s, count = call_seconds(log, latency, batch=batch, verify=True)
        passes += count
    else:
        for phase, of in (("forward", width == 1), (verify_phase(log, latency), width > 1)):
            rest = of & ~prompted
            verify_s[rest], count = pass_seconds(
                latency, "target", batch, width[rest], cached[rest], phase
            )
            passes += count

    catch_up = rounds["catch_up"].astype(np.int64)
    if latency.has(drafter, "prefill"):
        # A first pass at position 0 is the draft's prefill, booked above.
        catch_up[rounds["position"] == 0] = 0
    if calls is None:
        verified = Verified(width, cached) if along else None
        draft_s, count = draft_seconds(
            latency, drafter, batch, forwards, catch_up, context, verified
        )
    else:
        draft_s, count = call_seconds(log, latency, batch=batch, verify=False)
    each_s = host_seconds(latency, "signal", batch) if log.reads else 0.0
    signal_s = np.asarray(forwards * each_s, dtype=np.float64)
    # The last drafted token was never fed to the draft model, so its cache holds one fewer.
    unread = accepted < forwards - 1 if calls is None else np.zeros(len(log), bool)
    host_s = round_host_seconds(latency, drafter, batch, forwards, accepted < drafted, unread)
    left_out: tuple[str, ...] = ()
    if log.mismatched is not None:
        phase = judging_phase(log)
        if missing_judging(latency, phase):
            left_out = ("judging",)
        elif len(drafted):
            host_s += judging_seconds(latency, phase, batch, int(drafted.max()))[drafted]
    passes += count
    return Priced(log, latency, batch, draft_s, verify_s, signal_s, host_s, passes, left_out)


def _drafter(log: RoundLog, latency: LatencyTable) -> str:
    """Return the model of `latency` whose passes draft."""
    return log.drafter if log.drafter == "draft" else latency.drafter(log.drafter)


def _readers(log: RoundLog, drafter: str) -> tuple[str, ...]:
    """Return the models that read the prompts: the target, and a drafter that is not part of it."""
    own = log.calls is None or log.drafter != "draft" or ONE_PASS in log.calls["kind"]
    return ("target", drafter) if own and log.rounds["draft_forwards"].any() else ("target",)


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


def missing_judging(latency: LatencyTable, phase: str) -> bool:
    """Return True if a measured table has no cells of the verdicts of this phase."""
    return not latency.has("target", phase) and not latency.is_constant


def judging_seconds(latency: LatencyTable, phase: str, batch: int, longest: int) -> Floats:
    """Return seconds of the verdicts on 0, 1, ..., `longest` drafted tokens of a sequence.

    Zero where the table has no cells of this phase.
    """
    lengths = np.arange(longest + 1)
    if not latency.has("target", phase):
        return np.zeros(longest + 1)
    cells = latency.cells[latency.cells["phase"] == phase]
    nearest = int(np.clip(batch, cells["batch"].min(), cells["batch"].max()))
    return latency.seconds("target", phase, batch=nearest, new_tokens=lengths)


def call_seconds(
    log: RoundLog, latency: LatencyTable, *, batch: int = 1, verify: bool
) -> tuple[Floats, PassCount]:
    """Return seconds of each round's drafting or verification calls, shape (rounds,).

    Also returns the calls, counted as passes.  A layer call is read at its width and the
    round's context.

    Raises DraftsimError if the table lacks the cells of a call; its message names them.
    """
    assert log.calls is not None
    calls: npt.NDArray[Any] = log.calls
    kinds = np.where(calls["verify"] == verify, calls["kind"], -1)
    context = np.maximum(log.context - 1, 0)
    rounds, seconds = [np.zeros(0, np.int64)], [np.zeros(0)]
    passes = NO_PASSES
    for kind in np.flatnonzero(np.bincount(kinds[kinds >= 0])).tolist():
        mine = np.flatnonzero(kinds == kind)
        at_round, width, count = (
            calls[name][mine].astype(np.int64) for name in ("round", "new_tokens", "count")
        )
        model, phase = CALL_KINDS[kind]
        if kind in (DRAFTER, DRAFTER_TREE, ONE_PASS):
            model = latency.drafter(log.drafter)
        if kind == ONE_PASS:
            phase = latency.first_draft_phase(model)
        model, phase = _cells(latency, model, phase)
        at = context[at_round]
        attends = kind in (DRAFTER, DRAFTER_TREE, ONE_PASS) or phase == "layer"
        attends |= model == "target" and phase != "head"
        if not attends:
            # Nothing else attends to the context: it is read where it was measured.
            at = np.clip(at, *latency.grid(model, phase).contexts).astype(np.int64)
        read = read_each(latency, model, batch, width, at, phase)
        rounds.append(at_round)
        seconds.append(count * read.seconds)
        passes += PassCount.of(read.origin, count)
    # In the order of the calls, whose sums depend on it.
    total = np.bincount(np.concatenate(rounds), np.concatenate(seconds), len(log))
    return total.astype(np.float64, copy=False), passes


def verify_phase(log: RoundLog, latency: LatencyTable) -> str:
    """Return the phase of the target's cells that verifications of drafted tokens cost.

    A pass takes longer after passes that left other weights in the processor's caches: heads and
    lookups leave few.  A round without drafts is a step of plain decoding, and costs that.
    """
    if log.calls is None or not latency.has("target", "pass"):
        return "forward"
    return "forward" if (log.calls["kind"] == LAYER).any() else "pass"


def _cells(latency: LatencyTable, model: str, phase: str) -> tuple[str, str]:
    key: tuple[str, str] | None
    key = ("exit", "layer") if (model, phase) == ("target", "layer") else (model, phase)
    if latency.is_constant and phase == "tree":  # a pass costs what a pass costs
        key = model, "forward"
    while key is not None:
        if latency.has(*key):
            return key
        key = FALLBACKS.get(key)
    raise DraftsimError(
        f"latency table has no {phase!r} cells of {model!r}, which these rounds ran: profile the "
        "target with its sources"
    )


class Verified(NamedTuple):
    """The target's passes as tokens a sequence, fractions where they are means; shape (rounds,)."""

    width: Sizes
    cached: Sizes
    """Tokens in the cache before the pass."""


def runs_along(log: RoundLog, latency: LatencyTable, drafter: str = "draft") -> bool:
    """Return True if the drafter of `log` runs in every step of the engine of `latency`."""
    return not log.is_plain and log.calls is None and latency.has(drafter, "along")


def asked_passes(forwards: Ints, drafted: Sizes, along: bool) -> Ints:
    """Return the draft passes that a policy asks for, (rounds,).

    A drafter that runs `along` takes a pass in every step.  So a single pass whose token is not
    verified was not asked for.
    """
    return np.where((forwards < 2) & (drafted == 0), 0, forwards) if along else forwards


def draft_seconds(
    latency: LatencyTable, model: str, batch: int, forwards: Ints, catch_up: Sizes, context: Sizes,
    verified: Verified | None,
) -> tuple[Floats, PassCount]:  # fmt: skip
    """Return seconds of each round's passes of `model`, (rounds,); ``catch_up`` 0 was paid before.

    ``catch_up`` and ``context`` are tokens a sequence, and fractions where they are means.
    `verified` is given where the drafter runs along in every step (`runs_along`).
    """
    seconds = np.zeros(len(forwards))
    width, cached = verified or Verified(catch_up, np.maximum(context - catch_up, 0))
    ran = np.flatnonzero((forwards > 0) & (catch_up > 0))
    phase = latency.first_draft_phase(model)
    seconds[ran], first = pass_seconds(latency, model, batch, width[ran], cached[ran], phase)
    if verified is not None:
        idle = np.flatnonzero(forwards == 0)
        seconds[idle], own = pass_seconds(latency, model, batch, width[idle], cached[idle], "along")
        first += own
    ran = np.flatnonzero(forwards > 1)
    start, count = context[ran], forwards[ran] - 1
    if not len(ran):
        return seconds, first
    # Passes after the first run over consecutive contexts: a running sum prices any span.
    whole = np.floor(start).astype(np.int64)
    between = start - whole
    low, high = int(whole.min()), int((whole + count).max()) + 1
    span = latency.estimate(model, "forward", batch=batch, context=np.arange(low, high))
    begin = whole - low
    later = _spans(span.seconds, begin, begin + count)
    if between.any():  # passes are linear from one token of context to the next
        later += between * (span.seconds[begin + count] - span.seconds[begin])
        begin = begin + (between > 0)
    seconds[ran] += later + latency.settling_s(model, batch, count)
    rest = PassCount(
        int(count.sum()),
        *(int(_spans(span.origin == o, begin, begin + count).sum())
          for o in (INTERPOLATED, EXTRAPOLATED)),
    )  # fmt: skip
    return seconds, first + rest


def _spans(values: npt.NDArray[np.generic], begin: Ints, end: Ints) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(running[end] - running[begin])


def round_host_seconds(
    latency: LatencyTable, drafter: str, batch: int, forwards: Ints, rejected: Bools, unread: Bools
) -> Floats:
    """Return the host's seconds of each round: itself, its draft passes, and its caches, (rounds,).

    `rejected` rounds take tokens out of the target's cache, `unread` ones out of the drafter's.
    """
    seconds = host_seconds(latency, "host_round", batch)
    each = forwards * host_seconds(latency, "host_draft", batch)
    each += rejected * scalar_seconds(latency, "target", "rollback", batch)
    each += unread * scalar_seconds(latency, drafter, "rollback", batch)
    return np.asarray(seconds + each)


def pass_seconds(
    latency: LatencyTable, model: str, batch: int, width: Sizes, context: Sizes,
    phase: str = "forward",
) -> tuple[Floats, PassCount]:  # fmt: skip
    """Return seconds of one pass per element."""
    if not len(width):
        return np.zeros(0), NO_PASSES
    read = read_each(latency, model, batch, width, context, phase)
    return read.seconds, PassCount.of(read.origin)


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


HOSTS = ("target", "draft")
"""Models under which a host phase may be stored."""


def missing_hosts(latency: LatencyTable, reads: bool) -> list[str]:
    """Return the host phases that a run at `latency` would have and the table has not."""
    phases = ["host_round", *(["signal"] if reads else [])]
    return [phase for phase in phases if not any(latency.has(model, phase) for model in HOSTS)]


def host_seconds(latency: LatencyTable, phase: str, batch: int) -> float:
    """Return seconds of a host phase at `batch`, under whichever models it was stored; else 0."""
    return sum(scalar_seconds(latency, model, phase, batch) for model in HOSTS)


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


def host_at(latency: LatencyTable, reads: bool, batch: int) -> Host:
    """Return the host's seconds at `batch`; phases that the table lacks cost nothing.

    ``reads`` says whether the policy reads draft signals.
    """
    draft_s = host_seconds(latency, "host_draft", batch)
    if reads:
        draft_s += host_seconds(latency, "signal", batch)
    rollbacks = (scalar_seconds(latency, model, "rollback", batch) for model in HOSTS)
    around = [scalar_seconds(latency, SERVER, of, batch) for of in ("iteration", "request")]
    round_s = host_seconds(latency, "host_round", batch) + around[0]
    return Host(round_s, draft_s, *rollbacks, *around)
