"""The reference points: no speculation, a fixed draft length, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from policies.core import DraftPolicy, Load
from policies.spec import one_of, parameter, whole
from policies.vectorised import UNBOUNDED, Lengths, OwnStop, Starts, VectorisedPlan

Convention = Literal["run", "run+1"]


class Autoregressive(DraftPolicy):
    """Never drafts: every round is one plain target step."""

    def longest_draft(self) -> int:
        return 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return False

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(0)


@dataclass(eq=False)
class Fixed(DraftPolicy):
    """Drafts `gamma` tokens every round (Leviathan et al. 2023, Algorithm 1).

    Reads no signal, so there is no trigger token.
    """

    gamma: int = parameter(5, whole, 0)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.gamma

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(self.gamma)


@dataclass(eq=False)
class Oracle(DraftPolicy):
    """Knows how many drafts would be accepted: the bound no real policy can pass (DISCO, sec. 3).

    Only a recording holds this number (`Load.run_length`).

    Parameters
    ----------
    convention:
        ``run`` drafts exactly the tokens that will be accepted and wastes nothing;
        ``run+1`` also drafts the first mismatch (the trigger token is kept), as a perfect stop test
        after each token would.
    gamma_max:
        Longest draft; None leaves it to the run.

    Raises
    ------
    ValueError
        When a round begins without a run length (real decoding knows none).
    """

    reads_load = False
    convention: Convention = parameter("run", one_of, get_args(Convention))
    gamma_max: int | None = parameter(None, whole, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._length = 0

    def begin_round(self, load: Load) -> None:
        if load.run_length is None:
            raise ValueError(
                "oracle needs to know the coming run of accepted drafts, which only a recording "
                "holds: replay it on a trace, or choose another policy"
            )
        length = load.run_length + (self.convention == "run+1")
        self._length = length if self.gamma_max is None else min(length, self.gamma_max)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self._length

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(stop=OwnStop(self._lengths))

    def _lengths(self, starts: Starts) -> Lengths:
        run = starts.run_lengths
        longest = starts.most if self.gamma_max is None else np.minimum(self.gamma_max, starts.most)
        length = np.minimum(run + (self.convention == "run+1"), longest)
        # Nobody knows: a draft longer than any recorded one sends this setting to the loop.
        return Lengths(np.where(run < 0, UNBOUNDED, length))
