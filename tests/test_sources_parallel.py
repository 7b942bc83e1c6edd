"""One-pass drafters: drafts drawn from acceptance by position, and what one pass costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from simulator.pricing import price
from tests.conftest import Run
from tests.outputs import trace_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import fidelity_of
from traces.sources.as_draft import drafted_latency, drafted_trace
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source
from traces.sources.starts.parallel import Parallel, drawn_starts
from traces.sources.starts.sources import StartRecording

ACCEPTANCE = (0.8, 0.5, 0.3, 0.1)
TEXT = "parallel:acceptance=[0.8,0.5,0.3,0.1]"


@pytest.fixture(scope="module")
def trace() -> Trace:
    rng = np.random.default_rng(0)
    outputs = [[*rng.integers(2, 50, 1500).tolist(), 1] for _ in range(4)]
    return trace_of(outputs, 1501, [[5, 6, 7]] * 4, [1])


def probs(recorded: StartRecording) -> Any:
    """Probabilities of all drafts, (starts, offsets)."""
    return np.exp((recorded["top1"] - recorded["logsumexp"]).astype(np.float64))


def test_every_position_is_accepted_as_often_as_was_asked(trace: Trace) -> None:
    recorded = drawn_starts(trace, ACCEPTANCE)
    true = np.asarray(trace.columns["token"])
    starts = np.concatenate([np.arange(b + 1, b + 1490) for b in recorded.request_starts[:-1]])
    ahead = starts[:, None] + np.arange(4)
    shares = np.cumprod(recorded["token"][starts] == true[ahead], axis=1).mean(0)
    error = np.sqrt(np.array(ACCEPTANCE) * (1 - np.array(ACCEPTANCE)) / len(starts))
    assert (np.abs(shares - ACCEPTANCE) < 4 * error).all()
    # The confidence is the position's own chance, given that those before it were accepted.
    chances = [0.8, 0.5 / 0.8, 0.6, 1 / 3]
    np.testing.assert_allclose(probs(recorded)[starts].mean(0), chances, rtol=1e-5)


def test_a_drawn_confidence_is_the_chance_of_its_token(trace: Trace) -> None:
    recorded = drawn_starts(trace, (0.6,), concentration=1.5, seed=3)
    true = np.asarray(trace.columns["token"])
    starts = np.concatenate([np.arange(b + 1, b + 1490) for b in recorded.request_starts[:-1]])
    prob, right = probs(recorded)[starts, 0], recorded["token"][starts, 0] == true[starts]
    for low, high in ((0.05, 0.4), (0.4, 0.8), (0.8, 1.0)):
        some = (prob >= low) & (prob < high)
        assert some.sum() > 300
        error = np.sqrt(prob[some].mean() * (1 - prob[some].mean()) / some.sum())
        assert abs(right[some].mean() - prob[some].mean()) < 4 * error


def test_drawn_drafts_are_approximate(trace: Trace) -> None:
    source = parse_source(TEXT)
    assert replay_source(trace, source, Fixed(2)).fidelity == "approximate"
    drawn = source.completed(trace, {})
    assert fidelity_of(drafted_trace(trace, source, drawn)) == "approximate"


def test_all_tokens_cost_one_pass(trace: Trace) -> None:
    table = LatencyTable.constant(1.0, 0.25)
    source = parse_source(TEXT)
    logs = [replay_source(trace, source, Fixed(k)) for k in (1, 2, 4)]
    for log in logs:
        drafting = log.rounds["drafted"] > 0
        np.testing.assert_allclose(price(log, table).draft_s, 0.25 * drafting)
    # The pass reads what was verified, and three masks.
    calls = logs[2].recorded_calls
    assert calls is not None
    emitted = logs[2].rounds["emitted"]
    same = np.flatnonzero(logs[2].rounds["request"][1:] == logs[2].rounds["request"][:-1])
    drafted = np.isin(same + 1, calls["round"])
    place = np.searchsorted(calls["round"], same[drafted] + 1)
    np.testing.assert_array_equal(calls["new_tokens"][place], emitted[same[drafted]] + 3)
    recordings = source.completed(trace, {})
    alike = drafted_latency(table, source, recordings)
    drafted_as = drafted_trace(trace, source, recordings)
    assert (drafted_as.takes_verified, drafted_as.drafts_end, drafted_as.max_gamma) == (
        True, True, 4,
    )  # fmt: skip
    assert float(alike.estimate("draft", "forward").seconds) == 0
    assert float(alike.estimate("draft", "catch_up", new_tokens=3).seconds) == 0.25


def test_cutting_what_is_verified_raises_the_share_accepted(trace: Trace) -> None:
    source = parse_source(TEXT + ",concentration=1")
    shares = []
    for text in ("fixed:gamma=4", "confidence-scheduled:gamma=4", "adaptive-verification:gamma=4"):
        log = replay_source(trace, source, parse_policy(text, max_gamma=4))
        shares.append(log.rounds["accepted"].sum() / log.rounds["drafted"].sum())
        assert (log.rounds["draft_forwards"] >= log.rounds["drafted"]).all()
    assert shares[0] < shares[1]
    assert shares[0] < shares[2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parallel:acceptance=[0.5,0.6]", "rises"),
        ("parallel:acceptance=[]", "empty"),
        ("parallel:acceptance=[1.2]", "acceptance"),
        ("parallel:acceptance=[0.5],k=2", "lower k"),
        ("parallel:acceptance=[0.5],model=x", "name one"),
        ("parallel:concentration=2", "belongs to acceptance"),
        ("parallel:acceptance=[0.5],concentration=0", "expected > 0"),
    ],
)
def test_impossible_values_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_source(text)


def test_a_drafter_that_was_not_recorded_is_refused(trace: Trace) -> None:
    with pytest.raises(DraftsimError, match="profile sources --source parallel:model=DIR"):
        replay_source(trace, Parallel("head"), Fixed(1))


def test_the_command_line_simulates_and_serves_it(run: Run) -> None:
    source = "parallel:acceptance=[0.7,0.5,0.3],concentration=2"
    rows = run(
        "simulate", "--trace", "bundled", "--source", source, "--policy", "fixed:gamma=3",
        "--policy", "adaptive-verification:gamma=3", "--json", "-",
    ).rows  # fmt: skip
    named = {row["policy"]: row for row in rows}
    assert named["fixed:gamma=3"]["source"] == source
    assert named["fixed:gamma=3"]["block_efficiency"] == pytest.approx(2.5, abs=0.1)
    served = run(
        "serve", "--trace", "bundled", "--source", source, "--batch", "4", "--requests", "40",
        "--policy", "confidence-scheduled:gamma=3", "--policy", "fixed:gamma=3", "--json", "-",
    ).rows  # fmt: skip
    assert {row["policy"] for row in served} >= {"confidence-scheduled:gamma=3", "fixed:gamma=3"}
