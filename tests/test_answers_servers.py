"""A server's runs and counters: their own prompts, loads, settings and draft lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import draftsim
from simulator.aggregate.advice import predicted
from simulator.aggregate.benches import _length, read_benches
from simulator.aggregate.server import ServerRun, calibrate
from simulator.tune.breakeven import grid, measured_surface
from simulator.tune.costs import fixed_logs, price_grid
from simulator.tune.launch import start_line
from tests.conftest import ROOT, Run
from tests.serving import GRID
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.importers.base import Options
from traces.importers.registry import import_log
from traces.importers.totals import Totals

RESULTS = str(ROOT / "docs" / "examples" / "server" / "results")
STOPPING = "batch,k,tokens_per_s,accepted,drafted,rounds,p_min\n1,0,40,,,,\n1,4,90,210,400,100,\n"
EARLY = STOPPING + "1,16,99,190,300,100,0.75\n"


def test_a_surface_of_runs_reads_their_prompts() -> None:
    """2,048 prompt tokens for 128 of the answer, as the runs say, not the prior's one for one."""
    runs = [
        ServerRun(b, k, b * speed, prompt=2048, answer=128, emitted=2.5 if k else None)
        for b, k, speed in ((1, 0, 60.0), (1, 3, 110.0), (16, 0, 20.0), (16, 3, 24.0))
    ]
    server = calibrate(runs)
    loads = grid([1, 16], [2112], [3])
    surface = measured_surface(server, None, loads)
    for row, (batch, context, k) in zip(surface.to_dict("records"), loads, strict=True):
        known = server.tokens_per_s(batch, k, context, 16.0, noisy=False)
        assert row["tokens_per_s"] == pytest.approx(float(np.median(known)))
        [named] = predicted(server, [(batch, k, context)])
        assert row["tokens_per_s"] == pytest.approx(named.tokens_per_s.value, rel=0.05)


def test_a_table_of_runs_can_say_off(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("batch,k,tokens_per_s,emitted\n1,0,60,\n1,3,30,1.2\n8,0,300,\n8,3,120,1.2\n")
    done = run("breakeven", "--bench", path, "--k", "3", "--json", "-")
    assert done.code == 0, done.err
    assert {row["k"] for row in done.rows} == {0, 3}
    assert "no table with K above 0 is faster" in done.err


def test_settings_that_stop_early_are_left_out_at_another_acceptance(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(EARLY)
    assert calibrate(read_benches([str(path)]).runs).stopping()
    words = ("recommend", "--engine", "llamacpp", "--bench", path, "--acceptance", "0.3,0.1,0.03")
    done = run(*words)
    assert done.code == 0, done.err
    assert "runs with p-min are left out" in done.err
    assert "p-min 0.75" not in done.out


COUNTERS = 'sglang:spec_accept_length{{engine_type="unified",model_name="m"}} {length}\n'


def test_the_doctor_takes_the_draft_length_of_counters_without_one(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(COUNTERS.format(length=2.4))
    assert run("doctor", path).code == 2
    done = run("doctor", path, "--draft-length", "3")
    assert done.code == 0, done.err
    assert "2.40 tokens per round at K = 3" in done.out + done.err


def test_a_load_beyond_the_runs_is_no_draft_length_beyond_them(run: Run) -> None:
    done = run("recommend", "--bench", RESULTS, "--batch", "64")
    assert done.code == 0, done.err
    assert "loads above 4 requests were not measured" in done.err
    assert "the longest recommended draft length was not measured" not in done.err


def test_a_share_that_is_not_asked_for_is_refused(run: Run) -> None:
    done = run("recommend", "--bench", RESULTS, "--slo", "tpot=1s,p=0.99")
    assert done.code == 2
    assert "drop p" in done.err


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_an_unknown_method_is_refused(engine: str) -> None:
    with pytest.raises(DraftsimError, match="known for the method 'medusa'"):
        start_line(engine, {"max_draft_len": 3}, None, None, "medusa")
    assert "EAGLE3" in start_line(engine, {"max_draft_len": 3}, None, None, None).upper()


def test_a_headline_is_of_the_context_that_was_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "batch,k,tokens_per_s,emitted,context\n1,0,60,,1000\n1,3,100,2.4,1000\n"
        "1,0,40,,16000\n1,3,90,2.4,16000\n"
    )
    done = run("calibrate", path, "--context", "16000")
    assert done.code == 0, done.err
    assert "At 16,000 tokens of context: K = " in done.err


@pytest.mark.parametrize(
    ("name", "length"), [("plain-8k-16", None), ("run-k3", 3), ("spec-4", 4), ("c8_K=2", 2)]
)
def test_a_file_name_says_a_draft_length_or_none(name: str, length: int | None) -> None:
    class Fields:
        k, accepted = None, ()

    assert _length(Fields, Path(f"{name}.json"), None) == length  # type: ignore[arg-type]


def test_acceptance_of_one_position_is_of_one() -> None:
    ranking = draftsim.predict(acceptance=[0.8], latency="const:target=1,draft=0.1")
    assert {"fixed:gamma=1"} == {n for n in ranking.table["policy"] if n.startswith("fixed:")}


def test_the_first_token_comes_with_the_prompt() -> None:
    """8 prompt tokens take 0.8 ms; a round of a draft of eight takes over 10."""
    from simulator.targets import Targets

    trace = synthetic_trace(0.7, requests=6, tokens=20, prompt_length=8)
    _, logs = fixed_logs(trace, (8,))
    found = price_grid([*logs.values()], GRID, slo=Targets(ttft_s=3e-3))
    assert (found.within == 1).all()
    late = price_grid([*logs.values()], GRID, slo=Targets(ttft_s=5e-4))
    assert (late.within == 0).all()


def test_rounds_that_a_limit_cut_are_counted_as_sglang_counts_them(tmp_path: Path) -> None:
    """Three rounds of three accepted drafts, of which a limit of 8 tokens cut the last."""
    path = tmp_path / "log.jsonl"
    counts = {
        "spec_verify_ct": 3, "completion_tokens": 8, "spec_accept_histogram": [0, 0, 0, 3],
        "spec_accept_token_num": 9, "spec_draft_token_num": 9,
    }  # fmt: skip
    path.write_text(json.dumps({"meta_info": counts}) + "\n")
    found = import_log("sglang", [path], Options())
    assert isinstance(found, Totals)
    assert (found.rounds, found.drafted, found.accepted, found.longest) == (3, 9, 9, 3)
