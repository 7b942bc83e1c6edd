"""The shapes of the suite's pairs, and how what is measured of them is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.stand_in import write
from policies import Fixed
from policies.core import Round
from profiler.latency.host import dictating_trace, passes_s
from profiler.models.architectures import ARCHITECTURES
from profiler.suite.pair import error_summary
from simulator.pricing import price
from tests.serving import table_of
from traces.replay.run import replay


def test_error_summary_counts_both_signs() -> None:
    assert error_summary([0.01, -0.03, 0.02]) == {"points": 3, "median": 0.02, "largest": 0.03}
    assert error_summary([]) == {"points": 0}


def test_a_stand_in_follows_every_token_by_itself_whatever_came_before(tmp_path: Path) -> None:
    """No near-tie of bfloat16 can then change its text in an engine."""
    shape = ARCHITECTURES["qwen2.5-coder-0.5b"]
    small = replace(shape, hidden=256, inner=512, layers=2, heads=4, head_dim=64, vocab=512)
    write(small, tmp_path / "model", "cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    ids = torch.randint(small.vocab, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    assert torch.equal(logits.argmax(-1), ids[0])
    first, second = logits.topk(2).values.unbind(-1)
    assert (second < 0.7 * first).all()


def test_rounds_are_priced_as_the_simulator_prices_them() -> None:
    """Host time is what the passes leave: both sides must mean the same passes."""
    rows = [("target", "forward", 1, w, c, 1e-2 + 1e-3 * w + 1e-6 * c, 0.0, 1)
            for w in (1, 9) for c in (16, 512)]  # fmt: skip
    rows += [("draft", phase, 1, w, c, 1e-3 * scale * w + 1e-7 * c, 0.0, 1)
             for phase, scale in (("forward", 1.0), ("catch_up", 1.7))
             for w in (1, 2) for c in (16, 512)]  # fmt: skip
    table = table_of(rows)
    trace = dictating_trace(2, 60, 40, 8)
    log = replay(trace, Fixed(3))
    per_request = price(log, table).decode_s
    assert (log.rounds["catch_up"] > 1).any()
    for i in range(2):
        rounds = [Round(*map(int, (r[n] for n in Round._fields)))
                  for r in log.rounds[log.rounds["request"] == i]]  # fmt: skip
        assert passes_s([[one] for one in rounds], 40, table) == pytest.approx(per_request[i])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_the_parameters_they_are_named_for(name: str) -> None:
    """On the meta device, so without memory: the formula and transformers agree."""
    shape = ARCHITECTURES[name]
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(shape.config())
    counted = sum(p.numel() for p in model.parameters())
    # Norms and biases, which the formula leaves out.
    assert 0 <= counted - shape.parameters <= 0.002 * counted
    published = {"llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.236e9, "vicuna-7b": 6.74e9,
                 "vicuna-13b": 13.02e9, "vicuna-68m": 68e6, "vicuna-160m": 162e6,
                 "qwen2.5-32b": 32.76e9, "qwen2.5-0.5b": 0.494e9, "codellama-7b": 6.74e9,
                 "codellama-13b": 13.02e9}  # fmt: skip
    if name in published:
        assert counted == pytest.approx(published[name], rel=0.01)
    tiny = shape.miniature()
    assert tiny.heads // tiny.kv_heads == shape.heads // shape.kv_heads
    assert tiny.parameters < 1e6
