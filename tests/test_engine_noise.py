"""Errors judged by repeats, for runs whose scatter is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import halfnorm

from simulator.engines import MOST, slower_by, with_profile_errors, with_speedups
from simulator.validation import expected_median, noise_said, scatter

OFF = "autoregressive"
ARMS = (OFF, "a", "b", "c", "d", "e", "f")


def rows_of(
    rng: np.random.Generator, repeats: int, own: float, shared: float, arms: tuple[str, ...] = ARMS
) -> list[dict[str, Any]]:
    """Arms that are all predicted rightly, as engines that scatter measure them."""
    hour = rng.normal(0, shared, repeats)
    found = []
    for i, policy in enumerate(arms):
        rates = (50 + 10 * i) * np.exp(hour + rng.normal(0, own, repeats))
        found.append({
            "load": "closed:4", "policy": policy, "throughputs": rates.tolist(),
            "throughput": float(rates.mean()), "throughput_predicted": 50.0 + 10 * i,
            "error": 0.0, "busy_error": 0.0, "repeats": repeats, "paced_error": None,
        })  # fmt: skip
    return with_speedups(found, OFF)


def test_a_rightly_predicted_engine_errs_by_its_noise() -> None:
    """Errors in units of their stated noise have a mean square of 1, in many sessions together."""
    rng = np.random.default_rng(5)
    sessions = [rows_of(rng, 4, 0.02, 0.05) for _ in range(400)]
    scaled = [[r["speedup_error"] / r["speedup_noise"] for r in rows[1:]] for rows in sessions]
    squares = np.mean(np.square(scaled), axis=1)  # arms of a session share their "off"
    # A noise estimated from 18 degrees of freedom is a t's, whose square is 18 / 16 in the mean.
    assert np.mean(squares) == pytest.approx(18 / 16, abs=4 * squares.std() / math.sqrt(400))
    assert np.mean([rows[0]["speedup_noise"] for rows in sessions]) == 0


def test_the_median_that_a_perfect_model_shows_is_found_in_such_sessions() -> None:
    rng = np.random.default_rng(6)
    medians, floors = [], []
    for _ in range(400):
        rows = rows_of(rng, 2, 0.03, 0.0)[1:]
        medians.append(float(np.median([abs(row["speedup_error"]) for row in rows])))
        floors.append(expected_median([row["speedup_noise"] for row in rows]))
    off_by = 4 * np.std(medians) / math.sqrt(400)
    assert np.mean(floors) == pytest.approx(np.mean(medians), abs=off_by + 0.001)


def test_what_all_arms_of_a_repeat_share_is_no_noise_of_their_ratios() -> None:
    rng = np.random.default_rng(7)
    logs = rng.normal(0, 0.01, (7, 60)) + rng.normal(0, 0.2, 60)
    assert scatter(logs, shared=True) == pytest.approx(0.01, rel=0.15)
    assert scatter(logs) > 0.1  # type: ignore[operator]


def test_the_expected_median_is_that_of_normal_errors() -> None:
    assert expected_median([0.02] * 5) == pytest.approx(halfnorm.median(scale=0.02))
    assert expected_median([0.0, 0.0, 0.5]) == pytest.approx(0, abs=1e-9)
    draws = np.abs(np.random.default_rng(1).normal(0, [[0.01], [0.02], [0.08]], (3, 40_000)))
    assert expected_median([0.01, 0.02, 0.08]) == pytest.approx(float(np.median(draws)), rel=0.02)


def test_one_repeat_tells_no_noise() -> None:
    rows = rows_of(np.random.default_rng(1), 1, 0.02, 0.0)
    assert {row["noise"] for row in rows} == {row["speedup_noise"] for row in rows} == {None}
    assert noise_said(rows, OFF) is None
    alone = rows_of(np.random.default_rng(1), 3, 0.02, 0.0, (OFF,))
    assert alone[0]["noise"] > 0
    assert alone[0]["speedup_noise"] is None


def test_it_is_said_how_many_repeats_a_bound_takes() -> None:
    rows = rows_of(np.random.default_rng(3), 2, 0.03, 0.0)
    said = str(noise_said(rows, OFF))
    assert "perfect model would show" in said
    floor = expected_median([row["speedup_noise"] for row in rows[1:]])
    assert f"(1% with {math.ceil(2 * (floor / 0.01) ** 2)} repeats)" in said
    calm = rows_of(np.random.default_rng(3), 2, 0.001, 0.0)
    assert "(1% with " not in str(noise_said(calm, OFF))


def test_speedups_on_the_wrong_side_of_1_are_told_from_noise() -> None:
    row = {"policy": "p", "speedup_error": 0.1, "repeats": 3, "paced_speedup_error": None}
    near = row | {"speedup": 1.03, "speedup_predicted": 0.99, "speedup_noise": 0.02}
    far = row | {"speedup": 0.9, "speedup_predicted": 1.2, "speedup_noise": 0.02}
    right = row | {"speedup": 1.5, "speedup_predicted": 1.6, "speedup_noise": 0.02}
    said = str(noise_said([near, far, right], OFF))
    assert "; 2 of 3 are on the wrong side of 1x, 1 of them by more than 2 standard errors" in said
    assert str(noise_said([right], OFF)).endswith("0 of 1 are on the wrong side of 1x")


def test_errors_of_arms_on_a_slow_machine_are_told_by_what_else_ran_beside_them() -> None:
    told = {"usual": 1e-3, "counted": 1.1e-3, "follows": 0.5}
    assert slower_by([1.1e-3 * 1.21], told) == pytest.approx(1.1)
    assert slower_by([1.0, 1.1e-3, 1e-9], told) == pytest.approx(1)
    assert slower_by([1.0], told) == pytest.approx(MOST**0.5)  # disturbed itself
    assert slower_by([1.1e-3], {"usual": 1e-3}) is None
    rows = rows_of(np.random.default_rng(1), 2, 0.0, 0.0, (OFF, "a"))
    for row, slower in zip(rows, (1.0, 1.2), strict=True):
        row |= {"throughput": row["throughput_predicted"] / slower}
        error = row["throughput_predicted"] / row["throughput"] - 1
        row["paced_error"] = (1 + error) / slower - 1
    _, slow = with_speedups(rows, OFF)
    assert slow["speedup_error"] == pytest.approx(0.2)
    assert slow["paced_speedup_error"] == pytest.approx(0)


def test_rows_of_two_tables_stand_beside_each_other() -> None:
    rows, old = (rows_of(np.random.default_rng(seed), 2, 0.02, 0.0) for seed in (1, 2))
    found = with_profile_errors(rows, old)
    assert [row["profile_speedup_error"] for row in found] == [row["speedup_error"] for row in old]
