"""Caches of ragged batches: what they hold, and the positions of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from policies import ConfidenceFreeze, Fixed, Round
from policies.batch.base import BatchPolicy
from policies.together import together_of
from profiler.checks.differences import output_of
from profiler.decoding.batch import (
    BatchedDecoder,
    Stream,
    _on_device,
    enter,
    span_positions,
    speculate_batch,
)
from profiler.models.runner import Runner
from tests.batched import END, GAMMA, NEW, SLOTS, llama, pair, prompts, run_lengths, runners, trace
from tests.batched_decoding import decode_batch
from traces.errors import DraftsimError


def test_padding_leaves_every_live_slot_as_it_is() -> None:
    runner = Runner(pair().target, 12, 3)
    ids = torch.arange(30).reshape(3, 10)
    runner.forward_batch(ids, torch.arange(10).expand(3, 10), 10)
    layer: Any = runner.cache.layers[0]
    before = layer.keys[:, :, :10].clone()
    places = torch.tensor([[-1, 10], [-1, -1], [9, 10]])
    logits = runner.forward_batch(torch.full((3, 2), 60), places, 11)
    after = layer.keys[:, :, :10]
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[2, :, :9], before[2, :, :9])
    assert not torch.equal(after[2, :, 9], before[2, :, 9])
    alone = Runner(pair().target, 12)
    wanted = alone.forward(torch.cat([ids[0], torch.tensor([60])]), 0, keep=1)
    torch.testing.assert_close(logits[0, -1:], wanted, rtol=1e-4, atol=1e-4)


class Script(BatchPolicy):
    """Caps, stops and allotments drawn at random; keeps what it was shown."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self.calls = 0

    def plan(self, loads: Sequence[Any]) -> int:
        return int(self._rng.integers(0, GAMMA + 1))

    def plan_each(self, requests: Sequence[Any], loads: Sequence[Any]) -> Sequence[int]:
        assert len(set(requests)) == len(requests) == len(loads) == loads[0].batch
        return [int(n) for n in self._rng.integers(0, GAMMA + 1, len(loads))]

    def keep_drafting(self, drafts: Sequence[Sequence[Any]]) -> bool:
        return bool(self._rng.random() < 0.85)

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        return [int(self._rng.integers(0, len(d) + 1)) for d in drafts]

    def observe(self, outcomes: Sequence[Round]) -> None:
        self.calls += 1
        assert all(o.accepted <= o.drafted <= o.draft_forwards for o in outcomes)


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths_never_corrupt_a_cache(seed: int) -> None:
    """Caps, early stops, partial verification, leaving and joining, in any order."""
    rng = np.random.default_rng(100 + seed)
    order = rng.permutation(len(prompts()))
    own = runners(int(rng.integers(2, 7)))
    done = decode_batch(
        *own, [prompts()[i] for i in order], NEW, END, Script(seed), continuous=bool(seed % 2)
    )
    assert done.outputs == [output_of(trace(), int(i)) for i in order]
    runs = run_lengths(trace())
    for i, rounds in zip(order, done.rounds, strict=True):
        position = 1
        for r in rounds:
            assert (r.position, r.accepted) == (position, min(r.drafted, runs[i][position]))
            position += r.emitted
        assert position == trace().requests[i].tokens


def test_caches_hold_what_a_fresh_pass_would_write() -> None:
    """After ragged rounds every live slot equals a one-pass prefill of the same tokens."""
    decoder, style = BatchedDecoder(*runners(4)), together_of(Script(5))
    streams = [Stream(i, prompt, NEW) for i, prompt in enumerate(prompts()[:6])]
    checked = 0
    for _ in speculate_batch(decoder, style, streams):
        for s in decoder.streams:
            true = torch.cat([s.prompt, torch.tensor(s.output)])
            for model, held in ((decoder.target, s.known - 1), (decoder.draft_model, s.in_draft)):
                fresh = Runner(model.model, SLOTS)
                fresh.forward(true[:held], 0, keep=1)
                for mine, theirs in zip(model.cache.layers, fresh.cache.layers, strict=True):
                    for name in ("keys", "values"):
                        got = getattr(mine, name)[s.row, :, :held]
                        wanted = getattr(theirs, name)[0, :, :held]
                        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
                checked += held
    assert checked > 1000


