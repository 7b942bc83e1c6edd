"""Trains a small encoder-decoder pair on a task made from local text.

    python -m tests.seq2seq_pair --out DIR

The task: a function's signature from Python's standard library in, the same in words out,
arguments first ("given path , mode or 438 : make dirs"), which takes copying, reordering and
a little grammar.  The target (3 encoder and 6 decoder layers) is grown from the draft (1 and
1) as in `benchmarks.training.pair`: added layers start by adding nothing.  Writes ``target``,
``draft`` and ``prompts.jsonl``, which `draftsim profile` takes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from benchmarks.training.fit import TrainingPlan, rise_and_fall
from profiler.train.documents import stable_hash
from profiler.train.heads import Descent

EOS, PAD = "<|end|>", "<|pad|>"  # ids 0 and 1; EOS also starts the decoder
IGNORED = -100
Example = tuple[str, str]


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair; ``layers`` and ``draft_layers`` are (encoder, decoder)."""

    layers: tuple[int, int] = (3, 6)
    draft_layers: tuple[int, int] = (1, 1)
    width: int = 96
    feed_forward: int = 256
    heads: int = 4
    vocabulary: int = 1024
    positions: int = 128


DRAFT = TrainingPlan(350, 2048, 1, muon_rate=0.02, adam_rate=0.01)
TARGET = TrainingPlan(120, 2048, 2, muon_rate=0.008, adam_rate=0.004)


def words(name: str) -> str:
    """An identifier as lower-case words: ``_makeDirs`` becomes ``make dirs``."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return " ".join(part.lower() for part in parts) or name


def describe(function: ast.FunctionDef) -> str:
    """The signature in words, arguments first."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    given = [
        *zip(plain, [*missing, *args.defaults], strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    said = [
        words(arg.arg) + (f" or {ast.unparse(value)}" if value else "")
        for arg, value in given
        if arg.arg not in ("self", "cls")
    ]
    return f"given {' , '.join(said) or 'nothing'} : {words(function.name)}"


def load_examples() -> list[Example]:
    """(signature, words) of the functions of the standard library here, each once, shuffled."""
    root = Path(sysconfig.get_paths()["stdlib"])
    examples: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                line = f"def {node.name}({ast.unparse(node.args)})"
                if len(line) < 160:
                    examples[line] = describe(node)
    return sorted(examples.items(), key=lambda pair: stable_hash(pair[0]))


def train_tokenizer(examples: Sequence[Example], shape: Shape) -> PreTrainedTokenizerFast:
    """A byte-level BPE that sees words apart from punctuation; every text ends with EOS."""
    bpe = Tokenizer(models.BPE())
    # Underscores and signs alone, so that a word is the same token on both sides.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary, special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator((text for example in examples for text in example), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, 0)]
    )
    # The class's constructor has no type hints; a typed name for it keeps the check strict.
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=bpe, eos_token=EOS, pad_token=PAD, model_max_length=shape.positions,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(shape: Shape, layers: tuple[int, int]) -> MBartForConditionalGeneration:
    """Return a randomly initialised model with this many (encoder, decoder) layers."""
    config = MBartConfig(
        vocab_size=shape.vocabulary, d_model=shape.width, encoder_layers=layers[0],
        decoder_layers=layers[1], encoder_ffn_dim=shape.feed_forward,
        decoder_ffn_dim=shape.feed_forward, encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads, max_position_embeddings=shape.positions,
        dropout=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=1, decoder_start_token_id=0,
        forced_eos_token_id=None, scale_embedding=False,
    )  # fmt: skip
    model = MBartForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=0, bos_token_id=0, eos_token_id=0, pad_token_id=1
    )
    return model


def grow(small: Any, shape: Shape, layers: tuple[int, int]) -> MBartForConditionalGeneration:
    """A model of more layers that computes what `small` does: its added ones write zeros."""
    grown = build_model(shape, layers)
    grown.load_state_dict(small.state_dict(), strict=False)
    config = small.config
    for side, kept in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        stack: Any = getattr(grown.model, side)
        for layer in stack.layers[kept:]:
            for name, weights in layer.named_parameters():
                if "out_proj" in name or "fc2" in name:
                    torch.nn.init.zeros_(weights)
    return grown


