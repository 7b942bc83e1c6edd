"""A server's process: how it is started, that it ends whatever happens, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands.app import stop_signals
from profiler.engines import vllm
from profiler.engines.engine import EngineOptions
from profiler.engines.vllm.engine import speculative_of
from profiler.engines.vllm.server import VllmServer, arguments
from tests.conftest import ROOT, Run
from traces.errors import DraftsimError

OPTIONS = EngineOptions("somewhere", longest=4, max_batch=2, max_model_len=64)


def test_the_server_is_started_as_the_engine_is() -> None:
    given = arguments(OPTIONS)
    for flag, value in (
        ("--max-model-len", "64"), ("--max-num-seqs", "2"), ("--max-num-batched-tokens", "8192"),
        ("--dtype", "auto"), ("--model", "somewhere"),
    ):  # fmt: skip
        assert given[given.index(flag) + 1] == value
    assert {"--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling"} <= {*given}
    drafting = json.loads(given[given.index("--speculative-config") + 1])
    assert drafting == speculative_of(OPTIONS)


def pretend_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> VllmServer:
    """A server whose process runs `script` instead, which may use the port PORT."""
    room = tmp_path / "room"
    room.mkdir()
    server = VllmServer(OPTIONS, room)
    code = tmp_path / "script.py"
    code.write_text(script)

    def command() -> list[str]:
        return [sys.executable, str(code), str(server.port), str(tmp_path)]

    monkeypatch.setattr(server, "command", command)
    return server


HEALTHY = """
import http.server, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[2], "child").write_text(str(child.pid))
class Fine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Fine).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, DraftsimError])
def test_a_server_ends_with_its_children_however_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    server = pretend_server(tmp_path, monkeypatch, HEALTHY)
    try:
        with server:
            child = int((tmp_path / "child").read_text())
            assert alive(child)
            if error is not None:
                raise error("left")
    except (KeyboardInterrupt, DraftsimError):
        pass
    until_s = time.monotonic() + 5
    while alive(child) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not alive(child)


def test_being_told_to_end_leaves_through_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pretend_server(tmp_path, monkeypatch, HEALTHY)

    def told() -> None:
        with stop_signals(), server:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        told()


def test_a_server_that_does_not_come_up_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "print('loading'); raise ValueError('no such model')"
    server = pretend_server(tmp_path, monkeypatch, script)
    with pytest.raises(DraftsimError, match=r"ended with code 1.*no such model") as refused:
        server.__enter__()
    assert "\n" not in str(refused.value)
    assert "loading" in capfd.readouterr().err


def test_http_needs_an_engine(run: Run, tmp_path: Path) -> None:
    for more, said in (
        ((), "--http belongs to `draftsim validate engine`"),
        (("--engine", "vllm", "--remeasure"), "drop --remeasure"),
    ):  # fmt: skip
        ran = run("validate", "--run", tmp_path, "--http", *more)
        assert said in ran.refusal


def test_a_server_needs_vllm_and_our_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(DraftsimError, match="vLLM is not installed here"):
        vllm.check_installed(server=True)
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm, "entry_points", lambda group: [])
    with pytest.raises(DraftsimError, match="does not load draftsim's plugin"):
        vllm.check_installed(server=True)


def test_an_earlier_installation_s_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for value, refused in ((vllm.PLUGIN, False), ("profiler.engines.own_drafter:register", True)):
        found = [SimpleNamespace(name="draftsim", value=value)]
        monkeypatch.setattr(vllm, "entry_points", lambda group, found=found: found)
        with pytest.raises(DraftsimError, match="make vllm") if refused else nullcontext():
            vllm.check_installed(server=True)
    assert f'draftsim = "{vllm.PLUGIN}"' in (ROOT / "pyproject.toml").read_text()
