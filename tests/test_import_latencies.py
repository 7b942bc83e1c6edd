"""Latencies of other programs: the cells of a table, and what `simulate` makes of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ran, Run
from tests.logs import bench_record, written
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.registry import import_log
from traces.importers.timings import NORMAL_IQR
from traces.latency.table import LatencyTable
from traces.store.files import write_trace
from traces.store.recordings import find_latency

MARKDOWN = """| model                          |       size |     params | backend    | ngl |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | --------------: | -------------------: |
| qwen2 7B Q4_K - Medium         |   4.36 GiB |     7.62 B | CUDA       |  -1 |           pp512 |      7340.20 ± 23.45 |
| qwen2 7B Q4_K - Medium         |   4.36 GiB |     7.62 B | CUDA       |  -1 |           tg128 |        120.60 ± 0.59 |
| qwen2 7B Q4_K - Medium         |   4.36 GiB |     7.62 B | CUDA       |  -1 |    pp512 @ d512 |      6425.91 ± 18.88 |
| qwen2 7B Q4_K - Medium         |   4.36 GiB |     7.62 B | CUDA       |  -1 |    tg128 @ d512 |        116.71 ± 0.60 |

build: 8cf427ff (5163)
"""  # noqa: E501
"""The example "Different prefilled context" of llama-bench's own page."""
CSV = """build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,model_n_params,n_batch,n_ubatch,n_threads,type_k,type_v,n_gpu_layers,flash_attn,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts
"8cf427ff","5163","AMD Ryzen 7 7800X3D 8-Core Processor","NVIDIA GeForce RTX 4080","CUDA","models/Qwen2.5-7B-Instruct-Q4_K_M.gguf","qwen2 7B Q4_K - Medium","4677120000","7615616512","2048","512","8","f16","f16","-1","-1","512","0","0","2025-04-24T11:57:09Z","70285660","982040","7285.676949","100.064434"
"8cf427ff","5163","AMD Ryzen 7 7800X3D 8-Core Processor","NVIDIA GeForce RTX 4080","CUDA","models/Qwen2.5-7B-Instruct-Q4_K_M.gguf","qwen2 7B Q4_K - Medium","4677120000","7615616512","2048","512","8","f16","f16","-1","-1","0","128","0","2025-04-24T11:57:10Z","1067431600","3834831","119.915244","0.430617"
"""  # noqa: E501
"""The example of ``-o csv`` on the same page, some columns of settings left out."""
DRAFT = {"model_filename": "models/draft.gguf", "model_size": 400_000_000}


def table(content: Any, folder: Path, name: str = "llama-bench", **options: Any) -> LatencyTable:
    found = import_log(name, [written(folder, content)], Options(**options))
    assert isinstance(found, LatencyTable)
    return found


def simulated(run: Run, latency: str | Path, folder: Path) -> Ran:
    """A short trace under two drafts a round, at these latencies."""
    file = folder / "trace.parquet"
    write_trace(synthetic_trace(0.7, requests=4, tokens=40, max_gamma=8, seed=1), file)
    return run(
        "simulate", "--trace", file, "--latency", latency, "--policy", "fixed:gamma=2", "--json",
        "-",
    )  # fmt: skip


def cells(found: LatencyTable) -> list[tuple[Any, ...]]:
    names = ["model", "phase", "batch", "new_tokens", "context"]
    return list(found.cells[names].itertuples(index=False, name=None))


def test_prompts_of_one_measured_length_take_longer_together(tmp_path: Path) -> None:
    """llama-bench times 512 tokens alone by default: 2,048 took no longer, nor did four of 512."""
    path = tmp_path / "latencies.csv"
    path.write_text(
        "model,phase,batch,new_tokens,context,seconds\ntarget,forward,1,1,0,0.01\n"
        "target,prefill,1,512,0,0.1\n"
    )
    found = import_log("latency", [path], Options())
    assert isinstance(found, LatencyTable)
    for batch, tokens in ((1, 2048), (4, 512)):
        seconds = found.seconds("target", "prefill", batch=batch, new_tokens=tokens).item()
        assert 0.35 < seconds < 0.4
    assert found.seconds("target", "prefill", new_tokens=512).item() == pytest.approx(0.1)


