"""Damaged files: every reader refuses them in one line, or gives an answer that the file allows.

A file is damaged in its bytes, or in what it says: a field, a cell, a row, a column; Parquet is
sealed with a checksum again, so that the checks after it are tested.  Nothing may end in another
error than `DraftsimError`.  Where a checksum, a type or a bound can tell the damage, the file is
refused or the answer is the undamaged file's.

Seeded.  ``DRAFTSIM_DAMAGE_ROUNDS=20 DRAFTSIM_DAMAGE_SEED=7 pytest tests/test_damaged_files.py``
makes 20 times as many of another seed.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import draftsim
from policies.lengths.basic import Fixed
from policies.registry import describe, parse_policy
from policies.rules.memory import OnlineCorrectionMemory
from profiler.prompts import read_prompts
from profiler.recording.run import NAME, RunInfo, read_info, write_info
from simulator.pricing import price
from simulator.serving.outcome.results import ResultsFile, read_results
from simulator.tune.formats import read_settings
from simulator.validation import anchor_drift, check_recording
from tests import logs
from tests.conftest import ROOT
from tests.forked import forked
from tests.random_sources import random_outputs, random_recordings
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.importers.registry import IMPORTERS
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.sources.found import write_recordings
from traces.sources.lookups.sources import read_corpus
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source
from traces.store.engine_runs import MEASURED_COLUMNS, MeasuredRuns, write_measured
from traces.store.files import read_rounds, write_latency, write_rounds, write_trace
from traces.store.outputs import DIGEST, digest_of_document
from traces.store.parquet import HEADER_KEY, write_file
from traces.store.recordings import trace_folder

pytestmark = pytest.mark.usefixtures("short_chains")

ROUNDS = int(os.environ.get("DRAFTSIM_DAMAGE_ROUNDS", "1"))
SEED = int(os.environ.get("DRAFTSIM_DAMAGE_SEED", "0"))
EACH = 40
"""Damaged files of each reader in a round."""
EACH_FIT = 10
"""The same where reading a file ends in a fit, which takes a fifth of a second."""
MEMORY = 2 * 2**30
"""Bytes that a reader may take beyond what the process has."""
CPU_S = 20
"""Seconds of processor time that end a reader that does not."""

UNNAMED = (
    "latency table has no", "past what was recorded", "made counts, and no trace",
    "which this trace does not hold", "not recorded", "past the recorded tail",
    "of other requests than the trace", "rounds drafted by",
)  # fmt: skip
"""Refusals that are about an object as a whole, and so need not name its file."""

CONST = ("--latency", "const:target=0.0143,draft=0.00176", "--resamples", 1)
BUNDLED_ROUNDS = ROOT / "traces" / "recorded" / "bundled" / "rounds"
LOSSY = "fixed_gamma-6+csd-scg"


# ------------------------------------------------------------------------------- the readers


class Reader(NamedTuple):
    """A file, and what is made of it."""

    file: str
    """The file in the workspace."""
    answer: Callable[[Path], Any]
    """Result from the workspace: a command's JSON, or the object read."""
    sealed: bool = False
    """True if a checksum tells every changed byte."""
    free: str = ""
    """Fields, as a pattern of their paths, that any value may stand in, or that are optional."""
    each: int = EACH
    """Damaged files of a round."""


def said(*arguments: object) -> Callable[[Path], Any]:
    """Return what a command prints as JSON; ``{}`` in an argument is the workspace."""

    def answer(place: Path) -> Any:
        out, err = io.StringIO(), io.StringIO()
        sys.argv = ["draftsim", *(str(a).replace("{}", str(place)) for a in arguments)]
        with pytest.raises(SystemExit) as stop, redirect_stdout(out), redirect_stderr(err):
            draftsim.main()
        if stop.value.code == 2:
            lines = [x for x in err.getvalue().splitlines() if x.startswith("draftsim: ")]
            assert len(lines) == 1, err.getvalue()
            raise DraftsimError(lines[0])
        assert stop.value.code in (0, None), err.getvalue()
        return re.sub(r'"elapsed_s": [^,}]+', "", out.getvalue())

    return answer


