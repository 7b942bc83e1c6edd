"""The page of questions: each with a command and what it prints, run when the page is made."""

from __future__ import annotations

import re
from typing import NamedTuple

from docs import outputs

MOST_LINES = 20
"""Lines of an output that a page shows."""
PROVENANCE = re.compile(
    r"composed from operators|^acceptance of |measured sizes|passes: batch"
    r"|^prompts \w+ decoding, priced"
    r"|^not in the latency table|^warning: |^launch: |^before running, |^simulating, |^run \d+: "
)
"""Remarks on what was read that the page leaves out: the command's own output has them."""


class Question(NamedTuple):
    """A question, the command that answers it, and how to read its output."""

    asked: str
    command: str
    reading: str


A100 = "a100/llama-3.1-8b+llama-3.2-1b"
CODER = f"--trace qwen-coder-cpu --latency {A100}"
QUESTIONS = {
    "load": Question(
        "Which K at which concurrency?",
        "draftsim tune --engine vllm --batch 1,4,16 --resamples 50",
        "A row is a batch size. `deploy` says where no speculation is as fast; the setting below "
        "is what vLLM reads. Name your own recording and latencies, or give benchmark runs to "
        "`draftsim recommend`.",
    ),
    "context": Question(
        "Which K at which context?",
        f"draftsim breakeven --latency {A100} --acceptance 0.8,0.56,0.36,0.22 --batch 16 "
        "--context 512,4096,16384,65536 --k 1,2,4",
        "The last line is vLLM's table by sequence length, with what one K for all contexts loses.",
    ),
    "break-even": Question(
        "Where does speculation stop giving a speedup?",
        f"draftsim breakeven --latency {A100} --acceptance 0.7 --batch 1,8,32,128 "
        "--context 1024,8192 --k 1,2,4",
        "`needed` is the acceptance length that breaks even at the load, whatever drafts. With "
        "`--plot FILE` it is a map. `breakeven plan` chooses the fewest runs to measure on your "
        "own server.",
    ),
    "baseline": Question(
        "Over which baseline is the gain?",
        "draftsim serve --policy autoregressive --policy fixed:gamma=2 "
        "--policy batch-table:table=[[1,64,0]] --batch 1,8 --requests 40",
        "`autoregressive` is an engine without a drafter. K = 0 in a table is not that baseline: "
        "the draft model still reads every token, which is the difference of the two rows. A "
        "drafter can also force asynchronous scheduling, graphs or prefix caching off: "
        "`draftsim validate engine --run RUN --trace T --load closed:4 --defaults` (also "
        "`profile engine` and `tune engine`) serves the engine with its own defaults too and "
        "prints both speedups; [an example](engines.md#which-baseline) has 1.09x over one and "
        "0.99x over the other.",
    ),
    "moe": Question(
        "Does it help a mixture of experts?",
        "draftsim breakeven --latency h100/qwen3-30b-a3b+qwen3-0.6b --acceptance 0.75 "
        "--batch 1,2,4,8,16,64 --context 1024 --k 1,2,4",
        "At small batches every verified token reaches further experts, so `needed` is higher "
        "there than at batches that reach all experts anyway.",
    ),
    "one-pass": Question(
        "Do drafters that draft all tokens in one pass need another K?",
        "draftsim serve --trace smollm2-vllm-eagle3-cpu --batch 1,16 --requests 80 "
        "--source parallel:acceptance=[0.72,0.5,0.33,0.21,0.14,0.09,0.06] "
        "--policy fixed:gamma=1 --policy fixed:gamma=3 --policy fixed:gamma=7 "
        "--policy confidence-scheduled",
        "The acceptance is EAGLE-3's of vLLM's pull request 32628, by position. One pass drafts "
        "every token (P-EAGLE, DFlash, DSpark, PARD), so a longer draft costs verification alone, "
        "and policies that verify fewer tokens are faster. `--source parallel:model=DIR` is a "
        "recorded one; `draftsim calibrate --passes 1` fits such a server.",
    ),
    "adaptive": Question(
        "Does adaptive verification help?",
        f"draftsim serve {CODER} --policy fixed:gamma=5 --policy adaptive-verification:gamma=5 "
        "--policy goodput:gamma_max=5 --batch 1,32 --requests 160",
        "`adaptive-verification` verifies only the tokens of a draft that are worth their cost, "
        "`goodput` chooses K by measured acceptance. Compare them with the fixed K.",
    ),
    "acceptance": Question(
        "Why is my acceptance low?",
        "draftsim doctor 0.36,0.24,0.15,0.085 --against 0.72,0.475,0.295,0.17",
        "Give the server's `/metrics`, before and after, or its log in place of the numbers, and a "
        "recording, a published curve or `speculation_profile.json` as `--against`.",
    ),
    "capacity": Question(
        "How many replicas does it save?",
        f"draftsim capacity {CODER} --rate 24 --slo tpot=0.012 --policy fixed:gamma=2 "
        "--requests 200 --replications 2 --max-batch 16",
        "The first line says which policy needs the fewest replicas at the rate and SLO.",
    ),
    "trees": Question(
        "Is a tree better than a chain?",
        "draftsim simulate --trace smollm2-cpu --source eagle2:model=smollm2-eagle3 "
        "--policy fixed:gamma=3 --policy fixed:gamma=5 --resamples 100",
        "The tree accepts more tokens per round and verifies more nodes. Compare with the chain of "
        "the same head, `--source eagle:model=smollm2-eagle3`.",
    ),
    "thinking": Question(
        "Do thinking phases accept less?",
        f"draftsim simulate phases code=#73594..#73594 {CODER} "
        "--policy fixed:gamma=3 --resamples 100",
        "A phase is what lies between two markers in the output: here code between two fences, "
        "`#73594` in this tokenizer. With `--tokenizer DIR` markers are text: "
        "`'thinking=<think>..</think>' 'tool call=<tool_call>..</tool_call>'`.",
    ),
    "graphs": Question(
        "Which K fits the captured CUDA graphs?",
        f"draftsim serve {CODER} --policy fixed:gamma=2 "
        "--policy graph-aware:gamma=2 --batch 1,2,3 --requests 40",
        "A composed table pads passes to captured sizes, as vLLM does. `graph-aware` fills the "
        "padding with further drafts.",
    ),
}  # fmt: skip
"""The twelve questions, by name."""


def printed(command: str) -> str:
    """Return what a command prints, without the remarks of `PROVENANCE`.

    Raises RuntimeError if it fails.
    """
    lines: list[str] = []
    left_out = False
    for line in outputs.printed(command.removeprefix("draftsim ")).splitlines():
        # A remark's further lines are indented.
        left_out = bool(PROVENANCE.search(line)) or (left_out and line.startswith("  "))
        if not left_out:
            lines.append(line)
    return "\n".join(lines).strip("\n")


def questions() -> str:
    """Return every question with its command and the output of running it."""
    return "\n\n".join(
        f"## {number}. {q.asked}\n\n```\n{q.command}\n```\n\n```text\n{shown(q.command)}\n```\n\n"
        f"{q.reading}"
        for number, q in enumerate(QUESTIONS.values(), 1)
    )


def shown(command: str) -> str:
    """Return the first `MOST_LINES` lines of an output, without blank ends."""
    lines = [line.rstrip() for line in printed(command).splitlines()]
    cut = [*lines[:MOST_LINES], f"… {len(lines) - MOST_LINES} more lines"]
    return "\n".join(lines if len(lines) <= MOST_LINES + 1 else cut)
