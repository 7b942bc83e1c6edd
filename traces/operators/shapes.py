"""Sizes of decoders, which decide what their operators cost."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from policies.spec import assignments
from traces.errors import DraftsimError, nearest
from traces.operators.devices import DATA

BYTES = 2
"""Bytes of a number in weights and cache: bf16."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder, by its configuration on the Hugging Face hub.

    ``inner``: width of the MLP, of one expert where there are experts.  ``gated``: the MLP has a
    gate (SwiGLU).  ``tied``: the embedding is the output projection, too.  ``concentration``:
    experts that tokens reach, as a share of those that they would reach choosing independently.
    """

    name: str
    hub: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    concentration: float = 1.0

    @property
    def layer_shape(self) -> tuple[int | bool, ...]:
        """Sizes that a layer's operators depend on: layers with equal sizes cost the same."""
        return (
            self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, self.gated,
            self.qk_norm, self.experts, self.experts_per_token,
        )  # fmt: skip

    @property
    def matrices(self) -> dict[str, int]:
        """Weights of a layer's matrix products by operator; of one expert where there are some."""
        wide = 2 if self.gated else 1
        return {
            "qkv": self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim,
            "o": self.heads * self.head_dim * self.hidden,
            "gate_up": wide * self.hidden * self.inner,
            "down": self.inner * self.hidden,
        }

    @property
    def head(self) -> int:
        """Weights of the output projection."""
        return self.vocab * self.hidden

    @property
    def products(self) -> dict[str, int]:
        """Weights of all matrix products by operator: `matrices`, and the output projection."""
        return {**self.matrices, "lm_head": self.head}

    @property
    def kv_values(self) -> int:
        """Numbers that a token occupies in the cache of one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices, of all experts."""
        own = self.matrices
        return own["qkv"] + own["o"] + max(self.experts, 1) * (own["gate_up"] + own["down"])

    @property
    def parameters(self) -> int:
        """Weights of all matrices, the embedding included."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.head

    def kv_heads_on(self, shared: int) -> float:
        """Return the key-value heads of one of the GPUs that share the model.

        They are never divided: if there are more GPUs than heads, each head is copied to several.
        """
        return max(self.kv_heads / shared, 1)

    def products_on(self, shared: int) -> dict[str, float]:
        """Return weights of `products` on one of the GPUs that share the model."""
        heads = self.heads / shared + 2 * self.kv_heads_on(shared)
        own = {name: weights / shared for name, weights in self.products.items()}
        return {**own, "qkv": self.hidden * heads * self.head_dim}

    def parameters_on(self, shared: int) -> float:
        """Return weights of all matrices on one of the GPUs that share the model."""
        copied = self.kv_heads_on(shared) - self.kv_heads / shared
        return self.parameters / shared + self.layers * 2 * copied * self.hidden * self.head_dim

    def meta(self) -> dict[str, object]:
        """Return the fields that a latency table's provenance says of a model."""
        return {
            "name": self.hub, "layers": self.layers, "hidden_size": self.hidden,
            "vocab_size": self.vocab, "parameters": self.parameters, "tied": self.tied,
            "kv_values": self.layers * self.kv_values,
        }  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """A model and the number of GPUs that share it."""

    model: Architecture
    shared: int = 1

    def __post_init__(self) -> None:
        heads, kv_heads, shared = self.model.heads, self.model.kv_heads, self.shared
        whole = shared >= 1 and not heads % shared
        # A key-value head lies on one GPU, or on each of several.
        if not whole or (kv_heads % shared and shared % kv_heads):
            which = f"{kv_heads} key-value heads" if whole else f"{heads} heads"
            raise DraftsimError(
                f"{self.model.name}@tp{shared}: its {which} cannot be shared by {shared} GPUs"
            )

    @property
    def name(self) -> str:
        """As ``--latency`` names it."""
        return self.model.name if self.shared == 1 else f"{self.model.name}@tp{self.shared}"


def _read() -> dict[str, Architecture]:
    with (DATA / "models.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        flags: dict[str, bool] = {k: bool(int(row.pop(k))) for k in ("tied", "gated", "qk_norm")}
        name, hub = row.pop("name"), row.pop("hub")
        sizes: dict[str, Any] = {key: int(value) for key, value in row.items()}
        found[name] = Architecture(name, hub, **flags, **sizes)
    return found


ARCHITECTURES: Mapping[str, Architecture] = _read()
"""The models known by name."""
_ENDINGS = ("-hf", "-instruct", "-chat", "-2507", "-v0.1", "-v1.5", "-v1.3", "-base")


def find_architecture(name: str) -> Architecture:
    """Return the model called `name`, as in `ARCHITECTURES` or as on the Hugging Face hub.

    Sizes that differ may follow: ``NAME:field=value,...`` with fields of `Architecture`.

    Raises DraftsimError with the nearest name, or if a field is unknown or impossible.

    >>> find_architecture("meta-llama/Llama-2-7b-hf").name
    'llama-2-7b'
    >>> find_architecture("mixtral-8x7b:experts=16,experts_per_token=4").experts
    16
    """
    base, colon, changes = name.partition(":")
    if colon and changes.strip():
        return _changed(find_architecture(base), changes)
    text = name.strip().lower().rpartition("/")[2].removeprefix("meta-")
    while text not in ARCHITECTURES:
        ending = next((e for e in _ENDINGS if text.endswith(e)), None)
        if ending is None:
            break
        text = text.removesuffix(ending)
    for known in ARCHITECTURES.values():
        if text in (known.name, known.hub.lower().rpartition("/")[2]):
            return known
    raise DraftsimError(
        f"no model {name!r} is known by its sizes{nearest(text, ARCHITECTURES, 0.5)}: "
        f"traces/operators/data/models.csv holds those of {len(ARCHITECTURES)} models, and takes "
        "more"
    )


def _changed(model: Architecture, changes: str) -> Architecture:
    """Return `model` with other sizes, named and findable by them."""
    name = f"{model.name}:{changes}"
    own = {f.name: type(getattr(model, f.name)) for f in fields(model)[2:]}
    values: dict[str, Any] = {}
    for field, value in assignments(changes, name, own, "size").items():
        try:
            values[field] = float(value) if own[field] is float else own[field](int(value))
        except ValueError:
            raise DraftsimError(f"{name}: {field} is {value!r}, no number") from None
    found = replace(model, name=name, hub=f"{model.hub}:{changes}", **values)
    least = {"experts": 0, "experts_per_token": 0, "tied": 0, "gated": 0, "qk_norm": 0}
    for field, value in values.items():
        if not value >= least.get(field, 0.01 if field == "concentration" else 1):
            raise DraftsimError(f"{name}: {field} is {value}, too small")
    if found.heads % found.kv_heads:
        raise DraftsimError(
            f"{name}: {found.heads} heads are no multiple of {found.kv_heads} kv_heads"
        )
    some = min(found.experts, 1)
    if found.concentration > 1 or not some <= found.experts_per_token <= found.experts:
        raise DraftsimError(
            f"{name}: expected {some} to {found.experts} experts_per_token, and a concentration of "
            "at most 1"
        )
    return found
