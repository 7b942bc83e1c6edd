"""Regrets are against the same references, whatever policies a sweep asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies import DraftPolicy, Fixed, HFHeuristic, Oracle
from simulator.executors import Local
from simulator.whatif.sweep.cells import references
from simulator.whatif.sweep.prices import Prices
from simulator.whatif.sweep.run import Sweep
from tests.studies import TABLE, recorded
from traces.acceptance.synthetic import synthetic_trace

ADAPTIVE: dict[str, DraftPolicy] = {"hf-heuristic": HFHeuristic(gamma_max=20)}
REGRETS = ["best_fixed", "best_gamma", "oracle", "regret_fixed", "regret_oracle", "adapting"]


def swept(policies: dict[str, DraftPolicy], **changes: Any) -> Any:
    given: dict[str, Any] = {
        "alphas": (0.5, 0.8), "batches": (1, 3), "resamples": 4, "measure_tilt": False,
    } | changes  # fmt: skip
    prices = Prices((0.02, 0.3), {"here": TABLE}, (None, 500))
    return Sweep(recorded(), policies, prices, **given).run(Local(1))


def test_regrets_do_not_hang_on_the_policies_asked_for() -> None:
    ladder: dict[str, DraftPolicy] = {f"fixed:gamma={g}": Fixed(g) for g in range(1, 13)}
    bound = Oracle(gamma_max=recorded().max_gamma)
    alone, among = swept(ADAPTIVE), swept({**ladder, **ADAPTIVE, "oracle": bound})
    assert set(alone["policy"]) == {"hf-heuristic"}
    own = among[among["policy"] == "hf-heuristic"].reset_index(drop=True)
    assert len(alone) == 2 * 2 * 4 == len(own)
    for column in REGRETS:
        np.testing.assert_allclose(alone[column], own[column], err_msg=column)
    point = ["alpha_asked", "c", "latency", "batch", "context"]
    fixed = among[among["family"] == "fixed"].fillna({"c": -1.0, "context": -1.0})
    best = fixed.groupby(point, observed=True)["speedup"].max().clip(lower=1.0)
    keys = own.fillna({"c": -1.0, "context": -1.0}).set_index(point).index
    np.testing.assert_allclose(own["best_fixed"], best.loc[keys])
    np.testing.assert_allclose(own["regret_fixed"], 1 - own["speedup"] / own["best_fixed"])
    # One fixed length is not the best of those there are.
    single = swept({"fixed:gamma=5": Fixed(5)})
    assert (single["regret_fixed"] > 0).any()
    assert (single["regret_fixed"] >= 0).all()


def test_what_is_asked_for_is_not_replayed_twice() -> None:
    trace = recorded()
    names = {f"fixed:gamma={g}" for g in range(1, 13)} | {"oracle"}
    assert set(references(trace, ADAPTIVE)) == names
    bound = Oracle(gamma_max=trace.max_gamma)
    given: dict[str, DraftPolicy] = {"fixed": Fixed(5), "oracle:gamma_max=24": bound}
    assert set(references(trace, given)) == names - {"fixed:gamma=5", "oracle"}
    # A policy of that name which is another one keeps it.
    assert "oracle" not in references(trace, {"oracle": Oracle("run+1")})


def test_references_end_where_the_recording_does() -> None:
    short = synthetic_trace(0.6, requests=4, tokens=40, concentration=8.0, max_gamma=5)
    found = references(short, {})
    assert list(found) == [*(f"fixed:gamma={g}" for g in range(1, 6)), "oracle"]
    frame = Sweep(short, {"hf": HFHeuristic(gamma_max=5)}, Prices((0.1,))).run(Local(1))
    assert frame["best_fixed"].notna().all()
    assert frame["adapting"].notna().all()
