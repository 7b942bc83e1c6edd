"""Timings of a layer's operators: Vidur's profiles and LLMServingSim's."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.arrays import Floats
from traces.errors import DraftsimError, FileError
from traces.importers.base import Importer, Options
from traces.operators.devices import Device, find_device
from traces.operators.elementwise import fused_s
from traces.operators.shapes import Architecture, find_architecture
from traces.operators.table import OperatorTable, joined, rows_of
from traces.store.text import read_text


def read_frame(file: Path) -> pd.DataFrame:
    """Return the rows of a CSV file, gzipped or not; FileError for other files."""
    try:
        frame = pd.read_csv(io.StringIO(read_text(file)), skipinitialspace=True)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise FileError(
            f"{file}: cannot be read as CSV: give the .csv files of a profile ({error})"
        ) from None
    if frame.empty:
        raise FileError(f"{file}: holds no timings, only a header")
    return frame


MOST = 1e10
"""Largest number of a timing: ten seconds in nanoseconds, ten gigabytes sent at once."""


def numbers(file: Path, frame: pd.DataFrame, column: str, least: float = 0.0) -> Floats:
    """Return a column's numbers; FileError naming the file where it is missing or holds anything
    else.
    """
    if column not in frame:
        raise FileError(f"{file}: lacks the column {column}")
    values: Floats = pd.to_numeric(frame[column], errors="coerce").to_numpy(float)
    bad = ~(values >= least) | (values > MOST)
    if bad.any():
        row = int(bad.argmax())
        raise FileError(
            f"{file}: row {row + 1}: {column} is {str(frame[column].iloc[row])[:40]}, expected a "
            f"number from {least:g} to {MOST:g}"
        )
    return values


def place_of(
    file: Path, options: Options, needs_model: bool = True, folders: Sequence[str] | None = None
) -> tuple[Device, Any, int | None]:
    """Return (GPU, model, tensor parallel) of a file, by its folders where they are not given.

    ``folders`` are their names, innermost first; by default those of the path.

    Raises
    ------
    FileError
        If neither the folders nor the options say them.
    """
    if folders is None:
        folders = [part.name for part in file.resolve().parents if part.name]
    device = _found(find_device, options.device, folders)
    if device is None:
        raise FileError(f"{file}: no folder above it is a GPU's: name the GPU with --device")
    shape: Architecture | None = None
    if needs_model:
        shape = _found(find_architecture, options.model, folders)
        if shape is None:
            raise FileError(f"{file}: no folder above it is a model's: name it with --model")
    shared = next((int(f[2:]) for f in folders if re.fullmatch(r"tp\d+", f)), None)
    return device, shape, shared


def _found(find: Any, given: str | None, folders: Sequence[str]) -> Any:
    if given is not None:
        return find(given)
    for name in folders:
        try:
            return find(name)
        except DraftsimError:
            continue
    return None


TAKEN = {
    "emb": ("embedding", 0), "attn_pre_proj": ("qkv", 1), "attn_rope": ("rope", 1),
    "attn_post_proj": ("o", 1), "mlp_up_proj": ("gate_up", 1), "mlp_act": ("act", 1),
    "mlp_down_proj": ("down", 1), "add": ("add", 1),
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
VIDUR = "microsoft/vidur"


class Vidur(Importer):
    """Vidur's profiles.

    ``<gpu>/<model>/mlp.csv``: a row for each number of tokens and of GPUs that share the layer,
    with ``time_stats.<operator>.median`` in milliseconds.  ``<topology>/all_reduce.csv``: a row for
    each message.  GPU and model are the names of the folders, or are given.  Only messages within
    one machine are taken.  Source of the format: microsoft/vidur, ``data/profiling``.
    """

    name = "vidur"
    summary = "Vidur's mlp.csv and all_reduce.csv of a GPU, gzipped or not: operators"
    takes = ("device", "model")

    def sniff(self, text: str) -> bool:
        head = text.partition("\n")[0]
        return "time_stats.mlp_up_proj.median" in head or "time_stats.all_reduce.median" in head

    def read(self, files: Sequence[Path], options: Options) -> OperatorTable:
        return joined([_read(file, options) for file in files])


def _read(file: Path, options: Options) -> OperatorTable:
    frame = read_frame(file)
    if "time_stats.all_reduce.median" in frame:
        return _collective(file, frame, options)
    if "time_stats.mlp_up_proj.median" not in frame:
        raise FileError(f"{file}: is no profile of Vidur: expected its mlp.csv or all_reduce.csv")
    return _layer(file, frame, options)


def _layer(file: Path, frame: pd.DataFrame, options: Options) -> OperatorTable:
    device, model, _ = place_of(file, options)
    tokens, shared = (
        numbers(file, frame, c) for c in ("num_tokens", "num_tensor_parallel_workers")
    )
    parts = []
    norms = [f"time_stats.{n}.median" for n in NORMS if f"time_stats.{n}.median" in frame]
    found = {name: numbers(file, frame, f"time_stats.{name}.median") for name in TAKEN}
    timed = {TAKEN[name]: values for name, values in found.items()}
    if norms:
        each = np.array([numbers(file, frame, column) for column in norms])
        timed["norm", len(norms)] = each.mean(axis=0)
    for (operator, per_layer), milliseconds in timed.items():
        parts.append(rows_of(
            device=device.name, model=model.name, operator=operator, per_layer=per_layer,
            tensor_parallel=shared, tokens=tokens, seconds=milliseconds * 1e-3, source=VIDUR,
        ))  # fmt: skip
    rows = pd.concat(parts, ignore_index=True)
    return joined([OperatorTable(rows, {"files": [file.name]})])


def _collective(file: Path, frame: pd.DataFrame, options: Options) -> OperatorTable:
    topology = file.resolve().parent.name
    folders = [folder.name.partition("_")[0] for folder in file.resolve().parents]
    device, _, _ = place_of(file, options, needs_model=False, folders=folders)
    workers, beside, size, milliseconds = (
        numbers(file, frame, c)
        for c in ("num_workers", "devices_per_node", "size", "time_stats.all_reduce.min")
    )
    own = workers == beside
    if not own.any():
        raise FileError(f"{file}: holds no message within one machine")
    # Three repeats, launched from the host: the quickest is the one that the host did not hold up.
    rows = rows_of(
        device=device.name, operator="all_reduce", per_layer=2, tensor_parallel=workers[own],
        size=size[own], mode=topology, seconds=milliseconds[own] * 1e-3, source=VIDUR,
    )  # fmt: skip
    left = int((~own).sum())
    meta = {"files": [file.name]}
    if left:
        meta["left_out"] = [f"{file}: {left} messages between machines"]
    return joined([OperatorTable(rows, meta)])


LLMSERVINGSIM = "casys-kaist/LLMServingSim"
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


class ReadFile(NamedTuple):
    """A file's rows, and where they were timed."""

    file: Path
    frame: pd.DataFrame
    device: Device
    model: Architecture
    shared: int

    def column(self, name: str, least: float = 0.0) -> Floats:
        """Return its numbers."""
        return numbers(self.file, self.frame, name, least)

    def rows(self, **columns: Any) -> pd.DataFrame:
        """Return rows of this device and model."""
        shared = columns.pop("tensor_parallel", self.shared)
        return rows_of(
            device=self.device.name, model=self.model.name, tensor_parallel=shared,
            source=LLMSERVINGSIM, **columns,
        )  # fmt: skip


