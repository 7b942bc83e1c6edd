"""A server's runs extended to other loads: coverage, public studies, what is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from simulator.aggregate.advice import (
    PredictedSpeed,
    choices,
    draft_lengths,
    in_words,
    next_runs,
    predicted,
)
from simulator.aggregate.benches import latency_table, read_benches, read_runs
from simulator.aggregate.hazard import HAZARD, emitted_at, further, interval_of, lengths
from simulator.aggregate.server import (
    COSTS,
    MISFIT,
    WIDTH,
    ServerFit,
    ServerRun,
    Target,
    calibrate,
    passes_of,
    step_s,
)
from tests.conftest import Run
from tests.logs import write_rows
from traces.errors import DraftsimError
from traces.store.files import read_latency

RESULTS = str(Path(__file__).parents[1] / "docs" / "examples" / "server" / "results")
DESIGN = tuple(product((1, 8, 32), (0, 1, 4)))
"""Concurrency and draft length of the runs that are given."""
ASKED = ((2, 2), (16, 1), (16, 6), (64, 0), (64, 4), (128, 2))


def made_up(seed: int) -> tuple[list[ServerRun], list[ServerRun]]:
    """A server drawn from the priors: its runs at DESIGN, and at ASKED."""
    random = np.random.default_rng(seed)
    values = {
        name: np.array([[cost.median * np.exp(cost.spread * random.standard_normal())]])
        for name, cost in COSTS.items()
    }
    hazards = np.array([[p.mean + p.spread * random.standard_normal() for p in HAZARD.values()]])
    wrong = MISFIT.median * np.exp(MISFIT.spread * random.standard_normal())

    def run(batch: int, k: int) -> ServerRun:
        emitted = float(lengths(hazards, k)[0]) if k else 1.0
        seconds = float(step_s(values, emitted, batch, k)[0, 0])
        speed = batch * emitted / seconds * np.exp(wrong * random.standard_normal())
        return ServerRun(batch, k, float(speed), emitted=emitted if k else None)

    return [run(*load) for load in DESIGN], [run(*load) for load in ASKED]


def test_intervals_of_further_runs_hold_as_often_as_they_claim() -> None:
    """80% of them, over servers drawn from the priors: within four standard errors.

    Real servers differ less than the priors (`WIDTH`), so the draws are taken as they are.
    """
    held = []
    for seed in range(8):
        given, asked = made_up(seed)
        server = replace(calibrate(given), width=1.0)
        held.append([
            interval_of(server.tokens_per_s(run.batch, run.k), 0.8).holds(run.tokens_per_s)
            for run in asked
        ])  # fmt: skip
    share = np.mean(held, axis=1)
    assert abs(share.mean() - 0.8) < 4 * share.std(ddof=1) / np.sqrt(len(share))


@pytest.mark.usefixtures("short_chains")
def test_intervals_are_narrower_by_what_real_servers_need() -> None:
    """About the same median; those of a server that departs from the model keep their width."""
    given, _ = made_up(3)
    for runs, width in ((given, WIDTH), (departing(given), 1.0)):
        server = calibrate(runs)
        speeds = server.tokens_per_s(16, 6)
        drawn = replace(server, width=1.0).tokens_per_s(16, 6)
        assert np.median(speeds) == pytest.approx(np.median(drawn), rel=1e-3)
        expected = width * max(1.0, server.misfit / MISFIT.median) if width < 1 else 1.0
        assert np.log(speeds).std() == pytest.approx(expected * np.log(drawn).std(), rel=1e-6)


def departing(runs: list[ServerRun]) -> list[ServerRun]:
    """Return the runs with every second one a third faster."""
    return [
        replace(run, tokens_per_s=run.tokens_per_s * (4 / 3) ** (i % 2))
        for i, run in enumerate(runs)
    ]


def test_a_server_without_noise_is_predicted() -> None:
    """Nine runs of a server of the model's kind: further ones within a few percent."""
    values = {name: np.array([[cost.median]]) for name, cost in COSTS.items()}

    def speed(batch: int, k: int) -> float:
        emitted = float(lengths(np.array([[1.2, -0.25, -0.1]]), k)[0]) if k else 1.0
        return batch * emitted / (float(step_s(values, emitted, batch, k)[0, 0]) / 100)

    runs = [
        ServerRun(b, k, speed(b, k), emitted=float(lengths(np.array([[1.2, -0.25, -0.1]]), k)[0])
                  if k else None)
        for b, k in DESIGN
    ]  # fmt: skip
    server = calibrate(runs, noise=1e-3)
    for batch, k in ((2, 2), (16, 1), (24, 4)):
        found = interval_of(server.tokens_per_s(batch, k), 0.8)
        assert found.value == pytest.approx(speed(batch, k), rel=0.04)


