"""Records an acceptance trace: plain decoding once, and everything a draft would say.

Per prompt:

1. the target decodes its own output, token by token, as the baseline does;
2. the draft reads prompt and output in one pass, which gives its proposal and signals
   at every position (they depend on the true prefix alone);
3. wherever it was wrong, its off-path tail is drafted: all tails of the prompt advance
   together, one pass per step under a tree mask;
4. the target scores all tails under the same mask, so that lossy rules can be replayed.

With a temperature the output is sampled, and each position carries one coin: by the
coupling of rejection sampling, given the emitted token x the draft's proposal was
accepted with probability min(1, draft(x) / target(x)), and otherwise was a draw from
the normalised positive part of draft - target.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.decoder import check_prompt
from profiler.runner import Runner
from profiler.signals import check_finite, log_probs_at, signals
from traces.trace import COLUMNS, MATCH, MISMATCH

Columns = dict[str, "np.ndarray[Any, Any]"]

SCORE_TOKENS = 384
"""Tail tokens the target scores in one pass: bounds masked-out work and logits' memory."""


class Recorder:
    """Records prompts with one target/draft pair.

    Parameters
    ----------
    target, draft:
        Runners over a shared vocabulary.  Their caches need room for prompt, output and
        tails: see `slots_needed`.
    max_new_tokens, max_gamma:
        Output limit, and the longest draft that can be replayed.
    eos:
        Ids that end an output, and a draft.
    temperature, generator:
        0 records greedy decoding; above 0 one sampled output per prompt.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        *,
        max_new_tokens: int,
        max_gamma: int = 24,
        eos: frozenset[int] = frozenset(),
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if max_gamma < 1:
            raise ValueError(f"max_gamma is {max_gamma}, expected at least 1")
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}, expected >= 0")
        self.target, self.draft = target, draft
        self.max_new_tokens, self.max_gamma = max_new_tokens, max_gamma
        self.eos, self.temperature, self.generator = eos, temperature, generator
        self.decode_s = 0.0
        """Seconds the last prompt's plain decoding took, prefill included."""

    def slots_needed(self, prompt_tokens: int) -> int:
        """Cache slots that recording a prompt of this length can take at most."""
        return prompt_tokens + self.max_new_tokens * (self.max_gamma + 1)

    @torch.inference_mode()
    def record(self, prompt: Tensor) -> Columns:
        """Columns (without `request`) of one prompt, as in `traces.trace.COLUMNS`.

        ``prompt``: (prompt_tokens,) ids on the models' device; an encoder-decoder's source.
        Raises DraftsimError if the prompt does not fit or a model gives NaN.
        """
        check_prompt(int(prompt.shape[0]), self.max_new_tokens, self.target, self.draft)
        begin = time.perf_counter()
        prompt, source = self.target.begin(prompt), prompt
        output, target_logits = self._decode(prompt)
        self.decode_s = time.perf_counter() - begin
        self.draft.begin(source)
        count = output.shape[0]
        path = torch.cat([prompt, output[:-1]])
        draft_logits = self.draft.forward(path, 0, keep=count)  # (count, vocab)
        proposal, match = self._propose(draft_logits, target_logits, output)
        on_path = {
            "position": torch.arange(count),
            "offset": torch.zeros(count, dtype=torch.long),
            "match": torch.where(match, MATCH, MISMATCH),
            "token": output,
            **self._draft_side(draft_logits, proposal),
            **self._target_side(target_logits, proposal),
            "overlap": self._overlap(draft_logits, target_logits),
            "draft_path_logprob": log_probs_at(draft_logits, output, self.temperature),
            "target_path_logprob": log_probs_at(target_logits, output, self.temperature),
        }
        check_finite(on_path["draft_logsumexp"], "draft", "while recording")
        check_finite(on_path["target_logsumexp"], "target", "while recording")
        starts, lengths = self._tail_plan(match)
        tails = _Tails(self, path.shape[0], int(prompt.shape[0]), starts, lengths)
        tail_columns = tails.run(proposal)
        return _merge(on_path, tail_columns)

    def _decode(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """The target's output (tokens,) and the logits it came from (tokens, vocab)."""
        feed, start = prompt, 0
        output: list[Tensor] = []
        rows: list[Tensor] = []
        while len(output) < self.max_new_tokens:
            logits = self.target.forward(feed, start, keep=1)
            start += feed.shape[0]
            feed = self._pick(logits)
            rows.append(logits)
            output.append(feed)
            if self.eos and int(feed) in self.eos:
                break
        return torch.cat(output), torch.cat(rows)

    def _pick(self, logits: Tensor) -> Tensor:
        """One token per row: argmax, or a draw at the temperature; (rows,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return self._draw(torch.softmax(logits.float() / self.temperature, -1))

    def _draw(self, weights: Tensor) -> Tensor:
        noise = torch.empty_like(weights).exponential_(generator=self.generator)
        return (weights / noise).argmax(-1)

    def _propose(
        self, draft_logits: Tensor, target_logits: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the draft proposes on the path, and whether it is accepted; both (tokens,)."""
        if self.temperature == 0:
            proposal = draft_logits.argmax(-1)
            return proposal, proposal == output
        draft = torch.softmax(draft_logits.float() / self.temperature, -1)
        target = torch.softmax(target_logits.float() / self.temperature, -1)
        index = output[:, None]
        ratio = (draft.gather(1, index) / target.gather(1, index))[:, 0]
        coins = torch.rand(ratio.shape, generator=self.generator, device=ratio.device)
        match = coins < ratio
        residual = (draft - target).clamp(min=0)
        # Where the two agree there is no residual, and no rejection either.
        rejected = self._draw(torch.where(match[:, None], draft, residual))
        return torch.where(match, output, rejected), match

    def _draft_side(self, logits: Tensor, proposal: Tensor) -> dict[str, Tensor]:
        """The draft's numbers about one proposal per row; each (rows,)."""
        of = signals(logits)
        return {
            "draft_token": proposal,
            "draft_logprob": log_probs_at(logits, proposal, self.temperature),
            "draft_top1": of.top1,
            "draft_top2": of.top2,
            "draft_logsumexp": of.logsumexp,
            "draft_entropy": of.entropy,
        }

    def _target_side(self, logits: Tensor, proposal: Tensor) -> dict[str, Tensor]:
        """The target's numbers about one proposal per row; each (rows,)."""
        of, raw = signals(logits), logits.float()
        of_draft = raw.gather(1, proposal[:, None])
        return {
            "target_token": raw.argmax(-1),
            "target_top1": of.top1,
            "target_top2": of.top2,
            "target_logsumexp": of.logsumexp,
            "target_entropy": of.entropy,
            "target_draft_logit": of_draft[:, 0],
            "target_draft_rank": (raw > of_draft).sum(-1),
        }

    def _overlap(self, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
        """Sum over the vocabulary of the smaller probability; (rows,)."""
        scale = self.temperature or 1.0
        draft = torch.softmax(draft_logits.float() / scale, -1)
        return torch.minimum(draft, torch.softmax(target_logits.float() / scale, -1)).sum(-1)

    def _tail_plan(self, match: Tensor) -> tuple[Tensor, Tensor]:
        """Positions whose proposal was wrong, and the tail tokens each may need."""
        starts = torch.nonzero(~match)[:, 0]
        # No draft reaches the last position of the limit: verification fills it.
        room = self.max_new_tokens - 2 - starts
        lengths = room.clamp(min=0, max=self.max_gamma - 1)
        keep = lengths > 0
        return starts[keep], lengths[keep]


class _Tails:
    """All off-path tails of one prompt.

    The draft advances every branch together, one pass per step: step j of branch b
    occupies slot ``path + j * branches + b``.  The target then scores some branches at a
    time, all their steps in one pass.  Either way a branch sees the path before its
    mismatch and its own earlier steps, by the mask.
    """

    def __init__(
        self, recorder: Recorder, path: int, prompt: int, starts: Tensor, lengths: Tensor
    ) -> None:
        self._r, self._path = recorder, path
        self._starts, self._lengths = starts, lengths
        self._branches = int(starts.shape[0])
        self._steps = int(lengths.max()) if self._branches else 0
        self._wrong_at = prompt + starts  # slot and position of each branch's wrong token
        slots = torch.arange(path, device=starts.device)
        self._sees = slots[None] < self._wrong_at[:, None]  # (branches, path)

    def run(self, proposal: Tensor) -> dict[str, Tensor]:
        """Rows of all tails."""
        if not self._branches:
            return {}
        fed, parts = self._draft(proposal[self._starts])
        # Branch groups, not step groups: a branch never looks into another, so fewer
        # branches a pass mean fewer masked-out keys to multiply with.
        group = max(1, SCORE_TOKENS // self._steps)
        scored = []
        for begin in range(0, self._branches, group):
            some = torch.arange(begin, min(begin + group, self._branches), device=fed.device)
            logits = self._pass(self._r.target, fed[:, some].flatten(), some, 0, self._steps)
            drafted = torch.stack([part["draft_token"] for part in parts])[:, some].flatten()
            scored.append(self._r._target_side(logits, drafted))
            if self._r.temperature > 0:
                scored[-1]["heated"] = log_probs_at(logits, drafted, self._r.temperature)
        columns = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        for name in scored[0]:
            pieces = [part[name].reshape(self._steps, -1) for part in scored]
            columns[name] = torch.cat(pieces, dim=1)
        return self._rows(fed, columns)

    def _draft(self, feed: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Tokens fed at each step (steps, branches), and each step's draft-side columns."""
        everyone = torch.arange(self._branches, device=feed.device)
        feeds, parts = [], []
        for step in range(self._steps):
            feeds.append(feed)
            logits = self._pass(self._r.draft, feed, everyone, step, 1)
            feed = self._r._pick(logits)
            parts.append(self._r._draft_side(logits, feed))
        return torch.stack(feeds), parts

    def _rows(self, fed: Tensor, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Trace rows from columns of shape (steps, branches), without what was cut short."""
        shape = (self._steps, self._branches)
        offset = torch.arange(1, self._steps + 1, device=fed.device)[:, None].expand(shape)
        keep = offset <= self._lengths[None]
        if self._r.eos:
            # A draft ends with the EOS it proposes: nothing follows a fed EOS.
            eos = torch.tensor(sorted(self._r.eos), device=fed.device)
            keep = keep & (~torch.isin(fed, eos)).long().cumprod(0).bool()
        heated = columns.pop("heated", None)
        if heated is None:
            match = columns["draft_token"] == columns["target_token"]
        else:
            # Whether rejection sampling would accept the token: one coin each.
            coins = torch.rand(shape, generator=self._r.generator, device=fed.device)
            match = coins.log() < heated - columns["draft_logprob"]
        missing = torch.full_like(columns["draft_logprob"], torch.nan)
        rows = {
            "position": self._starts[None].expand(shape),
            "offset": offset,
            "match": torch.where(match, MATCH, MISMATCH),
            "token": torch.full_like(fed, -1),
            **columns,
            **dict.fromkeys(("overlap", "draft_path_logprob", "target_path_logprob"), missing),
        }
        return {name: values[keep] for name, values in rows.items()}

    def _pass(
        self, runner: Runner, tokens: Tensor, branches: Tensor, step: int, steps: int
    ) -> Tensor:
        """One tree-masked pass over ``steps`` steps, from ``step`` on, of some branches."""
        count = branches.shape[0]
        own = torch.eye(count, dtype=torch.bool, device=tokens.device)
        order = torch.ones(steps, step + steps, dtype=torch.bool, device=tokens.device).tril(step)
        # (steps, branches, steps so far, branches): same branch, not later.
        chain = order[:, None, :, None] & own[None, :, None, :]
        chain = chain.reshape(steps * count, (step + steps) * count)
        mask = torch.cat([self._sees[branches].repeat(steps, 1), chain], dim=1)
        ahead = torch.arange(step, step + steps, device=tokens.device)
        positions = (self._wrong_at[branches][None] + ahead[:, None]).flatten()
        start = self._path + step * count
        return runner.forward(tokens, start, mask=mask, positions=positions)


def _merge(on_path: dict[str, Tensor], tails: dict[str, Tensor]) -> Columns:
    """Both kinds of rows in (position, offset) order, as numpy in the trace's dtypes."""
    merged: Columns = {}
    for name, values in on_path.items():
        parts = [values, tails[name].to(values.dtype)] if tails else [values]
        both = torch.cat([part.cpu() for part in parts])
        dtype = np.dtype(COLUMNS[name][0])
        merged[name] = (both.float() if dtype.kind == "f" else both).numpy().astype(dtype)
    order = np.lexsort((merged["offset"], merged["position"]))
    return {name: values[order] for name, values in merged.items()}