PLACED = dict.fromkeys(
    ("vidur", "llmservingsim"), ("--device", "h100", "--model", "llama-3-8b")
)  # fmt: skip
"""Options that stand in for the folder names of these formats' files."""


COUNTED = (
    "sglang", "tensorrt-llm", "llamacpp", "lmstudio", "prometheus", "eagle", "speculation-profile",
)  # fmt: skip
"""Formats that tell counts, and no trace."""


def imported(log: str) -> Reader:
    """Return what an import of one of `LOGS` prints and writes."""
    form = log.partition(" ")[0]
    counts = form in COUNTED or log != form
    out = f"imported.{'json' if counts else 'parquet'}"

    def answer(place: Path) -> Any:
        (place / out).unlink(missing_ok=True)  # nothing is written over another kind of recording
        command = (
            "import", form, f"{{}}/log {log}", *PLACED.get(form, ()), "--json", "-", "--out",
            f"{{}}/{out}",
        )  # fmt: skip
        return said(*command)(place), (place / out).read_bytes()

    return Reader(f"log {log}", answer, free=FREE_IN_LOGS.get(form, ""))


def simulated(*more: object) -> Callable[[Path], Any]:
    costs = ("--latency", "bundled", "--resamples", 1)
    return said("simulate", "--trace", "{}", *costs, *more, "--json", "-")


def served(*more: object) -> Callable[[Path], Any]:
    return said(
        "serve", "--trace", "{}/plain/trace.parquet", "--latency", "{}/plain", *more,
        "--assume-batch-free", "--json", "-",
    )  # fmt: skip


def results(place: Path) -> Any:
    with ResultsFile(place / "serve.jsonl", key="k") as file:
        kept = file.kept
    return kept, read_results(place / "serve.jsonl")


SGLANG_SCRAPE = """sglang:spec_verify_calls_total{m="a"} 40.0
sglang:generation_tokens_total{m="a"} 130.0
sglang:num_requests_total{m="a"} 3.0
sglang:spec_num_steps{m="a"} 4.0
"""
TENSORRT_SCRAPE = """trtllm_spec_decode_drafted_tokens_total{token_position="0"} 50.0
trtllm_spec_decode_drafted_tokens_total{token_position="1"} 50.0
trtllm_spec_decode_accepted_tokens_total{token_position="0"} 30.0
trtllm_spec_decode_accepted_tokens_total{token_position="1"} 20.0
"""
_STEPS = ("per_step_drafted", "per_step_accepted")
_AIPERF = logs.AIPERF["spec_decode_acceptance"]
LOGS: Mapping[str, Any] = {
    **{form: logs.example(form) for form in IMPORTERS},
    "vllm in summary": logs.SUMMARY,
    "aiperf in summary": {
        **logs.AIPERF,
        "spec_decode_acceptance": {k: v for k, v in _AIPERF.items() if k not in _STEPS},
    },
    "prometheus of SGLang": SGLANG_SCRAPE, "prometheus of TensorRT-LLM": TENSORRT_SCRAPE,
}  # fmt: skip
"""A log of every format; a name's first word is the format's."""
FREE_IN_LOGS = {
    "specbench": "question_id|category", "vllm": "^id", "by-start": "^id", "aiperf": "_id|engine",
    "eagle": "question_id",
    "llama-bench": "_ns|model_|type|cpu|gpu|flash|batch|layers|threads|build|backend",
}  # fmt: skip
"""Names and numbers of a log that may be any."""

