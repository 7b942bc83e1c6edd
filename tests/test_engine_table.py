"""An engine's timed iterations as a table, without an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch

from commands.engine.check import engine_options, grid_of, often, policies_predicted
from commands.engine.profile import say_slow_dtype
from policies import parse_policy
from profiler.engines import measure, vllm
from profiler.engines.cells import SAMPLE, SIZES, Cell, EngineGrid
from profiler.engines.engine import EngineOptions
from profiler.engines.measure import (
    SWING,
    Average,
    cells_of_engine,
    follows,
    held_out_errors,
    host_parts,
    quiet,
    spikes_shared,
)
from simulator.engines import Workload, batches_decoded
from simulator.serving import ClosedLoop
from tests.conftest import Run
from tests.serving import SMALL
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.store.engine_runs import PARTS
from traces.store.files import write_latency

GRID = EngineGrid((1, 4), (1, 5), (64, 256), ((1, 16), (1, 64)), (1, 3), (1, 5), (16, 64), 1, 3)


def device_s(batch: int, width: int, context: float) -> float:
    return 0.01 + 1e-4 * batch * width + 1e-6 * batch * context


Samples = dict[Cell, list[tuple[Any, ...]]]


def sample(cell: Cell, control_s: float = 1e-3, slower: float = 1.0) -> tuple[Any, ...]:
    """An iteration that takes what `device_s` says, and round numbers besides."""
    decode_s = device_s(cell.batch, cell.width, cell.context) if cell.batch else 0.0
    parts = dict.fromkeys(PARTS, 1e-4)
    parts |= {"execute": slower * decode_s - 1e-4, "propose": 2e-5 + 1e-6 * (cell.width - 1)}
    prompt_s = 5e-4 * cell.prompts * cell.tokens
    seconds = slower * decode_s + prompt_s
    return (*cell, cell.context, seconds, *parts.values(), decode_s, control_s)


def frame(samples: Samples) -> pd.DataFrame:
    return pd.DataFrame([row for own in samples.values() for row in own], columns=SAMPLE)


def measured(grid: EngineGrid = GRID) -> Samples:
    return {cell: [sample(cell)] * 3 for block in grid.blocks() for cell in block}


def test_a_spike_is_spread_over_all_cells_and_no_time_is_lost() -> None:
    rng = np.random.default_rng(0)
    samples: Samples = {
        cell: [sample(cell, slower=float(x)) for x in rng.uniform(1, 1.1, 8)]
        for cell in GRID.blocks()[0]
    }
    seen = Cell("decode", 1, 1, 64)
    samples[seen][0] = sample(seen, slower=40.0)
    taken = frame(samples)
    shared = spikes_shared(taken)
    whole_s = shared[[*PARTS]].sum(axis=1)
    assert whole_s.sum() == pytest.approx(taken[[*PARTS]].sum().sum())
    here = taken[SIZES].eq(pd.Series(seen._asdict())).all(axis=1)
    first, *others = whole_s[here]
    assert first == pytest.approx(np.exp(SWING) * np.median([*others, first]), rel=0.05)
    [factor] = set((shared["seconds"] / taken["seconds"])[~here].round(9))
    assert factor > 1.2


def test_means_of_cells_add_up_to_the_iterations_that_were_timed() -> None:
    """Medians leave out one slow iteration in four, which a load has as well."""
    cell = Cell("decode", 4, 5, 256)
    samples = {**measured(), cell: [sample(cell, slower=s) for s in (1, 1, 1, 1.4)]}
    read = [
        float(LatencyTable(cells_of_engine(frame(samples), average=average)).seconds(
            "target", "forward", batch=4, new_tokens=5, context=256
        ))
        for average in get_args(Average)
    ]  # fmt: skip
    assert read == pytest.approx([device_s(4, 5, 256), 1.1 * device_s(4, 5, 256)])


def test_passes_prompts_and_what_prompts_add_are_read_back() -> None:
    table = LatencyTable(cells_of_engine(frame(measured())))
    read = table.seconds("target", "forward", batch=4, new_tokens=5, context=256)
    assert read == pytest.approx(device_s(4, 5, 256))
    assert table.seconds("target", "prefill", batch=1, new_tokens=16) == pytest.approx(8e-3)
    assert table.seconds("target", "mixed", batch=15, new_tokens=64) == pytest.approx(0.032)
    # Decoded tokens count in all: 3 sequences of 1 and 1 of 5 lie side by side.
    mixed = table.cells[table.cells["phase"] == "mixed"]
    assert sorted(set(mixed["batch"])) == [1, 3, 5, 15]


def test_noise_does_not_lengthen_what_prompts_add() -> None:
    """A mixed iteration can take less than those around it, and the mean is of differences."""
    cell, samples = Cell("mixed", 1, 1, 256, 1, 16), measured()
    plain = sample(cell)
    base, seconds = SAMPLE.index("base_s"), SAMPLE.index("seconds")

    def added(*times: float) -> float:
        samples[cell] = [
            (*plain[:seconds], plain[base] + added_s, *plain[seconds + 1 :]) for added_s in times
        ]
        cells = cells_of_engine(frame(samples), average="mean")
        own = cells[
            (cells["phase"] == "mixed") & (cells["batch"] == 1) & (cells["new_tokens"] == 16)
        ]
        return float(own["median_s"].item())

    assert added(-3e-3, 1e-3, 5e-3) == pytest.approx(1e-3)
    assert added(-3e-3, 1e-3) == 0.0


def test_the_hosts_time_is_told_apart() -> None:
    table = LatencyTable(cells_of_engine(frame(measured())))
    host = table.seconds("target", "host_round", batch=4, new_tokens=1)
    assert host == pytest.approx(3e-4 + 2e-5)
    assert table.seconds("target", "host_draft", batch=4, new_tokens=1) == pytest.approx(1e-6)
    assert {p["batch"] for p in host_parts(frame(measured()))} == {1, 4}


def test_a_proposer_without_a_model_drafts_for_the_hosts_time_alone() -> None:
    table = LatencyTable(cells_of_engine(frame(measured())))
    assert table.seconds("draft", "forward", batch=3, new_tokens=1, context=99) == 0


def test_samples_of_a_disturbed_machine_are_left_out() -> None:
    samples = measured()
    cell = Cell("decode", 4, 5, 256)
    samples[cell] = [sample(cell), sample(cell, 2e-3, 3.0), sample(cell, 2e-3, 3.0)]
    table = LatencyTable(cells_of_engine(quiet(frame(samples))))
    read = table.seconds("target", "forward", batch=4, new_tokens=5, context=256)
    assert read == pytest.approx(device_s(4, 5, 256))
    samples[cell] = [sample(cell, 2e-3, 3.0)]
    table = LatencyTable(cells_of_engine(quiet(frame(samples))))
    read = table.seconds("target", "forward", batch=4, new_tokens=5, context=256)
    assert read == pytest.approx(3 * device_s(4, 5, 256))


def test_held_out_cells_show_where_reading_between_misses() -> None:
    good, bad = Cell("decode", 2, 3, 256), Cell("decode", 3, 3, 256)
    held_out: Samples = {good: [sample(good)], bad: [sample(bad, slower=1.25)]}
    errors = held_out_errors(frame(measured()), frame(held_out))
    # Linear in batch and width by themselves, but not in their product.
    assert errors[good] == pytest.approx(0, abs=0.01)
    assert errors[bad] == pytest.approx(-0.2, abs=0.01)


def test_held_out_cells_lie_between_the_measured_ones() -> None:
    between = GRID.between()
    assert {c.batch for c in between} == {1, 2, 4}
    assert {c.width for c in between if c.batch in GRID.batches} == {3}
    assert {c.context for c in between} == {GRID.middle}


def test_a_grid_fits_what_the_engine_was_started_with() -> None:
    grid = EngineGrid().fitted(EngineOptions("m", longest=5, max_batch=6, max_model_len=512))
    assert list(grid.batches) == [1, 2, 4, 6]
    assert list(grid.widths) == [1, 2, 3, 5, 6]
    assert max(grid.contexts) < 512
    assert max(grid.beside_batches) == 5
    assert all(count <= 6 and tokens < 512 for count, tokens in grid.prompts)


def test_nothing_is_read_between_a_full_graph_and_a_piecewise_one() -> None:
    options = EngineOptions("m", longest=8)
    assert list(EngineGrid().fitted(options).widths) == [1, 2, 3, 5, 9]
    few = EngineOptions("m", longest=1)
    in_graphs = [
        list(EngineGrid().fitted(o, graphs="FULL_AND_PIECEWISE").widths) for o in (options, few)
    ]
    assert in_graphs == [[1, 2, 3, 5, 8, 9], [1, 2]]


def test_every_width_is_alike_where_every_pass_is_a_full_graph() -> None:
    options = EngineOptions("m", longest=8)
    assert EngineGrid().fitted(options, graphs="FULL") == EngineGrid().fitted(options)


def test_what_is_compared_is_measured_side_by_side() -> None:
    """A machine that is slower in another minute is so for every length and context of a batch."""
    *decoding, alone, mixed = EngineGrid().blocks()
    sizes = [{(c.width, c.context) for c in block} for block in decoding]
    assert [{c.batch for c in block} for block in decoding] == [{1}, {2}, {4}, {8}, {16}]
    assert all(
        size == {(w, c) for w in EngineGrid().widths for c in EngineGrid().contexts}
        for size in sizes
    )
    assert {c.kind for c in alone} == {"prompt"}
    assert {c.kind for c in mixed} == {"mixed"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profile", "--engine", "sglang", "--target", "m", "--out", "OUT"), "expected vllm"),
        (("profile", "--target", "m", "--out", "OUT"), "Missing option '--draft'"),
        (("profile", "--engine", "vllm", "--target", "m", "--prompts", "p", "--out", "OUT"),
         "--prompts belongs to `draftsim profile pair`"),
        (("profile", "--engine", "vllm", "--target", "m", "--draft", "d", "--eagle", "e", "--out",
          "OUT"), "two drafters"),
        (("validate", "--engine", "vllm", "--run", "bundled"), "no engine's latencies"),
        (("validate", "--engine", "vllm", "--run", "OUT", "--load", "open:1"), "closed:N"),
        (("validate", "--engine", "vllm", "--run", "OUT", "--policy", "fixed:gamma=9"),
         "--engine-longest 9"),
        (("validate", "--engine", "vllm", "--run", "OUT", "--load", "closed:99"),
         "more than the 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_a_line(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    engine: dict[str, Any] = {"longest": 4, "max_batch": 4, "max_model_len": 512,
                              "token_budget": 8192}  # fmt: skip
    meta = {"kind": "engine", "engine": engine, "target": "m", "dtype": "float32", "threads": 1}
    write_latency(
        LatencyTable(cells_of_engine(frame(measured())), meta), tmp_path / "latency.parquet"
    )
    (tmp_path / "bundled").mkdir()
    write_latency(LatencyTable.constant(1.0, 0.1), tmp_path / "bundled" / "latency.parquet")
    named = {"OUT": str(tmp_path), "bundled": str(tmp_path / "bundled")}
    done = run(*[named.get(a, a) for a in arguments])
    assert said in done.refusal


def test_medians_withstand_one_slow_iteration() -> None:
    samples = measured()
    cell = Cell("decode", 1, 1, 64)
    samples[cell] = [sample(cell), sample(cell), sample(cell, slower=50.0)]
    table = LatencyTable(cells_of_engine(frame(samples)))
    read = float(np.asarray(table.seconds("target", "forward", batch=1, new_tokens=1, context=64)))
    assert read == pytest.approx(device_s(1, 1, 64))


@pytest.mark.parametrize(("power", "noise"), [(0.0, 0.0), (0.6, 0.0), (1.0, 0.02)])
def test_how_the_engine_follows_the_control_load_is_read_back(power: float, noise: float) -> None:
    """An engine whose passes take the control load's time to a power, at moments unlike."""
    rng = np.random.default_rng(2)
    samples = {
        cell: [
            sample(cell, 1e-3 * pace, pace**power * float(np.exp(rng.normal(0, noise))))
            for pace in np.exp(rng.normal(0, 0.08, 12)).tolist()
        ]
        for cell in measured() if cell.kind == "decode"
    }  # fmt: skip
    assert follows(frame(samples)) == pytest.approx(power, abs=0.06 if noise else 0.02)
    slow = {cell: own * 2 for cell, own in measured().items()}
    assert follows(frame(slow)) == 0  # a machine that never changed tells nothing


