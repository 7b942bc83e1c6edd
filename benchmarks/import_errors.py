"""The error of a log without draft lengths: predictions from it against the full recording.

    python -m benchmarks.import_errors

Logs in Spec-Bench's form are made of the bundled recording under policies that are known, with
the wall times of its latencies; each is imported with the lengths unknown, inferred and said,
and every policy is predicted from it.  ``error`` is of the seconds, against the recording itself.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from commands.common.printed import print_table
from policies.registry import parse_policy
from simulator.pricing import price
from traces.acceptance.survival import impute
from traces.acceptance.trace import Trace
from traces.importers.base import Options
from traces.importers.registry import import_log
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.recordings import find_latency, find_trace

LOGGED = ("fixed:gamma=3", "fixed:gamma=6", "hf-heuristic", "confidence")
PREDICTED = ("fixed:gamma=2", "fixed:gamma=4", "fixed:gamma=8", "hf-heuristic", "gammatune")


def main() -> None:
    """Print the table."""
    trace, latency = find_trace("bundled"), find_latency("bundled")
    limit = max(r.max_new_tokens for r in trace.requests)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for text in LOGGED:
            log = replay(trace, parse_policy(text, max_gamma=trace.max_gamma), first=0)
            file = write_log(log, latency, Path(folder) / "log.jsonl")
            readings = ["none", "infer"] + ([text] if not log.reads else [])
            for reading in readings:
                options = Options(draft_lengths=reading, max_new_tokens=limit)
                imported = import_log("specbench", [file], options)
                assert isinstance(imported, Trace)
                rows.append({"log": text, "lengths": reading, **errors(imported, trace, latency)})
    print_table(rows)


def write_log(log: RoundLog, latency: LatencyTable, path: Path) -> Path:
    """Return the result file that Spec-Bench would have left of a run."""
    seconds = price(log, latency).decode_s
    lines = []
    for i, wall in enumerate(seconds):
        emitted = log.rounds["emitted"][log.rounds["request"] == i].tolist()
        choice = {
            "decoding_steps": [len(emitted)], "new_tokens": [sum(emitted)],
            "wall_time": [float(wall)], "accept_lengths": emitted,
        }  # fmt: skip
        lines.append(json.dumps({"question_id": i, "category": "", "choices": [choice]}) + "\n")
    path.write_text("".join(lines))
    return path


def errors(imported: Trace, trace: Trace, latency: LatencyTable) -> dict[str, Any]:
    """Return signed error of each policy's speedup, and whether the fastest is found."""
    known = bool(imported.meta["draft_lengths_known"])
    filled = impute(imported, 0, "hazard" if known else "rejected")
    predicted, true = {}, {}
    for text in PREDICTED:
        policy = parse_policy(text, max_gamma=trace.max_gamma)
        predicted[text] = price(replay(filled, policy), latency).total_s
        true[text] = price(replay(trace, policy, first=0), latency).total_s
    found = {name: f"{true[name] / predicted[name] - 1:+.1%}" for name in PREDICTED}
    right = min(predicted, key=predicted.__getitem__) == min(true, key=true.__getitem__)
    return {
        "taken": imported.meta["draft_lengths"] if known else "lower bound",
        **found,
        "winner": ("right" if right else "wrong") if known else "not ranked",
    }


if __name__ == "__main__":
    main()
