"""What of a transformer's shape decides the cost of its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.hardware.formats import Unpacking, WeightFormat
from traces.errors import DraftsimError
from traces.operators.shapes import ARCHITECTURES, Architecture


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    ``weights``: numbers in the layers' matrices and the output projection, each read once a
    pass and multiplied with every token.  ``head``: those of the output projection alone.
    ``kv_values``: numbers a token occupies in the cache.  ``weight_bytes``, ``kv_bytes``:
    bytes of one number (2 for bf16).
    ``head_bytes``: of one in the output projection, where it is kept otherwise.  ``unpacking``:
    what the weights' format costs beyond its bytes.
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
        """The same model with its weights in another format."""
        return replace(
            self, weight_bytes=form.bits / 8, head_bytes=form.head_bits / 8,
            unpacking=unpacking or Unpacking(),
        )  # fmt: skip

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], dtype_bytes: float = 2.0) -> ModelShape:
        """The shape that a recording's provenance holds (``meta["target"]``, ``["draft"]``).

        Where the cache's size is not recorded, every head has keys and values of its own;
        embeddings count as untied unless ``tied`` says otherwise.

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


def _shape(model: Architecture) -> ModelShape:
    weights = float(model.layers * model.layer_weights + model.head)
    kv_values = float(model.layers * model.kv_values)
    return ModelShape(model.hub, model.layers, model.hidden, weights, float(model.head), kv_values)


SHAPES: Mapping[str, ModelShape] = {m.hub: _shape(m) for m in ARCHITECTURES.values()}
"""The models of the published runs, by their configurations on the Hugging Face hub, in bf16."""
