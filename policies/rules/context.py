"""Lossy rules that also read past corrections or later tokens."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.arrays import Bools
from policies.confidence import OfVocabulary
from policies.rules.base import TokenRule, VerifyRule
from policies.rules.memory import OnlineCorrectionMemory
from policies.spec import flag, parameter, ratio, whole, within


def finite_or_inf(name: str, value: float) -> None:
    """Require a number of at least 0, which may be infinite."""
    if value != math.inf:
        within(name, value, 0)


@dataclass(eq=False)
class CSD(TokenRule):
    """Calibrated Speculative Decoding (2604.13634): rescue familiar, plausible mismatches.

    A mismatch (d, t*) is accepted if the pair was corrected more than `threshold` times
    before (Online Correction Memory) and ``z(d) - z(t*) >= log tau`` on the target's raw
    logits (Semantic Consistency Gating).

    Parameters
    ----------
    threshold:
        lambda: the pair's count must exceed it; infinity makes the rule exact.
    tau:
        Threshold of the gate, a probability ratio in (0, 1].
    use_memory, use_gate:
        Switch one of the two tests off, for the paper's ablation.
    count_first:
        True if a mismatch is counted before it is tested.  The paper leaves the order
        open; the default tests first.
    count_rescued:
        True if a rescued mismatch is counted as well.
    capacity:
        Bound on the memory's pairs (see `OnlineCorrectionMemory`); None for no bound.
    memory:
        A calibrated memory, or the file of one; None starts empty.  It keeps its own
        capacity.

    Attributes
    ----------
    table:
        The memory in use.  It depends on the order of the requests, which is therefore
        part of a run.
    """

    reads = ("token_id",)
    needs = ("match", "token", "top1", "draft_logit")
    threshold: float = parameter(6, finite_or_inf)
    tau: float = parameter(0.01, ratio)
    use_memory: bool = parameter(True, flag)
    use_gate: bool = parameter(True, flag)
    count_first: bool = parameter(False, flag)
    count_rescued: bool = parameter(False, flag)
    capacity: int | None = None
    memory: OnlineCorrectionMemory | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.use_memory or self.use_gate):
            raise ValueError(
                "use_memory and use_gate are both off, which would accept every token: leave one on"
            )
        if self.memory is None:
            self.table = OnlineCorrectionMemory(self.capacity)
        elif isinstance(self.memory, OnlineCorrectionMemory):
            self.table = self.memory
        else:
            self.table = OnlineCorrectionMemory.load(self.memory)
        if not self.use_memory:
            vars(self).update(reads=(), needs=("match", "top1", "draft_logit"))
        elif not self.use_gate:
            vars(self)["needs"] = ("match", "token")

    def with_memory(self, memory: OnlineCorrectionMemory) -> CSD:
        """Return the same rule, starting from `memory`."""
        mine = copy.copy(self)
        mine.memory = mine.table = memory
        mine.capacity = None
        return mine

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the token matches or its mismatch is rescued; update the counts."""
        if score.match:
            return True
        plausible = not self.use_gate or score.draft_logit - score.top1 >= math.log(self.tau)
        if not self.use_memory:
            return bool(plausible)
        pair = (token.token_id, score.token)
        rescued = plausible and self.table.count(*pair) + self.count_first > self.threshold
        if self.count_rescued or not rescued:
            self.table.add(*pair)
        return bool(rescued)

    def accepts_each(self, tokens: Any, scores: Any) -> Bools | None:
        """Return `accepts` for many tokens at once, if no memory decides."""
        if self.use_memory:
            return None
        return np.asarray(scores.match | (scores.draft_logit - scores.top1 >= math.log(self.tau)))

    def end_request(self) -> None:
        """Note the memory's size."""
        self.table.end_request()


@dataclass(eq=False)
class FLy(OfVocabulary, VerifyRule):
    """FLy (2511.22972): forgive a mismatch where the target is unsure and agreement returns.

    A mismatch is accepted if the target's entropy there, normalised by log |V|, is at least
    `entropy_threshold` and the next `window` drafted tokens all match; without a full
    window in the draft it is rejected, so a draft needs more than `window` tokens.

    Parameters
    ----------
    entropy_threshold, window:
        The paper's 0.3 and 6.
    vocab_size:
        |V|; None takes the run's.

    vLLM's implementation gates on the entropy of the three most probable tokens instead,
    unnormalised; the third probability is not among the target scores, so only the
    paper's form is offered.
    """

    needs = ("match", "entropy")
    entropy_threshold: float = parameter(0.3, within, 0)
    window: int = parameter(6, whole, 0)
    vocab_size: int | None = parameter(None, whole, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.look_ahead = self.window

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        """Return the leading tokens up to the first mismatch that is not forgiven."""
        most = math.log(self.known_vocabulary())
        for i, score in enumerate(scores):
            if score.match:
                continue
            ahead = scores[i + 1 : i + 1 + self.window]
            unsure = score.entropy >= self.entropy_threshold * most
            if not (unsure and len(ahead) == self.window and all(s.match for s in ahead)):
                return i
        return len(draft)
