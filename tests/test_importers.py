"""Logs of servers: each format as its program writes it, counts and the curves they allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Run
from tests.test_import_specbench import row, write_rows
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.registry import AUTO, IMPORTERS, import_log, looks_like
from traces.importers.specbench import import_specbench
from traces.importers.totals import Totals
from traces.latency.table import LatencyTable

SUMMARY = {
    "id": "a", "choices": [{"finish_reason": "stop"}],
    "metrics": {"speculative_decoding": {
        "mean_acceptance_length": 1.2325581395348837, "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10, "num_draft_tokens": 129, "num_spec_tokens": 3,
    }},
}  # fmt: skip
"""The example in vLLM's documentation of per-request metrics."""
DETAILED = {
    "id": "a", "metrics": {"speculative_decoding": {
        "per_step_drafted": [3, 3], "per_step_accepted": [3, 1], "num_spec_tokens": 3,
    }},
}  # fmt: skip
SCRAPE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {0}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {1}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {2}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {3}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {4}.0
vllm:num_requests_running{{engine="0",model_name="m"}} 0.0
"""
SGLANG = {
    "text": "…", "meta_info": {
        "id": "x", "finish_reason": {"type": "length", "length": 100}, "prompt_tokens": 9,
        "completion_tokens": 103, "spec_verify_ct": 33, "spec_num_correct_drafts": 69,
        "spec_num_proposed_drafts": 231, "spec_accept_length": 3.09,
        "spec_correct_drafts_histogram": [4, 10, 7, 7, 3, 1, 0, 1],
    },
}  # fmt: skip
LLAMACPP = {
    "choices": [{"finish_reason": "stop"}], "timings": {
        "prompt_n": 12, "prompt_ms": 30.0, "predicted_n": 17, "predicted_ms": 400.0,
        "draft_n": 12, "draft_n_accepted": 9,
    },
}  # fmt: skip
EAGLE = {
    "question_id": 81,
    "choices": [{"index": 0, "idxs": [9, 4], "new_tokens": [25, 10], "wall_time": [1.0, 0.5]}],
}  # fmt: skip
BY_START = {
    "id": "q0", "prompt_token_ids": [1, 2], "generated_token_ids": [3, 4, 5],
    "acc_eagle": {"acc_len": [2, 1, 1]},
}  # fmt: skip
ROUNDS = "request,drafted,accepted\na,3,3\na,3,1\nb,2,0\n"
ITERATION = {
    "iter": 7, "iterLatencyMS": 20.5, "numActiveRequests": 2, "specDecodingStats": {
        "numDraftTokens": 6, "numAcceptedTokens": 3, "numRequestsWithDraftTokens": 2,
        "acceptanceLength": 2.5, "iterLatencyMS": 3.1, "draftOverhead": 0.15,
    },
}  # fmt: skip
"""An iteration's statistics as TensorRT-LLM's ``trtllm-serve`` answers ``/metrics``."""
AIPERF = {
    "metadata": {
        "session_num": 0, "x_request_id": "c0", "x_correlation_id": "k", "conversation_id": "s0",
        "turn_index": 0, "request_start_ns": 1, "request_ack_ns": 2, "request_end_ns": 3,
        "worker_id": "worker_0", "record_processor_id": "rp_0", "benchmark_phase": "profiling",
        "was_cancelled": False, "context_overflow_skip": False, "agent_depth": 0,
    },
    "metrics": {
        "input_sequence_length": {"value": 9, "unit": "tokens"},
        "usage_prompt_tokens": {"value": 9, "unit": "tokens"},
    },
    "spec_decode_acceptance": {
        "engine": "vllm", "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.6666666666666666, "acceptance_histogram": {"1": 1, "3": 1},
        "num_accepted_draft_tokens": 4, "num_draft_tokens": 6, "num_spec_steps": 2,
        "num_spec_tokens": 3, "completion_tokens": 7, "per_step_accepted": [3, 1],
        "per_step_drafted": [3, 3],
    },
}  # fmt: skip
"""A row that AIPerf 0.13 itself made (``MetricRecordInfo``) of one of vLLM's answers."""
LATENCY = "model,phase,batch,new_tokens,context,seconds\ntarget,forward,1,1,64,0.01\n"


