"""``draftsim list``: recordings, devices, and every policy, rule and source with its parameters.

A class describes itself: its constructor gives parameters and defaults, ``reads`` the signals, its
docstring the source.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin

from commands.common.output import JsonOption, OutOption, emit
from commands.common.printed import print_entries


def recordings(out: OutOption = None, json: JsonOption = None) -> None:
    """Show the bundled recordings."""
    from traces.store.recordings import recordings

    emit("list", [{"name": r.name, "summary": r.summary} for r in recordings()], json, out=out)


def policies(out: OutOption = None, json: JsonOption = None) -> None:
    """Show length policies and their parameters."""
    _show_entries(policy_rows(), out, json)


def rules(out: OutOption = None, json: JsonOption = None) -> None:
    """Show verification rules and their parameters."""
    _show_entries(rule_rows(), out, json)


def sources(out: OutOption = None, json: JsonOption = None) -> None:
    """Show draft sources, and the named methods that combine one with a policy."""
    _show_entries(source_rows(), out, json)


def formats(out: OutOption = None, json: JsonOption = None) -> None:
    """Show the logs that `draftsim import` reads."""
    emit("list", format_rows(), json, out=out)


def devices(out: OutOption = None, json: JsonOption = None) -> None:
    """Show GPUs, and what is measured, composed or a roofline on each.

    --out and --json also have the sources of the data sheets.
    """
    from traces.operators.devices import DEVICES
    from traces.store.operators import coverage

    rows = [{"name": name, **coverage(name), **asdict(device)} for name, device in DEVICES.items()]
    show = ["name", "latencies", "measured", "composed", "bandwidth", "flops", "memory"]
    emit("list", rows, json, show=show, out=out)


def weight_formats(out: OutOption = None, json: JsonOption = None) -> None:
    """Show weight formats that latencies are extrapolated to."""
    from simulator.hardware.roofline import FORMATS

    emit("list", [asdict(form) for form in FORMATS.values()], json, out=out)


def published(out: OutOption = None, json: JsonOption = None) -> None:
    """Show the roofline model against published times."""
    from simulator.hardware.record import check_published, predicted_runs
    from simulator.published import GAMMATUNE

    rows = [{str(k): v for k, v in row.items()} for row in check_published().to_dict("records")]
    rows += [
        {
            "table": f"{one.study.name}, ms", "row": f"{one.label}", "device": one.run.device,
            "published": 1e3 * one.run.seconds, "ours": 1e3 * one.seconds, "error": one.error,
            "kind": one.given,
        }
        for mode in ("eager", "graph") for one in predicted_runs(mode)
        if one.study is not GAMMATUNE  # as the paper's table, above
    ]  # fmt: skip
    emit("list", rows, json, out=out)


def columns(out: OutOption = None, json: JsonOption = None) -> None:
    """Show what every printed column means."""
    from commands.common.columns import COLUMNS

    rows = [{"name": name, "what": text.replace("`", "")} for name, text in COLUMNS.items()]
    emit("list", rows, json, out=out)


def _show_entries(rows: Sequence[Mapping[str, Any]], out: Path | None, json: str | None) -> None:
    """Print what describes itself as entries of a glossary."""
    emit("list", rows, json, out=out, printed=partial(print_entries, map(_entry, rows)))


def _described(
    name: str, cls: type, fixed: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> dict[str, Any]:
    """Return the row of a policy, rule or source; ``fixed`` are parameters that a preset sets."""
    preset = "".join(f"; {key}={value}" for key, value in fixed.items())
    return {
        "name": name, "parameters": parameter_rows(cls, fixed), **more, "paper": papers_of(cls),
        "what": summary(cls) + preset,
    }  # fmt: skip


def policy_rows() -> list[dict[str, Any]]:
    """Return every length policy."""
    from policies.batch.base import BatchPolicy
    from policies.registry import POLICIES

    return [
        _described(
            name, cls, reads=", ".join(signals(cls)) or "-",
            kind="batch" if issubclass(cls, BatchPolicy) else "request",
            learns=bool(getattr(cls, "learns_across_requests", False)),
        )
        for name, cls in POLICIES.items()
    ]  # fmt: skip


def rule_rows() -> list[dict[str, Any]]:
    """Return every verification rule."""
    from policies.rules.registry import PRESETS, RULES

    return [
        _described(
            name, cls, PRESETS.get(name, {}), reads=", ".join(getattr(cls, "reads", ())) or "-",
            lossless=bool(cls.lossless),
        )
        for name, cls in RULES.items()
    ]  # fmt: skip


def source_rows() -> list[dict[str, Any]]:
    """Return every draft source, and the named methods that combine one with a policy."""
    from traces.sources.registry import SOURCES, SYSTEMS

    return [_described(name, cls, kind="source") for name, cls in SOURCES.items()] + [
        {
            "name": name, "parameters": [], "kind": "system", "paper": _ids(system.what),
            "what": f"{system.what} = {system.source} x {system.policy}",
        }
        for name, system in SYSTEMS.items()
    ]  # fmt: skip


def format_rows() -> list[dict[str, Any]]:
    """Return every format of `draftsim import`."""
    from traces.importers.registry import IMPORTERS

    return [
        {
            "name": i.name, "what": i.summary,
            "options": ", ".join(f"--{o.replace('_', '-')}" for o in i.takes) or "-",
        }
        for i in IMPORTERS.values()
    ]  # fmt: skip


def parameter_rows(cls: type, fixed: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Name, default and values of what a text can set of `cls`."""
    from policies.spec import parameters

    rows = []
    for name, parameter in parameters(cls).items():
        if name in fixed or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is inspect.Parameter.empty
        default = None if needed else parameter.default
        plain = isinstance(default, bool | int | float | str | list | tuple | dict | NoneType)
        rows.append(
            {
                "name": name,
                "default": default if plain else str(default),
                "needed": needed,
                "values": _options(parameter.annotation),
            }
        )
    return rows


