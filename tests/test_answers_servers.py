"""A server's runs and counters: their own prompts, loads, settings and draft lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import draftsim
from commands.calibrate import ServerEngine
from policies.batch.tables import BatchTable
from policies.lengths.basic import Fixed
from simulator.aggregate.advice import PredictedSpeed, predicted
from simulator.aggregate.benches import _length, read_benches
from simulator.aggregate.doctor import diagnose
from simulator.aggregate.observed import read_acceptance
from simulator.aggregate.positions import Positions, of_trace
from simulator.aggregate.server import ServerRun, calibrate
from simulator.bootstrap import Interval
from simulator.tune.breakeven import grid, measured_surface
from simulator.tune.costs import fixed_logs, price_grid
from simulator.tune.formats import BY_BATCH, read_settings
from simulator.tune.launch import NamedDrafter, launch_line, setting
from tests.conftest import ROOT, Run
from tests.serving import GRID
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.importers.base import Options
from traces.importers.registry import import_log
from traces.importers.totals import Totals
from traces.replay.vectorised import replay_many
from traces.sources.as_draft import drafted_trace
from traces.sources.registry import parse_source
from traces.store.recordings import find_latency, find_trace

pytestmark = pytest.mark.usefixtures("short_chains")

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
        named = predicted(server, batch, k, context)
        assert row["tokens_per_s"] == pytest.approx(named.tokens_per_s.value, rel=0.05)


def test_a_table_of_runs_can_say_off(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("batch,k,tokens_per_s,emitted\n1,0,60,\n1,3,30,1.2\n8,0,300,\n8,3,120,1.2\n")
    done = run("breakeven", "bench", path, "--k", "3", "--json", "-").ok()
    assert {row["k"] for row in done.rows} == {0, 3}
    assert "no table with K above 0 is faster" in done.err


def test_settings_that_stop_early_are_left_out_at_another_acceptance(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(EARLY)
    assert calibrate(read_benches([str(path)]).runs).stopping()
    words = ("recommend", "--engine", "llamacpp", "--bench", path, "--acceptance", "0.3,0.1,0.03")
    done = run(*words).ok()
    assert "all drafts are taken as K tokens long" in done.err
    assert "p-min 0.75" not in done.out


COUNTERS = 'sglang:spec_accept_length{{engine_type="unified",model_name="m"}} {length}\n'


def test_the_doctor_takes_the_draft_length_of_counters_without_one(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(COUNTERS.format(length=2.4))
    assert run("doctor", path).code == 2
    done = run("doctor", path, "--draft-length", "3").ok()
    assert "2.40 tokens per round at K = 3" in done.out + done.err


def test_a_load_beyond_the_runs_is_no_draft_length_beyond_them(run: Run) -> None:
    done = run("recommend", "--bench", RESULTS, "--batch", "64").ok()
    assert "loads above 4 requests were not measured" in done.err
    assert "the longest recommended draft length was not measured" not in done.err


def test_a_share_that_is_not_asked_for_is_refused(run: Run) -> None:
    done = run("recommend", "--bench", RESULTS, "--slo", "tpot=1s,p=0.99")
    assert "drop p" in done.refusal


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_an_unknown_method_is_refused(engine: str) -> None:
    with pytest.raises(DraftsimError, match="known for the method 'medusa'"):
        launch_line(engine, {"max_draft_len": 3}, drafter=NamedDrafter("medusa"))
    assert "EAGLE3" in launch_line(engine, {"max_draft_len": 3}).upper()


def test_a_headline_is_of_the_context_that_was_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "batch,k,tokens_per_s,emitted,context\n1,0,60,,1000\n1,3,100,2.4,1000\n"
        "1,0,40,,16000\n1,3,90,2.4,16000\n"
    )
    done = run("calibrate", path, "--context", "16000").ok()
    assert "At 16,000 tokens of context: K = " in done.err


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("plain-8k-16", None), ("run-k3", 3), ("spec-4", 4), ("c8_K=2", 2), ("k0-c4", 0),
        ("k8s-off", None), ("llama-spec-8b-off", None), ("no-spec-4", None), ("nospec-k4", None),
        ("off-k4", None), ("no-cache-k4", 4), ("kimi-k2-k0-c1", 0), ("kimi-k2-k3", 3),
        ("k3-top-k50", 3),
    ],
)  # fmt: skip
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


def test_a_prompt_does_not_wait_for_those_of_the_whole_batch() -> None:
    """A prompt of 256 tokens takes 10 ms, sixteen together over 80: they come one by one."""
    from simulator.targets import Targets

    trace = synthetic_trace(0.7, requests=6, tokens=20, prompt_length=256)
    plain, logs = fixed_logs(trace, (2,))
    table = find_latency("h100/llama-3.1-8b+llama-3.2-1b")
    found = price_grid([plain, *logs.values()], table, batch=16, slo=Targets(ttft_s=0.05))
    assert (found.within == 1).all()
    assert (found.tokens > 0).all()


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


SCRAPE = """vllm:spec_decode_num_drafts_total {drafts}
vllm:spec_decode_num_draft_tokens_total {drafted}
vllm:spec_decode_num_accepted_tokens_total {accepted}
"""
AT = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}\n'


def scrape(drafts: int, drafted: int, positions: list[int], more: str = "") -> str:
    lines = "".join(AT.format(place=i, count=n) for i, n in enumerate(positions))
    return SCRAPE.format(drafts=drafts, drafted=drafted, accepted=sum(positions)) + lines + more


NGRAM = scrape(
    400, 1600, [300, 200, 100, 50],
    "vllm:generation_tokens_total 1660\nvllm:request_success_total 10\n",
)  # fmt: skip
"""Counters of 1,000 steps of which n-grams drafted in 400."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Half of the drafts have four tokens, half one; every token is accepted 8 times in 10.
        (scrape(1000, 2500, [800, 320, 256, 205]), "its drafts differ in length"),
        (scrape(1000, 4000, [800, 640, 512, 410]), ""),
        (NGRAM, "40% of the steps had a draft"),
    ],
)  # fmt: skip
def test_counters_say_what_they_do_not_tell(text: str, said: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(text)
    assert "counts drafts of 4" in run("doctor", path, "--draft-length", 5).refusal
    cut = run("doctor", path, "--draft-length", 3, "--against", "0.8").ok()
    assert "tokens per round at K = 3" in cut.err
    done = run("doctor", path, "--against", "0.8").ok()
    assert said in done.err
    assert bool(said) == ("metrics.txt: " in done.err)


@pytest.mark.parametrize(
    "text", [NGRAM, scrape(30, 90, [10, 4, 2]), scrape(1000, 2500, [800, 320, 256, 205])]
)
def test_counts_that_import_wrote_say_what_the_log_says(
    text: str, run: Run, tmp_path: Path
) -> None:
    """Rounds, the steps without a draft among them, and what the counts do not tell."""
    log, out = tmp_path / "metrics.txt", tmp_path / "counts.json"
    log.write_text(text)
    imported = run("import", "prometheus", log, "--out", out).ok()
    told, again = (read_acceptance(str(file)) for file in (log, out))
    assert again.known == told.known
    assert again.rounds == told.rounds
    assert again.reached.tolist() == told.reached.tolist()
    assert again.note == told.note
    assert told.note in " ".join(imported.err.split())
    if text is NGRAM:
        assert told.known[4] == pytest.approx(1 + 650 / 1000)
    against = ("--against", "0.5", "--json", "-")
    assert run("doctor", out, *against).document == run("doctor", log, *against).document


def test_lengths_that_differ_as_sound_runs_do_are_as_expected() -> None:
    profile = Positions("profile", {3: 2.40})
    causes = {n: diagnose(Positions("own", {3: n}), profile).cause for n in (2.2, 2.39, 2.41, 2.6)}
    assert causes == {2.2: "mixed", 2.39: "as expected", 2.41: "as expected", 2.6: "better"}


def test_lengths_of_a_recording_are_those_of_each_draft_length() -> None:
    trace = find_trace("bundled")
    found = of_trace("bundled", trace, 8)
    for k in (1, 4, 8):
        [log] = replay_many(trace, [("fixed", Fixed(k))])
        # Rounds that the end of a request cuts off say nothing of the positions after it.
        whole = log.rounds["emitted"][log.rounds["drafted"] == k]
        assert found.known[k] == pytest.approx(whole.mean(), rel=0.01)


def test_a_position_without_a_proposal_counts_as_rejected() -> None:
    """An n-gram search finds nothing in most rounds of this recording."""
    trace = drafted_trace(find_trace("bundled"), parse_source("ngram"), {})
    found = of_trace("bundled", trace, 3)
    [log] = replay_many(trace, [("fixed", Fixed(3))])
    assert (log.rounds["drafted"] == 0).mean() > 0.3
    assert found.known[3] == pytest.approx(log.rounds["emitted"].mean(), rel=0.02)


def test_loads_are_answered_in_order_and_once(run: Run) -> None:
    words = ("recommend", "--bench", RESULTS, "--json", "-", "--batch")
    given, ordered = run(*words, "4,1,4"), run(*words, "1,4")
    assert given.code == 0, given.err
    assert [row["batch"] for row in given.rows] == [1, 4]
    assert given.rows == ordered.rows


def choice(batch: int, k: int, p_min: float = 0.0) -> PredictedSpeed:
    one = Interval(1.0, 0.9, 1.1)
    return PredictedSpeed(batch, k, 0.0, one, one, 0.9, extrapolated=False, p_min=p_min)


def test_one_setting_for_every_load_is_that_of_one_row() -> None:
    rows = [choice(1, 0), choice(4, 8, 0.6), choice(8, 4)]
    assert setting("llamacpp", rows, None) == {
        "spec-draft-n-max": 8, "spec-draft-n-min": 0, "spec-draft-p-min": 0.6
    }  # fmt: skip
    longest = setting("llamacpp", [choice(1, 4), *rows[1:]], None)
    assert longest is not None
    assert longest["spec-draft-n-max"] == 4


def test_vllm_is_recommended_no_table_where_it_would_fail() -> None:
    rows = [choice(1, 4), choice(8, 2)]
    assert BY_BATCH in (setting("vllm", rows, "eagle3") or {})
    assert setting("vllm", rows, "medusa") == {"method": "medusa", "num_speculative_tokens": 4}


@pytest.mark.parametrize("engine", get_args(ServerEngine))
def test_a_recommended_setting_is_one_that_serve_reads(engine: str, tmp_path: Path) -> None:
    """Transformers stops at a confidence of 0.4 unless it is told not to."""
    path = tmp_path / "setting.json"
    path.write_text(json.dumps(setting(engine, [choice(1, 4), choice(8, 2)], None)))
    read, policy = read_settings(path)
    assert read == engine
    assert not policy.reads
    assert policy.longest_draft() == 4


def test_counters_without_effect_are_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(scrape(1000, 3000, [800, 640, 512]))
    done = run("recommend", "--bench", RESULTS, "--metrics", path).ok()
    assert "--metrics has no effect" in done.err
    runs = tmp_path / "runs.csv"
    runs.write_text("batch,k,tokens_per_s\n1,0,60\n1,3,110\n1,5,100\n")
    done = run("recommend", "--bench", runs, "--metrics", path).ok()
    assert "acceptance at K = 5 is estimated from the speeds" in done.err


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("batch,k,tokens_per_s,context\n1,0,40,\n1,3,80,500\n", "{}", "does not say its context"),
        ("batch,k,tokens_per_s\n1,0,40\n1,3,80\n", "{}@3", "have draft lengths of their own"),
    ],
)
def test_runs_that_contradict_are_refused(
    text: str, path: str, said: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    done = run("calibrate", path.format(file))
    assert done.code == 2
    assert said in done.err


def test_a_draft_length_that_contradicts_the_file_is_refused(run: Run) -> None:
    done = run("recommend", "--bench", f"{RESULTS}@3")
    assert done.code == 2
    assert "a run there says K = 0: drop @3" in done.err


def test_an_estimated_acceptance_has_an_interval_at_other_lengths(tmp_path: Path) -> None:
    """Only the length at K = 3 is known: at K = 1 the interval holds what it leaves open."""
    server = calibrate([ServerRun(1, 0, 40.0), ServerRun(1, 3, 80.0, emitted=2.4)])
    other = server.at_acceptance({3: 2.4})
    assert np.ptp(other.emitted(3)) == 0
    assert np.ptp(other.emitted(1)) > 0.05


def test_one_draft_length_for_vllm_is_a_setting(tmp_path: Path) -> None:
    """As ``recommend --out`` writes it where one K is best at every load."""
    path = tmp_path / "setting.json"
    path.write_text('{"method": "eagle3", "num_speculative_tokens": 3}')
    engine, policy = read_settings(path)
    assert engine == "vllm"
    assert isinstance(policy, BatchTable)
    planned = [policy.planned_at(batch) for batch in (1, 7, 300)]
    assert [one is not None and one.verified for one in planned] == [3, 3, 3]
