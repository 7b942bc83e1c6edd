"""Static batches of a recording's own requests: seconds by hand, rounds as really decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import Autoregressive, DraftPolicy, Fixed, Round, parse_policy
from simulator.pricing import price
from simulator.serving import Limits, Scenario
from simulator.serving.run import simulate
from simulator.serving.study import InOrder, predict_groups
from tests.serving import table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay


def grid() -> LatencyTable:
    """Cells linear in every size, so that reading between them is exact."""
    rows = []
    for batch in (1, 2, 4):
        for context in (8, 64, 512):
            for width in (1, 3, 9):
                seconds = 1e-3 * (5 + batch * (0.1 + width * 0.2 + context * 0.01))
                rows.append(("target", "forward", batch, width, context, seconds, 0.0, 1))
            for width in (1, 2):
                seconds = 1e-3 * (1 + batch * (0.02 + width * 0.03 + context * 0.001))
                rows.append(("draft", "forward", batch, width, context, seconds, 0.0, 1))
    return table_of(rows)


TRACE = synthetic_trace(0.7, requests=7, tokens=25, max_gamma=8, concentration=3.0, seed=5)


@pytest.mark.invariant(10)
@pytest.mark.parametrize("text", ["autoregressive", "fixed:gamma=3", "svip", "gammatune"])
def test_groups_of_one_cost_what_clock_free_pricing_says(text: str) -> None:
    policy = parse_policy(text, max_gamma=8)
    groups, requests = predict_groups(TRACE, grid(), {text: policy}, [1])
    log = replay(TRACE, policy)
    np.testing.assert_allclose(groups["predicted_s"], price(log, grid()).decode_s, rtol=1e-9)
    assert groups["request"].tolist() == [r.id for r in TRACE.requests]
    assert groups["rounds"].tolist() == log.per_request(np.ones(len(log))).tolist()
    assert requests[text, 1]["drafted"].tolist() == log.per_request(log.rounds["drafted"]).tolist()


class Recorded(DraftPolicy):
    """Fixed drafts whose rounds are kept for the test to price."""

    def __init__(self, gamma: int = 3) -> None:
        self.gamma = gamma
        self.mine: list[Round] = []

    def fresh(self) -> Recorded:
        copy = Recorded(self.gamma)
        KEPT.append(copy.mine)
        return copy

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.gamma

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        del draft
        self.mine.append(outcome)


KEPT: list[list[Round]] = []


def test_a_padded_pass_costs_the_rectangle_of_the_widest_and_the_longest() -> None:
    KEPT.clear()
    table, batch = grid(), 4
    groups, _ = predict_groups(TRACE.select(range(batch)), table, {"p": Recorded()}, [batch])
    expected = 0.0
    for i in range(max(len(rounds) for rounds in KEPT)):
        here = [(r, k) for k, rounds in enumerate(KEPT) for r in rounds[i : i + 1]]
        # Tokens known when the round begins: the prompt and every position before it.
        known = {k: TRACE.requests[k].prompt_length + r.position for r, k in here}
        size = len(here)
        for step in range(max(r.draft_forwards for r, _ in here)):
            active = [(r, k) for r, k in here if r.draft_forwards > step]
            width = max(r.catch_up for r, _ in active) if step == 0 else 1
            seen = max(known[k] for _, k in active) + step
            expected += table.seconds(
                "draft", "forward", batch=size, new_tokens=width, context=seen - width
            )
        width = max(r.drafted for r, _ in here) + 1
        seen = max(known[k] + r.drafted for r, k in here)
        expected += table.seconds(
            "target", "forward", batch=size, new_tokens=width, context=seen - width
        )
    assert groups["predicted_s"].item() == pytest.approx(float(expected), rel=1e-9)


def test_ragged_passes_never_cost_more_than_rectangles() -> None:
    policy = parse_policy("svip", max_gamma=8)
    seconds = [
        predict_groups(TRACE, grid(), {"p": policy}, [4], passes=kind)[0]["predicted_s"]
        for kind in ("ragged", "padded")
    ]
    assert (seconds[0] < seconds[1]).all()
    equal = [
        predict_groups(TRACE, grid(), {"p": Autoregressive()}, [1], passes=kind)[0]["predicted_s"]
        for kind in ("ragged", "padded")
    ]
    np.testing.assert_allclose(equal[0], equal[1], rtol=1e-12)


class Growing(DraftPolicy):
    """Drafts one token more in every round of its life, which spans requests."""

    learns_across_requests = True

    def __init__(self) -> None:
        self.rounds = 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < min(1 + self.rounds // 3, 8)

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        del outcome, draft
        self.rounds += 1


def test_a_policy_that_learns_across_requests_has_a_life_in_every_seat() -> None:
    _, requests = predict_groups(TRACE, grid(), {"p": Growing()}, [3])
    found = requests["p", 3]["drafted"]
    for seat in range(3):
        mine = list(range(seat, len(TRACE.requests), 3))
        log = replay(TRACE.select(mine), Growing())
        assert found.iloc[mine].tolist() == log.per_request(log.rounds["drafted"]).tolist()


def test_an_unknown_shape_of_passes_is_refused() -> None:
    scenario = Scenario(InOrder(), Limits(max_batch=2), 4, "static", passes="square")  # type: ignore[arg-type]
    with pytest.raises(DraftsimError, match="passes is 'square', expected 'ragged' or 'padded'"):
        simulate(TRACE, grid(), Fixed(2), scenario)


def test_batches_really_decoded_are_compared_request_by_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from commands.validate.batched import BatchRuns
    from commands.validate.flow import CheckedPair
    from profiler.recording.run import RunInfo, write_info
    from tests.bundled import pair, record
    from traces.store.engine_runs import read_measured
    from traces.store.files import write_latency, write_trace

    trace = record(4, max_new=16)
    write_trace(trace, tmp_path / "trace.parquet")
    write_latency(grid(), tmp_path / "latency.parquet")
    write_info(RunInfo("bundled", "bundled"), tmp_path)
    monkeypatch.setattr(RunInfo, "load", lambda self: pair())
    names = ["fixed:gamma=3", "svip", "confidence-freeze", "batch-table"]
    rows = BatchRuns(CheckedPair(run=tmp_path, policy=names, repeats=1), "1,3").rows()
    assert rows[["batch", "policy"]].apply(tuple, axis=1).tolist() == [
        (b, p) for b in (1, 3) for p in ("autoregressive", *names)
    ]
    # Decisions are the simulator's own, batch by batch; only seconds can differ.
    assert (rows["rounds_differ"] == 0).all()
    assert (rows["measured_s"] > 0).all()
    assert (rows["predicted_s"] > 0).all()
    kept = read_measured(tmp_path / "measured_batches.parquet").times
    assert set(kept["batch"]) == {1, 3}
    with pytest.raises(DraftsimError, match="beyond the largest batch measured, 4"):
        BatchRuns(CheckedPair(run=tmp_path, policy=names), "8")
