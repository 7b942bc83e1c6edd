"""Seconds of a step outside attention: products, small kernels, experts, collectives.

Small kernels (norms, positions, activations) do little more than move their tokens (`fused_s`).

An operator that was timed for the asked sizes is read between its timings.  A matrix product that
was not is read between the timed products of the same GPU that have fewer and more weights: in
bytes of weights and tokens, products of one GPU lie close to one curve.  If each of Vidur's models
is predicted this way from the others on its GPU, the median error of a layer's products is 1.3 to
6%.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from policies.arrays import Floats
from traces.operators.devices import Device
from traces.operators.shapes import ARCHITECTURES, BYTES, Architecture
from traces.operators.table import OperatorTable

MEASURED, CORRECTED = "measured", "measured, norms corrected"
NEAR, MOVING, ASSUMED = "from near sizes", "by the bytes moved", "assumed"

PER_LAYER = {"norm": 2, "embedding": 0, "final_norm": 0, "lm_head": 0, "sampler": 0}
"""Runs of an operator per layer, if not 1; 0 means once per pass."""
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Products that an engine merges, and what they are where they were timed apart."""
SAMPLER_S = (20e-6, 0.6e-6)
"""Seconds of choosing tokens, and for each: 10 to 25 us for one token and 164 to 311 for 256, over
the models timed inside vLLM."""
PCIE_S, PCIE_SHARE = 20e-6, 0.6
"""An all-reduce over PCIe where none was timed: its latency, and the share of the link it reaches;
both are assumed, within a factor of two."""
NVLINK_SHARE = 0.8
LAUNCH_S = 2.2e-6
"""A fused norm's or rotary kernel's least time: 1.9 to 2.7 us over the five models timed inside
vLLM on an RTX 4090 and an RTX PRO 6000."""
MOVED = 0.8
"""Share of the memory's bandwidth that a long fused kernel reaches."""


class Curve(NamedTuple):
    """Seconds by tokens, or by bytes, ascending."""

    tokens: Floats
    seconds: Floats

    def at(self, tokens: Floats) -> Floats:
        """Return seconds at any number of tokens; beyond the last they grow in proportion."""
        found = np.interp(tokens, self.tokens, self.seconds)
        beyond = np.maximum(tokens / self.tokens[-1], 1.0)
        return np.asarray(found * beyond)

    def rising(self) -> Curve:
        """Return the curve with no number of tokens quicker than a smaller one."""
        return Curve(self.tokens, np.maximum.accumulate(self.seconds))


class Part(NamedTuple):
    """An operator of a model on a device."""

    curve: Curve
    per_layer: int
    """Times that it runs in a layer; 0: once in a pass."""
    origin: str


EXPERT = ("expert_gate", "expert_up", "expert_down", "expert_act")
"""Operators of one expert, where experts were timed one by one."""
ROUTING_KERNELS = 3
"""Kernels between an MoE block's router and its products in vLLM: one chooses the experts, two sort
the tokens by expert (`topk_softmax`, `moe_align_block_size`)."""
OTHERWISE = ("attention", "attention_unsplit", "all_reduce", "moe", "step", "step_saved")
"""Operators that no curve by tokens describes."""


