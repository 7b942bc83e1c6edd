"""Closed forms: published vectors, limits, identities between them, and the papers' tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.formulas import batching, gammatune, general, leviathan, parallel, specbound
from traces.errors import DraftsimError

ALPHA = st.floats(0, 1)
GAMMA = st.integers(1, 24)
RATIO = st.floats(0.01, 1)


def test_no_example_has_a_deadline() -> None:
    """Neither those of this file, which set none, nor those that set something else."""
    assert settings().deadline is None
    assert settings(max_examples=10).deadline is None


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "tokens", "speedup"),
    [
        (0.8, 5, 0.05, 3.68928, 2.951424),
        (0.6, 4, 0.1, 2.3056, 1.646857),
        (0.9, 10, 0.02, 6.861894, 5.718245),
        (0.7, 3, 0.13, 2.533, 1.822302),
        (0.5, 1, 0.5, 1.5, 1.0),
    ],
)
def test_leviathan_vectors(
    alpha: float, gamma: int, c: float, tokens: float, speedup: float
) -> None:
    assert leviathan.expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=5e-7)
    assert leviathan.speedup(alpha, gamma, c) == pytest.approx(speedup, abs=5e-7)


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 5, 1.63, 3.69), (0.9, 10, 1.60, 6.86)],
)
def test_leviathan_table_of_operations(
    alpha: float, gamma: int, operations: float, speed: float
) -> None:
    """Leviathan et al., Table 1, where c and c-hat are 0."""
    assert leviathan.operations_factor(alpha, gamma, 0) == pytest.approx(operations, abs=0.006)
    assert leviathan.speedup(alpha, gamma, 0) == pytest.approx(speed, abs=0.006)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma"),
    [(0.5, 0.05, 3), (0.6, 0.1, 3), (0.7, 0.1, 4), (0.8, 0.05, 8), (0.8, 0.1, 6), (0.9, 0.05, 13),
     (0.9, 0.2, 7)],
)  # fmt: skip
def test_optimal_gamma_vectors(alpha: float, c: float, gamma: int) -> None:
    assert leviathan.optimal_gamma(alpha, c) == gamma


@given(ALPHA, RATIO)
def test_optimal_gamma_is_the_best_of_all(alpha: float, c: float) -> None:
    best = leviathan.optimal_gamma(alpha, c)
    top = max(leviathan.speedup(alpha, g, c) for g in range(1001))
    assert leviathan.speedup(alpha, best, c) == pytest.approx(top, rel=1e-12)
    if abs(alpha - c) > 1e-9:
        assert (best > 0) == (alpha > c)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 0), (0.3, 1000), (0.9, 1000), (1.0, 1000)])
def test_free_drafts_are_as_long_as_allowed(alpha: float, gamma: int) -> None:
    assert leviathan.optimal_gamma(alpha, 0.0) == gamma
    assert leviathan.optimal_gamma(alpha, 0.0, 5) == min(gamma, 5)


@given(GAMMA, RATIO)
def test_leviathan_limits(gamma: int, c: float) -> None:
    assert leviathan.speedup(0, gamma, c) == pytest.approx(1 / (1 + gamma * c))
    assert leviathan.speedup(1, gamma, c) == pytest.approx((gamma + 1) / (1 + gamma * c))
    assert leviathan.speedup(c, 0, c) == 1
    # Corollary 3.9: alpha > c yields at least (1 + alpha) / (1 + c), with one drafted token.
    assert leviathan.speedup(c, 1, c) == pytest.approx(1)
    assert leviathan.speedup(0.5, 200, 0) == pytest.approx(2)


def test_near_one_nothing_cancels() -> None:
    assert leviathan.expected_tokens(1 - 1e-13, 7) == pytest.approx(8, rel=1e-11)


@given(GAMMA, RATIO, st.floats(1, 2))
def test_break_even_alpha_breaks_even(gamma: int, c: float, verify: float) -> None:
    if gamma * c + verify > gamma + 1:
        with pytest.raises(DraftsimError, match="no acceptance breaks even"):
            leviathan.break_even_alpha(gamma, c, verify)
        return
    alpha = leviathan.break_even_alpha(gamma, c, verify)
    tokens = leviathan.expected_tokens(alpha, gamma)
    assert general.speedup(tokens, gamma, 1.0, c, verify) == pytest.approx(1, abs=1e-9)
    assert general.break_even_verify(tokens, gamma, c) == pytest.approx(verify, abs=1e-9)
    assert general.break_even_c(tokens, gamma, verify) == pytest.approx(c, abs=1e-9)


def test_the_two_alphas_differ() -> None:
    assert leviathan.acceptance_proportion(0.8, 5) == pytest.approx(0.537856)
    wrong = gammatune.speedup(0.8, 5, 20)
    assert wrong != pytest.approx(leviathan.speedup(0.8, 5, 0.05), rel=0.1)


@given(ALPHA, GAMMA, RATIO)
def test_gammatune_is_leviathan_with_its_own_alpha(alpha: float, gamma: int, c: float) -> None:
    proportion = leviathan.acceptance_proportion(alpha, gamma)
    assert gammatune.speedup(proportion, gamma, 1 / c) == pytest.approx(
        leviathan.speedup(alpha, gamma, c)
    )
    seconds = gammatune.cost(100, proportion, gamma, gammatune.cost_ratio(1, c), c)
    assert 100 / seconds == pytest.approx(leviathan.speedup(alpha, gamma, c))


@given(GAMMA, st.floats(1, 60))
def test_gammatune_limits(gamma: int, c_gt: float) -> None:
    even = gammatune.break_even_proportion(c_gt)
    assert gammatune.speedup(even, gamma, c_gt) == pytest.approx(1)
    assert gammatune.speedup(1, gamma, c_gt) == pytest.approx(c_gt * (1 + gamma) / (c_gt + gamma))
    rising = gammatune.speedup(0.9, gamma + 1, c_gt) > gammatune.speedup(0.9, gamma, c_gt)
    if abs(0.9 - even) > 1e-6:
        assert rising == (even < 0.9)


@pytest.mark.parametrize(
    ("alpha", "gamma", "depth", "speedup"),
    [(0.8, 6, 0.3, 1.475712), (0.9, 8, 0.25, 2.071028), (0, 8, 0.25, 0.363636),
     (1, 8, 0.25, 2.909091), (0.7, 1, 0.3, 1)],
)  # fmt: skip
def test_specbound_vectors(alpha: float, gamma: int, depth: float, speedup: float) -> None:
    assert specbound.speedup(alpha, gamma, depth) == pytest.approx(speedup, abs=5e-7)


@pytest.mark.parametrize(
    ("depth", "published"),
    [(0.3, (0.509, 0.624, 0.695, 0.744, 0.779)), (0.25, (0.453, 0.571, 0.648, 0.701, 0.741))],
)
def test_specbound_break_even_table(depth: float, published: tuple[float, ...]) -> None:
    for gamma, alpha in zip((4, 6, 8, 10, 12), published, strict=True):
        assert specbound.break_even_alpha(gamma, depth) == pytest.approx(alpha, abs=6e-4)
    assert specbound.break_even_alpha(2, depth) == pytest.approx(depth)


@given(ALPHA, st.integers(1, 20), st.floats(0.01, 1))
def test_specbound_limits(alpha: float, gamma: int, depth: float) -> None:
    assert specbound.speedup(0, gamma, depth) == pytest.approx(specbound.worst_case(gamma, depth))
    assert specbound.speedup(1, gamma, depth) == pytest.approx(gamma / (1 + (gamma - 1) * depth))
    assert specbound.speedup(alpha, gamma, 1) <= 1 + 1e-12
    assert specbound.speedup(alpha, gamma, 0) == pytest.approx(
        specbound.expected_tokens(alpha, gamma)
    )
    assert specbound.speedup(alpha, 1, depth) == pytest.approx(1)
    assert specbound.speedup(alpha, 1, depth, "literal") == pytest.approx(1 + alpha)
    # n drafts and the verified position are n + 1 positions: Leviathan with c = depth.
    assert specbound.speedup(alpha, gamma + 1, depth) == pytest.approx(
        leviathan.speedup(alpha, gamma, depth)
    )


FITS = {
    (0, "Vicuna-7B"): (0.290, 0.241, 0.092, 0.66),
    (0, "Vicuna-13B"): (0.300, 0.205, 0.074, 0.62),
    (0, "Codellama-7B-Instruct"): (0.314, 0.133, 0.055, 0.70),
    (0, "Codellama-13B-Instruct"): (0.220, 0.099, 0.043, 0.83),
    (1, "Vicuna-7B"): (0.229, 0.177, 0.067, 0.81),
    (1, "Vicuna-13B"): (0.237, 0.157, 0.056, 0.78),
    (1, "Codellama-7B-Instruct"): (0.228, 0.104, 0.036, 0.82),
    (1, "Codellama-13B-Instruct"): (0.154, 0.070, 0.032, 0.92),
}


@pytest.mark.parametrize(("wasted", "model"), list(FITS))
def test_specbound_fits_its_own_table(wasted: int, model: str, shared_tables: Path) -> None:
    """Depth, RMSE, MAPE and R^2 of eq. 5 on Table 1; RAG of CodeLlama-13B is an outlier."""
    rows = pd.read_csv(shared_tables / "specbound_table1.csv", comment="#")
    rows = rows[(rows.method == "SpecBound") & rows.CR.notna() & (rows.model == model)]
    if model == "Codellama-13B-Instruct":
        rows = rows[rows.task != "RAG"]
    fit = specbound.fit_depth(rows.CR, rows.SD, wasted)
    found = (fit.depth, fit.rmse, fit.mape, fit.r_squared)
    assert found == pytest.approx(FITS[wasted, model], abs=0.006)


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"), [(0.8, 5, 2.2832), (0.6, 3, 1.4162), (0.9, 8, 3.8756)]
)
def test_pearl_vectors(alpha: float, gamma: int, tokens: float) -> None:
    assert parallel.tokens_per_step(alpha, gamma) == pytest.approx(tokens, abs=5e-5)


@given(st.floats(0, 0.95), GAMMA)
def test_pearl_limits(alpha: float, gamma: int) -> None:
    assert parallel.tokens_per_step(alpha, 1) == pytest.approx(1)
    assert parallel.tokens_per_step(alpha, 2000) == pytest.approx(1 / ((1 - alpha) * (1 + alpha)))
    assert parallel.tokens_per_step(1, gamma) == gamma
    assert parallel.tokens_per_step(alpha, gamma) >= 1 - 1e-12


def test_dsi_limits_and_vector() -> None:
    assert parallel.distributed_latency(100, 0.8, 1, 0.1) == pytest.approx(30.3, abs=0.05)
    assert parallel.distributed_latency(60, 0, 3, 0.1) == pytest.approx(60)
    assert parallel.distributed_latency(60, 1, 3, 0.1) == pytest.approx(59 * 0.1 + 1)
    assert parallel.sequential_latency(1000, 0.8, 5, 0.1) == pytest.approx(
        1000 / leviathan.speedup(0.8, 5, 0.1), rel=5e-3
    )


@given(st.integers(1, 30), ALPHA, st.integers(1, 8), st.floats(0.01, 1.5))
def test_dsi_never_falls_behind_plain_decoding(s: int, alpha: float, k: int, c: float) -> None:
    assert parallel.distributed_latency(s, alpha, k, c) <= s * (1 + 1e-12)


@given(ALPHA, GAMMA, RATIO)
def test_magicdec_is_leviathan_where_verification_is_free(
    alpha: float, gamma: int, c: float
) -> None:
    tokens = leviathan.expected_tokens(alpha, gamma)
    ratio = batching.time_ratio(tokens, gamma, 2.0, 2 * c, 2.0)
    assert 1 / ratio == pytest.approx(leviathan.speedup(alpha, gamma, c))
    assert batching.time_ratio(tokens, gamma, 2.0, 2 * c, 2.0, selection_s=0.1) > ratio


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [(1, 3.68928), (2, 2.58689), (4, 1.685768), (8, 1.201567), (16, 1.028963), (32, 1.000793)],
)
def test_truncated_batch_vectors(batch: int, tokens: float) -> None:
    assert batching.truncated_tokens([0.8] * batch, 5) == pytest.approx(tokens, abs=5e-6)


def test_truncated_batch_of_unequal_sequences() -> None:
    assert batching.truncated_tokens([0.9, 0.5], 3) == pytest.approx(1 + 0.45 + 0.45**2 + 0.45**3)


@given(ALPHA, st.integers(0, 12), st.integers(1, 64))
def test_goodput_between_none_and_all_speculating(alpha: float, gamma: int, batch: int) -> None:
    none = batching.goodput(alpha, gamma, batch, 0, 0.01)
    all_ = batching.goodput(alpha, gamma, batch, batch, 0.01)
    assert none == pytest.approx(batch / 0.01)
    assert all_ == pytest.approx(none * leviathan.expected_tokens(alpha, gamma))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=50), st.integers(0, 20))
def test_block_efficiency_is_the_mean_of_the_capped_runs(runs: list[int], gamma: int) -> None:
    survival = general.empirical_survival(runs, gamma)
    expected = 1 + np.minimum(runs, gamma).mean()
    assert general.block_efficiency(survival) == pytest.approx(expected)


@given(ALPHA, GAMMA)
def test_block_efficiency_of_iid_survival(alpha: float, gamma: int) -> None:
    survival = alpha ** np.arange(1, gamma + 1)
    assert general.block_efficiency(survival) == pytest.approx(
        leviathan.expected_tokens(alpha, gamma)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: leviathan.speedup(1.2, 4, 0.1), "alpha is 1.2, expected between 0 and 1"),
        (lambda: leviathan.speedup(0.5, -1, 0.1), "gamma is -1, expected at least 0"),
        (lambda: leviathan.optimal_gamma(1.2, 0.0), "alpha is 1.2, expected between 0 and 1"),
        (lambda: gammatune.cost_ratio(1.0, 0.0), "draft_s is 0.0"),
        (lambda: specbound.round_cost(4, 1.5), "depth is 1.5"),
        (lambda: specbound.break_even_alpha(1, 0.3), "gamma is 1"),
        (lambda: general.block_efficiency([0.2, 0.4]), "survival function must fall"),
        (lambda: parallel.tokens_per_step(0.5, 0), "gamma is 0"),
        (lambda: parallel.distributed_latency(0, 0.5, 1, 0.1), "tokens is 0"),
        (lambda: batching.goodput(0.5, 2, 4, 5, 0.1), "proposing is 5"),
        (lambda: specbound.fit_depth([1.0], [1.0]), "expected two or more"),
    ],
)
def test_impossible_values_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(DraftsimError, match=message):
        call()
