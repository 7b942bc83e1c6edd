"""Next-token distributions under a `Sampling`, and draws from them, one way everywhere.

The recorder and the real decoder must agree to the last bit of a float32, or a policy
near its threshold would decide differently in replay; so both call these functions and
both derive probabilities and margins as `traces.acceptance.trace.Trace.signal` does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError

ROWS = 32
"""Rows whose numbers are computed at a time: few enough to stay in a processor's cache."""


def tempered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits whose softmax is the distribution drawn from, float32 (rows, vocab).

    Divided by the temperature (greedy decoding reads T = 1), and -inf outside the smallest
    set of likeliest tokens whose mass reaches top-p: the set of transformers' TopPLogitsWarper.

    ``logits``: (rows, vocab), any float dtype.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    if sampling.top_p == 1:
        return scaled
    return torch.where(_cut(scaled, sampling.top_p), -torch.inf, scaled)


def _cut(scaled: Tensor, top_p: float) -> Tensor:
    """Return which tokens top-p leaves out; bool (rows, vocab)."""
    on_host = scaled.device.type == "cpu"
    if on_host:  # where torch takes fifteen times as long as numpy
        ascending = torch.from_numpy(np.sort(scaled.detach().numpy(), -1))
    else:
        ascending = scaled.sort(-1).values
    below = torch.softmax(ascending, -1).cumsum(-1) <= 1 - top_p
    count = below.sum(-1, keepdim=True).clamp(max=scaled.shape[-1] - 1)
    edge = ascending.gather(-1, count)
    cut = scaled < edge
    if on_host and not (ascending.gather(-1, (count - 1).clamp(min=0)) == edge).numpy().any():
        return cut
    # Of equal tokens at the edge the first are cut, alike in passes of any shape.
    tied = scaled == edge
    spare = count - cut.sum(-1, keepdim=True)
    return cut | (tied & (tied.cumsum(-1) <= spare))


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution drawn from, of raw ``logits``; float32 (rows, vocab) both."""
    return torch.softmax(tempered(logits, sampling), -1)


def log_probs_at(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return log of `probs` of one token per row, float32 (rows,); -inf where top-p cuts it."""
    parts = zip(logits.split(ROWS), tokens.split(ROWS), strict=True)
    return torch.cat([log_softmax_at(tempered(some, sampling), of) for some, of in parts])


def log_softmax_at(scaled: Tensor, tokens: Tensor) -> Tensor:
    """Return the same of what `tempered` gives."""
    return scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)


def draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one index per row with probability in proportion to its weight; (rows,).

    It inverts the cumulative weights with one random number per row; torch.multinomial draws one
    per token and takes 15 times as long on a CPU.
    Nothing is transferred to the host.

    ``weights``: (rows, vocab), none negative, each row with a positive one.
    """
    # A GPU adds up in a tree: its float32 sums may waver between tokens of no weight too, and a
    # draw could then be one of those that top-p cut away.
    cumulative = weights.cumsum(-1, dtype=torch.float64 if weights.is_cuda else None)
    total = cumulative[:, -1:].contiguous()
    coins = torch.rand(total.shape, generator=generator, device=weights.device)
    index = torch.searchsorted(cumulative, coins * total, right=True)
    # A coin just below 1 may round to the total; the last token with a weight owns that.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(index, last)[:, 0]


def likeliest(logits: Tensor) -> Tensor:
    """Return the argmax of each row; (rows,)."""
    # The same indices as argmax, which takes three times as long on a CPU.
    return logits.max(-1).indices


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Return one token per row of `logits`: the likeliest, or a draw; (rows,)."""
    return likeliest(logits) if sampling.greedy else draw(probs(logits, sampling), generator)


TokenVerdict = tuple[int, Tensor, list[int]]
"""Drafted tokens accepted, and the tokens emitted: on the device, and on the host."""


def count_matches(drafted: Sequence[int], own: Sequence[int]) -> int:
    """Return the number of leading drafted tokens that are the target's own."""
    return sum(takewhile(bool, map(operator.eq, drafted, own)))


