"""What the rounds of a sweep are priced with: cost ratios, tables, contexts and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from simulator.hardware.devices import find_device
from simulator.hardware.scaling import carry_over, home_device
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

ANY = "any"
"""The device of a cost ratio."""


class DeviceTable(NamedTuple):
    """A latency table on one device."""

    latency: str
    """Name of the table that was measured or assumed."""
    gpu: str
    """Device whose seconds these are: the data-sheet entry's name where there is one."""
    scaled: bool
    """Whether they were carried over from another device."""
    error: float
    """Median relative error of the carrying model against published figures; 0 unless `scaled`."""
    fit_error: float
    """The same on the passes measured, which it was fitted to."""
    table: LatencyTable


@dataclass(frozen=True)
class Prices:
    """At what costs every round log is priced.

    Parameters
    ----------
    ratios:
        Cost ratios c = T_draft / T_target, with verification at `verify` target passes.
    latencies:
        Tables by name, each read at every context of `contexts` (None: as recorded).
    gpus:
        Devices, by their data-sheet names, that each table is carried over to (see
        `simulator.hardware.carry_over`); none leaves them on the device measured.

    Raises
    ------
    DraftsimError
        If there is no price, one is impossible, a GPU is not known, or a table cannot be
        carried over.
    """

    ratios: Sequence[float] = ()
    latencies: Mapping[str, LatencyTable] = field(default_factory=dict)
    contexts: Sequence[int | None] = (None,)
    verify: float = 1.0
    gpus: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not len(self.ratios) and not self.latencies:
            raise DraftsimError("nothing to price with: give cost ratios or a latency table")
        for c in self.ratios:
            if not 0 <= c < np.inf:
                raise DraftsimError(f"cost ratio c is {c}, expected a finite number >= 0")
        if not 0 < self.verify < np.inf:
            raise DraftsimError(f"verify is {self.verify}, expected > 0 target passes")
        if self.gpus and not self.latencies:
            raise DraftsimError("GPUs need a latency table to carry over: give one measured")
        _ = self.tables  # refused now, not in a worker

    @property
    def count(self) -> int:
        """Rows of every log priced."""
        return len(self.ratios) + len(self.tables) * len(self.contexts)

    @cached_property
    def tables(self) -> tuple[DeviceTable, ...]:
        """Every table on every device, in the order of the rows priced."""
        if not self.gpus:
            return tuple(
                DeviceTable(n, device_name(t), *_scaling(t), t) for n, t in self.latencies.items()
            )
        devices = {d.name: d for d in map(find_device, self.gpus)}
        found = []
        for name, table in self.latencies.items():
            try:
                home = home_device(table)
                for gpu, device in devices.items():
                    there = table if device == home else carry_over(table, device)
                    found.append(DeviceTable(name, gpu, *_scaling(there), there))
            except DraftsimError as error:
                raise DraftsimError(f"{name}: {error}") from None
        return tuple(found)


def device_name(latency: LatencyTable) -> str:
    """The data-sheet name of a table's device where there is one, else as it was recorded."""
    try:
        return home_device(latency).name
    except DraftsimError:
        return str(latency.meta.get("device") or "unknown")


def _scaling(latency: LatencyTable) -> tuple[bool, float, float]:
    """Whether a table was carried over, and the errors of what carried it."""
    note = latency.meta.get("scaled")
    if not note:
        return False, 0.0, 0.0
    if not isinstance(note, Mapping):
        return True, float("nan"), float("nan")
    return True, float(note["published_median"]), float(note["fit_error"])
