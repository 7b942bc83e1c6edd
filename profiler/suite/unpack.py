"""Unpacking of the stages' results into a folder per pair and mode, like bundled recordings."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.errors import DraftsimError, FileError
from traces.latency.table import LatencyTable
from traces.store.engine_runs import MeasuredRuns, read_measured, write_measured
from traces.store.files import read_latency, write_latency
from traces.store.recordings import ELSEWHERE, SAMPLED
from traces.store.text import read_object
from traces.store.writing import write_atomically

STAGES = {
    "latency": ("latency.parquet", None, None),
    "forced": (None, "forced-measured.parquet", "forced-trace.parquet"),
    "trained": ("trained-latency.parquet", "trained-measured.parquet", "trained-trace.parquet"),
}
"""Per stage its latency table, its measured runs, and the trace they belong to."""


def unpack(out: Path, into: Path) -> list[Path]:
    """Write ``<into>/<device>-<pair>-<mode>/`` with latency, trace, measured and provenance.

    A trace that several pairs or modes have in common is stored once. The names of miniatures
    (``--quick``) say that they are.
    `out` holds the files of one stage or more, or a folder per stage.  Returns the folders.

    Raises DraftsimError if there is nothing of the suite in `out`, a file is damaged, or a folder
    would get results of two devices, dtypes or versions of torch.
    """
    found = [
        (stage, folder, read_object(folder / f"{stage}.json"))
        for folder in (out, *sorted(p for p in out.glob("*") if p.is_dir()))
        for stage in STAGES if (folder / f"{stage}.json").is_file()
    ]  # fmt: skip
    if not found:
        raise DraftsimError(
            f"{out} holds no results of profiler.suite: run a stage with --out {out}"
        )
    made: dict[Path, None] = {}
    for stage, folder, results in found:
        latency, measured, trace = STAGES[stage]
        setting = _setting(folder / f"{stage}.json", results)
        device = device_name(results["meta"])
        units: set[tuple[str, str]] = set()
        if latency and (folder / latency).is_file():
            table = read_latency(folder / latency)
            for pair, mode in sorted({tuple(m.split("/")[:2]) for m in table.cells["model"]}):
                place = _folder(into / f"{device}-{pair}-{mode}", setting, made)
                write_latency(tables_of(table, pair, mode), place / "latency.parquet")
                units.add((pair, mode))
        if measured and (folder / measured).is_file():
            runs = read_measured(folder / measured)
            for (pair, mode), part in runs.times.groupby(["pair", "mode"]):
                place = _folder(into / f"{device}-{pair}-{mode}", setting, made)
                times = part.drop(columns=["pair", "mode"]).reset_index(drop=True)
                write_measured(MeasuredRuns(times, runs.meta), place / "measured.parquet")
                units.add((str(pair), str(mode)))
        for pair, mode in sorted(units):
            place = into / f"{device}-{pair}-{mode}"
            _provenance(place, stage, results, f"{pair}.{mode}")
            # A drafter's pair has a trace of its own.
            own = results.get("drafters", {}).get(pair, {}).get("trace")
            files = {"trace.parquet": own or trace, SAMPLED: None if own else f"{stage}-{SAMPLED}"}
            laid = {n: folder / f for n, f in files.items() if f and (folder / f).is_file()}
            if "trace.parquet" in laid:
                _place_trace(laid, device, place)
    return list(made)


def _place_trace(files: Mapping[str, Path], device: str, place: Path) -> None:
    """Copy a trace to `place`, and the `files` that belong to it.

    If another folder of the `device` holds the same trace (the other mode's does), that one is
    named instead (`traces.store.recordings.ELSEWHERE`): traces are most of a recording's bytes.
    """
    for name in ("trace.parquet", SAMPLED, ELSEWHERE):
        (place / name).unlink(missing_ok=True)
    content = files["trace.parquet"].read_bytes()
    for other in sorted(place.parent.glob(f"{device}-*/trace.parquet")):
        if other.read_bytes() == content:
            text = json.dumps({"trace": other.parent.name})
            write_atomically(place / ELSEWHERE, text.encode())
            return
    for name, source in files.items():
        shutil.copyfile(source, place / name)


def tables_of(table: LatencyTable, pair: str, mode: str) -> LatencyTable:
    """Return one pair's table of a mode, its models named as usual."""
    prefix = f"{pair}/{mode}/"
    own = table.cells[table.cells["model"].str.startswith(prefix)].copy()
    own["model"] = own["model"].str.removeprefix(prefix)
    shapes = table.meta.get("shapes", {}).get(pair, {})
    kernels = table.meta.get("kernels", {}).get(mode)
    meta = {**table.meta, "pair": pair, "mode": mode, "shapes": shapes, "kernels": kernels}
    return LatencyTable(own.reset_index(drop=True), meta)


def device_name(meta: dict[str, Any]) -> str:
    """Return a short name for file paths: "NVIDIA H200" -> "h200"; miniatures end in "-quick".

    >>> device_name({"device": "NVIDIA A100-SXM4-80GB"})
    'a100-sxm4-80gb'
    """
    text = str(meta.get("device", "device")).lower().removeprefix("nvidia ")
    name = re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:24]
    return f"{name}-quick" if meta.get("quick") else name


def _setting(path: Path, results: Any) -> list[str]:
    """Return device, dtype and version of torch of results, which the file at `path` holds."""
    try:
        meta = dict(results["meta"])
        torch = dict(meta.get("versions", {})).get("torch")
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged ({error}): run the stage or unpack again") from None
    return [str(meta.get("device")), str(meta.get("dtype")), f"torch {torch}"]


def _folder(place: Path, setting: list[str], made: dict[Path, None]) -> Path:
    """Make the folder `place`; DraftsimError if it holds what was measured in another setting."""
    path = place / "provenance.json"
    for results in (read_object(path) if path.is_file() else {}).values():
        if (other := _setting(path, results)) != setting:
            raise DraftsimError(
                f"{place} holds results of {', '.join(other)}, and --out has some of "
                f"{', '.join(setting)}: unpack --into another folder"
            )
    place.mkdir(parents=True, exist_ok=True)
    made[place] = None
    return place


def _provenance(place: Path, stage: str, results: dict[str, Any], unit: str) -> None:
    """Add a stage's account of the unit to ``provenance.json``."""
    path = place / "provenance.json"
    kept = read_object(path) if path.is_file() else {}
    units = results.get("units", {})
    own = {name: value for name, value in units.items() if name.startswith(unit)}
    shared = {k: v for k, v in results.items() if k != "units"}
    kept[stage] = {**shared, "units": own}
    write_atomically(path, json.dumps(kept, indent=1).encode())