READERS: Mapping[str, Reader] = {
    "trace": Reader(
        "plain/trace.parquet",
        said("simulate", "--trace", "{}/plain/trace.parquet", *CONST, "--json", "-", "--policy",
             "gammatune", "--policy", "confidence", "--policy", "oracle"),
        True,
    ),
    "latency": Reader(
        "plain/latency.parquet",
        said("simulate", "--trace", "{}/plain/trace.parquet", "--latency",
             "{}/plain/latency.parquet", *CONST[2:], "--policy", "fixed:gamma=2", "--json", "-"),
        True,
    ),
    "starts": Reader(
        "starts-medusa.parquet", simulated("--source", "medusa", "--policy", "fixed:gamma=2"), True
    ),
    "exits": Reader(
        "exits.parquet",
        simulated("--source", "early-exit:omega=0.3,tau=0.5,depth=0.5", "--policy",
                  "fixed:gamma=2"),
        True,
    ),
    "trees": Reader(
        "trees-eagle2.eagle.parquet",
        said("simulate", "--trace", "{}", *CONST, "--source", "eagle2:model=eagle", "--policy",
             "fixed:gamma=2", "--json", "-"),
        True,
    ),
    "rounds": Reader(
        f"rounds/{LOSSY}.parquet",
        said("simulate", "rounds", f"{{}}/rounds/{LOSSY}.parquet", "--trace", "bundled",
             "--resamples", 1, "--json", "-"),
        True,
    ),
    "rounds of calls": Reader("calls.parquet", lambda p: _rounds(p / "calls.parquet"), True),
    "outputs": Reader(
        f"rounds/{LOSSY}.json",
        said("simulate", "rounds", f"{{}}/rounds/{LOSSY}.parquet", "--trace", "bundled",
             "--resamples", 1, "--json", "-"),
        True,
    ),
    "measured": Reader(
        "suite/measured.parquet", lambda place: check_recording(place / "suite").to_csv(), True
    ),
    "provenance": Reader(
        "suite/provenance.json", lambda place: anchor_drift(place / "suite")
    ),
    "run.json": Reader(f"run/{NAME}", lambda place: read_info(place / "run")),
    "results": Reader("serve.jsonl", results, free="."),
    "settings": Reader(
        "settings.json", served("--settings", "{}/settings.json", "--batch", 2, "--requests", 4)
    ),
    "settings, sglang": Reader("sglang.json", lambda place: _settings(place / "sglang.json")),
    "arrivals": Reader(
        "arrivals.csv", served("--policy", "fixed:gamma=2", "--arrivals", "{}/arrivals.csv")
    ),
    "calibrate": Reader("runs.csv", said("calibrate", "{}/runs.csv", "--json", "-"), each=EACH_FIT),
    "calibrate, jsonl": Reader(
        "runs.jsonl", said("calibrate", "{}/runs.jsonl", "--json", "-"), each=EACH_FIT
    ),
    "prompts": Reader(
        "prompts.jsonl", lambda place: read_prompts(place / "prompts.jsonl"),
        free="id|category|answer|reference",
    ),
    "corpus": Reader("corpus.jsonl", lambda place: read_corpus(place / "corpus.jsonl")),
    "elsewhere": Reader("plain/elsewhere.json", lambda place: trace_folder(place / "plain")),
    "memory": Reader("memory.npz", lambda place: _memory(place / "memory.npz")),
    **{f"import {log}": imported(log) for log in LOGS},
}  # fmt: skip


def _settings(path: Path) -> Any:
    engine, policy = read_settings(path)
    return engine, describe(policy)  # type: ignore[arg-type]


def _rounds(path: Path) -> Any:
    log = read_rounds(path)
    calls = None if log.recorded_calls is None else log.recorded_calls.tolist()
    return log.rounds.tolist(), calls, log.requests


def _memory(path: Path) -> Any:
    try:
        return sorted(OnlineCorrectionMemory.load(path)._counts.items())
    except ValueError as error:
        raise DraftsimError(str(error)) from None


