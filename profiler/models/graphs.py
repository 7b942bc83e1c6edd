"""Passes of fixed shapes, captured once as CUDA graphs and then replayed.

A pass of a small model launches hundreds of kernels that each run for microseconds, so the
host, not the device, sets its time.  A captured pass is launched as a whole.  That asks for
shapes that do not change: the visible context is rounded up and the rest hidden by the mask.

Hugging Face's layers launch about forty kernels each, most of them for microseconds, so that even
in a CUDA graph the time of a small model follows its layers.  Here queries, keys and values are
one matrix product, so are gate and up, and what lies between the products is compiled.  Attention
and the cache stay outside the compiler, whose code is then the same for every context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Linear, Module

from profiler.models.attention import (
    attending,
    grouped_attention,
    has_fused_part,
    parts_of,
    split_mask,
)
from profiler.models.runner import Runner, SlotCache
from traces.errors import DraftsimError

WIDEST = 32
"""Tokens per sequence up to which a pass is captured; wider ones (prompts) run eagerly."""
GRANULARITY = 128
"""Visible contexts are multiples of it (at long contexts, of a sixteenth of their magnitude), so
that few graphs serve all contexts."""


class Shape(NamedTuple):
    """The properties that passes of the same graph share."""

    batch: int
    width: int
    visible: int
    keep: int


class _Pass:
    """One shape's input buffers, and once captured its graph and output."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        size = (shape.batch, shape.width)
        self.shape = shape
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.positions = torch.zeros(size, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all captures: libraries keep a workspace per stream for good."""
    return torch.cuda.Stream(device)


def capture(
    run: Callable[[], Tensor], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return `run` as a CUDA graph, and the tensor that a replay writes its result to.

    The warm-up runs off the current stream, as captures must, and on the stream of the capture, so
    that it makes every allocation that must not happen during one: caches, library handles and that
    stream's workspaces.
    """
    side, current = capture_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    # A capture that breaks off leaves its stream the current one; the outer block does not.
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            out = run()
    current.wait_stream(side)
    return graph, out


def captured(run: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    """Return `run` as one CUDA graph; on a CPU, `run` itself."""
    if device.type != "cuda":
        return run
    graph, _ = capture(run, device)
    return graph.replay


class GraphRunner(Runner):
    """A `Runner` whose narrow causal passes have static shapes, one CUDA graph each.

    A graph belongs to a (batch, width, visible context, kept logits), batches padded to
    powers of two; it is captured when its shape first occurs.
    Tree passes, prompts and rows that do not begin at the first run eagerly over the same
    cache.  On a CPU the same static code runs without capture.

    Parameters
    ----------
    model, slots, batch: As for `Runner`; slots are rounded up to a multiple of `GRANULARITY`.

    Raises DraftsimError for a model without fused attention.
    """

    _attention = staticmethod(grouped_attention)

    def __init__(self, model: Any, slots: int, batch: int = 1) -> None:
        super().__init__(model, -(-slots // GRANULARITY) * GRANULARITY, batch)
        config = model.config.get_text_config()
        if not self._fused:
            # Its attention knows neither capped scores (Gemma 2) nor sinks (gpt-oss).
            raise DraftsimError(
                f"{type(config).__name__} has no fused attention, which CUDA graphs and compiled "
                "layers need: profile it eagerly"
            )
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._heads: int = config.num_key_value_heads
        self._dtype = next(model.parameters()).dtype
        cuda = self.device.type == "cuda"
        self._processors: int = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 0
        )
        if cuda:  # found out now: it waits for the device, as no capture may
            width = config.hidden_size // config.num_attention_heads
            has_fused_part(self.device, self._dtype, getattr(config, "head_dim", None) or width)
        self._passes: dict[Shape, _Pass] = {}
        # One pool for all graphs: only one runs at a time, so they share their scratch memory.
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    @property
    def captured(self) -> int:
        """Shapes seen so far, each a graph on a GPU."""
        return len(self._passes)

    def bucket(self, stop: int) -> int:
        """Return the number of slots shown to a pass that needs the first `stop`."""
        step = max(GRANULARITY, 1 << max(0, stop.bit_length() - 5))
        return min(self.cache.slots, -(-stop // step) * step)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        start: int,
        *,
        keep: int = 0,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Do `Runner.forward`; the returned logits may be kept."""
        width = tokens.shape[0]
        stop = start + width
        if mask is not None or positions is not None or width > WIDEST or stop > self.cache.slots:
            return super().forward(tokens, start, keep=keep, mask=mask, positions=positions)
        shape = Shape(1, width, self.bucket(stop), min(keep, width) or width)
        return self._replay(shape, tokens[None], self._positions[:, start:stop])[0]

    @torch.inference_mode()
    def forward_batch(
        self, tokens: Tensor, positions: Tensor, visible: int, *, first: int = 0, keep: int = 0
    ) -> Tensor:
        """Do `Runner.forward_batch`; the returned logits may be kept."""
        batch, width = tokens.shape
        fits = visible <= self.cache.slots and batch <= self.cache.batch
        if first or width > WIDEST or not fits:
            return super().forward_batch(tokens, positions, visible, first=first, keep=keep)
        # Padded to a power of two: a batch shrinks as its sequences end.
        rows = min(self.cache.batch, 1 << (batch - 1).bit_length())
        shape = Shape(rows, width, self.bucket(visible), min(keep, width) or width)
        return self._replay(shape, tokens, positions)[:batch]

    @torch.inference_mode()
    def _replay(self, shape: Shape, tokens: Tensor, positions: Tensor) -> Tensor:
        held = self._passes.get(shape) or _Pass(shape, self.device)
        count = tokens.shape[0]
        held.tokens[:count].copy_(tokens)
        held.positions[:count].copy_(positions)
        held.positions[count:].fill_(-1)  # rows of no sequence write their scratch slots
        if self._pool is None:
            held.logits = self._static(held)
        elif held.graph is None:
            # The warm-up computes what the replay will: what it writes to the cache is right.
            held.graph, held.logits = capture(partial(self._static, held), self.device, self._pool)
        if held.graph is not None:
            held.graph.replay()
        assert held.logits is not None
        # Only now: a pass that ran out of memory is captured again when it is next asked for.
        self._passes[shape] = held
        # The next replay of this shape overwrites the output, and callers keep logits.
        return held.logits.clone()

    def _static(self, held: _Pass) -> Tensor:
        """Return the pass on its buffers, which depends on no host value but the shape."""
        batch, width, visible, keep = held.shape
        cache = self.cache
        slots = torch.where(held.positions < 0, cache.scratch, held.positions)
        cache.place_ragged(self._rows[:batch], slots, visible)
        places = held.positions.clamp(min=0)
        # (batch, 1, width, visible)
        seen = self._positions[0, :visible] <= places[:, None, :, None]
        parts = parts_of(visible, batch * self._heads, width * self._group, self._processors)
        with attending(self.model, "draftsim_grouped", self._attention):
            out = self.model(
                input_ids=held.tokens,
                attention_mask=self._masks(
                    seen, lambda mask: split_mask(mask[:, 0], self._group, self._dtype, parts)
                ),
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: Tensor = out.logits
        return logits


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of the same input, by the names that transformers gives them."""

_twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class CompiledRunner(GraphRunner):
    """A `GraphRunner` over the fused and compiled twin of a model, which shares its weights.

    On a CPU the fused passes run without being compiled.
    """

    _attention = staticmethod(torch.compiler.disable(grouped_attention))

    def __init__(self, model: Any, slots: int, batch: int = 1) -> None:
        super().__init__(compiled(model), slots, batch)
        self.cache = ApartCache(self.layers, self.cache.slots, batch, self._firsts)


class ApartCache(SlotCache):
    """A cache that is not compiled, so that compiled code does not depend on its size."""

    update = torch.compiler.disable(SlotCache.update)


def compiled(model: Any) -> Any:
    """Return the twin of a model, made at the first call; compiled if it is on a GPU."""
    if model not in _twins:
        twin = fused(model)
        if model.device.type == "cuda":
            compile_layers(twin)
        _twins[model] = twin
    return _twins[model]


def forget_compiled() -> None:
    """Drop compiled code, whose caches keep the models in memory."""
    on_gpu = any(model.device.type == "cuda" for model in _twins)
    _twins.clear()
    if on_gpu:  # elsewhere nothing was, and asking loads the compiler
        torch.compiler.reset()


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile every layer, and the final norm, for any number of tokens."""
    # Layers differ in a number, their index, that no code depends on.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # A size of 1 is compiled apart from larger ones: four versions a model, of rows and of width.
    # At the default limit of eight a third model would run uncompiled, without a word.
    torch._dynamo.config.recompile_limit = 64
    for part in (*model.model.layers, model.model.norm):
        part.compile(dynamic=True, backend=backend)


def fused(model: Any) -> Any:
    """Return a copy of a model that shares its weights, with fused projections and norms.

    The weights of fused projections are laid side by side, in place, for both.
    """
    for part, names in _fusible(model):
        _lay_together([getattr(part, name) for name in names])
    # Everything but the tensors is copied.
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for part, names in _fusible(twin):
        _fuse(part, names)
    for part in list(twin.modules()):
        for name, child in part.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(part, name, Norm(child))
    return twin.eval()


def _fusible(model: Any) -> list[tuple[Module, Sequence[str]]]:
    """Return the parts of a model's layers that have projections of FUSED, with their names."""
    parts = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]
    return [
        (part, names) for part in parts for names in FUSED
        if all(hasattr(part, name) for name in names)
    ]  # fmt: skip


class Norm(Module):
    """A root-mean-square norm as one operation."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = plain.weight, plain.variance_epsilon

    def forward(self, states: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


class First(Module):
    """The first of some projections of the same input: computes all, returns its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.sizes = tuple(sizes)
        self.others: list[Tensor] = []

    def forward(self, states: Tensor) -> Tensor:
        """Return its own part of the product, (..., sizes[0])."""
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
    """Return the matrix that consecutive views form."""
    first = rows[0].detach()
    shape = (sum(len(r) for r in rows), *first.shape[1:])
    return first.as_strided(shape, first.stride())


@cache
def compiler_missing(device: torch.device) -> str | None:
    """Return the reason why code cannot be compiled for a device, or None."""
    if device.type != "cuda":
        return None
    try:
        probe = torch.compile(lambda x: (x * 2 + 1).relu(), dynamic=True)
        probe(torch.ones(64, device=device))
    except Exception as error:  # whatever stops the compiler leaves out this mode alone
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None
