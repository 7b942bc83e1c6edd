"""Sweeps: grids as text, cells against single runs, resuming, Dask workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Autoregressive, DraftPolicy, Fixed, HFHeuristic, Oracle, parse_policy
from policies.core import Load
from simulator.pricing import autoregressive, price
from simulator.ratios import price_ratios
from simulator.summary import prompt_speedups, summarize
from simulator.whatif.batching import InBatches, in_steps, step_seconds
from simulator.whatif.cells import COLUMNS, Bench, Part
from simulator.whatif.executors import Cluster, Columns, Local, Lost
from simulator.whatif.grid import expand, parse_axis, with_gammas
from simulator.whatif.prices import Prices
from simulator.whatif.sweep import Sweep
from simulator.whatif.sweep_file import read_sweep
from simulator.whatif.tilt import tilt_to
from traces.errors import DraftsimError, FileError
from traces.latency import LatencyTable
from traces.replay import replay
from traces.synthetic import Bursty, synthetic_trace
from traces.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
POLICIES: dict[str, DraftPolicy] = {
    **{f"fixed:gamma={g}": Fixed(g) for g in (1, 3, 6)},
    "hf-heuristic": HFHeuristic(gamma_max=20),
    "oracle": Oracle(),
}
SUMMARIZED = (
    "speedup", "speedup_lo", "speedup_hi", "wall_s", "block_efficiency", "tokens", "rounds",
    "drafted", "accepted", "acceptance_rate",
)  # fmt: skip
TABLE = LatencyTable.constant(0.01, 0.001, 0.0105, host_round=0.0005)


@cache
def recorded() -> Trace:
    return synthetic_trace(Bursty(), requests=12, tokens=60, concentration=8.0, seed=4)


def study(**changes: Any) -> Sweep:
    given: dict[str, Any] = {
        "prices": Prices((0.05, 0.2), {"here": TABLE}, (None, 500), verify=1.1),
        "alphas": (0.4, 0.8), "resamples": 40, "measure_tilt": False,
    } | changes  # fmt: skip
    return Sweep(recorded(), POLICIES, **given)


# The grid as text


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("0.1:0.4:4", (0.1, 0.2, 0.3, 0.4)),
        ("0.01:1:3log", (0.01, 0.1, 1.0)),
        ("1..4", (1, 2, 3, 4)),
        ("2..8..3", (2, 5, 8)),
        ("0.3,0.5,0.3", (0.3, 0.5)),
        ("7", (7,)),
    ],
)
def test_axes(text: str, points: tuple[float, ...]) -> None:
    assert parse_axis(text, "c") == pytest.approx(points)


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(2, 50))
def test_axis_ends_and_counts(a: float, b: float, count: int) -> None:
    for suffix in ("", "log"):
        points = parse_axis(f"{a!r}:{b!r}:{count}{suffix}", "c")
        assert points[0] == pytest.approx(a)
        assert points[-1] == pytest.approx(b)
        assert len(points) <= count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "'x' is no number"),
        ("1:2", "no number"),
        ("0:1:5log", "both ends above 0"),
        ("1:2:0", "asks for 0 points"),
        ("1:2:9999999", "asks for 9999999 points"),
        ("4..1", "counts from 4 up to 1"),
        ("-1", "-1 is not >= 0"),
        ("nan", "not finite"),
    ],
)
def test_axis_errors(text: str, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        parse_axis(text, "c", low=0)


def test_whole_axes_round_ranges_and_refuse_fractions() -> None:
    assert parse_axis("1:10:4log", "batch", whole=True) == (1, 2, 5, 10)
    with pytest.raises(DraftsimError, match="no whole number"):
        parse_axis("1.5", "batch", whole=True)


def test_braces_multiply() -> None:
    assert expand(["a:x={1..2},y={u,v}", "b"]) == [
        "a:x=1,y=u", "a:x=1,y=v", "a:x=2,y=u", "a:x=2,y=v", "b",
    ]  # fmt: skip
    table = 'batch-table:table=[[1,2]],extra={"a":1}'
    assert expand([table]) == [table]  # a JSON object is no list of alternatives
    with pytest.raises(DraftsimError, match="neither"):
        expand(["fixed:gamma={1,}"])


def test_gammas_go_to_the_policies_that_have_one() -> None:
    assert with_gammas(["fixed", "svip", "confidence:gamma=4"], [1, 2]) == [
        "fixed:gamma=1", "fixed:gamma=2", "svip", "confidence:gamma=4",
    ]  # fmt: skip
    with pytest.raises(DraftsimError, match="none of svip has a parameter gamma"):
        with_gammas(["svip"], [1])


# Cells


def test_rows_agree_with_single_runs() -> None:
    frame = study().run(Local(1))
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == study().rows == 2 * 5 * 4
    for alpha in (0.4, 0.8):
        tilted = tilt_to(recorded(), alpha)
        for name, policy in POLICIES.items():
            log = replay(tilted, policy, name=name)
            part = frame[(frame["policy"] == name) & (frame["alpha_asked"] == alpha)]
            by_ratio = part[part["latency"] == "ratio"]
            curve = price_ratios(log, by_ratio["c"], verify=1.1)
            np.testing.assert_allclose(by_ratio["speedup"], curve.speedup)
            np.testing.assert_allclose(by_ratio["wall_s"], curve.cost)
            own = part[(part["latency"] == "here") & part["context"].isna()].iloc[0]
            summary = summarize([log], TABLE, resamples=40, seed=0).iloc[1]
            for column in SUMMARIZED:
                assert own[column] == pytest.approx(summary[column]), column
            slower = np.nanmean(prompt_speedups(log, TABLE) < 1)
            assert own["below_1"] == pytest.approx(slower)
            at_c = autoregressive(log)
            for row in by_ratio.itertuples():
                cost = LatencyTable.constant(1.0, float(row.c), 1.1)
                each = price(at_c, cost).decode_s / price(log, cost).decode_s
                assert row.below_1 == pytest.approx((each < 1 - 1e-12).mean())
    assert (frame["fidelity"] == "approximate").all()


def test_contexts_reprice() -> None:
    rows = [("target", "forward", 1, n, k, 0.01 + 1e-5 * k, 0.0, 5)
            for n in (1, 30) for k in (0, 4000)]  # fmt: skip
    rows += [("draft", "forward", 1, 1, k, 0.001 + 1e-6 * k, 0.0, 5) for k in (0, 4000)]
    from traces.latency import CELL_COLUMNS

    table = LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS)))
    frame = Sweep(
        recorded(), {"fixed": Fixed(3)}, Prices((), {"t": table}, (10, 3000)), resamples=0
    ).run(Local(1))
    longer, shorter = frame[frame["context"] == 3000], frame[frame["context"] == 10]
    tokens = int(longer["tokens"].iloc[0])
    extra = longer["wall_s"].iloc[0] - shorter["wall_s"].iloc[0]
    log = replay(recorded(), Fixed(3))
    forwards = int(log.rounds["draft_forwards"].sum())
    assert extra == pytest.approx(2990 * (1e-5 * len(log) + 1e-6 * forwards))
    assert tokens == log.rounds["emitted"].sum()
    assert frame["speedup_lo"].isna().all()  # no resamples, no interval


def test_a_batch_of_one_is_a_single_stream() -> None:
    log = replay(recorded(), Fixed(4))
    steps = in_steps(log, 1, np.random.default_rng(0))
    single = price(log, TABLE)
    seconds = step_seconds(steps, TABLE)
    per_token = seconds.sum() / steps.emitted.sum()
    # Only which prompts were drawn differs.
    assert per_token == pytest.approx(single.total_s / log.rounds["emitted"].sum(), rel=0.15)
    plain = step_seconds(in_steps(autoregressive(log), 1, np.random.default_rng(0)), TABLE)
    assert plain == pytest.approx(np.full(len(plain), 0.0105))


@pytest.mark.parametrize("batch", [2, 8])
def test_fixed_lengths_in_batches_cost_the_closed_form(batch: int) -> None:
    trace = synthetic_trace(0.7, requests=40, tokens=200, seed=1)
    log = replay(trace, Fixed(3))
    found = InBatches(log, batch, resamples=30).at_ratios(np.array([0.1]), 1.0)
    single = price_ratios(log, [0.1]).speedup[0]
    # All slots draft alike, but for the ends of outputs, so that a batch changes nothing.
    assert found.low[0] - 0.05 < single < found.high[0] + 0.05


def test_ragged_drafts_pay_for_the_longest() -> None:
    log = replay(recorded(), Oracle())
    speedups = [
        InBatches(log, b, resamples=5).at_ratios(np.array([0.2]), 1.0).speedup[0]
        for b in (1, 4, 16)
    ]
    assert speedups[0] > speedups[1] > speedups[2]


def test_batches_agree_with_the_serving_simulator() -> None:
    from simulator.serving import ClosedLoop, Limits, Scenario, serve

    trace = synthetic_trace(0.75, requests=30, tokens=120, seed=6, prompt_length=1)
    table = LatencyTable.constant(1.0, 0.1, 1.2)
    scenario = Scenario(ClosedLoop(4), Limits(max_batch=4), requests=150)
    rows = serve(trace, table, {"p": Fixed(3), "b": Autoregressive()}, scenario).rows()
    served = rows[0]["throughput_tok_s"] / rows[1]["throughput_tok_s"]
    frame = Sweep(trace, {"p": Fixed(3)}, Prices((), {"t": table}), (), (4,)).run(Local(1))
    assert frame["speedup"].iloc[0] == pytest.approx(served, rel=0.05)


class Aware(DraftPolicy):
    """Drafts nothing in a batch."""

    def __init__(self) -> None:
        self.batch = 1

    def begin_round(self, load: Load) -> None:
        self.batch = load.batch

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return self.batch == 1 and len(draft) < 2


def test_policies_are_told_the_batch() -> None:
    frame = Sweep(recorded(), {"aware": Aware()}, Prices((0.1,)), (), (1, 8)).run(Local(1))
    assert frame["drafted"].tolist() == [pytest.approx(frame["drafted"].iloc[0]), 0]
    assert frame["drafted"].iloc[0] > 0
    assert frame["speedup"].iloc[1] == pytest.approx(1.0)


def test_iid_is_labelled_and_its_error_unknown() -> None:
    frame = study(method="iid").run(Local(1))
    assert set(frame["source"]) == {"iid"}
    assert frame["tilt_error"].isna().all()
    assert not frame["tilt_tried"].any()


def test_error_of_the_tilt_comes_with_every_row() -> None:
    sweep = study(measure_tilt=True)
    assert sweep.error is not None
    frame = sweep.run(Local(1))
    own = sweep.bench.trace.columns["match"][sweep.bench.trace.on_path].mean()
    for row in frame.itertuples():
        error = sweep.error.of(False).at(float(row.alpha), float(own))
        assert row.tilt_error == pytest.approx(error)
    as_recorded = study(alphas=()).run(Local(1))
    assert set(as_recorded["source"]) == {"recorded"}
    assert (as_recorded["tilt_error"] == 0).all()
    assert as_recorded["tilt_tried"].all()
    assert (as_recorded["fidelity"] == "exact").all()


# Running, keeping, resuming


class Failing:
    """Runs parts here and fails, or loses workers, after some of them."""

    def __init__(self, good: int, lose: bool = False) -> None:
        self.good = good
        self.lose = lose
        self.ran = 0

    def run(self, bench: Bench, parts: Sequence[Part]) -> Iterator[tuple[int, Columns | Lost]]:
        for i, part in enumerate(parts):
            if i >= self.good and self.lose:
                yield i, Lost()
                continue
            if i >= self.good:
                raise KeyboardInterrupt
            self.ran += 1
            yield i, bench.run(part)


@pytest.mark.parametrize("lose", [False, True])
def test_finished_parts_are_not_computed_again(tmp_path: Path, lose: bool) -> None:
    out = tmp_path / "grid.parquet"
    whole = study(batches=(1, 2), resamples=4)
    expected = whole.run(Local(1))
    with pytest.raises(DraftsimError if lose else KeyboardInterrupt) as caught:
        whole.run(Failing(3, lose), out=out)
    if lose:
        assert "1 of 4 parts were lost" in str(caught.value)
    assert not out.exists()
    rest = Failing(4)
    seen: list[tuple[int, int]] = []
    frame = study(batches=(1, 2), resamples=4).run(
        rest, out=out, progress=lambda *n: seen.append(n)
    )
    assert rest.ran == 1
    assert seen == [(3, 4), (4, 4)]
    pd.testing.assert_frame_equal(frame, expected)
    pd.testing.assert_frame_equal(read_sweep(out), expected, check_categorical=False)
    assert read_sweep(out).attrs["sweep"]["batches"] == [1, 2]
    assert not Path(f"{out}.parts").exists()


def test_other_questions_do_not_reuse_parts(tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    with pytest.raises(KeyboardInterrupt):
        study().run(Failing(1), out=out)
    for change in ({"seed": 1}, {"resamples": 41}, {"prices": Prices((0.05, 0.3))}):
        other = Failing(9)
        study(**change).run(other, out=tmp_path / "grid.parquet")
        assert other.ran == 2, change
        with pytest.raises(KeyboardInterrupt):
            study().run(Failing(1), out=out)


def test_a_damaged_part_is_computed_again(tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    with pytest.raises(KeyboardInterrupt):
        study().run(Failing(1), out=out)
    (kept,) = Path(f"{out}.parts").iterdir()
    kept.write_bytes(kept.read_bytes()[:200])
    again = Failing(2)
    study().run(again, out=out)
    assert again.ran == 2


class Deadly(DraftPolicy):
    """Kills the process that runs it."""

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False


def test_a_killed_process_is_one_clear_error() -> None:
    with pytest.raises(DraftsimError, match="a worker process was killed"):
        Sweep(recorded(), {"deadly": Deadly()}, Prices((0.1,)), batches=(1, 2)).run(Local(2))


def test_processes_give_the_same_rows() -> None:
    sweep = study(resamples=10)
    pd.testing.assert_frame_equal(sweep.run(Local(2)), sweep.run(Local(1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alphas": (1.0,)}, "alpha is 1, expected strictly"),
        ({"batches": (0,)}, "batches are"),
        ({"method": "guess"}, "method is 'guess'"),
        ({"resamples": -1}, "resamples is -1"),
        ({"confidence": 1.0}, "confidence is 1"),
    ],
)
def test_impossible_grids(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        study(**changes)


def test_impossible_prices_and_policies() -> None:
    with pytest.raises(DraftsimError, match="nothing to price with"):
        Prices()
    with pytest.raises(DraftsimError, match="c is -1"):
        Prices((-1.0,))
    with pytest.raises(DraftsimError, match="verify is 0"):
        Prices((0.1,), verify=0)
    with pytest.raises(DraftsimError, match="no policy"):
        Sweep(recorded(), {}, Prices((0.1,)))
    bare = synthetic_trace(0.5, requests=2, tokens=20)
    with pytest.raises(DraftsimError, match="policy svip reads"):
        Sweep(bare, {"svip": parse_policy("svip")}, Prices((0.1,)))


def test_files_that_are_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_sweep(tmp_path / "absent.parquet")
    other = tmp_path / "other.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(other)
    with pytest.raises(FileError, match="no table of `draftsim sweep`"):
        read_sweep(other)


# A real cluster on loopback


def test_no_scheduler_is_one_clear_error() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(DraftsimError, match="no Dask scheduler answers at tcp"):
        list(Cluster("tcp://127.0.0.1:1", timeout_s=0.5).run(study().bench, study().parts))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A Dask scheduler and two workers as processes of their own, ended with the test."""
    pytest.importorskip("distributed")
    where = tmp_path / "scheduler.json"
    quiet: dict[str, Any] = {
        "cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL,
        "env": {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    dask = [sys.executable, "-m", "dask"]
    started = [
        subprocess.Popen(
            [*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
             "--scheduler-file", str(where)], **quiet,
        )
    ]  # fmt: skip
    try:
        started += [
            subprocess.Popen(
                [*dask, "worker", "--scheduler-file", str(where), "--nthreads", "1", "--no-nanny",
                 "--no-dashboard", "--host", "127.0.0.1", "--local-directory", str(tmp_path),
                 "--death-timeout", "60"], **quiet,
            )
            for _ in range(2)
        ]  # fmt: skip
        yield _address(where), started[1:]
    finally:
        for process in reversed(started):
            process.kill()
        for process in started:
            process.wait(20)


def _address(where: Path) -> str:
    """The scheduler's address, once both workers have joined it."""
    from distributed import Client

    deadline = time.monotonic() + 60
    while not where.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with Client(scheduler_file=str(where), set_as_default=False, timeout=30) as client:
        client.wait_for_workers(2, timeout=60)
        return str(client.scheduler.address)


FIRST_CONTEXT = 65
"""Tokens in the cache when a synthetic request's first round begins."""


class Slow(DraftPolicy):
    """Drafts three tokens, and takes its time on a worker."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def begin_round(self, load: Load) -> None:
        if load.context == FIRST_CONTEXT:
            time.sleep(self.pause_s)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 3


def test_a_cluster_gives_the_same_rows_and_outlives_a_worker(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    address, workers = cluster
    sweep = study(resamples=10)
    pd.testing.assert_frame_equal(sweep.run(Cluster(address)), sweep.run(Local(1)))

    # Eight parts on two workers, one of which is killed in the midst of its work.  The
    # scheduler allows no second try here, so that what it held is lost, and that alone.
    alphas = tuple(np.linspace(0.3, 0.9, 8))
    slow = Sweep(recorded(), {"slow": Slow(0.02)}, Prices((0.1,)), alphas, measure_tilt=False)
    out = tmp_path / "grid.parquet"

    def kill(done: int, total: int) -> None:
        del total
        if done == 2:
            workers[0].send_signal(signal.SIGKILL)

    with pytest.raises(DraftsimError, match="were lost with their workers") as caught:
        slow.run(Cluster(address), out=out, progress=kill)
    lost = int(str(caught.value).split()[0])
    assert len(list(Path(f"{out}.parts").iterdir())) == 8 - lost
    assert lost <= 3  # those running or waiting on that worker
    frame = slow.run(Cluster(address), out=out)
    pd.testing.assert_frame_equal(frame, slow.run(Local(1)))
