"""Pieces of a stopped run that were damaged or moved are made again, and said to be."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.conftest import SMALL_PROFILE, Run
from tests.shared import made_once
from traces.errors import DraftsimError
from traces.store.checkpoint import Checkpoint
from traces.store.files import read_trace

SETTINGS = {"a": 1}
ARRAYS = {"x": np.arange(50.0), "y": np.array(["a", "b"])}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with two pieces."""
    checkpoint = Checkpoint(tmp_path / "kept", SETTINGS)
    for name in ("one", "two"):
        checkpoint.put(name, ARRAYS, of=name)
    return tmp_path / "kept"


def test_pieces_are_given_as_they_were_put(kept: Path) -> None:
    said: list[str] = []
    checkpoint = Checkpoint(kept, SETTINGS, said.append)
    found = checkpoint.get("one", of="one")
    assert found is not None
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(found[name], values)
    assert sorted(p.name for p in kept.iterdir()) == ["one.npz", "settings.json", "two.npz"]
    assert not said


@pytest.mark.invariant(13)
def test_no_damaged_piece_is_given(kept: Path) -> None:
    path, chosen = kept / "one.npz", random.Random(3)
    whole = path.read_bytes()
    cut = [whole[:n] for n in (0, 1, 60, len(whole) // 2, len(whole) - 1)]
    flipped = []
    for _ in range(60):
        content = bytearray(whole)
        content[chosen.randrange(len(whole))] ^= 1 << chosen.randrange(8)
        flipped.append(bytes(content))
    for content in (*cut, *flipped, whole + b"x", b"junk" * 100):
        path.write_bytes(content)
        said: list[str] = []
        assert Checkpoint(kept, SETTINGS, said.append).get("one", of="one") is None
        assert said == [f"{path} is damaged, or of another run: its part is repeated"]


def test_no_piece_is_given_for_another(kept: Path, tmp_path: Path) -> None:
    said: list[str] = []
    checkpoint = Checkpoint(kept, SETTINGS, said.append)
    assert checkpoint.get("one", of="another prompt") is None
    shutil.copy(kept / "two.npz", kept / "one.npz")
    assert checkpoint.get("one", of="one") is None
    other = Checkpoint(tmp_path / "other", {"a": 2}, said.append)
    shutil.copy(kept / "two.npz", other.folder)
    assert other.get("two", of="two") is None
    assert other.within("part").get("two") is None
    assert len(said) == 3


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"a": 1', b'{"a": 1}', b"[" * 100_000])
def test_damaged_settings_are_written_again(content: bytes, kept: Path) -> None:
    marker, said = kept / "settings.json", list[str]()
    whole = marker.read_bytes()
    marker.write_bytes(content)
    assert Checkpoint(kept, SETTINGS, said.append).get("one", of="one") is not None
    assert said == [f"{marker} is damaged: it is written again"]
    assert marker.read_bytes() == whole
    with pytest.raises(DraftsimError, match="a stopped run with other settings"):
        Checkpoint(kept, {"a": 2})


def test_a_piece_is_on_disk_when_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, synced = Checkpoint(tmp_path, SETTINGS), list[int]()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(number), fsync(number)))
    checkpoint.put("one", ARRAYS)
    assert len(synced) == 1


COMMAND = (*SMALL_PROFILE, "--limit", 3)


@pytest.fixture
def stopped(tmp_path: Path, run: Run) -> tuple[Path, Path]:
    """The folder of a profile that stopped before its end, and the trace it is to come to."""

    def profiled(place: Path) -> None:
        close = Checkpoint.close

        def closed(self: Checkpoint) -> None:
            shutil.copytree(self.folder, place / self.folder.name)
            close(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "close", closed)
            assert run(*COMMAND, "--out", place / "run").code == 0

    made, folder = made_once("stopped-profile", profiled), tmp_path / "run"
    shutil.copytree(made / "run", folder)
    (folder / "trace.parquet").unlink()
    shutil.copytree(made / ".trace", folder / ".trace")
    return folder, made / "run" / "trace.parquet"


def same(path: Path, expected: Path) -> bool:
    mine, other = read_trace(path).columns, read_trace(expected).columns
    return all(mine[n].tobytes() == other[n].tobytes() for n in {*mine, *other})


def swap(folder: Path) -> None:
    one, two = folder / "00000.npz", folder / "00001.npz"
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


HURT: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: (folder / "00001.npz").write_bytes(b""),
    "truncated": lambda folder: os.truncate(folder / "00001.npz", 300),
    "settings": lambda folder: (folder / "settings.json").write_bytes(b"\xff\xfe\x00"),
    "swapped": swap,
}


@pytest.mark.parametrize("name", HURT)
def test_a_stopped_profile_goes_on_whatever_was_damaged(
    name: str, stopped: tuple[Path, Path], run: Run
) -> None:
    folder, expected = stopped
    HURT[name](folder / ".trace")
    ran = run(*COMMAND, "--out", folder).ok()
    said = [line for line in ran.err.splitlines() if "damaged" in line]
    assert len(said) == (2 if name == "swapped" else 1)
    assert same(folder / "trace.parquet", expected)
    assert not list(folder.glob(".*"))
