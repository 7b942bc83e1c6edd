"""Logs of servers: each format as its program writes it, counts and the curves they allow."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.aggregate.positions import reservation
from tests.conftest import Run
from tests.logs import (
    DETAILED,
    EAGLE,
    LLAMACPP,
    LMSTUDIO,
    ROUNDS,
    SCRAPE,
    SGLANG,
    SUMMARY,
    counts,
    example,
    import_specbench,
    row,
    write_rows,
    written,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.registry import AUTO, IMPORTERS, import_log, looks_like
from traces.importers.totals import Totals
from traces.latency.table import LatencyTable
from traces.operators.table import OperatorTable

TRACES = ("specbench", "vllm", "rounds", "by-start", "aiperf")
"""Formats that hold rounds in order; the others hold counts, or latencies."""
LATENCIES = ("latency", "llama-bench")
OPERATORS = ("vidur", "llmservingsim")


def kind_of(name: str) -> type:
    """Return the type that an import of this format makes."""
    if name in OPERATORS:
        return OperatorTable
    return Trace if name in TRACES else LatencyTable if name in LATENCIES else Totals


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_every_format_knows_its_own_file_and_no_other(name: str, tmp_path: Path) -> None:
    # Operators are of the GPU and the model whose folders they lie in.
    (folder := tmp_path / "a100" / "phi-2").mkdir(parents=True)
    file = written(folder, example(name))
    assert looks_like(file) == [name]
    found = import_log(AUTO, [file], Options())
    assert isinstance(found, kind_of(name))
    # A byte-order mark changes nothing.
    marked = folder / "marked"
    marked.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    again = import_log(name, [marked], Options())
    assert type(again) is type(found)
    other = next(n for n in IMPORTERS if n != name)
    with pytest.raises(FileError, match=f"looks like {name}"):
        import_log(other, [file], Options())


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_damaged_files_are_one_line(name: str, tmp_path: Path, run: Run) -> None:
    for content in (b"", b"\xff\xfe\x00", b'{"question', b"[1]", b"[]", b"{}", b"a,b\n1,2\n"):
        (tmp_path / "bad").write_bytes(content)
        ran = run("import", name, tmp_path / "bad", "--out", tmp_path / "t.parquet")
        assert ran.code == 2, (name, content)
        assert ran.err.count("\n") == 1
        assert not (tmp_path / "t.parquet").exists()


def test_vllm_in_summary(tmp_path: Path) -> None:
    totals = counts("vllm", written(tmp_path, SUMMARY))
    assert (totals.rounds, totals.drafted, totals.accepted) == (43, 129, 10)
    assert totals.per_position == [4, 3, 3]
    assert totals.fixed_length
    assert totals.meta["kind"] == "vllm"
    assert not totals.tree
    choice = {"choices": [{**SUMMARY["choices"][0], "metrics": SUMMARY["metrics"]}]}  # type: ignore[dict-item]
    assert counts("vllm", written(tmp_path, choice)).per_position == [4, 3, 3]
    assert totals.survival()[0].tolist() == pytest.approx([4 / 43, 3 / 43, 3 / 43])
    # Counts tell as a trace does which requests they are not of.
    aborted = {**SUMMARY, "choices": [{"finish_reason": "abort"}]}
    some = counts("vllm", written(tmp_path, [SUMMARY, aborted]))
    assert (some.rounds, some.requests) == (43, 1)
    assert some.meta["left_out"] == [f"{tmp_path / 'log'} entry 2: ended by abort"]


def test_an_aborted_request_leaves_the_others(tmp_path: Path, run: Run) -> None:
    aborted = {"id": "b", "choices": [{"finish_reason": "abort"}], "metrics": DETAILED["metrics"]}
    failed = {"error": {"message": "too long", "code": 400}}
    several = {"id": "c", "metrics": {"speculative_decoding": None}}
    lines = "\n".join(json.dumps(r) for r in (DETAILED, aborted, failed, several))
    out = tmp_path / "t.parquet"
    ran = run("import", "vllm", written(tmp_path, lines), "--out", out).ok()
    assert "1 request," in ran.err
    assert ran.err.count("left out: ") == 3
    bad = row(2, [2, 2], [3, 1])
    bad["choices"][0]["turns"] = ["fine", "ERROR"]
    trace = import_specbench(write_rows(tmp_path / "s", [row(1, [2]), bad]))
    assert [r.id for r in trace.requests] == ["1/1", "2/1"]
    assert trace.meta["left_out"] == [
        f"{tmp_path / 's'} line 2, question 2, turn 2: failed",
    ]  # fmt: skip


def test_scrapes_before_and_after(tmp_path: Path) -> None:
    before = written(tmp_path, SCRAPE.format(10, 20, 9, 6, 3), "before")
    after = written(tmp_path, SCRAPE.format(110, 220, 129, 86, 43), "after")
    totals = counts("prometheus", before, after)
    assert (totals.rounds, totals.drafted, totals.accepted) == (100, 200, 120)
    assert totals.per_position == [80, 40]
    lo, hi = totals.block_efficiency()
    assert lo.tolist() == hi.tolist() == pytest.approx([1.8, 2.2])
    with pytest.raises(FileError, match="name the earlier scrape first"):
        counts("prometheus", after, before)
    assert "cannot be told" in reservation(totals)
    texts = before.read_text(), after.read_text()
    for name in ("process_start_time_seconds", "vllm:spec_decode_num_drafts_created"):
        for then, rounds, said in (
            ("1.7e+09", 100, ""),
            ("1.8e+09", 110, "the server was restarted after before: after alone counts"),
        ):
            one = written(tmp_path, f"{texts[0]}{name} 1.7e+09\n", "before")
            other = written(tmp_path, f"{texts[1]}{name} {then}\n", "after")
            totals = counts("prometheus", one, other)
            assert (totals.rounds, reservation(totals)) == (rounds, said)
        with pytest.raises(FileError, match="name the earlier scrape first"):
            counts("prometheus", written(tmp_path, f"{texts[1]}{name} 1.8e+09\n", "later"), one)
    # A time may be written in several ways.
    same = written(tmp_path, f"{texts[1]}{name} 1700000000.0\n", "after")
    assert counts("prometheus", one, same).rounds == 100
    # One of two engines was restarted.
    begun = f'{name}{{engine="0"}} 1\n{name}{{engine="1"}} '
    engines = [written(tmp_path, f"{text}{begun}{i}\n", str(i)) for i, text in enumerate(texts, 1)]
    with pytest.raises(FileError, match="some of its engines were restarted"):
        counts("prometheus", *engines)
    for page in ("hello\n", '{"process_start_time_seconds": 1}\n', "llamacpp:requests 1.0\n"):
        with pytest.raises(FileError, match="page: is no /metrics of vllm"):
            counts(AUTO, written(tmp_path, page, "page"), after)
    # Other metrics may come first.
    wide = "process_cpu_seconds_total 3.0\n" * 4000 + texts[1]
    assert counts(AUTO, written(tmp_path, wide)).rounds == 110
    with pytest.raises(FileError, match=r"begin with vllm:spec_decode_ or .*; found none"):
        counts("prometheus", written(tmp_path, "process_cpu_seconds_total 3.0\n"))
    wrong = written(tmp_path, SCRAPE.format(10, 20, 9, 3, 6))
    with pytest.raises(DraftsimError, match="rise, or exceed"):
        counts("prometheus", wrong)


def test_sglang_with_and_without_a_histogram(tmp_path: Path) -> None:
    totals = counts("sglang", written(tmp_path, [SGLANG, SGLANG]))
    assert (totals.rounds, totals.drafted, totals.accepted, totals.requests) == (66, 462, 138, 2)
    assert totals.longest == 7
    assert totals.per_position is not None
    assert sum(totals.per_position) == 138
    old = {"meta_info": {"completion_tokens": 41, "spec_verify_ct": 20}}
    totals = counts("sglang", written(tmp_path, old))
    assert (totals.rounds, totals.accepted, totals.per_position) == (20, 20, None)
    off = {"meta_info": {"completion_tokens": 41, "spec_verify_ct": 0}}
    with pytest.raises(FileError, match="without speculation"):
        counts("sglang", written(tmp_path, off))
    chunks = [{"meta_info": {**SGLANG["meta_info"], "finish_reason": why}}  # type: ignore[dict-item]
              for why in (None, {"type": "stop"})]  # fmt: skip
    assert counts("sglang", written(tmp_path, chunks)).rounds == 33
    with pytest.raises(FileError, match="no response of it finished"):
        counts("sglang", written(tmp_path, chunks[:1]))
    bad = {"meta_info": {**SGLANG["meta_info"], "spec_verify_ct": 32}}  # type: ignore[dict-item]
    with pytest.raises(FileError, match="counts 33 rounds, spec_verify_ct 32"):
        counts("sglang", written(tmp_path, bad))


def test_sglang_that_proposes_more_than_it_ever_accepts_may_have_drafted_trees(
    tmp_path: Path,
) -> None:
    """The histogram ends with the most that a verification accepted: 3 of 5 here."""
    info = {
        "spec_verify_ct": 20, "completion_tokens": 40, "spec_num_proposed_drafts": 100,
        "spec_num_correct_drafts": 19, "spec_correct_drafts_histogram": [10, 3, 5, 2],
    }  # fmt: skip
    file = written(tmp_path, {"meta_info": info})
    with pytest.raises(FileError, match=r"accepts at most 3: a tree, or a chain of 5: then import"):
        counts("sglang", file)
    totals = counts("sglang", file, draft_lengths="fixed:5")
    assert (totals.longest, totals.per_position) == (5, [10, 7, 2, 0, 0])
    assert totals.fixed_length
    for wrong in ("fixed:3", "fixed:6"):
        with pytest.raises(FileError, match="are no drafts of"):
            counts("sglang", file, draft_lengths=wrong)
    file = written(tmp_path, {"meta_info": {**info, "spec_num_proposed_drafts": 90}})
    with pytest.raises(FileError, match=r"a tree, or chains of several lengths: give"):
        counts("sglang", file)


def test_a_mean_near_a_whole_number_is_no_draft_length(tmp_path: Path) -> None:
    """Requests of 50 rounds with drafts of 8, or of 5 to 11 tokens, 7.9 on average."""

    def answered(drafted: int) -> dict[str, Any]:
        return {"timings": {"predicted_n": 151, "draft_n": drafted, "draft_n_accepted": 100}}

    for lengths, fixed in (((390, 395, 400), True), ((250, 550, 385), False)):
        lines = "\n".join(json.dumps(answered(n)) for n in lengths)
        totals = counts("llamacpp", written(tmp_path, lines))
        assert (totals.reach, totals.drafted, totals.fixed_length) == (8, 1185, fixed)
    keys = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    for pairs, fixed in ((((4, 32), (4, 31)), True), (((4, 20), (4, 43)), False)):
        rows = [{"specDecodingStats": dict(zip(keys, (*pair, 4), strict=True))} for pair in pairs]
        assert counts("tensorrt-llm", written(tmp_path, rows)).fixed_length is fixed


def test_llamacpp(tmp_path: Path) -> None:
    totals = counts("llamacpp", written(tmp_path, LLAMACPP))
    assert (totals.rounds, totals.drafted, totals.accepted) == (7, 12, 9)
    assert totals.meta["measured"]["wall_s"] == pytest.approx(0.4)
    plain = {"timings": {"predicted_n": 17, "predicted_ms": 400.0}}
    with pytest.raises(FileError, match="without speculation"):
        counts("llamacpp", written(tmp_path, plain))


def test_lmstudio(tmp_path: Path) -> None:
    """Its own API counts drafts in `usage`, the other one in `stats`, without a speed."""
    usage, stats = LMSTUDIO["usage"], LMSTUDIO["stats"]
    drafts = {name: usage[name] for name in usage if "draft" in name}
    other = {"usage": {n: v for n, v in usage.items() if n not in drafts}, "stats": drafts}
    for response, wall_s in ((LMSTUDIO, 3.0), (other, 0.0), ({"usage": usage}, 0.0)):
        totals = counts("lmstudio", written(tmp_path, response))
        assert (totals.rounds, totals.drafted, totals.accepted) == (25, 100, 34)
        assert totals.reach == 4
        assert totals.fixed_length
        assert totals.meta["measured"]["wall_s"] == pytest.approx(wall_s)
    for lacking, message in (
        ({"stats": stats}, "has no usage and stats: expected responses of LM Studio"),
        ({"usage": {"completion_tokens": 9}, "stats": {}}, "have no total_draft_tokens_count"),
        ({**LMSTUDIO, "stats": {"tokens_per_second": "x"}}, "usage and stats.tokens_per_second is"),
    ):
        with pytest.raises(FileError, match=message):
            counts("lmstudio", written(tmp_path, lacking))


def test_a_tree_is_no_chain(tmp_path: Path, run: Run) -> None:
    totals = counts("eagle", written(tmp_path, EAGLE))
    assert (totals.rounds, totals.accepted, totals.tree) == (15, 20, True)
    assert totals.rows() == []
    medusa = {**row(1, [3, 1, 2]), "model_id": "vicuna-7b-v1.3-medusa-temperature-0.0"}
    with pytest.raises(FileError, match="names medusa, which verifies several branches"):
        import_specbench(written(tmp_path, medusa))
    eagle2 = {**row(1, [3, 1, 2]), "model_id": "vicuna-7b-v1.3-eagle2-float16"}
    with pytest.raises(FileError, match="names eagle, which"):
        import_specbench(written(tmp_path, eagle2))
    document = run("import", "eagle", written(tmp_path, EAGLE), "--json", "-").document
    assert document["results"] == []
    assert document["counts"]["tree"] is True


def test_a_files_suffix_says_what_it_is(tmp_path: Path, run: Run) -> None:
    for form, log, out, what in (
        ("eagle", EAGLE, "t.parquet", "eagle made counts, and no trace: name a .json file"),
        ("rounds", ROUNDS, "t.csv", "this log makes a trace, a Parquet file: name a .parquet file"),
    ):
        refused = run("import", form, written(tmp_path, log), "--out", tmp_path / out)
        assert what in refused.refusal
        assert not (tmp_path / out).exists()
    wrote = run("import", "eagle", written(tmp_path, EAGLE), "--out", tmp_path / "t.json")
    assert (wrote.code, json.loads((tmp_path / "t.json").read_text())["command"]) == (0, "import")


@pytest.mark.parametrize("more", [0, 1])
def test_a_baseline_that_counts_its_tokens_is_plain_decoding(more: int, tmp_path: Path) -> None:
    """Versions write no tokens, the last step's index, or that and one more."""
    choice = EAGLE["choices"][0]  # type: ignore[index]
    wall = {"wall_time": [6.0, 2.4]}
    silent = {**EAGLE, "choices": [choice | {"idxs": [24, 9], "new_tokens": [0, 0]} | wall]}
    told = {**EAGLE, "choices": [
        choice | {"idxs": [24 + 1 - more, 10 - more], "new_tokens": [25, 10]} | wall
    ]}  # fmt: skip
    (tmp_path / "own").write_text(json.dumps(EAGLE))
    speedups = []
    for name, plain in (("silent", silent), ("told", told)):
        (tmp_path / name).write_text(json.dumps(plain))
        totals = counts("eagle", tmp_path / "own", baseline=tmp_path / name)
        speedups.append(totals.meta["baseline"]["speedup"])
        with pytest.raises(FileError, match="without speculation"):
            counts("eagle", tmp_path / name)
    assert speedups[0] == pytest.approx(speedups[1])


