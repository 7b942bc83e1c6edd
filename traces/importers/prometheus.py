"""Reading vLLM's counters from a scrape of ``/metrics`` (Prometheus text format).

``vllm:spec_decode_num_drafts``, ``…_num_draft_tokens``, ``…_num_accepted_tokens`` and
``…_num_accepted_tokens_per_pos`` with the label ``position``, each with ``_total`` behind it,
summed over engines and models.  Two files are a scrape before and one after: their
difference counts.  Source of the format: vllm-project/vllm, ``v1/spec_decode/metrics.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.rows import read_text
from traces.importers.totals import Totals

PREFIX = "vllm:spec_decode_num_"
_LINE = re.compile(
    rf"^{PREFIX}(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?\s*$"
)
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
Counts = dict[tuple[str, int], int]


class Prometheus:
    """vLLM's Prometheus counters."""

    name = "prometheus"
    summary = "vLLM's /metrics as text; two files: before and after"
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        return PREFIX in text and not text.lstrip().startswith(("{", "["))

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        del options
        if len(files) > 2:
            raise FileError(f"prometheus takes a scrape, or two, not {len(files)} files")
        counts = _scrape(files[-1])
        if len(files) == 2:
            before = _scrape(files[0])
            counts = {key: value - before.get(key, 0) for key, value in counts.items()}
            if any(value < 0 for value in counts.values()):
                raise FileError(
                    f"{files[1]}: counts less than {files[0]}: name the earlier scrape first; a "
                    "server that was restarted between them cannot be told"
                )
        positions = sorted(p for name, p in counts if name == "accepted_tokens_per_pos")
        if positions != list(range(len(positions))):
            raise FileError(f"{files[-1]}: positions {positions} are not 0, 1, 2, ...")
        per_position = [counts["accepted_tokens_per_pos", p] for p in positions] or None
        if not counts["drafts", 0]:
            raise FileError(f"{files[-1]}: counts no draft: nothing was decoded speculatively")
        return Totals(
            counts["drafts", 0], counts["draft_tokens", 0], counts["accepted_tokens", 0],
            len(positions) or None, per_position,
            meta={"kind": "prometheus", "source": [file.name for file in files]},
        )  # fmt: skip


def _scrape(file: Path) -> Counts:
    counts: Counts = {}
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if (found := _LINE.match(line)) is None:
            continue
        name, labels, text = found.groups()
        position = _POSITION.search(labels or "")
        if (name == "accepted_tokens_per_pos") != (position is not None):
            raise FileError(f"{file} line {number}: the label position does not belong there")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if value < 0 or not value.is_integer():
            raise FileError(f"{file} line {number}: {text} is no count")
        key = name, int(position.group(1)) if position else 0
        counts[key] = counts.get(key, 0) + int(value)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        if (name, 0) not in counts:
            raise FileError(
                f"{file}: has no {PREFIX}{name}: expected vLLM's /metrics with speculative "
                "decoding switched on"
            )
    return counts
