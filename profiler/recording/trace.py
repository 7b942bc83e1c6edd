"""Recording of an acceptance trace: decoding without speculation, and all draft proposals.

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
the normalised positive part of draft - target.  Top-p cuts both distributions before that, so
draft(x) may be 0: x is then never proposed.

`with_signals` adds the draft signals that a recording lacks, by passes over its texts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.decoding.single import check_prompt
from profiler.models.attention import TokenBlock, to_add
from profiler.models.runner import Runner
from profiler.models.sampling import (
    ROWS,
    Scored,
    coupled,
    drafted,
    draw,
    log_probs_at,
    log_softmax_at,
    pick,
    probs,
    refuse_nan,
    scored,
    tempered,
    top10_log_prob,
)
from profiler.models.seq2seq import make_runner
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import (
    COLUMNS,
    MATCH,
    MISMATCH,
    SIGNAL_COLUMNS,
    Request,
    Trace,
    signal_columns,
)
from traces.aliases import Columns
from traces.errors import DraftsimError

SCORE_TOKENS = 512
"""Tail tokens the target scores in one pass: bounds the memory of their logits."""

TensorColumns = dict[str, Tensor]


def slots_needed(prompt_tokens: int, new_tokens: int, max_gamma: int) -> int:
    """Return the cache slots that recording takes at most: prompt, output, and every tail."""
    return prompt_tokens + new_tokens * (max_gamma + 1)


def draft_columns(
    logits: Tensor, proposal: Tensor, sampling: Sampling, log_prob: Tensor | None = None
) -> TensorColumns:
    """Return the draft's numbers about one proposal per row; each (rows,).

    ``log_prob``: (rows,) that of drawing it, where the caller has it.
    """
    # Greedily the proposal is the argmax, which need not be sought again.
    best = proposal if sampling.greedy else None
    of = drafted(logits, proposal, sampling, best=best, log_prob=log_prob)
    columns = {
        "draft_token": proposal,
        "draft_logprob": of.log_prob,
        "draft_top1": of.top1,
        "draft_top2": of.top2,
        "draft_logsumexp": of.logsumexp,
        "draft_top10_logprob": top10_log_prob(logits),
        "draft_entropy": of.entropy,
    }
    if not sampling.plain:
        columns["draft_raw_logprob"] = of.raw_log_prob
    return columns


def target_columns(logits: Tensor, proposal: Tensor) -> TensorColumns:
    """Return the target's numbers about one proposal per row; each (rows,)."""
    parts = [scored(*part) for part in zip(logits.split(ROWS), proposal.split(ROWS), strict=True)]
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return {f"target_{n}": column for n, column in zip(Scored._fields, columns, strict=True)}


class Branches:
    """Branches of a tree after a path; each sees only the path before its wrong token.

    ``path``: tokens of prompt and output in a model's cache; ``wrong_at``: (branches,) slot and
    position of each branch's wrong token.
    """

    def __init__(self, path: int, wrong_at: Tensor) -> None:
        self.path, self.wrong_at = path, wrong_at
        slots = torch.arange(path, device=wrong_at.device)
        self.sees = slots[None] < wrong_at[:, None]  # (branches, path)

    def forward(self, runner: Runner, fed: Tensor, branch: Tensor, step: Tensor) -> Tensor:
        """Return a model's logits after the tokens of whole branches, in (branch, step) order."""
        positions = self.wrong_at[branch] + step
        # Few enough tokens attend together that little of it is masked out.
        spans = spans_of(branch, 96)
        blocks = [self._block(runner, branch[span], span) for span in spans]
        return runner.forward_blocks(fed, self.path, blocks, positions)

    def _block(self, runner: Runner, branch: Tensor, tokens: slice) -> TokenBlock:
        """Return what these tokens of whole branches attend to."""
        path = int(self.wrong_at[branch[-1]])
        own = (branch[None] == branch[:, None]).tril()
        sees = torch.cat([self.sees[branch, :path], own], dim=1)
        # Attention would make numbers of booleans again in every layer.
        return TokenBlock(tokens, path, to_add(sees, runner.model.dtype))


