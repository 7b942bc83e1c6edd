"""Runs of a server, read from what its benchmark wrote.

Each format is a function from one record to the fields of `ServerRun`.  Fields read in: vLLM 0.32
``benchmarks/serve.py`` (``vllm bench serve --save-result``, ``vllm bench sweep``), SGLang 0.5
``bench_serving.py``, GuideLLM 0.7 (``benchmarks.json``), AIPerf 0.13 and before
(``profile_export_aiperf.json``).  A CSV is read by `read_runs`, and `latency_table` makes a latency
table of the calibrated server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from policies.json_text import JSONError, parse_json
from simulator.aggregate.server import GUESSED, ServerFit, ServerRun
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.importers.metrics import SELDOM
from traces.latency.table import ANY_CONTEXT, CELL_COLUMNS, LatencyTable
from traces.store.text import csv_rows, decimal, json_lines, label, read_text

if TYPE_CHECKING:
    from simulator.aggregate.positions import Positions

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch", "concurrency", "max_concurrency"),
    "k": ("k", "num_speculative_tokens", "draft_length", "spec-draft-n-max"),
    "tokens_per_s": ("tokens_per_s", "output_throughput"),
    "context": ("context",),
    "emitted": ("emitted", "mean_acceptance_length", "acceptance_length"),
    "prompt": ("prompt", "mean_input_tokens"),
    "answer": ("answer", "mean_output_tokens"),
    "p_min": ("p_min", "spec-draft-p-min"),
    "rounds": ("rounds",),
    "drafted_total": ("drafted", "draft_n"),
    "accepted_total": ("accepted", "draft_n_accepted"),
    "accepted": ("acceptance", "per_position_acceptance_rate", "acceptance by position"),
}
"""Accepted names of a run's fields: ours first, then those of vLLM and others."""
COUNTS = ("emitted", "rounds", "drafted_total", "accepted_total")
"""Fields that count what speculation did."""
NAMES = tuple(name for names in COLUMNS.values() for name in names)
MOST = 1e9
"""Largest number of a run; no server comes near it, and fits of larger ones overflow."""
ROUNDED = 0.05
"""Largest error of a number that is written with one decimal place."""
MOST_PROMPTS = 2**17
"""Prompt tokens of the largest step that a calibrated table has a cell of; no engine reads more."""


def read_runs(path: Path, text: str | None = None) -> list[ServerRun]:
    """Read runs from CSV with a head, or JSON lines; the columns are those of `COLUMNS`.

    ``text`` is the file's, if it was read.

    Acceptance by position is numbers separated by blanks or semicolons (a list in JSON): the
    chances that the first 1, 2, ... drafted tokens are all accepted.  Other columns are ignored,
    unless they look like a misspelt one of these.

    Raises DraftsimError naming file and line of what is wrong.
    """
    text = read_text(path) if text is None else text
    if _ending(path) == ".jsonl":
        rows: list[Any] = [row for _, row in json_lines(path, text)]
    else:
        rows = [row for _, row in csv_rows(path, text, ())]
    if not rows:
        raise DraftsimError(
            f"{path} holds no runs: expected a header batch,k,tokens_per_s and one run per line"
        )
    return [_run(row, f"{path}, run {number}") for number, row in enumerate(rows, 1)]


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _run(row: Any, where: str) -> ServerRun:
    if not isinstance(row, dict):
        raise DraftsimError(f"{where}: is {shown(row)}, expected an object")
    for name in sorted(set(map(str, row)) - set(NAMES)):
        if close := get_close_matches(name, NAMES, n=1, cutoff=0.75):
            raise DraftsimError(f"{where}: unknown {shown(name)} (did you mean {close[0]!r}?)")
    given: dict[str, Any] = {}
    for field, names in COLUMNS.items():
        told = [name for name in names if row.get(name) not in (None, "")]
        if len(told) > 1:
            raise DraftsimError(f"{where}: {told[0]} and {told[1]} mean the same: drop one")
        if told:
            given[field] = row[told[0]]
    if "k" not in given and "num_speculative_tokens" in row:
        given["k"] = 0  # as vLLM's sweeps leave it empty without speculation
    for required in ("batch", "k", "tokens_per_s"):
        if required not in given:
            raise DraftsimError(f"{where}: has no {' or '.join(COLUMNS[required])}")
    positions = given.pop("accepted", ())
    if isinstance(positions, str):
        positions = positions.replace(";", " ").split()
    if not isinstance(positions, list | tuple):
        positions = [positions]
    found = {name: _number(where, name, value) for name, value in given.items()}
    if not found["k"]:  # without speculation a zero is no count
        found = {n: v for n, v in found.items() if v or n not in COUNTS}
    totals = [found.pop(name, None) for name in ("rounds", "drafted_total", "accepted_total")]
    lengths = [found.get("emitted")]
    found |= _per_round(where, totals)
    for name in ("batch", "k"):
        if not found[name].is_integer():
            raise DraftsimError(f"{where}: {name} is {found[name]:g}, expected a whole number")
    batch, k = int(found.pop("batch")), int(found.pop("k"))
    accepted = tuple(_number(where, "acceptance", v) for v in positions)
    try:
        run = ServerRun(batch, k, accepted=accepted, **found)
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}") from None
    known = [n for n in (*lengths, run.emitted, run.round_tokens) if n is not None]
    if known and max(known) - min(known) > ROUNDED * (1 + k):
        raise DraftsimError(
            f"{where}: its columns tell {min(known):g} and {max(known):g} tokens a round: drop "
            "those that are wrong"
        )
    return run


