"""The numbers that a recording keeps of each proposal: the draft's and the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.models.sampling import ROWS, draw, log_softmax_at, probs, tempered
from profiler.models.signals import drafted, signals, top10_log_prob
from traces.acceptance.sampling import Sampling


class Sides:
    """Picks tokens and computes the columns of `traces.acceptance.trace` under a sampling.

    Parameters
    ----------
    sampling, generator:
        Greedy picks the likeliest token; otherwise tokens are drawn with random numbers from
        ``generator``.
    eos:
        Ids that end a draft.
    """

    def __init__(
        self, sampling: Sampling, generator: torch.Generator | None, eos: frozenset[int]
    ) -> None:
        self.sampling, self.generator, self.eos = sampling, generator, eos

    def pick(self, logits: Tensor) -> Tensor:
        """One token per row: argmax, or a draw; (rows,)."""
        if self.sampling.greedy:
            return _likeliest(logits)
        return self.draw(probs(logits, self.sampling))

    def draw(self, weights: Tensor) -> Tensor:
        """One index per row, with probability as its weight; (rows,)."""
        return draw(weights, self.generator)

    def ends(self, tokens: Tensor) -> Tensor:
        """Which tokens are an EOS; bool (rows,)."""
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        for eos in self.eos:
            ended |= tokens == eos
        return ended

    def propose(self, logits: Tensor) -> dict[str, Tensor]:
        """One proposal of the draft per row and its numbers, as of `draft`; each (rows,)."""
        if self.sampling.top_p == 1:
            return self.draft(logits, self.pick(logits))
        scaled = tempered(logits, self.sampling)  # once: the cut is most of the work
        proposal = self.draw(torch.softmax(scaled, -1))
        return self.draft(logits, proposal, log_softmax_at(scaled, proposal))

    def draft(
        self, logits: Tensor, proposal: Tensor, log_prob: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The draft's numbers about one proposal per row; each (rows,).

        ``log_prob``: (rows,) that of drawing it, where the caller has it.
        """
        # Greedily the proposal is the argmax, which need not be sought again.
        best = proposal if self.sampling.greedy else None
        of = drafted(logits, proposal, self.sampling, best=best, log_prob=log_prob)
        columns = {
            "draft_token": proposal,
            "draft_logprob": of.log_prob,
            "draft_top1": of.top1,
            "draft_top2": of.top2,
            "draft_logsumexp": of.logsumexp,
            "draft_top10_logprob": top10_log_prob(logits),
            "draft_entropy": of.entropy,
        }
        if not self.sampling.plain:
            columns["draft_raw_logprob"] = of.raw_log_prob
        return columns

    def target(self, logits: Tensor, proposal: Tensor) -> dict[str, Tensor]:
        """The target's numbers about one proposal per row; each (rows,)."""
        parts = [
            _target(*part) for part in zip(logits.split(ROWS), proposal.split(ROWS), strict=True)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _likeliest(logits: Tensor) -> Tensor:
    # The same indices as argmax, which takes three times as long on a CPU.
    return logits.max(-1).indices


def _target(logits: Tensor, proposal: Tensor) -> dict[str, Tensor]:
    raw, best = logits.float(), _likeliest(logits)
    of = signals(raw, best)
    of_draft = raw.gather(1, proposal[:, None])
    return {
        "target_token": best,
        "target_top1": of.top1,
        "target_top2": of.top2,
        "target_logsumexp": of.logsumexp,
        "target_entropy": of.entropy,
        "target_draft_logit": of_draft[:, 0],
        "target_draft_rank": (raw > of_draft).sum(-1),
    }
