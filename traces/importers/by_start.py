"""Reading accepted lengths by start, as SpecDecode-Bench's simulator keeps them.

One row a request: ``id``, ``prompt_token_ids``, ``generated_token_ids`` and, for each way of
drafting, an entry like ``acc_eagle`` with ``acc_len``: per output position the tokens that a
round emits which begins there, the target's own included.  A drafter on the target's features
drafts otherwise from every start, so these are no runs of matches; fixed lengths and the
oracle replay exactly from them.  Published files hold more accepted lengths than tokens, of
starts after the last token: these are left out.  Source of the format: SpecDecode-Bench/simulator,
``request.py`` and ``data/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from traces.acceptance.schema import Request
from traces.acceptance.trace import Trace
from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import MOST_DRAFTED, MOST_ID, label, wholes
from traces.importers.rows import read_json_rows

PREFIX = "acc_"


class ByStart:
    """SpecDecode-Bench's ``combined_*.jsonl``."""

    name = "by-start"
    summary = "accepted lengths by start (acc_eagle.acc_len), as in SpecDecode-Bench's simulator"
    takes = ("drafter",)

    def sniff(self, text: str) -> bool:
        return '"acc_len"' in text or '"acc_eagle_three"' in text

    def read(self, files: Sequence[Path], options: Options) -> Trace:
        requests: list[Request] = []
        lengths: list[Any] = []
        tokens: list[int] = []
        drafter, beyond = options.drafter, 0
        for file in files:
            for where, row in zip(*read_json_rows(file), strict=True):
                drafter, found = _lengths(where, row, drafter)
                output = _ids(where, row, "generated_token_ids")[: len(found)]
                if 2 * len(output) < len(found):
                    raise FileError(
                        f"{where}: {len(found)} accepted lengths and {len(output)} output tokens: "
                        "use an unedited file"
                    )
                beyond += len(found) - len(output)
                found = found[: len(output)]
                prompt = tuple(_ids(where, row, "prompt_token_ids"))
                lengths.append(found)
                tokens += output
                requests.append(
                    Request(
                        label(where, "id", row.get("id"), str(len(requests))),
                        label(where, "category", row.get("category"), file.stem),
                        len(prompt), len(output), len(output), "length", prompt,
                    )
                )  # fmt: skip
        accepted = np.concatenate(lengths) - 1
        if not (longest := int(accepted.max())):
            raise FileError(f"{files[0]}: no draft of {drafter} was ever accepted")
        counts = [len(found) for found in lengths]
        columns = {
            "request": np.repeat(np.arange(len(counts)), counts),
            "position": np.concatenate([np.arange(n) for n in counts]),
            "offset": np.zeros(len(accepted), np.int16),
            "match": (accepted > 0).astype(np.int8),
            "accepted": accepted,
            "token": np.array(tokens),
        }
        meta = {
            "kind": self.name, "source": [file.name for file in files], "drafter": drafter,
            "draft_lengths": "by start", "draft_lengths_known": True,
        }  # fmt: skip
        if beyond:
            meta["left_out"] = [f"{beyond} accepted lengths of starts after the last token"]
        return Trace(columns, requests, longest, meta)


def _lengths(where: str, row: dict[str, Any], drafter: str | None) -> tuple[str, Any]:
    """Name of the drafter, and the (positions,) tokens of a round from each."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key.startswith(PREFIX):
            entry = value.get("acc_len") if isinstance(value, dict) else value
            if entry is not None:
                found[key.removeprefix(PREFIX)] = entry
    have = ", ".join(found) or "none"
    if drafter is None:
        if len(found) != 1:
            raise FileError(f"{where}: holds accepted lengths of {have}: name one with --drafter")
        return _lengths(where, row, next(iter(found)))
    if drafter not in found:
        raise FileError(f"{where}: has no accepted lengths of {drafter!r} (there are: {have})")
    entry = found[drafter]
    if not wholes(where, f"{PREFIX}{drafter}", entry, 1, MOST_DRAFTED + 1):
        raise FileError(f"{where}: {PREFIX}{drafter} holds no accepted length")
    return drafter, np.array(entry, dtype=np.int64)


def _ids(where: str, row: dict[str, Any], name: str) -> list[int]:
    if row.get(name) is None:
        raise FileError(f"{where}: has no {name}: expected a list of token ids")
    return wholes(where, name, row[name], most=MOST_ID)
