"""Recordings that come with draftsim, found by name, and latencies given in words."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.spec import assignments
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError, FileError, nearest
from traces.latency.table import PHASES, LatencyTable
from traces.store.files import read_latency, read_trace
from traces.store.header import PathLike
from traces.store.identity import (
    ROLES,
    check_folder,
    engine_head,
    model_in,
    model_label,
    names_of,
    same_model,
)
from traces.store.operators import find_composed
from traces.store.speculation_profile import is_profile, read_profile
from traces.store.text import MOST_SECONDS, decimal, read_object

DEFAULT_TRACE = "qwen-coder-vllm-cpu"
"""The recording used by default: a pair that people deploy, at the costs of a serving engine."""
TRACE_VARIABLE = "DRAFTSIM_TRACE"
"""The environment variable that names another one."""
PAPERS_TRACE = "smollm2-cpu"
"""The recording that has what the papers' methods need: early exits and drafters trained for it."""
BUNDLED = Path(__file__).parents[1] / "recorded"
"""Folder of the bundled recordings: ``<name>/trace.parquet``, ``<name>/latency.parquet``.

A recording may hold sampled outputs alone, ``<name>/sampled.parquet``; they are its trace then.
"""
SAMPLED = "sampled.parquet"
ELSEWHERE = "elsewhere.json"
"""The file that names the folder of another recording's trace: ``{"trace": NAME}``."""
KINDS = ("trace", "latency")
"""Kinds of file of which a folder needs one to be a recording."""


@dataclass(frozen=True)
class Bundled:
    """A bundled recording."""

    name: str
    folder: Path
    summary: str
    """Pair, size and device in one line."""


class Defaulted(str):
    """The name of a recording that a command takes because the user named none."""

    option = "--trace"
    """The option that would have named one."""


def given_name(trace: str) -> str | None:
    """Return the name that was given; None for a default or the environment's."""
    unnamed = isinstance(trace, Defaulted) or trace == os.environ.get(TRACE_VARIABLE)
    return None if unnamed else trace


def recordings(folder: Path = BUNDLED) -> list[Bundled]:
    """Return the bundled recordings, by name."""
    folders = [f for f in sorted(folder.glob("*")) if any(_file(f, kind) for kind in KINDS)]
    return [Bundled(f.name, f, _summary(f)) for f in folders]


def trace_folder(folder: Path) -> Path:
    """Return the folder of a recording's trace, its own or the one that `ELSEWHERE` names.

    Recordings made along the trace are in it, too.  Raises FileError if `ELSEWHERE` is damaged, or
    names no folder next to this one.
    """
    path = folder / ELSEWHERE
    if not path.is_file():
        return folder
    name = read_object(path, "unpack the recording again").get("trace")
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise FileError(f"{path}: names no trace: unpack the recording again")
    place = folder.resolve().parent / name
    if not place.is_dir():
        raise FileError(
            f"{path}: the trace is in {name!r}, but there is no such folder next to this one: "
            "unpack the recording again"
        )
    return place


def models_of(name_or_path: PathLike, trace: Trace) -> dict[str, dict[str, Any]]:
    """Return what trace and run folder say of the target and the draft model, by role."""
    home = folder_of(name_or_path)
    try:
        said = read_object(home / "run.json") if home is not None else {}
    except FileError:
        said = {}  # a bundled recording may have none; what is wrong with one, `read_run` says
    found = {}
    for role in ROLES:
        about = model_in(trace.meta, role)
        if about and not names_of(about) and isinstance(said, dict) and said.get(role):
            about["name"] = str(said[role])
        found[role] = about
    return found


def pair_of(trace: Trace) -> tuple[str | None, str | None]:
    """Return fingerprints of the target's and the draft's weights; None if they are not known."""
    target, draft = (
        value.get("fingerprint") if isinstance(value := trace.meta.get(role), dict) else None
        for role in ROLES
    )
    return target, draft


