"""Figures that others measured on GPUs, transcribed: facts, with source and licence named.

Only figures were carried over, no text and no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Length(NamedTuple):
    """A run at one draft length."""

    tokens_per_s: float
    emitted: float
    """Tokens a verification, the target's own included."""
    cycle: float
    """Time of a round over one plain decoding step."""
    gains: tuple[float, ...]
    """Speedup by class, percent."""


CLASSES = ("chat", "code", "prose", "reason", "zh")
RTX3090_PLAIN = 41.57
RTX3090_SOURCE = (
    "github.com/thc1006/qwen3.8-speculative-decoding-rtx3090, analysis/phase_nmax_report.txt and "
    "phase_nmax_cost.txt (2026-08), licence of the data beside it: llama.cpp, Qwen3.8-27B in 4 "
    "bits, one RTX 3090, batch 1, 25 prompts of 5 classes"
)
RTX3090: Mapping[str, Mapping[int, Length]] = {
    "MTP head": {
        1: Length(60.26, 1.78, 1.2302, (38.2, 58.3, 41.0, 52.5, 34.8)),
        2: Length(66.03, 2.32, 1.4644, (43.6, 91.9, 48.5, 72.8, 37.5)),
        3: Length(63.33, 2.67, 1.7492, (31.4, 98.8, 37.0, 71.3, 23.3)),
        4: Length(60.29, 2.89, 1.9921, (22.2, 99.3, 21.5, 67.2, 14.9)),
        5: Length(54.95, 3.05, 2.3041, (7.1, 90.8, 7.2, 55.1, 0.7)),
        6: Length(49.63, 3.16, 2.6459, (-6.1, 79.1, -5.9, 41.4, -11.6)),
        7: Length(45.37, 3.24, 2.9684, (-15.9, 68.3, -16.1, 29.7, -20.4)),
        8: Length(57.81, 3.31, 2.3788, (7.5, 117.2, 4.0, 65.5, 1.2)),
    },
    "DFlash drafter": {
        2: Length(63.89, 2.25, 1.4614, (45.6, 87.5, 45.0, 74.8, 15.6)),
        4: Length(63.20, 2.88, 1.8949, (30.3, 116.9, 23.1, 89.6, 0.3)),
        6: Length(54.65, 3.23, 2.4537, (4.6, 104.0, -2.0, 71.2, -20.5)),
        8: Length(50.96, 3.35, 2.7323, (-4.3, 91.7, -11.1, 65.4, -28.7)),
    },
}
"""Tokens/s, tokens a round and cycle over a plain step, by drafter and draft length."""


class EngineRun(NamedTuple):
    """A run of an engine at one draft length and load."""

    tokens_per_s: float
    emitted: float | None
    """Tokens a round; None where it was not said."""


class EngineStudy(NamedTuple):
    """Runs of one engine and pair, by load and draft length; 0 is plain decoding."""

    name: str
    source: str
    runs: Mapping[int, Mapping[int, EngineRun]]


VLLM_EAGLE = EngineStudy(
    "vLLM EAGLE, Llama-3.1-8B",
    "github.com/vllm-project/vllm pull request 24343, comment of 2025-09-18 (Apache-2.0): "
    "MT-bench, 100 prompts one at a time; the GPU is not named",
    {1: {0: EngineRun(61.74, 1.0), 1: EngineRun(100.01, 1.71), 3: EngineRun(119.31, 2.31)}},
)
VLLM_FRSPEC = EngineStudy(
    "vLLM FR-Spec, Llama-3.1-8B",
    VLLM_EAGLE.source,
    {1: {0: EngineRun(61.74, 1.0), 1: EngineRun(104.59, 1.68), 3: EngineRun(121.46, 2.23)}},
)
ENGINE_STUDIES = (VLLM_EAGLE, VLLM_FRSPEC)


class ServerStudy(NamedTuple):
    """A server's time between tokens by the requests that it serves at a time."""

    name: str
    source: str
    prompt: int
    """Tokens of a prompt, about; not said."""
    output: int
    """Mean tokens of an output."""
    itl_s: Mapping[int, float]


A100_CONCURRENCY = ServerStudy(
    "vLLM 0.24 on an A100, Llama-3-8B, HumanEval",
    "github.com/manojarulmurugan/SpecDecoding-Study-vLLM-SGLang at d96e4fb6, plain decoding, fp16, "
    "means of three repeats; prompts are taken to have 180 tokens",
    180,
    344,
    {1: 10.805e-3, 8: 11.244e-3, 32: 14.040e-3, 64: 17.039e-3},
)


class Positions(NamedTuple):
    """Chances that the first 1, 2, ... drafted tokens are all accepted, as an engine counts."""

    name: str
    source: str
    accepted: tuple[float, ...]


MINICPM = Positions(
    "vLLM EAGLE-3 MiniCPM3, RTX 4090",
    "github.com/vllm-project/vllm pull request 24243, description of 2025-09-04 (Apache-2.0): 200 "
    "samples, 10 at once, 6 drafted tokens, of which 5 are listed",
    (0.58, 0.34, 0.22, 0.15, 0.11),
)