@pytest.mark.usefixtures("shared_tables")
def test_public_servers_are_predicted_from_other_loads_of_theirs() -> None:
    """Held-out runs of an A100: the median error, and how many lie in their intervals."""
    from benchmarks.server_left_out import left_out, studies

    parts = dict(studies())["A100, EAGLE-3, from concurrency 1, 8"]
    results = [left_out(part, []) for part in parts]
    errors = [abs(one.error) for found, *_ in results for one in found]
    held = [one.held for found, *_ in results for one in found]
    signs = [sign for _, found, _ in results for sign in found]
    assert np.median(errors) < 0.06
    # Runs of one server miss together, so fewer count than there are.
    assert np.mean(held) > 0.8 - 4 * np.sqrt(0.8 * 0.2 / len(parts))
    assert np.mean(signs) >= 0.9


def test_measured_acceptance_is_returned_and_bounds_the_rest() -> None:
    known = {2: 2.2, 4: 2.6}
    assert emitted_at(known, 4).value == 2.6
    between, beyond = emitted_at(known, 3), emitted_at(known, 8)
    assert 2.2 <= between.low <= between.high <= 2.6 <= beyond.low
    with pytest.raises(DraftsimError, match="expected 1 to 3"):
        emitted_at({2: 3.5}, 4)


def test_later_tokens_may_be_easier_than_the_first() -> None:
    """First 0.53, later 0.89: published as 2.79, 3.94 and 5.16 tokens at 4, 8 and 16."""
    known = {1: 1.53, 4: 2.79}
    assert emitted_at(known, 8).holds(3.94)
    assert emitted_at({**known, 8: 3.94}, 16).holds(5.16)


@pytest.mark.usefixtures("short_chains")
def test_costs_are_one_set_of_numbers_wherever_they_are_told(tmp_path: Path, run: Run) -> None:
    """Printed, written and used: the table's passes add up to the step of the printed costs."""
    given, _ = made_up(3)
    path, table = tmp_path / "runs.csv", tmp_path / "latency.parquet"
    rows = ["concurrency,num_speculative_tokens,output_throughput,mean_acceptance_length"]
    rows += [f"{r.batch},{r.k},{r.tokens_per_s!r},{r.emitted or ''}" for r in given]
    path.write_text("\n".join(rows))
    document = run("calibrate", path, "--out", table, "--json", "-").document
    server = calibrate(read_runs(path))
    printed = {row["cost"]: row["value"] for row in document["results"]}
    assert printed
    for name, value in printed.items():
        assert value == server.central[name] >= 0
    latency = read_latency(table)
    for batch, k in ((1, 1), (8, 4), (32, 4)):
        verify = float(latency.seconds("target", "forward", batch=batch, new_tokens=k + 1))
        first = float(latency.seconds("draft", "catch_up", batch=batch, new_tokens=1))
        others = (k - 1) * float(latency.seconds("draft", "forward", batch=batch))
        step = float(server.step_s(1.0, batch, k, prompts=0.0)[0])
        assert verify + first + others == pytest.approx(step)


