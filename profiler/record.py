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

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.decoder import check_prompt
from profiler.runner import Runner
from profiler.signals import check_finite, log_probs_at, signals
from traces.trace import COLUMNS, MATCH, MISMATCH

Columns = dict[str, "np.ndarray[Any, Any]"]

SCORE_CHUNK = 512
"""Tail tokens the target scores in one pass: bounds the memory their logits take."""


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

    def slots_needed(self, prompt_tokens: int) -> int:
        """Cache slots that recording a prompt of this length can take at most."""
        return prompt_tokens + self.max_new_tokens * (self.max_gamma + 1)

    @torch.inference_mode()
    def record(self, prompt: Tensor, on_token: Callable[[], None] | None = None) -> Columns:
        """Columns (without `request`) of one prompt, as in `traces.trace.COLUMNS`.

        ``prompt``: (prompt_tokens,) ids on the models' device.
        Raises DraftsimError if the prompt does not fit or a model gives NaN.
        """
        check_prompt(int(prompt.shape[0]), self.max_new_tokens, self.target, self.draft)
        output, target_logits = self._decode(prompt, on_token)
        count = output.shape[0]
        path = torch.cat([prompt, output[:-1]])
        draft_logits = self.draft.forward(path, 0, keep=count)  # (count, vocab)
        proposal, match = self._propose(draft_logits, target_logits, output)
        on_path = {
            "position": torch.arange(count),
            "offset": torch.zeros(count, dtype=torch.long),
            "match": torch.where(match, MATCH, MISMATCH),
            "token": output,
            **self._score(draft_logits, target_logits, proposal),
            "draft_path_logprob": log_probs_at(draft_logits, output, self.temperature),
            "target_path_logprob": log_probs_at(target_logits, output, self.temperature),
        }
        check_finite(on_path["draft_logsumexp"], "draft", "while recording")
        check_finite(on_path["target_logsumexp"], "target", "while recording")
        starts, lengths = self._tail_plan(match)
        tails = _Tails(self, path.shape[0], int(prompt.shape[0]), starts, lengths)
        tail_columns = tails.run(proposal)
        return _merge(on_path, tail_columns)

    def _decode(
        self, prompt: Tensor, on_token: Callable[[], None] | None
    ) -> tuple[Tensor, Tensor]:
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
            if on_token is not None:
                on_token()
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

    def _score(self, draft_logits: Tensor, target_logits: Tensor, proposal: Tensor) -> dict[str, Tensor]:
        """Both sides' numbers about one proposal per row; each (rows,)."""
        mine, theirs = signals(draft_logits), signals(target_logits)
        raw = target_logits.float()
        of_draft = raw.gather(1, proposal[:, None])
        scale = self.temperature or 1.0
        both = torch.minimum(
            torch.softmax(draft_logits.float() / scale, -1), torch.softmax(raw / scale, -1)
        )
        return {
            "draft_token": proposal,
            "draft_logprob": log_probs_at(draft_logits, proposal, self.temperature),
            "draft_top1": mine.top1,
            "draft_top2": mine.top2,
            "draft_logsumexp": mine.logsumexp,
            "draft_entropy": mine.entropy,
            "target_token": raw.argmax(-1),
            "target_top1": theirs.top1,
            "target_top2": theirs.top2,
            "target_logsumexp": theirs.logsumexp,
            "target_entropy": theirs.entropy,
            "target_draft_logit": of_draft[:, 0],
            "target_draft_rank": (raw > of_draft).sum(-1),
            "overlap": both.sum(-1),
        }

    def _tail_plan(self, match: Tensor) -> tuple[Tensor, Tensor]:
        """Positions whose proposal was wrong, and the tail tokens each may need."""
        starts = torch.nonzero(~match)[:, 0]
        # No draft reaches the last position of the limit: verification fills it.
        room = self.max_new_tokens - 2 - starts
        lengths = room.clamp(min=0, max=self.max_gamma - 1)
        keep = lengths > 0
        return starts[keep], lengths[keep]


