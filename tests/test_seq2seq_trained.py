"""The training of a small encoder-decoder pair, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from profiler.models.loading import load_pair
from profiler.models.seq2seq import make_runner
from profiler.recording.trace import Recorder
from tests import seq2seq_pair as bundled
from tests.seq2seq import source

NOUNS = ["path", "mode", "name", "file", "size", "key", "value", "line", "code", "index"]


def test_a_small_trained_pair_is_loaded_and_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training of `tests.seq2seq_pair`, in miniature: it learns, and it round-trips."""
    shape = bundled.Shape((1, 2), (1, 1), width=32, feed_forward=48, heads=2, vocabulary=300)
    some = [
        (f"def set_{a}_{b}({a}, {b}={i}, force)", f"given {a} , {b} or {i} , force : set {a} {b}")
        for i, a in enumerate(NOUNS)
        for b in NOUNS
    ]
    monkeypatch.setattr(bundled, "load_examples", lambda: some)
    plans = [bundled.TrainingPlan(25, 256, seed, muon_rate=0.02, adam_rate=0.01) for seed in (1, 2)]
    losses = bundled.make_pair(tmp_path, shape, draft=plans[0], target=plans[1], prompts=4)
    assert losses[1] < losses[0] < np.log(300)
    loaded = load_pair(tmp_path / "target", tmp_path / "draft")
    assert loaded.meta["target"]["layers"] == 2
    assert loaded.meta["target"]["encoder_layers"] == 1
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    ids = loaded.encode(json.loads(lines[0])["prompt"])
    target, draft = make_runner(loaded.target, 900), make_runner(loaded.draft, 900)
    columns = Recorder(target, draft, max_new_tokens=12, max_gamma=4, eos=loaded.eos).record(ids)
    output = columns["token"][columns["offset"] == 0].tolist()
    wanted = loaded.target.generate(input_ids=ids[None], max_new_tokens=12, do_sample=False)
    assert output == wanted[0, 1:].tolist()


def test_signatures_are_said_in_words_with_their_arguments_first() -> None:
    import ast

    node = ast.parse("def makeDirs(self, path, *, mode_bits=438): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert bundled.describe(node) == "given path , mode bits or 438 : make dirs"


def test_growing_changes_no_output() -> None:
    shape = bundled.Shape(width=32, feed_forward=48, heads=2, vocabulary=300)
    small = bundled.build_model(shape, (1, 1)).eval()
    large = bundled.grow(small, shape, (2, 3)).eval()
    ids = source()[None]
    with torch.inference_mode():
        mine, theirs = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (small, large))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
