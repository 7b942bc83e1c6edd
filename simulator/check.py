"""Closed forms compared with simulation: where they hold, and their errors elsewhere.

`run_checks` compares every formula with the replay loop (or a small event simulation)
on synthetic i.i.d. acceptance, where it must agree within four standard errors; the optimal
draft length is compared with the best of the exact speedups.  On a recorded trace the assumptions
fail; `simulator.check` then shows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Ints
from policies.lengths.basic import Fixed
from simulator.aggregate.acceptance import emitted_of_rate
from simulator.bootstrap import RatioEstimate, ratio_of_sums
from simulator.formulas import batching, gammatune, general, leviathan, parallel, specbound
from simulator.formulas.general import require
from simulator.pricing import autoregressive, price
from simulator.whatif.tilt import acceptance
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay

FormulaRow = tuple[str, str, float, RatioEstimate]

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def recorded_checks(
    trace: Trace, latency: LatencyTable | None = None, gammas: Sequence[int] = GAMMAS
) -> Iterator[FormulaRow]:
    """Yield (formula, parameters, prediction, replayed with standard error) for each gamma.

    The standard error is over the requests.  Without latencies c is 0.1 and verification
    free; the steps that concern time then coincide.
    """
    table = LatencyTable.constant(1.0, 0.1) if latency is None else latency
    alpha = acceptance(trace)
    longest = max((r.tokens for r in trace.requests), default=0)
    for gamma in gammas:
        if gamma + trace.first < longest and (trace.max_gamma is None or gamma <= trace.max_gamma):
            yield from _steps(trace, table, alpha, gamma)


def _steps(trace: Trace, table: LatencyTable, alpha: float, gamma: int) -> Iterator[FormulaRow]:
    log = replay(trace, Fixed(gamma))
    plain, run = price(autoregressive(log), table), price(log, table)
    rounds = log.rounds
    emitted = log.per_request(rounds["emitted"])
    per_round = ratio_of_sums(emitted, log.per_request(np.ones(len(log))))
    # Every position counted once, but for those whose draft the end would cut short.
    inside = np.concatenate(
        [
            np.arange(a + trace.first, max(a + trace.first, b - gamma))
            for a, b in zip(trace.request_starts[:-1], trace.request_starts[1:], strict=True)
        ]
    )
    anywhere = general.empirical_survival(trace.run_lengths[inside], gamma)
    starts = trace.request_starts[rounds["request"]] + rounds["position"]
    begun = np.minimum(trace.run_lengths[starts], rounds["drafted"])
    survival = general.empirical_survival(begun, gamma)

    iid, bursty = leviathan.expected_tokens(alpha, gamma), general.block_efficiency(anywhere)
    where = f"gamma={gamma} alpha={alpha:.4f}"
    yield "recorded: tokens per round, i.i.d.", where, iid, per_round
    yield "recorded: tokens per round, correlated positions", where, bursty, per_round
    yield (
        "recorded: tokens per round, actual round starts", where,
        general.block_efficiency(survival), per_round,
    )  # fmt: skip
    # What the rate alone allows: the member of the two-state family that is nearest.
    span = emitted_of_rate(alpha, gamma)
    near = min(max(per_round.value, span.low), span.high)
    yield (
        "recorded: tokens per round, two-state interval of alpha",
        f"{where} from={span.low:.4f} to={span.high:.4f}", near, per_round,
    )  # fmt: skip

    forwards = rounds["draft_forwards"]
    target_s = float(plain.verify_s.mean())
    cached = np.maximum(log.context - 1, 0)
    draft_s = float((forwards * table.seconds("draft", "forward", context=cached)).sum())
    draft_s /= float(forwards.sum())
    replayed = ratio_of_sums(plain.decode_s, run.decode_s)
    where = f"{where} c={draft_s / target_s:.4f}"

    def textbook(tokens: float, drafts: float) -> float:
        return general.speedup(tokens, drafts, target_s, draft_s, target_s)

    stepped = plain.verify_s.sum()
    spent = forwards.sum() * draft_s + run.verify_s.sum()
    passes = run.draft_s.sum() + run.verify_s.sum()
    for step, value in (
        ("i.i.d.", textbook(iid, gamma)),
        ("correlated positions", textbook(bursty, gamma)),
        ("actual rounds", textbook(per_round.value, float(forwards.mean()))),
        ("T_verify", float(stepped / spent)),
        ("catch-up and context", float(stepped / passes)),
        ("host and signals", plain.total_s / run.total_s),
    ):
        yield f"recorded: speedup, {step}", where, value, replayed


def pearl_cycles(run_lengths: Sequence[int], gamma: int) -> tuple[Ints, Ints]:
    """Simulate PEARL over one output: tokens and steps of each cycle from pre-verify to pre-verify,
    (cycles,) each.

    Pre-verify checks the first token being drafted; once accepted, each post-verify step
    checks gamma tokens while the next gamma are drafted; a rejection after n accepted ones
    emits n and the correction.  There is no bonus token.  The last, unfinished cycle is
    left out.
    """
    require("gamma", gamma, 1)
    runs = np.asarray(run_lengths).tolist()
    cycles: list[tuple[int, int]] = []
    at = 0
    while at + 1 < len(runs):
        start, steps = at, 1
        confirmed = runs[at] > 0
        at += 1
        while confirmed and at + gamma < len(runs):
            steps += 1
            accepted = min(runs[at], gamma)
            confirmed = accepted == gamma
            at += accepted if confirmed else accepted + 1
        if confirmed:
            break
        cycles.append((at - start, steps))
    table = np.array(cycles, dtype=np.int64).reshape(len(cycles), 2)
    return table[:, 0], table[:, 1]


def dsi_latency(
    run_lengths: Sequence[int], lookahead: int, draft: float, target: float = 1.0
) -> float:
    """Return the latency of one output under distributed speculative inference, block by block."""
    require("lookahead", lookahead, 1)
    total, at, length = 0.0, 0, len(run_lengths)
    while at < length:
        begin, speculative = at, 0.0
        while True:
            block = min(lookahead, length - 1 - at)
            accepted = min(int(run_lengths[at]), block)
            speculative += block * draft
            at += accepted
            if block == 0 or accepted < block:
                break
        at += 1
        total += min(speculative + target, (at - begin) * target)
    return total


def truncated_rounds(run_lengths: npt.ArrayLike, gamma: int) -> Ints:
    """Return tokens per round and sequence of a batch that keeps what all sequences accepted.

    ``run_lengths`` has shape (sequences, positions); the result has shape (rounds,).
    """
    require("gamma", gamma, 0)
    shortest = np.asarray(run_lengths).min(axis=0).tolist()
    emitted, at = [], 0
    while at + gamma < len(shortest):
        emitted.append(min(shortest[at], gamma) + 1)
        at += emitted[-1]
    return np.array(emitted, dtype=np.int64)


class _Replays:
    """Replays of fixed draft lengths on i.i.d. outputs, each made once."""

    def __init__(self, tokens: int, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self.trace, self.log = cache(self._trace), cache(self._log)

    def _trace(self, alpha: float) -> Trace:
        return synthetic_trace(alpha, requests=1, tokens=self.tokens, seed=self.seed)

    def _log(self, alpha: float, gamma: int) -> RoundLog:
        """Return rounds of gamma drafts; those the end of the output cuts short are left out."""
        log = replay(self.trace(alpha), Fixed(gamma))
        whole = log.rounds[log.rounds["drafted"] == gamma]
        return RoundLog(whole, log.requests, log.policy)

    def speedup(self, alpha: float, gamma: int, c: float, verify: float = 1.0) -> RatioEstimate:
        log = self.log(alpha, gamma)
        table = LatencyTable.constant(1.0, c, verify)
        return ratio_of_sums(log.rounds["emitted"], price(log, table).round_s)

    def tokens_per_round(self, alpha: float, gamma: int) -> RatioEstimate:
        emitted = self.log(alpha, gamma).rounds["emitted"]
        return ratio_of_sums(emitted, np.ones(len(emitted)))


def _leviathan(replays: _Replays) -> Iterator[FormulaRow]:
    usual = (0.8, 5, 0.05), (0.6, 4, 0.1), (0.9, 10, 0.02), (0.7, 3, 0.13), (0.5, 1, 0.5)
    limits = (0.0, 4, 0.1), (1.0, 4, 0.1), (0.6, 0, 0.1), (0.6, 6, 0.0)
    for a, g, c in usual + limits:
        where = f"alpha={a} gamma={g} c={c}"
        tokens = replays.tokens_per_round(a, g)
        yield "Leviathan eq. 1 E[Y]", where, leviathan.expected_tokens(a, g), tokens
        yield "Leviathan Thm 3.8", where, leviathan.speedup(a, g, c), replays.speedup(a, g, c)
        # Operations: draft and target positions computed, per token emitted.
        rounds = replays.log(a, g).rounds
        operations = ratio_of_sums(
            c * rounds["draft_forwards"] + rounds["drafted"] + 1, rounds["emitted"]
        )
        yield "Leviathan Thm 3.11", where, leviathan.operations_factor(a, g, c), operations
    # Speedups of neighbouring lengths differ too little to simulate: each survives with alpha**k.
    gammas = np.arange(100)
    for a, c in ((0.5, 0.05), (0.7, 0.1), (0.8, 0.1)):
        top = np.argmax(np.cumsum(a**gammas) / (gammas * c + 1))
        best, exact = leviathan.optimal_gamma(a, c), RatioEstimate(float(top), 0.0)
        yield "Leviathan optimal gamma", f"alpha={a} c={c}", best, exact


def _general(replays: _Replays) -> Iterator[FormulaRow]:
    # `s` is the part of a draft pass that selects its cache.
    for a, g, c, v, s in ((0.8, 5, 0.05, 1.3, 0.0), (0.6, 4, 0.1, 1.1, 0.04)):
        where = f"alpha={a} gamma={g} c={c} T_v/T_t={v}"
        tokens, measured = leviathan.expected_tokens(a, g), replays.speedup(a, g, c, v)
        yield "speedup with T_verify", where, general.speedup(tokens, g, 1.0, c, v), measured
        slower = RatioEstimate(1 / measured.value, measured.standard_error / measured.value**2)
        closed = batching.time_ratio(tokens, g, 1.0, c - s, v, s)
        yield "MagicDec eq. 4", f"{where} selection={s}", closed, slower
        log, trace = replays.log(a, g), replays.trace(a)
        runs = trace.run_lengths[log.rounds["position"]]
        survival = general.block_efficiency(general.empirical_survival(runs, g))
        exact = RatioEstimate(replays.tokens_per_round(a, g).value, 0.0)
        yield "block efficiency from survival", f"alpha={a} gamma={g}", survival, exact


def _gammatune(replays: _Replays) -> Iterator[FormulaRow]:
    for a, g, c_gt in ((0.8, 5, 8.0), (0.6, 4, 4.0), (0.0, 4, 4.0), (1.0, 4, 4.0)):
        log = replays.log(a, g)
        where = f"alpha={a} gamma={g} c={c_gt}"
        rounds = log.rounds
        proportion = leviathan.acceptance_proportion(a, g)
        accepted = ratio_of_sums(rounds["accepted"], rounds["drafted"])
        yield "accepted / drafted", f"alpha={a} gamma={g}", proportion, accepted
        yield (
            "GammaTune eq. 6", f"{where} alpha_prop={proportion:.6g}",
            gammatune.speedup(proportion, g, c_gt), replays.speedup(a, g, 1 / c_gt),
        )  # fmt: skip
        # With the log's own proportion the equation is an identity, not an estimate.
        emitted = int(rounds["emitted"].sum())
        own = accepted.value
        seconds = price(log, LatencyTable.constant(c_gt, 1.0)).total_s
        yield (
            "GammaTune rounds", f"{where} alpha_prop={own:.6g}",
            gammatune.steps(emitted, own, g), RatioEstimate(float(len(log)), 0.0),
        )  # fmt: skip
        yield (
            "GammaTune cost", f"{where} alpha_prop={own:.6g}",
            gammatune.cost(emitted, own, g, c_gt, 1.0), RatioEstimate(seconds, 0.0),
        )  # fmt: skip


def _break_evens(replays: _Replays) -> Iterator[FormulaRow]:
    name = "break-even"
    yield f"{name} Leviathan", "alpha=c=0.4 gamma=1", 1.0, replays.speedup(0.4, 1, 0.4)
    for g, c, v in ((4, 0.1, 1.0), (4, 0.1, 1.5), (8, 0.2, 1.0)):
        a = leviathan.break_even_alpha(g, c, v)
        where = f"alpha={a:.6g} gamma={g} c={c} T_v/T_t={v}"
        yield f"{name} Leviathan", where, 1.0, replays.speedup(a, g, c, v)
    for a, g, c in ((0.8, 5, 0.05), (0.5, 2, 0.1)):
        v = general.break_even_verify(leviathan.expected_tokens(a, g), g, c)
        where = f"alpha={a} gamma={g} c={c} T_v/T_t={v:.6g}"
        yield f"{name} T_verify", where, 1.0, replays.speedup(a, g, c, v)
    for a, g in ((0.6, 4), (0.8, 8)):
        proportion = leviathan.acceptance_proportion(a, g)
        where = f"alpha={a} gamma={g} alpha_prop=1/c={proportion:.6g}"
        yield f"{name} GammaTune", where, 1.0, replays.speedup(a, g, proportion)
    for g, d in ((2, 0.3), (6, 0.3), (10, 0.25)):
        a = specbound.break_even_alpha(g, d)
        where = f"alpha={a:.6g} gamma={g} depth={d}"
        yield f"{name} SpecBound", where, 1.0, replays.speedup(a, g - 1, d)


def _specbound(replays: _Replays) -> Iterator[FormulaRow]:
    for a, g, d in ((0.8, 6, 0.3), (0.9, 8, 0.25), (0.0, 8, 0.25), (1.0, 8, 0.25), (0.7, 1, 0.3)):
        where = f"alpha={a} gamma={g} depth={d}"
        # Physical: the last position computed is the verified one, so gamma - 1 are drafts
        # that cost the depth each, and the round's own pass costs one target step.
        yield (
            "SpecBound eq. 5 physical", where,
            specbound.speedup(a, g, d), replays.speedup(a, g - 1, d),
        )  # fmt: skip
        yield (
            "SpecBound eq. 5 literal", where,
            specbound.speedup(a, g, d, "literal"), replays.speedup(a, g, d, 1 - d),
        )  # fmt: skip
    for w, d in ((4, 0.3), (8, 0.25)):
        where = f"alpha=0 width={w} depth={d}"
        yield "SpecBound App. E", where, specbound.worst_case(w, d), replays.speedup(0.0, w - 1, d)


def _pearl(replays: _Replays) -> Iterator[FormulaRow]:
    for a, g in ((0.8, 5), (0.6, 3), (0.9, 8), (0.5, 1), (0.0, 4)):
        simulated = ratio_of_sums(*pearl_cycles(replays.trace(a).run_lengths.tolist(), g))
        where = f"alpha={a} gamma={g}"
        yield "PEARL tokens per step", where, parallel.tokens_per_step(a, g), simulated


def _dsi(replays: _Replays) -> Iterator[FormulaRow]:
    length = 100
    outputs = max(replays.tokens // length, 2)
    for a, k, c in ((0.8, 1, 0.1), (0.6, 5, 0.1), (0.0, 3, 0.1), (1.0, 3, 0.1)):
        trace = synthetic_trace(a, requests=outputs, tokens=length, seed=replays.seed)
        runs = trace.run_lengths.reshape(outputs, length)
        where = f"alpha={a} lookahead={k} draft/target={c} tokens={length}"
        measured = ratio_of_sums([dsi_latency(r.tolist(), k, c) for r in runs], np.ones(outputs))
        yield (
            "DSI distributed latency",
            where,
            parallel.distributed_latency(length, a, k, c),
            measured,
        )
        rounds = replay(trace, Fixed(k), first=0)
        spent = price(rounds, LatencyTable.constant(1.0, c)).decode_s
        closed = parallel.sequential_latency(length, a, k, c)
        yield "DSI sequential latency", where, closed, ratio_of_sums(spent, np.ones(outputs))
        plain = price(autoregressive(rounds), LatencyTable.constant(1.0, c)).decode_s
        yield "DSI plain latency", where, float(length), ratio_of_sums(plain, np.ones(outputs))


def _batching(replays: _Replays) -> Iterator[FormulaRow]:
    for a, g, batch, proposing in ((0.8, 5, 1, 1), (0.8, 5, 2, 1), (0.8, 5, 8, 6), (0.9, 4, 4, 4)):
        trace = synthetic_trace(a, requests=batch, tokens=replays.tokens // 2, seed=replays.seed)
        runs = trace.run_lengths.reshape(batch, -1)
        rounds = truncated_rounds(runs, g)
        where = f"alpha={a} gamma={g} batch={batch}"
        closed = batching.truncated_tokens([a] * batch, g)
        per_round = ratio_of_sums(rounds, np.ones(len(rounds)))
        yield "batch truncated to the minimum", where, closed, per_round
        step_s = batching.llama_8b_h100_s(1000 * batch, batch + proposing * g)
        tokens = replays.tokens_per_round(a, g)
        emitted = proposing * tokens.value + batch - proposing
        yield (
            "goodput of a ragged batch", f"{where} proposing={proposing} step_s={step_s:.6g}",
            batching.goodput(a, g, batch, proposing, step_s),
            RatioEstimate(emitted / step_s, proposing * tokens.standard_error / step_s),
        )  # fmt: skip


LIMIT = 4.0
"""Standard errors within which a closed form and its simulation must agree."""


class Check(NamedTuple):
    """One comparison."""

    formula: str
    parameters: str
    closed_form: float
    simulated: float
    standard_error: float
    """Standard error of `simulated`; 0 where the simulation has no randomness."""
    z: float
    ok: bool


def run_checks(
    trace: Trace | None = None,
    latency: LatencyTable | None = None,
    *,
    tokens: int = 20_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Compare every closed form with simulation, one row each (columns of `Check`).

    Parameters
    ----------
    trace, latency:
        A recording, whose rows (formulas that begin with ``recorded``) follow the synthetic ones.
        They show the error of the i.i.d. formula, and need not agree.
    tokens:
        Length of each synthetic output; standard errors fall with its square root.
    seed:
        Seed of the synthetic outputs.
    """
    replays = _Replays(tokens, seed)
    parts = [
        part(replays) for part in (
            _leviathan, _general, _gammatune, _break_evens, _specbound, _pearl, _dsi, _batching
        )
    ]  # fmt: skip
    if trace is not None:
        parts.append(recorded_checks(trace, latency))
    checks = [checked(*row) for row in chain.from_iterable(parts)]
    return pd.DataFrame(checks, columns=list(Check._fields))


def checked(formula: str, parameters: str, closed_form: float, simulated: RatioEstimate) -> Check:
    """Return a `Check` of a closed form against a simulated value with its standard error."""
    value, error = simulated
    gap = value - closed_form
    if error > 0:
        z = gap / error
    else:
        z = 0.0 if math.isclose(value, closed_form, rel_tol=1e-9, abs_tol=1e-12) else math.inf
    return Check(formula, parameters, closed_form, value, error, z, abs(z) < LIMIT)
