"""The self-adjusting stop threshold that Draft&Verify introduced and AdaEDL reuses."""

from __future__ import annotations


class AdaptiveThreshold:
    """Moves a stop threshold towards a target acceptance rate (Zhang et al. 2024, eq. 4).

    After a round with A of n accepted:

    * rate <- b1 rate + (1 - b1) A / n;
    * wish = value + step if rate < target; value if the draft was at its maximum; else
      value - step;
    * value <- b2 value + (1 - b2) wish.

    Parameters
    ----------
    value:
        Initial threshold.
    target, step:
        Acceptance rate aimed at, and the size of a step.
    rate_memory, value_memory:
        b1 and b2 above, in [0, 1].
    rate:
        Initial rate; the released code starts at 0.
    """

    __slots__ = ("rate", "rate_memory", "step", "target", "value", "value_memory")

    def __init__(
        self,
        value: float,
        target: float = 0.9,
        step: float = 0.01,
        rate_memory: float = 0.5,
        value_memory: float = 0.9,
        rate: float = 0.0,
    ) -> None:
        self.value = value
        self.target = target
        self.step = step
        self.rate_memory = rate_memory
        self.value_memory = value_memory
        self.rate = rate

    def update(self, drafted: int, accepted: int, at_maximum: bool) -> None:
        """Take in a round; one without a draft changes nothing."""
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1 - self.rate_memory) * accepted / drafted
        if self.rate < self.target:
            wish = self.value + self.step
        elif at_maximum:
            wish = self.value
        else:
            wish = self.value - self.step
        self.value = self.value_memory * self.value + (1 - self.value_memory) * wish
