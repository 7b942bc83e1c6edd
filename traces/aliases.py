"""Types that recur: rows and columns of tables, and functions that are told of progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

Row = dict[str, Any]
"""A row of a table, by column."""
Columns = dict[str, npt.NDArray[Any]]
"""Arrays by name: those of one table have a value per row."""
Say = Callable[[str], None]
"""Is told a remark."""
Progress = Callable[[str, int, int], None]
"""Is told what takes long, how much of it is done, and how much there is."""
Count = Callable[[int, int], None]
"""Is told how many parts are done, and of how many."""


def silent(*_: object) -> None:
    """Say nothing."""
