"""Docstrings and defaults as the API page's parser reads them: a griffe extension.

Griffe gives all names of an entry ``a, b:`` the type and default of the first, takes an example
after the last section for a part of that section, and a `policies.spec.parameter` for the
default that it has.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

GROUP = re.compile(r"^(\w+(?:, \w+)+):\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE)
"""Several parameters with one description."""
HEADING = re.compile(r"^\w+\n-{3,}$", re.MULTILINE)
EXAMPLE = re.compile(r"\n\n(?=>>> )")


def for_griffe(text: str) -> str:
    """Return a docstring with an entry for each parameter, and its examples in their own section.

    >>> for_griffe("P.\\n\\nParameters\\n----------\\na, b:\\n    Two.\\n").splitlines()[4:]
    ['a:', '    Two.', 'b:', '    Two.']
    """

    def apart(group: re.Match[str]) -> str:
        return "".join(f"{name}:\n{group[2]}" for name in group[1].split(", "))

    text = GROUP.sub(apart, text if text.endswith("\n") else text + "\n").rstrip("\n")
    if HEADING.search(text) and "Examples\n--------" not in text:
        text = EXAMPLE.sub("\n\nExamples\n--------\n", text, count=1)
    return text


class Docstrings(griffe.Extension):
    """Applies `for_griffe` to every docstring, and gives parameters their defaults."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring is not None:
            obj.docstring.value = for_griffe(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace a parameter that was just read by its default."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "parameter":
            attr.value = attr.value.arguments[0]
