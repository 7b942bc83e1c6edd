"""The examples in the README and in docstrings run and say what they print."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pandas as pd
import pytest

from commands.common.drafted import load_recording
from docs.engine_tables import checks, speedups, stepped_in_words
from docs.gpu_tables import measured_gpu
from docs.lossy_tables import lossy_rules
from docs.outputs import printed
from docs.pair_tables import ladder
from policies.registry import PLAIN
from simulator.validation import check_recording, noise_said
from tests.conftest import ROOT, Run
from traces.store.recordings import BUNDLED, find_latency, find_trace

SEEN = (
    {"qwen-coder-vllm-float32-avx512-cpu": (1, 4), "qwen-coder-vllm-float32-cpu": (8, 16)},
    (
        "fixed:gamma=2", "fixed:gamma=3", "gammatune", "gammatune-plus", "hf-heuristic",
        "confidence", "cm-asd", "svip", "rate-optimal",
    ),
)  # fmt: skip
"""README's first table: loads by recording, and policies."""
SPEEDUPS = r"Median errors: ([\d.]+)% of speedups \(worst (\d+)%\)"
"""How a page says the errors of an engine's speedups."""
PACKAGES = ("commands", "policies", "profiler", "simulator", "traces")
ON_GPU = ("llama-3.1-8b+1b-compiled", "llama-3.1-8b+1b-graph", "qwen2.5-coder-1.5b+0.5b-graph")
"""Recordings of the H200 whose error the page of accuracy states."""
WITH_EXAMPLES = [
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize(("page", "most"), [("README.md", 3), ("docs/policy.md", 5)])
def test_page_examples(page: str, most: int) -> None:
    results = doctest.testfile(str(ROOT / page), module_relative=False)
    assert results.attempted > most
    assert results.failed == 0


def test_the_policy_of_the_tutorial_is_its_example() -> None:
    shown = (ROOT / "docs" / "policy.md").read_text().split(">>> class ", 1)[1]
    lines = [line[4:].strip() for line in shown.splitlines() if line.startswith("... ")]
    file = (ROOT / "docs" / "examples" / "mine.py").read_text().partition("class ")[2]
    assert [line.strip() for line in file.splitlines()[1:] if line.strip()] == lines


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_docstring_examples(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_readmes_first_table_is_what_was_recorded() -> None:
    made = speedups(*SEEN).splitlines()
    shown = [line for line in _part("README.md", "seen").splitlines() if line.startswith("|")]
    assert shown == made
    rows = [row for name in SEEN[0] for row in checks(name, "engine-*.json")]
    assert all(row["rounds_differ"] == 0 for row in rows)
    assert all(row["iterations_differ"] == 0 for row in rows)
    # Its sentence about times is of the same checks.
    said = stepped_in_words(rows)
    median, worst = re.findall(SPEEDUPS, said)[0]
    assert f"the median error of a speedup is {median}% (worst {worst}%)" in _readme()


def test_the_readme_shows_what_its_commands_print() -> None:
    block = _part("README.md", "prints")
    shown = re.findall(r"^\$ draftsim (.+?)   # .*\n((?:(?!\$|```).+\n)+)", block, re.M)
    assert len(shown) == block.count("$ draftsim") >= 5
    for command, lines in shown:
        out = " ".join(printed(command).split())
        # A line of a table by itself; a sentence wherever the terminal ends its lines.
        tabular = lines.startswith("policy ")
        for said in lines.splitlines() if tabular else [lines]:
            words = " ".join(said.split())
            # Intervals of a fit are sampled; everything else is equal on every processor.
            same = _says(out, words) if command.startswith("recommend") else words in out
            assert same, command


def _says(out: str, said: str) -> bool:
    """Return True if `out` holds `said`, its numbers within 2%.

    On another processor the sampler of an interval adds in another order.
    """
    number = r"\d+(?:,\d{3})*(?:\.\d+)?"
    pattern = f"({number})".join(map(re.escape, re.split(number, said)))
    shown = [float(n.replace(",", "")) for n in re.findall(number, said)]
    return any(
        [float(n.replace(",", "")) for n in found.groups()] == pytest.approx(shown, rel=0.02)
        for found in re.finditer(pattern, out)
    )


def test_accuracy_is_what_was_recorded() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text()
    for name, files, line in (
        ("smollm2-vllm-eagle3-avx2-cpu", "engine-*.json", "EAGLE-3, float32"),
        ("smollm2-vllm-eagle3-cpu", "engine-*.json", "vLLM, EAGLE-3, bfloat16"),
        ("smollm2-vllm-draft-cpu", "engine-*.json", "vLLM, draft model, bfloat16"),
        ("qwen-coder-vllm-cpu", "engine-*.json", "vLLM, Qwen2.5-Coder, bfloat16"),
        ("qwen-coder-vllm-float32-cpu", "engine-*.json", "vLLM, Qwen2.5-Coder, float32"),
        (
            "qwen-coder-vllm-float32-avx512-cpu",
            "engine-*.json",
            "the same on a machine with AVX-512",
        ),
        ("qwen-coder-vllm-lookups-cpu", "engine-*.json", "vLLM, Qwen2.5-Coder, n-gram"),
        ("h100-vllm-llama-3.1-8b+1b", "engine-*.json", "vLLM on one H100, its default CUDA graphs"),
        ("smollm2-vllm-eagle3-cpu", "http-*.json", "HTTP server, EAGLE-3"),
    ):
        rows = checks(name, files)
        median, worst = re.findall(SPEEDUPS, stepped_in_words(rows))[0]
        [shown] = [x for x in page.splitlines() if line in x and x.startswith("|")]
        cells = [cell.strip() for cell in shown.split("|")]
        assert cells[3] == f"{median}%", shown
        assert cells[4] == f"{worst}%", shown
        assert all(row["rounds_differ"] == 0 for row in rows)


def test_the_repeated_check_of_the_real_pair_in_float32_is_as_the_log_says() -> None:
    page = " ".join((ROOT / "docs" / "log" / "qwen_coder.md").read_text().split())
    repeated = checks("qwen-coder-vllm-float32-avx512-cpu", "engine-closed-1-4-2.json")
    said = str(noise_said(repeated, PLAIN))
    [perfect] = re.findall(r"a perfect model would show ([\d.]+%) with the noise", said)
    assert f"what a perfect model would show with this noise ({perfect})" in page
    assert said.endswith("0 of 6 are on the wrong side of 1x")
    fast = [row["error"] for row in repeated]
    assert f"predicted {100 * min(fast):.0f} to {100 * max(fast):.0f}% too high there" in page


def test_the_check_of_the_real_pair_with_means_is_as_the_log_says() -> None:
    page = " ".join((ROOT / "docs" / "log" / "qwen_coder.md").read_text().split())
    rows = checks("qwen-coder-vllm-float32-avx512-cpu", "engine-closed-1-4-5.json")
    assert not any(row["rounds_differ"] or row["iterations_differ"] for row in rows)
    drafting = [row for row in rows if row["policy"] != PLAIN]
    assert all((row["speedup_predicted"] > 1) == (row["speedup"] > 1) for row in drafting)
    speedup = pd.Series([row["speedup_error"] for row in drafting]).abs().median()
    rate = pd.Series([row["error"] for row in rows]).abs().median()
    assert f"speedups within {speedup:.1%} (median), tokens/s within {rate:.1%}, and every" in page


def test_the_readme_is_one_screen() -> None:
    text = _readme()
    assert len(text.splitlines()) <= 95
    prose = re.sub(r"^```.*?^```|`[^`\n]+`|\]\([^)]*\)", "", text, flags=re.M | re.S)
    in_tables = re.compile(r"^\|.*$", re.M)
    for text, most in ((prose, 130), (in_tables.sub("", prose), 20)):
        assert len(re.findall(r"(?<![\w.-])\d[\d.,]*", text)) <= most


def test_the_readmes_gpu_table_is_what_was_recorded() -> None:
    made = measured_gpu("h200", brief=True)
    assert made in _readme()
    assert made.count("\n") == 6


def test_accuracy_on_a_gpu_is_what_was_recorded() -> None:
    rows = pd.concat([check_recording(BUNDLED / f"h200-{name}") for name in ON_GPU])
    errors = rows[rows["policy"] != PLAIN]["speedup_error"].abs()
    assert not rows["rounds_differ"].any()
    shown = f"| 0 of {len(rows)} runs | {errors.median():.1%} | {errors.max():.1%} |"
    assert shown in (ROOT / "docs" / "fidelity.md").read_text()


def test_the_logs_figures_of_the_real_pair_are_those_recorded() -> None:
    text = " ".join(_log().split())
    trace, latency = find_trace("smollm2-cpu"), find_latency("smollm2-cpu")
    cells = latency.cells.query("model == 'target' and phase == 'forward' and batch == 1")
    by_width = cells.pivot(index="context", columns="new_tokens", values="median_s")
    ratio = by_width[2] / by_width[1]
    assert f"takes {ratio.min():.1f} to {ratio.max():.1f} times one" in text
    first = {"draft model": (trace.run_lengths > 0).mean()}
    for name, source in HEADS.items():
        drafted = load_recording("smollm2-cpu", None, source)
        columns = drafted.trace.columns
        first[name] = (columns["accepted"][columns["offset"] == 0] > 0).mean()
    for name, share in first.items():
        assert f"| {name} | {share:.2f} |" in text


HEADS = {
    "EAGLE": "eagle:model=smollm2-eagle", "EAGLE-3": "eagle:model=smollm2-eagle3",
    "P-EAGLE": "parallel:model=smollm2-parallel,k=4", "MTP": "eagle:model=smollm2-mtp",
}  # fmt: skip
"""SmolLM2's drafters on features, by their names in the log."""


@pytest.mark.parametrize(
    ("recording", "name"),
    [
        *(("smollm2-cpu", name) for name in ("draft model", "EAGLE", "EAGLE-3")),
        *(("smollm2-drafters-cpu", n) for n in ("draft model", "EAGLE-3", "P-EAGLE", "MTP")),
    ],
)
def test_the_logs_ladder_is_what_simulate_prints(recording: str, name: str, run: Run) -> None:
    source = ("--source", HEADS[name]) if name in HEADS else ()
    every = run("simulate", "--trace", recording, *source, "--json", "-").rows
    lossless = [r for r in every if r["verify"] == "exact" and r["source"] == every[1]["source"]]
    best = next(r["speedup"] for r in lossless if "best fixed" in str(r["note"]))
    oracle = next(r["speedup"] for r in lossless if r["policy"].startswith("oracle"))
    drafting = max(
        r["speedup"] for r in lossless if r["accepted"] and not r["policy"].startswith("oracle")
    )
    ends = f"| {best:.2f}x | {drafting:.2f}x | {oracle:.2f}x |"
    part = next(p for p in _log().split("\n## ") if f"simulate --trace {recording}" in p)
    assert re.search(rf"^\| {name} \|.*{re.escape(ends)}$", part, re.M), ends


def test_the_pairs_ladder_has_lossless_policies_alone(run: Run) -> None:
    """A lossy row once stood as the best fixed length, above the oracle."""
    rows = [line.split("|")[1:-1] for line in ladder("qwen-coder-vllm-cpu").splitlines()[2:]]
    speedups = [
        [float(re.findall(r"([\d.]+) \(", cell)[0]) for cell in cells] for _, *cells in rows
    ]
    assert len(rows) > 10
    assert all(oracle > max(others) for *others, oracle in speedups)
    every = run("simulate", "--trace", "qwen-coder-vllm-cpu", "--json", "-").rows
    fixed = next(r for r in every if "best fixed" in str(r["note"]))
    assert f"{fixed['policy']}` {fixed['speedup']:.2f} (" in rows[0][1]


def test_modules_in_turn_are_priced_for_one_request_and_not_served(run: Run) -> None:
    source = ("--trace", "smollm2-drafters-cpu", "--source", "eagle:model=smollm2-mtp3")
    every = run("simulate", *source, "--json", "-").rows
    best = next(r["speedup"] for r in every if "best fixed" in str(r["note"]))
    oracle = next(r["speedup"] for r in every if r["policy"].startswith("oracle"))
    text = " ".join(_log().split())
    assert f"have {best:.2f}x with the best fixed length and {oracle:.2f}x with the oracle" in text
    ran = run("serve", *source, "--policy", "fixed:gamma=2", "--batch", "1")
    assert "modules run in turn" in ran.refusal


def test_the_logs_lookup_is_what_simulate_prints(run: Run) -> None:
    own = run("simulate", "--trace", "smollm2-cpu", "--policy", "ngram", "--json", "-").rows[1]
    text = f"{own['speedup']:.2f}x ({own['speedup_lo']:.2f} to {own['speedup_hi']:.2f})"
    assert f"`ngram` {text}" in _log()
    by = run(
        "simulate", "--trace", "smollm2-cpu", "--policy", "ngram", "--by-category", "--json", "-"
    ).rows
    ends = [r["speedup_lo"] for r in by if r["policy"] == "ngram" and r["category"]]
    assert f"in all {len(ends)} categories" in " ".join(_log().split())
    assert min(ends) > 1


def test_the_logs_category_is_what_simulate_prints(run: Run) -> None:
    source = ("--source", "eagle:model=smollm2-eagle3", "--policy", "fixed:gamma=3")
    found = run("simulate", "--trace", "smollm2-cpu", *source, "--by-category", "--json", "-").rows
    by = {r["category"]: r for r in found if r["policy"] == "fixed:gamma=3"}
    own = by["math_reasoning"]
    text = f"{own['speedup']:.2f}x ({own['speedup_lo']:.2f} to {own['speedup_hi']:.2f})"
    assert f"{text}, but {by['summarization']['speedup']:.2f}x in summaries" in _log()


def _readme() -> str:
    return (ROOT / "README.md").read_text()


def _part(page: str, part: str) -> str:
    return (ROOT / page).read_text().split(f"<!-- {part} -->")[1].split("<!-- end of")[0]


def _log() -> str:
    """The log page of the real pair."""
    return (ROOT / "docs" / "log" / "smollm2.md").read_text()


def test_what_the_page_says_of_lossy_rules_is_in_its_table() -> None:
    rows = [line.split("|")[1:-1] for line in lossy_rules("smollm2-cpu").splitlines()[2:]]
    speedup = {row[0].strip(" `").partition(":")[0]: float(row[2].split()[0]) for row in rows}
    stood = {row[0].strip(" `").partition(":")[0]: int(row[3].strip(" %")) for row in rows}
    assert list(speedup.values()) == sorted(speedup.values(), reverse=True)
    assert next(iter(speedup)) == "csd-scg"
    assert speedup["csd-scg"] > 1.5
    # The gate stops a third of what the memory alone would let stand.
    assert 0.3 < 1 - stood["csd"] / stood["csd-ocm"] < 0.4
