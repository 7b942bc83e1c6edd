"""Records what a drafter on features drafts from every start of an output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from profiler.features.base import FeatureDrafter
from profiler.features.runner import DrafterRunner
from profiler.sources.stack import LayerRunner
from profiler.sources.start_record import CHUNK, StartRecorder


class FeatureRecorder(StartRecorder):
    """Chains from every start, `offsets` tokens long; all starts of a chunk advance together.

    One pass of the target gives the features, one of the drafter its keys and values of the
    true path; from then on each chain attends to the path before its start and to its own.

    ``longest``: tokens of the longest path; ``offsets``: of a draft, unless modules in turn
    limit it.
    """

    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, longest: int, offsets: int = 8
    ) -> None:
        super().__init__(target)
        turns = drafter.modules_in_turn
        self.drafter, self.offsets = drafter, turns if turns > 1 else offsets
        self._runner = DrafterRunner(drafter, longest + CHUNK * self.offsets)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.drafter.kind, "modules": self.drafter.modules_in_turn}

    def slots_needed(self, longest: int) -> int:
        return longest

    def target_ids(self, drafted: Tensor) -> Tensor:
        return self.drafter.target_ids(drafted)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        return self.drafter.draft_ids(tokens)

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        path = torch.cat([prompt, prompt.new_tensor(output[:-1])])
        fused = self.drafter.fuse(self.target.states(path[:-1], 0, self.drafter.feature_layers))
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
        parts = []
        for begin in range(first, entries, CHUNK):
            at = torch.arange(begin, min(begin + CHUNK, entries), device=path.device)
            if self.drafter.modules_in_turn > 1:
                parts.append(self._in_turn(at, heads[0], inputs, entries))
            else:
                parts.append(self._chain(at, heads[0], inputs[1], entries))
        return torch.cat(parts)

    def _pick(self, logits: Tensor) -> Tensor:
        return self.drafter.target_ids(logits.argmax(-1))

    def _chain(self, at: Tensor, heads: Tensor, out: Tensor, path: int) -> Tensor:
        """One layer for all tokens: (starts, offsets, draft vocabulary)."""
        count = int(at.shape[0])
        sees = torch.arange(path, device=at.device)[None] <= at[:, None]
        own = torch.eye(count, dtype=torch.bool, device=at.device)
        steps, fed_back = [self.drafter.logits(heads[at])], out[at]
        for step in range(1, self.offsets):
            mask = torch.cat([sees, own.repeat(1, step)], 1)
            states, fed_back = self._runner.run(
                self._pick(steps[-1]), fed_back, path + (step - 1) * count, mask=mask,
                positions=at + step,
            )  # fmt: skip
            steps.append(self.drafter.logits(states))
        return torch.stack(steps, 1)

    def _in_turn(self, at: Tensor, heads: Tensor, inputs: list[Tensor], path: int) -> Tensor:
        """Modules in turn: the k-th (from 0) lacks the true tokens of a start's last k entries.

        These are its own rows, oldest first; all but the oldest read what the module before made
        of its own.
        """
        count, device = int(at.shape[0]), at.device
        steps = [self.drafter.logits(heads[at])]
        drafted = [self._pick(steps[0])]
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
            # An entry before the sequence began is nobody's but its own.
            own &= (where[None] >= 0) | torch.eye(len(where), dtype=torch.bool, device=device)
            true = seen <= (at - module)[group][:, None]
            states, out = self._runner.run(
                torch.cat(drafted), fused, path, module=module,
                mask=torch.cat([true, own], 1), positions=where.clamp(min=0),
            )  # fmt: skip
            before = list(out.split(count))
            steps.append(self.drafter.logits(states[-count:]))
            drafted.append(self._pick(steps[-1]))
        return torch.stack(steps, 1)
