"""A chat model's prompts are put into its template, recorded, and decode as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training.draft import ProjectedDraft
from benchmarks.training.fit import Candidates
from benchmarks.training.smollm2 import chains, drafted, measure
from benchmarks.training.stored import store_draft
from benchmarks.training.unroll import GrowingCache, target_features
from commands.common.progress import progress_bar
from policies.lengths.basic import Fixed
from profiler.checks.spot_check import PlannedPolicy
from profiler.features.drafters import EagleDrafter, layer_config
from profiler.fetched.smollm2 import draft_config, write_folder
from profiler.models.loading import Pair, load_pair
from profiler.profile import Settings, profile_trace
from profiler.prompts import Prompt
from tests import small_smollm2
from tests.replayed import assert_decoded_as_replayed
from traces.errors import DraftsimError
from traces.store.files import read_trace

PROMPTS = [Prompt("1", "cats", "the cat sat"), Prompt("2", "dogs", "the dog sat on the log")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The miniature and a draft model whose embedding is a projection of its own."""
    folder = tmp_path_factory.mktemp("pair")
    words = small_smollm2.tokenizer()
    model = small_smollm2.model(len(words))
    model.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    torch.manual_seed(3)
    table = model.get_input_embeddings().weight.detach()
    every = Candidates(torch.arange(len(table)), torch.arange(0), 0)
    draft = ProjectedDraft(draft_config(model.config, 32, 2), table, every)
    torch.nn.init.orthogonal_(draft.projection)
    store_draft(draft, folder / "draft.safetensors")
    write_folder(folder / "draft.safetensors", folder / "target", folder / "draft")
    return load_pair(folder / "target", folder / "draft")


def test_prompts_are_recorded_in_the_template(pair: Pair, tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=12, max_gamma=4, chat=True)
    with progress_bar() as progress:
        profile_trace(pair, PROMPTS, settings, tmp_path, progress)
    trace = read_trace(tmp_path / "trace.parquet")
    assert trace.meta["chat_template"] is True
    for prompt, request in zip(PROMPTS, trace.requests, strict=True):
        turns = [{"role": "user", "content": prompt.text}]
        wanted: Any = pair.tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        assert list(request.prompt_ids or ()) == wanted["input_ids"]


def test_real_decoding_is_what_was_recorded(pair: Pair, tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=16, max_gamma=5, chat=True)
    with progress_bar() as progress:
        trace = profile_trace(pair, PROMPTS, settings, tmp_path, progress)
    assert_decoded_as_replayed(pair, trace, [PlannedPolicy("fixed:gamma=4", Fixed(4))])


def test_a_tokenizer_without_a_template_is_one_line(pair: Pair) -> None:
    without = Pair(pair.target, pair.draft, small_smollm2.tokenizer(), {})
    without.tokenizer.chat_template = None
    with pytest.raises(DraftsimError, match="has no chat template: leave --chat out"):
        without.encode("the cat", chat=True)


def test_drafts_along_an_output_are_those_of_decoding(pair: Pair) -> None:
    torch.manual_seed(0)
    drafter = EagleDrafter(layer_config(pair.target.config)).attach(pair.target).eval()
    ids, prompt = torch.randint(3, 300, (20,)), 8
    found = drafted(drafter, pair.target, ids, prompt, offsets=3)
    assert found.shape == (20 - prompt - 3, 3)
    for row, drafts in enumerate(found.tolist()):
        known = ids[: prompt + row + 1]
        features = target_features(pair.target, known[None, :-1])
        for token in drafts:
            # One token a call: the drafter's own states stand where features end.
            states = _own_states(drafter, known[None], features)
            assert int(drafter.logits(states[-1]).argmax()) == token
            known = torch.cat([known, torch.tensor([token])])
            features = torch.cat([features, states[None, -1:]], 1)


def test_shares_count_what_is_accepted(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(max_new_tokens=24, max_gamma=4, chat=True)
    with progress_bar() as progress:
        trace = profile_trace(pair, PROMPTS, settings, tmp_path, progress)

    def knows_two(_: object, __: object, ids: Any, prompt: int, offsets: int) -> Any:
        drafts = ids[prompt + 1 :].unfold(0, offsets, 1).clone()
        drafts[:, 2] += 1
        return drafts

    monkeypatch.setattr("benchmarks.training.smollm2.drafted", knows_two)
    drafter = EagleDrafter(layer_config(pair.target.config))
    shares = measure(trace, pair.target, drafter, offsets=3)
    assert shares == {name: [1.0, 1.0, 0.0] for name in ("cats", "dogs", "all")}
    own = measure(trace, pair.target, offsets=3)
    mean = [(a + b) / 2 for a, b in zip(own["cats"], own["dogs"], strict=True)]
    assert own["all"] == pytest.approx(mean, abs=1e-3)


def _own_states(
    drafter: EagleDrafter, tokens: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """(entries, hidden) outputs over all entries, whose features are given."""
    count = features.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        states, _ = drafter.step(
            drafter.embed(tokens[:, 1 : 1 + count]), drafter.fuse(features),
            drafter.rotary(torch.arange(count)[None]), mask, GrowingCache(),
        )  # fmt: skip
    return states[0]


def test_a_models_shares_follow_its_matches() -> None:
    matches = torch.tensor([True, True, False, True, True, True])
    wanted = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert chains(matches, 3).int().tolist() == wanted
