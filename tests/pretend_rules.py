"""Rules for torch's calls and operations on a pretended GPU (see `tests.pretend_gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodWrapperType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_gpu import (
    CPU,
    CUDA,
    PretendedError,
    PretendedGPU,
    Wait,
    _where,
    tensors_of,
)

ATEN = torch.ops.aten

WAITING = {
    ATEN._local_scalar_dense.default: "item",
    ATEN.nonzero.default: "nonzero",
    ATEN.masked_select.default: "masked_select",
    ATEN.equal.default: "equal",
    ATEN._unique2.default: "unique",
    ATEN.unique_dim.default: "unique",
    ATEN.unique_consecutive.default: "unique",
    ATEN.bincount.default: "bincount",
    ATEN.repeat_interleave.Tensor: "repeat_interleave",
}
"""Operations whose result, or its shape, the host must have."""

INDEXING = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default,
            ATEN._index_put_impl_.default}  # fmt: skip
SCALARS = {ATEN.where.self, ATEN.masked_fill.Tensor, ATEN.masked_fill_.Tensor, ATEN.fill_.Tensor,
           ATEN.fill.Tensor}  # fmt: skip
"""In addition to pointwise operations, those that take a number in a CPU tensor."""
BETWEEN = {ATEN.copy_.default, ATEN._has_compatible_shallow_copy_type.default}
"""Operations that are there to bring devices together."""
WHOLE = {ATEN.linear.default, ATEN.matmul.default}
"""Made of others, but of arithmetic alone: the rules need not see their parts."""


class Kind:
    """The facts about an operation that the rules ask for at every call of it."""

    def __init__(self, func: Any) -> None:
        self.whole = func in WHOLE
        """True if it is known not to be made of others."""
        self.copies = func is ATEN.copy_.default
        self.waits = WAITING.get(func, "")
        self.indexes = func in INDEXING
        self.asks = bool(self.waits) or self.indexes
        self.between = func in BETWEEN
        self.scalars = torch.Tag.pointwise in func.tags or func in {*SCALARS, *INDEXING}


class Rules(TorchDispatchMode):
    """Which operations are allowed, what they make the host wait for, and where results lie."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self._kinds: dict[int, Kind] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled where these rules hold, and hiding each call from it takes time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # By address: every operation lives as long as torch, and hashes itself in Python.
        kind = self._kinds.get(id(func)) or self._kinds.setdefault(id(func), Kind(func))
        with torch._C.DisableTorchFunction():
            if not kind.whole and torch.is_inference_mode_enabled():
                # Where operations made of others arrive whole.
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
                kind.whole = True
            gpu = self.gpu
            given = tensors_of(args, kwargs)
            on = gpu.places(given)
            here = True in on
            if kind.copies:
                self._copy(args[0], args[1], bool(args[2:] and args[2]))
            elif here and (kind.asks or False in on):
                self._check(func, kind, args, given, on)
            out = func(*args, **kwargs)
            if not kind.copies and gpu.makes_here(here):
                gpu.mark(out)
            if gpu.tape is not None:
                gpu.tape.append((func, args, kwargs, out))
            return out

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        gpu = self.gpu
        if gpu.moving:
            return
        if gpu.has(source) and not gpu.has(to):
            gpu.wait("copy to the host")
        if gpu.has(to) and not gpu.has(source) and not (non_blocking and gpu.is_pinned(source)):
            gpu.wait("copy from the host")

    def _check(
        self, func: Any, kind: Kind, args: Any, given: Sequence[torch.Tensor], on: Sequence[bool]
    ) -> None:
        if kind.waits:
            self.gpu.wait(kind.waits)
        if kind.indexes:
            indices = tensors_of(args[1])
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.gpu.wait("index by a mask")
            if self.gpu.has(args[0]) and not all(map(self.gpu.has, indices)):
                self.gpu.wait("index from the host")
                indexed = {id(i) for i in indices}
                on = [here or id(t) in indexed for t, here in zip(given, on, strict=True)]
        if kind.between or all(on):
            return
        hosts = [t for t, here in zip(given, on, strict=True) if not here]
        if not (kind.scalars and all(t.dim() == 0 for t in hosts)):
            raise PretendedError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({func})"
            )


