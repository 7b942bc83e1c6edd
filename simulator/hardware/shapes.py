"""What of a transformer's shape decides the cost of its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.hardware.formats import Unpacking, WeightFormat
from traces.errors import DraftsimError


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


def _llama(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int,
    head_dim: int | None = None,
) -> ModelShape:  # fmt: skip
    width = head_dim or hidden // heads
    kv = 2 * kv_heads * width
    head = float(vocab * hidden)
    layer = hidden * (2 * heads * width + kv + 3 * inner)
    return ModelShape(name, layers, hidden, layers * layer + head, head, float(layers * kv))


_ALL = (
    _llama("meta-llama/Llama-3.2-1B-Instruct", 16, 2048, 8192, 32, 8, 128256),
    _llama("meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256),
    _llama("meta-llama/Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128256),
    _llama("meta-llama/Llama-2-7b", 32, 4096, 11008, 32, 32, 32000),
    _llama("meta-llama/Llama-2-70b", 80, 8192, 28672, 64, 8, 32000),
    _llama("TinyLlama/TinyLlama-1.1B", 22, 2048, 5632, 32, 4, 32000),
    _llama("double7/vicuna-68m", 2, 768, 3072, 12, 12, 32000),
    _llama("double7/vicuna-160m", 12, 768, 3072, 12, 12, 32000),
    _llama("lmsys/vicuna-7b-v1.5", 32, 4096, 11008, 32, 32, 32000),
    _llama("lmsys/vicuna-13b-v1.5", 40, 5120, 13824, 40, 40, 32000),
    _llama("Qwen/Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 151936),
    _llama("Qwen/Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 151936),
    _llama("Qwen/Qwen2.5-3B", 36, 2048, 11008, 16, 2, 151936),
    _llama("Qwen/Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064),
    _llama("Qwen/Qwen2.5-14B", 48, 5120, 13824, 40, 8, 152064),
    _llama("Qwen/Qwen2.5-32B", 64, 5120, 27648, 40, 8, 152064),
    _llama("Qwen/Qwen3-0.6B", 28, 1024, 3072, 16, 8, 151936, 128),
    _llama("Qwen/Qwen3-1.7B", 28, 2048, 6144, 16, 8, 151936, 128),
    _llama("Qwen/Qwen3-4B", 36, 2560, 9728, 32, 8, 151936, 128),
    _llama("Qwen/Qwen3-8B", 36, 4096, 12288, 32, 8, 151936, 128),
    _llama("Qwen/Qwen3-14B", 40, 5120, 17408, 40, 8, 151936, 128),
    _llama("Qwen/Qwen3-32B", 64, 5120, 25600, 64, 8, 151936, 128),
)

SHAPES: Mapping[str, ModelShape] = {s.name: s for s in _ALL}
"""The models of the published runs, by their configurations on the Hugging Face hub, in bf16."""
