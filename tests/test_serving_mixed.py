"""The cost of a pass that prompts share with decoding sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from commands.serve import guesses
from policies.core import Round
from policies.lengths.basic import Fixed
from simulator.serving import ClosedLoop, Limits, Scenario, simulate
from simulator.serving.cost import Chunk, EngineCost
from tests.serving import bernoulli, table_of
from traces.latency.table import LatencyTable

FORWARD = [
    ("target", "forward", b, n, c, 0.01 + 1e-3 * b * n + 1e-5 * b * c)
    for b in (1, 8)
    for n in (1, 4)
    for c in (0, 100)
]
PREFILL = [("target", "prefill", b, n, 0, 0.008 + 1e-3 * b * n) for b in (1, 4) for n in (8, 64)]
MIXED = [("target", "mixed", d, n, 0, 2e-4 * n + 1e-5 * d) for d in (1, 40) for n in (8, 64)]
COMPOSED, MEASURED = table_of(FORWARD + PREFILL), table_of(FORWARD + PREFILL + MIXED)
ROUNDS = [Round(3, n, 0, 1, 0, 1) for n in (3, 1, 2)]
SLOTS: list[Any] = [SimpleNamespace(context=c) for c in (11, 21, 31)]
ALONE_S = 0.01 + 1e-3 * 9 + 1e-5 * 60
"""Three sequences, 9 tokens, 20 tokens of context each: linear in all, so no mean is lossy."""


def prompt(tokens: int, cached: int = 0, left: int | None = None) -> Chunk:
    slot: Any = SimpleNamespace(prefilled=cached, prefill_left=tokens if left is None else left)
    return Chunk(slot, tokens)


def seconds(latency: LatencyTable, *chunks: Chunk) -> float:
    return EngineCost(latency, speculates=False)(SLOTS, ROUNDS, chunks).target_s


def test_decoding_by_itself_is_unchanged() -> None:
    assert seconds(COMPOSED) == pytest.approx(ALONE_S)


def test_measured_cells_say_what_prompts_add() -> None:
    assert seconds(MEASURED, prompt(20)) == pytest.approx(ALONE_S + 2e-4 * 20 + 1e-5 * 9)
    two = seconds(MEASURED, prompt(20), prompt(30))
    assert two == pytest.approx(ALONE_S + 2e-4 * 50 + 1e-5 * 9)


def test_more_prompt_tokens_than_beside_decoding_are_not_as_cheap_as_the_most_measured() -> None:
    """Several prompts reach a server's engine while the first one decodes."""
    launch_s = 0.011
    four = [prompt(64)] * 4
    assert seconds(MEASURED, *four) == pytest.approx(ALONE_S + 0.008 + 4 * 0.064 - launch_s)
    cost = EngineCost(MEASURED, speculates=False)
    cost(SLOTS, ROUNDS, four)
    assert [(c.phase, c.origin) for c in cost.coverage if c.phase == "mixed"] == [
        ("mixed", "composed")
    ]


def test_without_them_both_passes_are_added_less_one_launch() -> None:
    launch_s = 0.011
    assert seconds(COMPOSED, prompt(20)) == pytest.approx(ALONE_S + 0.028 - launch_s)
    # 2 prompts of 25: the prefill cells are linear in batch and width.
    both = seconds(COMPOSED, prompt(20), prompt(30))
    assert both == pytest.approx(ALONE_S + 0.008 + 0.05 - launch_s)


@pytest.mark.parametrize("lengths", [(16, 16), (8, 64), (8, 16, 64), (64, 128)])
def test_prompts_of_unlike_lengths_cost_what_each_costs_less_what_they_share(
    lengths: tuple[int, ...],
) -> None:
    def alone_s(tokens: int) -> float:
        return 0.008 + 1e-3 * tokens + 1e-5 * tokens**2

    # One by one up to 128 tokens, four together only up to 64: they take 0.9 as long as alone.
    cells = [("target", "prefill", 1, n, 0, alone_s(n)) for n in (8, 16, 32, 64, 128)]
    cells += [("target", "prefill", 4, n, 0, 0.9 * 4 * alone_s(n)) for n in (8, 16, 32, 64)]
    cost = EngineCost(table_of(FORWARD + cells), speculates=False)
    count = len(lengths)
    shared = (1 + (count - 1) / 3 * (0.9 * 4 - 1)) / count  # between one and four prompts
    found = cost([], [], [prompt(n) for n in lengths]).target_s
    assert found == pytest.approx(shared * sum(map(alone_s, lengths)))