class DenseOperators:
    """The operators of one device, read at any model's sizes from its timings in a table."""

    def __init__(self, table: OperatorTable, device: Device) -> None:
        self.device = device
        own = table.of(device=device.name)
        self._rows = own[own["operator"].isin(["all_reduce", "moe", "expert_down"])]
        self._curves = _curves(own[~own["operator"].isin(OTHERWISE)])

    @property
    def models(self) -> list[tuple[str, int]]:
        """(model, GPUs that share it) of every model with products timed."""
        return sorted({(m, n) for op, m, n in self._curves if op in ("o", "qkv")})

    # What a model runs.

    def layer(self, model: Architecture, shared: int) -> dict[str, Part]:
        """Return the operators of a layer but attention and collectives, with how each is known."""
        names = ["norm", "qkv", *(["qk_norm"] if model.qk_norm else []), "rope", "o"]
        if not model.experts:
            names += ["gate_up", "act", "down"]
        parts = {name: self.part(name, model, shared) for name in names}
        # vLLM adds the residual inside the norm; Vidur's norms do not.
        if not model.experts and (add := self._timed("add", model, shared)) is not None:
            parts["add"] = add
        return parts

    def part(self, operator: str, model: Architecture, shared: int) -> Part:
        """Return an operator at a model's sizes."""
        if (found := self._timed(operator, model, shared)) is not None:
            return found
        if (merged := self._in_parts(operator, model, shared)) is not None:
            return Part(merged, 1, MEASURED)
        per_layer = PER_LAYER.get(operator, 1)
        if (weights := model.products_on(shared).get(operator)) is not None:
            return Part(self._products.curve(BYTES * weights), per_layer, NEAR)
        if operator == "sampler":
            rows = np.array([1.0, 4096.0])
            return Part(Curve(rows, SAMPLER_S[0] + SAMPLER_S[1] * rows), per_layer, ASSUMED)
        tokens = np.array([1.0, 8192.0])
        seconds = fused_s(
            operator, model, self.device, tokens, shared=shared, launch_s=self._launch_s(operator)
        )
        return Part(Curve(tokens, seconds), per_layer, MOVING)

    def layer_s(self, model: Architecture, shared: int, tokens: Floats) -> Floats:
        """Return seconds of a layer's operators but attention and collectives."""
        total = np.zeros(len(tokens))
        for part in self.layer(model, shared).values():
            total += part.per_layer * part.curve.at(tokens)
        if model.experts:
            total += self.experts_s(model, shared, tokens)
        return total

    def once_s(self, operator: str, model: Architecture, shared: int, rows: Floats) -> Floats:
        """Return seconds of an operator that runs once in a pass."""
        return self.part(operator, model, shared).curve.at(rows)

    # Experts.

    def experts_s(self, model: Architecture, shared: int, tokens: Floats) -> Floats:
        """Return seconds of an MoE block: routing, and the experts that the tokens reach."""
        reached = experts_reached(model, tokens)
        # A GPU has a slice of every expert: as much to read and to multiply as fewer whole ones.
        whole = reached / shared
        block = self._rows[self._rows["operator"] == "moe"]
        block = block[block["model"].isin(_alike(model))]
        if not block.empty:
            return _plane(block, tokens / shared, whole)
        each = tokens * model.experts_per_token / reached
        timed = [self._timed(name, model, shared) for name in EXPERT]
        if all(timed):
            router = self._timed("router", model, shared)
            once = router.curve.at(tokens) if router else np.full(len(tokens), LAUNCH_S)
            return np.asarray(
                whole * sum(one.curve.at(each) for one in timed if one is not None) + once
            )
        return self.grouped_s(model, shared, tokens, reached)

    def grouped_s(
        self, model: Architecture, shared: int, tokens: Floats, reached: Floats
    ) -> Floats:
        """Return seconds of an MoE block whose kernels were not timed, as engines run it.

        The router's product; `ROUTING_KERNELS` that choose the experts and sort the tokens by them;
        two grouped products, which read the weights of the experts reached, with the activation
        between them; and the weighted sum of each token's experts.
        """
        router = self._products.curve(BYTES * model.hidden * model.experts).at(tokens)
        each = tokens * model.experts_per_token / reached
        matrices = np.zeros(len(tokens))
        for name in ("gate_up", "down"):
            sizes = BYTES * model.matrices[name] * reached / shared
            matrices += [
                float(self._products.curve(size).rising().at(np.array([rows]))[0])
                for size, rows in zip(sizes, each, strict=True)
            ]
        act = fused_s(
            "act", model, self.device, tokens * model.experts_per_token, shared=shared,
            launch_s=self._launch_s("act"),
        )  # fmt: skip
        summed = BYTES * model.hidden * (model.experts_per_token + 1) * tokens
        total = LAUNCH_S + summed / (MOVED * self.device.bandwidth)
        return np.asarray(router + ROUTING_KERNELS * LAUNCH_S + matrices + act + total)

    def experts_origin(self, model: Architecture, shared: int) -> str:
        """Return how an MoE block is known."""
        own = self._rows["tensor_parallel"] == shared
        timed = self._rows[own & self._rows["operator"].isin(["moe", "expert_down"])]
        return MEASURED if timed["model"].isin(_alike(model)).any() else NEAR

    # Collectives.

    def all_reduce_s(self, size: Floats, gpus: int) -> tuple[Floats, str]:
        """Return seconds of one all-reduce of `size` bytes over `gpus`, and how they are known."""
        if gpus == 1:
            return np.zeros(len(size)), MEASURED
        own = self._rows[
            (self._rows["operator"] == "all_reduce") & (self._rows["tensor_parallel"] == gpus)
        ]
        moved = size * 2 * (gpus - 1) / gpus
        if own.empty:
            return PCIE_S + moved / (PCIE_SHARE * self.device.link), ASSUMED
        modes = sorted(set(own["mode"]), key=lambda m: (not m.endswith("dgx"), m))
        return _quickest(own[own["mode"] == modes[0]]).at(size), MEASURED

    # How it is known.

    def _timed(self, operator: str, model: Architecture, shared: int) -> Part | None:
        for name in _alike(model, operator):
            if (found := self._curves.get((operator, name, shared))) is not None:
                return found
        return None

    def _in_parts(self, operator: str, model: Architecture, shared: int) -> Curve | None:
        if operator not in PARTS:
            return None
        found = [self._timed(name, model, shared) for name in PARTS[operator]]
        curves = [one.curve for one in found if one is not None]
        if len(curves) < len(found):
            return None
        tokens = curves[0].tokens
        return Curve(tokens, np.asarray(sum(curve.at(tokens) for curve in curves)))

    def _launch_s(self, operator: str) -> float:
        least = [
            part.curve.seconds[0] for (name, _, _), part in self._curves.items()
            if name == operator and part.origin == MEASURED
        ]  # fmt: skip
        return float(np.median(least)) if least else LAUNCH_S

    @cached_property
    def _products(self) -> Products:
        found = []
        for (operator, name, shared), part in self._curves.items():
            model = ARCHITECTURES.get(name)
            weights = model.products_on(shared).get(operator) if model is not None else None
            if model is None or weights is None:
                continue
            if not (model.experts and operator in ("gate_up", "down")):
                found.append((BYTES * weights, part.curve))
        for operator, parts in PARTS.items():
            for name, shared in {(m, n) for op, m, n in self._curves if op == parts[0]}:
                model = ARCHITECTURES[name]
                if (whole := self._in_parts(operator, model, shared)) is not None:
                    found.append((BYTES * model.products_on(shared)[operator], whole))
        return Products(found)


