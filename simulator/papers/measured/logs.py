"""Logs of whole benchmarks on GPUs: one half of the turns is predicted from the other.

Both halves are taken in turn, by question, so that each is of every category.  What a round takes
is fitted to the one half's turns; the other half's seconds are predicted once from its own rounds,
which tests the cost alone, and once from its tokens alone, which is what a user knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from policies.arrays import Floats
from simulator.papers.measured.rows import Evidence, evidence, ranked
from traces.errors import DraftsimError
from traces.importers import eagle, specbench
from traces.importers.rows import LoggedTurn
from traces.latency.interpolate import non_negative

EAGLE = ("eagle_logs/llama-2-chat-70b-ea.jsonl", "eagle_logs/llama-2-chat-70b-base.jsonl")
SPECBENCH = (
    "specbench_logs/vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl",
    "specbench_logs/vicuna-7b-v1.3-vanilla-float16-temp-0.0.jsonl",
)
EAGLE_STUDY = "EAGLE, Llama-2-70B, four A100 (SafeAILab/EAGLE, Apache-2.0)"
SPECBENCH_STUDY = "Spec-Bench, Vicuna-7B + 68M (yukiki-jc/Spec-Bench, Apache-2.0)"
COST, BEFOREHAND = "half the turns, and the others' rounds", "half the turns"


def log_rows(folder: Path, needed: bool = True) -> list[Evidence]:
    """Return rows of the logs found in `folder`, laid out as `EAGLE` and `SPECBENCH` name them.

    Raises DraftsimError if it holds neither pair of logs and they are `needed`, or one is damaged.
    """
    rows: list[Evidence] = []
    if (turns := read_eagle(folder)) is not None:
        rows += _halves(EAGLE_STUDY, *turns, categories=False)
    if all((folder / name).is_file() for name in SPECBENCH):
        spec, plain = (_frame(specbench.read_turns(folder / name)[0]) for name in SPECBENCH)
        rows += _halves(SPECBENCH_STUDY, spec, plain, categories=True)
    if not rows and needed:
        raise DraftsimError(
            f"--logs {folder}: holds neither {EAGLE[0]} nor {SPECBENCH[0]} together with its plain "
            "run: name the folder that holds them"
        )
    return rows


def read_eagle(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Read EAGLE's turns with speculation and without; None if `folder` does not hold both logs.

    Raises DraftsimError if one is damaged.
    """
    if not all((folder / name).is_file() for name in EAGLE):
        return None
    spec, plain = (_frame(eagle.read_turns(folder / name)) for name in EAGLE)
    plain["tokens"] = plain["rounds"]
    return spec, plain


def _frame(turns: Sequence[LoggedTurn]) -> pd.DataFrame:
    """Return a row for each turn of a log: question, category, rounds, tokens and seconds."""
    rows = [(t.question, t.category, float(t.rounds), float(t.tokens), t.wall_s) for t in turns]
    return pd.DataFrame(rows, columns=["question", "category", "rounds", "tokens", "seconds"])


def _halves(
    study: str, spec: pd.DataFrame, plain: pd.DataFrame, *, categories: bool
) -> Iterator[Evidence]:
    odd = pd.Series(pd.factorize(spec["question"])[0] % 2 == 1)
    for name, known in (("even questions", ~odd), ("odd questions", odd)):
        given, asked = spec[known], spec[~known]
        same = plain["question"].isin(given["question"])
        step, others = _fit(plain[same], "tokens"), plain[~same]
        round_s = _fit(given, "rounds")
        plain_s = _seconds(step, others, others["tokens"]).sum()
        yield evidence(
            study, f"{COST}: {name}", "seconds of plain decoding", plain_s, others["seconds"].sum()
        )
        cost = _seconds(round_s, asked, asked["rounds"])
        yield evidence(
            study, f"{COST}: {name}", "seconds with speculation", cost.sum(),
            asked["seconds"].sum(),
        )  # fmt: skip
        per_round = given["tokens"].sum() / given["rounds"].sum()
        guess = _seconds(round_s, asked, asked["tokens"] / per_round)
        own_s = _seconds(step, asked, asked["tokens"])
        kind = f"{COST}, by category" if categories else COST
        for label, spec_s, apart in ((kind, cost, categories), (BEFOREHAND, guess, False)):
            rows = _speedups(study, f"{label}: {name}", asked, spec_s, own_s, others, apart)
            yield from ranked(list(rows))


def _speedups(
    study: str, given: str, asked: pd.DataFrame, spec_s: Floats, plain_s: Floats,
    plain: pd.DataFrame, categories: bool,
) -> Iterator[Evidence]:  # fmt: skip
    """Yield speed over plain decoding's, of all turns and by category: tokens/s over tokens/s."""
    for name in ["all", *sorted(set(asked["category"]))] if categories else ["all"]:
        mine, theirs = (
            (name == "all") | (turns["category"] == name).to_numpy() for turns in (asked, plain)
        )
        speed, its = (
            turns["tokens"].sum() / turns["seconds"].sum() for turns in (asked[mine], plain[theirs])
        )
        predicted = plain_s[mine].sum() / spec_s[mine].sum()
        yield evidence(
            study, given, f"speedup, {name}", float(predicted), float(speed / its), plain=1.0
        )


def _design(turns: pd.DataFrame, steps: pd.Series) -> Floats:
    """Return a turn's own time, its steps, and its steps times the context its output adds."""
    columns = np.ones(len(turns)), steps, steps * turns["tokens"] / 2
    return np.stack(columns, axis=1)


def _fit(turns: pd.DataFrame, steps: str) -> Floats:
    """Return seconds of a turn, of a step, and of a step per token in the cache; none negative."""
    weight = 1 / turns["seconds"].to_numpy()[:, None]
    return non_negative(_design(turns, turns[steps]) * weight, np.ones(len(turns)))


def _seconds(fitted: Floats, turns: pd.DataFrame, steps: pd.Series) -> Floats:
    """Return the seconds of turns of that many steps each."""
    return np.asarray(_design(turns, steps) @ fitted)