class LLMServingSim(Importer):
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
    takes = ("device", "model")

    def sniff(self, text: str) -> bool:
        return _kind(text.partition("\n")[0].strip().split(",")) is not None

    def read(self, files: Sequence[Path], options: Options) -> OperatorTable:
        tables = []
        for file in files:
            frame = read_frame(file)
            kind = _kind(list(frame.columns))
            if kind is None:
                raise FileError(
                    f"{file}: is no profile of LLMServingSim: expected one of "
                    f"{', '.join(name for name, _, _ in KINDS)}"
                )
            device, model, shared = place_of(file, options)
            read = ReadFile(file, frame, device, model, shared or 1)
            tables.append(joined([OperatorTable(kind(read), {"files": [file.name]})]))
        return joined(tables)


def _dense(read: ReadFile) -> pd.DataFrame:
    by = "tokens" if "tokens" in read.frame else "sequences"
    return _named(read, "layer", DENSE, read.column(by), read.column("time_us") * 1e-6)


def _layers(read: ReadFile) -> pd.DataFrame:
    kept = read.frame["layer_name"] != "attn"  # a stub
    own = read._replace(frame=read.frame[kept].reset_index(drop=True))
    known = {**LAYERS, **({"act_fn": ("expert_act", 1)} if read.model.experts else {})}
    rows = _named(own, "layer_name", known, own.column("input"), own.column("latency(ns)") * 1e-9)
    rows["tensor_parallel"] = own.column("tp_size").astype(int)
    for operator in LAUNCHED:
        which = (rows["operator"] == operator).to_numpy()
        timed = rows.loc[which, "seconds"].to_numpy(float)
        tokens = rows.loc[which, "tokens"].to_numpy(float)
        fused = fused_s(operator, read.model, read.device, tokens)
        rows.loc[which, "seconds"] = np.minimum(timed, fused)
        rows.loc[which, "measured"] = (timed <= fused).astype(int)
    return rows