class Products:
    """Matrix products by bytes of weights and tokens, read between those that were timed."""

    def __init__(self, timed: Sequence[tuple[float, Curve]]) -> None:
        every = sorted({float(t) for _, curve in timed for t in curve.tokens})
        self._tokens = np.array(every)
        by_bytes: dict[float, list[Floats]] = {}
        for size, curve in timed:
            by_bytes.setdefault(float(size), []).append(curve.at(self._tokens))
        self._bytes = np.array(sorted(by_bytes))
        self._seconds = np.array([np.median(by_bytes[b], axis=0) for b in self._bytes.tolist()])

    def curve(self, size: float) -> Curve:
        """Return seconds by tokens of a product of `size` bytes of weights.

        Beyond those timed they grow in proportion; below, all but a launch shrinks so.
        """
        known, logs = self._bytes, np.log(self._seconds)
        if size <= known[0]:
            least = np.minimum(LAUNCH_S, self._seconds[0])
            return Curve(self._tokens, least + (self._seconds[0] - least) * size / known[0])
        if size >= known[-1]:
            return Curve(self._tokens, self._seconds[-1] * size / known[-1])
        above = int(known.searchsorted(size))
        low, high = np.log(known[above - 1]), np.log(known[above])
        share = (np.log(size) - low) / (high - low)
        return Curve(self._tokens, np.exp(logs[above - 1] * (1 - share) + logs[above] * share))


def moved_per_token(operator: str, model: Architecture, shared: int = 1) -> float:
    """Return bytes that an operator moves for a token, on one of the GPUs that share it."""
    turned = (model.heads / shared + model.kv_heads_on(shared)) * model.head_dim
    return BYTES * {
        "embedding": 2.0 * model.hidden, "norm": 4.0 * model.hidden,
        "final_norm": 4.0 * model.hidden, "add": 3.0 * model.hidden, "rope": 2 * turned,
        "qk_norm": 2 * turned, "act": (3 if model.gated else 2) * model.inner / shared,
    }[operator]  # fmt: skip


