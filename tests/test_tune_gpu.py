"""Settings and reports for another GPU say what they rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.hardware.record import published_error
from tests.carried import TRUTH, write_carried
from tests.conftest import Run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_carried(tmp_path_factory.mktemp("gpu"))


def command(run: Run, files: Path, engine: str, *more: str) -> Any:
    return run(
        "tune", "--engine", engine, "--trace", files / "trace.parquet", "--resamples", "4",
        "--latency", *(m.format(files) for m in more),
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_settings_for_another_gpu_say_that_they_are_scaled(
    files: Path, engine: str, run: Run
) -> None:
    batches = () if engine == "hf" else ("--batch", "1,4")
    here, there = (
        command(run, files, engine, "{}/latency.parquet", "--gpu", gpu, *batches, "--json", "-")
        for gpu in ("h200", "rtx3090")
    )
    assert {row["scaled"] for row in here.rows} == {False}
    assert {row["scaled"] for row in there.rows} == {True}
    assert "scaled, not measured" not in here.err
    assert "warning: latencies were scaled, not measured: from h200 to rtx-3090" in there.err
    assert f"a median error of {published_error(TRUTH).median:.0%}" in there.err
    assert "measured on h200, scaled to rtx-3090: approximate" in there.err
    for row in there.rows:
        assert row["gain_dear"] <= row["gain_cheap"]
        assert {"setting_dear", "setting_cheap"} <= set(row)
    assert "gain_dear" not in here.rows[0]
    assert ("draftsim calibrate" in there.err) == (engine != "hf")
    # A GPU of a fifth of the bandwidth.
    rate = "decode_tok_s" if engine == "hf" else "served_tok_s"
    assert there.rows[0][rate] < 0.6 * here.rows[0][rate]


def test_composed_latencies_of_other_models_are_named_and_carried_over(run: Run) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", "qwen-coder-cpu", "--resamples", "4", "--batch",
        "1,8", "--latency", "h100/llama-3.1-8b+llama-3.2-1b", "--weights", "fp8", "--json", "-",
    )  # fmt: skip
    # The named models of these sizes have weights of 16 bits.
    line = ran.document["launch"]
    assert line.startswith("vllm serve TARGET --speculative-config ")
    assert '"model": "DRAFT"' in line
    assert "model" not in ran.document["settings"]
    [asked] = [w for w in ran.document["warnings"] if "quantised ones" in w]
    assert asked.endswith("name quantised ones for TARGET (in fp8) and DRAFT (in fp8)")
    assert 'the drafter in fp8 is another checkpoint than the recorded one: add "model"' in ran.said
    said = " ".join(ran.err.split())
    there = "h100, target in fp8, draft in fp8"
    assert f"{there}), at the costs of" in said.partition(" vllm: ")[0]
    assert f"composed for {there}: approximate" in said
    assert "scaled to" not in said
    assert "is then not padded" in said
    assert "of its time" not in said  # what other graphs cost there is not known


@pytest.mark.parametrize(
    ("weights", "target", "draft"),
    [
        ("bf16", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct"),
        ("target=awq-int4", "TARGET", "meta-llama/Llama-3.2-1B-Instruct"),
        ("draft=fp8", "meta-llama/Llama-3.1-8B", "DRAFT"),
    ],
)
def test_models_in_the_format_recorded_keep_their_names(
    weights: str, target: str, draft: str, run: Run
) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", "qwen-coder-cpu", "--resamples", "4", "--batch",
        "1", "--latency", "h100/llama-3.1-8b+llama-3.2-1b", "--weights", weights, "--json", "-",
    )  # fmt: skip
    line = ran.document["launch"]
    assert line.startswith(f"vllm serve {target} --speculative-config ")
    assert f'"model": "{draft}"' in line
    asked = [w for w in ran.document["warnings"] if "quantised ones" in w]
    assert len(asked) == (weights != "bf16")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("{}/latency.parquet", "--gpu", "h100,a100"), "expected one GPU: run the command once"),
        (("{}/latency.parquet", "--gpu", "h2o"), "did you mean 'h20"),
        (("{}/latency.parquet", "--weights", "awk-int4"), "did you mean 'awq-int4'"),
        (
            ("{}/latency.parquet", "--weights", "awk-int4"),
            "write fp8 (both models), or target=awq-int4,draft=bf16",
        ),
        (
            ("{}/latency.parquet", "--weights", "target=fp8,awq-int4"),
            "as in target=awq-int4,draft=bf16, or fp8 (both models)",
        ),
        (
            ("{}/latency.parquet", "--weights", "fp8=target"),
            "no model 'fp8': choose from target, ",
        ),
        (("{}/cpu.parquet", "--gpu", "h100"), "has no GPU data sheet"),
        (("const:target=1,draft=0.1", "--gpu", "h100"), "were assumed, not measured"),
        (("{}/suite.parquet",), "holds 2 tables, expected one: name"),
    ],
)
def test_settings_for_no_gpu_or_many_are_one_line(
    files: Path, more: tuple[str, ...], message: str, run: Run
) -> None:
    ran = command(run, files, "vllm", *more)
    assert message in ran.refusal


def test_a_report_for_another_gpu_says_so_and_leaves_out_the_measured_times(
    files: Path, tmp_path: Path, run: Run
) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    folder.mkdir()
    for name in ("trace.parquet", "latency.parquet"):
        (folder / name).write_bytes((files / name).read_bytes())
    common = ["report", "--run", folder, "--policy", "fixed", "--no-serve", "--resamples", "10"]
    for gpu, scaled in (("h200", False), ("h100", True)):
        run(*common, "--gpu", gpu, "--out", page).ok()
        assert ("if the extrapolation has its past errors" in page.read_text()) == scaled
        assert ("scaled, not measured: from h200 to h100" in page.read_text()) == scaled
