"""Named methods, and policies with rules of their own, in every command, and in the plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from policies.registry import POLICIES
from simulator.plots import recording
from tests.conftest import Run
from tests.test_cli_own_policy import OWN
from traces.sources.methods import METHODS, exact_policy, method_of, said_of, same_rule
from traces.sources.registry import SYSTEMS


def test_every_named_method_is_a_policy_of_simulate(run: Run) -> None:
    """Methods of one list share a table; a missing recording is named in one line."""
    asked = []
    for name in METHODS:
        if name in SYSTEMS and SYSTEMS[name].source.startswith(
            ("eagle", "hydra", "ngram", "suffix")
        ):
            ran = run("simulate", "--policy", name, "--resamples", 2)
            assert ran.code in (0, 2), name
            assert ran.err.count("\n") <= 2 or ran.code == 0, name
        else:
            asked += ["--policy", name]
    rows = run("simulate", *asked, "--resamples", 2, "--json", "-").rows
    found = {row["policy"].partition(":gamma_max")[0]: row for row in rows}
    for name in asked[1::2]:
        chosen = METHODS[name]
        if name == "transformer-base":  # plain decoding, which is the first row as it is
            continue
        exact = chosen.rule == "exact" or name in POLICIES
        assert (found[name]["verify"] == "exact") == exact, name
        if name not in POLICIES and name not in SYSTEMS:
            assert found[name]["note"].startswith(chosen.policy), name
    assert "best fixed" in rows[-1]["note"]
    table = run("simulate", *asked[:20], "--policy", "csd", "--resamples", 2).out
    assert "lossless first, then lossy (the output changes)" in table
    assert table.count("verify") >= 1


def test_a_method_by_name_is_its_parts(run: Run) -> None:
    def row(*options: object) -> dict[str, Any]:
        return run("simulate", *options, "--resamples", 2, "--json", "-").rows[1]  # type: ignore[no-any-return]

    for name, parts in (
        ("csd", ("--policy", "fixed:gamma=6", "--verify", "csd")),
        ("cm-asd+cm-asd", ("--policy", "cm-asd", "--verify", "cm-asd")),
        ("svip+lossy-global", ("--policy", "svip", "--verify", "lossy-global")),
        ("gammatune+", ("--policy", "gammatune-plus")),
        ("specdecode", ("--policy", "fixed:gamma=5")),
    ):  # fmt: skip
        own, other = row("--policy", name), row(*parts)
        assert own["policy"] == name
        for column in ("verify", "source", "rounds", "accepted", "wall_s"):
            assert own[column] == other[column], (name, column)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "--policy", "csd:tau=1"), "its parts, --policy fixed:gamma=6 --verify csd"),
        (("simulate", "--policy", "cm-asd+cmasd"), "unknown rule 'cmasd': did you mean 'cm-asd'?"),
        (("simulate", "--policy", "csd", "--verify", "csd"), "a verification of its own"),
        (("simulate", "--policy", "specdecode", "--verify", "csd"), "drop --verify"),
        (("simulate", "--policy", "csd", "--source", "pld"), "a draft source of its own"),
        (("sweep", "--policy", "csd"), "--verify csd, or use `draftsim simulate`"),
        (("sweep", "--policy", "pld"), "write --source pld --policy fixed:gamma=10"),
        (("serve", "--policy", "csd", "--policy", "svip"), "alike for all policies"),
        (("serve", "--policy", "pld"), "write --source pld --policy fixed:gamma=10"),
        (("serve", "--policy", "gammatune+csd", "--policy", "lossy-sd"), "alike for all policies"),
    ],
)  # fmt: skip
def test_where_a_method_cannot_run_one_line_says_what_to_write(
    arguments: tuple[str, ...], said: str, run: Run
) -> None:
    ran = run(*arguments)
    assert said in ran.refusal


def test_methods_run_in_other_commands_where_they_can(run: Run, synthetic_run: Path) -> None:
    asked = ("--policy", "specdecode", "--policy", "gammatune+")
    served = run(
        "serve", "--trace", synthetic_run, *asked, "--batch", 2, "--requests", 6, "--json", "-"
    ).rows  # fmt: skip
    assert [row["policy"] for row in served] == ["autoregressive", "specdecode", "gammatune+"]
    swept = run("sweep", "--trace", synthetic_run, *asked, "--resamples", 2, "--json", "-").rows
    assert {row["policy"] for row in swept} == {"specdecode", "gammatune+"}
    # One rule for all that are named can be had where a command takes one for all.
    ran = run(
        "serve", "--trace", "bundled", "--policy", "csd", "--policy", "gammatune+csd", "--batch", 1,
        "--requests", 4, "--json", "-",
    )  # fmt: skip
    assert "csd is fixed:gamma=6, gammatune+csd is gammatune, verified by csd" in ran.err
    assert [(r["policy"], r["verify"]) for r in ran.rows[1:]] == [
        ("fixed:gamma=6", "csd"), ("gammatune", "csd"),
    ]  # fmt: skip


def test_names_fall_into_their_parts() -> None:
    assert method_of("oracle:convention=run+1") is None
    assert method_of("svip:threshold=1e+3") is None
    assert method_of("cm-asd") is method_of("unknown") is None
    both = method_of("a+b/mine.py:Own:share=0.4+csd:tau=0.1")
    assert both is not None
    assert (both.policy, both.rule) == ("a+b/mine.py:Own:share=0.4", "csd:tau=0.1")
    for name in METHODS:
        assert name in POLICIES or method_of(name) is METHODS[name]
    assert said_of("cm-asd:gamma_max=8", True) == (
        "the draft lengths alone, verified exactly; the whole method is cm-asd+cm-asd"
    )
    assert said_of("cm-asd", False) is said_of("svip", True) is said_of("pld", True) is None
    assert exact_policy("svip:threshold=0.2") == "svip:threshold=0.2"
    assert same_rule(["csd", "svip"], None) == (["csd", "svip"], None)
    assert same_rule(None, None) == (None, None)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what each plot was given to draw, by its name."""
    given: dict[str, Any] = {}

    def taking(name: str) -> Any:
        def plot(first: Any, *_: Any, **__: Any) -> Figure:
            given[name] = first
            return Figure()

        return plot

    for name in ("plot_speedup", "plot_categories", "plot_cost_ratio", "plot_robustness"):
        monkeypatch.setattr(recording, name, taking(name))
    return given


