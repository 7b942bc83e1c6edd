"""A policy's own parameters, searched on some prompts and judged on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from policies.core import DraftPolicy
from policies.from_file import split_name
from policies.registry import describe
from policies.spec import as_text, assignments
from simulator.chosen import load_policies
from simulator.pricing import autoregressive, price
from simulator.summary import price_all, summarize_runs, to_rows
from simulator.whatif.axes import search_space
from simulator.whatif.ladder import split_prompts
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many


def tune(
    trace: Trace,
    latency: LatencyTable,
    policy: str,
    space: Mapping[str, Sequence[Any]],
    *,
    seed: int = 0,
    jobs: int = 1,
    resamples: int = 1000,
) -> list[dict[str, Any]]:
    """Search the parameters of `policy` (its text form) over `space`, name -> values.

    All combinations are tried but those that the policy refuses, on one half of the prompts
    (`split_prompts`), and the policy's default is tried, too.  Returns rows of
    `simulator.summary.summarize` on the prompts held out: plain decoding, the default, and the
    combination of most tokens per second in training, both named with their values of `space`.
    ``train_speedup`` is the speedup in training, ``tried`` the number of settings.  ``unpriced``
    names what the table has no cells of.

    Raises DraftsimError if the space is empty, a parameter is unknown, or no combination is
    possible.
    """
    import joblib

    if not space or any(len(values) == 0 for values in space.values()):
        raise DraftsimError("the space to search is empty: give every parameter some values")
    candidates = [_make(policy, {}, trace, latency)]
    refused = ""
    for values in product(*space.values()):
        try:
            setting = dict(zip(space, values, strict=True))
            candidates.append(_make(policy, setting, trace, latency))
        except DraftsimError as error:
            refused = str(error)
    if len(candidates) == 1:
        raise DraftsimError(f"no combination of the space is possible: {refused}")
    learned, tested = (trace.select(half) for half in split_prompts(trace, seed))
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
    best = 1 + int(np.argmax(speedups[1:]))
    compared = {_named(candidates[i], space): candidates[i] for i in (0, best)}
    runs = price_all(list(replay_many(tested, compared)), latency)
    judged = to_rows(summarize_runs(runs, resamples=resamples, seed=seed))
    told: dict[str, tuple[int | None, float]] = {
        _named(candidates[0], space): (None, speedups[0]),
        _named(candidates[best], space): (len(candidates), speedups[best]),
    }
    rows = []
    for row, run in zip(judged, runs, strict=True):
        tried, trained = told.get(row["policy"], (None, None))
        both = {"tried": tried, "train_speedup": trained}
        rows.append({**row, **both, "unpriced": run.unpriced(latency)})
    return rows


def tuned_rows(
    trace: Trace, latency: LatencyTable, texts: Sequence[str], *, resamples: int, seed: int,
    jobs: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of `tune` for each policy, those of plain decoding once.

    `texts` name the values to try in braces.

    Raises DraftsimError if a text has no braces, or there is none, or its search is impossible.
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
        if split_name(name)[0] == "all":
            raise DraftsimError("a search is of one policy: name it instead of all")
        found = tune(trace, latency, name, space, resamples=resamples, seed=seed, jobs=jobs)
        rows += found[1:] if rows else found
    return rows


def _named(policy: DraftPolicy, space: Mapping[str, Sequence[Any]]) -> str:
    """Return the text form of `policy` with its values of `space`, also where they are defaults."""
    name, given = split_name(describe(policy))
    known = assignments(given, f"policy {name!r}")
    inner = getattr(policy, "policy", policy)
    values = [
        f"{key}={as_text(getattr(inner, key))}"
        for key in space if key not in known and hasattr(inner, key)
    ]  # fmt: skip
    return ":".join(filter(None, (name, ",".join(filter(None, (given, *values))))))


def _make(
    policy: str, setting: Mapping[str, Any], trace: Trace, latency: LatencyTable
) -> DraftPolicy:
    given = ",".join(f"{name}={as_text(value)}" for name, value in setting.items())
    name, known = split_name(policy)
    known = ",".join(part for part in (known, given) if part)
    text = f"{name}:{known}" if known else name
    [(_, made)] = load_policies([text], trace, latency=latency)
    return made


def _seconds(trace: Trace, latency: LatencyTable, policies: Sequence[DraftPolicy]) -> list[float]:
    named = [("", policy) for policy in policies]
    return [price(log, latency).total_s for log in replay_many(trace, named)]
