"""On a pretended GPU: nothing mixes devices, and the host waits as seldom as promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policies.core import speculate
from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from policies.rules.registry import parse_rule
from policies.together import PerRequest
from profiler.decoding.batch import BatchedDecoder, Stream, enter, speculate_batch
from profiler.decoding.forced import ForcedDecoder, ForcedStream
from profiler.decoding.single import ModelDecoder
from profiler.latency.host import dictating_trace, host_beyond
from profiler.latency.passes import a_layer, layer_blocks, pass_blocks
from profiler.latency.table import Grid, Sweeps, swept
from profiler.models.graphs import GraphRunner, captured
from profiler.models.runner import Runner
from profiler.models.sampling import draw
from profiler.models.stack import LayerRunner
from profiler.recording.trace import Recorder
from tests.batched_decoding import decode_batch
from tests.pretend_gpu import CUDA, PretendedError, PretendedGPU, pretended
from traces.acceptance.sampling import GREEDY, Sampling
from traces.latency.table import as_cells

SLOTS, WORDS, NEW = 200, 61, 10
HALF = torch.bfloat16
"""Precision of a GPU's models: where signals are read in float32, it takes one operation more."""
RUNNERS = (Runner, GraphRunner)
READERS = ("svip", "confidence")


class ReadingFixed(Fixed):
    """A fixed length that reads a signal of every drafted token, as adaptive policies do."""

    reads = ("prob",)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        if draft:
            _ = draft[-1].prob
        return super().keep_drafting(draft)


