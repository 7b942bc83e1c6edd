"""Sweeps: grids of what-if questions, computed in parallel and resumable, as one tidy table.

A sweep is cut into parts (`simulator.whatif.cells.SweepPart`): policies that share an
acceptance rate and a batch, and hence a trace.  A part is replayed once and priced at
every cost ratio, latency table and context, which costs next to nothing in comparison.  Only
policies that decide by these are replayed for each.
Parts are kept as files as they finish; the same sweep begun again computes only what is
missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from policies.batch.base import decides_together
from policies.core import DraftPolicy
from policies.from_file import digestible
from simulator.bootstrap import CONFIDENCE
from simulator.executors import Executor, Local
from simulator.whatif.cells import (
    COLUMNS,
    TEXT,
    Prices,
    SweepPart,
    SweepRunner,
    cache_fits,
    references,
    with_regrets,
)
from simulator.whatif.tilt import METHODS, Tilter, TiltMethod
from simulator.whatif.tilt_fidelity import UNKNOWN_ERROR, TiltErrors, tilt_errors
from traces.acceptance.trace import Trace
from traces.aliases import Columns, Count, silent
from traces.errors import DraftsimError
from traces.store.checkpoint import Checkpoint
from traces.store.parquet import check_no_recording
from traces.store.text import plain
from traces.store.writing import is_device, only_writer, write_atomically

SCHEMA = 6
"""Version of a sweep's file and of its parts."""
POLICIES_A_PART = 24


