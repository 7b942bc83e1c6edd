"""Timings of a layer's operators: Vidur's profiles and LLMServingSim's."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd

from policies.arrays import Bools, Floats
from traces.errors import DraftsimError, FileError
from traces.importers.base import Importer, Options
from traces.operators.dense import fused_s
from traces.operators.devices import Device, find_device
from traces.operators.shapes import Architecture, find_architecture
from traces.operators.table import OperatorTable, joined, rows_of
from traces.store.text import read_text

MOST = 1e10
"""Largest number of a timing: ten seconds in nanoseconds, ten gigabytes sent at once."""
MEANS = ("kv_mean",)
"""Columns of tokens that are means, and may have a fraction."""


@dataclass(frozen=True, eq=False)
class ReadFile:
    """A file's rows, and where they were timed, by its folders where the options do not say."""

    file: Path
    frame: pd.DataFrame
    options: Options
    source: str
    """The program that timed them."""
    left_out: list[str]
    """Rows that are not taken, and why."""

    @property
    def folders(self) -> list[str]:
        """Names of the folders above the file, innermost first."""
        return [folder.name for folder in self.file.resolve().parents]

    @cached_property
    def device(self) -> Device:
        """The GPU; FileError if it is not known."""
        return self._device(self.folders)

    @property
    def joined_device(self) -> Device:
        """The GPU whose name a folder of a topology begins with: ``a100_dgx``."""
        return self._device([name.partition("_")[0] for name in self.folders])

    def _device(self, names: Sequence[str]) -> Device:
        found = _first(find_device, self.options.device, names)
        if found is None:
            raise FileError(
                f"{self.file}: no folder above it is a GPU's: name the GPU with --device"
            )
        return found

    @cached_property
    def model(self) -> Architecture:
        """The model; FileError if it is not known."""
        found = _first(find_architecture, self.options.model, self.folders)
        if found is None:
            raise FileError(f"{self.file}: no folder above it is a model's: name it with --model")
        return found

    def column(self, name: str, least: float = 0.0) -> Floats:
        """Return a column's numbers; FileError if it is missing or holds anything else."""
        values = self._numbers(name)
        expected = f"a number from {least:g} to {MOST:g}"
        return self._checked(name, values, (values >= least) & (values <= MOST), expected)

    def counts(self, name: str, least: int = 0) -> Floats:
        """Return a column of whole numbers, likewise: tokens, sequences, GPUs, bytes."""
        values = self._numbers(name)
        fits = (values >= least) & (values <= MOST) & (values == np.floor(values))
        return self._checked(name, values, fits, f"a whole number from {least} to {MOST:g}")

    def times(self, name: str) -> Floats:
        """Return a column of times, likewise, in the file's unit: nothing that ran took none."""
        values = self._numbers(name)
        expected = f"a number above 0, at most {MOST:g}"
        return self._checked(name, values, (values > 0) & (values <= MOST), expected)

    def _numbers(self, name: str) -> Floats:
        if name not in self.frame:
            raise FileError(f"{self.file}: lacks the column {name}")
        return np.asarray(pd.to_numeric(self.frame[name], errors="coerce"), float)

    def _checked(self, name: str, values: Floats, fits: Bools, expected: str) -> Floats:
        """Return `values`; FileError naming the first row where they do not fit."""
        if not fits.all():
            row = int(fits.argmin())
            raise FileError(
                f"{self.file}: row {int(self.frame.index[row]) + 1}: {name} is "
                f"{str(self.frame[name].iloc[row])[:40]}, expected {expected}"
            )
        return values

    def only(self, which: pd.Series[bool]) -> ReadFile:
        """Return the file with some of its rows, which keep their numbers."""
        return replace(self, frame=self.frame[which])

    def rows(self, **columns: Any) -> pd.DataFrame:
        """Return rows of this device and model; a folder ``tpN`` gives the GPUs that share it."""
        shared = next((int(f[2:]) for f in self.folders if re.fullmatch(r"tp[1-9]\d*", f)), 1)
        place = {"device": self.device.name, "model": self.model.name, "source": self.source}
        return rows_of(**{"tensor_parallel": shared, **place, **columns})

    def timed(self, operator: str, time: str, unit: float, **columns: str) -> pd.DataFrame:
        """Return rows of one operator: seconds of the column `time`, others by their own names."""
        numbers = {
            ours: (self.column if theirs in MEANS else self.counts)(theirs)
            for ours, theirs in columns.items()
        }
        return self.rows(operator=operator, seconds=self.times(time) * unit, **numbers)


