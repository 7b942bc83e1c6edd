"""The policies that full runs compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from policies.core import own_copy
from policies.registry import parse_policy
from profiler.checks.spot_check import Arm
from traces.acceptance.trace import Trace
from traces.store.measured import MEASURED_COLUMNS

ARMS = (
    "autoregressive", "fixed:gamma=4", "fixed:gamma=2", "fixed:gamma=8", "confidence",
    "hf-heuristic", "gammatune", "gammatune-plus", "cm-asd", "svip", "adaedl",
    "draft-and-verify", "oracle",
)  # fmt: skip
"""Plain decoding, fixed lengths as control, and the policies of the papers."""

MORE_ARMS = (
    "specdec-pp", "disco", "rate-optimal", "ucb", "exp3", "bild",
    "confidence:roc_update=in_call", "hf-heuristic:full_accept_means=budget",
)  # fmt: skip
"""The other policies that decide for one sequence at a time, run if there is time for all.

Those for whole batches (`policies.batch.base.BatchPolicy`) are not among them: they choose one
length for all sequences of an engine, from its own costs, and are compared in served batches.
"""

QUICK_ARMS = ("autoregressive", "fixed:gamma=3", "svip")
MORE_QUICK_ARMS = ("ucb",)

REPEATS = 3
"""Runs of an arm; miniatures, whose times are not used, have one."""

COLUMNS = ("pair", "mode", *MEASURED_COLUMNS)
"""Columns of the suite's measured runs."""


def arms_of(trace: Trace, names: Sequence[str]) -> list[Arm]:
    """Return an arm per policy, its maximum lowered to what the trace holds."""
    made = {name: parse_policy(name, max_gamma=trace.max_gamma) for name in names}
    # The vocabulary is the recorded pair's: what is run here is what a replay predicts.
    return [Arm(name, own_copy(policy, trace.vocab_size)) for name, policy in made.items()]


def run_rows(times: pd.DataFrame, pair: str, mode: str) -> list[list[Any]]:
    """Return measured runs of a pair in a mode as rows of `COLUMNS`."""
    named = times.assign(pair=pair, mode=mode)[list(COLUMNS)]
    rows: list[list[Any]] = named.astype(object).to_numpy().tolist()
    return rows