def test_a_question_that_was_run_twice_is_not_counted_twice(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join([json.dumps(EAGLE)] * 2))
    with pytest.raises(FileError, match="holds question 81, turn 1 2 times"):
        counts("eagle", path)


def test_questions_without_a_name_are_not_taken_for_one(tmp_path: Path) -> None:
    nameless = json.dumps({"choices": EAGLE["choices"]})
    assert counts("eagle", written(tmp_path, f"{nameless}\n{nameless}")).requests == 4
    first = json.dumps({**EAGLE, "choices": [None, *EAGLE["choices"]]})  # type: ignore[misc]
    with pytest.raises(FileError, match=r"has no choices\[0\]"):
        counts("eagle", written(tmp_path, first))


def test_public_eagle_log(shared_data: Path) -> None:
    folder = shared_data / "eagle_logs"
    plain = folder / "llama-2-chat-70b-base.jsonl"
    totals = counts("eagle", folder / "llama-2-chat-70b-ea.jsonl", baseline=plain)
    # The EAGLE paper (Table 1) gives 3.01x for this model and benchmark.
    assert totals.meta["baseline"]["speedup"] == pytest.approx(3.01, rel=0.05)
    assert totals.meta["measured"]["per_round"] > 3
    with pytest.raises(FileError, match="without speculation"):
        counts("eagle", plain)


