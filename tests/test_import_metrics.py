"""Servers' metrics and AIPerf's records: what each tells of acceptance, and what none can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from tests.logs import AIPERF, DETAILED, ITERATION, counts, written
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.registry import AUTO, import_log

LLAMACPP = """# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 120
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 201
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 64
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 52
# HELP llamacpp:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 29
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 17
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 10
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="3"} 8
"""
"""Text that llama.cpp's server wrote (b11549, a random miniature and a noisy copy as its draft,
``--spec-draft-n-max 4``, three requests of 40 tokens), other metrics left out."""
TIMINGS = [
    {"timings": {"cache_n": 0, "prompt_n": 13, "prompt_ms": 0.837, "predicted_n": 40,
                 "predicted_ms": 16.913, "draft_n": 69, "draft_n_accepted": 21}},
    {"timings": {"cache_n": 4, "prompt_n": 5, "prompt_ms": 0.356, "predicted_n": 40,
                 "predicted_ms": 9.621, "draft_n": 44, "draft_n_accepted": 27}},
    {"timings": {"cache_n": 4, "prompt_n": 17, "prompt_ms": 1.097, "predicted_n": 40,
                 "predicted_ms": 17.639, "draft_n": 88, "draft_n_accepted": 16}},
]  # fmt: skip
"""The same run's answers."""
SGLANG = """# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {length}
sglang:spec_accept_length{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"}} {length}
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {rate}
"""
"""Gauges as ``srt/observability/metrics_collector.py`` of SGLang names them, one a rank."""
LENGTHS = (
    'sglang:spec_num_steps{{tp_rank="0"}} {0}\nsglang:spec_num_draft_tokens{{tp_rank="0"}} {1}\n'
)
COUNTERS = """# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{is_streaming="true",model_name="m"}} {0:.1f}
sglang:generation_tokens_total{{is_streaming="false",model_name="m"}} 100.0
sglang:num_requests_total{{is_streaming="true",model_name="m"}} {1:.1f}
sglang:spec_verify_calls_total{{model_name="m"}} {2:.1f}
"""
TRTLLM = """# TYPE trtllm_spec_decode_drafted_tokens counter
trtllm_spec_decode_drafted_tokens_total{token_position="0",worker="0"} 10.0
trtllm_spec_decode_drafted_tokens_total{token_position="0",worker="1"} 20.0
trtllm_spec_decode_drafted_tokens_total{token_position="1",worker="0"} 10.0
trtllm_spec_decode_drafted_tokens_total{token_position="1",worker="1"} 20.0
trtllm_spec_decode_drafted_tokens_total{token_position="2",worker="1"} 15.0
trtllm_spec_decode_accepted_tokens_total{token_position="0",worker="0"} 10.0
trtllm_spec_decode_accepted_tokens_total{token_position="0",worker="1"} 12.0
trtllm_spec_decode_accepted_tokens_total{token_position="1",worker="1"} 8.0
"""
"""Counters of ``tensorrt_llm/metrics/collector.py``, of two workers."""
RESPONSE = {
    "choices": [{
        "index": 0, "finish_reason": "length", "avg_decoded_tokens_per_iter": 2.5,
        "speculative_decoding": {
            "acceptance_rate": 0.5, "total_accepted_draft_tokens": 30, "total_draft_tokens": 60,
            "num_spec_steps": 20, "acceptance_histogram": [8, 0, 6, 6], "num_spec_tokens": 3,
        },
    }],
}  # fmt: skip
"""A choice of TensorRT-LLM's, with the counts of AIPerf's own test of its adapter."""


def test_llamacpp_counts_as_its_answers_do(tmp_path: Path) -> None:
    totals = counts("prometheus", written(tmp_path, LLAMACPP, "metrics"))
    assert (totals.rounds, totals.drafted, totals.accepted) == (52, 201, 64)
    assert totals.per_position == [29, 17, 10, 8]
    lines = "\n".join(map(json.dumps, TIMINGS))
    answers = counts("llamacpp", written(tmp_path, lines, "answers"))
    assert (answers.drafted, answers.accepted) == (201, 64)
    # Rounds without a draft, in front of the last token, are no verifications.
    assert answers.rounds is not None
    assert 0 <= answers.rounds - 52 <= len(TIMINGS)
    low, high = answers.survival()
    known = totals.survival()[0]
    assert (known[: len(high)] <= high + 0.05).all()
    assert not low.any()


