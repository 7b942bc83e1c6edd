"""Draft sources of a pair profiled here: real runs, repeated profiles, heads."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from policies.lengths.rate_optimal import RateOptimal
from simulator.pricing import price
from simulator.whatif.ranking import fastest_for_real
from tests.conftest import SMALL_PROFILE, Run
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.sources.early_exit import EarlyExit
from traces.sources.found import read_recordings, write_recordings
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency, read_trace, write_latency
from traces.store.recordings import find_trace


def test_real_runs_agree_with_the_replay(run: Run, small_run: Path) -> None:
    names = ["specbound", "kangaroo", "medusa", "draft-and-verify-skip", "pld", "rest"]
    options = [part for name in names for part in ("--policy", name)]
    rows = run("validate", "--run", small_run, *options, "--repeats", 1, "--json", "-").rows
    assert [r["policy"] for r in rows] == ["autoregressive", *names]
    for row in rows:
        assert row["rounds_differ"] == 0, row
        assert row["texts_diverged"] == 0, row
        assert row["measured_s"] > 0
        assert row["predicted_s"] > 0
    refused = run("validate", "--run", small_run, "--source", "medusa-tree")
    assert "no real decoder" in refused.refusal


def with_flat_passes(run: Path, folder: Path) -> Path:
    """Copy a run, and let the target's passes cost 10 ms at every size and everything else 1 ms.

    Measured seconds move with the machine, and the fastest policy would move with them.
    """
    copy = Path(shutil.copytree(run, folder))
    table = read_latency(copy / "latency.parquet")
    cells = table.cells.copy()
    passes = (cells["model"] == "target") & (cells["phase"] == "forward")
    cells["median_s"] = np.where(passes, 0.01, 0.001)
    write_latency(LatencyTable(cells, table.meta), copy / "latency.parquet")
    return copy


def test_what_is_predicted_fastest_is_decoded_by_default(
    run: Run, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy predicted fastest runs too: with a draft model, a source, a rule, a batch."""
    small_run = with_flat_passes(small_run, tmp_path / "flat")
    few = ("fixed:gamma=4",)
    for place in ("spot_check.ARMS", "spot_check.SOURCE_ARMS", "spot_check.LOSSY_ARMS",
                  "batched.BATCH_ARMS"):  # fmt: skip
        monkeypatch.setattr(f"commands.validate.{place}", few)
    for more in ((), ("--source", "pld"), ("--verify", "lossy-global"), ("--batch", "1")):
        ran = run("validate", "--run", small_run, *more, "--repeats", 1, "--no-assisted",
                  "--json", "-")  # fmt: skip
        names = [row["policy"] for row in ran.rows]
        assert names[:2] == ["autoregressive", *few], more
        assert f"also decoding {names[2]}, which is predicted to be the fastest" in ran.err
        assert sum(row["rounds_differ"] for row in ran.rows) == 0
        if not more or more[0] == "--source":
            told = run("simulate", "--trace", small_run, *more, "--resamples", 2, "--json", "-")
            said = told.document["headline"]
            found = re.search(r": (?:no policy is faster .*: the best, )?(\S+)", said)
            assert found is not None
            first = found[1].rstrip(",")
            # Of methods with drafts of their own the check says how they are decoded.
            assert names[2] == first or f"decode it with --policy {first}" in ran.err, more
    # Named policies are decoded as they were named.
    asked = ("--policy", "fixed:gamma=2", "--repeats", 1, "--no-assisted", "--json", "-")
    rows = run("validate", "--run", small_run, *asked).rows
    assert [row["policy"] for row in rows] == ["autoregressive", "fixed:gamma=2"]