def spans_of(branch: Tensor, most: int) -> list[slice]:
    """Return slices of whole branches, about equally many rows and at most about `most` in each."""
    # Whole branches: one never looks into another.
    rows = branch.shape[0]
    share = rows / math.ceil(rows / most)
    changes = torch.diff(branch, append=branch[-1:] + 1)
    ends: list[int] = (torch.nonzero(changes)[:, 0] + 1).tolist()
    spans: list[slice] = []
    begin = 0
    for end in ends:
        if end == rows or end >= share * (len(spans) + 1):
            spans.append(slice(begin, end))
            begin = end
    return spans


@dataclass
class _Stream:
    """One of several prompts that the target decodes together."""

    index: int
    """Its place among the prompts."""
    prompt: Tensor
    sampling: Sampling
    generator: torch.Generator
    """Random numbers of this prompt alone: its draws do not depend on its neighbours."""
    output: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def take(self, logits: Tensor) -> None:
        """Pick the next output token from `logits` (1, vocab) and keep both."""
        self.logits.append(logits.clone())
        self.output.append(pick(logits, self.sampling, self.generator))


class Recorder:
    """Records prompts with one target/draft pair.

    Parameters
    ----------
    target, draft: Runners over a shared vocabulary.  Their caches need room for prompt, output and
        tails: see `slots_needed`.  `record_together` decodes as many prompts at once as the
        target's cache has rows after the first.
    max_new_tokens, max_gamma: Output limit, and the longest draft that can be replayed.
    eos: Ids that end an output, and a draft.
    sampling, generator: How outputs are drawn, one per prompt; greedily by default.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        *,
        max_new_tokens: int,
        max_gamma: int = 24,
        eos: frozenset[int] = frozenset(),
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> None:
        if max_gamma < 1:
            raise ValueError(f"max_gamma is {max_gamma}, expected at least 1")
        self.target, self.draft = target, draft
        self.max_new_tokens, self.max_gamma = max_new_tokens, max_gamma
        self.eos, self.sampling, self.generator = eos, sampling, generator
        self._ends = torch.tensor(sorted(eos), dtype=torch.long, device=target.device)
        self.decode_s = 0.0
        """Seconds the last prompt's plain decoding took, prefill included."""

    @torch.inference_mode()
    def record(self, prompt: Tensor) -> Columns:
        """Return columns of one prompt, as in `traces.acceptance.trace.COLUMNS` without `request`.

        ``prompt``: (prompt_tokens,) ids on the models' device; an encoder-decoder's source.
        Raises DraftsimError if the prompt does not fit or a model gives NaN.
        """
        check_prompt(int(prompt.shape[0]), self.max_new_tokens, self.target, self.draft)
        begin = time.perf_counter()
        path, source = self.target.begin(prompt), prompt
        output, target_logits = self._decode(path)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # where no EOS is looked for, nothing has
        self.decode_s = time.perf_counter() - begin
        self.draft.begin(source)
        return self._recorded(path, output, target_logits)

    @torch.inference_mode()
    def record_together(
        self, prompts: Sequence[Tensor], seeds: Sequence[int]
    ) -> Iterator[tuple[int, Columns]]:
        """Record several prompts, decoded together; yield (place in `prompts`, columns).

        A pass over several sequences reads the weights once for all of them, which is most of
        its time.  The columns are those of `record` up to rounding: a near-tie between two
        tokens may go the other way (`near_ties` of a trace counts them).  Prompts that end
        make room for the next ones.

        ``prompts``: (tokens,) ids each; ``seeds``: one per prompt, for sampling.
        Raises DraftsimError as `record`, or if the target's cache has one row.
        """
        size = self.target.cache.batch - 1
        if size < 1:
            raise DraftsimError("decoding together needs a target cache of at least 2 sequences")
        for prompt in prompts:
            check_prompt(int(prompt.shape[0]), self.max_new_tokens, self.target, self.draft)
        waiting = deque(enumerate(zip(prompts, seeds, strict=True)))
        streams: list[_Stream] = []
        while waiting or streams:
            while waiting and len(streams) < size:
                index, (prompt, seed) = waiting.popleft()
                generator = torch.Generator(prompt.device)
                generator.manual_seed(seed)
                streams.append(_Stream(index, prompt, self.sampling, generator))
                slots = torch.arange(prompt.shape[0], device=prompt.device)[None]
                logits = self.target.forward_batch(
                    prompt[None], slots, prompt.shape[0], first=len(streams), keep=1
                )
                streams[-1].take(logits[0])
            if not any(self._is_done(stream) for stream in streams):
                self._step_together(streams)
            for place in [i for i, s in enumerate(streams) if self._is_done(s)][::-1]:
                done = streams[place]
                self.target.cache.copy_row(place + 1, 0)
                last = streams.pop()
                if last is not done:  # the last row moves into the gap
                    self.target.cache.copy_row(len(streams) + 1, place + 1)
                    streams[place] = last
                if self.generator is not None:
                    self.generator.set_state(done.generator.get_state())
                output, logits = torch.cat(done.output), torch.cat(done.logits)
                done.logits.clear()
                yield done.index, self._recorded(done.prompt, output, logits)

    def _step_together(self, streams: Sequence[_Stream]) -> None:
        """Decode one more token of every stream in one pass of the target."""
        at = [s.prompt.shape[0] + len(s.output) - 1 for s in streams]
        tokens = torch.stack([s.output[-1] for s in streams])  # (streams, 1)
        positions = torch.tensor(at, device=tokens.device)[:, None]
        logits = self.target.forward_batch(tokens, positions, max(at) + 1, first=1, keep=1)
        for stream, row in zip(streams, logits, strict=True):
            stream.take(row)

    def _is_done(self, stream: _Stream) -> bool:
        """Return True if the stream has reached the limit or an end-of-sequence token."""
        if len(stream.output) >= self.max_new_tokens:
            return True
        return bool(self.eos) and int(stream.output[-1]) in self.eos

    def _recorded(self, prompt: Tensor, output: Tensor, target_logits: Tensor) -> Columns:
        """Return columns of an output whose path is in the first row of the target's cache."""
        count = output.shape[0]
        path = torch.cat([prompt, output[:-1]])
        draft_logits = self.draft.forward(path, 0, keep=count)  # (count, vocab)
        proposal, match, overlap = self._propose(draft_logits, target_logits, output)
        on_path = {
            "position": torch.arange(count),
            "offset": torch.zeros(count, dtype=torch.long),
            "match": torch.where(match, MATCH, MISMATCH),
            "token": output,
            **draft_columns(draft_logits, proposal, self.sampling),
            **target_columns(target_logits, proposal),
            "overlap": overlap,
            "draft_path_logprob": log_probs_at(draft_logits, output, self.sampling),
            "target_path_logprob": log_probs_at(target_logits, output, self.sampling),
        }
        for name in ("draft", "target"):
            bad = bool(on_path[f"{name}_logsumexp"].isnan().any())
            refuse_nan(bad, name, "while recording")
        starts, lengths = self._tail_plan(match)
        branches = Branches(path.shape[0], int(prompt.shape[0]) + starts)
        rows = self._tails(branches, lengths, proposal[starts])
        return _merge(on_path, self._tail_columns(rows, starts) if rows else {})

    def _decode(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's output (tokens,) and the logits it came from (tokens, vocab)."""
        feed, start = prompt, 0
        output: list[Tensor] = []
        rows: list[Tensor] = []
        while len(output) < self.max_new_tokens:
            logits = self.target.forward(feed, start, keep=1)
            start += feed.shape[0]
            feed = pick(logits, self.sampling, self.generator)
            rows.append(logits)
            output.append(feed)
            if self.eos and int(feed) in self.eos:
                break
        return torch.cat(output), torch.cat(rows)

    def _propose(
        self, draft_logits: Tensor, target_logits: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the draft's proposals on the path, whether they are accepted, and the overlap.

        The last is the sum over the vocabulary of the smaller probability; (tokens,) each.
        """
        draft, target = (probs(logits, self.sampling) for logits in (draft_logits, target_logits))
        overlap = torch.minimum(draft, target).sum(-1)
        if self.sampling.greedy:
            proposal = draft_logits.argmax(-1)
            return proposal, proposal == output, overlap
        coins = torch.rand(output.shape, generator=self.generator, device=output.device)
        match, residual = coupled(draft, target, output, coins)
        return torch.where(match, output, draw(residual, self.generator)), match, overlap

    def _tail_plan(self, match: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions whose proposal was wrong, and the tail tokens each may need."""
        starts = torch.nonzero(~match)[:, 0]
        # No draft reaches the last position of the limit: verification fills it.
        room = self.max_new_tokens - 2 - starts
        lengths = room.clamp(min=0, max=self.max_gamma - 1)
        keep = lengths > 0
        return starts[keep], lengths[keep]

    def _tails(self, branches: Branches, lengths: Tensor, wrong: Tensor) -> TensorColumns:
        """Return rows of all off-path tails by (branch, step), two of the columns; {} if none.

        Each wrong proposal, `wrong` (branches,), begins a branch of at most `lengths` tokens.  The
        draft advances all branches that have not ended, one pass per step; the target then scores
        whole branches, many in a pass.  Either way a branch sees the path before its wrong token
        and its own earlier steps: the mask makes a tree of what lies in consecutive slots.  A tail
        ends with the EOS it proposes.
        """
        rows = self._drafted(branches, lengths, wrong)
        if not rows:
            return {}
        order = torch.argsort(rows["branch"] * int(lengths.max()) + rows["step"])
        rows = {name: values[order] for name, values in rows.items()}
        fed, parts = rows.pop("fed"), []
        for span in spans_of(rows["branch"], SCORE_TOKENS):
            branch, step, token = (rows[name][span] for name in ("branch", "step", "draft_token"))
            logits = branches.forward(self.target, fed[span], branch, step)
            parts.append(target_columns(logits, token))
            if not self.sampling.greedy:
                parts[-1]["drawn"] = log_probs_at(logits, token, self.sampling)
        return rows | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _drafted(self, branches: Branches, lengths: Tensor, feed: Tensor) -> TensorColumns:
        """Return the draft's columns, with the token fed before each, in drafting order."""
        branch = torch.arange(feed.shape[0], device=feed.device)
        owners = branch[:0]
        steps: list[TensorColumns] = []
        while True:
            step = len(steps)
            # A draft ends with the EOS it proposes: nothing follows a fed EOS.
            going = (lengths[branch] > step) & ~torch.isin(feed, self._ends)
            branch, feed = branch[going], feed[going]
            if not branch.shape[0]:
                break
            start = branches.path + owners.shape[0]
            owners = torch.cat([owners, branch])
            sees = torch.cat([branches.sees[branch], owners[None] == branch[:, None]], dim=1)
            logits = self.draft.forward(
                feed, start, mask=to_add(sees, self.draft.model.dtype),
                positions=branches.wrong_at[branch] + step,
            )  # fmt: skip
            at = torch.full_like(branch, step)
            numbers = self._proposed(logits)
            steps.append({"branch": branch, "step": at, "fed": feed, **numbers})
            feed = numbers["draft_token"]
        return (
            {name: torch.cat([rows[name] for rows in steps]) for name in steps[0]} if steps else {}
        )

    def _proposed(self, logits: Tensor) -> TensorColumns:
        """Return one proposal of the draft per row and its numbers, as in `draft_columns`."""
        if self.sampling.top_p == 1:
            own = pick(logits, self.sampling, self.generator)
            return draft_columns(logits, own, self.sampling)
        scaled = tempered(logits, self.sampling)  # once: the cut is most of the work
        own = draw(torch.softmax(scaled, -1), self.generator)
        return draft_columns(logits, own, self.sampling, log_softmax_at(scaled, own))

    def _tail_columns(self, rows: dict[str, Tensor], starts: Tensor) -> dict[str, Tensor]:
        """Return trace columns from the rows of `_tails`."""
        branch, step, drawn = rows.pop("branch"), rows.pop("step"), rows.pop("drawn", None)
        if drawn is None:
            match = rows["draft_token"] == rows["target_token"]
        else:
            # Whether rejection sampling would accept the token: one coin each.
            coins = torch.rand(step.shape, generator=self.generator, device=step.device)
            match = coins.log() < drawn - rows["draft_logprob"]
        missing = torch.full_like(rows["draft_logprob"], torch.nan)
        return {
            "position": starts[branch],
            "offset": step + 1,
            "match": torch.where(match, MATCH, MISMATCH),
            "token": torch.full_like(step, -1),
            **rows,
            **dict.fromkeys(("overlap", "draft_path_logprob", "target_path_logprob"), missing),
        }


def _merge(on_path: dict[str, Tensor], tails: dict[str, Tensor]) -> Columns:
    """Return both kinds of rows in (position, offset) order, in the trace's dtypes."""
    merged: Columns = {}
    for name, values in on_path.items():
        parts = [values, tails[name].to(values.dtype)] if tails else [values]
        both = torch.cat([part.cpu() for part in parts])
        dtype = np.dtype(COLUMNS[name][0])
        merged[name] = (both.float() if dtype.kind == "f" else both).numpy().astype(dtype)
    order = np.lexsort((merged["offset"], merged["position"]))
    return {name: values[order] for name, values in merged.items()}


def lacking(trace: Trace) -> list[str]:
    """Return the columns of draft signals that an older recording does not have."""
    wanted = {c for s in SIGNAL_COLUMNS for c in signal_columns(s, trace.sampling)}
    return sorted(wanted - trace.columns.keys())


def with_signals(trace: Trace, draft: Any, advance: Callable[[], object]) -> Trace:
    """Return `trace` with the columns that it is `lacking`.

    Parameters
    ----------
    trace: Recorded by `Recorder`.
    draft: The model that drafted.
    advance: Called after every request.
    """
    slots = (
        slots_needed(r.prompt_length, r.max_new_tokens, trace.max_gamma or 0)
        for r in trace.requests
    )
    runner = make_runner(draft, max(slots))
    wanted = lacking(trace)
    bounds = np.searchsorted(trace.columns["request"], np.arange(len(trace.requests) + 1))
    parts = []
    for i, request in enumerate(trace.requests):
        rows = slice(int(bounds[i]), int(bounds[i + 1]))
        mine = {name: values[rows] for name, values in trace.columns.items()}
        parts.append(_signals(runner, request, mine, trace.sampling, wanted))
        advance()
    added = {name: np.concatenate([part[name] for part in parts]) for name in wanted}
    return replace(trace, columns={**trace.columns, **added})


@torch.inference_mode()
def _signals(
    runner: Runner, request: Request, columns: Columns, sampling: Sampling, wanted: list[str]
) -> Columns:
    """Return columns of one request, in the order of its rows."""
    rows = {
        name: torch.tensor(columns[name], dtype=torch.long, device=runner.device)
        for name in ("position", "offset", "token", "draft_token")
    }
    prompt = runner.begin(torch.tensor(request.prompt_ids, device=runner.device))
    on_path = torch.nonzero(rows["offset"] == 0)[:, 0]
    path = torch.cat([prompt, rows["token"][on_path[:-1]]])
    order = [on_path]
    logits = runner.forward(path, 0, keep=len(on_path))
    found = [draft_columns(logits, rows["draft_token"][on_path], sampling)]
    tail = torch.nonzero(rows["offset"])[:, 0]
    step = rows["offset"][tail] - 1
    branch = (step == 0).cumsum(0) - 1
    branches = Branches(len(path), len(prompt) + rows["position"][tail[step == 0]])
    for span in spans_of(branch, SCORE_TOKENS) if len(tail) else ():
        at = tail[span]
        fed = rows["draft_token"][at - 1]
        logits = branches.forward(runner, fed, branch[span], step[span])
        order.append(at)
        found.append(draft_columns(logits, rows["draft_token"][at], sampling))
    back = torch.cat(order).argsort()
    columns_of = {n: torch.cat([part[n] for part in found])[back] for n in wanted}
    return {n: column.float().cpu().numpy() for n, column in columns_of.items()}
