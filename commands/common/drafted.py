"""Recordings, latencies and acceptance by position that options name, loaded with remarks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import remark
from policies.spec import assignments
from traces.acceptance.trace import Trace
from traces.aliases import Say
from traces.digits import counted
from traces.errors import DraftsimError, FileError
from traces.latency.table import LatencyTable
from traces.operators.devices import find_device
from traces.store.identity import ROLES
from traces.store.parquet import kind_of
from traces.store.recordings import TRACE_VARIABLE, find_latency, folder_of, given_name

if TYPE_CHECKING:
    from simulator.aggregate.positions import Positions
    from simulator.hardware.roofline import WeightFormat
    from simulator.recording import Recording

FORMS = (
    "numbers: 0.76,0.60,0.43 (chance that the first 1, 2, ... tokens are all accepted, as vLLM "
    "logs it), 0.8 (each of 8 positions, if those before were), 1:1.8,2:2.4 (acceptance length by "
    "draft length); or a recording, a server's /metrics (also its URL on this machine; two files "
    "are before and after), a benchmark's result, speculation_profile.json, FILE.yaml[#CURVE], or "
    "a log that `draftsim import` reads"
)
"""The texts and files that give acceptance by position, as help texts list them."""
LONGEST = 8
"""Longest draft that a recording is replayed at where no draft length is asked for."""


def load_recording(
    name: str, latency: str | Sequence[str] | None, source: str | None = None, *,
    gpu: str | None = None, weights: str | None = None, **how: Any,
) -> Recording:  # fmt: skip
    """Return the recording called `name` (`simulator.recording.load_recording`), with its remarks.

    ``latency`` are the latencies named (`latencies`); with `gpu` or `weights` one table is carried
    over there.
    """
    from simulator import recording

    given = [latency] if isinstance(latency, str) else list(latency or ())
    carry = partial(carried, gpu=gpu, weights=weights, say=remark) if gpu or weights else None
    tables = latencies(given) if given else None
    from_environment = given_name(name) is None
    try:
        return recording.load_recording(
            name, tables, source, carry=carry, from_environment=from_environment,
            takes_acceptance="acceptance" in how, say=remark, **how,
        )  # fmt: skip
    except FileError as error:
        said = str(error)
        if from_environment and TRACE_VARIABLE in os.environ and said.startswith(f"{name}: "):
            raise FileError(f"{TRACE_VARIABLE}={said}") from None
        raise


def load_unpriced(name: str, source: str | None, chooses: str) -> Recording:
    """Return the recording called `name`, for what needs no costs: it may have no latencies.

    ``source`` is as in ``--source``; ``chooses`` and errors are those of `load_recording`.
    """
    folder = folder_of(name)
    timed = folder is not None and (folder / "latency.parquet").is_file()
    return load_recording(name, None, source, chooses=chooses, by_ratio=not timed, one=False)


def load_positions(
    given: str | Sequence[str], k: int | None = None, *, form: str = "auto",
    source: str | None = None, drafts: int | None = None, most: int | None = None,
) -> Positions:  # fmt: skip
    """Return acceptance by position, from a text or the files of one log (`FORMS`).

    ``k`` is the draft length that recordings are replayed at: by default their longest, up to
    `LONGEST`, or the longest draft that an imported log shows; ``most`` takes `LONGEST`'s place,
    and bounds an imported log, too.  ``source`` is as in ``--source``,
    ``drafts`` the draft length of counts that do not say theirs.  Raises as `read_acceptance`, or
    DraftsimError if a recording does not have the drafts.
    """
    from simulator.aggregate.observed import is_told, read_acceptance
    from simulator.aggregate.positions import of_trace
    from simulator.recording import imputed
    from simulator.tune.costs import longest_seen

    def replayed(label: str, trace: Trace) -> Positions:
        seen = longest_seen(trace)
        if k is not None and seen is not None and k > seen:
            raise DraftsimError(
                f"{label}: the longest verified draft has {counted(seen, 'token')}, and drafts of "
                f"{k} are asked for: their acceptance was not measured"
            )
        bounds = (most or seen or LONGEST, seen or trace.max_gamma)
        return of_trace(label, trace, k or min(bound for bound in bounds if bound is not None))

    def rounds(label: str, read: Trace) -> Positions:
        return replayed(label, imputed(label, read, "acceptance by position", remark))

    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) == 1 and texts[0].strip() and not is_told(texts[0]):
        trace = load_unpriced(texts[0], source, "acceptance by position").trace
        return replayed(texts[0], trace)
    if source is not None:
        raise DraftsimError(
            f"--source {source} chooses a drafter of a recording, and {', '.join(texts)} has no "
            "drafters: drop it"
        )
    one = texts[0] if len(texts) == 1 else texts
    found = read_acceptance(one, k or most, form=form, rounds=rounds, drafts=drafts)
    if found.note:
        remark(f"{found.label}: {found.note}")
    return found


def latencies(names: Sequence[str]) -> dict[str, LatencyTable]:
    """Return the tables named, by name.

    A table of the GPU suite, which holds many pairs and modes, gives one table each, or the one
    that a suffix names (``FILE:PAIR/MODE``).
    """
    found: dict[str, LatencyTable] = {}
    for name in names:
        path, _, chosen = name.rpartition(":")
        # After an operator table's file comes a GPU, which the composed latencies are of.
        single = name.startswith("const:") or not Path(path).is_file()
        if single or kind_of(path) == "operators":
            path, chosen = name, ""
        tables = _by_pair(find_latency(path))
        if chosen and chosen not in tables:
            raise DraftsimError(
                f"--latency {name}: {path} holds {', '.join(filter(None, tables)) or 'one pair'}, "
                f"not {chosen!r}"
            )
        for pair, table in tables.items():
            if not chosen:
                found[f"{path}:{pair}" if pair else path] = table
            elif pair == chosen:
                found[name] = table
    return found


def carried(
    tables: Mapping[str, LatencyTable], gpu: str | None, weights: str | None, say: Say
) -> dict[str, LatencyTable]:
    """Return the one table extrapolated to one GPU, to `weights` (`weight_formats`), or to both.

    Raises DraftsimError if it is more than one GPU, or the table cannot be extrapolated.
    """
    wanted, forms = gpu_names(gpu), weight_formats(weights)
    if len(wanted) > 1:
        raise DraftsimError(f"--gpu is {gpu!r}, expected one GPU: run the command once for each")
    from simulator.whatif.cells import Prices, said_scaled

    prices = Prices(latencies=tables, gpus=wanted, weights=forms)
    for line in said_scaled(prices):
        say(line)
    return dict.fromkeys(tables, prices.tables[0].table)


def _by_pair(table: LatencyTable) -> dict[str, LatencyTable]:
    """Return the tables of each pair and mode of a suite's table; else the table itself."""
    models = {str(m) for m in table.cells["model"]}
    drafts = [tuple(m.split("/")) for m in models if m.endswith("/draft") and m.count("/") == 2]
    if not drafts:
        return {"": table}
    from profiler.suite.unpack import tables_of

    return {f"{pair}/{mode}": tables_of(table, pair, mode) for pair, mode, _ in sorted(drafts)}


def gpu_names(text: str | None) -> tuple[str, ...]:
    """Return the names of ``--gpu``; DraftsimError for one without a data-sheet entry."""
    names = [] if text is None else [part.strip() for part in text.split(",")]
    return tuple(dict.fromkeys(find_device(name).name for name in names))


def weight_formats(text: str | None) -> dict[str, WeightFormat]:
    """Return the formats of ``--weights`` by role; DraftsimError for an unknown one."""
    from simulator.hardware.roofline import find_format

    if text is None:
        return {}
    where, each, both = f"--weights {text}", "target=awq-int4,draft=bf16", "fp8 (both models)"
    given = dict.fromkeys(ROLES, text)
    if "=" in text:
        given = assignments(text, where, ROLES, "model", f"{each}, or {both}")
    try:
        return {role: find_format(name) for role, name in given.items()}
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}; write {both}, or {each}") from None
