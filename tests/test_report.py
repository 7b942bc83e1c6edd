"""The page's content: the numbers of the Python API, in one file that needs nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from simulator.pricing import always_drafted, price
from simulator.report.data import (
    logs_by_length,
)
from simulator.summary import summarize
from simulator.whatif.ranking import FITTED
from tests.conftest import Run
from tests.gains import paired_gain
from tests.report_pages import (
    POLICIES,
    build_report,
    data,
    data_of,
    fixed_two,
    latency,
    lead,
    logs,
    measured,
    page,
    reader,
    recording,
    tilted_once,
)
from traces.acceptance.synthetic import synthetic_trace
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import drafting_always
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.engine_runs import write_measured
from traces.store.files import write_latency, write_trace


@pytest.fixture(autouse=True)
def _tilted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """These pages have one recording: it is tilted for the first of them alone."""
    monkeypatch.setattr("simulator.report.data.tilted", tilted_once)


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    found = reader()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert all(link == "data:," or link[1:] in found.ids for link in found.links), found.links
    script = page().partition('id="data">')[2].partition("</script>")[2]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page())
    assert "@import" not in page()
    assert "fetch(" not in script


def test_names_cannot_break_out_of_the_page() -> None:
    assert "<code>" not in page()
    assert "</script><b>" not in page()
    assert "&lt;code&gt; &amp; more" in page()
    assert "pair &lt;1&gt;" in page()
    assert data()["categories"]["names"] == ["<code> & more", "synthetic"]


def test_the_ranking_is_that_of_the_summary() -> None:
    expected = summarize(logs(), latency(), resamples=200).set_index("policy")
    shown = data()["policies"]
    assert [p["policy"] for p in shown] == list(
        expected.drop("autoregressive")["speedup"].sort_values(ascending=False).index
    )
    cells = reader().cells
    for row in shown:
        for name in ("speedup", "speedup_lo", "speedup_hi", "block_efficiency"):
            assert row[name] == pytest.approx(expected.loc[row["policy"], name], rel=1e-12)
        assert three_digits(expected.loc[row["policy"], "speedup"]) in cells
    assert "Fastest policy: <strong>oracle" not in page()


def test_a_methods_draft_lengths_alone_are_named_as_such() -> None:
    trace = recording()
    given = [replay(trace, parse_policy("fixed:gamma=2")), replay(trace, Fixed(3), name="bild")]
    found = data_of(build_report(trace, latency(), given, resamples=20, serve=False))
    notes = {p["policy"]: p["note"] for p in found["policies"]}
    assert "the draft lengths alone, verified exactly" in notes["bild"]


def test_predictions_stand_beside_what_was_measured() -> None:
    checked = data()["validation"]
    assert [r["policy"] for r in checked["rows"]] == ["autoregressive", *POLICIES[:3]]
    for row in checked["rows"]:
        # Three repeats of 20 requests, each with an error of 1%.
        assert row["error"] == pytest.approx(1 / 1.1 - 1, abs=4 * 0.01)
        assert row["rounds_differ"] == 0
    without = build_report(recording(), latency(), logs()[:1], serve=False, resamples=20)
    assert 'id="validation"' not in without
    assert "Latency against throughput" not in without


def test_the_best_fixed_length_is_ranked_though_not_asked_for() -> None:
    given = [logs()[1], fixed_two(recording())]
    text = build_report(recording(), latency(), given, resamples=200, serve=False)
    found = data_of(text)
    best = max(logs_by_length(recording()).items(), key=lambda item: -seconds(item[1]))
    assert best[0] == 4
    assert {p["policy"]: p["note"] for p in found["policies"]} == {
        "svip": None, "fixed:gamma=2": None, "fixed:gamma=4": "best fixed",
    }  # fmt: skip
    top = found["policies"][found["headline"]["policy"]]
    assert top["speedup"] == max(p["speedup"] for p in found["policies"])
    # And no fixed length in the page's own table by batch is faster than the headline.
    assert max(found["batches"]["speedup"][0]) <= top["speedup"] + 1e-12
    assert f"<strong>{top['policy']}</strong>" in lead(text)


def test_a_longer_best_fixed_length_has_curves_too() -> None:
    long = replay(recording(), Fixed(20), name="fixed:gamma=20")
    table = LatencyTable.constant(1.0, 1e-5)
    found = data_of(build_report(recording(), table, [long], resamples=20, serve=False))
    assert found["about"]["best_fixed"] == 20
    assert found["fixed"]["gammas"] == [*range(1, 13), 20]


def seconds(log: RoundLog) -> float:
    return price(log, latency()).total_s


def test_the_headline_says_whether_the_first_is_told_from_the_best_fixed_length() -> None:
    head = data()["headline"]
    rows = data()["policies"]
    other = head["fixed"] if head["next"] is None else head["next"]
    own = dict(zip(POLICIES, logs(), strict=True))
    expected = paired_gain(
        own[rows[head["policy"]]["policy"]], own[rows[other]["policy"]], latency(), resamples=200
    )
    assert (head["gain"], head["gain_lo"], head["gain_hi"]) == pytest.approx(expected)
    assert head["gain"] > 1
    assert head["told_apart"] == (expected[1] > 1)
    assert ("is beyond chance" in lead(page())) == head["told_apart"]
    assert "oracle" not in lead(page())
    # A rule that comes out as the best fixed length is as fast, not 0.0% slower ...
    twin = replace(logs()[0], policy="twin")
    text = build_report(recording(), latency(), [twin], resamples=20, serve=False)
    assert "The best fixed length, γ = 4, is just as fast." in lead(text)
    # ... and is no policy that adapts its length.
    same = [fixed_two(recording()), *logs()[:1], twin]
    text = build_report(recording(), latency(), same, resamples=20, serve=False)
    assert "twin" not in lead(text)
    assert "identical to fixed:gamma=4" in {row["note"] for row in data_of(text)["policies"]}


def test_a_fitted_rule_is_not_held_against_the_unfitted_one_that_ran() -> None:
    notes = {"svip": FITTED}
    found = data_of(build_report(recording(), latency(), logs(), notes=notes, measured=measured(),
                                 resamples=20, serve=False))  # fmt: skip
    assert "svip" not in [r["policy"] for r in found["validation"]["rows"]]
    assert "svip" in found["validation"]["left_out"]


def test_a_trace_without_signals_or_categories_has_a_page() -> None:
    trace = synthetic_trace(0.6, requests=5, tokens=30)
    log = replay(trace, parse_policy("fixed"), name="fixed")
    plain = build_report(trace, LatencyTable.constant(1.0, 0.1), [log], resamples=20)
    assert "By prompt category" not in plain
    with pytest.raises(DraftsimError, match="no round log was given"):
        build_report(trace, latency(), [])


def test_the_command_writes_the_page(run: Run, tmp_path: Path) -> None:
    write_trace(recording(), tmp_path / "trace.parquet")
    write_latency(latency((1,)), tmp_path / "latency.parquet")
    write_measured(measured(), tmp_path / "measured.parquet")
    out = tmp_path / "report.html"
    chosen = [part for p in POLICIES[:2] for part in ("--policy", p)]
    ran = run("report", "--run", tmp_path, "--out", out, "--resamples", "50", *chosen).ok()
    text = out.read_text()
    answer, wrote = ran.err.splitlines()[0], ran.err.splitlines()[-1]
    best = data_of(text)["policies"][data_of(text)["headline"]["policy"]]
    assert answer.startswith(f"{tmp_path.name} (")
    assert f"{best['policy']} is fastest, {three_digits(best['speedup'])}x no spec" in answer
    assert wrote.startswith(f"wrote {out}, ")
    assert tmp_path.name in text
    assert "Predicted against measured" in text
    assert "Measured, but not replayed for this page" in text
    (tmp_path / "measured.parquet").unlink()
    (tmp_path / "measured.parquet").mkdir()
    odd = run("report", "--run", tmp_path, "--out", out)
    assert "measured.parquet: is no regular file" in odd.refusal
    missing = run("report", "--run", tmp_path / "nowhere", "--out", out)
    assert missing.code == 2
    assert missing.err.count("\n") == 1


def test_other_latencies_price_the_page_and_no_measured_time_stands_beside_them(
    run: Run, tmp_path: Path
) -> None:
    write_trace(recording(), tmp_path / "trace.parquet")
    write_latency(latency((1,)), tmp_path / "latency.parquet")
    write_measured(measured(), tmp_path / "measured.parquet")
    out = tmp_path / "report.html"
    run(
        "report", "--run", tmp_path, "--out", out, "--resamples", 50, "--no-serve",
        "--latency", "const:target=0.02,draft=0.001", "--policy", "fixed:gamma=2",
    ).ok()  # fmt: skip
    text = out.read_text()
    log = replay(recording(), parse_policy("fixed:gamma=2"), name="fixed:gamma=2")
    other = LatencyTable.constant(0.02, 0.001)
    [shown] = [p for p in data_of(text)["policies"] if p["policy"] == "fixed:gamma=2"]
    expected = summarize([log], other)["speedup"].iloc[1]
    assert shown["speedup"] == pytest.approx(expected)
    assert expected != pytest.approx(summarize([log], latency((1,)))["speedup"].iloc[1])
    # Times measured on another device are no check of what is predicted for this one.
    assert "Predicted against measured" not in text


def test_the_page_says_whose_costs_these_are_and_what_they_leave_out(
    run: Run, tmp_path: Path
) -> None:
    write_trace(recording(), tmp_path / "trace.parquet")
    cells = latency((1,)).cells
    write_latency(
        LatencyTable(cells[cells["phase"] != "signal"], latency().meta),
        tmp_path / "latency.parquet",
    )
    out = tmp_path / "report.html"
    common = ("report", "--run", tmp_path, "--out", out, "--resamples", 5, "--no-serve",
              "--policy", "svip")  # fmt: skip
    free = "not in the latency table, counted as 0 s: signal (speedups are too high)"
    assert free in run(*common, "--always-draft", 2).ok().err
    text = out.read_text()
    shown = [line for line in text.splitlines() if line.startswith('  <p class="small">')]
    assert f"{tmp_path.name} (" in shown[0]
    assert [free in line for line in shown] == [False, False, True]
    assert "--always-draft 2" in shown[1]
    assert "priced with measured latencies. Bars" in text
    costs = "const:target=0.02,draft=0.001,host_round=0.001"
    run(*common, "--latency", costs).ok()
    assert f"at the costs of {costs}" in out.read_text().partition("</header>")[0]
    assert "priced with constant latencies" in out.read_text()


def test_the_page_says_that_lossy_rules_are_left_out(run: Run, tmp_path: Path) -> None:
    write_trace(recording(), tmp_path / "trace.parquet")
    write_latency(latency((1,)), tmp_path / "latency.parquet")
    out = tmp_path / "report.html"
    common = ("report", "--run", tmp_path, "--out", out, "--resamples", 5, "--no-serve")
    said = "not listed: methods that verify by cm-asd, spec-verification, csd-ocm, csd-scg, csd, "
    for named in ((), ("--policy", "fixed:gamma=2")):
        ran = run(*common, *named).ok()
        for text in (out.read_text().partition("</header>")[0], ran.said):
            assert (said in text) == (not named)
            assert ("because these rules change the output" in text) == (not named)


def test_no_fixed_length_is_said_to_adapt() -> None:
    given = [fixed_two(recording()), replay(recording(), Fixed(16), name="fixed:gamma=16")]
    always = drafting_always(latency((1,)), 2), [always_drafted(log, 2) for log in given[:1]]
    for table, some in ((latency((1,)), given), always):
        found = data_of(build_report(recording(), table, some, resamples=20, serve=False))
        assert found["headline"]["policy"] == found["headline"]["fixed"]
        assert found["headline"]["next"] is None


def test_one_prompt_has_no_interval() -> None:
    trace = recording().select([0])
    text = build_report(trace, latency(), [fixed_two(trace)], resamples=20, serve=False)
    for part in ("batches", "contexts"):
        assert {v for row in data_of(text)[part]["low"] for v in row} == {None}
    assert 'title="–"' in text
    assert " ?</td>" not in text


def test_it_says_what_it_computes() -> None:
    said: list[str] = []
    build_report(recording(), latency((1,)), logs(), resamples=10, progress=said.append)
    assert said == [
        "pricing policies", "other acceptance rates", "batches, contexts and serving",
        "categories and checks",
    ]  # fmt: skip