def test_rounds_as_csv(tmp_path: Path) -> None:
    trace = import_log("rounds", [written(tmp_path, ROUNDS)], Options())
    assert isinstance(trace, Trace)
    assert trace.columns["match"].tolist() == [-1, 1, 1, 1, -1, 1, 0, -1, 0]
    for content, message in (
        ("drafted,accepted\n1,2\n", "line 2: accepted=2 exceeds drafted=1"),
        ("drafted,accepted\n1,x\n", "line 2: accepted is 'x'"),
        ("drafted,taken\n1,1\n", r"lacks the column\(s\) accepted"),
        ("drafted,accepted,more\n1,1,1\n", "unknown column"),
        ("drafted,accepted\n0,0\n", "without speculation"),
        ("drafted,accepted\n", "holds no rounds"),
    ):
        with pytest.raises(FileError, match=message):
            import_log("rounds", [written(tmp_path, content)], Options())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_interval_of_curves_holds_the_true_one(accepted: list[int]) -> None:
    longest, rounds = 5, len(accepted)
    per_position = [sum(a >= k for a in accepted) for k in range(1, longest + 1)]
    known = Totals(rounds, longest * rounds, sum(accepted), longest, per_position)
    sums = Totals(rounds, longest * rounds, sum(accepted), longest)
    for mine, theirs in (
        (known.survival(), sums.survival()),
        (known.block_efficiency(), sums.block_efficiency()),
    ):
        assert np.array_equal(mine[0], mine[1])
        assert (theirs[0] <= mine[0] + 1e-12).all()
        assert (mine[0] <= theirs[1] + 1e-12).all()
    assert sums.block_efficiency()[0][-1] == pytest.approx(1 + sums.mean_accepted)
    assert sums.block_efficiency()[1][-1] == pytest.approx(1 + sums.mean_accepted)


