"""Encoder-decoder models (BART, Marian, T5 classes) with the interface of `Runner`.

The source text is encoded once per request; what is then decoded speculatively is the
decoder, whose "prompt" is its start token.  Its self-attention cache is addressed by slot
as a causal model's is, and its cross-attention reads the same source states in every pass.
So recording, real decoding and spot checks need no code of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from profiler.models.runner import Runner, SlotCache
from traces.errors import DraftsimError


def is_seq2seq(model: Any) -> bool:
    """Return True if the model has an encoder and a decoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def decoder_layers(decoder: Any) -> int:
    """Return layers of a decoder stack, under either of the two names in use."""
    layers: int = len(decoder.layers if hasattr(decoder, "layers") else decoder.block)
    return layers


def decoder_prefix(model: Any) -> list[int]:
    """Return what `generate` puts before the first free token: start token, then the forced one."""
    settings = model.generation_config
    start = settings.decoder_start_token_id
    if start is None:
        start = getattr(model.config, "decoder_start_token_id", None)
    if start is None:
        start = settings.bos_token_id
    if start is None:
        raise DraftsimError(
            f"{type(model).__name__} names no decoder_start_token_id: add it to the model's "
            "generation_config.json"
        )
    forced = settings.forced_bos_token_id
    return [int(start)] if forced is None else [int(start), int(forced)]


def banned_tokens(model: Any) -> list[int]:
    """Return ids that `generate` never emits, by the model's generation settings."""
    settings = model.generation_config
    words = [ids[0] for ids in settings.bad_words_ids or [] if len(ids) == 1]
    return sorted({*words, *(settings.suppress_tokens or [])})


def ignored_settings(model: Any) -> dict[str, Any]:
    """Return generation settings that change `generate`'s output and are not followed here."""
    settings = model.generation_config
    neutral: dict[str, tuple[Any, ...]] = {
        "num_beams": (None, 1), "repetition_penalty": (None, 1.0), "min_length": (None, 0),
        "no_repeat_ngram_size": (None, 0), "forced_eos_token_id": (None,),
        "encoder_no_repeat_ngram_size": (None, 0), "min_new_tokens": (None, 0),
        "begin_suppress_tokens": (None, []), "sequence_bias": (None, {}),
        "encoder_repetition_penalty": (None, 1.0), "exponential_decay_length_penalty": (None,),
        "guidance_scale": (None, 1.0), "penalty_alpha": (None, 0.0),
    }  # fmt: skip
    if not is_seq2seq(model):  # whose runner follows `banned_tokens`
        neutral |= {"bad_words_ids": (None, []), "suppress_tokens": (None, [])}
    return {
        name: getattr(settings, name)
        for name, plain in neutral.items()
        if getattr(settings, name, None) not in plain
    }


def check_same_start(target: Any, draft: Any) -> None:
    """Raise DraftsimError unless both decoders start with the same tokens."""
    mine, theirs = decoder_prefix(target), decoder_prefix(draft)
    if mine != theirs:
        raise DraftsimError(
            f"the target's decoder starts with the tokens {mine} and the draft's with {theirs}: "
            "set the same decoder_start_token_id and forced_bos_token_id in both"
        )


def check_room(model: Any, length: int, max_new_tokens: int, where: str = "") -> None:
    """Raise DraftsimError unless a source of ``length`` tokens and its output have positions.

    ``where`` begins the message.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        return
    if length > limit:
        raise DraftsimError(
            f"{where}a source text of {length} tokens exceeds the encoder's {limit} positions: "
            "shorten it"
        )
    room = limit - len(decoder_prefix(model))
    if max_new_tokens > room:
        raise DraftsimError(
            f"{where}{max_new_tokens} new tokens exceed the decoder's {limit} positions, of which "
            f"{room} are free: lower --max-new-tokens"
        )


def describe_seq2seq(model: Any) -> dict[str, Any]:
    """Return an encoder-decoder's shape, for provenance; ``layers``: the decoder's."""
    layers = model.config.num_hidden_layers  # the encoder's, in every class
    return {"layers": decoder_layers(model.get_decoder()), "encoder_layers": layers}


EncodedSource = tuple[BaseModelOutput, Cache]
"""States of an encoded source text, and the decoder's cache over them."""