def fused_s(
    operator: str, model: Architecture, device: Device, tokens: Floats, *, shared: int = 1,
    launch_s: float = LAUNCH_S,
) -> Floats:  # fmt: skip
    """Return seconds of one fused kernel: its launch, and the bytes that it moves."""
    moved = tokens * moved_per_token(operator, model, shared)
    found: Floats = launch_s + moved / (MOVED * device.bandwidth)
    return found


def _curves(rows: pd.DataFrame) -> dict[tuple[str, str, int], Part]:
    """Return the operators that were timed, by operator, model and GPUs."""
    keys = ["operator", "model", "tensor_parallel", "tokens"]
    if rows.duplicated(keys).any():
        together = {"seconds": "median", "per_layer": "first", "measured": "min"}
        rows = rows.groupby(keys, as_index=False).agg(together)
    rows = rows.sort_values(keys)
    names = [*zip(*(rows[key].tolist() for key in keys[:3]), strict=True)]
    tokens, seconds = rows["tokens"].to_numpy(float), rows["seconds"].to_numpy(float)
    per_layer, measured = rows["per_layer"].tolist(), rows["measured"].to_numpy() == 1
    cuts = [i for i, name in enumerate(names) if not i or name != names[i - 1]]
    found = {}
    for first, last in pairwise([*cuts, len(names)]):
        curve = Curve(tokens[first:last], seconds[first:last])
        operator, model, shared = names[first]
        origin = MEASURED if measured[first:last].all() else CORRECTED
        found[str(operator), str(model), int(shared)] = Part(curve, int(per_layer[first]), origin)
    return found


def experts_reached(model: Architecture, tokens: Floats) -> Floats:
    """Return distinct experts that this many tokens reach.

    With tokens that choose independently, E experts and k a token, ``E (1 - (1 - k / E)^T)`` are
    reached by T tokens; times the model's ``concentration``, never fewer than k.
    """
    chance = model.experts_per_token / model.experts
    reached = model.experts * (1 - (1 - chance) ** tokens) * model.concentration
    return np.asarray(np.clip(reached, model.experts_per_token, model.experts))


def _alike(model: Architecture, operator: str = "") -> list[str]:
    """Return models with the same sizes of an operator, by default of a layer; itself first."""

    def sizes(one: Architecture) -> tuple[int | bool, ...]:
        if operator in ("lm_head", "sampler"):
            return one.hidden, one.vocab
        return (one.hidden,) if operator in ("embedding", "final_norm") else one.layer_shape

    same = [m.name for m in ARCHITECTURES.values() if sizes(m) == sizes(model)]
    return sorted(same, key=lambda name: name != model.name)


def _plane(rows: pd.DataFrame, tokens: Floats, experts: Floats) -> Floats:
    """Return seconds of an MoE block between the tokens and experts that were timed."""
    lines = []
    counts = np.array(sorted(set(rows["tokens"])), dtype=float)
    for count in counts:
        own = rows[rows["tokens"] == count].groupby("experts")["seconds"].median()
        known, seconds = own.index.to_numpy(float), own.to_numpy(float)
        # A token count's most experts are those that it can reach; below the fewest, all but a
        # launch shrinks.
        lines.append(np.interp(experts, [0.0, *known], [LAUNCH_S, *seconds]))
    table = np.array(lines)
    found = np.array([np.interp(t, counts, table[:, i]) for i, t in enumerate(tokens)])
    return np.asarray(found * np.maximum(tokens / counts[-1], 1.0))


def _quickest(rows: pd.DataFrame) -> Curve:
    """Return seconds by bytes of messages; none takes longer than the quickest larger one."""
    edges = 2.0 ** np.arange(10, 31)
    size, seconds = rows["size"].to_numpy(float), rows["seconds"].to_numpy(float)
    place = np.searchsorted(edges, size)
    kept = sorted(set(place.tolist()))
    at = np.array([np.median(size[place == i]) for i in kept])
    low = np.array([np.quantile(seconds[place == i], 0.25) for i in kept])
    return Curve(at, np.minimum.accumulate(low[::-1])[::-1])
