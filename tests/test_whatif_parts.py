"""Running a sweep in parts: resuming, damage, processes, files."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from policies import DraftPolicy
from simulator.executors import Local
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep
from tests.studies import Failing, read_sweep, recorded, study
from traces.errors import DraftsimError


@pytest.mark.parametrize("lose", [False, True])
def test_finished_parts_are_not_computed_again(tmp_path: Path, lose: bool) -> None:
    out = tmp_path / "grid.parquet"
    whole = study(batches=(1, 2), resamples=4)
    expected = whole.run(Local(1))
    with pytest.raises(DraftsimError if lose else KeyboardInterrupt) as caught:
        whole.run(Failing(3, lose), out=out)
    if lose:
        assert "1 of 4 parts were lost" in str(caught.value)
    assert not out.exists()
    rest = Failing(4)
    seen: list[tuple[int, int]] = []
    frame = study(batches=(1, 2), resamples=4).run(
        rest, out=out, progress=lambda *n: seen.append(n)
    )
    assert rest.ran == 1
    assert seen == [(3, 4), (4, 4)]
    pd.testing.assert_frame_equal(frame, expected)
    pd.testing.assert_frame_equal(read_sweep(out), expected, check_categorical=False)
    assert read_sweep(out).attrs["sweep"]["batches"] == [1, 2]
    assert not Path(f"{out}.parts").exists()


def test_other_questions_do_not_reuse_parts(tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    with pytest.raises(KeyboardInterrupt):
        study().run(Failing(1), out=out)
    for change in ({"seed": 1}, {"resamples": 41}, {"prices": Prices((0.05, 0.3))}):
        other = Failing(9)
        study(**change).run(other, out=tmp_path / "grid.parquet")
        assert other.ran == 2, change
        with pytest.raises(KeyboardInterrupt):
            study().run(Failing(1), out=out)


@pytest.mark.parametrize("place", [0, 40, 300, -1, None])
def test_a_damaged_part_is_computed_again(place: int | None, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    with pytest.raises(KeyboardInterrupt):
        study().run(Failing(1), out=out)
    (kept,) = Path(f"{out}.parts").glob("*.npz")
    content = bytearray(kept.read_bytes())
    if place is not None:
        content[place] ^= 1
    kept.write_bytes(content if place is not None else content[:200])
    again = Failing(2)
    study().run(again, out=out)
    assert again.ran == 2
    pd.testing.assert_frame_equal(read_sweep(out), study().run(), check_categorical=False)


class Deadly(DraftPolicy):
    """Kills the process that runs it."""

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False


def test_a_killed_process_is_one_clear_error() -> None:
    with pytest.raises(DraftsimError, match="a worker process was killed"):
        Sweep(recorded(), {"deadly": Deadly()}, Prices((0.1,)), batches=(1, 2)).run(Local(2))


@pytest.mark.invariant(6)
def test_processes_give_the_same_rows() -> None:
    sweep = study(resamples=10)
    pd.testing.assert_frame_equal(sweep.run(Local(2)), sweep.run(Local(1)))