def profiled(**engine: Any) -> LatencyTable:
    limits = {"longest": 4, "max_batch": 16, "max_model_len": 2048, "token_budget": 8192,
              "method": "custom_class"}  # fmt: skip
    meta = {"engine": {**limits, **engine}, "target": "m", "dtype": "float32", "threads": 1}
    return LatencyTable(cells_of_engine(frame(measured())), meta)


def test_a_table_between_the_arms_has_the_batches_that_so_few_requests_make() -> None:
    latency = profiled()
    options = engine_options(latency, SMALL, vllm)
    loads = {f"closed:{n}": ClosedLoop(n) for n in (4, 16)}
    three = Workload(SMALL, {"a": parse_policy("fixed:gamma=3")}, loads, 12)
    grid = grid_of(options, three, latency)
    assert list(grid.batches) == [1, 2, 4, 8, 12]
    assert list(grid.widths) == [1, 2, 3, 4]
    four = Workload(SMALL, {"a": parse_policy("fixed:gamma=4")}, loads, 12)
    graphs = profiled(cudagraph_mode="FULL_AND_PIECEWISE")
    assert list(grid_of(options, four, graphs).widths) == [1, 2, 3, 4, 5]
    assert list(grid.contexts) == [32, 72]  # a prompt, and all of its output
    assert list(grid.prompts) == [(1, 16), (4, 16), (1, 32), (4, 32), (12, 32)]
    assert list(grid.beside_prompts) == [16, 32]  # the fifth request waits for one of four
    # All prompts share the first iteration, or each is alone in its own.
    alone = replace(three, loads={f"closed:{n}": ClosedLoop(n) for n in (1, 12)})
    kinds = {cell.kind for block in grid_of(options, alone, latency).blocks() for cell in block}
    assert kinds == {"decode", "prompt"}
    assert len(set(grid.prompts)) == len(grid.prompts)


