"""Errors and coverage of `draftsim calibrate` on public runs that it was not given.

    python -m benchmarks.server_left_out [--each-run] [--terms | --widths] [--without COST ...]
        [--out FILE]

Studies are those of `../shared/tables` and of `simulator.published`.  From some runs
of a study every other run is predicted; with `--each-run` every run from all others of its study.
`coverage` is the part of the measured speeds that lie in the 80% intervals; `sign` counts how
often speculation is rightly called faster or slower than none, where that is by more than 5%;
`best K` how often the draft length predicted fastest is within 2% of the fastest measured.
`--without` takes costs as zero (names of `simulator.aggregate.server.COSTS`); `--terms` does so
with each term in turn, and prints what it is worth.  `--widths` prints, for each server, how wide
intervals have to be for 80% of its runs to lie inside, from a few runs and from all others,
relative to the draws', and the coverage with the width that the other servers need
(`simulator.aggregate.server.WIDTH`).  `--out` writes a CSV with a row per study, or per server.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from simulator.aggregate.hazard import interval_of
from simulator.aggregate.server import ServerRun, Target, calibrate
from simulator.published import ENGINE_STUDIES, RTX3090, RTX3090_PLAIN

ALL = "all studies"
LEVEL = 0.8
SERVERS = ("A100", "vLLM 32628", "RTX 3090")
"""Servers with 20 predicted runs and more, by the beginning of their studies' names."""
CLEAR, NEAR = 0.05, 0.02
"""Gains and losses that count as clear, and a draft length's speed that counts as the best."""
TERMS = {
    "all terms": (),
    "without what speculation costs whatever K": ("speculating", "speculating_sequence"),
    "without prompts": ("prefill",),
    "without either": ("speculating", "speculating_sequence", "prefill"),
    "without costs per request": ("sequence", "draft_sequence", "speculating_sequence"),
}
"""Costs taken as zero, by what the model lacks then."""
TABLES = Path(__file__).resolve().parents[2] / "shared" / "tables"
GPT_OSS_120B = Target(experts=(128, 4))
"""Experts of the thread 32628, and how many a token chooses (openai/gpt-oss-120b)."""
LLAMACPP = Target(vectors=True)
Given = Callable[[ServerRun], bool]


class Study(NamedTuple):
    """Runs of one server, and which of them are given."""

    name: str
    runs: list[ServerRun]
    given: Given
    target: Target = Target()
    passes: int | None = None


class Missed(NamedTuple):
    """A run that was not given."""

    run: ServerRun
    error: float
    held: bool
    width: float
    """Upper over lower end of the interval."""
    needed: float
    """Width, relative to the draws', at which the run is at the end of its interval."""


def studies() -> Iterator[tuple[str, list[Study]]]:
    """Yield studies by name, with the design of the runs that are given."""
    a100 = list(_a100())
    for design in ((1, 8), (1, 8, 32)):
        yield (
            f"A100, EAGLE-3, from concurrency {', '.join(map(str, design))}",
            [Study(name, runs, lambda run, d=design: run.batch in d) for name, runs in a100],
        )
    eagle = eagle3_runs()
    for lengths, batches in (((3, 8), (1, 2, 8)), ((3, 5), (1, 2, 8)), ((3, 8), (1, 8))):
        yield f"vLLM 32628, from K = {lengths} at {batches}", [Study(
            "32628", eagle, lambda r, k=lengths, b=batches: r.k in k and r.batch in b, GPT_OSS_120B
        )]  # fmt: skip
    for name, ladder in RTX3090.items():
        runs = [ServerRun(1, 0, RTX3090_PLAIN)]
        runs += [
            ServerRun(1, k, one.tokens_per_s, emitted=one.emitted) for k, one in ladder.items()
        ]
        given = sorted(ladder)[:2]
        yield (
            f"RTX 3090 {name}, from none and K = {given}",
            [
                Study(
                    name,
                    runs,
                    lambda run, g=given: run.k in (0, *g),
                    LLAMACPP,
                )
            ],
        )
    for study, loads in ENGINE_STUDIES.items():
        for load, of in loads.items():
            told = {k: r.emitted for k, r in of.items() if k and not math.isnan(r.emitted)}
            runs = [ServerRun(load, k, r.tokens_per_s, emitted=told.get(k))
                    for k, r in of.items()]  # fmt: skip
            yield (
                f"{study}, K = 3 from none and 1",
                [Study(study, runs, lambda run: run.k != 3)],
            )