def test_sglang_from_its_counters(tmp_path: Path) -> None:
    # 1,000 tokens of 10 requests in 330 verifications: 660 accepted drafts.
    gauges = SGLANG.format(length=2.8, rate=0.6) + LENGTHS.format(3, 4)
    file = written(tmp_path, gauges + COUNTERS.format(900, 10, 330))
    totals = counts("prometheus", file)
    assert (totals.rounds, totals.accepted, totals.requests) == (330, 660, 10)
    assert (totals.longest, totals.drafted, totals.tree) == (3, None, False)
    low, high = totals.survival()
    assert high[0] == 1.0
    assert low[0] == pytest.approx(2 / 3)
    later = written(tmp_path, gauges + COUNTERS.format(1900, 20, 630), "later")
    grown = counts("prometheus", file, later)
    assert (grown.rounds, grown.accepted) == (300, 690)
    for fresh in (
        "# TYPE sglang:spec_accept_length gauge\n", COUNTERS.format(-100, 0, 0),
        LENGTHS.format(0, 0) + COUNTERS.format(-100, 0, 0),
    ):  # fmt: skip
        first = written(tmp_path, fresh.replace("-100.0", "0").replace(" 100.0", " 0"), "fresh")
        since = counts(AUTO, first, file)
        assert (since.rounds, since.accepted, since.longest) == (330, 660, 3), fresh
    with pytest.raises(FileError, match="counts do not belong together"):
        counts("prometheus", written(tmp_path, gauges + COUNTERS.format(1900, 20, 330)))
    wide = LENGTHS.format(3, 16) + COUNTERS.format(900, 10, 330)
    assert counts("prometheus", written(tmp_path, wide)).tree


def test_adaptive_lengths_bound_nothing(tmp_path: Path) -> None:
    files = [
        written(tmp_path, LENGTHS.format(k, k + 1) + COUNTERS.format(n, 10 * i, 330 * i), str(k))
        for i, (k, n) in enumerate(((3, 900), (5, 1900)), 1)
    ]
    totals = counts("prometheus", *files)
    assert totals.longest is None
    assert not totals.survival()[0].any()


def test_gauges_alone_are_means_of_unknown_rounds(tmp_path: Path, run: Run) -> None:
    file = written(tmp_path, SGLANG.format(length=2.8, rate=0.6))
    totals = counts("prometheus", file)
    assert totals.rounds is None
    assert totals.mean_accepted == pytest.approx(1.8)
    assert totals.drafted == pytest.approx(3.0)
    assert totals.reach == 3
    ran = run("import", "prometheus", file, "--json", "-")
    assert "means of an unknown number of rounds: 1.800 drafted tokens accepted" in ran.err
    assert ran.document["counts"]["rounds"] is None
    known = counts("prometheus", written(tmp_path, file.read_text() + LENGTHS.format(3, 4)))
    assert known.fixed_length
    assert known.survival()[0].tolist() == pytest.approx([0.6, 0.4, 0.0])
    other = SGLANG.format(length=2.8, rate=0.6).replace('tp_rank="1"}} 2.8', "")
    two = other.replace('tp_rank="1"} 2.8', 'dp_rank="1"} 2.5')
    with pytest.raises(FileError, match=r"differs between engines \(2.5, 2.8\)"):
        counts("prometheus", written(tmp_path, two))
    with pytest.raises(FileError, match="nothing was decoded yet"):
        counts("prometheus", written(tmp_path, SGLANG.format(length=0.0, rate=0.0)))


