"""llama.cpp's server: its drafting as a policy, the options written, what cannot be expressed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from policies.lengths.llamacpp import LlamaCppDraft
from policies.registry import parse_policy
from simulator.pricing import price
from simulator.tune.formats import SettingsError, check_llamacpp, read_settings
from simulator.tune.launch import NamedDrafter, about_sharing, launch_line
from simulator.tune.settings import write_settings
from simulator.tune.single import mirrored, tune_single
from tests.conftest import Run
from tests.tuning import CHEAP
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.store.files import write_latency, write_trace

DEAR = LatencyTable.constant(1.0, 0.9)
GOOD = {"spec-draft-n-max": 5, "spec-draft-n-min": 2, "spec-draft-p-min": 0.4}


def recorded() -> Trace:
    """A draft whose probability tells whether it is right, better than chance."""
    return synthetic_trace(0.7, requests=24, tokens=60, max_gamma=24, concentration=2.0, seed=5)


def test_without_a_threshold_it_is_a_fixed_length() -> None:
    trace = recorded()
    own, fixed = replay(trace, LlamaCppDraft(4)), replay(trace, Fixed(4))
    assert own.rounds.tolist() == fixed.rounds.tolist()
    assert own.reads == ()


def test_an_unsure_token_is_paid_and_dropped() -> None:
    trace = recorded()
    log = replay(trace, parse_policy("llama-cpp:gamma=8,p_min=0.75"))
    assert log.reads == ("top10_prob",)
    drafted, paid = log.rounds["drafted"], log.rounds["draft_forwards"]
    assert set((paid - drafted).tolist()) == {0, 1}
    fewer = replay(trace, LlamaCppDraft(8, gamma_min=3, p_min=0.75))
    assert set(fewer.rounds["drafted"].tolist()) <= {0, *range(3, 9)}
    assert not fewer.rounds["drafted"][fewer.rounds["drafted"] < 3].any()


class Token:
    def __init__(self, top10_prob: float) -> None:
        self.top10_prob = top10_prob


@pytest.mark.parametrize(
    ("probs", "goes_on", "sent"),
    [
        ([], True, 0),
        ([0.9], True, 0),
        ([0.9, 0.9], True, 2),
        ([0.9, 0.9, 0.9], False, 3),
        ([0.9, 0.9, 0.3], False, 2),
        ([0.9, 0.3], False, 0),
        ([0.3], False, 0),
    ],
)
def test_the_rule_of_the_server(probs: list[float], goes_on: bool, sent: int) -> None:
    # n_max 3, n_min 2, p_min 0.5, as `common_speculative_impl_draft_simple::draft` reads.
    policy = LlamaCppDraft(3, 2, 0.5)
    draft = [Token(p) for p in probs]
    assert policy.keep_drafting(draft) is goes_on
    assert policy.submit(draft) == sent


def test_a_recording_without_its_probability_is_refused_under_a_threshold() -> None:
    whole = recorded()
    older = {n: v for n, v in whole.columns.items() if n != "draft_top10_logprob"}
    trace = Trace(older, whole.requests, whole.max_gamma, whole.meta)
    assert len(replay(trace, LlamaCppDraft(8))) == len(replay(whole, LlamaCppDraft(8)))
    said = "LlamaCppDraft reads top10_prob, which this trace does not hold .*`draftsim profile`"
    with pytest.raises(SignalError, match=said):
        replay(trace, LlamaCppDraft(8, p_min=0.5))


def test_the_draft_model_reads_what_was_verified() -> None:
    log = replay(recorded(), LlamaCppDraft(3))
    table = LatencyTable.constant(1.0, 0.1)
    more = price(mirrored(log), table).round_s - price(log, table).round_s
    assert np.allclose(more, 0.1)
    assert log.rounds["draft_forwards"].max() == 3  # the log itself is left alone


def test_what_pays_is_found() -> None:
    cheap, dear = (tune_single("llamacpp", recorded(), table) for table in (CHEAP, DEAR))
    assert cheap.document is not None
    check_llamacpp(cheap.document)
    assert cheap.document["spec-draft-n-max"] > 1
    row = cheap.rows[0]
    assert row["deploy"] == "on"
    assert row["decode_tok_s"] > 1.0  # of plain decoding, at a second a token
    assert row["default"] == "3, 0, 0"
    assert dear.document is None
    assert any("without a draft model" in w for w in dear.warnings)
    whole = recorded()
    assert not any("probability" in w or "threshold" in w for w in cheap.warnings)
    older = {n: v for n, v in whole.columns.items() if n != "draft_top10_logprob"}
    unsure = tune_single("llamacpp", Trace(older, whole.requests, 24, {}), CHEAP)
    assert any("lacks the draft signal top10_prob (`draftsim" in w for w in unsure.warnings)
    assert unsure.document is not None
    assert unsure.document["spec-draft-p-min"] == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec-draft-n-max": 0}, "whole number, 1 to"),
        ({"spec-draft-n-min": 6}, "^spec-draft-n-min is 6, expected <= spec-draft-n-max = 5"),
        ({"spec-draft-p-min": 1.5}, "expected between 0 and 1"),
        ({"spec-draft-p-min": "0.5"}, "expected a finite number"),
        ({"draft-max": 5}, "expected spec-draft-n-max"),
    ],
)
def test_what_the_server_would_refuse(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_llamacpp({**GOOD, **changed})


def test_written_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    tuned = tune_single("llamacpp", recorded(), CHEAP, settings=[{**GOOD, "spec-draft-p-min": 0.2}])
    write_settings(tuned, file)
    engine, policy = read_settings(file)
    assert engine == "llamacpp"
    assert isinstance(policy, LlamaCppDraft)
    assert json.loads(file.read_text()) == tuned.document


def test_the_line_that_starts_an_engine() -> None:
    line = launch_line("llamacpp", GOOD, target="t.gguf")
    assert shlex.split(line)[-6:] == [
        "--spec-draft-n-max", "5", "--spec-draft-n-min", "2", "--spec-draft-p-min", "0.4",
    ]  # fmt: skip
    assert "--spec-type draft-simple" in line
    assert launch_line("llamacpp", None) == "llama-server -m TARGET"
    config = {"num_speculative_tokens": 3}
    words = shlex.split(launch_line("vllm", config))
    assert json.loads(words[-1])["num_speculative_tokens"] == 3
    assert "--tensor-parallel-size 4" in launch_line("vllm", config, shared=4)
    assert launch_line("llamacpp", None, shared=4) == launch_line("llamacpp", None)
    line = launch_line("sglang", {"1": {"candidate_steps": [1]}}, file="steps.json")
    assert line.endswith("--speculative-adaptive --speculative-adaptive-config steps.json")
    assert "generation_config.update(num_assistant_tokens=3)" in launch_line(
        "hf", {"num_assistant_tokens": 3}
    )
    named = NamedDrafter("draft_model", "org/draft")
    line = launch_line("hf", {"num_assistant_tokens": 3}, target="org/target", drafter=named)
    compile(line, "launch", "exec")  # Python, as it is pasted
    assert "from_pretrained('org/draft')" in line
    assert launch_line("llamacpp", GOOD, target="org/target", drafter=named).startswith(
        "llama-server -m TARGET -md DRAFT "
    )
    eagle = shlex.split(launch_line("vllm", config, drafter=NamedDrafter("eagle3", "org/head")))
    assert json.loads(eagle[-1]) == {"method": "eagle3", "model": "org/head", **config}
    lookup = shlex.split(launch_line("vllm", config, drafter=NamedDrafter("ngram")))
    assert json.loads(lookup[-1]) == {"method": "ngram", **config}
    with pytest.raises(DraftsimError, match="expected one of vllm"):
        launch_line("tgi", None)


def test_heads_in_the_target_s_checkpoint_take_no_model() -> None:
    heads = NamedDrafter("mtp")
    assert "model" not in launch_line("vllm", {"num_speculative_tokens": 3}, drafter=heads)
    steps = {"speculative-num-steps": 3}
    assert "draft-model-path" not in launch_line("sglang", steps, drafter=heads)
    assert "--speculative-draft-model-path DRAFT" in launch_line("sglang", steps)
    line = launch_line("llamacpp", GOOD, drafter=heads)
    assert line.startswith("llama-server -m TARGET --spec-type draft-mtp --spec-draft-n-max 5")
    line = launch_line("llamacpp", GOOD, drafter=NamedDrafter("eagle3", "head.gguf"))
    assert "-md head.gguf --spec-type draft-eagle3 " in line
    line = launch_line("tensorrt-llm", {"max_draft_len": 3}, drafter=heads)
    # Without it TensorRT-LLM drafts one token.
    assert '"num_nextn_predict_layers": 3' in line
    assert "speculative_model" not in line


def test_tensorrt_llm_is_told_a_draft_model_by_the_name_that_it_compares() -> None:
    line = launch_line("tensorrt-llm", {"max_draft_len": 3}, drafter=NamedDrafter("draft_model"))
    assert '"decoding_type": "Draft_Target"' in line


def test_a_draft_model_on_other_gpus_than_its_target_is_warned_of() -> None:
    """vLLM's layers are split over the target's GPUs, whatever draft_tensor_parallel_size is."""
    drafter = NamedDrafter("draft_model")
    apart = LatencyTable.constant(0.01, 0.001)
    apart.meta["tensor_parallel"] = {"target": 4, "draft": 1}  # type: ignore[index]
    said = about_sharing("vllm", drafter, apart)
    assert "a draft model on 1 GPU and a target on 4: vllm shares both alike" in said
    assert not about_sharing("vllm", NamedDrafter("eagle3"), apart)
    assert not about_sharing("llamacpp", drafter, apart)
    assert not about_sharing("vllm", drafter, LatencyTable.constant(0.01, 0.001))


def test_the_command(tmp_path: Path, run: Run) -> None:
    write_trace(recorded(), tmp_path / "trace.parquet")
    write_latency(CHEAP, tmp_path / "latency.parquet")
    given = ("tune", "--engine", "llamacpp", "--trace", tmp_path)
    ran = run(*given, "--out", tmp_path / "s.json", "--json", "-").ok()
    document = ran.document
    assert document["launch"].startswith(
        "llama-server -m TARGET -md DRAFT --spec-type draft-simple"
    )
    assert document["settings"] == json.loads((tmp_path / "s.json").read_text())
    assert "launch: llama-server" in ran.err
    assert "also reads every verified batch" in " ".join(ran.err.split())
    for more, message in (
        (("--batch", "1,8"), "one setting for every batch size, no table of them"),
        (("--by-context",), "a table of vllm"),
    ):
        refused = run(*given, *more)
        assert message in refused.refusal
