"""The real SmolLM2-135M-Instruct, where `draftsim fetch smollm2` has brought it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from commands.common.progress import progress_bar
from policies.lengths.basic import Fixed
from profiler.checks.spot_check import PlannedPolicy
from profiler.features.checkpoint import read_drafter
from profiler.fetched import places
from profiler.models.loading import Pair
from profiler.profile import Settings, profile_trace
from profiler.prompts import Prompt
from profiler.recording.run import RunInfo
from tests.replayed import assert_decoded_as_replayed

pytestmark = pytest.mark.real_model

PROMPTS = [
    Prompt("1", "qa", "Why is the sky blue?"),
    Prompt("2", "math", "A shop sells 3 pens for 2 dollars. What do 12 pens cost?"),
]


def _need(name: str) -> None:
    if not (places.folder(name) / "config.json").is_file():
        pytest.skip(f"{name} is not there: `draftsim fetch smollm2` brings it")


@pytest.fixture(scope="module")
def pair() -> Pair:
    for name in ("smollm2", "smollm2-draft"):
        _need(name)
    return RunInfo("smollm2", "smollm2", threads=1).load()


def test_it_speaks(pair: Pair) -> None:
    ids = pair.encode(PROMPTS[0].text, chat=True)
    out = pair.target.generate(
        ids[None], attention_mask=torch.ones_like(ids[None]), do_sample=False, max_new_tokens=24
    )
    assert "The sky appears blue because" in pair.tokenizer.decode(out[0, len(ids) :])


def test_real_decoding_is_what_was_recorded(pair: Pair, tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=8, max_gamma=4, chat=True)
    with progress_bar() as progress:
        trace = profile_trace(pair, PROMPTS, settings, tmp_path, progress)
    assert_decoded_as_replayed(pair, trace, [PlannedPolicy("fixed:gamma=3", Fixed(3))])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle", "eagle"), ("eagle3", "eagle3"), ("parallel", "p-eagle"), ("mtp", "mtp")],
)
def test_feature_drafters_are_read(pair: Pair, name: str, kind: str) -> None:
    _need(f"smollm2-{name}")
    assert read_drafter(places.fetched(f"smollm2-{name}"), pair.target).kind == kind