class Sweep:
    """A grid of policies, acceptance rates, batches and prices over one recording.

    Raises DraftsimError if an axis is empty or impossible, the trace cannot be tilted, or a policy
    decides for the whole batch or learns from it and a batch is larger than 1.

    Parameters
    ----------
    trace:
        The recording.
    policies:
        Prototypes by name.  In addition the fixed lengths and the oracle are replayed as
        references (`simulator.whatif.cells`), without rows of their own.
    prices:
        Cost ratios, latency tables, contexts and GPUs.
    alphas:
        Acceptance rates to tilt to; none leaves the recording as it is.
    batches:
        Sequences decoded together.
    method:
        How to tilt (`simulator.whatif.tilt`), or ``iid``, the textbook baseline.
    resamples, seed:
        Bootstrap resamples over prompts (in batches at most 30), and the seed of everything drawn.
    measure_tilt:
        True to measure the error of tilting on this recording's own prompt groups.
    """

    def __init__(
        self,
        trace: Trace,
        policies: Mapping[str, DraftPolicy],
        prices: Prices,
        alphas: Sequence[float] = (),
        batches: Sequence[int] = (1,),
        *,
        method: TiltMethod | str = "coupled",
        resamples: int = 200,
        seed: int = 0,
        measure_tilt: bool = True,
    ) -> None:
        if not policies:
            raise DraftsimError("no policy to sweep over: name at least one")
        if method not in (*METHODS, "iid"):
            raise DraftsimError(f"tilt is {method!r}, expected {', '.join(METHODS)} or iid")
        if not batches or min(batches) < 1:
            raise DraftsimError(f"batches are {list(batches)}, expected at least 1 each")
        if resamples < 0:
            raise DraftsimError(f"resamples is {resamples}, expected >= 0")
        if seed < 0:
            raise DraftsimError(f"seed is {seed}, expected >= 0")
        if method != "coupled" and not alphas:
            raise DraftsimError("no --alpha is given: drop --tilt")
        for alpha in alphas:
            if not 0 < alpha < 1:
                raise DraftsimError(f"alpha is {alpha:g}, expected strictly between 0 and 1")
        for name, policy in policies.items():
            trace.check_reads(policy.reads, f"policy {name}")
            if max(batches) > 1 and decides_together(policy):
                raise DraftsimError(
                    f"policy {name} decides for the whole batch, and a sweep replays one request "
                    "at a time: use `draftsim serve --batch`"
                )
        self.alphas = tuple(alphas)
        self.batches = tuple(batches)
        self.method = method
        tilter, shifts = None, dict[float, float]()
        self.error: TiltErrors | None = None
        if alphas and method != "iid":
            kind: TiltMethod = "redraw" if method == "redraw" else "coupled"
            tilter = Tilter(trace, kind, seed)
            self.error = TiltErrors(UNKNOWN_ERROR, UNKNOWN_ERROR)
            if measure_tilt:
                self.error = tilt_errors(trace, method=kind, seed=seed)
            # Searched together here, so that a part need not.
            shifts = dict(zip(self.alphas, tilter.shifts(self.alphas).tolist(), strict=True))
        added = references(trace, policies)
        self.runner = SweepRunner(
            trace, {**policies, **added}, prices, tilter, shifts, resamples, seed,
            frozenset(added),
        )  # fmt: skip

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies asked for, which alone have rows."""
        return tuple(n for n in self.runner.policies if n not in self.runner.references)

    @property
    def parts(self) -> list[SweepPart]:
        """The parts of the grid, in the order of its rows."""
        names = self.policies
        blocks = [names[i : i + POLICIES_A_PART] for i in range(0, len(names), POLICIES_A_PART)]
        added = tuple(n for n in self.runner.policies if n in self.runner.references)
        blocks[0] += added
        rates: tuple[float | None, ...] = self.alphas or (None,)
        return [SweepPart(a, b, block) for a in rates for b in self.batches for block in blocks]

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        rates = len(self.alphas) or 1
        return len(self.policies) * rates * len(self.batches) * self.runner.prices.count

    def run(
        self,
        executor: Executor | None = None,
        *,
        out: str | Path | None = None,
        progress: Count = silent,
    ) -> pd.DataFrame:
        """Compute what is missing and return the table; with `out`, also as a Parquet file.

        Finished parts lie in the folder ``<out>.parts`` until all are there, unless `out` is a
        device.

        Raises DraftsimError if a part fails (its parts so far are kept), or workers were lost and
        with them parts: begun again, the sweep computes those alone; or if another process sweeps
        into `out`.
        """
        if out is not None:
            check_no_recording(out)
        with only_writer(out) if out is not None else nullcontext():
            return self._run(executor or Local(), out, progress)

    def _run(self, executor: Executor, out: str | Path | None, progress: Count) -> pd.DataFrame:
        parts = self.parts
        key = "" if out is None else self._key()
        kept = None
        if out is not None and not is_device(out):
            kept = Checkpoint(Path(f"{out}.parts"), {"sweep": SCHEMA})
        done: dict[int, Columns] = {}
        if kept is not None:
            found = {i: kept.get(_named(part), key) for i, part in enumerate(parts)}
            done = {i: columns for i, columns in found.items() if columns is not None}
        missing = [i for i in range(len(parts)) if i not in done]
        progress(len(done), len(parts))
        for place, result in executor.run(self.runner, [parts[i] for i in missing]):
            index = missing[place]
            done[index] = result
            if kept is not None:
                kept.put(_named(parts[index]), result, key)
            progress(len(done), len(parts))
        frame = self._table([done[i] for i in range(len(parts))])
        if out is not None:
            write_sweep(frame, out, self.description)
        if kept is not None:
            kept.close()
        return frame

    @property
    def description(self) -> dict[str, Any]:
        """Return what the table was made from, for the file's header."""
        runner = self.runner
        return {
            "policies": list(self.policies), "alphas": list(self.alphas),
            "batches": list(self.batches), "ratios": list(runner.prices.ratios),
            "verify": runner.prices.verify, "contexts": list(runner.prices.contexts),
            "latencies": {n: dict(t.meta) for n, t in runner.prices.latencies.items()},
            "gpus": [
                {"latency": t.latency, "gpu": t.gpu, "scaled": t.table.meta.get("scaled")}
                for t in runner.prices.tables
            ],
            "method": self.method, "resamples": runner.resamples, "seed": runner.seed,
            "confidence": CONFIDENCE,
            "tilt_error": None
            if self.error is None
            else {n: asdict(e) for n, e in self.error._asdict().items()},
            "trace": {
                k: runner.trace.meta[k] for k in ("target", "draft", "device", "kind", "sampling")
                if k in runner.trace.meta
            },
        }  # fmt: skip

    def _table(self, blocks: Sequence[Columns]) -> pd.DataFrame:
        columns = {k: np.concatenate([b[k] for b in blocks]) for k in blocks[0]}
        rates = columns["alpha"]
        columns["tilt_tried"] = columns["source"] == "recorded"
        columns["tilt_error"] = np.where(columns["tilt_tried"], 0.0, np.nan)
        if self.error is not None and self.runner.tilter is not None:
            recorded = self.runner.tilter.alpha
            errors = {n: self.error.of(bool(p.reads)) for n, p in self.runner.policies.items()}
            rows = list(zip(columns["policy"].tolist(), rates.tolist(), strict=True))
            known = {
                (name, rate): (errors[name].at(rate, recorded), errors[name].tried(rate, recorded))
                for name, rate in set(rows)
            }
            columns["tilt_error"] = np.array([known[row][0] for row in rows])
            columns["tilt_tried"] = np.array([known[row][1] for row in rows])
        frame = with_regrets(pd.DataFrame(columns))
        frame = frame[~frame["policy"].isin(list(self.runner.references))]
        frame["cache_fits"] = cache_fits(frame, self.runner.prices, self.runner.trace)
        return pd.DataFrame(
            {k: pd.Categorical(frame[k].astype(object)) if k in TEXT else frame[k].to_numpy()
             for k in COLUMNS}
        )  # fmt: skip

    def _key(self) -> str:
        """Return a digest of everything a part's rows depend on."""
        import joblib

        runner = self.runner
        content: list[Any] = [
            SCHEMA, dict(runner.trace.columns), [asdict(r) for r in runner.trace.requests],
            runner.trace.max_gamma, digestible(runner.policies), list(runner.prices.ratios),
            runner.prices.verify, list(runner.prices.contexts),
            [(*t[:-1], t.table.cells.to_dict("list")) for t in runner.prices.tables],
            runner.prices.passes_always, self.method, runner.resamples, runner.seed,
        ]  # fmt: skip
        try:
            return str(joblib.hash(content))
        except Exception:  # a policy of one's own may hold anything: no other run is this one
            return uuid4().hex