def _per_round(where: str, totals: list[float | None]) -> dict[str, float]:
    """Return acceptance length and drafted tokens of a round, from totals over all rounds."""
    rounds, drafted, accepted = totals
    if drafted is None and accepted is None:
        return {}
    if not rounds or drafted is None or accepted is None or accepted > drafted:
        raise DraftsimError(
            f"{where}: drafted and accepted are totals over all rounds: give rounds, drafted and "
            "accepted together"
        )
    return {"emitted": 1 + accepted / rounds, "drafted": drafted / rounds}


def _number(where: str, name: str, value: Any) -> float:
    number = decimal(value)
    if not abs(number) <= MOST:
        raise DraftsimError(
            f"{where}: {name} is {shown(value)}, expected numbers of at most {MOST:g}"
        )
    return number


def latency_table(server: ServerFit, model: str | None = None) -> LatencyTable:
    """Return passes of target and draft, and prompts, over the loads that the runs span.

    The cells are the costs that `calibrate` prints and predicts with.  A round's first draft pass
    includes the fixed cost of speculation.  ``model`` is the target's name, which `--latency`
    compares with that of the recording.
    """
    runs = server.runs
    batches = sorted({1, *(run.batch for run in runs)})
    longest = max(1, *(run.k for run in runs))
    # One context determines no cost of context: its cells hold at every other.
    contexts = sorted({int(run.held) for run in runs} | ({0} if server.tells_context else set()))
    cost = server.central
    costs = {name: np.array(value) for name, value in cost.items()}
    cells: list[list[Any]] = []

    def cell(model: str, phase: str, batch: int, tokens: int, context: int, seconds: float) -> None:
        cells.append([model, phase, batch, tokens, context, seconds, 0.0, 1])

    for batch in batches:
        extra = cost["speculating"] + cost["speculating_sequence"] * batch
        each = cost["draft"] + cost["draft_sequence"] * batch
        passes = server.passes
        first = extra + each * (1 if passes is None else passes)
        for context in contexts:
            for width in range(1, longest + 2):
                # A verification by itself: a step that drafts nothing.
                one = server.step_s(1.0, batch, 0, context, prompts=0.0, verified=width - 1)
                cell("target", "forward", batch, width, context, float(one[0]))
            for tokens in (1, longest + 1):
                cell("draft", "catch_up", batch, tokens, context, first)
            cell("draft", "forward", batch, 1, context, each if passes is None else 0.0)
    s, compute = cost["sharpness"], cost["prefill"] * cost["weights"] / server.computing_knee
    held = max(contexts[-1], 16)
    lengths = sorted({1, *(2**i for i in range(4, held.bit_length())), held})
    for prompts, tokens in product(batches, lengths):
        read = float(server.target.read_s(costs, np.array(prompts * tokens)))
        work = (read**s + (compute * prompts * tokens) ** s) ** (1 / s)
        cell("target", "prefill", prompts, tokens, 0, cost["fixed"] + work)
    # As in the fit, a step that decodes reads the weights anyway, and computes prompts on top.
    for decoded in sorted({1, batches[-1] * (longest + 1)}):
        for tokens in (1, MOST_PROMPTS):
            cell("target", "mixed", decoded, tokens, 0, compute * tokens)
    # The runs' steps are whole: passes and the drafter's fixed cost hold the host's time.
    cell("target", "host_round", 1, 1, 0, 0.0)
    meta = {
        "kind": "calibrated", "misfit": server.misfit, "runs": len(runs),
        "passes_apart": server.tells_passes_apart, **({} if model is None else {"target": model}),
    }  # fmt: skip
    if not server.tells_context:
        where = f"{contexts[0]:,} tokens" if contexts[0] else "an unknown length"
        meta[ANY_CONTEXT] = True
        meta["remark"] = (
            f"calibrated at one context, {where}: others are priced like it, so longer ones are "
            "too fast"
        )
    if server.guessed:
        meta["remark"] = f"{meta['remark']}; {GUESSED}" if "remark" in meta else GUESSED
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)), meta)


