"""On a pretended GPU in bfloat16: loading, the latency table, every source, encoder-decoders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.common.progress import progress_bar
from policies.core import speculate
from policies.lengths.basic import Fixed
from profiler import profile
from profiler.checks.differences import rounds_differ
from profiler.checks.spot_check import PlannedPolicy, assisted_generation, run_batches, run_requests
from profiler.decoding.single import ModelDecoder
from profiler.latency.host import DRAWS, RULES, TOSSES
from profiler.latency.table import Grid
from profiler.models import loading
from profiler.models.loading import Pair, choose_device, load_pair
from profiler.models.seq2seq import make_runner
from profiler.models.stack import LayerRunner
from profiler.profile import LatencyProfile, Settings, profile_trace
from profiler.prompts import read_prompts
from profiler.recording.run import BUNDLED
from profiler.recording.trace import Recorder
from profiler.sources.run import SourceLatency, SourceRunner, load_modules, record_sources
from profiler.sources.start_record import RecordOptions
from profiler.train import heads as train
from profiler.train.heads import own_text, train_all
from tests import bundled, seq2seq
from tests.conftest import Run
from tests.few_cells import untimed_none
from tests.pretend_gpu import CUDA, PretendedGPU, pretended
from tests.replayed import run_source
from tests.test_device import model
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.run import replay
from traces.sources.base import Source
from traces.sources.early_exit import EarlyExit, Kangaroo
from traces.sources.lookups.sources import PLD
from traces.sources.starts.sources import Blockwise, Hydra, LayerSkip, Medusa, Space, SpecDec

SOURCES: list[tuple[Source, int]] = [
    (PLD(), 1), (Blockwise(), 1), (Medusa(), 1), (SpecDec(), 1), (Hydra(), 1), (Space(), 1),
    (LayerSkip(), 1), (Kangaroo(), 1), (EarlyExit(tau=0.3), 1),
]  # fmt: skip


class Case:
    """A pair as a GPU would have it, and traces of it."""

    def __init__(self, models: Path, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.pair: Pair = load_pair(models / "target", models / "draft", device="cuda")
        self.greedy = self.trace(Settings(6, 4))
        self.sampled = self.trace(Settings(6, 4, Sampling(1.0, 0.9)))

    def trace(self, settings: Settings) -> Trace:
        prompts = read_prompts(BUNDLED / "prompts.jsonl", 2)
        with progress_bar() as progress:
            return profile_trace(self.pair, prompts, settings, self.folder, progress)


@pytest.fixture(scope="module")
def gpu() -> Iterator[PretendedGPU]:
    bundled.folder()  # made before there is another device
    with pretended() as device:
        yield device


@pytest.fixture(scope="module")
def case(gpu: PretendedGPU, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(bundled.folder(), tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def whole(gpu: PretendedGPU, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The case of the bundled pair, which the bundled heads were trained for."""
    return Case(BUNDLED, tmp_path_factory.mktemp("whole"))


def test_a_pair_is_loaded_in_bfloat16_and_recorded(case: Case) -> None:
    assert case.pair.device == CUDA
    assert case.pair.target.dtype is torch.bfloat16
    assert case.pair.meta["device"] == "Pretended GPU"
    assert case.greedy.tokens == case.sampled.tokens == 12