def _a100() -> Iterator[tuple[str, list[ServerRun]]]:
    table = pd.read_csv(TABLES / "a100_eagle3_vllm_concurrency.csv", comment="#")
    keys = ["w", "kv", "wl"]
    means = table.groupby([*keys, "spec", "c"], as_index=False)[["tps", "tau"]].mean()
    for key, rows in means.groupby(keys):
        yield (
            " ".join(map(str, key)),
            [
                ServerRun(int(c), 0, tps)
                if spec == "none"
                else ServerRun(int(c), 5, tps, emitted=tau)
                for spec, c, tps, tau in rows[["spec", "c", "tps", "tau"]].itertuples(index=False)
            ],
        )


def eagle3_runs() -> list[ServerRun]:
    table = pd.read_csv(TABLES / "vllm_pr32628_eagle3_humaneval.csv", comment="#")
    runs = []
    for row in table.to_dict("records"):
        k = int(row["k"])
        accepted = tuple(float(row[f"p{i}"]) for i in range(k))
        runs += [ServerRun(c, k, float(row[f"c{c}"]), accepted=accepted) for c in (1, 2, 4, 8)]
    return runs


class Result(NamedTuple):
    """Predictions of runs that were not given."""

    missed: list[Missed]
    signs: list[bool]
    """True for each clear gain or loss that was predicted as such."""
    best: list[bool]
    """True for each load whose draft length predicted fastest is near the fastest measured."""

    def joined(self, other: Result) -> Result:
        """Return both together."""
        return Result(self.missed + other.missed, self.signs + other.signs, self.best + other.best)


NOTHING = Result([], [], [])


def left_out(study: Study, without: Collection[str] = ()) -> Result:
    """Return every run that was not given, predicted from those that were."""
    given = [run for run in study.runs if study.given(run)]
    return _predicted(study, given, [r for r in study.runs if not study.given(r)], without)


def each_run(study: Study, without: Collection[str] = ()) -> Result:
    """Return every run, predicted from all others of its study."""
    found = NOTHING
    for run in study.runs:
        others = [other for other in study.runs if other is not run]
        if len(others) > 1:
            found = found.joined(_predicted(study, others, [run], without))
    return found


def _predicted(
    study: Study, given: list[ServerRun], asked: list[ServerRun], without: Collection[str]
) -> Result:
    runs = study.runs
    server = calibrate(given, passes=study.passes, without=without, target=study.target)
    missed, signs, best = [], [], []
    plain = {run.batch: run.tokens_per_s for run in runs if run.k == 0}
    for run in asked:
        load = (run.batch, run.k, run.held, run.prompts)
        speeds = server.tokens_per_s(*load)
        found = interval_of(speeds, LEVEL)
        drawn = interval_of(replace(server, width=1.0).tokens_per_s(*load), LEVEL)
        end = drawn.high if run.tokens_per_s > drawn.value else drawn.low
        missed.append(Missed(
            replace(run), found.value / run.tokens_per_s - 1, found.holds(run.tokens_per_s),
            found.high / found.low,
            float(np.log(run.tokens_per_s / drawn.value) / np.log(end / drawn.value)),
        ))  # fmt: skip
        if run.k and run.batch in plain:
            true = run.tokens_per_s / plain[run.batch]
            plain_speeds = server.tokens_per_s(run.batch, 0, run.held, run.prompts)
            gain = float(np.median(speeds / plain_speeds))
            if abs(true - 1) > CLEAR:
                signs.append((gain > 1) == (true > 1))
    for batch in {run.batch for run in asked}:
        here = [run for run in runs if run.batch == batch]
        if len({run.k for run in here}) > 2:
            chosen = max(here, key=lambda r: float(np.median(
                server.tokens_per_s(r.batch, r.k, r.held, r.prompts)
            )))  # fmt: skip
            fastest = max(run.tokens_per_s for run in here)
            best.append(chosen.tokens_per_s >= (1 - NEAR) * fastest)
    return Result(missed, signs, best)


