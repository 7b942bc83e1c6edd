"""Models whose layers attend to a window: recorded and decoded as they are on their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from policies.lengths.basic import Fixed
from profiler.checks.differences import output_of, rounds_differ
from profiler.checks.spot_check import PlannedPolicy, run_batches
from profiler.features.heads import ExitHeads
from profiler.models.graphs import GraphRunner
from profiler.models.loading import Pair, load_pair
from profiler.models.runner import NO_LIMIT, Runner, context_of, windows_of
from profiler.models.sampling import log_probs_at
from profiler.models.stack import LayerRunner
from profiler.profile import Settings, assemble
from profiler.prompts import Prompt
from profiler.recording.run import BUNDLED
from profiler.recording.trace import Recorder, slots_needed
from profiler.sources.exit_record import ExitRecorder
from profiler.sources.run import SourceRunner
from profiler.sources.start_record import record_along
from tests.replayed import assert_decoded_as_replayed, run_as_replayed
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.run import replay
from traces.sources.early_exit import EarlyExit

WINDOW, NEW, GAMMA, VOCAB = 8, 16, 5, 61
LENGTHS = (24, 3)
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.4,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EITHER = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mistral": (transformers.MistralConfig, {}),
    "phi3": (transformers.Phi3Config, {}),
    "qwen2": (transformers.Qwen2Config, {"use_sliding_window": True, "layer_types": EITHER}),
    "gemma2": (transformers.Gemma2Config, {"layer_types": EITHER}),
    "gemma3": (transformers.Gemma3TextConfig, {"layer_types": EITHER}),
    "gpt-oss": (
        transformers.GptOssConfig, {"layer_types": EITHER, "num_local_experts": 4},
    ),
    "llama4": (
        transformers.Llama4TextConfig,
        {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": WINDOW,
         "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    ),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


def model(kind: str) -> Any:
    torch.manual_seed(2)
    config, own = KINDS[kind]
    window = {} if kind == "llama4" else {"sliding_window": WINDOW}
    made = transformers.AutoModelForCausalLM.from_config(config(**{**SHAPE, **window, **own}))
    with torch.no_grad():  # some weights, as sinks of attention, begin as zeros or are not set
        for weights in made.parameters():
            if weights.dim() < 2 or not weights.isfinite().all():
                weights.copy_(1 + 0.2 * torch.randn_like(weights))
    return made.eval()


@cache
def pair(kind: str) -> Pair:
    """A target, and a draft that is the same model slightly disturbed."""
    torch.set_num_threads(1)
    target, draft = model(kind), model(kind)
    torch.manual_seed(3)
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(0.05 * weights.std(unbiased=False) * torch.randn_like(weights))
    return Pair(target, draft, None, {})


def prompts() -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=seeded) for n in LENGTHS]


def recorder(kind: str, sampling: Sampling = GREEDY, together: int = 0) -> Recorder:
    slots = slots_needed(max(LENGTHS), NEW, GAMMA)
    return Recorder(
        Runner(pair(kind).target, slots, together + 1), Runner(pair(kind).draft, slots),
        max_new_tokens=NEW, max_gamma=GAMMA, sampling=sampling, generator=torch.Generator(),
    )  # fmt: skip


@cache
def trace(kind: str) -> Trace:
    mine = recorder(kind)
    columns = [{**mine.record(p), "seconds": np.zeros(2)} for p in prompts()]
    named = [Prompt(str(i), "", "all") for i in range(len(LENGTHS))]
    return assemble(pair(kind), named, prompts(), columns, Settings(NEW, GAMMA))


@cache
@torch.inference_mode()
def after(model: Any, text: tuple[int, ...]) -> torch.Tensor:
    """The model's logits after a whole text, (1, vocab), without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1]
    return logits


