"""Draft sources and named systems on the command line: rows, notes, errors, recordings."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftsim
from policies.basic import Fixed
from simulator.papers import Ours
from simulator.papers.early_exit import FIGURE_3, early_exit_rows
from simulator.pricing import price
from tests.conftest import Ran, Run
from traces.errors import FileError
from traces.files import (
    read_latency,
    read_rounds,
    read_trace,
    write_latency,
    write_rounds,
    write_trace,
)
from traces.latency import LatencyTable
from traces.recordings import BUNDLED
from traces.replay import replay
from traces.sources import (
    PLD,
    SYSTEMS,
    EarlyExit,
    parse_source,
    read_recordings,
    replay_source,
    write_recordings,
)
from traces.sources.base import Recordings
from traces.trace import Request, Trace

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
    assert set(found) == set(SYSTEMS)
    assert "not listed" not in ran.err
    tokens = ran.rows[0]["tokens"]
    for name, row in found.items():
        source = parse_source(SYSTEMS[name].source)
        assert (row["source"], row["fidelity"]) == (source.name, source.fidelity)
        assert row["tokens"] == tokens  # lossless: the target's own output


def test_what_was_not_recorded_is_one_note(run: Run, plain: Path) -> None:
    ran = run("simulate", "--trace", plain, "--json", "-")
    listed = {row["policy"] for row in ran.rows} & set(SYSTEMS)
    assert listed == {"pld", "rest", "lookahead"}
    notes = [line for line in ran.err.splitlines() if "not listed" in line]
    assert len(notes) == 1
    assert "draftsim profile --exit-layers" in notes[0]
    assert all(name in notes[0] for name in set(SYSTEMS) - listed)


def test_a_source_replaces_the_draft_model(run: Run, plain: Path) -> None:
    ran = run(
        "simulate", "--trace", plain, "--source", "pld:num_tokens=4", "--policy", "fixed:gamma=2",
        "--policy", "fixed:gamma=4", "--json", "-",
    )  # fmt: skip
    rows = ran.rows
    assert [r["source"] for r in rows] == ["none", "pld", "pld"]
    log = replay_source(tokens_alone(), PLD(num_tokens=4), Fixed(2))
    assert rows[1]["rounds"] == len(log)
    # Searching text costs nothing beside constant latencies, and every round is a target pass.
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
        (["--source", "early-exit:tau=0.55"], "profile --exit-layers --source early-exit:tau=0.55"),
        (["--source", "pld", "--policy", "svip"], "svip|SVIP"),
        (["--source", "pld", "--verify", "spec-verification"], "use --verify exact"),
        (["--source", "pld", "--policy", "rest"], "drop --source"),
        (["--source", "pld", "--robustness"], "drop --source"),
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
        assert ran.code == 2
        assert "draftsim profile --exit-layers" in ran.err
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
    assert ran.code == 2
    assert "other outputs" in ran.err


def test_round_logs_keep_their_calls(tmp_path: Path) -> None:
    trace, latency = read_trace(FOLDER / "trace.parquet"), read_latency(FOLDER / "latency.parquet")
    log = replay_source(trace, EarlyExit(), Fixed(4), recordings=read_recordings(FOLDER))
    write_rounds(log, tmp_path / "log.parquet")
    again = read_rounds(tmp_path / "log.parquet")
    assert log.calls is not None
    assert again.calls is not None
    assert np.array_equal(again.calls, log.calls)
    assert price(again, latency).total_s == price(log, latency).total_s
    assert again.source == "early-exit"


def test_a_draft_models_rounds_have_no_calls_and_damage_is_named(tmp_path: Path) -> None:
    import pyarrow as pa

    from traces.parquet import read_file, write_file

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
    assert read_rounds(tmp_path / "none.parquet").calls is None


def test_the_papers_sweeps_are_monotone_where_they_must_be() -> None:
    trace, latency = read_trace(FOLDER / "trace.parquet"), read_latency(FOLDER / "latency.parquet")
    rows = early_exit_rows(Ours(trace, latency, (), read_recordings(FOLDER)))
    rate = {r.row: r.ours for r in rows if r.table == "SpecBound Figure 3" and r.column == "CR"}
    assert len(rate) == sum(len(values) for values in FIGURE_3.values())
    # A laxer threshold and a later bound let more positions exit; width bounds a round's tokens.
    widths = [rate[f"width={w}"] for w in FIGURE_3["width"]]
    assert all(r is not None and r <= w + 1 for r, w in zip(widths, FIGURE_3["width"], strict=True))
    assert widths[0] == 1  # one token drafted, no bonus: a round emits one token
    tables = {r.table for r in rows}
    assert {"SpecBound Table 1", "SpecBound Table 2", "SpecBound Table 5"} <= tables
    assert {"SpecBound Figure 3", "SpecBound Figure 4"} <= tables
    sampled = [r for r in rows if r.row.startswith("temperature")]
    assert sampled
    assert all(r.ours is None and "sampled" in r.note for r in sampled)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the bundled pair on a few prompts, by the command itself."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("small") / "run"
    prompts = Path(__file__).parents[1] / "profiler" / "bundled" / "prompts.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv",
            ["draftsim", "profile", "--target", "bundled", "--draft", "bundled", "--prompts",
             str(prompts), "--out", str(folder), "--limit", "2", "--max-new-tokens", "16",
             "--max-gamma", "4", "--repeats", "3", "--exit-layers"],
        )  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            draftsim.main()
    assert not stop.value.code
    return folder


def test_real_runs_agree_with_the_replay(run: Run, small_run: Path) -> None:
    names = ["specbound", "kangaroo", "medusa", "draft-and-verify-skip", "pld", "rest"]
    options = [part for name in names for part in ("--policy", name)]
    rows = run("validate", "--run", small_run, *options, "--repeats", 1, "--json", "-").rows
    assert [r["policy"] for r in rows] == ["autoregressive", *names]
    for row in rows:
        assert row["rounds_differ"] == 0, row
        assert row["outputs_differ"] == 0, row
        assert row["measured_s"] > 0
        assert row["predicted_s"] > 0
    refused = run("validate", "--run", small_run, "--source", "medusa-tree")
    assert refused.code == 2
    assert "no real decoder" in refused.err


def test_latencies_measured_between_the_real_runs_predict_and_are_kept(
    run: Run, small_run: Path
) -> None:
    arms = ("--policy", "fixed:gamma=2", "--policy", "gammatune")
    ran = run(
        "validate", "--run", small_run, *arms, "--repeats", 2, "--no-assisted", "--remeasure",
        "--json", "-",
    )  # fmt: skip
    trace = read_trace(small_run / "trace.parquet")
    log = replay(trace, Fixed(2), name="fixed:gamma=2")
    row = next(r for r in ran.rows if r["policy"] == "fixed:gamma=2")
    for file, column in (("latency-check", "error"), ("latency", "profile_error")):
        predicted = price(log, read_latency(small_run / f"{file}.parquet")).total_s
        assert row[column] == pytest.approx(predicted / row["measured_s"] - 1)
    refused = run("validate", "--run", small_run, "--remeasure", "--batch", 2)
    assert refused.code == 2
    assert "--remeasure is for" in refused.err
    ran = run(
        "validate", "--run", small_run, "--policy", "medusa", "--repeats", 2, "--remeasure",
        "--json", "-",
    )  # fmt: skip
    assert [row["policy"] for row in ran.rows] == ["autoregressive", "medusa"]
    kept = read_latency(small_run / "latency-check.parquet")
    assert kept.has("target", "pass")
    assert all(np.isfinite(row["profile_error"]) for row in ran.rows)


def test_a_repeated_profile_keeps_what_it_has_and_adds_what_is_asked(
    run: Run, small_run: Path
) -> None:
    from profiler.run import BUNDLED as PAIR

    command = (
        "profile", "--target", "bundled", "--draft", "bundled", "--prompts",
        PAIR / "prompts.jsonl", "--out", small_run, "--limit", 2, "--max-new-tokens", 16,
        "--max-gamma", 4, "--repeats", 3,
    )  # fmt: skip
    before = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    (small_run / "starts-medusa.parquet").unlink()
    assert run(*command, "--exit-layers", "--source", "early-exit:tau=0.55").code == 0
    after = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    assert {n for n in before if before[n] != after.get(n)} <= {
        "exits.parquet", "starts-medusa.parquet", "measured-sources.parquet",
    }  # fmt: skip
    found = read_recordings(small_run)
    assert found.exits is not None
    settings = {s[:-1] for s in found.exits.settings}
    assert EarlyExit(tau=0.55).setting(1)[:-1] in settings
    assert EarlyExit().setting(1)[:-1] in settings
    assert "medusa" in found.starts
    assert run(*command, "--latency-only").code == 0
    again = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    assert {n for n in again if again[n] != after.get(n)} == {"latency.parquet"}
    assert read_latency(small_run / "latency.parquet").has("exit", "layer")
    refused = run(*command, "--latency-only", "--exit-layers")
    assert refused.code == 2


def profiled(run: Run, folder: Path, *options: object) -> Ran:
    """The command that made `small_run`, with more options and into another folder."""
    from profiler.run import BUNDLED as PAIR

    return run(
        "profile", "--target", "bundled", "--draft", "bundled", "--prompts",
        PAIR / "prompts.jsonl", "--out", folder, "--limit", 2, "--max-new-tokens", 16,
        "--max-gamma", 4, "--repeats", 3, "--exit-layers", *options,
    )  # fmt: skip


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
    command = "draftsim profile --target bundled --draft bundled --prompts"
    assert command in row["note"]
    assert f"--out {small_run} --exit-layers --temperature 1`" in row["note"]
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
    assert "--out RUN --exit-layers --temperature 1 --top-p 0.9`" in note
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
        assert f"sampled at T=1: name another --out for --temperature {said}" in " ".join(
            refused.err.split()
        )


def test_top_p_is_recorded_and_found_beside_the_trace(run: Run, small_run: Path) -> None:
    from traces.recordings import recordings

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
        [_, found] = run(
            "simulate", "--trace", trace, "--latency", small_run, "--policy", "specbound",
            "--json", "-",
        ).rows  # fmt: skip
        assert found["speedup"] == pytest.approx(row["ours"])
    listed = {r.name: r.summary for r in recordings(small_run.parent)}
    assert "sampled at T=1, top-p 0.9" in listed["cut"]
    assert "sampled" not in listed["run"]
    # Another pair's, or a damaged one, beside the trace is no reason to fail; asked for, it is.
    other = read_trace(cut / "sampled.parquet")
    alien = Trace(
        other.columns, other.requests, other.max_gamma, {**other.meta, "target": {}},
    )  # fmt: skip
    write_trace(alien, cut / "sampled.parquet")
    assert table_2(run, small_run)["top-p sampling (p=0.9)"]["ours"] is None
    refused = run("papers", "--trace", small_run, "--sampled", cut)
    assert refused.code == 2
    assert "was recorded of another pair" in refused.err
    (cut / "sampled.parquet").write_bytes(b"PAR1")
    assert table_2(run, small_run)["top-p sampling (p=0.9)"]["ours"] is None
    shutil.rmtree(cut)
    refused = run("papers", "--trace", small_run, "--sampled", cut)
    assert (refused.code, "holds no sampled outputs" in " ".join(refused.err.split())) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0.9), "top-p 0.9 cuts what is drawn"),
        (("--temperature", 1, "--top-p", 0), "top-p is 0, expected above 0 and at most 1"),
        (("--temperature", 1, "--top-p", 1.5), "top-p is 1.5, expected"),
        (("--temperature", -1), "temperature is -1, expected a finite number"),
        (("--temperature", "nan"), "temperature is nan"),
    ],
)
def test_samplings_that_cannot_be_are_refused(
    run: Run, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    refused = profiled(run, tmp_path / "none", *options)
    assert refused.code == 2
    assert message in " ".join(refused.err.split())
    assert not (tmp_path / "none").exists()


def test_stale_recordings_are_recorded_again(small_run: Path) -> None:
    from commands.source_runs import missing
    from profiler.sources.modules import Modules

    kept = read_recordings(small_run)
    provenance = {"outputs_sha256": "of another trace"}
    assert missing(kept, Modules(), [], None, provenance) == ["layer-skip"]
    assert missing(Recordings(), Modules(), [], None, {}) == ["layer-skip"]
    true = {"outputs_sha256": kept.starts["layer-skip"].meta["outputs_sha256"]}
    assert missing(kept, Modules(), [], None, true) == []
    assert missing(kept, Modules(), [], [2], true) == ["layer-skip"]


def test_an_unsupported_architecture_is_one_line(run: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from profiler.run import BUNDLED as PAIR

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    ran = run(
        "profile", "--target", tmp_path / "gpt2", "--draft", tmp_path / "gpt2", "--prompts",
        PAIR / "prompts.jsonl", "--out", tmp_path / "run", "--exit-layers",
    )  # fmt: skip
    assert ran.code == 2
    assert "GPT2LMHeadModel" in ran.err
    assert "Llama, Mistral and Qwen" in ran.err
    assert not (tmp_path / "run").exists()


def test_heads_are_trained_for_a_target_that_has_none(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands.source_modules import HEADS, modules_of
    from profiler.loading import Pair
    from profiler.run import read_run
    from profiler.sources import train

    made: list[str] = []
    full = train.train_all

    def few(target: Any, text: Any, out: Path, only: Any) -> None:
        made.extend(only)
        full(target, text, out, only, seconds=0.0)  # a step each

    own_text = train.own_text
    monkeypatch.setattr(
        train, "own_text", lambda target, encoded: own_text(target, encoded, rounds=1, batch=6)
    )
    monkeypatch.setattr(train, "train_all", few)
    info = read_run(small_run)
    pair: Pair = info.load()
    texts = tmp_path / "texts.txt"
    texts.write_text("return first + second; " * 60)
    trace = read_trace(small_run / "trace.parquet")
    modules = modules_of(pair, info, tmp_path, trace, texts)
    assert set(made) == set(train.MODULES)
    assert modules.exits is not None
    assert modules.masks is not None
    assert sorted(p.name for p in (tmp_path / HEADS).iterdir()) == sorted(train.FILES.values())
    made.clear()
    modules_of(pair, info, tmp_path, trace, texts)
    assert made == []


def test_recordings_survive_their_folder(tmp_path: Path) -> None:
    found = read_recordings(FOLDER)
    write_recordings(found, tmp_path)
    again = read_recordings(tmp_path)
    assert found.exits is not None
    assert again.exits is not None
    assert again.exits.settings == found.exits.settings
    assert set(again.starts) == set(found.starts)
