"""``draftsim demo``, stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from profiler.checks.unfinished import PLACE
from tests.conftest import Run
from tests.few_cells import few_cells


def test_a_demo_stopped_while_it_decodes_keeps_its_recording(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    found = []

    def interrupted(run: Path, **_: Any) -> None:
        found.append((run / "trace.parquet").read_bytes())
        (run / f"{PLACE}-0").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("commands.demo.spot_check", interrupted)
    with few_cells():
        for _ in range(2):
            ran = run("demo", "--out", folder, "--limit", 4, "--max-new-tokens", 8)
            assert ran.code == 130
    assert f"{folder} is finished and kept as it is" in " ".join(ran.err.split())
    assert found[0] == found[1]
