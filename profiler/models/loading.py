"""Loading of a target/draft pair onto a device; every failure is one clear line."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import Tensor

from profiler.models.seq2seq import (
    check_same_start,
    describe_seq2seq,
    ignored_settings,
    is_seq2seq,
)
from traces.errors import DraftsimError

IGNORED = "ignored_generation_settings"
"""Provenance of a model: the generation settings that change `generate`'s text, and not ours."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Pair:
    """Two models over one vocabulary, ready to run, and their provenance."""

    target: Any
    draft: Any
    tokenizer: Any
    meta: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Device of both models."""
        device: torch.device = self.target.device
        return device

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end an output, as the target's generation settings have them."""
        ids = getattr(self.target.generation_config, "eos_token_id", None)
        if ids is None:
            ids = self.target.config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    def encode(self, text: str, chat: bool = False) -> Tensor:
        """Return (tokens,) ids on the device; `chat`: of a user's turn, up to where the answer
        begins.

        Raises DraftsimError if the target's tokenizer has no chat template, or one that fails, or
        a token of the text has no row in a model's table.
        """
        if chat:
            if self.tokenizer.chat_template is None:
                raise DraftsimError(
                    "--chat: the target's tokenizer has no chat template: leave --chat out"
                )
            turns = [{"role": "user", "content": text}]
            try:
                text = self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # a template is the model's own program
                reason = " ".join(str(error).split())[:160] or type(error).__name__
                raise DraftsimError(
                    f"--chat: the target's chat template fails ({reason}): leave --chat out, or "
                    "mend the template in the model's folder"
                ) from error
        # A template writes all special tokens itself.
        options = {"add_special_tokens": False} if chat else {}
        ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        models = (self.target, self.draft)
        rows = min(model.get_input_embeddings().weight.shape[0] for model in models)
        if (largest := max(ids, default=0)) >= rows:
            raise DraftsimError(
                f"the tokenizer makes token {largest} of {shown(text)}, but the pair's tables have "
                f"{rows} rows: the tokenizer is that of another model"
            )
        return torch.tensor(ids, dtype=torch.long, device=self.device)


def choose_device(name: str) -> torch.device:
    """Return the device called `name` (cpu, cuda, cuda:1), made ready to decode and to be timed.

    Raises DraftsimError if it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DraftsimError(f"--device {name!r} is not a device: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DraftsimError(
            "--device cuda was asked for, but torch sees no CUDA device: use --device cpu, or "
            "install a CUDA build of torch and check the driver with nvidia-smi"
        )
    if device.type == "cuda":
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise DraftsimError(f"--device {name!r}: there are {count} GPUs, from cuda:0 on")
        # Streams, events and waits without a device are those of the current one.
        torch.cuda.set_device(device.index or 0)
        # cuDNN's attention makes a plan per shape, and decoding has a new shape every round.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`, or the device's usual one (cpu float32, cuda bfloat16)."""
    if name is None:
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    if name not in DTYPES:
        raise DraftsimError(f"--dtype {name!r} is not one of {', '.join(DTYPES)}")
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise DraftsimError("this GPU has no bfloat16: use --dtype float16 or float32")
    return DTYPES[name]