def find_trace(name_or_path: PathLike, folder: Path = BUNDLED) -> Trace:
    """Return the trace of a bundled recording, of a run's folder, or in a file.

    A ``speculation_profile.json`` gives a trace drawn from its acceptance rates.

    Raises
    ------
    FileError
        If there is none, with the nearest name.
    """
    if is_profile(name_or_path):
        return read_profile(name_or_path).drawn()
    return read_trace(_find(name_or_path, "trace", folder))


def find_latency(name_or_path: PathLike, folder: Path = BUNDLED) -> LatencyTable:
    """Return the latency table of a recording, of a run's folder, in a file, or given in words.

    Words are ``const:`` (see `parse_latency`) or a GPU and its models, composed from operators:
    ``a100/llama-2-70b@tp4+llama-2-7b`` (see `traces.store.operators.find_composed`).

    Raises
    ------
    FileError
        If there is none, with the nearest name; if a folder's trace is of another run.
    DraftsimError
        If such a description is wrong.
    """
    if isinstance(name_or_path, str) and name_or_path.startswith("const:"):
        return parse_latency(name_or_path)
    if isinstance(name_or_path, str) and (composed := find_composed(name_or_path)) is not None:
        return composed
    path = _find(name_or_path, "latency", folder)
    if path != Path(name_or_path):
        check_folder(path.parent)
    return read_latency(path)


def folder_of(name_or_path: PathLike, folder: Path = BUNDLED) -> Path | None:
    """Return the folder of a bundled recording or run; None for a single file."""
    path = _find(name_or_path, "trace", folder)
    return path.parent if path != Path(name_or_path) else None


OF_THE_TARGET = tuple(name for name, phase in PHASES.items() if phase.given)
"""Phases that constant latencies may name."""


def parse_latency(text: str) -> LatencyTable:
    """Return the table of ``const:target=0.0143,draft=0.00176[,verify=0.0150]``, in seconds.

    Other times of the target may follow by name (``host_round=0.0003``; `OF_THE_TARGET`).

    Raises
    ------
    DraftsimError
        If the text is anything else.
    """
    form = "expected const:target=SECONDS,draft=SECONDS[,verify=SECONDS]"
    kind, _, body = text.partition(":")
    if kind != "const":
        raise DraftsimError(f"latency {text!r} does not begin with 'const:': {form}")
    allowed = ["target", "draft", "verify", *OF_THE_TARGET]
    given: dict[str, float] = {}
    for name, value in assignments(body, f"latency {text!r}", allowed, "time").items():
        given[name] = decimal(value)
        if math.isnan(given[name]):
            raise DraftsimError(f"latency {text!r} gives {name}={value!r}, no number: {form}")
        if given[name] > MOST_SECONDS:
            raise DraftsimError(
                f"latency {text!r} gives {name}={value}, expected at most {MOST_SECONDS:g} seconds"
            )
        if name == "target" and not given[name] > 0:
            raise DraftsimError(f"latency {text!r} gives target={value}, expected > 0 seconds")
    if missing := [name for name in ROLES if name not in given]:
        raise DraftsimError(f"latency {text!r} lacks {' and '.join(missing)}: {form}")
    # One pass each tells nothing of batches: a caller that takes them to be free says so.
    return LatencyTable.constant(**given, batch_free=False)


def _find(name_or_path: PathLike, kind: str, folder: Path) -> Path:
    path = Path(name_or_path)
    # ./NAME is a folder of the user's own.
    named = len(path.parts) == 1 and str(name_or_path) == path.name
    if (
        named and not isinstance(name_or_path, Defaulted)
        and _file(folder / path, kind) is not None and _file(path, kind) is not None
        and not path.samefile(folder / path)
    ):  # fmt: skip
        raise FileError(
            f"{path}: is a bundled recording and a folder here: write ./{path} for the folder, "
            f"{folder / path} for the bundled one"
        )
    for place in (folder / path, path) if named else (path,):
        if (found := _file(place, kind)) is not None:
            return found
    names = [p.name for p in sorted(folder.glob("*")) if _file(p, kind) is not None]
    if not named and len(path.parts) == 1 and not path.exists() and path.name in names:
        raise FileError(
            f"{name_or_path}: no such file here: write {path.name} for the bundled recording"
        )
    if named and not path.exists() and (folder / path).is_dir():
        if kind == "latency" and (alike := _same_pair(name_or_path, names, folder)):
            raise FileError(
                f"the bundled recording {name_or_path} holds acceptance alone: for costs of the "
                f"same pair add --latency {' or '.join(alike)}"
            )
        raise FileError(
            f"the bundled recording {name_or_path} has no {kind}.parquet: name another's "
            f"({', '.join(names) or 'none has one'})"
        )
    # Names hold dots too, but not what ends a file's: h200-llama-3.1-8b+1b-graph.
    if path.exists() or not named or path.suffix[1:].isalpha():
        return path  # the reader says what is wrong with it
    listed = f"the bundled ones are {', '.join(names)}" if names else "none is bundled"
    hint = nearest(str(path), names)
    raise FileError(f"{name_or_path}: no such file and no bundled recording{hint}: {listed}")


