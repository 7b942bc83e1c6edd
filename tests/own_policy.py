"""A user's own policy in a module of its own, to be imported by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies import DraftPolicy


class StopWhenUnsure(DraftPolicy):
    """A user's own policy, as the README shows it."""

    reads = ("prob",)

    def __init__(self, threshold: float = 0.5, gamma: int = 6) -> None:
        self.threshold, self.gamma = threshold, gamma

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        sure = not draft or draft[-1].prob > self.threshold
        return sure and len(draft) < self.gamma
