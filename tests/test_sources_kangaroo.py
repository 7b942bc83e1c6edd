"""Kangaroo's adapter: its own keys and values, and replay against real decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.core import DraftPolicy
from policies.registry import parse_policy
from profiler.features.heads import Adapter, AdapterRunner, load_module, save_module
from profiler.models.stack import LayerRunner
from profiler.sources.run import SourceRunner, measure_sources, record_sources
from profiler.sources.start_record import RecordOptions, default_skip
from profiler.train.heads import BEGINNING, default_exit_layers, train_adapter, train_all
from simulator.pricing import price
from tests.outputs import greedy, trace_of
from tests.replayed import run_as_replayed
from tests.test_sources_sampled import EOS, model
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import ADAPTER, LAYER
from traces.sources.early_exit import Kangaroo
from traces.sources.found import read_recordings, write_recordings
from traces.sources.recording import Recordings
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source

LIMIT = 24


class Irregular(DraftPolicy):
    """Drafts 0, 0, 3, 1, 5 tokens in turn: rounds without a draft leave a backlog."""

    def __init__(self) -> None:
        self._lengths, self._round = (0, 0, 3, 1, 5), 0

    def keep_drafting(self, draft: Any) -> bool:
        """Up to the round's length."""
        return len(draft) < self._lengths[self._round % 5]

    def observe(self, round: Any, draft: Any) -> None:
        """On to the next length."""
        self._round += 1


POLICIES: dict[str, DraftPolicy] = {
    "fixed": parse_policy("fixed:gamma=4"),
    "one": parse_policy("fixed:gamma=1"),
    "kangaroo": parse_policy("confidence:gamma=6,confidence_threshold=0.6"),
    "discards": parse_policy("bild:gamma_max=5,threshold=0.5"),
    "irregular": Irregular(),
}


@cache
def adapter() -> Adapter:
    """An adapter after the second of four layers, trained until some drafts are right."""
    torch.manual_seed(9)
    ids = torch.randint(23, (24, 40))
    return train_adapter(LayerRunner(model(), 64), ids, 2, steps=60)


@cache
def case() -> tuple[Trace, Recordings]:
    target = LayerRunner(model(), 128)
    prompts = [torch.tensor([i, 4, 5 + i, 2]) for i in range(8)]
    outputs = [greedy(target, p, LIMIT, frozenset({EOS})) for p in prompts]
    trace = trace_of(outputs, LIMIT, [p.tolist() for p in prompts], [EOS])
    modules, how = {"kangaroo": adapter()}, RecordOptions(tail=6)
    return trace, record_sources(model(), trace, modules, how, only=["kangaroo"])


@pytest.mark.invariant(1)
@pytest.mark.parametrize("name", list(POLICIES))
def test_replayed_rounds_are_the_real_ones(name: str) -> None:
    trace, recordings = case()
    policy = POLICIES[name]
    runner = SourceRunner(model(), trace, {"kangaroo": adapter()})
    run_layers, ran = runner.target.run_layers, []

    def spy(hidden: Any, start: int, which: Any, **kwargs: Any) -> Any:
        ran.append((hidden.shape[0], len(which)))
        return run_layers(hidden, start, which, **kwargs)

    runner.target.run_layers = spy  # type: ignore[method-assign]
    prefilled = 0
    decoder = runner.decoder

    def counted(*given: Any) -> Any:
        nonlocal prefilled
        before = len(ran)
        made = decoder(*given)
        prefilled += sum(w * n for w, n in ran[before:])
        return made

    runner.decoder = counted  # type: ignore[method-assign]
    _, log = run_as_replayed(runner, Kangaroo(), policy, trace, recordings)
    assert log.recorded_calls is not None
    layers = log.recorded_calls[log.recorded_calls["kind"] == LAYER]
    assert int((layers["count"] * layers["new_tokens"]).sum()) == (
        sum(w * n for w, n in ran) - prefilled
    )
    # A pass of the adapter per forward, over whatever positions it had missed.
    adapted = log.recorded_calls[log.recorded_calls["kind"] == ADAPTER]
    assert adapted["count"].sum() == log.rounds["draft_forwards"].sum()
    if name == "fixed":
        assert 0 < log.rounds["accepted"].sum() < log.rounds["drafted"].sum()
    if name == "one":
        assert set(adapted["new_tokens"].tolist()) == {1, 2}  # 2 after an accepted draft
    if name == "irregular":
        assert adapted["new_tokens"].max() > 2