def test_what_cannot_be_decoded_says_so() -> None:
    with pytest.raises(DraftsimError, match="the prompt is empty"):
        decode_batch(*runners(2), [prompts()[0], prompts()[0][:0]], NEW, END, Fixed(2))
    with pytest.raises(DraftsimError, match=f"exceed the context of {SLOTS}"):
        decode_batch(*runners(2), prompts(), NEW + 1, END, Fixed(2))
    decoder = BatchedDecoder(*runners(2))
    with pytest.raises(DraftsimError, match="3 sequences do not fit a batch of 2"):
        enter(
            decoder, together_of(Fixed(1)), [Stream(i, p, NEW) for i, p in enumerate(prompts()[:3])]
        )
    with pytest.raises(DraftsimError, match="batch is 0, expected at least 1"):
        Runner(pair().target, SLOTS, 0)
    with pytest.raises(DraftsimError, match="synchronise is 'best'"):
        together_of(Fixed(1), "best")  # type: ignore[arg-type]
    with pytest.raises(DraftsimError, match="policies per request"):
        together_of(ConfidenceFreeze(), "mean")
    target = runners(2)[0]
    ids = torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(DraftsimError, match="3 sequences do not fit the cache of 2"):
        target.forward_batch(ids, ids, 1)
    with pytest.raises(DraftsimError, match=f"{SLOTS + 1} tokens do not fit"):
        target.forward_batch(ids[:2], ids[:2] + SLOTS, SLOTS + 1)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_nan_is_an_error_not_an_output(which: str) -> None:
    broken = llama(1, 30)
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    models = {"target": pair().target, "draft": pair().draft, which: broken}
    own = Runner(models["target"], SLOTS, 2), Runner(models["draft"], SLOTS, 2)
    with pytest.raises(DraftsimError, match=f"the {which} produced NaN"):
        decode_batch(*own, prompts(), NEW, END, Fixed(2))


def test_nan_met_while_decoding() -> None:
    decoder, style = BatchedDecoder(*runners(2)), together_of(Fixed(2))
    enter(decoder, style, [Stream(i, p, NEW) for i, p in enumerate(prompts()[:2])])
    with torch.inference_mode():
        decoder.target.cache.layers[0].keys[1, :, 0] = float("nan")
    with pytest.raises(DraftsimError, match="the target produced NaN"):
        list(speculate_batch(decoder, style))


SPANS = st.lists(
    st.one_of(
        st.just((0, 0)),
        st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda p: (p[0], sum(p))),
    ),
    min_size=1,
    max_size=6,
).filter(lambda spans: any(stop for _, stop in spans))


@given(SPANS, st.booleans())
def test_every_row_holds_its_span_and_padding(spans, right):
    width = max(stop - start for start, stop in spans)
    found = span_positions(torch.tensor(spans), torch.arange(width), right).tolist()
    for row, (start, stop) in zip(found, spans, strict=True):
        padding = [-1] * (width - (stop - start))
        own = list(range(start, stop))
        assert row == (padding + own if right else own + padding)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting is a matter of CUDA devices")
def test_neither_host_nor_device_waits_for_positions():
    columns = torch.arange(8, device="cuda")
    _on_device([(0, 0)], columns.device)  # the first call sets up pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        spans = _on_device([(3, 6), (0, 8)], columns.device)
        positions = span_positions(spans, columns, right=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert positions.tolist() == [[-1, -1, -1, -1, -1, 3, 4, 5], list(range(8))]
