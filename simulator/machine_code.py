"""Functions over arrays in machine code, kept on disk where that can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **how: Any) -> Function:
    """Compile `function` when it is first called; ``how`` are options of `numba.njit`."""
    how = {"error_model": "numpy", **how}
    try:
        return cast("Function", numba.njit(cache=True, **how)(function))
    except RuntimeError:  # neither next to the file nor in the user's cache can anything be written
        return cast("Function", numba.njit(**how)(function))
