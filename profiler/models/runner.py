"""A causal language model with its cache; the only module that calls a model.

transformers' growing cache copies itself at every token and its static one cannot step
back.  Here every pass says which slots its tokens go to; a rejected token's slot is
simply written again by the next pass, and is hidden by the mask until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import (
    bidirectional_mask_function,
    chunked_overlay,
    sliding_window_overlay,
)

from profiler.models.attention import TokenBlock, attending, block_attention, dense_mask, to_add
from traces.errors import DraftsimError

First = Callable[[int], int]


def whole(start: int) -> int:
    """Return the first slot that a token attends to where it attends to all before it."""
    return 0


class Window(NamedTuple):
    """The tokens that a token attends to in one kind of layer."""

    size: int
    """Most tokens that it attends to, itself included."""
    shows: Callable[..., Any]
    """transformers' mask function, to be combined with a causal mask by "and"."""
    first: First
    """The first position that a token at a position attends to."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, shape (batch, kv_heads, slots, head_dim)."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: SlotCache, first: First) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._first = cache, first

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
            count, stop = key_states.shape[0], cache.start + key_states.shape[2]
            self.keys[:count, :, cache.start : stop] = key_states
            self.values[:count, :, cache.start : stop] = value_states
            seen = slice(self._begin(), stop)
            return self.keys[:count, :, seen], self.values[:count, :, seen]
        rows, slots = cache.scatter  # (batch, 1), (batch, new_tokens)
        keys, values = self.keys[cache.rows], self.values[cache.rows]
        keys[rows, :, slots] = key_states.transpose(1, 2)
        values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : cache.visible], values[:, :, : cache.visible]

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Return (key length, offset); only asked for when no 4-D mask is given."""
        begin = self._begin()
        return self._cache.start + query_length - begin, begin

    def _begin(self) -> int:
        return self._first(self._cache.start) if self._cache.near else 0

    def get_seq_length(self, *args: Any) -> int:
        """Return tokens before the current pass."""
        return self._cache.start

    def get_max_length(self) -> int:
        """Return the number of slots allocated."""
        return self._cache.slots

    # transformers before 5.20 asks under this name.
    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """Slots for `slots` tokens of each of `batch` sequences in each of `layers` layers.

    Set the placement before each pass: ``place(start, stop)`` writes consecutive slots of the
    first sequences, as many as are passed, and shows slots up to the last written;
    ``place_ragged(rows, positions, visible)`` writes slot ``positions[b, i]`` of sequence
    ``first + b`` and shows the first ``visible`` slots, leaving the rest to the mask.  The
    ragged form has fixed shapes, so a CUDA graph can capture it.

    One more slot than `slots`, number ``scratch``, takes what padding tokens write.

    ``firsts``: of each layer, `Window.first`; 0 for all if None.
    """

    def __init__(
        self, layers: int, slots: int, batch: int = 1, firsts: Sequence[First] | None = None
    ) -> None:
        self.slots = slots
        self.batch = batch
        self.scratch = slots
        self.start = 0
        self.near = False
        self.visible = slots
        self.rows = slice(0, batch)
        self.scatter: tuple[Tensor, Tensor] | None = None
        super().__init__(layers=[SlotLayer(self, first) for first in firsts or [whole] * layers])

    def place(self, start: int, stop: int, *, near: bool = False) -> None:
        """Let the next pass write the slots from start up to stop of the first sequences.

        ``near``: show layers with a window only the slots that their windows reach.

        Raises DraftsimError if `stop` is beyond the last slot.
        """
        if stop > self.slots:
            raise DraftsimError(f"{stop} tokens do not fit the cache of {self.slots} slots")
        self.start, self.scatter, self.near = start, None, near

    def place_ragged(self, rows: Tensor, positions: Tensor, visible: int, first: int = 0) -> None:
        """Let the next pass write ``positions`` (batch, new_tokens) of sequences from ``first`` on.

        ``rows`` (batch, 1) counts them: 0, 1, ...
        """
        self.scatter, self.visible = (rows, positions), visible
        self.rows = slice(first, first + positions.shape[0])

    def copy_row(self, source: int, destination: int) -> None:
        """Make sequence ``destination`` hold what ``source`` holds."""
        for buffer in self._buffers():
            buffer[destination] = buffer[source]

    def move(self, slots: Tensor, start: int) -> None:
        """Keep of a tree the tokens in `slots` (tokens,), in the slots from `start` on.

        Their rotary positions are those of the path already, so keys are copied as they are.
        """
        for buffer in self._buffers():
            # What is read is copied before anything is written.
            buffer[:1, :, start : start + slots.shape[0]] = buffer[:1, :, slots]

    def _buffers(self) -> Iterator[Tensor]:
        """Yield the keys and the values of every layer that a pass has run through."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                yield from (b for b in (layer.keys, layer.values) if b is not None)


NO_LIMIT = 1 << 62
"""Context of a model whose configuration names no last position."""


def context_of(model: Any) -> int:
    """Return the longest text that the passes here compute as the model does."""
    config = model.config.get_text_config()
    last = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    if getattr(config, "attn_temperature_tuning", False):
        # From there on Llama 4 scales queries by the length of its cache, not by their positions.
        last = min(last, config.floor_scale - 1)
    return int(last)


def windows_of(config: Any, slots: int, device: torch.device) -> dict[str, Window]:
    """Return the window of each kind of layer in texts of up to `slots` tokens.

    Raises DraftsimError if a kind of layer is unknown.
    """
    slides = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if slides else None
    chunk = getattr(config, "attention_chunk_size", None)
    full = Window(NO_LIMIT, bidirectional_mask_function, whole)
    known = {"full_attention": full}
    if chunk:
        left = torch.zeros(1, dtype=torch.long, device=device)  # tokens of padding before the text
        known["chunked_attention"] = Window(
            chunk, chunked_overlay(chunk, left), lambda at: at - at % chunk
        )
    if window:
        known["sliding_attention"] = Window(
            window, sliding_window_overlay(window), lambda at: max(0, at + 1 - window)
        )
    kinds = getattr(config, "layer_types", None) or list(known)[-1:]
    if others := set(kinds) - set(known):
        raise DraftsimError(
            f"{type(config).__name__} has layers of the kind {min(others)!r}: models with full, "
            "sliding and chunked attention can be used here"
        )
    return {kind: known[kind] if known[kind].size < slots else full for kind in kinds}


class Runner:
    """Runs passes of one model over one sequence or a batch, any slots rewritten at will.

    Parameters
    ----------
    model: A Hugging Face causal model in eval mode, attention ``sdpa`` or ``eager``.
    slots: Cache capacity in tokens (prompt + output + drafts or tree branches).
    batch: Sequences the cache has room for; `forward` uses the first.
    """

    _attends_in_blocks = False

    def __init__(self, model: Any, slots: int, batch: int = 1) -> None:
        if batch < 1:
            raise DraftsimError(f"batch is {batch}, expected at least 1 sequence")
        if getattr(model.config, "is_encoder_decoder", False):
            raise DraftsimError(
                f"{type(model).__name__} is an encoder-decoder model, which cannot be used here: "
                "it is profiled, replayed and validated with a draft model, one request at a time"
            )
        config = model.config.get_text_config()
        self.model = self.stack = model
        self.device = model.device
        self._windows = windows_of(config, slots, self.device)
        self._nearest = min(window.size for window in self._windows.values())
        windowed = self._nearest < NO_LIMIT
        self._kinds = getattr(config, "layer_types", None) if windowed else None
        self._fused = config._attn_implementation == "sdpa"
        self._attends_in_blocks = self._fused and not windowed
        self.max_positions = context_of(model)
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        kinds = self._kinds or [next(iter(self._windows))] * self.layers
        self._firsts = [self._windows[kind].first for kind in kinds[: self.layers]]
        self.cache = SlotCache(self.layers, slots, batch, self._firsts)
        # On a GPU attention without a mask is the fastest: with one, heads are copied, and no
        # flash attention takes it.  A lone token sees every slot shown, and a prompt fed from
        # the first slot on is causal without being told, up to the length of a window.
        self._maskless = self._fused and self.device.type == "cuda"
        # One causal matrix, sliced per pass: building a mask costs more than a small layer.
        self._causal = torch.ones(slots, slots, dtype=torch.bool, device=self.device).tril_()
        self._positions = torch.arange(slots, device=self.device)[None]
        self._rows = torch.arange(batch, device=self.device)[:, None]

    @property
    def captured(self) -> int:
        """Shapes captured as CUDA graphs so far; none here."""
        return 0

    def begin(self, prompt: Tensor) -> Tensor:
        """Start a request: the tokens that its first pass is fed, here the prompt itself."""
        return prompt

    def check_room(self, length: int, max_new_tokens: int) -> None:
        """Raise DraftsimError unless a prompt of ``length`` tokens and its output fit."""
        room = min(self.max_positions, self.cache.slots)
        if length + max_new_tokens > room:
            raise DraftsimError(
                f"a prompt of {length} tokens and {max_new_tokens} new ones exceed the "
                f"context of {room}: shorten the prompt or lower --max-new-tokens"
            )

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
        """Feed ``tokens`` into slots ``start ...`` and return the logits.

        Parameters
        ----------
        tokens: (new_tokens,) token ids on the model's device.
        start: first slot to write; slots before it are attended to.
        keep: logits wanted of the last ``keep`` tokens; 0 = all.
        mask: (new_tokens, start + new_tokens) for trees, booleans or numbers to add; causal if
            None.
        positions: (new_tokens,) positions, for trees; slots if None.

        Returns (kept, vocab) raw logits in the model's dtype.

        Raises DraftsimError if the tokens do not fit the cache.
        """
        stop = start + tokens.shape[0]
        out = self.model(
            input_ids=tokens[None],
            attention_mask=self._placed(start, stop, mask),
            position_ids=self._positions[:, start:stop] if positions is None else positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits[0]
        return logits

    def _placed(self, start: int, stop: int, mask: Tensor | None) -> Any:
        """Place a pass over slots ``start`` to ``stop``, and return its mask as in `_masks`.

        ``mask``: as in `forward`.  Returns None in place of causal masks that are not needed.
        """
        self.cache.place(start, stop, near=mask is None)
        if mask is not None:
            return self._masks(mask[None, None])
        bare = stop == start + 1 or (start == 0 and stop <= self._nearest)
        if self._maskless and bare:
            return dict.fromkeys(self._kinds) if self._kinds else None
        return self._masks(self._causal[None, None, start:stop, :stop], start=start)

    def _masks(
        self, mask: Tensor, form: Callable[[Tensor], Tensor] | None = None, start: int | None = None
    ) -> Any:
        """Return what the model takes as its mask: one for all layers, or one for each kind.

        ``mask``: (batch, 1, new_tokens, visible) as in `forward`, for layers without a window.
        ``form`` is applied to the boolean masks.  ``start``: where a pass begins that is shown no
        more than its windows reach.
        """
        form = form or self._formed
        if self._nearest == NO_LIMIT:
            return form(mask)
        seen = mask if mask.dtype == torch.bool else mask >= 0
        # Of what a token sees, the first is at position 0, and so on: in a tree, too, whose
        # tokens are in other slots.  So windows are counted in positions.
        places = seen.cumsum(-1, dtype=torch.int32) - 1
        masks = {}
        for kind, (_, shows, first) in self._windows.items():
            own = seen & shows(0, 0, places[..., -1:], places)
            masks[kind] = form(own if start is None else own[..., first(start) :])
        return masks if self._kinds else next(iter(masks.values()))

    def _formed(self, mask: Tensor) -> Tensor:
        if self._fused or mask.dtype != torch.bool:
            return mask
        # Plain attention adds the mask to its scores.
        return to_add(mask, self.model.dtype)

    @torch.inference_mode()
    def forward_blocks(
        self, tokens: Tensor, start: int, blocks: Sequence[TokenBlock], positions: Tensor
    ) -> Tensor:
        """Do `forward` for branches of a tree that attend in `blocks` covering all tokens."""
        if not self._attends_in_blocks:
            return self.forward(tokens, start, mask=dense_mask(blocks, start), positions=positions)
        # transformers makes no mask of its own where it is given one of four dimensions.
        unread = blocks[0].mask.new_zeros(()).expand(len(tokens), start + len(tokens))
        with attending(self.model, "draftsim_blocks", block_attention(blocks)):
            return self.forward(tokens, start, mask=unread, positions=positions)

    @torch.inference_mode()
    def forward_batch(
        self, tokens: Tensor, positions: Tensor, visible: int, *, first: int = 0, keep: int = 0
    ) -> Tensor:
        """Feed each sequence its own tokens at its own positions and return the logits.

        A token's slot is its position; it attends to the slots up to its own, so whatever
        lies beyond (rejected drafts, an earlier occupant) is hidden until it is rewritten.

        Parameters
        ----------
        tokens: (batch, new_tokens) token ids on the model's device.
        positions: (batch, new_tokens) positions; -1 marks padding, which is written to a
            scratch slot, sees slot 0 alone, and whose logits mean nothing.
        visible: slots shown, at least the largest position + 1.
        first: cache row of the first sequence; the others follow.
        keep: logits wanted of the last ``keep`` columns; 0 = all.

        Returns (batch, kept, vocab) raw logits in the model's dtype.

        Raises DraftsimError if the sequences or positions do not fit the cache.
        """
        count, cache = tokens.shape[0], self.cache
        if first + count > cache.batch:
            raise DraftsimError(
                f"{first + count} sequences do not fit the cache of {cache.batch} sequences"
            )
        if visible > cache.slots:
            raise DraftsimError(f"{visible} tokens do not fit the cache of {cache.slots} slots")
        slots = torch.where(positions < 0, cache.scratch, positions)
        cache.place_ragged(self._rows[:count], slots, visible, first)
        places = positions.clamp(min=0)
        mask = self._positions[0, :visible] <= places[:, None, :, None]  # (batch, 1, new, visible)
        out = self.model(
            input_ids=tokens, attention_mask=self._masks(mask), position_ids=places,
            past_key_values=cache, use_cache=True, logits_to_keep=keep,
        )  # fmt: skip
        logits: Tensor = out.logits
        return logits
