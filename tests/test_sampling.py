"""Sampling: its values, the distributions it makes, and the draws from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import TopKLogitsWarper, TopPLogitsWarper

from profiler.models import sampling as sampling_module
from profiler.models.sampling import (
    coupled,
    draw,
    log_probs_at,
    probs,
    top10_log_prob,
    verify_greedily,
    verify_sampled,
)
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

LOGITS = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-9, 9, width=32)), min_size=1, max_size=40
)
"""Logits of one row; the integers make ties."""


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.5, 0.0, 6.0, 0.5, 0.0])
    count = 20_000
    drawn = draw(weights.expand(count, 7), torch.Generator().manual_seed(1))
    seen = torch.bincount(drawn, minlength=7)
    assert (seen[weights == 0] == 0).all()
    some = weights > 0
    expected = weights[some] / weights.sum() * count
    assert stats.chisquare(seen[some].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(("coin", "expected"), [(0.0, 1), (1 - 2**-24, 3), (1.0, 3)])
def test_the_ends_of_the_range_fall_on_tokens_with_a_weight(
    monkeypatch: pytest.MonkeyPatch, coin: float, expected: int
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(tuple(shape), coin))
    assert draw(torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.0]]), None).tolist() == [expected]


def transformers_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return what transformers' warpers leave, temperature before top-p."""
    return torch.softmax(
        TopPLogitsWarper(sampling.top_p)(torch.zeros(0), logits / sampling.temperature), -1
    )


@given(
    LOGITS, st.one_of(st.floats(0.01, 1), st.sampled_from([0.1, 0.5, 0.9, 1.0])),
    st.sampled_from([0.3, 1.0, 2.0]),
)  # fmt: skip
def test_the_distribution_is_that_of_transformers_whatever_the_ties(
    row: list[float], top_p: float, temperature: float
) -> None:
    logits, sampling = torch.tensor([row, row[::-1]]), Sampling(temperature, top_p)
    ours, theirs = probs(logits, sampling), transformers_probs(logits, sampling)
    # Its sort leaves open which of equal tokens at the edge are kept, but not how many.
    assert torch.allclose(ours.sort().values, theirs.sort().values, rtol=1e-6, atol=0)
    assert torch.equal((ours > 0).sum(-1), (theirs > 0).sum(-1))
    edge = torch.where(ours > 0, logits, torch.inf).amin(-1, keepdim=True)
    clear = logits != edge
    assert torch.allclose(ours[clear], theirs[clear], rtol=1e-6, atol=0)
    tokens = ours.argmin(-1)
    expected = ours.gather(1, tokens[:, None])[:, 0].log()
    assert torch.allclose(log_probs_at(logits, tokens, sampling), expected, atol=1e-4)


def test_the_cut_keeps_the_fewest_tokens_that_reach_top_p_over_a_vocabulary() -> None:
    logits = 3 * torch.randn(200, 2048, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(1.0, 0.9)
    ours = probs(logits, sampling)
    assert torch.equal(ours, transformers_probs(logits, sampling))
    plain, kept = probs(logits, Sampling(1.0)), ours > 0
    mass = (plain * kept).sum(-1)
    least = torch.where(kept, plain, torch.inf).amin(-1)
    assert (mass >= 0.9 - 1e-5).all()
    assert (mass - least < 0.9 + 1e-5).all()
    assert torch.allclose(ours, plain * kept / mass[:, None], atol=1e-6)
    assert torch.equal(probs(logits, GREEDY), plain)


def test_of_equal_tokens_at_the_edge_the_last_are_kept_whatever_the_rows() -> None:
    row = torch.zeros(1, 40)
    row[0, 7] = -5.0
    kept = probs(row, Sampling(1.0, 0.5)) > 0
    assert torch.nonzero(kept)[:, 1].tolist() == list(range(20, 40))
    rows = torch.cat([torch.randn(3, 40), row, row.flip(-1)])
    assert torch.equal(probs(rows, Sampling(1.0, 0.5))[3:4] > 0, kept)


@pytest.mark.parametrize("vocabulary", [3, 10, 1000])
def test_the_ten_likeliest_are_those_that_transformers_keeps(vocabulary: int) -> None:
    logits = 3 * torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    kept = TopKLogitsWarper(10)(torch.empty(64, 0), logits.double())
    found = top10_log_prob(logits)
    np.testing.assert_allclose(found, kept.softmax(-1).amax(-1).log(), rtol=1e-5, atol=1e-6)
    # A recording computes many rows at a time, real decoding one.
    assert found.tolist() == [float(top10_log_prob(row[None])) for row in logits]


def test_nothing_is_sorted_without_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "_cut", None)
    probs(torch.randn(2, 9), Sampling(0.7))
    with pytest.raises(TypeError):
        probs(torch.randn(2, 9), Sampling(0.7, 0.5))