REACHED = 0.8
"""A benchmark kept its limit of requests at once if their mean was this part of it, or more."""
MOST_BYTES = 256 * 2**20
"""A larger file is no summary of benchmarks."""
ESTIMATED = "no acceptance is told: it is estimated from the speeds"
AIPERF = "profile_export_aiperf.json"
"""Summary of a run in AIPerf's folder."""
AIPERF_OTHERS = (
    "profile_export", "server_metrics_export", "gpu_telemetry_export", "inputs.json",
    "outputs.json", "dataset-identity.json", "mlflow_export.json", "raw_records",
)  # fmt: skip
"""Beginnings of the names of AIPerf's further files: inputs, records and telemetry."""
SAME_NAME = (AIPERF, "benchmarks.json")
"""Results of AIPerf and GuideLLM, which have this name in every run: their folder is named."""
AT = re.compile(r"^(?P<path>.+)@(?P<k>\d{1,4})$")


class Benchmarks(NamedTuple):
    """Runs of one file."""

    runs: list[ServerRun]
    model: str | None
    notes: list[str]
    """Assumptions made while reading, one sentence each."""


class _Fields(NamedTuple):
    concurrency: float | None
    """Requests at once, on average."""
    tokens_per_s: float
    prompt: float | None
    answer: float | None
    accepted: tuple[float, ...] = ()
    emitted: float | None = None
    k: int | None = None
    model: str | None = None
    drafting: float = 1.0
    """Part of the steps that had a draft; acceptance is that of all steps."""
    cap: float | None = None
    """Limit that the benchmark set on requests at once."""
    drafted: float | None = None
    """Mean tokens drafted in a step."""
    ttft_s: float | None = None
    speculated: bool = False
    """True if the run speculated, though it may not tell its draft length."""


def read_benches(files: Sequence[str], *, acceptance_told: bool = False) -> Benchmarks:
    """Read runs of benchmark files and folders of them; ``FILE@K`` names the draft length of a
    file.

    A note names runs without acceptance, unless ``acceptance_told``: it is known from elsewhere.

    Raises DraftsimError naming the file: unreadable, of no known format, without runs, or without
    what a run needs.
    """
    runs: list[ServerRun] = []
    notes: list[str] = []
    models: list[str] = []
    given: dict[Path, int | None] = {}
    for text in files:
        found = AT.match(text)
        path, k = (Path(found["path"]), int(found["k"])) if found else (Path(text), None)
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*.json*")) if p.is_file() and _is_run(p, path)]
            if not inside:
                raise DraftsimError(f"{path}: holds no .json or .jsonl of a benchmark")
        else:
            inside = [path]
        for one in inside:
            try:
                bench, file = _read(one, k), one.resolve()
            except _NoRun:
                if one == path or not _in_aiperf(one, path):
                    raise
                notes.append(f"{one}: left out: it lies with a result of AIPerf and holds no run")
                continue
            if file in given:
                if given[file] != k:
                    raise DraftsimError(f"{one}: is given twice, with different @K: give it once")
                notes.append(f"{text}: holds runs that were given before: each counts once")
                continue
            given[file] = k
            runs += bench.runs
            notes += [n for n in bench.notes if not (acceptance_told and n.endswith(ESTIMATED))]
            models += [bench.model] if bench.model else []
    if len(set(models)) > 1:
        raise DraftsimError(
            f"the benchmarks are of several models, {' and '.join(sorted(set(models)))}: give "
            "those of one server"
        )
    return Benchmarks(runs, models[0] if models else None, _gathered(notes))


