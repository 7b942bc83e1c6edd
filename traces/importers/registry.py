"""Importers by name: the one mapping the command line reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from policies.spec import choice
from traces.errors import DraftsimError, FileError
from traces.importers.acceptance import ByStart, RoundsCSV, SpeculationProfiles
from traces.importers.aiperf import AIPerf
from traces.importers.base import Imported, Importer, Options
from traces.importers.eagle import EagleLog
from traces.importers.metrics import Prometheus
from traces.importers.operators import LLMServingSim, Vidur
from traces.importers.responses import LlamaCpp, LMStudio, SGLang, TRTLLMLog
from traces.importers.specbench import SpecBench
from traces.importers.timings import Latency, LlamaBench
from traces.importers.vllm import VLLM
from traces.store.text import read_text

_ALL: tuple[Importer, ...] = (
    SpecBench(), VLLM(), SGLang(), TRTLLMLog(), LlamaCpp(), LMStudio(), Prometheus(), AIPerf(),
    EagleLog(), RoundsCSV(), ByStart(), SpeculationProfiles(), LlamaBench(), Latency(), Vidur(),
    LLMServingSim(),
)  # fmt: skip
IMPORTERS: Mapping[str, Importer] = {importer.name: importer for importer in _ALL}
AUTO = "auto"
"""The name that selects the format by the file's looks."""


def find_importer(name: str, files: Sequence[Path]) -> Importer:
    """Return the importer called `name`, or with ``auto`` the one that knows the files.

    Raises
    ------
    DraftsimError
        For an unknown name (naming the nearest), or a file that none or several know.
    """
    if name != AUTO:
        if name not in IMPORTERS:
            raise DraftsimError(f"unknown format {name!r}{choice(name, [*IMPORTERS, AUTO])}")
        return IMPORTERS[name]
    found = looks_like(*files)
    if len(found) != 1:
        what = f"looks like {' and '.join(found)}" if found else "is of no known format"
        raise FileError(f"{files[0]}: {what}: name one of {', '.join(IMPORTERS)}")
    return IMPORTERS[found[0]]


def looks_like(*files: Path) -> list[str]:
    """Return the formats (`Importer.sniff`) of the first file that looks like any; else none."""
    for file in files:
        text = read_text(file)
        if found := [name for name, i in IMPORTERS.items() if i.sniff(text[: i.sniffed])]:
            return found
    return []


def import_log(name: str, files: Sequence[Path], options: Options) -> Imported:
    """Return the contents of the files, read by the importer called `name`.

    Raises
    ------
    DraftsimError
        If they cannot be read so; where they look like another format, that is said.
    """
    importer = find_importer(name, files)
    try:
        return importer.read(files, options)
    except FileError as error:
        if name != AUTO and files[0].is_file():
            try:
                found = looks_like(files[0])
            except FileError:
                found = []
            if found and importer.name not in found:
                raise FileError(f"{error} (it looks like {found[0]}: name that format)") from error
        raise
    except DraftsimError as error:
        raise FileError(f"{files[0]}: {error}") from error
