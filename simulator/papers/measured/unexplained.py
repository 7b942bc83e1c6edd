"""Explanations of the largest errors of the public measurements, and what is not explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.papers.measured.rows import Evidence, by_study

LARGE = 0.2
"""An error beyond this has a note."""


class Note(NamedTuple):
    """A remark on the rows of some studies: ``study`` and ``given`` are parts of their names."""

    study: str
    given: str
    text: str

    def on(self, study: str, given: str) -> bool:
        """Return True if it is about these rows."""
        return self.study in study and self.given in given


NOTES = (
    Note(
        "Cells of operators", "products of the GPU's other models",
        "Products of 128 to 1,024 tokens are bound by arithmetic, and what share of it a kernel "
        "reaches depends on both sides of the matrix, which bytes of weights do not tell",
    ),
    Note(
        "vLLM server on an RTX 4090", "the server's settings,",
        "The server found beginnings of prompts in its prefix cache, and from 27 s on lets up to "
        "four requests in 10 to 14 s before they get in here; which prompts begin alike is not in "
        "the data.  Its first request waited 0.5 s longer than its passes take.  The last ten "
        "seconds hold few requests",
    ),
    Note(
        "RTX 3090 llama.cpp 27B", "plain and",
        "llama.cpp verifies up to 8 tokens with a vector kernel and more with another "
        "(MMVQ_MAX_BATCH_SIZE), which at 9 tokens costs a fifth less.  Where a length on its own "
        "side of that is given, its cycle is read from there.  Not explained: what the other "
        "kernel saves, where no length beyond 7 is given; and that the cost of a token grows with "
        "the draft, from 0.23 to 0.34 of a step",
    ),
    Note(
        "vLLM FR-Spec", "plain and one length",
        "Not explained: a round with one drafted token takes 0.99 of a plain step, which no cost "
        "of drafting does; plain decoding was slower there than the steps of a round",
    ),
    Note(
        "GammaTune Table 1", "quantised",
        "Not explained by any kernel.  The paper calls the model int4 in the table and int8 in the "
        "text.  In 8 bits, head and embedding in 16, with its 8B draft model it takes 89 GB of the "
        "H100's 80: Hugging Face then leaves layers in host memory and copies them in every pass, "
        "and 8.7 GB in 925 ms are 9.4 GB/s, as pageable memory is copied.  The paper does not say "
        "where its layers were, so this is not modelled",
    ),
    Note(
        "GammaTune Table 1", "the table's other models",
        "Not explained: the 68M's two layers take a quarter more than the other models' launches "
        "say; the launches outside of the layers are known from Qwen's models alone",
    ),
    Note(
        "transformers on", "unpacking from other studies",
        "Another library: Qwen2.5 ran AutoGPTQ 0.6 and AutoAWQ 0.2.6, Qwen3 GPTQModel 2.2 and "
        "AutoAWQ 0.2.9, and neither GPTQ library's ExLlama kernels take 8 bits.  From the "
        "library's other models the errors are those of the rows named so",
    ),
    Note(
        "Qwen3, transformers", "unpacking from",
        "Not explained: AWQ in 32B, 64 layers in 23.9 ms, where 36 layers take 19.4 and 40 take "
        "22.4 (one host cannot launch so unevenly; the page gives AutoAWQ an environment of its "
        "own), and FP8, whose passes grow with the matrices as no launch does",
    ),
    Note(
        "vLLM on A100", "unpacking from other studies",
        "Marlin's kernels are known of SGLang on an H20, whose passes reach a third of its "
        "bandwidth: what they take beyond their bytes there is not unpacking alone.  From vLLM's "
        "own other models the errors are those of the rows named so",
    ),
    Note(
        "SGLang on H20", "unpacking from other models",
        "Not explained: its passes reach a third of the bandwidth, in 16 bits as well",
    ),
    Note(
        "llama.cpp, several GPUs", "",
        "its tables are of December 2023 and May 2024; llama.cpp captures CUDA graphs since May "
        "2024 (pull request 6766: 6 to 14% for 7B in 4 bits), so some of these passes were "
        "launched kernel by kernel.  Not explained: the A100 reached half of its bandwidth there, "
        "where gpt-fast reached two thirds",
    ),
    Note(
        "Whole steps of", "operators alone",
        "Not explained: run by themselves, steps take 1.6 times the attention that was timed "
        "alone, at 14 us as at 1.4 ms, though its cells read the cache at 0.92 to 0.96 of the "
        "bandwidth: no floor of bytes over bandwidth binds there.  On an RTX 4090, timed in the "
        "same way, a server's steps take what the operators add up to; LLMServingSim withdrew "
        "its table of steps",
    ),
    Note(
        "Cells of operators", "half the cells",
        "Half of the cells leaves out every other doubling: a kernel that shares the cache among "
        "more multiprocessors from some context on is missed in between",
    ),
    Note(
        "Cells of operators", "another GPU's attention",
        "The law has three constants: it misses how many multiprocessors share a sequence's cache, "
        "which matters for one or two sequences and for the fewest heads",
    ),
    Note(
        "", "operators alone, of passes that a host launches",
        "Operators hold no launches: where a host launches kernel by kernel, they are a floor, and "
        "what such passes take follows layers (`--gpu` and its roofline have that)",
    ),
    Note(
        "Qwen2.5, vLLM on A100", "operators",
        "vLLM 0.6.3 prepared a step after the one before it: 1.4 to 2.2 ms that later versions "
        "hide (version 0.24 on the same GPU takes what the operators add up to); the 32B ran "
        "without graphs",
    ),
    Note(
        "llama.cpp, tokens a pass of 1B", "operators",
        "llama.cpp's kernels for vectors read small matrices at more of the bandwidth than the "
        "products that were timed on the RTX 3090, keys and values apart",
    ),
)  # fmt: skip


def notes_on(rows: Sequence[Evidence]) -> list[str]:
    """Return the notes on these rows, each after the parts of the names it is about."""
    groups = [*by_study(rows)]
    return [
        f"{note.study} ({note.given or 'all rows'}): {note.text}"
        for note in NOTES if any(note.on(*group) for group in groups)
    ]  # fmt: skip
