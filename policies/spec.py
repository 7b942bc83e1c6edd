"""Parameters of an object: their text form ``name:key=value,key=value``, and their bounds.

A value is a number, an option's name, ``true``/``false``, ``none``, a path, or a JSON
list, as the parameter's annotation says, or its default where it has no annotation.
A parameter is declared with its default and its bounds (`parameter`), which `Checked` checks.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from policies.errors import TextError
from policies.json_text import JSONError, parse_json

ALSO: Mapping[str, tuple[str, ...]] = {"num_speculative_tokens": ("gamma", "gamma_max", "k")}
"""Names of parameters in vLLM and SGLang, each with ours; the first that an object has is meant."""


def parse_spec(
    text: str, kind: str, table: Mapping[str, type], fixed: Collection[str] = ()
) -> tuple[str, Any, dict[str, Any]]:
    """Return name, class and parameters of `text`, typed as the constructor in `table` declares.

    ``kind`` is what messages call the object (``policy``, ``rule``); parameters in
    `fixed` are not the text's to set.

    Raises ValueError for an unknown name or parameter (naming the nearest), or a malformed value.
    """
    name, _, rest = text.strip().partition(":")
    cls = table.get(name)
    if cls is None:
        if kind == "policy" and name.endswith(".py"):
            raise ValueError(f"{name!r} names a file and no policy: write {name}:CLASS")
        raise ValueError(f"unknown {kind} {name!r}{choice(name, table)}")
    known = {k: v for k, v in parameters(cls).items() if k not in fixed}
    given: dict[str, Any] = {}
    for key, value in assignments(rest, f"{kind} {name!r}", known).items():
        where, declared = f"{kind} {name!r}: {key}={value}", _declared(known[key])
        if declared is inspect.Parameter.empty:
            raise ValueError(
                f"{where}: the constructor declares no type: annotate it, as in {key}: float = 0.5"
            )
        given[key] = _value(where, declared, value)
    return name, cls, given


def assignments(
    text: str, where: str, keys: Collection[str] | None = None, noun: str = "parameter",
    example: str = "",
) -> dict[str, str]:  # fmt: skip
    """Return the values of a text ``key=value,key=value`` by key.

    Commas inside brackets do not separate.  Only `keys` may be given, if there are any, also by
    other names of them (`ALSO`).  ``where`` begins the error's message, and ``noun`` is what it
    calls a key.  ``example`` is a text of this form, which the message shows.

    Raises TextError for a part of another form, an unknown key, or one that is given twice.

    >>> assignments("gamma=4, weights=[1,0]", "policy")
    {'gamma': '4', 'weights': '[1,0]'}
    """
    found: dict[str, str] = {}
    for item in split_items(text):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            known = f" ({noun}s: {', '.join(keys)})" if keys else ""
            shown = f", as in {example}" if example else ""
            raise TextError(f"{where}: {item!r} is not of the form key=value{known}{shown}")
        key = next((own for own in ALSO.get(key, ()) if own in (keys or ())), key)
        if keys is not None and key not in keys:
            raise TextError(f"{where} has no {noun} {key!r}{choice(key, keys)}")
        if key in found:
            raise TextError(f"{where}: {noun} {key!r} is given twice")
        found[key] = value
    return found


def describe_spec(obj: object, name: str, fixed: Collection[str] = ()) -> str:
    """Return `name` with those parameters of `obj` that differ from their defaults."""
    parts = [
        f"{key}={as_text(value)}"
        for key, declared in parameters(type(obj)).items()
        if key not in fixed
        and (value := getattr(obj, key)) != declared.default
        and isinstance(value, bool | int | float | str | list | tuple | dict | NoneType)
    ]
    return f"{name}:{','.join(parts)}" if parts else name


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters, by name, with resolved annotations."""
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return {}
    try:
        return dict(inspect.signature(cls, eval_str=True).parameters)
    except Exception:  # a name in one annotation that is imported for type checkers alone
        found = inspect.signature(cls).parameters
    return {name: p.replace(annotation=_evaluated(cls, p.annotation)) for name, p in found.items()}


