"""``draftsim sweep`` as a person runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from commands import app
from simulator.plots.whatif import figures, plot_batches
from simulator.whatif.axes import search_space
from tests.conftest import Run
from tests.serving import table_of
from tests.studies import read_sweep
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.files import write_latency, write_trace

CONST = "const:target=0.01,draft=0.001,verify=0.011"
FREE = ("--c", "0.1", "--assume-batch-free")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recording") / "trace.parquet"
    write_trace(synthetic_trace(Bursty(), requests=12, tokens=80, concentration=8.0, seed=2), path)
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app.app, ["sweep", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def rows(*arguments: str) -> list[dict[str, Any]]:
    document = json.loads(run(*arguments, "--json", "-"))
    assert (document["schema"], document["command"]) == (1, "sweep")
    found: list[dict[str, Any]] = document["results"]
    return found


def test_grid_writes_a_table_and_maps(trace: str, tmp_path: Path) -> None:
    out, plots = tmp_path / "grid.parquet", tmp_path / "plots"
    found = rows(
        "--trace", trace, "--c", "0.01:1:5log", "--alpha", "0.4:0.8:3", "--gamma", "1..3",
        "--policy", "fixed", "--policy", "hf-heuristic", "--policy", "oracle",
        "--out", str(out), "--plots", str(plots), "--jobs", "1", "--resamples", "20",
    )  # fmt: skip
    frame = read_sweep(out)
    assert len(frame) == 5 * 3 * (3 + 3 + 1)
    assert {row["policy"] for row in found} == set(frame["policy"])
    assert sorted(path.name for path in plots.glob("*.png")) == [
        "adapting.png", "break_even_c.png", "map_c_alpha.png",
    ]  # fmt: skip
    assert all((plots / name).stat().st_size > 10_000 for name in ("map_c_alpha.png",))
    assert all(0 <= row["speedup_above_1"] <= 1 for row in found)


def said(*arguments: str) -> tuple[str, str]:
    """Return what the command prints on its output and on its error stream."""
    result = CliRunner().invoke(app.app, ["sweep", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_break_even_is_printed_and_kept(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    common = ("--trace", trace, "--c", "0:0.5:5", "--policy", "fixed:gamma={3,8}", "--jobs", "1")
    shown, _ = said(*common, "--out", str(out))
    document = json.loads(run(*common, "--json", "-"))
    kept = pd.read_parquet(tmp_path / "grid.breakeven.parquet")
    assert [r["policy"] for r in document["break_even"]] == list(kept["policy"])
    for row, again in zip(kept.itertuples(), document["break_even"], strict=True):
        assert row.along == "c"
        assert row.break_even == again["break_even"]
        assert row.break_even_lo < row.break_even < row.break_even_hi
        assert str(row.says) in shown
    assert set(document) == {"schema", "command", "results", "break_even", "fastest"}
    beyond = json.loads(run(*common[:2], "--c", "0.001,0.01", *common[4:], "--json", "-"))
    assert {r["edge"] for r in beyond["break_even"]} == {"> 0.01"}
    assert {r["break_even"] for r in beyond["break_even"]} == {None}


def test_the_first_line_says_what_is_fastest_where(trace: str) -> None:
    common = ("--trace", trace, "--jobs", "1", "--resamples", "0", "--policy",
              "fixed:gamma={1,4,5}", "--policy", "oracle")  # fmt: skip
    _, remarks = said(*common, "--c", "0.01,0.2,0.9")
    line = next(line for line in remarks.splitlines() if ": fastest" in line)
    found = json.loads(run(*common, "--c", "0.01,0.2,0.9", "--json", "-"))["fastest"]
    names = [row["policy"] for row in found]
    assert names[0] in ("fixed:gamma=4", "fixed:gamma=5")  # not the oracle, nor a bare "fixed"
    assert names[-1] == "no speculation"
    assert f", at given cost ratios: fastest: {names[0]} at c 0.01" in line
    assert line.endswith("no speculation at c 0.9")
    _, remarks = said(*common, "--c", "0.01,0.9", "--alpha", "0.4,0.8")
    assert "fastest over 4 points: " in remarks
    assert "no speculation (50%)" in remarks
    _, remarks = said("ladder", "--trace", trace, "--latency", CONST, "--policy", "svip",
                     "--resamples", "10")  # fmt: skip
    assert "of the oracle's gain" in remarks


def test_what_is_only_estimated_is_said(trace: str, tmp_path: Path) -> None:
    table = tmp_path / "latency.parquet"
    cells = [(m, "forward", b, n, k, 0.01 + 1e-6 * k, 0.0, 5) for m in ("target", "draft")
             for b in (1, 4) for n in (1, 9) for k in (0, 600)]  # fmt: skip
    write_latency(table_of(cells), table)
    common = ("--trace", trace, "--latency", str(table), "--policy", "fixed:gamma=2",
              "--resamples", "0", "--jobs", "1")  # fmt: skip
    shown, remarks = said(*common, "--context", "10,100000", "--batch", "1,64")
    assert "3 of 4 rows have passes outside the measured sizes" in remarks
    assert "most fixed:gamma=2 at batch 64, context 100000 (100.0% of its passes)" in remarks
    assert "outside" in shown
    assert "outside" not in said(*common, "--context", "10")[1]


def test_only_rows_of_assumed_costs_are_marked_as_assumed(trace: str, tmp_path: Path) -> None:
    """One table knows a single batch size, the other several; cost ratios know none."""
    common = ["--trace", trace, "--batch", "1,4", "--assume-batch-free", "--policy",
              "fixed:gamma=2", "--resamples", "0", "--jobs", "1"]  # fmt: skip
    for name, batches in (("one", (1,)), ("several", (1, 4))):
        cells = [(m, "forward", b, n, k, 0.01 * b, 0.0, 5) for m in ("target", "draft")
                 for b in batches for n in (1, 9) for k in (0, 600)]  # fmt: skip
        write_latency(table_of(cells, {"device": name}), file := tmp_path / f"{name}.parquet")
        common += ["--latency", str(file)]
    for more, whose in (((), "one.parquet"), (("--c", "0.1"), "one.parquet and cost ratios")):
        found = {row["gpu"]: row["assumed"] for row in rows(*common, *more)}
        assert {gpu for gpu, assumed in found.items() if assumed} == {"one", *["any"] * len(more)}
        assert found["several"] is None
        _, remarks = said(*common, *more)
        line = next(x for x in remarks.splitlines() if x.startswith("assumed to cost nothing: "))
        assert line.endswith(whose)
        assert ("and at given cost ratios: " in remarks) == bool(more)


def test_acceptance_beyond_the_measured_range_is_said(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    shown, remarks = said(
        "--trace", trace, "--c", "0.1", "--alpha", "0.00001,0.7", "--policy", "fixed:gamma=2",
        "--jobs", "1", "--out", str(out),
    )  # fmt: skip
    assert "tilt_" in shown  # the heading takes two lines
    assert "1 of 2 acceptance rates (1e-05) lie outside the measured range of changes" in remarks
    assert "unknown where no draft or every draft is accepted" in remarks
    frame = read_sweep(out)
    assert not np.isinf(frame["tilt_error"]).any()
    assert frame["tilt_error"].isna().tolist() == [True, False]
    assert frame["tilt_tried"].tolist() == [False, True]


def test_devices_batches_and_contexts(trace: str, tmp_path: Path) -> None:
    out, plots = tmp_path / "grid.parquet", tmp_path / "plots"
    run(
        "--trace", trace, "--latency", CONST, "--latency", "const:target=0.02,draft=0.001",
        "--batch", "1,4", "--context", "100,1000", "--policy", "fixed:gamma={1,4}",
        "--out", str(out), "--plots", str(plots), "--jobs", "1", "--resamples", "4",
        "--assume-batch-free",
    )  # fmt: skip
    frame = read_sweep(out)
    assert len(frame) == 2 * 2 * 2 * 2
    assert set(frame["latency"]) == {CONST, "const:target=0.02,draft=0.001"}
    assert (frame["source"] == "recorded").all()
    assert (plots / "map_batch_gamma_1.png").exists()
    assert (plots / "map_context_batch_2.png").exists()
    # A batch whose cache fits at some contexts alone is left out of the map, with a line.
    one = frame[frame["latency"] == CONST]
    more = one[one["batch"] == 4].assign(batch=8)
    part = pd.concat([one, more[more["context"] == 100]])
    titles = [axes.get_title() for axes in figures(part)["map_context_batch"].axes]
    assert titles[0] == "without batch 8, too large at some contexts\nfixed:gamma=1"


def test_speedup_against_the_batch_of_several_gpus(trace: str, tmp_path: Path) -> None:
    names = "a100/llama-2-7b+vicuna-68m", "h800/llama-2-7b+vicuna-68m"
    run(
        "--trace", trace, "--latency", names[0], "--latency", names[1], "--batch", "1,4,16",
        "--policy", "fixed:gamma={1,4}", "--policy", "gammatune", "--plots", str(tmp_path / "p"),
        "--out", str(tmp_path / "grid.parquet"), "--jobs", "1", "--resamples", "4",
    )  # fmt: skip
    assert (tmp_path / "p" / "speedup_batch.png").exists()
    frame = read_sweep(tmp_path / "grid.parquet")
    panels = plot_batches(frame).axes
    assert [axes.get_title() for axes in panels] == list(names)
    best, tuned = panels[0].lines[:2]
    own = frame[(frame["latency"] == names[0]) & (frame["family"] == "fixed")]
    fastest = own.groupby("batch")["speedup"].max()
    assert list(best.get_ydata()) == pytest.approx(fastest.tolist())
    assert best.get_label() == "best fixed length"
    assert str(tuned.get_label()).startswith("gammatune")
    # The same latencies on two GPUs are two panels.
    two = pd.concat([frame[frame["latency"] == names[0]].assign(gpu=g) for g in ("a", "b")])
    titles = [axes.get_title() for axes in plot_batches(two).axes]
    assert titles == [f"{names[0]} on a", f"{names[0]} on b"]
    with pytest.raises(DraftsimError, match="two or more batches"):
        plot_batches(frame[frame["batch"] == 1])


def test_defaults_price_as_recorded(trace: str) -> None:
    found = rows("--trace", trace, "--latency", CONST, "--jobs", "1", "--resamples", "0")
    assert len(found) == 13  # twelve fixed lengths and the oracle


def test_iid_baseline(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    common = ("--trace", trace, "--jobs", "1", "--policy", "fixed", "--out", str(out))
    run(*common, "--c", "0.1,verify=1.5", "--alpha", "0.6,tilt=iid")
    found = read_sweep(out)
    assert set(found["source"]) == {"iid"}
    # As two options, as they were before.
    run(*common, "--c", "0.1", "--verify-ratio", "1.5", "--alpha", "0.6", "--tilt", "iid")
    pd.testing.assert_frame_equal(read_sweep(out), found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--c", "verify=1.5"), "--c verify=1.5 has no values: write --c AXIS,verify=1.5"),
        (("--c", "0.1,verify=1.5", "--verify-ratio", "2"), "drop --verify-ratio"),
        (("--alpha", "0.6,tilt=iid", "--tilt", "redraw"), "drop --tilt"),
    ],
)
def test_settings_of_an_axis_come_once_and_with_values(given: tuple[str, ...], said: str) -> None:
    error = CliRunner().invoke(app.app, ["sweep", *given]).exception
    assert isinstance(error, DraftsimError)
    assert said in str(error)


def test_ladder(trace: str, tmp_path: Path) -> None:
    found = rows("ladder", "--trace", trace, "--latency", CONST, "--policy", "svip",
                 "--plots", str(tmp_path), "--resamples", "10")  # fmt: skip
    assert [r["rung"] for r in found if r["policy"].startswith("svip")] == ["policy"]
    assert {"autoregressive", "rate-optimal", "oracle"} <= {r["rung"] for r in found}
    assert (tmp_path / "ladder.png").exists()


@pytest.mark.parametrize(
    "asked",
    [
        ("ladder", "--policy", "all"),
        ("ladder", "--policy", "oracle", "--policy", "oracle:convention=run+1"),
        ("tune", "--policy", "oracle:gamma_max={2,6}", "--policy", "fixed:gamma={1,2}"),
    ],
)
def test_the_oracle_is_not_recommended(trace: str, asked: tuple[str, ...]) -> None:
    given = ["sweep", *asked, "--trace", trace, "--latency", CONST, "--resamples", "5"]
    shown = CliRunner().invoke(app.app, given)
    assert shown.exit_code == 0
    said = " ".join(shown.stderr.split())
    assert "fastest" in said
    assert not re.search(r"fastest: oracle|oracle\S* is fastest", said)
    if "ladder" in asked:
        assert not re.search(r"^policy +oracle(:gamma_max=\d+)? ", shown.stdout, re.MULTILINE)
        assert "is not fitted" not in said


@pytest.mark.parametrize(
    ("asked", "unfitted"),
    [
        (("ladder", "--policy", "rate-optimal"), None),  # the rung of this name is fitted
        (("ladder", "--policy", "rate-optimal:gamma_max=4"), "rate-optimal:gamma_max=4"),
        (("tune", "--policy", "rate-optimal:gamma_max={2,4}"), "rate-optimal"),
    ],
)
def test_a_rule_that_is_not_fitted_is_said_to_be_so(
    trace: str, asked: tuple[str, ...], unfitted: str | None
) -> None:
    _, remarks = said(*asked, "--trace", trace, "--latency", CONST, "--resamples", "0")
    assert re.findall(r"(\S+) is not fitted", remarks) == ([unfitted] if unfitted else [])


@pytest.mark.parametrize("order", ["0.01,0.2,0.9", "0.9,0.01,0.2"])
def test_the_first_line_names_ranges_in_any_order(trace: str, order: str) -> None:
    common = ("--trace", trace, "--jobs", "1", "--resamples", "0", "--policy", "fixed:gamma=5")
    _, remarks = said(*common, "--c", order)
    line = next(line for line in remarks.splitlines() if ": fastest" in line)
    assert re.search(r"fastest: fixed:gamma=5 at c 0.01 to 0.2 .*; no speculation at c 0.9$", line)


def test_no_map_of_batch_and_gamma_without_latencies_is_drawn(trace: str, tmp_path: Path) -> None:
    _, remarks = said(
        "--trace", trace, "--c", "0.1,0.2", "--batch", "1,4", "--gamma", "1..3", "--policy",
        "fixed", "--assume-batch-free", "--resamples", "0", "--plots", str(tmp_path / "p"),
    )  # fmt: skip
    assert "or with --latency of batch and gamma" in " ".join(remarks.split())


def test_parameters_are_searched_on_other_prompts_than_they_are_judged_on(trace: str) -> None:
    found = rows(
        "tune", "--trace", trace, "--latency", CONST, "--policy", "fixed:gamma={1..8}",
        "--policy", "gammatune:gamma=2,eta={0.1,0.5}", "--resamples", "20",
    )  # fmt: skip
    assert [row["policy"] for row in found[:2]] == ["autoregressive", "fixed:gamma=5"]
    best = found[2]
    assert best["policy"].startswith("fixed:gamma=")
    assert best["tried"] == 9  # eight lengths, and the setting it comes with
    # Prompts held out are others than those searched on: the two speedups are not the same one.
    assert best["train_speedup"] != best["speedup"]
    # Judged by itself on the held-out prompts, the same setting gives the same speedup.
    again = rows(
        "tune", "--trace", trace, "--latency", CONST, "--policy",
        best["policy"].replace("gamma=", "gamma={") + "}", "--resamples", "20",
    )  # fmt: skip
    assert again[-1]["speedup"] == pytest.approx(best["speedup"])
    assert found[3]["policy"] == "gammatune:gamma=2,eta=0.3"
    # What was asked for has a row, also where the default is faster.
    slow = rows(
        "tune", "--trace", trace, "--latency", CONST, "--policy", "fixed:gamma={11,12}",
        "--resamples", "20",
    )  # fmt: skip
    assert [row["policy"] for row in slow[1:]] == ["fixed:gamma=5", "fixed:gamma=11"]
    assert slow[1]["train_speedup"] > slow[2]["train_speedup"]


def test_search_space_tells_values_from_braces() -> None:
    assert search_space("fixed:gamma={1..3}") == ("fixed", {"gamma": ["1", "2", "3"]})
    assert search_space("svip") == ("svip", {})
    text = "cm-asd:weights=[1,0,0],beta={2,4}"
    assert search_space(text) == ("cm-asd:weights=[1,0,0]", {"beta": ["2", "4"]})
    with pytest.raises(DraftsimError, match="braces give the values of a parameter"):
        search_space("{svip,fixed}:gamma=1{2}")
    with pytest.raises(DraftsimError, match="braces give the values of a parameter"):
        search_space("fixed:{1..3}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--c", "0.1:x:3"), "'x' is no number"),
        (("--c", "0.1", "--alpha", "1.5"), "--alpha holds 1.5, expected 1e-06 to"),
        (("--c", "0.1", "--batch", "0"), "--batch holds 0, expected 1 to 65536"),
        (("--c", "0.1", "--policy", "fixd"), "did you mean 'fixed'"),
        (("--c", "0.1", "--policy", "svip", "--gamma", "1..3"), "none of svip"),
        (("--c", "0.1", "--context", "5"), "--context needs a latency table: give --latency"),
        (("--c", "0.1", "--jobs", "2", "--cluster", "tcp://x:1"), "give one"),
        (
            ("--latency", CONST, "--latency", "const:target=1,draft=1", "--ladder"),
            "takes one --latency: drop the others",
        ),
        (("--latency", CONST, "--tune", "--policy", "svip"), "none of"),
        (("--latency", CONST, "--tune"), "needs a policy"),
        (
            ("--latency", CONST, "--batch", "1000000000"),
            "--batch holds 1000000000, expected 1 to 65536",
        ),
        (
            ("--latency", CONST, "--context", "1e12"),
            "expected 0 to 1e",
        ),
        (("--latency", CONST, "--tune", "--ladder"), "--ladder belongs to `draftsim sweep ladder`"),
        (
            (*FREE, "--batch", "1,4", "--policy", "confidence-freeze"),
            "confidence-freeze decides for the whole batch.*serve --batch",
        ),
        ((*FREE, "--batch", "4", "--policy", "confidence-scheduled"), "the whole batch"),
        ((*FREE, "--batch", "4", "--policy", "goodput"), "goodput decides for the whole batch"),
        ((*FREE, "--batch", "4", "--policy", "tensorrt-llm:window=3"), "the whole batch"),
        (("--latency", CONST, "--tune", "--policy", "all:gamma={1,2}"), "name it instead of all"),
    ],
)
def test_errors_say_what_to_change(trace: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        run("--trace", trace, *arguments)


def test_fixed_lengths_are_swept_as_far_as_drafts_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    whole = synthetic_trace(Bursty(), requests=6, tokens=40, seed=2)
    write_trace(Trace(whole.columns, whole.requests, 5, whole.meta), path)
    found = rows("--trace", str(path), "--latency", CONST, "--jobs", "1", "--resamples", "20")
    names = {row["policy"] for row in found}
    # The default length is one as any other.
    short = {f"fixed:gamma={length}" for length in (1, 2, 3, 4, 5)}
    assert names == {*short, "oracle:gamma_max=5"}


def test_batches_whose_cache_does_not_fit_are_left_out(run: Run, tmp_path: Path) -> None:
    pair = ("--latency", "rtx-3090/llama-3.1-8b+llama-3.2-1b", "--policy", "fixed:gamma=1")
    out = tmp_path / "s.parquet"
    ran = run("sweep", *pair, "--batch", "1,128", "--context", "64,2048", "--resamples", 0,
              "--out", out).ok()  # fmt: skip
    assert "left out from batch 128 and context 2048: its KV cache needs" in ran.err
    assert f"means over a row's points; each point is in {out};" in ran.said
    frame = read_sweep(out)
    fits = {(b, c): f for b, c, f in zip(
        frame["batch"], frame["context"], frame["cache_fits"], strict=True
    )}  # fmt: skip
    assert fits == {(1, 64): True, (1, 2048): True, (128, 64): True, (128, 2048): False}
    none = run("sweep", *pair, "--batch", 128, "--context", 4096, "--resamples", 0)
    assert none.code == 2
    assert "blocks of 16 tokens" in none.err.splitlines()[-1]


@pytest.mark.parametrize("tilt", ["coupled", "redraw", "iid"])
def test_drafts_of_every_start_have_no_other_acceptance(run: Run, tilt: str) -> None:
    ran = run("sweep", "--trace", "smollm2-vllm-eagle3-cpu", "--c", "0.1", "--alpha", "0.5",
              "--tilt", tilt, "--policy", "fixed:gamma=2", "--jobs", 1)  # fmt: skip
    assert "holds acceptance by draft position, which cannot be made better or worse" in ran.refusal