def main() -> None:
    """Print a line per study and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--each-run", action="store_true")
    parser.add_argument("--terms", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--widths", action="store_true")
    asked = parser.parse_args()
    if asked.widths:
        table = pd.DataFrame(widths(_needed()))
        print(table.to_string(index=False, float_format="{:.2f}".format))
        if asked.out is not None:
            table.to_csv(asked.out, index=False, float_format="%.3g")
        return
    held_out = each_run if asked.each_run else left_out
    terms = TERMS if asked.terms else {"all terms": tuple(asked.without)}
    rows: list[dict[str, Any]] = []
    for name, without in terms.items():
        everything, seen = NOTHING, set()
        for study, parts in studies():
            results = NOTHING
            for part in parts:
                # Designs differ in what is given, which leaving each run out does not ask.
                if not (asked.each_run and part.name in seen):
                    results = results.joined(held_out(part, without))
                seen.add(part.name)
            everything = everything.joined(results)
            if results.missed:
                label = re.split(r", (?:from|K =) ", study)[0] if asked.each_run else study
                rows.append({"terms": name, "study": label, **summary(results)})
                if not asked.terms:
                    print_row(rows[-1])
        rows.append({"terms": name, "study": ALL, **summary(everything)})
        print_row(rows[-1])
    if asked.out is not None:
        pd.DataFrame(rows).to_csv(asked.out, index=False, float_format="%.4g")


def _needed() -> dict[str, list[float]]:
    """Return by server the widths at which single runs are at the ends of their intervals."""
    needed: dict[str, list[float]] = {name: [] for name in SERVERS}
    seen = set()
    for study, parts in studies():
        server = next((name for name in SERVERS if study.startswith(name)), None)
        for part in parts if server is not None else ():
            results = left_out(part)
            if part.name not in seen:
                results = results.joined(each_run(part))
            seen.add(part.name)
            needed[str(server)] += [one.needed for one in results.missed]
    return needed


def widths(needed: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return by server the width that it needs, that of the others, and its coverage with that.

    A width for several servers is the narrowest at which `LEVEL` of the runs of each are inside.
    """
    own = {name: float(np.quantile(runs, LEVEL)) for name, runs in needed.items()}
    rows = []
    for name, runs in needed.items():
        others = max(width for other, width in own.items() if other != name)
        covered = float(np.mean(np.array(runs) <= others))
        rows.append({
            "server": name, "runs": len(runs), "needs": own[name], "others_need": others,
            "coverage": covered,
        })  # fmt: skip
    return rows


def summary(found: Result) -> dict[str, float]:
    """Return errors, coverage and widths of the predictions, and the counts of right ones."""
    errors = np.abs([one.error for one in found.missed])
    return {
        "runs": len(errors), "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "coverage": float(np.mean([one.held for one in found.missed])),
        "width": float(np.median([one.width for one in found.missed])),
        "signs_right": sum(found.signs), "signs": len(found.signs),
        "best_right": sum(found.best), "best": len(found.best),
    }  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    """Print the figures of a study."""
    print(
        f"{row['terms']}, {row['study']}: {row['runs']} runs, |error| median "
        f"{row['median_error']:.1%}, largest {row['largest_error']:.1%}, coverage "
        f"{row['coverage']:.0%}, width {row['width']:.2f}, sign {row['signs_right']} of "
        f"{row['signs']}, best K {row['best_right']} of {row['best']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