def _gathered(notes: Sequence[str]) -> list[str]:
    """Return the notes; what holds for several files is said once."""
    alike: dict[str, dict[str, str]] = {}
    for note in notes:
        file, _, said = note.partition(": ")
        alike.setdefault(said.replace(file, "FILE"), {})[file] = note
    return [
        next(iter(of.values())) if len(of) == 1
        else f"{next(iter(of))} and {len(of) - 1} more: {said}"
        for said, of in alike.items()
    ]  # fmt: skip


class _NoRun(DraftsimError):
    """A file that is no benchmark's result."""


def _in_aiperf(path: Path, top: Path) -> bool:
    """Return True if a folder from `top` to the file's own has a result of AIPerf."""
    return any((p / AIPERF).exists() for p in path.parents if p.is_relative_to(top))


def _is_run(path: Path, top: Path) -> bool:
    """Return False for the other files that `vllm bench sweep` and AIPerf write next to results.

    ``top`` is the folder that was named.
    """
    if path.name == "warmup.json" or path.stem.endswith("failure"):
        return False
    if path.name.startswith(AIPERF_OTHERS) and _in_aiperf(path, top):
        return path.name == AIPERF
    # The summary repeats the runs.
    runs = path.parent.glob("run=*.json")
    return path.name != "summary.json" or not any(_is_run(run, top) for run in runs)


def _read(path: Path, k: int | None) -> Benchmarks:
    text = read_text(path, MOST_BYTES)
    json = _ending(path) in (".json", ".jsonl") or re.match(r"\s*[\[{]", text)
    records = _records(path, text) if json else ()
    if (_ending(path) == ".jsonl" and all(map(_is_row, records))) or not records:
        if k is not None:
            raise DraftsimError(f"{path}@{k}: its rows have draft lengths of their own: drop @{k}")
        return Benchmarks(read_runs(path, text), None, [])
    runs, notes, models = [], [], []
    for number, record in enumerate(records, 1):
        where = f"{path}, run {number}" if len(records) > 1 else str(path)
        fields = _bounded(_fields(record, where), where)
        length = _length(fields, path, k)
        if k == 0 and fields.speculated:
            raise DraftsimError(f"{path}@0: the run speculated: write its draft length, {path}@K")
        if not length and fields.speculated:
            raise DraftsimError(f"{where}: speculated, and has no draft length: write {path}@K")
        if length is None:
            length = 0
            notes.append(
                f"{path}: does not mention speculation, so it is taken as a run without it "
                f"(K = 0); otherwise write {path}@K"
            )
        elif length and k is None and fields.k is None and not fields.accepted:
            notes.append(f"{path}: K = {length} is read from its name; otherwise write {path}@K")
        if length and not fields.accepted and fields.emitted is None:
            notes.append(f"{path}: {ESTIMATED}")
        if fields.drafting < 1:
            notes.append(
                f"{path}: {fields.drafting:.0%} of the steps had a draft: acceptance is taken over "
                "all steps"
            )
        if fields.concurrency is None or fields.concurrency <= 0:
            raise DraftsimError(
                f"{where}: has no concurrency: run the benchmark with a fixed one and no request "
                "rate (vLLM, SGLang: --max-concurrency; AIPerf: --concurrency)"
            )
        batch = max(1, round(fields.concurrency))
        if fields.concurrency != (fields.cap or batch):
            below = f", below its limit of {fields.cap:g}" if fields.cap else ""
            notes.append(
                f"{where}: ran at {three_digits(fields.concurrency)} requests at once on "
                f"average{below}: taken as {batch}, each as fast as measured"
            )
        try:
            runs.append(ServerRun(
                batch, length,
                _number(where, "tokens_per_s", fields.tokens_per_s * batch / fields.concurrency),
                emitted=fields.emitted if length and not fields.accepted else None,
                accepted=fields.accepted if length else (),
                prompt=fields.prompt, answer=fields.answer, drafted=_drafted(fields, length),
                ttft_s=fields.ttft_s or None,  # 0 where answers are not streamed
            ))  # fmt: skip
        except DraftsimError as error:
            raise DraftsimError(f"{where}: {error}") from None
        models += [fields.model] if fields.model else []
    return Benchmarks(runs, models[0] if models else None, notes)


