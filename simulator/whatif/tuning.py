"""A policy's own parameters, searched on some prompts and judged on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from policies.core import DraftPolicy
from policies.from_file import split_name
from policies.registry import describe
from policies.spec import as_text
from simulator.chosen import load_policies
from simulator.pricing import autoregressive, price
from simulator.summary import summarize, to_rows
from simulator.whatif.ladder import split_prompts
from simulator.whatif.sweep.grid import search_space
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of a search.

    Attributes
    ----------
    best:
        The policy with the parameters of most tokens per second in training.
    text:
        Its text form.
    tried:
        Every setting by falling training speedup: its parameters, ``train_speedup``.
    held_out:
        Rows of `simulator.summary.summarize` on the prompts held out: plain decoding, the
        policy as it was given, and tuned.
    """

    best: DraftPolicy
    text: str
    tried: pd.DataFrame
    held_out: pd.DataFrame


def tune(
    trace: Trace,
    latency: LatencyTable,
    policy: str,
    space: Mapping[str, Sequence[Any]],
    *,
    seed: int = 0,
    jobs: int = 1,
    resamples: int = 1000,
) -> Tuning:
    """Search the parameters of `policy` (its text form) over `space`, name -> values.

    All combinations are tried but those that the policy refuses, on one half of the prompts
    (`split_prompts`).  The setting the policy comes with is always among those tried, so that
    tuning cannot lose in training.

    Raises
    ------
    DraftsimError
        If the space is empty, a parameter is unknown, or no combination is possible.
    """
    import joblib

    if not space or any(len(values) == 0 for values in space.values()):
        raise DraftsimError("the space to search is empty: give every parameter some values")
    grid = [dict(zip(space, values, strict=True)) for values in product(*space.values())]
    made: list[tuple[dict[str, Any], DraftPolicy]] = [({}, _make(policy, {}, trace))]
    refused = ""
    for setting in grid:
        try:
            made.append((setting, _make(policy, setting, trace)))
        except DraftsimError as error:
            refused = str(error)
    if len(made) == 1:
        raise DraftsimError(f"no combination of the space is possible: {refused}")
    learned, tested = (trace.select(half) for half in split_prompts(trace, seed))
    candidates = [candidate for _, candidate in made]
    [first] = replay_many(learned, {"": candidates[0]})
    plain = price(autoregressive(first), latency).total_s
    count = min(joblib.effective_n_jobs(jobs), len(candidates))
    shares = [candidates[i::count] for i in range(count)]
    found: Any = joblib.Parallel(n_jobs=count)(
        joblib.delayed(_seconds)(learned, latency, share) for share in shares
    )
    speedups = [0.0] * len(candidates)
    for i, share in enumerate(found):
        speedups[i::count] = [plain / s for s in share]
    best = int(np.argmax(speedups))
    tried = pd.DataFrame(
        [{**{n: s.get(n) for n in space}, "train_speedup": v}
         for (s, _), v in zip(made, speedups, strict=True)]
    ).sort_values("train_speedup", ascending=False, kind="stable", ignore_index=True)  # fmt: skip
    tuned = made[best][1]
    arms = {describe(made[0][1]): made[0][1], describe(tuned): tuned}
    logs = list(replay_many(tested, arms))
    judged = summarize(logs, latency, resamples=resamples, seed=seed)
    return Tuning(tuned, describe(tuned), tried, judged)


def tuned_rows(
    trace: Trace, latency: LatencyTable, texts: Sequence[str], *, resamples: int, seed: int,
    jobs: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return per policy the setting it came with and the best found, on the prompts held out.

    `texts` name the values to try in braces.  ``tried`` is the number of settings searched and
    ``train_speedup`` the best one's speedup on the prompts it was searched on.

    Raises
    ------
    DraftsimError
        If a text has no braces, or there is none, or its search is impossible.
    """
    if not texts:
        raise DraftsimError("a search needs a policy with values in braces: name one")
    rows: list[dict[str, Any]] = []
    for text in texts:
        name, space = search_space(text)
        if not space:
            raise DraftsimError(
                f"a search tries values in braces, which {text!r} has none of: "
                "write them as in gammatune:eta={0.1,0.3,0.5}"
            )
        found = tune(trace, latency, name, space, resamples=resamples, seed=seed, jobs=jobs)
        for row in to_rows(found.held_out)[1 if rows else 0 :]:
            best = row["policy"] == found.text
            rows.append(
                {
                    **row, "tried": len(found.tried) if best else None,
                    "train_speedup": float(found.tried["train_speedup"][0]) if best else None,
                }
            )  # fmt: skip
    return rows


def _make(policy: str, setting: Mapping[str, Any], trace: Trace) -> DraftPolicy:
    given = ",".join(f"{name}={as_text(value)}" for name, value in setting.items())
    name, known = split_name(policy)
    known = ",".join(part for part in (known, given) if part)
    [(_, made)] = load_policies([f"{name}:{known}" if known else name], trace)
    return made


def _seconds(trace: Trace, latency: LatencyTable, policies: Sequence[DraftPolicy]) -> list[float]:
    named = [("", policy) for policy in policies]
    return [price(log, latency).total_s for log in replay_many(trace, named)]
