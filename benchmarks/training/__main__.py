"""The command line of the training runs: the bundled pair, SmolLM2's drafters, heads.

    python -m benchmarks.training pair --out DIR                   # train, save, pick the prompts
    python -m benchmarks.training pair --out DIR --measure         # the figures of its CARD.md
    python -m benchmarks.training smollm2 STEP                     # see below
    python -m benchmarks.training heads --target DIR --out FOLDER  # the modules of draft sources

The steps of SmolLM2-135M-Instruct, which ``draftsim fetch smollm2`` brings::

    text                      the model writes the training text, with its hidden states
    draft, eagle, eagle3      each drafter by itself, in any order
    parallel                  EAGLE-3 with mask tokens: a round in one pass; begins as eagle3
    mtp, mtp3                 one MTP module for every token of a round; three, which begin as it
    heads, space              exit heads, an adapter and parallel heads; mask embeddings
    folder --drafter NAME     the folder of stored weights, for `draftsim profile`
    measure --trace FILE      the figures of CARD.md

A stopped run resumes. Unfinished work is in --work; weights and the training curve go to --out.
Seeds and step counts are fixed, so one machine with one thread count gives the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.training.smollm2 import SHARDS, STEPS, Training, measure_all
from profiler.features.heads import MODULES
from profiler.fetched.places import SMOLLM2, SMOLLM2_WEIGHTS, cache, fetched
from profiler.fetched.smollm2 import write_folder
from traces.errors import DraftsimError


def train_pair(given: argparse.Namespace) -> None:
    """Train the bundled pair, or measure the one that is in --out."""
    from benchmarks.training.pair import make_pair
    from benchmarks.training.pair_prompts import measure_pair, save_prompts

    torch.set_num_threads(given.threads)
    if given.measure:
        measure_pair(given.out)
        return
    if not given.prompts:
        make_pair(given.out, given.shrink)
    save_prompts(given.out)


def train_smollm2(given: argparse.Namespace) -> None:
    """Do one step of the training of SmolLM2's drafters."""
    torch.set_num_threads(given.threads)
    if given.step == "measure":
        measure_all(given.trace, given.out, given.limit)
    elif given.step == "folder":
        stored = given.out / f"{given.drafter}.safetensors"
        write_folder(stored, fetched(SMOLLM2.name), given.out / f"{SMOLLM2.name}-{given.drafter}")
    else:
        STEPS[given.step](Training(fetched(SMOLLM2.name), given.work, given.out, given.shards))


def train_heads(given: argparse.Namespace) -> None:
    """Train the modules of draft sources for one target."""
    from profiler.models.loading import load_pair
    from profiler.models.stack import LayerRunner
    from profiler.prompts import read_prompts
    from profiler.train.documents import load_documents
    from profiler.train.heads import own_text, train_all

    pair = load_pair(given.target, given.target, device=given.device)
    if given.text:
        texts = [p.text for p in read_prompts(given.text)]
    else:
        texts = [document.text for document in load_documents()[0]][:4000]
    text = own_text(pair.target, [pair.tokenizer(t)["input_ids"] for t in texts])
    train_all(LayerRunner(pair.target, 512), text, given.out, given.only, seconds=given.seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_subparsers(dest="what", required=True)
    pair = what.add_parser("pair", help=train_pair.__doc__)
    pair.set_defaults(run=train_pair)
    pair.add_argument("--out", type=Path, default=Path("profiler/bundled"))
    pair.add_argument("--measure", action="store_true", help="measure, train nothing")
    pair.add_argument("--prompts", action="store_true", help="pick the prompts, train nothing")
    pair.add_argument("--threads", type=int, default=2, help="torch threads of the training")
    pair.add_argument("--shrink", type=int, default=1, help="divide the step counts (a trial)")
    smollm2 = what.add_parser("smollm2", help=train_smollm2.__doc__)
    smollm2.set_defaults(run=train_smollm2)
    smollm2.add_argument("step", choices=[*STEPS, "measure", "folder"])
    smollm2.add_argument("--work", type=Path, default=cache() / SMOLLM2.name / "training")
    smollm2.add_argument("--out", type=Path, default=SMOLLM2_WEIGHTS)
    smollm2.add_argument("--threads", type=int, default=1)
    smollm2.add_argument("--shards", type=int, default=SHARDS, help="of text, at most")
    smollm2.add_argument("--drafter", help="of folder: the name of its weights in --out")
    smollm2.add_argument("--trace", type=Path, help="of measure: a greedy recording of the pair")
    smollm2.add_argument("--limit", type=int, help="of measure: at most this many prompts")
    heads = what.add_parser("heads", help=train_heads.__doc__)
    heads.set_defaults(run=train_heads)
    heads.add_argument("--target", required=True)
    heads.add_argument("--out", type=Path, required=True)
    heads.add_argument("--text", type=Path, help="texts as in a prompts file")
    heads.add_argument("--only", nargs="+", choices=MODULES, default=list(MODULES))
    heads.add_argument("--device", default="cpu")
    heads.add_argument("--seconds", type=float, default=30.0, help="at most, per module")
    given = parser.parse_args(arguments)
    for step, option in (("measure", "trace"), ("folder", "drafter")):
        if given.what == "smollm2" and given.step == step and getattr(given, option) is None:
            smollm2.error(f"{step} needs --{option}")
    try:
        given.run(given)
    except DraftsimError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
