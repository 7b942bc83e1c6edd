"""Made-up results of the GPU suite's stages: a few requests, constant latencies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from policies.registry import parse_policy
from profiler.suite.__main__ import main
from profiler.suite.checks import COLUMNS
from profiler.suite.environment import LARGEST
from simulator.pricing import price
from tests.serving import table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.replay.run import replay
from traces.store.engine_runs import MeasuredRuns, write_measured
from traces.store.files import write_latency, write_trace

SMALL, OTHER = "cm-asd-12+3", "vicuna-7b+68m"
"""Two pairs of the suite that are small."""
MODES = ("eager", "graph")
META: dict[str, Any] = {"device": "NVIDIA H200", "quick": False}
POLICIES = ("autoregressive", "fixed:gamma=2", "fixed:gamma=4")


def cells(pair: str, mode: str, *, draft: bool = True) -> list[list[Any]]:
    """Cells of a target of 10 ms (5 ms graphed) and a draft of a tenth."""
    target = 0.010 if mode == "eager" else 0.005
    models = [("target", target), *([("draft", target / 10)] if draft else [])]
    return [
        [f"{pair}/{mode}/{name}", "forward", 1, width, context, seconds, 0.0, 3]
        for name, seconds in models for width in (1, 9) for context in (16, 4096)
    ]  # fmt: skip


def write_latencies(out: Path, rows: list[list[Any]], meta: Mapping[str, Any] = META) -> None:
    """The files of stage ``latency``."""
    out.mkdir(parents=True, exist_ok=True)
    table = table_of(rows, meta)
    write_latency(table, out / "latency.parquet")
    (out / "latency.json").write_text(json.dumps({"meta": meta, "units": {}}))


def write_forced(
    out: Path, pairs: Sequence[str], slower: Mapping[str, float] | None = None,
    drift: float = 0.0, meta: Mapping[str, Any] = META,
) -> Trace:  # fmt: skip
    """The files of stage ``forced``: times as predicted, times ``1 + slower[policy]``.

    ``drift`` is how much slower the anchors were than in stage ``latency``.
    """
    out.mkdir(parents=True, exist_ok=True)
    trace = synthetic_trace(0.7, requests=2, tokens=20, prompt_length=16, max_gamma=6, seed=3)
    write_trace(trace, out / "forced-trace.parquet")
    rows, units = [], {}
    for pair in pairs:
        for mode in MODES:
            own = cells("", mode)
            anchors = [
                {"model": row[0].rpartition("/")[2], "batch": 1, "width": row[3],
                 "context": row[4], "median_s": row[5] * (1 + drift)}
                for row in own
            ]  # fmt: skip
            units[f"{pair}.{mode}.1"] = {"anchors": anchors}
            named = [[row[0].rpartition("/")[2], *row[1:]] for row in own]
            table = table_of(named)
            for name in POLICIES:
                log = replay(trace, parse_policy(name, max_gamma=6), name=name)
                rounds = log.per_request([1] * len(log)).astype(int)
                for i, seconds in enumerate(price(log, table).decode_s):
                    took = float(seconds) * (1 + (slower or {}).get(name, 0.0))
                    rows += [
                        [pair, mode, name, "exact", 1, True, repeat, trace.requests[i].id,
                         took * (1 + 0.001 * repeat), int(rounds[i])]
                        for repeat in range(3)
                    ]  # fmt: skip
    runs = MeasuredRuns(pd.DataFrame(rows, columns=list(COLUMNS)), dict(meta))
    write_measured(runs, out / "forced-measured.parquet")
    (out / "forced.json").write_text(json.dumps({"meta": meta, "units": units}))
    return trace


def check_files(out: Path) -> None:
    """The files below `out` are as few, as small and as plainly named as can be handed back."""
    found = [f for f in out.rglob("*") if f.is_file()]
    assert 0 < len(found) <= 8
    for file in found:
        assert file.stat().st_size <= LARGEST <= 16 << 20
        assert len(file.relative_to(out).parts) <= 3
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", p) for p in file.relative_to(out).parts)


def results(out: Path, stage: str) -> Any:
    """The JSON that a stage wrote."""
    return json.loads((out / f"{stage}.json").read_text())


def suite(*arguments: str, out: Path) -> None:
    """A stage in miniature, all of it, on the CPU."""
    assert main([*arguments, "--device", "cpu", "--quick", "--out", str(out)]) == 0
