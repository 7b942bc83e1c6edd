"""The command that starts an engine with what was found.

Options read in: vLLM ``--speculative-config``; SGLang ``srt/server_args.py`` and
``srt/speculative/adaptive_spec_params.py`` (0.5.23; it takes the steps that it begins with from
the candidates, and the draft tokens from the steps); TensorRT-LLM ``llmapi/llm_args.py``, whose
``decoding_type`` is compared as it is written; llama.cpp ``common/arg.cpp`` (since April 2026:
``--draft-max``, ``--draft-min`` and ``--draft-p-min`` before).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator.aggregate.advice import PredictedSpeed
from simulator.hardware.roofline import FORMATS
from simulator.recording import Recording
from simulator.tune.formats import (
    BY_BATCH,
    CHECKS,
    SGLANG_KEYS,
    fixed_steps,
    hf_setting,
    llamacpp_setting,
    merged,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.operators.shapes import find_architecture
from traces.sources.lookups.sources import PLD, LookupSource, NGram
from traces.store.identity import ROLES, model_in, same_model

TARGET, DRAFT, METHOD, FILE = "TARGET", "DRAFT", "METHOD", "FILE"
"""Placeholders for models, a method and a file that nobody named."""

COMMANDS = {
    "vllm": "vllm serve", "sglang": "python -m sglang.launch_server --model-path",
    "llamacpp": "llama-server -m", "tensorrt-llm": "trtllm-serve",
    "dynamo": "python -m dynamo.mocker --model-path",
}  # fmt: skip
"""The start of each engine's command, before the target; for transformers see `_hf`."""
SHARED = {
    "vllm": "--tensor-parallel-size", "sglang": "--tp-size", "tensorrt-llm": "--tp_size",
}  # fmt: skip
"""Each engine's option for the number of GPUs that share the target."""
METHODS = {
    "draft-model": "draft_model", "draft_model": "draft_model", "eagle": "eagle",
    "eagle3": "eagle3", "mtp": "mtp", "medusa": "medusa", "pld": "ngram", "ngram": "ngram",
    "suffix": "suffix",
}  # fmt: skip
"""vLLM's ``method`` of each source or kind of drafter (vllm/config/speculative.py,
``SpeculativeMethod``, 0.32)."""
WITHOUT_MODEL = ("ngram", "suffix")
"""Methods of vLLM that look drafts up and load no model."""
WITHOUT_TABLE = {"vllm": ("medusa", "suffix"), "sglang": ("draft_model",)}
"""vLLM's methods with which an engine cannot vary K.  In vLLM 0.32 these two assert that K is
``num_speculative_tokens`` (v1/spec_decode/medusa.py, suffix_decoding.py); SGLang's
``adaptive_unsupported_reason`` names EAGLE and EAGLE3 alone."""
OWN_WEIGHTS = ("mtp",)
"""Methods whose weights are in the target's own checkpoint, unless a model is named."""
GGUF = ".gguf"
"""Suffix of the files that llama.cpp reads; a model's folder or name does not end so."""
BY_METHOD: Mapping[str, Mapping[str, str]] = {
    "sglang": {
        "eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE", "mtp": "NEXTN",
    },
    "tensorrt-llm": {
        "eagle3": "Eagle3", "eagle": "Eagle", "mtp": "MTP", "ngram": "NGram",
        "draft_model": "Draft_Target",
    },
    "llamacpp": {"draft_model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp"},
}  # fmt: skip
"""vLLM's methods as SGLang's ``--speculative-algorithm``, TensorRT-LLM's ``decoding_type`` and
llama.cpp's ``--spec-type``.  The first is for drafters of which the method is not known."""


@dataclass(frozen=True)
class NamedDrafter:
    """Method and model of the drafter; None where they are not known."""

    method: str | None = None
    """vLLM's name, one of the values of `METHODS`."""
    model: str | None = None
    """A folder, or a name on the Hugging Face hub."""
    sizes: tuple[int, int] | None = None
    """Tokens of the shortest and longest n-gram that a lookup searches for."""

    def config(self) -> dict[str, Any]:
        """Return the keys of vLLM's ``--speculative-config`` that name the drafter, as far as
        known.

        >>> NamedDrafter("eagle3", "org/head").config()
        {'method': 'eagle3', 'model': 'org/head'}
        >>> NamedDrafter("ngram", sizes=(2, 5)).config()
        {'method': 'ngram', 'prompt_lookup_min': 2, 'prompt_lookup_max': 5}
        """
        found: dict[str, Any] = {} if self.method is None else {"method": self.method}
        if self.sizes is not None:
            found |= dict(zip(("prompt_lookup_min", "prompt_lookup_max"), self.sizes, strict=True))
        if self.model is not None and self.method not in WITHOUT_MODEL:
            found["model"] = self.model
        return found


