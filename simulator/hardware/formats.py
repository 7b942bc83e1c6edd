"""Formats of weights, and the cost of reading each beyond its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.json_text import parse_json
from simulator.published import published_rows
from traces.errors import DraftsimError, nearest
from traces.operators.shapes import ARCHITECTURES


@dataclass(frozen=True)
class WeightFormat:
    """A format in which a model's matrices are stored.

    ``bits``: bits per weight in the layers' matrices, including its share of scales and zero
    points. ``head_bits``: the same in the output projection, which many formats do not quantise.
    ``kernels``: name of the kernels that read it, if they read several formats.
    """

    name: str
    bits: float
    head_bits: float
    source: str
    kernels: str = ""

    @property
    def quantised(self) -> bool:
        """Return True if the numbers are unpacked, or multiplied at less than 16 bits."""
        return self.bits < 16


@dataclass(frozen=True)
class Unpacking:
    """The cost of passes over a format beyond its bytes; fitted to published runs of it.

    Parameters
    ----------
    layer_s:
        Seconds a layer on the device: further kernels, and matrices too small to fill it.
    launches:
        The same where a host launches every kernel, over the launches of a layer.
    weight_ops:
        Vector operations per weight and pass.
    token_ops:
        The same for each token after a pass's first, in kernels that take the tokens one by one.
    tokens:
        Tokens of a pass up to which such kernels run; None: they never do.
    tile_ops:
        Vector operations per weight of the kernels for more, which take a whole tile of them.
    """

    layer_s: float = 0.0
    launches: float = 0.0
    weight_ops: float = 0.0
    token_ops: float = 0.0
    tokens: int | None = None
    tile_ops: float = 0.0

    def operations(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the vector operations per weight of passes over `tokens` tokens."""
        count = np.asarray(tokens, dtype=float)
        if self.tokens is None:
            return np.full_like(count, self.weight_ops)
        more = np.where(count <= self.tokens, self.token_ops * (count - 1), self.tile_ops)
        return np.asarray(self.weight_ops + more)


FORMATS: Mapping[str, WeightFormat] = {
    row["name"]: WeightFormat(
        row["name"], parse_json(row["bits"]), parse_json(row["head_bits"]), row["source"],
        row["kernels"],
    )
    for row in published_rows("formats")
}  # fmt: skip

_ALIASES = {
    "fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "gptq": "gptq-int4", "awq": "awq-int4",
    "gptq-int4-g128": "gptq-int4", "awq-int4-g128": "awq-int4",
}  # fmt: skip


def find_format(name: str) -> WeightFormat:
    """Return the format called `name`, as in `FORMATS`; raises DraftsimError with the nearest name.

    >>> find_format("Q4_K_M").bits
    4.83
    """
    text = name.strip().lower()
    text = _ALIASES.get(text, text)
    if text in FORMATS:
        return FORMATS[text]
    raise DraftsimError(
        f"{name!r} is no weight format known here{nearest(text, FORMATS, 0.3)}: expected of "
        f"{', '.join(FORMATS)}"
    )


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    ``weights``: number of weights in the layers' matrices and the output projection; a pass reads
    each once and multiplies it with every token.  ``head``: those of the output projection alone.
    ``kv_values``: values per token in the cache.  ``weight_bytes``, ``kv_bytes``: bytes of one
    value (2 for bf16).  ``head_bytes``: bytes per weight of the output projection, if it has
    another format.  ``unpacking``: cost of the weights' format beyond its bytes.
    """

    name: str
    layers: int
    hidden: int
    weights: float
    head: float
    kv_values: float
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    head_bytes: float | None = None
    unpacking: Unpacking = field(default_factory=Unpacking)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "weights", "kv_values", "weight_bytes", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise DraftsimError(
                    f"{name} of {self.name!r} is {getattr(self, name)}, expected > 0"
                )

    @property
    def held_bytes(self) -> float:
        """Bytes of the weights that a pass reads."""
        head = self.weight_bytes if self.head_bytes is None else self.head_bytes
        return (self.weights - self.head) * self.weight_bytes + self.head * head

    def kept_as(self, form: WeightFormat, unpacking: Unpacking | None = None) -> ModelShape:
        """Return the same model with its weights in another format."""
        return replace(
            self, weight_bytes=form.bits / 8, head_bytes=form.head_bits / 8,
            unpacking=unpacking or Unpacking(),
        )  # fmt: skip

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], dtype_bytes: float = 2.0) -> ModelShape:
        """Return the shape that a recording's provenance holds (``meta["target"]``, ``["draft"]``).

        If the cache's size is not recorded, every head has its own keys and values.  Embeddings
        count as untied unless ``tied`` says otherwise.

        Raises DraftsimError if layers, width, vocabulary or parameters are missing.
        """
        needed = ("layers", "hidden_size", "vocab_size", "parameters")
        if missing := [name for name in needed if name not in meta]:
            raise DraftsimError(
                f"the recording does not say the {', '.join(missing)} of its model: "
                "profile it again"
            )
        layers, hidden = int(meta["layers"]), int(meta["hidden_size"])
        head = float(meta["vocab_size"]) * hidden
        # The input embedding is looked up, not multiplied; a tied one is the projection.
        weights = float(meta["parameters"]) - (0.0 if meta.get("tied") else head)
        kv_values = float(meta.get("kv_values", 2 * layers * hidden))
        name = str(meta.get("name", meta.get("path", "model")))
        return cls(name, layers, hidden, weights, head, kv_values, dtype_bytes, dtype_bytes)


SHAPES: Mapping[str, ModelShape] = {
    model.hub: ModelShape.from_meta(model.meta()) for model in ARCHITECTURES.values()
}
"""The models of the published runs, by their configurations on the Hugging Face hub, in bf16."""
