"""What a service promises: how long a request may wait, and which share of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from traces.errors import DraftsimError

NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "p": "share"}
"""Fields of `Targets` by the names of the command line."""


@dataclass(frozen=True)
class Targets:
    """A share of the requests gets the first token and the mean of the others in time.

    Parameters
    ----------
    ttft_s:
        Seconds to the first token.
    tpot_s:
        Seconds per output token behind it, in the mean of a request.
    share:
        Of the requests, how many must meet both.

    Raises
    ------
    DraftsimError
        For impossible values, or where nothing is bounded.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    share: float = 0.95

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise DraftsimError(f"{name} is {getattr(self, name)}, expected > 0 seconds")
        if not 0 < self.share <= 1:
            raise DraftsimError(f"share is {self.share}, expected above 0, at most 1")
        if math.isinf(self.ttft_s) and math.isinf(self.tpot_s):
            raise DraftsimError("the targets bound nothing: give ttft, tpot or both")


def parse_targets(text: str) -> Targets:
    """Targets from ``ttft=0.5,tpot=0.05,p=0.95`` (seconds; p defaults to 0.95).

    Raises
    ------
    DraftsimError
        Naming what is wrong with the text.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (s.strip() for s in part.partition("="))
        if name not in NAMES or not equals:
            raise DraftsimError(f"--slo {text}: {part!r} is none of ttft=S, tpot=S, p=SHARE")
        if NAMES[name] in found:
            raise DraftsimError(f"--slo {text}: {name} stands there twice")
        try:
            found[NAMES[name]] = float(value)
        except ValueError:
            raise DraftsimError(f"--slo {text}: {name} is {value!r}, expected a number") from None
    try:
        return Targets(**found)
    except DraftsimError as error:
        raise DraftsimError(f"--slo {text}: {error}") from None
