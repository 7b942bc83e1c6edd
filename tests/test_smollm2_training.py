"""The miniature target writes chats, and drafters learn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.training import chats as own_text
from benchmarks.training import eagles
from benchmarks.training import heads as on_target
from benchmarks.training.chats import ANSWERS, BOTH, Chats, RowWriter
from benchmarks.training.draft import ProjectedDraft, principal_directions
from benchmarks.training.fit import Candidates, TrainingPlan, by_frequency, fit, soft_loss
from benchmarks.training.heads import AHEAD
from benchmarks.training.stored import store_draft, store_drafter
from benchmarks.training.unroll import target_features, unroll
from profiler.features.checkpoint import read_drafter
from profiler.features.drafters import Eagle3, Mtp, ParallelEagle3
from profiler.fetched.smollm2 import draft_config, write_folder
from tests import small_smollm2
from traces.errors import DraftsimError

DEPTHS = (1, 3, 5)


def learnt(
    module: Any, chats: Chats, folder: Path, steps: int = 14, warmup: int = 4
) -> list[dict[str, Any]]:
    """Train `module` for a few steps, and return its curve, in which the loss falls."""
    plan = TrainingPlan(steps=steps, tokens=600, warmup=warmup, report_every=steps // 2)
    curve = fit(module, chats, plan, folder)
    assert curve[-1]["loss"] < curve[0]["loss"]
    return curve


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Model, tokenizer, and their folder."""
    words = small_smollm2.tokenizer()
    model = small_smollm2.model(len(words)).requires_grad_(False)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model, words, folder