def test_steps_of_the_table_are_those_that_are_predicted() -> None:
    """Costs are one draw's: the medians of single costs add up to other steps."""
    for seed in (2, 5, 6):
        server = calibrate(made_up(seed)[0])
        for batch, k in DESIGN:
            predicted = np.median(server.tokens_per_s(batch, k, noisy=False))
            emitted = np.median(server.emitted(k))
            told = batch * emitted / server.step_s(emitted, batch, k)[0]
            assert told == pytest.approx(predicted, rel=0.03), (seed, batch, k)
        for name, one in server.intervals(0.8).items():
            assert one.low <= one.value <= one.high, (seed, name)


def test_a_longer_context_is_never_faster() -> None:
    runs = [ServerRun(b, k, 100 * b**0.8 * (1 + 0.3 * k), 350, emitted=1 + 0.7 * k if k else None)
            for b, k in product((1, 16), (0, 2))]  # fmt: skip
    server = calibrate(runs)
    for k in (0, 2):
        short, long = (server.tokens_per_s(16, k, c, noisy=False) for c in (350, 1400))
        assert np.all(long <= short)
    assert "cached" in server.undetermined


def test_a_drafter_that_drafts_all_at_once_costs_the_same_at_any_length() -> None:
    runs = [ServerRun(b, k, 50.0 * b * (1 + 0.2 * k), emitted=1 + 0.4 * k if k else None)
            for b, k in product((1, 4), (0, 3))]  # fmt: skip
    server = calibrate(runs, passes=1)
    values = {name: np.array([[value]]) for name, value in server.central.items()}
    two, three = (step_s(values, 1.0, 1, k, passes=1)[0, 0] for k in (2, 3))
    verified = step_s(values, 1.0, 1, 3, passes=0)[0, 0] - step_s(values, 1.0, 1, 2, passes=0)[0, 0]
    assert three - two == pytest.approx(verified)


def test_acceptance_is_estimated_where_no_run_tells_it() -> None:
    given, _ = made_up(5)
    bare = [ServerRun(r.batch, r.k, r.tokens_per_s) for r in given]
    server = calibrate(bare)
    lengths_at_2 = interval_of(server.emitted(2), 0.99)
    assert 1 <= lengths_at_2.low < lengths_at_2.high <= 3
    narrow = interval_of(calibrate(given).emitted(2), 0.99)
    assert lengths_at_2.high / lengths_at_2.low > 2 * narrow.high / narrow.low - 1


def stopping_runs(draft: float, knee: float) -> list[dict[str, float]]:
    """Runs of llama.cpp at one request, exact: a draft pass costs `draft`, tokens as `knee` says.

    Accepted and drafted tokens of 1,000 rounds by n-max and p-min.
    """
    values = {name: np.array([[cost.median]]) for name, cost in COSTS.items()}
    values |= {"draft": np.array([[draft]]), "knee": np.array([[knee]])}
    rows = []
    for k, p_min, accepted, drafted in (
        (0, 0.0, 0, 0), (1, 0.0, 700, 1000), (4, 0.0, 1700, 4000), (8, 0.0, 2100, 8000),
        (4, 0.6, 1550, 2200), (8, 0.6, 1850, 2900),
    ):  # fmt: skip
        run = ServerRun(1, k, 1.0, emitted=1 + accepted / 1000 if k else None,
                        drafted=drafted / 1000, p_min=p_min)  # fmt: skip
        emitted = 1 + accepted / 1000
        rounds = {"verified": run.verified, "passes": run.draft_passes}
        seconds = float(step_s(values, emitted, 1, k, **rounds)[0, 0])
        row = {"batch": 1, "spec-draft-n-max": k, "spec-draft-p-min": p_min,
               "tokens_per_s": 100 * emitted / seconds}  # fmt: skip
        rows.append(row | ({"rounds": 1000, "draft_n": drafted, "draft_n_accepted": accepted}
                           if k else {}))  # fmt: skip
    return rows


