"""Reading TensorRT-LLM's counts: of iterations, or of responses.

An iteration (``trtllm-serve``'s ``/metrics``, ``LLM.get_stats``, ``trtllm-bench
--iteration_log``) holds ``specDecodingStats``: ``numDraftTokens``, ``numAcceptedTokens`` and
``numRequestsWithDraftTokens``, one round each; where only single requests drafted, every
iteration is one round and the survival curve follows.  A response's choice holds
``speculative_decoding`` (``per_request_spec_decode_stats: true``): ``num_spec_steps``,
``total_draft_tokens``, ``total_accepted_draft_tokens``, ``acceptance_histogram`` and
``num_spec_tokens``.  Source of the format: NVIDIA/TensorRT-LLM, ``_torch/pyexecutor`` and
``serve/openai_protocol.py``; ai-dynamo/aiperf, ``spec_decode/trtllm_adapter.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import check_drafted, whole
from traces.importers.histograms import Summary, pooled
from traces.importers.rows import Rows, read_json_rows
from traces.importers.totals import Totals
from traces.store.text import read_text

STATS = "specDecodingStats"
CHOICE = "speculative_decoding"
_COUNTS = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
_SUMMED = (
    "acceptance_histogram", "num_spec_steps", "total_draft_tokens", "total_accepted_draft_tokens",
)  # fmt: skip


class TensorRTLLM:
    """TensorRT-LLM's iteration statistics or responses."""

    name = "tensorrt-llm"
    summary = "TensorRT-LLM's iterations (specDecodingStats) or responses (speculative_decoding)"
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        response = f'"{CHOICE}"' in text and f'"{_SUMMED[-1]}"' in text
        return response or f'"{STATS}"' in text or f"'{STATS}'" in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        del options
        rows = [pair for file in files for pair in zip(*_rows(file), strict=True)]
        meta = {"kind": self.name, "source": [file.name for file in files]}
        responses = [pair for where, row in rows for pair in _choices(where, row)]
        if responses:
            return pooled([Summary(at, *map(c.get, _SUMMED)) for at, c in responses], meta)
        return _iterations(files[0], [pair for pair in rows if not _copied(pair[1])], meta)


def _iterations(
    file: Path, rows: Sequence[tuple[str, Mapping[str, Any]]], meta: dict[str, Any]
) -> Totals:
    if not any(STATS in row for _, row in rows):
        raise FileError(
            f"{file}: no iteration with {STATS} and no choice with {CHOICE}: serve with "
            "enable_iter_perf_stats: true, or per_request_spec_decode_stats: true"
        )
    found = []
    for at, row in rows:
        stats = row.get(STATS)
        if stats is None:
            continue
        if not isinstance(stats, dict):
            raise FileError(f"{at}: {STATS} is {shown(stats)}, expected an object")
        requests, drafted, accepted = counts = [
            whole(at, f"{STATS}.{name}", stats.get(name)) for name in _COUNTS
        ]
        if accepted > drafted or requests > drafted or (drafted and not requests):
            raise FileError(
                f"{at}: {STATS} counts {accepted} accepted of {drafted} drafted in {requests} "
                "requests: they do not belong together"
            )
        check_drafted(at, f"{STATS}.numDraftTokens", drafted, requests)
        if drafted:
            found.append(counts)
    if not found:
        raise FileError(f"{file}: is a log of plain decoding, no iteration drafted a token")
    rounds, drafted, accepted = (sum(column) for column in zip(*found, strict=True))
    longest = per_position = None
    if all(requests == 1 for requests, _, _ in found):
        longest = max(drafts for _, drafts, _ in found)
        per_position = [sum(a >= k for _, _, a in found) for k in range(1, longest + 1)]
    return Totals(rounds, drafted, accepted, longest, per_position, meta=meta)


def _copied(row: Mapping[str, Any]) -> bool:
    """Return True if another rank's row holds the same iteration."""
    return bool(row.get("attentionDpRank") or row.get("rank"))


def _choices(where: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    choices = row.get("choices")
    for i, choice in enumerate(choices if isinstance(choices, list) else ()):
        stats = choice.get(CHOICE) if isinstance(choice, dict) else None
        if isinstance(stats, dict):
            yield f"{where}, choice {i}", stats


def _rows(file: Path) -> Rows:
    """The rows of a file, of JSON or as Python prints a dictionary (the iteration log)."""
    text = read_text(file)
    if not text.lstrip().startswith("{'"):
        return read_json_rows(file)
    where, objects = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        at = f"{file} line {number}"
        try:
            row = ast.literal_eval(line)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise FileError(f"{at}: is no dictionary (truncated?): copy the file again") from error
        if not isinstance(row, dict):
            raise FileError(f"{at}: is no dictionary: expected one iteration a line")
        where.append(at)
        objects.append(row)
    return Rows(where, objects)
