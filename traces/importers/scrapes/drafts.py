"""Counters that vLLM named and llama.cpp's server took over: drafts, their tokens, positions.

``spec_decode_num_drafts``, ``…_num_draft_tokens``, ``…_num_accepted_tokens`` and
``…_num_accepted_tokens_per_pos`` with the label ``position``, each with the suffix ``_total``.
Sources of the format: vllm-project/vllm, ``v1/spec_decode/metrics.py``; ggml-org/llama.cpp,
``tools/server`` (``/metrics``, 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.errors import FileError
from traces.importers.scrapes.text import by_position, read_counts
from traces.importers.totals import Totals

_PLAIN = ("drafts", "draft_tokens", "accepted_tokens")
_PLACED = "accepted_tokens_per_pos"


def read_drafts(files: Sequence[Path], server: str) -> Totals:
    """Totals of a server whose counters are called ``SERVER:spec_decode_num_…``."""
    prefix = f"{server}:spec_decode_num_"
    counts = read_counts(files, prefix, _PLAIN, (_PLACED,))
    for name in _PLAIN:
        if (name, 0) not in counts:
            raise FileError(
                f"{files[-1]}: has no {prefix}{name}: expected {server}'s /metrics with "
                "speculative decoding switched on"
            )
    rounds, drafted, accepted = (counts[name, 0] for name in _PLAIN)
    if not rounds:
        raise FileError(f"{files[-1]}: counts no draft: nothing was decoded speculatively")
    per_position = by_position(counts, _PLACED, files[-1]) or None
    return Totals(
        rounds, drafted, accepted, len(per_position) if per_position else None, per_position,
        meta={"kind": "prometheus", "server": server, "source": [file.name for file in files]},
    )  # fmt: skip