def _drafted(fields: _Fields, length: int) -> float | None:
    """Return the mean tokens drafted in a step; None if all had `length`, or no count says."""
    if fields.drafted is None or not length or fields.drafted >= length:
        return None
    emitted = 1 + sum(fields.accepted) if fields.accepted else fields.emitted or 1
    return max(fields.drafted, emitted - 1)  # equal up to rounding where all were accepted


def _length(fields: _Fields, path: Path, k: int | None) -> int | None:
    """Return the draft length: as given, as counted, or as the file's name says (`_named`).

    ``k`` is that of ``FILE@K``.  Counts of drafts may tell a mean, below it.  Raises DraftsimError
    if the run contradicts it.
    """
    told = fields.k
    if told is None and fields.accepted:
        told = len(fields.accepted)
    if told is None:
        told = _named(path)
    if told is None or k is None:
        return told if k is None else k
    if told > k or (k and not told):
        raise DraftsimError(f"{path}@{k}: a run there says K = {told}: drop @{k}")
    return k


def _named(path: Path) -> int | None:
    """Return the draft length in a file's name; None if it has none, or an "off" before it."""
    own = path.name.removesuffix(".gz")
    name = (path.absolute().parent.name if own in SAME_NAME else Path(own).stem).lower()
    draft_length = (
        r"(?:^|(?<!top)[^a-z0-9])(?:k|spec|num_speculative_tokens)[-_=]?(\d{1,2})(?![a-z0-9])"
    )
    # The last one: a model's name may come before (kimi-k2-k0-c1).
    *_, found = (None, *re.finditer(draft_length, name))
    off = r"(?:^|[^a-z])(?:no|non|without|off)[-_]?(?:spec)?$"
    return None if found is None or re.search(off, name[: found.start()]) else int(found[1])


def _records(path: Path, text: str) -> list[Mapping[str, Any]]:
    try:
        values = [parse_json(text)]
    except JSONError:
        values = [row for _, row in json_lines(path, text)]
    rows: list[Mapping[str, Any]] = []
    for value in values:
        inside = value.get("benchmarks", value) if isinstance(value, dict) else value
        each = inside if isinstance(inside, list) else [value]
        rows += [row for row in each if isinstance(row, dict)]
    if not rows:
        raise _NoRun(f"{path}: holds no runs of a benchmark")
    return rows


Record = Mapping[str, Any]


def _is_served(record: Record) -> bool:
    return "output_throughput" in record and "total_output_tokens" in record


def _is_row(record: Record) -> bool:
    """Return True for a row of `read_runs`, False for a benchmark's result."""
    return any(name in record for name in COLUMNS["tokens_per_s"]) and not _is_served(record)


def _bounded(fields: _Fields, where: str) -> _Fields:
    """Return the fields with the model's name as text.

    Raises DraftsimError for a number that is NaN or larger than `MOST`, and for another name.
    """
    # Times come first: a concurrency is made of them.
    for name, value in reversed(fields._asdict().items()):
        if isinstance(value, float):
            _number(where, name, value)
    return fields._replace(model=label(where, "model", fields.model) or None)


def _fields(record: Record, where: str) -> _Fields:
    try:
        if _is_served(record):
            return _serve(record)
        if "output_tokens_per_second" in (record.get("metrics") or {}):
            return _guidellm(record)
        if "output_token_throughput" in record and "output_sequence_length" in record:
            return _aiperf(record)
    except DraftsimError as error:
        raise DraftsimError(f"{where}: {error}") from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DraftsimError(f"{where}: lacks or misstates {error}") from None
    raise _NoRun(
        f"{where}: is of no known format: expected a result of vllm bench serve, SGLang's "
        "bench_serving, GuideLLM or AIPerf, or a CSV of runs"
    )


