"""A published run, and a study: runs of one engine."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Run(NamedTuple):
    """Passes of one model at batch 1."""

    model: str
    """A name in `simulator.hardware.shapes.SHAPES`."""
    device: str
    weights: str
    """A name in `simulator.hardware.formats.FORMATS`."""
    tokens_per_s: float
    new_tokens: int = 1
    """Tokens of a pass."""
    context: int = 1024
    """Mean tokens in the cache."""

    @property
    def seconds(self) -> float:
        """Of one pass."""
        return self.new_tokens / self.tokens_per_s


class Study(NamedTuple):
    """Runs of one engine by one group."""

    name: str
    source: str
    engine: str
    mode: Literal["eager", "graph"]
    runs: tuple[Run, ...]
    libraries: tuple[tuple[str, str], ...] = ()
    """Weight formats and the libraries whose kernels read them, where these are not the engine's
    own."""
