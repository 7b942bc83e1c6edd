"""The chats of a text folder as training batches: padded rows of whole chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from profiler.smollm2.text import ANSWER, PROMPT, USER
from traces.errors import DraftsimError

Weights = tuple[float, float, float]
BOTH: Weights = (0.0, 0.5, 1.0)
ANSWERS: Weights = (0.0, 0.0, 1.0)
"""Weights of positions in the loss, by the kind of the token that follows: PROMPT, USER, ANSWER."""


HELD_OUT = 16


@dataclass(frozen=True)
class Batch:
    """Chats padded on the right: (rows, length) each, states (rows, length, ...).

    `weights` is 0 on padding and wherever nothing is to be learnt.  `states` are the target's
    final normed ones, `features` those of the drafter's depths side by side.
    """

    tokens: Tensor
    weights: Tensor
    states: Tensor
    features: Tensor | None = None


class Chats:
    """The chats of a folder's first shards, each after the beginning that they share.

    `features`: whether the states of the depths are read too.  One chat in HELD_OUT is in
    `held_out`, the others in `training`; both are indices.
    """

    def __init__(self, folder: Path, shards: int, weights: Weights, features: bool = False) -> None:
        self.weights = torch.tensor(weights)
        names = ("tokens", "states", "features") if features else ("tokens", "states")
        self._parts: dict[str, list[Tensor]] = {name: [] for name in (*names, "kinds")}
        self._prefix: dict[str, Tensor] = {}
        bounds = [torch.zeros(1, dtype=torch.long)]
        for number in range(shards):
            path = folder / f"text-{number:03}.safetensors"
            if not path.is_file():
                raise DraftsimError(f"{path} is missing: write the training text first")
            with safe_open(path, "pt") as file:
                for name, parts in self._parts.items():
                    parts.append(_flat(file.get_tensor(_STORED.get(name, name))))
                for name in names:
                    self._prefix[name] = _flat(file.get_tensor(f"prefix_{_STORED.get(name, name)}"))
                bounds.append(file.get_tensor("starts")[1:] + bounds[-1][-1])
        self._arrays = {name: torch.cat(parts) for name, parts in self._parts.items()}
        self._parts.clear()
        self.bounds = torch.cat(bounds)
        indices = torch.arange(len(self.bounds) - 1)
        self.held_out = indices[indices % HELD_OUT == HELD_OUT - 1]
        self.training = indices[indices % HELD_OUT != HELD_OUT - 1]

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by what they are."""
        kinds = self._arrays["kinds"].long().bincount(minlength=3).tolist()
        return {"prompt": kinds[PROMPT], "user": kinds[USER], "answer": kinds[ANSWER]}

    @property
    def tokens(self) -> Tensor:
        """All tokens in one line, (n,)."""
        return self._arrays["tokens"]

    @property
    def states(self) -> Tensor:
        """The target's final states, (n, hidden)."""
        return self._arrays["states"]

    @property
    def features(self) -> Tensor:
        """The states of all depths side by side, (n, depths * hidden)."""
        return self._arrays["features"]

    def beginnings(self, length: int) -> Tensor:
        """Return the first tokens of every training chat that is long enough, (chats, length)."""
        prefix = self._prefix["tokens"]
        room = length - len(prefix)
        starts = [int(self.bounds[i]) for i in self.training if self.bounds.diff()[i] >= room]
        rows = [torch.cat([prefix, self.tokens[start : start + room]]) for start in starts]
        return torch.stack(rows).long()

    def batch(self, chosen: Sequence[int]) -> Batch:
        """The chats of these indices."""
        count = len(self._prefix["tokens"])
        spans = [(int(self.bounds[i]), int(self.bounds[i + 1])) for i in chosen]
        length = count + max(end - start for start, end in spans)

        def padded(name: str) -> Tensor:
            values, prefix = self._arrays[name], self._prefix.get(name)
            out = values.new_zeros(len(chosen), length, *values.shape[1:])
            for row, (start, end) in enumerate(spans):
                if prefix is not None:
                    out[row, :count] = prefix
                out[row, count : count + end - start] = values[start:end]
            return out

        return Batch(  # padding is of kind PROMPT, which weighs nothing
            padded("tokens").long(), self.weights[padded("kinds").long()], padded("states"),
            padded("features") if "features" in self._arrays else None,
        )  # fmt: skip

    def order(self, indices: Tensor, seed: int, tokens: int) -> Iterator[list[int]]:
        """These chats in random order without end, in batches of about `tokens` tokens.

        A batch's chats are of similar length; padding counts.  What does not fill half a batch
        is left for another round.
        """
        generator = torch.Generator().manual_seed(seed)
        lengths = self.bounds.diff() + len(self._prefix["tokens"])
        while True:
            shuffled = indices[torch.randperm(len(indices), generator=generator)]
            batches: list[list[int]] = []
            current: list[int] = []
            for some in shuffled.split(512):
                for index in some[lengths[some].argsort()].tolist():
                    if current and (len(current) + 1) * int(lengths[index]) > tokens:
                        batches.append(current)
                        current = []
                    current.append(index)
                if len(current) * int(lengths[current[-1]]) >= tokens // 2 or not batches:
                    batches.append(current)
                current = []
            for at in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[at]


_STORED = {"states": "final"}


def _flat(values: Tensor) -> Tensor:
    """(n,) as it is, (n, depths, hidden) as (n, depths * hidden)."""
    return values.flatten(1) if values.ndim > 1 else values