class _Tails:
    """All off-path tails of one prompt, advanced together under a tree mask.

    After the path's slots, step j of branch b occupies slot ``path + j * branches + b``.
    A branch sees the path before its mismatch and its own earlier steps.
    """

    def __init__(
        self, recorder: Recorder, path: int, prompt: int, starts: Tensor, lengths: Tensor
    ) -> None:
        self._r, self._path = recorder, path
        self._starts, self._lengths = starts, lengths
        self._branches = int(starts.shape[0])
        self._steps = int(lengths.max()) if self._branches else 0
        self._first_position = prompt + starts  # of each branch's wrong token
        # Which path slots each branch sees: all before its wrong token.
        slots = torch.arange(path, device=starts.device)
        self._sees = slots[None] < self._first_position[:, None]  # (branches, path)

    def run(self, proposal: Tensor) -> dict[str, Tensor]:
        """Rows of all tails."""
        if not self._branches:
            return {}
        feed = proposal[self._starts]
        alive = torch.ones_like(feed, dtype=torch.bool)
        chunk = max(1, SCORE_CHUNK // self._branches)
        parts: list[dict[str, Tensor]] = []
        for begin in range(0, self._steps, chunk):
            feeds, rows = [], []
            for step in range(begin, min(begin + chunk, self._steps)):
                feeds.append(feed)
                rows.append(self._pass(self._r.draft, feed, step, 1))
                feed = self._r._pick(rows[-1])
            # Both sides' logits of a chunk are dropped once scored: they can be gigabytes.
            fed, drafted = torch.cat(feeds), torch.cat([*feeds[1:], feed])
            target_rows = self._pass(self._r.target, fed, begin, len(feeds))
            part, alive = self._rows(begin, torch.stack(feeds), drafted, torch.cat(rows), target_rows, alive)
            parts.append(part)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _rows(
        self, begin: int, feeds: Tensor, drafted: Tensor, draft_rows: Tensor, target_rows: Tensor,
        alive: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
        """Trace rows of a chunk of steps, and which branches go on after it."""
        steps = feeds.shape[0]
        if self._r.eos:
            # A draft ends with the EOS it proposes: nothing follows a fed EOS.
            eos = torch.tensor(sorted(self._r.eos), device=drafted.device)
            going = (~torch.isin(feeds, eos)).long().cumprod(0).bool() & alive[None]
        else:
            going = alive[None].expand(steps, self._branches)
        offset = torch.arange(begin + 1, begin + steps + 1, device=drafted.device)[:, None]
        offset = offset.expand(steps, self._branches)
        keep = (going & (offset <= self._lengths[None])).flatten()
        columns = self._r._score(draft_rows, target_rows, drafted)
        if self._r.temperature == 0:
            match = columns["draft_token"] == columns["target_token"]
        else:
            match = self._coin(draft_rows, target_rows, drafted)
        missing = torch.full_like(columns["draft_logprob"], torch.nan)
        rows = {
            "position": self._starts[None].expand(steps, self._branches).flatten(),
            "offset": offset.flatten(),
            "match": torch.where(match, MATCH, MISMATCH),
            "token": torch.full_like(drafted, -1),
            **columns,
            "draft_path_logprob": missing,
            "target_path_logprob": missing,
        }
        return {name: values[keep] for name, values in rows.items()}, going[-1]

    def _coin(self, draft_rows: Tensor, target_rows: Tensor, drafted: Tensor) -> Tensor:
        """Whether rejection sampling would accept each tail token; (rows,)."""
        heat = self._r.temperature
        gap = log_probs_at(target_rows, drafted, heat) - log_probs_at(draft_rows, drafted, heat)
        coins = torch.rand(gap.shape, generator=self._r.generator, device=gap.device)
        return coins.log() < gap

    def _pass(self, runner: Runner, tokens: Tensor, step: int, steps: int) -> Tensor:
        """One tree-masked pass over ``steps`` steps of every branch."""
        own = torch.eye(self._branches, dtype=torch.bool, device=tokens.device)
        order = torch.ones(steps, step + steps, dtype=torch.bool, device=tokens.device).tril(step)
        # (steps, branches, past and present steps, branches): same branch, not later.
        chain = order[:, None, :, None] & own[None, :, None, :]
        chain = chain.reshape(steps * self._branches, (step + steps) * self._branches)
        mask = torch.cat([self._sees.repeat(steps, 1), chain], dim=1)
        ahead = torch.arange(step, step + steps, device=tokens.device)
        positions = (self._first_position[None] + ahead[:, None]).flatten()
        start = self._path + step * self._branches
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
