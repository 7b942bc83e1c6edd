"""``draftsim tune``: what it writes, prints and refuses."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policies.batch.sglang import SGLangAdaptive
from policies.batch.tables import BatchTable
from policies.lengths.basic import Autoregressive, Fixed
from policies.lengths.huggingface import Confidence
from simulator.tune.formats import read_settings
from simulator.tune.served import closed_load, compare_served, served_rates
from simulator.tune.settings import TUNE_COLUMNS
from tests.conftest import Run
from tests.tuning import batched
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable
from traces.store.files import write_latency, write_trace


@pytest.fixture
def recorded(tmp_path: Path) -> SimpleNamespace:
    trace = synthetic_trace(0.7, requests=12, tokens=40, max_gamma=24, concentration=4.0, seed=1)
    write_trace(trace, tmp_path / "trace.parquet")
    write_latency(batched(), tmp_path / "latency.parquet")
    return SimpleNamespace(folder=tmp_path, out=tmp_path / "settings.json")


@pytest.mark.parametrize(
    ("engine", "key"),
    [("vllm", "num_speculative_tokens"), ("sglang", "1"), ("hf", "num_assistant_tokens")],
)
def test_the_command_writes_file_and_rows(
    run: Run,
    recorded: SimpleNamespace, engine: str, key: str,
) -> None:  # fmt: skip
    more = [] if engine == "hf" else ["--batch", "1,16", "--resamples", "4"]
    ran = run(
        "tune", "--engine", engine, "--trace", recorded.folder, "--slo", "ttft=5,tpot=0.05",
        "--out", recorded.out, "--json", "-", *more,
    )  # fmt: skip
    found = ran.rows
    assert [r["batch"] for r in found] == ([1] if engine == "hf" else [1, 16])
    assert tuple(found[0]) == TUNE_COLUMNS
    assert key in json.loads(recorded.out.read_text())
    assert "only 12 prompts" in ran.err


def test_the_command_serves_what_it_found(run: Run, recorded: SimpleNamespace) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batch", "1,4", "--check",
        "--json", "-",
    )  # fmt: skip
    document = ran.document
    assert document["settings"]["num_speculative_tokens"] > 0
    assert any("only 12 prompts" in w for w in document["warnings"])
    for row in ran.rows:
        assert row["not_worse"] is True
        assert row["deployed_tok_s"] == pytest.approx(row["checked_tok_s"])
        assert row["rival"] in ("no speculation", "K=1", "K=3", "K=5")
        assert row["margin_lo"] <= row["margin_hi"]


def test_what_served_faster_than_the_setting_is_named(
    run: Run, recorded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*given: Any, **options: Any) -> Any:
        found = compare_served(*given, **options)
        return found.assign(not_worse=False, rival="no speculation")

    monkeypatch.setattr("commands.tune.compare_served", lost)
    ran = run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batch", "1,4",
        "--resamples", "4", "--check",
    ).ok()  # fmt: skip
    said = "served faster than the setting: no speculation at batch 1, no speculation at batch 4"
    assert said in ran.said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--engine", "vllm", "--slo", "fast"],
            "'fast' is not of the form key=value (targets: ",
        ),
        (["--engine", "vllm", "--slo", "tpot=-1"], "expected more than 0 seconds"),
        (["--engine", "vllm", "--batch", "0"], "--batch holds 0"),
        (["--engine", "vllm", "--context", ""], "'' is no number"),
        (["--engine", "vllm", "--batch", "1000000000"], "expected 1 to 65536"),
        (["--engine", "hf", "--batch", "1,2"], "decodes one request"),
        (["--engine", "sglang", "--by-context"], "a table of vllm"),
        (["--engine", "llamacpp", "--batch", "8"], "no table of them"),
        (["--engine", "tgi"], "tgi"),
    ],
)
def test_wrong_options_are_one_line(
    run: Run,
    recorded: SimpleNamespace, arguments: list[str], message: str,
) -> None:  # fmt: skip
    ran = run("tune", "--trace", recorded.folder, *arguments)
    assert message in ran.refusal


def test_where_it_never_pays_the_file_says_null(run: Run, recorded: SimpleNamespace) -> None:
    slow = batched().cells.copy()
    slow.loc[slow["model"] == "draft", "median_s"] *= 20
    write_latency(LatencyTable(slow), recorded.folder / "latency.parquet")
    ran = run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batch", "1,4", "--check",
        "--out", recorded.out, "--json", "-",
    )  # fmt: skip
    assert json.loads(recorded.out.read_text()) is None
    assert [row["deploy"] for row in ran.rows] == ["off", "off"]
    assert all(row["not_worse"] for row in ran.rows)
    assert "without --speculative-config" in ran.err


def test_standard_output_is_the_setting_or_what_was_asked_for(
    run: Run, recorded: SimpleNamespace
) -> None:
    command = ("tune", "--engine", "vllm", "--trace", recorded.folder, "--batch", "1,4")
    bare = run(*command)
    assert bare.document["num_speculative_tokens"] > 0
    assert "decode_tok_s" in bare.err  # the table
    assert "assumed" not in bare.err  # nothing is
    assert 'does not name the drafter: add "model"' in bare.err
    assert "use K=" in bare.err
    kept = run(*command, "--out", recorded.out)
    assert recorded.out.read_text() == bare.out
    assert "decode_tok_s" in kept.out
    assert "decode_tok_s" not in kept.err
    rows = recorded.folder / "rows.json"
    assert run(*command, "--json", rows).out == bare.out
    assert run(*command, "--json", "-").document == json.loads(rows.read_text())


def test_the_drafter_that_the_recording_names_is_in_the_file_and_the_line(
    run: Run, recorded: SimpleNamespace
) -> None:
    trace = synthetic_trace(0.7, requests=12, tokens=40, max_gamma=24, concentration=4.0, seed=1)
    models = {"target": {"path": "org/target"}, "draft": {"path": "org/draft"}}
    write_trace(replace(trace, meta={**trace.meta, **models}), recorded.folder / "trace.parquet")
    command = ("--trace", recorded.folder, "--resamples", "4", "--json", "-")
    ran = run("tune", "--engine", "vllm", *command, "--batch", "1", "--out", recorded.out)
    written = json.loads(recorded.out.read_text())
    assert (written["method"], written["model"]) == ("draft_model", "org/draft")
    line = ran.document["launch"]
    assert line.startswith("vllm serve org/target --speculative-config ")
    assert json.loads(shlex.split(line)[-1]) == written
    assert read_settings(recorded.out)[0] == "vllm"


def test_sglang_gets_fixed_steps_for_a_draft_model(run: Run, recorded: SimpleNamespace) -> None:
    """SGLang adapts the steps of EAGLE's heads alone (``adaptive_unsupported_reason``)."""
    trace = synthetic_trace(0.7, requests=12, tokens=40, max_gamma=24, concentration=4.0, seed=1)
    models = {"target": {"path": "org/target"}, "draft": {"path": "org/draft"}}
    write_trace(replace(trace, meta={**trace.meta, **models}), recorded.folder / "trace.parquet")
    ran = run("tune", "--engine", "sglang", "--trace", recorded.folder, "--resamples", "4",
              "--batch", "1,64", "--out", recorded.out, "--json", "-").ok()  # fmt: skip
    written = json.loads(recorded.out.read_text())
    k = written["speculative-num-steps"]
    assert written == {
        "speculative-num-steps": k, "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": k + 1,
    }  # fmt: skip
    assert {row["setting"] for row in ran.rows} == {f"K={k}"}
    line = ran.document["launch"]
    assert line.endswith(
        "--speculative-algorithm STANDALONE --speculative-draft-model-path org/draft "
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k + 1}"
    )
    assert f"SGLang adapts no steps of a draft model (STANDALONE): K = {k} is drafted" in ran.said
    engine, policy = read_settings(recorded.out)
    assert (engine, repr(policy)) == ("sglang", repr(Fixed(k)))


