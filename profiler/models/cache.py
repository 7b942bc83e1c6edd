"""A preallocated key-value cache addressed by slot, so that rollback costs nothing.

transformers' growing cache copies itself at every token and its static one cannot step
back.  Here every pass says which slots its tokens go to; a rejected token's slot is
simply written again by the next pass, and is hidden by the mask until then.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, shape (batch, kv_heads, slots, head_dim)."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate both buffers once, from the first states seen."""
        heads, width = key_states.shape[1], key_states.shape[-1]
        batch, slots = self._cache.batch, self._cache.slots + 1
        # Zeros, not empty: a masked slot still enters 0 x value, which NaN would poison.
        self.keys = key_states.new_zeros(batch, heads, slots, width)
        self.values = value_states.new_zeros(batch, heads, slots, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's states to its slots; return what the mask refers to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        cache = self._cache
        if cache.scatter is None:
            stop = cache.start + key_states.shape[2]
            self.keys[:1, :, cache.start : stop] = key_states
            self.values[:1, :, cache.start : stop] = value_states
            return self.keys[:1, :, :stop], self.values[:1, :, :stop]
        rows, slots = cache.scatter  # (batch, 1), (batch, new_tokens)
        keys, values = self.keys[cache.rows], self.values[cache.rows]
        keys[rows, :, slots] = key_states.transpose(1, 2)
        values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : cache.visible], values[:, :, : cache.visible]

    def copy_row(self, source: int, destination: int) -> None:
        """Make sequence ``destination`` hold what ``source`` holds."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[destination] = buffer[source]

    def move(self, slots: Tensor, start: int) -> None:
        """Make the slots from `start` on hold what `slots` (tokens,) of the first sequence hold."""
        stop = start + slots.shape[0]
        for buffer in (self.keys, self.values):
            if buffer is not None:
                # What is read is copied before anything is written.
                buffer[:1, :, start:stop] = buffer[:1, :, slots]

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """(key length, offset); only asked for when no 4-D mask is given."""
        return self._cache.start + query_length, 0

    def get_seq_length(self, *args: Any) -> int:
        """Tokens before the current pass."""
        return self._cache.start

    def get_max_length(self) -> int:
        """Slots allocated."""
        return self._cache.slots

    # transformers before 5.20 asks under this name.
    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """Slots for `slots` tokens of each of `batch` sequences in each of `layers` layers.

    Set the placement before each pass: ``place(start)`` writes consecutive slots of the
    first sequence from ``start`` and shows slots up to the last written;
    ``place_ragged(rows, positions, visible)`` writes slot ``positions[b, i]`` of sequence
    ``first + b`` and shows the first ``visible`` slots, leaving the rest to the mask.  The
    ragged form has fixed shapes, so a CUDA graph can capture it.

    One more slot than `slots`, number ``scratch``, takes what padding tokens write.
    """

    def __init__(self, layers: int, slots: int, batch: int = 1) -> None:
        self.slots = slots
        self.batch = batch
        self.scratch = slots
        self.start = 0
        self.visible = slots
        self.rows = slice(0, batch)
        self.scatter: tuple[Tensor, Tensor] | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def place(self, start: int) -> None:
        """The next pass writes slots start, start + 1, ... of the first sequence."""
        self.start, self.scatter = start, None

    def place_ragged(self, rows: Tensor, positions: Tensor, visible: int, first: int = 0) -> None:
        """The next pass writes ``positions`` (batch, new_tokens) of sequences from ``first`` on.

        ``rows`` (batch, 1) counts them: 0, 1, ...
        """
        self.scatter, self.visible = (rows, positions), visible
        self.rows = slice(first, first + positions.shape[0])

    def copy_row(self, source: int, destination: int) -> None:
        """Make sequence ``destination`` hold what ``source`` holds."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.copy_row(source, destination)

    def move(self, slots: Tensor, start: int) -> None:
        """Keep of a tree the tokens in `slots` (tokens,), in the slots from `start` on.

        Their positions are those of the path: keys were turned by them, wherever they lay.
        """
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.move(slots, start)