def _serve(record: Record) -> _Fields:
    """Return a result of vLLM's or SGLang's serving benchmark: the fields have the same names."""
    completed = float(record["completed"])
    prompt = float(record["total_input_tokens"]) / completed
    answer = float(record["total_output_tokens"]) / completed
    cap = float(record.get("max_concurrency") or 0) or None
    mean = record.get("concurrency")  # SGLang measures it
    named = ("mean_ttft_ms", "mean_tpot_ms", "request_throughput")
    ttft, tpot, rate = (None if record.get(n) is None else float(record[n]) for n in named)
    stay_ms = record.get("mean_e2el_ms")
    if stay_ms is None and (latencies := record.get("latencies")):
        stay_ms = 1e3 * sum(map(float, latencies)) / completed
    if stay_ms is None and ttft is not None and tpot is not None:
        # Exact only if all answers have one length: vLLM's mean TPOT counts each request once.
        stay_ms = ttft + tpot * (answer - 1)
    if mean is None and stay_ms is not None and rate is not None:
        # Little's law: requests at once are their rate times their stay.
        mean = rate * float(stay_ms) / 1e3
    paced = record.get("request_rate") not in (None, "inf", math.inf)
    server = record.get("server_info") or {}  # SGLang's options
    drafts, tokens = (record.get(f"spec_decode_{n}") for n in ("num_drafts", "draft_tokens"))
    drafted = float(tokens) / float(drafts) if drafts and tokens is not None else None
    positions = record.get("spec_decode_per_position_acceptance_rates") or ()
    emitted = record.get("spec_decode_acceptance_length") or record.get("accept_length")
    # An `accept_length` of 1 or 0 is no sign of speculation.
    beyond = record.get("spec_decode_acceptance_length") is not None or float(emitted or 0) > 1
    drafting = _drafting(record)
    if drafting < 1:  # n-grams and suffixes: vLLM's acceptance is over the steps with a draft
        positions = [drafting * float(p) for p in positions]
        emitted = 1 + drafting * (float(emitted or 1) - 1)
    told = _speculative(record)
    if told is None and server:
        told = _steps(server)
    mentioned = bool(server.get("speculative_algorithm")) or any(map(_is_config, record))
    # Lengths of drafts may differ: their mean is no draft length where positions are told.
    length = len(positions) or (None if drafted is None else round(drafted))
    if told is not None:
        length = int(told)
    return _Fields(
        _at_once(cap, mean, paced), float(record["output_throughput"]), prompt, answer,
        tuple(float(p) for p in positions)[:length],
        None if emitted is None else float(emitted), length,
        record.get("model_id") or server.get("model_path"), drafting=drafting, cap=cap,
        drafted=None if drafted is None else drafting * drafted,
        ttft_s=None if ttft is None else ttft / 1e3,
        speculated=beyond or (told is None and mentioned),
    )  # fmt: skip


def _at_once(cap: float | None, mean: Any, paced: bool) -> float | None:
    """Return requests at once: the benchmark's limit, or their mean where it stayed below.

    ``paced`` requests arrive at a rate, which may keep them below the limit.
    """
    if mean is None:
        return None if paced else cap
    held = float(mean)
    if cap is None:
        return held
    # NaN is returned, so that `_bounded` refuses it.
    return min(held, cap) if paced or not held >= REACHED * cap else cap


def _drafting(record: Record) -> float:
    """Return the part of a vLLM server's steps that had a draft, 1 where nearly all had one."""
    told = (record.get(f"spec_decode_{name}") for name in ("num_drafts", "accepted_tokens"))
    drafts, accepted = (None if count is None else float(count) for count in told)
    if drafts is None or accepted is None:
        return 1.0
    # A request's first token comes with its prompt.
    steps = float(record["total_output_tokens"]) - float(record["completed"]) - accepted
    return drafts / steps if 0 < drafts < SELDOM * steps else 1.0


