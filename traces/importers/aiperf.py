"""Reading AIPerf's ``profile_export.jsonl``: a record of acceptance per request.

Each row has ``spec_decode_acceptance`` (`SpecDecodeAcceptanceRecord`): ``engine``, counts, a sparse
``acceptance_histogram`` and, if the engine reports them, ``per_step_drafted`` and
``per_step_accepted``, which make a trace.  For llama.cpp's server AIPerf has only sums.  It spreads
them evenly over a histogram and counts the prompt's own token as a verification; neither is used
here.  Source of the format: ai-dynamo/aiperf 0.13,
``common/models/spec_decode_models.py`` and ``spec_decode/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from traces.acceptance.trace import MOST_DRAFTED, Trace
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import read_json_rows
from traces.importers.totals import Summary, Totals, pooled
from traces.importers.vllm import STEPS, SUMMED, Stepped, stepped_trace
from traces.store.text import label, sparse

RECORD = "spec_decode_acceptance"
SUMS_ALONE = "llamacpp"
"""The engine whose histogram AIPerf makes up from sums."""


class AIPerf(Importer):
    """AIPerf's records of requests."""

    name = "aiperf"
    summary = "AIPerf's profile_export.jsonl (spec_decode_acceptance)"

    def sniff(self, text: str) -> bool:
        return f'"{RECORD}"' in text

    def read(self, files: Sequence[Path], options: Options) -> Trace | Totals:
        rows = [row for file in files for row in read_json_rows(file)]
        records = [(at, row, row[RECORD]) for at, row in rows if isinstance(row.get(RECORD), dict)]
        if not records:
            raise FileError(
                f"{files[0]}: no row with {RECORD}: name profile_export.jsonl of a server that "
                "reports acceptance per request (vLLM: --per-request-spec-decode-metrics detailed)"
            )
        left_out = [
            f"{at}: {'nothing was verified' if row.get('error') is None else 'failed'}"
            for at, row in rows if not row.get(RECORD)
        ]  # fmt: skip
        engines = {label(at, "engine", r.get("engine"), "?") for at, _, r in records}
        meta = self.meta(files, left_out=left_out, engine=sorted(engines))
        if all(record.get(name) is not None for _, _, record in records for name in STEPS):
            return stepped_trace([_stepped(*record) for record in records], meta)
        summaries = [_summary(at, record) for at, _, record in records]
        found = pooled(summaries, meta)
        # As in SGLang's own responses, what exceeds the histograms may be a tree.
        most = max(len(s.histogram or ()) for s in summaries) - 1
        told = any(s.histogram is None or s.longest for s in summaries)
        if "sglang" in engines and not told and (found.drafted or 0) > most * (found.rounds or 0):
            raise FileError(
                f"{files[0]}: SGLang proposed more than the {most} tokens a verification that "
                "were accepted at most: a tree, or longer chains: give --acceptance the "
                f"acceptance length instead, such as 3:{1 + found.mean_accepted:.3g} for drafts "
                "of 3"
            )
        return found


def _stepped(at: str, row: Mapping[str, Any], record: Mapping[str, Any]) -> Stepped:
    """Return a request as a response of vLLM would tell it."""
    about = row.get("metadata", {})
    if not isinstance(about, dict):
        raise FileError(f"{at}: metadata is {shown(about)}, expected an object")
    tokens = {"completion_tokens": record.get("completion_tokens"), **_prompt(at, row)}
    usage = {name: value for name, value in tokens.items() if value is not None}
    return at, {"id": about.get("x_request_id"), "usage": usage}, {}, record


def _prompt(at: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokens of the prompt, as far as AIPerf measured them."""
    metrics = row.get("metrics")
    if metrics is not None and not isinstance(metrics, dict):
        raise FileError(f"{at}: metrics is {shown(metrics)}, expected an object")
    for name in ("usage_prompt_tokens", "input_sequence_length"):
        found = metrics.get(name) if isinstance(metrics, dict) else None
        value: Any = found.get("value") if isinstance(found, dict) else None
        if type(value) in (int, float):
            return {"prompt_tokens": int(value) if value == value // 1 else value}
    return {}


def _summary(at: str, record: Mapping[str, Any]) -> Summary:
    histogram, rounds, drafted, accepted = map(record.get, SUMMED)
    longest = record.get("num_spec_tokens")
    if type(longest) is not int:
        longest = None
    if record.get("engine") == SUMS_ALONE:
        rounds = max(0, rounds - 1) if type(rounds) is int else rounds
        return Summary(at, None, rounds, drafted, accepted, longest)
    return Summary(at, _dense(at, histogram), rounds, drafted, accepted, longest)


def _dense(at: str, histogram: Any) -> list[int]:
    """Return a sparse histogram as a list by accepted drafts."""
    counts = sparse(at, "its histogram of accepted drafts", histogram, most=MOST_DRAFTED)
    return [counts.get(k, 0) for k in range(max(counts, default=0) + 1)]
