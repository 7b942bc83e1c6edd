"""Acceptance by draft position, as a server or a person tells it.

Numbers are taken as they are.  Files are `/metrics` of a server, results of its benchmark, the
counts that ``draftsim import --out FILE.json`` writes, and every log that ``draftsim import``
reads into counts.  All commands read acceptance here.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from policies.json_text import JSONError, parse_json
from simulator.aggregate.benches import AT, read_benches
from simulator.aggregate.hazard import check_totals, median_survival
from simulator.aggregate.server import ServerRun
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.bounds import decimal
from traces.importers.registry import AUTO, import_log, looks_like
from traces.importers.totals import Totals
from traces.store.text import read_text

EXPECTED = "expected chances from 1 to 0 that do not rise, such as 0.76,0.60,0.43"
MOST_BYTES = 64 * 2**20
"""Longest answer of a server that is asked for its counters."""


class Acceptance(NamedTuple):
    """How likely the first 1, 2, ... drafted tokens of a round are all accepted."""

    survival: tuple[float, ...]
    source: str
    """The files it was read from; empty for numbers."""
    model: str | None = None
    """The target, where the file names it."""
    prompt: float | None = None
    """Mean prompt tokens of a request, where the file says so."""
    answer: float | None = None
    """Mean output tokens of a request, where the file says so."""
    estimated: bool = False
    """True if the file holds acceptance lengths alone: the positions follow from the prior."""

    @property
    def named(self) -> str:
        """A name for titles."""
        return f"acceptance of {self.source}" if self.source else "the acceptance given"

    @property
    def sizes(self) -> dict[str, int]:
        """Prompt and output tokens of a request, where they are told."""
        told = {"prompt_length": self.prompt, "tokens": self.answer}
        return {name: max(2, round(size)) for name, size in told.items() if size is not None}

    @property
    def meta(self) -> dict[str, Any]:
        """Provenance of a trace made from it."""
        of = {} if self.model is None else {"target": {"name": self.model}}
        return {"source": self.source, **of}

    @property
    def said(self) -> str:
        """The chances and where they come from, in words."""
        chances = ", ".join(f"{chance:.2f}" for chance in self.survival)
        where = f" ({self.source})" if self.source else ""
        how = ", estimated from the acceptance length" if self.estimated else ""
        return f"acceptance by position {chances}{where}{how}"


def read_acceptance(given: str | Sequence[str]) -> Acceptance:
    """Acceptance from ``0.76,0.60,0.43``, or from files or addresses with commas between.

    Two files of a server's counters are those before and after.

    Raises
    ------
    DraftsimError
        If the numbers are no chances, or the file says nothing of acceptance.
    """
    parts = given.split(",") if isinstance(given, str) else list(given)
    values = [decimal(part.strip()) for part in parts]
    if not all(part.strip() for part in parts):
        raise DraftsimError(f"acceptance {','.join(parts)!r} has an empty part: {EXPECTED}")
    if not all(math.isnan(value) for value in values):
        survival = tuple(values)
        if not all(0 <= b <= a for a, b in pairwise((1.0, *survival))):
            raise DraftsimError(f"acceptance {','.join(parts)}: {EXPECTED}")
        return Acceptance(survival, "")
    with tempfile.TemporaryDirectory() as scratch:
        files = [_fetched(part, Path(scratch), i) for i, part in enumerate(parts)]
        found = _of_files(files, parts)
    return found._replace(source=", ".join(Path(part).name for part in parts))


def _of_files(files: Sequence[Path], named: Sequence[str]) -> Acceptance:
    if AT.match(str(files[0])) or files[0].is_dir() or files[0].suffix == ".csv":
        return _of_runs([str(file) for file in files])
    if (counts := _counts(files[0])) is not None:
        return counts
    kinds = looks_like(files[0])
    if not kinds and files[0].suffix in (".json", ".jsonl"):
        return _of_runs([str(file) for file in files])
    found = import_log(kinds[0] if len(kinds) == 1 else AUTO, files, Options())
    if not isinstance(found, Totals):
        raise FileError(
            f"{named[0]}: holds rounds in order or timings, not counts: `draftsim import` makes "
            "a trace of it, for --trace"
        )
    return _of_totals(found, named[-1])


def _of_totals(totals: Totals, where: str) -> Acceptance:
    if totals.tree:
        raise FileError(f"{where}: counts trees of drafts: they tell no acceptance of a chain")
    if totals.per_position is not None:
        return Acceptance(tuple(float(chance) for chance in totals.survival()[0]), where)
    if not totals.fixed_length:
        raise FileError(
            f"{where}: counts no acceptance by position, and its drafts differ in length or "
            "their lengths are unknown: give the chances as numbers, 0.76,0.60,0.43"
        )
    known = {totals.reach: 1 + totals.mean_accepted}
    return Acceptance(median_survival(known, totals.reach), where, estimated=True)


def _of_runs(files: Sequence[str]) -> Acceptance:
    """The mean over the runs with the longest drafts whose acceptance is told."""
    bench = read_benches(files)
    told = [run for run in bench.runs if run.k and run.round_tokens is not None]
    if not told:
        raise FileError(f"{files[0]}: holds no run with speculation that says its acceptance")
    longest = max(run.k for run in told)
    of = [run for run in told if run.k == longest]
    prompt, answer = (
        _mean([size for run in of if (size := getattr(run, name)) is not None])
        for name in ("prompt", "answer")
    )
    if all(run.accepted for run in of):
        survival = [_mean([run.accepted[i] for run in of]) or 0.0 for i in range(longest)]
        return Acceptance(tuple(survival), "", bench.model, prompt, answer)
    known = {k: _mean(_lengths(told, k)) or 1.0 for k in {run.k for run in told}}
    check_totals(known)
    found = median_survival(known, longest)
    return Acceptance(found, "", bench.model, prompt, answer, estimated=True)


def _lengths(runs: Sequence[ServerRun], k: int) -> list[float]:
    return [run.round_tokens for run in runs if run.k == k and run.round_tokens is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _counts(file: Path) -> Acceptance | None:
    """Acceptance in the counts that `draftsim import` wrote; None if the file is another."""
    if file.suffix != ".json":
        return None
    try:
        document = parse_json(read_text(file))
    except JSONError:
        return None
    counts = document.get("counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or document.get("command") != "import":
        return None
    try:
        rows = document["results"]
        chances = [(float(row["survival_lo"]), float(row["survival_hi"])) for row in rows]
        if chances and all(low == high for low, high in chances):
            return Acceptance(tuple(low for low, _ in chances), "")
        totals = Totals(
            counts["rounds"], counts["drafted"], counts["accepted"], len(rows) or None,
            tree=bool(counts["tree"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{file}: is damaged ({error}): import the log again") from None
    return _of_totals(totals, str(file))


def _fetched(source: str, scratch: Path, number: int) -> Path:
    """A file as it is; a URL on this machine, fetched."""
    if not source.startswith(("http://", "https://")):
        return Path(source)
    from urllib.error import URLError
    from urllib.parse import urlsplit
    from urllib.request import ProxyHandler, build_opener

    if urlsplit(source).hostname not in ("localhost", "127.0.0.1", "::1"):
        raise DraftsimError(f"{source}: is not on this machine: save its text and name the file")
    try:
        with build_opener(ProxyHandler({})).open(source, timeout=10) as answer:
            text = answer.read(MOST_BYTES)
    except (URLError, OSError, ValueError) as error:
        raise DraftsimError(f"{source}: cannot be fetched ({error}): is the server up?") from None
    path = scratch / f"metrics-{number}.txt"
    path.write_bytes(text)
    return path