RUNS = """batch,k,tokens_per_s,context,acceptance
1,0,50,100,
4,0,190,100,
16,0,600,900,
1,2,80,100,0.7 0.5
4,2,280,100,0.7 0.5
16,2,700,900,0.7 0.5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one undamaged file of every kind."""
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("plain", "rounds", "run"):
        (folder / name).mkdir()
    trace = synthetic_trace(0.7, requests=4, tokens=12, max_gamma=6, concentration=4.0, seed=1)
    write_trace(trace, folder / "plain" / "trace.parquet")
    table = LatencyTable.constant(0.0143, 0.00176, 0.015, host_round=0.0003)
    write_latency(table, folder / "plain" / "latency.parquet")
    (folder / "plain" / "elsewhere.json").write_text(json.dumps({"trace": "plain"}))
    outputs = random_outputs(3)
    write_trace(outputs, folder / "trace.parquet")
    recordings = random_recordings(outputs, 3, missing=0.0)
    write_recordings(recordings, folder)
    log = replay_source(outputs, parse_source("medusa"), Fixed(2), recordings=recordings)
    write_rounds(log, folder / "calls.parquet")
    for suffix in (".parquet", ".json"):
        (folder / "rounds" / f"{LOSSY}{suffix}").write_bytes(
            (BUNDLED_ROUNDS / f"{LOSSY}{suffix}").read_bytes()
        )
    _suite(folder / "suite")
    meta = {"run_id": "abc", "dtype": "float32", "threads": 1}
    write_trace(type(trace)(trace.columns, trace.requests, 6, meta), folder / "run/trace.parquet")
    write_info(RunInfo("bundled", "bundled", threads=1, run_id="abc"), folder / "run")
    with ResultsFile(folder / "serve.jsonl", key="k") as file:
        for rate in (1.0, 2.0):
            file.add({"policy": "fixed", "rate": rate, "ttft_s": {"mean": 0.1, "p50": None}})
        unfinished = file.path.read_bytes()
    (folder / "serve.jsonl").write_bytes(unfinished)
    texts: dict[str, Any] = {
        "settings.json": {
            "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 1]],
        },
        "sglang.json": {"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0, 1]}},
        "arrivals.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,10,12\n0.5,8,9\n1.0,7,20\n",
        "runs.csv": RUNS,
        "runs.jsonl": "".join(
            json.dumps({"batch": b, "k": 0, "tokens_per_s": 45.0 * b}) + "\n" for b in (1, 4, 8)
        ),
        "prompts.jsonl": '{"id": "a", "category": "c", "prompt": "One?", "answer": "1"}\n'
        '{"question_id": 7, "turns": ["Two?"], "reference": ["#### 2"]}\n{"text": "Three?"}\n',
        "corpus.jsonl": "[1, 2, 3]\n[4, 5]\n",
        **{f"log {log}": content for log, content in LOGS.items()},
    }
    for name, content_of in texts.items():
        logs.written(folder, content_of, name)
    memory = OnlineCorrectionMemory(4)
    for pair in ((1, 2), (1, 2), (3, 4)):
        memory.add(*pair)
    (folder / "memory.npz").write_bytes(memory.content())
    return folder


def _suite(folder: Path) -> None:
    """A recording with measured runs of two policies, as the GPU suite unpacks it."""
    folder.mkdir()
    trace = synthetic_trace(0.7, requests=2, tokens=12, max_gamma=6, seed=3)
    write_trace(trace, folder / "trace.parquet")
    table = LatencyTable.constant(0.0143, 0.00176, 0.015)
    write_latency(table, folder / "latency.parquet")
    rows = []
    for name in ("autoregressive", "fixed:gamma=2"):
        log = replay(trace, parse_policy(name), name=name)
        rounds = log.per_request([1] * len(log)).astype(int).tolist()
        for request, took_s, count in zip(
            trace.requests, price(log, table).decode_s.tolist(), rounds, strict=True
        ):
            rows += [
                (name, "exact", 1, True, repeat, request.id, took_s * (1 + repeat / 100), count)
                for repeat in range(3)
            ]
    times = pd.DataFrame(rows, columns=list(MEASURED_COLUMNS))
    write_measured(MeasuredRuns(times, {"device": "NVIDIA H200"}), folder / "measured.parquet")
    anchor = {"model": "target", "batch": 1, "width": 1, "context": 4, "median_s": 0.015}
    units = {"p.eager.1": {"anchors": [anchor]}}
    (folder / "provenance.json").write_text(json.dumps({"forced": {"units": units}}))


# ----------------------------------------------------------------------------- the mutations


class Damaged(NamedTuple):
    """A damaged content, and whether a checksum, a type or a bound can tell."""

    what: str
    content: bytes
    told: bool


class Raw(NamedTuple):
    """Text that stands in JSON as it is."""

    text: str


HUGE = Raw("9" * 5000)
NESTED = Raw("[" * 100_000 + "]" * 100_000)
NUMBERS = (-7, -0.5, 10**11, 1e308, math.inf, math.nan, HUGE)
"""Impossible numbers, put where one of 0 or more belongs."""
OTHERS: Mapping[type, tuple[Any, ...]] = {
    bool: ("x", 3, [], {}), int: (*NUMBERS, True, "x", "", [], {}), list: ("x", 0, 1.5, {}),
    float: (-7, *NUMBERS[3:], True, "x", "", [], {}), str: (True, 0, -1, 1e30, [], {}),
    dict: ("x", 0, -1, [], True), type(None): ([], {}),
}  # fmt: skip
"""Values that no field of a type can have."""
POSSIBLE = (None, 0, 1, 0.5, "", "x", "\u0000", True, [], {}, NESTED)
"""Values that some fields can have: each may be read, but not end in another error."""


def in_bytes(rng: random.Random, content: bytes, sealed: bool) -> Damaged:
    """Damage any file by its bytes."""
    at = rng.randrange(len(content))
    flipped = bytearray(content)
    flipped[at] ^= 1 << rng.randrange(8)
    noise = rng.randbytes(rng.randrange(1, 300))
    what, damaged = rng.choice(
        [
            (f"bit of byte {at}", bytes(flipped)), (f"cut at {at}", content[:at]),
            (f"{len(noise)} bytes put in at {at}", content[:at] + noise + content[at:]),
            (f"byte {at} left out", content[:at] + content[at + 1 :]),
            (f"zeros at {at}", content[:at] + bytes(8) + content[at + 8 :]),
            ("doubled", content * 2), ("empty", b""), ("random bytes", noise),
            ("UTF-16", b"\xff\xfe" + content.decode("latin-1").encode("utf-16-le")),
            (f"latin-1 at {at}", content[:at] + b"\xe9" + content[at:]),
            ("a byte-order mark", b"\xef\xbb\xbf" + content),
            ("CRLF", content.replace(b"\n", b"\r\n")),
        ]
    )  # fmt: skip
    return Damaged(what, damaged, sealed)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within one."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_of(inner, (*path, key))


def pattern(path: tuple[Any, ...]) -> str:
    return ".".join("*" if isinstance(key, int) else str(key) for key in path)


def in_document(rng: random.Random, document: Any) -> tuple[str, Any, bool]:
    """Change a JSON value in one place: a field's value, or the fields or items there."""
    paths: dict[str, list[tuple[Any, ...]]] = {}
    for path in places_of(document):
        paths.setdefault(pattern(path), []).append(path)
    path = rng.choice(paths[rng.choice(sorted(paths))])
    changed = deepcopy(document)
    holder, name = changed, pattern(path)
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]] if path else changed
    kind = rng.randrange(10)
    if kind == 0 and path and isinstance(holder, dict):
        del holder[path[-1]]
        return f"{name} left out", changed, False
    if kind == 1 and isinstance(old, dict):
        old["unknown"] = 3
        return f"{name}.unknown", changed, False
    if kind == 1 and isinstance(old, list) and old:
        what = rng.choice(("left out", "twice", "swapped"))
        at = rng.randrange(len(old))
        if what == "left out":
            del old[at]
        elif what == "twice":
            old.insert(at, old[at])
        else:
            old[0], old[at] = old[at], old[0]
        return f"{name}.* {what}", changed, False
    told = kind > 4
    choices = list(OTHERS[type(old)] if told else POSSIBLE)
    if isinstance(old, float | int) and not isinstance(old, bool) and old < 0:
        choices = [v for v in choices if v not in NUMBERS[:2]]
    new = rng.choice(choices)
    if path:
        holder[path[-1]] = new
    else:
        changed = new
    return f"{name}={str(new)[:12]}", changed, told


