"""Acceptance by draft position, from numbers or files; every command reads acceptance here.

Files are a server's `/metrics`, results of its benchmark, profiles, published curves, the counts
that ``draftsim import --out FILE.json`` writes, and every log that ``draftsim import`` counts.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

from policies.json_text import JSONError, parse_json
from simulator.aggregate.acceptance import is_curves, pick_curve
from simulator.aggregate.benches import AT, read_benches
from simulator.aggregate.positions import (
    EXPECTED,
    Positions,
    of_runs,
    of_survival,
    of_totals,
)
from traces.acceptance.synthetic import OUTPUT, PLAIN_DECODING, trace_by_position
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.digits import counted
from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.importers.registry import import_log, looks_like
from traces.importers.totals import Totals
from traces.store.parquet import is_parquet
from traces.store.text import decimal, read_text

FORMS = "expected numbers, counters, a benchmark's result, a curve, a profile or a log"
LONGEST = 8
"""Positions that one number is read as where no draft length is asked for."""
MOST_BYTES = 64 * 2**20
"""Longest answer of a server that is asked for its counters."""
URLS = ("http://", "https://")
RoundsReader = Callable[[str, Trace], Positions]
"""A function from a label and the rounds of a log to their acceptance."""


def read_acceptance(
    given: str | Sequence[str], k: int | None = None, *, form: str = "auto",
    rounds: RoundsReader | None = None, drafts: int | None = None,
) -> Positions:  # fmt: skip
    """Return acceptance by position, from numbers or files.

    Parameters
    ----------
    given:
        A text, whose commas part numbers or files; or files.
    k:
        Positions that one number is read as, by default `LONGEST`.
    form:
        Format of a log, of `draftsim import`.
    rounds:
        Reads a log of rounds in order; None: such a log is refused.
    drafts:
        Draft length of counts that do not say theirs (older versions of SGLang).

    Raises DraftsimError if the text has another form, or tells no acceptance; FileError if a file
    is damaged, missing, or holds several curves.
    """
    if isinstance(given, str) and is_curves(given):
        return Positions(given, pick_curve(given))
    parts = given.split(",") if isinstance(given, str) else list(given)
    text = ",".join(parts)
    if not all(part.strip() for part in parts):
        raise DraftsimError(f"acceptance {text!r} has an empty part: {EXPECTED}")
    if (found := _numbers(text, k)) is not None:
        return found
    if len(parts) == 1 and is_curves(text):
        return Positions(text, pick_curve(text))
    with tempfile.TemporaryDirectory() as scratch:
        files = [_fetched(part, Path(scratch), i) for i, part in enumerate(parts)]
        read = _of_files(files, parts, form, rounds, drafts)
    named = ", ".join(Path(part).name for part in parts)
    return replace(read, label=named, source=named)


def is_told(text: str) -> bool:
    """Return True for numbers, a curve, or a file of counts or runs; False for a recording."""
    path = Path(text)
    if "," in text or text.startswith(URLS) or is_curves(text) or _numbers(text, 1) is not None:
        return True
    if AT.match(text) and not path.exists():
        return True
    if path.is_dir():
        return not any(path.glob("*.parquet"))
    return path.is_file() and path.suffix != ".parquet" and not is_parquet(path)


def _of_files(
    files: Sequence[Path], named: Sequence[str], form: str, rounds: RoundsReader | None,
    drafts: int | None,
) -> Positions:  # fmt: skip
    first = files[0]
    if not first.exists() and not AT.match(str(first)):
        raise FileError(f"{named[0]}: no such file: {FORMS}")
    if form == "auto":
        if first.is_file() and (counts := _counts(first, named[0], drafts)) is not None:
            return counts
        if not first.is_file() or not looks_like(*(file for file in files if file.is_file())):
            if first.is_file() and first.suffix not in (".json", ".jsonl", ".csv"):
                raise FileError(f"{named[0]}: of no known format: {FORMS}")
            bench = read_benches([str(file) for file in files])
            said = "; ".join(note.removeprefix(f"{first}: ") for note in bench.notes)
            return replace(of_runs(named[0], bench.runs, bench.model), note=said)
    read = import_log(form, files, Options())
    label = ", ".join(Path(name).name for name in named)
    if isinstance(read, Trace):
        if rounds is None:
            raise FileError(
                f"{named[0]}: holds rounds in order or timings, not counts: `draftsim import` "
                "makes a trace of it, for --trace"
            )
        return rounds(label, read)
    if not isinstance(read, Totals):
        raise FileError(f"{named[0]}: holds timings, and nothing about acceptance")
    return of_totals(named[-1], read, drafts)


def _counts(file: Path, named: str, drafts: int | None) -> Positions | None:
    """Return acceptance in the counts that `draftsim import` wrote; None if the file is another."""
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
        rows, rounds = document["results"], counts["rounds"]
        chances = [(float(row["survival_lo"]), float(row["survival_hi"])) for row in rows]
        alive: list[float] | None = None
        if chances and all(low == high for low, high in chances):
            alive = [low if rounds is None else round(low * rounds) for low, _ in chances]
        kinds = {"drafting": float, "scrapes": str}
        told = {name: counts[name] for name in kinds if counts.get(name) is not None}
        totals = Totals(
            rounds, counts["drafted"], counts["accepted"],
            counts.get("longest", len(rows) or None), alive, counts.get("requests"),
            bool(counts["tree"]), {name: kinds[name](value) for name, value in told.items()},
            bool(counts.get("differ")),
        )  # fmt: skip
    except (ArithmeticError, DraftsimError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{named}: is damaged ({error}): import the log again") from None
    return of_totals(named, totals, drafts)


def _fetched(source: str, scratch: Path, number: int) -> Path:
    """Return a file's path; fetch a URL on this machine into one first."""
    if not source.startswith(URLS):
        return Path(source)
    from urllib.error import URLError
    from urllib.parse import urlsplit
    from urllib.request import ProxyHandler, build_opener

    try:
        host = urlsplit(source).hostname
    except ValueError:  # half of an IPv6 address
        host = None
    if host not in ("localhost", "127.0.0.1", "::1"):
        raise DraftsimError(f"{source}: is not on this machine: save its text and name the file")
    try:
        with build_opener(ProxyHandler({})).open(source, timeout=10) as answer:
            text = answer.read(MOST_BYTES)
    except (URLError, OSError, ValueError) as error:
        raise DraftsimError(f"{source}: cannot be fetched ({error}): is the server up?") from None
    path = scratch / f"metrics-{number}.txt"
    path.write_bytes(text)
    return path