@pytest.mark.parametrize(
    ("length", "rate", "drafted"),
    [
        (2.45, 2.45 / 5, 4),  # of 5 proposed with the bonus token's place
        (2.45, 1.45 / 4, 4),  # of 4 proposed
        (2.0, 1 / 3, None),  # either: 2 of 6, or 1 of 3
        (2.45, 0.4321, None),
    ],
)
def test_a_gauge_tells_the_draft_length_where_one_reading_alone_is_whole(
    length: float, rate: float, drafted: int | None, tmp_path: Path, run: Run
) -> None:
    file = written(tmp_path, SGLANG.format(length=length, rate=rate))
    assert counts("prometheus", file).drafted == drafted
    told = run("doctor", file, "--draft-length", 5, "--against", "0.5")
    if drafted is None:
        assert f"{length:.2f} tokens per round at K = 5" in " ".join(told.ok().err.split())
        assert "give the acceptance length" in run("doctor", file, "--against", "0.5").refusal
    else:
        assert "counts drafts of 4, and the draft length is 5" in told.refusal
        run("doctor", file, "--draft-length", 4, "--against", "0.5").ok()


def test_tensorrt_llm_by_position(tmp_path: Path) -> None:
    totals = counts("prometheus", written(tmp_path, TRTLLM))
    assert (totals.rounds, totals.drafted, totals.accepted) == (30, 75, 30)
    assert totals.per_position == [22, 8, 0]
    assert not totals.fixed_length
    fresh = written(tmp_path, "trtllm_request_success_total 0.0\n", "fresh")
    assert counts(AUTO, fresh, tmp_path / "log").per_position == [22, 8, 0]
    alone = "trtllm_spec_decode_num_draft_tokens_total 60.0\n"
    with pytest.raises(FileError, match="do not say in how many rounds"):
        counts("prometheus", written(tmp_path, alone))


def test_scrapes_of_two_servers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="of one server"):
        counts("prometheus", written(tmp_path, LLAMACPP), written(tmp_path, TRTLLM, "other"))


def test_iterations_of_tensorrt_llm(tmp_path: Path) -> None:
    prompt = {"iter": 6, "specDecodingStats": None}
    copy = {**ITERATION, "attentionDpRank": 1}
    rows = [prompt, ITERATION, copy, {**ITERATION, "iter": 8}]
    for name, text in (
        ("metrics", json.dumps(rows)),
        ("iterations.jsonl", "\n".join(map(json.dumps, rows))),
        ("iterations.log", "\n".join(map(str, rows))),  # --iteration_log prints dictionaries
    ):
        totals = counts("tensorrt-llm", written(tmp_path, text, name))
        assert (totals.rounds, totals.drafted, totals.accepted) == (4, 12, 6), name
        # Two requests shared each iteration: how its tokens were spread is not known.
        assert totals.per_position is None
    alone = [
        {"specDecodingStats": {"numDraftTokens": 3, "numAcceptedTokens": a,
                               "numRequestsWithDraftTokens": 1}}
        for a in (3, 0, 1, 3)
    ]  # fmt: skip
    totals = counts("tensorrt-llm", written(tmp_path, alone))
    assert totals.per_position == [3, 2, 2]
    assert totals.fixed_length
    for content, message in (
        ([prompt], "without speculation"),
        ([{"iter": 1}], "no iteration with specDecodingStats"),
        ([{"specDecodingStats": {"numDraftTokens": 3}}], "numRequestsWithDraftTokens is None"),
        ([{**ITERATION, "specDecodingStats": {
            **ITERATION["specDecodingStats"], "numAcceptedTokens": 9,  # type: ignore[dict-item]
        }}], "9 accepted of 6 drafted"),
        ("{'iter': 1", "is no dictionary"),
    ):  # fmt: skip
        with pytest.raises(FileError, match=message):
            counts("tensorrt-llm", written(tmp_path, content))