def launch_line(
    engine: str, document: Mapping[str, Any] | None, *, target: str = TARGET, file: str = FILE,
    drafter: NamedDrafter | None = None, captured: Sequence[int] = (), shared: int = 1,
) -> str:  # fmt: skip
    """Return one line for a shell; for transformers, whose draft's folder holds the settings, a
    call.

    Parameters
    ----------
    engine:
        A name in `simulator.tune.formats.CHECKS`.
    document:
        Setting that `simulator.tune` found, or a `setting`; None: no speculation.
    target:
        The target model, as the engine's command names it.
    file:
        Where the document was written, for an engine that reads it from there.
    drafter:
        The drafter, as far as it was named; placeholders are put where it was not.
    captured:
        Tokens that vLLM is to capture CUDA graphs for; none: its own list.
    shared:
        GPUs that share the target.

    Raises
    ------
    DraftsimError
        For an unknown engine.

    >>> launch_line("llamacpp", {"spec-draft-n-max": 5}, target="t.gguf")
    'llama-server -m t.gguf -md DRAFT --spec-type draft-simple --spec-draft-n-max 5'
    """
    if engine not in CHECKS:
        raise DraftsimError(f"engine is {engine!r}, expected one of {', '.join(CHECKS)}")
    drafter = drafter or NamedDrafter()
    if engine == "hf":
        return _hf(document, target, drafter)
    if engine == "llamacpp" and not target.endswith(GGUF):
        target = TARGET
    start = f"{COMMANDS[engine]} {shlex.quote(target)}"
    if shared > 1 and engine in SHARED:
        start += f" {SHARED[engine]} {shared}"
    if document is None:
        return start
    sizes = f" --cudagraph-capture-sizes {' '.join(map(str, captured))}" if captured else ""
    return start + _speculating(engine, document, file, drafter) + sizes


def proposed_graphs(document: Mapping[str, Any] | None) -> CUDAGraphs | None:
    """Return CUDA graphs for the rounds of a vLLM setting: their sizes are multiples of K + 1.

    None without a setting, and for a table by sequence length.

    >>> table = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 1]]}
    >>> proposed_graphs(table).sizes
    (1, 2, 4, 6, 8)
    """
    rows = (document or {}).get(BY_BATCH)
    if not rows:
        return None
    return CUDAGraphs.for_lengths([(row[0], row[1], row[-1]) for row in rows])


def _speculating(engine: str, document: Mapping[str, Any], file: str, drafter: NamedDrafter) -> str:
    """Return what a setting adds to the command that starts an engine."""
    draft = drafter.model or DRAFT
    if engine == "vllm":
        known = {**drafter.config(), **document}
        config = {"method": known.pop("method", METHOD)}
        if "model" in known or config["method"] not in (*WITHOUT_MODEL, *OWN_WEIGHTS):
            config["model"] = known.pop("model", DRAFT)
        return f" --speculative-config {shlex.quote(json.dumps(config | known))}"
    if engine == "sglang":
        options = _options(document) if SGLANG_KEYS[0] in document else (
            " --speculative-eagle-topk 1 --speculative-adaptive --speculative-adaptive-config "
            + shlex.quote(file)
        )  # fmt: skip
        algorithm = _named(engine, drafter.method)
        if drafter.model or drafter.method not in OWN_WEIGHTS:
            options = f" --speculative-draft-model-path {shlex.quote(draft)}{options}"
        return f" --speculative-algorithm {algorithm}{options}"
    if engine == "llamacpp":
        options = f" --spec-type {_named(engine, drafter.method)}{_options(document)}"
        if drafter.model or drafter.method not in OWN_WEIGHTS:
            options = f" -md {shlex.quote(draft if draft.endswith(GGUF) else DRAFT)}{options}"
        return options
    if engine == "dynamo":
        return f" --extra-engine-args {shlex.quote(file)}"
    assert engine == "tensorrt-llm"
    settings: dict[str, Any] = {"decoding_type": _named(engine, drafter.method)}
    if drafter.method == "mtp":
        # Its drafts are as long as this says, 1 by default, whatever max_draft_len is.
        settings["num_nextn_predict_layers"] = document["max_draft_len"]
    if drafter.model or drafter.method not in (*WITHOUT_MODEL, *OWN_WEIGHTS):
        settings["speculative_model"] = draft
    # A file of options, written by the shell (bash or zsh); JSON is YAML too.
    options = shlex.quote(json.dumps({"speculative_config": {**settings, **document}}))
    return f" --extra_llm_api_options <(echo {options})"


