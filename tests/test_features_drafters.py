"""Drafters on the target's features: their arithmetic, their unrolling, their training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.training.unroll import target_features, unroll
from profiler.features.drafters import (
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    default_depths,
    layer_config,
)
from profiler.features.runner import DrafterRunner, Layer, Trees
from profiler.sources.start_record import ranks
from tests.features import DRAFTED, drafters, miniature
from traces.errors import DraftsimError

KINDS = ("eagle", "eagle-bias", "eagle3", "eagle3-variant", "mtp", "mtp-several")
ONE_FOR_ALL = KINDS[:-1]


@pytest.fixture(scope="module")
def target() -> Any:
    return miniature()


@pytest.fixture(scope="module")
def made(target: Any) -> dict[str, FeatureDrafter]:
    return drafters(target)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(5))


def _norm(x: Tensor, module: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight


def _turned(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... written out; x (tokens, head_dim)."""
    tokens, width = x.shape
    out = x.clone()
    for p in range(tokens):
        for i in range(width // 2):
            angle = torch.tensor(p * 1000.0 ** (-2 * i / width))
            a, b = x[p, i], x[p, i + width // 2]
            out[p, i] = a * angle.cos() - b * angle.sin()
            out[p, i + width // 2] = b * angle.cos() + a * angle.sin()
    return out


def _attention(x: Tensor, attn: Any) -> Tensor:
    """Causal attention of 3 heads over 1 key-value head, written out; x (tokens, width)."""
    q, k, v = (x @ p.weight.T for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    k, heads = _turned(k), []
    for h in range(3):
        scores = _turned(q[:, 12 * h : 12 * h + 12]) @ k.T / 12**0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ attn.o_proj.weight.T


def _mlp(x: Tensor, mlp: Any) -> Tensor:
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    return (nn.functional.silu(gate) * up) @ mlp.down_proj.weight.T


def _by_hand(drafter: Any, e: Tensor, f: Tensor, kind: str) -> Tensor:
    """Return the head's input, by the papers' formulas; e, f (entries, ...)."""
    if kind.startswith("eagle3"):
        layer = drafter.midlayer
        if drafter.input_norm is not None:
            f = _norm(f, drafter.input_norm)
        x = f @ drafter.fc.weight.T
        normed = _norm(x, layer.hidden_norm)
        x = normed if layer.norm_before_residual else x
        inputs = torch.cat([_norm(e, layer.input_layernorm), normed], -1)
    elif kind.startswith("eagle"):
        layer = drafter.layers[0]
        x = inputs = drafter.fc(torch.cat([e, f], -1))
    else:
        layer = drafter.mtp_layers[0]
        both = [_norm(e, layer.token_layernorm), _norm(f, layer.hidden_layernorm)]
        x = torch.cat(both, -1) @ layer.input_proj.weight.T
        inputs = _norm(x, layer.input_layernorm)
    x = x + _attention(inputs, layer.self_attn)
    x = x + _mlp(_norm(x, layer.post_attention_layernorm), layer.mlp)
    if kind.startswith("eagle3"):
        return _norm(x, drafter.norm)
    return _norm(x, layer.final_layernorm) if kind.startswith("mtp") else x


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_the_published_formula(
    made: dict[str, FeatureDrafter], target: Any, ids: Tensor, kind: str
) -> None:
    drafter = made[kind]
    features = target_features(target, ids, drafter.feature_layers)
    [states] = unroll(drafter, ids, features, 1)
    for row in range(2):
        embedded = target.model.embed_tokens(ids[row, 1:])
        want = _by_hand(drafter, embedded, features[row, :-1], kind)
        torch.testing.assert_close(states[row], want, rtol=1e-4, atol=1e-4)


def test_features_are_the_targets_states(target: Any, ids: Tensor) -> None:
    out = target(input_ids=ids, output_hidden_states=True)
    last = target_features(target, ids)
    torch.testing.assert_close(target.lm_head(last), out.logits)
    both = target_features(target, ids, (1, 3))
    torch.testing.assert_close(both, torch.cat([out.hidden_states[i] for i in (1, 3)], -1))
    with pytest.raises(DraftsimError, match="target of 4 layers"):
        target_features(target, ids, (1, 5))
    assert default_depths(30) == (2, 15, 27)
    assert default_depths(8) == (2, 4, 5)
    assert default_depths(6) == (1, 3, 5)
    with pytest.raises(DraftsimError, match="no three depths"):
        default_depths(3)


@pytest.mark.parametrize("kind", ONE_FOR_ALL)
def test_unrolling_is_decoding_from_every_entry(
    made: dict[str, FeatureDrafter], target: Any, ids: Tensor, kind: str
) -> None:
    drafter = made[kind]
    features = target_features(target, ids, drafter.feature_layers)

    def greedy(states: Tensor) -> Tensor:
        return drafter.target_ids(drafter.logits(states).argmax(-1))

    with torch.inference_mode():
        states = unroll(drafter, ids, features, 4, pick=greedy)
        fused = drafter.fuse(features[0])
        for entry in range(11):
            runner = DrafterRunner(drafter, 16)
            out, fed_back = runner.run(ids[0, 1 : entry + 2], fused[: entry + 1], 0)
            for step in range(4):
                torch.testing.assert_close(out[-1], states[step][0, entry], rtol=1e-4, atol=1e-4)
                token = greedy(out[-1:])
                out, fed_back = runner.run(token, fed_back[-1:], entry + 1 + step)


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing_sees_no_token_it_is_to_foresee(
    made: dict[str, FeatureDrafter], target: Any, ids: Tensor, kind: str
) -> None:
    drafter = made[kind]
    features = target_features(target, ids, drafter.feature_layers)
    before = unroll(drafter, ids, features, 3)
    changed = ids.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 96
    again = target_features(target, changed, drafter.feature_layers)
    after = unroll(drafter, changed, again, 3)
    for step in range(3):
        last = 8 - 2 - step  # foresees token 8
        torch.testing.assert_close(before[step][:, : last + 1], after[step][:, : last + 1])
        assert not torch.allclose(before[step][:, last + 1], after[step][:, last + 1])


def test_the_draft_vocabulary_maps_both_ways(made: dict[str, FeatureDrafter]) -> None:
    drafter = made["eagle3"]
    assert isinstance(drafter, Eagle3)
    drafted = torch.arange(drafter.draft_vocab_size)
    assert drafter.target_ids(drafted).tolist() == DRAFTED
    assert drafter.t2d.nonzero()[:, 0].tolist() == DRAFTED
    tokens = torch.tensor([[-1, 0, 1], [2, 3, 95]])
    back = drafter.draft_ids(tokens)
    assert back.tolist() == [[-1, -1, 0], [1, -1, DRAFTED.index(95)]]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "mtp-several"])
def test_training_moves_every_parameter_and_lowers_the_loss(target: Any, kind: str) -> None:
    drafter = drafters(target, seed=7)[kind].train()
    ids = torch.randint(96, (4, 10), generator=torch.Generator().manual_seed(3))
    features = target_features(target, ids, drafter.feature_layers)
    begin = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    optimiser = torch.optim.Adam(drafter.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        states = unroll(drafter, ids, features, 3)
        loss = torch.zeros(())
        for step, out in enumerate(states):
            labels = nn.functional.pad(
                drafter.draft_ids(ids)[:, 2 + step :], (0, 1 + step), value=-1
            )
            logits = drafter.logits(out).flatten(0, 1)
            loss = loss + nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for name, parameter in drafter.named_parameters():
        assert not torch.equal(parameter, begin[name]), name


def test_bad_sizes_are_refused(target: Any, ids: Tensor) -> None:
    layer = layer_config(target.config)
    with pytest.raises(ValueError, match="expected ascending depths"):
        Eagle3(layer, None, (3, 1, 2))
    with pytest.raises(ValueError, match="ascending ids below 96"):
        Eagle3(layer, [5, 96], (1, 2, 3))
    with pytest.raises(ValueError, match="modules is 0"):
        Mtp(layer, 0)
    with pytest.raises(DraftsimError, match="trained for another"):
        Eagle3(layer, None, (1, 2, 9)).attach(target)
    other = layer_config({**target.config.to_dict(), "vocab_size": 95})
    with pytest.raises(DraftsimError, match="over 95 tokens"):
        EagleDrafter(other).attach(target)
    drafter = Mtp(layer, 2).attach(target)
    features = target_features(target, ids)
    with pytest.raises(DraftsimError, match="at most 2 tokens"):
        unroll(drafter, ids, features, 3)
    with pytest.raises(DraftsimError, match="attach a target"):
        EagleDrafter(layer).embed(ids)


def test_equal_scores_are_taken_from_the_upper_layer_first() -> None:
    """All tokens are as likely as each other: certain ones, and ties within and across layers."""
    trees = Trees.__new__(Trees)
    trees.topk, trees._at, trees._own = 2, torch.zeros(1), torch.ones(2, 2, dtype=torch.bool)
    zeros = torch.zeros(1, 4)
    first = Layer(zeros[:, :2], torch.tensor([[7, 8]]), torch.zeros(1, 2, dtype=torch.long),
                  torch.tensor([[0, 1]]), zeros)  # fmt: skip
    second = Layer(zeros, torch.tensor([[7, 8, 7, 8]]), torch.tensor([[0, 0, 1, 1]]),
                   torch.tensor([[0, 1]]), zeros)  # fmt: skip
    trees.layers = [first, second]
    rank = ranks(trees, torch.tensor([[8, 7]]))[0]
    assert rank.tolist() == [[1, 1], [-1, 4]]
    cut = trees.cut(5, 2)
    assert cut.tokens.tolist() == [7, 8, 7, 8, 7]
    assert cut.parent.tolist() == [0, 0, 1, 1, 2]
    assert cut.depth.tolist() == [0, 1, 1, 2, 2, 2]
    assert cut.sees.int().tolist()[5] == [1, 0, 1, 0, 0, 1]
