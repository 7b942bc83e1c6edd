"""A model as an engine runs it: projections fused, the rest compiled, each pass one CUDA graph.

Hugging Face's layers launch about forty kernels each, most of them for microseconds, so that even
in a CUDA graph the time of a small model follows its layers.  Here queries, keys and values are
one matrix product, so are gate and up, and what lies between the products is compiled.  Attention
and the cache are those of `profiler.models.graphs`: they stay outside the compiler, whose code is
then the same for every context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Linear, Module

from profiler.models.attention import grouped_attention
from profiler.models.cache import SlotCache
from profiler.models.graphs import GraphRunner

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of the same input, by the names that transformers gives them."""

_twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class CompiledRunner(GraphRunner):
    """A `GraphRunner` over the fused and compiled twin of a model, which shares its weights.

    On a CPU the fused passes run without being compiled.
    """

    _attention = staticmethod(torch.compiler.disable(grouped_attention))

    def __init__(self, model: Any, slots: int, batch: int = 1, granularity: int = 128) -> None:
        super().__init__(compiled(model), slots, batch, granularity)
        self.cache = ApartCache(self.layers, self.cache.slots, batch)


class ApartCache(SlotCache):
    """A cache that the compiler leaves alone: its slots and layers are not the code's."""

    update = torch.compiler.disable(SlotCache.update)


def compiled(model: Any) -> Any:
    """The twin of a model, made when first asked for; compiled where it lies on a GPU."""
    if model not in _twins:
        twin = fused(model)
        if model.device.type == "cuda":
            compile_layers(twin)
        _twins[model] = twin
    return _twins[model]


def forget_compiled() -> None:
    """Drop what was compiled: its caches hold on to the models."""
    on_gpu = any(model.device.type == "cuda" for model in _twins)
    _twins.clear()
    if on_gpu:  # elsewhere nothing was, and asking loads the compiler
        torch.compiler.reset()


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile every layer, and the final norm, for any number of tokens."""
    # Layers differ in a number, their index, that no code depends on.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for part in (*model.model.layers, model.model.norm):
        part.compile(dynamic=True, backend=backend)


def fused(model: Any) -> Any:
    """A copy of a model that shares its weights, with fused projections and norms.

    The weights of fused projections are laid side by side, in place, for both.
    """
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for names in FUSED:
                if all(hasattr(part, name) for name in names):
                    _lay_together([getattr(part, name) for name in names])
    # Everything but the tensors is copied.
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for layer in twin.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for names in FUSED:
                if all(hasattr(part, name) for name in names):
                    _fuse(part, names)
    for part in list(twin.modules()):
        for name, child in part.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(part, name, Norm(child))
    return twin.eval()


class Norm(Module):
    """A root-mean-square norm as one operation."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = plain.weight, plain.variance_epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Return what the module that it replaces returns, for any shape."""
        return torch.nn.functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class First(Module):
    """The first of some projections of the same input: computes all, and hands out its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.sizes = tuple(sizes)
        self.others: list[Tensor] = []

    def forward(self, states: Tensor) -> Tensor:
        """Its own part of the product, (..., sizes[0])."""
        whole = torch.nn.functional.linear(states, self.weight, self.bias)
        first: Tensor
        first, *others = whole.split(self.sizes, dim=-1)
        self.others = others
        return first


class Later(Module):
    """A further projection of the input that `First` was given just before."""

    def __init__(self, first: First, index: int) -> None:
        super().__init__()
        self.first, self.index = (first,), index  # in a tuple: it is no part of this one

    def forward(self, states: Tensor) -> Tensor:
        """Return the result that was already computed."""
        del states
        first = self.first[0]
        part: Tensor = first.others[self.index]
        if self.index == len(first.sizes) - 2:
            first.others = []  # else they would outlive the pass
        return part


def _lay_together(parts: Sequence[Linear]) -> None:
    """Make the weights of some projections consecutive rows of one matrix."""
    for name in ("weight", "bias"):
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None:
            continue
        whole = torch.cat([t.detach() for t in tensors])
        for tensor, rows in zip(tensors, whole.split([len(t) for t in tensors]), strict=True):
            tensor.data = rows


def _fuse(part: Module, names: Sequence[str]) -> None:
    linears: list[Any] = [getattr(part, name) for name in names]
    sizes = [linear.out_features for linear in linears]
    wholes = [
        None if tensors[0] is None else _whole(tensors)
        for tensors in ([linear.weight for linear in linears], [linear.bias for linear in linears])
    ]
    assert wholes[0] is not None
    first = First(wholes[0], wholes[1], sizes)
    setattr(part, names[0], first)
    for index, name in enumerate(names[1:]):
        setattr(part, name, Later(first, index))


def _whole(rows: Sequence[Tensor]) -> Tensor:
    """The one matrix that consecutive views make up."""
    first = rows[0].detach()
    shape = (sum(len(r) for r in rows), *first.shape[1:])
    return first.as_strided(shape, first.stride())


@cache
def compiler_missing(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device, or None."""
    if device.type != "cuda":
        return None
    try:
        probe = torch.compile(lambda x: (x * 2 + 1).relu(), dynamic=True)
        probe(torch.ones(64, device=device))
    except Exception as error:  # whatever stops the compiler leaves out this mode alone
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None