@pytest.mark.parametrize(("draft", "knee"), [(0.5, 120.0), (0.02, 4.0), (0.02, 300.0)])
def test_a_threshold_is_chosen_as_drafts_and_verification_cost(
    draft: float, knee: float, tmp_path: Path, run: Run
) -> None:
    """Dear drafts or dear verification speak for p-min, cheap ones for long drafts."""
    rows = stopping_runs(draft, knee)
    path = tmp_path / "runs.jsonl"
    write_rows(path, rows)
    document = run("recommend", "--engine", "llamacpp", "--bench", path, "--json", "-").document
    [found] = document["results"]
    best = max(rows, key=lambda row: row["tokens_per_s"])
    chosen = next((row for row in rows if (row["spec-draft-n-max"], row["spec-draft-p-min"])
                   == (found["k"], found["p_min"])), None)  # fmt: skip
    if chosen is not None:
        assert chosen["tokens_per_s"] >= 0.98 * best["tokens_per_s"]
    assert found["tokens_per_s"] >= 0.95 * best["tokens_per_s"]
    if found["p_min"]:
        assert document["setting"]["spec-draft-p-min"] == found["p_min"]


def test_draft_passes_are_those_of_drafts_that_stop() -> None:
    assert passes_of(3.0, 3) == 3
    assert passes_of(0.0, 3) == pytest.approx(1.0)
    q = 0.6
    kept = sum(q**i for i in range(1, 9))
    assert passes_of(kept, 8) == pytest.approx(sum(q**i for i in range(8)))


@pytest.mark.usefixtures("short_chains")
def test_what_runs_do_not_tell_apart_is_said(tmp_path: Path, run: Run) -> None:
    """At one concurrency a draft pass and a verified token are one slope, without p-min."""
    path, costs = tmp_path / "runs.jsonl", tmp_path / "costs.parquet"
    rows = stopping_runs(0.1, 60.0)
    said = "cannot separate a draft pass from a verified token"
    for kept, apart in ((rows[:4], False), (rows, True)):
        write_rows(path, kept)
        ran = run("calibrate", path, "--out", costs).ok()
        assert (said in ran.err) is not apart
        assert "nothing" not in ran.err
        cells = read_latency(costs).cells
        drafts = cells[(cells["model"] == "draft") & (cells["phase"] == "forward")]
        assert (drafts["median_s"] > 0).all(), "drafting is free"
        tuned = run("tune", "--engine", "llamacpp", "--trace", "smollm2-cpu", "--latency", costs,
                    "--resamples", "20")  # fmt: skip
        assert ("cannot separate a draft pass from" in tuned.err + tuned.out) is not apart


def test_a_line_of_a_csv_file_is_named_by_its_number_there(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    head = "# my runs\n\nbatch,k,tokens_per_s,note\n# second\n1,0,100,a\x0bb\n"
    path.write_text(head + "2,0,150,\n")
    assert [run.batch for run in read_runs(path)] == [1, 2]
    # Zeros without speculation count nothing; written numbers are rounded.
    path.write_text(
        "batch,k,tokens_per_s,emitted,acceptance,rounds,drafted,accepted\n1,0,40,0,,0,0,0\n"
        "1,2,60,1.6,0.45 0.1,,,\n"
    )
    assert [run.round_tokens for run in read_runs(path)] == [1.0, pytest.approx(1.55)]
    path.write_text(head + "2,0\n")
    with pytest.raises(DraftsimError, match="line 6: has not as many values"):
        read_runs(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"p_min": 0.5, "k": 3}, "says not how many tokens its drafts had"),
        ({"p_min": 0.5, "k": 3, "drafted": 10, "accepted": 5}, "give rounds, drafted and accepted"),
        ({"k": 3, "drafted": 10, "accepted": 15, "rounds": 5}, "give rounds, drafted and accepted"),
        ({"k": 1, "drafted": 10, "accepted": 5, "rounds": 5}, "expected no fewer than were"),
        ({"p_min": 1.5, "k": 1, "drafted": 5, "accepted": 5, "rounds": 5}, "p_min 1.5"),
    ],
)
def test_impossible_counts_are_refused(row: dict[str, float], message: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"batch": 1, "tokens_per_s": 10.0, **row}) + "\n")
    with pytest.raises(DraftsimError, match=message):
        read_runs(path)


