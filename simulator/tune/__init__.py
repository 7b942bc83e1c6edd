"""Offline search for what a serving engine reads, with the gain it should bring.

>>> from simulator.tune import check_vllm
>>> check_vllm(
...     {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
... )
"""

from simulator.tune.costs import Grid, default_batches, fixed_logs, price_grid
from simulator.tune.formats import (
    SettingsError,
    check_huggingface,
    check_llamacpp,
    check_settings,
    check_sglang,
    check_vllm,
)
from simulator.tune.gains import Choice, Objective, choose, cross_fitted
from simulator.tune.huggingface import tune_huggingface
from simulator.tune.launch import launch_line
from simulator.tune.llamacpp import tune_llamacpp
from simulator.tune.reading import read_settings
from simulator.tune.served import (
    NO_SPECULATION,
    RIVALS,
    Held,
    check_seed,
    closed_load,
    compare_served,
    held,
    mended,
    served_rates,
    unbeaten,
)
from simulator.tune.settings import ENGINES, TUNE_COLUMNS, Tuned, write_settings
from simulator.tune.sglang import tune_sglang
from simulator.tune.tensorrt_llm import tune_dynamo, tune_tensorrt_llm
from simulator.tune.vllm import tune_vllm

__all__ = [
    "ENGINES",
    "NO_SPECULATION",
    "RIVALS",
    "TUNE_COLUMNS",
    "Choice",
    "Grid",
    "Held",
    "Objective",
    "SettingsError",
    "Tuned",
    "check_huggingface",
    "check_llamacpp",
    "check_seed",
    "check_settings",
    "check_sglang",
    "check_vllm",
    "choose",
    "closed_load",
    "compare_served",
    "cross_fitted",
    "default_batches",
    "fixed_logs",
    "held",
    "launch_line",
    "mended",
    "price_grid",
    "read_settings",
    "served_rates",
    "tune_dynamo",
    "tune_huggingface",
    "tune_llamacpp",
    "tune_sglang",
    "tune_tensorrt_llm",
    "tune_vllm",
    "unbeaten",
    "write_settings",
]