def policies_of(table: pd.DataFrame) -> set[str]:
    return {str(name) for name in table["policy"]} - {"autoregressive"}


def test_plots_hold_what_was_named_and_say_what_they_leave_out(
    run: Run, drawn: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    own = "mine.py:Careful:threshold=0.4"
    asked = [f"{file}:Careful:threshold=0.4", "svip", "csd", "pld"]
    options = [part for name in asked for part in ("--policy", name)]
    ran = run("simulate", *options, "--resamples", 2, "--plots", tmp_path / "plots").ok()
    names = {own, "svip:gamma_max=24", "csd", "pld"}
    for name in ("plot_speedup", "plot_categories"):
        assert names <= policies_of(drawn[name]), name
    assert {log.policy for log in drawn["plot_cost_ratio"]} >= names - {"pld"}
    assert set(drawn["plot_robustness"]["policy"]) == {"fixed", own}
    assert "cost_ratio.png shows policies with the draft model, without pld" in ran.err
    assert "(initial draft length): csd, pld, svip:gamma_max=24" in ran.err


def test_plots_of_all_hold_the_fastest(run: Run, drawn: dict[str, Any], tmp_path: Path) -> None:
    ran = run("simulate", "--trace", "smollm2-cpu", "--plots", tmp_path, "--resamples", 2)
    rows = run("simulate", "--trace", "smollm2-cpu", "--resamples", 2, "--json", "-").rows
    real = [r for r in rows if r["verify"] == "exact" and not r["policy"].startswith("oracle")]
    fastest = max(real, key=lambda row: row["speedup"])["policy"]
    assert fastest == "ngram"
    assert fastest in policies_of(drawn["plot_categories"])
    assert fastest in policies_of(drawn["plot_speedup"])
    assert "categories.png and cost_ratio.png show the fastest policy and" in ran.err
    assert "name policies with --policy to draw them" in ran.err
    # Lengths as far as they were recorded.
    assert set(drawn["plot_robustness"]["gamma"]) == set(range(1, 9))
    assert "initial draft lengths 1 to 8: no longer drafts were recorded" in ran.err


def test_robustness_is_of_what_was_named_as_far_as_it_was_recorded(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    ran = run("simulate", "robustness", "--trace", "smollm2-cpu", "--json", "-")
    assert [row["policy"] for row in ran.rows] == [
        "fixed", "hf-heuristic", "confidence", "gammatune", "gammatune-plus",
    ]  # fmt: skip
    assert "initial draft lengths 1 to 8: no longer drafts were recorded" in ran.err
    ran = run(
        "simulate", "robustness", "--policy", f"{file}:Careful:threshold=0.4", "--policy", "svip",
        "--policy", "gammatune", "--json", "-",
    )  # fmt: skip
    assert [r["policy"] for r in ran.rows] == [
        "fixed",
        "mine.py:Careful:threshold=0.4",
        "gammatune",
    ]
    assert "no parameter gamma (initial draft length): svip" in ran.err
    assert "no longer drafts" not in ran.err
    shown = run("simulate", "robustness", "--policy", "fixed", "--policy", "gammatune").out
    assert "over initial draft lengths, fixed's mean speedup is 1" in " ".join(shown.split())
    drafted = ("simulate", "robustness", "--trace", "smollm2-cpu", "--source", "ngram")
    ran = run(*drafted, "--json", "-").ok()
    assert [row["policy"] for row in ran.rows][:2] == ["fixed", "hf-heuristic"]
    assert "left out, because their signals were not recorded: confidence" in ran.err
    refused = run("simulate", "robustness", "--policy", "csd")
    assert refused.code == 2
    assert (
        "--policy csd has a source or a rule of its own, and initial draft lengths are compared"
        in refused.err
    )
