"""Acceptance by position as an input: read from numbers and files, replayed, never another's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commands.common.drafted import load_positions
from policies.lengths.basic import Fixed
from simulator.aggregate.acceptance import extended, pick_curve, read_curves
from simulator.aggregate.benches import latency_table
from simulator.aggregate.hazard import HAZARD, emitted_at, lengths
from simulator.aggregate.observed import observed_trace, read_acceptance
from simulator.aggregate.server import ServerRun, calibrate
from simulator.summary import summarize
from tests.conftest import Run, few_draws
from tests.logs import vllm_counters
from tests.test_recommend import A100, ACCEPTED, served, written
from traces.acceptance.synthetic import trace_by_position
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.store.files import write_latency
from traces.store.recordings import find_latency

pytestmark = pytest.mark.usefixtures("short_chains")

CONST = ("--latency", "const:target=1,draft=0.1")


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_rounds_accept_as_often_as_was_counted(gamma: int) -> None:
    survival = (0.8, 0.5, 0.1)
    log = replay(trace_by_position(survival), Fixed(gamma))
    accepted = log.rounds["accepted"]
    whole = accepted[log.rounds["drafted"] == gamma]
    for place, chance in enumerate(survival[:gamma], 1):
        error = np.sqrt(chance * (1 - chance) / len(whole))
        assert abs(np.mean(whole >= place) - chance) < 4 * error
    assert log.fidelity == "approximate"


@pytest.mark.parametrize("survival", [(), (0.5, 0.6), (1.2,), (-0.1,), (float("nan"),)])
def test_impossible_chances_make_no_trace(survival: tuple[float, ...]) -> None:
    with pytest.raises(DraftsimError, match="expected chances"):
        trace_by_position(survival)


def test_every_file_tells_the_same_acceptance(tmp_path: Path, run: Run) -> None:
    """Numbers, counters, a benchmark's result, a CSV, and the counts that `import` writes."""
    numbers = load_positions("0.75,0.5,0.25")
    before = vllm_counters(tmp_path / "before.txt", 1000, (900, 100, 0))
    after = vllm_counters(tmp_path / "after.txt", 5000, (3900, 2100, 1000))
    bench = tmp_path / "k3.json"
    bench.write_text(json.dumps(served(4, 300.0, (0.75, 0.5, 0.25))))
    csv = tmp_path / "runs.csv"
    csv.write_text("batch,k,tokens_per_s,acceptance\n1,0,90,\n1,3,150,0.75 0.5 0.25\n")
    counts = tmp_path / "counts.json"
    assert run("import", "prometheus", before, after, "--out", counts).code == 0
    for given in (f"{before},{after}", str(bench), str(csv), str(counts), f"{bench}@3"):
        assert load_positions(given).survival == pytest.approx(numbers.survival), given
    told = load_positions(str(bench))
    assert (told.model, told.prompt, told.answer) == ("org/target", 900, 256)
    assert told.source == "k3.json"


def test_every_command_reads_numbers_alike() -> None:
    """Several are vLLM's rates by position; one is every position's; lengths have a colon."""
    rates = load_positions("0.8,0.6,0.3")
    assert rates.survival == pytest.approx((0.8, 0.6, 0.3))
    assert rates.rates == pytest.approx([0.8, 0.75, 0.5])
    assert load_positions("0.5", 3).survival == pytest.approx((0.5, 0.25, 0.125))
    assert load_positions("1:1.8,2:2.4").survival == pytest.approx((0.8, 0.6))
    # Measured lengths wobble: pooled chances fall and keep the length.
    assert load_positions("1:1.8,2:2.2,3:2.8").survival == pytest.approx((0.8, 0.5, 0.5))
    profile = load_positions("bundled", 2)
    assert profile.rounds
    assert profile.survival == pytest.approx(np.cumprod(profile.rates).tolist())