def test_prompts_cost_a_drafter_without_a_model_nothing() -> None:
    free = [("draft", phase, b, n, c, 0.0) for _, phase, b, n, c, _ in FORWARD + PREFILL]
    cost = EngineCost(table_of(FORWARD + PREFILL + free))
    found = cost([], [], [prompt(8), prompt(20)])
    assert found.draft_s == 0.0
    assert found.target_s > 0


def test_a_pass_takes_no_less_than_its_parts() -> None:
    cheap = table_of(FORWARD + [("target", "prefill", 1, n, 0, 1e-4 * n) for n in (8, 64)])
    assert seconds(cheap, prompt(8)) == pytest.approx(ALONE_S)


def test_a_prompt_in_pieces_is_composed_after_its_first_piece() -> None:
    cost = EngineCost(MEASURED, speculates=False)
    cost(SLOTS, ROUNDS, [prompt(8, cached=16, left=40)])
    composed = [c for c in cost.coverage if c.origin == "composed"]
    assert [(c.passes, c.batch, c.new_tokens, c.context) for c in composed] == [
        (1, (9, 9), (8, 8), (16, 16))
    ]


@pytest.mark.parametrize(
    ("pieces", "width", "context"),
    [
        ([prompt(4, left=12)], 4, 0),
        ([prompt(4, cached=4, left=8)], 4, 4),
        ([prompt(4, cached=8)], 4, 8),
        ([prompt(4), prompt(2, left=10)], 3, 0),
        ([prompt(4), prompt(2, cached=8)], 3, 4),
    ],
)
def test_pieces_of_prompts_are_passes_of_their_mean_width_and_context(
    pieces: list[Chunk], width: int, context: int
) -> None:
    found = EngineCost(COMPOSED, speculates=False)([], [], pieces).target_s
    batch = len(pieces)
    assert found == pytest.approx(0.01 + 1e-3 * batch * width + 1e-5 * batch * context)


@pytest.mark.parametrize(
    ("pieces", "least", "expected"),
    [
        # The first tokens of a longer prompt are those of the measured cell.
        ([prompt(64, left=96)], 0, 0.008 + 0.064),
        # The rest takes what it adds to its prompt, or what as many tokens take alone.
        ([prompt(32, cached=64)], 0, 0.008 + 0.032),
        ([prompt(32, cached=64)], 0.02, 0.032 + 0.02 * 32),
        # A prompt that is cut makes the others no cheaper than a pass of whole prompts.
        ([prompt(24), prompt(40, left=80)], 0, 0.008 + 0.064),
    ],
)
def test_a_chunk_wider_than_the_decoding_passes_is_read_from_the_prompts(
    pieces: list[Chunk], least: float, expected: float
) -> None:
    cells = [
        ("target", "prefill", b, n, 0, 0.008 + 1e-3 * b * n + least * max(n - 64, 0))
        for b in (1, 4) for n in (8, 24, 32, 64, 96)
    ]  # fmt: skip
    found = EngineCost(table_of(FORWARD + cells), speculates=False)([], [], pieces).target_s
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("latency", "said"), [(COMPOSED, 1), (MEASURED, 0)])
def test_serving_says_which_it_was(latency: LatencyTable, said: int) -> None:
    scenario = Scenario(ClosedLoop(3), Limits(max_batch=3), 9)
    drafts = table_of([("draft", "forward", b, 1, c, 1e-3) for b in (1, 8) for c in (0, 100)])
    both = LatencyTable(_joined(latency, drafts))
    row = simulate(bernoulli(0.7, 9, 12, prompt=20), both, Fixed(2), scenario).row()
    notes = [note for note in guesses([row]) if "one launch" in note]
    assert len(notes) == said


def _joined(*tables: LatencyTable) -> Any:
    return pd.concat([t.cells for t in tables], ignore_index=True)
