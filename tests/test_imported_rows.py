"""Imported logs keep every token, in every row: decoding begins where the log's began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import parse_policy
from policies.core import speculate
from tests.test_import_specbench import LIMIT, SPS, VANILLA, log_file, recorded
from traces.acceptance.schema import Request
from traces.acceptance.trace import Trace
from traces.importers.specbench import import_specbench
from traces.replay.decoder import ReplayDecoder
from traces.replay.run import replay
from traces.sources import replay_source
from traces.sources.lookups.sources import PLD
from traces.store.files import write_trace

LATENCY = ("--latency", "const:target=0.0195,draft=0.002")


def rows_of(run: Any, file: Path) -> list[dict[str, Any]]:
    ran = run("simulate", "--trace", file, *LATENCY, "--resamples", 20, "--json", "-")
    assert ran.code == 0, ran.err
    rows: list[dict[str, Any]] = json.loads(ran.out)["results"]
    return rows


@pytest.mark.parametrize("lengths", ["hf-heuristic:5", "none"])
def test_every_row_of_an_imported_log_has_the_logs_tokens(
    run: Any, tmp_path: Path, lengths: str
) -> None:
    log = replay(recorded(3, 0.7), parse_policy("hf-heuristic:gamma=5"), first=0)
    file = log_file(tmp_path / "log.jsonl", log)
    trace = import_specbench(file, draft_lengths=lengths, max_new_tokens=LIMIT)
    write_trace(trace, tmp_path / "t.parquet")
    rows = rows_of(run, tmp_path / "t.parquet")
    assert len(rows) > 5
    assert {row["policy"]: row["tokens"] for row in rows} == {
        row["policy"]: trace.tokens for row in rows
    }


def test_every_row_of_the_public_log_has_its_tokens(
    run: Any, tmp_path: Path, shared_data: Path
) -> None:
    folder = shared_data / "specbench_logs"
    trace = import_specbench(folder / SPS, folder / VANILLA, "fixed:20")
    write_trace(trace, tmp_path / "t.parquet")
    rows = rows_of(run, tmp_path / "t.parquet")
    assert {row["tokens"] for row in rows} == {trace.tokens}
    assert trace.tokens == trace.meta["measured"]["tokens"]


def test_every_round_of_the_public_logs_replays(shared_data: Path) -> None:
    """Under the policies that made them: 20 tokens at most, and none at all."""
    folder = shared_data / "specbench_logs"
    for name, text in ((SPS, "fixed:gamma=20"), (VANILLA, "fixed:gamma=0")):
        trace = import_specbench(folder / name, draft_lengths=text.replace("gamma=", ""))
        log = replay(trace, parse_policy(text))
        with (folder / name).open() as file:
            logged = [v for line in file for v in json.loads(line)["choices"][0]["accept_lengths"]]
        assert log.rounds["emitted"].tolist() == logged
        assert len(log) == trace.meta["measured"]["rounds"]


def test_everything_that_replays_begins_where_the_trace_does() -> None:
    requests = [Request("a", "", 2, 5, 9, "eos", prompt_ids=(1, 2))]
    made = Trace.without_tails(requests, None, {}, match=np.ones(5, np.int8))
    tokens = np.array([2, 1, 2, 1, 2], np.int32)
    for first in (0, 1):
        trace = Trace({**made.columns, "token": tokens}, requests, None, {"first": first})
        policy = parse_policy("fixed:gamma=1")
        assert trace.first == first
        decoder = ReplayDecoder(trace, 0)
        rounds = list(speculate(decoder, policy))
        for log in (replay(trace, policy), replay_source(trace, PLD(), policy)):
            assert log.first == first
            assert log.rounds["position"][0] == first
            assert log.rounds["emitted"].sum() == trace.tokens - first
        assert rounds[0].position == first