def test_a_round_of_many_requests_is_no_prompt(tmp_path: Path) -> None:
    """64 requests that decode together have 64 tokens: the host's round of one took an eighth."""
    path = tmp_path / "latencies.csv"
    path.write_text(
        "model,phase,batch,new_tokens,context,seconds\ntarget,forward,64,1,0,0.02\n"
        "target,forward,1,1,0,0.01\ntarget,host_round,64,1,0,0.002\n"
    )
    found = import_log("latency", [path], Options())
    assert isinstance(found, LatencyTable)
    for batch in (1, 64, 128):
        seconds = found.seconds("target", "host_round", batch=batch).item()
        assert seconds == pytest.approx(0.002)


def test_output_of_llama_bench_is_read_from_a_pipe() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        json.dump([bench_record(n_gen=128)], file)
    found = import_log("llama-bench", [Path(f"/dev/fd/{reading}")], Options())
    os.close(reading)
    assert isinstance(found, LatencyTable)
    assert cells(found) == [("target", "forward", 1, 1, 64)]


def test_the_page_of_llama_bench(tmp_path: Path) -> None:
    found = table(MARKDOWN, tmp_path)
    assert cells(found) == [
        ("target", "prefill", 1, 512, 0),
        ("target", "forward", 1, 1, 64),
        ("target", "forward", 1, 1, 576),
    ]
    assert found.cells["median_s"].tolist() == pytest.approx([512 / 7340.20, 1 / 120.6, 1 / 116.71])
    assert found.cells["spread_s"][1] == pytest.approx(NORMAL_IQR * 0.59 / 120.6**2)
    assert found.meta["left_out"] == [
        f"{tmp_path / 'log'} line 5: 512 tokens at depth 512 are neither prompt nor verification"
    ]
    found = table(CSV, tmp_path)
    assert found.cells["median_s"].tolist() == pytest.approx([0.07028566, 1.0674316 / 128])
    assert found.meta["device"] == "NVIDIA GeForce RTX 4080"


def test_a_target_and_its_draft(tmp_path: Path, run: Run) -> None:
    widths = (1, 2, 3, 5, 9)
    tests = [
        *(bench_record(n_prompt=p, n_depth=512, avg_ns=10_000_000 + 100_000 * p) for p in widths),
        bench_record(n_gen=64, n_depth=1024),
        bench_record(n_prompt=512),
        bench_record(n_gen=64, n_depth=512, avg_ns=64_000_000, **DRAFT),
        bench_record(n_prompt=512, n_gen=32),
    ]
    for content in (tests, "\n".join(map(json.dumps, tests))):
        found = table(content, tmp_path)
        assert found.meta["models"] == {
            "target": "models/target.gguf",
            "draft": "models/draft.gguf",
        }
        passes = found.seconds("target", "forward", new_tokens=widths, context=512)
        assert passes.tolist() == pytest.approx([0.01 + 0.0001 * p for p in widths])
        assert found.seconds("draft", "forward", context=544) == pytest.approx(0.001)
        assert found.seconds("target", "prefill", new_tokens=512) == pytest.approx(1.0)
        assert len(found.meta["left_out"]) == 1
        assert found.cells["repeats"].tolist() == [5] * 8
        assert found.cells["spread_s"][0] == pytest.approx(0.01)
    out = tmp_path / "latency.parquet"
    ran = run("import", "llama-bench", tmp_path / "log", "--out", out).ok()
    assert "draft: models/draft.gguf" in ran.err
    assert "no host time" in ran.err
    assert find_latency(str(out)).meta["kind"] == "llama-bench"
    ran = simulated(run, out, tmp_path)
    assert ran.code == 0, ran.err
    by = {r["policy"]: r for r in ran.rows}
    assert by["fixed:gamma=2"]["wall_s"] > 0