@every_kind
def test_texts_and_proposals_are_those_of_the_models_without_a_cache(kind: str) -> None:
    target, draft, recorded = pair(kind).target, pair(kind).draft, trace(kind)
    true = recorded.columns["offset"] == 0
    assert 0.2 < recorded.columns["match"][true].mean() < 0.95
    for i, prompt in enumerate(prompts()):
        output = output_of(recorded, i)
        alone = target.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=NEW,
            do_sample=False,
        )  # fmt: skip
        assert output == alone[0, len(prompt) :].tolist()
        rows = recorded.columns["request"] == i
        begun, offset, token, top, scored = (
            recorded.columns[name][rows]
            for name in ("position", "offset", "draft_token", "draft_top1", "target_top1")
        )
        assert offset.max() == GAMMA - 1
        text = tuple(prompt.tolist())
        for row in range(len(begun)):
            # The draft goes on from its own tokens, until the next row of the true text.
            if offset[row] == 0:
                text = (*prompt.tolist(), *output[: begun[row]])
            logits = after(draft, text)
            assert int(logits.argmax()) == token[row]
            for logit, of in ((float(top[row]), draft), (float(scored[row]), target)):
                assert float(after(of, text).max()) == pytest.approx(logit, rel=1e-3, abs=1e-3)
            text = (*text, int(token[row]))


@every_kind
def test_rounds_decoded_for_real_are_those_of_the_replay_and_of_whole_texts(kind: str) -> None:
    recorded, policy = trace(kind), Fixed(4)
    planned = [PlannedPolicy("fixed", policy)]
    assert_decoded_as_replayed(pair(kind), recorded, planned)
    log = replay(recorded, policy)
    batched = run_batches(pair(kind), recorded, planned, batches=(1, 2), repeats=1)
    for batch in (1, 2):
        assert rounds_differ(batched.logs["fixed", batch], log) == 0
    for i, prompt in enumerate(prompts()):
        rounds = log.rounds[log.rounds["request"] == i]
        accepted, text = [], (*prompt.tolist(), output_of(recorded, i)[0])
        while len(text) < len(prompt) + NEW:
            drafted: tuple[int, ...] = ()
            while len(drafted) < min(4, len(prompt) + NEW - len(text) - 1):
                drafted += (int(after(pair(kind).draft, text + drafted).argmax()),)
            kept = 0
            while (own := int(after(pair(kind).target, text).argmax())) in drafted[kept : kept + 1]:
                text, kept = (*text, own), kept + 1
            text, accepted = (*text, own), [*accepted, kept]
        assert text == (*prompt.tolist(), *output_of(recorded, i))
        assert accepted == rounds["accepted"].tolist()


@every_kind
def test_prompts_decoded_together_are_recorded_as_alone(kind: str) -> None:
    together = dict(recorder(kind, together=2).record_together(prompts(), [0, 1]))
    for i, columns in together.items():
        rows = trace(kind).columns["request"] == i
        for name in ("token", "draft_token", "match"):
            np.testing.assert_array_equal(columns[name], trace(kind).columns[name][rows])


@every_kind
def test_probabilities_of_a_sampled_text_are_those_of_whole_texts(kind: str) -> None:
    prompt = prompts()[0]
    columns = recorder(kind, Sampling(1.0)).record(prompt)
    true = columns["offset"] == 0
    output = torch.tensor(columns["token"][true])
    for name, model in (("draft", pair(kind).draft), ("target", pair(kind).target)):
        text = torch.cat([prompt, output])
        with torch.inference_mode():
            logits = model(input_ids=text[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(
            columns[f"{name}_path_logprob"][true], log_probs_at(logits, output, GREEDY), atol=1e-3
        )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.MistralConfig(sliding_window=8), {8}),
        (transformers.MistralConfig(sliding_window=None), {NO_LIMIT}),
        (transformers.MistralConfig(sliding_window=64), {NO_LIMIT}),  # no text here is longer
        (transformers.Qwen2Config(use_sliding_window=False, sliding_window=8), {NO_LIMIT}),
        (transformers.Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1),
         {NO_LIMIT, 8}),
        (transformers.Llama4TextConfig(attention_chunk_size=8), {NO_LIMIT, 8}),
        (transformers.LlamaConfig(), {NO_LIMIT}),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_configuration(config: Any, expected: set[int]) -> None:
    windows = windows_of(config, 64, torch.device("cpu"))
    assert {window.size for window in windows.values()} == expected


