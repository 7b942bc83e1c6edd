"""Acceptance by position, from a recording, a log, a profile, a published curve or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.output import note
from traces.errors import DraftsimError, FileError

if TYPE_CHECKING:
    from simulator.aggregate.positions import Positions

FORMS = (
    "a recording, a log that `draftsim import` reads, speculation_profile.json, FILE.yaml[#CURVE] "
    "of acceptance lengths, or numbers: 0.8 (every position), 0.8,0.7,0.6 (by position, if those "
    "before were accepted), 1:1.8,2:2.4 (acceptance length by draft length)"
)
LONGEST = 8
"""Longest draft that a recording is replayed at where no draft length is asked for."""


def load_positions(
    texts: Sequence[str], k: int | None = None, *, form: str = "auto", source: str | None = None
) -> Positions:
    """Return acceptance by position, from a text or the files of one log (`FORMS`).

    ``k`` is the draft length that recordings are replayed at: by default their longest, up to
    `LONGEST`, or the longest draft that an imported log shows.  ``source`` is as of ``--source``.

    Raises
    ------
    DraftsimError
        If the text has no form of `FORMS`.
    FileError
        If a file is damaged, missing, or holds several curves.
    """
    from simulator.aggregate.curves import is_curves, pick_curve
    from simulator.aggregate.positions import Positions, of_rates, of_totals, of_trace
    from simulator.recording import imputed
    from traces.acceptance.trace import Trace
    from traces.importers.base import Options
    from traces.importers.registry import import_log, looks_like

    first = texts[0]
    if len(texts) == 1 and (found := _numbers(first)) is not None:
        if isinstance(found, dict):
            return Positions(first, found)
        return of_rates(first, found * (k or LONGEST) if len(found) == 1 else found)
    if len(texts) == 1 and is_curves(first):
        return Positions(first, pick_curve(first))
    paths = [Path(text) for text in texts]
    is_log = all(path.is_file() for path in paths) and paths[0].suffix != ".parquet"
    if not is_log:
        if len(texts) > 1:
            missing = next((text for text in texts if not Path(text).is_file()), first)
            raise FileError(
                f"{missing}: several texts are the files of one log, and this is no file"
            )
        return _recorded(first, k, source)
    if form == "auto" and not looks_like(paths[0]):
        raise FileError(f"{first}: of no known format: expected {FORMS}")
    read = import_log(form, paths, Options())
    label = ", ".join(path.name for path in paths)
    if isinstance(read, Trace):
        trace = imputed(label, read, "acceptance by position", note)
        seen = (trace.meta.get("imputed") or {}).get("longest_seen")
        return of_trace(label, trace, k or int(seen or trace.max_gamma or LONGEST))
    from traces.importers.totals import Totals

    if not isinstance(read, Totals):
        raise FileError(f"{first}: holds timings, and nothing about acceptance")
    return of_totals(label, read)


def _recorded(name: str, k: int | None, source: str | None) -> Positions:
    from commands.common.drafted import load_recording
    from simulator.aggregate.positions import of_trace

    # Nothing is priced: any latencies do.
    trace = load_recording(
        name, None if _has_latency(name) else "const:target=1,draft=0.1", source,
        chooses="acceptance by position",
    ).trace  # fmt: skip
    return of_trace(name, trace, k or min(trace.max_gamma or LONGEST, LONGEST))


def _has_latency(name: str) -> bool:
    from traces.store.recordings import folder_of

    folder = folder_of(name)
    return folder is not None and (folder / "latency.parquet").is_file()


def _numbers(text: str) -> list[float] | dict[int, float] | None:
    """Return rates, or lengths by draft length; None if the text is no numbers.

    Raises DraftsimError for a draft length that is named twice.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        if not all(":" in part for part in parts):
            return [float(part) for part in parts]
        pairs = [part.split(":") for part in parts]
        lengths = [(int(k), float(emitted)) for k, emitted in pairs]
    except ValueError:
        return None
    if len(dict(lengths)) < len(lengths):
        raise DraftsimError(f"{text}: names a draft length twice")
    return dict(lengths)
