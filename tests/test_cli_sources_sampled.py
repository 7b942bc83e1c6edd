"""Sampled outputs on the command line: recorded, found with the trace, refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL_PROFILE, Ran, Run
from traces.acceptance.trace import Trace
from traces.store.files import read_trace, write_trace


def profiled(run: Run, folder: Path, *options: object) -> Ran:
    """The command that made `small_run`, with more options or into another folder."""
    return run(*SMALL_PROFILE, "--out", folder, "--exit-layers", *options)


def table_2(run: Run, folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    """SpecBound's Table 2 on our pair, by row."""
    rows = run(
        "papers", "--trace", folder, "--table", "SpecBound Table 2", *options, "--json", "-"
    ).rows
    labels = [(row["row"], row["column"]) for row in rows]
    assert len(set(labels)) == len(labels)
    return {row["row"]: row for row in rows if row["kind"] == "same experiment on our pair"}


def test_sampled_outputs_get_their_early_exits_and_their_row(run: Run, small_run: Path) -> None:
    row = table_2(run, small_run)["temperature sampling (T=1.0)"]
    assert row["ours"] is None
    assert (
        "`draftsim profile sources --exit-layers --temperature 1` of the same pair" in row["note"]
    )
    before = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    assert profiled(run, small_run, "--temperature", 1).code == 0
    after = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    assert set(after) - set(before) == {"sampled.parquet", "exits-sampled.parquet"}
    assert all(after[name] == before[name] for name in before)
    rows = table_2(run, small_run)
    assert rows["temperature sampling (T=1.0)"]["ours"] > 0
    assert "exact in distribution" in rows["temperature sampling (T=1.0)"]["note"]
    assert rows["greedy decoding"]["ours"] > 0
    assert rows["temperature sampling (T=0.3)"]["ours"] is None
    note = rows["top-p sampling (p=0.9)"]["note"]
    assert "profile sources --exit-layers --temperature 1 --top-p 0.9` of the same pair" in note
    found = run(
        "simulate", "--trace", small_run / "sampled.parquet", "--latency", small_run, "--policy",
        "specbound", "--json", "-",
    ).rows  # fmt: skip
    assert (found[1]["verify"], found[1]["fidelity"]) == (
        "rejection-sampling", "exact in distribution",
    )  # fmt: skip
    assert profiled(run, small_run, "--temperature", 1).code == 0
    assert (small_run / "exits-sampled.parquet").read_bytes() == after["exits-sampled.parquet"]
    for other, said in (((0.3,), "0.3"), ((1, "--top-p", 0.9), "1 --top-p 0.9")):
        refused = profiled(run, small_run, "--temperature", *other)
        assert refused.code == 2
        assert f"sampled at T=1: name another --out for --temperature {said}" in refused.said


def test_sampled_runs_are_priced_by_the_rounds_really_decoded(run: Run, small_run: Path) -> None:
    from policies.lengths.basic import Fixed
    from profiler.checks.spot_check import PlannedPolicy, run_requests
    from profiler.recording.run import read_info
    from simulator.pricing import price
    from traces.store.engine_runs import read_measured
    from traces.store.files import read_latency

    assert profiled(run, small_run, "--temperature", 1).code == 0
    found = run(
        "validate", "--run", small_run, "--sampled", "--policy", "fixed:gamma=2", "--repeats", 2,
        "--json", "-",
    ).rows  # fmt: skip
    assert [row["rounds_differ"] for row in found] == [None, None]
    times = read_measured(small_run / "measured-sampled.parquet").times
    # Every repeat writes the same texts.
    assert (times.groupby(["policy", "request"])["rounds"].nunique() == 1).all()
    trace, planned = read_trace(small_run / "sampled.parquet"), PlannedPolicy("two", Fixed(2))
    log = run_requests(read_info(small_run).load(), trace, [planned], repeats=1).logs["two"]
    priced = price(log, read_latency(small_run / "latency.parquet"))
    assert found[1]["predicted_s"] == pytest.approx(priced.total_s)


def test_top_p_is_recorded_and_found_beside_the_trace(run: Run, small_run: Path) -> None:
    from traces.store.recordings import recordings

    cut = small_run.parent / "cut"
    shutil.copytree(small_run, cut)
    for name in ("sampled.parquet", "exits-sampled.parquet"):
        (cut / name).unlink(missing_ok=True)
    assert profiled(run, cut, "--temperature", 1, "--top-p", 0.9).code == 0
    # What ships of it: no greedy trace and no latencies.
    for path in cut.glob("*.parquet"):
        if path.name not in ("sampled.parquet", "exits-sampled.parquet"):
            path.unlink()
    row = table_2(run, small_run)["top-p sampling (p=0.9)"]
    assert row["ours"] > 0
    assert "exact in distribution" in row["note"]
    for trace in (cut, cut / "sampled.parquet"):
        rows = run(
            "simulate", "--trace", trace, "--latency", small_run, "--policy", "specbound",
            "--json", "-",
        ).rows  # fmt: skip
        [found] = [row for row in rows if row["policy"] == "specbound"]
        assert found["speedup"] == pytest.approx(row["ours"])
    listed = {r.name: r.summary for r in recordings(small_run.parent)}
    assert "sampled at T=1, top-p 0.9" in listed["cut"]
    assert "sampled" not in listed["run"]
    # Another pair's, or a damaged one, next to the trace is no reason to fail; asked for, it is.
    other = read_trace(cut / "sampled.parquet")
    alien = Trace(
        other.columns, other.requests, other.max_gamma, {**other.meta, "target": {}},
    )  # fmt: skip
    write_trace(alien, cut / "sampled.parquet")
    assert table_2(run, small_run)["top-p sampling (p=0.9)"]["ours"] is None
    refused = run("papers", "--trace", small_run, "--sampled", cut)
    assert "was recorded of another pair" in refused.refusal
    (cut / "sampled.parquet").write_bytes(b"PAR1")
    assert table_2(run, small_run)["top-p sampling (p=0.9)"]["ours"] is None
    shutil.rmtree(cut)
    refused = run("papers", "--trace", small_run, "--sampled", cut)
    assert (refused.code, "holds no sampled outputs" in refused.said) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0.9), "top-p 0.9 cuts what is drawn"),
        (("--temperature", 1, "--top-p", 0), "top-p is 0, expected above 0 and at most 1"),
        (("--temperature", 1, "--top-p", 1.5), "top-p is 1.5, expected"),
        (("--temperature", -1), "temperature is -1, expected a finite number"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--temperature", 1e-40), "temperature is 1e-40, expected a finite number from 1e-05"),
        (("--temperature", 1, "--seed", 10**14), "--seed: expected a value less than or equal to"),
        (("--temperature", 1, "--seed", -1), "--seed: expected a value greater than or equal to"),
    ],
)
def test_samplings_that_cannot_be_are_refused(
    run: Run, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    refused = profiled(run, tmp_path / "none", *options)
    assert refused.code == 2
    assert message in refused.said
    assert not (tmp_path / "none").exists()