def test_an_acceptance_length_alone_keeps_its_sum(tmp_path: Path) -> None:
    path = vllm_counters(tmp_path / "metrics.txt", 1000, (700, 400, 300), positions=False)
    found = load_positions(str(path))
    assert found.estimated
    assert sum(found.survival) == pytest.approx(1.4)
    assert list(found.survival) == sorted(found.survival, reverse=True)
    assert "estimated" in found.said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0.7,0.8", "expected chances from 1 to 0 that do not rise"),
        ("1.7,2.2", "acceptance lengths are given as 1:1.8,2:2.4"),
        ("1000000000:2.0", "expected at most 4096"),
        ("0.7,x", "expected chances"),
        ("nan,0.5", "expected chances"),
        ("", "has an empty part"),
        ("0.7,,0.5", "has an empty part"),
        ("nofile.txt", "no such file"),
        ("http://198.51.100.1/metrics", "is not on this machine"),
        ("http://[::1/metrics", "is not on this machine"),
    ],
)
def test_what_is_no_acceptance_is_refused(given: str, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        load_positions(given)


def test_a_log_answers_for_the_drafts_it_shows(tmp_path: Path, run: Run) -> None:
    """Rounds of one drafted token, and their trace under any name."""
    log, trace = tmp_path / "rounds.csv", tmp_path / "trace"
    log.write_text("request,drafted,accepted\n" + "a,1,1\na,1,0\n" * 40)
    run("import", "rounds", log, "--out", trace).ok()
    for given in (log, trace):
        assert load_positions(str(given)).longest == 1
        refused = run("doctor", given, "--draft-length", 2).refusal
        assert "the longest verified draft has 1 token, and drafts of 2 are asked for" in refused
    compared = run("doctor", "0.8,0.6", "--against", log).ok()
    assert "1.80 tokens per round at K = 1, expected 1.50" in compared.err
    priced = ("--latency", "const:target=1,draft=0.1", "--batch", 1, "--k", "1,2", "--json", "-")
    told = [run("breakeven", given, trace, *priced).ok() for given in ("--trace", "--acceptance")]
    assert told[0].rows == told[1].rows
    out = tmp_path / "profile.json"
    command = ("export", "speculation-profile", "--trace", trace, "--out", out)
    assert "acceptance length 1.50 at draft length 1" in run(*command).ok().said
    assert "has drafts of up to 1 token" in run(*command, "--draft-length", 2).refusal


def test_the_error_of_counted_rounds_is_said(tmp_path: Path, run: Run) -> None:
    path = vllm_counters(tmp_path / "metrics.txt", 400, (320, 160))
    # Tokens per round 2.2, variance 0.2 x 1.44 + 0.4 x 0.04 + 0.4 x 0.64 = 0.56.
    error = 1.96 * np.sqrt(0.56 / 400) / 2.2
    assert load_positions(str(path)).error == pytest.approx(error)
    policy = ("--policy", "fixed:gamma=2")
    said = run("simulate", "--acceptance", path, *CONST, *policy).ok().err
    assert f"known to within ±{error:.1%} (95%) from 400 rounds" in " ".join(said.split())
    assert "known to within" not in run("simulate", "--acceptance", "0.8,0.4", *CONST, *policy).err


def test_intervals_of_counted_acceptance_hold(tmp_path: Path) -> None:
    """They are as wide as 5,000 counted rounds are uncertain."""
    alive, latency = np.array([0.8, 0.55, 0.3]), find_latency("const:target=1,draft=0.1")

    def priced(trace: Trace) -> pd.Series:
        [log] = replay_many(trace, [("fixed:gamma=3", Fixed(3))])
        return summarize([log], latency, resamples=200).iloc[-1]

    truth = priced(trace_by_position(alive, requests=2000, seed=1))["speedup"]
    held = 0
    for seed in range(30):
        drawn = np.random.default_rng(seed).random((5000, 1))
        path = vllm_counters(tmp_path / "metrics.txt", 5000, (drawn < alive).sum(axis=0).tolist())
        _, trace = observed_trace(str(path))
        row = priced(trace)
        held += row["speedup_lo"] <= truth <= row["speedup_hi"]
    assert held >= 25  # 28.5 expected; fewer than 25 have a chance of 0.3%


def test_acceptance_by_position_is_that_of_its_rounds() -> None:
    trace = trace_by_position((0.8, 0.55, 0.3), requests=20, tokens=2000)
    [log] = replay_many(trace, [("", Fixed(3))])
    accepted = log.rounds["accepted"]
    shares = [(accepted >= k).mean() for k in (1, 2, 3)]
    assert shares == pytest.approx([0.8, 0.55, 0.3], abs=0.002)


def test_rounds_in_order_are_a_trace(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text("batch,k,tokens_per_s\n1,0,90\n")
    with pytest.raises(DraftsimError, match="no run with speculation"):
        load_positions(str(path))
    log = tmp_path / "log.txt"
    log.write_text("drafted,accepted\n3,2\n3,0\n")
    ran = run("simulate", "--acceptance", log, *CONST)
    assert "for --trace" in ran.refusal
    assert load_positions(str(log)).rounds == 2


FREE = "--assume-batch-free"


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "--policy", "fixed:gamma=2"),
        ("serve", FREE, "--batch", "1", "--requests", "20", "--policy", "fixed:gamma=2"),
        ("sweep", "--policy", "fixed:gamma=2", "--resamples", "2"),
        ("tune", FREE, "--engine", "hf", "--resamples", "20"),
        ("capacity", FREE, "--rate", "0.001", "--slo", "ttft=30s,tpot=3s", "--requests", "20",
         "--replications", "1", "--policy", "fixed:gamma=2"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_every_command_takes_acceptance(command: tuple[str, ...], run: Run) -> None:
    ran = run(*command, "--acceptance", "0.7,0.5", *CONST).ok()
    lines = ran.err.splitlines()
    [at] = [i for i, line in enumerate(lines) if line.startswith("acceptance by position 0.70, ")]
    assert "200 requests" in lines[at]
    # The answer comes before it; that of simulate is on standard output.
    answers = [line.startswith("the acceptance given") for line in lines[:at]]
    assert any(answers) == (command[0] != "simulate")


def test_the_speedup_is_that_of_the_acceptance_length(run: Run) -> None:
    rows = run("simulate", "--acceptance", "0.7,0.5", *CONST, "--json", "-").rows
    [row] = [r for r in rows if r["policy"] == "fixed:gamma=2"]
    assert row["speedup"] == pytest.approx(2.2 / 1.2, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--acceptance says nothing of what passes cost: give --latency"),
        ((*CONST, "--trace", "smollm2-cpu"), "are two acceptances: give one"),
        ((*CONST, "--source", "eagle"), "and --source eagle names one: drop one"),
        ((*CONST, "--policy", "pld"), "drafts from texts"),
    ],
)
def test_options_that_contradict_it_are_refused(
    options: tuple[str, ...], message: str, run: Run
) -> None:
    ran = run("simulate", "--acceptance", "0.7,0.5", *options)
    assert message in ran.refusal


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibrated latencies of a server, with and without the name of its target."""
    runs = [ServerRun(b, 0, 90.0 * b) for b in (1, 8)]
    runs += [ServerRun(b, 5, 190.0 * b**0.9, accepted=ACCEPTED) for b in (1, 8)]
    with few_draws():
        server, folder = calibrate(runs), tmp_path_factory.mktemp("costs")
    paths = {"named": folder / "named.parquet", "bare": folder / "bare.parquet"}
    write_latency(latency_table(server, "org/llama"), paths["named"])
    write_latency(latency_table(server), paths["bare"])
    return paths


def test_another_models_acceptance_is_refused_or_announced(
    costs: dict[str, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTSIM_TRACE")
    few = ("serve", "--batch", "1", "--requests", "20", "--policy", "fixed:gamma=2")
    for path in costs.values():
        ran = run(*few, "--latency", path)
        assert ran.code == 2, "the default recording's acceptance was taken"
        both = run(*few, "--latency", path, "--trace", "smollm2-cpu").ok()
        answer = both.err.index("smollm2-cpu (smollm2 135M + draft model 15.5M)")
        assert answer < both.err.index("acceptance of smollm2-cpu")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**served(4, 300.0, (0.7, 0.5)), "model_id": "org/gpt2"}))
    ran = run(*few, "--acceptance", other, "--latency", costs["named"]).ok()
    assert "the target differs" in ran.err
    own = tmp_path / "own.json"
    own.write_text(json.dumps({**served(4, 300.0, (0.7, 0.5)), "model_id": "org/llama"}))
    assert "differs" not in run(*few, "--acceptance", own, "--latency", costs["named"]).err


def test_another_workloads_acceptance_moves_the_best_draft_length(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", A100)
    ks = {}
    for name, acceptance in (("hard", "0.3,0.1,0.03,0.01,0.0"), ("easy", "0.95,0.9,0.85,0.8,0.75")):
        for command in (("recommend", "--bench", folder), ("calibrate", folder)):
            ran = run(*command, "--acceptance", acceptance, "--batch", "8", "--json", "-").ok()
            assert "predicted for acceptance by position" in ran.err
            document = ran.document
            [row] = document.get("choices") or document["results"]
            ks[name, command[0]] = row["k"]
    assert ks["hard", "recommend"] == ks["hard", "calibrate"] < 3
    assert ks["easy", "recommend"] == ks["easy", "calibrate"] >= 5


TEXT = """# a comment
model:
  thinking_on:
    1: 1.83   # measured
    2: 2.43
    3: 2.88
    4: N/A
    5: 3.46
  thinking_off:
    1: 1.80
    2: 2.33
"""


def test_a_file_of_curves_is_read(tmp_path: Path) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text(TEXT)
    curves = read_curves(path)
    assert list(curves) == ["model/thinking_on", "model/thinking_off"]
    assert curves["model/thinking_on"] == {1: 1.83, 2: 2.43, 3: 2.88, 5: 3.46}
    assert pick_curve(f"{path}#thinking_off") == {1: 1.80, 2: 2.33}
    with pytest.raises(FileError, match="name one as"):
        pick_curve(str(path))
    path.write_text("a, b:\n  1: 1.8\n  2: 2.3\n")
    assert read_acceptance(f"{path}#a, b").label == f"{path}#a, b"


@pytest.mark.parametrize(
    ("text", "said"),
    [("model:\n  1: 3.5\n", "line 2: 3.5 tokens a round"), ("model:\n", "holds no acceptance"),
     ("- a\n", "line 1"), ("m:\n  1: x\n", "line 2"),
     ("m:\n  1: 1.5\n  1: 1.6\n", "line 3: m has draft length 1 twice")],
)  # fmt: skip
def test_a_damaged_file_of_curves_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=said):
        read_curves(path)


def test_curves_of_four_large_models_lie_in_their_intervals(shared_data: Path) -> None:
    """From K = 1, 2, 3 to 8: more lie in the intervals, and nearer, than under one rate."""
    rows = []
    for path in sorted((shared_data / "acceptance_curves").glob("*.yaml")):
        for curve in read_curves(path).values():
            rows += extended(curve, (1, 2, 3), range(4, 9))
    assert len(rows) == 30
    # Lengths of one curve miss together: six curves, of which four out of five should hold.
    assert np.mean([row["inside"] for row in rows]) > 0.8 - 2 * np.sqrt(0.8 * 0.2 / 6)
    hazard, iid = (
        np.median([abs(row[f"{name}_error"]) for row in rows]) for name in ("hazard", "iid")
    )
    assert hazard < 0.03 < iid


def test_intervals_hold_curves_of_the_prior_as_often_as_they_claim() -> None:
    """80% or more: they are also wide enough for positions that leave the line."""
    random = np.random.default_rng(3)
    held = []
    for _ in range(40):
        values = np.array([[p.mean + p.spread * random.standard_normal() for p in HAZARD.values()]])
        known = {k: float(lengths(values, k)[0]) for k in (1, 2, 3)}
        true = float(lengths(values, 7)[0])
        held.append(emitted_at(known, 7).holds(true))
    assert np.mean(held) > 0.8 - 3 * np.sqrt(0.8 * 0.2 / 40)


def test_curve_on_the_command_line(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "curves.yaml"
    path.write_text(TEXT)
    ran = run("curve", f"{path}#thinking_on", "--json", "-")
    rows = {row["k"]: row for row in ran.rows}
    assert set(rows) == {4, 5, 6, 7, 8}
    assert rows[5]["measured"] == 3.46
    assert rows[5]["inside"]
    assert "1 of 1 measured lengths are in their 80% intervals" in ran.err
    assert rows[8]["low"] < rows[8]["hazard"] < rows[8]["high"]
    shown = run("curve", "1:1.83,2:2.43,3:2.88", "--k", "5,8")
    assert "measured" not in shown.out
    assert shown.err.startswith("1:1.83,2:2.43,3:2.88: K = 5: 3.42 tokens per round (")
    assert "K = 8: 3.74 tokens per round (" in shown.err
    assert run("curve", path, "--given", "7").code == 2
    given = run("curve", f"{path}#thinking_on", "--given", "1,2", "--k", "2,3")
    assert "1 of 1 measured lengths are in" in given.ok().err
    rate = run("curve", "0.8", "--given", "1,2", "--k", "2,4")  # nothing was measured
    assert "measured" not in rate.ok().out + rate.err
    own = run("curve", "bundled", "--given", "1,2", "--k", "4", "--json", "-").rows[0]
    assert own["inside"]
    assert json.dumps(own)


def test_one_chance_is_that_of_each_of_eight_positions_in_curve_too(run: Run) -> None:
    """As its help says, and as `breakeven` and the others read it."""
    ran = run("curve", "0.8", "--json", "-").ok()
    assert [row["k"] for row in ran.rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    for row in ran.rows:
        exact = sum(0.8**k for k in range(row["k"] + 1))
        assert [row[n] for n in ("hazard", "low", "high")] == pytest.approx([exact] * 3)
    assert run("curve", "0.8").err == (
        "0.8: K = 1: 1.80 tokens per round; K = 8: 4.33 tokens per round\n"
    )
    longer = run("curve", "0.8", "--k", "8,12", "--json", "-").rows
    assert longer[0]["hazard"] == pytest.approx(load_positions("0.8").known[8])
    assert longer[0]["hazard"] < longer[1]["low"] < longer[1]["high"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("8:1.5,9:5", "5 tokens per round at K = 9 contradict 1.5 at K = 8 (expected 1.5 to 1.56)"),
        ("1:1.8,2:1.5", "1.5 tokens per round at K = 2 contradict 1.8 at K = 1"),
        ("1:1.8,2:1.78", ""),
        ("1:1.8,2:2.61", ""),
    ],
)
def test_lengths_that_no_drafter_has_together_are_said(told: str, said: str, run: Run) -> None:
    ran = run("curve", told).ok()
    assert (said in ran.said) if said else ("contradict" not in ran.said)


@pytest.mark.parametrize("known", [{1: 1.8, 2: 2.44, 3: 2.95}, {1: 1.3, 2: 1.35}, {1: 1.05}])
def test_bounds_of_a_longer_draft_are_no_lower(known: dict[int, float]) -> None:
    """The draws of a run at another draft length are common to all draft lengths."""
    spans = [emitted_at(known, k) for k in range(max(known) + 1, 33)]
    for name in ("low", "value", "high"):
        assert (np.diff([getattr(span, name) for span in spans]) > -1e-12).all()


def test_the_environment_names_what_a_server_is_compared_with(run: Run) -> None:
    assert "against bundled" in run("doctor", "0.5,0.3").ok().out
