"""`import draftsim`: four questions answered as the commands answer them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import draftsim
from policies import Autoregressive, BatchPolicy, DraftPolicy, Fixed, GammaTune, Oracle, RateOptimal
from policies.core import DraftToken, Load
from policies.registry import is_bound
from simulator.arguments import as_parameters
from simulator.chosen import load_policies, load_serving_policies
from simulator.serving import ClosedLoop, Scenario
from simulator.serving.study import over_loads
from simulator.tune.search import Search
from simulator.whatif.tuning import tuned_rows
from tests.conftest import ROOT, Run
from traces.acceptance.synthetic import synthetic_trace
from traces.importers.base import Options
from traces.latency.table import LatencyTable
from traces.sources.found import find_drafted
from traces.store.files import write_trace
from traces.store.recordings import TRACE_VARIABLE, find_latency, find_trace

SOME = ["fixed:gamma=3", "gammatune"]


class Two(DraftPolicy):
    """Drafts two tokens."""

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return len(draft) < 2


class UpTo(DraftPolicy):
    """Drafts some tokens."""

    def __init__(self, most: int = 2) -> None:
        self.most = most

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return len(draft) < self.most


class Trained(DraftPolicy):
    """Drafts as many tokens as it was trained to."""

    def __init__(self, gamma: int = 9) -> None:
        self.gamma, self.learnt = gamma, 0

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return len(draft) < self.learnt


def trained() -> Trained:
    """Return a policy with an attribute set after construction."""
    policy = Trained()
    policy.learnt = 4
    return policy


class Endless(DraftPolicy):
    """Drafts as long as it may."""

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return True


class Batched(BatchPolicy):
    """Drafts as long as it may, for whole batches."""

    def plan(self, loads: Sequence[Load]) -> int:
        return 100


class OneToken(RateOptimal):
    """Drafts one token, whatever the rate."""

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return not draft


class Both(Autoregressive):
    """Drafts two tokens."""

    def longest_draft(self) -> int:
        return 2

    def keep_drafting(self, draft: Sequence[DraftToken]) -> bool:
        return len(draft) < 2


def test_it_imports_nothing_until_a_name_is_asked_for() -> None:
    code = "import draftsim, sys; print('numpy' in sys.modules); draftsim.predict"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="draftsim has no 'guess': it exports BUNDLED"):
        _ = draftsim.guess
    assert set(draftsim.__all__) == {n for names in draftsim.EXPORTED.values() for n in names}
    assert all(getattr(draftsim, name) is not None for name in draftsim.__all__)


def test_predict_gives_the_rows_of_simulate(run: Run) -> None:
    found = draftsim.predict("bundled", policies=SOME, resamples=50)
    names = [part for name in SOME for part in ("--policy", name)]
    told = run("simulate", "--trace", "bundled", *names, "--resamples", "50", "--json", "-")
    rows = told.rows
    table = found.table.astype(object).where(found.table.notna(), None)
    for name in ("policy", "note", "tokens", "unpriced", "against"):
        assert [row[name] for row in rows] == table[name].to_list()
    for name in ("speedup", "block_efficiency", "outside"):
        assert [row[name] for row in rows] == pytest.approx(found.table[name].to_list())
    assert found.best == "fixed:gamma=2"
    assert found.plot().axes
    parts = draftsim.predict("bundled", policies=SOME, resamples=5, by_category=True, prefill=True)
    figure = parts.plot()
    kinds = [name for name in dict.fromkeys(parts.table["category"]) if isinstance(name, str)]
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == kinds
    assert "prefill counted" in [text.get_text() for text in figure.texts]


def test_predict_lists_the_methods_that_simulate_lists(run: Run) -> None:
    found = draftsim.predict("bundled", resamples=20).table
    rows = run("simulate", "--trace", "bundled", "--resamples", "20", "--json", "-").rows
    assert list(zip(found["policy"], found["verify"], found["source"], strict=True)) == [
        (row["policy"], row["verify"], row["source"]) for row in rows
    ]
    assert {"exact", "csd"} <= {verify.partition(":")[0] for verify in found["verify"]}
    some = draftsim.predict("bundled", policies=["pld", "gammatune+csd"], resamples=20).table
    assert {"pld", "gammatune+csd"} <= set(some["policy"])
    looked_up = draftsim.predict("bundled", source="pld", policies=SOME, resamples=20).table
    assert set(looked_up["source"][1:]) == {"pld"}
    with pytest.raises(draftsim.DraftsimError, match=r"is a method, .* of its own: drop verify"):
        draftsim.predict("bundled", policies=["pld"], verify="csd")


def test_predict_takes_objects() -> None:
    trace, latency = synthetic_trace(0.7, requests=4, tokens=30), LatencyTable.constant(1.0, 0.1)
    found = draftsim.predict(trace, latency, [Two(), "fixed:gamma=2"], resamples=20)
    speedup = found.table.set_index("policy")["speedup"]
    assert speedup["Two"] == pytest.approx(speedup["fixed:gamma=2"])
    assert [name for name, _ in load_policies([Two()], trace)] == ["Two"]
    with pytest.raises(draftsim.DraftsimError, match="give latency as well"):
        draftsim.predict(trace)
    with pytest.raises(draftsim.DraftsimError, match="source chooses the drafter of a named"):
        draftsim.predict(trace, latency, source="ngram")


def test_a_subclass_of_a_shipped_policy_is_run_as_it_is() -> None:
    given = [OneToken(), Both(), "fixed:gamma=1", "fixed:gamma=2"]
    table = draftsim.predict("bundled", policies=given, resamples=20).table
    served = draftsim.serve("bundled", policies=given, concurrency=[1], requests=20).table
    assert list(served["policy"]) == ["autoregressive", "OneToken", "Both", *given[2:]]
    for rows in (table, served):
        accepted = rows.set_index("policy")["acceptance_rate"]
        assert accepted["OneToken"] == accepted["fixed:gamma=1"]
        assert accepted["Both"] == accepted["fixed:gamma=2"] != accepted["OneToken"]
    planned = draftsim.plan("bundled", None, [Both()], rate=0.1, slo="ttft=100", requests=20)
    assert list(planned.table["policy"]) == ["autoregressive", "Both"]


def test_objects_of_one_class_are_told_apart() -> None:
    trace, latency = synthetic_trace(0.7, requests=4, tokens=30), LatencyTable.constant(1.0, 0.1)
    given = [UpTo(), UpTo(3), UpTo(4), UpTo(4)]
    names = ["UpTo", "UpTo:most=3", "UpTo:most=4", "UpTo:most=4 (2)"]
    assert [name for name, _ in load_policies(given, trace)] == names
    assert list(load_serving_policies(given, trace, latency)) == ["autoregressive", *names]
    table = draftsim.predict(trace, latency, given, resamples=20).table
    assert set(names) <= set(table["policy"])


def test_an_object_that_repeats_a_name_is_no_second_row() -> None:
    trace, latency = synthetic_trace(0.7, requests=4, tokens=30), LatencyTable.constant(1.0, 0.1)
    given = ["oracle", Oracle(), "fixed:gamma=2", Fixed(2), Fixed(3)]
    names = ["oracle", "fixed:gamma=2", "fixed:gamma=3"]
    assert [name for name, _ in load_policies(given, trace)] == names
    assert not is_bound(draftsim.predict(trace, latency, given, resamples=20).best)
    assert is_bound("oracle (2)")


def test_objects_are_held_to_the_recorded_length_as_names_are() -> None:
    latency = LatencyTable.constant(1.0, 0.1)
    short = synthetic_trace(0.7, requests=4, tokens=30, max_gamma=6, concentration=8.0)
    given = ["gammatune", GammaTune(), GammaTune(gamma_max=5), Endless(), Batched()]
    said: list[str] = []
    served = load_serving_policies(given, short, latency, say=said.append)
    longest = {name: policy.longest_draft() for name, policy in served.items()}
    assert longest == {
        "autoregressive": 0, "gammatune": 6, "gammatune:gamma_max=5": 5, "Endless": 6,
        "Batched": None,
    }  # fmt: skip
    cut = [
        f"{name} sets no longest draft: it is cut at length 6, the recording's longest (set an "
        "attribute gamma_max, or define longest_draft())" for name in ("Endless", "Batched")
    ]  # fmt: skip
    assert said == cut
    found = draftsim.predict(short, latency, [*given, "fixed:gamma=6"], resamples=20)
    assert [note for note in found.notes if "cut at" in note] == cut
    speedup = found.table.set_index("policy")["speedup"]
    assert speedup["Endless"] == speedup["Batched"] == speedup["fixed:gamma=6"]
    found = draftsim.predict(short, latency, [trained(), "fixed:gamma=4"], resamples=20)
    assert "Trained drafts up to 9 tokens: it is cut at length 6, the recording's longest" in (
        found.notes
    )
    speedup = found.table.set_index("policy")["speedup"]
    assert speedup["Trained"] == speedup["fixed:gamma=4"]
    for wrong in (Fixed, None, 3):
        with pytest.raises(draftsim.DraftsimError, match="is no policy: give a name, or an object"):
            draftsim.predict(short, latency, [wrong])  # type: ignore[list-item]


def test_predict_drafts_with_the_head_that_the_latencies_are_of() -> None:
    found = draftsim.predict("smollm2-vllm-eagle3-cpu", policies=["fixed:gamma=1"], resamples=20)
    assert set(found.table["source"][1:]) == {"eagle:model=smollm2-eagle3"}
    assert any(note.startswith("drafting with eagle:model=smollm2-eagle3") for note in found.notes)
    lossy = draftsim.predict("bundled", policies=["fixed:gamma=2"], verify="csd", resamples=20)
    assert lossy.table["verify"].iloc[1].startswith("csd")


def test_objects_of_two_drafters_are_refused() -> None:
    trace, latency = find_trace(HEAD), find_latency(HEAD)
    with pytest.raises(draftsim.DraftsimError, match=r"those of smollm2-eagle3, whose drafts this"):
        draftsim.predict(trace, latency, ["fixed:gamma=1"], resamples=20)
    with pytest.raises(draftsim.DraftsimError, match=r"those of smollm2-eagle3, whose drafts this"):
        draftsim.serve(trace, HEAD, ["fixed:gamma=1"], concurrency=[1], requests=20)
    drafted, its = find_drafted(HEAD)
    with pytest.raises(draftsim.DraftsimError, match="no passes of the drafter"):
        draftsim.predict(drafted, find_latency("smollm2-vllm-draft-cpu"), resamples=20)
    found = draftsim.predict(drafted, its, ["fixed:gamma=1"], resamples=20)
    assert set(found.table["source"][1:]) == {"eagle:model=smollm2-eagle3"}
    given = draftsim.predict(drafted, CONST, ["fixed:gamma=1"], resamples=20)
    assert set(given.table["source"][1:]) == {"eagle:model=smollm2-eagle3"}


def test_serve_gives_a_row_for_each_load_and_policy() -> None:
    found = draftsim.serve(policies=SOME, concurrency=[1, 2], requests=40)
    assert list(found.table["policy"]) == ["autoregressive", *SOME] * 2
    assert list(found.best) == [1, 2]
    assert found.plot().axes
    loaded = draftsim.serve(policies=SOME, rate=[0.5], requests=40, slo="ttft=2,tpot=0.2")
    assert list(loaded.best) == [0.5]
    assert loaded.table["within_targets"].between(0, 1).all()
    with pytest.raises(draftsim.DraftsimError, match="keep the engine full"):
        draftsim.serve(concurrency=[1], rate=[1.0])


def test_a_policy_that_finished_nothing_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")
    ratios = {"autoregressive": 1.0, "a": nan, "b": 1.2, "c": 0.8, "oracle": 0.5}
    nothing = dict.fromkeys(ratios, nan)

    def rows(*given: Any, **options: Any) -> list[dict[str, Any]]:
        return [
            {"policy": name, "rate": rate, "concurrency": None, "latency_ratio": ratio,
             "e2e_s": {"mean": 3 * ratio}, "extrapolated": 0, "unpriced": [],
             "throughput_tok_s": 1 / ratio, "overloaded": False, "rejected": 0, "preemptions": 0}
            for rate, found in ((1.0, ratios), (2.0, nothing)) for name, ratio in found.items()
        ]  # fmt: skip

    monkeypatch.setattr("simulator.serving.sweep", rows)
    found = draftsim.serve(policies=["fixed:gamma=1"], rate=[1.0, 2.0])
    assert found.best == {1.0: "c", 2.0: None}


def test_with_targets_the_best_serves_most_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(within: float, *given: Any, **options: Any) -> list[dict[str, Any]]:
        served = (("autoregressive", 1.0, 0.30), ("a", 0.5, 0.20), ("b", 0.9, within))
        return [
            {"policy": name, "rate": 1.0, "concurrency": None, "latency_ratio": ratio,
             "goodput_req_s": goodput, "throughput_tok_s": 1.0, "overloaded": False, "rejected": 0,
             "preemptions": 0, "extrapolated": 0, "unpriced": []}
            for name, ratio, goodput in served
        ]  # fmt: skip

    for within, best in ((0.40, "b"), (0.25, "autoregressive"), (0.3001, "autoregressive")):
        monkeypatch.setattr("simulator.serving.sweep", partial(rows, within))
        asked = {"policies": ["fixed:gamma=1"], "rate": [1.0]}
        assert draftsim.serve(**asked, slo="ttft=1").best == {1.0: best}
        assert draftsim.serve(**asked).best == {1.0: "a"}


def test_plan_gives_the_fewest_replicas() -> None:
    trace, latency = synthetic_trace(0.7, requests=8, tokens=20), LatencyTable.constant(0.01, 0.001)
    found = draftsim.plan(
        trace, latency, ["fixed:gamma=2"], rate=1.0, slo="ttft=1,tpot=0.1", replications=2,
        max_num_seqs=1, requests=60, price=2.0,
    )  # fmt: skip
    assert list(found.table["policy"]) == ["autoregressive", "fixed:gamma=2"]
    assert found.best in found.table["policy"].to_list()
    assert (found.table["cost_per_hour"] == 2.0 * found.table["replicas"]).all()
    with pytest.raises(draftsim.DraftsimError, match="curve=True"):
        found.plot()


def test_sweep_gives_a_grid() -> None:
    found = draftsim.sweep(
        "bundled", policies=["fixed:gamma={1..2}"], c=[0.05, 0.2], alpha=[0.5, 0.7], resamples=0,
        tilt="iid", jobs=1,
    )  # fmt: skip
    assert len(found.table) == 8
    assert len(found.best) == 4
    assert set(found.thresholds["policy"]) <= {"fixed:gamma=1", "fixed:gamma=2"}
    titles = [axes.get_title() for axes in found.plot().axes]
    assert titles[:2] == ["fixed:gamma=1", "fixed:gamma=2"]
    with pytest.raises(draftsim.DraftsimError, match="nothing to map"):
        draftsim.sweep("bundled", policies=["fixed:gamma=1"], resamples=0, jobs=1).plot()


def test_sweep_gives_the_points_and_remarks_of_the_command(run: Run, tmp_path: Path) -> None:
    asked = ["--c", "0.05,0.2", "--alpha", "0.5,0.7", "--policy", "fixed:gamma={1..2}"]
    out = tmp_path / "grid.parquet"
    told = run("sweep", "--trace", "bundled", *asked, "--resamples", "0", "--out", str(out))
    assert told.code == 0
    found = draftsim.sweep(
        "bundled", policies=["fixed:gamma={1..2}"], c=[0.05, 0.2], alpha=[0.5, 0.7], resamples=0,
        jobs=1,
    )  # fmt: skip
    points = (pd.read_parquet(out), found.table)
    pd.testing.assert_frame_equal(*(rows.astype(object) for rows in points))
    assert any("reweighted to alpha" in note for note in found.notes)
    for note in found.notes:
        assert note.strip().replace(" alpha,", " --alpha,") in told.said


def test_recordings_by_name_and_by_object_agree() -> None:
    by_name = draftsim.predict("bundled", policies=["fixed:gamma=2"], resamples=20)
    given = draftsim.predict(
        find_trace("bundled"), find_latency("bundled"), ["fixed:gamma=2"], resamples=20
    )
    assert by_name.table.equals(given.table)


def test_objects_of_different_pairs_are_said_and_the_bound_is_never_best() -> None:
    trace, latency = find_trace("bundled"), find_latency("smollm2-cpu")
    found = draftsim.predict(trace, latency, SOME, resamples=20)
    assert any(note.startswith("acceptance of trace (") for note in found.notes)
    assert not draftsim.predict(trace, find_latency("bundled"), SOME, resamples=20).notes
    served = draftsim.serve("bundled", policies=["oracle", *SOME], concurrency=[1], requests=20)
    row = served.table.set_index("policy")["throughput_tok_s"]
    assert row.idxmax() == "oracle"
    assert served.best[1] in ("autoregressive", *SOME)


def test_acceptance_that_a_server_counted_takes_the_traces_place() -> None:
    counted, costs = [0.76, 0.6, 0.43], "const:target=0.02,draft=0.002"
    found = draftsim.predict(
        latency=costs, acceptance=counted, policies=["fixed:gamma=3"], resamples=20
    )
    speedup = found.table.set_index("policy")["speedup"]["fixed:gamma=3"]
    assert speedup == pytest.approx((1 + sum(counted)) * 0.02 / (0.02 + 3 * 0.002), rel=0.02)
    assert found.notes[0].startswith("acceptance by position 0.76, 0.60, 0.43")
    swept = draftsim.sweep(acceptance="0.7,0.5", c=[0.1], policies=["fixed:gamma=1"], resamples=0)
    assert swept.table.set_index("policy")["speedup"]["fixed:gamma=1"] == pytest.approx(
        1.7 / 1.1, rel=0.02
    )
    for more, said in (
        ({}, "what passes cost"),
        ({"latency": costs, "trace": "bundled"}, "two acceptances"),
        ({"latency": costs, "source": "draft-model"}, "drop one"),
    ):
        with pytest.raises(draftsim.DraftsimError, match=said):
            draftsim.predict(acceptance=counted, **more)


CONST = "const:target=0.02,draft=0.002"
HEAD = "smollm2-vllm-eagle3-cpu"


def loads(**given: Any) -> object:
    return over_loads(Scenario(ClosedLoop(1)), find_latency("bundled"), **given)


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("serve --batch 1 --rate 1", lambda: draftsim.serve(concurrency=[1], rate=[1.0])),
        ("serve --scale 2", lambda: loads(scale=[2.0])),
        ("serve --batch 2 --process poisson", lambda: loads(concurrency=[2], process="poisson")),
        ("serve --rate 1 --process bursty", lambda: loads(rate=[1.0], process="bursty")),
        ("serve --interference 0.5", lambda: Scenario(ClosedLoop(1), interference=0.5)),
        ("serve --mode pearl --batch 4", lambda: draftsim.serve(mode="pearl", concurrency=[4])),
        (f"serve --mode pearl --trace {HEAD}", lambda: draftsim.serve(HEAD, mode="pearl")),
        ("serve --mode static-mean --policy goodput --batch 2",
         lambda: draftsim.serve(mode="static-mean", policies=["goodput"], concurrency=[2])),
        ("serve --slo ttft=1,p=0.9", lambda: draftsim.serve(slo="ttft=1,p=0.9")),
        ("capacity --slo ttft=2h --rate 1", lambda: draftsim.plan(slo="ttft=2h", rate=1.0)),
        ("capacity --slo ttft=1", lambda: draftsim.plan(slo="ttft=1")),
        ("sweep --c 0.1 --batch 2", lambda: draftsim.sweep(c=[0.1], concurrency=[2])),
        ("sweep --c 0.1 --context 5", lambda: draftsim.sweep(c=[0.1], context=[5])),
        (f"sweep --trace {HEAD} --gpu h100", lambda: draftsim.sweep(HEAD, gpus=["h100"])),
        ("sweep --verify-ratio 2", lambda: draftsim.sweep(verify_ratio=2)),
        ("sweep --tilt iid", lambda: draftsim.sweep(tilt="iid")),
        ("simulate --latency bundled", lambda: draftsim.predict(latency="bundled")),
        ("serve --latency bundled --policy fixed:gamma=2 --batch 1",
         lambda: draftsim.serve(latency="bundled", policies=["fixed:gamma=2"], concurrency=[1])),
        ("sweep tune", lambda: tuned_rows(
            find_trace("bundled"), find_latency("bundled"), [], resamples=1, seed=0, jobs=1)),
        ("simulate --policy pld --verify csd",
         lambda: draftsim.predict(policies=["pld"], verify="csd")),
        ("simulate --policy rest --source pld",
         lambda: draftsim.predict(policies=["rest"], source="pld")),
        ("simulate --acceptance 0.7", lambda: draftsim.predict(acceptance="0.7")),
        (f"simulate --acceptance 0.7 --latency {CONST} --trace bundled",
         lambda: draftsim.predict("bundled", CONST, acceptance="0.7")),
        (f"simulate --acceptance 0.7 --latency {CONST} --source eagle",
         lambda: draftsim.predict(latency=CONST, acceptance="0.7", source="eagle")),
        ("tune --engine sglang --by-context", lambda: Search("sglang", by_context=True)),
        ("tune --engine hf --batch 2", lambda: Search("hf", [2])),
        ("tune --engine vllm --by-length --batch 1,2",
         lambda: Search("vllm", [1, 2], by_length=True)),
    ],
)  # fmt: skip
def test_python_and_the_command_refuse_with_the_same_line(
    run: Run, command: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    with pytest.raises(draftsim.DraftsimError) as refused:
        call()
    ran = run(*command.split())
    assert ran.code == 2
    line = ran.err.splitlines()[-1].removeprefix("draftsim: ")
    # A question names its parameters; a class that only commands use, the options.
    assert str(refused.value) in (as_parameters(line, ARGUMENTS), line)


QUESTIONS = (draftsim.predict, draftsim.serve, draftsim.plan, draftsim.sweep)
ARGUMENTS = {name for question in QUESTIONS for name in inspect.signature(question).parameters}


def test_errors_and_notes_in_python_name_parameters() -> None:
    for call, said in (
        (partial(draftsim.serve, concurrency=1, rate=1.0), r"\(concurrency\) .* rate and arrivals"),
        (partial(draftsim.serve, concurrency=1, max_num_seqs=3), "leave out max_num_seqs$"),
        (partial(draftsim.serve, rate=1.0, max_num_seqs=0), "^max_num_seqs is 0"),
        (partial(draftsim.serve, "bundled", latency=""), "is a directory"),
        (partial(draftsim.plan, slo="ttft=1", rate=1.0, price=-1.0), "^price is -1.0"),
        (partial(draftsim.predict, latency="bundled"), "draft from, trace bundled$"),
        (partial(draftsim.predict, acceptance="0.7"), "give latency, .* RUNS --out FILE`"),
    ):  # fmt: skip
        with pytest.raises(draftsim.DraftsimError, match=said):
            call()
    found = draftsim.serve(concurrency=[8], requests=8, policies="autoregressive")
    assert "8 requests never fill 8 at a time: give requests 80 or more" in found.notes


@pytest.mark.usefixtures("nothing_named")
def test_plain_decoding_alone_needs_no_recording(run: Run) -> None:
    asked = {"latency": "bundled", "concurrency": 1, "requests": 20}
    found = draftsim.serve(policies="autoregressive", **asked)
    given = draftsim.serve(policies=[Autoregressive()], **asked)
    assert given.table["throughput_tok_s"].equals(found.table["throughput_tok_s"])
    with pytest.raises(draftsim.DraftsimError, match="from the default recording's"):
        draftsim.serve(policies=[Both()], **asked)
    named = ("--latency", "bundled", "--policy", "autoregressive", "--batch", "1")
    rows = run("serve", *named, "--requests", "20", "--json", "-").rows
    assert rows[0]["throughput_tok_s"] == pytest.approx(found.table["throughput_tok_s"][0])


def test_arguments_may_be_of_any_kind_of_sequence() -> None:
    few = {"policies": "fixed:gamma=1", "resamples": 0, "jobs": 1}
    listed = draftsim.sweep("bundled", c=[0.1, 0.2], alpha=[0.5], gamma=[], **few).table
    arrays = draftsim.sweep("bundled", c=np.array([0.1, 0.2]), alpha=np.array(0.5), **few).table
    assert arrays.equals(listed)
    fixed = {**few, "policies": (name for name in ["fixed"])}
    lengths = draftsim.sweep("bundled", gamma=np.array([1, 2]), context=np.array([50.0]), **fixed)
    assert list(lengths.table["policy"]) == ["fixed:gamma=1", "fixed:gamma=2"]
    recorded = draftsim.sweep("bundled", context=[None, 50], **few).table["context"]
    assert recorded.isna().tolist() == [True, False]
    served = draftsim.serve(
        "bundled", policies="gammatune", concurrency=np.array([1, 2]), requests=20
    )
    assert list(served.best) == [1, 2]
    asked = (name for name in SOME)
    predicted = draftsim.predict(
        Path("bundled"), policies=asked, resamples=np.int64(20), prefill=np.False_
    ).table
    assert list(predicted["policy"]) == ["autoregressive", *SOME, "fixed:gamma=2"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draftsim.serve(rate=[]), "rate is empty"),
        (lambda: draftsim.serve(concurrency=[]), "concurrency is empty"),
        (lambda: draftsim.serve(concurrency=[2.5]), "concurrency holds 2.5, expected whole"),
        (lambda: draftsim.sweep(context=[]), "context is empty"),
        (lambda: draftsim.sweep(c=["0.1"]), "c holds '0.1', expected numbers"),
        (lambda: draftsim.sweep(c=[0.1], seed=-1), "seed is -1, expected >= 0"),
        (lambda: draftsim.sweep(policies=[Fixed(3)]), "a sweep takes policies by name"),
        (lambda: draftsim.serve(requests=2.5), "^requests is 2.5, expected a whole number or None"),
        (lambda: draftsim.serve(seed=None), "^seed is None, expected a whole number$"),
        (lambda: draftsim.serve(replicas=True), "^replicas is True, expected a whole number$"),
        (lambda: draftsim.predict(latency=["bundled"]),
         r"^latency is \['bundled'\], expected a text or a LatencyTable or None$"),
        (lambda: draftsim.plan(slo=0.2, rate=1.0), "^slo is 0.2, expected a text$"),
        (lambda: draftsim.sweep(gpus=[80]), "80"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_told(call: Callable[[], object], message: str) -> None:
    with pytest.raises(draftsim.DraftsimError, match=message):
        call()


def test_an_unknown_argument_is_told_with_the_question() -> None:
    with pytest.raises(TypeError, match=r"^predict\(\) got an unexpected keyword argument 'gama'$"):
        draftsim.predict(gama=3)  # type: ignore[call-arg]


def test_nothing_faster_than_plain_decoding_makes_it_the_best() -> None:
    found = draftsim.predict(
        acceptance=[0.0], latency=CONST, policies=["fixed:gamma=1"], resamples=20
    )
    assert (found.table["speedup"][1:] < 1).all()
    assert found.best == "autoregressive"


def test_a_log_is_imputed_as_an_object_as_it_is_as_a_file(tmp_path: Path) -> None:
    log = tmp_path / "rounds.csv"
    log.write_text("request,drafted,accepted\n" + "0,3,1\n0,3,3\n1,3,2\n1,3,0\n" * 5)
    trace = draftsim.import_log("rounds", [log], Options())
    write_trace(trace, tmp_path / "rounds.parquet")
    given = draftsim.predict(trace, CONST, SOME, resamples=20)
    named = draftsim.predict(str(tmp_path / "rounds.parquet"), CONST, SOME, resamples=20)
    assert given.table.equals(named.table)
    assert any("longer ones are extrapolated" in note for note in given.notes)


def test_methods_with_one_rule_in_common_are_served_by_it(run: Run) -> None:
    found = draftsim.serve("bundled", policies=["gammatune+csd"], concurrency=[1], requests=20)
    assert list(found.table["policy"]) == ["autoregressive", "gammatune"]
    assert found.table["verify"].str.startswith("csd").all()
    assert "gammatune+csd is gammatune, verified by csd" in found.notes