def verify_greedily(drafted: Tensor, logits: Tensor) -> TokenVerdict:
    """Accept the leading drafted tokens (count,) that are the argmax of `logits`.

    ``logits`` (positions, vocab): one position more than drafted, or as many; then a full match
    emits the draft alone.
    """
    count, picks = drafted.shape[0], logits.argmax(-1)
    # One transfer per round: the verdict and the tokens together.
    both = torch.cat([drafted, picks]).tolist()
    accepted = count_matches(both[:count], both[count:])
    return accepted, picks[: accepted + 1], both[count : count + accepted + 1]


def residual(weights: Tensor, less: Tensor) -> Tensor:
    """Return the positive part of ``weights - less``, (rows, vocab); `weights` if there is none."""
    left = (weights - less).clamp(min=0)
    # Where the two agree there is no residual, and but for rounding no rejection either.
    return torch.where(left.any(-1, keepdim=True), left, weights)


def toss(
    drafted: Tensor, proposals: Tensor, logits: Tensor, sampling: Sampling,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Toss the coins of rejection sampling (Leviathan et al., 2211.17192, Alg. 1).

    ``drafted`` (count,) tokens drawn from the raw logits ``proposals`` (count, vocab); ``logits``
    of the target as in `verify_greedily`.  Returns the target's and the draft's distributions, and
    whether each drafted token is accepted, (count,).
    """
    target, proposal = (probs(rows, sampling) for rows in (logits, proposals))
    count, index = drafted.shape[0], drafted[:, None]
    ratio = (target[:count].gather(1, index) / proposal.gather(1, index))[:, 0]
    coins = torch.rand(count, generator=generator, device=ratio.device)
    return target, proposal, coins < ratio


def verify_sampled(
    drafted: Tensor, proposals: Tensor, logits: Tensor, sampling: Sampling,
    generator: torch.Generator | None,
) -> TokenVerdict:  # fmt: skip
    """Verify a draft losslessly by rejection sampling; arguments as for `toss`."""
    target, proposal, coins = toss(drafted, proposals, logits, sampling, generator)
    count = coins.long().cumprod(0).sum(0, keepdim=True)  # (1,)
    # After a full match there is nothing to subtract: the residual is the target's row.
    taken = torch.cat([proposal, torch.zeros_like(target[:1])])
    # index_select, not []: indexing by a device scalar would bring it to the host.
    row = target.index_select(0, count.clamp(max=target.shape[0] - 1))
    own = draw(residual(row, taken.index_select(0, count)), generator)
    # One transfer per round: the verdict and the tokens together.
    accepted, *tokens = torch.cat([count, drafted, own]).tolist()
    positions = target.shape[0]
    emitted = torch.cat([drafted[:accepted], own])[:positions]
    return accepted, emitted, [*tokens[:accepted], tokens[-1]][:positions]


def coupled(draft: Tensor, target: Tensor, emitted: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Run rejection sampling backwards: what the draft proposed where the target emitted a token.

    Given the emitted x the proposal was x with probability min(1, draft(x) / target(x)), and
    otherwise a draw from the normalised positive part of draft - target, never x.

    ``draft``, ``target``: probabilities, (rows, vocab); ``emitted``, ``coins``: (rows,) tokens
    drawn from the target, and uniform numbers.  Returns whether x was proposed, (rows,), and
    the weights of the proposals where it was not, (rows, vocab).
    """
    index = emitted[:, None]
    match = coins < (draft.gather(1, index) / target.gather(1, index))[:, 0]
    return match, residual(draft, target)


class Signals(NamedTuple):
    """Per row of logits: float32 columns, shape (rows,)."""

    top1: Tensor
    top2: Tensor
    logsumexp: Tensor
    entropy: Tensor


def signals(logits: Tensor, best: Tensor | None = None) -> Signals:
    """Return raw top-2 logits, log-sum-exp and entropy (nats) at T = 1.

    ``logits``: (rows, vocab), any float dtype; computed in float32.  ``best``: (rows,) their
    argmax, if the caller has it: its search is the largest part of the work.
    """
    logits = logits.float()
    if best is None:
        top1, top2 = logits.topk(2, dim=-1).values.unbind(-1)
    else:
        index = best[:, None]
        top1 = logits.gather(1, index)[:, 0]
        top2 = logits.scatter(1, index, -torch.inf).amax(-1)
    # exp(-inf) * -inf is NaN: a masked-out token carries no entropy.  In place: over a large
    # vocabulary fresh memory costs more than the arithmetic; and one exp serves both sums.
    below = (logits - top1[:, None]).clamp_(min=-1e30)
    weights = below.exp()
    total = weights.sum(-1)
    log_total = total.log()
    entropy = log_total - weights.mul_(below).sum(-1) / total
    return Signals(top1, top2, top1 + log_total, entropy)


class Scored(NamedTuple):
    """The target's numbers about one drafted token per row of its logits, shape (rows,)."""

    token: Tensor
    """Its own token: the argmax."""
    top1: Tensor
    top2: Tensor
    logsumexp: Tensor
    entropy: Tensor
    draft_logit: Tensor
    """Raw logit of the drafted token."""
    draft_rank: Tensor
    """Tokens with a larger logit than the drafted one."""


def scored(logits: Tensor, tokens: Tensor) -> Scored:
    """Return the target's numbers about drafted `tokens` (rows,), from raw logits (rows, vocab)."""
    raw, best = logits.float(), likeliest(logits)
    of_draft = raw.gather(1, tokens[:, None])
    return Scored(best, *signals(raw, best), of_draft[:, 0], (raw > of_draft).sum(-1))


LIKELIEST = 10
"""Tokens that llama.cpp's server keeps of a draft model's."""


def top10_log_prob(logits: Tensor) -> Tensor:
    """Return the likeliest token's log-probability among the ten likeliest, T = 1; float32 (rows,).

    It is not part of `signals`, because the search for ten tokens costs extra.  ``logits``: (rows,
    vocab) raw, any float dtype.
    """
    likeliest = logits.float().topk(min(LIKELIEST, logits.shape[-1]), dim=-1).values
    return -(likeliest - likeliest[:, :1]).logsumexp(-1)


class Drafted(NamedTuple):
    """Per drafted token, float32 columns of shape (rows,): `Signals`, and log-probabilities."""

    top1: Tensor
    top2: Tensor
    logsumexp: Tensor
    entropy: Tensor
    log_prob: Tensor
    """Log probability that it was drawn with."""
    top_log_prob: Tensor
    """Log probability of the likeliest token at T = 1."""
    raw_log_prob: Tensor
    """Its log probability at T = 1 without top-p."""

    def stack(self) -> Tensor:
        """Return the stacked signals, (rows, 7)."""
        return torch.stack(tuple(self), dim=-1)


def drafted(
    logits: Tensor,
    tokens: Tensor,
    sampling: Sampling,
    *,
    best: Tensor | None = None,
    log_prob: Tensor | None = None,
) -> Drafted:
    """Return the numbers about one drafted token per row.

    ``logits``: (rows, vocab) raw, any float dtype; ``tokens``: (rows,) drawn from them under
    `sampling`; ``best`` as for `signals`; ``log_prob``: (rows,) that of drawing them, where the
    caller has it.
    """
    of = signals(logits, best)
    raw = logits.gather(1, tokens[:, None])[:, 0].float() - of.logsumexp
    if sampling.plain:
        log_prob = raw
    elif log_prob is None:
        log_prob = log_probs_at(logits, tokens, sampling)
    return Drafted(*of, log_prob, of.top1 - of.logsumexp, raw)


def refuse_nan(bad: bool, model: str, where: str) -> None:
    """Raise DraftsimError if logits of a model are `bad`: NaN, and so not usable."""
    if bad:
        raise DraftsimError(
            f"the {model} produced NaN logits {where}: check its weights and dtype "
            "(bfloat16 or float32 instead of float16 often helps)"
        )