def _options(document: Mapping[str, Any]) -> str:
    return "".join(f" --{name} {value}" for name, value in document.items())


def _hf(document: Mapping[str, Any] | None, target: str, drafter: NamedDrafter) -> str:
    """Return a line of Python in which `TARGET` and `DRAFT` are models, loaded if named."""
    names = {TARGET: target if target != TARGET else None}
    call = f"{TARGET}.generate(inputs)"
    update = ""
    if document is not None:
        names[DRAFT] = drafter.model
        options = ", ".join(f"{name}={value!r}" for name, value in document.items())
        update = f"{DRAFT}.generation_config.update({options}); "
        call = f"{TARGET}.generate(inputs, assistant_model={DRAFT})"
    loaded = "".join(
        f"{model} = AutoModelForCausalLM.from_pretrained({name!r}); "
        for model, name in names.items() if name is not None
    )  # fmt: skip
    imported = "from transformers import AutoModelForCausalLM; " if loaded else ""
    return f"{imported}{loaded}{update}{call}"


def _named(engine: str, method: str | None) -> str:
    """Return an engine's name for one of vLLM's methods, its first for None.

    Raises DraftsimError if none is known.
    """
    known = BY_METHOD[engine]
    if (found := known.get(method or next(iter(known)))) is None:
        raise DraftsimError(
            f"no setting of {engine} is known for the method {method!r}: expected one of "
            f"{', '.join(known)}"
        )
    return found


def about_sharing(engine: str, drafter: NamedDrafter, latency: LatencyTable) -> str:
    """Return a warning if `engine` shares the models between other GPUs than `latency` does.

    Engines share a draft model like the target.  vLLM 0.32 takes ``draft_tensor_parallel_size`` 1
    or the target's (``_verify_and_get_draft_tp``).  But with 1 its first runner does not start
    (``_raise_if_draft_tp_mismatch``), and layers are split over all the target's GPUs in the
    second, which is the default.  Empty if there is nothing to warn of.
    """
    shared = latency.meta.get("tensor_parallel") or {}
    target, draft = (int(shared.get(role, 1)) for role in ROLES)
    if engine not in SHARED or drafter.method != "draft_model" or target == draft:
        return ""
    one = "GPU" if draft == 1 else "GPUs"
    return (
        f"the latencies are those of a draft model on {draft} {one} and a target on {target}: "
        f"{engine} shares both alike, so name them @tp{target}, target and draft"
    )


def check_drafter(engine: str, recording: Recording) -> str | None:
    """Return vLLM's name of the drafter's method, None if unknown.

    Raises DraftsimError if no setting of `engine` is known for the drafter.
    """
    source = recording.source
    if isinstance(source, LookupSource) and (engine != "vllm" or source.name not in METHODS):
        raise DraftsimError(
            f"no setting of {engine} is known for the lookup {source.name}: settings for vLLM's "
            "n-gram method are, so name --engine vllm and --source ngram"
        )
    method = named_models(recording, recording.latency)[1].method
    if engine not in BY_METHOD:
        return method
    if method is None and recording.source is not None:
        method = recording.source.name  # one that vLLM has no method for
    if method is None and recording.one_pass:
        method = "one-pass"
    _named(engine, method)
    return method


def named_models(recording: Recording, latency: LatencyTable) -> tuple[str, NamedDrafter]:
    """Return the names of the target and the drafter.

    They are those recorded if `latency` is of these models, else those of the models that it
    prices: the settings are for them.  Models in another weight format have no name here
    (`quantised`).
    """
    target, drafter = _without_formats(recording, latency)
    formats = quantised(latency)
    if "draft" in formats:
        drafter = replace(drafter, model=None)
    return TARGET if "target" in formats else target, drafter


def quantised(latency: LatencyTable) -> dict[str, str]:
    """Return the formats of quantised weights that `latency` was extrapolated to, by role.

    The recorded models are other checkpoints than those.
    """
    note = latency.meta.get("scaled")
    formats = note["weights"] if isinstance(note, Mapping) else {}
    return {role: name for role, name in formats.items() if FORMATS[name].quantised}


