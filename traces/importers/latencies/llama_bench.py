"""Reading ``llama-bench``: passes of one sequence, timed by prompt, generation and depth.

A prompt test of P tokens at depth D is a pass over P tokens with D in the cache: a prefill where D
is 0, and a verification as wide where P is small.  A generation test of N tokens at depth D is N
passes over one token, with D to D + N - 1 in the cache, and gives their mean.  Neither includes
tokenizing, sampling or anything around the passes.  Of two models in a file the larger is the
target.  Every form is read: md, csv, json, jsonl (sql is not).  Source of the format:
ggml-org/llama.cpp, ``tools/llama-bench``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.latencies.llama_tests import Test, read_tests
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.store.text import read_text

WIDEST = 64
"""Tokens of a prompt test up to which it is read as a verification.

Between the widths of drafts and a prompt of hundreds a straight line would be a guess.
"""
ROLES = ("target", "draft")


class LlamaBench:
    """llama-bench's output."""

    name = "llama-bench"
    summary = "llama-bench -o json|jsonl|csv|md of a target and its draft: latencies"
    takes = ("device",)

    def sniff(self, text: str) -> bool:
        known = all(f'"{k}"' in text for k in ("n_prompt", "n_gen", "avg_ns"))
        line = text.lstrip().partition("\n")[0]
        csv = all(k in line.split(",") for k in ("n_prompt", "n_gen", "avg_ns"))
        return known or csv or (line.startswith("| model") and line.rstrip().endswith("t/s |"))

    def read(self, files: Sequence[Path], options: Options) -> LatencyTable:
        tests = [test for file in files for test in read_tests(file, read_text(file))]
        if not tests:
            raise FileError(f"{files[0]}: holds no test: expected llama-bench's output")
        models: dict[str, list[Test]] = {}
        for test in tests:
            models.setdefault(test.model, []).append(test)
        ordered = sorted(models, key=lambda name: -models[name][0].size)
        if len(ordered) > len(ROLES):
            raise FileError(
                f"{files[0]}: holds {len(ordered)} models ({', '.join(ordered)}): import a target "
                "and a draft at most"
            )
        rows: list[tuple[Any, ...]] = []
        left_out: list[str] = []
        for role, name in zip(ROLES, ordered, strict=False):
            _check_one_setting(name, models[name])
            for test in models[name]:
                own = _cells(role, test)
                if not own:
                    left_out.append(f"{test.where}: {_why_left_out(test)}")
                rows += own
        cells = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
        key = list(CELL_COLUMNS)[:5]
        if (again := cells[cells.duplicated(key)]).shape[0]:
            cell = ", ".join(str(value) for value in again[key].iloc[0])
            raise FileError(f"{files[0]}: tells the cell ({cell}) twice: import one run at a time")
        if "target" not in set(cells["model"]):
            raise FileError(f"{files[0]}: {left_out[0] if left_out else 'no test can be used'}")
        meta: dict[str, Any] = {
            "kind": self.name, "source": [file.name for file in files], "estimator": "mean",
            "device": options.device or tests[0].device, "left_out": left_out,
            "models": dict(zip(ROLES, ordered, strict=False)), "settings": dict(tests[0].settings),
        }  # fmt: skip
        return LatencyTable(cells, meta)


def _cells(role: str, test: Test) -> list[tuple[Any, ...]]:
    if test.prompt and test.generated:
        return []
    if test.generated:
        context = test.depth + test.generated // 2
        seconds, spread = test.seconds / test.generated, test.spread_s / test.generated
        return [(role, "forward", 1, 1, context, seconds, spread, test.repeats)]
    tail = (test.seconds, test.spread_s, test.repeats)
    cells: list[tuple[Any, ...]] = []
    if not test.depth:
        cells.append((role, "prefill", 1, test.prompt, 0, *tail))
    if test.prompt <= WIDEST:
        cells.append((role, "forward", 1, test.prompt, test.depth, *tail))
    return cells


def _why_left_out(test: Test) -> str:
    if test.prompt and test.generated:
        return "a prompt and its generation together are no pass"
    return f"{test.prompt} tokens at depth {test.depth} are neither prompt nor verification"


def _check_one_setting(model: str, tests: Sequence[Test]) -> None:
    first = tests[0]
    for test in tests[1:]:
        for name in {*first.settings, *test.settings}:
            mine, other = first.settings.get(name), test.settings.get(name)
            if mine != other:
                raise FileError(
                    f"{test.where}: {model} was run with {name} {mine} and {other}: import the "
                    "tests of one setting at a time"
                )
