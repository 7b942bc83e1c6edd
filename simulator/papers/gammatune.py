"""GammaTune's experiments on our pair: its Table 2, taken apart in Appendix A."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.papers.ours import Ours, Row, experiment
from simulator.published import GAMMATUNE_2
from simulator.robustness import (
    STARTING,
    Families,
    GammaSeconds,
    families_of,
    robustness,
    seconds_at_each,
)
from traces.acceptance.trace import Trace

APPENDIX = "GammaTune Appendix A"
REFERENCE = "SpecDecode"
NOT_AT_HAND = "no figure of the appendix is at hand: ours alone"


def gammatune_families(trace: Trace) -> Families:
    """Return the methods of Table 2 as functions of the initial draft length, by its names."""
    found = families_of(trace, STARTING, fewest=1)
    names = zip(GAMMATUNE_2.cells, STARTING, strict=True)
    return found._replace(made={label: found.made[name] for label, name in names})


def gammatune_rows(ours: Ours) -> list[Row]:
    """Return the table 2, mean and sd over the initial draft lengths; and what these are made of.

    The appendix breaks the table's means down: by initial draft length, as speedups over plain
    decoding, and by prompt category (Spec-Bench's tasks in the paper), relative to the mean of
    fixed lengths in the same category.
    """
    families = gammatune_families(ours.trace)
    [seconds] = seconds_at_each(ours.trace, families.made, [ours.latency], families.gammas)
    note = f"speedup over no speculation; {NOT_AT_HAND}"
    by_gamma = [
        experiment(APPENDIX, f"initial gamma {gamma}", name, speedup, note)
        for name, gamma, speedup in seconds.speedups().itertuples(index=False)
    ]
    return [*_table_2(seconds, families.gammas), *by_gamma, *_by_category(seconds, ours)]


def _table_2(seconds: GammaSeconds, gammas: Sequence[int]) -> list[Row]:
    speedups = seconds.speedups()
    frame = robustness(speedups, REFERENCE).set_index("policy").astype(float)
    plain = speedups.groupby("policy")["speedup"].mean()
    return [
        experiment(
            GAMMATUNE_2.name, name, of_paper, dict(frame[column])[name],
            f"over {len(gammas)} initial gammas; {plain[name]:.2f}x no speculation",
        )
        for name in GAMMATUNE_2.cells
        for column, of_paper in (("mean", "average_mean"), ("sd", "average_sd"))
    ]  # fmt: skip


def _by_category(seconds: GammaSeconds, ours: Ours) -> list[Row]:
    names = [r.category for r in ours.trace.requests]
    note = f"mean over initial gammas, relative to {REFERENCE}'s in the category; {NOT_AT_HAND}"
    rows = []
    for category in dict.fromkeys(names):
        mine = [i for i, name in enumerate(names) if name == category]
        if not seconds.plain_s[mine].any():
            continue  # every output of it ended with its first token
        frame = robustness(seconds.speedups(mine), REFERENCE).set_index("policy")["mean"]
        rows += [
            experiment(APPENDIX, category, str(name), float(mean), note)
            for name, mean in frame.items()
        ]
    return rows