@pytest.mark.parametrize(
    ("drafted", "positions", "accepted", "emitted"),
    [
        ([3, 1], 3, 2, [3, 1, 2]), ([3, 1], 2, 2, [3, 1]), ([3, 0], 3, 1, [3, 1]),
        ([0, 1], 3, 0, [3]), ([], 1, 0, [3]),
    ],
)  # fmt: skip
def test_a_greedy_draft_is_kept_up_to_the_first_difference(
    drafted: list[int], positions: int, accepted: int, emitted: list[int]
) -> None:
    logits = torch.eye(4)[[3, 1, 2]][:positions]
    found, tokens, ids = verify_greedily(torch.tensor(drafted, dtype=torch.long), logits)
    assert (found, tokens.tolist(), ids) == (accepted, emitted, emitted)


def test_a_rejection_without_a_residual_draws_from_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding alone can reject a token of two equal distributions; no cut token may follow."""
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.ones(size))
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    found = verify_sampled(torch.tensor([1]), logits, logits.expand(2, 3), Sampling(1.0, 0.5), None)
    assert (found[0], found[1].tolist(), found[2]) == (0, [1], [1])


def test_the_coupling_runs_rejection_sampling_backwards() -> None:
    """Proposals follow the draft though given the target's token; also where one is cut away."""
    target = torch.tensor([0.5, 0.3, 0.2, 0.0])
    generator, rows = torch.Generator().manual_seed(2), 40_000
    emitted = draw(target.expand(rows, 4), generator)
    for draft in (
        torch.tensor([0.1, 0.6, 0.2, 0.1]), torch.tensor([0.0, 0.0, 0.7, 0.3]), target,
        torch.tensor([0.0, 0.4, 0.0, 0.6]),
    ):  # fmt: skip
        coins = torch.rand(rows, generator=generator)
        match, rest = coupled(draft.expand(rows, 4), target.expand(rows, 4), emitted, coins)
        proposals = torch.where(match, emitted, draw(rest, generator))
        counts = torch.bincount(proposals, minlength=4)
        some = draft > 0
        assert (counts[~some] == 0).all()
        expected = (draft[some].double() * rows).numpy()
        assert stats.chisquare(counts[some].numpy(), expected / expected.sum() * rows).pvalue > 6e-5
        assert ((proposals == emitted) == match).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1, expected a finite number from 1e-05"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top-p is 0, expected above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top-p is 1.5"),
        ({"temperature": 1.0, "top_p": math.nan}, "top-p is nan"),
        ({"top_p": 0.9}, "give a temperature above 0"),
    ],
)
def test_impossible_samplings_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        Sampling(**values)
    trace = synthetic_trace(0.5, requests=2, tokens=5)
    with pytest.raises(DraftsimError, match=message):
        Trace(trace.columns, trace.requests, None, {"sampling": values})


def test_samplings_are_shown_and_kept() -> None:
    cut = Sampling(1.0, 0.9)
    assert [s.label for s in (GREEDY, Sampling(0.3), cut)] == ["greedy", "T=0.3", "T=1, top-p 0.9"]
    assert (GREEDY.options, cut.options) == ("", "--temperature 1 --top-p 0.9")
    # Files of before hold a temperature alone, and those without a cut still do.
    assert Sampling(0.3).meta == {"temperature": 0.3}
    for sampling in (GREEDY, Sampling(0.3), cut):
        assert Sampling.of({**sampling.meta, "seed": 4}) == sampling
    assert Sampling.of(None) == Sampling.of({}) == Sampling.of({"temperature": None}) == GREEDY
    with pytest.raises(DraftsimError, match="sampling has top_p='high', expected a number"):
        Sampling.of({"top_p": "high"})


def test_the_cut_of_no_rows_is_empty() -> None:
    assert probs(torch.zeros(0, 5), Sampling(1.0, 0.5)).shape == (0, 5)
    gone = log_probs_at(torch.tensor([[0.0, 9.0]]), torch.tensor([0]), Sampling(1.0, 0.5))
    assert gone.tolist() == [-math.inf]