def load_pair(
    target: str | Path,
    draft: str | Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Pair:
    """Load two Hugging Face models (directory or hub id) with a shared tokenizer.

    Both are causal models, or both encoder-decoders (see `profiler.models.seq2seq`).  A model that
    brings code of its own is refused unless `trust_remote_code`: that code would be run.

    Raises
    ------
    DraftsimError
        If one cannot be loaded, does not fit in memory, is of another kind than the other,
        or the tokenizers differ.
    """
    # Its bars and deprecation notes would run through ours.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    # Said either way: where nothing is, transformers asks at the terminal, and runs it on a `y`.
    trust = {"trust_remote_code": trust_remote_code}
    tokenizers = [
        _load(transformers.AutoTokenizer, path, "tokenizer of", **trust) for path in (target, draft)
    ]
    factory = _model_factory(target, draft, **trust)
    check_tokenizers(tokenizers[0], tokenizers[1], str(target), str(draft))
    models = [
        _load(factory, path, "model", dtype=kind, attn_implementation="sdpa", **trust)
        for path in (target, draft)
    ]
    for model in models:
        if getattr(model.config, "alibi", False):
            raise DraftsimError(
                f"{type(model).__name__} with ALiBi positions takes no mask of four dimensions, "
                "which recordings need: use a model with rotary or learned positions"
            )
    if is_seq2seq(models[0]):
        check_same_start(*models)
    _check_rows(models, (target, draft), tokenizers[0])
    try:
        models = [m.to(where).eval() for m in models]
    except torch.OutOfMemoryError:
        raise DraftsimError(
            f"{target} and {draft} do not fit on {device} together: use a smaller pair, "
            "--dtype bfloat16, or --device cpu"
        ) from None
    meta = {
        "target": describe_model(models[0], target),
        "draft": describe_model(models[1], draft),
        "tokenizer": {"class": type(tokenizers[0]).__name__, "vocab_size": len(tokenizers[0])},
        "dtype": str(kind).removeprefix("torch."),
        "attention": "+".join(dict.fromkeys(m.config._attn_implementation for m in models)),
        **describe_device(where),
    }
    _share_vocabulary(models)
    return Pair(models[0], models[1], tokenizers[0], meta)


def _check_rows(models: Sequence[Any], names: Sequence[str | Path], tokenizer: Any) -> None:
    """Raise DraftsimError if the tokenizer has tokens of which one model alone has rows.

    The tokens that only the larger table has could never be drawn, or not be read.  A padding token
    is neither drawn nor read.
    """
    rows = [model.get_output_embeddings().weight.shape[0] for model in models]
    tokens = {*tokenizer.get_vocab().values()} - {tokenizer.pad_token_id}
    if cut := [i for i in tokens if min(rows) <= i < max(rows)]:
        few, many = (names[rows.index(one)] for one in (min(rows), max(rows)))
        raise DraftsimError(
            f"{few} has {min(rows)} rows in its table of tokens and {many} {max(rows)}, but their "
            f"tokenizer has {len(cut)} tokens between: a draft model must know all tokens of the "
            "target"
        )


def _share_vocabulary(models: Sequence[Any]) -> None:
    """Cut the logits of each model to the tokens that all have: the others are never drawn.

    With one tokenizer, tables still differ in length where they are padded differently: Qwen2.5's
    have 151,936 rows up to 3B and 152,064 from 7B on.
    """
    rows = min(model.get_output_embeddings().weight.shape[0] for model in models)
    for model in models:
        if model.get_output_embeddings().weight.shape[0] > rows:
            # The pass itself stays as it is, since it is timed.
            model.register_forward_hook(partial(_cut_logits, rows))
            model.config.get_text_config().vocab_size = rows


def _cut_logits(rows: int, model: Any, given: Any, out: Any) -> Any:
    out.logits = out.logits[..., :rows]
    return out


def check_tokenizers(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Raise DraftsimError unless both map the same text to the same ids."""
    mine, theirs = target.get_vocab(), draft.get_vocab()
    if mine != theirs:
        differing = sum(theirs.get(token) != i for token, i in mine.items())
        raise DraftsimError(
            f"{target_name} and {draft_name} have different tokenizers ({len(mine)} and "
            f"{len(theirs)} tokens, {differing} not shared): a draft model must share the "
            "target's vocabulary"
        )


def _model_factory(target: str | Path, draft: str | Path, **trust: bool) -> Any:
    """Return the class to load both with; DraftsimError if only one is an encoder-decoder."""
    configs = [load_config(path, **trust) for path in (target, draft)]
    kinds = [bool(getattr(config, "is_encoder_decoder", False)) for config in configs]
    if kinds[0] != kinds[1]:
        named = {kinds[0]: target, kinds[1]: draft}
        raise DraftsimError(
            f"{named[True]} is an encoder-decoder model and {named[False]} is not: a target and "
            "its draft must both be encoder-decoders or both causal models"
        )
    return transformers.AutoModelForSeq2SeqLM if kinds[0] else transformers.AutoModelForCausalLM


def load_config(path: str | Path, **trust: bool) -> Any:
    """Return the configuration of a model, by folder or hub id; DraftsimError if it has none."""
    return _load(transformers.AutoConfig, path, "model", **trust)


def _load(factory: Any, path: str | Path, what: str, **options: Any) -> Any:
    # What the hub's client says of every attempt would bury the one line that counts.
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        return factory.from_pretrained(str(path), **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "scaled_dot_product_attention" in text and options.get("attn_implementation") == "sdpa":
            # Gemma 2 and gpt-oss have no fused attention.
            plain = _load(factory, path, what, **{**options, "attn_implementation": "eager"})
            # Attention of other code may see less than its mask shows (GPT-Neo) or take none of
            # four dimensions (Bloom).
            if plain._supports_attention_backend:
                return plain
            advice = "it has neither fused attention nor transformers' plain one"
        elif "gated" in text or "401" in text or "403" in text:
            advice = "it needs an access token: set HF_TOKEN, or use a pair that is public"
        elif "trust_remote_code" in text:
            advice = "it brings code of its own: read that, then add --trust-remote-code to run it"
        elif not Path(path).is_dir():
            advice = "no such directory here, and the hub has no such id or cannot be reached"
        else:
            advice = "the directory is incomplete or not a language model that generates text"
        raise DraftsimError(f"cannot load the {what} {path}: {advice} ({text[:160]})") from error


def describe_model(model: Any, path: str | Path) -> dict[str, Any]:
    """Return name, revision, shape and ignored settings of a model, for provenance."""
    ignored = ignored_settings(model)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    # T5 names a head's width by itself.
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    width = width or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {
        "path": Path(path).name if Path(path).is_dir() else str(path),
        "revision": getattr(model.config, "_commit_hash", None),
        "architecture": type(model).__name__,
        "layers": config.num_hidden_layers,
        **(describe_seq2seq(model) if is_seq2seq(model) else {}),
        **({IGNORED: ignored} if ignored else {}),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "kv_values": 2 * config.num_hidden_layers * kv_heads * width,
        "tied": bool(config.tie_word_embeddings),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "fingerprint": fingerprint(model),
    }


def fingerprint(model: Any) -> str:
    """Return a digest of a model's weights (some values of each), which differs between models."""
    digest = hashlib.sha256()
    for name, weights in sorted(model.state_dict().items()):
        flat = weights.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].float().cpu().numpy()
        digest.update(name.encode() + some.tobytes())
    return digest.hexdigest()[:16]


def check_same_models(recorded: Mapping[str, Any], pair: Pair) -> None:
    """Raise DraftsimError if a recording was not made with the weights of `pair`."""
    for role in ("target", "draft"):
        before, now = ((meta.get(role) or {}).get("fingerprint") for meta in (recorded, pair.meta))
        # Another precision rounds the same weights to other values: not comparable.
        comparable = recorded.get("dtype") == pair.meta.get("dtype")
        if comparable and None not in (before, now) and before != now:
            raise DraftsimError(
                f"the {role} model's weights ({now}) are not those of the recording ({before}): "
                "profile the pair again"
            )


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return device, driver and library versions, for provenance."""
    versions = {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": torch.cuda.get_device_name(device),
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "versions": versions,
        }
    return {
        "device": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