def _same_pair(name: PathLike, names: Sequence[str], folder: Path) -> list[str]:
    """Return the recordings among `names` that hold costs of the pair of the trace `name`.

    A head that an engine drafted with is no draft model.
    """
    known = models_of(folder / name, find_trace(name, folder))
    traced = [one for one in names if _file(folder / one, "trace") is not None]
    others = {one: models_of(folder / one, find_trace(one, folder)) for one in traced}
    return [
        one for one, models in others.items()
        if all(same_model(known[role], models[role]) for role in ROLES)
        and engine_head(find_latency(one, folder).meta) is None
    ]  # fmt: skip


def _file(place: Path, kind: str) -> Path | None:
    """Return the file of a recording's folder that holds its trace or latencies, if any."""
    if kind == "trace":
        home = trace_folder(place)
        files = [home / f"{kind}.parquet", home / SAMPLED]
    else:
        files = [place / f"{kind}.parquet"]
    return next((file for file in files if file.is_file()), None)


def pair_label(
    models: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Any], drafter: str = ""
) -> str:
    """Return target and drafter of a recording in a few words, with the engine they ran in.

    ``models`` as in `models_of`, ``measured`` the provenance of its latencies, ``drafter`` the
    source that drafts in the draft model's place.  Empty if no model is known.
    """
    target, draft = (model_label(models.get(role, {})) for role in ROLES)
    size = model_label({"parameters": models.get("draft", {}).get("parameters")})
    if names_of(models.get("target", {})) & names_of(models.get("draft", {})) and size:
        draft = f"draft model {size}"  # one folder holds both
    parts = [part for part in (target, drafter or draft) if part]
    engine = measured.get("engine")
    ran = f" in {engine.get('name')} {engine.get('version')}" if isinstance(engine, dict) else ""
    return " + ".join(parts) + ran if parts else ""


def _summary(folder: Path) -> str:
    """Return pair, size and device; the mode where latencies belong to one."""
    table = folder / "latency.parquet"
    measured = read_latency(table).meta if table.is_file() else {}
    mode = f", {measured['mode']}" if "mode" in measured else ""
    if _file(folder, "trace") is None:
        named = pair_label({role: model_in(measured, role) for role in ROLES}, measured)
        pair, size = str(measured.get("pair") or named or "?"), "latencies alone"
        device = measured.get("device")
    else:
        trace = find_trace(folder)
        pair = pair_label(models_of(folder, trace), measured, engine_head(measured) or "")
        drawn = "" if trace.sampling.greedy else f", sampled at {trace.sampling.label}"
        size = f"{counted(len(trace.requests), 'request')}, {counted(trace.tokens, 'token')}{drawn}"
        engine = measured.get("engine")
        if not table.is_file():
            size = f"acceptance alone, {size}"
        elif isinstance(engine, dict) and not engine.get("own_drafter"):
            size = f"no drafter was timed, {size}"
        if not pair and "pair" in measured:
            pair, size = str(measured["pair"]), f"dictated verdicts, {size}"
        pair = pair or str(trace.meta.get("kind", "?"))
        device = trace.meta.get("device")
    if "mode" in measured:
        device = device or measured.get("device")
    return f"{pair}{mode}: {size}" + (f", {device}" if device else "")
