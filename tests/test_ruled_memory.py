"""The memory of a rule over real decoding, and the prompts it is calibrated on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.lengths.basic import Fixed
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from profiler.checks.spot_check import Arm, run_arms
from tests import bundled
from tests.rule_runs import short_trace
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.corrections import calibrated, rejected_pairs, split_requests
from traces.replay.run import replay


def test_a_calibrated_memory_survives_save_and_load(tmp_path: Path) -> None:
    """Rounds, outputs and the memory they end with, byte for byte; and the memory matters."""
    trace = short_trace()
    memory = calibrated(trace, Fixed(5))
    assert len(memory) > 0
    assert memory.sizes == sorted(memory.sizes)
    assert sum(n for _, n in memory.items()) == len(rejected_pairs(trace, replay(trace, Fixed(5))))
    loaded = OnlineCorrectionMemory.load(memory.save(tmp_path / "memory.npz"))
    runs = {}
    for name, table in (("kept", memory), ("loaded", loaded), ("empty", None)):
        arm = Arm("fixed", Fixed(5), CSD(threshold=0, tau=1e-3, memory=table))
        measured = run_arms(bundled.pair(), trace, [arm], repeats=1)
        log = measured.logs[arm.label]
        assert isinstance(log.rule, CSD)
        runs[name] = (
            log.rounds.tobytes(), measured.outputs[arm.label], log.rule.table.items(),
            log.rule.table.sizes[-3:],
        )  # fmt: skip
    assert runs["kept"] == runs["loaded"]
    assert runs["kept"] != runs["empty"]
    assert len(memory) == len(loaded)  # the run worked on a copy


def test_rules_share_a_run_in_order_and_are_not_the_callers() -> None:
    trace = short_trace()
    rule = CSD(threshold=0)
    arm = Arm("fixed", Fixed(5), rule)
    measured = run_arms(bundled.pair(), trace, [arm], repeats=2)
    assert len(rule.table) == 0
    ended = measured.logs[arm.label].rule
    assert isinstance(ended, CSD)
    assert len(ended.table.sizes) == len(trace.requests)
    counts = measured.times.groupby("repeat")["rounds"].sum()
    assert counts.nunique() == 1  # every repeat starts from the same memory


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_splitting_is_even_and_loses_nothing(share: float) -> None:
    trace = synthetic_trace(0.5, requests=20, tokens=4, max_gamma=4)
    trace = Trace(
        trace.columns,
        [replace(r, category="ab"[i % 2]) for i, r in enumerate(trace.requests)],
        trace.max_gamma,
    )
    train, rest = split_requests(trace, share)
    assert sorted(train + rest) == list(range(20))
    assert len(train) == round(20 * share)
    assert abs(sum(i % 2 for i in train) - len(train) / 2) <= 1
    assert split_requests(trace, 1.0) == (list(range(20)), [])
    for wrong, said in ((0.0, "share is 0"), (0.01, "leaves none")):
        with pytest.raises(DraftsimError, match=said):
            split_requests(trace, wrong)
