"""A chat model's prompts are put into its template, recorded, and decode as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.loading import Pair, load_pair
from profiler.profile import Settings, profile_trace, progress_bar
from profiler.prompts import Prompt
from profiler.smollm2.draft import ProjectedDraft, draft_config
from profiler.smollm2.drafters import store_draft, write_folder
from tests import small_smollm2
from traces.errors import DraftsimError
from traces.files import read_trace

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
    draft = ProjectedDraft(draft_config(model.config, 32, 2), table)
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


def test_a_tokenizer_without_a_template_is_one_line(pair: Pair) -> None:
    without = Pair(pair.target, pair.draft, small_smollm2.tokenizer(), {})
    without.tokenizer.chat_template = None
    with pytest.raises(DraftsimError, match="has no chat template: leave --chat out"):
        without.encode("the cat", chat=True)
