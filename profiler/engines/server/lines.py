"""Notes that the processes of a server leave in files, a JSON object a line.

A line is kept while its process is at work and written once that has been idle for `QUIET_S`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import Any

VARIABLE = "DRAFTSIM_RECORD"
"""Environment variable that names the folder to write to."""
QUIET_S = 0.1


class Lines:
    """The notes of one process, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: deque[dict[str, Any]] = deque()
        self._last_s = time.perf_counter()
        self._process = 0

    def put(self, **line: Any) -> None:
        """Note something."""
        if self._process != os.getpid():  # the first note, or that of a forked process
            self._process = os.getpid()
            self._lines.clear()
            threading.Thread(target=self._write, daemon=True).start()
        self._last_s = time.perf_counter()
        self._lines.append(line)

    def _write(self) -> None:
        path = self.folder / f"{os.getpid()}.jsonl"
        while True:
            time.sleep(QUIET_S / 2)
            if self._lines and time.perf_counter() - self._last_s > QUIET_S:
                lines = [self._lines.popleft() for _ in range(len(self._lines))]
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)


@lru_cache(maxsize=1)
def lines() -> Lines | None:
    """Return this process's notes; None if the environment asks for none."""
    folder = os.environ.get(VARIABLE)
    return Lines(Path(folder)) if folder else None