Place = TypeVar("Place", Device, Architecture)


def _first(find: Callable[[str], Place], given: str | None, names: Sequence[str]) -> Place | None:
    """Return the entry called `given`; without it, the entry of the first name that is known."""
    if given is not None:
        return find(given)
    for name in names:
        with suppress(DraftsimError):
            return find(name)
    return None


Reader = Callable[[ReadFile], pd.DataFrame]


class Profiles(Importer):
    """Profiles of one program: CSV files, gzipped or not, known by their columns."""

    takes = ("device", "model")
    source: ClassVar[str]
    """The program's repository."""
    kinds: ClassVar[Sequence[tuple[str, frozenset[str], Reader]]]
    """A file's name, the columns that it is known by, and what reads it."""

    def sniff(self, text: str) -> bool:
        return self._reader(text.partition("\n")[0].strip().split(",")) is not None

    def read(self, files: Sequence[Path], options: Options) -> OperatorTable:
        tables = []
        for file in files:
            try:
                frame = pd.read_csv(io.StringIO(read_text(file)), skipinitialspace=True)
            except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
                raise FileError(
                    f"{file}: cannot be read as CSV: give the .csv files of a profile ({error})"
                ) from None
            if not isinstance(frame.index, pd.RangeIndex):
                raise FileError(f"{file}: rows have more cells than the header has columns")
            if frame.empty:
                raise FileError(f"{file}: holds no timings, only a header")
            reader = self._reader(list(frame.columns))
            if reader is None:
                raise FileError(
                    f"{file}: is no profile of {type(self).__name__}: expected one of "
                    f"{', '.join(name for name, _, _ in self.kinds)}"
                )
            read = ReadFile(file, frame, options, self.source, [])
            meta = {"files": [file.name], "left_out": read.left_out}
            tables.append(joined([OperatorTable(reader(read), meta)]))
        return joined(tables)

    def _reader(self, columns: Sequence[str]) -> Reader | None:
        own = {name.strip().strip('"') for name in columns}
        return next((reader for _, needed, reader in self.kinds if needed <= own), None)


