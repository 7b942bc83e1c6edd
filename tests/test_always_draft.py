"""Draft passes that an engine always runs: one option, priced alike by every command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.batch.base import SingleStream
from policies.lengths.basic import Autoregressive, Fixed
from policies.lengths.gammatune import GammaTune
from policies.registry import parse_policy
from simulator.pricing import always_drafted, autoregressive, price
from simulator.serving import ClosedLoop, Limits, Scenario, TableCost, simulate
from simulator.tune.costs import RESTING
from simulator.whatif.rate import LatencyCost
from tests.compiled import ALONG
from tests.conftest import Run
from tests.serving import GRID
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import drafting_always, in_one_pass, passes_always
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.files import read_trace, write_trace

TARGET_S, DRAFT_S = 0.02, 0.002
CONST = f"const:target={TARGET_S},draft={DRAFT_S}"


class Filled(Fixed):
    """Drafts all of its slots, and has the first few verified: what such an engine does."""

    def __init__(self, gamma: int = 2, slots: int = 6) -> None:
        super().__init__(gamma)
        self.slots = slots

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.slots

    def submit(self, draft: Sequence[Any]) -> int:
        return min(self.gamma, len(draft))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(Bursty(), requests=6, tokens=120, seed=4)


def inside(log: RoundLog, slots: int) -> np.ndarray:
    """Rounds that the output's end does not cut short, nor the one before them."""
    tokens = np.array([r.tokens for r in log.requests])[log.rounds["request"]]
    return np.asarray(tokens - log.rounds["position"] - 1 >= slots)


@pytest.mark.parametrize(("gamma", "slots"), [(2, 6), (1, 3), (4, 4), (5, 2)])
def test_rounds_are_those_of_a_policy_that_fills_its_slots(
    trace: Trace, gamma: int, slots: int
) -> None:
    """The same loop, run with such a policy, on every field of every round."""
    made = always_drafted(replay(trace, Fixed(gamma)), slots)
    real = replay(trace, Filled(gamma, max(slots, gamma)))
    assert len(made) == len(real)
    here = inside(made, max(slots, gamma))
    assert here.sum() > 0.8 * len(made)
    for name in ("position", "drafted", "accepted", "emitted", "draft_forwards", "catch_up"):
        np.testing.assert_array_equal(made.rounds[name][here], real.rounds[name][here], name)


@pytest.mark.parametrize("by_iteration", [False, True])
@pytest.mark.parametrize("takes_verified", [False, True])
@pytest.mark.parametrize("table", [GRID, ALONG])
def test_one_request_at_a_time_is_served_at_its_price(
    trace: Trace, table: LatencyTable, takes_verified: bool, by_iteration: bool
) -> None:
    own = replace(trace, meta={**trace.meta, "takes_verified": takes_verified})
    alone = Scenario(ClosedLoop(1), Limits(1), requests=6, warmup=0.0)
    for policy, passes in product((Fixed(1), Fixed(4), GammaTune()), (1, 3, 6)):
        always = drafting_always(table, passes)
        run = simulate(own, always, policy, alone, by_iteration=by_iteration)
        served = run.requests.sort_values("index")
        expected = price(replay(own, policy, first=1), always).decode_s[served["sequence"]]
        decode_s = served["finish_s"] - served["first_s"]
        np.testing.assert_allclose(decode_s, expected, rtol=1e-9)


def test_a_drafter_that_reads_along_is_the_engines_own_resting_policy(trace: Trace) -> None:
    """vLLM's and SGLang's K = 0, which drafts one token and verifies none."""
    made = always_drafted(replay(trace, parse_policy("batch-table:table=[[1,64,0]]")), 1)
    real = replay(trace, SingleStream(RESTING))
    here = inside(made, 1)
    for name in ("drafted", "draft_forwards", "catch_up"):
        np.testing.assert_array_equal(made.rounds[name][here], real.rounds[name][here], name)


