"""The part of ``torch.cuda`` that a pretended GPU needs: streams, events, and captured graphs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretend_gpu import PretendedError, PretendedGPU, tensors_of


class Event:
    """An event of a device that never lags its host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing, self._at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        """Now."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds to `end`."""
        assert self._timing
        assert self._at > 0, "an event that was never recorded"
        return (end._at - self._at) * 1e3


class Stream:
    """A stream; all of them run in order."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""
        assert isinstance(other, Stream)


class Graphs:
    """Streams and captures of one pretended GPU."""

    def __init__(self, gpu: PretendedGPU) -> None:
        self.gpu, self.current = gpu, Stream()
        self.captured: list[CUDAGraph] = []

    def current_stream(self, device: Any = None) -> Stream:
        """The stream of the innermost block."""
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Work of the block goes to `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device; not counted, as only timing asks for it."""
        self.gpu.refuse_capture("synchronize")

    @contextmanager
    def graph(self, graph: CUDAGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        """Record the operations of the block; like a capture, it leaves nothing computed."""
        gpu = self.gpu
        self.synchronize()
        gpu.tape = []
        before, self.current = self.current, stream or Stream()
        try:
            if gpu.breaks_captures:
                raise PretendedError(
                    "CUDA error: operation failed due to a previous error during capture"
                )
            yield
        except PretendedError:
            gpu.tape = None  # torch then fails to end the capture, and leaves its stream current
            raise
        except BaseException:
            gpu.tape, self.current = None, before
            raise
        graph.close(gpu.tape, pool)
        gpu.tape, self.current = None, before
        self.captured.append(graph)


class CUDAGraph:
    """Recorded operations, run again on the same tensors they were recorded with."""

    owner: Graphs

    def __init__(self) -> None:
        self._steps: list[Any] = []
        self._made: list[torch.Tensor] = []
        self._holds = True
        """True if what it made is what it last computed."""
        self.pool: Any = None

    def close(self, tape: list[Any], pool: Any) -> None:
        """Keep what was recorded, and spoil what recording computed."""
        self.pool = pool
        for func, args, kwargs, out in tape:
            taken = {_key(t) for t in tensors_of((args, kwargs))}
            fresh = [t for t in tensors_of(out) if _key(t) not in taken]
            if fresh or func._schema.is_mutable:
                self._steps.append((func, args, kwargs, out))
                self._made += fresh
        self.spoil()

    def spoil(self) -> None:
        """Fill every tensor made inside with nonsense, unless that was done already."""
        if not self._holds:
            return
        self._holds = False
        with _bare():
            for tensor in self._made:
                if tensor.is_floating_point() and tensor.numel():
                    tensor.fill_(torch.nan)

    def replay(self) -> None:
        """Compute everything again; graphs of the same pool lose what they computed."""
        self.owner.gpu.refuse_capture("replay")
        for other in self.owner.captured:
            if other is not self and other.pool is not None and other.pool == self.pool:
                other.spoil()
        with _bare():
            for func, args, kwargs, out in self._steps:
                again = func(*args, **kwargs)
                for old, new in zip(tensors_of(out), tensors_of(again), strict=True):
                    if _key(old) != _key(new):
                        old.copy_(new)
        self._holds = True


@contextmanager
def _bare() -> Iterator[None]:
    """Without the rules of the pretended device."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode():
        yield


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


GROUPS = "_group_tensors_by_device_and_dtype"


def _grouped(gpu: PretendedGPU) -> Any:
    """Optimisers group their tensors below Python, where the pretended device is not seen."""
    plain = getattr(torch._C, GROUPS)

    def grouped(*args: Any) -> Any:
        groups = plain(*args).items()
        place = torch.device("cuda", 0)
        return {
            (place if gpu.has(lists[0][0][0]) else device, dtype): (lists, indices)
            for (device, dtype), (lists, indices) in groups
        }

    return grouped


@contextmanager
def installed(gpu: PretendedGPU, generator: Any) -> Iterator[None]:
    """Replace ``torch.cuda`` by the pretended device, name by existing name."""
    graphs = Graphs(gpu)
    bound = type("CUDAGraph", (CUDAGraph,), {"owner": graphs})
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
    pool = iter(range(1, 1 << 30))
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "Pretended GPU",
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "empty_cache": lambda: gpu.refuse_capture("empty_cache"),
        "synchronize": graphs.synchronize,
        "current_stream": graphs.current_stream,
        "stream": graphs.stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": bound,
        "graph": graphs.graph,
        "graph_pool_handle": lambda: (0, next(pool)),
        "is_current_stream_capturing": lambda: gpu.tape is not None,
    }
    patches = [mock.patch.object(torch._C, GROUPS, _grouped(gpu))]
    for name, value in names.items():
        real = getattr(torch.cuda, name)  # an AttributeError here: torch has no such name
        taken = set(inspect.signature(value).parameters)
        known = set(inspect.signature(real).parameters)
        # What a stand-in takes, torch must take as well.
        if inspect.isfunction(real) and inspect.isfunction(value):
            assert taken <= known, (name, taken, known)
        patches.append(mock.patch.object(torch.cuda, name, value))
    patches.append(mock.patch.object(torch, "Generator", generator))
    # A compiler sees none of the pretended device: what it is given runs as it is.
    patches.append(mock.patch.object(torch, "compile", lambda run, **_: run))
    patches.append(mock.patch.object(torch.compiler, "reset"))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
