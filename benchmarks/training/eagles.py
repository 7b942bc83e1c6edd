"""EAGLE, EAGLE-3, P-EAGLE and MTP drafters, distilled from the target's states over its chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.training.chats import Batch, Chats
from benchmarks.training.fit import Candidates, InTraining
from benchmarks.training.unroll import unroll
from profiler.features.drafters import (
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    ParallelEagle3,
    layer_config,
)

DECAY = 0.8  # of the loss's weight from one drafted token to the next, as EAGLE-3 has it
FEATURE_WEIGHT = 0.5  # of EAGLE's regression to the target's own features


class _PerInput(nn.Module):
    """A matrix trained as if each of its inputs had unit variance.

    A few numbers of a language model's states are a thousand times larger than the others, so an
    optimiser that treats all entries of a matrix alike learns nothing about the rest.
    """

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    scale: Tensor

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.scale


def _pairs(chats: Chats, count: int = 40_000) -> Tensor:
    """Return about `count` places in `chats.tokens`, evenly spaced, where the chat goes on."""
    followed = torch.ones(len(chats.tokens), dtype=torch.bool)
    followed[chats.bounds[1:] - 1] = False
    places = followed.nonzero()[:, 0]
    return places[:: max(1, len(places) // count)]


def _ridge(inputs: Tensor, wanted: Tensor, scale: Tensor) -> Tensor:
    """Return the matrix (out, in) that best gives `wanted` (n, out) from `inputs` (n, in)."""
    scaled = inputs / scale
    gram = scaled.T @ scaled + 1e-3 * len(scaled) * torch.eye(scaled.shape[1])
    solved: Tensor = torch.linalg.solve(gram, scaled.T @ wanted)
    return solved.T / scale


def new_eagle3(
    target: Any, chats: Chats, draft_tokens: Tensor, depths: tuple[int, ...],
    kind: type[Eagle3] = Eagle3,
) -> Eagle3:  # fmt: skip
    """Return an EAGLE-3 drafter (`kind`) that begins as a linear guess of the target's next final
    state.

    ``fc`` starts as the ridge regression of that state from the features (0.22 of first tokens
    right), the head is the target's own rows and stays so, and the layer adds nothing yet.
    """
    drafter = kind(layer_config(target.config), draft_tokens, depths, norm_before_residual=True)
    drafter.attach(target)
    places = _pairs(chats)
    features, states = chats.features[places].float(), chats.states[places + 1].float()
    scale = features.std(0).clamp(min=1e-3)
    head = target.get_output_embeddings().weight.detach().float()
    with torch.no_grad():
        drafter.fc.weight.copy_(_ridge(features, states, scale))
        size = states.pow(2).mean().sqrt()
        drafter.midlayer.hidden_norm.weight.fill_(size)
        drafter.norm.weight.fill_(size)
        drafter.lm_head.weight.copy_(head[draft_tokens])
        drafter.midlayer.self_attn.o_proj.weight.zero_()
        drafter.midlayer.mlp.down_proj.weight.zero_()
    drafter.lm_head.weight.requires_grad_(False)
    parametrize.register_parametrization(drafter.fc, "weight", _PerInput(scale))
    return drafter


def new_eagle(target: Any, chats: Chats) -> EagleDrafter:
    """Return an EAGLE drafter that begins as a linear guess of the target's next final state.

    ``fc`` starts as the ridge regression of that state from the token read and the state before
    it, which alone gives 0.31 of first tokens right; the layer adds nothing yet.
    """
    drafter = EagleDrafter(layer_config(target.config))
    drafter.attach(target)
    places = _pairs(chats)
    embedding = target.get_input_embeddings().weight.detach()
    read = F.embedding(chats.tokens[places + 1].long(), embedding)
    inputs = torch.cat([read, chats.states[places]], 1).float()
    scale = inputs.std(0).clamp(min=1e-3)
    with torch.no_grad():
        drafter.fc.weight.copy_(_ridge(inputs, chats.states[places + 1].float(), scale))
        layer: Any = drafter.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    parametrize.register_parametrization(drafter.fc, "weight", _PerInput(scale))
    return drafter


def new_parallel(target: Any, trained: Eagle3, chats: Chats) -> ParallelEagle3:
    """Return a P-EAGLE drafter that begins as a trained EAGLE-3 drafter.

    The first token of a round is then EAGLE-3's from the first step on.  The mask begins as the
    mean token and the mean state.
    """
    drafter = ParallelEagle3(
        trained.config, trained.target_ids(torch.arange(trained.draft_vocab_size)),
        trained.feature_layers, norm_before_residual=True,
    )  # fmt: skip
    drafter.load_state_dict(trained.state_dict(), strict=False)
    drafter.attach(target)
    places = _pairs(chats)
    features = chats.features[places].float()
    with torch.no_grad():
        drafter.mask_token.copy_(trained.embed(chats.tokens[places + 1].long()).mean(0))
        drafter.mask_state.copy_(drafter.fuse(features.mean(0)))
    drafter.lm_head.weight.requires_grad_(False)
    scale = features.std(0).clamp(min=1e-3)
    parametrize.register_parametrization(drafter.fc, "weight", _PerInput(scale))
    return drafter


def new_mtp(target: Any, chats: Chats) -> Mtp:
    """Return an MTP drafter of one module that begins as a linear guess of the next final state.

    Its projection begins as the ridge regression of that state from the normed embedding of the
    token and the normed state before it; the layer adds nothing yet.
    """
    drafter = Mtp(layer_config(target.config))
    drafter.attach(target)
    places = _pairs(chats)
    embedding = target.get_input_embeddings().weight.detach()
    wanted = chats.states[places + 1].float()
    layer: Any = drafter.mtp_layers[0]
    with torch.no_grad():
        read = F.embedding(chats.tokens[places + 1].long(), embedding).float()
        inputs = torch.cat(
            [layer.token_layernorm(read), layer.hidden_layernorm(chats.states[places].float())], 1
        )
        scale = inputs.std(0).clamp(min=1e-3)
        layer.input_proj.weight.copy_(_ridge(inputs, wanted, scale))
        layer.final_layernorm.weight.fill_(wanted.pow(2).mean().sqrt())
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    parametrize.register_parametrization(layer.input_proj, "weight", _PerInput(scale))
    return drafter


def in_turn(target: Any, trained: Mtp, modules: int) -> Mtp:
    """Return an MTP drafter of `modules` modules that all begin as the one of `trained`."""
    drafter = Mtp(trained.config, modules)
    drafter.attach(target)
    for layer in drafter.mtp_layers:
        layer.load_state_dict(trained.mtp_layers[0].state_dict())
    return drafter


class Unrolled(InTraining):
    """A drafter in training: `steps` tokens from every entry, each compared with the target.

    From the second token on the drafter meets its own outputs, which is what it meets in decoding
    (EAGLE-3's training-time test; HASS for EAGLE).
    """

    decay = DECAY

    def __init__(
        self, drafter: FeatureDrafter, head: Tensor, candidates: Candidates, steps: int
    ) -> None:
        super().__init__(head, candidates)
        self.drafter, self.steps = drafter, steps

    def foreseen(
        self, batch: Batch, row: Tensor, column: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the places and states of each drafted token; see `InTraining.foreseen`."""
        features = batch.states if batch.features is None else batch.features
        outputs = unroll(self.drafter, batch.tokens, features, self.steps)
        for step, states in enumerate(outputs):
            # Entry i foresees token i + 2 + step, which the target's state at the one before gives.
            some = column > step
            yield some, states[row[some], column[some] - 1 - step]

    def regression(self, batch: Batch, found: Tensor, wanted: Tensor) -> Tensor | float:
        """Return EAGLE's regression to the target's states, if these are its features."""
        if batch.features is not None:
            return 0.0
        target = wanted.float()
        spread = target.std(0).clamp(min=1e-3)
        return FEATURE_WEIGHT * F.smooth_l1_loss(found / spread, target / spread)

    def finished(self) -> FeatureDrafter:
        """Return the drafter as it is written and read, its scales folded in."""
        for module in list(self.drafter.modules()):
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        return self.drafter.eval()