def test_layers_without_a_cache_of_keys_are_refused() -> None:
    config = transformers.Qwen3NextConfig()
    with pytest.raises(DraftsimError, match="Qwen3NextConfig has layers of the kind 'linear_atten"):
        windows_of(config, 64, torch.device("cpu"))


def test_texts_end_where_llama_4_begins_to_scale_its_queries() -> None:
    config = transformers.Llama4TextConfig(floor_scale=8192)
    assert context_of(SimpleNamespace(config=config)) == 8191


def test_a_model_without_fused_attention_is_loaded(tmp_path: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(BUNDLED / "draft").save_pretrained(tmp_path)
    pair("gemma2").target.save_pretrained(tmp_path)
    loaded = load_pair(tmp_path, tmp_path)
    assert loaded.meta["attention"] == "eager"
    text = prompts()[0]
    torch.testing.assert_close(
        Runner(loaded.target, 64).forward(text, 0, keep=1),
        after(pair("gemma2").target, tuple(text.tolist())), rtol=1e-3, atol=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [  # one masks by slots itself, the other takes no mask of four dimensions
        transformers.GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, window_size=WINDOW,
            attention_types=[[["global", "local"], 1]],
        ),
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    ],
)  # fmt: skip
def test_a_model_whose_attention_may_not_follow_its_mask_is_refused(
    config: Any, tmp_path: Path
) -> None:
    transformers.AutoTokenizer.from_pretrained(BUNDLED / "draft").save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(DraftsimError, match="neither fused attention nor transformers' plain one"):
        load_pair(tmp_path, tmp_path)


@every_kind
def test_lone_tokens_and_short_prompts_need_no_mask(kind: str) -> None:
    """As on a GPU."""
    plain, bare = (Runner(pair(kind).target, 64) for _ in range(2))
    bare._maskless = plain._fused
    ids = prompts()[0]
    assert len(plain.cache.layers) == len(Runner(plain.model, WINDOW).cache.layers) == plain.layers
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12), (12, 24), (0, 24)):
        fed = ids[start:stop]
        torch.testing.assert_close(
            bare.forward(fed, start), plain.forward(fed, start), rtol=1e-3, atol=1e-3
        )


def test_static_passes_of_attention_that_they_do_not_have_are_refused() -> None:
    with pytest.raises(DraftsimError, match="GptOssConfig has no fused attention"):
        GraphRunner(model("gpt-oss"), 32)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "gemma3", "llama4"])
def test_static_passes_see_what_others_see(kind: str) -> None:
    plain, static = Runner(pair(kind).target, 64), GraphRunner(pair(kind).target, 64)
    for start, stop in ((0, 14), (14, 15), (15, 20)):
        fed = prompts()[0][start:stop]
        torch.testing.assert_close(
            static.forward(fed, start), plain.forward(fed, start), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("maskless", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "phi3", "qwen2", "gpt-oss"])
@torch.inference_mode()
def test_layers_run_one_by_one_have_windows_of_their_own(kind: str, maskless: bool) -> None:
    runner, ids = LayerRunner(pair(kind).target, 64), prompts()[0]
    whole = runner.forward(ids, 0)
    runner._maskless = maskless and runner._fused
    for start, stop in ((0, 14), (14, 15), (15, 24)):
        states = runner.run_layers(runner.embed(ids[start:stop]), start, range(runner.layers))
        torch.testing.assert_close(runner.logits(states), whole[start:stop], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_early_exit_decoded_for_real_has_the_rounds_of_its_replay(kind: str) -> None:
    target, recorded = pair(kind).target, trace(kind)
    heads = ExitHeads((1, 2), SHAPE["hidden_size"]).start_from(target.model.norm.weight.detach())
    source, policy = EarlyExit(0.3, 0.0, 1.0), Fixed(4)
    wide = LayerRunner(target, ExitRecorder.slots_needed(recorded.longest, 4))
    recordings = {
        "early-exit": record_along(ExitRecorder(wide, heads, [source.setting(4)]), recorded)
    }
    runner = SourceRunner(target, recorded, {"early-exit": heads})
    _, log = run_as_replayed(runner, source, policy, recorded, recordings)
    assert 0 < log.rounds["accepted"].sum() < log.rounds["drafted"].sum()
