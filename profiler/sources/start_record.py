"""Records what a source drafts from every start (see `traces.sources.starts.recording`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from profiler.features.heads import MaskEmbeddings, ParallelHeads
from profiler.models.sampling import drafted, signals
from profiler.models.stack import LayerRunner
from profiler.sources.drafters import default_skip, head_logits, kept_layers, mask_logits
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.sources.base import prompt_tokens, true_tokens
from traces.sources.columns import DRAWN
from traces.sources.starts.recording import START_SIGNALS, StartRecording

Rows = dict[str, "npt.NDArray[Any]"]
CHUNK = 64
"""Starts a pass takes: bounds the tree masks and the logits' memory."""


class StartRecorder(ABC):
    """Drafts from every start of one output."""

    offsets: int

    def __init__(self, target: LayerRunner, sampling: Sampling = GREEDY) -> None:
        self.target, self.sampling = target, sampling

    @abstractmethod
    def slots_needed(self, longest: int) -> int:
        """Cache slots for a path of `longest` tokens."""

    @abstractmethod
    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        """(starts - 1, offsets, vocab): drafts of the starts 1, 2, ... of the output."""

    def drafts(self, prompt: Tensor, output: list[int]) -> tuple[Tensor, Tensor]:
        """`logits`, and the target ids drafted from them, (starts - 1, offsets)."""
        logits = self.logits(prompt, output)
        return logits, self.target_ids(logits.argmax(-1))

    def target_ids(self, drafted: Tensor) -> Tensor:
        """Target ids of the drafter's, any shape: the same, unless its vocabulary is smaller."""
        return drafted

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """The drafter's ids of target ids, any shape; -1 where it lacks one."""
        return tokens

    def meta(self) -> dict[str, Any]:
        """Provenance, and what the replay must know."""
        return {}

    @torch.inference_mode()
    def record(self, prompt: Tensor, output: list[int], eos: frozenset[int]) -> Rows:
        """Rows of one request; that of start 0, before the first token, is empty."""
        count, k = len(output), self.offsets
        names = START_SIGNALS if self.sampling.greedy else (*START_SIGNALS, *DRAWN)
        rows: Rows = {name: np.zeros((count, k), np.float32) for name in names}
        rows["token"] = np.full((count, k), -1, np.int32)
        rows["rank"] = np.full((count, k), -1, np.int32)
        if count < 2:
            return rows
        logits, tokens = self.drafts(prompt, output)  # (count - 1, k, vocab), (count - 1, k)
        flat = logits.flatten(0, 1)
        for name, values in zip(START_SIGNALS, signals(flat), strict=True):
            rows[name][1:] = values.reshape(-1, k).cpu().numpy()
        if not self.sampling.greedy:
            own = drafted(flat, self.draft_ids(tokens).flatten(), self.sampling)
            for name in DRAWN:
                rows[name][1:] = getattr(own, name).reshape(-1, k).cpu().numpy()
        rows["token"][1:] = tokens.cpu().numpy()
        ended = np.isin(rows["token"], list(eos)).cumsum(1)
        rows["token"][:, 1:][ended[:, :-1] > 0] = -1
        true = torch.tensor(output + [-1] * k, device=logits.device)
        index = torch.arange(1, count, device=logits.device)[:, None] + torch.arange(
            k, device=logits.device
        )
        wanted = true[index]  # (count - 1, k)
        known = self.draft_ids(wanted)
        of_true = logits.float().gather(-1, known.clamp(min=0)[..., None])
        rank = (logits.float() > of_true).sum(-1).masked_fill(known < 0, logits.shape[-1])
        rank = rank.masked_fill(wanted < 0, -1)
        rows["rank"][1:] = rank.cpu().numpy()
        return rows


class HeadsRecorder(StartRecorder):
    """Parallel heads, all starts in one teacher-forced pass."""

    def __init__(self, target: LayerRunner, heads: ParallelHeads) -> None:
        super().__init__(target)
        self.heads, self.offsets = heads, heads.k

    def slots_needed(self, longest: int) -> int:
        return longest

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        emitted = prompt.new_tensor(output[:-1])
        path = torch.cat([prompt, emitted[:-1]])
        hidden = self.target.run_layers(self.target.embed(path), 0, range(self.target.layers))[
            prompt.shape[0] - 1 :
        ]
        return head_logits(self.target, self.heads, self.target.normed(hidden), emitted)