def _named(part: SweepPart) -> str:
    """Return the name that a part is kept under."""
    import joblib

    return str(joblib.hash(asdict(part)))


def write_sweep(frame: pd.DataFrame, path: str | Path, description: Mapping[str, Any]) -> None:
    """Write a sweep's table to `path`, with what it was made from in the header.

    Raises FileError if the file cannot be written there.
    """
    table = pa.table({
        name: pa.array(frame[name].astype(object).tolist(), pa.string()).dictionary_encode()
        if name in TEXT else pa.array(frame[name].to_numpy())
        for name in COLUMNS
    })  # fmt: skip
    _write(table, path, "sweep", description)


def thresholds_path(out: str | Path) -> Path:
    """Return the path of the break-even points of a sweep whose file is `out`."""
    return Path(out).with_suffix(".breakeven.parquet")


def write_thresholds(rows: pd.DataFrame, out: str | Path, description: Mapping[str, Any]) -> Path:
    """Write `rows` of `breakeven.thresholds` next to the sweep's file; return the path.

    Raises FileError if the file cannot be written there.
    """
    path = thresholds_path(out)
    _write(pa.Table.from_pandas(rows, preserve_index=False), path, "break-even", description)
    return path


def _write(table: pa.Table, path: str | Path, kind: str, description: Mapping[str, Any]) -> None:
    header = plain({"schema": SCHEMA, "kind": kind, "sweep": description})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({"draftsim": json.dumps(header, default=str)}),
        sink, compression="zstd",
    )  # fmt: skip
    write_atomically(path, sink.getvalue().to_pybytes())
