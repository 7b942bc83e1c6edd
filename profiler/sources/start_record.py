"""Recording of a source's drafts from every position of an output, chain or tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profiler.features.drafters import FeatureDrafter
from profiler.features.heads import HydraHeads, MaskEmbeddings, ParallelHeads, mask_layout
from profiler.features.runner import (
    DrafterRunner,
    DrawnDrafts,
    Trees,
    check_tree,
    layer_signals,
)
from profiler.models.sampling import drafted, probs, signals
from profiler.models.stack import LayerRunner
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.aliases import Columns
from traces.digits import counted
from traces.errors import DraftsimError
from traces.sources.base import eos_of, prompt_tokens, true_tokens
from traces.sources.exit_recording import ExitSetting
from traces.sources.recording import DRAWN, LOGITS, SourceRecording
from traces.sources.starts.sources import StartRecording
from traces.sources.starts.trees import TREE_SIGNALS, TreeRecording

CHUNK = 64
"""Starts a pass takes: bounds the tree masks and the logits' memory."""


def head_logits(target: LayerRunner, heads: ParallelHeads, normed: Tensor, last: Tensor) -> Tensor:
    """Return the logits of every head after some states: (starts, k, vocab).

    ``normed`` (starts, hidden): the target's last state that was verified; ``last``
    (starts,): the token emitted from it.
    """
    states = heads.states(normed.float(), target.embed(last).float())
    return target.project(states)


def hydra_logits(target: LayerRunner, heads: HydraHeads, normed: Tensor, tokens: Tensor) -> Tensor:
    """Return the logits of Hydra's head n - 1 (from 0) after some states: (starts, vocab).

    ``normed`` as for `head_logits`; ``tokens`` (starts, n): the last emitted token and the n - 1
    tokens drafted after it.
    """
    embedded = target.embed(tokens.flatten()).float().view(*tokens.shape, -1)
    return target.project(heads.state(tokens.shape[1] - 1, normed.float(), embedded))


