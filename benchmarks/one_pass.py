"""Errors of predicted one-pass drafters against the public numbers of vLLM's threads.

    python -m benchmarks.one_pass

Both targets are mixtures of experts, which the predictions are told (`--experts`).

Pull request 52362 (DeepSeek-V4 with DSpark): from the runs without speculation and with K = 7 at
three concurrencies, every other run is predicted; from two runs of adaptive verification, the five
others.  Its acceptance length is not given there; 3.4 is that of the DSpark blog of vLLM
(2026-08-14, DeepSeek-V4-Pro, K = 7).

Pull request 32628 (gpt-oss-120b, HumanEval): from four of the EAGLE-3 runs (`../shared/tables`),
the 20 others.  From all 24, a drafter that drafts all tokens in one pass (P-EAGLE): the thread's
table of its runs is not in our data, its summary is.  With acceptance within 2% of EAGLE-3's, the
best K of each differs by 16% at one request and 10% at eight (MT-bench: 12% and 6.5%), and a
token takes 2.7 to 2.9 ms whatever K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks.server_left_out import GPT_OSS_120B, TABLES, eagle3_runs
from policies.batch.confidence import AdaptiveVerification
from policies.core import Load
from simulator.aggregate.hazard import chances
from simulator.aggregate.positions import of_survival
from simulator.aggregate.server import COSTS, ServerFit, ServerRun, Target, calibrate
from traces.acceptance.synthetic import drawn_chances
from traces.replay.decoder import RecordedToken

Floats = npt.NDArray[np.float64]

RUNS = Path(__file__).with_name("one_pass.csv")
K, EMITTED = 7, 3.4
DEEPSEEK_V4 = Target(experts=(384, 6))
"""Routed experts of DeepSeek-V4-Pro, and how many a token chooses, by its configuration."""
GIVEN = (4, 64, 256)
"""Concurrencies whose runs without speculation and with K = 7 are given."""
TUNED = (16, 128)
"""Concurrencies whose adaptive runs are given."""
CONCENTRATIONS = (None, 8.0, 4.0, 2.0, 1.0, 0.5)
DRAFTS = 2048
"""Drafts drawn for every predicted cell, over all iterations."""
DESIGN = ((3, 8), (1, 8))
"""Draft lengths and concurrencies of the EAGLE-3 runs that are given."""
HUMANEVAL, MT_BENCH = "HumanEval", "MT-bench"
GAINS = {HUMANEVAL: {1: 0.16, 8: 0.10}, MT_BENCH: {1: 0.12, 8: 0.065}}
"""Gains of pull request 32628's summary by concurrency."""
MT_BENCH_ACCEPTED = (0.63, 0.38, 0.23, 0.14, 0.09, 0.05, 0.03, 0.02)
"""EAGLE-3's acceptance by position on MT-bench there, K = 8."""
TPOT_MS = (2.7, 2.9)
"""Range of P-EAGLE's time per output token there, one request, K = 3 to 8."""


class Row(NamedTuple):
    """A predicted run."""

    concurrency: int
    run: str
    measured: float
    predicted: float
    given: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def fixed_rows(table: pd.DataFrame) -> tuple[ServerFit, list[Row]]:
    """Return the server that the given runs tell, and its runs with and without speculation."""
    runs = [
        run
        for c in GIVEN
        for run in (
            ServerRun(c, 0, float(table["none"][c])),
            ServerRun(c, K, float(table["fixed"][c]), emitted=EMITTED),
        )
    ]
    server = calibrate(runs, passes=1, target=DEEPSEEK_V4)
    return server, [
        Row(
            int(c), name, float(table[name][c]),
            float(np.median(server.tokens_per_s(int(c), k))), c in GIVEN,
        )
        for name, k in (("none", 0), ("fixed", K)) for c in table.index
    ]  # fmt: skip


def adaptive_rows(table: pd.DataFrame, server: ServerFit) -> tuple[float | None, float, list[Row]]:
    """Return the concentration and the factor of two runs, and all runs predicted with them.

    The factor holds what adaptive verification costs beyond the step's tokens.
    """
    best: tuple[float, float | None, float] | None = None
    for concentration in CONCENTRATIONS:
        gaps = [np.log(table["adaptive"][c] / adaptive(server, c, concentration)) for c in TUNED]
        spread = float(np.ptp(gaps))
        if best is None or spread < best[0]:
            best = spread, concentration, float(np.exp(np.mean(gaps)))
    assert best is not None
    _, concentration, factor = best
    return concentration, factor, [
        Row(
            int(c), "adaptive", float(table["adaptive"][c]),
            factor * adaptive(server, int(c), concentration), c in TUNED,
        )
        for c in table.index
    ]  # fmt: skip


