"""Acceptance by position as an input: read from numbers and files, replayed, never another's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from commands.common.acceptance import load_positions
from policies.lengths.basic import Fixed
from simulator.aggregate.benches import latency_table
from simulator.aggregate.server import ServerRun, calibrate
from tests.conftest import Run
from tests.test_recommend import A100, ACCEPTED, served, written
from traces.acceptance.synthetic import trace_by_position
from traces.errors import DraftsimError
from traces.replay.run import replay
from traces.store.files import write_latency

CONST = ("--latency", "const:target=1,draft=0.1")
SCRAPE = """
vllm:spec_decode_num_drafts_total {drafts}.0
vllm:spec_decode_num_draft_tokens_total {drafted}.0
vllm:spec_decode_num_accepted_tokens_total {accepted}.0
"""


def scrape(path: Path, drafts: int, accepted: tuple[int, ...], positions: bool = True) -> Path:
    """A server's counters after `drafts` rounds, `accepted` of them by position."""
    text = SCRAPE.format(drafts=drafts, drafted=len(accepted) * drafts, accepted=sum(accepted))
    if positions:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        text += "".join(f'{name}{{position="{i}"}} {n}.0\n' for i, n in enumerate(accepted))
    path.write_text(text)
    return path


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
    before = scrape(tmp_path / "before.txt", 1000, (900, 100, 0))
    after = scrape(tmp_path / "after.txt", 5000, (3900, 2100, 1000))
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
    profile = load_positions("bundled", 2)
    assert profile.rounds
    assert profile.survival == pytest.approx(np.cumprod(profile.rates).tolist())


def test_an_acceptance_length_alone_keeps_its_sum(tmp_path: Path) -> None:
    path = scrape(tmp_path / "metrics.txt", 1000, (700, 400, 300), positions=False)
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
        ("0.7,x", "expected chances"),
        ("nan,0.5", "expected chances"),
        ("", "has an empty part"),
        ("0.7,,0.5", "has an empty part"),
        ("nofile.txt", "no such file"),
        ("http://198.51.100.1/metrics", "is not on this machine"),
    ],
)
def test_what_is_no_acceptance_is_refused(given: str, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        load_positions(given)


def test_rounds_in_order_are_a_trace(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text("batch,k,tokens_per_s\n1,0,90\n")
    with pytest.raises(DraftsimError, match="no run with speculation"):
        load_positions(str(path))
    log = tmp_path / "log.txt"
    log.write_text("drafted,accepted\n3,2\n3,0\n")
    ran = run("simulate", "--acceptance", log, *CONST)
    assert ran.code == 2
    assert "for --trace" in ran.err
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
    ran = run(*command, "--acceptance", "0.7,0.5", *CONST)
    assert ran.code == 0, ran.err
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
    assert ran.code == 2
    assert message in ran.err


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibrated latencies of a server, with and without the name of its target."""
    runs = [ServerRun(b, 0, 90.0 * b) for b in (1, 8)]
    runs += [ServerRun(b, 5, 190.0 * b**0.9, accepted=ACCEPTED) for b in (1, 8)]
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
        both = run(*few, "--latency", path, "--trace", "smollm2-cpu")
        assert both.code == 0, both.err
        answer = both.err.index("smollm2-cpu (smollm2 135M + draft model 15.5M)")
        assert answer < both.err.index("acceptance of smollm2-cpu")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**served(4, 300.0, (0.7, 0.5)), "model_id": "org/gpt2"}))
    ran = run(*few, "--acceptance", other, "--latency", costs["named"])
    assert ran.code == 0, ran.err
    assert "the target differs" in ran.err
    own = tmp_path / "own.json"
    own.write_text(json.dumps({**served(4, 300.0, (0.7, 0.5)), "model_id": "org/llama"}))
    assert "differs" not in run(*few, "--acceptance", own, "--latency", costs["named"]).err


def test_another_workloads_acceptance_moves_the_best_draft_length(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", A100)
    ks = {}
    for name, acceptance in (("hard", "0.3,0.1,0.03,0.01,0.0"), ("easy", "0.95,0.9,0.85,0.8,0.75")):
        for command in (("recommend", "--bench", folder), ("calibrate", folder)):
            ran = run(*command, "--acceptance", acceptance, "--batch", "8", "--json", "-")
            assert ran.code == 0, ran.err
            assert "predicted for acceptance by position" in ran.err
            document = json.loads(ran.out[ran.out.index("{") :])
            [row] = document.get("choices") or document["results"]
            ks[name, command[0]] = row["k"]
    assert ks["hard", "recommend"] == ks["hard", "calibrate"] < 3
    assert ks["easy", "recommend"] == ks["easy", "calibrate"] >= 5
