"""Parts of the pages that are read from the code, so that they cannot go stale.

Each function returns Markdown; `MAKERS` are the names that a page can ask for, in a line like
``{{ columns trace }}`` (see `docs.hooks`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

from commands import app, catalogue
from docs.engine_tables import (
    check_errors,
    engine_checks,
    engine_load,
    over_defaults,
    over_http,
    server_checks,
    stepped,
)
from docs.gpu_tables import measured_gpu, measured_gpu_errors
from docs.llamacpp_tables import llamacpp_counts
from docs.lossy_tables import lossy_rules
from docs.operator_tables import held_against, paper_settings
from docs.outputs import output
from docs.pair_tables import ladder
from docs.paper_tables import order_of_systems
from docs.question_tables import questions
from docs.reading import as_markdown, attribute_docs, code, first_line, string_behind, table
from docs.server_tables import (
    server_confirmed,
    server_left_out,
    server_outside,
    server_terms,
    server_widths,
)
from policies.core import Round
from policies.guard import SIGNALS
from traces.acceptance.trace import COLUMNS, SIGNAL_COLUMNS, Request
from traces.latency.table import CELL_COLUMNS, PHASES
from traces.operators.table import OPERATOR_COLUMNS, OPERATORS
from traces.replay.calls import CALL_DTYPE, CALL_KINDS
from traces.replay.rounds import ROUND_DTYPE
from traces.sources.exit_recording import NODE_COLUMNS
from traces.sources.methods import METHODS
from traces.store.outputs import Output
from traces.store.parquet import KINDS

ROOT = Path(__file__).resolve().parent.parent


def columns(kind: str) -> str:
    """Return the columns of a file, with types, meanings and units."""
    schemas = {"trace": COLUMNS, "latency": CELL_COLUMNS, "operators": OPERATOR_COLUMNS}
    if kind in schemas:
        found = schemas[kind]
        return table(
            ("column", "type", "meaning"), [(code(n), t, what) for n, (t, what) in found.items()]
        )
    if kind == "rounds":
        said = {"request": "index into the header's requests", **attribute_docs(Round)}
        types = [(name, ROUND_DTYPE[name].name) for name in ROUND_DTYPE.names or ()]
        return table(("column", "type", "meaning"), [(code(n), t, said[n]) for n, t in types])
    if kind == "calls":
        return table(
            ("field", "type"), [(code(n), CALL_DTYPE[n].name) for n in CALL_DTYPE.names or ()]
        )
    if kind == "nodes":
        return table(("column", "type"), [(code(n), t) for n, t in NODE_COLUMNS.items()])
    if kind in ("requests", "outputs"):
        row: Any = Request if kind == "requests" else Output
        said = attribute_docs(row)
        return table(
            ("field", "type", "meaning"),
            [(code(f.name), f.type, said.get(f.name, "")) for f in fields(row)],
        )
    raise KeyError(kind)


def kinds() -> str:
    """Return the kinds of recordings."""
    return table(("kind", "holds"), [(code(name), what) for name, what in KINDS.items()])


BOUNDS = (
    "traces.store.text:MOST_BYTES", "policies.json_text:MOST_DEPTH",
    "policies.json_text:MOST_DIGITS", "traces.acceptance.trace:MOST_DRAFTED",
    "traces.acceptance.trace:MOST_TOKENS", "traces.store.text:MOST_COUNT",
    "traces.store.text:MOST_SECONDS", "simulator.serving.arrivals:MOST_S",
)  # fmt: skip


def bounds() -> str:
    """Return the bounds of what is read from a file."""
    rows = []
    for module, _, name in (where.partition(":") for where in BOUNDS):
        value = getattr(importlib.import_module(module), name)
        rows.append((f"{value:,.0f}", string_behind(module, name)))
    return table(("at most", "of what"), rows)


def phases() -> str:
    """Return the phases of a latency table."""
    rows = []
    for name, phase in PHASES.items():
        model, other, again = phase.instead or ("", "", "")
        instead = " ".join(map(code, filter(None, (other or model, again))))
        rows.append((code(name), phase.what, code(phase.timed) if phase.timed else "", instead))
    return table(("phase", "what was timed", "timed in", "read instead"), rows)


def operators() -> str:
    """Return the operators of an operator table."""
    return table(("operator", "what was timed"), [(code(n), t) for n, t in OPERATORS.items()])


def calls() -> str:
    """Return the kinds of calls of sources other than a draft model."""
    rows = [(i, code(model), code(phase)) for i, (model, phase) in enumerate(CALL_KINDS)]
    return table(("kind", "model", "phase"), rows)


def signals() -> str:
    """Return the draft signals, what they are, and the columns they are computed from."""
    from policies.core import DraftToken

    said = attribute_docs(DraftToken)
    rows = [(code(n), said[n], ", ".join(map(code, SIGNAL_COLUMNS[n]))) for n in SIGNALS]
    return table(("signal", "meaning", "columns of the trace"), rows)


def row_columns(where: str) -> str:
    """Return the columns in a tuple ``module:NAME``, and what the string after it says of them."""
    module, _, name = where.partition(":")
    names = getattr(importlib.import_module(module), name)
    return ", ".join(map(code, names)) + ".\n\n" + string_behind(module, name)


def printed_columns() -> str:
    """Return the columns that commands print, with their meanings."""
    from commands.common.columns import COLUMNS

    return table(("column", "meaning"), [(code(n), what) for n, what in COLUMNS.items()])


def served() -> str:
    """Return the columns of a row of `serve`, from two requests served."""
    from policies.lengths.basic import Fixed
    from simulator.serving import ClosedLoop, Scenario, simulate
    from traces.acceptance.synthetic import synthetic_trace
    from traces.latency.table import LatencyTable

    trace = synthetic_trace(0.7, requests=2, tokens=4, seed=0)
    scenario = Scenario(ClosedLoop(1), requests=2)
    row = simulate(trace, LatencyTable.constant(0.01, 0.001), Fixed(2), scenario).row()
    return ", ".join(map(code, row)) + "."


def string(where: str) -> str:
    """Return the string after ``module:NAME``."""
    module, _, name = where.partition(":")
    return string_behind(module, name)


def docstring(where: str) -> str:
    """Return the docstring of ``module:Name.attribute``; of ``module:`` without its head.

    On a page it begins with what is returned: no "Return".
    """
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    text = as_markdown(inspect.getdoc(found) or "")
    text = re.sub(r"^Return (.)", lambda begun: begun[1].upper(), text)
    return text if path else text.partition("\n\n")[2]


def catalogued(kind: str) -> str:
    """Return what `draftsim list` shows: policies, rules, sources or formats."""
    if kind == "formats":
        return table(
            ("format", "what writes it", "options"),
            [(code(r["name"]), r["what"], r["options"]) for r in catalogue.format_rows()],
        )
    found: list[dict[str, Any]] = {
        "policies": catalogue.policy_rows, "rules": catalogue.rule_rows,
        "sources": catalogue.source_rows,
    }[kind]()  # fmt: skip
    return table(
        ("name", "what", "parameters"),
        [
            (code(r["name"]), _with_paper(r["what"], r["paper"]), parameters(r["parameters"]))
            for r in found
            if r.get("kind") != "system"
        ],
    )


def _with_paper(what: str, paper: str) -> str:
    """Return `what` with the paper in brackets, unless it names it already."""
    known = paper in ("", "-") or all(p.casefold() in what.casefold() for p in paper.split(", "))
    return what if known else f"{what} ({paper})"


def routers() -> str:
    """Return the routers of `serve` and `capacity`, and what they do."""
    from simulator.serving import ROUTERS

    rows = [
        (code(name), (inspect.getdoc(kind) or "").partition("\n")[0])
        for name, kind in ROUTERS.items()
    ]
    return table(("router", "who takes a request"), rows)


def parameters(given: Iterable[Mapping[str, Any]]) -> str:
    """Return parameters with their defaults, as code."""
    from policies.spec import as_text

    return ", ".join(
        code(p["name"] if p["needed"] else f"{p['name']}={as_text(p['default'])}") for p in given
    ) or "–"  # fmt: skip


def methods() -> str:
    """Return the named methods, each a source, a length policy and a rule."""
    return table(
        ("method", "source", "policy", "rule", "what"),
        [
            (code(name), code(m.source), code(m.policy), code(m.rule), m.what)
            for name, m in METHODS.items()
        ],
    )


def commands() -> str:
    """Return what ``--help`` says of every command."""
    found: Mapping[str, Any] = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
    parts = []
    for name, command in found.items():
        parts.append(f"## {name}\n\n{usage(name, command)}")
        verbs: Mapping[str, Any] = getattr(command, "commands", {})
        # The help of a command shows its first verb's, too.
        parts += [f"### {name} {v}\n\n{usage(f'{name} {v}', verbs[v])}" for v in [*verbs][1:]]
    return "\n\n".join(parts)


def usage(name: str, command: Any) -> str:
    """Return the help of a command, or of a verb of one, as printed."""
    width = {"terminal_width": 92, "max_content_width": 92}
    context = command.context_class(command, info_name=f"draftsim {name}", **width)
    return f"```text\n{command.get_help(context)}\n```"


def modules(package: str) -> str:
    """Return every module of a folder, then of its sub-folders, with its docstring's first line."""
    folders = [ROOT / package, *sorted(p.parent for p in (ROOT / package).glob("*/__init__.py"))]
    parts = []
    for folder in folders:
        name = folder.relative_to(ROOT).as_posix()
        lines = [
            (code(path.name), first_line(path))
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
        said = first_line(folder / "__init__.py")
        parts.append(f"### {name}/\n\n{said}\n\n{table(('module', 'what it is'), lines)}")
    return "\n\n".join(parts)


def rooms(package: str) -> str:
    """Return the folders below a folder, a line each."""
    found = sorted((ROOT / package).glob("*/**/__init__.py"))
    rooms = [(code(f"{path.parent.relative_to(ROOT)}/"), first_line(path)) for path in found]
    return table(("folder", "what it is for"), rooms)


def readme(part: str) -> str:
    """Return the part of README.md between ``<!-- part -->`` and ``<!-- end of part -->``.

    Its links to pages are those of a page in the same folder.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {part} -->\n(.*?)<!-- end of {part} -->", text, re.DOTALL)
    if found is None:
        raise KeyError(part)
    return found[1].strip().replace("](docs/", "](")


def api(where: str) -> str:
    """Return the names of ``module:Name,Name`` for mkdocstrings to describe."""
    module, _, names = where.partition(":")
    return "\n\n".join(f"::: {module}.{name}" for name in names.split(","))


def formulas() -> str:
    """Return the functions of every module of closed forms."""
    import simulator.formulas

    parts = []
    for name in simulator.formulas.__all__:
        module = importlib.import_module(f"simulator.formulas.{name}")
        own = [
            n for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__ and n[0] != "_"
        ]  # fmt: skip
        said = as_markdown((inspect.getdoc(module) or "").partition("\n\n")[0])
        parts.append(f"**{name}**: {said}\n\n{api(f'{module.__name__}:{chr(44).join(own)}')}")
    return "\n\n".join(parts)


def equivalents() -> str:
    """Return mutants of the core that make no difference, and why."""
    file = ROOT / "benchmarks" / "mutants" / "equivalent.toml"
    known = tomllib.loads(file.read_text(encoding="utf-8"))["equivalent"]
    return table(
        ("file", "change", "why it makes no difference"),
        [(code(e["path"]), " ".join(map(code, e["change"])), e["why"]) for e in known],
    )


MAKERS: Mapping[str, Callable[..., str]] = {
    "api": api, "bounds": bounds, "calls": calls, "catalogued": catalogued, "columns": columns,
    "commands": commands, "docstring": docstring, "engine_checks": engine_checks,
    "check_errors": check_errors,
    "engine_load": engine_load, "equivalents": equivalents, "formulas": formulas,
    "held_against": held_against, "kinds": kinds, "ladder": ladder,
    "llamacpp_counts": llamacpp_counts, "lossy_rules": lossy_rules, "measured_gpu": measured_gpu,
    "measured_gpu_errors": measured_gpu_errors, "methods": methods,
    "server_confirmed": server_confirmed, "server_left_out": server_left_out,
    "server_outside": server_outside, "server_terms": server_terms,
    "server_widths": server_widths,
    "modules": modules, "operators": operators, "order_of_systems": order_of_systems,
    "output": output, "over_defaults": over_defaults, "over_http": over_http,
    "paper_settings": paper_settings,
    "phases": phases, "printed_columns": printed_columns, "questions": questions,
    "readme": readme, "rooms": rooms, "routers": routers, "row_columns": row_columns,
    "served": served, "server_checks": server_checks, "signals": signals,
    "stepped": stepped, "string": string,
}  # fmt: skip
