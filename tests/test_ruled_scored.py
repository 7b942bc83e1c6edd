"""Outputs scored by exact match: from the numbers in a prompts file to what the commands say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from profiler.checks.differences import ANSWERS, SOLVED, answers_to, score, solved_by, solves
from profiler.checks.spot_check import real_run
from profiler.prompts import Prompt, read_prompts
from profiler.recording.run import BUNDLED
from simulator.papers.ours import quality_note
from tests import bundled
from tests.conftest import Run
from tests.logs import write_rows
from tests.outputs import greedy
from tests.rule_runs import decode, short_trace
from traces.errors import DraftsimError
from traces.replay.quality import final_number
from traces.store.files import read_trace
from traces.store.outputs import find_runs, quality, read_run, write_run

LIMIT = 32
ENDED, WRONG, CUT, BARE = "method-05", "function-11", "reference-01", "header-03"
"""Prompts of the bundled pair: three whose outputs end below the limit, and one that does not."""


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"reference": ["9 * 8 = <<9*8=72>>72\n#### 72", "second turn"]}, "72"),
        ({"reference": "#### 1,000"}, "1000"),
        ({"answer": 72}, "72"),
        ({"answer": 0.5}, "0.5"),
        ({"answer": "$7"}, "7"),
        ({"reference": ["Paris"], "answer": "#### 3"}, "3"),
        ({"reference": ["19 integers"]}, None),
        ({"reference": [["1995", "in 1995"]]}, None),
        ({"reference": [], "answer": None}, None),
        ({}, None),
    ],
)
def test_prompts_keep_the_number_that_solves_them(
    fields: dict[str, Any], answer: str | None, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "How many?", **fields}])
    assert read_prompts(path) == [Prompt("1", "all", "How many?", answer)]


@pytest.mark.parametrize("wrong", [{"answer": True}, {"reference": {"a": 1}}, {"answer": [{}]}])
def test_an_answer_of_another_type_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", **wrong}])
    with pytest.raises(DraftsimError, match=r"p\.jsonl line 2: '\w+' holds a \w+: give a text"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.JSONL", "p.ndjson", "p.Json"])
def test_json_lines_are_read_as_such_whatever_they_are_called(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / name, [{"id": "x", "prompt": "a"}])
    assert read_prompts(path) == [Prompt("x", "all", "a")]


def test_categories_are_chosen_before_prompts_are_counted(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": "a", "category": "xyx"[i % 3]} for i in range(9)]
    path = write_rows(tmp_path / "p.jsonl", rows)
    assert [p.id for p in read_prompts(path, None, ["y"])] == ["1", "4", "7"]
    assert [p.id for p in read_prompts(path, 2, ["y"])] == ["1", "4"]
    assert [p.id for p in read_prompts(path, 3)] == ["0", "1", "2"]
    with pytest.raises(DraftsimError, match=r"'z'.*has the categories x, y"):
        read_prompts(path, None, ["z"])


def test_a_cut_output_solves_nothing_and_without_a_number_nothing_is_said() -> None:
    pair = bundled.pair()
    tokens = pair.encode("x = 4, y = 72").tolist()
    assert solves(pair, tokens, "eos", "72") is True
    assert solves(pair, [*tokens, *pair.eos], "eos", "72.0") is True
    assert solves(pair, tokens, "eos", "4") is False
    assert solves(pair, tokens, "length", "72") is False
    assert solves(pair, tokens, "eos", None) is None


def test_answers_are_those_of_the_prompts_file_before_those_recorded() -> None:
    trace = short_trace()
    first, second, third = trace.requests
    trace = replace(trace, meta={**trace.meta, ANSWERS: {first.id: "1", second.id: "2", "-": "3"}})
    given = [
        Prompt(first.id, first.category, "", "7"),
        Prompt(second.id, "another", "", "8"),
        Prompt(third.id, third.category, ""),
    ]
    assert answers_to(trace) == {first.id: "1", second.id: "2"}
    assert answers_to(trace, given) == {first.id: "7", second.id: "2"}


def test_files_from_before_there_were_scores_still_read(tmp_path: Path) -> None:
    trace = short_trace()
    planned, measured = decode("csd:threshold=inf", trace)
    run = real_run(bundled.pair(), trace, planned, measured, {}, {trace.requests[0].id: "7"})
    path = write_run(run, tmp_path)
    assert [o.solved is None for o in read_run(path).outputs] == [False, True, True]
    assert quality(run.outputs, trace).score == "solved 0 of 1 (greedy 0 of 1)"
    document = json.loads(path.with_suffix(".json").read_text())
    for output in document["outputs"]:
        del output["solved"], output["greedy_solved"]
    document.pop("sha256", None)
    path.with_suffix(".json").write_text(json.dumps(document))
    old = read_run(path)
    assert {(o.solved, o.greedy_solved) for o in old.outputs} == {(None, None)}
    seen = quality(old.outputs, trace)
    assert (seen.scored, seen.solved, seen.solved_greedy, seen.score) == (0, 0, 0, "")
    assert "solved" not in quality_note(seen)


class Made(NamedTuple):
    """Prompts with answers, and the options that profile them."""

    prompts: Path
    options: tuple[object, ...]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """One prompt solved by construction, one not, one cut before its end, one without an answer."""
    pair, target = bundled.pair(), bundled.runners()[0]
    every = (json.loads(line) for line in (BUNDLED / "prompts.jsonl").read_text().splitlines())
    rows = {row["id"]: row for row in every if row["id"] in (ENDED, WRONG, CUT, BARE)}
    for name in (ENDED, WRONG, CUT):
        tokens = greedy(target, pair.encode(rows[name]["prompt"]), LIMIT, pair.eos)
        assert (tokens[-1] in pair.eos) == (name != CUT)
        number = final_number(pair.tokenizer.decode(tokens, skip_special_tokens=True))
        assert number is not None
        rows[name]["reference"] = [f"so it is\n#### {number + (name == WRONG)}"]
    prompts = write_rows(tmp_path / "prompts.jsonl", list(rows.values()))
    return Made(prompts, (
        "profile", *bundled.named(), "--prompts", prompts, "--out",
        tmp_path / "run", "--max-new-tokens", LIMIT, "--max-gamma", 4, "--repeats", 3,
    ))  # fmt: skip


def test_the_commands_say_how_many_prompts_are_solved(run: Run, made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = run(*made.options).said
    line = "the target solves 1 of the 3 prompts with a numeric answer; 1 cut"
    assert line in said
    trace = read_trace(folder / "trace.parquet")
    assert trace.meta[SOLVED] == [ENDED] == solved_by(bundled.pair(), trace, answers_to(trace))
    assert score(bundled.pair(), trace, answers_to(trace)) == (
        "solves 1 of the 3 prompts with a numeric answer; 1 cut at the token limit"
    )
    # Said again of a folder that is kept; the numbers are the folder's own from now on.
    assert line in run(*made.options).said
    made.prompts.unlink()
    same = ("--verify", "csd:threshold=inf", "--policy", "fixed:gamma=3")  # accepts no mismatch
    lenient = ("--verify", "lossy-global:tau=0.01", "--policy", "fixed:gamma=4")
    for rule in (same, lenient):
        ran = run(*made.options, *rule).ok()
    runs = [read_run(path) for path in find_runs(folder)]
    kept = {r.log.verify.partition(":")[0]: {o.id: o.solved for o in r.outputs} for r in runs}
    assert kept["csd"] == {ENDED: True, WRONG: False, CUT: False, BARE: None}
    assert kept["lossy-global"].keys() == kept["csd"].keys()
    for one in runs:
        assert {o.id: o.greedy_solved for o in one.outputs} == kept["csd"]
        solved = sum(s is True for s in kept[one.log.verify.partition(":")[0]].values())
        seen = quality(one.outputs, trace)
        assert (seen.scored, seen.solved, seen.solved_greedy) == (3, solved, 1)
        assert quality_note(seen).endswith(f"; solved {solved} of 3 (greedy 1 of 3)")

    rounds = ("simulate", "--rounds", folder, "--resamples", 5)
    plain, *rows = run(*rounds, "--json", "-").rows
    assert plain["scored"] is None
    for row in rows:
        own = sum(s is True for s in kept[row["verify"].partition(":")[0]].values())
        assert (row["scored"], row["solved"], row["solved_greedy"]) == (3, own, 1)
        assert row["agreement"] is not None
    printed = run(*rounds).out
    for row in rows:
        line = f"{row['verify']}: solved {row['solved']} of 3 (greedy 1 of 3)"
        assert line in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100

    ran = run("validate", "--run", folder, *same, "--repeats", 1, "--json", "-")
    [row] = [row for row in ran.rows if row["policy"] != "autoregressive"]
    assert (row["scored"], row["solved"], row["solved_greedy"]) == (3, 1, 1)


def test_a_category_is_decoded_again_beside_the_whole(run: Run, made: Made, tmp_path: Path) -> None:
    folder, rule = tmp_path / "run", ("--verify", "csd:threshold=inf", "--policy", "fixed:gamma=3")
    ran = run(*made.options, "--category", "method", "--category", "reference", *rule).ok()
    assert [r.id for r in read_trace(folder / "trace.parquet").requests] == [CUT, ENDED]
    [whole] = find_runs(folder)
    ran = run(*made.options, "--category", "method", *rule).ok()
    [part] = set(find_runs(folder)) - {whole}
    assert part.stem == f"{whole.stem}+method"
    assert [(o.id, o.solved) for o in read_run(part).outputs] == [(ENDED, True)]
    assert read_run(part).meta["part"] == "method"
    assert [o.id for o in read_run(whole).outputs] == [CUT, ENDED]
    again = run(*made.options, "--category", "method", *rule)
    assert "is finished and kept:" in again.said
    # Each is judged on the prompts that it decoded, and in its own category.
    rounds = ("simulate", "--rounds", folder, "--resamples", 5)
    rows = run(*rounds, "--by-category", "--json", "-").rows
    lossy = [r for r in rows if r["policy"] != "autoregressive"]
    scores = sorted((r["category"] or "", r["scored"], r["solved"]) for r in lossy)
    assert scores == [
        ("", 1, 1), ("", 2, 1), ("method", 1, 1), ("method", 1, 1), ("reference", 1, 0),
    ]  # fmt: skip
    ran = run(*made.options, "--category", "maths", *rule)
    assert (ran.code, "has the categories" in ran.said) == (2, True)
