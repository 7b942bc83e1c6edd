"""The pages: what they name exists, what is made from the code can be made, and the site stands."""

from __future__ import annotations

import importlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main

from commands import app
from docs.made import MAKERS
from tests.browser import Browser
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("policies", "traces", "profiler", "simulator", "commands")
FOLDERS = (*PACKAGES, "tests", "docs", "benchmarks", "notebooks")
LINE = re.compile(r"^\{\{ (\w+)(?: (\S+))? \}\}$", re.MULTILINE)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def _made_once() -> Iterator[None]:
    """Parts of pages are made once, for the tests of single pages and for the site."""
    with pytest.MonkeyPatch.context() as patch:
        for name, make in MAKERS.items():
            patch.setitem(MAKERS, name, cache(make))
        yield


@by_page
def test_commands_and_options_exist(page: Path) -> None:
    known = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
    text = re.sub(r"\\\n\s+", "", text_of(page))
    for line in re.findall(r"(?:^|`|/)draftsim ([^\n`]+)", text, re.MULTILINE):
        name, *words = line.split("#")[0].split()
        if name == "COMMAND" or name.startswith("--"):
            continue
        one = known[name]
        verbs = getattr(one, "commands", {})
        asked = [verbs[words[0]]] if words and words[0] in verbs else [one, *verbs.values()]
        params = [p for command in asked for p in command.params]
        options = {option for p in params for option in (*p.opts, *p.secondary_opts)}
        if one in asked and verbs:
            options |= {option for verb in one.verbs.values() for option in verb.chosen_by}
        for word in words:
            if word.startswith("--"):
                assert word.rstrip(",.;:").partition("=")[0] in {*options, "--help"}, line


@by_page
def test_files_and_names_exist(page: Path) -> None:
    quoted = [word for part in re.findall(r"`([^`\n]+)`", text_of(page)) for word in part.split()]
    for word in quoted:
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*", word):
            stem = word.replace("NAME", "*").removesuffix("/")
            assert list(ROOT.glob(stem)), f"{page.name} names {word}"
        elif re.fullmatch(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+", word) and "parquet" not in word:
            if word.startswith("profiler.") and find_spec("torch") is None:
                continue
            resolved(word)


def resolved(name: str) -> object:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(page)):
        made = {"img/validation.png"} if ROOT / "docs" in page.parents else set()
        assert target in made or (page.parent / target).exists(), f"{page.name}: {target}"


@by_page
def test_what_is_made_from_the_code_can_be_made(page: Path) -> None:
    for name, argument in LINE.findall(text_of(page)):
        assert len(MAKERS[name](*([argument] if argument else []))) > 20
    assert len(LINE.findall(text_of(page))) == text_of(page).count("{{")


def test_every_test_file_is_of_one_area() -> None:
    areas = re.findall(r"^\| [^|]+ \| `(tests/[^`]+)` \|$", text_of(PAGES[1]), re.MULTILINE)
    parts = [part for area in areas for part in area.split()]
    named = Counter(path.name for part in parts for path in ROOT.glob(part))
    assert named == Counter(path.name for path in (ROOT / "tests").glob("test_*.py"))


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of(ROOT / "mkdocs.yml").partition("\nnav:")[2]
    assert set(re.findall(r"([\w/]+\.md)$", navigation, re.MULTILINE)) == {
        path.relative_to(ROOT / "docs").as_posix() for path in PAGES[2:]
    }


def test_pages_for_users_are_short() -> None:
    """At most 10,000 words outside code, tables and what is made; pages for authors apart."""
    authors = {"CONTRIBUTING", "architecture", "invariants", "mutants"}
    users = [p for p in PAGES if p.stem not in authors and p.parent.name != "log"]
    apart = re.compile(r"^```.*?^```|^\{\{.*?\}\}$|^\|.*?$|<!--.*?-->", re.MULTILINE | re.DOTALL)
    assert sum(len(apart.sub("", text_of(p)).split()) for p in users) <= 10_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` does."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)  # what is wrong with a page raises
        finally:
            config.plugins.on_shutdown()
    return folder


def test_the_site_asks_for_nothing_from_outside(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {p.stem for p in pages} >= {p.stem for p in PAGES[2:]}
    fetched = r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"((?:https?:)?//.*?)\""
    for path in pages:
        text = text_of(path)
        assert not re.findall(fetched, text), path.name
        assert "{{ " not in re.sub(r"<(code|pre|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", text_of(path)), path.name


def test_the_site_is_searched_without_a_server(site: Path) -> None:
    with Browser() as browser:
        browser.open(site / "tour.html")
        assert browser.run("return document.querySelector('article img').naturalWidth") > 100
        browser.run("document.querySelector('.md-search__input').focus()")
        browser.press(*"tail")
        found = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        for _ in range(300):
            if links := browser.run(found):
                break
            time.sleep(0.1)
        assert any("terms.html" in link for link in links)
        assert not [line for line in browser.console() if line["level"] == "SEVERE"]


def test_the_api_page_gives_every_parameter_its_own_type() -> None:
    griffe = pytest.importorskip("griffe")
    from docs.docstrings import Docstrings

    found = griffe.load(
        "simulator.api", search_paths=[ROOT], extensions=griffe.load_extensions(Docstrings())
    )["predict"].docstring.parse("numpy")
    [parameters] = [part.value for part in found if part.kind.value == "parameters"]
    types = {one.name: (str(one.annotation), str(one.default)) for one in parameters}
    assert types["trace"] == ("str | Trace", "DEFAULT_TRACE")
    assert types["latency"] == ("str | LatencyTable | None", "None")
    [raised] = [part.value for part in found if part.kind.value == "raises"]
    assert [str(one.annotation) for one in raised] == ["DraftsimError"]
    assert [part for part in found if part.kind.value == "examples"]


def test_the_api_page_gives_the_defaults_of_checked_parameters() -> None:
    griffe = pytest.importorskip("griffe")
    from docs.docstrings import Docstrings

    oracle = griffe.load(
        "policies.lengths.basic",
        search_paths=[ROOT],
        extensions=griffe.load_extensions(Docstrings()),
    )["Oracle"]
    assert [str(one.default) for one in oracle.parameters][1:] == ["'run'", "None"]