def test_a_lookup_is_vllms_method_with_the_sizes_that_were_replayed(
    run: Run, recorded: SimpleNamespace
) -> None:
    asked = ("--trace", "bundled", "--batch", "1,4", "--resamples", "4")
    source = ("--source", "pld:max_ngram=3")
    ran = run("tune", "--engine", "vllm", *asked, *source, "--out", recorded.out)
    written = json.loads(recorded.out.read_text())
    assert [written.pop(n) for n in ("method", "prompt_lookup_min", "prompt_lookup_max")] == [
        "ngram", 1, 3
    ]  # fmt: skip
    assert set(written) <= {"num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
    assert "does not name the drafter" not in ran.err
    assert "METHOD" not in ran.err
    for engine, other in (("sglang", "pld"), ("vllm", "lookahead")):
        ran = run("tune", "--engine", engine, *asked, "--source", other)
        assert f"no setting of {engine} is known for the lookup {other}" in ran.refusal


def test_vllm_gets_no_table_for_drafters_with_which_it_would_fail(
    run: Run, recorded: SimpleNamespace
) -> None:
    """vLLM 0.32's MedusaProposer asserts that K is num_speculative_tokens in every step."""
    ran = run("tune", "--engine", "vllm", "--trace", "bundled", "--source", "medusa",
              "--batch", "1,8", "--assume-batch-free", "--resamples", "4", "--out", recorded.out,
              "--json", "-").ok()  # fmt: skip
    written = json.loads(recorded.out.read_text())
    assert set(written) == {"method", "num_speculative_tokens"}
    k = written["num_speculative_tokens"]
    assert {row["setting"] for row in ran.rows} == {f"K={k}"}
    assert f"a table for medusa and suffix drafts: K = {k} is drafted at every load" in ran.said
    ran = run("tune", "--engine", "vllm", "--trace", "bundled", "--source", "medusa", "--by-length")
    assert "vllm takes no table with medusa: drop --by-length" in ran.refusal


@pytest.mark.parametrize(
    ("drafter", "method"),
    [
        (("--trace", "bundled", "--source", "parallel:acceptance=[0.7,0.5]"), "parallel"),
        (("--trace", "bundled", "--source", "layer-skip"), "layer-skip"),
        (("--acceptance", "0.7,0.5", "--latency", "bundled", "--one-pass"), "one-pass"),
    ],
)
def test_a_drafter_that_an_engine_has_no_method_for_is_not_launched_as_eagle3(
    run: Run, drafter: tuple[str, ...], method: str
) -> None:
    for engine in ("sglang", "tensorrt-llm"):
        ran = run("tune", "--engine", engine, *drafter, "--batch", "1", "--resamples", "4")
        assert f"no setting of {engine} is known for the method '{method}'" in ran.refusal
    assert "METHOD" in run("tune", "--engine", "vllm", *drafter, "--batch", "1").ok().said


def test_an_eagle_head_is_named_with_its_method(run: Run, recorded: SimpleNamespace) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", "smollm2-vllm-eagle3-cpu", "--source",
        "eagle:model=smollm2-eagle3", "--batch", "1", "--resamples", "4", "--out", recorded.out,
    )  # fmt: skip
    written = json.loads(recorded.out.read_text())
    assert (written["method"], written["model"]) == ("eagle3", "smollm2-eagle3")
    assert "does not name the drafter" not in ran.err
    assert "METHOD" not in ran.err
    assert "DRAFT" not in ran.err


