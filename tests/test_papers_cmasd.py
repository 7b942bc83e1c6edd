"""CM-ASD's ablation on our pair: real runs are found, and fixed thresholds are fair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.lengths.cmasd import CMASD
from policies.registry import parse_policy
from policies.rules.registry import parse_rule
from profiler.suite.checks import POLICIES, planned_policies
from simulator.chosen import load_policies
from simulator.papers.cmasd import SERVED, batch_rows, cmasd_rows, comparison
from simulator.papers.compare import REAL_RUNS
from simulator.papers.ours import REAL, MethodOutcome, Ours, method_outcome
from tests.scored import LATENCY, scored_trace
from tests.serving import table_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.sources.methods import CMASD_ABLATION, FIXED_TAUS, METHODS, Method, mean_tau, resolved
from traces.store.outputs import find_run, find_runs, read_run
from traces.store.recordings import find_trace, folder_of


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(scored_trace(), LATENCY)


@pytest.fixture(scope="module")
def recorded() -> Ours:
    """The shipped pair with its runs that were decoded for real."""
    folder = folder_of("bundled")
    assert folder is not None
    runs = [read_run(file) for file in find_runs(folder)]
    return Ours(find_trace("bundled"), LATENCY, runs)


def test_every_real_run_of_the_papers_is_found_again(recorded: Ours) -> None:
    wanted = {(policy, rule) for policy, rule, split in REAL_RUNS if split is None}
    for policy, text in wanted:
        rule = resolved(Method("", policy, text, ""), recorded.trace).rule
        names = parse_policy(policy), parse_rule(rule)
        run = find_run(recorded.runs, *names, recorded.trace)
        assert run is not None, (policy, rule)
        # However the run was given its vocabulary.
        size = recorded.trace.vocab_size
        if policy.startswith("cm-asd"):
            joined = "," if ":" in policy else ":"
            told = parse_policy(f"{policy}{joined}vocab_size={size}")
            assert find_run(recorded.runs, told, names[1], recorded.trace) is run
            other = parse_policy(f"{policy}{joined}vocab_size={1 + (size or 0)}")
            assert find_run(recorded.runs, other, names[1], recorded.trace) is None


def test_tables_iii_and_v_show_what_was_decoded_for_real(recorded: Ours) -> None:
    found = method_outcome(recorded, METHODS["cm-asd"])
    assert found.how.startswith(REAL)
    assert found.quality is not None
    rows = cmasd_rows(recorded)
    [bleu] = [r for r in rows if (r.row, r.column) == ("CM-ASD", "relative BLEU")]
    assert bleu.ours == pytest.approx(found.quality.relative_bleu)
    assert bleu.published == 87.34
    # Whatever the threshold is fixed at: only texts of equal standing are compared.
    drafting = [r for r in rows if r.column == "Tok" and r.ours != 1.0]
    assert len(drafting) == 7 + 2 * len(FIXED_TAUS)
    assert all(r.note.startswith(REAL) for r in drafting)
    assert all("of tokens as greedy" in r.note for r in drafting if "tau =" in r.note)


def test_the_fixed_threshold_is_the_mean_of_what_the_adaptive_one_judges(ours: Ours) -> None:
    policy = parse_policy("cm-asd", max_gamma=ours.trace.max_gamma)
    tau = mean_tau(ours.trace, policy)
    rule = parse_rule("cm-asd")
    low = min(FIXED_TAUS)
    assert low < tau < max(FIXED_TAUS)
    # With a confidence that never changes, the fixed threshold is the adaptive one.
    constant = parse_rule("cm-asd:gamma=0")
    assert replay(ours.trace, policy, constant).rounds.tolist() == (
        replay(ours.trace, policy, parse_rule(f"spec-verification:tau={low}")).rounds.tolist()
    )
    assert replay(ours.trace, policy, rule).verify == "cm-asd"


def test_the_comparison_says_what_the_numbers_say(ours: Ours) -> None:
    adaptive = method_outcome(ours, CMASD_ABLATION["cm-asd"])
    below, above = (
        method_outcome(ours, CMASD_ABLATION["cm-asd"]._replace(rule=f"spec-verification:tau={t:g}"))
        for t in FIXED_TAUS
    )
    assert "accepts less" in comparison(adaptive, below)
    assert "accepts more" in comparison(adaptive, above)
    assert "accepts as much" in comparison(adaptive, adaptive)
    figures = [f"{o.accepted_per_round:.2f}" for o in (above, adaptive)]
    assert " against ".join(figures) in comparison(adaptive, above)
    labels = {r.row for r in cmasd_rows(ours) if "fixed τ" in r.row}
    assert len(labels) == 1 + len(FIXED_TAUS)


def test_the_vocabulary_is_the_pairs_own_everywhere(ours: Ours) -> None:
    """One name means one policy, in a replay and in the suite that measures it."""
    trace = ours.trace
    asked = replay(trace, CMASD(gamma_max=16, vocab_size=trace.vocab_size))
    assert replay(trace, CMASD(gamma_max=16)).rounds.tolist() == asked.rounds.tolist()
    assert replay(trace, CMASD(gamma_max=16, vocab_size=32000)).rounds.tolist() != (
        asked.rounds.tolist()
    )
    [run] = [a for a in planned_policies(trace, POLICIES) if a.name == "cm-asd"]
    assert run.policy.vocab_size == trace.vocab_size  # type: ignore[attr-defined]


def test_without_a_vocabulary_nobody_guesses_one(ours: Ours) -> None:
    meta = {k: v for k, v in ours.trace.meta.items() if k not in ("target", "vocab_size")}
    bare = Trace(ours.trace.columns, ours.trace.requests, ours.trace.max_gamma, meta)
    with pytest.raises(DraftsimError, match="give it vocab_size"):
        replay(bare, CMASD(gamma_max=16))
    # What nobody asked for by name is left out instead.
    assert "cm-asd" in dict(load_policies(None, ours.trace))
    assert "cm-asd" not in dict(load_policies(None, bare))
    with pytest.raises(ValueError, match="give it vocab_size"):
        CMASD().keep_drafting([])


def test_tok_counts_accepted_drafts_and_rollbacks_rounds(ours: Ours) -> None:
    found: MethodOutcome = method_outcome(replace(ours, runs=()), METHODS["cm-asd"])
    rounds = found.log.rounds
    assert found.accepted_per_round < found.tokens_per_round
    thrown = (rounds["accepted"] < rounds["drafted"]).sum() / (rounds["drafted"] > 0).sum()
    assert found.rollback_rate == pytest.approx(thrown)


STEPS_S = {1: 0.010, 2: 0.011, 4: 0.013}


def table() -> LatencyTable:
    """A pass costs the same at every width and context, more at a larger batch."""
    cells = [
        (model, "forward", batch, width, context, seconds * share, 0.0, 1)
        for model, share in (("target", 1.0), ("draft", 0.1))
        for batch, seconds in STEPS_S.items()
        for width in (1, 25)
        for context in (0, 400)
    ]
    return table_of(cells)


def test_plain_decoding_is_a_pass_a_token() -> None:
    rows = batch_rows(Ours(scored_trace(), table()))
    found = {(r.row, r.column): r.ours for r in rows}
    assert len(rows) == 2 * len(SERVED) * len(STEPS_S)
    assert found["plain decoding, batch 1", "ms a token"] == pytest.approx(10, rel=0.02)
    assert found["plain decoding, batch 1", "tokens/s"] == pytest.approx(100, rel=0.03)
    # Full batches step at their own cost, and the last, emptier ones faster.
    for batch, seconds in STEPS_S.items():
        token = found[f"plain decoding, batch {batch}", "ms a token"]
        assert 10 * 0.98 <= (token or 0) <= 1e3 * seconds * 1.02
        served = found[f"plain decoding, batch {batch}", "tokens/s"]
        assert (served or 0) <= batch / seconds * 1.02
    assert {r.mark for r in rows} == {""}
    assert all("approximate" in r.note for r in rows if r.row.startswith("CM-ASD"))


def test_one_batch_size_is_not_a_figure() -> None:
    with pytest.raises(DraftsimError, match="over several: measure them"):
        batch_rows(Ours(scored_trace(), LATENCY))
