"""A headless Chromium driven through chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""WebDriver's name for a reference to an element."""
KEYS = {"Tab": "\ue004", "ArrowLeft": "\ue012", "ArrowRight": "\ue014", "Home": "\ue011",
        "End": "\ue010", "Enter": "\ue007"}  # fmt: skip


class Browser:
    """One page at a time; ``with Browser() as b`` starts and ends both programs."""

    def __enter__(self) -> Browser:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        driver = shutil.which("chromedriver")
        if not chromium or not driver:
            pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._profile = TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._session = ""
        try:
            self._wait()
            options = {
                "binary": chromium, "args": [*FLAGS, f"--user-data-dir={self._profile.name}"],
            }  # fmt: skip
            wanted = {
                "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"},
            }  # fmt: skip
            made = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}}, session=False)
            self._session = made["sessionId"]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            self._call("DELETE", "")
        finally:
            self._stop()

    def open(self, page: Path, width: int = 1100, height: int = 900) -> None:
        """Load a local file in a viewport of this size (CSS pixels)."""
        # As on a phone, a narrow page gives no room to a scroll bar.
        narrow = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": narrow}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function body returns in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys one after another, wherever the focus is."""
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._call("POST", "/actions", {"actions": [source]})

    def text(self, css: str) -> str:
        """Text of the first element that matches."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def console(self) -> list[dict[str, Any]]:
        """Return the console's lines since the last call."""
        return list(self._call("POST", "/se/log", {"type": "browser"}))

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, path: str, body: Any = None, *, session: bool = True) -> Any:
        middle = f"/session/{self._session}" if session else "/session"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{middle}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:2000]) from None

    def _wait(self) -> None:
        end = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/status", timeout=5):
                    return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(timeout=20)
        self._profile.cleanup()
