"""The settings that each engine accepts, and the policy that it runs under them.

The check of a document returns its policy, or raises SettingsError, which names the key and the
rule.  A file is checked when it is written and when it is read.

Rules read in the engines' own code: vLLM v1/spec_decode/dynamic/utils.py
(``validate_and_normalize_dynamic_sd_schedule``), SGLang 0.5.23
srt/speculative/adaptive_spec_params.py, transformers 5.23
generation/candidate_generator.py, llama.cpp common/arg.cpp, TensorRT-LLM llmapi/llm_args.py and
Dynamo's mocker (2026).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from reprlib import repr as shown
from typing import Any, NoReturn, TypeVar

from policies.batch.base import Policy
from policies.batch.engines import TensorRTLLM
from policies.batch.sglang import SGLangAdaptive
from policies.batch.tables import BatchTable
from policies.lengths.basic import Autoregressive, Fixed
from policies.lengths.huggingface import Confidence, HFHeuristic, RocUpdate
from policies.lengths.llamacpp import LlamaCppDraft
from traces.acceptance.trace import MOST_DRAFTED
from traces.errors import DraftsimError
from traces.store.text import read_json

CONTEXT_END = 2**31 - 1
"""The end of vLLM's last context range, which it reads as no end."""
BY_BATCH = "num_speculative_tokens_per_batch_size"
"""vLLM's table over batch sizes."""
BY_LENGTH = "num_speculative_tokens_per_seq_len"
"""vLLM's table over sequence lengths."""
ROWS = {3: "[lo, hi, K]", 5: "[lo, hi, context_lo, context_hi, K]"}
"""Forms of a row of vLLM's tables, by their length."""
HF_KEYS = (
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
)  # fmt: skip
SGLANG_KEYS = (
    "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens",
)  # fmt: skip
"""SGLang's options for steps that stay the same, without their dashes."""
LLAMACPP_KEYS = ("spec-draft-n-max", "spec-draft-n-min", "spec-draft-p-min")
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
ENGINE_OF: Mapping[str, str] = {
    BY_LENGTH: "vllm", "draft_len_schedule": "tensorrt-llm", "aic_nextn": "dynamo",
    BY_BATCH: "vllm", HF_KEYS[0]: "hf", LLAMACPP_KEYS[0]: "llamacpp",
    "num_speculative_tokens": "vllm", SGLANG_KEYS[0]: "sglang",
}  # fmt: skip
"""The engine that reads a key; the keys of SGLang's adaptive steps are batch sizes."""
OWN_KEYS = {"hf": HF_KEYS, "llamacpp": LLAMACPP_KEYS}
"""The keys of engines whose files have others, which are left alone."""

Made = TypeVar("Made", bound=Policy)


class SettingsError(DraftsimError):
    """A settings file that its engine would refuse or misread."""


def check_vllm(document: Mapping[str, Any]) -> BatchTable:
    """Check the Dynamic SD keys of vLLM's ``--speculative-config``, and return their policy.

    Rows of ``num_speculative_tokens_per_batch_size`` are all ``[lo, hi, K]`` or all ``[lo, hi,
    context_lo, context_hi, K]``, in any order; batch ranges are positive, begin at 1 and do not
    overlap; contexts start at 1 without gaps, and every batch range has the same ones.  K is cut to
    ``num_speculative_tokens``, which is at least 1.  Rows of ``num_speculative_tokens_per_seq_len``
    (vllm-project/vllm pull request 54801) are ``[lo, hi, K]`` over sequence lengths, from 1 and
    without gaps, with K up to ``num_speculative_tokens``, and exclude the other table.  Without
    either, ``num_speculative_tokens`` is the K of every load.

    >>> check_vllm({"num_speculative_tokens": 3, BY_BATCH: [[1, 8, 3]]}).table
    [[1, 8, 3]]
    """
    most: Any = document.get("num_speculative_tokens")
    _check_whole("num_speculative_tokens", most, 1, MOST_DRAFTED)
    if BY_BATCH not in document and BY_LENGTH not in document:
        return _made(BatchTable, [[1, 1, most]])  # vLLM keeps the last K of a table
    if BY_LENGTH in document:
        if BY_BATCH in document:
            _fail(BY_LENGTH, document[BY_LENGTH], f"which table wins is not known: drop {BY_BATCH}")
        rows = _rows(BY_LENGTH, document[BY_LENGTH], (3,), most)
        _continuous(BY_LENGTH, [row[:2] for row in rows])
        return _made(BatchTable, [[1, CONTEXT_END, *row] for row in rows])
    rows = _rows(BY_BATCH, document.get(BY_BATCH), (3, 5))
    # vLLM sorts the rows and cuts K (`build_dynamic_sd_schedule_lookup`).
    table = sorted([*row[:-1], min(row[-1], most)] for row in rows)
    policy = _made(BatchTable, table)
    batches = {tuple(row[:2]) for row in table}
    contexts = sorted({tuple(row[2:-1]) for row in table})
    if len(table) != len(batches) * len(contexts):
        _fail(BY_BATCH, table, "every batch range needs the same contexts, each once")
    if contexts != [()]:
        _continuous(BY_BATCH, contexts)
    return policy


