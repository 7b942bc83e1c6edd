"""Which run a recording belongs to, and that the files of one folder belong together.

A run has a random id, kept in the provenance of everything it records (``run_id``).  Older files
have none.  They are accepted if the weights' fingerprints and the precision agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from traces.errors import FileError
from traces.store.parquet import read_meta
from traces.store.text import read_object

RUN_ID = "run_id"
SHAPE = ("layers", "hidden_size")
"""Fields that tell two models apart where their weights cannot be compared."""
NAMES = ("name", "id", "model", "path")
ROLES = ("target", "draft")


def identity(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recording's provenance says of its run, by name, as far as known."""
    found = {RUN_ID: meta.get(RUN_ID), "dtype": meta.get("dtype")}
    for role in ROLES:
        about = meta.get(role)
        found[f"{role}'s weights"] = about.get("fingerprint") if isinstance(about, dict) else None
    return {name: value for name, value in found.items() if value is not None}


def model_in(meta: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return everything that provenance says of the model in a role; empty if it names none.

    Some tables describe a model by its fields, others by its name, its shape or a title.
    """
    shape, title = (
        others.get(role) if isinstance(others := meta.get(key), Mapping) else None
        for key in ("shapes", "models")
    )
    found = next((own for own in (meta.get(role), shape, title) if own is not None), "")
    if found == "":
        return {}
    if not isinstance(found, Mapping):
        sizes = {key: shape[key] for key in SHAPE if key in shape} if shape else {}
        found = {**sizes, "name": str(found)}
    return {**found, "dtype": meta.get("dtype")}


def names_of(model: Mapping[str, Any]) -> set[str]:
    """Return the names of a model, without the folders they lie in or what says only its role."""
    found = {PurePath(str(model[key])).name.casefold() for key in NAMES if model.get(key)}
    return found - {"", *ROLES}


def same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool | None:
    """Return whether two descriptions (`model_in`) are of one model; None if they cannot tell.

    Fingerprints decide where both models have the same precision, which changes the weights'
    values; then shapes, then names.
    """
    prints = one.get("fingerprint"), other.get("fingerprint")
    if None not in prints and one.get("dtype") == other.get("dtype"):
        return prints[0] == prints[1]
    shapes = [(one[key], other[key]) for key in SHAPE if one.get(key) and other.get(key)]
    if shapes:
        return all(mine == theirs for mine, theirs in shapes)
    mine, theirs = names_of(one), names_of(other)
    return bool(mine & theirs) if mine and theirs else None


def is_named_by_folder(models: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return True if all that is known of target and draft model is the folder that holds both."""
    target, draft = (models[role] for role in ROLES)
    known = any(model.get(key) for model in (target, draft) for key in ("fingerprint", *SHAPE))
    return not known and bool(names_of(target) & names_of(draft))


def engine_head(meta: Mapping[str, Any]) -> str | None:
    """Return the drafting head that an engine ran while it was measured, by name; None without."""
    engine = meta.get("engine")
    if not isinstance(engine, Mapping) or not engine.get("own_drafter"):
        return None
    return None if engine.get("method") == "draft_model" else PurePath(str(meta["draft"])).name


def model_label(model: Mapping[str, Any]) -> str:
    """Return a model's name and size in a few words; empty if neither is known.

    >>> model_label({"path": "smollm2", "parameters": 134515008})
    'smollm2 135M'
    """
    size = float(model.get("parameters") or 0)
    shown = f"{size / 1e9:.2g}B" if size >= 1e9 else f"{size / 1e6:.3g}M" if size else ""
    named = (PurePath(str(model[key])).name for key in NAMES if model.get(key))
    name = next((text for text in named if text.casefold() in names_of(model)), "")
    return " ".join(filter(None, (name, shown)))


def check_together(metas: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise FileError unless the files named belong to one run, as far as they say."""
    held: dict[str, tuple[str, Any]] = {}
    for file, meta in metas.items():
        for name, value in identity(meta).items():
            other, before = held.setdefault(name, (file, value))
            if before != value:
                what = "runs" if name == RUN_ID else f"runs: the {name} differ"
                raise FileError(
                    f"{other} and {file} are of two {what}: measure again with `draftsim profile "
                    "latency` or record with --force, or name the one meant by its file"
                )


def check_folder(folder: Path, rounds: Sequence[Path] = ()) -> None:
    """Raise FileError unless, by provenance, the files of a run folder are of one run."""
    metas: dict[str, Mapping[str, Any]] = {}
    for name in ("trace", "latency"):
        if (path := folder / f"{name}.parquet").is_file():
            metas[str(path)] = read_meta(path)
    for path in rounds:
        try:
            metas[str(path)] = dict(read_object(path.with_suffix(".json"))["meta"])
        except (FileError, ValueError, TypeError, KeyError):
            continue
    check_together(metas)