def test_step_by_step_is_the_whole_pass() -> None:
    target = LayerRunner(model(), 64)
    hidden = torch.randn(9, 16)
    whole = AdapterRunner(adapter(), target).run(hidden, 0)
    stepwise = AdapterRunner(adapter(), target)
    parts = [stepwise.run(hidden[a:b], a) for a, b in ((0, 4), (4, 5), (5, 7), (7, 9))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)
    # A wrong token's slot is written again, and what followed it is forgotten.
    stepwise.run(torch.randn(3, 16), 5)
    torch.testing.assert_close(stepwise.run(hidden[5:9], 5), whole[5:], rtol=1e-5, atol=1e-6)


def test_an_untrained_adapter_is_the_logit_lens_and_training_beats_it() -> None:
    target = LayerRunner(model(), 64)
    norm = model().model.norm.weight.detach()
    fresh = Adapter(2, 16, 2, 8).start_from(norm)
    ids = torch.tensor([3, 9, 1, 20, 7, 7, 2, 11])
    with torch.inference_mode():
        hidden = target.run_layers(target.embed(ids), 0, range(2))
        lens = target.logits(hidden)
        final = torch.log_softmax(target.logits(target.run_layers(hidden, 0, range(2, 4))), -1)

    def distance(chosen: Adapter) -> float:
        states = AdapterRunner(chosen, target).run(hidden, 0)
        logits = torch.log_softmax(target.project(states), -1)
        return float((final.exp() * (final - logits)).sum(-1).mean())

    trained = adapter()
    with torch.inference_mode():
        states = AdapterRunner(fresh, target).run(hidden, 0)
        torch.testing.assert_close(target.project(states), lens, rtol=1e-4, atol=1e-4)
        assert distance(trained) < distance(fresh)


def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    assert [default_exit_layers(n) for n in (2, 4, 12)] == [(1,), (1, 2, 3), (3, 6, 9)]
    with pytest.raises(DraftsimError, match="a target of 1 layer has no exit before its last"):
        default_exit_layers(1)
    assert default_skip(5) == [2, 4]
    with pytest.raises(DraftsimError, match="a target of 2 layers has none between"):
        default_skip(2)
    short = torch.randint(23, (4, BEGINNING + 1))
    for kind in ("medusa", "space"):
        with pytest.raises(DraftsimError, match=r"ends its texts within 1 token,.*--heads-text"):
            train_all(LayerRunner(model(), 64), short, tmp_path, [kind], seconds=0)
    assert not any(tmp_path.iterdir())


def test_recordings_weights_and_latencies_survive_and_fit(tmp_path: Path) -> None:
    trace, recordings = case()
    write_recordings(recordings, tmp_path)
    again = read_recordings(tmp_path)
    policy = POLICIES["kangaroo"]
    log = replay_source(trace, parse_source("kangaroo"), policy, recordings=again)
    expected = replay_source(trace, Kangaroo(), policy, recordings=recordings)
    np.testing.assert_array_equal(log.rounds, expected.rounds)
    with pytest.raises(DraftsimError, match="no recording of 'kangaroo' drafts"):
        replay_source(trace, Kangaroo(), policy)
    with pytest.raises(DraftsimError, match="train one first"):
        SourceRunner(model(), trace).decoder(Kangaroo(), 0)
    target = LayerRunner(model(), 64)
    train_all(target, torch.randint(23, (4, 40)), tmp_path, ["kangaroo"], seconds=0)
    loaded = load_module(tmp_path / "kangaroo_heads.safetensors", model(), Adapter)
    assert (loaded.layer, loaded.heads, loaded.head_dim) == (1, 2, 8)
    save_module(adapter(), model(), tmp_path / "own.safetensors")
    kept = load_module(tmp_path / "own.safetensors", model(), Adapter)
    for mine, theirs in zip(kept.parameters(), adapter().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)  # half precision
    cells = measure_sources(
        LayerRunner(model(), 64), {"kangaroo": adapter()}, widths=(1, 2, 4, 7), repeats=3
    )
    priced = price(log, LatencyTable(cells))
    assert (priced.draft_s[log.rounds["draft_forwards"] > 0] > 0).all()