@pytest.fixture(scope="module")
def server() -> ServerFit:
    return calibrate(made_up(1)[0])


def test_the_choice_is_the_fastest_and_the_sentence_says_it(server: ServerFit) -> None:
    rows = choices(server, [1, 8, 32])
    for row in rows:
        loads = every_length(server, row.batch)
        assert row.k == max(loads, key=lambda load: load.tokens_per_s.value).k
    said = in_words(rows)
    assert f"up to {rows[-1].batch} requests" in said
    assert said.count("up to") == 1 + sum(a.k != b.k for a, b in pairwise(rows))
    assert f" at {rows[-1].batch} requests" in in_words(rows[-1:])


def every_length(server: ServerFit, batch: int) -> list[PredictedSpeed]:
    context, _ = server.usual
    return [predicted(server, batch, k, context) for k in draft_lengths(server.runs)]


def test_no_draft_length_is_chosen_that_is_predicted_to_be_slower() -> None:
    """Each load has a further run's noise of its own: the most tokens/s may be no speedup."""
    server = calibrate(read_benches([RESULTS]).runs)
    rows = choices(server, range(8, 25))
    assert any(row.k for row in rows)
    for row in rows:
        faster = [load for load in every_length(server, row.batch) if load.speedup.value > 1]
        assert (row.k > 0) == bool(faster)
        assert row.k == 0 or row.speedup.value > 1


def test_noisier_runs_widen_the_intervals() -> None:
    runs, widths = read_benches([RESULTS]).runs, []
    for noise in (None, 0.1, 0.3):
        found = interval_of(calibrate(runs, noise=noise).tokens_per_s(4, 1), 0.8)
        widths.append(found.high / found.low)
    # Without it the misfit tells how far runs lie apart: about as far as with 10% of noise.
    assert widths[2] > widths[1] > 0.95 * widths[0]


def test_the_next_run_narrows_what_is_asked(server: ServerFit) -> None:
    """Measured at its prediction, it leaves narrower speedups than before, over all loads."""
    best = next_runs(server)[0]
    assert 0 < best.narrows < 1
    told = float(np.median(server.tokens_per_s(best.batch, best.k, noisy=False)))
    emitted = float(np.median(server.emitted(best.k))) if best.k else None
    after = calibrate([*server.runs, ServerRun(best.batch, best.k, told, emitted=emitted)])

    def spread(of: ServerFit) -> float:
        logs = [np.log(of.tokens_per_s(b, k, noisy=False) / of.tokens_per_s(b, 0, noisy=False))
                for b, k in ((1, 2), (8, 2), (32, 2), (32, 4))]  # fmt: skip
        return float(np.mean([one.var() for one in logs]))

    assert spread(after) < spread(server)


def test_a_second_run_is_chosen_given_the_first(server: ServerFit) -> None:
    """Together they take away more than the first alone, and no more than everything."""
    first, second = next_runs(server)
    assert 0 < second.narrows < 1 - first.narrows
    assert (second.batch, second.k) != (first.batch, first.k)


def test_unmeasured_positions_are_less_certain_than_the_line_through_the_measured() -> None:
    values = np.tile([1.0, -0.2, -0.1], (4000, 1))
    alive = 1 / (1 + np.exp(-1.0))
    known = {1: 1 + alive}
    far = further(values, known, 6)
    assert float(further(values, known, 1)[0]) == pytest.approx(known[1])
    assert np.median(far) == pytest.approx(float(lengths(values[:1], 6)[0]), rel=0.02)
    assert far.std() > further(values, known, 2).std() > 0
    assert far.min() >= known[1]