def _rows(name: str, table: Any, widths: Sequence[int], most: int = CONTEXT_END) -> list[Any]:
    """Check that every row holds batch or context ranges, and K up to `most`; return the rows."""
    if not isinstance(table, list) or not table:
        _fail(name, table, "expected a list of rows [lo, hi, K]")
    for row in table:
        if not isinstance(row, list | tuple) or len(row) not in widths:
            _fail(name, row, f"expected {' or '.join(ROWS[width] for width in widths)}")
        if not all(_whole(end, 1) for end in row[:-1]):
            _fail(name, row, f"its ranges must be whole numbers, 1 to {CONTEXT_END}")
        if not _whole(row[-1], 0, most):
            bound = "" if most == CONTEXT_END else f", up to num_speculative_tokens = {most}"
            _fail(name, row, f"K must be 0 or more{bound}")
    return table


def _continuous(name: str, contexts: Sequence[Sequence[int]]) -> None:
    """Check that context ranges begin at 1 and have no gap, in which nothing would serve."""
    for low, high in contexts:
        if low > high:
            _fail(name, [low, high], f"the range {low}..{high} is empty")
    if contexts[0][0] != 1:
        _fail(name, contexts[0], "the first context range must start at 1")
    for (low, high), after in pairwise(contexts):
        if after[0] != high + 1:
            rule = f"expected to start at {high + 1}: it does not continue the context range"
            _fail(name, after, f"{rule} {low}..{high}")


def fixed_steps(length: int) -> dict[str, Any]:
    """Return SGLang's options for drafts of one length at every load.

    >>> fixed_steps(3)["speculative-num-draft-tokens"]
    4
    """
    return dict(zip(SGLANG_KEYS, (length, 1, length + 1), strict=True))


def check_sglang(document: Mapping[str, Any]) -> SGLangAdaptive | Fixed:
    """Check SGLang's ``--speculative-adaptive-config`` or `fixed_steps`, and return the policy.

    Keys are batch sizes as digits, each with ``candidate_steps`` (whole numbers >= 0),
    and settings, for all slots or within one.  A slot serves batches from its size on, so
    without one for 1 the smallest would serve batches it was not meant for.
    """
    if SGLANG_KEYS[0] in document:
        steps = document[SGLANG_KEYS[0]]
        _check_whole(SGLANG_KEYS[0], steps, 1, MOST_DRAFTED)
        for key, value in fixed_steps(steps).items():
            if document.get(key) != value:
                _fail(key, document.get(key), f"expected {value}, for one chain of {steps} drafts")
        return Fixed(steps)
    if (strategy := document.get("strategy", "ema")) != "ema":
        _fail("strategy", strategy, "expected 'ema', the strategy these slots are for")
    policy = _made(SGLangAdaptive, {k: v for k, v in document.items() if k != "strategy"})
    slots = {key: value["candidate_steps"] for key, value in document.items() if is_batch(key)}
    if "1" not in slots:
        _fail("config", sorted(slots), "expected a slot for batch size 1")
    for key, steps in slots.items():
        if steps != sorted(set(steps)) or steps[-1] > MOST_DRAFTED:
            rule = f"expected whole numbers up to {MOST_DRAFTED} that rise, each once"
            _fail(f"slot {key}: candidate_steps", steps, rule)
    return policy


