"""Passes of encoder-decoder models: equal to the model's own, and priced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from commands.common.progress import progress_bar
from profiler.decoding.single import greedy
from profiler.latency.table import Grid
from profiler.models.seq2seq import Seq2SeqRunner
from profiler.profile import Settings, profile_latency
from tests.few_cells import few_cells
from tests.seq2seq import GAMMA, KINDS, NEW, build, models, pair, source


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32's rounding, on the scale of the logits."""
    scale = float(expected.abs().max())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_equal_the_models_own_whatever_the_slots_held(kind: str) -> None:
    """Whole, token by token, and after another source and rejected tokens."""
    model = models(kind)[0]
    runner = Seq2SeqRunner(model, 200)
    for seed in (1, 2):
        text = source(9 + seed, seed)
        tokens = torch.cat([runner.begin(text), source(14, seed + 10)])
        with torch.inference_mode():
            expected = model(input_ids=text[None], decoder_input_ids=tokens[None]).logits[0]
        assert_close(runner.forward(tokens, 0), expected)
        steps = [runner.forward(tokens[i : i + 1], i, keep=1) for i in range(15)]
        assert_close(torch.cat(steps), expected)
        runner.forward(source(6), 5)  # rejected: written over by the next pass
        assert_close(runner.forward(tokens[5:], 5, keep=3), expected[-3:])


@pytest.mark.parametrize("kind", KINDS)
def test_branches_of_a_tree_equal_sequences_of_their_own(kind: str) -> None:
    model = models(kind)[0]
    runner, text = Seq2SeqRunner(model, 200), source()
    path = torch.cat([runner.begin(text), source(14, 3)])
    runner.forward(path, 0)
    count, cuts, tails = path.shape[0], (9, 4), source(6, 4).reshape(2, 3)
    sees = torch.arange(count)[None] < torch.tensor(cuts)[:, None]
    for step in range(3):
        mask = torch.cat([sees, *[torch.eye(2, dtype=torch.bool)] * (step + 1)], dim=1)
        logits = runner.forward(
            tails[:, step], count + 2 * step, mask=mask, positions=torch.tensor(cuts) + step
        )
        for branch, cut in enumerate(cuts):
            alone = torch.cat([path[:cut], tails[branch, : step + 1]])
            with torch.inference_mode():
                expected = model(input_ids=text[None], decoder_input_ids=alone[None]).logits[0, -1]
            assert_close(logits[branch], expected)
    # The same pass with the slots as positions is another one: the positions did reach it.
    slots = runner.forward(tails[:, 2], count + 4, mask=mask)
    assert float((slots - logits).abs().max()) > 1e-2


def test_the_forced_first_token_and_banned_ids_are_as_in_generate() -> None:
    model = build("bart", 2)
    plain = greedy(Seq2SeqRunner(model, 64), source(), NEW, frozenset())
    model.generation_config.forced_bos_token_id = 5
    model.generation_config.bad_words_ids = [[plain[0]], [plain[1], plain[2]]]
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    runner = Seq2SeqRunner(model, 64)
    assert runner.prefix.tolist() == [2, 5]
    model.generation_config.bad_words_ids = [[plain[0]]]
    expected = model.generate(input_ids=source()[None], max_new_tokens=NEW + 1, do_sample=False)
    mine = greedy(Seq2SeqRunner(model, 64), source(), NEW, frozenset())
    assert expected[0].tolist() == [2, 5, *mine]
    assert plain[0] not in mine


def test_the_latency_table_prices_the_encoder_with_the_prefill(tmp_path: Path) -> None:
    both = pair("bart")
    grid = Grid(widths=(1, 5, 9), contexts=(16, 64, 900), prompts=(8, 32, 900), repeats=3)
    with progress_bar() as progress, few_cells():
        table = profile_latency(both, Settings(NEW, GAMMA, grid=grid), tmp_path, progress)
    cells = table.cells
    prefill = cells[cells["phase"] == "prefill"]
    assert sorted(set(prefill["new_tokens"])) == [8, 32]
    assert set(cells[cells["phase"] == "forward"]["context"]) == {16, 64}
    assert set(cells["phase"]) >= {"prefill", "forward", "catch_up", "signal", "host_round", "head"}
    assert (cells["median_s"] >= 0).all()