class MasksRecorder(StartRecorder):
    """SPACE's mask tokens, some starts a pass."""

    def __init__(self, target: LayerRunner, masks: MaskEmbeddings) -> None:
        super().__init__(target)
        self.masks, self.offsets = masks, masks.k

    def meta(self) -> dict[str, Any]:
        return {"layers": self.target.layers}

    def slots_needed(self, longest: int) -> int:
        return longest + CHUNK * self.offsets

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        path = torch.cat([prompt, prompt.new_tensor(output[:-2])])
        parts = []
        first = int(prompt.shape[0]) - 1
        for begin in range(0, len(output) - 1, CHUNK):
            end = min(begin + CHUNK, len(output) - 1)
            at = torch.arange(first + begin, first + end, device=prompt.device)
            # No mask of the chunk sees the path beyond its last index.
            parts.append(mask_logits(self.target, self.masks, path[: first + end], at)[1])
        return torch.cat(parts)


class SkipRecorder(StartRecorder):
    """Draft & Verify's layer skip: a chain from every start, `offsets` tokens long.

    Chains advance together under a tree mask: each attends to the true states of the path
    before its start and to its own inexact ones.
    """

    def __init__(
        self, target: LayerRunner, skip: list[int] | None = None, offsets: int = 8
    ) -> None:
        super().__init__(target)
        self.skip = default_skip(target.layers) if skip is None else list(skip)
        self.kept, self.offsets = kept_layers(target.layers, self.skip), offsets

    def meta(self) -> dict[str, Any]:
        return {"skip": self.skip, "layers": len(self.kept)}

    def slots_needed(self, longest: int) -> int:
        return longest + CHUNK * self.offsets

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        path = torch.cat([prompt, prompt.new_tensor(output[:-2])])
        self.target.run_layers(self.target.embed(path), 0, range(self.target.layers))
        parts = []
        for begin in range(1, len(output), CHUNK):
            starts = torch.arange(begin, min(begin + CHUNK, len(output)), device=prompt.device)
            parts.append(self._chains(starts, prompt, output, int(path.shape[0])))
        return torch.cat(parts)

    def _chains(self, starts: Tensor, prompt: Tensor, output: list[int], path: int) -> Tensor:
        """Chains from some starts: (starts, offsets, vocab)."""
        device, count = prompt.device, int(starts.shape[0])
        slot = starts + (prompt.shape[0] - 1)  # of the last true token, which is fed first
        feed = prompt.new_tensor(output)[starts - 1]
        sees = torch.arange(path, device=device)[None] < slot[:, None]
        own = torch.eye(count, dtype=torch.bool, device=device)
        steps = []
        for step in range(self.offsets):
            mask = torch.cat([sees, own.repeat(1, step + 1)], 1)
            hidden = self.target.run_layers(
                self.target.embed(feed), path + step * count, self.kept,
                mask=mask, positions=(slot + step).clamp(max=self.target.cache.slots - 1),
            )  # fmt: skip
            logits = self.target.logits(hidden)
            feed = logits.argmax(-1)
            steps.append(logits)
        return torch.stack(steps, 1)


def record_starts(
    recorder: StartRecorder, trace: Trace, advance: Callable[[], None] = lambda: None
) -> StartRecording:
    """Record what the source drafts from every start of `trace`; call `advance` after each.

    Raises DraftsimError if the trace was sampled otherwise than its recorder draws, or holds no
    prompts.
    """
    drawn = not recorder.sampling.greedy and recorder.sampling == trace.sampling
    output, starts = true_tokens(trace, sampled=drawn), trace.request_starts
    eos = frozenset(trace.meta.get("eos_token_ids") or ())
    parts = []
    for i in range(len(trace.requests)):
        prompt = torch.tensor(prompt_tokens(trace, i), device=recorder.target.device)
        parts.append(recorder.record(prompt, output[int(starts[i]) : int(starts[i + 1])], eos))
        advance()
    merged = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    return StartRecording(
        merged["token"], {name: merged[name] for name in START_SIGNALS}, merged["rank"],
        tuple(int(s) for s in starts), {**recorder.meta(), "sampling": recorder.sampling.meta},
        **{name: merged[name] for name in DRAWN if name in merged},
    )  # fmt: skip
