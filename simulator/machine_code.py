"""Functions over arrays in machine code, kept on disk where that can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

FOLDER = Path(__file__).parent / "__pycache__" / f"numba-{numba.__version__}"
"""Machine code of this version of numba.  Versions that share a folder delete each other's code,
and an engine's environment often has another version."""


def compiled(function: Function, **how: Any) -> Function:
    """Compile `function` when it is first called; ``how`` are options of `numba.njit`."""
    how = {"error_model": "numpy", **how}
    config: Any = numba.config
    given = config.CACHE_DIR
    config.CACHE_DIR = given or str(FOLDER)
    try:
        return cast("Function", numba.njit(cache=True, **how)(function))
    except RuntimeError:  # neither there nor in the user's cache can anything be written
        return cast("Function", numba.njit(**how)(function))
    finally:
        config.CACHE_DIR = given
