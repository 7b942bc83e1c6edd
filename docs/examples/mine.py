"""The policy of the tutorial, as the page shows it."""

# mypy: ignore-errors
from policies import DraftPolicy


class StopWhenUnsure(DraftPolicy):
    """Draft until the draft model doubts its own token."""

    reads = ("prob",)

    def __init__(self, threshold=0.5, gamma=8):
        self.threshold, self.gamma = threshold, gamma

    def keep_drafting(self, draft):
        sure = not draft or draft[-1].prob > self.threshold
        return sure and len(draft) < self.gamma
