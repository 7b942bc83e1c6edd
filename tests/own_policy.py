"""Policies of a user's own in a module of their own, to be imported by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from policies import DraftPolicy, Fixed


class StopWhenUnsure(DraftPolicy):
    """A user's own policy, as the README shows it."""

    reads = ("prob",)

    def __init__(self, threshold: float = 0.5, gamma: int = 6) -> None:
        self.threshold, self.gamma = threshold, gamma

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        sure = not draft or draft[-1].prob > self.threshold
        return sure and len(draft) < self.gamma


class Unbounded(DraftPolicy):
    """Drafts as long as the draft model is sure, and sets no longest draft."""

    reads = ("prob",)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 40 and (not draft or draft[-1].prob > 0.3)


class Told(Fixed):
    """Drafts a fixed length, and remembers the vocabulary sizes that runs began with."""

    sizes: ClassVar[list[int | None]] = []

    def begin_run(self, vocab_size: int | None) -> None:
        self.sizes.append(vocab_size)
