"""The table of `simulate`, and its remarks on rows that say little."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commands.simulate.table import headline, print_ranked
from policies.lengths.basic import Fixed, Oracle
from policies.rules.registry import parse_rule
from simulator.summary import (
    HARDLY_VERIFIES,
    accepted_mismatches,
    degenerate,
    price_all,
    summarize,
    to_rows,
)
from simulator.whatif.ranking import compared
from tests.conftest import Run
from tests.gains import paired_gain
from tests.scored import LATENCY, scored_trace
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.files import write_latency, write_trace


def logs() -> list[RoundLog]:
    return [replay(scored_trace(), Fixed(g), name=f"fixed:gamma={g}") for g in (2, 4, 8)]


def test_gains_are_paired_and_over_what_is_asked() -> None:
    runs = logs()
    rows, priced = to_rows(summarize(runs, LATENCY, resamples=200)), price_all(runs, LATENCY)
    found = compared(rows, priced, LATENCY, "fixed:gamma=4", 200)
    assert found[2]["gain"] is None
    for row, log in ((found[1], runs[0]), (found[3], runs[2])):
        assert (row["gain"], row["gain_lo"], row["gain_hi"]) == pytest.approx(
            paired_gain(log, runs[1], LATENCY, resamples=200)
        )
        assert row["against"] == "fixed:gamma=4"
    with pytest.raises(DraftsimError, match="--against nobody: not among the policies"):
        compared(rows, priced, LATENCY, "nobody", 200)
    # A name with more parameters in its row, as where a recording lowers the longest draft.
    short = compared(rows[:2], priced[:2], LATENCY, "fixed", 200)
    assert short == compared(rows[:2], priced[:2], LATENCY, "fixed:gamma=2", 200)
    with pytest.raises(DraftsimError, match="names 3 rows: write one, such as fixed:gamma=2"):
        compared(rows, priced, LATENCY, "fixed", 200)
    best = max(found[1:], key=lambda row: row["speedup"])
    assert best["policy"] in headline(found)
    assert f"{three_digits(best['speedup'])}x" in headline(found)


def test_an_oracle_that_another_row_beats_is_called_no_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = scored_trace()
    runs = [replay(trace, Fixed(1), name="fixed:gamma=1"), replay(trace, Oracle(gamma_max=8))]
    for draft_s, said in ((0.1, "a bound, not a policy"), (1.5, "here it is no bound")):
        latency = LatencyTable.constant(1.0, draft_s)
        priced = price_all(runs, latency)
        rows = to_rows(summarize(runs, latency, resamples=50))
        print_ranked(compared(rows, priced, latency, None, 50))
        assert said in capsys.readouterr().out
    # Another drafter may be faster than the best that this one can be.
    rows = compared(rows, priced, latency, None, 50)
    other = {**rows[1], "policy": "pld", "source": "pld", "speedup": 9.0}
    print_ranked([rows[2], other])
    assert "a bound for that alone" in capsys.readouterr().out


def test_plain_decoding_is_one_row_and_has_no_rule(run: Run) -> None:
    rows = run("simulate", "--trace", "bundled", "--policy", "autoregressive", "--json", "-").rows
    assert [row["policy"] for row in rows].count("autoregressive") == 1
    # Nor is a draft length of 0 "the best" where no draft gives a speedup.
    slow = ("simulate", "--trace", "bundled", "--latency", "const:target=1,draft=2")
    said = " ".join(run(*slow, "--policy", "fixed:gamma=0").ok().out.split())
    assert "no policy is faster than no speculation: the best, fixed:gamma=1, is at" in said
    printed = run("simulate", "rounds", "bundled").ok().out
    plain = [line for line in printed.splitlines() if line.startswith("autoregressive")]
    assert len(plain) == 2  # two sets of prompts
    assert all(line.split()[1] == "-" for line in plain)
    # Nothing of these is recommended, and the recording is named all the same.
    assert "bundled, 28 prompts (set 2 of 2): no lossless policy is shown" in " ".join(
        printed.split()
    )


def test_rules_that_hardly_verify_and_runs_that_coincide_are_named() -> None:
    trace = scored_trace()
    lenient = replay(trace, Fixed(4), parse_rule("spec-verification:beta=50,tau=100"))
    strict = replay(trace, Fixed(4), parse_rule("spec-verification:beta=1,tau=0"))
    exact = replay(trace, Fixed(4), name="exact")
    assert accepted_mismatches(exact) is None
    assert accepted_mismatches(lenient) == 1.0 > HARDLY_VERIFIES
    assert accepted_mismatches(strict) == 0.0
    said = degenerate([exact, lenient, strict])
    assert said[0] == ""
    assert "hardly verifies" in said[1]
    assert said[2] == "identical to exact"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_trace(scored_trace(), tmp_path / "t.parquet")
    write_latency(LATENCY, tmp_path / "l.parquet")
    return ["--trace", str(tmp_path / "t.parquet"), "--latency", str(tmp_path / "l.parquet")]


def test_categories_stand_below_what_all_prompts_say(run: Run, files: list[str]) -> None:
    trace = scored_trace()
    names = {r.id: f"kind {i % 3}" for i, r in enumerate(trace.requests)}
    requests = [replace(r, category=names[r.id]) for r in trace.requests]
    write_trace(replace(trace, requests=requests), Path(files[1]))
    asked = ["simulate", *files, "--policy", "all", "--resamples", "50"]
    whole = run(*asked, "--json", "-").rows
    rows = run(*asked, "--by-category", "--json", "-").rows
    overall = [r for r in rows if r["category"] is None]
    assert [{k: v for k, v in r.items() if k != "category"} for r in overall] == whole
    parts = [r for r in rows if r["category"] is not None]
    for row in overall:
        own = [r for r in parts if all(r[k] == row[k] for k in ("policy", "verify", "source"))]
        assert {r["category"] for r in own} == set(names.values())
        assert sum(r["tokens"] for r in own) == row["tokens"]
    printed = run(*asked, "--by-category").out.splitlines()
    assert max(map(len, printed)) <= 100
    assert any(line.rstrip().endswith(" oracle") for line in printed)
    assert printed[0] == run(*asked).out.splitlines()[0]
    notes = [line for line in printed if line.startswith("* ")]
    assert len({line.partition(": ")[0] for line in notes}) == len(notes)
    lines = {line[:6]: line.split() for line in printed if line.strip().startswith("kind")}
    for category in set(names.values()):
        own = {
            r["policy"].partition(":gamma_max")[0]: r["speedup"]
            for r in parts if r["category"] == category and r["verify"] == "exact"
        }  # fmt: skip
        oracle, rule = own.pop("oracle"), own["rate-optimal"]
        own.pop("autoregressive")
        best = max(own, key=lambda name: own[name])
        [fixed] = {r["policy"] for r in whole if (r["note"] or "").startswith("best fixed")}
        cells = lines[category]
        assert (cells[2], cells[3]) == (f"{own[fixed]:.2f}", best)
        assert (cells[4], *cells[-2:]) == tuple(f"{x:.2f}" for x in (own[best], rule, oracle))


def test_every_policy_that_was_named_is_in_every_category(run: Run, files: list[str]) -> None:
    trace = scored_trace()
    # A name is anybody's, and must not reach the terminal as it is.
    kinds = ("\x1b]0;mine\x07", "two\nlines")
    requests = [replace(r, category=kinds[i % 2]) for i, r in enumerate(trace.requests)]
    write_trace(replace(trace, requests=requests), Path(files[1]))
    names = ("fixed:gamma=4", "cm-asd", "csd", "gammatune+csd", "gammatune+", "svip+csd-ocm")
    asked = [part for name in names for part in ("--policy", name)]
    command = ["simulate", *files, *asked, "--by-category", "--resamples", "50"]
    rows = [r for r in run(*command, "--json", "-").rows if r["category"] is not None]
    printed = run(*command).out
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "\\x1b]0;mine\\x07" in printed
    assert "two\\nlines" in printed
    assert max(map(len, printed.splitlines())) <= 100
    below = printed.partition("speedup by category")[2].partition("\n* ")[0]
    for row in rows:
        if row["policy"] != "autoregressive":
            assert three_digits(row["speedup"]) in below, row["policy"]
    assert below.count("gammatune+csd") == below.count("svip+csd-ocm") == 2
    # Its own method is what has the rule; the other two say what they are.
    assert "* cm-asd: the draft lengths alone, verified exactly" in printed
    assert "whole method is cm-asd+cm-asd" in " ".join(printed.split())
    assert "* csd: fixed:gamma=6, verified by csd" in printed
    assert "* gammatune+: gammatune-plus, verified exactly" in printed


def test_tables_are_sorted_fit_a_hundred_columns_and_cut_no_number(
    run: Run, files: list[str]
) -> None:
    ran = run("simulate", *files, "--policy", "all", "--resamples", "50").ok()
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.rstrip().endswith("wrong") for line in lines)
    assert "BLEU" not in ran.out  # no text was decoded under a rule
    named = run("simulate", "--policy", "csd", "--resamples", 10)
    assert "wrong: " in named.out
    assert "BLEU" not in named.out  # a shared table has no column of it
    assert "fastest" in lines[0]
    asked = [*files, "--policy", "all", "--resamples", "50", "--json", "-"]
    rows = run("simulate", *asked).rows
    printed = [float(x) for x in re.findall(r" (\d\.\d\d)  \d\.\d\d-\d", ran.out)]
    lossless = [r["speedup"] for r in rows if r["verify"] == "exact"]
    lossy = [r["speedup"] for r in rows if r["verify"] != "exact"]
    np.testing.assert_allclose(
        printed, [*sorted(lossless, reverse=True), *sorted(lossy, reverse=True)], atol=6e-3
    )
    assert lossy
    both = [r["note"] or "" for r in rows if r["verify"] in ("csd", "csd-ocm", "csd-scg")]
    assert len(both) == 3


def test_what_was_guessed_or_missing_is_said(run: Run, tmp_path: Path) -> None:
    trace = scored_trace()
    write_trace(trace, tmp_path / "t.parquet")
    cells = LATENCY.cells.assign(context=0)
    far = cells.assign(context=4, median_s=cells["median_s"] * 1.01)
    table = LatencyTable(pd.concat([cells, far]))
    write_latency(table, tmp_path / "l.parquet")
    asked = ["simulate", "--trace", tmp_path / "t.parquet", "--latency", tmp_path / "l.parquet",
             "--policy", "fixed:gamma=1", "--json", "-"]  # fmt: skip
    ran = run(*asked, "--prefill")
    assert "outside the measured sizes" in ran.err
    said = ran.said
    assert "counted as 0 s: draft prefill (speedups are too high); host_round (speedups" in said
    assert "; target prefill (tokens/s are too high, and speedups too far from 1" in said
    assert all(row["outside"] > 0.5 for row in ran.rows)
    assert "prefill" not in run(*asked).err
    assert ran.document["headline"]


def test_lossy_rows_alone_have_gains_and_categories(run: Run, files: list[str]) -> None:
    asked = ("--verify", "csd-scg", "--against", "autoregressive", "--by-category")
    out = run("simulate", *files, *asked, "--resamples", 20).ok().out
    assert "lossy (the output changes); gain: speed over autoregressive's" in out
    assert "gain, %" in out
    assert "speedup by category, csd-scg" in out


def test_a_row_is_named_by_its_rule_where_policies_have_several() -> None:
    trace, rule = scored_trace(), parse_rule("spec-verification:beta=50,tau=100")
    exact = replay(trace, Fixed(4), name="fixed:gamma=4")
    lossy = [
        replace(replay(trace, Fixed(4), rule, name="fixed:gamma=4"), verify=verify)
        for verify in ("csd", "csd-scg")
    ]

    def against(name: str, logs: list[RoundLog]) -> list[int]:
        rows = to_rows(summarize(logs, LATENCY, resamples=10))
        found = compared(rows, price_all(logs, LATENCY), LATENCY, name, 10)
        assert {row["against"] for row in found} <= {None, name}
        return [i for i, row in enumerate(found) if row["gain"] is None]

    assert against("fixed:gamma=4", [*lossy, exact]) == [3]  # the lossless row
    assert against("fixed:gamma=4+csd-scg", [*lossy, exact]) == [2]
    with pytest.raises(DraftsimError, match=r"2 rows: .*, such as fixed:gamma=4\+csd$"):
        against("fixed:gamma=4", lossy)


def test_texts_of_other_lengths_than_plain_decodings_are_said(run: Run) -> None:
    """Lossy rules write other texts, and plain decoding is priced over one of them."""
    said = run("simulate", "rounds", "bundled", "--resamples", 10).ok().said
    assert re.search(r"plain decoding is priced over the texts of \S+, verified by \S+; \d+ other "
                     r"runs? wrote texts of other lengths", said)  # fmt: skip


def test_recorded_rounds_are_compared_with_those_of_their_requests(run: Run) -> None:
    """The pair's rounds were recorded on two sets of prompts."""
    asked = ("simulate", "rounds", "bundled", "--resamples", 10, "--against")
    rows = run(*asked, "fixed:gamma=6+csd-scg", "--json", "-").rows
    of_group = {row["policy"].startswith("fixed:gamma=6") for row in rows if row["gain"]}
    assert of_group == {True, False}  # plain decoding of those prompts as well
    assert all(row["gain"] is None for row in rows if row["policy"] == "cm-asd")
    assert "write one as POLICY+RULE, such as cm-asd+" in run(*asked, "cm-asd").refusal
    assert "name some as POLICY or POLICY+RULE" in run(*asked, "gammatune").refusal


