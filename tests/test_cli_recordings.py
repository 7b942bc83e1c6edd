"""Drafter, acceptance and costs: the same in every command, and never mixed without a word."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import draftsim
from commands.common.drafted import load_recording
from commands.simulate.table import headline
from simulator.whatif.ranking import winner
from tests.conftest import ROOT, Run
from tests.report_pages import data_of, lead
from traces.acceptance.trace import Trace
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, as_cells
from traces.sources.found import find_drafted
from traces.store.files import write_latency, write_trace
from traces.store.identity import engine_head, model_in, same_model
from traces.store.recordings import (
    BUNDLED,
    DEFAULT_TRACE,
    PAPERS_TRACE,
    find_latency,
    find_trace,
)

EAGLE3, DRAFT, ONE = "smollm2-vllm-eagle3-cpu", "smollm2-vllm-draft-cpu", "smollm2-cpu"
HEAD = "eagle:model=smollm2-eagle3"
TUNE = ("tune", "--engine", "vllm", "--batch", "1,4", "--resamples", "8")
QUICK = ("--policy", "fixed:gamma=2", "--resamples", "8")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Costs that name no model, as in `calibrate`."""
    rows = [
        (model, "forward", batch, width, 0, seconds, 0.0, 1)
        for model, seconds in (("target", 0.01), ("draft", 0.001))
        for batch in (1, 4) for width in (1, 2, 9)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("costs") / "h100.parquet"
    cells = as_cells(rows)
    write_latency(LatencyTable(cells, {"kind": "calibrated"}), path)
    return path


def test_a_recording_is_tuned_with_the_drafter_it_was_measured_with(run: Run) -> None:
    ran = run(*TUNE, "--trace", EAGLE3, "--json", "-")
    assert [row["decode_gain"] for row in ran.rows] == pytest.approx([1.446, 0.985], abs=5e-4)
    assert ran.err.splitlines()[0].startswith(f"{EAGLE3} (")
    assert f"\ndrafting with {HEAD}" in ran.err
    assert ran.rows == run(*TUNE, "--trace", EAGLE3, "--source", HEAD, "--json", "-").rows
    # The latencies decide: they hold passes of the head, whose drafts belong to the same outputs.
    assert ran.rows == run(*TUNE, "--trace", ONE, "--latency", EAGLE3, "--json", "-").rows


def test_every_command_drafts_with_it(run: Run, tmp_path: Path) -> None:
    simulated = run("simulate", "--trace", EAGLE3, *QUICK, "--json", "-").rows[1]
    assert simulated["source"] == HEAD
    named = run("simulate", "--trace", EAGLE3, "--source", HEAD, *QUICK, "--json", "-").rows[1]
    assert simulated == named
    served = run(
        "serve", "--trace", EAGLE3, "--policy", "fixed:gamma=2", "--batch", "1", "--requests", "8",
        "--json", "-",
    ).rows  # fmt: skip
    assert served[1]["source"] == HEAD
    for costs in ((), ("--c", "0.1")):
        swept = run("sweep", "--trace", EAGLE3, *QUICK, *costs, "--json", "-").rows
        assert [row["drafts"] for row in swept] == [HEAD]
    out = tmp_path / "page.html"
    assert run("report", "--run", EAGLE3, *QUICK, "--no-serve", "--out", out).code == 0
    page = data_of(out.read_text())
    assert page["about"]["draft"] == HEAD
    [shown] = [row for row in page["policies"] if row["policy"] == "fixed:gamma=2"]
    assert shown["speedup"] == pytest.approx(simulated["speedup"])
    for command, more in (("papers", ()), ("calibrate-memory", ("--out", tmp_path / "m.npz"))):
        refused = run(command, "--trace", EAGLE3, *more)
        assert HEAD in refused.refusal


def test_one_function_finds_recordings_for_all_commands() -> None:
    """No command reads a trace or latencies by name past `load_recording`."""
    past = re.compile(r"\b(load_trace|find_trace|load_latency|find_latency)\(")
    common = ROOT / "commands" / "common"
    found = [
        path for path in (ROOT / "commands").rglob("*.py")
        if common not in path.parents and past.search(path.read_text(encoding="utf-8"))
    ]  # fmt: skip
    assert found == []


def test_python_gets_the_same_drafter() -> None:
    trace, latency = find_drafted(EAGLE3)
    assert trace.source == HEAD
    assert latency.has("eagle.smollm2-eagle3", "forward")
    assert find_drafted(DRAFT)[0].source == find_drafted(EAGLE3, HEAD)[0].source.replace(
        HEAD, "draft-model"
    )
    assert load_recording(ONE, EAGLE3).trace.source == HEAD
    assert load_recording(EAGLE3, None, by_ratio=True, one=False).trace.source == HEAD


def test_a_source_that_the_latencies_have_no_passes_of_is_refused(run: Run) -> None:
    refused = run(*TUNE, "--trace", EAGLE3, "--source", "draft-model")
    assert "without passes of the draft model" in refused.refusal
    assert run(*TUNE, "--trace", DRAFT, "--source", "draft-model").code == 0
    # Both were named: the costs' drafter drafts, and a remark says so.
    ran = run(*TUNE, "--trace", EAGLE3, "--latency", DRAFT)
    assert (
        f"drafting with the draft model, like the latencies of {DRAFT}; {EAGLE3} was measured with "
        "smollm2-eagle3"
    ) in ran.err.splitlines()


def test_a_head_without_recorded_drafts_is_refused(tmp_path: Path) -> None:
    table = find_latency(EAGLE3)
    write_latency(LatencyTable(table.cells, {**table.meta, "draft": "other/head"}), tmp_path / "l")
    with pytest.raises(DraftsimError, match="are those of head, whose drafts this trace does"):
        load_recording(ONE, str(tmp_path / "l"))
    # A log says nothing of its drafter: it may be the head.
    trace = find_trace(ONE).select(range(3))
    columns = {k: trace.columns[k] for k in ("request", "position", "offset", "match")}
    log = Trace(columns, trace.requests, trace.max_gamma, {"kind": "rounds"})
    write_trace(log, tmp_path / "log.parquet")
    found = load_recording(str(tmp_path / "log.parquet"), str(tmp_path / "l"))
    assert found.trace.source == "draft-model"


@pytest.mark.usefixtures("nothing_named")
@pytest.mark.parametrize(
    ("command", "option"),
    [(("simulate",), "--trace"), (("tune", "--engine", "vllm"), "--trace"), (("serve",), "--trace"),
     (("sweep",), "--trace"), (("check",), "--trace"), (("papers",), "--trace"),
     (("capacity", "--slo", "ttft=1", "--rate", "1"), "--trace"), (("report",), "--run")],
)  # fmt: skip
def test_other_models_latencies_are_refused_without_a_recording(
    command: tuple[str, ...], option: str, run: Run, calibrated: Path
) -> None:
    other = run(*command, "--latency", "bundled")
    assert (other.code, other.err.count("\n")) == (2, 1)
    default = PAPERS_TRACE if command[0] == "papers" else DEFAULT_TRACE
    assert f"differ from the default recording's, {default} (" in other.err
    assert f"{option} bundled" in other.err
    nameless = run(*command, "--latency", calibrated)
    assert "does not name its models" in nameless.refusal
    assert f"{option} RUN" in nameless.err


@pytest.mark.usefixtures("nothing_named")
@pytest.mark.parametrize("named", [(), ("--trace", DEFAULT_TRACE)])
def test_a_recordings_own_latencies_are_of_its_models(named: tuple[str, ...], run: Run) -> None:
    own = run("simulate", *named, *QUICK, "--json", "-").rows
    for latency in (DEFAULT_TRACE, BUNDLED / DEFAULT_TRACE):
        ran = run("simulate", *named, "--latency", latency, *QUICK, "--json", "-")
        assert ran.rows == own
        assert "acceptance of" not in ran.err
    # The engine called both models by their folder, which tells nothing of an object.
    given = draftsim.predict(find_trace(DEFAULT_TRACE), find_latency(DEFAULT_TRACE), ["fixed"])
    assert "at the costs of the given latencies, which do not name their models" in given.notes[0]
    # An object has no option.
    with pytest.raises(DraftsimError, match=r"^the given latencies: the .*to draft from$"):
        draftsim.predict(latency=find_latency("bundled"))


def test_only_a_folders_own_latencies_are_recorded_with_its_trace(tmp_path: Path, run: Run) -> None:
    folder = BUNDLED / "bundled"
    for file in ("trace", "latency"):
        shutil.copy(folder / f"{file}.parquet", tmp_path)
    write_latency(find_latency("smollm2-cpu"), tmp_path / "other.parquet")
    for file, said in (("latency", False), ("other", True)):
        latency = tmp_path / f"{file}.parquet"
        ran = run("simulate", "--trace", tmp_path, "--latency", latency, *QUICK).ok()
        assert ("the target and draft differ" in ran.err) == said


@pytest.mark.usefixtures("nothing_named")
def test_constants_say_whose_acceptance_they_price(run: Run) -> None:
    ran = run("simulate", "--latency", "const:target=0.01,draft=0.001", *QUICK).ok()
    assert ran.err.splitlines()[0].startswith(f"acceptance of {DEFAULT_TRACE} (Qwen2.5-Coder")
    assert "--trace names another recording" in ran.err.splitlines()[0]


def test_both_named_the_first_remark_says_whose(run: Run, calibrated: Path) -> None:
    ran = run("simulate", "--trace", ONE, "--latency", "bundled", *QUICK).ok()
    first = ran.err.splitlines()[0]
    assert first.startswith(f"acceptance of {ONE} (smollm2 135M + draft model 15.5M) at the costs")
    assert "bundled (2.81M + 0.638M: the target and draft differ)" in first
    # Nothing is said of latencies of the same pair.
    for latency in (ONE, DRAFT):
        ran = run("simulate", "--trace", DRAFT, "--latency", latency, *QUICK)
        assert "acceptance of" not in ran.err
    ran = run("simulate", "--trace", DRAFT, "--latency", calibrated, *QUICK)
    assert "which does not name its models" in ran.err.splitlines()[0]


def test_models_are_compared_by_weights_then_shapes_then_names() -> None:
    meta = find_trace(ONE).meta
    target = model_in(meta, "target")
    assert same_model(target, target)
    assert same_model(target, {**target, "fingerprint": "another"}) is False
    # Another precision rounds the same weights: then shapes tell.
    assert same_model(target, {**target, "fingerprint": "another", "dtype": "bfloat16"})
    assert same_model(target, {"layers": 32, "hidden_size": 4096}) is False
    one, other = ({"name": name} for name in ("models/smollm2", "meta/llama-3.1-8b"))
    assert same_model(one, {"name": "SmolLM2"})
    assert same_model(one, other) is False
    assert same_model(one, {}) is None
    assert model_in({"shapes": {"target": {"name": "x"}}}, "target")["name"] == "x"
    assert model_in({"models": {"draft": "llama 1B Q4"}}, "draft")["name"] == "llama 1B Q4"
    # An engine's table has a folder's name, or that of `draftsim fetch`, and the model's shape.
    sizes = {key: target[key] for key in ("layers", "hidden_size")}
    engine = {"target": "runs/mine", "shapes": {"target": {**sizes, "heads": 1}}}
    assert model_in(engine, "target") == {**sizes, "name": "runs/mine", "dtype": None}
    assert same_model(target, model_in(engine, "target"))
    assert engine_head(find_latency(EAGLE3).meta) == "smollm2-eagle3"
    assert engine_head(find_latency(DRAFT).meta) is None


def test_the_list_names_models_and_drafter(run: Run) -> None:
    said = {row["name"]: row["summary"] for row in run("list", "--json", "-").rows}
    assert said[EAGLE3].startswith("smollm2 135M + smollm2-eagle3 in vllm 0.32.0:")
    assert said[ONE].startswith("smollm2 135M + draft model 15.5M, eager: 160 requests, 17,485 tok")


def test_simulate_and_report_recommend_the_same_policy(run: Run, tmp_path: Path) -> None:
    out, few = tmp_path / "page.html", ("--resamples", "8")
    ran = run("simulate", "--trace", ONE, *few, "--json", "-")
    best = ran.rows[winner(ran.rows) or 0]
    assert best["policy"] == "ngram"
    said = ran.document["headline"]
    assert said.startswith(
        f"{ONE} (smollm2 135M + draft model 15.5M, AMD EPYC): ngram is fastest, "
        f"{three_digits(best['speedup'])}x no speculation ("
    )
    assert said.endswith(
        "; with the draft model no policy is: the best fixed length, fixed:gamma=3, is at 0.742x."
    )
    reported = run("report", "--run", ONE, *few, "--no-serve", "--out", out)
    assert said in reported.err.splitlines()  # a slow machine shows its progress first
    page = data_of(out.read_text())
    top = page["policies"][page["headline"]["policy"]]
    assert (top["policy"], top["speedup"]) == ("ngram", pytest.approx(best["speedup"]))
    assert lead(out.read_text()).startswith("Fastest policy: <strong>ngram</strong>, 1.25× no")
    assert "With the draft model no policy is faster" in lead(out.read_text())
    ranked = {row["name"] for row in page["policies"]}
    assert {"ngram", "pld", "eagle3", "fixed:gamma=3", "llama-cpp"} <= ranked


def test_a_page_of_heads_without_a_cost_per_token_is_refused(run: Run, tmp_path: Path) -> None:
    ran = run("report", "--source", "medusa", *QUICK, "--no-serve", "--out", tmp_path / "p.html")
    assert "drafts of medusa end by themselves" in ran.refusal
    drafted = ("--source", "layer-skip", *QUICK, "--no-serve", "--out", tmp_path / "p.html")
    assert run("report", *drafted).code == 0
    page = data_of((tmp_path / "p.html").read_text())
    assert page["about"]["draft"] == "layer-skip"
    assert {row["source"] for row in page["policies"]} == {"layer-skip"}


def test_the_best_policy_that_adapts_is_none_of_a_fixed_length(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    asked = [part for p in ("llama-cpp", "svip", "fixed:gamma=2") for part in ("--policy", p)]
    assert run("report", *asked, "--resamples", "8", "--no-serve", "--out", out).code == 0
    page = data_of(out.read_text())
    head, rows = page["headline"], page["policies"]
    assert rows[head["policy"]]["note"] == "best fixed"
    assert rows[head["next"]]["policy"].startswith("svip")


def test_a_headline_gains_over_no_slower_row_by_itself() -> None:
    plain = {"policy": "autoregressive", "verify": "exact", "source": "draft-model"}
    known = {"fidelity": "exact", "speedup_lo": None, "speedup_hi": None, "note": None}
    gain = {"gain": 1.25, "gain_lo": None, "gain_hi": None, "against": "fixed:gamma=2"}
    rows = [
        {**plain, **known, **gain, "speedup": 1.0},
        {**plain, **known, **gain, "policy": "svip", "speedup": 1.5},
        {**plain, **known, **gain, "policy": "fixed:gamma=2", "speedup": 1.2, "gain": None,
         "note": "best fixed"},
    ]  # fmt: skip
    assert headline(rows) == (
        "svip is fastest, 1.50x no speculation; +25.0% against fixed:gamma=2."
    )
    lossy = {**rows[1], "verify": "csd", "speedup": 1.6}
    assert headline([*rows, lossy]).startswith("svip is fastest of the lossless, 1.50x")
    assert headline([*rows, {**lossy, "speedup": 1.4}]) == headline(rows)
    rows[2]["speedup"] = 0.9
    assert headline(rows, "mine").startswith("mine: svip is fastest, 1.50x no speculation; the")
    assert "fixed:gamma=2, is at 0.900x" in headline(rows)
    rows[1]["speedup"] = 0.95
    assert "no policy is faster than no speculation: the best, svip, is at 0.950x" in headline(rows)


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", *QUICK),
        ("serve", "--policy", "fixed:gamma=1", "--batch", 1, "--requests", 2),
        ("tune", "--engine", "llamacpp", "--resamples", 4),
        ("capacity", "--rate", 1, "--slo", "ttft=2s,tpot=9", "--requests", 20, *QUICK[:2]),
        ("sweep", *QUICK),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_costs_of_other_models_are_remarked_on_below(command: tuple[object, ...], run: Run) -> None:
    ran = run(*command, "--trace", ONE, "--latency", "a100/llama-2-7b+vicuna-68m").ok()
    lines = ran.err.splitlines()
    [at] = [i for i, line in enumerate(lines) if line.startswith(f"acceptance of {ONE} (")]
    first, second = lines[at : at + 2]
    # The answer of simulate is on standard output.
    answers = [line.startswith(f"{ONE} (") for line in lines[:at]]
    assert any(answers) == (command[0] != "simulate")
    assert "at the costs of a100/llama-2-7b+vicuna-68m" in first
    assert "composed from operators" in second, second


def test_the_first_line_says_where_an_engine_without_a_drafter_makes_drafts_free(
    run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from tests.stand_in_engine import write_measured_engine

    folder = tmp_path / "engine"
    write_measured_engine(folder)
    priced = ("--latency", folder, "--policy", "fixed:gamma=2")
    ran = run("simulate", "--trace", "bundled", *priced, "--resamples", 4)
    answer = " ".join(ran.out.split())
    assert answer.startswith("bundled (bundled 2.81M + draft model 0.638M in stand-in 1, cpu), at")
    assert ", where drafts cost nothing because the engine had no drafter: " in answer[:250]
    plain = run("serve", "--latency", folder, "--policy", "autoregressive", "--prompt", 8,
                "--output", 8, "--batch", 1, "--requests", 2).ok()  # fmt: skip
    assert "drafts cost nothing" not in plain.out + plain.err