def _options(annotation: Any) -> str:
    kinds = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Literal:
        kinds = (annotation,)
    parts = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            parts += [str(option) for option in get_args(kind)]
        elif kind is NoneType:
            parts.append("none")
        else:
            parts.append(getattr(kind, "__name__", str(kind)))
    return " | ".join(parts)


def _entry(row: Mapping[str, Any]) -> tuple[str, list[list[str]]]:
    """Return a row's name, and what is said of it, in parts that stay whole."""
    from policies.spec import as_text

    parameters = [
        p["name"] if p["needed"] else f"{p['name']}={as_text(p['default'])}"
        for p in row["parameters"]
    ]
    behind = [f"reads {row['reads']}"] if row.get("reads", "-") != "-" else []
    if row["paper"] != "-" and any(one not in row["what"] for one in row["paper"].split(", ")):
        behind.append(row["paper"])
    paragraphs = [
        [f"{word} " for word in row["what"].split()],
        [*(f"{one}, " for one in parameters[:-1]), *parameters[-1:]],
        [f"{word} " for word in "; ".join(behind).split()],
    ]
    return row["name"], list(filter(None, paragraphs))


def signals(cls: type) -> tuple[str, ...]:
    """Return the draft signals that a policy reads as it comes."""
    try:
        return tuple(cls().reads)
    except (TypeError, ValueError):
        return tuple(getattr(cls, "reads", ()))


def papers_of(cls: type) -> str:
    """Return the arXiv numbers in a class's or module's docstring, else the summary's source."""
    module = inspect.getmodule(cls)
    for text in (cls.__doc__, module.__doc__ if module else None):
        if (ids := _ids(text)) != "-":
            return ids
    named = re.findall(r"\(([^()]*[A-Z][^()]*)\)", summary(cls))
    return named[-1] if named else "-"


def _ids(text: str | None) -> str:
    return ", ".join(dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", text or ""))) or "-"


def summary(cls: type) -> str:
    """Return the first sentence of a class's docstring, with the source that it names."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    return re.sub(r"\s+", " ", text).replace("`", "").removesuffix(".")