@pytest.fixture(scope="module")
def chats_folder(target: tuple[Any, Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of the target's own chats."""
    folder = tmp_path_factory.mktemp("chats")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"USER_TOKENS": 12, "ANSWER_TOKENS": 24, "ROWS": 8, "STEPS": 90}.items():
            patch.setattr(own_text, name, value)
        writer = own_text.ChatWriter(target[0], target[1], DEPTHS)
        for number in range(2):
            own_text.save_file(writer.shard(number, 8, 90), own_text.shard_path(folder, number))
    return folder


def test_rows_of_different_lengths_are_what_transformers_computes(
    target: tuple[Any, Any, Path],
) -> None:
    model = target[0]
    prefix = [5, 9, 7]
    writer = RowWriter(model, prefix, 2, 40, DEPTHS)
    lines: list[list[int]] = [[], []]
    for step in range(12):
        if step == 5:
            writer.restart(1)
            lines[1] = []
        read = torch.tensor([10 + step, 30 + step])
        final, features = writer.step(read)
        for line, token in zip(lines, read.tolist(), strict=True):
            line.append(token)
    for row, line in enumerate(lines):
        ids = torch.tensor([prefix + line])
        whole = model(ids, output_hidden_states=True)
        states = whole.hidden_states
        torch.testing.assert_close(final[row], states[-1][0, -1], rtol=1e-4, atol=1e-4)
        wanted = torch.stack([states[depth][0, -1] for depth in DEPTHS])
        torch.testing.assert_close(features[row], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            writer.logits(final)[row], whole.logits[0, -1], rtol=1e-4, atol=1e-3
        )


def test_a_shard_holds_whole_chats_and_their_states(
    target: tuple[Any, Any, Path], chats_folder: Path
) -> None:
    model, words, _ = target
    chats = Chats(chats_folder, 1, BOTH, features=True)
    answering = words("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    several = 0
    for index in range(len(chats.bounds) - 1):
        batch = chats.batch([index])
        ids = batch.tokens
        torch.testing.assert_close(batch.states, target_features(model, ids), rtol=1e-3, atol=1e-3)
        features = target_features(model, ids, DEPTHS)
        torch.testing.assert_close(batch.features, features, rtol=1e-3, atol=1e-3)
        line = ids[0].tolist()
        at = next((i for i in range(len(line)) if line[i : i + len(answering)] == answering), None)
        if at is not None:
            several += 1
            # Nothing is learnt from the tokens between the turns, everything from the answer.
            end = at + len(answering) - 1
            assert batch.weights[0, at:end].tolist() == [0.0] * (end - at)
            assert set(batch.weights[0, end:].tolist()) == {1.0}
    assert several > 10


def test_a_shard_depends_on_its_number_alone(
    target: tuple[Any, Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = own_text.ChatWriter(target[0], target[1], DEPTHS)
    first, again, other = (writer.shard(number, 4, 30) for number in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], other["tokens"])


def test_batches_hold_a_chat_at_most_once_a_round(chats_folder: Path) -> None:
    chats = Chats(chats_folder, 2, BOTH)
    assert not set(chats.training.tolist()) & set(chats.held_out.tolist())
    assert len(chats.training) + len(chats.held_out) == len(chats.bounds) - 1
    seen: list[int] = []
    for chosen in chats.order(chats.training, seed=1, tokens=400):
        if set(chosen) & set(seen):
            break
        tokens = chats.batch(chosen).tokens
        assert 200 <= tokens.numel() <= 400
        seen += chosen
    assert len(seen) == len(set(seen)) > 0.8 * len(chats.training)
    assert set(seen) <= set(chats.training.tolist())


def _draft(model: Any, chats: Chats, candidates: Candidates) -> ProjectedDraft:
    table = model.get_input_embeddings().weight.detach()
    torch.manual_seed(0)
    draft = ProjectedDraft(draft_config(model.config, 32, 2), table, candidates)
    counts = chats.tokens.long().bincount(minlength=len(table))
    with torch.no_grad():
        draft.projection.copy_(principal_directions(table, counts, 32))
    return draft


def test_the_draft_model_learns_and_becomes_an_ordinary_folder(
    target: tuple[Any, Any, Path], chats_folder: Path, tmp_path: Path
) -> None:
    model, _, folder = target
    chats = Chats(chats_folder, 2, BOTH)
    candidates = Candidates(torch.arange(model.config.vocab_size), torch.arange(0), 0)
    draft = _draft(model, chats, candidates)
    learnt(draft, chats, tmp_path / "k", steps=20, warmup=5)
    store_draft(draft, tmp_path / "draft.safetensors")
    write_folder(tmp_path / "draft.safetensors", folder, tmp_path / "made")
    made: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ids = chats.batch([0]).tokens
    states = draft.states(ids)
    wanted = states @ (draft.table @ draft.projection).T
    torch.testing.assert_close(made(ids).logits, wanted, rtol=2e-2, atol=2e-2)
    assert {p.name for p in folder.iterdir()} - {
        p.name for p in (tmp_path / "made").iterdir()
    } == set()


def test_a_stopped_run_ends_as_an_uninterrupted_one(
    target: tuple[Any, Any, Path], chats_folder: Path, tmp_path: Path
) -> None:
    chats = Chats(chats_folder, 1, BOTH)
    plan = TrainingPlan(steps=12, tokens=400, warmup=2, report_every=4)

    def train(kept: str, stop_after: int | None = None) -> ProjectedDraft:
        draft = _draft(target[0], chats, Candidates(torch.arange(50), torch.arange(50, 250), 20))
        real, calls = draft.loss, 0

        def loss(batch: Any) -> Any:
            nonlocal calls
            calls += torch.is_grad_enabled()
            if calls == stop_after:
                raise KeyboardInterrupt
            return real(batch)

        draft.loss = loss  # type: ignore[method-assign]
        try:
            fit(draft, chats, plan, tmp_path / kept)
        except KeyboardInterrupt:
            return train(kept)
        return draft

    whole, resumed = train("whole"), train("stopped", stop_after=7)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    other = TrainingPlan(steps=13, tokens=400)
    with pytest.raises(DraftsimError, match="holds a run of another plan"):
        fit(whole, chats, other, tmp_path / "whole")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "p-eagle"])
def test_feature_drafters_learn_and_are_read_back(
    kind: str, target: tuple[Any, Any, Path], chats_folder: Path, tmp_path: Path
) -> None:
    model, _, folder = target
    chats = Chats(chats_folder, 2, ANSWERS, kind != "eagle")
    vocabulary = model.config.vocab_size
    torch.manual_seed(0)
    drafter: Any
    if kind != "eagle":
        tokens = by_frequency(chats.tokens, vocabulary)[:100].sort().values
        own = Eagle3 if kind == "eagle3" else ParallelEagle3
        drafter = eagles.new_eagle3(model, chats, tokens, DEPTHS, own)
        candidates = Candidates(tokens, torch.arange(0), 0)
    else:
        candidates = Candidates(torch.arange(100), torch.arange(100, vocabulary), 40)
        drafter = eagles.new_eagle(model, chats)
    module = eagles.Unrolled(drafter, model.get_output_embeddings().weight.detach(), candidates, 3)
    curve = learnt(module, chats, tmp_path / "kept")
    assert len(curve[-1]["held_out"]) == 3
    trained = module.finished()
    store_drafter(trained, tmp_path / "stored.safetensors")
    write_folder(tmp_path / "stored.safetensors", folder, tmp_path / "made")
    read = read_drafter(tmp_path / "made", model)
    weights = read.state_dict()
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(weights[name].float(), value.float(), rtol=1e-3, atol=1e-3)
    assert read.kind == kind
    if kind != "eagle":
        assert torch.equal(read.target_ids(torch.arange(100)), tokens)


def test_one_pass_begins_as_the_drafter_that_drafts_in_turn(
    target: tuple[Any, Any, Path], chats_folder: Path
) -> None:
    model = target[0]
    chats = Chats(chats_folder, 2, ANSWERS, features=True)
    tokens = by_frequency(chats.tokens, model.config.vocab_size)[:100].sort().values
    torch.manual_seed(0)
    candidates = Candidates(tokens, torch.arange(0), 0)
    head = model.get_output_embeddings().weight.detach()
    trained = eagles.Unrolled(
        eagles.new_eagle3(model, chats, tokens, DEPTHS), head, candidates, 1
    ).finished()
    assert isinstance(trained, Eagle3)
    parallel = eagles.new_parallel(model, trained, chats)
    assert torch.equal(parallel.target_ids(torch.arange(100)), tokens)
    ids = chats.batch(chats.training[:2].tolist()).tokens
    features = target_features(model, ids, DEPTHS)
    first, second = unroll(parallel, ids, features, 2)
    torch.testing.assert_close(first, unroll(trained, ids, features, 1)[0])
    assert not torch.equal(second, unroll(trained, ids, features, 2)[1])


def test_mtp_learns_as_one_module_and_as_several(
    target: tuple[Any, Any, Path], chats_folder: Path, tmp_path: Path
) -> None:
    model, _, folder = target
    chats = Chats(chats_folder, 2, ANSWERS)
    candidates = Candidates(torch.arange(100), torch.arange(100, model.config.vocab_size), 40)
    head = model.get_output_embeddings().weight.detach()
    torch.manual_seed(0)
    drafter: Mtp = eagles.new_mtp(model, chats)
    for modules in (1, 3):
        if modules > 1:
            drafter = eagles.in_turn(model, drafter, modules)
        module = eagles.Unrolled(drafter, head, candidates, max(2, modules))
        learnt(module, chats, tmp_path / f"kept{modules}")
        module.finished()
        store_drafter(drafter, tmp_path / "stored.safetensors")
        write_folder(tmp_path / "stored.safetensors", folder, tmp_path / f"made{modules}")
        read = read_drafter(tmp_path / f"made{modules}", model)
        assert (read.kind, read.modules_in_turn) == ("mtp", modules)
        for name, value in drafter.state_dict().items():
            torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["exit", "blockwise", "medusa", "specdec"])