def mask_logits(
    target: LayerRunner, masks: MaskEmbeddings, fed: Tensor, at: Tensor, k: int, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Run one pass over `fed` (tokens,) with `k` masks after each index of `at` (starts,).

    ``start``: slot of the first token; slots before it are attended to.  Returns the target's
    logits after `fed`, (tokens, vocab), and after the masks, (starts, k, vocab).  The tokens fed do
    not see the masks, so the former are the plain ones.
    """
    length = int(fed.shape[0])
    layout, positions = mask_layout(length, at, k)
    embedded = target.embed(fed)
    own = masks.weight[:k].repeat(at.shape[0], 1).to(embedded.dtype)
    before = layout.new_ones(layout.shape[0], start)
    hidden = target.run_layers(
        torch.cat([embedded, own]), start, range(target.layers),
        mask=torch.cat([before, layout], 1), positions=positions + start,
    )  # fmt: skip
    logits = target.logits(hidden)
    return logits[:length], logits[length:].reshape(-1, k, logits.shape[-1])


def kept_layers(layers: int, skip: list[int]) -> list[int]:
    """Return 0-based layers that remain when those of `skip` (1-based) are left out.

    Raises DraftsimError if `skip` names layers the target does not have, or all of them.
    """
    if wrong := [layer for layer in skip if not 1 <= layer <= layers]:
        raise DraftsimError(f"skip names layer {wrong[0]}: the target has layers 1 to {layers}")
    kept = [i for i in range(layers) if i + 1 not in skip]
    if not kept or not skip:
        raise DraftsimError(
            f"skip={skip} leaves {len(kept)} of {layers} layers: skip some, and not all"
        )
    return kept


def default_skip(layers: int) -> list[int]:
    """Return every second layer, the first and the last kept.

    Raises DraftsimError if there is none between them.
    """
    if layers < 3:
        raise DraftsimError(
            f"a target of {counted(layers, 'layer')} has none between its first and its last to "
            "skip: name layers, as in --source layer-skip:skip=[2]"
        )
    return list(range(2, layers, 2))


@dataclass(frozen=True)
class RecordOptions:
    """Settings of the recording of sources."""

    settings: Sequence[ExitSetting] = ()
    """Exit settings whose wrong exits are followed (see `EarlyExit.setting`)."""
    skip: Sequence[int] | None = None
    """Layers left out by layer skip; None: every second."""
    offsets: int = 8
    """Longest draft recorded of layer skip and of drafters on the target's features."""
    tail: int = 12
    """Longest draft recorded of an adapter."""
    seed: int = 0
    """Seed of the draws along sampled outputs."""


class SourceRecorder(ABC):
    """Records a source along outputs of one target.

    ``sampling``: how these outputs were drawn.
    """

    def __init__(self, target: LayerRunner, sampling: Sampling = GREEDY) -> None:
        self.target, self.sampling = target, sampling

    @abstractmethod
    def record(self, prompt: Tensor, output: list[int], limit: int, eos: frozenset[int]) -> Any:
        """Return what is recorded of one request.

        ``prompt`` (prompt_tokens,) ids; ``limit``: most output tokens; ``eos``: ids that end it.
        """

    @abstractmethod
    def joined(self, parts: Sequence[Any], trace: Trace) -> SourceRecording:
        """Return the recording of all requests."""


def record_along(
    recorder: SourceRecorder, trace: Trace, advance: Callable[[], None] = lambda: None
) -> Any:
    """Return the recording of a source along the outputs of `trace`; `advance` after each request.

    Raises DraftsimError if the trace was sampled otherwise than the recorder expects, or holds no
    prompts.
    """
    drawn = not recorder.sampling.greedy
    output, starts = true_tokens(trace, sampled=drawn), trace.request_starts
    if trace.sampling != recorder.sampling:
        raise DraftsimError(
            f"this trace's outputs are {trace.sampling.label}, and this source is to be recorded "
            f"along {recorder.sampling.label} ones: record both alike"
        )
    parts = []
    for i, info in enumerate(trace.requests):
        prompt = torch.tensor(prompt_tokens(trace, i), device=recorder.target.device)
        mine = output[int(starts[i]) : int(starts[i + 1])]
        parts.append(recorder.record(prompt, mine, info.max_new_tokens, eos_of(trace)))
        advance()
    return recorder.joined(parts, trace)


def _merged(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class StartRecorder(SourceRecorder):
    """Drafts from every start of one output."""

    offsets: int

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        """Return (starts - 1, offsets, vocab): drafts of the starts 1, 2, ... of the output."""
        raise NotImplementedError

    def drafts(self, prompt: Tensor, output: list[int]) -> tuple[Tensor, Tensor]:
        """Return `logits`, and the target ids drafted from them, (starts - 1, offsets)."""
        logits = self.logits(prompt, output)
        return logits, logits.argmax(-1)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Return the drafter's ids of target ids, any shape; -1 where it lacks one."""
        return tokens

    def meta(self) -> dict[str, Any]:
        """Return provenance, and what the replay must know."""
        return {}

    @torch.inference_mode()
    def record(self, prompt: Tensor, output: list[int], limit: int, eos: frozenset[int]) -> Columns:
        """Return rows of one request; that of start 0, before the first token, is empty."""
        count, k = len(output), self.offsets
        names = LOGITS if self.sampling.greedy else (*LOGITS, *DRAWN)
        rows: Columns = {name: np.zeros((count, k), np.float32) for name in names}
        rows["token"] = np.full((count, k), -1, np.int32)
        rows["rank"] = np.full((count, k), -1, np.int32)
        if count < 2:
            return rows
        logits, tokens = self.drafts(prompt, output)  # (count - 1, k, vocab), (count - 1, k)
        flat = logits.flatten(0, 1)
        for name, values in zip(LOGITS, signals(flat), strict=True):
            rows[name][1:] = values.reshape(-1, k).cpu().numpy()
        if not self.sampling.greedy:
            own = drafted(flat, self.draft_ids(tokens).flatten(), self.sampling)
            for name in DRAWN:
                rows[name][1:] = getattr(own, name).reshape(-1, k).cpu().numpy()
        rows["token"][1:] = tokens.cpu().numpy()
        ended = np.isin(rows["token"], list(eos)).cumsum(1)
        rows["token"][:, 1:][ended[:, :-1] > 0] = -1
        true = torch.tensor(output + [-1] * k, device=logits.device)
        wanted = true.unfold(0, k, 1)[1:count]  # (count - 1, k)
        known = self.draft_ids(wanted)
        of_true = logits.float().gather(-1, known.clamp(min=0)[..., None])
        rank = (logits.float() > of_true).sum(-1).masked_fill(known < 0, logits.shape[-1])
        rank = rank.masked_fill(wanted < 0, -1)
        rows["rank"][1:] = rank.cpu().numpy()
        return rows

    def joined(self, parts: Sequence[Columns], trace: Trace) -> StartRecording:
        starts = tuple(int(s) for s in trace.request_starts)
        meta = {**self.meta(), "sampling": self.sampling.meta}
        return StartRecording(_merged(parts), starts, meta)


class HeadsRecorder(StartRecorder):
    """Parallel heads, all starts in one teacher-forced pass."""

    def __init__(self, target: Any, trace: Trace, heads: ParallelHeads, how: RecordOptions) -> None:
        super().__init__(LayerRunner(target, trace.longest))
        self.heads, self.offsets = heads, heads.k

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        emitted = prompt.new_tensor(output[:-1])
        path = torch.cat([prompt, emitted[:-1]])
        states = self.target.states(path, 0)[prompt.shape[0] - 1 :]
        return self.after(states, emitted)

    def after(self, states: Tensor, emitted: Tensor) -> Tensor:
        """Return the heads' logits (starts, k, vocab) after states and the tokens of these."""
        return head_logits(self.target, self.heads, states, emitted)


class HydraRecorder(HeadsRecorder):
    """Hydra's heads: each reads what those before it drafted."""

    heads: Any

    def after(self, states: Tensor, emitted: Tensor) -> Tensor:
        tokens, steps = emitted[:, None], []
        for _ in range(self.offsets):
            steps.append(hydra_logits(self.target, self.heads, states, tokens))
            tokens = torch.cat([tokens, steps[-1].argmax(-1)[:, None]], 1)
        return torch.stack(steps, 1)


class MasksRecorder(StartRecorder):
    """SPACE's mask tokens, some starts a pass."""

    def __init__(
        self, target: Any, trace: Trace, masks: MaskEmbeddings, how: RecordOptions
    ) -> None:
        super().__init__(LayerRunner(target, trace.longest + CHUNK * masks.k))
        self.masks, self.offsets = masks, masks.k

    def meta(self) -> dict[str, Any]:
        return {"layers": self.target.layers}

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        path = torch.cat([prompt, prompt.new_tensor(output[:-2])])
        parts = []
        first = int(prompt.shape[0]) - 1
        for begin in range(0, len(output) - 1, CHUNK):
            end = min(begin + CHUNK, len(output) - 1)
            at = torch.arange(first + begin, first + end, device=prompt.device)
            # No mask of the chunk sees the path beyond its last index.
            some = path[: first + end]
            parts.append(mask_logits(self.target, self.masks, some, at, self.offsets)[1])
        return torch.cat(parts)


class SkipRecorder(StartRecorder):
    """Draft & Verify's layer skip: a chain from every start, `offsets` tokens long.

    Chains advance together under a tree mask: each attends to the true states of the path
    before its start and to its own inexact ones.
    """

    def __init__(self, target: Any, trace: Trace, module: None, how: RecordOptions) -> None:
        runner = LayerRunner(target, trace.longest + CHUNK * how.offsets)
        super().__init__(runner)
        self.skip = default_skip(runner.layers) if how.skip is None else list(how.skip)
        self.kept, self.offsets = kept_layers(runner.layers, self.skip), how.offsets

    def meta(self) -> dict[str, Any]:
        return {"skip": self.skip, "layers": len(self.kept)}

    def logits(self, prompt: Tensor, output: list[int]) -> Tensor:
        path = torch.cat([prompt, prompt.new_tensor(output[:-2])])
        self.target.run_layers(self.target.embed(path), 0, range(self.target.layers))
        parts = []
        for begin in range(1, len(output), CHUNK):
            starts = torch.arange(begin, min(begin + CHUNK, len(output)), device=prompt.device)
            parts.append(self._chains(starts, prompt, output, int(path.shape[0])))
        return torch.cat(parts)

    def _chains(self, starts: Tensor, prompt: Tensor, output: list[int], path: int) -> Tensor:
        """Return chains from some starts: (starts, offsets, vocab)."""
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


Pick = Callable[..., Tensor]
HeadDrafts = tuple[Tensor, Tensor]
"""Logits (starts, offsets, draft vocabulary), and the target ids drafted (starts, offsets)."""


class FeatureRecorder(StartRecorder):
    """Chains from every start, `offsets` tokens long; all starts of a chunk advance together.

    One pass of the target gives the features, one of the drafter its keys and values of the
    true path; from then on each chain attends to the path before its start and to its own.
    Modules in turn limit its length.
    """

    def __init__(
        self, target: Any, trace: Trace, drafter: FeatureDrafter, how: RecordOptions
    ) -> None:
        super().__init__(LayerRunner(target, trace.longest), trace.sampling)
        self._generator = torch.Generator(target.device).manual_seed(how.seed)
        modules = drafter.modules_in_turn
        self.drafter, self.offsets = drafter, modules if modules > 1 else how.offsets
        self._runner = DrafterRunner(drafter, trace.longest + CHUNK * self.offsets)

    def meta(self) -> dict[str, Any]:
        return {"kind": self.drafter.kind, "modules": self.drafter.modules_in_turn}

    def draft_ids(self, tokens: Tensor) -> Tensor:
        return self.drafter.draft_ids(tokens)

    def drafts(self, prompt: Tensor, output: list[int]) -> tuple[Tensor, Tensor]:
        path = torch.cat([prompt, prompt.new_tensor(output[:-1])])
        depths = self.drafter.feature_layers
        pick: Pick = self._likeliest
        if self.sampling.greedy:
            features = self.target.states(path[:-1], 0, depths)
        else:
            logits, features = self.target.forward_with_states(path, 0, depths)
            drawn_from = probs(logits[prompt.shape[0] - 1 :], self.sampling)
            pick = DrawnDrafts(self.drafter, output, drawn_from, self.sampling, self._generator)
        fused = self.drafter.fuse(features[: path.shape[0] - 1])
        first = int(prompt.shape[0]) - 1  # entry from which start 1 drafts
        entries = int(fused.shape[0])
        inputs, heads = [fused], []
        for module in range(self.drafter.modules_in_turn):
            count = entries - module
            if count < 1:
                break
            tokens = path[1 + module : 1 + module + count]
            states, out = self._runner.run(tokens, inputs[module][:count], 0, module=module)
            heads.append(states)
            inputs.append(out)
        parts: list[HeadDrafts] = []
        for begin in range(first, entries, CHUNK):
            at = torch.arange(begin, min(begin + CHUNK, entries), device=path.device)
            own = partial(pick, starts=at - first + 1)
            if self.drafter.modules_in_turn > 1:
                parts.append(self._in_turn(at, heads[0], inputs, entries, own))
            else:
                parts.append(self._chain(at, heads[0], inputs[1], entries, own))
        return torch.cat([made for made, _ in parts]), torch.cat([picked for _, picked in parts])

    def _likeliest(self, logits: Tensor, starts: Tensor, step: int) -> Tensor:
        """Return greedy drafts, as `DrawnDrafts` returns drawn ones."""
        return self.drafter.target_ids(logits.argmax(-1))

    def _chain(self, at: Tensor, heads: Tensor, out: Tensor, path: int, pick: Pick) -> HeadDrafts:
        """Draft by one layer for all tokens."""
        count = int(at.shape[0])
        sees = torch.arange(path, device=at.device)[None] <= at[:, None]
        own = torch.eye(count, dtype=torch.bool, device=at.device)
        steps, fed_back = [self.drafter.logits(heads[at])], out[at]
        drafted = [pick(steps[0], step=0)]
        for step in range(1, self.offsets):
            mask = torch.cat([sees, own.repeat(1, step)], 1)
            # Of a one-pass drafter these are masks, whose rows wait for no other.
            tokens, fed_back = self.drafter.following(drafted[-1], fed_back)
            states, fed_back = self._runner.run(
                tokens, fed_back, path + (step - 1) * count, mask=mask, positions=at + step
            )
            steps.append(self.drafter.logits(states))
            drafted.append(pick(steps[-1], step=step))
        return torch.stack(steps, 1), torch.stack(drafted, 1)

    def _in_turn(
        self, at: Tensor, heads: Tensor, inputs: list[Tensor], path: int, pick: Pick
    ) -> HeadDrafts:
        """Draft by modules in turn: the k-th (from 0) lacks the true tokens of a start's last k
        entries.

        These are its own rows, oldest first; all but the oldest read what the module before made
        of its own.
        """
        count, device = int(at.shape[0]), at.device
        steps = [self.drafter.logits(heads[at])]
        drafted = [pick(steps[0], step=0)]
        before: list[Tensor] = []  # outputs of the own rows of the module before
        seen = torch.arange(path, device=device)[None]
        same = torch.arange(count, device=device)
        for module in range(1, self.offsets):
            entries = [at - module + 1 + row for row in range(module)]
            oldest = entries[0].clamp(min=0)
            fused = torch.cat([inputs[module][oldest.clamp(max=len(inputs[module]) - 1)], *before])
            where = torch.cat(entries)
            group, row = same.repeat(module), torch.arange(module, device=device)
            row = row.repeat_interleave(count)
            own = (group[:, None] == group[None]) & (row[None] <= row[:, None])
            # An entry before the sequence began is seen by itself alone.
            own &= (where[None] >= 0) | torch.eye(len(where), dtype=torch.bool, device=device)
            true = seen <= (at - module)[group][:, None]
            states, out = self._runner.run(
                torch.cat(drafted), fused, path, module=module,
                mask=torch.cat([true, own], 1), positions=where.clamp(min=0),
            )  # fmt: skip
            before = list(out.split(count))
            steps.append(self.drafter.logits(states[-count:]))
            drafted.append(pick(steps[-1], step=module))
        return torch.stack(steps, 1), torch.stack(drafted, 1)


TREE_CHUNK = 16
"""Trees grown in the same passes: bounds the memory of mask and logits."""
TOPK = 10
"""Nodes expanded in a layer, and children of each, by default: those of EAGLE-2."""
LAYERS = 8
"""Depth of recorded trees by default: that of EAGLE-3's released code."""

BUDGET = 59
"""Nodes verified of a tree: with its root, the 60 of the authors' `total_token`."""


@dataclass(frozen=True)
class GrownTrees:
    """A drafter, and the shape of its trees."""

    drafter: FeatureDrafter
    topk: int = TOPK
    layers: int = LAYERS
    budget: int = BUDGET

    @property
    def kind(self) -> str:
        """The drafter's kind."""
        return str(self.drafter.kind)


class TreeRecorder(SourceRecorder):
    """Trees from every start, as the real decoder grows them."""

    def __init__(self, target: Any, trace: Trace, grown: GrownTrees, how: RecordOptions) -> None:
        super().__init__(LayerRunner(target, trace.longest))
        check_tree(grown.drafter.modules_in_turn)
        self.drafter, self.topk, self.layers = grown.drafter, grown.topk, grown.layers
        slots = trace.longest + TREE_CHUNK * self.topk * (self.layers - 1)
        self._runner = DrafterRunner(self.drafter, slots)

    @torch.inference_mode()
    def record(self, prompt: Tensor, output: list[int], limit: int, eos: frozenset[int]) -> Columns:
        count, layers = len(output), self.layers
        rows: Columns = {name: np.zeros((count, layers), np.float32) for name in TREE_SIGNALS}
        rows["rank"] = np.full((count, layers, layers), -1, np.int32)
        if count < 2:
            return rows
        path = torch.cat([prompt, prompt.new_tensor(output[:-1])])
        fused = self.drafter.fuse(self.target.states(path[:-1], 0, self.drafter.feature_layers))
        entries, first = int(fused.shape[0]), int(prompt.shape[0]) - 1
        heads, out = self._runner.run(path[1:], fused, 0)
        padded = prompt.new_tensor(output + [-1] * layers)
        for begin in range(first, entries, TREE_CHUNK):
            at = torch.arange(begin, min(begin + TREE_CHUNK, entries), device=path.device)
            sees = torch.arange(entries, device=at.device)[None] <= at[:, None]
            logits = self.drafter.logits(heads[at])
            trees = Trees(self._runner, self.topk, logits, out[at], at, sees)
            found = [layer_signals(trees.layers[0])]
            found += [layer_signals(trees.grow()) for _ in range(layers - 1)]
            start = at - first + 1
            mine = slice(int(start[0]), int(start[-1]) + 1)
            for name, values in zip(TREE_SIGNALS, torch.stack(found, 1).unbind(-1), strict=True):
                rows[name][mine] = values.cpu().numpy()
            true = padded[start[:, None] + torch.arange(layers, device=at.device)]
            rows["rank"][mine] = ranks(trees, true).cpu().numpy()
        return rows

    def joined(self, parts: Sequence[Columns], trace: Trace) -> TreeRecording:
        starts = tuple(int(s) for s in trace.request_starts)
        meta = {"kind": self.drafter.kind, "topk": self.topk, "sampling": trace.sampling.meta}
        rows = _merged(parts)
        rows["rank"] = rows["rank"][:, *np.triu_indices(self.layers)]
        return TreeRecording(rows, starts, meta)


def ranks(trees: Trees, true: Tensor) -> Tensor:
    """Return (trees, layers, layers): places of the tokens `true` (trees, layers), -1 for none.

    As `TreeRecording.rank`.
    """
    count, layers = true.shape
    rank = torch.full((count, layers, layers), -1, dtype=torch.long, device=true.device)
    rows, k = torch.arange(count, device=true.device), trees.topk
    place = torch.zeros_like(rows)  # of the node above among those expanded
    there = torch.ones_like(rows, dtype=torch.bool)
    for j, layer in enumerate(trees.layers):
        children = place[:, None] * k + torch.arange(k, device=true.device)
        same = layer.tokens.gather(1, children) == true[:, j, None]
        there = there & same.any(1)
        node = children[rows, same.int().argmax(1)]
        score = layer.scores[rows, node][:, None]
        before = torch.zeros_like(rows)
        for d, other in enumerate(trees.layers):
            ahead = other.scores > score
            if d < j:
                ahead |= other.scores == score
            elif d == j:
                earlier = torch.arange(other.scores.shape[1], device=true.device) < node[:, None]
                ahead |= (other.scores == score) & earlier
            before = before + ahead.sum(1)
            if d >= j:
                rank[:, j, d] = torch.where(there, before, -1)
        expanded = layer.chosen == node[:, None]
        there = there & expanded.any(1)
        place = expanded.int().argmax(1)
    return rank
