"""The settings of an encoder-decoder model that tell how its decoding starts and ends."""

from __future__ import annotations

from typing import Any

from traces.errors import DraftsimError


def is_seq2seq(model: Any) -> bool:
    """Return True if the model has an encoder and a decoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def decoder_layers(decoder: Any) -> int:
    """Layers of a decoder stack, under either of the two names in use."""
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
    """Ids that `generate` never emits, by the model's generation settings."""
    settings = model.generation_config
    words = [ids[0] for ids in settings.bad_words_ids or [] if len(ids) == 1]
    return sorted({*words, *(settings.suppress_tokens or [])})


def ignored_settings(model: Any) -> dict[str, Any]:
    """Generation settings that change `generate`'s output and are not followed here."""
    settings = model.generation_config
    neutral = {
        "num_beams": (None, 1), "repetition_penalty": (None, 1.0), "min_length": (None, 0),
        "no_repeat_ngram_size": (None, 0), "forced_eos_token_id": (None,),
        "encoder_no_repeat_ngram_size": (None, 0),
    }  # fmt: skip
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
    """Shape and settings of an encoder-decoder, for provenance; ``layers`` are the decoder's."""
    layers = model.config.num_hidden_layers  # the encoder's, in every class
    ignored = ignored_settings(model)
    return {
        "layers": decoder_layers(model.get_decoder()),
        "encoder_layers": layers,
        **({"ignored_generation_settings": ignored} if ignored else {}),
    }