def test_rounds_of_other_prompts_share_no_table_and_latex_keeps_the_notes(
    tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "t.tex"
    ran = run("simulate", "rounds", "bundled", "--resamples", 10, "--out", out).ok()
    assert "2 sets of prompts: each has its own table" in ran.err
    rows = run("simulate", "rounds", "bundled", "--resamples", 10, "--json", "-").rows
    first, second = out.read_text().split(r"\end{table}")[:2]
    for i, table in enumerate((first, second), 1):
        [said] = {row["prompts"] for row in rows if f"(set {i} of 2)" in row["prompts"]}
        assert f"bundled, {said}: lossy" in table
        assert ran.out.count(f"{said}: lossy") == 1
        assert table.count("\nautoregressive ") == 1
    # The fastest row accepts whatever is drafted, and is not the best.
    assert r"\textbf{fixed:gamma=6} & \textbf{lossy-global}" in second
    below = second.partition(r"\end{tabular}")[2].splitlines()
    assert below[1] == r"\par\smallskip\footnotesize"
    printed = " ".join(ran.out.split())
    for line in below[2:]:
        if line:
            assert line.removesuffix(r"\par").replace(r"\%", "%") in printed
    assert r"accepts 100\% of mismatches: hardly verifies\par" in second
    assert "hardly" not in first


def test_lossy_rules_alone_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    log = replay(scored_trace(), Fixed(4), parse_rule("spec-verification"))
    rows, priced = to_rows(summarize([log], LATENCY)), price_all([log], LATENCY)
    print_ranked(compared(rows, priced, LATENCY, None, 50))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    none = "no lossless policy is shown, so none is recommended."
    assert lines[:3] == [none, "", "lossy (the output changes)"]
    assert not [line for line in lines if line.startswith("lossless")]


def test_a_rule_that_accepts_nothing_is_named_where_nothing_says_so() -> None:
    strict = replay(scored_trace(), Fixed(4), parse_rule("spec-verification:beta=1,tau=0"))
    assert degenerate([strict]) == ["accepts no mismatch: never fires"]
