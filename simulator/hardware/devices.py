"""GPUs as their data sheets describe them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from traces.errors import DraftsimError


@dataclass(frozen=True)
class Device:
    """A GPU's peak rates.

    ``bandwidth``: memory, bytes/s.  ``flops``: dense bf16 with fp32 accumulation, 1/s
    (no sparsity).  ``memory``: bytes.  ``vector_flops``: fp32 outside the tensor cores, 1/s.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    source: str
    vector_flops: float

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory", "vector_flops"):
            value = getattr(self, name)
            if not value > 0:
                raise DraftsimError(f"{name} of {self.name!r} is {value}, expected > 0")


_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet (2021)"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet, SXM (1,979 TFLOP/s with sparsity, halved)"
_H800 = "NVIDIA H800 Tensor Core GPU data sheet, SXM: memory and bf16 as the H100's"

_ALL = (
    Device("a100-40gb", 1555e9, 312e12, 40e9, f"{_AMPERE}, SXM 40 GB", 19.5e12),
    Device("a100-80gb", 2039e9, 312e12, 80e9, f"{_AMPERE}, SXM 80 GB", 19.5e12),
    Device("h100", 3350e9, 989.5e12, 80e9, _HOPPER, 67e12),
    Device("h200", 4800e9, 989.5e12, 141e9, "NVIDIA H200 Tensor Core GPU data sheet, SXM", 67e12),
    Device("h800", 3350e9, 989.5e12, 80e9, _H800, 67e12),
    Device("h20", 4000e9, 148e12, 96e9, "NVIDIA H20 product brief (148 TFLOP/s bf16 dense)", 44e12),
    Device(
        "l4", 300e9, 121e12, 24e9, "NVIDIA L4 data sheet (242 TFLOP/s with sparsity, halved)",
        30.3e12,
    ),
    Device("l40s", 864e9, 362e12, 48e9, "NVIDIA L40S data sheet (362.05 TFLOP/s dense)", 91.6e12),
    Device("a10", 600e9, 125e12, 24e9, "NVIDIA A10 data sheet (125 TFLOP/s dense)", 31.2e12),
    Device(
        "rtx-4090", 1008e9, 165.2e12, 24e9,
        "NVIDIA Ada GPU Architecture white paper, appendix A (bf16, fp32 accumulate)", 82.6e12,
    ),
    Device(
        "rtx-5090", 1792e9, 209.5e12, 32e9,
        "NVIDIA RTX Blackwell GPU Architecture white paper, appendix A (bf16, fp32 accumulate)",
        104.8e12,
    ),
    Device(
        "b200", 8000e9, 2250e12, 180e9,
        "NVIDIA HGX B200 data sheet, an eighth (36 PFLOP/s bf16 with sparsity, halved)", 75e12,
    ),
    Device(
        "mi300x", 5300e9, 1307.4e12, 192e9,
        "AMD Instinct MI300X data sheet (1,307.4 TFLOP/s bf16 dense)", 163.4e12,
    ),
    Device(
        "rtx-3090", 936e9, 71e12, 24e9,
        "NVIDIA Ampere GA102 GPU Architecture white paper, tables 2 and 9 (bf16, fp32 accumulate)",
        35.6e12,
    ),
)  # fmt: skip

DEVICES: Mapping[str, Device] = {d.name: d for d in _ALL}

_ALIASES = {
    "a100": "a100-80gb",
    **{name: f"rtx-{n}" for n in ("3090", "4090", "5090") for name in (n, f"rtx{n}")},
}  # fmt: skip


def find_device(name: str) -> Device:
    """The device called `name`, as in `DEVICES` or as torch names it ("NVIDIA H200").

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
    if text.startswith("a100") and "40gb" in text:
        return DEVICES["a100-40gb"]
    others = ("nvl", "pcie", "laptop", "-d", "-ti", "max-q")  # other cards of like names
    for key in (
        "h200",
        "h100",
        "h800",
        "a100",
        "b200",
        "mi300x",
        "rtx-3090",
        "rtx-4090",
        "rtx-5090",
    ):
        if text.startswith(key) and not any(other in text for other in others):
            return DEVICES[_ALIASES.get(key, key)]
    close = difflib.get_close_matches(text, DEVICES, n=1, cutoff=0.3)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise DraftsimError(
        f"device {name!r} has no data-sheet entry{hint}: the known ones are {', '.join(DEVICES)}"
    )