def test_a_rule_that_wins_is_decoded_as_it_is_fitted(
    run: Run, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fastest_for_real(
        find_trace("bundled").select(range(8)), LatencyTable.constant(0.01, 0.001, 0.012)
    )
    own = found.policy
    assert found.name == "rate-optimal"
    assert isinstance(own, RateOptimal)
    assert own.cost is not None
    short = RateOptimal(
        own.rate, 4, own.acceptance, estimator=own.estimator, following=own.following,
        cost=own.cost,
    )  # fmt: skip
    monkeypatch.setattr("commands.validate.spot_check.ARMS", ("fixed:gamma=4",))
    monkeypatch.setattr(
        "commands.validate.spot_check.fastest_for_real", lambda *_: found._replace(policy=short)
    )
    ran = run("validate", "--run", small_run, "--repeats", 1, "--json", "-")
    assert [row["policy"] for row in ran.rows][1:3] == ["fixed:gamma=4", "rate-optimal"]
    assert ran.rows[2]["rounds_differ"] == 0
    # The first round of transformers' own generation reads the prompt, too.
    assert {row["policy"]: row["measured_s"] for row in ran.rows[3:]} == {
        "transformers constant": None, "transformers heuristic": None,
    }  # fmt: skip


def test_transformers_drafts_no_more_than_was_recorded(
    run: Run, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }  # fmt: skip
    # Never unsure: every draft is as long as it may be.
    never = {"constant": ("confidence:confidence_threshold=0", settings)}
    monkeypatch.setattr("commands.validate.spot_check.ASSISTED", never)
    ran = run("validate", "--run", small_run, "--policy", "fixed:gamma=2", "--repeats", 1,
              "--json", "-")  # fmt: skip
    assert (ran.rows[-1]["policy"], ran.rows[-1]["rounds_differ"]) == ("transformers constant", 0)


def test_latencies_measured_between_the_real_runs_predict_and_are_kept(
    run: Run, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sweep takes seconds, and that there is one is all that matters here.
    monkeypatch.setattr("commands.validate.flow.SWEEPS", 1)
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
    assert {"machine", "disturbed", "left_out", "slowdown"} <= row.keys()
    for file, read in (("latency-check", read_latency), ("measured", read_measured)):
        kept_state = read(small_run / f"{file}.parquet").meta["machine"]
        assert kept_state["reference_s"] > 0
        assert kept_state["runs"] > 0
    assert read_measured(small_run / "measured.parquet").times["off_s"].ge(0).all()
    refused = run("validate", "--run", small_run, "--remeasure", "--batch", 2)
    assert "--batch chooses `draftsim validate batch`: drop one of them" in refused.refusal
    ran = run(
        "validate", "--run", small_run, "--policy", "medusa", "--repeats", 2, "--remeasure",
        "--json", "-",
    )  # fmt: skip
    assert [row["policy"] for row in ran.rows] == ["autoregressive", "medusa"]
    kept = read_latency(small_run / "latency-check.parquet")
    assert kept.has("target", "pass")
    assert all(np.isfinite(row["profile_error"]) for row in ran.rows)
    # A speedup's error is that of plain decoding against the row's own.
    plain = ran.rows[0]
    for row in ran.rows:
        expected = (1 + plain["profile_error"]) / (1 + row["profile_error"]) - 1
        assert row["profile_speedup_error"] == pytest.approx(expected)


def test_a_repeated_profile_keeps_what_it_has_and_adds_what_is_asked(
    run: Run, small_run: Path
) -> None:
    command = (*SMALL_PROFILE, "--out", small_run)
    before = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    (small_run / "starts-medusa.parquet").unlink()
    more = run(*command, "--exit-layers", "--source", "early-exit:tau=0.55").ok()
    said = more.said
    assert "its trace of 2 prompts and its latencies are kept (it also holds exits" in said
    assert "recording what is missing of: early exits, heads, layer skip" in said
    # Before anything is recorded.
    _, tail = said.split("recording early-exit, medusa along 2 prompts; kept: ")
    assert "recorded early-exit, medusa into" in tail
    assert "layer-skip" in tail.split(" recorded ")[0]
    after = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    assert {n for n in before if before[n] != after.get(n)} <= {
        "exits.parquet", "starts-medusa.parquet", "measured-sources.parquet",
    }  # fmt: skip
    found = read_recordings(small_run)
    settings = {s[:-1] for s in EarlyExit().recording(found).settings}
    assert EarlyExit(tau=0.55).setting(1)[:-1] in settings
    assert EarlyExit().setting(1)[:-1] in settings
    assert "medusa" in found
    measured = run(*command, "--latency-only").ok()
    # What is measured again is not kept.
    assert "are measured again, its recordings are kept" in measured.err
    assert "its latencies are kept" not in measured.err
    again = {path.name: path.read_bytes() for path in small_run.glob("*.parquet")}
    assert {n for n in again if again[n] != after.get(n)} == {"latency.parquet"}
    assert read_latency(small_run / "latency.parquet").has("exit", "layer")
    refused = run(*command, "--latency-only", "--exit-layers")
    assert refused.code == 2


def test_stale_recordings_are_recorded_again(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands.profile.sources import modules_of, record
    from profiler.recording.run import read_info
    from profiler.sources import run as real

    kept = read_recordings(small_run)
    info = read_info(small_run)
    pair = info.load()
    modules = modules_of(pair, info, small_run)
    monkeypatch.setattr(real, "record_sources", lambda *_, only, **__: {only[0]: kept[only[0]]})
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    name = "layer-skip"

    def again(*sources: str) -> list[str]:
        return record(pair, run, modules, {name: {}}, sources)

    assert again() == again("layer-skip") == []
    assert again("layer-skip:skip=[2]") == [name]
    of_another = {**kept[name].meta, "outputs_sha256": "of another trace"}
    write_recordings({name: replace(kept[name], meta=of_another)}, run)
    assert again() == [name]
    assert again() == []
    (run / "starts-layer-skip.parquet").unlink()
    assert again() == [name]


GPT2 = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
ONE_LAYER = {
    "max_position_embeddings": 64, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("GPT2", GPT2, "early exit and heads work for Llama, Mistral and Qwen models"),
        ("Llama", ONE_LAYER, "a target of 1 layer has no exit before its last one"),
    ],
)
def test_a_target_without_exits_is_one_line(
    run: Run, tmp_path: Path, kind: str, shape: dict[str, int], said: str
) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    from profiler.recording.run import BUNDLED as PAIR

    tokenizer = transformers.AutoTokenizer.from_pretrained(PAIR / "target")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None, **shape,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ran = run(
        "profile", "--target", tmp_path / "model", "--draft", tmp_path / "model", "--prompts",
        PAIR / "prompts.jsonl", "--out", tmp_path / "run", "--exit-layers",
    )  # fmt: skip
    assert said in ran.refusal
    assert not (tmp_path / "run").exists()


def test_heads_are_trained_for_a_target_that_has_none(
    run: Run, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands.profile.sources import HEADS, modules_of
    from profiler.models.loading import Pair
    from profiler.recording.run import read_info
    from profiler.train import heads as train

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
    info = read_info(small_run)
    pair: Pair = info.load()
    texts = tmp_path / "texts.txt"
    texts.write_text("return first + second; " * 60)
    trace = read_trace(small_run / "trace.parquet")
    modules = modules_of(pair, info, tmp_path, trace, texts)
    assert set(made) == set(train.MODULES)
    assert {"early-exit", "space"} <= set(modules)
    assert sorted(p.name for p in (tmp_path / HEADS).iterdir()) == sorted(train.FILES.values())
    made.clear()
    modules_of(pair, info, tmp_path, trace, texts)
    assert made == []
    # So further texts to train on are refused, and those that cannot be read before any work.
    sources = (*SMALL_PROFILE, "--out", tmp_path, "--exit-layers", "--heads-text")
    assert "exit_heads has all heads: leave --heads-text out" in run(*sources, texts).refusal
    assert "gone.txt: no such file" in run(*sources, tmp_path / "gone.txt").refusal
    assert not (tmp_path / "run.json").exists()
