"""Draft sources and named methods on the command line: rows, notes, errors, recordings."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from simulator.papers.ours import Ours
from simulator.papers.specbound import choices_recorded, early_exit_rows, sampling_rows
from simulator.pricing import price
from tests.conftest import Run
from traces.acceptance.trace import Request, Trace
from traces.errors import FileError
from traces.latency.table import LatencyTable
from traces.sources.early_exit import EarlyExit
from traces.sources.found import read_recordings, write_recordings
from traces.sources.lookups.sources import PLD
from traces.sources.registry import SYSTEMS, parse_source
from traces.sources.replay import replay_source
from traces.store.files import (
    read_latency,
    read_rounds,
    read_trace,
    write_latency,
    write_rounds,
    write_trace,
)
from traces.store.recordings import BUNDLED

FOLDER = BUNDLED / "bundled"
CONST = "const:target=0.0143,draft=0.00176"


def tokens_alone(requests: int = 3, length: int = 30) -> Trace:
    """A trace of repeating text, without anything that other sources need recorded."""
    lengths = [length] * requests
    token = np.tile(np.arange(length) % 5, requests)
    columns = {
        "request": np.repeat(np.arange(requests), lengths),
        "position": np.tile(np.arange(length), requests),
        "offset": np.zeros(sum(lengths), int),
        "match": np.zeros(sum(lengths), int),
        "token": token,
    }
    rows = [
        Request(str(i), "all", 6, length, length, "length", (0, 1, 2, 3, 4, 9))
        for i in range(requests)
    ]
    return Trace(columns, rows, 1, {"eos_token_ids": []})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_trace(tokens_alone(), folder / "trace.parquet")
    write_latency(LatencyTable.constant(0.0143, 0.00176), folder / "latency.parquet")
    return folder


def test_all_lists_every_named_system_of_the_bundled_recording(run: Run) -> None:
    ran = run("simulate", "--policy", "all", "--resamples", 20, "--json", "-")
    found = {row["policy"]: row for row in ran.rows if row["policy"] in SYSTEMS}
    # The bundled recording has no drafters on features; Hydra and some lookups were not timed.
    note = next(line for line in ran.err.splitlines() if "not listed" in line)
    lacking = {
        "eagle", "eagle2", "eagle3", "eagle3-tree", "hydra", "mtp", "ngram", "ngram-simple",
        "suffix",
    }  # fmt: skip
    assert set(found) == set(SYSTEMS) - lacking
    assert note.startswith(
        "not listed: 5 methods that this recording cannot replay and 4 methods without measured "
        "passes: `draftsim profile sources --exit-layers` "
    )
    lacks = run("simulate", "--policy", "eagle").err  # which says it of each
    assert "`draftsim profile sources --source eagle:model=DIR`" in lacks
    tokens = ran.rows[0]["tokens"]
    for name, row in found.items():
        source = parse_source(SYSTEMS[name].source)
        assert (row["source"], row["fidelity"]) == (source.name, source.fidelity)
        assert row["tokens"] == tokens  # lossless: the target's own output


def test_what_was_not_recorded_is_one_note(run: Run, plain: Path) -> None:
    ran = run("simulate", "--trace", plain, "--json", "-")
    listed = {row["policy"] for row in ran.rows} & set(SYSTEMS)
    assert listed == {"pld", "rest", "lookahead", "ngram", "ngram-simple", "suffix"}
    notes = [line for line in ran.err.splitlines() if "not listed" in line]
    assert len(notes) == 1
    assert "draftsim profile sources --exit-layers" in notes[0]
    assert f"{len(set(SYSTEMS) - listed)} methods that this recording cannot replay" in notes[0]
    assert len(notes[0]) < 240


def test_single_layers_are_not_priced_at_a_target_with_more_of_them(run: Run) -> None:
    """The bundled target has 8 layers and SmolLM2 has 30: rounds of 8 would look cheap."""
    other = ("--trace", "bundled", "--latency", "smollm2-cpu", "--resamples", 20)
    for asked in (("--policy", "specbound"), ("--source", "layer-skip", "--policy", "fixed")):
        ran = run("simulate", *other, *asked)
        said = "recorded of a target with 8, and the latencies are of a target with 30"
        assert said in ran.refusal
    swept = run("sweep", *other[:4], "--source", "layer-skip")
    assert "recorded of a target with 8" in swept.refusal
    ran = run("simulate", *other, "--json", "-")
    assert "methods that ran layers of another target" in ran.err
    listed = {row["source"] for row in ran.rows}
    assert not listed & {"early-exit", "kangaroo", "layer-skip"}
    assert "blockwise" in listed  # heads run in whole passes


def test_a_source_replaces_the_draft_model(run: Run, plain: Path) -> None:
    ran = run(
        "simulate", "--trace", plain, "--source", "pld:num_tokens=4", "--policy", "fixed:gamma=2",
        "--policy", "fixed:gamma=4", "--json", "-",
    )  # fmt: skip
    rows = ran.rows
    assert {r["source"] for r in rows} == {"none", "pld"}
    log = replay_source(tokens_alone(), PLD(num_tokens=4), Fixed(2))
    assert rows[1]["rounds"] == len(log)
    # Searching text costs nothing with constant latencies, and every round is a target pass.
    assert rows[1]["wall_s"] == pytest.approx(len(log) * 0.0143)


def test_a_lossless_system_emits_the_same_tokens_as_its_parts(run: Run) -> None:
    rows = run("simulate", "--policy", "kangaroo", "--json", "-").rows
    system = SYSTEMS["kangaroo"]
    parts = run(
        "simulate", "--source", system.source, "--policy", system.policy, "--json", "-"
    ).rows
    for name in ("rounds", "drafted", "accepted", "wall_s", "speedup"):
        assert rows[1][name] == parts[1][name], name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source", "early-exitt"], "did you mean 'early-exit'"),
        (["--source", "early-exit:tau=2"], "tau"),
        (
            ["--source", "early-exit:tau=0.55"],
            "profile sources --exit-layers --source early-exit:tau=0.55",
        ),
        (["--source", "pld", "--policy", "svip"], "svip|SVIP"),
        (["--source", "pld", "--verify", "spec-verification"], "use --verify exact"),
        (["--source", "pld", "--policy", "rest"], "drop --source"),
        (["--policy", "specbound", "--verify", "csd"], "drop --verify"),
    ],
)
def test_what_cannot_be_is_one_line(run: Run, arguments: list[str], said: str) -> None:
    ran = run("simulate", *arguments)
    assert ran.code == 2
    assert len(ran.err.strip().splitlines()) == 1
    assert any(part in ran.err for part in said.split("|")), ran.err


def test_a_missing_recording_is_one_line(run: Run, plain: Path) -> None:
    for arguments in (
        ["--source", "medusa"],
        ["--policy", "specbound"],
        ["--source", "early-exit"],
    ):
        ran = run("simulate", "--trace", plain, *arguments)
        assert "draftsim profile sources --exit-layers" in ran.refusal
        assert len(ran.err.strip().splitlines()) == 1


def test_recordings_of_other_outputs_are_refused(run: Run, tmp_path: Path) -> None:
    trace = read_trace(FOLDER / "trace.parquet")
    token = np.array(trace.columns["token"])
    token[trace.on_path[3]] += 1
    changed = Trace({**trace.columns, "token": token}, trace.requests, trace.max_gamma, trace.meta)
    write_trace(changed, tmp_path / "trace.parquet")
    for name in ("latency", "exits"):
        shutil.copy(FOLDER / f"{name}.parquet", tmp_path)
    ran = run("simulate", "--trace", tmp_path, "--policy", "specbound")
    assert "other outputs" in ran.refusal


def test_round_logs_keep_their_calls(tmp_path: Path) -> None:
    trace, latency = read_trace(FOLDER / "trace.parquet"), read_latency(FOLDER / "latency.parquet")
    log = replay_source(trace, EarlyExit(), Fixed(4), recordings=read_recordings(FOLDER))
    write_rounds(log, tmp_path / "log.parquet")
    again = read_rounds(tmp_path / "log.parquet")
    assert log.recorded_calls is not None
    assert again.recorded_calls is not None
    assert np.array_equal(again.recorded_calls, log.recorded_calls)
    assert price(again, latency).total_s == price(log, latency).total_s
    assert again.source == "early-exit"


def test_a_draft_models_rounds_have_no_calls_and_damage_is_named(tmp_path: Path) -> None:
    import pyarrow as pa

    from traces.store.parquet import read_file, write_file

    log = replay_source(tokens_alone(), PLD(), Fixed(2))
    write_rounds(log, tmp_path / "log.parquet")
    header, table = read_file(tmp_path / "log.parquet", "rounds")
    lacking = table.drop_columns(["calls_kind"])
    write_file(tmp_path / "lacking.parquet", "rounds", lacking, header)
    with pytest.raises(FileError, match="calls_kind"):
        read_rounds(tmp_path / "lacking.parquet")
    wrong = table.set_column(
        table.column_names.index("calls_kind"), "calls_kind",
        pa.array([[99]] * table.num_rows, pa.list_(pa.int8())),
    )  # fmt: skip
    write_file(tmp_path / "wrong.parquet", "rounds", wrong, header)
    with pytest.raises(FileError, match=r"lengths|unknown kind"):
        read_rounds(tmp_path / "wrong.parquet")
    none = table.drop_columns([n for n in table.column_names if n.startswith("calls_")])
    write_file(tmp_path / "none.parquet", "rounds", none, header)
    assert read_rounds(tmp_path / "none.parquet").recorded_calls is None


def test_the_papers_sweeps_are_monotone_where_they_must_be() -> None:
    trace, latency = read_trace(FOLDER / "trace.parquet"), read_latency(FOLDER / "latency.parquet")
    ours = Ours(trace, latency, (), read_recordings(FOLDER))
    rows, values = early_exit_rows(ours), choices_recorded(ours)
    rate = {r.row: r.ours for r in rows if r.table == "SpecBound Figure 3" and r.column == "CR"}
    assert len(rate) == sum(len(v) for v in values.values())
    # A laxer threshold and a later bound let more positions exit; width bounds a round's tokens.
    widths = [rate[f"width={w}"] for w in values["width"]]
    assert all(r is not None and r <= w + 1 for r, w in zip(widths, values["width"], strict=True))
    assert widths[0] == 1  # one token drafted, no bonus: a round emits one token
    tables = {r.table for r in rows}
    assert {"SpecBound Table 1", "SpecBound Table 5"} <= tables
    assert {"SpecBound Figure 3", "SpecBound Figure 4"} <= tables
    table_2 = sampling_rows(ours)
    assert {r.table for r in table_2} == {"SpecBound Table 2"}
    sampled = [r for r in table_2 if r.row.startswith("temperature")]
    assert sampled
    assert all(r.ours is None and "sampled" in r.note for r in sampled)


def test_recordings_survive_their_folder(tmp_path: Path) -> None:
    found = read_recordings(FOLDER)
    write_recordings(found, tmp_path)
    again = read_recordings(tmp_path)
    assert EarlyExit().recording(again).settings == EarlyExit().recording(found).settings
    assert set(again) == set(found)