def dumped(document: Any) -> str:
    """JSON with `Raw` texts as they are."""
    raw: list[str] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value.text)
            return f"@{len(raw) - 1}@"
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else value

    text = json.dumps(plain(document))
    for number, inner in enumerate(raw):
        text = text.replace(f'"@{number}@"', inner)
    return text


def in_json(rng: random.Random, content: bytes, sealed: bool) -> Damaged:
    """Change a JSON document; one with a checksum is sealed again, or not."""
    what, changed, told = in_document(rng, json.loads(content))
    if sealed and rng.random() < 0.5 and isinstance(changed, dict) and DIGEST in changed:
        with suppress(TypeError):  # `Raw` is no JSON
            changed[DIGEST] = digest_of_document(json.loads(json.dumps(changed)))
            return Damaged(f"{what}, sealed", dumped(changed).encode(), told)
    # Older files have no checksum.
    return Damaged(what, dumped(changed).encode(), told or (sealed and DIGEST not in what))


def in_lines(rng: random.Random, content: bytes) -> Damaged:
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines))
    what, changed, told = in_document(rng, json.loads(lines[at]))
    lines[at] = dumped(changed)
    return Damaged(f"line {at + 1} {what}", "\n".join(lines).encode(), told)


CELLS = ("", "x", "-7", "-0.5", "1e308", "inf", "nan", "100000000000", HUGE.text, "\u00b2", "1_0")