def test_heads_learn(
    kind: str, target: tuple[Any, Any, Path], chats_folder: Path, tmp_path: Path
) -> None:
    model = target[0]
    chats = Chats(chats_folder, 2, ANSWERS, features=True)
    table = model.get_input_embeddings().weight.detach()
    candidates = Candidates(torch.arange(len(table)), torch.arange(0), 0)
    torch.manual_seed(0)
    heads = (
        on_target.new_exit_heads(model, DEPTHS[1:])
        if kind == "exit"
        else on_target.new_parallel_heads(model, kind)
    )
    module = on_target.Distilled(heads, table, candidates)
    batch = chats.batch(chats.training[:6].tolist())
    if kind == "exit":
        # Untrained, a head is the logit lens at its own depth.
        states = model(batch.tokens, output_hidden_states=True).hidden_states
        lens = model.lm_head(model.model.norm(states[DEPTHS[2]])).argmax(-1)
        own = model.lm_head(batch.states).argmax(-1)
        there = batch.weights > 0
        wanted = (lens == own)[there].float().mean()
        torch.testing.assert_close(module.loss(batch)[1][1], wanted, rtol=0, atol=0.02)
    curve = learnt(module, chats, tmp_path / "kept")
    assert len(curve[-1]["held_out"]) == (2 if kind == "exit" else AHEAD[kind])


