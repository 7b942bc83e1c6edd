"""Axes and families of policies as texts.

`parse_axis` reads numbers, as in ``1,4,16`` or ``0.01:1:100log``; `expand`, `search_space` and
`with_gammas` read families of policies, as in ``fixed:gamma={1..12}``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from policies.from_file import is_file, load_file, split_name
from policies.registry import POLICIES
from policies.spec import assignments, parameters, split_items
from traces.errors import DraftsimError

MOST_POINTS = 100_000
"""An axis longer than this is taken for a slip."""

_RANGE = re.compile(r"^([^:]+):([^:]+):(\d+)(log|lin)?$")
_BRACES = re.compile(r'\{([^{}":]*)\}')
IN_BRACES = "braces give the values of a parameter, as in gamma={1..8}"
_STEPS = re.compile(r"^(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?$")


def parse_axis(
    text: str | None, name: str, *, low: float | None = None, high: float | None = None,
    whole: bool = False,
) -> tuple[float, ...]:  # fmt: skip
    """Return the points that `text` names, in its order and without repetition; none without text.

    ``a:b:N`` is N points evenly from a to b, ``a:b:Nlog`` evenly in the logarithm,
    ``a..b`` or ``a..b..step`` whole numbers, ``a,b,c`` these and ``a`` one.  `whole`
    rounds a range to whole numbers and refuses others.

    Raises DraftsimError if the text is of another form, or a point lies outside [low, high].

    >>> parse_axis("1:8:4log", "c")
    (1.0, 2.0, 4.0, 8.0)
    >>> parse_axis("1..3,8", "gamma", whole=True)
    (1.0, 2.0, 3.0, 8.0)
    """
    points: list[float] = []
    if text is None:
        return ()
    for part in text.split(","):
        points += _points(part.strip(), text, name, whole)
    for value in points:
        if (low is not None and value < low) or (high is not None and value > high):
            bound = f"at least {low:g}" if high is None else f"{low or 0:g} to {high:g}"
            raise DraftsimError(f"--{name} holds {value:.12g}, expected {bound}")
    return tuple(dict.fromkeys(points))


def axis_settings(
    text: str | None, name: str, keys: Collection[str]
) -> tuple[str | None, dict[str, str]]:
    """Return the text of an axis, and the values of `keys` that follow it.

    Raises DraftsimError for other keys, and for keys without an axis.

    >>> axis_settings("0.5:0.9:5,tilt=iid", "alpha", ["tilt"])
    ('0.5:0.9:5', {'tilt': 'iid'})
    """
    items = split_items(text or "")
    points = [item for item in items if "=" not in item]
    given = ",".join(item for item in items if "=" in item)
    found = assignments(given, f"--{name} {text}", keys, "setting")
    if found and not points:
        raise DraftsimError(f"--{name} {text} has no values: write --{name} AXIS,{text}")
    return text if not found else ",".join(points), found


def _points(part: str, text: str, name: str, whole: bool) -> list[float]:
    form = f"expected a:b:N, a:b:Nlog, a..b or a,b,c (--{name} {text!r})"
    if steps := _STEPS.match(part):
        return [float(v) for v in _stepped(steps, part)]
    if span := _RANGE.match(part):
        begin, end = (number(v, form) for v in span.group(1, 2))
        count = int(span.group(3))
        if not 1 <= count <= MOST_POINTS:
            raise DraftsimError(f"{part!r} asks for {count} points, expected 1 to {MOST_POINTS}")
        if span.group(4) == "log":
            if begin <= 0 or end <= 0:
                raise DraftsimError(f"{part!r}: a logarithmic axis needs both ends above 0")
            values = np.geomspace(begin, end, count)
        else:
            values = np.linspace(begin, end, count)
        values = np.round(values) if whole else np.array([float(f"{v:.10g}") for v in values])
        return [float(v) for v in values]
    value = number(part, form)
    if whole and value != int(value):
        raise DraftsimError(f"--{name} {text}: {part} is no whole number")
    return [value]


def expand(texts: Sequence[str]) -> list[str]:
    """Return every policy that `texts` name, with each ``{...}`` replaced by its alternatives.

    ``{1..12}`` counts, ``{1..12..3}`` in steps, ``{0.3,0.5}`` lists.

    Raises DraftsimError if the braces hold neither.

    >>> expand(["fixed:gamma={1..3}", "svip"])
    ['fixed:gamma=1', 'fixed:gamma=2', 'fixed:gamma=3', 'svip']
    """
    found: list[str] = []
    for text in texts:
        pieces = _BRACES.split(text)
        choices = [_alternatives(inner, text) for inner in pieces[1::2]]
        for chosen in product(*choices):
            filled = [pieces[0]]
            for value, after in zip(chosen, pieces[2::2], strict=True):
                filled += [value, after]
            found.append("".join(filled))
    return list(dict.fromkeys(found))


def search_space(text: str) -> tuple[str, dict[str, list[str]]]:
    """Return a policy without its ``{...}``, and the values that these give its parameters.

    Raises DraftsimError if the braces hold neither a range nor a list, or are not a parameter's
    value.

    >>> search_space("gammatune:gamma=4,eta={0.1,0.3}")
    ('gammatune:gamma=4', {'eta': ['0.1', '0.3']})
    """
    name, given = split_name(text)
    fixed: list[str] = []
    space: dict[str, list[str]] = {}
    where = f"policy {text!r}"
    if any(part.startswith("{") for part in split_items(given)):
        raise DraftsimError(f"{where}: {IN_BRACES}")
    for key, value in assignments(given, where).items():
        if braces := _BRACES.fullmatch(value):
            space[key] = _alternatives(braces.group(1), text)
        elif "{" in value:
            raise DraftsimError(f"{where}: {IN_BRACES}")
        else:
            fixed.append(f"{key}={value}")
    return name + (":" + ",".join(fixed) if fixed else ""), space


def with_gammas(texts: Sequence[str], gammas: Sequence[int]) -> list[str]:
    """Return `texts`, those of policies with a parameter gamma they do not set once per gamma.

    Raises DraftsimError if no policy has one.
    """
    found: list[str] = []
    for text in texts:
        name, rest = split_name(text)
        takes = parameters(POLICIES[name]) if name in POLICIES else {}
        if is_file(text):
            try:
                takes = parameters(type(load_file(name).policy))
            except ValueError as error:
                raise DraftsimError(str(error)) from None
        if "gamma" not in takes or "gamma" in assignments(rest, f"policy {text!r}"):
            found.append(text)
        else:
            found += [f"{text}{',' if rest else ':'}gamma={g}" for g in gammas]
    if found == list(texts):
        raise DraftsimError(
            f"--gamma: none of {', '.join(texts)} has a parameter gamma that is left unset"
        )
    return found


def _alternatives(inner: str, text: str) -> list[str]:
    if steps := _STEPS.match(inner.strip()):
        return [str(v) for v in _stepped(steps, text)]
    values = [v.strip() for v in inner.split(",")]
    if "" in values:
        raise DraftsimError(f"policy {text!r}: {{{inner}}} is neither {{a..b}} nor {{a,b,c}}")
    return values


def _stepped(match: re.Match[str], text: str) -> list[int]:
    begin, end, step = int(match.group(1)), int(match.group(2)), int(match.group(3) or 1)
    if end < begin or step < 1:
        raise DraftsimError(f"{text!r}: {match.group(0)} counts from {begin} up to {end} by {step}")
    if (end - begin) // step >= MOST_POINTS:
        raise DraftsimError(f"{text!r} asks for more than {MOST_POINTS} points")
    return list(range(begin, end + 1, step))


def number(text: str, form: str) -> float:
    """Return the finite number that `text` is; DraftsimError, which ends with `form`, if none."""
    try:
        value = float(text)
    except ValueError:
        raise DraftsimError(f"{text!r} is no number: {form}") from None
    if not np.isfinite(value):
        raise DraftsimError(f"{text!r} is not finite: {form}")
    return value
