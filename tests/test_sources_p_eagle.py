"""A one-pass drafter with mask tokens: recorded, replayed, really decoded, kept in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training.unroll import target_features, unroll
from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import Confidence
from profiler.features.checkpoint import read_drafter, write_drafter
from profiler.features.drafters import ParallelEagle3
from profiler.sources.run import SourceRunner
from tests.conftest import ONE_PROMPT, Run
from tests.replayed import run_as_replayed
from tests.test_sources_eagle import OFFSETS, Case, Moody
from traces.errors import DraftsimError
from traces.replay.calls import ONE_PASS
from traces.sources.found import read_recordings
from traces.sources.starts.parallel import Parallel


class Masks:
    """The case of EAGLE's tests with a one-pass drafter under its own name."""

    def __init__(self) -> None:
        self.case = Case(("p-eagle",))
        own = self.case.modules["eagle.p-eagle"]
        self.modules = {"parallel.mine": own}
        starts = self.case.recordings["eagle.p-eagle"]
        self.recordings = {"parallel.mine": starts}
        self.runner = SourceRunner(self.case.target, self.case.trace, self.modules)
        self.drafter: Any = own


@pytest.fixture(scope="module")
def masks() -> Masks:
    return Masks()


@pytest.mark.invariant(1)
@pytest.mark.parametrize("k", [OFFSETS, 2])
@pytest.mark.parametrize("policy", [Fixed(4), Confidence(5, 0.4), Moody()],
                         ids=lambda p: type(p).__name__)  # fmt: skip
def test_replayed_rounds_are_the_real_ones(masks: Masks, policy: DraftPolicy, k: int) -> None:
    source = Parallel("mine", k=k)
    real, log = run_as_replayed(masks.runner, source, policy, masks.case.trace, masks.recordings)
    assert set(real.log.recorded_calls["kind"].tolist()) == {ONE_PASS}
    np.testing.assert_array_equal(real.log.recorded_calls, log.recorded_calls)
    assert 0 < log.rounds["accepted"].sum() < log.rounds["drafted"].sum()


def test_later_tokens_do_not_read_what_was_drafted(masks: Masks) -> None:
    ids = torch.tensor(masks.case.outputs[0])[None]
    features = target_features(masks.case.target, ids, masks.drafter.feature_layers)
    with torch.no_grad():
        true = unroll(masks.drafter, ids, features, 3)
        own = unroll(masks.drafter, ids, features, 3, pick=lambda states: states.argmax(-1) * 0)
    for one, other in zip(true, own, strict=True):
        assert torch.equal(one, other)


def test_files_hold_the_masks(masks: Masks, tmp_path: Path) -> None:
    write_drafter(masks.drafter, tmp_path, dtype=torch.float32)
    again = read_drafter(tmp_path, masks.case.target)
    assert isinstance(again, ParallelEagle3)
    assert torch.equal(again.mask_token, masks.drafter.mask_token)
    with pytest.raises(DraftsimError, match="speculators format has no p-eagle"):
        write_drafter(masks.drafter, tmp_path, layout="speculators")


def test_it_is_profiled_and_replayed_from_the_command_line(
    run: Run, drafters: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(*ONE_PROMPT, "--out", out, "--source", f"parallel:model={drafters / 'masks'}").ok()
    assert set(read_recordings(out)) == {"parallel.masks"}
    rows = run(
        "simulate", "--trace", out, "--source", "parallel:model=masks", "--policy",
        "fixed:gamma=3", "--json", "-",
    ).rows  # fmt: skip
    named = {row["policy"]: row for row in rows}
    assert named["fixed:gamma=3"]["source"] == "parallel:model=masks"
    assert named["fixed:gamma=3"]["fidelity"] == "exact"
    wrong = run(*ONE_PROMPT, "--out", out, "--source", f"eagle:model={drafters / 'masks'}")
    assert "parallel:model=" in wrong.refusal
