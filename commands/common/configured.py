"""Options of commands: shared groups, values from ``--config FILE``, and largest values."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

KINDS = (".yaml", ".yml", ".toml", ".json")
CONFIGURED = "draftsim.configured"
"""Name under which a click context keeps the file of ``--config`` and what it set."""
LEFT_OUT = "draftsim.left_out"
"""Name under which it keeps the options that a file may have although the verb has none of them."""

MOST_BATCH = 65_536
"""Requests that run at a time in one engine."""
MOST_CONTEXT = 100_000_000
"""Tokens in one request's cache."""
MOST_LENGTH = 1024
"""Tokens of one draft."""
MOST = {
    "requests": 10_000_000, "limit": 10_000_000, "tokens": 100_000_000, "replicas": 65_536,
    "max_replicas": 65_536, "max_batch": MOST_BATCH, "engine_batch": MOST_BATCH, "gpus": 65_536,
    "replications": 10_000, "repeats": 10_000, "resamples": 1_000_000, "jobs": 4096,
    "threads": 4096, "max_new_tokens": 1_000_000, "max_gamma": MOST_LENGTH,
    "engine_length": MOST_CONTEXT, "engine_longest": MOST_LENGTH, "always_draft": MOST_LENGTH,
    "always": MOST_LENGTH, "draft_length": MOST_LENGTH, "max_context": MOST_CONTEXT,
    "seed": 2**63 - 1,
}  # fmt: skip
"""Largest value of each whole-number option, by the name of its parameter.

A larger one could use up the machine's memory.
"""
OTHERWISE = 2**31 - 1
"""Largest value of an option that is not in `MOST`."""


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the fields of each parameter that is a dataclass as its options.

    The fields are annotated as options are; one without a default is an option that must be given.
    The class's ``heading``, if it has one, is above them in the command's help.
    """
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        n: p.annotation for n, p in own.parameters.items() if is_dataclass(p.annotation)
    }
    if not groups:
        return command
    options: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name not in groups:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        options += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY,
                default=own.empty if field.default is MISSING else field.default,
                annotation=_under(hints[field.name], getattr(groups[name], "heading", None)),
            )
            for field in fields(groups[name])
        ]  # fmt: skip

    def run(**given: Any) -> None:
        for name, kind in groups.items():
            held = {f.name: given.pop(f.name) for f in fields(kind) if f.name in given}
            given[name] = kind(**held)
        command(**given)

    return _with_options(wraps(command)(run), options)


def _under(annotation: Any, heading: str | None) -> Any:
    """Return the annotation of an option with the heading that it is shown under."""
    if heading is None:
        return annotation
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = option.rich_help_panel or heading
    return Annotated[kind, option]


def _with_options(
    run: Callable[..., None], options: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with an option ``--config FILE`` that sets the other options' defaults."""
    asked = Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", is_eager=True, callback=_taken,
            help="Take options from a YAML, TOML or JSON file, by their names without dashes in "
            "front; what the command line says comes first.",
        ),
    ]  # fmt: skip

    @wraps(command)
    def run(*values: Any, config: Path | None = None, **options: Any) -> None:
        del config  # its options are defaults by now
        command(*values, **options)

    own = inspect.signature(command, eval_str=True).parameters.values()
    option = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=asked
    )
    return _with_options(run, [*own, option])


