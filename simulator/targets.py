"""Service-level objectives: how long a request may wait, and the share of requests that must."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from policies.spec import assignments
from traces.errors import DraftsimError

NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "p": "share"}
"""Fields of `Targets` by the names of the command line."""
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3}
"""Seconds of each unit; a bare number is in seconds."""
TIME = "expected a time such as 200ms, 0.2s or 0.2 (seconds)"


@dataclass(frozen=True)
class Targets:
    """Bounds on the times of a request, and the share of requests that must meet them.

    Parameters
    ----------
    ttft_s:
        Seconds to the first token.
    tpot_s:
        Seconds per output token after the first, averaged over the request.
    share:
        Share of the requests that must meet both bounds.

    Raises
    ------
    DraftsimError
        For impossible values.
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

    @property
    def bound(self) -> bool:
        """True if a time is bounded."""
        return math.isfinite(min(self.ttft_s, self.tpot_s))

    def met(self, ttft_s: Any, tpot_s: Any) -> Any:
        """Return which requests met both bounds; NaN seconds per token, of one token, do."""
        return (ttft_s <= self.ttft_s) & ~(tpot_s > self.tpot_s)

    def __str__(self) -> str:
        """Return the bounds in words, as in ``TTFT 200 ms and TPOT 30 ms``."""
        bounds = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        return " and ".join(f"{name} {s * 1e3:g} ms" for name, s in bounds if math.isfinite(s))


def parse_targets(text: str, *, share: bool = True) -> Targets:
    """Read targets such as ``ttft=200ms,tpot=30ms,p=0.95``.

    A time has the unit ms or s; a bare number is in seconds.  ``p`` is the share of requests that
    must meet the targets, 0.95 by default; `share` is False where none is asked for.

    Raises
    ------
    DraftsimError
        Naming the part of the text that is wrong.

    >>> parse_targets("ttft=200ms,tpot=0.03")
    Targets(ttft_s=0.2, tpot_s=0.03, share=0.95)
    """
    found: dict[str, float] = {}
    example = "ttft=200ms,tpot=0.03" + (",p=0.95" if share else "")
    for name, value in assignments(text, f"--slo {text}", NAMES, "target", example).items():
        if name == "p" and not share:
            raise DraftsimError(
                f"--slo {text}: no share of requests is asked for here: drop p, or ask for a plan "
                "or settings"
            )
        where = f"--slo {text}: {name}"
        found[NAMES[name]] = _share(value, where) if name == "p" else parse_time(value, where)
    try:
        targets = Targets(**found)
    except DraftsimError as error:
        raise DraftsimError(f"--slo {text}: {error}") from None
    if not targets.bound:
        raise DraftsimError(f"--slo {text}: the targets bound nothing: give ttft, tpot or both")
    return targets


def parse_time(text: str, where: str) -> float:
    """Read seconds from ``200ms``, ``0.2s`` or ``0.2``; `where` begins the error's message.

    Raises DraftsimError if the text is no time, or not above 0.

    >>> parse_time("30ms", "--tpot")
    0.03
    """
    number, unit = re.fullmatch(r"(.*?)\s*(ms|s|)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        raise DraftsimError(f"{where} is {text!r}, {TIME}") from None
    if not seconds > 0:
        raise DraftsimError(f"{where} is {text!r}, expected more than 0 seconds")
    return seconds


def _share(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DraftsimError(f"{where} is {text!r}, expected a number such as 0.95") from None
