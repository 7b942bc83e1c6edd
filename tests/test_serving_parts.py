"""A study of serving in parts: processes, resuming, fleets on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from policies.lengths.basic import Autoregressive, Fixed
from simulator.executors import Local
from simulator.serving import (
    LeastRequests,
    Limits,
    Poisson,
    RoundRobin,
    Scenario,
    over_batches,
    over_rates,
    read_results,
    sweep,
)
from simulator.serving.study import shares_of
from tests.compiled import same
from tests.conftest import Serve
from tests.serving import CONSTANT, PAIR, SMALL, arrival_file
from tests.studies import Failing
from traces.errors import DraftsimError

POLICIES = {"autoregressive": Autoregressive(), "fixed": Fixed(3)}


def fleet(requests: int = 60, **changes: Any) -> Scenario:
    return Scenario(
        Poisson(30.0), Limits(4), requests=requests, replications=2,
        **{"replicas": 6, "router": RoundRobin(), **changes},
    )  # fmt: skip


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "elapsed_s"} for row in rows]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.serving.study.MANY", 50)
    monkeypatch.setattr("simulator.serving.study.A_PART", 10)


@pytest.mark.usefixtures("small_parts")
def test_parts_are_all_replicas_once() -> None:
    assert shares_of(fleet()) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert shares_of(fleet(20)) == [None]
    assert shares_of(fleet(router=LeastRequests())) == [None]
    for replicas in (2, 3, 5, 64):
        shares = shares_of(fleet(replicas=replicas))
        assert [i for share in shares for i in share or ()] == list(range(replicas))


@pytest.mark.invariant(6)
@pytest.mark.usefixtures("small_parts")
def test_processes_give_the_same_rows() -> None:
    scenarios = [*over_rates(fleet(), [10.0, 60.0]), fleet(router=LeastRequests())]
    served: list[int] = []
    rows = sweep(SMALL, CONSTANT, POLICIES, scenarios)
    elsewhere = sweep(
        SMALL, CONSTANT, POLICIES, scenarios, executor=Local(2), advance=served.append
    )
    for row, other in zip(timeless(rows), timeless(elsewhere), strict=True):
        same(row, other, "row")
    assert sum(served) == 60 * 2 * len(rows)


@pytest.mark.invariant(13)
@pytest.mark.parametrize("lose", [False, True])
def test_an_interrupted_run_goes_on_behind_its_rows(tmp_path: Path, lose: bool) -> None:
    path = tmp_path / "rows.jsonl"
    scenarios = over_rates(fleet(router=LeastRequests()), [5.0, 20.0])
    whole = sweep(SMALL, CONSTANT, POLICIES, scenarios)
    with pytest.raises(DraftsimError if lose else KeyboardInterrupt) as caught:
        sweep(SMALL, CONSTANT, POLICIES, scenarios, path=path, executor=Failing(5, lose))
    if lose:
        assert "3 of 8 parts were lost" in str(caught.value)
    assert len(read_results(path).rows) == 2  # of two replications each; one of the third was lost
    with path.open("a") as file:
        file.write('{"row": {"pol')  # killed while writing
    again = Failing(9)
    seen: list[tuple[int, int]] = []
    rows = sweep(
        SMALL, CONSTANT, POLICIES, scenarios, path=path, executor=again,
        progress=lambda done, total, _: seen.append((done, total)),
    )  # fmt: skip
    assert again.ran == 4
    assert seen == [(2, 4), (3, 4), (4, 4)]
    for row, expected in zip(timeless(rows), timeless(whole), strict=True):
        same(row, expected, "row")
    stored = read_results(path)
    assert stored.complete
    assert len(stored.rows) == 4
    # A finished run is computed again, and so is the answer to another question.
    for other in (scenarios, over_rates(fleet(seed=1), [5.0, 20.0])):
        anew = Failing(9)
        sweep(SMALL, CONSTANT, POLICIES, other, path=path, executor=anew)
        assert anew.ran == 8
        with pytest.raises(KeyboardInterrupt):
            sweep(SMALL, CONSTANT, POLICIES, scenarios, path=path, executor=Failing(5))


def test_every_engine_of_a_fleet_is_kept_full() -> None:
    [scenario] = over_batches(fleet(120, router=LeastRequests()), [3])
    assert scenario.arrivals.concurrency == 18
    [row] = sweep(SMALL, CONSTANT, {"fixed": Fixed(3)}, [scenario])
    assert row["mean_batch"] == pytest.approx(3, rel=0.2)
    assert row["replicas"] == 6


def test_fleets_on_the_command_line(serve: Serve, tmp_path: Path) -> None:
    few = ("--rate", 9, "--requests", 40, *PAIR)
    for router in ("random", "round-robin", "least-requests", "least-tokens"):
        rows = serve(*few, "--replicas", 3, "--router", router, "--json", "-").rows
        assert [(r["replicas"], r["router"], r["requests"]) for r in rows] == [(3, router, 40)] * 2
    printed = serve(*few, "--replicas", 3).out
    assert "replicas" in printed
    assert "imbalance" in printed
    timeline = tmp_path / "t.json"
    assert serve(*few, "--replicas", 3, "--timeline", timeline).code == 0
    requests = {e["tid"] for e in json.loads(timeline.read_text()) if e["pid"] == 2}
    assert 10 < len(requests) < 40  # those of the first replica
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,5" for i in range(12)))
    rows = serve("--arrivals", file, "--replicas", 2, *PAIR, "--json", "-").rows
    assert all(r["requests"] == 12 and r["imbalance"] == 1 for r in rows)
    for wrong, message in (
        (("--router", "random"), "chooses among replicas"),
        (("--replicas", 2, "--router", "best"), "router is 'best'"),
        (("--replicas", 0), "replicas is 0"),
        (("--timeline", timeline, "--jobs", 2), "needs all runs in one process"),
        (("--jobs", 2, "--cluster", "tcp://127.0.0.1:1"), "give one"),
    ):
        ran = serve(*few, *wrong)
        assert message in ran.refusal
