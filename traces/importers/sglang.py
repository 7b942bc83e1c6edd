"""Reading SGLang's responses: ``meta_info`` with speculation's counts per request.

``spec_verify_ct`` verifications, ``completion_tokens``, and in newer versions
``spec_num_proposed_drafts``, ``spec_num_correct_drafts`` and ``spec_correct_drafts_histogram``
(rounds by accepted drafts; ``spec_accept_histogram`` before that).  Rounds are not in order,
so there is no trace.  Source of the format: sgl-project/sglang, ``managers/io_struct.py`` and
``tokenizer_manager.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import MOST_DRAFTED, summed, whole, wholes
from traces.importers.rows import read_json_rows
from traces.importers.totals import Totals

HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


class SGLang:
    """SGLang's responses."""

    name = "sglang"
    summary = "SGLang's responses (meta_info with spec_verify_ct)"
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        return '"spec_verify_ct"' in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        del options
        found = [pair for file in files for pair in _infos(file)]
        if not found:
            raise FileError(
                f"{files[0]}: no response with meta_info.spec_verify_ct: serve with speculative "
                "decoding switched on"
            )
        rounds = sum(_count(at, info, "spec_verify_ct") for at, info in found)
        if not rounds:
            raise FileError(f"{files[0]}: is a log of plain decoding: spec_verify_ct is 0 in it")
        accepted = sum(_accepted(at, info) for at, info in found)
        drafted = None
        if all("spec_num_proposed_drafts" in info for _, info in found):
            drafted = sum(_count(at, info, "spec_num_proposed_drafts") for at, info in found)
        histograms = [_histogram(at, info) for at, info in found]
        per_position = longest = None
        if all(histograms):
            longest = max(len(h) for h in histograms) - 1
            per_position = summed(histograms, longest)
        meta = {"kind": "sglang", "source": [file.name for file in files]}
        return Totals(rounds, drafted, accepted, longest, per_position, len(found), meta=meta)


def _infos(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, row in zip(*read_json_rows(file), strict=True):
        choices = row.get("choices")
        for holder in (row, *(choices if isinstance(choices, list) else ())):
            info = holder.get("meta_info") if isinstance(holder, dict) else None
            if isinstance(info, dict) and info.get("spec_verify_ct") is not None:
                reason = info.get("finish_reason")
                aborted = isinstance(reason, dict) and reason.get("type") == "abort"
                if not aborted:
                    yield where, info


def _count(at: str, info: Mapping[str, Any], name: str) -> int:
    return whole(at, f"meta_info.{name}", info.get(name))


def _accepted(at: str, info: Mapping[str, Any]) -> int:
    if info.get("spec_num_correct_drafts") is not None:
        return _count(at, info, "spec_num_correct_drafts")
    # Older versions: what was emitted beyond a token a round and the prompt's own.
    rounds, tokens = _count(at, info, "spec_verify_ct"), _count(at, info, "completion_tokens")
    return max(0, tokens - rounds - 1)


def _histogram(at: str, info: Mapping[str, Any]) -> list[int]:
    """Rounds by accepted drafts; empty where it is not there."""
    told = (info[name] for name in HISTOGRAMS if info.get(name) is not None)
    values: Any = next(told, [])
    wholes(at, "its histogram of accepted drafts", values)
    whole(at, "the length of its histogram", len(values), most=MOST_DRAFTED + 1)
    if values and sum(values) != info["spec_verify_ct"]:
        raise FileError(
            f"{at}: the histogram counts {sum(values)} rounds, spec_verify_ct "
            f"{info['spec_verify_ct']}: they do not belong together"
        )
    return list(values)
