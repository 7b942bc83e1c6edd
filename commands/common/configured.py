"""Options of a command from a file: ``--config run.yaml``."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

KINDS = (".yaml", ".yml", ".toml", ".json")


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

    own = inspect.signature(command, eval_str=True)
    option = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=asked
    )
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in own.parameters.items()} | {
        "config": asked
    }
    return run


def _taken(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of the command that is parsed."""
    if path is not None:
        known = {
            option.lstrip("-"): (str(p.name), getattr(p, "multiple", False))
            for p in ctx.command.params for option in getattr(p, "opts", ())
        }  # fmt: skip
        ctx.default_map = dict(ctx.default_map or {}) | _defaults(read_config(path), known, path)
    return path


def _defaults(
    found: Mapping[str, Any], known: Mapping[str, tuple[str, bool]], path: Path
) -> dict[str, Any]:
    """Return values by parameter, as the command line would give them."""
    from difflib import get_close_matches

    from traces.errors import DraftsimError

    defaults: dict[str, Any] = {}
    for name, value in found.items():
        option = name.replace("_", "-")
        if option not in known or option == "config":
            near = get_close_matches(option, known, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise DraftsimError(f"{path}: {name} is no option of this command{hint}")
        parameter, repeated = known[option]
        if isinstance(value, Mapping):
            raise DraftsimError(f"{path}: {name} holds names and values, expected a value or list")
        if value is None:
            raise DraftsimError(f"{path}: {name} has no value: give one, or remove the line")
        each = [_text(v) for v in value] if isinstance(value, list) else [_text(value)]
        defaults[parameter] = (
            each if repeated else value if isinstance(value, bool) else ",".join(each)
        )
    return defaults


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, bool)) else str(value)


def read_config(path: Path) -> dict[str, Any]:
    """Return the names and values of a YAML, TOML or JSON file.

    Raises
    ------
    FileError
        If it cannot be read, is of another kind, or holds anything but names and values.
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
            found = parse_json(text)
        else:
            import yaml

            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is no {path.suffix[1:].upper()} ({error}): mend it") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise FileError(f"{path}: holds no names and values: write one `option: value` a line")
    return found
