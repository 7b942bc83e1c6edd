"""How far the i.i.d. formula is off on a recording, and which assumption costs how much.

From Leviathan's formula to the replayed speedup in steps, each giving up one assumption:
independent positions, rounds that start anywhere, a verification as cheap as one step,
draft passes of one token, a host that costs nothing.  The last step is the replay.  Beside them
stands what the acceptance rate alone allows where positions are not independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policies.lengths.basic import Fixed
from simulator.aggregate.rates import emitted_of_rate
from simulator.estimate import Estimate, ratio
from simulator.formulas import general, leviathan
from simulator.pricing import autoregressive, price
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.latency.table import LatencyTable
from traces.replay.run import replay

Row = tuple[str, str, float, Estimate]

TEXTBOOK = LatencyTable.constant(1.0, 0.1)
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def recorded_checks(
    trace: Trace, latency: LatencyTable | None = None, gammas: Sequence[int] = GAMMAS
) -> Iterator[Row]:
    """(formula, parameters, prediction, replayed with standard error) for each gamma.

    The standard error is over the requests.  Without latencies c is 0.1 and verification
    free; the steps that concern time then coincide.
    """
    table = TEXTBOOK if latency is None else latency
    match = trace.columns["match"][trace.on_path]
    alpha = float((match[match != UNKNOWN] == MATCH).mean())
    longest = max((r.tokens for r in trace.requests), default=0)
    for gamma in gammas:
        if gamma < longest and (trace.max_gamma is None or gamma <= trace.max_gamma):
            yield from _steps(trace, table, alpha, gamma)


def _steps(trace: Trace, table: LatencyTable, alpha: float, gamma: int) -> Iterator[Row]:
    log = replay(trace, Fixed(gamma))
    plain, run = price(autoregressive(log), table), price(log, table)
    rounds = log.rounds
    emitted = log.per_request(rounds["emitted"])
    per_round = ratio(emitted, log.per_request(np.ones(len(log))))
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
    replayed = ratio(plain.decode_s, run.decode_s)
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