def bench_record(**changed: Any) -> dict[str, Any]:
    """A test as ``llama-bench -o jsonl`` prints it (tools/llama-bench of llama.cpp, 2026)."""
    return {
        "build_commit": "8cf427ff", "build_number": 5163, "cpu_info": "a processor",
        "gpu_info": "NVIDIA GeForce RTX 4080", "backends": "CUDA",
        "model_filename": "models/target.gguf", "model_type": "qwen2 7B Q4_K - Medium",
        "model_size": 4677120000, "model_n_params": 7615616512, "n_batch": 2048, "n_ubatch": 512,
        "n_threads": 8, "cpu_strict": False, "type_k": "f16", "n_gpu_layers": -1,
        "flash_attn": -1, "n_prompt": 0, "n_gen": 0, "n_depth": 0,
        "test_time": "2025-04-24T11:58:50Z", "avg_ns": 1_000_000_000, "stddev_ns": 10_000_000,
        "avg_ts": 128.0, "stddev_ts": 1.0,
        "samples_ns": [980_000_000, 990_000_000, 1_000_000_000, 1_010_000_000, 1_020_000_000],
        "samples_ts": [], **changed,
    }  # fmt: skip


def written(folder: Path, content: Any, name: str = "log") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def example(name: str) -> Any:
    """A file's content of each format."""
    return {
        "specbench": row(1, [3, 1, 2]), "vllm": DETAILED, "sglang": SGLANG, "eagle": EAGLE,
        "prometheus": SCRAPE.format(10, 20, 9, 6, 3), "llamacpp": LLAMACPP, "rounds": ROUNDS,
        "by-start": BY_START, "tensorrt-llm": [ITERATION], "aiperf": AIPERF, "latency": LATENCY,
        "llama-bench": bench_record(n_gen=128),
    }[name]  # fmt: skip


def counts(name: str, *files: Path, **options: Any) -> Totals:
    found = import_log(name, files, Options(**options))
    assert isinstance(found, Totals)
    return found


TRACES = ("specbench", "vllm", "rounds", "by-start", "aiperf")
"""Formats that hold rounds in order; the others hold counts, or latencies."""
LATENCIES = ("latency", "llama-bench")


def kind_of(name: str) -> type:
    """What an import of this format makes."""
    return Trace if name in TRACES else LatencyTable if name in LATENCIES else Totals


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_every_format_knows_its_own_file_and_no_other(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, example(name))
    assert looks_like(file) == [name]
    found = import_log(AUTO, [file], Options())
    assert isinstance(found, kind_of(name))
    # A byte-order mark changes nothing.
    marked = tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    again = import_log(name, [marked], Options())
    assert type(again) is type(found)
    other = next(n for n in IMPORTERS if n != name)
    with pytest.raises(FileError, match=f"looks like {name}"):
        import_log(other, [file], Options())


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_damaged_files_are_one_line(name: str, tmp_path: Path, run: Run) -> None:
    for content in (b"", b"\xff\xfe\x00", b'{"question', b"[1]", b"[]", b"{}", b"a,b\n1,2\n"):
        (tmp_path / "bad").write_bytes(content)
        ran = run("import", name, tmp_path / "bad", "--out", tmp_path / "t.parquet")
        assert ran.code == 2, (name, content)
        assert ran.err.count("\n") == 1
        assert not (tmp_path / "t.parquet").exists()


def test_vllm_in_summary(tmp_path: Path) -> None:
    totals = counts("vllm", written(tmp_path, SUMMARY))
    assert (totals.rounds, totals.drafted, totals.accepted) == (43, 129, 10)
    assert totals.per_position == [4, 3, 3]
    assert totals.fixed_length
    assert totals.meta["kind"] == "vllm"
    assert not totals.tree
    assert totals.survival()[0].tolist() == pytest.approx([4 / 43, 3 / 43, 3 / 43])


