"""The rules each engine holds its settings file to, and what breaks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.tune.formats import (
    CONTEXT_END,
    SettingsError,
    check_huggingface,
    check_settings,
    check_sglang,
    check_vllm,
    fixed_steps,
)
from simulator.tune.settings import Tuned, write_settings
from traces.errors import FileError


def vllm(table: Any, most: Any = 5) -> dict[str, Any]:
    return {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": table}


GOOD_VLLM = [
    [[1, 64, 3], [65, 128, 1], [129, 512, 0]],  # the example of vLLM's documentation
    [[1, 1, 5], [4, 8, 2]],  # a gap inherits
    [[1, 4, 1, 99, 3], [1, 4, 100, CONTEXT_END, 5], [5, 9, 1, 99, 0], [5, 9, 100, CONTEXT_END, 1]],
]
BAD_VLLM = [
    ([], "expected a list of rows"),
    (None, "expected a list of rows"),
    ([[2, 4, 3]], "must start at batch size 1"),
    ([[1, 4, 3], [4, 8, 1]], "overlaps or precedes the row before"),
    ([[1, 4, 3], [3, 3, 1]], "overlaps"),
    ([[4, 1, 3]], "is empty"),
    ([[0, 4, 3]], "whole numbers, 1 to"),
    ([[1, 4, -1]], "K must be 0 or more"),
    ([[1, 4, True]], "K must be"),
    ([[1, 4, 2.5]], "K must be"),
    ([[1, 4]], r"expected \[lo, hi, K\]"),
    ([[1, 4, 1, 3]], r"expected \[lo, hi, K\]"),
    ([[1, 4, 3], [5, 8, 1, 9, 2]], "^num_speculative_tokens_per_batch_size rows must all be"),
    ([[1, 4, 0, 9, 2]], "whole numbers, 1 to"),
    ([[1, 4, 2, 9, 2]], "first context range must start at 1"),
    ([[1, 4, 9, 2, 2]], "are empty"),
    ([[1, 4, 1, 9, 2], [1, 4, 11, 20, 2]], "does not continue the context range 1..9"),
    ([[1, 4, 1, 9, 2], [5, 8, 1, 8, 2]], "needs the same contexts"),
    ([[1, 4, 1, 9, 2], [1, 4, 10, 20, 2], [5, 8, 1, 9, 2]], "needs the same contexts"),
    ([[1, 4, 2], [1, 4, 2]], "overlaps"),
]


@pytest.mark.parametrize("table", GOOD_VLLM)
def test_tables_vllm_takes(table: Any) -> None:
    check_vllm(vllm(table))


def test_a_table_is_sorted_and_cut_as_by_vllm() -> None:
    """``build_dynamic_sd_schedule_lookup`` of vLLM 0.32, v1/spec_decode/dynamic/utils.py."""
    assert check_vllm(vllm([[5, 64, 1], [1, 4, 9]])).table == [[1, 4, 5], [5, 64, 1]]


@pytest.mark.parametrize(("table", "message"), BAD_VLLM)
def test_tables_vllm_refuses(table: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_vllm(vllm(table))


@pytest.mark.parametrize("most", [0, None, "3", True])
def test_vllm_needs_a_window(most: Any) -> None:
    with pytest.raises(SettingsError, match=r"num_speculative_tokens is .*whole number, 1 to"):
        check_vllm(vllm([[1, 4, 0]], most))


SGLANG_DEFAULT = {
    "1": {"candidate_steps": [1, 3, 5, 7], "up_hysteresis": 0.0, "down_hysteresis": -0.25},
    "8": {"candidate_steps": [0, 1, 3]},
    "64": {"candidate_steps": [0], "ceiling_coeff": 0},
}


@pytest.mark.parametrize(
    "document",
    [SGLANG_DEFAULT, {"strategy": "ema", "ema_alpha": 0.2, "1": {"candidate_steps": [1]}}],
)
def test_configurations_sglang_takes(document: dict[str, Any]) -> None:
    check_sglang(document)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "no slot such as"),
        ({"ema_alpha": 0.2}, "no slot such as"),
        ({"8": {"candidate_steps": [1]}}, "slot for batch size 1"),
        ({"1": [1, 3]}, "is no object with candidate_steps"),
        ({"1": {}}, "candidate_steps is None"),
        ({"1": {"candidate_steps": []}}, "expected a list"),
        ({"1": {"candidate_steps": [1, -1]}}, "expected >= 0"),
        ({"1": {"candidate_steps": [1.0]}}, "expected an integer"),
        ({"1": {"candidate_steps": [3, 1]}}, "rise, each once"),
        ({"1": {"candidate_steps": [1, 1]}}, "rise, each once"),
        ({"1": {"candidate_steps": [1], "up": 1}}, "reads no setting 'up'"),
        ({"1": {"candidate_steps": [1]}, "up": 1}, "neither a batch size nor a setting"),
        ({"1": {"candidate_steps": [1], "ema_alpha": 2}}, "expected between 0 and 1"),
        ({"1": {"candidate_steps": [1], "ceiling_coeff": -1}}, "expected >= 0"),
        ({"1": {"candidate_steps": [1], "up_hysteresis": "0"}}, "expected a finite number"),
        (
            {"1": {"candidate_steps": [1]}, "update_interval": 0},
            "update_interval is 0, expected >= 1",
        ),
        ({"1": {"candidate_steps": [1]}, "strategy": "throughput_aware"}, "expected 'ema'"),
        ({"1": {"candidate_steps": [1]}, "candidate_steps": [1]}, "neither a batch size"),
        ({"speculative-num-steps": 0}, "whole number, 1 to"),
        ({"speculative-num-steps": 3}, "speculative-eagle-topk is None: expected 1"),
        ({**fixed_steps(3), "speculative-num-draft-tokens": 3}, "expected 4, for one chain of 3"),
    ],
)
def test_configurations_sglang_refuses(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_sglang(document)


def huggingface(**other: Any) -> dict[str, Any]:
    return {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
        **other,
    }


def test_settings_transformers_takes() -> None:
    check_huggingface(huggingface())
    check_huggingface(huggingface(num_assistant_tokens_schedule="heuristic_transient"))
    check_huggingface(huggingface(assistant_confidence_threshold=0))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_assistant_tokens": 0}, "whole number, 1 to"),
        ({"num_assistant_tokens": 2.0}, "whole number, 1 to"),
        ({"num_assistant_tokens_schedule": "linear"}, "expected one of constant"),
        ({"assistant_confidence_threshold": 1.2}, "^assistant_confidence_threshold is 1.2"),
        ({"assistant_confidence_threshold": "0.4"}, "expected a finite number"),
        ({"top_k": 4}, "expected num_assistant_tokens"),
    ],
)
def test_settings_transformers_would_misread(other: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_huggingface(huggingface(**other))


def test_transformers_reads_the_keys() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra `profile`")
    config = transformers.GenerationConfig(**huggingface())
    assert {k: getattr(config, k) for k in huggingface()} == huggingface()


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(SettingsError, match="engine is 'tgi': expected one of vllm, sglang, hf"):
        check_settings("tgi", {})


def tuned(table: Any) -> Tuned:
    return Tuned("vllm", vllm(table), [])


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "speculative.json"
    for table in GOOD_VLLM:
        write_settings(tuned(table), path)
        assert json.loads(path.read_text()) == vllm(table)
    assert [p.name for p in tmp_path.iterdir()] == ["speculative.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_an_engine_would_refuse_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "speculative.json"
    path.write_text("kept")
    with pytest.raises(SettingsError):
        tuned([[2, 3, 1]])
    settings = tuned([[1, 3, 1]])
    settings.document["num_speculative_tokens_per_batch_size"][0][0] = 2
    with pytest.raises(SettingsError):
        write_settings(settings, path)
    assert path.read_text() == "kept"
    with pytest.raises(FileError, match="cannot be written"):
        write_settings(tuned([[1, 3, 1]]), tmp_path / "absent" / "file.json")