def test_the_latency_table_is_measured(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    less: dict[str, dict[str, Any]] = {
        "host_beyond": {"tokens": 4, "gammas": (0, 2)}, "measure_choosing": {"drafted": (1, 4)},
    }  # fmt: skip
    for name, given in less.items():
        monkeypatch.setattr(profile, name, partial(getattr(profile, name), repeats=1, **given))
    untimed_none(monkeypatch)
    grid = Grid(
        widths=(1, 2), contexts=(64,), prompts=(16,), batches=(1, 2), batch_widths=(1, 2),
        repeats=1, warmup=0,
    )  # fmt: skip
    measured = LatencyProfile(case.pair, grid)
    measured.sweeps.run()
    phases = set(measured.table().cells["phase"])
    assert {"forward", "prefill", "signal", "host_round", "layer", "head", "judge"} <= phases
    # What a check of lossless greedy rounds measures again.
    few = set(measured.table(passes_alone=True).cells["phase"])
    assert phases - few == {"layer", "head", *RULES, *TOSSES, *DRAWS}


def test_real_and_forced_runs_of_single_streams_and_batches(case: Case) -> None:
    planned = [PlannedPolicy("fixed", Fixed(3))]
    for forced in (False, True):
        measured = run_requests(case.pair, case.greedy, planned, forced=forced, repeats=1)
        real, expected = measured.logs["fixed"], replay(case.greedy, Fixed(3), name="fixed")
        assert len(real) > 0
        if forced:
            assert rounds_differ(real, expected) == 0
        both = run_batches(
            case.pair, case.greedy, [PlannedPolicy("fixed", Fixed(2))], batches=(1, 2), repeats=1,
            forced=forced,
        )  # fmt: skip
        assert set(both.times["batch"]) == {1, 2}
    run_requests(case.pair, case.sampled, planned, repeats=1)
    prompt = torch.tensor(case.greedy.requests[0].prompt_ids, device=CUDA)
    tokens, passes = assisted_generation(case.pair, prompt, 8, num_assistant_tokens=3)
    assert len(tokens) == 8
    assert passes > 0


def test_heads_trained_in_float32_serve_the_target_in_bfloat16(
    gpu: PretendedGPU, whole: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled heads, whose file names a digest of the weights before they were rounded."""
    modules = load_modules(BUNDLED / "exit_heads", whole.pair.target)
    how = RecordOptions([EarlyExit().setting(4)])
    recordings = record_sources(whole.pair.target, whole.greedy, modules, how)
    heads = {"early-exit", "blockwise", "medusa", "specdec", "hydra", "space", "layer-skip"}
    assert set(recordings) >= heads
    record_sources(whole.pair.target, whole.sampled, modules, how)
    runner = SourceRunner(whole.pair.target, whole.greedy, modules)
    # Lookups work on the host, and early exits ask at every exit whether to stop.
    for source, most in SOURCES:
        decoder = runner.decoder(source, 0)
        with gpu.counted() as waits:
            rounds = list(speculate(decoder, Fixed(3)))
        drafts = sum(r.draft_forwards for r in rounds)
        exits = len(modules["early-exit"].layers) * (drafts + len(rounds))
        token = [w for w in waits if "single.py" in w.where]
        asked = [w for w in waits if "exits.py" in w.where and w.what == "item"]
        assert len(token) <= drafts
        assert len(asked) <= exits
        others = len(waits) - len(token) - len(asked)
        assert others <= most * len(rounds) + (source.name == "pld") * len(rounds), Counter(waits)
    drawn = SourceRunner(whole.pair.target, whole.sampled, modules)
    run_source(drawn, EarlyExit(tau=0.3), Fixed(3))
    layered = LayerRunner(whole.pair.target, 80)
    untimed_none(monkeypatch)
    latency = SourceLatency(layered, modules, whole.greedy, widths=(1, 2), contexts=(16,))
    latency.advance(1)
    assert {"layer", "head", "forward"} <= set(latency.cells()["phase"])
    # Of a width that is not the target's they are refused whatever the precision.
    with pytest.raises(DraftsimError, match="was trained for another target"):
        load_modules(BUNDLED / "exit_heads", model(2, torch.bfloat16))


def test_modules_are_trained_on_the_device(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = case.pair.target
    monkeypatch.setattr(train, "continuations", partial(train.continuations, new_tokens=12))
    encoded = [list(case.greedy.requests[0].prompt_ids or ()) + [5] * 40]
    text = own_text(target, encoded, rounds=2, batch=2)
    train_all(LayerRunner(target, 200), text, tmp_path, seconds=0.0)
    modules = load_modules(tmp_path, target)
    assert {"early-exit", "kangaroo"} <= set(modules)
    weight = target.model.norm.weight
    before = weight.data.clone()
    weight.data += 1
    try:  # trained in this precision, they know this very target
        with pytest.raises(DraftsimError, match="was trained for another target"):
            load_modules(tmp_path, target)
    finally:
        weight.data.copy_(before)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_encoder_decoders_record_and_decode(gpu: PretendedGPU, kind: str) -> None:
    target, draft = (make_runner(seq2seq.build(kind, n).to("cuda"), 200) for n in (2, 1))
    prompt = seq2seq.source().to("cuda")
    columns = Recorder(target, draft, max_new_tokens=12, max_gamma=4).record(prompt)
    assert (columns["offset"] > 0).any()
    decoder = ModelDecoder(target, draft, prompt, 12, watch_eos=False)
    with gpu.counted() as waits:
        rounds = list(speculate(decoder, Fixed(3)))
    assert len(waits) == len(rounds), Counter(waits)


def test_what_cannot_be_loaded_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(DraftsimError, match="torch sees no CUDA device: use --device cpu"):
            choose_device("cuda")
    for wrong in ("gpu", "meta", "mps"):
        with pytest.raises(DraftsimError, match=f"'{wrong}' is not a device: use cpu or cuda"):
            choose_device(wrong)

    class Gated:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            raise OSError("You are trying to access a gated repo. 401 Client Error")

    with pytest.raises(DraftsimError, match="needs an access token: set HF_TOKEN, or use a pair"):
        loading._load(Gated, "meta-llama/Llama-3.1-8B", "model")


def test_the_gpu_named_is_the_one_used(gpu: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert choose_device("cuda:1").index == 1
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert current == [1]
    with pytest.raises(DraftsimError, match="'cuda:2': there are 2 GPUs, from cuda:0 on"):
        choose_device("cuda:2")


def test_a_pair_too_large_for_the_device_names_a_smaller_choice(
    gpu: PretendedGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, *_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.PreTrainedModel.to", full)
    with pytest.raises(DraftsimError, match="do not fit on cuda together: use a smaller pair"):
        load_pair(BUNDLED / "target", BUNDLED / "draft", device="cuda")


def test_a_command_out_of_memory_says_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("profiler.profile.profile_trace", full)
    prompts = BUNDLED / "prompts.jsonl"
    ran = run("profile", "--target", "bundled", "--draft", "bundled", "--prompts", prompts,
              "--out", tmp_path / "run", "--limit", 1)  # fmt: skip
    assert "the device's memory is full: use a smaller pair, --dtype bfloat16" in ran.refusal
