"""The memory of a rule over a replay, and the rejected pairs it is calibrated with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from policies.core import speculate
from policies.lengths.basic import Fixed
from policies.rules.base import ExactMatch
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from tests.made_up import PROMPTS, TRACE, MadeUpDecoder
from traces.replay.corrections import rejected_pairs
from traces.replay.run import replay


def test_memory_is_shared_in_request_order_and_the_prototype_kept() -> None:
    rule = CSD(threshold=1, tau=0.05)
    log, again = (replay(TRACE, Fixed(5), rule) for _ in range(2))
    np.testing.assert_array_equal(log.rounds, again.rounds)
    assert len(rule.table) == 0
    assert isinstance(log.rule, CSD)
    sizes = log.rule.table.sizes
    assert len(sizes) == len(PROMPTS)
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(log.rule.table) > sizes[0] > 0
    alone = replay(TRACE.select([7]), Fixed(5), rule)
    last = log.rounds[log.rounds["request"] == 7]
    assert len(last) < len(alone), "the last request profits from the seven before it"


def test_bounded_memory_stays_bounded() -> None:
    log = replay(TRACE, Fixed(5), CSD(threshold=1, capacity=4))
    assert isinstance(log.rule, CSD)
    assert len(log.rule.table) == 4
    assert log.rule.table.evictions > 0


def test_a_calibrated_memory_replays_alike_after_save_and_load(tmp_path: Path) -> None:
    pairs = rejected_pairs(TRACE, replay(TRACE, Fixed(5)))
    memory = OnlineCorrectionMemory().calibrate(pairs)
    path = memory.save(tmp_path / "ocm.npz")
    kept = replay(TRACE, Fixed(5), CSD(threshold=1, memory=memory))
    loaded = replay(TRACE, Fixed(5), CSD(threshold=1, memory=path))
    assert kept.rounds.tobytes() == loaded.rounds.tobytes()
    assert len(kept) < len(replay(TRACE, Fixed(5), CSD(threshold=1)))


@pytest.mark.parametrize("gamma", [1, 5])
def test_rejected_pairs_are_those_of_a_real_run(gamma: int) -> None:
    real = []
    for prompt in PROMPTS:
        decoder = MadeUpDecoder([prompt], ExactMatch())
        list(speculate(decoder, Fixed(gamma)))
        real += decoder.rejected
    assert rejected_pairs(TRACE, replay(TRACE, Fixed(gamma), first=0)) == real
