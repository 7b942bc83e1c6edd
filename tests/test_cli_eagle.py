"""Drafters on features from the command line: recorded, replayed, run for real."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import ONE_PROMPT, Run
from traces.sources.found import read_recordings
from traces.sources.starts.trees import TreeRecording
from traces.store.files import read_latency, write_latency


def test_a_profiled_drafter_replays_as_it_really_decodes(
    run: Run, drafters: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    names = ("one", "three")
    sources = [p for n in names for p in ("--source", f"eagle:model={drafters / n}")]
    run(*ONE_PROMPT, "--out", out, *sources).ok()
    found = read_recordings(out)
    assert set(found) == {"eagle.one", "eagle.three"}
    table = read_latency(out / "latency.parquet")
    for name in ("eagle.one", "eagle.three"):
        assert table.has(name, "forward")
        assert table.has(name, "prefill")

    kept = {p.name: p.read_bytes() for p in out.glob("*.parquet")}
    assert run(*ONE_PROMPT, "--out", out, *sources).code == 0
    assert {p.name: p.read_bytes() for p in out.glob("*.parquet")} == kept

    rows = run(
        "simulate", "--trace", out, "--source", "eagle:model=three", "--policy", "fixed:gamma=3",
        "--policy", "confidence", "--json", "-",
    ).rows  # fmt: skip
    shown = [r["policy"] for r in rows]
    assert shown[:3] == ["autoregressive", "fixed:gamma=3", "confidence:gamma=8"]
    assert rows[1]["source"] == "eagle:model=three"
    assert rows[1]["fidelity"] == "exact"

    drafted = ("--trace", out, "--source", "eagle:model=three", "--json", "-")
    served = run("serve", *drafted, "--policy", "fixed:gamma=3", "--batch", 1, "--requests", 2).rows
    assert [(r["policy"], r["source"]) for r in served] == [
        ("autoregressive", "eagle:model=three"), ("fixed:gamma=3", "eagle:model=three")
    ]  # fmt: skip
    [swept] = run("sweep", *drafted, "--policy", "fixed:gamma=3", "--resamples", 0).rows
    # One prompt, decoded alone: served, swept and replayed come to the same.
    assert swept["mean_speedup"] == pytest.approx(rows[1]["speedup"], rel=1e-9)
    assert served[1]["tpot_s"]["mean"] == pytest.approx(
        served[0]["tpot_s"]["mean"] / rows[1]["speedup"], rel=1e-9
    )
    assert swept["drafts"] == "eagle:model=three"
    run("tune", "--engine", "vllm", *drafted).ok()
    for command, message in (
        (("serve", "--batch", 4), "at batch 1 alone"),
        (("serve", "--mode", "pearl"), "needs verified features to draft"),
        (("serve", "--verify", "typical"), "recorded for a draft model alone"),
        (("sweep", "--gpu", "h100"), "is not kept"),
        (("sweep", "--alpha", "0.5"), "leave out what asks for another acceptance"),
        (("tune", "--engine", "hf"), "needs a draft model"),
        (("tune", "--engine", "llamacpp"), "needs a draft model"),
    ):
        refused = run(*command, *drafted)
        assert message in refused.refusal
    refused = run("serve", "--source", "medusa-tree", "--trace", out)
    assert "verification is wider than its draft" in refused.refusal

    checked = run(
        "validate", "--run", out, "--source", "eagle:model=eagle3", "--policy", "fixed:gamma=3",
        "--policy", "eagle", "--repeats", 1, "--json", "-",
    )  # fmt: skip
    assert "has a draft source of its own" in checked.refusal
    for options in (("--source", "eagle:model=one", "--policy", "fixed:gamma=3"),
                    ("--policy", "eagle", "--policy", "eagle3")):  # fmt: skip
        rows = run("validate", "--run", out, *options, "--repeats", 1, "--json", "-").rows
        assert len(rows) == len(options) // 2 + 1 - (options[0] == "--source")
        for row in rows:
            assert row["rounds_differ"] == row["texts_diverged"] == 0, row
            assert row["predicted_s"] > 0

    assert run(*ONE_PROMPT, "--out", out, "--latency-only").code == 0
    assert read_latency(out / "latency.parquet").has("eagle.three", "forward")


def test_a_run_takes_in_further_drafters_of_a_kind(
    run: Run, drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    made = run(*ONE_PROMPT, "--out", out, "--source", f"eagle:model={drafters / 'one'}").ok()
    kept = {p.name: p.read_bytes() for p in out.glob("*.parquet") if p.stem != "latency"}
    cells = read_latency(out / "latency.parquet").cells

    monkeypatch.chdir(drafters)  # the drafter is named from where one is, and found from elsewhere
    made = run(*ONE_PROMPT, "--out", out, "--source", "eagle:model=another").ok()
    assert "recording eagle.another along 1 prompt" in made.err
    assert "recorded eagle.another into" in made.err
    monkeypatch.chdir(tmp_path)
    assert {n: (out / n).read_bytes() for n in kept} == kept
    now = read_latency(out / "latency.parquet").cells
    assert set(now["model"]) - set(cells["model"]) == {"eagle.another"}
    pd.testing.assert_frame_equal(
        now[now["model"] != "eagle.another"].reset_index(drop=True), cells
    )

    asked = ("--source", "eagle:model=one", "--policy", "fixed:gamma=3", "--json", "-")
    first = run("simulate", "--trace", out, *asked).rows[1]
    table = read_latency(out / "latency.parquet")
    slower = table.scaled({"eagle.one": 10.0}, "a test")
    write_latency(slower, out / "latency.parquet")
    dear = run("simulate", "--trace", out, *asked).rows[1]
    assert dear["wall_s"] > first["wall_s"]
    write_latency(table.scaled({"eagle.another": 10.0}, "a test"), out / "latency.parquet")
    assert run("simulate", "--trace", out, *asked).rows[1]["wall_s"] == first["wall_s"]

    # What is of a kind is listed drafter by drafter, and told apart by its source.
    every = run("simulate", "--trace", out, "--policy", "eagle", "--json", "-").rows
    assert [(r["policy"], r["source"]) for r in every[1:3]] == [
        ("eagle (eagle:model=another)", "eagle:model=another"),
        ("eagle (eagle:model=one)", "eagle:model=one"),
    ]  # fmt: skip
    refused = run("simulate", "--trace", out, "--source", "eagle", "--policy", "fixed:gamma=2")
    assert "another (eagle), one (eagle)" in refused.refusal
    row = run("validate", "--run", out, "--source", "eagle:model=another", "--policy",
              "fixed:gamma=3", "--repeats", 1, "--json", "-").rows[1]  # fmt: skip
    assert (row["source"], row["rounds_differ"]) == ("eagle:model=another", 0)

    # Weights that lie elsewhere by now are the same weights.
    (drafters / "one").rename(tmp_path / "one")
    drafts = read_recordings(out)["eagle.one"]["token"]
    made = run(*ONE_PROMPT, "--out", out, "--source", f"eagle:model={tmp_path / 'one'}",
               "--temperature", 1)  # fmt: skip
    assert "recorded nothing new" in made.err
    assert "recording outputs sampled at T=1 of 1 prompt" in made.err
    assert "recording eagle.one along sampled outputs of 1 prompt" in made.err
    assert "recorded eagle.one along sampled outputs" in made.err
    row = run("simulate", "--trace", out / "sampled.parquet", "--latency", out, *asked).rows[1]
    assert (row["source"], row["fidelity"]) == ("eagle:model=one", "exact in distribution")
    moved = read_recordings(out)["eagle.one"]
    assert moved.meta["model"] == str(tmp_path / "one")
    assert (moved["token"] == drafts).all()
    (tmp_path / "one").rename(drafters / "one")


def test_what_is_amiss_is_one_line(run: Run, drafters: Path, tmp_path: Path) -> None:
    out, own = ("--out", tmp_path / "run"), f"eagle2:model={drafters / 'one'}"
    for options, message in (
        (("--source", "eagle"), "names no drafter: give its folder"),
        (("--source", "pld", "--exit-layers"), "pld has nothing to set in a recording"),
        (("--source", "eagle:model=a/x", "--source", "eagle:model=b/x"), "are called x"),
        (("--source", f"eagle:model={drafters}", "--latency-only"),
         "--source belongs to `draftsim profile sources`"),
        (("--source", "eagle2"), "names no drafter: give its folder, eagle2:model=DIR"),
        (("--source", own, "--temperature", "1"), "along greedy output alone"),
        (("--source", own, "--source", f"{own},topk=3"), "are called one"),
        (("--source", own, "--latency-only"), "--source belongs to `draftsim profile sources`"),
    ):  # fmt: skip
        refused = run(*ONE_PROMPT, *out, *options)
        assert message in refused.refusal
    for source in ("eagle", "eagle2"):
        refused = run("simulate", "--trace", "bundled", "--source", source)
        assert f"draftsim profile sources --source {source}:model=DIR" in refused.refusal


def test_trees_are_recorded_once_and_cut_as_they_are_really_grown(
    run: Run, drafters: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sources = [
        part for name in ("one", "three")
        for part in ("--source", f"eagle2:model={drafters / name},topk=3,depth=4,budget=9")
    ]  # fmt: skip
    made = run(*ONE_PROMPT, "--out", out, *sources).ok()
    found = read_recordings(out)
    assert set(found) == {"eagle2.one", "eagle2.three"}
    assert {(t.topk, t.layers) for t in found.values() if isinstance(t, TreeRecording)} == {(3, 4)}
    table = read_latency(out / "latency.parquet")
    for key in found:
        assert all(table.has(key, phase) for phase in ("forward", "tree", "prefill"))
    cells = table.cells[(table.cells["model"] == "target") & (table.cells["phase"] == "tree")]
    assert 10 in set(cells["new_tokens"])

    kept = {p.name: p.read_bytes() for p in out.glob("*.parquet")}
    made = run(*ONE_PROMPT, "--out", out, "--source", f"eagle2:model={drafters / 'one'},topk=3,"
               "depth=3")  # fmt: skip
    said = made.said
    assert "(it also holds trees-eagle2.one, trees-eagle2.three)" in said
    assert "recording what is missing of: eagle2.one" in said
    assert "recording eagle2" not in said
    assert "recorded nothing new" in said
    assert {p.name: p.read_bytes() for p in out.glob("*.parquet")} == kept

    accepted = []
    for budget in (1, 4, 30):
        rows = run(
            "simulate", "--trace", out, "--source", f"eagle2:model=three,budget={budget}",
            "--policy", "fixed:gamma=3", "--policy", "confidence", "--json", "-",
        ).rows  # fmt: skip
        assert rows[1]["source"] == f"eagle2:model=three,budget={budget}"
        assert {r["fidelity"] for r in rows} == {"exact"}
        assert rows[2]["policy"] == "confidence:gamma=4"
        accepted.append(rows[1]["accepted"])
    assert accepted == sorted(accepted)

    rows = run("validate", "--run", out, "--source", "eagle2:model=three,budget=6", "--policy",
               "fixed:gamma=3", "--policy", "confidence:gamma=4", "--repeats", 1, "--json",
               "-").rows  # fmt: skip
    assert len(rows) == 3
    for row in rows:
        assert row["rounds_differ"] == row["texts_diverged"] == 0, row
        assert row["predicted_s"] > 0
    assert rows[1]["source"] == "eagle2:model=three,budget=6,depth=4"

    drafted = ("--trace", out, "--source", "eagle2:model=three")
    for command in (("serve",), ("sweep",), ("tune", "--engine", "vllm")):
        refused = run(*command, *drafted)
        assert "verification is wider than its draft" in refused.refusal
    for options, message in (
        (("--policy", "fixed:gamma=5"), "4 were recorded"),
        (("--policy", "eagle2"), "has a draft source of its own"),
    ):
        refused = run("simulate", *drafted, *options)
        assert message in refused.refusal
    assert run(*ONE_PROMPT, "--out", out, "--latency-only").code == 0
    assert read_latency(out / "latency.parquet").has("eagle2.three", "tree")
