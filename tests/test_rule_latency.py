"""Costs of lossy rules' verdicts: measured by family, charged by what a rule reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from commands.common.output import say_undrawn
from policies.lengths.basic import Autoregressive, Fixed
from policies.lengths.gammatune import GammaTune
from policies.rules.base import TokenRule
from policies.rules.registry import RULES as BUILT_IN
from policies.rules.registry import parse_rule
from profiler.latency.host import DRAWN, DRAWS, RULES, TOSSES, measure_choosing
from profiler.machine import Stopwatch, Timing
from profiler.models.runner import Runner
from simulator.papers.ours import Ours
from simulator.pricing import (
    autoregressive,
    extras_of,
    host_at,
    judging_phase,
    judging_seconds,
    price,
)
from simulator.serving import ClosedLoop, Limits, Scenario, simulate
from simulator.serving.cost import TableCost
from simulator.serving.scenario import Mode
from simulator.serving.study import InOrder
from tests.conftest import Run
from tests.test_pricing import CELLS, HOST, random_log, table
from traces.acceptance.sampling import GREEDY, Sampling
from traces.errors import FileError
from traces.latency.table import CELL_COLUMNS, PHASES, LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.files import read_latency, read_rounds, write_latency, write_rounds
from traces.store.outputs import Output, RealRun, read_run, write_run
from traces.store.parquet import read_file, write_file
from traces.store.recordings import find_latency, find_trace, folder_of

JUDGING = {
    ("target", phase, 1, n, 0): base + slope * n
    for phase, base, slope in (("judge", 2e-4, 1e-5), ("judge_signals", 3e-4, 4e-5))
    for n in (0, 1, 4, 8)
}
DRAWING = {
    **{("draft", f"draw{end}", batch, 1, 0): times * 1e-4 * batch
       for end, times in (("", 1), ("_top_p", 10)) for batch in (1, 8)},
    **{("target", f"toss{end}", 1, n, 0): times * (4e-4 + 3e-5 * n)
       for end, times in (("", 1), ("_top_p", 10)) for n in (0, 2, 8)},
}  # fmt: skip
SAMPLED_TRACE = str(folder_of("bundled") / "sampled.parquet")


def judged(seed: int, verify: str, rule: TokenRule | None = None) -> RoundLog:
    log = random_log(seed)
    return replace(log, verify=verify, rule=rule, mismatched=np.zeros(len(log), np.int32))


@pytest.mark.parametrize(
    ("verify", "base", "slope"),
    [
        ("spec-verification:beta=3", 2e-4, 1e-5), ("csd:threshold=2", 2e-4, 1e-5),
        ("cm-asd", 3e-4, 4e-5), ("lenience:factor=0.3", 3e-4, 4e-5),
    ],
)  # fmt: skip
def test_a_lossy_round_pays_its_verdict_by_drafted_length(
    verify: str, base: float, slope: float
) -> None:
    log, latency = judged(3, verify), table(CELLS | HOST | JUDGING)
    lossless = price(random_log(3), latency)
    priced = price(log, latency)
    expected = base + slope * log.rounds["drafted"]
    np.testing.assert_allclose(priced.round_s - lossless.round_s, expected, rtol=1e-9)
    np.testing.assert_allclose(priced.host_s - lossless.host_s, expected, rtol=1e-9)
    assert priced.unpriced(latency) == lossless.unpriced(latency) == []
    # Plain decoding of the same requests judges nothing.
    plain = price(autoregressive(log), latency)
    assert plain.total_s == price(autoregressive(random_log(3)), latency).total_s


@pytest.mark.parametrize("by_iteration", [False, True])
@pytest.mark.parametrize("rule", ["csd", "typical"])
def test_one_request_at_a_time_is_served_at_its_price(rule: str, by_iteration: bool) -> None:
    trace, latency = find_trace("bundled"), find_latency("bundled")
    alone = Scenario(InOrder(), Limits(1), requests=12, warmup=0.0)  # rules learn
    for policy in (Fixed(4), GammaTune()):
        lossy = parse_rule(rule)
        run = simulate(trace, latency, policy, alone, rule=lossy, by_iteration=by_iteration)
        served = run.requests
        priced = price(replay(trace, policy, parse_rule(rule), first=1), latency)
        expected = priced.decode_s[served["sequence"]]
        np.testing.assert_allclose(served["finish_s"] - served["first_s"], expected, rtol=1e-9)
        assert run.unpriced == []


def test_judging_is_priced_in_batches_and_named_where_it_is_not() -> None:
    trace, latency = find_trace("bundled"), find_latency("bundled")
    batch = Scenario(ClosedLoop(4), Limits(4), requests=12, warmup=0.0)
    cells = latency.cells
    bare = LatencyTable(cells[~cells["phase"].str.startswith("judge")], latency.meta)
    known, missing = (
        [
            simulate(trace, t, Fixed(4), batch, rule=parse_rule("csd"), by_iteration=by_iteration)
            for by_iteration in (False, True)
        ]
        for t in (latency, bare)
    )
    for runs, said in ((known, []), (missing, ["judging"])):
        assert runs[0].simulated_s == pytest.approx(runs[1].simulated_s, rel=1e-9)
        assert [run.unpriced for run in runs] == [said, said]
    assert missing[0].simulated_s < known[0].simulated_s
    plain = simulate(trace, bare, Autoregressive(), batch, rule=parse_rule("csd"))
    assert plain.unpriced == []


def test_a_table_without_the_cells_says_that_judging_is_left_out() -> None:
    log, old = judged(1, "typical"), table(CELLS | HOST)
    assert price(log, old).unpriced(old) == ["judging"]
    np.testing.assert_array_equal(price(log, old).round_s, price(random_log(1), old).round_s)
    assert price(random_log(1), old).unpriced(old) == []
    # An assumed table leaves out nothing: it says what everything costs.
    assumed = LatencyTable.constant(0.01, 0.001)
    assert price(log, assumed).unpriced(assumed) == ["host_round"]
    dearer = LatencyTable.constant(0.01, 0.001, judge=0.5)
    extra = price(log, dearer).total_s - price(log, assumed).total_s
    assert extra == pytest.approx(0.5 * len(log))


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_the_family_of_a_rule_is_known_from_its_name(name: str) -> None:
    rule = parse_rule(name, vocab_size=50)
    by_name = judging_phase(judged(0, name))
    assert by_name == ("judge_signals" if set(rule.reads) - {"token_id"} else "judge")
    assert by_name in PHASES


def test_a_rule_that_reads_fewer_signals_than_its_class_is_priced_by_what_it_reads() -> None:
    class Own(TokenRule):
        """Not in the registry."""

        reads = ("entropy",)

        def accepts(self, token: object, score: object) -> bool:
            """Always."""
            return True

    assert judging_phase(judged(0, "Own", Own())) == "judge_signals"
    assert judging_phase(judged(0, "Own")) == "judge"


def runner(layers: int) -> Runner:
    torch.set_num_threads(1)
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return Runner(LlamaForCausalLM(config).eval(), 64)


def sampled(log: RoundLog, top_p: float = 1.0) -> RoundLog:
    return replace(log, sampling=Sampling(1.0, top_p), verify="rejection-sampling")


@pytest.mark.parametrize(("top_p", "times"), [(1.0, 1), (0.9, 10)])
def test_a_sampled_round_pays_its_draws_and_its_verdict(top_p: float, times: int) -> None:
    latency = table(CELLS | HOST | DRAWING)
    log, plain = sampled(random_log(5), top_p), autoregressive(sampled(random_log(5), top_p))
    for one in (log, plain):
        greedy = replace(one, sampling=GREEDY, verify="exact")
        priced, without = price(one, latency), price(greedy, latency)
        rounds = one.rounds
        expected = 4e-4 + 3e-5 * rounds["drafted"] + 1e-4 * rounds["draft_forwards"]
        np.testing.assert_allclose(priced.host_s - without.host_s, times * expected, rtol=1e-9)
        assert priced.unpriced(latency) == []
        bare = table(CELLS | HOST)
        assert price(one, bare).unpriced(bare) == ["sampling"]
        assert price(greedy, bare).unpriced(bare) == []
        assumed = LatencyTable.constant(0.01, 0.001, host_round=0.0)
        assert price(one, assumed).unpriced(assumed) == []


def test_a_rule_judges_sampled_drafts_after_their_coins_are_tossed() -> None:
    latency = table(CELLS | HOST | JUDGING | DRAWING)
    log = sampled(judged(3, "csd"))
    parts = [
        price(one, latency).total_s
        for one in (log, replace(log, sampling=GREEDY), sampled(random_log(3)), random_log(3))
    ]
    both, judging, drawing, neither = parts
    assert both - neither == pytest.approx(judging - neither + drawing - neither)


@pytest.mark.parametrize("by_iteration", [False, True])
def test_one_sampled_request_at_a_time_is_served_at_its_price(by_iteration: bool) -> None:
    trace, measured = find_trace(SAMPLED_TRACE), find_latency("bundled")
    cells = [measured.cells, table(DRAWING).cells]
    latency = LatencyTable(pd.concat(cells, ignore_index=True), measured.meta)
    alone = Scenario(InOrder(), Limits(1), requests=12, warmup=0.0)
    for policy in (Autoregressive(), Fixed(4), GammaTune()):
        run = simulate(trace, latency, policy, alone, by_iteration=by_iteration)
        served = run.requests
        expected = price(replay(trace, policy, first=1), latency).decode_s[served["sequence"]]
        np.testing.assert_allclose(served["finish_s"] - served["first_s"], expected, rtol=1e-9)
        assert "sampling" not in run.unpriced
        assert "sampling" in simulate(trace, measured, policy, alone).unpriced


def test_the_verdicts_of_a_batch_are_those_on_all_its_tokens() -> None:
    latency = table(CELLS | HOST | DRAWING)
    alone, many = (judging_seconds(latency, "toss", batch, 3) for batch in (1, 2))
    np.testing.assert_allclose(alone, 4e-4 + 3e-5 * np.arange(4))
    np.testing.assert_allclose(many, 4e-4 + 3e-5 * (2 * np.arange(1, 5) - 1))
    drafted = [host_at(latency, {"draw", "toss"}, batch).draft_s for batch in (1, 8, 64)]
    np.testing.assert_allclose(np.diff(drafted), [7e-4, 0.0], atol=1e-12)


def test_policies_that_weigh_costs_are_told_of_draws() -> None:
    latency = table(CELLS | HOST | DRAWING)
    extras = extras_of(sampling=Sampling(1.0))
    for drafts in (0, 4, 9):
        sizes = 1, drafts, drafts + 1, 50.0
        beyond = TableCost(latency, extras)(*sizes) - TableCost(latency)(*sizes)
        assert beyond == pytest.approx(4e-4 + 3e-5 * drafts + 1e-4 * drafts)


@pytest.mark.parametrize("command", [["simulate"], ["breakeven"], ["tune", "--engine", "vllm"]])
def test_commands_say_that_latencies_hold_no_draws(run: Run, command: list[str]) -> None:
    said = "not in the latency table, counted as 0 s: sampling (tokens/s are too high"
    given = "--latency", "bundled"
    assert said in run(*command, "--trace", SAMPLED_TRACE, *given).said
    assert said not in run(*command, "--trace", "bundled", *given).said


@pytest.mark.parametrize("mode", ["pearl", "dsi"])
def test_overlapped_verification_is_charged_for_its_verdict(mode: Mode) -> None:
    alone = Scenario(InOrder(), Limits(1), requests=5, mode=mode, warmup=0.0)
    each_s = {}
    for toss_s in (0.0, 0.005):
        latency = LatencyTable.constant(0.02, 1e-5, host_round=0.0, toss=toss_s)
        # The drafter is quick: verifications follow one another.
        run = simulate(find_trace(SAMPLED_TRACE), latency, Fixed(1), alone)
        each_s[toss_s] = (run.requests["finish_s"] - run.requests["first_s"]).sum()
    assert each_s[0.005] / each_s[0.0] == pytest.approx(0.025 / 0.02, rel=1e-2)


def test_a_log_on_disk_keeps_how_it_was_sampled(tmp_path: Path) -> None:
    for log in (sampled(random_log(1), 0.9), random_log(1)):
        write_rounds(log, tmp_path / "rounds.parquet")
        assert read_rounds(tmp_path / "rounds.parquet").sampling == log.sampling


def test_a_header_without_a_table_of_sampling_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    write_rounds(sampled(random_log(1)), path)
    header, rows = read_file(path, "rounds")
    for wrong, message in (
        ("hot", "header field 'sampling' is 'hot', expected a table"),
        ({"temperature": "hot"}, "temperature='hot', expected a number"),
    ):
        write_file(path, "rounds", rows, {**header, "sampling": wrong})
        with pytest.raises(FileError, match=message):
            read_rounds(path)


def test_rounds_of_before_were_sampled_as_their_outputs_say(tmp_path: Path) -> None:
    log = judged(1, "csd")
    outputs = [Output(r.id, [1] * r.tokens, "", "", -1.0) for r in log.requests]
    for drawn in (Sampling(0.7, 0.9), GREEDY):
        path = write_run(RealRun(log, outputs, {"sampling": drawn.meta}), tmp_path)
        header, rows = read_file(path, "rounds")
        write_file(path, "rounds", rows, {k: v for k, v in header.items() if k != "sampling"})
        assert read_rounds(path).sampling == GREEDY
        assert read_run(path).log.sampling == drawn


def test_plain_decoding_of_sampled_outputs_is_not_that_of_greedy_ones() -> None:
    latency = table(CELLS | HOST | DRAWING)
    ours = Ours(find_trace("bundled"), latency)
    for log in (random_log(5), sampled(random_log(5)), sampled(random_log(5), 0.9)):
        assert ours.plain(log).total_s == price(autoregressive(log), latency).total_s


def test_a_check_says_that_latencies_hold_no_draws(capsys: pytest.CaptureFixture[str]) -> None:
    bare, known = table(CELLS | HOST), table(CELLS | HOST | DRAWING)
    assumed = LatencyTable.constant(0.01, 0.001)
    for latency, sampling in ((bare, GREEDY), (known, Sampling(1.0)), (assumed, Sampling(1.0))):
        say_undrawn(latency, sampling)
        assert capsys.readouterr() == ("", "")
    say_undrawn(bare, Sampling(1.0, 0.9))
    assert "hold no time for drawing and rejecting sampled tokens" in capsys.readouterr().err


def test_a_draw_is_timed_right_behind_the_pass_that_it_draws_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, calls = Stopwatch.each, []

    def each(self: Stopwatch, runs: Sequence[Callable[[], object]]) -> list[Timing]:
        calls.append(len(runs))
        return [Timing(0.5), *own(self, runs)[1:]]

    monkeypatch.setattr(Stopwatch, "each", each)
    seen = measure_choosing(runner(2), runner(1), drafted=(0, 1), repeats=2)
    assert set(calls) == {2}
    assert len(calls) >= 2 * len(DRAWN) * (len(DRAWS) + 1)
    assert (seen["median_s"] < 0.5).all()  # the pass itself is no part of a draw


def test_measuring_gives_a_cell_per_family_and_length(tmp_path: Path) -> None:
    seen = measure_choosing(runner(2), runner(1), drafted=(0, 1, 3, 9, 40), repeats=3)
    assert list(seen.columns) == list(CELL_COLUMNS)
    # 40 drafted tokens do not fit 64 slots with the room a round needs.
    assert seen.groupby("phase")["new_tokens"].apply(tuple).to_dict() == {
        **dict.fromkeys(RULES, (0, 1, 3, 9)), **dict.fromkeys(TOSSES, (0, 3, 9)),
        **dict.fromkeys(DRAWS, (1,) * len(DRAWN)),
    }  # fmt: skip
    assert (seen["median_s"] >= 0).all()
    latency = LatencyTable(pd.concat([table(CELLS).cells, seen], ignore_index=True))
    assert "judging" not in price(judged(2, "bild"), latency).unpriced(latency)
    path = tmp_path / "latency.parquet"
    write_latency(latency, path)
    assert read_latency(path).has("target", "judge_signals")
