"""A run as Chrome trace events, which the Perfetto UI (ui.perfetto.dev) opens.

Events go to the file as they happen: the writer holds none.  The file is the JSON array
form of the format, which viewers also read when a killed run left it without its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from traces.errors import FileError

DEVICES, REQUESTS = 1, 2


class Timeline:
    """Writes one track per device and one per request; use it as a context manager.

    Times are given in seconds; the format holds microseconds.  Slices of one track come in
    order and never overlap.

    Raises
    ------
    FileError
        On entering, if the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._ends_ns: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Timeline:
        try:
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise FileError(f"timeline {self.path} cannot be written: {error.strerror}") from None
        self._file.write("[\n")
        for pid, name in ((DEVICES, "devices"), (REQUESTS, "requests")):
            self._emit(name="process_name", ph="M", pid=pid, args={"name": name})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._file is not None:
            # A last element without a comma, which the JSON array needs.
            last = {"name": "process_sort_index", "ph": "M", "pid": DEVICES}
            self._file.write(json.dumps({**last, "args": {"sort_index": 0}}) + "\n]\n")
            self._file.close()
            self._file = None

    def device(
        self, track: int, name: str, start_s: float, seconds: float, label: str, **args: Any
    ) -> None:
        """A device was busy with `label`."""
        self._slice(DEVICES, track, name, start_s, seconds, label, args)

    def request(self, index: int, start_s: float, seconds: float, label: str, **args: Any) -> None:
        """A request was waiting, prefilled or decoded."""
        self._slice(REQUESTS, index, f"request {index}", start_s, seconds, label, args)

    def tokens(self, now: float, drafted: int, accepted: int) -> None:
        """Counter of an iteration's accepted and wasted drafts."""
        args = {"accepted": accepted, "wasted": drafted - accepted}
        self._emit(name="drafted tokens", ph="C", ts=now * 1e6, pid=DEVICES, args=args)

    def _slice(
        self, pid: int, tid: int, track: str, start_s: float, seconds: float, label: str,
        args: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if (pid, tid) not in self._ends_ns:
            self._emit(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": track})
            self._emit(name="thread_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": tid})
        # Viewers round start and duration to nanoseconds each, and drop slices that then
        # overlap: whole nanoseconds leave them nothing to round.
        start_ns = max(round(start_s * 1e9), self._ends_ns.get((pid, tid), 0))
        end_ns = max(round((start_s + seconds) * 1e9), start_ns)
        self._ends_ns[pid, tid] = end_ns
        self._emit(
            name=label, ph="X", ts=start_ns / 1e3, dur=(end_ns - start_ns) / 1e3, pid=pid, tid=tid,
            args=dict(args),
        )  # fmt: skip

    def _emit(self, **event: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event) + ",\n")