def test_responses_of_tensorrt_llm(tmp_path: Path) -> None:
    totals = counts("tensorrt-llm", written(tmp_path, [RESPONSE, RESPONSE]))
    assert (totals.rounds, totals.drafted, totals.accepted, totals.requests) == (40, 120, 60, 2)
    assert totals.per_position == [24, 24, 12]
    stats = RESPONSE["choices"][0]["speculative_decoding"]
    for changed, message in (
        ({"num_spec_steps": 19}, "30 tokens in 20 rounds, but the counts say 30 in 19"),
        ({"total_accepted_draft_tokens": 29}, "but the counts say 29 in 20"),
        ({"total_draft_tokens": 29}, "30 tokens accepted of 29 drafted"),
        ({"acceptance_histogram": {"0": 20}}, "no list of whole numbers"),
        ({"num_spec_steps": None}, "rounds is None"),
    ):
        bad = {"choices": [{"speculative_decoding": {**stats, **changed}}]}  # type: ignore[dict-item]
        with pytest.raises(DraftsimError, match=message):
            counts("tensorrt-llm", written(tmp_path, bad))


def record(**changed: Any) -> dict[str, Any]:
    own: Any = AIPERF["spec_decode_acceptance"]
    return {**AIPERF, "spec_decode_acceptance": {**own, **changed}}


def test_aiperf_with_steps_is_the_trace_of_vllm(tmp_path: Path) -> None:
    failed = {"metadata": {}, "metrics": {}, "error": {"code": 400, "message": "too long"}}
    lines = "\n".join(json.dumps(r) for r in (AIPERF, failed, record()))
    trace = import_log("aiperf", [written(tmp_path, lines)], Options())
    assert isinstance(trace, Trace)
    assert [r.id for r in trace.requests] == ["c0", "c0"]
    assert trace.requests[0].prompt_length == 9
    assert trace.meta["engine"] == ["vllm"]
    assert trace.meta["left_out"] == [f"{tmp_path / 'log'} line 2: failed"]
    theirs = import_log("vllm", [written(tmp_path, DETAILED)], Options())
    assert isinstance(theirs, Trace)
    assert trace.columns["match"][:7].tolist() == theirs.columns["match"].tolist()


def test_aiperf_without_steps_is_counts(tmp_path: Path) -> None:
    bare = record(per_step_accepted=None, per_step_drafted=None)
    totals = counts("aiperf", written(tmp_path, [AIPERF, bare]))
    assert (totals.rounds, totals.accepted, totals.longest) == (4, 8, 3)
    assert totals.per_position == [4, 2, 2]
    # The histogram ends with the most that a round accepted.
    short: dict[str, Any] = {
        "acceptance_histogram": {"0": 1, "1": 2}, "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 12, "num_spec_steps": 3, "num_spec_tokens": None,
        "per_step_accepted": None, "per_step_drafted": None,
    }  # fmt: skip
    totals = counts("aiperf", written(tmp_path, [record(**short)] * 2))
    assert (totals.per_position, totals.fixed_length) == ([4, 0, 0, 0], True)
    # A histogram that ends with 0 has a place for every length.
    whole = short | {"acceptance_histogram": {"0": 1, "1": 2, "3": 0}, "num_draft_tokens": 13}
    assert counts("aiperf", written(tmp_path, record(**whole))).longest == 3
    with pytest.raises(FileError, match="more than the 1 tokens a verification"):
        counts("aiperf", written(tmp_path, record(**short, engine="sglang")))
    # Of llama.cpp's server AIPerf spreads sums over a histogram that nobody measured.
    made_up = record(engine="llamacpp", num_spec_tokens=None, **dict.fromkeys(
        ("per_step_accepted", "per_step_drafted")))  # fmt: skip
    totals = counts("aiperf", written(tmp_path, [made_up, made_up]))
    assert totals.per_position is None
    assert totals.rounds == 2
    with pytest.raises(FileError, match=r"name profile_export\.jsonl"):
        counts("aiperf", written(tmp_path, {"metrics": {}}))
    with pytest.raises(FileError, match="but the counts say 4 in 3"):
        counts("aiperf", written(tmp_path, record(num_spec_steps=3, per_step_accepted=None)))