class Batches:
    """Examples as padded token ids, those of a batch of similar lengths."""

    def __init__(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, shape: Shape
    ) -> None:
        sources, goals = (
            tokenizer([example[side] for example in examples], verbose=False)["input_ids"]
            for side in (0, 1)
        )
        rows = [
            (source, goal)
            for source, goal in zip(sources, goals, strict=True)
            if max(len(source), len(goal)) < shape.positions
        ]
        self.rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))

    def draw(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(rows, source tokens) and (rows, goal tokens), about `tokens` ids in all."""
        at = int(torch.randint(len(self.rows), (1,), generator=generator))
        count = max(1, tokens // (len(self.rows[at][0]) + len(self.rows[at][1])))
        begin = min(max(0, at - count // 2), max(0, len(self.rows) - count))
        some = self.rows[begin : begin + count]
        return _padded([source for source, _ in some], 1), _padded([g for _, g in some], IGNORED)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def train(model: Any, batches: Batches, stage: TrainingPlan, name: str) -> float:
    """Train in place as `benchmarks.training.pair` does; the last 50 steps' loss, nats a token."""
    generator = torch.Generator().manual_seed(stage.seed)

    def loss(_: int) -> Tensor:
        source, goal = batches.draw(stage.tokens, generator)
        begun = torch.cat([goal.new_zeros(goal.shape[0], 1), goal[:, :-1]], 1)
        logits = model(
            input_ids=source, attention_mask=(source != 1).long(),
            decoder_input_ids=begun.masked_fill(begun == IGNORED, 1), use_cache=False,
        ).logits.float()  # fmt: skip
        return F.cross_entropy(logits.flatten(0, 1), goal.flatten(), ignore_index=IGNORED)

    model.train()
    descent = Descent(model, stage.adam_rate, stage.muon_rate, apart=("embed", "shared"))
    values = descent.steps(loss, rise_and_fall(stage.steps))
    losses = [float(v) for v in track(values, total=stage.steps, description=f"{name:7}")]
    model.eval()
    return statistics.fmean(losses[-50:])


def make_pair(
    out: Path, shape: Shape | None = None, *, draft: TrainingPlan = DRAFT,
    target: TrainingPlan = TARGET,
    prompts: int = 40,
) -> tuple[float, float]:  # fmt: skip
    """Train and save the pair and held-out prompts; the (draft, target) losses."""
    shape = shape or Shape()
    examples = load_examples()
    held_out, kept = examples[: len(examples) // 20], examples[len(examples) // 20 :]
    tokenizer = train_tokenizer(kept, shape)
    batches = Batches(kept, tokenizer, shape)
    torch.manual_seed(0)
    small = build_model(shape, shape.draft_layers)
    lost = train(small, batches, draft, "draft")
    large = grow(small, shape, shape.layers)
    lost_large = train(large, batches, target, "target")
    for name, model in (("target", large), ("draft", small)):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    # Long outputs make rounds: no prompt has fewer than three arguments.
    long = [example for example in held_out if example[1].count(",") >= 2][:prompts]
    rows = [
        {"id": str(i), "category": "many" if goal.count(",") > 3 else "three", "prompt": source}
        for i, (source, goal) in enumerate(long)
    ]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lost, lost_large


def main() -> None:
    """The command line: trains the pair and writes it to a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.seq2seq_pair")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the training")
    parser.add_argument("--shrink", type=int, default=1, help="divide the step counts (a trial)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stages = (replace(stage, steps=stage.steps // options.shrink) for stage in (DRAFT, TARGET))
    losses = make_pair(options.out, draft=next(stages), target=next(stages))
    print("loss of the draft {:.3f}, of the target {:.3f} nats a token".format(*losses))


if __name__ == "__main__":
    main()