def test_every_round_is_charged_and_plain_decoding_is_not(trace: Trace) -> None:
    table = drafting_always(LatencyTable.constant(TARGET_S, DRAFT_S), 6)
    assert passes_always(table) == 6
    log = replay(trace, Fixed(2))
    assert price(log, table).total_s == pytest.approx(len(log) * (TARGET_S + 6 * DRAFT_S))
    for plain in (autoregressive(log), replay(trace, Autoregressive(), name="autoregressive")):
        assert price(plain, table).total_s == pytest.approx(len(plain) * TARGET_S)
    # As many as were drafted where that is more, and twice is as once.
    long = replay(trace, Fixed(9))
    assert always_drafted(long, 6).rounds["draft_forwards"].max() == 9
    once = always_drafted(log, 6)
    np.testing.assert_array_equal(always_drafted(once, 6).rounds, once.rounds)
    assert drafting_always(table, None) is table
    with pytest.raises(DraftsimError, match="are 0, expected at least 1"):
        drafting_always(table, 0)


@pytest.mark.parametrize("kind", [LatencyCost, TableCost])
def test_policies_that_weigh_cost_are_told_of_it(kind: Any) -> None:
    """Drafting less saves nothing, up to what is always drafted."""
    table = LatencyTable.constant(TARGET_S, DRAFT_S)
    always, asked = kind(drafting_always(table, 4)), kind(table)
    costs = [always(1, n, 3, 100.0) for n in range(7)]
    assert costs[:5] == pytest.approx([asked(1, 4, 3, 100.0)] * 5)
    assert costs[6] == pytest.approx(asked(1, 6, 3, 100.0))


