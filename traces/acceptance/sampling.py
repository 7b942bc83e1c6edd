"""Sampling of an output: the temperature, and the cut to the likeliest tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traces.errors import DraftsimError

COLDEST = 1e-5
"""Lowest temperature above 0; vLLM takes lower ones for greedy, since logits divided by them
overflow."""
HOTTEST = 1000
"""Highest temperature; from here on all tokens are as good as equally likely."""


@dataclass(frozen=True)
class Sampling:
    """The settings that turn raw logits into a next-token distribution.

    Parameters
    ----------
    temperature:
        Divides the logits; 0 is greedy decoding, which draws nothing.
    top_p:
        Share of the probability that the likeliest tokens must reach: the fewest that do are
        kept and renormalised (nucleus sampling, Holtzman et al., 1904.09751); 1 keeps all.

    Raises DraftsimError if a value is impossible, or a greedy output is to be cut.
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise DraftsimError(
                f"temperature is {self.temperature:g}, expected a finite number from {COLDEST:g} "
                f"to {HOTTEST}, or 0 for greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise DraftsimError(f"top-p is {self.top_p:g}, expected above 0 and at most 1")
        if self.greedy and self.top_p < 1:
            raise DraftsimError(
                f"top-p {self.top_p:g} cuts what is drawn, and greedy decoding draws nothing: give "
                "a temperature above 0 as well"
            )

    @property
    def greedy(self) -> bool:
        """Return True if the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Return True if a token has its softmax probability (T = 1, uncut), or none is drawn."""
        return self.temperature in (0, 1) and self.top_p == 1

    @property
    def label(self) -> str:
        """Temperature and top-p in short, such as ``T=1, top-p 0.9`` or ``greedy``."""
        if self.greedy:
            return "greedy"
        return f"T={self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")

    @property
    def options(self) -> str:
        """Return the options of `draftsim profile` that record it; nothing for greedy outputs."""
        if self.greedy:
            return ""
        cut = f" --top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"--temperature {self.temperature:g}{cut}"

    @property
    def meta(self) -> dict[str, float]:
        """Return the fields of a file's provenance; ``top_p`` only if it cuts tokens."""
        cut = {"top_p": self.top_p} if self.top_p < 1 else {}
        return {"temperature": self.temperature, **cut}

    @classmethod
    def of(cls, meta: Mapping[str, Any] | None) -> Sampling:
        """Return the settings that `meta` names; without its fields, greedy and uncut.

        Raises DraftsimError if a field is no number or impossible.
        """
        found = {n: v for n in ("temperature", "top_p") if (v := (meta or {}).get(n)) is not None}
        for name, value in found.items():
            if type(value) not in (int, float):
                raise DraftsimError(f"sampling has {name}={value!r}, expected a number")
        return cls(**{name: float(value) for name, value in found.items()})


GREEDY = Sampling()
