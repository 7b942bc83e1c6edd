"""The made-up page opened in a real Chromium, and its sliders moved: a plugin of its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.report_pages import page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, file: Path) -> Browser:
    browser.console()
    browser.open(file)
    return browser
