"""TensorRT-LLM's ``/prometheus/metrics``: drafted and accepted tokens of each draft position.

``trtllm_spec_decode_drafted_tokens_total`` and ``…_accepted_tokens_total`` with the label
``token_position`` count finished requests: the first position was drafted once a round.  The
iterations' own ``trtllm_spec_decode_num_draft_tokens_total`` and ``…_num_accepted_tokens_total``
count tokens of an unknown number of rounds.  Source of the format: NVIDIA/TensorRT-LLM,
``tensorrt_llm/metrics/collector.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.errors import FileError
from traces.importers.scrapes.text import by_position, read_counts
from traces.importers.totals import Totals

PREFIX = "trtllm_spec_decode_"
_PLACED = ("drafted_tokens", "accepted_tokens")


def read_tensorrt_llm(files: Sequence[Path]) -> Totals:
    """Totals with counts per position.

    Raises
    ------
    FileError
        If those counters are missing, or count nothing.
    """
    file = files[-1]
    counts = read_counts(files, PREFIX, (), _PLACED, "token_position")
    drafted, accepted = (by_position(counts, name, file) for name in _PLACED)
    if not drafted:
        raise FileError(
            f"{file}: has no {PREFIX}drafted_tokens_total by token_position, and the tokens of "
            "iterations alone do not say in how many rounds: ask for per-request metrics "
            "(return_perf_metrics: true), or import the iterations' JSON as tensorrt-llm"
        )
    if not drafted[0]:
        raise FileError(f"{file}: counts no draft: nothing was decoded speculatively")
    # A position that was never accepted has no sample yet.
    accepted += [0] * (len(drafted) - len(accepted))
    return Totals(
        drafted[0], sum(drafted), sum(accepted), len(drafted), accepted,
        meta={
            "kind": "prometheus", "server": "tensorrt-llm", "source": [f.name for f in files],
        },
    )  # fmt: skip
