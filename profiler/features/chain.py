"""Drafting one sequence's tokens in turn, catching up with what was verified."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.features.base import FeatureDrafter
from profiler.features.runner import DrafterRunner
from profiler.features.tree import Trees


class DrafterChain:
    """A drafter that follows one sequence.

    ``slots``: tokens it has room for, drafts and branches of trees included.
    """

    def __init__(self, drafter: FeatureDrafter, slots: int) -> None:
        self.drafter = drafter
        self._runner = DrafterRunner(drafter, slots)
        turns, hidden = drafter.modules_in_turn, int(drafter.config.hidden_size)
        self._tokens = torch.zeros(slots, dtype=torch.long, device=drafter.device)
        # What module k reads of every entry: the target's, and module k - 1's output.
        self._inputs = torch.zeros(turns, slots, hidden, dtype=drafter.dtype, device=drafter.device)
        self._known = 0  # true tokens
        self._seen = 0  # features: the last token's comes with the pass that processes it
        self._done = [0] * turns  # entries that each module has seen with true tokens
        self._fed_back = self._inputs[0, :1]

    @torch.inference_mode()
    def prefill(self, prompt: Tensor, features: Tensor) -> None:
        """Take in a prompt (tokens,) and its (tokens, width) features."""
        self.learn(prompt, features)
        for module in range(self.drafter.modules_in_turn):
            self._run(module, self._known - 1 - module)

    @torch.inference_mode()
    def draft(self, offset: int, last: Tensor | None) -> tuple[Tensor, int]:
        """Logits (1, draft vocabulary) of this round's token `offset`, and the pass's width.

        ``last`` (1,): the token drafted before it, None at the first.
        """
        entries = self._known - 1
        turns = self.drafter.modules_in_turn
        if last is not None:
            self._tokens[self._known + offset - 1] = last[0]
        if turns == 1 and last is not None:
            states, self._fed_back = self._runner.run(last, self._fed_back, entries + offset - 1)
            return self.drafter.logits(states), 1
        begin = self._done[offset]
        states = self._run(offset, entries)
        self._done[offset] = max(0, entries - offset)
        return self.drafter.logits(states[-1:]), entries - begin

    @torch.inference_mode()
    def draft_all(self, count: int) -> tuple[Tensor, int]:
        """Logits (count, draft vocabulary) of all this round's tokens, and the pass's width.

        The drafter is one of `FeatureDrafter.one_pass`.
        """
        begin, entries = self._done[0], self._known - 1
        tokens, inputs = self._tokens[begin + 1 : entries + 1], self._inputs[0, begin:entries]
        masks = self.drafter.following(
            self._tokens.new_zeros(count - 1), self._inputs[0].new_zeros(count - 1, inputs.shape[1])
        )
        states, _ = self._runner.run(
            torch.cat([tokens, masks[0]]), torch.cat([inputs, masks[1]]), begin
        )
        self._done[0] = entries
        return self.drafter.logits(states[-count:]), entries - begin + count - 1

    @torch.inference_mode()
    def tree(self, topk: int) -> tuple[Trees, int]:
        """Return a tree after the known tokens, one layer deep, and the width of its pass."""
        logits, width = self.draft(0, None)
        entries = self._known - 1
        sees = torch.ones(1, entries, dtype=torch.bool, device=logits.device)
        at = self._tokens.new_full((1,), entries - 1)
        return Trees(self._runner, topk, logits, self._fed_back, at, sees), width

    @torch.inference_mode()
    def learn(self, tokens: Tensor, features: Tensor | None = None) -> None:
        """True tokens (n,) follow, and the (m, width) features that have become known."""
        if features is not None:
            at = self._seen
            self._inputs[0, at : at + features.shape[0]] = self.drafter.fuse(features)
            self._seen = at + features.shape[0]
        self._tokens[self._known : self._known + tokens.shape[0]] = tokens
        self._known += tokens.shape[0]

    def _run(self, module: int, stop: int) -> Tensor:
        """Run a module over the entries it lacks up to `stop`; what the head reads of them."""
        begin = self._done[module]
        if stop <= begin:
            return self._inputs[0, :0]
        tokens = self._tokens[begin + 1 + module : stop + 1 + module]
        states, out = self._runner.run(
            tokens, self._inputs[module, begin:stop], begin, module=module
        )
        if module + 1 < self.drafter.modules_in_turn:
            self._inputs[module + 1, begin:stop] = out
        self._fed_back = out[-1:]
        self._done[module] = stop
        return states
