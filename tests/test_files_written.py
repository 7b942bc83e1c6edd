"""How files are written: whole, through links and devices, with the mode they had."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from simulator.plots.look import save
from simulator.serving import ResultsFile, Timeline
from tests.conftest import Run
from tests.forked import forked
from traces.errors import FileError
from traces.store.writing import AtomicFile, write_atomically


@pytest.fixture
def umask() -> Iterator[None]:
    """A umask that leaves new files to their owner alone."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_that_the_umask_leaves(umask: None, tmp_path: Path) -> None:
    write_atomically(tmp_path / "private", b"x")
    os.umask(0o022)
    write_atomically(tmp_path / "public", b"x")
    assert (mode(tmp_path / "private"), mode(tmp_path / "public")) == (0o600, 0o644)


@pytest.mark.parametrize("held", [0o600, 0o640, 0o664, 0o755])
def test_a_file_keeps_its_mode(held: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    path.chmod(held)
    with AtomicFile(path) as file:
        [part] = [p for p in tmp_path.iterdir() if p != path]
        assert mode(part) == held  # nobody else may read it meanwhile either
        file.write(b"after")
    assert (mode(path), path.read_bytes()) == (held, b"after")


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    named, link = tmp_path / "far" / "file", tmp_path / "link"
    link.symlink_to(Path("far") / "file")
    for content in (b"first", b"second"):  # of a file that is not there yet, and of one that is
        write_atomically(link, content)
        assert link.is_symlink()
        assert named.read_bytes() == content
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["far", "file", "link"]
    (tmp_path / "self").symlink_to("self")
    with pytest.raises(FileError, match="self: cannot be written"):
        write_atomically(tmp_path / "self", b"x")


def through(path: Path, write: threading.Thread) -> bytes:
    """Return the bytes from the FIFO at `path` while `write` runs."""
    write.start()
    content = path.read_bytes()
    write.join()
    return content


def test_a_fifo_is_written_through(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to("fifo")
    for path in (fifo, link):
        writer = threading.Thread(target=write_atomically, args=(path, b"content"))
        assert through(fifo, writer) == b"content"
        assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "link"]


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device of our own that takes everything, in the test's own folder."""
    path = tmp_path / "device"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        with path.open("wb"):
            pass
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


@pytest.mark.parametrize("option", ["--json", "--out", "lines"])
def test_a_device_stays_a_device(option: str, device: Path, synthetic_run: Path, run: Run) -> None:
    served = ("serve", "--trace", synthetic_run, "--batch", 1, "--requests", 2)
    if option == "lines":
        ran = run(*served, "--policy", "fixed:gamma=2", "--out", device)
    elif option == "--out":
        report = ("report", "--no-serve", "--run", synthetic_run, "--resamples", 2)
        ran = run(*report, "--policy", "fixed:gamma=2", "--out", device)
    else:
        ran = run("list", "rules", "--json", device)
    assert ran.code == 0, ran.err
    assert stat.S_ISCHR(device.stat().st_mode)
    assert [p.name for p in device.parent.iterdir()] == ["device"]


def test_rows_go_through_a_fifo(tmp_path: Path, run: Run) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    assert run("list", "rules", "--json", fifo).code == 0
    reader.join()
    assert read[0].startswith(b'{\n  "schema": 1')
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_what_killed_writers_left_is_removed_and_what_is_written_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def killed() -> None:
        with AtomicFile(path) as file:
            file.write(b"half")
            os._exit(1)

    with forked(killed):
        pass
    assert len(list(tmp_path.iterdir())) == 1
    with AtomicFile(path) as slow:
        slow.write(b"slow")
        write_atomically(path, b"quick")
        assert path.read_bytes() == b"quick"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"slow"


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ResultsFile(tmp_path / "rows") as rows, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileError, match=r"rows: cannot be written \(No space"):
            rows.add({"a": 1})
    (tmp_path / "rows").unlink()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"f\.png: cannot be written \(No space.*free some space"):
        save(Figure(), tmp_path / "f.png")
    with pytest.raises(FileError, match=r"t\.json.*No space"), Timeline(tmp_path / "t.json"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", [True, False])
def test_a_timeline_is_there_whole_or_not_at_all(fails: bool, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("before")
    with suppress(KeyboardInterrupt), Timeline(path) as drawn:
        drawn.device(0, "target model", 0.0, 1.0, "forward")
        assert path.read_text() == "before"
        if fails:
            raise KeyboardInterrupt
    assert (path.read_text() == "before") == fails
    assert list(tmp_path.iterdir()) == [path]
