"""A real vLLM under our policies: the rounds it takes are the replay's, request by request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from policies import parse_policy
from profiler.engines.loads import SWEEPS
from tests.conftest import ROOT
from tests.engine_lookups import NGRAMS, SUFFIXES, ngram_texts, suffix_texts
from tests.engine_runs import (
    BATCH,
    BY_BATCH,
    LONGEST,
    LOOKING,
    OWN,
    SEARCHED,
    TRACE,
    names,
    policy,
)
from traces.acceptance.trace import Request, Trace
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.lookups.sources import PLD
from traces.sources.lookups.suffix import SuffixLookup, SuffixTree
from traces.sources.lookups.text import NGramLookup
from traces.sources.replay import replay_source
from traces.store.files import read_latency

PYTHON = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
INSTALLED = PYTHON.parents[1] / ".installed"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not INSTALLED.is_file():
        pytest.skip("needs vLLM in .venv-vllm next to .venv: make vllm")
    folder = tmp_path_factory.mktemp("vllm")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), "-m", "tests.engine_runs", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def ran(runs: Path) -> Any:
    return {**json.loads((runs / "ours" / "runs.json").read_text()), "folder": runs / "ours"}


@pytest.fixture(scope="module")
def own(runs: Path) -> Any:
    return {**json.loads((runs / "own" / "runs.json").read_text()), "folder": runs / "own"}


@pytest.fixture(scope="module")
def lookups(runs: Path) -> Any:
    return json.loads((runs / "lookups" / "runs.json").read_text())


def test_the_command_line_starts_in_the_engines_environment(ran: Any) -> None:
    # Without joblib, matplotlib and what else the engine's environment does not hold.
    command = [str(PYTHON), str(ROOT / "draftsim.py"), "tune", "engine", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--defaults" in done.stdout


def rounds(log: RoundLog) -> dict[str, list[list[int]]]:
    fields = ("position", "drafted", "accepted", "emitted", "draft_forwards", "catch_up")
    found: dict[str, list[list[int]]] = {f"{i}/0": [] for i in range(len(log.requests))}
    for row in log.rounds:
        found[f"{row['request']}/0"].append([int(row[f]) for f in fields])
    return {name: own for name, own in found.items() if own}


@pytest.mark.invariant(1)
@pytest.mark.parametrize("name", names())
def test_the_engine_takes_the_rounds_of_the_replay(ran: Any, name: str) -> None:
    own = policy(name)
    assert not own.learns_across_requests  # type: ignore[union-attr]
    found = {n: r for n, r in ran["policies"][name]["rounds"].items() if r}
    assert found == rounds(replay(TRACE, own))  # type: ignore[arg-type]


def test_the_engine_ran_drafts_in_batches(ran: Any) -> None:
    steps = ran["policies"]["fixed"]["steps"]
    assert {s["kind"] for s in steps} == {"prompt", "mixed", "decode"}
    assert max(len(s["drafted"]) for s in steps) == BATCH
    lengths = {d for s in ran["policies"][OWN]["steps"] for d in s["drafted"]}
    assert len(lengths) > 2
    assert max(lengths) <= LONGEST


def test_a_batch_policy_sees_the_engines_batch(ran: Any) -> None:
    steps = ran["batch"]["steps"]
    # Drafts end at the request's limit; some of every full batch do not.
    full = [s["drafted"] for s in steps if len(s["drafted"]) > 1]
    assert full
    assert all(max(d) <= len(d) for d in full)
    assert any(max(d) == BATCH for d in full)


def test_a_lookup_drafts_as_its_replay(ran: Any) -> None:
    prompts = {int(i): tuple(p) for i, p in ran["prompts"].items()}
    requests = [
        Request(r.id, r.category, r.prompt_length, r.tokens, r.tokens, "length", prompts[i])
        for i, r in enumerate(TRACE.requests)
    ]
    columns = dict(TRACE.columns)
    token = columns["token"].copy()
    token[TRACE.on_path] = [t for i in range(len(requests)) for t in ran["texts"][str(i)]]
    columns["token"] = token
    trace = Trace(columns, requests, TRACE.max_gamma, {**TRACE.meta, "eos_token_ids": []})
    log = replay_source(trace, PLD(), parse_policy("fixed:gamma=4"))
    ours = {n: [r[:4] for r in own] for n, own in ran["lookup"]["rounds"].items() if own}
    assert ours == {n: [r[:4] for r in own] for n, own in rounds(log).items()}


def test_searches_that_find_nothing_take_the_simulators_iterations(ran: Any) -> None:
    assert 0.1 < SEARCHED.nothing_drafted.mean() < 0.9
    assert [(r["load"], r["policy"]) for r in ran["looked"]] == [
        (load, name) for load in ("closed:1", "closed:3") for name in ("autoregressive", *LOOKING)
    ]
    iterations = {(r["load"], r["policy"]): r["iterations"] for r in ran["looked"]}
    for row in ran["looked"]:
        assert row["rounds_differ"] == 0 < row["rounds_compared"]
        assert row["iterations"] == row["iterations_predicted"]
        if row["policy"] in LOOKING:
            assert row["iterations"] < iterations[row["load"], "autoregressive"]


def test_policies_are_told_the_vocabulary_of_the_engines_model(ran: Any) -> None:
    assert ran["lookup"]["vocabularies"] == [512]


def test_the_engine_says_what_it_is(ran: Any) -> None:
    assert ran["meta"]["engine"]["name"] == "vllm"
    assert ran["meta"]["engine"]["method"] == "custom_class"


@pytest.mark.parametrize("load", ["closed:1", "closed:3", "closed:4"])
@pytest.mark.parametrize("name", ["autoregressive", "gammatune", *BY_BATCH])
def test_closed_loops_take_the_simulators_iterations_one_by_one(
    ran: Any, load: str, name: str
) -> None:
    [row] = [r for r in ran["rows"] if (r["load"], r["policy"]) == (load, name)]
    assert row["rounds_differ"] == 0
    assert row["iterations"] == row["iterations_predicted"] > 0


def test_all_loads_took_turns(ran: Any) -> None:
    assert ran["side_by_side"] == [len(ran["rows"]), len(ran["tried"])]


@pytest.mark.parametrize("load", ["rate:50", "arrivals:arrivals.csv"])
def test_timed_arrivals_take_the_replays_rounds_and_state_an_interval(ran: Any, load: str) -> None:
    rows = [r for r in ran["rows"] if r["load"] == load and r["policy"] not in BY_BATCH]
    assert [r["rounds_differ"] for r in rows] == [0, 0]
    for row in rows:
        lo, hi = row["tpot_s_predicted_lo"], row["tpot_s_predicted_hi"]
        assert lo <= row["tpot_s_predicted"] <= hi
        assert lo < hi


def test_every_kind_of_iteration_is_priced(ran: Any) -> None:
    [row] = [r for r in ran["rows"] if (r["load"], r["policy"]) == ("closed:3", "gammatune")]
    assert {k["kind"] for k in row["kinds"]} == {"prompt", "decode", "mixed"}
    assert sum(k["iterations"] for k in row["kinds"]) == row["iterations"]
    assert sum(k["measured_s"] for k in row["kinds"]) == pytest.approx(row["busy_s"])


def test_what_was_measured_is_a_table_of_the_engine(ran: Any) -> None:
    latency = read_latency(ran["folder"] / "latency.parquet")
    assert latency.meta["kind"] == "engine"
    assert latency.meta["engine"]["version"].startswith("0.32")
    for phase in ("forward", "prefill", "mixed", "host_round", "host_draft"):
        assert latency.has("target", phase)
    forward = latency.cells[latency.cells["phase"] == "forward"]
    assert set(forward["batch"]) >= {1, 2, 4}
    assert set(forward["new_tokens"]) >= {1, 3, LONGEST + 1}
    assert not (ran["folder"] / "checkpoint").exists()


def test_settings_found_are_tried_beside_those_set_by_hand(ran: Any) -> None:
    assert ran["tables"]  # vLLM 0.32 reads tables by batch
    arms = ["no speculation", "K=1", "K=3", "K=5", *(["tuned"] if ran["tuned"] else [])]
    for load in ("closed:1", "closed:3"):
        rows = [r for r in ran["tried"] if r["load"] == load]
        assert [r["policy"] for r in rows] == arms
        off = rows[0]["throughput"]
        for row in rows:
            assert row["gain"] == pytest.approx(row["throughput"] / off)
            assert row["gain_error"] == pytest.approx(row["gain_predicted"] / row["gain"] - 1)
            assert row["rounds_differ"] == 0
            assert row["iterations"] == row["iterations_predicted"]


@pytest.mark.invariant(1)
@pytest.mark.parametrize("name", ["autoregressive", "fixed", "gammatune", "svip"])
def test_rounds_dictated_behind_vllms_own_drafter_are_the_replays(own: Any, name: str) -> None:
    found = {n: r for n, r in own["policies"][name]["rounds"].items() if r}
    assert found == rounds(replay(TRACE, policy(name)))  # type: ignore[arg-type]


def test_a_policy_cuts_what_vllms_own_drafter_drafts(own: Any) -> None:
    assert own["meta"]["engine"]["method"] == "draft_model"
    drafted = {
        n: {r[1] for o in ran["rounds"].values() for r in o} for n, ran in own["own"].items()
    }
    assert drafted["autoregressive"] == {0}
    assert max(drafted["fixed"]) == parse_policy("fixed").gamma  # type: ignore[attr-defined]
    assert len(drafted["gammatune"]) > 2
    accepted = [r[2] for o in own["own"]["fixed"]["rounds"].values() for r in o]
    assert sum(accepted) > 0  # the first of two layers finds some of their tokens
    assert own["outputs"] == {f"{i}/0": text for i, text in own["texts"].items()}


@pytest.mark.parametrize("drafts", ["rows", "by_start"])
@pytest.mark.parametrize("load", ["closed:1", "closed:3"])
def test_loops_with_vllms_own_drafter_take_the_simulators_iterations(
    own: Any, load: str, drafts: str
) -> None:
    found = [r for r in own[drafts] if r["load"] == load]
    assert [r["policy"] for r in found] == ["autoregressive", "fixed", "gammatune"]
    for row in found:
        assert row["rounds_differ"] == 0
        assert row["iterations"] == row["iterations_predicted"] > 0


def test_the_own_drafters_passes_have_cells_of_their_own(own: Any) -> None:
    cells = read_latency(Path(own["folder"]) / "latency.parquet").cells
    drafter = cells[cells["model"] == "draft"]
    assert set(drafter["phase"]) == {"along", "catch_up", "forward", "prefill"}
    # A cell is a difference of two, of which a busy machine may have the smaller one larger.
    longest_s = drafter[drafter["phase"] != "forward"].groupby("phase")["median_s"].max()
    assert (longest_s > 0).all()


def test_a_table_measured_between_the_arms_predicts_in_the_place_of_the_first(own: Any) -> None:
    cells = read_latency(own["folder"] / "between.parquet").cells
    target = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]
    sizes = set(zip(target["batch"], target["new_tokens"], strict=True))
    assert sizes == {(b, w) for b in (1, 4) for w in (1, 2, 4)}
    assert own["sweeps"] == SWEEPS
    for row in own["rows"]:
        assert row["profile_error"] != row["error"]
        assert row["throughput_predicted"] / row["throughput"] - 1 == pytest.approx(row["error"])
    assert not [key for row in own["by_start"] for key in row if key.startswith("profile_")]


@pytest.mark.parametrize("number", range(len(NGRAMS)))
def test_ngrams_are_vllms(lookups: Any, number: int) -> None:
    mine = []
    for ids in ngram_texts():
        lookup = NGramLookup(*NGRAMS[number])
        lookup.extend(ids)
        mine.append([p.token_id for p in lookup.propose()])
    assert mine == lookups["ngrams"][number]
    assert sum(map(len, mine)) > 100


@pytest.mark.parametrize("number", range(len(SUFFIXES)))
def test_suffix_drafts_are_arctics(lookups: Any, number: int) -> None:
    if lookups["suffixes"] is None:
        pytest.skip("arctic-inference is not in .venv-vllm: see what `make vllm` said of it")
    depth, factor, least, vocabulary = SUFFIXES[number]
    tree, mine = SuffixTree(depth), []
    for prompt, output in suffix_texts(depth, vocabulary):
        lookup = SuffixLookup(tree, depth, depth, factor, least)
        lookup.extend(prompt)
        for token in output:
            lookup.extend([token])
            draft = lookup.propose()
            mine.append([[p.token_id for p in draft], [p.prob for p in draft]])
    assert mine == lookups["suffixes"][number]
    assert sum(len(tokens) for tokens, _ in mine) > 100