def test_kangaroo_learns_from_the_logit_lens_on(
    target: tuple[Any, Any, Path], chats_folder: Path, tmp_path: Path
) -> None:
    model = target[0]
    chats = Chats(chats_folder, 2, ANSWERS, features=True)
    vocabulary = model.config.vocab_size
    candidates = Candidates(torch.arange(vocabulary), torch.arange(0), 0)
    torch.manual_seed(0)
    module = on_target.DistilledAdapter(on_target.new_adapter(model, DEPTHS[0]), model, candidates)
    batch = chats.batch(chats.training[:6].tolist())
    states = model(batch.tokens, output_hidden_states=True).hidden_states
    lens = model.lm_head(model.model.norm(states[DEPTHS[0]])).argmax(-1)
    own = model.lm_head(batch.states).argmax(-1)
    wanted = (lens == own)[batch.weights > 0].float().mean()
    torch.testing.assert_close(module.loss(batch)[1][0], wanted, rtol=0, atol=0.02)
    learnt(module, chats, tmp_path / "kept")


def test_parallel_heads_read_the_state_behind_which_they_are_asked(
    target: tuple[Any, Any, Path], chats_folder: Path
) -> None:
    """A head that foresees nothing is scored on the tokens that `ParallelHeads` decodes."""
    model = target[0]
    chats = Chats(chats_folder, 1, ANSWERS)
    table = model.get_input_embeddings().weight.detach()
    batch = chats.batch(chats.training[:4].tolist())
    heads = on_target.new_parallel_heads(model, "specdec")
    torch.nn.init.normal_(heads.blocks[1].up.weight, std=0.3)
    whole = Candidates(torch.arange(len(table)), torch.arange(0), 0)
    agreement = on_target.Distilled(heads, table, whole).loss(batch)[1]
    embedded = table[batch.tokens.roll(-1, 1)]
    drafts = (heads.states(batch.states.flatten(0, 1), embedded.flatten(0, 1)) @ table.T).argmax(-1)
    drafts = drafts.unflatten(0, batch.tokens.shape)  # (rows, length, k): of token t + 2 + i
    own = (batch.states @ table.T).argmax(-1)  # of token t + 1
    for index in range(heads.k):
        there = batch.weights[:, 1 + index :] > 0
        same = drafts[:, : -1 - index, index] == own[:, 1 + index :]
        torch.testing.assert_close(agreement[index], same[there].float().mean())


def test_sampled_candidates_estimate_the_whole_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(400)
    candidates = Candidates(torch.arange(20), torch.arange(20, 400), sampled=40)
    estimates = []
    for _ in range(2000):
        ids, raised = candidates.draw()
        estimates.append((logits[ids] + raised).exp().sum())
    drawn = torch.stack(estimates)
    error = drawn.std() / len(drawn) ** 0.5
    assert abs(drawn.mean() - logits.exp().sum()) < 4 * error


def test_the_loss_is_least_for_the_teacher_itself() -> None:
    torch.manual_seed(0)
    teacher, weights = torch.randn(30, 9), torch.rand(30)
    same, agreement = soft_loss(teacher, teacher, weights)
    entropy = (-(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1) * weights).sum()
    torch.testing.assert_close(same, entropy / weights.sum())
    assert agreement == 1
    assert soft_loss(teacher + 0.3 * torch.randn(30, 9), teacher, weights)[0] > same


def test_principal_directions_lose_least() -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 12) * torch.arange(1, 13)
    directions = principal_directions(rows, torch.zeros(200), 5)
    torch.testing.assert_close(directions.T @ directions, torch.eye(5), rtol=0, atol=1e-5)
    kept = (rows @ directions).pow(2).sum()
    assert kept == pytest.approx(float(torch.linalg.svdvals(rows)[:5].pow(2).sum()), rel=1e-4)