def test_an_objective_that_nothing_meets_writes_no_setting(
    run: Run, recorded: SimpleNamespace
) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batch", "1,4",
        "--slo", "tpot=1ms", "--out", recorded.out, "--check", "--json", "-",
    )  # fmt: skip
    assert json.loads(recorded.out.read_text()) is None
    assert [row["deploy"] for row in ran.rows] == ["SLO missed", "SLO missed"]
    assert [row["not_worse"] for row in ran.rows] == [None, None]
    assert "no setting meets the SLO at batch 1, 4" in ran.err


@pytest.mark.parametrize(
    ("expected_engine", "document", "policy"),
    [
        ("off", None, Autoregressive()),
        (
            "vllm",
            {"method": "eagle3", "num_speculative_tokens": 3,
             "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 0]]},
            BatchTable([[1, 4, 3], [5, 9, 0]]),
        ),
        (
            "sglang",
            {"1": {"candidate_steps": [0, 2]}, "ema_alpha": 0.3},
            SGLangAdaptive({"1": {"candidate_steps": [0, 2]}, "ema_alpha": 0.3}),
        ),
        (
            "hf",
            {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant",
             "assistant_confidence_threshold": 0.0, "max_length": 20},
            Confidence(5, 0.0, "off"),
        ),
    ],
)  # fmt: skip
def test_settings_are_read_back_as_the_policy_they_make_an_engine_run(
    tmp_path: Path, expected_engine: str, document: Any, policy: Any
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(document))
    engine, own = read_settings(path)
    assert engine == expected_engine
    trace = synthetic_trace(0.7, requests=6, tokens=40, max_gamma=24, concentration=4.0, seed=1)
    load = closed_load(trace, 6)
    found, expected = served_rates(trace, batched(), [own, policy], load, 1)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_file_tuned_is_served_beside_what_people_set_by_hand(
    run: Run, recorded: SimpleNamespace
) -> None:
    run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batch", "1,4",
        "--out", recorded.out, "--json", "-",
    )  # fmt: skip
    arguments = ("serve", "--trace", recorded.folder, "--settings", recorded.out, "--batch", "1",
                 "--requests", "20", "--json", "-")  # fmt: skip
    rows = run(*arguments).rows
    assert [r["policy"] for r in rows] == ["no speculation", "settings.json", "K=1", "K=3", "K=5"]
    off, tuned = rows[:2]
    assert tuned["throughput_tok_s"] > off["throughput_tok_s"]
    both = run(*arguments, "--policy", "fixed:gamma=2").rows
    assert [r["policy"] for r in both] == ["autoregressive", "settings.json", "fixed:gamma=2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "is not JSON"),
        ("[1]", "holds a list, expected an object"),
        ('{"temperature": 1}', "expected num_speculative_tokens (vLLM)"),
        ('{"2": {"candidate_steps": [1]}}', "expected a slot for batch size 1"),
        ('{"num_assistant_tokens": 0}', "expected num_assistant_tokens"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"num_speculative_tokens": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        (
            '{"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": '
            "[[5, 64, 1], [2, 4, 3]]}",
            "must start at batch size 1, its first row is [2, 4, 3]",
        ),
    ],
)
def test_settings_no_engine_would_read_are_one_line(
    run: Run, recorded: SimpleNamespace, text: str | None, message: str,
) -> None:  # fmt: skip
    if text is not None:
        recorded.out.write_text(text)
    ran = run("serve", "--trace", recorded.folder, "--settings", recorded.out)
    assert message in ran.refusal
    assert "settings.json" in ran.err
    assert ran.err.count("\n") == 1


