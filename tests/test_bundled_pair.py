"""The bundled pair: its files, its tokenizer, its prompts, and the code that made them."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from benchmarks.near_ties import by_category, gaps
from benchmarks.training import pair, pair_prompts
from profiler.recording.run import model_path
from profiler.train import documents as text
from profiler.train.minutes import descent as descent_of
from profiler.train.minutes import prediction_loss
from traces.acceptance.trace import Trace
from traces.sources.as_draft import drafted_trace
from traces.sources.found import find_recordings
from traces.sources.registry import parse_source
from traces.store.recordings import find_trace

BUNDLED = Path(text.__file__).parents[1] / "bundled"
MODELS = ("target", "draft")


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, str]]:
    lines = (BUNDLED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(BUNDLED / "target")


@pytest.fixture(scope="module")
def documents():
    return text.load_documents()


@pytest.fixture(scope="module")
def models():
    load = transformers.AutoModelForCausalLM.from_pretrained
    return {name: load(BUNDLED / name, dtype=torch.float32).eval() for name in MODELS}


def test_bundle_is_small_and_readable():
    weights = sum((BUNDLED / name / "model.safetensors").stat().st_size for name in MODELS)
    everything = sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file())
    assert weights < 8_000_000
    assert everything < 8_500_000
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in BUNDLED.rglob("*"))


def test_models_share_all_but_depth(models):
    target, draft = models["target"].config, models["draft"].config
    assert target.num_hidden_layers > draft.num_hidden_layers == 1
    assert target.vocab_size == draft.vocab_size
    assert target.max_position_embeddings >= 1024
    for model in models.values():
        assert model.generation_config.eos_token_id == model.config.eos_token_id == 0
        assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def test_full_context_runs(models):
    ids = torch.arange(1024)[None] % 1000 + 2
    with torch.inference_mode():
        for model in models.values():
            assert bool(torch.isfinite(model(input_ids=ids).logits).all())


def test_tokenizer_is_shared(models, tokenizer):
    first, second = ((BUNDLED / name / "tokenizer.json").read_bytes() for name in MODELS)
    assert first == second
    assert len(tokenizer) == models["target"].config.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)


@pytest.mark.parametrize(
    "written", ["", "x", "def f(x):\n    return x\n", " \t\n\n é 漢字 🙂 ", "\x00"]
)
def test_tokenizer_round_trip(tokenizer, written):
    ids = tokenizer.encode(written)
    assert tokenizer.decode(ids) == written
    assert 0 not in ids  # no special token is added


def test_prompt_categories(prompts):
    counts = Counter(row["category"] for row in prompts)
    assert set(counts) <= set(text.CATEGORIES)
    assert len(counts) >= 5
    assert min(counts.values()) >= 12
    assert len({row["id"] for row in prompts}) == len({row["prompt"] for row in prompts})
    assert len({row["id"] for row in prompts}) == len(prompts)


def test_prompts_round_trip_within_lengths(prompts, tokenizer):
    for row in prompts:
        ids = tokenizer.encode(row["prompt"])
        assert 48 <= len(ids) <= 128, row["id"]
        assert tokenizer.decode(ids) == row["prompt"]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="trained on the library of Python 3.11")
def test_prompts_are_not_in_the_training_text(prompts, documents):
    training = "\0".join(document.text for document in documents[0])
    assert [row["id"] for row in prompts if row["prompt"] in training] == []


def test_split_is_by_source(documents):
    training, held_out = documents
    assert not {d.source for d in training} & {d.source for d in held_out}
    assert not {d.text for d in training} & {d.text for d in held_out}
    assert all(text.is_held_out(d.source) for d in held_out)
    assert not any(text.is_held_out(d.source) for d in training)
    assert {d.category for d in held_out} == set(text.CATEGORIES)


def test_load_documents_names_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python source under"):
        text.load_documents([tmp_path])


def test_cut_prompt_is_a_prefix_in_tokens(documents, tokenizer):
    cut = 0
    for document in documents[1][:60]:
        prompt = text.cut_prompt(document.text, tokenizer.encode)
        if prompt is not None:
            cut += 1
            ids = tokenizer.encode(prompt)
            assert tokenizer.encode(document.text)[: len(ids)] == ids
    assert cut > 5


def test_unique_4gram_share():
    assert pair_prompts.unique_4gram_share([1, 2, 3]) == 1.0
    assert pair_prompts.unique_4gram_share(range(10)) == 1.0
    assert pair_prompts.unique_4gram_share([7] * 13) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["Medusa", "Blockwise", "SpecDec", "Hydra"])
def test_the_cards_shares_of_right_drafts_are_those_recorded(name: str) -> None:
    trace = find_trace("bundled")
    source = parse_source(name.lower())
    columns = drafted_trace(trace, source, find_recordings("bundled", trace)).columns
    right = columns["accepted"][columns["offset"] == 0]
    shares = " | ".join(f"{(right >= n).mean():.2f}" for n in (1, 2, 3, 4))
    assert f"| {name} | {shares} |" in (BUNDLED / "CARD.md").read_text(encoding="utf-8")


def test_the_cards_shares_after_a_right_draft_are_those_recorded() -> None:
    trace = find_trace("bundled")
    recordings, shares = find_recordings("bundled", trace), {}
    for name in ("medusa", "blockwise", "specdec", "hydra"):
        columns = drafted_trace(trace, parse_source(name), recordings).columns
        right = columns["accepted"][columns["offset"] == 0]
        shares[name] = [(right > n).sum() / (right >= n).sum() for n in (1, 2, 3)]
    own = shares.pop("hydra")
    others = [share for each in shares.values() for share in each]
    said = " ".join((BUNDLED / "CARD.md").read_text(encoding="utf-8").split())
    assert (
        f"right in {min(own):.2f} to {max(own):.2f} of the cases, "
        f"the others' in {min(others):.2f} to {max(others):.2f}:"
    ) in said


def test_grown_model_computes_the_same():
    torch.manual_seed(0)
    small = pair.build_model(1).eval()
    grown = pair.grow(small, 3).eval()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(grown(input_ids=ids).logits, small(input_ids=ids).logits)


def test_batch_is_seeded_and_half_starts_at_documents(documents, tokenizer):
    stream = pair.DocumentBatches(documents[1][:400], tokenizer)
    first, second = (stream.batch(256, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (8, 257)
    heads = {tuple(stream.ids[s : s + 8].tolist()) for s in stream.starts.tolist()}
    assert all(tuple(row[:8].tolist()) in heads for row in first[::2])


def test_greedy_continuation_is_bounded(models, tokenizer, prompts):
    ids = tokenizer.encode(prompts[0]["prompt"])
    new = pair_prompts.continue_greedily(models["target"], ids, limit=16)
    assert 0 < len(new) <= 16
    assert new == pair_prompts.continue_greedily(models["target"], ids, limit=16)
    assert 0 not in new[:-1]


def test_repeats_marks_what_completes_a_seen_4gram_up_to_the_end():
    row = [5, 6, 7, 8, 5, 6, 7, 8, 9, 0, 6, 7, 8, 9]  # 8 at 7 repeats; past EOS (0) nothing counts
    found = pair.repeats(torch.tensor([row]), prompt=2, eos=0)
    assert found.nonzero()[:, 1].tolist() == [7]
    assert not pair.repeats(torch.tensor([row]), prompt=8, eos=0).any()


def test_unlikelihood_falls_with_the_probability_of_repeats():
    rows = torch.tensor([[3, 3, 3]])
    repeated = torch.tensor([[False, False, True]])
    logits = torch.zeros(1, 2, 4)
    even = pair.unlikelihood(logits, rows, repeated)
    assert float(even) == pytest.approx(-math.log(1 - 1 / 4))
    logits[0, 1, 3] = -10.0
    assert float(pair.unlikelihood(logits, rows, repeated)) < 1e-4
    assert float(pair.unlikelihood(logits, rows, torch.zeros_like(repeated))) == 0


def test_written_text_is_the_models_own_greedy_text(models):
    heads = torch.tensor([[5, 6, 7], [9, 4, 3]])
    written = pair.write_greedily(models["draft"], heads, 5)
    assert torch.equal(written[:, :3], heads)
    for row in written:
        with torch.inference_mode():
            greedy = models["draft"](input_ids=row[None, :-1]).logits[0].argmax(-1)
        assert torch.equal(row[3:], greedy[2:])


def test_a_step_scales_the_full_rate():
    torch.manual_seed(0)
    model = pair.build_model(1)
    losses = (prediction_loss(model, torch.arange(12)[None]) for _ in range(2))
    descent = descent_of(model, rate=0.5)
    rates = []
    for _ in descent.steps(lambda _: next(losses), (0.1, 1.0)):
        rates.append([g["lr"] for s in descent.steppers for g in s.param_groups])
    assert rates[0] == pytest.approx([0.0015, 0.0005])
    assert rates[1] == pytest.approx([0.015, 0.005])


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