@pytest.fixture
def file(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    write_trace(trace, path)
    return path


def test_every_command_prices_it_alike(trace: Trace, file: Path, run: Run, tmp_path: Path) -> None:
    """A round of two verified tokens with six passes, in streams, grids, batches and pages."""
    log = replay(trace, Fixed(2))
    round_s = TARGET_S + 6 * DRAFT_S
    tokens = int(log.rounds["emitted"].sum())
    expected = tokens * TARGET_S / (len(log) * round_s)
    common = ("--trace", file, "--policy", "fixed:gamma=2", "--always-draft", 6)
    alone = run("simulate", *common, "--latency", CONST, "--resamples", 10, "--json", "-")
    row = next(r for r in alone.rows if r["policy"] == "fixed:gamma=2")
    assert row["speedup"] == pytest.approx(expected)
    assert row["draft_forwards"] == 6 * len(log)
    for more in (("--latency", CONST), ("--c", DRAFT_S / TARGET_S)):
        grid = run("sweep", *common, *more, "--resamples", 0, "--jobs", 1, "--json", "-")
        assert grid.rows[0]["mean_speedup"] == pytest.approx(expected), more
    # A batch of one, kept full, is the stream; of eight, each iteration takes as long.
    rates = {}
    for name, more in (("always", ("--always-draft", 6)), ("asked", ())):
        served = run(
            "serve", "--trace", file, "--policy", "fixed:gamma=2", *more, "--latency", CONST,
            "--assume-batch-free", "--batch", "1,8", "--requests", 40, "--json", "-",
        )  # fmt: skip
        rates[name] = {
            r["batch"]: r["throughput_tok_s"]["mean"]
            if isinstance(r["throughput_tok_s"], dict) else r["throughput_tok_s"]
            for r in served.rows if r["policy"] == "fixed:gamma=2"
        }  # fmt: skip
    for batch, rate in rates["always"].items():
        slower = rates["asked"][batch] / rate
        assert slower == pytest.approx(round_s / (TARGET_S + 2 * DRAFT_S), rel=0.02), batch
    page = tmp_path / "page.html"
    run(
        "report", "--run", file, "--latency", CONST, "--policy", "fixed:gamma=2", "--no-serve",
        "--resamples", 10, "--always-draft", 6, "--out", page,
    ).ok()  # fmt: skip


def test_capacity_is_planned_at_what_the_engine_always_pays(
    file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests one after the other: tokens take longer by what six passes cost beyond two."""
    monkeypatch.setattr("simulator.capacity.FEW", 40)
    tpot: dict[str, dict[str, float]] = {}
    for name, more in (("always", ("--always-draft", 6)), ("asked", ())):
        planned = run(
            "capacity", "--trace", file, "--policy", "fixed:gamma=2", "--latency", CONST, *more,
            "--max-batch", 1, "--rate", 0.01, "--slo", "ttft=10,tpot=1", "--requests", 40,
            "--replications", 2, "--jobs", 1, "--json", "-",
        )  # fmt: skip
        tpot[name] = {row["policy"]: row["tpot_s"]["mean"] for row in planned.rows}
    slower = {policy: tpot["always"][policy] / tpot["asked"][policy] for policy in tpot["asked"]}
    assert slower["autoregressive"] == pytest.approx(1.0)
    longer_s = (TARGET_S + 6 * DRAFT_S) / (TARGET_S + 2 * DRAFT_S)
    assert slower["fixed:gamma=2"] == pytest.approx(longer_s, rel=0.01)


def test_settings_are_searched_at_what_the_engine_always_pays(file: Path, run: Run) -> None:
    """All lengths cost the same drafting, so that a longer one pays where it did not."""
    found = {}
    for name, more in (("asked", ()), ("always", ("--always-draft", 8))):
        found[name] = run(
            "tune", "--engine", "vllm", "--trace", file, "--latency", CONST, "--batch", "1",
            "--resamples", 20, *more, "--json", "-",
        ).document  # fmt: skip
    always, asked = (found[n]["settings"]["num_speculative_tokens"] for n in ("always", "asked"))
    assert always >= asked


def test_modes_without_rounds_refuse_it(file: Path, run: Run) -> None:
    ran = run(
        "serve", "--trace", file, "--latency", CONST, "--mode", "pearl", "--batch", "1",
        "--always-draft", 2,
    )  # fmt: skip
    assert "no drafter runs in every round: drop --always-draft" in ran.refusal


@pytest.mark.parametrize("table", [LatencyTable.constant(TARGET_S, DRAFT_S), ALONG])
def test_a_drafter_of_one_pass_costs_the_same_at_every_length(
    trace: Trace, table: LatencyTable
) -> None:
    once = in_one_pass(table)
    for gamma in (1, 3, 5):
        log = replay(trace, Fixed(gamma))
        first = price(replay(trace, Fixed(1)), table).draft_s.mean()
        drafted = price(log, once).draft_s[log.rounds["drafted"] > 0]
        # One that runs along also reads the tokens that were verified.
        rel = 0.03 if table.has("draft", "along") else 0.02
        assert drafted.mean() == pytest.approx(first, rel=rel), gamma
    with pytest.raises(DraftsimError, match="no draft passes"):
        in_one_pass(LatencyTable(table.cells[table.cells["model"] == "target"], table.meta))


def test_every_command_takes_one_pass(file: Path, run: Run) -> None:
    """Two drafts cost one pass, alone and in a batch, and with --c it is said how to ask."""
    common = ("--trace", file, "--latency", CONST, "--one-pass", "--policy", "fixed:gamma=2")
    row = next(r for r in run("simulate", *common, "--json", "-").rows if r["drafted"])
    log = replay(read_trace(file), Fixed(2))
    each_s = int(log.rounds["emitted"].sum()) / len(log) * TARGET_S
    assert row["speedup"] == pytest.approx(each_s / (TARGET_S + DRAFT_S), rel=0.01)
    served = run("serve", *common, "--assume-batch-free", "--batch", "4", "--requests", "40",
                 "--json", "-").rows  # fmt: skip
    assert served[1]["throughput_tok_s"] / served[0]["throughput_tok_s"] == pytest.approx(
        row["speedup"], rel=0.03
    )
    refused = run("sweep", "--trace", file, "--c", "0.1", "--one-pass")
    assert "the cost of that pass as --latency const:target=1,draft=C" in refused.refusal


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--source", "pld"), "drop it or --source pld, or price both with `draftsim serve`"),
        (("--policy", "pld", "--policy", "fixed:gamma=2"), "drop it, or pld"),
    ],
)
def test_other_sources_refuse_it(words: tuple[str, ...], said: str, run: Run) -> None:
    """Their rounds would not pay for it, so that they would rank too high."""
    common = ("simulate", "--always-draft", 8, "--resamples", 10)
    assert said in run(*common, *words).refusal
    every = run(*common, "--json", "-")
    assert "other sources are left out" in every.err
    assert {row["source"] for row in every.rows} == {"none", "draft-model"}