def hf_setting(
    tokens: int, schedule: str = "constant", threshold: float = 0.0
) -> dict[str, Any]:  # fmt: skip
    """Return the keys of the draft's ``generation_config.json``.

    All are written, because transformers' own defaults are others.
    """
    return dict(zip(HF_KEYS, (tokens, schedule, threshold), strict=True))


def check_huggingface(document: Mapping[str, Any]) -> Confidence:
    """Check transformers' assisted-generation keys of the draft's ``generation_config.json``.

    The policy returned is transformers 5.23 under them, scikit-learn installed.
    """
    keys = HF_KEYS
    if set(document) != set(keys):
        _fail("keys", sorted(document), f"expected {', '.join(keys)}")
    _check_whole(keys[0], document[keys[0]], 1, MOST_DRAFTED)
    if document[keys[1]] not in SCHEDULES:
        _fail(keys[1], document[keys[1]], f"expected one of {', '.join(SCHEDULES)}")
    tokens, schedule, threshold = (document[key] for key in keys)
    # The threshold is re-fitted within each call, as 5.23 does.
    update: RocUpdate = "in_call" if threshold and schedule != "heuristic" else "off"
    if schedule == "constant":
        return _made(Confidence, tokens, threshold, update)
    persist = "persistent" if schedule == "heuristic" else "transient"
    return _made(HFHeuristic, tokens, "sent", threshold, update, persist)


def llamacpp_setting(tokens: int, fewest: int = 0, p_min: float = 0.0) -> dict[str, Any]:
    """Return the options by name, without their dashes, as the server's preset files hold them."""
    return dict(zip(LLAMACPP_KEYS, (tokens, fewest, p_min), strict=True))


def check_llamacpp(document: Mapping[str, Any]) -> LlamaCppDraft:
    """Check options of llama.cpp's server (April 2026), without their dashes."""
    if set(document) != set(LLAMACPP_KEYS):
        _fail("keys", sorted(document), f"expected {', '.join(LLAMACPP_KEYS)}")
    _check_whole(LLAMACPP_KEYS[0], document[LLAMACPP_KEYS[0]], 1, MOST_DRAFTED)
    return _made(LlamaCppDraft, *(document[key] for key in LLAMACPP_KEYS))


def check_tensorrt_llm(document: Mapping[str, Any]) -> TensorRTLLM:
    """Check the fields of TensorRT-LLM's ``speculative_config`` that `tune` writes.

    ``llmapi/llm_args.py``, ``DecodingBaseConfig`` (2026): ``draft_len_schedule`` maps the largest
    batch size of each range to its draft length, nothing is drafted beyond the last; the smallest
    key has ``max_draft_len``, and none has more.  Older releases took keys as the smallest batch
    size of a range and wanted a key of 1: they refuse these schedules unless there is one.
    """
    most: Any = document.get("max_draft_len")
    name = "draft_len_schedule"
    _check_whole("max_draft_len", most, 1, MOST_DRAFTED)
    schedule = document.get(name)
    if not isinstance(schedule, Mapping) or not all(is_batch(str(batch)) for batch in schedule):
        _fail(name, schedule, "expected draft lengths by batch size")
    if "max_concurrency" in document:
        _fail("max_concurrency", document["max_concurrency"], f"excludes {name}: drop one")
    policy = _made(
        TensorRTLLM, schedule, document.get("acceptance_window", 0),
        document.get("acceptance_length_threshold", 0.0), in_step=True,
    )  # fmt: skip
    if policy.longest != most:
        _fail(name, schedule, f"the smallest batch size must have max_draft_len = {most}")
    return policy


def check_dynamo(document: Mapping[str, Any]) -> Fixed:
    """Check the fields of Dynamo's mocker arguments that tell of acceptance.

    ai-dynamo/dynamo, ``normalize_conditional_accept_rates`` (2026): ``aic_nextn`` is 1 to 5, and
    ``aic_nextn_accept_rates`` a text of as many chances, commas between.
    """
    count, rates = document.get("aic_nextn"), document.get("aic_nextn_accept_rates")
    _check_whole("aic_nextn", count, 1, 5)
    try:
        found = [float(part) for part in rates.split(",")] if isinstance(rates, str) else []
    except ValueError:
        found = []
    if len(found) != count or not all(0 <= rate <= 1 for rate in found):
        _fail("aic_nextn_accept_rates", rates, f"expected {count} chances with commas between")
    return Fixed(count)


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], Policy]] = {
    "vllm": check_vllm,
    "sglang": check_sglang,
    "hf": check_huggingface,
    "llamacpp": check_llamacpp,
    "tensorrt-llm": check_tensorrt_llm,
    "dynamo": check_dynamo,
}


