"""Another acceptance rate for a trace: what stays, and which matches change."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CMASD, SVIP, Fixed
from simulator.bootstrap import RatioEstimate, ratio_of_sums
from simulator.whatif.drawn import DECAY
from simulator.whatif.tilt import (
    LONGEST_RUN,
    MatchModel,
    Tilter,
    acceptance,
    iid_like,
    signal_table,
)
from simulator.whatif.tilt_fidelity import (
    UNKNOWN_ERROR,
    compare_groups,
    compare_tilt,
    default_policies,
    speedups_at_ratio,
    summarize_error,
    tilt_errors,
)
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import MISMATCH, Trace
from traces.errors import DraftsimError
from traces.replay.run import replay


@cache
def bursty(seed: int = 0, easy: float = 0.95, hard: float = 0.4) -> Trace:
    """Easy and hard stretches, with signals that say part of it."""
    return synthetic_trace(
        Bursty(easy, hard), requests=30, tokens=150, concentration=8.0, seed=seed, eos_fraction=0.3
    )


@cache
def tilter(method: Any = "coupled") -> Tilter:
    return Tilter(bursty(), method)


def block_efficiency(trace: Trace, gamma: int) -> RatioEstimate:
    log = replay(trace, Fixed(gamma))
    return ratio_of_sums(log.per_request(log.rounds["emitted"]), log.per_request(np.ones(len(log))))


@pytest.mark.parametrize("gamma", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("method", ["coupled", "redraw"])
def test_no_shift_gives_back_block_efficiency(method: str, gamma: int) -> None:
    recorded = block_efficiency(bursty(), gamma)
    tilted = block_efficiency(tilter(method).shifted(0.0), gamma)
    error = np.hypot(recorded.standard_error, tilted.standard_error)
    assert abs(tilted.value - recorded.value) < 4 * error
    if method == "coupled":
        assert tilted.value == recorded.value


def test_redraw_gives_back_block_efficiency_on_average() -> None:
    # Over many draws the mean must agree far more narrowly than one draw does.
    trace = bursty()
    for gamma in (2, 6):
        recorded = block_efficiency(trace, gamma)
        drawn = [
            block_efficiency(Tilter(trace, "redraw", seed).shifted(0.0), gamma).value
            for seed in range(8)
        ]
        error = np.std(drawn, ddof=1) / np.sqrt(len(drawn)) + recorded.standard_error / 2
        assert abs(np.mean(drawn) - recorded.value) < 4 * error


def test_iid_matches_fail_the_same_comparison() -> None:
    # Without its stretches a trace has another block efficiency: the bound above can fail.
    trace = synthetic_trace(Bursty(0.98, 0.1), requests=80, tokens=400)
    textbook = iid_like(trace, acceptance(trace))
    pair = block_efficiency(trace, 8), block_efficiency(textbook, 8)
    error = np.hypot(pair[0].standard_error, pair[1].standard_error)
    assert abs(pair[0].value - pair[1].value) > 4 * error


@settings(max_examples=15, deadline=None)
@given(alpha=st.floats(0.05, 0.97), method=st.sampled_from(["coupled", "redraw"]))
def test_reaches_any_acceptance(alpha: float, method: str) -> None:
    tilted = tilter(method).to(alpha)
    assert acceptance(tilted) == pytest.approx(alpha, abs=3 / len(tilted.on_path))


def test_no_shift_returns_the_recording() -> None:
    trace, same = bursty(), tilter().to(acceptance(bursty()))
    for name in same.columns:
        if name == "match":  # tails are not told whether they would match
            assert (same.columns[name][same.on_path] == trace.columns[name][trace.on_path]).all()
        else:
            np.testing.assert_array_equal(same.columns[name], trace.columns[name])
    assert same.meta["tilt"]["shift"] == 0.0
    assert same.meta["fidelity"] == "approximate"


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_texts_stay_and_tails_follow_the_matches(alpha: float) -> None:
    trace = bursty()
    tilted = tilter().to(alpha)
    before, after = trace.columns, tilted.columns
    old, new = trace.on_path, tilted.on_path
    for name in ("token", "position", "request"):
        np.testing.assert_array_equal(after[name][new], before[name][old])
    match = after["match"][new]
    tails = np.diff(np.append(new, len(tilted))) - 1
    assert (tails[match != MISMATCH] == 0).all()
    agrees = after["draft_token"][new] == after["token"][new]
    assert (agrees == (match != MISMATCH)).all()
    # Whatever a policy drafts, the tails reach.
    replay(tilted, Fixed(trace.max_gamma or 0))
    replay(tilted, SVIP(gamma_max=trace.max_gamma or 0))


def test_matches_follow_the_shifted_chance() -> None:
    # Calibration: among positions of like shifted chance, that share matches.
    trace = bursty()
    model = MatchModel(trace)
    for method in ("coupled", "redraw"):
        made = tilter(method)
        shift = float(made.shifts([0.55])[0])
        match = made.shifted(shift)
        outcome = match.columns["match"][match.on_path] == 1
        odds = model.logit(outcome) + shift
        chance = 1 / (1 + np.exp(-odds))
        for part in np.array_split(np.argsort(chance), 8):
            expected = chance[part].mean()
            error = np.sqrt((chance[part] * (1 - chance[part])).sum()) / len(part)
            assert abs(outcome[part].mean() - expected) < 4 * error


def test_the_same_seed_serves_every_rate() -> None:
    low, high = tilter().to(0.5), tilter().to(0.52)
    changed = low.columns["match"][low.on_path] != high.columns["match"][high.on_path]
    # Independent draws would differ at about half of the positions near 1/2.
    assert changed.mean() < 0.06


def test_a_trace_without_signals_is_tilted_by_its_history() -> None:
    trace = synthetic_trace(Bursty(), requests=20, tokens=200)
    tilted = Tilter(trace).to(0.5)
    assert acceptance(tilted) == pytest.approx(0.5, abs=0.001)
    assert tilted.max_gamma is None
    # Stretches survive the tilt: long runs are commoner than independent draws make them.
    share = float((tilted.run_lengths >= 8).mean())
    assert share > 4 * float((iid_like(trace, 0.5).run_lengths >= 8).mean())


def test_replays_are_approximate_and_target_scores_gone() -> None:
    tilted = tilter().to(0.6)
    assert replay(tilted, Fixed(3)).fidelity == "approximate"
    assert replay(tilted, CMASD(gamma_max=10)).fidelity == "approximate"
    scored = Trace(
        {**bursty().columns, "target_draft_rank": np.zeros(len(bursty()), np.int32)},
        bursty().requests, bursty().max_gamma, bursty().meta,
    )  # fmt: skip
    assert "target_draft_rank" not in Tilter(scored).to(0.6).columns


def test_what_cannot_be_tilted_says_why() -> None:
    sure = synthetic_trace(1.0, requests=2, tokens=20)
    with pytest.raises(DraftsimError, match="same outcome"):
        Tilter(sure).to(0.5)
    with pytest.raises(DraftsimError, match=r"alpha is 1, expected strictly"):
        tilter().to(1.0)
    with pytest.raises(DraftsimError, match="alpha is 2"):
        iid_like(bursty(), 2.0)
    bad: Any = "guess"
    with pytest.raises(DraftsimError, match="method is 'guess'"):
        Tilter(bursty(), bad)
    unknown = dict(sure.columns)
    unknown["match"] = np.where(np.arange(40) % 7, unknown["match"], -1).astype(np.int8)
    with pytest.raises(DraftsimError, match="impute"):
        Tilter(Trace(unknown, sure.requests)).to(0.5)


def test_untouched_by_what_was_done_before() -> None:
    frames = [pd.DataFrame(dict(Tilter(bursty(), seed=3).to(0.6).columns)) for _ in range(2)]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.parametrize("shift", [-1.5, 0.0, 2.0])
def test_matches_are_drawn_one_after_another(shift: float) -> None:
    """The compiled draw is the loop that its model states, in Python."""
    model = MatchModel(bursty())
    margins = model.signal_logit + np.random.default_rng(1).logistic(size=len(model.signal_logit))
    [found] = model.drawn(margins, np.array([shift]))
    one, two = model.share_logit
    for first, end in itertools.pairwise(model.trace.request_starts.tolist()):
        run, share = 0, model.alpha
        for place in range(first, end):
            history = model.run_logit[run] + share * (one + two * share)
            match = bool(margins[place] + history + shift > 0)
            assert found[place] == match
            run = min(run + 1, LONGEST_RUN) if match else 0
            share = DECAY * share + (1 - DECAY) * match
    # What was drawn makes the histories that it was drawn with.
    logit = model.logit(found) - model.signal_logit
    np.testing.assert_array_equal(found, margins + logit + shift > 0)
    assert 0 < found.mean() < 1


def test_error_is_measured_against_another_recording() -> None:
    # Two recordings of the same kind, one of harder text: the tilt must come nearer to the
    # second than the first as it is, in every row.
    easy, hard = bursty(1, 0.95, 0.5), bursty(2, 0.88, 0.3)
    rows = compare_tilt(Tilter(easy), hard)
    before, after = (
        speedups_at_ratio(trace, default_policies(easy, hard)) for trace in (easy, hard)
    )
    untilted = [abs(before[name] / after[name] - 1) for name in rows["policy"]]
    assert (rows["error"].abs() < untilted).all()
    assert rows["error"].abs().median() < rows["iid_error"].abs().median()
    found = summarize_error(rows)
    assert found.worst == rows["error"].abs().max()
    assert found.at(acceptance(hard), acceptance(easy)) == pytest.approx(
        found.per_logit * found.largest
    )
    assert found.tried(acceptance(hard), acceptance(easy))
    assert not found.tried(0.999, acceptance(easy))


def test_a_recording_is_compared_with_itself_by_groups_of_prompts() -> None:
    rows = compare_groups(bursty())
    # Every pair in both directions.
    assert sorted(rows["shift"]) == pytest.approx(sorted(-rows["shift"]))
    errors = tilt_errors(bursty())
    for reads in (False, True):
        assert errors.of(reads) == summarize_error(rows[rows["reads"] == reads])
    alike = synthetic_trace(0.7, requests=3, tokens=60)
    assert tilt_errors(alike) == (UNKNOWN_ERROR, UNKNOWN_ERROR)
    assert np.isnan(UNKNOWN_ERROR.at(0.5, 0.6))
    # Where nothing matches, or everything, no error was measured and none is infinite.
    for end in (0.0, 1.0):
        assert np.isnan(errors.lengths.at(end, 0.7))
        assert not errors.lengths.tried(end, 0.7)


def test_moved_signals_come_nearer_to_a_real_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(bursty(s, 0.95, 0.5), bursty(s + 10, 0.85, 0.3)) for s in range(2)]
    reading = {"svip": SVIP(gamma_max=16), "cm-asd": CMASD(gamma_max=16)}

    def errors() -> Any:
        rows = [
            compare_tilt(Tilter(source), reference, reading)
            for easy, hard in pairs for source, reference in ((easy, hard), (hard, easy))
        ]  # fmt: skip
        return pd.concat(rows)["error"].to_numpy(float)

    moved = errors()
    monkeypatch.setattr(Tilter, "_shown", lambda *_: None)
    kept = errors()
    assert np.sqrt((moved**2).mean()) < np.sqrt((kept**2).mean())


SCORES = ("draft_logprob", "draft_entropy", "draft_top1", "draft_top2", "draft_logsumexp")


def shown(trace: Trace) -> set[tuple[float, ...]]:
    """Outcome and scores of every on-path position."""
    columns = [trace.columns[n][trace.on_path].tolist() for n in ("match", *SCORES)]
    return set(zip(*columns, strict=True))


@pytest.mark.parametrize("method", ["coupled", "redraw"])
def test_signals_move_with_the_acceptance(method: Any) -> None:
    trace = bursty()
    mean = {"recorded": trace.signal("prob")[trace.on_path].mean()}
    for alpha in (0.3, 0.9):
        tilted = tilter(method).to(alpha)
        # Those of one recorded position of that outcome, all together.
        assert shown(tilted) <= shown(trace)
        mean[str(alpha)] = tilted.signal("prob")[tilted.on_path].mean()
    assert mean["0.3"] < mean["recorded"] < mean["0.9"]


def test_signals_still_tell_the_chance_of_a_match() -> None:
    # Calibrated as recorded: among positions that show like chances, that share matches.
    # (Synthetic drafts match with just their probability.)
    trace = synthetic_trace(Bursty(), requests=60, tokens=150, concentration=8.0, seed=5)
    for alpha in (0.45, 0.8):
        tilted = Tilter(trace).to(alpha)
        match = tilted.columns["match"][tilted.on_path] == 1
        prob = tilted.signal("prob")[tilted.on_path]
        kept = trace.signal("prob")[trace.on_path]
        gaps = {}
        for name, chance in (("moved", prob), ("kept", kept)):
            parts = np.array_split(np.argsort(chance, kind="stable"), 6)
            gaps[name] = max(abs(match[p].mean() - chance[p].mean()) for p in parts)
        assert gaps["moved"] < gaps["kept"] / 2, alpha


def test_redrawn_outcomes_show_the_signals_of_like_ones() -> None:
    trace, again = bursty(), tilter("redraw").shifted(0.0)
    old, new = trace.on_path, again.on_path
    same = trace.columns["match"][old] == again.columns["match"][new]
    assert 0 < same.mean() < 1
    for name in SCORES:
        np.testing.assert_array_equal(
            again.columns[name][new][same], trace.columns[name][old][same]
        )


def test_new_mismatches_borrow_from_like_signals() -> None:
    trace = bursty()
    tilted = tilter().to(0.3)
    new = np.flatnonzero(
        (trace.columns["match"][trace.on_path] != MISMATCH)
        & (tilted.columns["match"][tilted.on_path] == MISMATCH)
    )
    signals = signal_table(trace)
    own = signals[trace.on_path]
    # The lender is known by its tail's first token, which the borrower shows.
    lent = tilted.columns["draft_logprob"][np.minimum(tilted.on_path[new] + 1, len(tilted) - 1)]
    first = trace.columns["draft_logprob"]
    heads = np.flatnonzero(trace.columns["offset"] == 1)
    lender = {float(first[row]): row - 1 for row in heads}
    known = [(i, lender[float(v)]) for i, v in zip(new, lent, strict=True) if float(v) in lender]
    assert len(known) > len(new) / 2
    distance = np.linalg.norm(own[[i for i, _ in known]] - signals[[r for _, r in known]], axis=1)
    rng = np.random.default_rng(0)
    mismatched = trace.on_path[trace.columns["match"][trace.on_path] == MISMATCH]
    anyone = signals[rng.choice(mismatched, len(known))]
    random = np.linalg.norm(own[[i for i, _ in known]] - anyone, axis=1)
    assert np.median(distance) < np.median(random) / 3
