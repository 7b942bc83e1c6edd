"""The base of importers: each reads one format into a trace, counts or timings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from traces.acceptance.trace import Trace
from traces.aliases import Progress, silent
from traces.importers.totals import Totals
from traces.latency.table import LatencyTable
from traces.operators.table import OperatorTable

Imported = Trace | Totals | LatencyTable | OperatorTable


@dataclass(frozen=True)
class Options:
    """The facts about a log that a user can give; each importer names those it takes."""

    baseline: Path | None = None
    """The log of plain decoding of the same requests."""
    draft_lengths: str = "infer"
    """How the log's drafts were chosen, see `traces.importers.schedules.reading`."""
    max_new_tokens: int = 1024
    """Token limit of a request."""
    drafter: str | None = None
    """Which of several drafters a log tells of."""
    device: str | None = None
    """Device that latencies were measured on, if their file does not say."""
    model: str | None = None
    """The model that operators are of, where the folders of their files do not say."""
    progress: Progress = field(default=silent, compare=False)


class Importer(ABC):
    """Reads one format."""

    name: ClassVar[str]
    """The format's usual name."""
    summary: ClassVar[str]
    """One line that names the programs that write such files."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Names of the `Options` that it uses."""
    sniffed: ClassVar[int | None] = 100_000
    """Characters of a file's beginning that `sniff` is given; None: the whole file."""

    @abstractmethod
    def sniff(self, text: str) -> bool:
        """Return True if the beginning of a file (`sniffed`) looks like this format."""

    def meta(self, files: Sequence[Path], **more: Any) -> dict[str, Any]:
        """Return the provenance of what `files` tell: the format, their names, and `more`."""
        return {"kind": self.name, "source": [file.name for file in files], **more}

    @abstractmethod
    def read(self, files: Sequence[Path], options: Options) -> Imported:
        """Return what the files tell: a trace where rounds are in order, else counts; or timings.

        Raises
        ------
        FileError
            If a file is damaged, of another format, or contradicts itself.
        """
