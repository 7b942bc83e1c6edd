"""Trains the drafters of SmolLM2-135M-Instruct: ``python -m profiler.smollm2 STEP``.

    python -m profiler.smollm2 text     # the model writes the training text, with its states
    python -m profiler.smollm2 eagle3   # then each drafter by itself, in any order
    python -m profiler.smollm2 parallel # EAGLE-3 with mask tokens, all of a round in one pass
    python -m profiler.smollm2 mtp      # one MTP module, applied to every token of a round
    python -m profiler.smollm2 mtp3     # then three MTP modules in turn, which begin as that one
    python -m profiler.smollm2 draft
    python -m profiler.smollm2 eagle
    python -m profiler.smollm2 heads    # exit heads, Blockwise, Medusa, SpecDec, Kangaroo
    python -m profiler.smollm2 space    # mask embeddings
    python -m profiler.smollm2 measure --trace RUN/trace.parquet    # what CARD.md says of them

Training goes on where it stopped. Seeds and step counts are fixed, so one machine with one
thread count gives the same weights again. What is half-made stays in --work; weights and the
training curve go to --out. The target is brought by ``draftsim fetch smollm2``.
``folder`` makes of a drafter's weights in --out the folder that ``draftsim profile`` reads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from profiler.features import Eagle3, FeatureDrafter, Mtp, default_depths, read_drafter
from profiler.fetched.places import cache, fetched, folder
from profiler.heads.adapter import Adapter
from profiler.heads.modules import ExitHeads, ParallelHeads, save_module
from profiler.heads.train import FILES, train_masks
from profiler.models.stack import LayerRunner
from profiler.smollm2.candidates import Candidates, by_frequency
from profiler.smollm2.chats import ANSWERS, BOTH, Chats
from profiler.smollm2.draft import ProjectedDraft, draft_config, principal_directions
from profiler.smollm2.drafters import (
    feature_drafter,
    read_stored,
    store_draft,
    store_drafter,
    write_folder,
)
from profiler.smollm2.eagles import (
    Unrolled,
    in_turn,
    new_eagle,
    new_eagle3,
    new_mtp,
    new_parallel,
)
from profiler.smollm2.fitting import Plan, fit
from profiler.smollm2.heads import (
    Distilled,
    DistilledAdapter,
    new_adapter,
    new_exit_heads,
    new_parallel_heads,
)
from profiler.smollm2.measure import measure
from profiler.smollm2.places import DRAFTERS, HEADS, NAME, STORED
from profiler.smollm2.text import write_text
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
    "draft": Plan(steps=1700, tokens=2048),
    "eagle3": Plan(steps=1100, tokens=2048),
    "parallel": Plan(steps=60, tokens=1024, muon_rate=0.004, warmup=5, report_every=10),
    "mtp": Plan(steps=80, tokens=1024, muon_rate=0.004, adam_rate=5e-4, report_every=20),
    "mtp3": Plan(steps=30, tokens=1024, muon_rate=0.004, adam_rate=5e-4, report_every=10),
    "eagle": Plan(steps=250, tokens=2048, muon_rate=0.004, adam_rate=5e-4),
    "heads": Plan(steps=120, tokens=2048),
}


class Work:
    """The part that all steps share: the target, and the folders."""

    def __init__(self, target: Path, work: Path, out: Path, shards: int = SHARDS) -> None:
        self.work, self.out, self.shards = work, out, shards
        model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self.depths = default_depths(self.model.config.num_hidden_layers)

    def text(self) -> None:
        """Writes the training text."""
        write_text(self.model, self.tokenizer, self.depths, self.work, self.shards)

    def draft(self) -> None:
        """The small draft model."""
        chats = Chats(self.work, self.shards, BOTH)
        table = self.model.get_input_embeddings().weight.detach()
        torch.manual_seed(0)
        draft = ProjectedDraft(draft_config(self.model.config, DRAFT_HIDDEN, DRAFT_LAYERS), table)
        counts = chats.tokens.long().bincount(minlength=len(table))
        with torch.no_grad():
            draft.projection.copy_(principal_directions(table, counts, DRAFT_HIDDEN))
        candidates = self._candidates(chats, len(table))
        plan, kept = PLANS["draft"], self.work / "draft.pt"
        curve = fit(draft, lambda batch: draft.loss(batch, candidates), chats, plan, kept)
        store_draft(draft, self.out / "draft.safetensors")
        self._report("draft", chats, curve)

    def eagle3(self) -> None:
        """The EAGLE-3 head."""
        chats = Chats(self.work, self.shards, ANSWERS, features=True)
        known = self._ranked(chats)[:DRAFT_VOCABULARY].sort().values
        torch.manual_seed(0)
        drafter = new_eagle3(self.model, chats, known, self.depths)
        self._unrolled("eagle3", drafter, self._candidates(chats, DRAFT_VOCABULARY), chats)

    def parallel(self) -> None:
        """The EAGLE-3 head with mask tokens (P-EAGLE), from the trained EAGLE-3 head on."""
        chats = Chats(self.work, self.shards, ANSWERS, features=True)
        trained = self._stored(STORED / "eagle3.safetensors")
        assert isinstance(trained, Eagle3)
        torch.manual_seed(0)
        drafter = new_parallel(trained, chats)
        tokens = drafter.target_ids(torch.arange(drafter.draft_vocab_size))
        ranked = self._ranked(chats)
        known = ranked[torch.isin(ranked, tokens)]
        candidates = Candidates(known[:FREQUENT], known[FREQUENT:], SAMPLED)
        self._unrolled("parallel", drafter, candidates, chats, AT_ONCE)

    def mtp(self) -> None:
        """One MTP module, which drafts every token of a round."""
        chats = Chats(self.work, self.shards, ANSWERS)
        torch.manual_seed(0)
        whole = self._candidates(chats, int(self.model.config.vocab_size))
        self._unrolled("mtp", new_mtp(self.model, chats), whole, chats)

    def mtp3(self) -> None:
        """MTP modules in turn, from the one module on."""
        chats = Chats(self.work, self.shards, ANSWERS)
        trained = self._stored(self.out / "mtp.safetensors")
        assert isinstance(trained, Mtp)
        torch.manual_seed(0)
        whole = self._candidates(chats, int(self.model.config.vocab_size))
        self._unrolled("mtp3", in_turn(trained, MODULES), whole, chats, MODULES)

    def _stored(self, path: Path) -> FeatureDrafter:
        settings, weights = read_stored(path)
        return feature_drafter(settings, weights, self.model)

    def eagle(self) -> None:
        """The EAGLE head."""
        chats = Chats(self.work, self.shards, ANSWERS)
        torch.manual_seed(0)
        whole = self._candidates(chats, int(self.model.config.vocab_size))
        self._unrolled("eagle", new_eagle(self.model, chats), whole, chats)

    def heads(self) -> None:
        """Exit heads, parallel heads and Kangaroo's adapter, each kind by itself."""
        chats = Chats(self.work, min(HEAD_SHARDS, self.shards), ANSWERS, features=True)
        table = self.model.get_input_embeddings().weight.detach()
        candidates = self._candidates(chats, len(table))
        read_as = self.model.to(torch.float32)  # the dtype of its fingerprint
        made: dict[str, ExitHeads | ParallelHeads | Adapter] = {
            # After the first depth the target knows next to nothing of its next token.
            "exit": new_exit_heads(self.model, self.depths[1:]),
            **{kind: new_parallel_heads(self.model, kind) for kind in ParallelHeads.KINDS},
            "kangaroo": new_adapter(self.model, self.depths[0]),
        }
        for name, heads in made.items():
            torch.manual_seed(0)
            module: Distilled | DistilledAdapter
            if isinstance(heads, Adapter):
                module = DistilledAdapter(heads, self.model, candidates)
            else:
                module = Distilled(heads, table, candidates)
            curve = fit(module, module.loss, chats, PLANS["heads"], self.work / f"{name}.pt")
            (self.out / HEADS).mkdir(exist_ok=True)
            save_module(heads, read_as, self.out / HEADS / FILES[name])
            self._report(name, chats, curve)

    def space(self) -> None:
        """SPACE's mask embeddings, through the whole frozen target."""
        text = Chats(self.work, min(HEAD_SHARDS, self.shards), ANSWERS).beginnings(MASKED_LENGTH)
        target = LayerRunner(self.model.to(torch.float32), MASKED_LENGTH)
        masks = train_masks(target, text, MASKS, steps=MASK_STEPS, seconds=math.inf)
        (self.out / HEADS).mkdir(exist_ok=True)
        save_module(masks, self.model, self.out / HEADS / FILES["space"])

    def _unrolled(
        self, name: str, drafter: FeatureDrafter, candidates: Candidates, chats: Chats,
        steps: int = UNROLLED,
    ) -> None:  # fmt: skip
        head = self.model.get_output_embeddings().weight.detach()
        module = Unrolled(drafter, head, candidates, steps)
        curve = fit(module, module.loss, chats, PLANS[name], self.work / f"{name}.pt")
        store_drafter(module.finished(), self.out / f"{name}.safetensors")
        self._report(name, chats, curve)

    def _ranked(self, chats: Chats) -> torch.Tensor:
        return by_frequency(chats.tokens, self.model.config.vocab_size)

    def _candidates(self, chats: Chats, vocabulary: int) -> Candidates:
        """Return the candidates, of which the `vocabulary` most frequent tokens take part."""
        ranked = self._ranked(chats)[:vocabulary]
        return Candidates(ranked[:FREQUENT], ranked[FREQUENT:], SAMPLED)

    def _report(self, name: str, chats: Chats, curve: list[dict[str, Any]]) -> None:
        report: Mapping[str, Any] = {
            "plan": asdict(PLANS.get(name, PLANS["heads"])),
            "text": chats.counts,
            "chats": len(chats.training),
            "held_out_chats": len(chats.held_out),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "curve": curve,
        }
        (self.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def measure_all(path: Path, out: Path, limit: int | None) -> None:
    """Measures every drafter that has been fetched along a recorded trace's first outputs."""
    trace = read_trace(path)
    trace = trace.select(range(min(limit or len(trace.requests), len(trace.requests))))
    target: Any = LlamaForCausalLM.from_pretrained(fetched(NAME), dtype=torch.float32).eval()
    found = {"draft": measure(trace, target)}
    for name in DRAFTERS[1:]:
        where = folder(f"{NAME}-{name}")
        if where.exists():
            found[name] = measure(trace, target, read_drafter(where, target))
    for name, shares in found.items():
        for category, by_offset in shares.items():
            print(f"{name:8}{category:16}", *(f"{share:7.3f}" for share in by_offset))
    (out / "measured.json").write_text(json.dumps(found, indent=1) + "\n")


STEPS: Mapping[str, Callable[[Work], None]] = {
    "text": Work.text, "draft": Work.draft, "eagle3": Work.eagle3, "eagle": Work.eagle,
    "parallel": Work.parallel, "mtp": Work.mtp, "mtp3": Work.mtp3, "heads": Work.heads,
    "space": Work.space,
}  # fmt: skip


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m profiler.smollm2", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("step", choices=[*STEPS, "measure", "folder"])
    parser.add_argument("--work", type=Path, default=cache() / NAME / "training")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shards", type=int, default=SHARDS, help="of text, at most")
    parser.add_argument("--drafter", help="of folder: the name of its weights in --out")
    parser.add_argument("--trace", type=Path, help="of measure: a greedy recording of the pair")
    parser.add_argument("--limit", type=int, help="of measure: at most this many prompts")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.step == "measure":
        if given.trace is None:
            parser.error("measure needs --trace")
        measure_all(given.trace, given.out, given.limit)
        return
    if given.step == "folder":
        if given.drafter is None:
            parser.error("folder needs --drafter")
        stored = given.out / f"{given.drafter}.safetensors"
        write_folder(stored, fetched(NAME), given.out / f"{NAME}-{given.drafter}")
        return
    STEPS[given.step](Work(fetched(NAME), given.work, given.out, given.shards))


if __name__ == "__main__":
    main()