def test_batches_that_a_load_often_decodes_are_measured_themselves() -> None:
    """16 requests at once, 5 of which end soon: most steps decode 11, between 8 and 16."""
    trace = SMALL.select(range(16))
    lengths = [5 if i < 5 else 40 for i in range(16)]
    requests = [
        replace(r, tokens=n, max_new_tokens=n) for r, n in zip(trace.requests, lengths, strict=True)
    ]
    ends = np.array([r.tokens for r in requests])
    kept = trace.columns["position"] < ends[trace.columns["request"]]
    trace = Trace({name: values[kept] for name, values in trace.columns.items()}, requests)
    latency = profiled()
    loads = {"closed:16": ClosedLoop(16)}
    work = Workload(trace, {"off": parse_policy("autoregressive")}, loads, 16)
    assert batches_decoded(latency, work) == [Counter({16: 4, 11: 35})]
    grid = grid_of(engine_options(latency, trace, vllm), work, latency)
    assert list(grid.batches) == [1, 2, 4, 8, 11, 16]
    assert often([Counter({8: 9, 3: 1}), Counter({2: 95, 5: 5})]) == [2, 8, 3]


def times_measured(table: measure.EngineTable) -> dict[Cell, int]:
    """Return how often each cell was measured."""
    return dict(Counter(Cell(*row) for row in table.samples[SIZES].itertuples(index=False)))