def said_quantised(latency: LatencyTable, line: str) -> list[str]:
    """Return a sentence that asks for quantised checkpoints in a launch `line`; none if it names
    all models as they are priced.
    """
    named = {"target": TARGET, "draft": DRAFT}
    which = [
        f"{named[role]} (in {form})"
        for role, form in quantised(latency).items() if named[role] in line
    ]  # fmt: skip
    if not which:
        return []
    return [
        "--weights changes the costs and not the recorded checkpoints: in the launch name "
        f"quantised ones for {' and '.join(which)}"
    ]


def _without_formats(recording: Recording, latency: LatencyTable) -> tuple[str, NamedDrafter]:
    """Return what `named_models` does if the weights keep the format recorded."""
    trace, engine = recording.trace, latency.meta.get("engine") or {}
    priced = {role: model_in(latency.meta, role) for role in ROLES}
    same = {r: same_model(recording.models.get(r, {}), priced[r]) is not False for r in ROLES}
    known = _path(trace, "target") if same["target"] else _hub(priced["target"])
    target = str(latency.meta.get("target", TARGET)) if engine else known or TARGET
    if isinstance(recording.source, NGram | PLD):
        least, most = (
            (recording.source.min_n, recording.source.max_n)
            if isinstance(recording.source, NGram) else (1, recording.source.max_ngram)
        )  # fmt: skip
        return target, NamedDrafter("ngram", sizes=(least, most))
    if recording.source is not None:
        meta = recording.drafter
        kind = METHODS.get(str(meta.get("kind", recording.source.name)))
        model = meta.get("model") if same["target"] else None
        return target, NamedDrafter(kind, None if model is None else str(model))
    if engine.get("own_drafter"):
        model = str(latency.meta["draft"])
        # One name for both is that of a pair; as a model it would be the target itself.
        named = None if model == target else model
        return target, NamedDrafter(METHODS.get(engine["method"]), named)
    if isinstance(trace.meta.get("draft"), Mapping):
        known = _path(trace, "draft") if all(same.values()) else _hub(priced["draft"])
        return target, NamedDrafter("draft_model", None if known == target else known)
    return target, NamedDrafter()


def _hub(model: Mapping[str, Any]) -> str | None:
    """Return the name on the Hugging Face hub of a model that is known by its sizes, else None."""
    try:
        hub = find_architecture(str(model.get("name"))).hub
    except DraftsimError:
        return None
    return None if ":" in hub else hub


def _path(trace: Trace, role: str) -> str | None:
    """Return the folder or name of a recorded model; None if it is named by its role alone."""
    described = trace.meta.get(role)
    path = described.get("path") if isinstance(described, Mapping) else None
    return None if path in (None, role) else str(path)


def setting(
    engine: str, rows: Sequence[PredictedSpeed], method: str | None
) -> dict[str, Any] | None:
    """Return an engine's setting; None if no speculation is best at every concurrency."""
    longest = max(row.k for row in rows)
    if not longest:
        return None
    ranges = merged([row.batch for row in rows], [row.k for row in rows])
    if engine == "vllm":
        table = {} if len(ranges) == 1 else {BY_BATCH: ranges}
        if method in WITHOUT_TABLE[engine]:
            longest, table = _for_every_load(rows).k, {}
        named = {} if method is None else {"method": method}
        return {**named, "num_speculative_tokens": longest, **table}
    if engine == "tensorrt-llm":
        # Its longest draft is that of the smallest batch; after the last batch nothing is drafted.
        first = rows[0].k or longest
        schedule = {str(high): min(k or first * (low == 1), first) for low, high, k in ranges}
        while len(schedule) > 1 and not [*schedule.values()][-1]:
            schedule.popitem()
        return {"max_draft_len": first, "draft_len_schedule": schedule}
    chosen = _for_every_load(rows)
    k = chosen.k
    if engine == "sglang":
        return fixed_steps(k)
    if engine == "llamacpp":
        return llamacpp_setting(k, p_min=chosen.p_min)
    return hf_setting(k, threshold=chosen.p_min)


def _for_every_load(rows: Sequence[PredictedSpeed]) -> PredictedSpeed:
    """Return the row of the smallest concurrency asked about, if it drafts; else the longest."""
    return rows[0] if rows[0].k else max(rows, key=lambda row: row.k)
