"""Where speedups end: by latencies, by a server's runs, and the runs to measure."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simulator.aggregate.observed import read_acceptance
from simulator.aggregate.server import COSTS, ServerRun, calibrate, step_s
from simulator.serving.cost import TableCost
from simulator.tune.breakeven import (
    faster_up_to,
    grid,
    measured_surface,
    plan,
    priced_surface,
    vllm_tables,
)
from simulator.tune.formats import check_settings
from simulator.tune.vllm import table_rows
from tests.conftest import Run
from traces.latency.table import LatencyTable


def test_the_surface_of_constant_costs_is_the_closed_form() -> None:
    """One target pass costs 1, verification 1.5, a draft pass 0.1: i.i.d. acceptance of 0.7."""
    cost = TableCost(LatencyTable.constant(1.0, 0.1, 1.5))
    surface = priced_surface(cost, cost, read_acceptance("0.7", 4), grid([1], [100], [1, 2, 4]))
    for row in surface.to_dict("records"):
        k, seconds = row["k"], 1.5 + 0.1 * row["k"]
        assert row["emitted"] == pytest.approx(sum(0.7**i for i in range(k + 1)))
        assert row["needed"] == pytest.approx(seconds)
        assert row["speedup"] == pytest.approx(row["emitted"] / seconds)
        assert row["speedup_above_1"] == (row["speedup"] > 1)
        # At the rate that breaks even, it does.
        rate = row["needed_rate"]
        assert sum(rate**i for i in range(k + 1)) == pytest.approx(row["needed"])


class Interacting:
    """A cost whose best draft length falls with batch and context: drafts read the context."""

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        each = batch * context * 1e-6
        return 1 + 0.02 * verify_tokens + each + draft_length * (0.05 + 5 * each)


def test_loads_at_which_an_engine_without_a_drafter_is_faster_are_said() -> None:
    """K = 0 pays the drafter, too, so a table may keep a K above 0 that is slower than none."""

    def cost(batch: int, length: int, verified: int, context: float) -> float:
        return 1 + 0.3 * length + 0.02 * verified

    surface = priced_surface(
        cost, lambda b, k, v, c: cost(b, 0, b, c), read_acceptance("0.5", 2),
        grid([1, 64], [100], [0, 1, 2]),
    )  # fmt: skip
    assert (surface[surface["batch"] == 64]["speedup"] < 1).all()
    table = vllm_tables(surface)["batch"]
    assert table.document is not None
    assert list(table.slower) == [64]
    lost = 1 - surface[surface["batch"] == 64]["speedup"].max()
    assert table.slower[64][1] == pytest.approx(lost)
    said = table.said_slower("batch")
    assert f"slower than an engine without a drafter by {lost:.1%} at batch 64" in said
    assert said.endswith("K = 0 still runs the drafter")
    assert not vllm_tables(surface[surface["batch"] == 1])["batch"].said_slower("batch")


def test_vllms_two_tables_agree_with_the_surface_and_say_what_they_lose() -> None:
    cost = Interacting()
    surface = priced_surface(
        cost, lambda b, k, v, c: cost(b, 0, b, c), read_acceptance("0.8", 6),
        grid([1, 8, 64], [100, 10_000, 200_000], [0, 1, 2, 4, 6]),
    )  # fmt: skip
    tables = vllm_tables(surface)
    for table in tables.values():
        assert table.document is not None
        check_settings("vllm", table.document)
    by_length = tables["seq_len"].document
    assert by_length is not None
    ks = [row[-1] for row in by_length["num_speculative_tokens_per_seq_len"]]
    assert ks == sorted(ks, reverse=True)
    assert len(ks) > 1
    assert 0 < tables["seq_len"].loses < 1
    assert 0 < tables["batch"].loses < 1
    one = surface[surface["batch"] == 1]
    assert vllm_tables(one)["seq_len"].loses == pytest.approx(0, abs=1e-12)
    assert faster_up_to(one, "context", "tokens").startswith("up to ")
    # Each sentence is true of the rows that it names, and of no others.
    for along, unit, at in (("batch", "requests", "context"), ("context", "tokens", "batch")):
        least = surface[surface[at] == surface[at].min()]
        faster = least[(least["k"] > 0) & (least["speedup"] > 1)][along].max()
        said = faster_up_to(surface, along, unit)
        assert said.startswith(f"up to {faster:,} {unit} at ")
        assert said.removesuffix(", all that were asked").endswith(
            {"context": "100 tokens of context", "batch": "1 request"}[at]
        )
    assert table_rows(np.array([[0, 0]]), [1], [10, 20], [3]) == [[1, 1, 1, 2**31 - 1, 3]]


def true_speed(batch: int, k: int, context: int, emitted: float) -> float:
    """A server with the priors' median costs."""
    values = {name: np.array([[cost.median]]) for name, cost in COSTS.items()}
    seconds = step_s(values, emitted, batch, k, context, prompts=0.0)
    return batch * emitted / (0.01 * float(seconds[0, 0]))