def adaptive(server: ServerFit, batch: int, concentration: float | None) -> float:
    """Return tokens/s of `batch` requests whose likeliest drafts are verified."""
    accepted = np.median(chances(server.draws[:, len(COSTS) + 1 :], K), axis=0)
    hazard = accepted / np.concatenate([[1.0], accepted[:-1]])
    rng = np.random.default_rng(batch)

    def step_s(verified: float, emitted: float) -> float:
        # More than zero drafts: the drafter runs whatever is verified.
        k = max(verified / batch - 1, 1e-9)
        return float(server.step_s(emitted, [batch], [k])[0])

    def cost(batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        del batch, draft_length, context
        return step_s(verify_tokens, 0.0)

    policy = AdaptiveVerification(gamma=K, cost=cost)
    tokens, seconds = 0.0, 0.0
    for _ in range(max(1, DRAFTS // batch)):
        each = np.broadcast_to(hazard, (batch, K))
        if concentration is not None:
            each = drawn_chances(each, concentration, rng)
        drafts = [[RecordedToken(2, prob=p) for p in row] for row in each.tolist()]
        policy.plan([Load(batch, 0)] * batch)
        lengths = np.array(policy.allot(drafts))
        kept = np.arange(K) < lengths[:, None]
        emitted = batch + float((np.cumprod(each, axis=1) * kept).sum())
        tokens += emitted
        seconds += step_s(batch + int(lengths.sum()), emitted / batch)
    return tokens / seconds


def eagle3_rows() -> list[Row]:
    """Return every EAGLE-3 run, predicted from those of `DESIGN`."""
    lengths, batches = DESIGN
    runs = eagle3_runs()
    server = calibrate(
        [r for r in runs if r.k in lengths and r.batch in batches], target=GPT_OSS_120B
    )
    return [
        Row(
            run.batch, f"K = {run.k}", run.tokens_per_s,
            float(np.median(server.tokens_per_s(run.batch, run.k))),
            run.k in lengths and run.batch in batches,
        )
        for run in runs
    ]  # fmt: skip


def gains() -> Iterator[tuple[str, int, float]]:
    """Yield (benchmark, concurrency, gain) of one pass at the best K over EAGLE-3 at its best."""
    server = calibrate(eagle3_runs(), target=GPT_OSS_120B)
    mt_bench = of_survival("MT-bench", MT_BENCH_ACCEPTED).known
    for name, published in GAINS.items():
        drafts_in_turn = server if name == HUMANEVAL else server.at_acceptance(mt_bench)
        for batch in published:
            best = [
                max(float(np.median(one.tokens_per_s(batch, k, noisy=False))) for k in range(3, 9))
                for one in (replace(drafts_in_turn, passes=1), drafts_in_turn)
            ]
            yield name, batch, best[0] / best[1] - 1


def tpots_ms() -> dict[int, tuple[float, float]]:
    """Return by K the milliseconds per output token of EAGLE-3 and, predicted, of one pass.

    A run's time per output token leaves its prompt out: the prediction is EAGLE-3's measured one
    times the ratio of the predicted speeds.
    """
    table = pd.read_csv(TABLES / "vllm_pr32628_eagle3_humaneval.csv", comment="#")
    server = calibrate(eagle3_runs(), target=GPT_OSS_120B)
    at_once = replace(server, passes=1)
    found = {}
    for k, measured in zip(table["k"].tolist(), table["tpot_ms"].tolist(), strict=True):
        slower, faster = (
            float(np.median(one.tokens_per_s(1, k, noisy=False))) for one in (server, at_once)
        )
        found[int(k)] = float(measured), float(measured) * slower / faster
    return found


def report(title: str, rows: list[Row]) -> None:
    """Print the rows, and the errors of those that were not given."""
    print(f"{title}:")
    for row in rows:
        said = "given" if row.given else f"{row.error:+.1%}"
        print(
            f"  {row.concurrency:3}  {row.run:8}  {row.measured:9.0f}  {row.predicted:9.0f}  {said}"
        )
    errors = np.abs([row.error for row in rows if not row.given])
    print(f"  |error| of {len(errors)}: median {np.median(errors):.1%}, largest {errors.max():.1%}")


def main() -> None:
    """Print every run with its error, and the gains."""
    table = pd.read_csv(RUNS, comment="#").set_index("concurrency")
    server, rows = fixed_rows(table)
    concentration, factor, more = adaptive_rows(table, server)
    for name in ("none", "fixed", "adaptive"):
        report(f"52362, {name}", [row for row in (*rows, *more) if row.run == name])
    print(f"  confidences: concentration {concentration}, adaptive factor {factor:.3f}")
    signs = [
        (a.predicted > f.predicted) == (a.measured > f.measured)
        for f, a in zip([r for r in rows if r.run == "fixed"], more, strict=True)
    ]
    print(f"  adaptive called faster or slower than K = 7 rightly: {sum(signs)} of {len(signs)}")
    report("32628, EAGLE-3", eagle3_rows())
    for benchmark, batch, gain in gains():
        print(
            f"32628, one pass over EAGLE-3, {benchmark}, {batch} request{'s' * (batch > 1)}: "
            f"predicted {gain:+.1%}, published {GAINS[benchmark][batch]:+.1%}"
        )
    for k, (eagle3, at_once) in tpots_ms().items():
        print(
            f"32628, ms per output token at K = {k}: EAGLE-3 {eagle3:.2f}, one pass predicted "
            f"{at_once:.2f}, published {TPOT_MS[0]} to {TPOT_MS[1]}"
        )


if __name__ == "__main__":
    main()
