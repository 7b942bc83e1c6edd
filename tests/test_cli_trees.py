"""EAGLE-2's trees from the command line: recorded once, cut, run for real."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ONE_PROMPT, Run
from traces.sources import TreeRecording, read_recordings
from traces.store.files import read_latency


def test_trees_are_recorded_once_and_cut_as_they_are_really_grown(
    run: Run, drafters: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sources = [
        part for name in ("one", "three")
        for part in ("--source", f"eagle2:model={drafters / name},topk=3,depth=4,budget=9")
    ]  # fmt: skip
    made = run(*ONE_PROMPT, "--out", out, *sources)
    assert made.code == 0, made.err
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
    said = " ".join(made.err.split())
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
        assert refused.code == 2, command
        assert "verification is wider than its draft" in refused.err
    for options, message in (
        (("--policy", "fixed:gamma=5"), "4 were recorded"),
        (("--policy", "eagle2"), "has a draft source of its own"),
    ):
        refused = run("simulate", *drafted, *options)
        assert refused.code == 2
        assert message in refused.err
    assert run(*ONE_PROMPT, "--out", out, "--latency-only").code == 0
    assert read_latency(out / "latency.parquet").has("eagle2.three", "tree")


def test_what_is_amiss_is_one_line(run: Run, drafters: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    own = f"eagle2:model={drafters / 'one'}"
    for options, message in (
        (("--source", "eagle2"), "names no drafter: give its folder, eagle2:model=DIR"),
        (("--source", own, "--temperature", "1"), "along greedy output alone"),
        (("--source", own, "--source", f"{own},topk=3"), "are called one"),
        (("--source", own, "--latency-only"), "--source belongs to `draftsim profile sources`"),
    ):
        refused = run(*ONE_PROMPT, *out, *options)
        assert refused.code == 2
        assert message in refused.err
    refused = run("simulate", "--trace", "bundled", "--source", "eagle2")
    assert refused.code == 2
    assert "draftsim profile --source eagle2:model=DIR" in refused.err
