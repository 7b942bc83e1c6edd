"""Timelines keep the rules by which Perfetto imports Chrome trace events.

`imported` follows google/perfetto: json_trace_parser_impl.cc for fields and threads,
json_utils.cc for times, slice_tracker.cc (MaybeCloseStack) for what is dropped.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import Round
from policies.lengths.basic import Fixed
from policies.registry import parse_serving_policy
from simulator.serving import ClosedLoop, Limits, Poisson, Scenario, Timeline, simulate
from simulator.serving.outcome.timeline import result_said
from tests.serving import GRID, bernoulli
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable

METADATA = {
    "process_name": ("name", str), "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int),
}  # fmt: skip
FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
}


class Slice(NamedTuple):
    track: str
    name: str
    start_ns: int
    end_ns: int
    depth: int
    args: dict[str, Any]


class Imported(NamedTuple):
    slices: list[Slice]
    dropped: list[dict[str, Any]]
    counters: dict[str, list[tuple[int, float]]]


def nanoseconds(value: Any) -> int:
    # A whole number is multiplied, any other is cut off after the multiplication.
    return value * 1000 if isinstance(value, int) else int(value * 1000.0)


def imported(events: list[dict[str, Any]]) -> Imported:
    names: dict[int, str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]  # whatever its process
    timed = sorted((e for e in events if e["ph"] != "M"), key=lambda e: nanoseconds(e["ts"]))
    stacks: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    found = Imported([], [], defaultdict(list))
    for event in timed:
        start = nanoseconds(event["ts"])
        if event["ph"] == "C":
            for series, value in event["args"].items():
                found.counters[f"{event['name']} {series}"].append((start, float(value)))
            continue
        duration = nanoseconds(event["dur"])
        stack = stacks[event["pid"], event["tid"]]
        kept = True
        for other in reversed(list(stack)):
            instants = other.end_ns == other.start_ns and duration == 0
            if other.end_ns < start or (other.end_ns == start and not instants):
                stack.pop()
            elif start < other.end_ns < start + duration:
                kept = False
                break
        if not kept:
            found.dropped.append(event)
            continue
        track = names[event["tid"]]
        stack.append(
            Slice(track, event["name"], start, start + duration, len(stack), event["args"])
        )
        found.slices.append(stack[-1])
    return found


def checked(path: Path) -> Imported:
    """The events of a file, after every rule of the format was held to it."""
    events = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert isinstance(events, list)
    processes: dict[int, str] = {}
    threads: dict[int, tuple[int, str]] = {}
    for event in events:
        assert set(event) == FIELDS[event["ph"]]
        assert isinstance(event["name"], str)
        assert event["name"]
        for field in ("pid", "tid"):
            assert type(event[field]) is int
            assert 0 < event[field] < 1 << 32, "0 is the idle process"
        for field in {"ts", "dur"} & set(event):
            assert type(event[field]) is int, "fractions are cut off"
            assert 0 <= event[field] < (1 << 63) // 1000
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert set(event["args"]) == {key}
            assert type(event["args"][key]) is kind
            assert event["args"][key] or kind is int
            if event["name"] == "process_name":
                assert event["pid"] not in processes, "named once"
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                assert event["tid"] not in threads, "one name a thread, in whatever process"
                assert event["tid"] not in processes, "a process's main thread is not a track"
                threads[event["tid"]] = event["pid"], event["args"]["name"]
            continue
        assert event["pid"] in processes, "named before it is used"
        if event["ph"] == "C":
            assert all(type(v) in (int, float) for v in event["args"].values())
            continue
        assert threads[event["tid"]][0] == event["pid"], "named before it is used"
        assert all(type(v) in (int, float, str, bool) for v in event["args"].values())
    assert len({name for _, name in threads.values()}) == len(threads)
    found = imported(events)
    assert not found.dropped
    assert {s.depth for s in found.slices} <= {0}, "one thing at a time on every track"
    return found


@pytest.mark.parametrize(
    ("policy", "scenario"),
    [
        ("fixed:gamma=3", Scenario(Poisson(6), Limits(4, kv_blocks=16), requests=25)),
        ("svip", Scenario(ClosedLoop(3), Limits(3), requests=12)),
        ("goodput", Scenario(Poisson(4), Limits(4), requests=20)),
        ("gammatune", Scenario(ClosedLoop(4), Limits(4), requests=12, mode="static-minimum")),
        ("fixed:gamma=3", Scenario(Poisson(2), requests=10, mode="pearl")),
        ("fixed:gamma=2", Scenario(Poisson(2), requests=10, mode="dsi")),
        ("svip", Scenario(Poisson(2), requests=6, mode="dsi", interference=0.4)),
    ],
)
@pytest.mark.parametrize("latency", [GRID, LatencyTable.constant(1.37e-5, 3.3e-6, 1.91e-5)])
def test_no_viewer_drops_a_slice(tmp_path, policy, scenario, latency):
    trace = synthetic_trace(0.7, requests=8, tokens=30, max_gamma=24, concentration=3.0, seed=1)
    path = tmp_path / "run.json"
    chosen = parse_serving_policy(policy, max_gamma=trace.max_gamma)
    with Timeline(path) as timeline:
        run = simulate(trace, latency, chosen, scenario, timeline=timeline)
    found = checked(path)
    tracks = {s.track for s in found.slices}
    assert "draft model" in tracks
    assert {f"request {i}" for i in range(len(run.requests))} <= tracks
    decoding = [s for s in found.slices if s.track.startswith("request") and "drafted" in s.args]
    assert sum(s.args["accepted"] for s in decoding) == run.recorder.accepted
    assert sum(s.args["wasted"] for s in decoding) == (
        run.recorder.draft_forwards - run.recorder.accepted
    )
    assert max(s.end_ns for s in found.slices) <= run.simulated_s * 1e9 + 1000


def test_times_are_those_of_the_run(tmp_path):
    path = tmp_path / "run.json"
    with Timeline(path) as timeline:
        run = simulate(
            bernoulli(0.7, 10, 40), GRID, Fixed(3), Scenario(Poisson(4), Limits(4), requests=10),
            timeline=timeline,
        )  # fmt: skip
    found = checked(path)
    frame = run.requests.set_index("index")
    for index, row in frame.iterrows():
        mine = [s for s in found.slices if s.track == f"request {index}"]
        assert mine[0].start_ns / 1e9 == pytest.approx(row["arrival_s"], abs=1e-6)
        assert mine[-1].end_ns / 1e9 == pytest.approx(row["finish_s"], abs=1e-6)
        assert sum(s.args.get("emitted", 0) for s in mine) == row["tokens"] - 1
    busy = {"draft model": 0, "target model": 0, "host": 0}
    for s in found.slices:
        if s.track in busy:
            busy[s.track] += s.end_ns - s.start_ns
    assert sum(busy.values()) / 1e9 == pytest.approx(run.recorder.busy_s, rel=1e-3)
    drafted = [value for _, value in found.counters["drafted tokens accepted"]]
    assert sum(drafted) == run.recorder.accepted


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e-4), st.floats(0, 1e-4)), min_size=2, max_size=40))
def test_neighbours_never_overlap_however_they_round(tmp_path_factory, steps):
    path, now = tmp_path_factory.mktemp("t") / "t.json", 0.0
    with Timeline(path) as timeline:
        for gap, seconds in steps:
            now += gap
            timeline.device(0, "target model", now, seconds, "forward", drafted=1)
            timeline.request(0, now, seconds, "decode")
            now += seconds
    assert len(checked(path).slices) == 2 * sum(seconds > 0 for _, seconds in steps)


def test_a_killed_run_s_timeline_reads_without_its_end(tmp_path):
    path = tmp_path / "run.json"
    scenario = Scenario(Poisson(4), Limits(4), requests=10)
    with Timeline(path) as timeline:
        simulate(bernoulli(0.7, 10, 40), GRID, Fixed(3), scenario, timeline=timeline)
    whole = path.read_text()
    lines = whole.splitlines()
    for count in (3, 5, len(lines) // 2, len(lines) - 1):
        # Viewers read events one by one until the text ends.
        assert lines[0] == "["
        events = [json.loads(line.rstrip(",")) for line in lines[1:count]]
        assert not imported(events).dropped


def test_the_importer_here_drops_what_perfetto_s_drops():
    name = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 5, "args": {"name": "a"}}

    def event(ts: Any, dur: Any) -> dict[str, Any]:
        return {"name": "s", "ph": "X", "pid": 1, "tid": 5, "ts": ts, "dur": dur, "args": {}}

    def dropped(*times: tuple[Any, Any]) -> int:
        return len(imported([name, *(event(*t) for t in times)]).dropped)

    assert dropped((0, 10), (5, 10)) == 1, "begins inside, ends outside"
    assert dropped((0, 10), (5, 5)) == 0, "nested"
    assert dropped((0, 10), (10, 5)) == 0, "next to each other"
    assert nanoseconds(1.001) == 1000, "cut off, where rounding would give 1001"
    assert dropped((0, 1.001), (math.nextafter(1.001, 0), 3)) == 0
    # Exact in nanoseconds, yet the second begins a nanosecond early and is lost.
    assert dropped((0.5, 0.501), (1.001, 3)) == 1


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Round(0, 0, 0, 1, 0, 1), "no draft"),
        (Round(0, 3, 3, 4, 3, 1), "all 3 accepted"),
        (Round(0, 3, 2, 3, 3, 1), "2 of 3 accepted"),
        (Round(0, 3, 0, 1, 5, 1), "none of 3 accepted"),
    ],
)
def test_a_round_says_what_became_of_its_draft(outcome, words):
    assert result_said(outcome) == words


def test_counters_are_zero_while_nothing_runs(tmp_path):
    path = tmp_path / "run.json"
    with Timeline(path) as timeline:
        timeline.tokens(1.0, 0.5, 3, 1)
        timeline.tokens(1.5, 0.5, 2, 0)
        timeline.tokens(4.0, 0.5, 1, 1)
    found = sorted(checked(path).counters["drafted tokens accepted"])
    seconds = [(ns / 1e9, value) for ns, value in found]
    assert seconds == [(0, 0), (1, 3), (1.5, 2), (2, 0), (4, 1), (4.5, 0)]


@pytest.mark.parametrize("mode", ["continuous", "pearl", "dsi"])
def test_devices_show_prompts_and_both_kinds_of_tokens(tmp_path, mode):
    path = tmp_path / "run.json"
    trace, policy = bernoulli(0.7, 10, 40), Fixed(3)
    scenario = Scenario(Poisson(4), Limits(4), requests=10, mode=mode)
    with Timeline(path) as timeline:
        simulate(trace, with_prompts(), policy, scenario, timeline=timeline)
    found = checked(path)
    for track in ("target model", "draft model"):
        busy = [s for s in found.slices if s.track == track and "prefill" in s.name]
        prompts = [s for s in found.slices if s.track.startswith("request") and s.name == "prefill"]
        assert 0 < len(busy) <= len(prompts) == 10
    for series in ("accepted", "wasted"):
        counted = [value for _, value in found.counters[f"drafted tokens {series}"]]
        assert min(counted) == 0 < max(counted)


def with_prompts() -> LatencyTable:
    cells = GRID.cells
    rows = cells[(cells["phase"] == "forward") & (cells["batch"] == 1)]
    return LatencyTable(pd.concat([cells, rows.assign(phase="prefill", context=0)]).drop_duplicates(
        ["model", "phase", "batch", "new_tokens", "context"]))  # fmt: skip
