"""CUDA graphs of an engine: which passes replay one, and over how many tokens it then runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from policies.batch.confidence import CAPTURED
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED
from traces.latency.table import LatencyTable, cells_of, combined

MODES = ("FULL", "PIECEWISE", "NONE")
WIDEST = 64
"""New tokens a sequence up to which a pass is a decoding one, and padded."""
PHASES = ("forward", "with_prompts", "catch_up", "pass")
"""Steps of decoding whose passes replay graphs."""
FINEST = 16
"""Batch sizes and widths up to which every one counts by itself."""


@dataclass(frozen=True)
class CUDAGraphs:
    """The CUDA graphs that an engine captures at its start.

    A pass over ``batch * (K + 1)`` tokens runs over as many as the next captured graph has.  A pass
    over more tokens than any graph has is launched kernel by kernel.

    Parameters
    ----------
    sizes:
        Tokens that graphs are captured for, in any order (vLLM's ``cudagraph_capture_sizes``).
    mode:
        ``FULL``: whole decode steps are graphs.  ``PIECEWISE``: the parts between two layers'
        attention are.  ``NONE``: no graphs, and nothing is padded.  ``FULL_AND_PIECEWISE``, vLLM's
        default, is FULL here.

    Raises DraftsimError if the mode is another, or a size is not positive.

    >>> CUDAGraphs((4, 8, 16)).padded(np.array([3, 4, 9, 17])).tolist()
    [4.0, 4.0, 16.0, 17.0]
    """

    sizes: tuple[int, ...] = CAPTURED
    mode: str = "FULL"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise DraftsimError(
                f"CUDA-graph mode is {self.mode!r}, expected {', '.join(MODES[:-1])} or {MODES[-1]}"
            )
        if any(size < 1 for size in self.sizes):
            raise DraftsimError(f"a captured size is {min(self.sizes)}, expected at least 1 token")
        captured = self.sizes if self.mode != "NONE" else ()
        object.__setattr__(self, "sizes", tuple(sorted(set(captured))))

    @classmethod
    def parsed(cls, sizes: str | None, mode: str | None) -> CUDAGraphs:
        """Return the graphs that two options give, by default vLLM's.

        Raises DraftsimError if the sizes are not whole numbers, or the mode is unknown.
        """
        try:
            given = CAPTURED if sizes is None else tuple(int(part) for part in sizes.split(","))
        except ValueError:
            raise DraftsimError(
                f"--cudagraph-capture-sizes is {sizes!r}: expected whole numbers, commas between"
            ) from None
        name = (mode or "FULL").upper()
        return cls(given, "FULL" if name == "FULL_AND_PIECEWISE" else name)

    @classmethod
    def for_lengths(cls, rows: Sequence[Sequence[int]]) -> CUDAGraphs:
        """Return graphs whose sizes are multiples of K + 1, for rows [first batch, last batch, K].

        Every batch size up to `FINEST` has its own; larger ones are captured at an eighth apart.
        Draft passes have one token a sequence: vLLM's sizes up to the last batch are kept.

        >>> CUDAGraphs.for_lengths([[1, 2, 3], [3, 4, 1]]).sizes
        (1, 2, 4, 6, 8)
        """
        single = [size for size in CAPTURED if size <= max(row[1] for row in rows)]
        batches = [*range(1, FINEST + 1)]
        while batches[-1] < max(row[1] for row in rows):
            batches.append(batches[-1] + max(1 << (batches[-1].bit_length() - 4), 1))
        sizes = [
            batch * (length + 1) for first, last, length in rows
            for batch in (*(b for b in batches if first <= b < last), last)
        ]  # fmt: skip
        return cls((*single, *sizes))

    def padded(self, tokens: npt.ArrayLike) -> Floats:
        """Return tokens that passes over `tokens` run over."""
        asked = np.asarray(tokens, dtype=float)
        if not self.sizes:
            return asked
        captured = np.array(self.sizes, dtype=float)
        place = captured.searchsorted(asked)
        inside = captured[np.minimum(place, len(captured) - 1)]
        return np.where(place < len(captured), inside, asked)

    def launched(self, tokens: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return True for passes that no graph holds, but one of vLLM's default list does."""
        asked = np.asarray(tokens, dtype=float)
        largest = self.sizes[-1] if self.sizes else 0
        return np.asarray((asked > largest) & (asked <= CAPTURED[-1]))

    def applied(self, latency: LatencyTable, largest: int) -> LatencyTable:
        """Return a measured table whose decoding passes, of up to `largest` sequences, are padded.

        A pass costs what it was measured to cost with as many more sequences, whose caches are
        empty.  Every batch size has cells of its own then.

        Raises DraftsimError if the table does not tell batches apart, holds no pass as large as one
        is padded to, or no graphs are asked for: it holds what it was measured with.
        """
        if self.mode == "NONE":
            raise DraftsimError(
                "--cudagraph-mode NONE: these latencies were measured in one mode and say nothing "
                "of another; composed ones do (--latency GPU/TARGET+DRAFT)"
            )
        if not latency.knows_batches:
            raise DraftsimError(
                "--cudagraph-capture-sizes pads batches, and these latencies do not say what a "
                "batch costs: name some that were measured at several, or composed ones"
            )
        kept, parts = latency.cells, []
        decoding = kept[kept["phase"].isin(PHASES)]
        steps = decoding[["model", "phase"]].drop_duplicates()
        for model, phase in steps.itertuples(index=False):
            grid = latency.grid(model, phase)
            if len(grid.batches) < 2:
                continue
            own = kept[(kept["model"] == model) & (kept["phase"] == phase)]
            few = own[(own["batch"] <= largest) & (own["new_tokens"] <= WIDEST)]
            if few.empty:
                continue
            most = int(min(largest, grid.batches[-1]))
            contexts = np.unique(few["context"])
            # Between two measured widths the padding jumps: every width has cells of its own.
            between = np.arange(1, min(int(few["new_tokens"].max()), FINEST) + 1)
            widths = np.union1d(few["new_tokens"], between)
            b, n, c = combined(np.arange(1, most + 1), widths, contexts)
            run = self.padded(b * n) / n
            if (far := run > 2 * grid.batches[-1]).any():
                i = int(far.argmax())
                raise DraftsimError(
                    f"--cudagraph-capture-sizes: a pass over {b[i] * n[i]:g} tokens would run over "
                    f"{run[i] * n[i]:g}, which were not measured (at most {grid.batches[-1]:g} "
                    "sequences were): give sizes that are closer together"
                )
            read = latency.estimate(model, phase, batch=run, new_tokens=n, context=c * b / run)
            known = read.origin != EXTRAPOLATED  # what is not known stays outside the cells
            parts.append(cells_of(model, phase, b[known], n[known], c[known], read.seconds[known]))
            kept = kept.drop(few.index)
        cells = pd.concat([kept, *parts], ignore_index=True)
        return LatencyTable(cells, {**latency.meta, **self.meta()})

    def meta(self) -> dict[str, Any]:
        """Return the fields of a latency table's provenance that say the graphs."""
        return {"captured": list(self.sizes), "graph_mode": self.mode}
