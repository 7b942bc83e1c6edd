"""``vllm serve`` in a separate process, with the settings of an engine in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from policies.registry import PLAIN
from profiler.engines import notes, session
from profiler.engines.engine import EngineOptions
from profiler.engines.served import MODEL
from profiler.engines.vllm.engine import environment, measured_arguments
from traces.errors import DraftsimError
from traces.store.writing import write_atomically

START_S, STOP_S = 600.0, 15.0
"""Seconds that it may take to come up, and to end, before it is killed."""
TAIL = 12
"""Lines of its log that are shown of a server that did not come up."""
RAISED = re.compile(r"(?:^|[\])] )((?:\w+\.)*\w*(?:Error|Exception): .*)")
"""An error in that log, after the name of the process."""
HOST = "127.0.0.1"


class VllmServer:
    """A server on a free port of this machine; a context manager that ends it on leaving.

    Parameters
    ----------
    options: As in `profiler.engines.vllm.engine.VllmEngine`.
    folder: Where its setup, log and record are kept: empty, and the caller's to remove.

    Raises DraftsimError on entry, where vLLM is missing or does not come up; its log's end goes to
    standard error.
    """

    unnoted = "this vLLM is not 0.32, or draftsim is not installed in its environment (`make vllm`)"

    def __init__(self, options: EngineOptions, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.notes = folder / "notes"
        """The folder that its processes write `profiler.engines.notes` to."""
        self.log = folder / "server.log"
        self.port = 0
        self._setup = folder / "setup.json"
        self._process: subprocess.Popen[bytes] | None = None

    def decide(self, policy: str, source: str) -> None:
        given = {"policy": policy, "source": source}
        write_atomically(self._setup, json.dumps(given).encode())

    def __enter__(self) -> VllmServer:
        self.notes.mkdir()
        self.decide(PLAIN, session.ENGINE if self.options.own_drafter else "pld")
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = int(free.getsockname()[1])
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command(), env=self._environment(), stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and what it started."""
        process, self._process = self._process, None
        if process is not None:
            try:
                _signal_group(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
            finally:
                # The engine is a process of its own, which may outlive the one that started it.
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def command(self) -> list[str]:
        """Return the command that starts the server.

        It is what `vllm serve` runs; that command itself asks for the version of a distribution
        called vllm, which the wheel for CPUs is not.
        """
        module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        return [*module, *arguments(self.options), "--host", HOST, "--port", str(self.port)]

    def _environment(self) -> dict[str, str]:
        return {
            **environment(self.options.threads), session.VARIABLE: str(self._setup),
            notes.VARIABLE: str(self.notes),
        }  # fmt: skip

    def _wait(self) -> None:
        local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self._process is not None and (code := self._process.poll()) is not None:
                raise self.failed(f"`vllm serve` ended with code {code}")
            try:
                with local.open(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise self.failed(f"`vllm serve` did not answer in {START_S:g} s")

    def failed(self, how: str) -> DraftsimError:
        """Return an error that says why, as far as the server's log does; its end is printed."""
        said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in said[-TAIL:]:
            print(line, file=sys.stderr)
        told = next((found for line in said if (found := RAISED.search(line))), None)
        reason = f": {told[1]}" if told else ""
        return DraftsimError(f"{how}, with {self.options.target}{reason}")


def arguments(options: EngineOptions) -> list[str]:
    """Return the arguments of ``vllm serve`` for a server with these options."""
    found = []
    for name, value in {**measured_arguments(options), "served_model_name": MODEL}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given = isinstance(value, dict | list)
            found += [f"--{flag}", json.dumps(value) if given else str(value)]
    return found


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
