"""Predicted against measured: the arithmetic of errors, ranking and sign."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from commands.validate.spot_check import say_verdict
from policies.lengths.basic import Fixed
from simulator.pricing import Priced, autoregressive, price
from simulator.validation import VALIDATE_COLUMNS, common_error, compare, predictions, verdict
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.store.engine_runs import MEASURED_COLUMNS


@pytest.fixture(scope="module")
def runs() -> list[Priced]:
    trace = synthetic_trace(0.7, tokens=40, requests=5)
    latency = LatencyTable.constant(0.01, 0.001)
    logs = [replay(trace, Fixed(g), name=f"fixed:gamma={g}") for g in (2, 6)]
    return [price(log, latency) for log in [autoregressive(logs[0]), *logs]]


def measure(runs: list[Priced], factors: dict[str, list[float]]) -> pd.DataFrame:
    """Measured times that are the predicted ones times a factor per policy and repeat."""
    rows = [
        (row.policy, row.verify, 1, False, k, row.request, row.predicted_s * f, row.rounds)
        for row in predictions(runs).itertuples()
        for k, f in enumerate(factors[row.policy])
    ]
    return pd.DataFrame(rows, columns=list(MEASURED_COLUMNS))


def same(runs: list[Priced], factors: list[float]) -> dict[str, list[float]]:
    return dict.fromkeys(names(runs), factors)


def names(runs: list[Priced]) -> list[str]:
    return [run.log.policy for run in runs]


def test_error_spread_and_rounds(runs: list[Priced]) -> None:
    factors = dict(
        zip(names(runs), ([1.0] * 5, [1.25] * 5, [0.7, 0.8, 0.8, 0.8, 0.9]), strict=True)
    )
    measured = measure(runs, factors)
    measured.loc[(measured["policy"] == "fixed:gamma=2") & (measured["request"] == "synthetic-3"),
                 "rounds"] += 1  # fmt: skip
    rows = compare(runs, measured)
    assert tuple(rows.columns) == VALIDATE_COLUMNS
    np.testing.assert_allclose(rows["predicted_s"], [run.total_s for run in runs])
    np.testing.assert_allclose(rows["error"], [0, -0.2, 0.25])
    np.testing.assert_allclose(rows["spread"], [0, 0, 0], atol=1e-12)
    assert list(rows["rounds_differ"]) == [0, 1, 0]
    # Times 1.25 against a control of 1: the speedup was overestimated by as much.
    np.testing.assert_allclose(rows["speedup_error"], [0, 0.25, -0.2])
    assert compare(runs, measure(runs, same(runs, [1.0])))["spread"].isna().all()
    wide = measure(runs, same(runs, [0.8, 0.9, 1.0, 1.1, 1.2]))
    np.testing.assert_allclose(compare(runs, wide)["spread"], 0.1)


def test_disturbed_repeats_are_left_out_and_said(runs: list[Priced]) -> None:
    plain, two, six = names(runs)
    measured = measure(runs, same(runs, [1.0, 1.5, 1.0])).assign(off_s=0.0, repeated=0)
    # Of the second repeat a third was spent waiting: it does not count, as there are others.
    measured.loc[measured["repeat"] == 1, "off_s"] = measured["wall_s"] / 3
    measured.loc[(measured["policy"] == plain) & (measured["repeat"] == 0), "repeated"] = 1
    rows = compare(runs, measured).set_index("policy")
    np.testing.assert_allclose(rows["error"], 0, atol=1e-12)
    assert set(rows["machine"]) == {"quiet"}
    requests = measured["request"].nunique()
    assert list(rows["left_out"]) == [2 * requests, requests, requests]
    # Where every repeat was disturbed, what it had of the processor counts, and it is said.
    busy = measured["policy"] == six
    measured.loc[busy, "wall_s"] *= 2
    measured.loc[busy, "off_s"] = measured["wall_s"] / 2
    rows = compare(runs, measured).set_index("policy")
    assert rows.loc[six, "machine"] == "disturbed"
    assert rows.loc[six, "disturbed"] == pytest.approx(0.5)
    assert rows.loc[six, "error"] == pytest.approx(3 / 3.5 - 1)
    assert rows.loc[two, "machine"] == "quiet"
    unknown = compare(runs, measured.drop(columns=["off_s", "repeated"]))
    assert unknown["machine"].isna().all()
    assert unknown["disturbed"].isna().all()


def test_a_machine_that_is_slow_at_times_is_told_by_the_mean(runs: list[Priced]) -> None:
    rows = compare(runs, measure(runs, same(runs, [1.0, 1.0, 1.6])))
    np.testing.assert_allclose(rows["error"], 1 / 1.2 - 1)


def test_verdict_sees_ranking_and_sign(runs: list[Priced]) -> None:
    plain, two, six = names(runs)
    good = verdict(
        compare(runs, measure(runs, {plain: [1.0, 1.0], two: [1.02, 1.02], six: [1.05, 1.05]}))
    )
    assert not good.misranked
    assert not good.wrong_sign
    assert good.sign_arms == 2
    assert good.median_error == pytest.approx(1 - 1 / 1.02)
    assert good.worst_error == pytest.approx(1 / 1.05 - 1)
    assert good.worst_policy == six
    # Both drafting arms measured slower than plain decoding, against the prediction.
    bad = verdict(
        compare(runs, measure(runs, {plain: [1.0, 1.0], two: [9.0, 9.0], six: [8.0, 8.0]}))
    )
    assert set(bad.wrong_sign) == {two, six}
    assert (plain, two) in bad.misranked


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([1.0], "one repeat cannot tell which policies differ"),
        ([0.1, 1.9, 1.0], "no two policies are clearly different"),
        ([1.0, 1.0], "0 of 3 clearly different pairs misranked"),
    ],
)
def test_one_repeat_is_said_to_tell_no_difference(
    runs: list[Priced], seconds: list[float], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_verdict(compare(runs, measure(runs, same(runs, seconds))))
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_error_of_no_speculation_alone_is_said_to_be_in_every_speedup() -> None:
    def said(plain: float, *policies: float) -> str:
        errors = [plain, *policies]
        named = ["autoregressive", *(f"fixed:gamma={g}" for g in range(1, len(errors)))]
        return common_error(pd.DataFrame({"policy": named, "error": errors}))

    assert said(0.098, 0.004, -0.006, 0.011).startswith(
        "the seconds of no speculation are +9.8% off, those of the policies +0.4%: every speedup"
    )
    assert said(0.098, 0.09, 0.1, 0.11) == ""  # the machine was slower throughout
    assert said(0.02, 0.0, 0.01, -0.01) == ""
    assert said(0.05, -0.1, 0.0, 0.1) == ""  # the policies differ by more
    assert said(0.098, 0.0) == ""


def test_differences_within_twice_the_spread_do_not_count(runs: list[Priced]) -> None:
    noisy = same(runs, [0.1, 1.0, 1.9])
    result = verdict(compare(runs, measure(runs, noisy)))
    assert result.ranked_pairs < 3


def test_arms_of_another_batch_are_ranked_apart(runs: list[Priced]) -> None:
    measured = measure(runs, same(runs, [1.0, 1.0]))
    other = measured.assign(batch=2, wall_s=measured["wall_s"] * 0.5)
    rows = compare(runs, pd.concat([measured, other]))
    assert len(rows) == 6
    np.testing.assert_allclose(rows["error"], [0, 0, 0, 1, 1, 1])
    assert verdict(rows).ranked_pairs == 2 * verdict(compare(runs, measured)).ranked_pairs


def test_predictions_may_depend_on_the_batch(runs: list[Priced]) -> None:
    measured = measure(runs, same(runs, [1.0]))
    other = measured.assign(batch=2, wall_s=measured["wall_s"] * 0.5)
    table = predictions(runs)
    both = pd.concat(
        [table.assign(batch=1), table.assign(batch=2, predicted_s=table["predicted_s"] * 0.5)]
    )
    np.testing.assert_allclose(compare(both, pd.concat([measured, other]))["error"], 0, atol=1e-12)


def test_bad_measurements_are_refused(runs: list[Priced]) -> None:
    measured = measure(runs, same(runs, [1.0, 1.0]))
    with pytest.raises(DraftsimError, match=r"lack the column\(s\) wall_s"):
        compare(runs, measured.drop(columns="wall_s"))
    with pytest.raises(DraftsimError, match="measured under fixed:gamma=6/exact but not predicted"):
        compare(runs[:2], measured)
    with pytest.raises(DraftsimError, match="lacks a request in one of its repeats"):
        compare(runs, measured.drop(index=1))
    with pytest.raises(DraftsimError, match="expected more than 0"):
        compare(runs, measured.assign(wall_s=0.0))
    with pytest.raises(DraftsimError, match="no measured times"):
        compare(runs, measured.iloc[:0])
    with pytest.raises(DraftsimError, match="no predicted run"):
        compare([], measured)
    with pytest.raises(DraftsimError, match="no compared runs"):
        verdict(compare(runs, measured).iloc[:0])
