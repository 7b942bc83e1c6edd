"""Checks that the arrays of a recording fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from traces.errors import DraftsimError


def check_shapes(
    recording: str, arrays: Mapping[str, tuple[npt.NDArray[Any] | None, tuple[int, ...]]]
) -> None:
    """Raise DraftsimError unless each array that exists has the shape given with it.

    ``recording`` names the recording in the message.
    """
    for name, (values, expected) in arrays.items():
        if values is not None and values.shape != expected:
            raise DraftsimError(
                f"{recording}: {name} has shape {values.shape}, expected {expected}: record it "
                "again"
            )