class Seq2SeqRunner(Runner):
    """Runs a decoder's passes over one encoded source, any slots rewritten at will.

    Parameters
    ----------
    model: A Hugging Face encoder-decoder model in eval mode, attention ``sdpa``.
    slots: Capacity of the decoder's cache in tokens (start + output + drafts or branches).

    Raises DraftsimError if the decoder's positions cannot be set, which tree-masked passes need.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model, self.device = model, model.device
        self.stack = model.get_decoder()
        self._positioned = position_setter(self.stack)
        # T5 has no last position: its biases are by distance.
        self.max_positions: int = getattr(model.config, "max_position_embeddings", None) or slots
        rows = model.get_output_embeddings().weight.shape[0]
        self.vocab_size: int = min(rows, model.config.vocab_size)  # that of the pair may be shorter
        self.layers: int = decoder_layers(self.stack)
        self.cache = SlotCache(self.layers, slots)
        self.source: EncodedSource | None = None
        self.prefix = torch.tensor(decoder_prefix(model), device=self.device)
        self._banned = torch.tensor(banned_tokens(model), dtype=torch.long, device=self.device)
        self._causal = torch.ones(slots, slots, dtype=torch.bool, device=self.device).tril_()
        # The position of each slot's token: its number, except for branches of a tree.
        self._places = torch.arange(slots, device=self.device)
        self._straight = torch.arange(slots, device=self.device)

    @torch.inference_mode()
    def begin(self, prompt: Tensor) -> Tensor:
        """Encode the source ``prompt`` (tokens,); the decoder starts with what is returned."""
        self.source = self.encode(prompt)
        return self.prefix

    @torch.inference_mode()
    def encode(self, prompt: Tensor) -> EncodedSource:
        """Return the source text's states; the first pass fills the cross-attention cache."""
        states = self.model.get_encoder()(input_ids=prompt[None])[0]  # (1, tokens, width)
        cache: Any = EncoderDecoderCache(self.cache, DynamicCache())
        output: Any = BaseModelOutput(last_hidden_state=states)
        return output, cache

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
        """Run `Runner.forward` over the decoder, which attends to the source of `begin`.

        Raises DraftsimError if the tokens do not fit the cache or nothing was encoded.
        """
        stop = start + tokens.shape[0]
        self.cache.place(start, stop)
        if self.source is None:
            raise DraftsimError("no source is encoded: call begin(source ids) before a pass")
        states, cache = self.source
        if mask is None:
            mask = self._causal[start:stop, :stop]
        own = self._straight[start:stop] if positions is None else positions
        self._places[start:stop] = own
        with ExitStack() as stack:
            if positions is not None:
                stack.enter_context(self._positioned(self._places[:stop], own))
            out = self.model(
                encoder_outputs=states,
                decoder_input_ids=tokens[None],
                decoder_attention_mask=mask[None, None],
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = out.logits[0, -keep if keep else 0 :]  # (kept, vocab)
        if self._banned.shape[0]:
            logits[:, self._banned] = -torch.inf
        return logits

    def forward_batch(
        self, tokens: Tensor, positions: Tensor, visible: int, *, first: int = 0, keep: int = 0
    ) -> Tensor:
        raise DraftsimError(
            f"{type(self.model).__name__} is an encoder-decoder model: decode one request at a time"
        )

    def check_room(self, length: int, max_new_tokens: int) -> None:
        check_room(self.model, length, max_new_tokens)
        room = self.cache.slots - int(self.prefix.shape[0])
        if max_new_tokens > room:
            raise DraftsimError(
                f"{max_new_tokens} new tokens do not fit the decoder's cache, which has room for "
                f"{room}: lower --max-new-tokens"
            )


def make_runner(model: Any, slots: int) -> Runner:
    """Return the runner of the model's kind, for one sequence at a time."""
    return Seq2SeqRunner(model, slots) if is_seq2seq(model) else Runner(model, slots)


def position_setter(decoder: Any) -> Any:
    """Return how to give a decoder's pass positions of its own: a context manager of

    ``places`` (visible,), the position of every slot shown, and ``own`` (new_tokens,).
    BART and Marian add an embedding of the position; T5 adds a bias by distance.
    """
    embed = getattr(decoder, "embed_positions", None)
    if embed is not None and "position_ids" in inspect.signature(embed.forward).parameters:
        return lambda places, own: _absolute(embed, own)
    # A cross-attention has the method too, but no bias of its own.
    biased = [m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)]
    if embed is None and biased and all(hasattr(m, "compute_bias") for m in biased):
        return lambda places, own: _relative(biased, places, own)
    raise DraftsimError(
        f"{type(decoder).__name__} takes no positions for its tokens, so draft tails cannot be "
        "recorded exactly: use a model of the BART, mBART, Marian, Pegasus or T5 classes"
    )


@contextmanager
def _absolute(embed: Any, own: Tensor) -> Iterator[None]:
    def placed(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": own}

    handle = embed.register_forward_pre_hook(placed, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _relative(biased: list[Any], places: Tensor, own: Tensor) -> Iterator[None]:
    def shadow(module: Any) -> Any:
        plain = type(module).compute_bias

        def compute_bias(query_length: int, key_length: int, **others: Any) -> Tensor:
            # One query at the far end sees every distance once: the model's own biases.
            others["past_seen_tokens"] = far = key_length - 1
            by_distance = plain(module, 1, key_length, **others)[0, :, 0]  # (heads, far + 1)
            apart = (own[:, None] - places[None]).clamp(0, far)  # (new_tokens, visible)
            bias: Tensor = by_distance[:, far - apart][None]
            return bias  # (1, heads, new_tokens, visible)

        return compute_bias

    for module in biased:
        module.compute_bias = shadow(module)
    try:
        yield
    finally:
        for module in biased:
            del module.compute_bias