def _named(
    read: ReadFile,
    column: str,
    known: Mapping[str, tuple[str, int]],
    tokens: Floats,
    seconds: Floats,
) -> pd.DataFrame:
    names = read.frame[column].fillna("nan").astype(str)
    if unknown := sorted(set(names) - set(known)):
        raise FileError(f"{read.file}: holds the unknown operator(s) {', '.join(unknown)}")
    return read.rows(
        operator=[known[n][0] for n in names], per_layer=[known[n][1] for n in names],
        tokens=tokens, seconds=seconds,
    )  # fmt: skip


def _attention(read: ReadFile) -> pd.DataFrame:
    return read.rows(
        operator="attention", tokens=read.column("prefill_chunk"),
        context=read.column("kv_prefill"), batch=read.column("n_decode"),
        batch_context=read.column("kv_decode"), seconds=read.column("time_us") * 1e-6,
    )  # fmt: skip


def _skew(read: ReadFile) -> pd.DataFrame:
    return read.rows(
        operator="attention", tokens=read.column("pc"), context=read.column("kp"),
        batch=read.column("n"), batch_context=read.column("kv_mean"),
        longest=read.column("kv_big"),
        seconds=read.column("t_skew_us") * 1e-6 / _iterations(read.file),
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
    frame = read.frame
    said = frame["is_prefill"].astype(str).str.lower() == "true"
    prompts, decodes = (
        read._replace(frame=frame[which].reset_index(drop=True)) for which in (said, ~said)
    )
    chunk, reached = (prompts.column(c) for c in ("prefill_chunk_size", "kv_cache_size"))
    batch, cached = (decodes.column(c) for c in ("batch_size", "kv_cache_size"))
    parts = [
        prompts.rows(
            operator="attention_unsplit", tokens=chunk, context=np.maximum(reached - chunk, 0),
            tensor_parallel=prompts.column("num_tensor_parallel_workers"),
            seconds=prompts.column("time_stats.attn_prefill.median") * 1e-3,
        ),
        decodes.rows(
            operator="attention_unsplit", tokens=0, batch=batch,
            batch_context=np.where(batch > 0, cached / np.maximum(batch, 1), 0),
            tensor_parallel=decodes.column("num_tensor_parallel_workers"),
            seconds=decodes.column("time_stats.attn_decode.median") * 1e-3,
        ),
    ]  # fmt: skip
    rows = pd.concat(parts, ignore_index=True)
    # With less than a token a sequence there was nothing to attend to.
    return rows[(rows["batch"] == 0) | (rows["batch_context"] >= 1)]


def _moe(read: ReadFile) -> pd.DataFrame:
    return read.rows(
        operator="moe", tokens=read.column("tokens"), experts=read.column("activated_experts"),
        seconds=read.column("time_us") * 1e-6,
    )  # fmt: skip


def _step(read: ReadFile) -> pd.DataFrame:
    tokens, batch = read.column("prefill_chunk"), read.column("n_decode")
    # A step's chunk begins its prompt; `kv_decode` is the decoding sequences'.
    sizes = {
        "tokens": tokens, "batch": batch, "per_layer": 0,
        "batch_context": np.where(batch > 0, read.column("kv_decode"), 0),
        "mode": read.frame["branch"].astype(str),
    }  # fmt: skip
    saved = np.maximum(read.column("saved_us", -MOST), 0) * 1e-6
    return pd.concat(
        [
            read.rows(operator="step", seconds=read.column("step_us") * 1e-6, **sizes),
            read.rows(operator="step_saved", seconds=saved, **sizes),
        ],
        ignore_index=True,
    )


KINDS: Sequence[tuple[str, frozenset[str], Callable[[ReadFile], pd.DataFrame]]] = (
    ("dense.csv", frozenset({"layer", "tokens", "time_us"}), _dense),
    ("per_sequence.csv", frozenset({"layer", "sequences", "time_us"}), _dense),
    ("attention.csv", frozenset({"prefill_chunk", "kv_prefill", "time_us"}), _attention),
    ("skew.csv", frozenset({"kv_big", "kv_mean", "t_skew_us"}), _skew),
    ("moe.csv", frozenset({"tokens", "activated_experts", "time_us"}), _moe),
    ("step.csv", frozenset({"branch", "step_us", "saved_us"}), _step),
    ("layers.csv", frozenset({"layer_name", "input", "tp_size", "latency(ns)"}), _layers),
    (
        "attention.csv",
        frozenset({"time_stats.attn_prefill.median", "is_prefill"}),
        _older_attention,
    ),
)
"""A file's name, the columns that it is known by, and what reads it."""


def _kind(columns: Sequence[str]) -> Callable[[ReadFile], pd.DataFrame] | None:
    own = {name.strip() for name in columns}
    return next((reader for _, needed, reader in KINDS if needed <= own), None)
