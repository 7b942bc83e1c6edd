"""A transformer pass as bytes, operations and launches, fitted to measured cells.

    roof   = bytes / (memory_share x bandwidth) + operations / (compute_share x flops)
             + unpacking operations / vector flops
    eager  = fixed + max((layers + outside) x layer_s, roof)    the host launches while it runs
    graph  = fixed + layers x layer_s + roof                    what is left between its kernels

Bytes are the weights once, and every sequence's cache.  Operations are two per weight and token,
and four per cached position, token and hidden unit of every layer (the roofline model of Williams
et al. 2009, with launches as in LLM inference in eager mode).  Reading and arithmetic are added,
because the narrow products of decoding do not overlap them: with the larger of the two alone,
published passes over 8 to 64 tokens are predicted 9 to 50% too fast.  ``outside`` is the number of
launches outside of the layers, embedding to sampling, over those of a layer.  Quantised weights are
unpacked as in their kernels (`Unpacking`).

`SHAPES` has the models of the published runs, and `FORMATS` the formats of their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from policies.json_text import parse_json
from simulator.published import published_rows
from traces.errors import DraftsimError, nearest
from traces.latency.table import LatencyTable
from traces.operators.devices import Device
from traces.operators.shapes import ARCHITECTURES

LaunchMode = Literal["eager", "graph"]

FREE = ("fixed_s", "layer_s", "memory_share", "compute_share")
_BOUNDS = {
    "fixed_s": (1e-9, 1.0), "layer_s": (1e-9, 1e-1),
    "memory_share": (1e-3, 1.0), "compute_share": (1e-3, 1.0),
}  # fmt: skip


class Observation(NamedTuple):
    """One measured pass."""

    shape: ModelShape
    batch: int
    new_tokens: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """Seconds of a pass on a device; the defaults are guesses until fitted.

    Parameters
    ----------
    device:
        Peak rates.
    mode:
        ``eager`` or ``graph``.
    fixed_s, layer_s:
        Seconds per pass and per layer that no rate explains: launches and gaps.
    memory_share, compute_share:
        Shares of the peak rates that are reached.
    outside:
        Launches outside of the layers, in layers' worth, where the host launches.
    """

    device: Device
    mode: LaunchMode = "eager"
    fixed_s: float = 1e-4
    layer_s: float = 4e-4
    memory_share: float = 0.75
    compute_share: float = 0.6
    outside: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("eager", "graph"):
            raise DraftsimError(f"mode is {self.mode!r}, expected 'eager' or 'graph'")
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not 0 <= value <= high:
                raise DraftsimError(f"{name} is {value}, expected 0..{high}")
            if value == 0 and name.endswith("share"):
                raise DraftsimError(f"{name} is 0, expected at least {low}")

    def roof_s(
        self, shape: ModelShape, batch: npt.ArrayLike = 1, new_tokens: npt.ArrayLike = 1,
        context: npt.ArrayLike = 0,
    ) -> Floats:  # fmt: skip
        """Return seconds by memory and arithmetic alone; sizes broadcast."""
        b, n, c = (np.asarray(v, dtype=float) for v in (batch, new_tokens, context))
        moved = shape.held_bytes + b * (c + n) * shape.kv_values * shape.kv_bytes
        done = 2 * b * n * shape.weights + 4 * b * n * (c + n) * shape.layers * shape.hidden
        memory = moved / (self.memory_share * self.device.bandwidth)
        arithmetic = done / (self.compute_share * self.device.flops)
        unpacked = shape.weights * shape.unpacking.operations(b * n)
        return np.asarray(memory + arithmetic + unpacked / self.device.vector_flops)

    def seconds(
        self, shape: ModelShape, batch: npt.ArrayLike = 1, new_tokens: npt.ArrayLike = 1,
        context: npt.ArrayLike = 0,
    ) -> Floats:  # fmt: skip
        """Return seconds of a pass; sizes broadcast."""
        roof = self.roof_s(shape, batch, new_tokens, context)
        how = shape.unpacking
        if self.mode == "eager":
            launches = (shape.layers * (1 + how.launches) + self.outside) * self.layer_s
            return np.asarray(self.fixed_s + np.maximum(launches, roof))
        return np.asarray(self.fixed_s + shape.layers * (self.layer_s + how.layer_s) + roof)

    def on(self, device: Device) -> Roofline:
        """Return the same launches and shares of the peak rates on another device."""
        return replace(self, device=device)

    def fitted(self, observed: Sequence[Observation], free: Sequence[str] = FREE) -> Roofline:
        """Return the parameters in `free` fitted to relative errors, the others as they are.

        Raises DraftsimError if there are fewer observations than free parameters, or a name is
        unknown.
        """
        from scipy.optimize import least_squares

        if unknown := [name for name in free if name not in FREE]:
            raise DraftsimError(f"{unknown[0]!r} is no parameter, expected of {', '.join(FREE)}")
        if len(observed) < len(free):
            raise DraftsimError(
                f"{len(observed)} observation(s) cannot fit {len(free)} parameters: measure more "
                "passes or fix some parameters"
            )
        measured = np.log([o.seconds for o in observed])
        groups: dict[ModelShape, list[int]] = {}
        for i, o in enumerate(observed):
            groups.setdefault(o.shape, []).append(i)
        sizes = np.array([(o.batch, o.new_tokens, o.context) for o in observed], dtype=float)

        def made(x: Floats) -> Roofline:
            return replace(self, **dict(zip(free, np.exp(x).tolist(), strict=True)))

        def errors(x: Floats) -> Floats:
            model = made(x)
            out: Floats = np.empty(len(observed))
            for shape, rows in groups.items():
                out[rows] = np.log(model.seconds(shape, *sizes[rows].T))
            gap: Floats = out - measured
            return gap

        low, high = (np.log([_BOUNDS[name][side] for name in free]) for side in (0, 1))
        best = None
        # The maximum has kinks: a few starts, the best of them.
        for scale in (1.0, 0.3, 0.05):
            start = [getattr(self, n) * (scale if n.endswith("_s") else 1.0) for n in free]
            x0 = np.clip(np.log(np.maximum(start, 1e-9)), low + 1e-6, high - 1e-6)
            found = least_squares(errors, x0, bounds=(low, high), loss="soft_l1", f_scale=0.1)
            if best is None or found.cost < best.cost:
                best = found
        assert best is not None
        return made(np.minimum(best.x, high))

    def errors(self, observed: Sequence[Observation]) -> Floats:
        """Return relative error of every observation, positive where the model is too slow."""
        own = [float(self.seconds(o.shape, o.batch, o.new_tokens, o.context)) for o in observed]
        relative: Floats = np.array(own) / np.array([o.seconds for o in observed]) - 1
        return relative


def observations(table: LatencyTable, shapes: Mapping[str, ModelShape]) -> list[Observation]:
    """Return the forward passes of a table, of the models whose shapes are given."""
    cells = table.cells[table.cells["phase"] == "forward"]
    return [
        Observation(shapes[str(m)], int(b), int(n), int(c), float(t))
        for m, b, n, c, t in zip(
            cells["model"], cells["batch"], cells["new_tokens"], cells["context"],
            cells["median_s"], strict=True,
        )
        if m in shapes and t > 0
    ]  # fmt: skip


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