def test_an_aborted_request_leaves_the_others(tmp_path: Path, run: Run) -> None:
    aborted = {"id": "b", "choices": [{"finish_reason": "abort"}], "metrics": DETAILED["metrics"]}
    failed = {"error": {"message": "too long", "code": 400}}
    several = {"id": "c", "metrics": {"speculative_decoding": None}}
    lines = "\n".join(json.dumps(r) for r in (DETAILED, aborted, failed, several))
    out = tmp_path / "t.parquet"
    ran = run("import", "vllm", written(tmp_path, lines), "--out", out)
    assert ran.code == 0, ran.err
    assert "1 requests" in ran.err
    assert ran.err.count("left out: ") == 3
    bad = row(2, [2, 2], [3, 1])
    bad["choices"][0]["turns"] = ["fine", "ERROR"]
    trace = import_specbench(write_rows(tmp_path / "s", [row(1, [2]), bad]))
    assert [r.id for r in trace.requests] == ["1/1", "2/1"]
    assert trace.meta["left_out"] == [
        f"{tmp_path / 's'} line 2, question 2, turn 2: failed",
    ]  # fmt: skip


def test_scrapes_before_and_after(tmp_path: Path) -> None:
    before = written(tmp_path, SCRAPE.format(10, 20, 9, 6, 3), "before")
    after = written(tmp_path, SCRAPE.format(110, 220, 129, 86, 43), "after")
    totals = counts("prometheus", before, after)
    assert (totals.rounds, totals.drafted, totals.accepted) == (100, 200, 120)
    assert totals.per_position == [80, 40]
    lo, hi = totals.block_efficiency()
    assert lo.tolist() == hi.tolist() == pytest.approx([1.8, 2.2])
    with pytest.raises(FileError, match="name the earlier scrape first"):
        counts("prometheus", after, before)
    with pytest.raises(FileError, match=r"begin with vllm:spec_decode_ or .*; found none"):
        counts("prometheus", written(tmp_path, "process_cpu_seconds_total 3.0\n"))
    wrong = written(tmp_path, SCRAPE.format(10, 20, 9, 3, 6))
    with pytest.raises(DraftsimError, match="rise, or exceed"):
        counts("prometheus", wrong)


def test_sglang_with_and_without_a_histogram(tmp_path: Path) -> None:
    totals = counts("sglang", written(tmp_path, [SGLANG, SGLANG]))
    assert (totals.rounds, totals.drafted, totals.accepted, totals.requests) == (66, 462, 138, 2)
    assert totals.longest == 7
    assert totals.per_position is not None
    assert sum(totals.per_position) == 138
    old = {"meta_info": {"completion_tokens": 41, "spec_verify_ct": 20}}
    totals = counts("sglang", written(tmp_path, old))
    assert (totals.rounds, totals.accepted, totals.per_position) == (20, 20, None)
    off = {"meta_info": {"completion_tokens": 41, "spec_verify_ct": 0}}
    with pytest.raises(FileError, match="plain decoding"):
        counts("sglang", written(tmp_path, off))
    bad = {"meta_info": {**SGLANG["meta_info"], "spec_verify_ct": 32}}  # type: ignore[dict-item]
    with pytest.raises(FileError, match="counts 33 rounds, spec_verify_ct 32"):
        counts("sglang", written(tmp_path, bad))


def test_llamacpp(tmp_path: Path) -> None:
    totals = counts("llamacpp", written(tmp_path, LLAMACPP))
    assert (totals.rounds, totals.drafted, totals.accepted) == (7, 12, 9)
    assert totals.meta["measured"]["wall_s"] == pytest.approx(0.4)
    plain = {"timings": {"predicted_n": 17, "predicted_ms": 400.0}}
    with pytest.raises(FileError, match="plain decoding"):
        counts("llamacpp", written(tmp_path, plain))


def test_a_tree_is_no_chain(tmp_path: Path, run: Run) -> None:
    totals = counts("eagle", written(tmp_path, EAGLE))
    assert (totals.rounds, totals.accepted, totals.tree) == (15, 20, True)
    assert totals.rows() == []
    medusa = {**row(1, [3, 1, 2]), "model_id": "vicuna-7b-v1.3-medusa-temperature-0.0"}
    with pytest.raises(FileError, match="names medusa, which verifies several branches"):
        import_specbench(written(tmp_path, medusa))
    eagle2 = {**row(1, [3, 1, 2]), "model_id": "vicuna-7b-v1.3-eagle2-float16"}
    with pytest.raises(FileError, match="names eagle, which"):
        import_specbench(written(tmp_path, eagle2))
    ran = run("import", "eagle", written(tmp_path, EAGLE), "--json", "-")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["results"] == []
    assert document["counts"]["tree"] is True