def _taken(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of the command that is parsed."""
    from difflib import get_close_matches

    from traces.errors import DraftsimError

    if path is None:
        return None
    known = {name.lstrip("-"): p for p in ctx.command.params for name in getattr(p, "opts", ())}
    off = {
        name.lstrip("-"): p
        for p in ctx.command.params for name in getattr(p, "secondary_opts", ())
    }  # fmt: skip
    called = ctx.token_normalize_func or str
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    for name, value in read_config(path).items():
        option = called(name.replace("_", "-"))
        if f"--{option}" in ctx.meta.get(LEFT_OUT, ()):
            continue
        is_off = option in off and isinstance(value, bool)  # no-assisted: true
        parameter = off[option] if is_off else known.get(option)
        if parameter is None and isinstance(value, Mapping):
            raise DraftsimError(f"{path}: {name} is no option: write options without a heading")
        if option == "config":
            raise DraftsimError(f"{path}: {name} is for the command line: a file names no other")
        if parameter is None:
            near = get_close_matches(option, known, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise DraftsimError(f"{path}: {name} is no option of this command{hint}")
        held = str(parameter.name)
        if held in names:
            raise DraftsimError(f"{path}: {names[held]} and {name} are one option: drop one")
        names[held] = name
        defaults[held] = _default(f"{path}: {name}", not value if is_off else value, parameter)
    ctx.default_map = dict(ctx.default_map or {}) | defaults
    ctx.meta[CONFIGURED] = path, defaults
    return path


def _default(where: str, value: Any, parameter: Any) -> Any:
    """Return a value of a file as the command line would give it to `parameter`."""
    from traces.errors import DraftsimError

    if isinstance(value, Mapping):
        raise DraftsimError(f"{where} holds names and values, expected a value or list")
    if value is None:
        raise DraftsimError(f"{where} has no value: give one, or remove the line")
    values = value if isinstance(value, list) else [value]
    flag = getattr(parameter, "is_flag", False)
    if not flag and any(isinstance(one, bool) for one in values):
        raise DraftsimError(f"{where} is true or false, expected a value")
    each = [_text(one) for one in values]
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        return each
    return value if flag else ",".join(each)


def configured_in(error: Any) -> str:
    """Return the file that set the value which a click error is about, and a colon; or nothing."""
    param = getattr(error, "param", None)
    path, defaults = getattr(error.ctx, "meta", {}).get(CONFIGURED, ("", {}))
    given = {arg.partition("=")[0] for arg in sys.argv}
    if param is None or param.name not in defaults or given & {*param.opts}:
        return ""
    return f"{path}: "


def _text(value: Any) -> str:
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list) else str(value)


def read_config(path: Path) -> dict[str, Any]:
    """Return the names and values of a YAML, TOML or JSON file.

    Raises FileError if it cannot be read, is of another kind, or holds anything but names and
    values.
    """
    from policies.json_text import parse_json
    from traces.errors import FileError
    from traces.store.text import read_text

    if path.suffix not in KINDS:
        raise FileError(f"{path}: unknown suffix, expected one of {', '.join(KINDS)}")
    text = read_text(path)
    try:
        if path.suffix == ".toml":
            found: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            found = parse_json(text, _unique)
        else:
            found = _parsed_yaml(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is no {path.suffix[1:].upper()} ({error}): mend it") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise FileError(f"{path}: holds no names and values: write one `option: value` a line")
    return found


def _parsed_yaml(text: str) -> Any:
    """Return the value of a YAML text, in which numbers and dates are text; else ValueError.

    An option reads them as on the command line: to YAML, 1:1.8 is a number of minutes and seconds.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A safe loader that reads all scalars as text, except true, false and null."""

    kept = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in ways if tag in kept]
        for first, ways in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_constructor(
        "tag:yaml.org,2002:map",
        lambda loader, node: _unique(loader.construct_pairs(node, deep=True)),
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return names and values as a mapping; ValueError if a name comes twice, or is no text."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if not isinstance(name, str):
            raise ValueError(f"{name} is not text, as names of options are")
        if name in found:
            raise ValueError(f"{name} comes twice")
        found[name] = value
    return found


def check_most(options: Mapping[str, Any]) -> None:
    """Raise DraftsimError for a whole number beyond `MOST` among values by parameter."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if value > (most := MOST.get(name, OTHERWISE)):
            from traces.errors import DraftsimError

            option = name.replace("_", "-")
            raise DraftsimError(f"--{option} is {value}, expected at most {most}")