def _numbers(text: str, k: int | None) -> Positions | None:
    """Return acceptance from a text of numbers; None if it holds none.

    Raises DraftsimError for impossible chances, or a draft length that is named twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if all(":" in part for part in parts):
        try:
            pairs = [part.split(":") for part in parts]
            lengths = [(int(n), float(emitted)) for n, emitted in pairs]
        except ValueError:
            return None
        if len(dict(lengths)) < len(lengths):
            raise DraftsimError(f"{text}: names a draft length twice")
        return Positions(text, dict(lengths))
    values = [decimal(part) for part in parts]
    if all(math.isnan(value) for value in values):
        return None
    if len(values) == 1 and 0 <= values[0] <= 1:
        return of_survival(text, list(accumulate(values * (k or LONGEST), mul)))
    if any(math.isnan(value) for value in values):
        raise DraftsimError(f"acceptance {text}: {EXPECTED}")
    return of_survival(text, values)


FEWEST, REQUESTS = 20, 200
"""Requests that acceptance by position is replayed as: at least for an interval, and at most."""


def observed_trace(
    told: str | Sequence[float], say: Say = silent, sizes: Mapping[str, int] | None = None, *,
    named: str | None = None, source: str | None = None, costs: bool = True,
) -> tuple[str, Trace]:  # fmt: skip
    """Return a name and a trace of acceptance that a server counted; `say` is told whose it is.

    ``told`` is a text as `read_acceptance` takes, or chances that the first 1, 2, ... tokens are
    all accepted.  ``sizes`` are the requests' ``prompt_length`` and ``tokens``, by default the
    server's.

    Raises DraftsimError if it cannot be read, a recording (`named`) or a `source` was named as
    well, or nothing says what passes cost (`costs`).
    """
    if named is not None:
        raise DraftsimError(f"--acceptance and --trace {named} are two acceptances: give one")
    if source is not None:
        raise DraftsimError(
            f"--acceptance is that of your drafter, and --source {source} names one: drop one"
        )
    if not costs:
        raise DraftsimError(
            "--acceptance says nothing of what passes cost: give --latency, such as costs of "
            "`draftsim calibrate RUNS --out FILE` or const:target=SECONDS,draft=SECONDS"
        )
    found = (
        read_acceptance(told) if isinstance(told, str)
        else of_survival(",".join(f"{chance:g}" for chance in told), told)
    )  # fmt: skip
    size = {**found.sizes, **(sizes or {})}
    alike = _alike(found, size.get("tokens", OUTPUT))
    trace = trace_by_position(
        found.survival, requests=min(max(alike, FEWEST), REQUESTS), meta=found.meta, **size
    )
    one = trace.requests[0]
    say(
        f"{found.said}: {counted(len(trace.requests), 'request')} of {one.prompt_length} prompt "
        f"and {one.tokens} output tokens, rounds drawn independently, {trace.said_longest}"
    )
    if found.error is not None:
        say(
            f"{found.label}: tokens per round are known to within ±{found.error:.1%} (95%) from "
            f"{counted(found.rounds or 0, 'round')}"
            + (", too few for the intervals, which are narrower" if alike < FEWEST else "")
        )
    if found.note:
        say(f"{found.label}: {found.note}")
    return found.named, trace


def _alike(found: Positions, tokens: int) -> int:
    """Return how many requests of that many output tokens have the rounds that were counted.

    Intervals over this many requests are as wide as the counts are uncertain.
    """
    if found.rounds is None:
        return REQUESTS
    return round(found.rounds * (1 + sum(found.survival)) / tokens)


def plain_trace(sizes: Mapping[str, int] | None = None) -> tuple[str, Trace]:
    """Return a name and a trace for plain decoding, which drafts nothing.

    ``sizes`` are the requests' ``prompt_length`` and ``tokens`` (`trace_by_position`); None if a
    file of arrivals has them.
    """
    trace = trace_by_position((0.0,), **(sizes or {}), meta={"source": PLAIN_DECODING})
    one = trace.requests[0]
    if sizes is None:
        return PLAIN_DECODING, trace
    return f"requests of {one.prompt_length} prompt and {one.tokens} output tokens", trace
