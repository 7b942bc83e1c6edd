"""What of a transformer's shape decides the cost of its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traces.errors import DraftsimError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    ``weights``: numbers in the layers' matrices and the output projection, each read once a
    pass and multiplied with every token.  ``head``: those of the output projection alone.
    ``kv_values``: numbers a token occupies in the cache.  ``weight_bytes``, ``kv_bytes``:
    bytes of one number (2 for bf16).
    """

    name: str
    layers: int
    hidden: int
    weights: float
    head: float
    kv_values: float
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "weights", "kv_values", "weight_bytes", "kv_bytes"):
            if not getattr(self, name) > 0:
                raise DraftsimError(
                    f"{name} of {self.name!r} is {getattr(self, name)}, expected > 0"
                )

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


def _llama(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int,
    weight_bytes: float = 2.0,
) -> ModelShape:  # fmt: skip
    kv = 2 * kv_heads * (hidden // heads)
    head = float(vocab * hidden)
    layer = hidden * (2 * hidden + kv + 3 * inner)
    return ModelShape(
        name, layers, hidden, layers * layer + head, head, float(layers * kv), weight_bytes
    )


_ALL = (
    _llama("meta-llama/Llama-3.2-1B-Instruct", 16, 2048, 8192, 32, 8, 128256),
    _llama("meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256),
    _llama("meta-llama/Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128256, weight_bytes=0.5),
    _llama("double7/vicuna-68m", 2, 768, 3072, 12, 12, 32000),
    _llama("double7/vicuna-160m", 12, 768, 3072, 12, 12, 32000),
    _llama("lmsys/vicuna-7b-v1.5", 32, 4096, 11008, 32, 32, 32000),
    _llama("lmsys/vicuna-13b-v1.5", 40, 5120, 13824, 40, 40, 32000),
)

SHAPES: Mapping[str, ModelShape] = {s.name: s for s in _ALL}
"""The models of GammaTune's Table 1, by their configurations on the Hugging Face hub (the 70B
with the paper's int4 weights)."""
