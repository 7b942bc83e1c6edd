"""Off-path tails: what a draft would have gone on to propose after its wrong tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from profiler.models.attention import Block
from profiler.models.runner import Runner
from profiler.models.sampling import log_probs_at
from profiler.recording.sides import Sides

SCORE_TOKENS = 512
"""Tail tokens the target scores in one pass: bounds the memory of their logits."""

BLOCK_TOKENS = 96
"""Tail tokens that attend together: few enough that little of it is masked out."""

Rows = dict[str, Tensor]


class Branches:
    """Branches of a tree after a path; each sees only the path before its wrong token.

    ``path``: tokens of prompt and output in a model's cache; ``wrong_at``: (branches,) slot and
    position of each branch's wrong token.
    """

    def __init__(self, path: int, wrong_at: Tensor) -> None:
        self.path, self.wrong_at = path, wrong_at
        slots = torch.arange(path, device=wrong_at.device)
        self.sees = slots[None] < wrong_at[:, None]  # (branches, path)

    def forward(self, runner: Runner, fed: Tensor, branch: Tensor, step: Tensor) -> Tensor:
        """Return a model's logits after the tokens of whole branches, in (branch, step) order."""
        positions = self.wrong_at[branch] + step
        spans = spans_of(branch, BLOCK_TOKENS)
        blocks = [self._block(runner, branch[span], span) for span in spans]
        return runner.forward_blocks(fed, self.path, blocks, positions)

    def _block(self, runner: Runner, branch: Tensor, tokens: slice) -> Block:
        """Return what these tokens of whole branches attend to."""
        path = int(self.wrong_at[branch[-1]])
        own = (branch[None] == branch[:, None]).tril()
        sees = torch.cat([self.sees[branch, :path], own], dim=1)
        return Block(tokens, path, _to_add(sees, runner))


class Tails:
    """All off-path tails of one prompt, drafted together and scored by the target.

    Each wrong proposal begins a branch.  The draft advances all branches that have not
    ended, one pass per step; the target then scores whole branches, many in a pass.
    Either way a branch sees the path before its wrong token and its own earlier steps:
    the mask makes a tree of what lies in consecutive slots.

    Parameters
    ----------
    target, draft:
        Runners whose caches hold the path.
    path:
        Tokens of prompt and output in the caches.
    wrong_at:
        (branches,) slot and position of each branch's wrong token.
    lengths:
        (branches,) tail tokens wanted of each, at least 1.
    sides:
        What is computed of each proposal.
    """

    def __init__(
        self, target: Runner, draft: Runner, path: int, wrong_at: Tensor, lengths: Tensor,
        sides: Sides,
    ) -> None:  # fmt: skip
        self._target, self._draft = target, draft
        self._branches, self._lengths, self._sides = Branches(path, wrong_at), lengths, sides

    def record(self, wrong: Tensor) -> Rows:
        """Rows of all tails by (branch, step), which are two of the columns; {} if there are none.

        ``wrong``: (branches,) the wrong tokens.  A tail ends with the EOS it proposes.
        """
        rows = self._drafted(wrong)
        if not rows:
            return {}
        order = torch.argsort(rows["branch"] * int(self._lengths.max()) + rows["step"])
        rows = {name: values[order] for name, values in rows.items()}
        fed = rows.pop("fed")
        parts = []
        for span in spans_of(rows["branch"], SCORE_TOKENS):
            some = {name: values[span] for name, values in rows.items()}
            parts.append(self._scored(fed[span], **some))
        return rows | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _drafted(self, feed: Tensor) -> Rows:
        """The draft's columns, with the token fed before each proposal, in drafting order."""
        known, branch = self._branches, torch.arange(feed.shape[0], device=feed.device)
        owners = branch[:0]
        steps: list[Rows] = []
        while True:
            step = len(steps)
            # A draft ends with the EOS it proposes: nothing follows a fed EOS.
            going = (self._lengths[branch] > step) & ~self._sides.ends(feed)
            branch, feed = branch[going], feed[going]
            if not branch.shape[0]:
                break
            start = known.path + owners.shape[0]
            owners = torch.cat([owners, branch])
            sees = torch.cat([known.sees[branch], owners[None] == branch[:, None]], dim=1)
            logits = self._draft.forward(
                feed, start, mask=_to_add(sees, self._draft),
                positions=known.wrong_at[branch] + step,
            )  # fmt: skip
            at = torch.full_like(branch, step)
            numbers = self._sides.propose(logits)
            steps.append({"branch": branch, "step": at, "fed": feed, **numbers})
            feed = numbers["draft_token"]
        return (
            {name: torch.cat([rows[name] for rows in steps]) for name in steps[0]} if steps else {}
        )

    def _scored(
        self, fed: Tensor, branch: Tensor, step: Tensor, draft_token: Tensor, **_: Tensor
    ) -> Rows:
        """The target's columns about the proposals of whole branches, in (branch, step) order."""
        logits = self._branches.forward(self._target, fed, branch, step)
        scored = self._sides.target(logits, draft_token)
        if not self._sides.sampling.greedy:
            scored["drawn"] = log_probs_at(logits, draft_token, self._sides.sampling)
        return scored


def spans_of(branch: Tensor, most: int) -> list[slice]:
    """Slices of whole branches, about equally many rows and at most about `most` in each."""
    # Whole branches: one never looks into another.
    rows = branch.shape[0]
    share = rows / math.ceil(rows / most)
    changes = torch.diff(branch, append=branch[-1:] + 1)
    ends: list[int] = (torch.nonzero(changes)[:, 0] + 1).tolist()
    spans: list[slice] = []
    begin = 0
    for end in ends:
        if end == rows or end >= share * (len(spans) + 1):
            spans.append(slice(begin, end))
            begin = end
    return spans


def _to_add(sees: Tensor, runner: Runner) -> Tensor:
    # Attention would make numbers of booleans again in every layer.
    mask = torch.zeros(sees.shape, dtype=runner.model.dtype, device=sees.device)
    return mask.masked_fill_(~sees, -torch.inf)
