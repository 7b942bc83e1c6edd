"""Qwen's speed benchmarks: one stream, 2048 tokens from a prompt of one, so 1024 on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.hardware.evidence.runs import Run, Study

_SOURCE_25 = (
    "github.com/QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst (Apache-2.0), input "
    "length 1, one GPU: A100 80GB"
)
_SOURCE_3 = (
    "github.com/QwenLM/Qwen3, docs/source/getting_started/speed_benchmark.md (Apache-2.0), input "
    "length 1, one GPU: H20 96GB"
)
_LIBRARIES_25 = (
    ("gptq-int8", "AutoGPTQ 0.6.0"), ("gptq-int4", "AutoGPTQ 0.7.1"), ("awq-int4", "AutoAWQ 0.2.6"),
)  # fmt: skip
_LIBRARIES_3 = (
    ("fp8", "transformers 4.51.3"), ("gptq-int8", "GPTQModel 2.2.0"),
    ("awq-int4", "AutoAWQ 0.2.9"),
)  # fmt: skip
_ENGINE_25 = tuple((name, "vLLM 0.6.3") for name in ("gptq-int8", "gptq-int4", "awq-int4"))
_ENGINE_3 = tuple((name, "SGLang 0.4.6") for name in ("gptq-int8", "awq-int4"))
"""As both pages name them; the second also gives AutoAWQ's runs an environment of their own."""
_FOUR = ("bf16", "gptq-int8", "gptq-int4", "awq-int4")

_TRANSFORMERS_25: Mapping[str, Sequence[float]] = {
    "0.5B": (47.40, 35.17, 50.60, 37.09),
    "1.5B": (39.68, 32.62, 43.33, 31.70),
    "3B": (30.80, 25.69, 35.21, 25.29),
    "7B": (40.38, 31.55, 43.10, 32.03),
    "14B": (24.74, 18.84, 25.89, 19.23),
    "32B": (17.54, 14.52, 19.20, 14.60),
}
_VLLM_25: Mapping[str, Sequence[float]] = {
    "0.5B": (311.55, 257.07, 260.93, 261.95),
    "1.5B": (183.33, 201.67, 217.03, 213.74),
    "3B": (127.61, 150.02, 168.20, 165.50),
    "7B": (84.28, 122.01, 154.05, 148.10),
    "14B": (46.30, 70.40, 98.02, 92.66),
    "32B": (22.13, 37.57, 55.83, 51.92),
}
"""The 32B in bf16 ran without graphs: bound by memory all the same."""

_SGLANG_3: Mapping[str, Mapping[str, float]] = {
    "0.6B": {"bf16": 414.17, "fp8": 458.03, "gptq-int8": 344.92},
    "1.7B": {"bf16": 227.80, "fp8": 333.90, "gptq-int8": 257.40},
    "4B": {"bf16": 133.13, "fp8": 200.61, "awq-int4": 199.71},
    "8B": {"bf16": 81.73, "fp8": 150.25, "awq-int4": 144.11},
    "14B": {"bf16": 47.10, "fp8": 97.11, "awq-int4": 96.49},
    "32B": {"bf16": 20.72, "fp8": 46.17, "awq-int4": 47.67},
}
_TRANSFORMERS_3: Mapping[str, Mapping[str, float]] = {
    "0.6B": {"bf16": 58.57, "fp8": 24.60, "gptq-int8": 26.56},
    "1.7B": {"bf16": 59.83, "fp8": 23.83, "gptq-int8": 28.06},
    "4B": {"bf16": 45.94, "fp8": 17.33, "awq-int4": 51.57},
    "8B": {"bf16": 45.32, "fp8": 15.46, "awq-int4": 51.33},
    "14B": {"bf16": 40.66, "fp8": 13.02, "awq-int4": 44.67},
    "32B": {"bf16": 26.24, "fp8": 7.37, "awq-int4": 41.8},
}


def _four(table: Mapping[str, Sequence[float]]) -> tuple[Run, ...]:
    return tuple(
        Run(f"Qwen/Qwen2.5-{size}", "a100-80gb", name, speed)
        for size, speeds in table.items()
        for name, speed in zip(_FOUR, speeds, strict=True)
    )


def _named(table: Mapping[str, Mapping[str, float]]) -> tuple[Run, ...]:
    return tuple(
        Run(f"Qwen/Qwen3-{size}", "h20", name, speed)
        for size, speeds in table.items() for name, speed in speeds.items()
    )  # fmt: skip


QWEN = (
    Study(
        "Qwen2.5, transformers on A100",
        _SOURCE_25,
        "transformers",
        "eager",
        _four(_TRANSFORMERS_25),
        _LIBRARIES_25,
    ),
    Study(
        "Qwen3, transformers on H20",
        _SOURCE_3,
        "transformers",
        "eager",
        _named(_TRANSFORMERS_3),
        _LIBRARIES_3,
    ),
    Study("Qwen2.5, vLLM on A100", _SOURCE_25, "vLLM", "graph", _four(_VLLM_25), _ENGINE_25),
    Study("Qwen3, SGLang on H20", _SOURCE_3, "SGLang", "graph", _named(_SGLANG_3), _ENGINE_3),
)