def test_settings_that_are_null_are_said_to_be_off(run: Run, recorded: SimpleNamespace) -> None:
    """`tune` writes null if no setting gives a gain; a damaged file may hold null, too."""
    recorded.out.write_text("null")
    arguments = ("--settings", recorded.out, "--batch", 1, "--requests", 3, "--json", "-")
    ran = run("serve", "--trace", recorded.folder, *arguments).ok()
    assert "settings.json is null: it means decoding without speculation" in ran.err


@pytest.mark.parametrize(
    ("document", "batch", "said"),
    [
        ({"spec-draft-n-max": 3, "spec-draft-n-min": 0, "spec-draft-p-min": 0.0}, 1,
         "llama.cpp's draft model also reads every verified batch, which is not priced here"),
        ({"max_draft_len": 2, "draft_len_schedule": {"1": 2}}, 4,
         "K = 0 is priced with a draft pass, as in vLLM; TensorRT-LLM may skip it"),
        ({"max_draft_len": 2, "draft_len_schedule": {"4": 2}}, 4, ""),
        ({"num_speculative_tokens": 2}, 4, ""),
    ],
)  # fmt: skip
def test_what_serving_does_not_price_of_an_engines_settings_is_said(
    run: Run, recorded: SimpleNamespace, document: Any, batch: int, said: str
) -> None:
    """As `tune` says it of its own prices."""
    recorded.out.write_text(json.dumps(document))
    arguments = ("--settings", recorded.out, "--batch", batch, "--requests", 8 * batch)
    ran = run("serve", "--trace", recorded.folder, *arguments).ok()
    lines = "settings.json: " + said
    assert (lines in ran.said) if said else ("settings.json: " not in ran.said)


