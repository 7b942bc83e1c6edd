"""vLLM's per-request metrics become traces with unknown positions marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from tests.conftest import Run
from tests.logs import SUMMARY, counts, import_vllm
from traces.acceptance.survival import survival
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN
from traces.errors import FileError
from traces.replay.run import replay


def response(drafted: list[int], accepted: list[int], **more: Any) -> dict[str, Any]:
    steps = {"per_step_drafted": drafted, "per_step_accepted": accepted}
    return {"id": "r", "metrics": {"speculative_decoding": steps}, **more}


def write(path: Path, *objects: Any) -> Path:
    path.write_text("\n".join(json.dumps(o) for o in objects))
    return path


EXPECTED = [UNKNOWN, MATCH, MATCH, UNKNOWN, MISMATCH, MATCH, MISMATCH, UNKNOWN]


def test_positions_by_hand(tmp_path: Path) -> None:
    # prefill | two of two and the bonus | none of two | one of three | no draft
    one = response([2, 2, 3, 0], [2, 0, 1, 0])
    trace = import_vllm(write(tmp_path / "f", one))
    assert trace.columns["match"].tolist() == EXPECTED
    (request,) = trace.requests
    assert (request.id, request.tokens, request.ended) == ("r", 8, "eos")
    assert trace.meta["first"] == 1


def test_the_metrics_are_found_wherever_they_stand(tmp_path: Path) -> None:
    top = response([2, 2, 3, 0], [2, 0, 1, 0], usage={"completion_tokens": 8, "prompt_tokens": 5})
    inner = {"id": "b", "choices": [{"finish_reason": "length", "metrics": top["metrics"]}]}
    both = {"id": "c", "usage": {"completion_tokens": 16}, "choices": inner["choices"] * 2}
    bare = {"request_id": "d", **top["metrics"]}
    for lines in ([top, inner, both, bare], [[top, inner, both, bare]]):
        trace = import_vllm(write(tmp_path / "f", *lines))
        assert [r.id for r in trace.requests] == ["r", "b", "c/0", "c/1", "d"]
        assert trace.columns["match"].tolist() == EXPECTED * 5
        assert [r.ended for r in trace.requests] == ["eos", "length", "length", "length", "eos"]
        assert trace.requests[0].prompt_length == 5
    several = import_vllm(write(tmp_path / "a", top), write(tmp_path / "b", inner))
    assert [r.id for r in several.requests] == ["r", "b"]


def test_a_stop_inside_the_last_step_cuts_it(tmp_path: Path) -> None:
    cut = response([3, 3], [0, 3], usage={"completion_tokens": 4})
    trace = import_vllm(write(tmp_path / "f", cut))
    assert trace.columns["match"].tolist() == [UNKNOWN, MISMATCH, MATCH, MATCH]


def test_the_rounds_of_a_fixed_policy_come_back(tmp_path: Path) -> None:
    source = synthetic_trace(0.75, requests=5, tokens=80, seed=9)
    log = replay(source, Fixed(3), first=1)
    objects = []
    for i in range(5):
        mine = log.rounds[log.rounds["request"] == i]
        drafted, accepted = mine["drafted"].tolist(), mine["accepted"].tolist()
        objects.append(response(drafted, accepted, choices=[{"finish_reason": "length"}]))
    trace = import_vllm(write(tmp_path / "f", *objects))
    assert [r.ended for r in trace.requests] == ["length"] * 5
    assert replay(trace, Fixed(3)).rounds.tolist() == log.rounds.tolist()
    seen = trace.columns["match"] != UNKNOWN
    assert np.array_equal(trace.columns["match"][seen], source.columns["match"][seen])
    estimate = survival(trace)
    assert estimate.rejected.sum() == (log.rounds["accepted"] < log.rounds["drafted"]).sum()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"id": "x"}, "has no metrics.speculative_decoding"),
        ({"choices": [{"metrics": None}]}, "has no metrics.speculative_decoding"),
        (response([2], [3]), "step 0: per_step_accepted=3 exceeds per_step_drafted=2"),
        (response([2, 1], [1]), "has 2 steps, per_step_accepted 1"),
        (response([2], [-1]), "per_step_accepted is no list of whole numbers"),
        (response([2.5], [1]), "per_step_drafted is no list"),
        ({"metrics": {"speculative_decoding": {}}}, "per_step_drafted is no list"),
        (response([2], [1], usage={"completion_tokens": 9}), "emit 3 tokens .* is 9"),
        (response([2], [1], usage={"completion_tokens": 1}), "emit 3 tokens .* is 1"),
        (response([2], [1], usage={"prompt_tokens": "a"}), "usage.prompt_tokens is 'a'"),
    ],
)
def test_contradictions_are_named_with_their_place(
    tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    with pytest.raises(FileError, match=rf"bad line 2.*{message}"):
        import_vllm(write(tmp_path / "bad", response([1], [1]), bad))


def test_a_log_is_used_as_far_as_it_goes(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    log = tmp_path / "log.parquet"
    accepted = [(rng.random(30) < 0.8).astype(int).tolist() for _ in range(6)]
    source = write(tmp_path / "f", *(response([1] * 30, a, id=f"r{i}")
                                     for i, a in enumerate(accepted)))  # fmt: skip
    assert run("import", "vllm", source, "--out", log).code == 0
    # Without usage nobody knows the prompts: requests are served all the same.
    table = ("--latency", "const:target=0.02,draft=0.001")
    ran = run("serve", "--trace", log, *table, "--policy", "fixed:gamma=1", "--batch", "1",
              "--requests", "6", "--json", "-")  # fmt: skip
    assert ran.rows[0]["requests"] == 6
    assert "the longest verified draft has 1 token;" in ran.err


def test_a_log_without_drafts_is_one_line(tmp_path: Path, run: Run) -> None:
    log = tmp_path / "log.parquet"
    source = write(tmp_path / "f", response([0] * 9, [0] * 9))
    ran = run("import", "vllm", source, "--out", log)
    assert "is a log without speculation, no request drafted a token" in ran.refusal
    assert not log.exists()


def test_responses_without_metrics_are_left_out_of_summaries(tmp_path: Path) -> None:
    totals = counts("vllm", write(tmp_path / "f", SUMMARY, {"id": "x"}))
    assert totals.requests == 1
    assert totals.meta["left_out"] == [f"{tmp_path / 'f'} line 2: no metrics"]
