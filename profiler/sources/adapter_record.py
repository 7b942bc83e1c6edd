"""Records Kangaroo's adapter's drafts along the target's output and after its wrong tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from profiler.features.heads import Adapter, AdapterRunner
from profiler.models.stack import LayerRunner
from profiler.sources.exit_record import ExitRecorder
from traces.sources.exits.recording import ExitSetting


class AdapterRecorder(ExitRecorder):
    """Records Kangaroo's adapter: one exit, whose head attends to its own past.

    What it drafts still depends on the fed tokens alone, as the states it reads are exact.
    Parameters as of `ExitRecorder`, with an adapter instead of the heads.
    """

    def __init__(
        self, target: LayerRunner, adapter: Adapter, settings: Sequence[ExitSetting],
        omegas: Sequence[float] = (0.0,), eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        super().__init__(target, adapter, settings, omegas, eos)
        self._adapter = AdapterRunner(adapter, target)

    def _normed(
        self, at: int, hidden: Tensor, start: int, first: int = 0, *, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        del at
        return self._adapter.run(hidden, start, mask=mask, positions=positions)[first:]