def test_one_request_at_a_time_is_not_served_in_batches(
    run: Run, recorded: SimpleNamespace
) -> None:
    recorded.out.write_text(
        '{"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", '
        '"assistant_confidence_threshold": 0.0}'
    )
    arguments = ("serve", "--trace", recorded.folder, "--settings", recorded.out)
    ran = run(*arguments, "--batch", "1,4")
    assert "decodes one request at a time: use --batch 1" in ran.refusal
    assert len(run(*arguments, "--batch", "1", "--requests", "5", "--json", "-").rows) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "sglang"), "runs vllm alone: use `draftsim tune search` for sglang"),
        (("--engine", "vllm"), "the engine that the latencies were measured on"),
    ],
)
def test_only_the_engine_that_was_measured_is_tried(
    run: Run, recorded: SimpleNamespace, arguments: tuple[str, ...], message: str
) -> None:
    ran = run("tune", "--trace", recorded.folder, "--try", *arguments)
    assert message in ran.refusal


def test_a_file_of_options_may_try_or_not(run: Run, recorded: SimpleNamespace) -> None:
    options = recorded.folder / "options.yaml"
    asked = f"engine: hf\ntrace: {recorded.folder}\nresamples: 20\n"
    options.write_text(f"{asked}try: false\n")
    assert "num_assistant_tokens" in run("tune", "--config", options).ok().out
    options.write_text(f"{asked}try: true\n")
    assert "(--try) runs vllm alone" in run("tune", "--config", options).refusal


def test_without_the_engine_nothing_is_searched(
    run: Run, recorded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiler.engines.vllm.find_spec", lambda name: None)
    measured = LatencyTable(batched().cells, {"kind": "engine", "engine": {"longest": 4}})
    write_latency(measured, recorded.folder / "latency.parquet")
    ran = run("tune", "engine", "--trace", recorded.folder)
    assert "make vllm" in ran.refusal


def test_settings_of_several_contexts_are_told_by_context(run: Run) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", "qwen-coder-cpu", "--latency",
        "a100/llama-3.1-8b+llama-3.2-1b", "--batch", "8", "--context", "512,4096",
        "--resamples", "20",
    ).ok()  # fmt: skip
    said = ran.said
    rows = re.findall(r"^ +(512|4,096) +(K=\d)", ran.err, re.M)
    [(short, low), (long, high)] = rows
    assert (short, long) == ("512", "4,096")
    assert low != high
    assert f"{low} (context 512), {high} (context 4,096) at batch 8" in said
    # One number serves both rows.
    assert "served_tok_s and gain are those of the recorded requests at each batch" in said