def _steps(server: Record) -> int | None:
    """Return the draft length of an SGLang server, if it says; raise DraftsimError for trees."""
    if not server.get("speculative_algorithm"):
        return 0 if "speculative_algorithm" in server else None
    if (branches := server.get("speculative_eagle_topk") or 1) > 1:
        raise DraftsimError(
            f"drafted trees (speculative_eagle_topk {branches}), which are not predicted: "
            "benchmark chains (--speculative-eagle-topk 1)"
        )
    steps, tokens = (server.get(f"speculative_num_{n}") for n in ("steps", "draft_tokens"))
    return int(steps) if steps else int(tokens) - 1 if tokens else None


def _speculative(record: Record) -> Any:
    """Draft length of a run's server; `vllm bench sweep` adds the options that it varied."""
    for key, value in record.items():
        if key.replace("-", "_").rpartition(".")[2] == "num_speculative_tokens":
            return 0 if value is None else value
        if _is_config(key):
            config = parse_json(value) if isinstance(value, str) else value
            # vLLM takes a number left out from the drafter.
            return 0 if config is None else config.get("num_speculative_tokens")
    return None


def _is_config(key: str) -> bool:
    return key.replace("-", "_") == "speculative_config"


def _guidellm(record: Record) -> _Fields:
    metrics = record["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return _Fields(
        mean("request_concurrency"), mean("output_tokens_per_second"),
        mean("prompt_token_count"), mean("output_token_count"),
        ttft_s=mean(first) / 1e3 if (first := "time_to_first_token_ms") in metrics else None,
    )  # fmt: skip


def _aiperf(record: Record) -> _Fields:
    def average(name: str) -> float:
        return float(record[name]["avg"])

    config = record.get("input_config") or {}
    # A run has phases, warm-up among them; older versions wrote one `loadgen`.
    loads = [p for p in config.get("phases") or () if not p.get("exclude_from_results")]
    loads = [p for p in loads if p.get("name") == "profiling"] or loads
    load = [*loads, config.get("loadgen") or {}][0]
    mean = None
    if "request_latency" in record and "request_throughput" in record:
        # Little's law; latencies are in milliseconds.
        mean = average("request_throughput") * average("request_latency") / 1e3
    cap = float(load.get("concurrency") or 0) or None
    paced = bool(load.get("rate") or load.get("request_rate"))
    emitted, k = _accepted(record)
    models = config.get("models") or (config.get("endpoint") or {}).get("model_names") or ()
    first = next(iter(models.get("items") or () if isinstance(models, dict) else models), None)
    return _Fields(
        _at_once(cap, mean, paced), average("output_token_throughput"),
        average("input_sequence_length"), average("output_sequence_length"), emitted=emitted, k=k,
        model=first.get("name") if isinstance(first, dict) else first, cap=cap,
        ttft_s=average("time_to_first_token") / 1e3 if "time_to_first_token" in record else None,
        speculated=emitted is not None,
    )  # fmt: skip


def _accepted(record: Record) -> tuple[float | None, int | None]:
    """Return acceptance length and draft length of a run whose server told AIPerf of its steps.

    AIPerf makes up the counts by accepted tokens of a llama.cpp server, so their mean alone is
    used.
    """
    counts = record.get("pooled_spec_decode_acceptance_histogram")
    if not counts:
        return None, None
    steps = sum(float(n) for n in counts.values())
    accepted = sum(int(drafts) * float(n) for drafts, n in counts.items())
    rate = float((record.get("spec_decode_overall_draft_acceptance_rate") or {}).get("avg") or 0)
    k = round(accepted / steps / (rate / 100)) if rate else max(map(int, counts))
    return 1 + accepted / steps, k or None


def with_acceptance(runs: Sequence[ServerRun], told: Positions) -> list[ServerRun]:
    """Return the runs; those without acceptance get that of ``told``.

    Runs with longer drafts than ``told`` has positions stay without.
    """

    def known(run: ServerRun) -> ServerRun:
        if not run.k or run.round_tokens is not None or run.k > told.longest:
            return run
        if told.estimated:
            return replace(run, emitted=told.known[run.k]) if run.k in told.known else run
        return replace(run, accepted=told.survival[: run.k])

    return [known(run) for run in runs]
