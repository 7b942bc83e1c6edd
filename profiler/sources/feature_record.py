"""Records what a drafter on features drafts from every start of an output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrafterRunner, Drawn, Likeliest
from profiler.models.sampling import probs
from profiler.models.stack import LayerRunner
from profiler.sources.start_record import CHUNK, StartRecorder
from traces.acceptance.sampling import GREEDY, Sampling

Pick = Callable[..., Tensor]
Drafts = tuple[Tensor, Tensor]
"""Logits (starts, offsets, draft vocabulary), and the target ids drafted (starts, offsets)."""


class FeatureRecorder(StartRecorder):
    """Chains from every start, `offsets` tokens long; all starts of a chunk advance together.

    One pass of the target gives the features, one of the drafter its keys and values of the
    true path; from then on each chain attends to the path before its start and to its own.

    ``longest``: tokens of the longest path; ``offsets``: of a draft, unless modules in turn
    limit it; ``sampling`` and ``generator``: of outputs and drafts that were drawn.
    """

    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, longest: int, offsets: int = 8,
        sampling: Sampling = GREEDY, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, sampling)
        self._generator = generator
        turns = drafter.modules_in_turn
        self.drafter, self.offsets = drafter, turns if turns > 1 else offsets
        self._runner = DrafterRunner(drafter, longest + CHUNK * self.offsets)
        self._likeliest: Likeliest | Drawn = Likeliest(drafter)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.drafter.kind, "modules": self.drafter.modules_in_turn}

    def slots_needed(self, longest: int) -> int:
        return longest

    def target_ids(self, drafted: Tensor) -> Tensor:
        return self.drafter.target_ids(drafted)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        return self.drafter.draft_ids(tokens)

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        return self.drafts(prompt, output)[0]

    def drafts(self, prompt: Tensor, output: list[int]) -> tuple[Tensor, Tensor]:
        path = torch.cat([prompt, prompt.new_tensor(output[:-1])])
        depths, pick = self.drafter.feature_layers, self._likeliest
        if self.sampling.greedy:
            features = self.target.states(path[:-1], 0, depths)
        else:
            logits, features = self.target.forward_with_states(path, 0, depths)
            drawn_from = probs(logits[prompt.shape[0] - 1 :], self.sampling)
            pick = Drawn(self.drafter, output, drawn_from, self.sampling, self._generator)
        fused = self.drafter.fuse(features[: path.shape[0] - 1])
        first = int(prompt.shape[0]) - 1  # entry from which start 1 drafts
        entries = int(fused.shape[0])
        inputs, heads = [fused], []
        for module in range(self.drafter.modules_in_turn):
            count = entries - module
            if count < 1:
                break
            tokens = path[1 + module : 1 + module + count]
            states, out = self._runner.run(tokens, inputs[module][:count], 0, module=module)
            heads.append(states)
            inputs.append(out)
        parts: list[Drafts] = []
        for begin in range(first, entries, CHUNK):
            at = torch.arange(begin, min(begin + CHUNK, entries), device=path.device)
            own = partial(pick, starts=at - first + 1)
            if self.drafter.modules_in_turn > 1:
                parts.append(self._in_turn(at, heads[0], inputs, entries, own))
            else:
                parts.append(self._chain(at, heads[0], inputs[1], entries, own))
        return torch.cat([made for made, _ in parts]), torch.cat([picked for _, picked in parts])

    def _chain(self, at: Tensor, heads: Tensor, out: Tensor, path: int, pick: Pick) -> Drafts:
        """One layer for all tokens."""
        count = int(at.shape[0])
        sees = torch.arange(path, device=at.device)[None] <= at[:, None]
        own = torch.eye(count, dtype=torch.bool, device=at.device)
        steps, fed_back = [self.drafter.logits(heads[at])], out[at]
        drafted = [pick(steps[0], step=0)]
        for step in range(1, self.offsets):
            mask = torch.cat([sees, own.repeat(1, step)], 1)
            # Of a one-pass drafter these are masks, whose rows wait for no other.
            tokens, fed_back = self.drafter.following(drafted[-1], fed_back)
            states, fed_back = self._runner.run(
                tokens, fed_back, path + (step - 1) * count, mask=mask, positions=at + step
            )
            steps.append(self.drafter.logits(states))
            drafted.append(pick(steps[-1], step=step))
        return torch.stack(steps, 1), torch.stack(drafted, 1)

    def _in_turn(
        self, at: Tensor, heads: Tensor, inputs: list[Tensor], path: int, pick: Pick
    ) -> Drafts:
        """Modules in turn: the k-th (from 0) lacks the true tokens of a start's last k entries.

        These are its own rows, oldest first; all but the oldest read what the module before made
        of its own.
        """
        count, device = int(at.shape[0]), at.device
        steps = [self.drafter.logits(heads[at])]
        drafted = [pick(steps[0], step=0)]
        before: list[Tensor] = []  # outputs of the own rows of the module before
        seen = torch.arange(path, device=device)[None]
        same = torch.arange(count, device=device)
        for module in range(1, self.offsets):
            entries = [at - module + 1 + row for row in range(module)]
            oldest = entries[0].clamp(min=0)
            fused = torch.cat([inputs[module][oldest.clamp(max=len(inputs[module]) - 1)], *before])
            where = torch.cat(entries)
            group, row = same.repeat(module), torch.arange(module, device=device)
            row = row.repeat_interleave(count)
            own = (group[:, None] == group[None]) & (row[None] <= row[:, None])
            # An entry before the sequence began is seen by itself alone.
            own &= (where[None] >= 0) | torch.eye(len(where), dtype=torch.bool, device=device)
            true = seen <= (at - module)[group][:, None]
            states, out = self._runner.run(
                torch.cat(drafted), fused, path, module=module,
                mask=torch.cat([true, own], 1), positions=where.clamp(min=0),
            )  # fmt: skip
            before = list(out.split(count))
            steps.append(self.drafter.logits(states[-count:]))
            drafted.append(pick(steps[-1], step=module))
        return torch.stack(steps, 1), torch.stack(drafted, 1)
