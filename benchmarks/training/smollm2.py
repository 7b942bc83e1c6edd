"""Training and measurement of the drafters of SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.training.chats import ANSWERS, BOTH, Chats, write_text
from benchmarks.training.draft import ProjectedDraft, principal_directions
from benchmarks.training.eagles import (
    Unrolled,
    in_turn,
    new_eagle,
    new_eagle3,
    new_mtp,
    new_parallel,
)
from benchmarks.training.fit import Candidates, InTraining, TrainingPlan, by_frequency, fit
from benchmarks.training.heads import (
    Distilled,
    DistilledAdapter,
    new_adapter,
    new_exit_heads,
    new_parallel_heads,
)
from benchmarks.training.stored import store_draft, store_drafter
from benchmarks.training.unroll import target_features, unroll
from profiler.features.checkpoint import read_drafter
from profiler.features.drafters import Eagle3, FeatureDrafter, Mtp, default_depths
from profiler.features.heads import FILES, Adapter, ExitHeads, ParallelHeads, save_module
from profiler.fetched.places import SMOLLM2, SMOLLM2_HEADS, SMOLLM2_WEIGHTS, fetched, folder
from profiler.fetched.smollm2 import draft_config, feature_drafter, read_stored
from profiler.models.stack import LayerRunner
from profiler.train.heads import train_masks
from traces.acceptance.trace import MATCH, Request, Trace
from traces.store.files import read_trace

SHARDS = 6
HEAD_SHARDS = 2  # as many tokens as the steps of the heads read
DRAFT_HIDDEN, DRAFT_LAYERS = 256, 4
FREQUENT, SAMPLED = 2048, 1024  # tokens that a training step compares
DRAFT_VOCABULARY = 8192  # of EAGLE-3
MASKS, MASK_STEPS, MASKED_LENGTH = 4, 60, 160  # of SPACE
UNROLLED = 2  # drafted tokens a training step looks ahead
AT_ONCE = 4  # of the drafter that drafts them in one pass
MODULES = 3  # of MTP in turn
PLANS = {
    "draft": TrainingPlan(steps=1700, tokens=2048),
    "eagle3": TrainingPlan(steps=1100, tokens=2048),
    "parallel": TrainingPlan(steps=400, tokens=2048, muon_rate=0.004),
    "mtp": TrainingPlan(steps=500, tokens=2048, muon_rate=0.004, adam_rate=5e-4),
    "mtp3": TrainingPlan(steps=150, tokens=2048, muon_rate=0.004, adam_rate=5e-4),
    "eagle": TrainingPlan(steps=250, tokens=2048, muon_rate=0.004, adam_rate=5e-4),
    "heads": TrainingPlan(steps=120, tokens=2048),
}


class Training:
    """The target and the folders, which all training runs share; a method for each run."""

    def __init__(self, target: Path, work: Path, out: Path, shards: int = SHARDS) -> None:
        self.work, self.out, self.shards = work, out, shards
        model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self.depths = default_depths(self.model.config.num_hidden_layers)

    def text(self) -> None:
        """Write the training text."""
        write_text(self.model, self.tokenizer, self.depths, self.work, self.shards)

    def draft(self) -> None:
        """Train the small draft model."""
        chats = Chats(self.work, self.shards, BOTH)
        table = self.model.get_input_embeddings().weight.detach()
        torch.manual_seed(0)
        config = draft_config(self.model.config, DRAFT_HIDDEN, DRAFT_LAYERS)
        draft = ProjectedDraft(config, table, _candidates(self._ranked(chats)))
        counts = chats.tokens.long().bincount(minlength=len(table))
        with torch.no_grad():
            draft.projection.copy_(principal_directions(table, counts, DRAFT_HIDDEN))
        self._fit("draft", draft, chats)
        store_draft(draft, self.out / "draft.safetensors")

    def eagle(self) -> None:
        """Train the EAGLE head."""
        chats = Chats(self.work, self.shards, ANSWERS)
        self._unrolled("eagle", lambda: new_eagle(self.model, chats), chats)

    def eagle3(self) -> None:
        """Train the EAGLE-3 head."""
        chats = Chats(self.work, self.shards, ANSWERS, features=True)
        known = self._ranked(chats)[:DRAFT_VOCABULARY]
        tokens = known.sort().values
        self._unrolled(
            "eagle3", lambda: new_eagle3(self.model, chats, tokens, self.depths), chats, known
        )

    def parallel(self) -> None:
        """Train the EAGLE-3 head with mask tokens (P-EAGLE), from the trained EAGLE-3 head on."""
        chats = Chats(self.work, self.shards, ANSWERS, features=True)
        trained = self._stored(SMOLLM2_WEIGHTS / "eagle3.safetensors")
        assert isinstance(trained, Eagle3)
        ranked = self._ranked(chats)
        tokens = trained.target_ids(torch.arange(trained.draft_vocab_size))
        known = ranked[torch.isin(ranked, tokens)]
        self._unrolled(
            "parallel", lambda: new_parallel(self.model, trained, chats), chats, known, AT_ONCE
        )

    def mtp(self) -> None:
        """Train one MTP module, which drafts every token of a round."""
        chats = Chats(self.work, self.shards, ANSWERS)
        self._unrolled("mtp", lambda: new_mtp(self.model, chats), chats)

    def mtp3(self) -> None:
        """Train MTP modules in turn, from the one module on."""
        chats = Chats(self.work, self.shards, ANSWERS)
        trained = self._stored(self.out / "mtp.safetensors")
        assert isinstance(trained, Mtp)
        self._unrolled("mtp3", lambda: in_turn(self.model, trained, MODULES), chats, steps=MODULES)

    def heads(self) -> None:
        """Train exit heads, parallel heads and Kangaroo's adapter, each kind by itself."""
        chats = Chats(self.work, min(HEAD_SHARDS, self.shards), ANSWERS, features=True)
        table = self.model.get_input_embeddings().weight.detach()
        candidates = _candidates(self._ranked(chats))
        read_as = self.model.to(torch.float32)  # the dtype of its fingerprint
        made: dict[str, ExitHeads | ParallelHeads | Adapter] = {
            # After the first depth the target knows next to nothing of its next token.
            "exit": new_exit_heads(self.model, self.depths[1:]),
            **{kind: new_parallel_heads(self.model, kind) for kind in ParallelHeads.KINDS},
            "kangaroo": new_adapter(self.model, self.depths[0]),
        }
        for name, heads in made.items():
            module: InTraining
            if isinstance(heads, Adapter):
                module = DistilledAdapter(heads, self.model, candidates)
            else:
                module = Distilled(heads, table, candidates)
            self._fit(name, module, chats)
            (self.out / SMOLLM2_HEADS).mkdir(exist_ok=True)
            save_module(heads, read_as, self.out / SMOLLM2_HEADS / FILES[name])

    def space(self) -> None:
        """Train SPACE's mask embeddings, through the whole frozen target."""
        text = Chats(self.work, min(HEAD_SHARDS, self.shards), ANSWERS).beginnings(MASKED_LENGTH)
        target = LayerRunner(self.model.to(torch.float32), MASKED_LENGTH)
        masks = train_masks(target, text, MASKS, steps=MASK_STEPS, seconds=math.inf)
        (self.out / SMOLLM2_HEADS).mkdir(exist_ok=True)
        save_module(masks, self.model, self.out / SMOLLM2_HEADS / FILES["space"])

    def _unrolled(
        self, name: str, make: Callable[[], FeatureDrafter], chats: Chats,
        known: Tensor | None = None, steps: int = UNROLLED,
    ) -> None:  # fmt: skip
        """Train a drafter on its own outputs; `known`: its vocabulary, most frequent first."""
        candidates = _candidates(self._ranked(chats) if known is None else known)
        torch.manual_seed(0)
        head = self.model.get_output_embeddings().weight.detach()
        module = Unrolled(make(), head, candidates, steps)
        self._fit(name, module, chats)
        store_drafter(module.finished(), self.out / f"{name}.safetensors")

    def _stored(self, path: Path) -> FeatureDrafter:
        settings, weights = read_stored(path)
        return feature_drafter(settings, weights, self.model)

    def _ranked(self, chats: Chats) -> Tensor:
        return by_frequency(chats.tokens, self.model.config.vocab_size)

    def _fit(self, name: str, module: InTraining, chats: Chats) -> None:
        """Train a module by its plan, and write how the training went."""
        plan = PLANS.get(name, PLANS["heads"])
        curve = fit(module, chats, plan, self.work / f"{name}.pt")
        report: Mapping[str, Any] = {
            "plan": asdict(plan),
            "text": chats.counts,
            "chats": len(chats.training),
            "held_out_chats": len(chats.held_out),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "curve": curve,
        }
        (self.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def _candidates(ranked: Tensor) -> Candidates:
    return Candidates(ranked[:FREQUENT], ranked[FREQUENT:], SAMPLED)


Shares = dict[str, list[float]]
"""By category, and over all: the share of starts from which at least k tokens are accepted."""


def recorded_outputs(trace: Trace) -> Iterator[tuple[Request, Tensor, Tensor]]:
    """Yield (request, its tokens with the prompt, the draft model's matches) of every request."""
    tokens = trace.columns["token"][trace.on_path]
    matches = trace.columns["match"][trace.on_path] == MATCH
    starts = trace.request_starts
    for request, begin, end in zip(trace.requests, starts, starts[1:], strict=False):
        ids = [*(request.prompt_ids or ()), *tokens[begin:end].tolist()]
        yield request, torch.tensor(ids), torch.from_numpy(matches[begin:end])


def chains(matches: Tensor, offsets: int) -> Tensor:
    """Return True where all tokens up to an offset match, (starts, offsets), along one path.

    A draft model's proposal at a position depends on the path alone, so a draft from a start goes
    on matching as long as the positions do. Starts that have `offsets` positions ahead count.
    """
    return matches.unfold(0, offsets, 1).long().cumprod(1).bool()


@torch.inference_mode()
def drafted(drafter: FeatureDrafter, target: Any, ids: Tensor, prompt: int, offsets: int) -> Tensor:
    """Return a feature drafter's drafts from every output token but the last: (starts, offsets).

    `ids`: prompt and output. The drafts of row i follow the output's token i, its i + 1 first
    tokens known; starts that have `offsets` tokens ahead count.
    """
    features = target_features(target, ids[None], drafter.feature_layers)
    picked: list[Tensor] = []

    def pick(states: Tensor) -> Tensor:
        picked.append(drafter.target_ids(drafter.logits(states).argmax(-1)))
        return picked[-1]

    outputs = unroll(drafter, ids[None], features, offsets, pick=pick)
    pick(outputs[-1])
    return torch.cat(picked).T[prompt - 1 : len(ids) - 1 - offsets]


def measure(
    trace: Trace, target: Any, drafter: FeatureDrafter | None = None, offsets: int = 5
) -> Shares:
    """Measure shares by category and for ``all``; of the trace's own draft model where there is no
    drafter.

    Every request weighs the same, whatever its length; one too short to count is left out.
    """
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for request, ids, matches in recorded_outputs(trace):
        if request.tokens <= offsets + 1:
            continue
        if drafter is None:
            accepted = chains(matches[1:], offsets)
        else:
            drafts = drafted(drafter, target, ids, request.prompt_length, offsets)
            emitted = ids[request.prompt_length + 1 :].unfold(0, offsets, 1)
            accepted = (drafts == emitted).long().cumprod(1)
        share = accepted.float().mean(0).numpy()
        found.setdefault(request.category, []).append(share)
        found.setdefault("all", []).append(share)
    return {name: np.mean(shares, 0).round(4).tolist() for name, shares in found.items()}


def measure_all(path: Path, out: Path, limit: int | None) -> None:
    """Measure every drafter that has been fetched along a recorded trace's first outputs."""
    trace = read_trace(path)
    trace = trace.select(range(min(limit or len(trace.requests), len(trace.requests))))
    target: Any = LlamaForCausalLM.from_pretrained(
        fetched(SMOLLM2.name), dtype=torch.float32
    ).eval()
    found = {"draft": measure(trace, target)}
    for name in SMOLLM2.drafters[1:]:
        where = folder(f"{SMOLLM2.name}-{name}")
        if where.exists():
            found[name] = measure(trace, target, read_drafter(where, target))
    for name, shares in found.items():
        for category, by_offset in shares.items():
            print(f"{name:8}{category:16}", *(f"{share:7.3f}" for share in by_offset))
    (out / "measured.json").write_text(json.dumps(found, indent=1) + "\n")


STEPS: Mapping[str, Callable[[Training], None]] = {
    "text": Training.text, "draft": Training.draft, "eagle3": Training.eagle3,
    "eagle": Training.eagle, "parallel": Training.parallel, "mtp": Training.mtp,
    "mtp3": Training.mtp3, "heads": Training.heads,
    "space": Training.space,
}  # fmt: skip
