"""What ``draftsim sweep`` spans: axes read from text, and the prices of a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands.common.bounds import MOST_CONTEXT
from commands.common.devices import gpu_names, weight_formats
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.whatif.sweep.prices import Prices
    from traces.latency.table import LatencyTable


def axis(
    text: str | None, name: str, *, low: float, high: float | None = None, whole: bool = False
) -> tuple[float, ...]:
    """The points of an axis; none where it is not named."""
    from simulator.whatif.sweep.grid import parse_axis

    return () if text is None else parse_axis(text, name, low=low, high=high, whole=whole)


def prices_of(
    ratios: tuple[float, ...], tables: dict[str, LatencyTable], context: str | None,
    verify: float, gpu: str | None, weights: str | None, always: int | None,
) -> Prices:  # fmt: skip
    """Cost ratios and tables, at contexts, on GPUs and in formats.

    Raises DraftsimError where contexts are named without a table, or one is impossible.
    """
    from simulator.whatif.sweep.prices import Prices

    contexts: list[int | None] = [None]
    if context is not None:
        if not tables:
            raise DraftsimError("--context needs a latency table: add --latency")
        contexts = [int(k) for k in axis(context, "context", low=0, high=MOST_CONTEXT, whole=True)]
    return Prices(
        ratios, tables, contexts, verify, gpu_names(gpu), weight_formats(weights), always or 0
    )