@cache
def model(layers: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.4, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(dtype)


@pytest.fixture
def gpu() -> Iterator[PretendedGPU]:
    with pretended() as device:
        yield device


def pair(gpu: PretendedGPU, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A target and a draft on the device; they agree now and then."""
    models = model(2, dtype), model(1, dtype)
    for one in models:
        gpu.mark([*one.parameters(), *one.buffers()])
    return models


def ids(count: int, seed: int = 0) -> torch.Tensor:
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    drawn = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed))
    return drawn.to(CUDA)


def runners(
    gpu: PretendedGPU, make: Any = Runner, dtype: torch.dtype = torch.float32, batch: int = 1
) -> tuple[Any, Any]:
    target, draft = pair(gpu, dtype)
    return make(target, SLOTS, batch), make(draft, SLOTS, batch)


@pytest.mark.parametrize("make", RUNNERS)
def test_the_host_waits_once_a_round_where_no_signal_is_read(gpu: PretendedGPU, make: Any) -> None:
    target, draft = runners(gpu, make, HALF)
    samplings = GREEDY, Sampling(0.7), Sampling(1.0, 0.9)
    for text in ("fixed:gamma=0", "fixed:gamma=4", "gammatune"):
        for sampling in samplings:
            generator = torch.Generator("cuda").manual_seed(1)
            decoder = ModelDecoder(
                target, draft, ids(20), NEW, watch_eos=False, sampling=sampling,
                generator=generator,
            )  # fmt: skip
            with gpu.counted() as waits:
                rounds = list(speculate(decoder, parse_policy(text, max_gamma=24)))
            assert len(waits) == len(rounds), Counter(waits)
            assert len(decoder.output) == NEW


@pytest.mark.parametrize("make", RUNNERS)
def test_reading_signals_waits_once_a_token_more(gpu: PretendedGPU, make: Any) -> None:
    target, draft = runners(gpu, make, HALF)
    for policy in (ReadingFixed(3), *(parse_policy(text, max_gamma=24) for text in READERS)):
        for sampling in (GREEDY, Sampling(1.0, 0.9)):
            decoder = ModelDecoder(
                target, draft, ids(20), NEW, watch_eos=False, sampling=sampling,
                generator=torch.Generator("cuda").manual_seed(1),
            )  # fmt: skip
            with gpu.counted() as waits:
                rounds = list(speculate(decoder, policy.fresh()))
            drafted = sum(r.draft_forwards for r in rounds)
            assert len(rounds) < len(waits) <= len(rounds) + drafted, Counter(waits)
            assert {w.what for w in waits} == {"tolist"}  # all signals of a token together


class Wavering:
    """Weights whose sums waver by their last place, as on a GPU, which adds in another order."""

    is_cuda, device = True, torch.device("cpu")

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def cumsum(self, dim: int, dtype: Any = None) -> torch.Tensor:
        sums = self.weights.cumsum(dim, dtype=dtype)
        off = torch.randint(-1, 2, sums.shape, generator=torch.Generator().manual_seed(0))
        return sums * (1 + torch.finfo(sums.dtype).eps * off)


def test_a_draw_is_never_a_token_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.arange(100) % 5 == 0
    weights = torch.rand(50, 100, generator=torch.Generator().manual_seed(1)) * kept
    for at in range(0, 95, 5):  # just where the sums stay the same
        coins = (weights.cumsum(-1)[:, at] / weights.sum(-1))[:, None]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *_, own=coins, **__: own)
            drawn = draw(Wavering(weights), None)  # type: ignore[arg-type]
        assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_watching_for_the_end_waits_for_every_token(gpu: PretendedGPU) -> None:
    target, draft = runners(gpu)
    decoder = ModelDecoder(target, draft, ids(20), 20, frozenset({WORDS + 1}))
    with gpu.counted() as waits:
        rounds = list(speculate(decoder, Fixed(3)))
    assert len(waits) == len(rounds) + sum(r.draft_forwards for r in rounds)


@pytest.mark.parametrize("text", ["csd", "cm-asd", "typical"])
def test_a_lossy_rule_costs_no_wait_more(gpu: PretendedGPU, text: str) -> None:
    target, draft = runners(gpu, dtype=HALF)
    rule = parse_rule(text)
    rule.begin_run(WORDS, 0.0)
    decoder = ModelDecoder(target, draft, ids(20), 16, watch_eos=False, rule=rule)
    with gpu.counted() as waits:
        rounds = list(speculate(decoder, Fixed(3)))
    assert len(waits) == len(rounds), Counter(waits)


def test_rounds_are_those_of_the_cpu() -> None:
    outcomes = []
    for make in (*RUNNERS, None):
        for text in ("fixed:gamma=4", "svip", "gammatune-plus"):
            if make is None:
                plain = Runner(model(2), SLOTS), Runner(model(1), SLOTS)
                prompt = torch.randint(WORDS, (33,), generator=torch.Generator().manual_seed(0))
                decoder = ModelDecoder(*plain, prompt, 24, watch_eos=False)
                rounds = list(speculate(decoder, parse_policy(text, max_gamma=24)))
            else:
                with pretended() as gpu:
                    decoder = ModelDecoder(*runners(gpu, make), ids(33), 24, watch_eos=False)
                    rounds = list(speculate(decoder, parse_policy(text, max_gamma=24)))
            outcomes.append((rounds, decoder.output))
    assert outcomes[:3] == outcomes[3:6] == outcomes[6:]


@pytest.mark.parametrize("make", RUNNERS)
def test_a_batch_waits_once_an_iteration(gpu: PretendedGPU, make: Any) -> None:
    target, draft = runners(gpu, make, HALF, batch=4)
    for policy, reads in ((Fixed(3), False), (ReadingFixed(3), True)):
        decoder, style = BatchedDecoder(target, draft, watch_eos=False), PerRequest(policy)
        enter(decoder, style, [Stream(i, ids(9 + i, i), 8 + 2 * i) for i in range(4)])
        with gpu.counted() as waits:
            log = list(speculate_batch(decoder, style))
        steps = sum(max(r.draft_forwards for _, r in iteration) for iteration in log)
        if reads:  # those of all sequences together, once a step of the batch
            assert len(log) < len(waits) <= len(log) + steps, Counter(waits)
        else:
            assert len(waits) == len(log), Counter(waits)


@pytest.mark.parametrize("synchronise", ["ragged", "minimum", "mean"])
def test_batches_of_every_style_decode(gpu: PretendedGPU, synchronise: Any) -> None:
    target, draft = runners(gpu, GraphRunner, HALF, batch=3)
    prompts = [ids(8 + i, i) for i in range(5)]
    for text in ("fixed:gamma=2", "svip"):
        for continuous in (False, True):
            done = decode_batch(
                target, draft, prompts, 12, frozenset({3}), parse_policy(text, max_gamma=8),
                synchronise=synchronise, continuous=continuous,
            )  # fmt: skip
            assert all(len(out) == 12 or out[-1] == 3 for out in done.outputs)


@pytest.mark.parametrize("make", RUNNERS)
def test_forced_rounds_wait_as_real_ones_do(gpu: PretendedGPU, make: Any) -> None:
    trace = dictating_trace(4, 12, 10, 8)
    target, draft = runners(gpu, make, HALF, batch=4)
    single = ForcedDecoder(target, draft, trace, 0)
    with gpu.counted() as waits:
        rounds = list(speculate(single, Fixed(4)))
    assert len(waits) == len(rounds), Counter(waits)
    decoder, style = BatchedDecoder(target, draft, watch_eos=False), PerRequest(Fixed(4))
    enter(decoder, style, [ForcedStream(trace, i, WORDS, CUDA) for i in range(4)])
    with gpu.counted() as waits:
        log = list(speculate_batch(decoder, style))
    assert len(waits) == len(log), Counter(waits)


@pytest.mark.parametrize("make", RUNNERS)
def test_a_trace_with_tails_is_recorded(gpu: PretendedGPU, make: Any) -> None:
    target, draft = (make(m, 30 + 20 * 9) for m in pair(gpu, HALF))
    for sampling in (GREEDY, Sampling(1.0), Sampling(0.7, 0.9)):
        recorder = Recorder(
            target, draft, max_new_tokens=20, max_gamma=8, sampling=sampling,
            generator=torch.Generator("cuda").manual_seed(2),
        )  # fmt: skip
        with gpu.counted() as waits:
            columns = recorder.record(ids(15))
        assert (columns["offset"] > 0).any()
        # None of them for each token of the plain decoding.
        assert not [w for w in waits if w.what == "item" and "record.py" in w.where]


def test_plain_decoding_is_timed_to_its_end(
    gpu: PretendedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is ahead of a device that it never asked for a token."""
    clock = [0.0]
    monkeypatch.setattr("profiler.recording.trace.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.__setitem__(0, 5.0))
    recorder = Recorder(*runners(gpu), max_new_tokens=4, max_gamma=2)
    recorder.record(ids(5))
    assert recorder.decode_s == 5.0


@torch.inference_mode()
def test_layers_and_heads_are_timed_alone_and_captured(gpu: PretendedGPU) -> None:
    runner = LayerRunner(pair(gpu, HALF)[0], 44)
    for graphs in (False, True):
        blocks = layer_blocks(runner, "target", (1, 3), (16, 40), graphs=graphs, exits=True)
        cells = swept(list(blocks), CUDA, 1)
        assert {*zip(cells["model"], cells["phase"], strict=True)} == {
            ("target", "layer"), ("target", "head"), ("exit", "head")
        }  # fmt: skip
        each = a_layer(cells.assign(median_s=1.0), 4)
        assert set(each[each["phase"] == "layer"]["median_s"]) == {0.25}
        assert set(each[each["phase"] == "head"]["median_s"]) == {1.0}


def test_the_host_waits_at_the_end_of_a_round_alone(
    gpu: PretendedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes follow one another as in decoding; only then is the device waited for."""
    target, draft = runners(gpu, dtype=HALF)
    grid = Grid((1, 3), (16,), (8,), batch_widths=(1,))
    blocks = pass_blocks(target, draft, grid, apart=[(2, 20)], short=True)
    sweeps = Sweeps(blocks, CUDA, warmup=0)
    ended: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: ended.append(1))
    with gpu.counted() as waits:
        sweeps.run()
    rounds = sum(len(block.rounds) for block in blocks)
    read = sum(step.phase == "signal" for block in blocks for r in block.rounds for step in r)
    assert Counter(w.what for w in waits) == {"tolist": read}
    assert len(ended) == 2 * rounds
    cells = sweeps.cells()
    assert set(cells[cells["phase"] == "forward"]["context"]) == {16, 20}


@pytest.mark.parametrize("batch", [1, 4])
def test_the_hosts_share_of_dictated_runs_is_never_negative(gpu: PretendedGPU, batch: int) -> None:
    target, draft = runners(gpu, GraphRunner, HALF, batch=batch)
    rows = [(model, phase, b, w, c, 1e-9, 0.0, 1)
            for model, phase in (("target", "forward"), ("draft", "forward"), ("draft", "catch_up"))
            for b in (1, 4) for w in (1, 9) for c in (16, 64)]  # fmt: skip
    passes = as_cells(rows)
    cells = host_beyond(
        target, draft, passes, batch=batch, repeats=1, tokens=6, prompt=16, gammas=(0, 2)
    )
    assert cells["phase"].tolist() == ["host_round", "host_draft"]
    assert set(cells["batch"]) == {batch}
    assert cells["median_s"].iloc[0] > 0
    assert (cells["median_s"] >= 0).all()


def test_a_captured_call_is_computed_by_its_replay(gpu: PretendedGPU) -> None:
    buffer = torch.ones(3, device="cuda")
    out = torch.zeros(3, device="cuda")
    run = captured(lambda: out.copy_(buffer * 2), CUDA)
    buffer.fill_(4)
    run()
    assert out.tolist() == [8, 8, 8]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, PretendedError])
def test_a_shape_whose_capture_fails_is_captured_anew(
    gpu: PretendedGPU, error: type[RuntimeError]
) -> None:
    runner, _ = runners(gpu, GraphRunner)
    runner.forward(ids(30), 0)
    want = Runner(pair(gpu)[0], SLOTS)
    want.forward(ids(30), 0)
    real, calls = runner._static, []

    def failing(held: Any) -> torch.Tensor:
        calls.append(torch.cuda.is_current_stream_capturing())
        if calls[-1]:
            raise error("CUDA out of memory")
        return real(held)  # type: ignore[no-any-return]

    runner._static = failing
    stream = torch.cuda.current_stream()
    with pytest.raises(error):
        runner.forward(ids(2), 30)
    assert runner.captured == 1
    assert torch.cuda.current_stream() is stream
    runner._static = real
    torch.testing.assert_close(
        runner.forward(ids(2), 30), want.forward(ids(2), 30), rtol=1e-4, atol=1e-4
    )
    runner.forward(ids(3), 32)
    assert runner.captured == 3
