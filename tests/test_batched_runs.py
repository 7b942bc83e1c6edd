"""Whole batched runs: forced and real, their times, and latencies of batched passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from commands.common.progress import progress_bar
from policies import SVIP, ConfidenceFreeze, DraftPolicy, Fixed, Round
from policies.together import Synchronise, together_of
from profiler.checks.differences import output_of, rounds_differ
from profiler.checks.interleaved import LEAST_REPEATS, order
from profiler.checks.spot_check import PlannedPolicy, groups_of, run_batches, run_requests
from profiler.decoding.batch import BatchedDecoder, speculate_batch
from profiler.decoding.forced import ForcedStream
from profiler.latency.host import measure_batch_host
from profiler.latency.passes import pass_blocks
from profiler.latency.table import Grid, Sweeps
from profiler.machine import NoTimeError
from profiler.models.loading import Pair
from profiler.models.runner import Runner
from profiler.profile import Settings, profile_latency
from tests.batched import (
    END,
    GAMMA,
    LENGTHS,
    NEW,
    VOCAB,
    llama,
    pair,
    prompts,
    replayed,
    runners,
    trace,
)
from tests.batched_decoding import decode_batch
from tests.few_cells import few_cells
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.interpolate import INTERPOLATED
from traces.latency.table import LatencyTable
from traces.replay.run import replay


def forced(
    policy: DraftPolicy, style: Synchronise = "ragged", models: Pair | None = None, step: int = 4
) -> list[list[Round]]:
    """Return the rounds of the recorded requests, `step` at a time, with dictated verdicts."""
    target, draft = runners(4, models)
    decoder, together = BatchedDecoder(target, draft, watch_eos=False), together_of(policy, style)
    streams = [ForcedStream(trace(), i, VOCAB, target.device) for i in range(len(LENGTHS))]
    rounds: list[list[Round]] = [[] for _ in streams]
    for begin in range(0, len(streams), step):
        for iteration in speculate_batch(decoder, together, streams[begin : begin + step]):
            for stream, outcome in iteration:
                rounds[stream.request].append(outcome)
    return rounds


def test_forced_runs_follow_the_recording_with_any_weights() -> None:
    other = Pair(llama(1, 20), llama(1, 21), None, {})
    for policy in (Fixed(4), SVIP(gamma_max=GAMMA)):
        assert forced(policy, models=other, step=len(LENGTHS)) == replayed(trace(), policy)


@pytest.mark.parametrize(
    ("policy", "style"), [(Fixed(4), "minimum"), (SVIP(gamma_max=GAMMA), "mean")]
)
def test_forced_and_real_agree_where_sequences_wait(
    policy: DraftPolicy, style: Synchronise
) -> None:
    real = decode_batch(*runners(4), prompts(), NEW, END, policy, synchronise=style)
    both = (real.rounds, forced(policy, style))
    real_ones, dictated = ([[(r.drafted, r.accepted) for r in own] for own in run] for run in both)
    assert real_ones == dictated


def test_runs_in_turn_are_repeats_of_all_units_or_in_haste_of_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("profiler.machine.WARMING", 1)
    assert list(order([0, 1, 0], 1)) == [(-1, 0), (-1, 2), (0, 0), (0, 1), (0, 2)]

    def within(steps: int, repeats: int = 3) -> list[tuple[int, int]]:
        done: list[tuple[int, int]] = []
        for turn in order([0, 1, 2], repeats, lambda: len(done) < steps):
            done.append(turn)
        return done

    every = [(-1, 0), *((r, i) for i in range(3) for r in range(3))]
    assert within(100) == every
    assert within(0) == every[: 1 + LEAST_REPEATS]  # these in any case
    assert within(3) == every[:3]
    assert within(4) == every[:4]
    assert within(5) == every[:7]  # an item that was begun has all of its repeats
    assert within(0, repeats=1) == every[:2]


@pytest.mark.parametrize("batch", [1, 4])
def test_runs_of_limited_time_are_whole_repeats_of_the_first_requests(batch: int) -> None:
    """Alone and in batches: what was begun when the time ended does not count."""
    left: list[int] = []

    def advance() -> None:
        left.pop()
        if not left:
            raise NoTimeError("no time left")

    def times(runs: int, repeats: int = 2, late: bool = False) -> pd.DataFrame:
        left[:] = range(runs)
        limited: dict[str, Any] = {
            "repeats": repeats, "advance": advance, "in_time": lambda: not late
        }  # fmt: skip
        if batch == 1:
            planned = [
                PlannedPolicy("fixed", Fixed(3)),
                PlannedPolicy("svip", SVIP(gamma_max=GAMMA)),
            ]
            measured = run_requests(pair(), trace(), planned, **limited)
            for run in planned:
                count = measured.times["request"].nunique()
                assert len(measured.outputs[run.name]) == count
                assert len(measured.logs[run.name].requests) == count
            return measured.times
        some = [PlannedPolicy("fixed", Fixed(3)), PlannedPolicy("freeze", ConfidenceFreeze())]
        ran = run_batches(pair(), trace(), some, batches=(batch,), **limited)
        for run in some:
            count = len(ran.logs[run.name, batch].requests)
            assert -(-count // batch) == ran.times["request"].nunique()
        return ran.times

    whole = times(1000)
    assert whole["request"].nunique() == len(groups_of(9, batch))
    assert (whole.groupby(["policy", "request"]).size() == 2).all()
    two = times(9)  # two repeats of two policies on two requests, and one run of the third
    assert two["request"].tolist() == whole["request"].tolist()[:4] * 2
    assert times(4)["repeat"].unique().tolist() == [0]  # the second repeat lacked a run
    assert times(1000, 3, late=True)["repeat"].tolist() == [0, 0, 1, 1]
    with pytest.raises(NoTimeError):
        times(1)


def test_run_batches_reports_every_group() -> None:
    planned = [PlannedPolicy("fixed", Fixed(3)), PlannedPolicy("freeze", ConfidenceFreeze())]
    beats: list[int] = []
    run = run_batches(
        pair(), trace(), planned, batches=(1, 4), repeats=2, advance=lambda: beats.append(1)
    )
    groups = {1: 9, 4: 3}
    assert len(beats) == 2 * len(planned) * sum(groups.values())
    counts = run.times.groupby(["policy", "batch", "repeat"]).size()
    assert {(b, n) for (_, b, _), n in counts.items()} == set(groups.items())
    assert (run.times["wall_s"] > 0).all()
    for batch in groups:
        assert rounds_differ(run.logs["fixed", batch], replay(trace(), Fixed(3))) == 0
        assert run.outputs["freeze", batch] == [output_of(trace(), i) for i in range(9)]
    slowest = run.logs["fixed", 4].per_request(np.ones(len(run.logs["fixed", 4])))
    own = run.times.query("policy == 'fixed' and batch == 4 and repeat == 0").set_index("request")
    assert own["rounds"].to_dict() == {str(g[0]): slowest[list(g)].max() for g in groups_of(9, 4)}


def test_grid_cells_cover_batches_and_host() -> None:
    grid = Grid(
        widths=(1,), contexts=(4, 8), prompts=(4,), batches=(1, 2, 3), batch_widths=(1, 3),
        repeats=2,
    )  # fmt: skip
    target, draft = Runner(pair().target, 16, 3), Runner(pair().draft, 16, 3)
    blocks = [block for batch in (2, 3) for block in pass_blocks(target, draft, grid, batch)]
    sweeps = Sweeps(blocks, target.device, warmup=1)
    sweeps.run()
    sweeps.run()
    cells = sweeps.cells()
    passes = cells.groupby(["model", "phase"]).size().to_dict()
    # Two batches, two contexts: as many widths of each pass as decoding knows.
    assert passes == {
        ("target", "prefill"): 2, ("target", "forward"): 8, ("draft", "prefill"): 2,
        ("draft", "forward"): 8, ("draft", "catch_up"): 12, ("draft", "settling"): 4,
        ("draft", "signal"): 2,
    }  # fmt: skip
    assert set(cells["batch"]) == {2, 3}
    hosts = measure_batch_host(target, draft, grid.batches, repeats=3, tokens=9)
    table = LatencyTable(hosts)
    assert set(hosts["phase"]) == {"host_round", "host_draft"}
    assert (table.estimate("target", "host_round", batch=[2, 3], new_tokens=1).seconds > 0).all()


def test_a_profile_holds_batches_beside_the_single_stream(tmp_path: Path) -> None:
    grid = Grid(
        widths=(1, 2), contexts=(4, 48), prompts=(4,), batches=(1, 3), batch_widths=(1, 2),
        repeats=1, warmup=0,
    )  # fmt: skip
    with progress_bar() as progress, few_cells():
        table = profile_latency(pair(), Settings(grid=grid), tmp_path, progress)
    for phase in ("prefill", "forward", "host_round", "host_draft"):
        own = table.cells[(table.cells["phase"] == phase) & (table.cells["model"] == "target")]
        assert set(own["batch"]) == {1, 3}, phase
    between = table.estimate("target", "forward", batch=2, new_tokens=2, context=6)
    assert between.origin == INTERPOLATED


def test_sampled_traces_and_bad_batches_are_refused() -> None:
    sampled = Trace(
        trace().columns, trace().requests, GAMMA, {**trace().meta, "sampling": {"temperature": 0.7}}
    )
    with pytest.raises(DraftsimError, match=r"sampled at temperature 0\.7"):
        run_batches(pair(), sampled, [PlannedPolicy("fixed", Fixed(2))])
    with pytest.raises(DraftsimError, match="batch is 0"):
        run_batches(pair(), trace(), [PlannedPolicy("fixed", Fixed(2))], batches=(2, 0))