def in_csv(rng: random.Random, content: bytes) -> Damaged:
    """Change a cell of CSV, or its rows or columns."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    at, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    kind = rng.randrange(8)
    if kind == 0:
        rows.insert(at, rows[at])
    elif kind == 1:
        del rows[at][column]
    elif kind == 2:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif kind == 3:
        rows[at].append("7")
    else:
        new = rng.choice(CELLS)
        # Any text may stand where a text stood.
        told = at > 0 and new != "" and re.fullmatch(r"[\d.]+", rows[at][column]) is not None
        what = f"row {at} {rows[0][column]}={new[:12]}"
        rows[at][column] = new
        return Damaged(what, "\n".join(map(",".join, rows)).encode(), told)
    what = ("a row twice", "a cell left out", "a column left out", "a cell more")[kind]
    return Damaged(f"row {at}: {what}", "\n".join(map(",".join, rows)).encode(), kind in (1, 3))


def in_numbers(rng: random.Random, content: bytes) -> Damaged:
    """Change one number of a text."""
    text = content.decode()
    found = rng.choice(list(re.finditer(r"\d+(?:\.\d+)?", text)))
    new = rng.choice(CELLS[2:])
    damaged = text[: found.start()] + new + text[found.end() :]
    line = text[: found.start()].count("\n") + 1
    return Damaged(f"line {line} {found.group()}={new[:12]}", damaged.encode(), False)


def in_parquet(rng: random.Random, content: bytes, scratch: Path) -> Damaged:
    """Change a header field, a value, a row or a column of a recording, and seal it again."""
    source = pa.BufferReader(content)
    table = pq.read_table(source).replace_schema_metadata(None)
    header = json.loads(pq.ParquetFile(pa.BufferReader(content)).metadata.metadata[HEADER_KEY])
    kind, told = str(header["kind"]), True
    if rng.randrange(3) == 0:
        what, header, told = in_document(rng, header)
        if not isinstance(header, dict) or any(
            isinstance(v, Raw) for p in places_of(header) for v in [_at(header, p)]
        ):
            header = {}
        what = f"header.{what}"
    else:
        what, table, told = in_table(rng, table)
    scratch.unlink(missing_ok=True)  # a recording of another kind is not written over
    write_file(scratch, kind, table, header)
    return Damaged(what, scratch.read_bytes(), told)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def in_table(rng: random.Random, table: pa.Table) -> tuple[str, pa.Table, bool]:
    name, at = rng.choice(table.column_names), rng.randrange(table.num_rows)
    place = table.column_names.index(name)
    column = table.column(place)
    values, kind, rows = column.to_pylist(), column.type, list(range(table.num_rows))
    how = rng.randrange(12)
    if how < 4:
        swap = rng.randrange(table.num_rows)
        what, picked = [
            ("no row", []), ("a row twice", [*rows[: at + 1], *rows[at:]]),
            ("a row left out", rows[:at] + rows[at + 1 :]),
            ("rows swapped", [swap if r == at else at if r == swap else r for r in rows]),
        ][how]  # fmt: skip
        return f"{what} ({at})", table.take(pa.array(picked, pa.int64())), how == 0
    if how == 4:
        return f"no column {name}", table.drop_columns([name]), True
    if how == 5:
        texts = pa.array([str(v) for v in values], pa.string())
        return f"{name} as text", table.set_column(place, name, texts), kind != pa.string()
    listed = isinstance(values[at], list)
    inner = (values[at] or [None])[0] if listed else values[at]
    new = rng.choice(
        [None, -7, 2**31 - 1 if kind == pa.int32() else 127] if isinstance(inner, int)
        else [None, math.nan, math.inf] if isinstance(inner, float) else [None]
    )  # fmt: skip
    if isinstance(inner, bool):
        new = None
    values[at] = [new, *values[at][1:]] if listed else new
    changed = table.set_column(place, name, pa.array(values, kind))
    return f"{name}[{at}]={new}", changed, new is None or new == -7 or not math.isfinite(new)


def damaged(rng: random.Random, name: str, content: bytes, sealed: bool, scratch: Path) -> Damaged:
    """Damage a file by its kind."""
    if rng.randrange(3) == 0:
        return in_bytes(rng, content, sealed)
    if content.startswith(b"PAR1"):
        return in_parquet(rng, content, scratch)
    if name.endswith((".csv", " rounds", " latency", *(f" {form}" for form in PLACED))):
        return in_csv(rng, content)
    if "prometheus" in name:
        return in_numbers(rng, content)
    if name.endswith(".npz"):
        return in_bytes(rng, content, sealed)
    return in_lines(rng, content) if name.endswith(".jsonl") else in_json(rng, content, sealed)


# -------------------------------------------------------------------------------- the harness


@contextmanager
def bounded() -> Iterator[None]:
    """End this process's reader where it takes too much memory or processor time.

    Nothing waits for the disk: thousands of small files are written.
    """
    os.fsync = lambda fd: None  # in a process of its own
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def late(*_: object) -> None:
        raise TimeoutError(f"takes more than {CPU_S} s of processor time")

    signal.signal(signal.SIGVTALRM, late)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def tried(reader: Reader, place: Path, right: str, one: Damaged) -> str:
    """Return a reader's mistake with a damaged file; empty for none."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        answer = repr(reader.answer(place))
    except DraftsimError as error:
        text = str(error)
        if "\n" in text or len(text) > 1200:
            return f"refused in {len(text)} characters: {text[:200]}"
        named = any(part in text for part in (Path(reader.file).name, *UNNAMED))
        return "" if named else f"refused without its name: {text}"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
    free = reader.free and re.search(reader.free, one.what)
    return "another answer, and nothing said" if one.told and answer != right and not free else ""


def wrong(reader: Reader, place: Path, name: str) -> list[str]:
    """Return a reader's mistakes with many damaged files, from `SEED`."""
    path = place / reader.file
    whole, found = path.read_bytes(), []
    with bounded():
        right = repr(reader.answer(place))
        for number in range(reader.each * ROUNDS):
            path.write_bytes(whole)
            rng = random.Random(f"{SEED} {name} {number}")
            one = damaged(rng, reader.file, whole, reader.sealed, place / "scratch.parquet")
            if one.content == whole:
                continue
            path.write_bytes(one.content)
            if bad := tried(reader, place, right, one):
                found.append(f"{number}: {one.what}: {bad}")
    path.write_bytes(whole)
    return found


@pytest.mark.invariant(13)
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_in_one_line(name: str, place: Path, tmp_path: Path) -> None:
    said_in = tmp_path / "said"

    def work() -> None:
        said_in.write_text(json.dumps(wrong(READERS[name], place, name)))

    with forked(work, tmp_path / "errors"):
        pass
    assert said_in.exists(), (tmp_path / "errors").read_text()[-2000:]
    assert not json.loads(said_in.read_text()), "\n".join(json.loads(said_in.read_text()))
