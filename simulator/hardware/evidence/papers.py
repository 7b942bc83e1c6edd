"""Latencies that a paper on speculation publishes of the models it decodes with."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.hardware.evidence.runs import Run, Study

GAMMATUNE_1: Mapping[str, float] = {
    "meta-llama/Llama-3.2-1B-Instruct": 8.87,
    "meta-llama/Llama-3.1-8B": 16.65,
    "meta-llama/Llama-3.1-70B": 925.05,
    "double7/vicuna-68m": 1.76,
    "double7/vicuna-160m": 5.61,
    "lmsys/vicuna-7b-v1.5": 14.29,
    "lmsys/vicuna-13b-v1.5": 20.15,
}
"""Milliseconds a token on one H100 (GammaTune, arXiv:2504.00030, Table 1)."""

QUANTISED = {"meta-llama/Llama-3.1-70B": "nf4"}
"""int4 by the table, int8 by the text: its kernels are not those of the others."""

CONTEXT = 512
"""Tokens in the cache that the published means are read at; none of the papers says."""

GAMMATUNE = Study(
    "GammaTune Table 1", "arXiv:2504.00030, Table 1", "transformers", "eager",
    tuple(
        Run(name, "h100", "bf16", 1e3 / milliseconds, 1, CONTEXT)
        for name, milliseconds in GAMMATUNE_1.items() if name not in QUANTISED
    ),
)  # fmt: skip
