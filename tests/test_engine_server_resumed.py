"""A check over HTTP that was stopped, or is to have more repeats, goes on after its runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from profiler.engines import served as clients
from profiler.engines import vllm
from profiler.engines.drafts import Forced
from profiler.engines.loads import RunningLoad
from profiler.engines.served import CONTROL, Clients
from profiler.engines.session import FORCED, Setup, policy_from
from profiler.engines.texts import own_texts
from profiler.engines.vllm import server as process
from tests.stand_in_engine import TICK_S, Control, StandIn
from tests.test_engine_resumed import LOADS, PAIR, Checked, check, folder, stop_after
from traces import Trace
from traces.store.engine_runs import Demand, ServedRun

__all__ = ["check", "folder"]  # fixtures


class StandInClients(Clients):
    """Clients that step a stand-in themselves, and say what its server added."""

    loads: ClassVar[list[tuple[str, int]]] = []
    """Policy and requests of every load that was sent."""

    def __init__(self, server: Any, trace: Trace, device: str) -> None:
        del device
        self.server, self.trace, self.engine = server, trace, StandIn(server.options)

    def decide(self, policy: str) -> None:
        self.policy = policy

    def _sent(self, demand: Demand) -> Any:
        texts = own_texts(
            self.engine, self.trace, {j.sequence: self.prompts[j.sequence] for j in demand.jobs}
        )
        return [SimpleNamespace(sequence=i, tokens=text) for i, text in texts.items()], None

    def run(self, demand: Demand) -> ServedRun:
        self.loads.append((self.policy, len(demand.jobs)))
        forced = Forced.read(Path(self._drafts.removeprefix(FORCED)))
        setup, control = Setup(policy_from(self.policy), forced), Control()
        load = RunningLoad(self.engine, setup, demand, self.prompts, control)  # type: ignore[arg-type]
        load.go_on()
        ran = load.result()
        added = [TICK_S * i for i in range(len(demand.jobs))]
        return ServedRun(ran, added, [2 * TICK_S] * len(ran.steps), added)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the loads sent to a server (a stand-in); control loads have 8 requests."""

    @contextmanager
    def server(options: Any, folder: Path) -> Iterator[Any]:
        yield SimpleNamespace(options=options, folder=folder)

    monkeypatch.setattr(process, "VllmServer", server)
    monkeypatch.setattr(vllm, "check_installed", lambda server: None)
    monkeypatch.setattr(clients, "Clients", StandInClients)
    StandInClients.loads.clear()
    return StandInClients.loads


def test_a_server_s_check_goes_on_and_is_extended(
    folder: Path, tmp_path: Path, check: Checked, sent: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    expected = check(other, 2, "--http")
    assert expected.code == 0, expected.err
    controls = [load for load in sent if load[1] == CONTROL]
    assert len(controls) == LOADS * 3  # before either repeat, and after the last
    with monkeypatch.context() as patch:
        stop_after(PAIR + 1, patch)
        assert check(folder, 2, "--http").code == 130
    sent.clear()
    resumed = check(folder, 2, "--http")
    assert resumed.rows == expected.rows
    # One to read the recording; the loads left, and the control after them.
    assert len(sent) == 1 + (PAIR - 1) + LOADS
    sent.clear()
    assert {row["repeats"] for row in check(folder, 3, "--http").rows} == {3}
    assert len(sent) == 1 + PAIR + 2 * LOADS