@pytest.mark.usefixtures("short_chains")
def test_what_the_runs_do_not_tell_is_said(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("batch,k,tokens_per_s,emitted,context\n1,2,100,2.1,900\n1,4,110,2.6,900\n")
    ran = run("calibrate", path, "--context", "1000").ok()
    assert "no run without speculation" in ran.err
    assert "all runs have one context" in ran.err
    assert "measure next:" in ran.err
    assert ran.err.splitlines()[0].startswith("At 1,000 tokens of context: K = ")
    # Three tables, two of the same columns: each says which it is, and a chance is no speedup.
    best, loads, costs = (
        ran.out.index(title)
        for title in ("best draft length at each concurrency\n", "every load\n", "costs\n")
    )
    assert best < loads < costs
    assert ran.out.count("chance faster") == 2


@pytest.mark.usefixtures("short_chains")
@pytest.mark.parametrize(
    ("contexts", "message"),
    [((900, 900), "all runs have one of about 900 tokens"), ((0, 0), "the runs do not say theirs")],
)
def test_one_context_is_not_extrapolated(
    contexts: tuple[int, int], message: str, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "runs.csv"
    rows = [f"{8 * i + 1},0,{100 + 400 * i},{c}" for i, c in enumerate(contexts)]
    path.write_text("\n".join(["batch,k,tokens_per_s,context", *rows]) + "\n")
    ran = run("calibrate", path, "--context", "4000")
    assert message in ran.refusal


@pytest.mark.usefixtures("short_chains")
def test_a_far_context_is_refused_unless_the_runs_determine_its_cost(
    tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "runs.csv"
    head = "batch,k,tokens_per_s,emitted,context\n1,0,50,,100\n1,3,85,2.5,100\n"
    path.write_text(head + "1,0,49.9,,125\n1,3,84.8,2.5,125\n")
    ran = run("calibrate", path, "--context", "4000")
    assert "all runs have 100 to 125 tokens" in ran.refusal
    assert "so the cost of 4,000 is not determined: add runs at about 4,000" in ran.refusal
    path.write_text(head + "1,0,30,,20000\n1,3,55,2.5,20000\n8,0,60,,20000\n8,3,110,2.5,20000\n")
    document = run("calibrate", path, "--context", "20000,60000", "--json", "-").ok().document
    assert {row["context"] for row in document["predictions"] if row["extrapolated"]} >= {60000}
    near = [row for row in document["predictions"] if row["context"] == 20000 and row["k"] < 4]
    assert not any(row["extrapolated"] for row in near)


def test_draft_lengths_to_predict_are_bounded(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("batch,k,tokens_per_s\n1,0,50\n")
    assert "expected 0 to 4096" in run("calibrate", path, "--k", "0,4097").refusal


def test_costs_of_one_context_hold_at_every_other_and_say_so() -> None:
    one = calibrate([ServerRun(b, 0, 90.0 * b**0.9, 900) for b in (1, 8)])
    table = latency_table(one)
    assert set(table.cells.query("phase == 'forward'")["context"]) == {900}
    assert "calibrated at one context, 900 tokens" in table.meta["remark"]
    far = table.estimate("target", "forward", batch=8, new_tokens=1, context=[0, 900, 9000])
    assert len(set(far.seconds.tolist())) == 1
    assert not far.origin.any()  # all count as measured
    two = calibrate([ServerRun(b, 0, 90.0 * b**0.9, c) for b, c in ((1, 900), (8, 900), (8, 4000))])
    assert two.tells_context
    assert "remark" not in latency_table(two).meta


def test_impossible_runs_are_refused(tmp_path: Path) -> None:
    for text, message in (
        ("batch,k,tokens_per_s\n1,0,50\n0,1,60\n", "run 2: batch is 0"),
        ("batch,k\n1,0\n", "has no tokens_per_s or output_throughput"),
        ("batch,k,tokens_per_s,emitted\n1,2,60,3.5\n", "3.5 tokens a round at k = 2"),
        ("batch,k,tokens_per_s,acceptance\n1,2,60,0.7\n", "acceptance of 1 positions at k = 2"),
        ("batch,k,tokens_per_s\n1,0,fast\n", "expected numbers"),
        ("batch,k,tokens_per_s\n1,0,inf\n", "tokens_per_s is 'inf', expected numbers of at most"),
        ("batch,k,tokens_per_s,context\n1,0,50,1e308\n", "run 1: context is '1e308', expected"),
        ("batch,k,tokens_per_s\n1,0.5,50\n", "k is 0.5, expected a whole number"),
        ("batch,k,tokens_per_s\n1_0,0,50\n", "batch is '1_0', expected numbers"),
        ("batch,k,tokens_per_s,context\n1,0,50\n", "line 2: has not as many values as"),
        ("batch,k,tokens_per_s,contex\n1,0,50,9\n", "unknown 'contex' .did you mean 'context'"),
        ("batch,k,k,tokens_per_s\n1,0,0,50\n", "has a column twice"),
        (f"batch,k,tokens_per_s\n1,0,{'x' * 200_000}\n", "is not CSV .field larger than"),
        ("batch,k,tokens_per_s,acceptance\n1,2,60,0.7 0.9\n", "chances from 1 to 0 that do not"),
        ("batch,k,tokens_per_s,max_concurrency\n1,0,5,8\n", "mean the same"),
        (
            "batch,k,tokens_per_s,emitted,acceptance\n1,3,58,3.9,0.5 0.2 0.1\n",
            "tell 1.8 and 3.9 tokens a round",
        ),
        (
            "batch,k,tokens_per_s,emitted,rounds,drafted,accepted\n1,3,58,3.9,1000,3000,800\n",
            "tell 1.8 and 3.9 tokens a round",
        ),
        ("batch,k,tokens_per_s,emitted\n1,0,58,3.9\n", "tell 1 and 3.9 tokens a round"),
        ("", "holds no runs"),
    ):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        with pytest.raises(DraftsimError, match=message):
            read_runs(path)
    for line, message in (
        ("[" * 100_000, "runs.jsonl line 1: is not JSON .nested deeper"),
        ('{"batch": 1, "k": 0, "tokens_per_s": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        ("[1, 0, 50]", "run 1: is .1, 0, 50., expected an object"),
        ('{"batch": true, "k": 0, "tokens_per_s": 50}', "batch is True, expected numbers"),
    ):
        path = tmp_path / "runs.jsonl"
        path.write_text(line)
        with pytest.raises(DraftsimError, match=message):
            read_runs(path)
    with pytest.raises(DraftsimError, match="no runs"):
        calibrate([])


def test_the_table_of_a_fit_holds_every_load_of_its_runs(server: ServerFit) -> None:
    cells = latency_table(server).cells
    assert set(cells["batch"][cells["model"] == "target"]) >= {1, 8, 32}
    # The runs' steps hold the host's time, which is not left out then.
    assert {"forward", "prefill", "catch_up", "host_round"} <= set(cells["phase"])
    assert (cells["median_s"] >= 0).all()


def test_a_calibrated_table_serves_what_its_runs_measured(tmp_path: Path, run: Run) -> None:
    """Prompts of a step that decodes cost what the fit says, and many at once more than one.

    They were priced as overlapping with reading the weights, and prompts together as a few:
    64 requests were served 13% faster than the server had been.
    """
    measured = {1: 149.1, 4: 570.0, 64: 5128.4}
    path, costs = tmp_path / "runs.csv", tmp_path / "costs.parquet"
    rows = [f"{batch},0,{speed},500,200," for batch, speed in measured.items()]
    drafting = ["1,3,225.1,500,200,2.7", "16,3,2771,500,200,2.7", "64,1,5912.1,500,200,1.75"]
    path.write_text("\n".join(["batch,k,tokens_per_s,prompt,answer,emitted", *rows, *drafting]))
    run("calibrate", path, "--out", costs).ok()
    load = ("--batch", "1,4,64", "--prompt", "500", "--output", "200", "--requests", "640")
    plain = ("--acceptance", "0.75,0.55,0.4", "--policy", "autoregressive")
    served = run("serve", *plain, "--latency", costs, *load, "--json", "-").ok().document
    for row in served["results"]:
        assert row["throughput_tok_s"] == pytest.approx(measured[row["concurrency"]], rel=0.03)


def test_a_run_that_contradicts_the_others_is_named(
    tmp_path: Path, run: Run, server: ServerFit
) -> None:
    """No server is slower at 4 requests than at 1, and five times as fast at 8."""
    assert server.contradicting is None
    path = tmp_path / "runs.csv"
    head = "batch,k,tokens_per_s,emitted\n1,0,100,\n8,0,500,\n1,3,160,2.5\n"
    path.write_text(f"{head}4,0,90,\n")
    for command in (("calibrate", path), ("recommend", "--bench", path)):
        said = run(*command).ok().err
        assert "the run of 4 requests at K = 0 gave 90 tokens/s, the costs that fit all" in said
    path.write_text(f"{head}4,0,310,\n")
    assert "costs that fit all" not in run("calibrate", path).ok().err


def test_prompts_of_a_mixture_read_its_experts() -> None:
    """A prompt of few tokens takes at least the time of reading what they choose."""
    runs = [ServerRun(b, 0, s, prompt=500.0, answer=200.0) for b, s in ((1, 60.0), (8, 300.0))]
    server = calibrate(runs, target=Target(experts=(128, 4)))
    cells = latency_table(server).cells
    prompts = cells[cells["phase"] == "prefill"]
    tokens = prompts["new_tokens"].to_numpy()
    read = server.target.read_s(server.central, tokens)  # type: ignore[arg-type]
    assert (prompts["median_s"].to_numpy() >= server.central["fixed"] + read).all()


def test_tokens_of_a_step_reach_more_experts_until_all_are_read() -> None:
    """Passes of one token read the chosen experts alone, those of many tokens all of them."""
    target = Target(experts=(128, 4))
    values = {name: np.array([[cost.median]]) for name, cost in COSTS.items()}
    values |= {"experts": np.array([[2.0]])}
    read = target.read_s(values, np.array([[1.0, 2.0, 1e4]]))[0]
    weights = COSTS["weights"].median
    assert read[0] == pytest.approx(weights + 2 * 4 / 128)
    assert read[1] == pytest.approx(weights + 2 * (1 - (124 / 128) ** 2))
    assert read[2] == pytest.approx(weights + 2)
    with pytest.raises(DraftsimError, match="8 of 4 experts"):
        Target(experts=(4, 8))


def test_a_pass_of_llama_cpp_costs_what_llama_bench_measured() -> None:
    """The priors are those of 8B in 4 bits on an RTX 3090; other kernels begin at 9 tokens."""
    target = Target(vectors=True)
    values = {name: np.array([[target.prior(name).median]]) for name in COSTS}
    values |= {name: np.array([[cost.median]]) for name, cost in target.costs.items()}
    tokens = np.arange(1.0, 17.0)
    took = target.pass_s(values, tokens[None])[0] + values["fixed"][0, 0]
    measured = np.array([1.0, 1.12, 1.2, 1.33, 1.53, 1.73, 1.96, 2.14])
    assert took[:8] / took[0] == pytest.approx(measured, rel=0.1)
    assert took[8] < took[7]
    assert took[15] < 1.2 * took[8]


@pytest.mark.usefixtures("short_chains")
def test_a_target_s_own_costs_are_shown_and_written(tmp_path: Path) -> None:
    runs = [ServerRun(b, k, 100.0 * b**0.7 * (1 + 0.2 * k), emitted=1 + 0.5 * k if k else None)
            for b in (1, 4) for k in (0, 1)]  # fmt: skip
    server = calibrate(runs, target=Target(experts=(128, 4)))
    assert "experts" in server.intervals(0.8)
    assert len(latency_table(server).cells)
    at = server.at_acceptance({1: 1.5})
    assert at.draws[:, -1] == pytest.approx(server.draws[:, -1])
