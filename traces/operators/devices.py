"""GPUs as their data sheets describe them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.errors import DraftsimError, nearest

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Device:
    """A GPU's peak rates.

    ``bandwidth``: memory, bytes/s.  ``flops``: dense bf16 with fp32 accumulation, 1/s
    (no sparsity).  ``memory``: bytes.  ``vector_flops``: fp32 outside the tensor cores, 1/s.
    ``link``: to another GPU, bytes/s each way.  ``processors``: multiprocessors.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    source: str
    vector_flops: float
    link: float
    processors: int

    def __post_init__(self) -> None:
        names = ("bandwidth", "flops", "memory", "vector_flops", "link", "processors")
        for name in names:
            value = getattr(self, name)
            if not value > 0:
                raise DraftsimError(f"{name} of {self.name!r} is {value}, expected > 0")


def _read() -> dict[str, Device]:
    kinds: Mapping[str, Callable[[str], Any]] = {"name": str, "source": str, "processors": int}
    with (DATA / "devices.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            {name: kinds.get(name, float)(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]
    return {row["name"]: Device(**row) for row in rows}


DEVICES: Mapping[str, Device] = _read()

_ALIASES = {
    "a100": "a100-80gb", "a6000": "rtx-a6000", "rtxpro6000": "rtx-pro-6000",
    **{name: f"rtx-{n}" for n in ("3090", "4090", "5090") for name in (n, f"rtx{n}")},
}  # fmt: skip
_BEGINNINGS = (
    "h200", "h100", "h800", "a100", "b200", "mi300x", "rtx-3090", "rtx-4090", "rtx-5090",
    "rtx-pro-6000-blackwell-server",
)  # fmt: skip
"""Beginnings of longer names that torch gives to a device."""


def find_device(name: str) -> Device:
    """Return the device called `name`, as in `DEVICES` or as torch names it ("NVIDIA H200").

    Raises DraftsimError with the nearest name.

    >>> find_device("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    text = name.lower()
    for maker in ("nvidia", "geforce", "amd", "instinct"):
        text = text.replace(maker, "")
    text = "-".join(text.split())
    text = _ALIASES.get(text, text)
    if text in DEVICES:
        return DEVICES[text]
    slice_of_one = "-mig-"
    if text.startswith("a100") and "40gb" in text and slice_of_one not in text:
        return DEVICES["a100-40gb"]
    # Other cards of like names.
    others = ("nvl", "pcie", "laptop", "-d", "-ti", "max-q", slice_of_one)
    for key in _BEGINNINGS:
        if text.startswith(key) and not any(other in text for other in others):
            return DEVICES[_ALIASES.get(key, key.removesuffix("-blackwell-server"))]
    raise DraftsimError(
        f"device {name!r} has no data-sheet entry{nearest(text, DEVICES, 0.3)}: the known ones are "
        f"{', '.join(DEVICES)}"
    )
