"""Arguments of the four questions in Python: checked, put into lists, and named in messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

Acceptance = str | Sequence[float]
Question = TypeVar("Question", bound=Callable[..., Any])
KINDS: Mapping[str, tuple[str, Any]] = {
    "int": ("a whole number", Integral), "float": ("a number", Real), "str": ("a text", str),
    "bool": ("True or False", bool | np.bool_), "Path": ("a path", Path), "Mode": ("a text", str),
    "Trace": ("a Trace", Trace), "LatencyTable": ("a LatencyTable", LatencyTable),
    "None": ("None", type(None)),
}  # fmt: skip
"""Annotations of arguments that are checked: in words, and as types."""

OURS = {
    "batch": "concurrency", "max_batch": "max_num_seqs", "token_budget": "max_num_batched_tokens",
    "kv_blocks": "num_gpu_blocks", "policy": "policies", "gpu": "gpus",
}  # fmt: skip
"""Parameters by the names of their options, where these differ."""


def as_parameters(message: str, names: Container[str]) -> str:
    """Return `message` with options of the command line as the parameters among `names`.

    Limits of an engine, such as max_batch, are renamed without dashes, too.  Commands, which are in
    backticks, keep theirs.

    >>> as_parameters("give --max-batch or --jobs (`draftsim serve --max-batch`)", ["max_num_seqs"])
    'give max_num_seqs or --jobs (`draftsim serve --max-batch`)'
    """

    def named(option: re.Match[str]) -> str:
        name = (option[1] or option[2]).replace("-", "_")
        return found if (found := OURS.get(name, name)) in names else option[0]

    parts = message.split("`")
    spelled = r"--([a-z][a-z-]*)|\b(max_batch|token_budget|kv_blocks)\b"
    parts[::2] = [re.sub(spelled, named, part) for part in parts[::2]]
    return "`".join(parts)


def checked(question: Question) -> Question:
    """Return `question` such that an argument unlike its annotation is refused in one line.

    A path given for a name counts as its text.  Other annotations than those of `KINDS`, such as
    axes, are left to the question.  Errors and notes name parameters (`as_parameters`).
    """
    signature = inspect.signature(question)

    @wraps(question)
    def asked(*given: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(f"{question.__name__}() {error}") from None
        for name, value in bound.arguments.items():
            expected = str(signature.parameters[name].annotation).split(" | ")
            if not set(expected) <= set(KINDS):
                continue
            kinds = tuple(KINDS[kind][1] for kind in expected)
            if isinstance(value, Path) and Path not in kinds and str in kinds:
                bound.arguments[name] = str(value)
            elif not isinstance(value, kinds) or (
                isinstance(value, bool) and "bool" not in expected
            ):
                words = " or ".join(dict.fromkeys(KINDS[kind][0] for kind in expected))
                raise DraftsimError(f"{name} is {value!r}, expected {words}")
        names = signature.parameters
        try:
            found = question(*bound.args, **bound.kwargs)
        except DraftsimError as error:
            error.args = (as_parameters(str(error), names),)
            raise
        return replace(found, notes=tuple(as_parameters(note, names) for note in found.notes))

    return cast("Question", asked)


def told_acceptance(acceptance: Acceptance | None) -> Acceptance | None:
    """Return acceptance by position as a text, or as numbers (`axis`)."""
    given = acceptance is None or isinstance(acceptance, str)
    return acceptance if given else axis("acceptance", acceptance) or ()


def listed(given: Any) -> list[Any] | None:
    """Return the values of an argument in a list, those of numpy as Python's own; one alone counts.

    None stays None.
    """
    if given is None:
        return None
    given = given.tolist() if isinstance(given, np.ndarray) else given
    many = isinstance(given, Iterable) and not isinstance(given, str)
    return [v.item() if isinstance(v, np.generic) else v for v in (given if many else [given])]


def axis(name: str, given: Any, whole: bool = False, none: bool = False) -> list[Any] | None:
    """Return the numbers of an axis (`listed`); ``none``: None may be one of them.

    DraftsimError if one is no (`whole`) number.
    """
    values = listed(given)
    for value in values or ():
        if value is None and none:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value % 1):
            raise DraftsimError(f"{name} holds {value!r}, expected {'whole ' * whole}numbers")
    if values is None or not whole:
        return values
    return [None if value is None else int(value) for value in values]
