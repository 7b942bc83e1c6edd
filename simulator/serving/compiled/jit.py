"""numba's compiler where it is installed; else functions stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def installed() -> bool:
    """Whether numba is, and takes the numpy that is; loads it."""
    try:
        import_module("numba")
    except ImportError:
        return False
    return True


def jit(function: Function) -> Function:
    """Compile `function` when it is first called; the machine code is kept on disk."""
    if not installed():
        return function
    import numba

    try:
        return cast("Function", numba.njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # neither beside the file nor in the user's cache can anything be written
        return cast("Function", numba.njit(error_model="numpy")(function))
