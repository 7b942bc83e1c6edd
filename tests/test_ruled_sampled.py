"""Real decoding under rules that toss coins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from policies.rules.registry import parse_rule
from profiler.checks.spot_check import Arm, real_run, run_arms
from tests import bundled
from tests.rule_runs import decode
from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError
from traces.replay.run import replay
from traces.store.outputs import find_run, find_runs, read_run, write_run


@pytest.mark.invariant(6)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, 0.9)], ids=["all", "top-p"])
def test_a_stochastic_rules_seed_reproduces(sampling: Sampling) -> None:
    trace = bundled.record(3, sampling, max_new=16, seed=3)
    outputs = []
    for seed in (1, 1, 2):
        _, measured = decode(f"ensemble:mode=sample,weight=0.5,seed={seed}", trace)
        outputs += list(measured.outputs.values())
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_lossless_as_lenience_one_keeps_the_sampled_output() -> None:
    """At factor 1 the rule never rescues, so coins, residuals and outputs are unchanged."""
    trace = bundled.record(3, sampling=Sampling(1.0), max_new=16, seed=3)
    plain = Arm("fixed:gamma=5", Fixed(5))
    measured = run_arms(bundled.pair(), trace, [plain], repeats=1)
    arm, ruled = decode("lenience:mode=sample,factor=1", trace)
    np.testing.assert_array_equal(ruled.logs[arm.label].rounds, measured.logs[plain.label].rounds)
    assert ruled.outputs[arm.label] == measured.outputs[plain.label]


def test_a_cut_that_a_rule_cannot_know_is_refused() -> None:
    trace = bundled.record(2, Sampling(1.0, 0.9), max_new=8)
    refusal = r"lenience.*: .* not 1 with top-p 0\.9"
    with pytest.raises(DraftsimError, match=refusal):
        decode("lenience:mode=sample", trace)
    with pytest.raises(DraftsimError, match=refusal):
        replay(trace, Fixed(3), parse_rule("lenience:mode=sample"))


def test_a_sampled_run_is_not_taken_for_a_greedy_one(tmp_path: Path) -> None:
    greedy = bundled.record(2, max_new=8)
    sampled = bundled.record(2, Sampling(1.0), max_new=8)
    for trace in (greedy, sampled):
        arm, measured = decode("lossy-global", trace, "fixed:gamma=4")
        about = {"sampling": trace.sampling.meta}
        write_run(real_run(bundled.pair(), greedy, arm, measured, about), tmp_path)
    runs = [read_run(file) for file in find_runs(tmp_path)]
    assert len(runs) == 2
    assert arm.rule is not None
    for trace in (greedy, sampled):
        found = find_run(runs, arm.policy, arm.rule, trace)
        assert found is not None
        assert found.meta["sampling"] == trace.sampling.meta
    assert find_run(runs, arm.policy, arm.rule, bundled.record(2, Sampling(0.5), 8)) is None
