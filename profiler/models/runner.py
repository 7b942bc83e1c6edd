"""A causal language model with its cache; the only module that calls a model.

transformers' growing cache copies itself at every token and its static one cannot step
back.  Here every pass says which slots its tokens go to; a rejected token's slot is
simply written again by the next pass, and is hidden by the mask until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from profiler.models.attention import TokenBlock, attending, block_attention, dense_mask
from traces.errors import DraftsimError


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
            count, stop = key_states.shape[0], cache.start + key_states.shape[2]
            self.keys[:count, :, cache.start : stop] = key_states
            self.values[:count, :, cache.start : stop] = value_states
            return self.keys[:count, :, :stop], self.values[:count, :, :stop]
        rows, slots = cache.scatter  # (batch, 1), (batch, new_tokens)
        keys, values = self.keys[cache.rows], self.values[cache.rows]
        keys[rows, :, slots] = key_states.transpose(1, 2)
        values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : cache.visible], values[:, :, : cache.visible]

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Return (key length, offset); only asked for when no 4-D mask is given."""
        return self._cache.start + query_length, 0

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

    def place(self, start: int, stop: int) -> None:
        """Let the next pass write the slots from start up to stop of the first sequences.

        Raises DraftsimError if `stop` is beyond the last slot.
        """
        if stop > self.slots:
            raise DraftsimError(f"{stop} tokens do not fit the cache of {self.slots} slots")
        self.start, self.scatter = start, None

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


def context_of(model: Any) -> tuple[int, str]:
    """Return the longest text that the passes here compute as the model does, and what limits it.

    Here every token attends to all before it.  In a sliding or chunked window it does so only as
    far as the window reaches.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True)
    windows = {
        "sliding_attention": getattr(config, "sliding_window", None) if slides else None,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    found = [(w, "attention window") for k, w in windows.items() if w and k in (kinds or windows)]
    last = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    return min([(int(last), "context"), *found])


class Runner:
    """Runs passes of one model over one sequence or a batch, any slots rewritten at will.

    Parameters
    ----------
    model: A Hugging Face causal model in eval mode, attention ``sdpa``.
    slots: Cache capacity in tokens (prompt + output + drafts or tree branches).
    batch: Sequences the cache has room for; `forward` uses the first.
    """

    _attends_in_blocks = False
    _limit = "context"

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
        self._attends_in_blocks = config._attn_implementation == "sdpa"
        self.device = model.device
        self.max_positions, self._limit = context_of(model)
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self.cache = SlotCache(self.layers, slots, batch)
        # On a GPU attention without a mask is the fastest: with one, heads are copied, and no
        # flash attention takes it.  A lone token sees every slot shown, and a prompt fed from
        # the first slot on is causal without being told.
        self._maskless = self.device.type == "cuda"
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
                f"{self._limit} of {room}: shorten the prompt or lower --max-new-tokens"
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
        self.cache.place(start, stop)
        if mask is None:
            mask = self._causal_mask(start, stop)
        out = self.model(
            input_ids=tokens[None],
            attention_mask=None if mask is None else mask[None, None],
            position_ids=self._positions[:, start:stop] if positions is None else positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits[0]
        return logits

    def _causal_mask(self, start: int, stop: int) -> Tensor | None:
        """Return the causal mask of a pass over slots ``start`` to ``stop``; None if not needed."""
        if self._maskless and (start == 0 or stop == start + 1):
            return None
        return self._causal[start:stop, :stop]

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
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache,
            use_cache=True, logits_to_keep=keep,
        )  # fmt: skip
        logits: Tensor = out.logits
        return logits
