"""Errors and coverage of `draftsim calibrate` on public runs that it was not given.

    python -m benchmarks.server_left_out [--without COST ...]

Studies are those of `../shared/tables` and of `simulator.papers.measured.figures`.  From some runs
of a study every other run is predicted; `coverage` is the part of the measured speeds that lie in
the 80 % intervals, `sign` how often speculation is called faster or slower than none, rightly.
`--without` takes costs as zero (names of `simulator.aggregate.server.COSTS`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from simulator.aggregate.server import ServerRun, calibrate, interval_of
from simulator.papers.measured.figures import ENGINE_STUDIES, RTX3090, RTX3090_PLAIN

TABLES = Path(__file__).resolve().parents[2] / "shared" / "tables"
Given = Callable[[ServerRun], bool]


class Study(NamedTuple):
    """Runs of one server, and which of them are given."""

    name: str
    runs: list[ServerRun]
    given: Given


class Missed(NamedTuple):
    """A run that was not given."""

    run: ServerRun
    error: float
    held: bool
    width: float
    """Upper over lower end of the interval."""


def studies() -> Iterator[tuple[str, list[Study]]]:
    """Studies by name, with the design of the runs that are given."""
    a100 = list(_a100())
    for design in ((1, 8), (1, 8, 32)):
        yield (
            f"A100, EAGLE-3, from concurrency {', '.join(map(str, design))}",
            [Study(name, runs, lambda run, d=design: run.batch in d) for name, runs in a100],
        )
    eagle = eagle3_runs()
    for lengths, batches in (((3, 8), (1, 2, 8)), ((3, 5), (1, 2, 8)), ((3, 8), (1, 8))):
        yield f"vLLM 32628, from K = {lengths} at {batches}", [Study(
            "32628", eagle, lambda r, k=lengths, b=batches: r.k in k and r.batch in b
        )]  # fmt: skip
    for name, ladder in RTX3090.items():
        runs = [ServerRun(1, 0, RTX3090_PLAIN)]
        runs += [
            ServerRun(1, k, one.tokens_per_s, emitted=one.emitted) for k, one in ladder.items()
        ]
        given = sorted(ladder)[:2]
        yield (
            f"RTX 3090 {name}, from none and K = {given}",
            [Study(name, runs, lambda run, g=given: run.k in (0, *g))],
        )
    for study in ENGINE_STUDIES:
        for load, of in study.runs.items():
            runs = [ServerRun(load, k, r.tokens_per_s, emitted=r.emitted if k else None)
                    for k, r in of.items()]  # fmt: skip
            yield (
                f"{study.name}, K = 3 from none and 1",
                [Study(study.name, runs, lambda run: run.k != 3)],
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


def left_out(study: Study, without: list[str]) -> tuple[list[Missed], list[bool]]:
    """Every run that was not given, and whether the sign of each of their speedups is right."""
    given = [run for run in study.runs if study.given(run)]
    server = calibrate(given, without=without)
    missed, signs = [], []
    plain = {run.batch: run.tokens_per_s for run in study.runs if run.k == 0}
    for run in study.runs:
        if study.given(run):
            continue
        speeds = server.tokens_per_s(run.batch, run.k)
        found = interval_of(speeds, 0.8)
        missed.append(Missed(
            replace(run), found.value / run.tokens_per_s - 1, found.holds(run.tokens_per_s),
            found.high / found.low,
        ))  # fmt: skip
        if run.k and run.batch in plain:
            gain = float(np.median(speeds / server.tokens_per_s(run.batch, 0)))
            signs.append((gain > 1) == (run.tokens_per_s > plain[run.batch]))
    return missed, signs


def main() -> None:
    """Print a line per study and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--without", nargs="*", default=[])
    without = parser.parse_args().without
    everything: list[Missed] = []
    for name, parts in studies():
        results = [left_out(part, without) for part in parts]
        missed = [one for found, _ in results for one in found]
        signs = [sign for _, found in results for sign in found]
        everything += missed
        _print(name, missed, signs)
    _print("all", everything, [])


def _print(name: str, missed: list[Missed], signs: list[bool]) -> None:
    errors = np.abs([one.error for one in missed])
    line = (
        f"{name}: {len(missed)} runs, |error| median {np.median(errors):.1%}, largest "
        f"{errors.max():.1%}, coverage {np.mean([one.held for one in missed]):.0%}, "
        f"width {np.median([one.width for one in missed]):.2f}"
    )
    print(line + (f", sign {sum(signs)} of {len(signs)}" if signs else ""), flush=True)


if __name__ == "__main__":
    main()