TAKEN = {
    "emb": ("embedding", 0), "attn_pre_proj": ("qkv", 1), "attn_rope": ("rope", 1),
    "attn_post_proj": ("o", 1), "mlp_up_proj": ("gate_up", 1), "mlp_act": ("act", 1),
    "mlp_down_proj": ("down", 1), "add": ("add", 1),
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")


def _mlp(read: ReadFile) -> pd.DataFrame:
    tokens, shared = read.counts("num_tokens"), read.counts("num_tensor_parallel_workers", 1)
    timed = {taken: read.times(f"time_stats.{name}.median") for name, taken in TAKEN.items()}
    if norms := [c for name in NORMS if (c := f"time_stats.{name}.median") in read.frame]:
        timed["norm", len(norms)] = np.mean([read.times(c) for c in norms], axis=0)
    parts = [
        read.rows(
            operator=operator, per_layer=per_layer, tensor_parallel=shared, tokens=tokens,
            seconds=milliseconds * 1e-3,
        )
        for (operator, per_layer), milliseconds in timed.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def _collective(read: ReadFile) -> pd.DataFrame:
    workers, on_machine, size = (
        read.counts(c) for c in ("num_workers", "devices_per_node", "size")
    )
    milliseconds = read.times("time_stats.all_reduce.min")
    own = workers == on_machine
    if not own.any():
        raise FileError(f"{read.file}: holds no message within one machine")
    if left := int((~own).sum()):
        read.left_out.append(f"{read.file}: {left} messages between machines")
    # Three repeats, launched from the host: the quickest is the one that the host did not hold up.
    return rows_of(
        device=read.joined_device.name, operator="all_reduce", per_layer=2,
        tensor_parallel=workers[own], size=size[own], mode=read.folders[0],
        seconds=milliseconds[own] * 1e-3, source=read.source,
    )  # fmt: skip


class Vidur(Profiles):
    """Vidur's profiles.

    ``<gpu>/<model>/mlp.csv``: a row for each number of tokens and of GPUs that share the layer,
    with ``time_stats.<operator>.median`` in milliseconds.  ``<topology>/all_reduce.csv``: a row for
    each message.  GPU and model are the names of the folders, or are given.  Only messages within
    one machine are taken.  Source of the format: microsoft/vidur, ``data/profiling``.
    """

    name = "vidur"
    summary = "Vidur's mlp.csv and all_reduce.csv of a GPU, gzipped or not: operators"
    source = "microsoft/vidur"
    kinds = (
        ("all_reduce.csv", frozenset({"time_stats.all_reduce.median"}), _collective),
        ("mlp.csv", frozenset({"time_stats.mlp_up_proj.median"}), _mlp),
    )


ITERATIONS = 3

DENSE = {
    "embedding": ("embedding", 0), "layernorm": ("norm", 2), "qkv_proj": ("qkv", 1),
    "qk_norm": ("qk_norm", 1), "rotary_emb": ("rope", 1), "o_proj": ("o", 1),
    "gate_up_proj": ("gate_up", 1), "act_fn": ("act", 1), "down_proj": ("down", 1),
    "final_layernorm": ("final_norm", 0), "lm_head": ("lm_head", 0), "sampler": ("sampler", 0),
}  # fmt: skip
LAYERS = {
    "embedding": ("embedding", 0), "q_proj": ("q", 1), "k_proj": ("k", 1), "v_proj": ("v", 1),
    "rope": ("rope", 1), "o_proj": ("o", 1), "gate_proj": ("gate", 1), "up_proj": ("up", 1),
    "act_fn": ("act", 1), "down_proj": ("down", 1), "gate": ("router", 1),
    "expert.w1": ("expert_gate", 1), "expert.w3": ("expert_up", 1),
    "expert.w2": ("expert_down", 1), "final_layernorm": ("final_norm", 0),
    "lm_head": ("lm_head", 0), "input_layernorm": ("norm", 2), "post_layernorm": ("norm", 2),
}  # fmt: skip
LAUNCHED = ("norm", "final_norm", "rope")
"""Operators that the older profiler timed launch by launch."""


def _dense(read: ReadFile) -> pd.DataFrame:
    by = "tokens" if "tokens" in read.frame else "sequences"
    return _named(read, "layer", DENSE, read.counts(by), read.times("time_us") * 1e-6)


def _layers(read: ReadFile) -> pd.DataFrame:
    own = read.only(read.frame["layer_name"] != "attn")  # a stub
    known = {**LAYERS, **({"act_fn": ("expert_act", 1)} if read.model.experts else {})}
    rows = _named(own, "layer_name", known, own.counts("input"), own.times("latency(ns)") * 1e-9)
    rows["tensor_parallel"] = own.counts("tp_size", 1).astype(int)
    for operator in LAUNCHED:
        which = (rows["operator"] == operator).to_numpy()
        timed = rows.loc[which, "seconds"].to_numpy(float)
        tokens = rows.loc[which, "tokens"].to_numpy(float)
        fused = fused_s(operator, read.model, read.device, tokens)
        rows.loc[which, "seconds"] = np.minimum(timed, fused)
        rows.loc[which, "measured"] = (timed <= fused).astype(int)
    return rows


def _named(
    read: ReadFile, column: str, known: Mapping[str, tuple[str, int]], tokens: Floats,
    seconds: Floats,
) -> pd.DataFrame:  # fmt: skip
    names = read.frame[column].fillna("nan").astype(str)
    if unknown := sorted(set(names) - set(known)):
        raise FileError(f"{read.file}: holds the unknown operator(s) {', '.join(unknown)}")
    return read.rows(
        operator=[known[n][0] for n in names], per_layer=[known[n][1] for n in names],
        tokens=tokens, seconds=seconds,
    )  # fmt: skip


def _attention(read: ReadFile) -> pd.DataFrame:
    return read.timed(
        "attention", "time_us", 1e-6, tokens="prefill_chunk", context="kv_prefill",
        batch="n_decode", batch_context="kv_decode",
    )  # fmt: skip


def _skew(read: ReadFile) -> pd.DataFrame:
    return read.timed(
        "attention", "t_skew_us", 1e-6 / _iterations(read.file), tokens="pc", context="kp",
        batch="n", batch_context="kv_mean", longest="kv_big",
    )  # fmt: skip


def _iterations(file: Path) -> int:
    for folder in file.resolve().parents[:3]:
        meta = folder / "meta.yaml"
        if meta.is_file():
            text = meta.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"^measurement_iterations: (\d+)", text, re.M):
                return int(found[1])
    return ITERATIONS


def _older_attention(read: ReadFile) -> pd.DataFrame:
    said = read.frame["is_prefill"].astype(str).str.lower() == "true"
    prompts, decodes = read.only(said), read.only(~said)
    chunk, reached = (prompts.counts(c) for c in ("prefill_chunk_size", "kv_cache_size"))
    batch, cached = (decodes.counts(c) for c in ("batch_size", "kv_cache_size"))
    parts = [
        prompts.rows(
            operator="attention_unsplit", tokens=chunk, context=np.maximum(reached - chunk, 0),
            tensor_parallel=prompts.counts("num_tensor_parallel_workers", 1),
            seconds=prompts.times("time_stats.attn_prefill.median") * 1e-3,
        ),
        decodes.rows(
            operator="attention_unsplit", tokens=0, batch=batch,
            batch_context=np.where(batch > 0, cached / np.maximum(batch, 1), 0),
            tensor_parallel=decodes.counts("num_tensor_parallel_workers", 1),
            seconds=decodes.times("time_stats.attn_decode.median") * 1e-3,
        ),
    ]  # fmt: skip
    rows = pd.concat(parts, ignore_index=True)
    # With less than a token a sequence there was nothing to attend to.
    return rows[(rows["batch"] == 0) | (rows["batch_context"] >= 1)]


def _moe(read: ReadFile) -> pd.DataFrame:
    return read.timed("moe", "time_us", 1e-6, tokens="tokens", experts="activated_experts")


def _step(read: ReadFile) -> pd.DataFrame:
    tokens, batch = read.counts("prefill_chunk"), read.counts("n_decode")
    # A step's chunk begins its prompt; `kv_decode` is the decoding sequences'.
    sizes = {
        "tokens": tokens, "batch": batch, "per_layer": 0,
        "batch_context": np.where(batch > 0, read.counts("kv_decode"), 0),
        "mode": read.frame["branch"].astype(str),
    }  # fmt: skip
    saved = np.maximum(read.column("saved_us", -MOST), 0) * 1e-6
    return pd.concat(
        [
            read.rows(operator="step", seconds=read.times("step_us") * 1e-6, **sizes),
            read.rows(operator="step_saved", seconds=saved, **sizes),
        ],
        ignore_index=True,
    )


class LLMServingSim(Profiles):
    """LLMServingSim's profiles.

    ``<gpu>/<model>/tp<N>/`` holds, of the profiler inside vLLM, ``dense.csv`` (a layer's operators
    by tokens), ``per_sequence.csv`` (head and sampler by sequences), ``attention.csv`` (a prompt's
    chunk and decoding sequences together), ``skew.csv`` (sequences of different lengths),
    ``moe.csv`` (an MoE block by tokens and experts reached) and ``step.csv`` (whole steps by
    CUDA-graph mode), in microseconds; of the older one ``layers.csv`` (nanoseconds) and its
    ``attention.csv`` (milliseconds).  GPU and model are the names of the folders, or are given.
    Source of the format: casys-kaist/LLMServingSim, ``profiler``.

    Three things in these files are not what they look like:

    * The older profiler timed norms and rotary positions launch by launch, unfused: 17 to 27 us,
      which is the host.  They are replaced by what a fused kernel takes (`fused_s`) where that is
      less, and marked as corrected.
    * The decode cells of the older ``attention.csv`` give the cache of all sequences together: read
      as tokens a sequence they would move 3.4 TB/s on a GPU of 0.77.  They time the kernel that
      does not share a sequence among multiprocessors, and are kept as ``attention_unsplit``.
    * The times in ``skew.csv`` are sums over the measurement's iterations, three unless
      ``meta.yaml`` says otherwise: batches whose sequences are alike take 2.995 times (0.012) those
      of ``attention.csv``.
    """

    name = "llmservingsim"
    summary = (
        "LLMServingSim's layers, attention, dense, per_sequence, skew, moe and step.csv: operators"
    )
    source = "casys-kaist/LLMServingSim"
    kinds = (
        ("dense.csv", frozenset({"layer", "tokens", "time_us"}), _dense),
        ("per_sequence.csv", frozenset({"layer", "sequences", "time_us"}), _dense),
        ("attention.csv", frozenset({"prefill_chunk", "kv_prefill", "time_us"}), _attention),
        ("skew.csv", frozenset({"kv_big", "kv_mean", "t_skew_us"}), _skew),
        ("moe.csv", frozenset({"tokens", "activated_experts", "time_us"}), _moe),
        ("step.csv", frozenset({"branch", "step_us", "saved_us"}), _step),
        ("layers.csv", frozenset({"layer_name", "input", "tp_size", "latency(ns)"}), _layers),
        (
            "attention.csv", frozenset({"time_stats.attn_prefill.median", "is_prefill"}),
            _older_attention,
        ),
    )  # fmt: skip
