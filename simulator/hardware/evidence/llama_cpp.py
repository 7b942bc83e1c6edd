"""llama.cpp and gpt-fast on one GPU, by others."""

from __future__ import annotations

from simulator.hardware.evidence.runs import Run, Study

_EIGHT, _SEVEN = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b"

_BENCHMARKS = (
    "github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README (MIT), tables of May 2024 "
    "(Llama 3) and December 2023 (Llama 2), llama-bench"
)
_TG: tuple[tuple[str, str, int, float], ...] = (
    ("rtx-3090", "q4_k_m", 256, 115.42), ("rtx-3090", "q4_k_m", 4096, 87.49),
    ("rtx-3090", "bf16", 256, 47.40), ("rtx-3090", "bf16", 4096, 42.62),
    ("rtx-4090", "q4_k_m", 256, 130.58), ("rtx-4090", "q4_k_m", 4096, 110.66),
    ("rtx-4090", "bf16", 256, 54.84), ("rtx-4090", "bf16", 4096, 50.88),
)  # fmt: skip
"""Llama 3 8B generating 512 and 8192 tokens, F16 as bf16: half of them in the cache."""

_LLAMA2: tuple[tuple[str, str, float], ...] = (
    ("rtx-3090", "q4_0", 120.6), ("rtx-3090", "bf16", 51.85),
    ("rtx-4090", "q4_0", 149.37), ("rtx-4090", "bf16", 60.78),
    ("a100-80gb", "q4_0", 136.24), ("a100-80gb", "bf16", 73.83),
)  # fmt: skip
"""Llama 2 7B, 1024 tokens."""

_WIDTHS = (
    "github.com/ggml-org/llama.cpp pull requests 14262, 15131, 15802, descriptions (MIT): "
    "llama-bench, prompts of 512 in passes of 1, 2, ... tokens"
)
_ROWS_3090 = (156.56, 279.89, 390.96, 470.48, 509.70, 541.57, 559.30, 583.77)
"""Llama 3 8B Q4_0 on an RTX 3090, 1 to 8 tokens a pass (15802)."""
_ROWS_4090 = {10: 1216.63, 11: 1340.94, 12: 1460.17, 13: 1564.21, 14: 1684.51, 15: 1785.59,
              16: 1930.50}  # fmt: skip
"""The same on an RTX 4090, 10 to 16 tokens a pass (15131)."""
_PLAIN_3090 = {1: 58.27, 2: 109.70, 8: 423.63, 9: 450.76, 10: 492.08, 11: 539.89, 12: 585.90,
               13: 625.12, 14: 671.95, 15: 706.71, 16: 764.17}  # fmt: skip
"""Llama 3 8B in 16 bits on an RTX 3090 (1 and 2: 14262; from 8: 15131)."""

_REFACTORED = (
    "github.com/ggml-org/llama.cpp pull request 24216, description (MIT): llama-bench, prompts of "
    "512 in passes of 1, 2, ... tokens, a Llama of 1B in 16 bits; of TinyLlama's shape, since any "
    "larger one would be read faster than the memory is"
)
_SMALL_3090 = {1: 379.20, 2: 682.74, 4: 1349.54, 8: 2602.11, 16: 4588.29, 32: 7671.32,
               64: 12340.13}  # fmt: skip

_GPTFAST = (
    "github.com/pytorch-labs/gpt-fast, README (BSD-3): torch.compile, A100 80GB limited to 330 W"
)

LLAMA_CPP = (
    Study("llama.cpp, several GPUs", _BENCHMARKS, "llama.cpp", "graph", (
        *(Run(_EIGHT, device, name, speed, 1, context) for device, name, context, speed in _TG),
        *(Run(_SEVEN, device, name, speed, 1, 512) for device, name, speed in _LLAMA2),
    )),
    Study("llama.cpp, tokens a pass", _WIDTHS, "llama.cpp", "graph", (
        *(Run(_EIGHT, "rtx-3090", "q4_0", speed, width, 256)
          for width, speed in enumerate(_ROWS_3090, 1)),
        *(Run(_EIGHT, "rtx-4090", "q4_0", speed, width, 256)
          for width, speed in _ROWS_4090.items()),
        *(Run(_EIGHT, "rtx-3090", "bf16", speed, width, 256)
          for width, speed in _PLAIN_3090.items()),
    )),
    Study("llama.cpp, tokens a pass of 1B", _REFACTORED, "llama.cpp", "graph", tuple(
        Run("TinyLlama/TinyLlama-1.1B", "rtx-3090", "bf16", speed, width, 256)
        for width, speed in _SMALL_3090.items()
    )),
    Study("gpt-fast on A100", _GPTFAST, "gpt-fast", "graph", (
        Run(_SEVEN, "a100-80gb", "bf16", 104.9, 1, 100),
        Run(_SEVEN, "a100-80gb", "int8", 155.58, 1, 100),
        Run(_SEVEN, "a100-80gb", "int4-g32", 196.80, 1, 100),
        Run("meta-llama/Llama-2-70b", "a100-80gb", "int8", 19.13, 1, 100),
        Run("meta-llama/Llama-2-70b", "a100-80gb", "int4-g32", 25.25, 1, 100),
    )),
)  # fmt: skip