def test_the_planned_runs_determine_the_surface() -> None:
    """Half of the grid's loads or fewer: then every speedup is known within a few percent."""
    own = read_acceptance("0.8,0.56,0.336,0.168")
    loads = grid([1, 8, 64], [1000, 30_000], [1, 2, 4])
    runs = plan(loads, own)
    assert 4 <= len(runs) <= len(loads) // 2 + 3
    assert all(a.uncertain >= b.uncertain for a, b in pairwise(runs))
    assert any(run.k == 0 for run in runs)
    measured = [
        ServerRun(run.batch, run.k, true_speed(run.batch, run.k, run.context, run.emitted),
                  run.context, run.emitted if run.k else None, (), 1.0, 1e6)
        for run in runs
    ]  # fmt: skip
    surface = measured_surface(calibrate(measured, noise=0.005), own, loads)
    errors = []
    for row in surface.to_dict("records"):
        emitted = float(own.known[row["k"]])
        true = true_speed(row["batch"], row["k"], row["context"], emitted) / true_speed(
            row["batch"], 0, row["context"], 1.0
        )
        errors.append(row["speedup"] / true - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.1
    lines = next(run.commands() for run in runs if run.k)
    words = shlex.split(lines["serve"])
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["rejection_sample_method"] == "synthetic"
    assert 1 <= config["synthetic_acceptance_length"] <= config["num_speculative_tokens"] + 1
    assert "--max-concurrency" in lines["bench"]


def test_a_surface_on_the_command_line(run: Run, tmp_path: Path) -> None:
    out, picture = tmp_path / "surface.csv", tmp_path / "surface.png"
    ran = run("breakeven", "--trace", "smollm2-vllm-draft-cpu", "--k", "1,2,4", "--out", out,
              "--plot", picture).ok()  # fmt: skip
    head, *lines = out.read_text().splitlines()
    assert head.startswith("batch,context,k,emitted,needed")
    assert len(lines) > 12
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "speculation is faster " in ran.err
    assert "num_speculative_tokens_per_seq_len" in ran.err or "no K above 0" in ran.err
    given = ("breakeven", "--latency", "const:target=1,draft=0.05,verify=1.1", "--acceptance",
             "0.8,0.56,0.336", "--json", "-", "--batch", "1", "--k", "1,2,3")  # fmt: skip
    rows = {row["k"]: row for row in run(*given).rows}
    assert rows[2]["speedup"] == pytest.approx((1 + 0.8 + 0.56) / 1.2)
    rows = {row["k"]: row for row in run(*given, "--one-pass").rows}
    assert rows[2]["speedup"] == pytest.approx((1 + 0.8 + 0.56) / 1.15)


def test_the_answer_comes_before_how_the_costs_are_known(run: Run) -> None:
    ran = run("breakeven", "--latency", "a100/llama-3.1-8b+llama-3.2-1b", "--acceptance",
              "0.76,0.60,0.43", "--batch", "1,64", "--context", "128", "--k", "1,3")  # fmt: skip
    first, second, *_ = ran.err.splitlines()
    assert first.startswith("a100/llama-3.1-8b+llama-3.2-1b (")
    assert ", a100-80gb), acceptance 0.76,0.60,0.43: decoding with speculation is faster" in first
    assert "composed from operators" in second


@pytest.fixture
def at_2000(tmp_path: Path) -> Path:
    """Return runs of one context whose acceptance length at K = 3 is 2.5."""
    path = tmp_path / "runs.csv"
    rows = ["concurrency,num_speculative_tokens,output_throughput,mean_acceptance_length,context"]
    for batch in (1, 16):
        for k, emitted in ((0, 1.0), (3, 2.5)):
            speed = true_speed(batch, k, 2000, emitted)
            rows.append(f"{batch},{k},{speed},{emitted if k else ''},2000")
    path.write_text("\n".join(rows))
    return path


def test_dictated_runs_are_read_and_another_acceptance_is_put_in(run: Run, at_2000: Path) -> None:
    gains = []
    for acceptance in ("3:1.5", "3:3.5"):
        ran = run("breakeven", "bench", at_2000, "--acceptance", acceptance, "--k", "3",
                  "--batch", "1,16", "--json", "-")  # fmt: skip
        gains.append([row["speedup"] for row in ran.rows if row["k"]])
    assert all(a < b for a, b in zip(*gains, strict=True))
    assert gains[1][0] / gains[0][0] == pytest.approx(3.5 / 1.5, rel=0.25)


def test_a_context_that_the_runs_do_not_determine_is_refused(run: Run, at_2000: Path) -> None:
    ran = run("breakeven", "bench", at_2000, "--batch", "1", "--context", "2000,100000")
    assert "the cost of 100,000 is not determined: add runs at about 100,000" in ran.refusal


def test_a_plan_dictates_the_acceptance_of_the_runs(run: Run, at_2000: Path) -> None:
    planned = ("breakeven", "plan", "--bench", at_2000, "--batch", "1,256", "--context",
               "2000,100000", "--k", "3")  # fmt: skip
    for options, emitted in (((), 2.5), (("--acceptance", "3:1.5"), 1.5)):
        rows = run(*planned, *options, "--json", "-").rows
        dictated = {row["emitted"] for row in rows if row["k"]}
        assert list(dictated) == pytest.approx([emitted])


def test_a_plan_draws_nothing(run: Run) -> None:
    ran = run("breakeven", "plan", "--acceptance", "0.8", "--plot", "surface.png")
    assert "--plot belongs to `draftsim breakeven surface` or `bench`" in ran.refusal
    ran = run("breakeven", "--plot", "surface.foo")
    assert "--plot surface.foo: the suffix is not one of .png, .svg, .pdf" in ran.refusal


def test_a_plan_on_the_command_line(run: Run) -> None:
    ran = run("breakeven", "plan", "--acceptance", "0.8,0.7,0.6", "--batch", "1,16", "--context",
              "1000,20000", "--k", "1,3", "--json", "-")  # fmt: skip
    assert ran.rows
    assert {"batch", "context", "k", "serve", "bench"} <= set(ran.rows[0])
    assert "server starts" in ran.err


def test_a_plan_of_no_runs_is_a_table_of_no_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.tune.breakeven.EXACT", 100.0)
    ran = run("breakeven", "plan", "--acceptance", "0.8,0.7,0.6", "--batch", "1,16", "--context",
              "1000,20000", "--k", "1,3", "--json", "-").ok()  # fmt: skip
    assert ran.rows == []
    assert "nothing to measure" in ran.err
    assert "then run" not in ran.err


def test_lower_bounds_are_not_said_to_be_slower(run: Run) -> None:
    """A lookup that seldom proposes is priced as if it always did, so it may well be faster."""
    given = ("--trace", "smollm2-cpu", "--source", "ngram")
    one = run("simulate", *given, "--policy", "fixed:gamma=5", "--json", "-").rows
    assert one[1]["speedup"] > 1
    ran = run("breakeven", *given, "--context", "256", "--k", "5").ok()
    said = " ".join((ran.out + ran.err).split())
    assert "is sure to be faster nowhere (speedups here are lower bounds)" in said
    assert "no table with K above 0 is sure to be faster" in said
    assert " low " not in ran.out  # as exact as the recording: intervals have no width
