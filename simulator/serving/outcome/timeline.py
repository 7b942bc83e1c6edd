"""A run as Chrome trace events, which the Perfetto UI (ui.perfetto.dev) opens.

The file is the JSON array form of the format.  Events are written as they happen: the writer
holds none.  The file takes its place at the end, so a run that is stopped leaves none.

Perfetto's importer (json_trace_parser_impl.cc, slice_tracker.cc) drops a slice that
overlaps another of its track without lying inside it; it turns fractional microseconds
into nanoseconds by cutting off, which can make neighbours overlap; it knows a thread by
its number whatever its process; and it gives counters and process names to the thread
numbered like the process.  Hence whole microseconds, and numbers that nothing shares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from policies.core import Round
from traces.store.writing import AtomicFile

DEVICES, REQUESTS = 1, 2
"""Processes."""
FIRST = {DEVICES: 100, REQUESTS: 10_000}
"""Thread number of the first track of each."""


def result_said(outcome: Round) -> str:
    """Return a draft's result in words, by which Perfetto colours, whatever their numbers."""
    drafted, accepted = outcome.drafted, outcome.accepted
    if not drafted:
        return "no draft"
    part = "all" if accepted == drafted else f"{accepted} of" if accepted else "none of"
    return f"{part} {drafted} accepted"


class Timeline:
    """Writes one track per device and one per request; use it as a context manager.

    Times are given in seconds and written as whole microseconds, at least one a slice.
    Slices of one track come in order and never overlap; what took no time has none.

    Raises
    ------
    FileError
        On entering, if the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: AtomicFile | None = None
        self._ends_us: dict[tuple[int, int], int] = {}
        self._counted_us = 0

    def __enter__(self) -> Timeline:
        self._file = AtomicFile(self.path).__enter__()
        self._file.write(b"[\n")
        for pid, name in ((DEVICES, "devices"), (REQUESTS, "requests")):
            self._emit(name="process_name", ph="M", pid=pid, tid=pid, args={"name": name})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        with ExitStack() as opened:
            opened.push(self._file)
            if kind is None:
                self._count(self._counted_us, 0, 0)
                # A last element without a comma, which the JSON array needs.
                last = {"name": "process_sort_index", "ph": "M", "pid": DEVICES, "tid": DEVICES}
                end = json.dumps({**last, "args": {"sort_index": 0}})
                self._file.write(f"{end}\n]\n".encode())
            else:
                self._file.discard()
        self._file = None

    def device(
        self, track: int, name: str, start_s: float, seconds: float, label: str, **args: Any
    ) -> None:
        """Note that a device was busy with `label`."""
        self._slice(DEVICES, track, name, start_s, seconds, label, args)

    def request(self, index: int, start_s: float, seconds: float, label: str, **args: Any) -> None:
        """Note that a request was waiting, prefilled or decoded."""
        self._slice(REQUESTS, index, f"request {index}", start_s, seconds, label, args)

    def round(
        self, index: int, start_s: float, seconds: float, outcome: Round, wasted: int
    ) -> None:
        """Note that a request drafted and verified, or decoded; `wasted` drafts are now lost."""
        self.request(
            index, start_s, seconds, result_said(outcome), drafted=outcome.drafted,
            accepted=outcome.accepted, emitted=outcome.emitted, wasted=wasted,
        )  # fmt: skip

    def tokens(self, start_s: float, seconds: float, accepted: int, wasted: int) -> None:
        """Note counters of an iteration's accepted and wasted drafts; 0 while nothing runs."""
        start_us = round(start_s * 1e6)
        if start_us > self._counted_us:
            self._count(self._counted_us, 0, 0)
        self._count(start_us, accepted, wasted)
        self._counted_us = round((start_s + seconds) * 1e6)

    def _count(self, ts: int, accepted: int, wasted: int) -> None:
        args = {"accepted": accepted, "wasted": wasted}
        self._emit(name="drafted tokens", ph="C", ts=ts, pid=DEVICES, tid=DEVICES, args=args)

    def _slice(
        self, pid: int, number: int, track: str, start_s: float, seconds: float, label: str,
        args: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if seconds <= 0:
            return
        tid = FIRST[pid] + number
        if (pid, tid) not in self._ends_us:
            self._emit(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": track})
            self._emit(name="thread_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": tid})
        # Both ends are rounded, not the duration: neighbours still touch.
        start_us = max(round(start_s * 1e6), self._ends_us.get((pid, tid), 0))
        # Slices without length would pile up as children of each other.
        end_us = max(round((start_s + seconds) * 1e6), start_us + 1)
        self._ends_us[pid, tid] = end_us
        self._emit(
            name=label, ph="X", ts=start_us, dur=end_us - start_us, pid=pid, tid=tid,
            args=dict(args),
        )  # fmt: skip

    def _emit(self, **event: Any) -> None:
        if self._file is not None:
            self._file.write(f"{json.dumps(event)},\n".encode())