def changed(name: str, path: str, value: Any) -> Any:
    """The example of a format with the value at `path`, a name or number a step, replaced."""
    document = deepcopy(example(name))
    holder, (*steps, last) = document, path.split(".")
    for step in steps:
        holder = holder[int(step) if isinstance(holder, list) else step]
    holder[int(last) if isinstance(holder, list) else last] = value
    return document


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("llamacpp", "timings.draft_n", 10**9, "timings: drafted is 1,000,000,000 in 7 rounds, "
         "expected at most 4,096 drafted tokens in each"),
        ("llamacpp", "timings.predicted_n", 10**8, "timings.predicted_n is 100,000,000, expected"),
        ("llamacpp", "timings.predicted_ms", "x", "timings.predicted_ms is 'x', expected"),
        ("llamacpp", "timings.predicted_ms", 1e308, r"timings.predicted_ms is 1e\+308"),
        ("tensorrt-llm", "0.specDecodingStats.numDraftTokens", 2 * 10**8,
         "numDraftTokens is 200,000,000 in 2 rounds"),
        ("specbench", "choices.0.accept_lengths", [10**18, 1, 2], "accept_lengths holds 1,000,000"),
        ("specbench", "choices.0.new_tokens", [10**18], "new_tokens holds 1,000,000,000,000,000,0"),
        ("vllm", "metrics.speculative_decoding.per_step_drafted", [3, 2**40],
         "per_step_drafted holds 1,099,511,627,776, expected at most 4,096"),
        ("vllm", "usage", "x", "usage is 'x', expected an object"),
        ("sglang", "meta_info.spec_correct_drafts_histogram", {}, "no list of whole numbers"),
        ("sglang", "meta_info.spec_num_proposed_drafts", 10**15, "in 33 rounds, expected at"),
        ("aiperf", "spec_decode_acceptance.per_step_accepted", 1, "per_step_accepted is no list"),
        ("eagle", "choices.0.wall_time", [float("inf"), 1.0], "wall_time is no list of positive"),
        ("eagle", "choices.0", {}, r"has no choices\[0\] with idxs, new_tokens, wall_time: "),
        ("by-start", "acc_eagle.acc_len", [2**70, 1, 1], "acc_eagle holds 1,180,591,620,717,411"),
        ("by-start", "generated_token_ids", [3, 4, 2**63], "generated_token_ids holds 9,223,372"),
        ("llama-bench", "samples_ns", [[1], "x"], "samples_ns is"),
        ("llama-bench", "n_gen", 1e300, r"n_gen is 1e\+300, expected a whole number"),
    ],
)  # fmt: skip
def test_one_number_of_a_log_does_not_set_the_memory(
    name: str, path: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=message) as refused:
        import_log(name, [written(tmp_path, changed(name, path, value))], Options())
    assert "log" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("prometheus", SCRAPE.replace('position="1"', 'position="\u00b2"').format(10, 20, 9, 6, 3),
         "line 7: the label position is '\u00b2', expected a whole number"),
        ("prometheus", SCRAPE.replace('position="1"', f'position="{"1" * 5000}"')
         .format(10, 20, 9, 6, 3), "line 7: the label position is '1111"),
        ("prometheus", SCRAPE.format(10, 20, 1e18, 6, 3), "line 5: .* is no count of at most"),
        ("rounds", "drafted,accepted\n3,\u00b2\n", "line 2: accepted is '\u00b2', expected"),
        ("rounds", "drafted,accepted\n3,1,1\n", "line 2: has not as many values"),
        ("rounds", "drafted,accepted\n5000,1\n", "line 2: drafted is 5,000, expected at most"),
        ("specbench", [row(1, [2]), row(1, [2])], "holds question 1, turn 1 2 times"),
        ("llamacpp", "[" * 100_000, "line 1: is not JSON .nested deeper than 64 levels"),
        ("llamacpp", '{"timings": {"draft_n": ' + "9" * 5000 + "}}", "a number of 5000 digits"),
    ],
)  # fmt: skip
def test_what_no_program_writes_is_one_line(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=message):
        import_log(name, [written(tmp_path, content)], Options())


def test_options_of_another_format_are_refused(tmp_path: Path, run: Run) -> None:
    file = written(tmp_path, DETAILED)
    ran = run("import", "vllm", file, "--out", tmp_path / "t", "--draft-lengths", "fixed:3")
    assert "--draft-lengths says nothing about a log of vllm" in ran.refusal
    ran = run("import", "vlm", file, "--out", tmp_path / "t")
    assert "did you mean 'vllm'" in ran.err
    assert run("import", "vllm", file).code == 2
