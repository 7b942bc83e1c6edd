"""Near-ties: the positions where a target in another dtype prefers another token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from benchmarks.near_ties import by_category, gaps
from profiler.recording.run import model_path
from traces.acceptance.trace import Trace
from traces.store.recordings import find_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return by_category(find_trace("bundled"), 2)


def test_a_target_prefers_what_it_wrote_and_another_does_not(trace: Trace) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path("bundled", "target"), dtype=torch.float32
    ).eval()
    own = [gap for _, gap in gaps(trace, model)]
    assert [len(gap) for gap in own] == [request.tokens for request in trace.requests]
    assert np.concatenate(own).max() == 0
    with torch.no_grad():
        model.lm_head.weight.neg_()  # the likeliest token becomes the least likely one
    assert min(gap.min() for _, gap in gaps(trace, model)) > 0


def test_outputs_are_taken_in_turn_from_every_category() -> None:
    every = find_trace("bundled")
    kinds = {request.category for request in every.requests}
    assert {r.category for r in by_category(every, len(kinds)).requests} == kinds