def check_settings(engine: str, document: Mapping[str, Any]) -> Policy:
    """Check a document by the rules of `engine` (`CHECKS`), and return the policy that it runs.

    Raises
    ------
    SettingsError
        For an unknown engine, or what it would refuse.
    """
    if engine not in CHECKS:
        _fail("engine", engine, f"expected one of {', '.join(CHECKS)}")
    return CHECKS[engine](document)


def read_settings(path: str | os.PathLike[str]) -> tuple[str, Policy]:
    """Read engine and policy of a file that `draftsim tune` wrote, or that an engine would read.

    ``null`` means any engine without a draft model, ``off``.  Keys other than an engine's own, such
    as the ``model`` and ``method`` of vLLM's ``--speculative-config``, are left alone.

    Raises
    ------
    FileError
        If the file cannot be read, or is not JSON.
    SettingsError
        If no engine's keys are in it, or the engine would refuse them.
    """
    document = read_json(path, "name a file that `draftsim tune` wrote")
    if document is None:
        return "off", Autoregressive()
    if not isinstance(document, dict):
        raise SettingsError(f"{path} holds a {type(document).__name__}, expected an object")
    engine = next((engine for key, engine in ENGINE_OF.items() if key in document), None)
    if engine is None and any(is_batch(key) for key in document):
        engine = "sglang"
    if engine is None:
        raise SettingsError(
            f"{path}: expected num_speculative_tokens (vLLM), a slot such as "
            '{"1": {"candidate_steps": [1]}} or speculative-num-steps (SGLang), '
            "num_assistant_tokens (transformers), "
            "spec-draft-n-max (llama.cpp), draft_len_schedule (TensorRT-LLM) or aic_nextn (Dynamo)"
        )
    own = {key: document[key] for key in OWN_KEYS.get(engine, document) if key in document}
    try:
        return engine, check_settings(engine, own)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def merged(ends: Sequence[int], values: Sequence[Any]) -> list[list[Any]]:
    """Return ranges [first, last, value] from 1 to `ends`; neighbours with one value share a range.

    >>> merged([4, 8, 64], [3, 3, 0])
    [[1, 8, 3], [9, 64, 0]]
    """
    found: list[list[Any]] = []
    for end, value in zip(ends, values, strict=True):
        if found and found[-1][-1] == value:
            found[-1][1] = end
        else:
            found.append([found[-1][1] + 1 if found else 1, end, value])
    return found


KEYS = {
    BatchTable: {"table": BY_BATCH},
    Confidence: {"confidence_threshold": HF_KEYS[2]},
    HFHeuristic: {"confidence_threshold": HF_KEYS[2]},
    LlamaCppDraft: dict(zip(("gamma", "gamma_min", "p_min"), LLAMACPP_KEYS, strict=True)),
    TensorRTLLM: {
        "schedule": "draft_len_schedule", "window": "acceptance_window",
        "threshold": "acceptance_length_threshold",
    },
}  # fmt: skip
"""Keys of the engines' files, by parameter of the policy that has another name for them."""


def _made(policy: Callable[..., Made], *values: Any, **options: Any) -> Made:
    """Return the policy; SettingsError in its words, with the file's keys, if it refuses values."""
    try:
        return policy(*values, **options)
    except ValueError as error:
        keys = KEYS.get(policy, {})  # type: ignore[call-overload]
        said = re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), str(error))
        raise SettingsError(said) from None


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if not _whole(value, least, most):
        _fail(name, value, f"expected a whole number, {least} to {most}")


def is_batch(key: object) -> bool:
    """Return whether a key of SGLang's file is a batch size in digits."""
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 9


def _whole(value: object, least: int, most: int = CONTEXT_END) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _fail(where: str, value: Sequence[Any] | object, rule: str) -> NoReturn:
    raise SettingsError(f"{where} is {shown(value)}: {rule}")