class Calls(TorchFunctionMode):
    """torch's own functions and methods, with ``cuda`` for a device."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self.gpu = gpu
        tensor = torch.Tensor
        self._own: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda t: CUDA if gpu.has(t) else t.device,  # type: ignore[attr-defined]
            tensor.is_cuda.__get__: gpu.has,  # type: ignore[attr-defined]
            tensor.get_device: lambda t: 0 if gpu.has(t) else -1,
            tensor.to: self._to,
            tensor.cuda: lambda t, *a, **k: self._moved(t, CUDA, **k),
            tensor.cpu: lambda t, **k: self._moved(t, CPU, **k),
            tensor.tolist: self._tolist,
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
            tensor.pin_memory: self._pin,
            tensor.is_pinned: gpu.is_pinned,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self._own.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        if func is torch._C._nn._parse_to:  # a module's: its tensors are then moved one by one
            return func(*args, **(kwargs or {}))
        # Every other call asks for a shape or type.
        if type(func) is MethodWrapperType and func.__name__ == "__get__":
            return func(*args)
        gpu, kwargs = self.gpu, kwargs or {}
        # Without a device or operands a factory makes host tensors: left to the operands.
        # Only what operands and device both leave open is decided by what the call is given.
        makes: Any = (args, kwargs)
        device = kwargs.get("device")
        if isinstance(device, (str, int, torch.device)):
            makes = _device(device).type == "cuda" or None
            if makes:
                kwargs = {**kwargs, "device": CPU}
        here = False
        if func in _WATCHED or "generator" in kwargs:
            here = gpu.touched(makes) if type(makes) is tuple else bool(makes)
            self._watch(func, here, args, kwargs)
        gpu.makes.append(makes)
        try:
            out = func(*args, **kwargs)
        finally:
            gpu.makes.pop()
        return gpu.mark(out) if here and func in _FACTORIES else out

    def _watch(self, func: Any, here: bool, args: Any, kwargs: Any) -> None:
        generator = kwargs.get("generator")
        if generator is not None and (generator.device.type == "cuda") != here:
            raise PretendedError(f"Expected a generator of the other device for {func}")
        if here and func in _FACTORIES:
            self.gpu.wait("tensor from the host")
        elif here and func is torch.nn.functional.scaled_dot_product_attention:
            self._attend(*args, **kwargs)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attn_mask: torch.Tensor | None = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if attn_mask is not None and len(query) == 1 < query.shape[2] == key.shape[2]:
            self.gpu.masked_prompts.append(Wait("mask", _where()))

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = dict(kwargs)
        flags = [a for a in args if isinstance(a, bool)]
        for value, name in zip(flags, ("non_blocking", "copy"), strict=False):
            names.setdefault(name, value)
        for value in args:
            if isinstance(value, torch.Tensor):
                names["dtype"], names["device"] = value.dtype, self._place(value)
            elif isinstance(value, torch.dtype):
                names["dtype"] = value
            elif isinstance(value, str | torch.device):
                names["device"] = value
        device = names.pop("device", None)
        return self._moved(tensor, self._place(tensor) if device is None else _device(device),
                           **names)  # fmt: skip

    def _place(self, tensor: torch.Tensor) -> torch.device:
        return CUDA if self.gpu.has(tensor) else tensor.device

    def _moved(
        self, tensor: torch.Tensor, device: torch.device, non_blocking: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        gpu, here = self.gpu, self.gpu.has(tensor)
        there = device.type == "cuda"
        if here == there:
            return tensor.to(**kwargs) if kwargs else tensor
        if tensor.device.type == "meta" or device.type == "meta":
            return tensor.to(device, **kwargs)
        if here:
            gpu.wait("copy to the host")
        elif not (non_blocking and gpu.is_pinned(tensor)):
            gpu.wait("copy from the host")
        kwargs["copy"] = True
        gpu.makes.append(there)
        gpu.moving = True
        try:
            moved = tensor.to(**kwargs)
        finally:
            gpu.makes.pop()
            gpu.moving = False
        return gpu.mark(moved) if there else moved

    def _tolist(self, tensor: torch.Tensor) -> Any:
        if self.gpu.has(tensor):
            self.gpu.wait("tolist")
        return tensor.tolist()

    def _numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.gpu.has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return tensor.numpy() if not args else tensor.__array__(*args, **kwargs)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gpu.refuse_capture("pinning memory")
        return self.gpu.mark(tensor.clone(), pinned=True)


_FACTORIES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_WATCHED = {*_FACTORIES, torch.nn.functional.scaled_dot_product_attention}


def _device(value: Any) -> torch.device:
    return CUDA if isinstance(value, int) else torch.device(value)
