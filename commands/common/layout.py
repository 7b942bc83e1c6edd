"""Layout of tables for a terminal: where headings, names and lists fold, and which columns fit.

A number is never folded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NAME = 36
"""Characters of a name on one line."""
GAP = 2
"""Blanks between two columns."""
_WORD = r"(?>\[[^\]]*\]|[^:,])"


def in_lines(name: str, width: int = NAME) -> str:
    """`name` on lines of at most `width` where it has places to break; never within a number.

    A name is not broken at its hyphens, so that it can be copied.

    >>> in_lines("spec-verification:beta=5,tau=0.533", 19)
    'spec-verification:\\nbeta=5,tau=0.533'
    """
    return in_parts(re.findall(rf"{_WORD}*[:,]+\s*|{_WORD}+", name), width)


def heading(name: str, width: int) -> str:
    """A column's name on lines of at most `width`, as far as its words allow.

    >>> heading("standard_error", 8)
    'standard_\\nerror'
    """
    return in_parts(re.findall(r"[^\s_]*[\s_]+|[^\s_]+", name), width)


def in_parts(parts: Sequence[str], width: int) -> str:
    """`parts` on lines of at most `width`, broken only between them.

    >>> in_parts(["gamma=5, ", "weights=[1,2,3], ", "beta=1"], 17)
    'gamma=5,\\nweights=[1,2,3],\\nbeta=1'
    """
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def longest(text: str) -> int:
    """Characters of the longest line of `text`."""
    return max(map(len, text.split("\n")))


def blocks(widths: Mapping[str, int], keys: Sequence[str], room: int) -> list[list[str]]:
    """The columns that stand together, in order: `keys` lead every block.

    ``widths`` are the characters that each column needs.  A block takes at most `room`, `GAP`
    between its columns, unless a single column needs more.

    >>> blocks({"policy": 8, "a": 6, "b": 6, "c": 6}, ["policy"], 24)
    [['policy', 'a', 'b'], ['policy', 'c']]
    """
    lead = sum(widths[name] + GAP for name in keys)
    found, taken = [list(keys)], lead
    for name, width in widths.items():
        if name in keys:
            continue
        if taken + width > room and found[-1] != list(keys):
            found.append(list(keys))
            taken = lead
        found[-1].append(name)
        taken += width + GAP
    return found
