"""The largest number that an option takes: beyond it an answer would end the machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

MOST_BATCH = 65_536
"""Requests that run at a time in one engine."""
MOST_CONTEXT = 100_000_000
"""Tokens in one request's cache."""
MOST_LENGTH = 1024
"""Tokens of one draft."""
MOST = {
    "requests": 10_000_000, "limit": 10_000_000, "tokens": 100_000_000, "replicas": 65_536,
    "max_replicas": 65_536, "max_batch": MOST_BATCH, "engine_batch": MOST_BATCH, "gpus": 65_536,
    "replications": 10_000, "repeats": 10_000, "resamples": 1_000_000, "jobs": 4096,
    "threads": 4096, "max_new_tokens": 1_000_000, "max_gamma": MOST_LENGTH,
    "engine_length": MOST_CONTEXT, "engine_longest": MOST_LENGTH, "always_draft": MOST_LENGTH,
    "always": MOST_LENGTH, "draft_length": MOST_LENGTH, "max_context": MOST_CONTEXT,
    "seed": 2**63 - 1,
}  # fmt: skip
"""Largest value of each whole-number option, by the name of its parameter."""
OTHERWISE = 2**31 - 1
"""Largest value of an option that is not in `MOST`."""


def bounded(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, which refuses whole numbers beyond `MOST` in one line before it does
    anything.
    """

    @wraps(command)
    def checked(*values: Any, **options: Any) -> None:
        for name, value in options.items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if value > (most := MOST.get(name, OTHERWISE)):
                from traces.errors import DraftsimError

                option = name.replace("_", "-")
                raise DraftsimError(f"--{option} is {value}, expected at most {most}")
        command(*values, **options)

    return checked
