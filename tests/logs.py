"""Logs as the programs write them, one of every format that can be imported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from traces.acceptance.trace import Trace
from traces.importers.base import Options
from traces.importers.registry import IMPORTERS, import_log
from traces.importers.totals import Totals

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
LMSTUDIO = {
    "object": "chat.completion", "usage": {
        "prompt_tokens": 66, "completion_tokens": 60, "total_draft_tokens_count": 100,
        "accepted_draft_tokens_count": 34, "rejected_draft_tokens_count": 66,
    },
    "stats": {"tokens_per_second": 20.0, "time_to_first_token": 1.2, "stop_reason": "eosFound"},
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


def row(question: int, *turns: list[int], **extra: Any) -> dict[str, Any]:
    """A row of Spec-Bench's result file whose turns had rounds of these lengths."""
    tokens = [sum(t) for t in turns]
    choice = {
        "index": 0, "turns": ["…"] * len(turns), "decoding_steps": [len(t) for t in turns],
        "new_tokens": tokens, "wall_time": [0.01 * n for n in tokens],
        "accept_lengths": [v for t in turns for v in t], **extra,
    }  # fmt: skip
    return {"question_id": question, "category": f"c{question}", "choices": [choice]}


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vllm_counters(path: Path, drafts: int, accepted: Sequence[int], positions: bool = True) -> Path:
    """Write a vLLM server's counters after `drafts` rounds, `accepted` of them by position."""
    counts = {
        "drafts": drafts, "draft_tokens": len(accepted) * drafts, "accepted_tokens": sum(accepted),
    }  # fmt: skip
    lines = [f"vllm:spec_decode_num_{name}_total {count}.0" for name, count in counts.items()]
    if positions:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{i}"}} {count}.0' for i, count in enumerate(accepted)]
    path.write_text("\n".join(lines) + "\n")
    return path


def traced(name: str, *files: Path, **options: Any) -> Trace:
    """Import a trace."""
    found = IMPORTERS[name].read(files, Options(**options))
    assert isinstance(found, Trace)
    return found


import_specbench, import_vllm = partial(traced, "specbench"), partial(traced, "vllm")


def counts(name: str, *files: Path, **options: Any) -> Totals:
    """Import counts."""
    found = import_log(name, files, Options(**options))
    assert isinstance(found, Totals)
    return found


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


VIDUR = "time_stats.all_reduce.median,time_stats.all_reduce.min,num_workers,size,devices_per_node\n"
VIDUR += "0.043,0.010,2,2048,2\n"
PROFILE = {
    "schema_version": "1.0", "measured": True, "method": "eagle3", "num_speculative_tokens": 2,
    "marginal_accept_rates": [0.8, 0.6], "conditional_accept_rates": [0.8, 0.75],
    "mean_accept_length": 2.4, "acceptance_length_histogram": {"1": 2, "2": 2, "3": 6},
}  # fmt: skip
DENSE = "layer,tokens,time_us\nqkv_proj,1,54.9\n"


def example(name: str) -> Any:
    """A file's content of each format."""
    return {
        "specbench": row(1, [3, 1, 2]), "vllm": DETAILED, "sglang": SGLANG, "eagle": EAGLE,
        "prometheus": SCRAPE.format(10, 20, 9, 6, 3), "llamacpp": LLAMACPP, "rounds": ROUNDS,
        "lmstudio": LMSTUDIO,
        "by-start": BY_START, "tensorrt-llm": [ITERATION], "aiperf": AIPERF, "latency": LATENCY,
        "llama-bench": bench_record(n_gen=128), "vidur": VIDUR, "llmservingsim": DENSE,
        "speculation-profile": PROFILE,
    }[name]  # fmt: skip
