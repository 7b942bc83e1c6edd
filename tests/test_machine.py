"""Disturbed runs: how they are seen, made again and left out, and what is said of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

torch = pytest.importorskip("torch")

import commands.common.quiet  # noqa: E402 - needs torch
from profiler.latency.table import Block, Step, Sweeps  # noqa: E402
from profiler.machine import (  # noqa: E402  # noqa: E402  # noqa: E402
    MOST,
    Machine,
    Repeats,
    Stopwatch,
    Timing,
    involuntary_switches,
    matrix_vector_products,
    read_stat,
    timed,
)
from traces.latency.table import LatencyTable  # noqa: E402
from traces.machine import DISTURBED, differ, machine_label, slowdown  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _made_again(_nothing_run_twice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside the tests."""
    monkeypatch.setattr("profiler.machine.MOST", MOST)


QUIET, OFF = Timing(1.0, 0.0), Timing(2.0, 1.0, 4)


class FakeClock:
    """A clock of `profiler.machine` that runs at all only where it is told so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 0.0
        self.switches = 0
        patch.setattr("profiler.machine.perf_counter", lambda: self.wall)
        patch.setattr("profiler.machine.thread_time", lambda: self.cpu)
        patch.setattr("profiler.machine.involuntary_switches", lambda: self.switches)

    def work(self, seconds: float, off: float = 0.0) -> None:
        """Some work, and a time in which another process had the processor."""
        self.wall, self.cpu = self.wall + seconds + off, self.cpu + seconds
        self.switches += off > 0


def test_time_without_a_processor_is_told_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeClock(monkeypatch)
    watch = Stopwatch(CPU)
    taken, _ = watch.measure(lambda: fake.work(2.0))
    assert taken == (2.0, 0.0, 0)
    assert not taken.disturbed
    taken, _ = watch.measure(lambda: fake.work(3.0, off=1.0))
    assert taken == (4.0, 1.0, 1)
    assert taken.disturbed
    assert (taken.off, taken.seconds) == (0.25, 3.0)
    taken, _ = timed(CPU, lambda: fake.work(1.0, off=DISTURBED / 2))
    # Too little to matter: wall time is what there is to pay.
    assert taken.seconds == taken.wall_s == pytest.approx(1 + DISTURBED / 2)
    assert Timing(1.0, 0.5, 2) + Timing(2.0, 0.0, 1) == Timing(3.0, 0.5, 3)


def answers(timings: Sequence[Timing]) -> Iterator[Timing]:
    yield from timings


def test_a_disturbed_run_is_discarded_and_made_again() -> None:
    again = Repeats()
    runs = answers([QUIET, OFF, QUIET, OFF, QUIET])
    kept = [again.best(lambda: (taken := next(runs), taken))[0] for _ in range(3)]
    assert kept == [QUIET] * 3
    assert (again.runs, again.disturbed, again.repeated) == (3, 2, 2)
    found = Machine(torch.nn.Module(), CPU).state([again])
    assert (found["runs"], found["disturbed"], found["repeated"], found["off"]) == (3, 2, 2, 0)


def test_the_least_disturbed_run_is_kept_and_the_budget_is_too() -> None:
    again, made = Repeats(share=0.5), 0

    def run() -> tuple[Timing, int]:
        nonlocal made
        made += 1
        return Timing(1.0, 0.5 if made == 2 else 0.9), made

    assert again.best(run)[1] == 2
    for _ in range(99):
        again.best(run)
    assert again.disturbed == 100
    assert again.repeated == made - 100 <= 51
    alone = Repeats(share=100)
    made = 2
    alone.best(run)
    assert made == 3 + MOST


def test_a_cell_is_the_mean_of_what_was_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeClock(monkeypatch)
    script = iter(
        [(1.0, 0.0), (1.0, 2.0)]  # half of the first block disturbed: made again
        + [(1.0, 0.0), (1.0, 0.1)]  # less so, and kept: its quiet call counts
        + [(2.0, 0.0)] * 2 + [(3.0, 0.0)] * 2  # slow at times, which a median would not tell
    )  # fmt: skip
    step = Step("target", "forward", 1, 8, lambda: fake.work(*next(script)))
    sweeps = Sweeps([Block([[step], [step]])], CPU, warmup=0)
    sweeps.repeats = Repeats(share=1)
    sweeps.run()
    assert (sweeps.repeats.disturbed, sweeps.repeats.repeated) == (1, 1)
    sweeps.run()
    sweeps.run()
    row = sweeps.cells().iloc[0]
    assert row["median_s"] == pytest.approx((1 + 2 + 3) / 3)
    assert row["repeats"] == 3
    assert next(script, None) is None


def test_blocks_of_a_sweep_are_timed_one_by_one() -> None:
    ran: list[int] = []
    blocks = [Block([[Step("target", "forward", n, 8, lambda n=n: ran.append(n))]])  # type: ignore[misc]
              for n in range(1, 6)]  # fmt: skip
    sweeps = Sweeps(blocks, CPU, warmup=0)
    sweeps.repeats = Repeats(share=0)
    for done in range(1, 13):
        sweeps.step()
        assert (sweeps.steps, len(ran), len(sweeps)) == (done, done, done // 5)
    for start in (0, 5):
        assert sorted(ran[start : start + 5]) == [1, 2, 3, 4, 5]
    sweeps.run()
    assert (sweeps.steps, len(sweeps)) == (15, 3)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot pin processes here")
def test_switches_forced_by_another_process_are_counted() -> None:
    """Two processes on one processor take turns, so that each is interrupted."""
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    spin = f"import os\nos.sched_setaffinity(0, {{{one}}})\nwhile True: pass"
    watch, seen = Stopwatch(CPU), Timing(0.0)
    with subprocess.Popen([sys.executable, "-c", spin]) as rival:
        try:
            os.sched_setaffinity(0, {one})
            give_up = time.monotonic() + 60
            while not (seen.switches and seen.disturbed) and time.monotonic() < give_up:
                seen, _ = watch.measure(lambda: sum(range(3_000_000)))
        finally:
            os.sched_setaffinity(0, allowed)
            rival.kill()
    assert seen.switches > 0
    assert seen.disturbed
    assert 0 < seen.off_s < seen.wall_s
    assert involuntary_switches() >= seen.switches


def test_the_reference_work_reads_every_matrix_of_the_model_once() -> None:
    tied = torch.nn.Linear(4, 6, bias=True)
    model = torch.nn.ModuleList([tied, torch.nn.LayerNorm(4), tied, torch.nn.Linear(6, 3)])
    machine = Machine(model, CPU)
    assert machine.state([])["reference_s"] is None
    for _ in range(3):
        machine.pulse()
    state = machine.state([])
    assert state["reference_s"] > 0
    assert state["reference_spread_s"] >= 0
    assert (state["runs"], state["off"]) == (0, 0.0)
    assert matrix_vector_products(torch.nn.LayerNorm(4)) is None
    if read_stat() is not None:
        assert 0 <= state["steal"] <= 1
        assert state["others"] >= 0


def test_what_the_system_does_not_tell_is_unknown(tmp_path: os.PathLike[str]) -> None:
    from pathlib import Path

    assert read_stat(Path(tmp_path) / "none") is None
    (short := Path(tmp_path) / "stat").write_text("cpu 1 2 3\n")
    assert read_stat(short) is None
    assert machine_label(None) is machine_label({}) is machine_label({"steal": 0.5}) is None
    assert slowdown({"reference_s": 0.0}, {"reference_s": 1.0}) is None
    assert not differ(None, {"reference_s": 1.0})


def state(reference_s: float = 1e-3, spread: float = 0.01, **figures: float) -> dict[str, float]:
    return {"reference_s": reference_s, "reference_spread_s": spread * reference_s, **figures}


def test_machines_differ_beyond_the_spread_of_the_reference_work() -> None:
    assert machine_label(state(off=0.0)) == "quiet"
    assert machine_label(state(off=2 * DISTURBED)) == "disturbed"
    assert machine_label(state(off=0.0, spread=0.09)) == "disturbed"
    assert differ(state(), state(1.2e-3))
    assert differ(state(1.2e-3), state())
    assert not differ(state(spread=0.15), state(1.2e-3, spread=0.15))
    assert not differ(state(), state(1.03e-3))


def test_warnings_name_the_figures_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    def table(machine: object) -> LatencyTable:
        plain = LatencyTable.constant(1.0, 0.1)
        return LatencyTable(plain.cells, {**plain.meta, "machine": machine})

    commands.common.quiet.say_machine(table(state()), state(1.4e-3, off=0.0), "use --remeasure")
    said = capsys.readouterr().err
    assert "the machine's speed changed" in said
    assert "1 ms during the profile and 1.4 ms during the runs (+40%): use --remeasure" in said
    commands.common.quiet.say_machine(table(state()), state(1.4e-3, off=0.0), None)
    assert capsys.readouterr().err == ""
    commands.common.quiet.say_machine(table(None), state(off=0.25, others=1.0), "use --remeasure")
    said = capsys.readouterr().err
    assert "disturbed during the real runs: 25.0% of the time without a processor" in said
    assert "other work on 1.0 processors, reference work ± 1%: use --remeasure" in said
    commands.common.quiet.say_disturbed(table(state(off=0.25)))
    assert "measure them again" in capsys.readouterr().err
    commands.common.quiet.say_disturbed(table(state(off=0.0)))
    commands.common.quiet.say_disturbed(LatencyTable.constant(1.0, 0.1))
    assert capsys.readouterr().err == ""