def test_a_files_suffix_says_what_it_is(tmp_path: Path, run: Run) -> None:
    for form, log, out, what in (
        ("eagle", EAGLE, "t.parquet", "eagle made counts, and no trace: name a .json file"),
        ("rounds", ROUNDS, "t.csv", "this log makes a trace, a Parquet file: name a .parquet file"),
    ):
        refused = run("import", form, written(tmp_path, log), "--out", tmp_path / out)
        assert refused.code == 2
        assert what in refused.err
        assert refused.err.count("\n") == 1
        assert not (tmp_path / out).exists()
    wrote = run("import", "eagle", written(tmp_path, EAGLE), "--out", tmp_path / "t.json")
    assert (wrote.code, json.loads((tmp_path / "t.json").read_text())["command"]) == (0, "import")


def test_public_eagle_log(shared_data: Path) -> None:
    folder = shared_data / "eagle_logs"
    plain = folder / "llama-2-chat-70b-base.jsonl"
    totals = counts("eagle", folder / "llama-2-chat-70b-ea.jsonl", baseline=plain)
    # The EAGLE paper (Table 1) gives 3.01x for this model and benchmark.
    assert totals.meta["baseline"]["speedup"] == pytest.approx(3.01, rel=0.05)
    assert totals.meta["measured"]["per_round"] > 3
    with pytest.raises(FileError, match="plain decoding"):
        counts("eagle", plain)


def test_rounds_as_csv(tmp_path: Path) -> None:
    trace = import_log("rounds", [written(tmp_path, ROUNDS)], Options())
    assert isinstance(trace, Trace)
    assert trace.columns["match"].tolist() == [-1, 1, 1, 1, -1, 1, 0, -1, 0]
    for content, message in (
        ("drafted,accepted\n1,2\n", "line 2: accepted=2 exceeds drafted=1"),
        ("drafted,accepted\n1,x\n", "line 2: accepted is 'x'"),
        ("drafted,taken\n1,1\n", r"lacks the column\(s\) accepted"),
        ("drafted,accepted,more\n1,1,1\n", "unknown column"),
        ("drafted,accepted\n0,0\n", "plain decoding"),
        ("drafted,accepted\n", "holds no rounds"),
    ):
        with pytest.raises(FileError, match=message):
            import_log("rounds", [written(tmp_path, content)], Options())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_interval_of_curves_holds_the_true_one(accepted: list[int]) -> None:
    longest, rounds = 5, len(accepted)
    per_position = [sum(a >= k for a in accepted) for k in range(1, longest + 1)]
    known = Totals(rounds, longest * rounds, sum(accepted), longest, per_position)
    sums = Totals(rounds, longest * rounds, sum(accepted), longest)
    for mine, theirs in (
        (known.survival(), sums.survival()),
        (known.block_efficiency(), sums.block_efficiency()),
    ):
        assert np.array_equal(mine[0], mine[1])
        assert (theirs[0] <= mine[0] + 1e-12).all()
        assert (mine[0] <= theirs[1] + 1e-12).all()
    assert sums.block_efficiency()[0][-1] == pytest.approx(1 + sums.mean_accepted)
    assert sums.block_efficiency()[1][-1] == pytest.approx(1 + sums.mean_accepted)


def test_options_of_another_format_are_refused(tmp_path: Path, run: Run) -> None:
    file = written(tmp_path, DETAILED)
    ran = run("import", "vllm", file, "--out", tmp_path / "t", "--draft-lengths", "fixed:3")
    assert ran.code == 2
    assert "--draft-lengths says nothing about a log of vllm" in ran.err
    ran = run("import", "vlm", file, "--out", tmp_path / "t")
    assert "did you mean 'vllm'" in ran.err
    assert run("import", "vllm", file).code == 2