def test_what_verification_costs_is_not_guessed(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "latency.parquet"
    tests = [bench_record(n_gen=128), bench_record(n_prompt=512), bench_record(n_gen=128, **DRAFT)]
    ran = run("import", "auto", written(tmp_path, tests), "--out", out).ok()
    assert "what verification costs is not known" in ran.err
    ran = simulated(run, out, tmp_path)
    assert "know the target's passes over 1 token(s) alone" in ran.refusal


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([bench_record(n_gen=8), bench_record(n_gen=16, n_threads=4)], "n_threads 8 and 4"),
        ([bench_record(n_gen=8), bench_record(n_gen=8)], "tells the cell .* twice"),
        ([bench_record(n_gen=8, model_filename=str(i)) for i in range(3)], "holds 3 models"),
        ([bench_record(n_prompt=8, n_gen=8)], "are no pass"),
        ([bench_record(n_gen=8, avg_ns=0)], "are no test"),
        ([bench_record(n_gen=8, avg_ns=None)], "avg_ns is None, expected a number"),
        (MARKDOWN.replace("tg128 @", "tg128 at"), "test is 'tg128 at d512'"),
        (CSV.partition("\n")[0], "holds no test"),
    ],
)
def test_runs_that_make_no_table(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=message):
        table(content, tmp_path)


def test_latencies_as_csv(tmp_path: Path, run: Run) -> None:
    bundled = find_latency("bundled")
    text = bundled.cells.rename(columns={"median_s": "seconds"}).to_csv(index=False)
    found = table(text, tmp_path, "latency", device="my server")
    assert found.cells.equals(bundled.cells)
    assert found.meta["device"] == "my server"
    out = tmp_path / "latency.parquet"
    assert run("import", "latency", tmp_path / "log", "--out", out).code == 0
    rows = []
    for latency in ("bundled", out):
        ran = simulated(run, latency, tmp_path)
        assert ran.code == 0, ran.err
        rows.append([r["wall_s"] for r in ran.rows])
    assert rows[0] == rows[1]
    short = "model,new_tokens,context,seconds\ntarget,1,0,0.01\ntarget,5,0,0.012\ndraft,1,0,0.001\n"
    plain = table(short, tmp_path, "latency")
    assert plain.cells["phase"].tolist() == ["forward"] * 3
    assert run("import", "latency", tmp_path / "log").code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model,new_tokens,seconds\n", r"lacks the column\(s\) context"),
        ("model,new_tokens,context,seconds,mood\n", "unknown column"),
        ("model,new_tokens,context,seconds\n", "holds no latencies"),
        ("model,new_tokens,context,seconds\ntarget,1,0\n", "line 2: has not as many values"),
        ("model,new_tokens,context,seconds\ntarget,x,0,1\n", "new_tokens is 'x'"),
        ("model,new_tokens,context,seconds\ntarget,1,0,\n", "seconds is empty"),
        ("model,new_tokens,context,seconds\ntarget,1,0,-1\n", "seconds is .-1., expected"),
        (
            "model,new_tokens,context,seconds\ntarget,1,0,0.0\n",
            "line 2: seconds is '0.0', expected more than 0 for a pass of the target",
        ),
        ("model,new_tokens,context,seconds\ntarget,1.5,0,1\n", "line 2: new_tokens is '1.5'"),
        ("model,new_tokens,context,seconds\ntarget,1,0,1\ntarget,1,0,1\n", "repeats the cell"),
        (
            "model,phase,new_tokens,context,seconds\ntarget,walk,1,0,1\n",
            r"unknown phase\(s\) walk",
        ),
    ],
)
def test_tables_that_are_none(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DraftsimError, match=message):
        table(content, tmp_path, "latency")