def _evaluated(cls: type, annotation: Any) -> Any:
    """Return the value of `annotation` in the file of `cls`, empty if it cannot be evaluated."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(cls.__init__, "__globals__", {}))  # type: ignore[misc]
    except Exception:
        return inspect.Parameter.empty


def choice(word: str, options: Iterable[str]) -> str:
    """Return the hint of an error message about a word that `options` does not hold."""
    options = list(options)
    if not options:
        return ": it takes none"
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else ":"
    return f"{hint} choose from {', '.join(options)}"


def split_items(text: str) -> list[str]:
    """Split at commas that stand outside brackets."""
    items, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def _declared(given: inspect.Parameter) -> Any:
    """Return the parameter's annotation, or without one the type of its default."""
    if given.annotation not in (inspect.Parameter.empty, Any):
        return given.annotation
    default = given.default
    if isinstance(default, int) and not isinstance(default, bool):
        return int | float  # as 1 may be meant for a share
    if default is None or default is inspect.Parameter.empty:
        return inspect.Parameter.empty
    return type(default)


def _value(where: str, annotation: Any, text: str) -> Any:
    """Return `text` as a value of the declared type; an error message begins with `where`."""
    union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if union else (annotation,)
    if NoneType in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{where}: expected true or false")
    literals = [kind for kind in kinds if get_origin(kind) is Literal]
    options = {as_text(option): option for kind in literals for option in get_args(kind)}
    if options:
        if text in options:
            return options[text]
        raise ValueError(f"{where}{choice(text, options)}")
    if text.startswith(("[", "{")) and str not in kinds:
        try:
            return parse_json(text)
        except JSONError as error:
            raise ValueError(f"{where}: not a JSON list or object ({error})") from None
    for kind, meaning in ((int, "an integer"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                if kind is int and float in kinds:
                    continue
                raise ValueError(f"{where}: expected {meaning}") from None
    if str in kinds:
        return text
    raise ValueError(f"{where}: expected a JSON list such as [1,2,3]")


def as_text(value: Any) -> str:
    """Return a parameter's value as it is written in a text form."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, separators=(",", ":"))
    return str(value)


class Checked:
    """A base of dataclasses whose parameters are checked when an object is made."""

    def __post_init__(self) -> None:
        """Raise ValueError if a `parameter` has an impossible value; the message has the bound."""
        made: Any = self
        for one in fields(made):
            value = getattr(self, one.name)
            if "check" in one.metadata and not (value is None and one.default is None):
                one.metadata["check"](one.name, value, *one.metadata["bounds"])


def parameter(default: Any, check: Callable[..., None], *bounds: Any) -> Any:
    """Return a dataclass field that has to pass ``check(name, value, *bounds)``."""
    return field(default=default, metadata={"check": check, "bounds": bounds})


def whole(name: str, value: Any, low: int, *, none: bool = False) -> None:
    """Require an integer of at least `low` (or None where `none` allows it)."""
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, expected an integer >= {low}")
    if value < low:
        raise ValueError(f"{name} is {value}, expected >= {low}")


def within(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Require a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    if not low <= value <= high:
        bound = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {value}, expected {bound}")


def ratio(name: str, value: Any) -> None:
    """Require a number in (0, 1]."""
    within(name, value, 0, 1)
    if value == 0:
        raise ValueError(f"{name} is {value}, expected above 0 and at most 1")


def one_of(name: str, value: Any, options: Sequence[str]) -> None:
    """Require one of the named options."""
    if value not in options:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(options)}")


def flag(name: str, value: Any) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false")


def ordered(low_name: str, low: float, high_name: str, high: float | None) -> None:
    """Require low <= high (None: no upper bound)."""
    if high is not None and low > high:
        raise ValueError(f"{low_name} is {low}, expected <= {high_name} = {high}")