class Bent:
    """A timer of an engine whose cost bends between the batches measured; notes its blocks."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.blocks: list[list[Cell]] = []

    def block(self, cells: list[Cell], steps: int) -> pd.DataFrame:
        self.blocks.append(list(cells))
        # The first sweep's blocks of four sequences are measured on a slow machine.
        control = 2e-3 if cells[0].batch == 4 and len(self.blocks) <= 4 else 1e-3
        return frame(
            {c: [sample(c, control, 1.5 if 1 < c.batch < 4 else 1.0)] * steps for c in cells}
        )


@pytest.mark.parametrize(("left_s", "left_out"), [(1e6, 0), (0.0, 16)])
def test_what_a_table_can_do_without_is_measured_in_the_time_left(
    monkeypatch: pytest.MonkeyPatch, left_s: float, left_out: int
) -> None:
    monkeypatch.setattr(measure, "CellTimer", Bent)
    options = EngineOptions("m", longest=4, max_batch=4)
    meta = {"engine": {"own_drafter": False}, "device": "cpu"}
    engine: Any = SimpleNamespace(options=options, meta=meta)
    made = measure.EngineTable(engine, GRID.fitted(options), left_s=lambda: left_s)
    table = made.run()
    batches = set(table.cells.query("phase == 'forward'")["batch"])
    # Two sweeps over the batch that reading between missed, and twice the four slow cells.
    assert made.left_out == left_out
    assert batches == ({1, 4} if left_out else {1, 2, 4})
    assert times_measured(made)[Cell("decode", 4, 5, 64)] == (3 if left_out else 9)


@pytest.mark.parametrize(("left_s", "visits"), [(1e6, 3), (0.0, 1)])
def test_one_sweep_is_measured_in_any_case_and_further_ones_in_the_time_left(
    monkeypatch: pytest.MonkeyPatch, left_s: float, visits: int
) -> None:
    monkeypatch.setattr(measure, "CellTimer", Bent)
    options = EngineOptions("m", longest=4, max_batch=4)
    engine: Any = SimpleNamespace(
        options=options, meta={"engine": {"own_drafter": False}, "device": "cpu"}
    )
    grid = replace(GRID, sweeps=3, held_out=1.0)
    made = measure.EngineTable(engine, grid.fitted(options), left_s=lambda: left_s)
    advanced: list[int] = []
    made.run(advanced.append)
    assert times_measured(made)[Cell("decode", 1, 1, 64)] == visits * GRID.steps
    assert advanced == sorted(
        [*range(visits)] * len(made.blocks)
    )  # block by block, sweep after sweep
    cells = sum(map(len, made.grid.blocks()))
    assert made.left_out >= (3 - visits) * cells
    assert (made.left_out == 0) == (visits == 3)


@pytest.mark.parametrize("between_runs", [False, True])
def test_a_gpu_runs_every_size_once_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, between_runs: bool
) -> None:
    monkeypatch.setattr(measure, "CellTimer", Bent)
    options = EngineOptions("m", longest=4, max_batch=4)
    grid = replace(GRID, sweeps=1, held_out=1.0)
    runs: dict[str, Any] = {}
    for device in ("cpu", "NVIDIA H200"):
        meta = {"engine": {"own_drafter": False}, "device": device}
        engine: Any = SimpleNamespace(options=options, meta=meta)
        if between_runs:
            runs[device] = measure.EngineTable(engine, grid.fitted(options))
            runs[device].advance(1)
        else:
            runs[device] = measure.EngineTable(engine, grid.fitted(options), left_s=lambda: 0.0)
            runs[device].run()
    timed, warm = runs["cpu"], runs["NVIDIA H200"]
    every = timed.grid.blocks()
    assert warm._timer.blocks[: len(every)] == every
    assert len(warm._timer.blocks) == len(every) + len(timed._timer.blocks)
    assert times_measured(warm) == times_measured(timed)


@pytest.mark.parametrize(
    ("dtype", "device", "known", "warned"),
    [
        ("bfloat16", "cpu", {"avx512_f": True, "avx512_bf16": False}, True),
        ("bfloat16", "cpu", {"avx512_bf16": True, "amx_bf16": False}, False),
        ("float32", "cpu", {"avx512_bf16": False}, False),
        ("bfloat16", "cuda", {"avx512_bf16": False}, False),
    ],
)
def test_an_engine_in_a_format_that_the_processor_lacks_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, device: str,
    known: dict[str, bool], warned: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    say_slow_dtype({"dtype": dtype, "device": device})
    assert ("--dtype float32" in capsys.readouterr().err) == warned


def test_policies_run_by_default_are_those_that_the_engine_can_draft() -> None:
    work = Workload(SMALL, {}, {"closed:4": ClosedLoop(4)}, 8)
    found = policies_predicted(profiled(longest=2, max_batch=4), work, 2)
    assert "fixed:gamma=2" in found
    assert "fixed:gamma=4" not in found
