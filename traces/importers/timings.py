"""Timings of passes: CSV of latencies, and llama-bench's output."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

from policies.arrays import half_iqr
from traces.acceptance.trace import MOST_TOKENS
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import head, only_file, read_json_rows
from traces.latency.table import CELL_COLUMNS, LatencyTable, as_cells
from traces.store.identity import ROLES
from traces.store.text import MOST_SECONDS, csv_rows, decimal, digits, label, read_text, whole

NEEDED = ("model", "new_tokens", "context", "seconds")
DEFAULTS = {"phase": "forward", "batch": "1", "spread_s": "0", "repeats": "1"}


class Latency(Importer):
    """Latencies as CSV.

    Columns ``model`` (target, draft), ``phase`` (`traces.latency.table.PHASES`; default forward),
    ``batch`` (1), ``new_tokens``, ``context`` and ``seconds``; ``spread_s`` and ``repeats`` are
    optional.  A format of ours.
    """

    name = "latency"
    summary = "CSV of latencies: model,phase,batch,new_tokens,context,seconds"
    takes = ("device",)

    def sniff(self, text: str) -> bool:
        return set(NEEDED) <= head(text)

    def read(self, files: Sequence[Path], options: Options) -> LatencyTable:
        file = only_file(self.name, files)
        columns = {
            "seconds" if name == "median_s" else name: kind
            for name, (kind, _) in CELL_COLUMNS.items()
        }
        cells: list[list[object]] = []
        for at, row in csv_rows(file, read_text(file), NEEDED, tuple(DEFAULTS)):
            given = {**DEFAULTS, **{name: value for name, value in row.items() if value}}
            if empty := [name for name in NEEDED if name not in given]:
                raise FileError(f"{at}: {empty[0]} is empty")
            cell = {name: _value(at, name, kind, given[name]) for name, kind in columns.items()}
            passed = given["model"] == "target" and given["phase"] in ("prefill", "forward")
            if passed and not cell["seconds"]:
                raise FileError(
                    f"{at}: seconds is {shown(given['seconds'])}, expected more than 0 for a pass "
                    "of the target"
                )
            cells.append(list(cell.values()))
        if not cells:
            raise FileError(f"{file}: holds no latencies: expected a row a cell")
        meta = self.meta(files, device=options.device or "not said", estimator="mean")
        return LatencyTable(as_cells(cells), meta)


def _value(at: str, name: str, kind: str, text: str) -> object:
    if kind == "str":
        return text
    if kind.startswith("int"):
        return digits(at, name, text, most=MOST_TOKENS)
    value = decimal(text)
    if not 0 <= value <= MOST_SECONDS:
        raise FileError(f"{at}: {name} is {shown(text)}, expected seconds, 0 or more")
    return value


NORMAL_IQR = 0.6744897501960817
"""Half the interquartile range of a normal distribution, in standard deviations."""
_NOT_SETTINGS = {
    "build_commit", "build_number", "model_filename", "model_type", "model_size", "model_n_params",
    "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
    "samples_ns", "samples_ts", "cpu_info", "gpu_info", "model", "size", "params", "test", "t/s",
    "fit_target", "fit_min_ctx",
}  # fmt: skip
_TEST = re.compile(r"(?:pp ?(\d{1,8}))?\+?(?:tg ?(\d{1,8}))?(?: @ d ?(\d{1,8}))?", re.ASCII)
_RATE = re.compile(r"(\d{1,15}(?:\.\d+)?) ± (\d{1,15}(?:\.\d+)?)", re.ASCII)
_SIZES = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


class Test(NamedTuple):
    """One test: its numbers of prompt tokens and of generated tokens, and its depth."""

    where: str
    model: str
    size: float
    """Bytes of the model."""
    prompt: int
    generated: int
    depth: int
    seconds: float
    """Seconds of the whole test, mean over repeats."""
    spread_s: float
    """Half the interquartile range over repeats."""
    repeats: int
    device: str
    settings: Mapping[str, str]
    """Everything else that the row says the test was run with."""


def read_tests(file: Path) -> list[Test]:
    """Return the tests of a file in json, jsonl, csv or md.

    Raises FileError if it has another form, or a row does not hold what its form has.
    """
    text = read_text(file)
    if text.lstrip().startswith(("[", "{")):
        return [_from_record(at, row) for at, row in read_json_rows(file, text)]
    if text.lstrip().startswith("|"):
        return [_from_table(at, row) for at, row in _markdown(file, text)]
    if not {"n_prompt", "n_gen", "avg_ns"} <= head(text):
        raise FileError(f"{file}: is no output of llama-bench: expected -o json, jsonl, csv or md")
    return [_from_record(at, row) for at, row in csv_rows(file, text, ())]


def _from_record(at: str, row: Mapping[str, Any]) -> Test:
    prompt, generated = (_count(at, row, name) for name in ("n_prompt", "n_gen"))
    depth = _count(at, row, "n_depth") if row.get("n_depth") is not None else 0
    mean = _number(at, row, "avg_ns")
    samples = row.get("samples_ns")
    # CSV has them in a cell, as text.
    in_csv = isinstance(row.get("avg_ns"), str) and isinstance(samples, str)
    if not (samples is None or in_csv or isinstance(samples, list)):
        raise FileError(f"{at}: samples_ns is {shown(samples)}, expected a list")
    if samples and isinstance(samples, list):
        each = [_number(at, {"samples_ns": sample}, "samples_ns") for sample in samples]
        spread, repeats = float(half_iqr(each)), len(samples)
    else:
        spread, repeats = NORMAL_IQR * _number(at, row, "stddev_ns"), 1
    if prompt + generated < 1 or mean <= 0:
        raise FileError(f"{at}: {prompt} and {generated} tokens in {mean:g} ns are no test")
    return Test(
        at, _model(at, row),
        _number(at, row, "model_size") if row.get("model_size") else 0.0,
        prompt, generated, depth, mean / 1e9, spread / 1e9, repeats,
        str(row.get("gpu_info") or row.get("cpu_info") or "not said"), _settings(row.items()),
    )  # fmt: skip


def _model(at: str, row: Mapping[str, Any]) -> str:
    names = ("model_filename", "model_type")
    given = next((name for name in names if row.get(name) not in (None, "")), names[1])
    return label(at, given, row.get(given), "?")


def _markdown(file: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    names: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            continue
        values = [value.strip() for value in line.strip().strip("|").split("|")]
        if values[0] == "model":
            names = values
        elif not set(line) <= set("|-: "):
            if len(values) != len(names):
                raise FileError(f"{file} line {number}: has not as many columns as its header")
            yield f"{file} line {number}", dict(zip(names, values, strict=True))


def _from_table(at: str, row: Mapping[str, str]) -> Test:
    test, rate = _TEST.fullmatch(row.get("test", "")), _RATE.fullmatch(row.get("t/s", ""))
    if test is None or not any(test.groups()[:2]) or rate is None or not float(rate.group(1)):
        raise FileError(
            f"{at}: test is {row.get('test')!r} at {row.get('t/s')!r} t/s, expected such as "
            "'pp512 @ d512' at '132.19 ± 0.55'"
        )
    prompt, generated, depth = (int(part or 0) for part in test.groups())
    mean, deviation = (float(part) for part in rate.groups())
    seconds = (prompt + generated) / mean
    number, _, unit = row.get("size", "").partition(" ")
    size = decimal(number) * 1024 ** _SIZES.get(unit, math.nan)
    return Test(
        at, row["model"], size if math.isfinite(size) else 0.0, prompt, generated, depth, seconds,
        NORMAL_IQR * seconds * deviation / mean, 1, row.get("backend", "not said"),
        _settings(row.items()),
    )  # fmt: skip


def _settings(items: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {name: str(value) for name, value in items if name not in _NOT_SETTINGS}


def _number(at: str, row: Mapping[str, Any], name: str) -> float:
    value = decimal(row.get(name))
    if not 0 <= value <= 1e9 * MOST_SECONDS:
        raise FileError(f"{at}: {name} is {shown(row.get(name))}, expected a number >= 0")
    return value


def _count(at: str, row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    if isinstance(value, str):
        return digits(at, name, value, most=MOST_TOKENS)
    return whole(at, name, value, most=MOST_TOKENS)


WIDEST = 64
"""Tokens of a prompt test up to which it is read as a verification.

Between the widths of drafts and a prompt of hundreds a straight line would be a guess.
"""


class LlamaBench(Importer):
    """llama-bench's output.

    A prompt test of P tokens at depth D is a pass over P tokens with D in the cache: a prefill
    where D is 0, and a verification as wide where P is small.  A generation test of N tokens at
    depth D is N passes over one token, with D to D + N - 1 in the cache, and gives their mean.
    Neither includes tokenizing, sampling or anything around the passes.  Of two models in a file
    the larger is the target.  Every form is read: md, csv, json, jsonl (sql is not).  Source of the
    format: ggml-org/llama.cpp, ``tools/llama-bench``.
    """

    name = "llama-bench"
    summary = "llama-bench -o json|jsonl|csv|md of a target and its draft: latencies"
    takes = ("device",)

    def sniff(self, text: str) -> bool:
        known = all(f'"{k}"' in text for k in ("n_prompt", "n_gen", "avg_ns"))
        line = text.lstrip().partition("\n")[0]
        csv = {"n_prompt", "n_gen", "avg_ns"} <= head(text.lstrip())
        return known or csv or (line.startswith("| model") and line.rstrip().endswith("t/s |"))

    def read(self, files: Sequence[Path], options: Options) -> LatencyTable:
        tests = [test for file in files for test in read_tests(file)]
        if not tests:
            raise FileError(f"{files[0]}: holds no test: expected llama-bench's output")
        models: dict[str, list[Test]] = {}
        for test in tests:
            models.setdefault(test.model, []).append(test)
        ordered = sorted(models, key=lambda name: -models[name][0].size)
        if len(ordered) > len(ROLES):
            raise FileError(
                f"{files[0]}: holds {len(ordered)} models ({', '.join(ordered)}): import a target "
                "and a draft at most"
            )
        rows: list[tuple[Any, ...]] = []
        left_out: list[str] = []
        for role, name in zip(ROLES, ordered, strict=False):
            _check_one_setting(name, models[name])
            for test in models[name]:
                own = _cells(role, test)
                if not own:
                    left_out.append(f"{test.where}: {_why_left_out(test)}")
                rows += own
        cells = as_cells(rows)
        key = list(CELL_COLUMNS)[:5]
        if (again := cells[cells.duplicated(key)]).shape[0]:
            cell = ", ".join(str(value) for value in again[key].iloc[0])
            raise FileError(f"{files[0]}: tells the cell ({cell}) twice: import one run at a time")
        if "target" not in set(cells["model"]):
            raise FileError(f"{files[0]}: {left_out[0] if left_out else 'no test can be used'}")
        meta = self.meta(
            files, estimator="mean", device=options.device or tests[0].device, left_out=left_out,
            models=dict(zip(ROLES, ordered, strict=False)), settings=dict(tests[0].settings),
        )  # fmt: skip
        return LatencyTable(cells, meta)


def _cells(role: str, test: Test) -> list[tuple[Any, ...]]:
    if test.prompt and test.generated:
        return []
    if test.generated:
        context = test.depth + test.generated // 2
        seconds, spread = test.seconds / test.generated, test.spread_s / test.generated
        return [(role, "forward", 1, 1, context, seconds, spread, test.repeats)]
    tail = (test.seconds, test.spread_s, test.repeats)
    cells: list[tuple[Any, ...]] = []
    if not test.depth:
        cells.append((role, "prefill", 1, test.prompt, 0, *tail))
    if test.prompt <= WIDEST:
        cells.append((role, "forward", 1, test.prompt, test.depth, *tail))
    return cells


def _why_left_out(test: Test) -> str:
    if test.prompt and test.generated:
        return "a prompt and its generation together are no pass"
    return f"{test.prompt} tokens at depth {test.depth} are neither prompt nor verification"


def _check_one_setting(model: str, tests: Sequence[Test]) -> None:
    first = tests[0]
    for test in tests[1:]:
        for name in {*first.settings, *test.settings}:
            mine, other = first.settings.get(name), test.settings.get(name)
            if mine != other:
                raise FileError(
                    f"{test.where}: {model} was run with {name} {mine} and {other}: import the "
                    "tests of one setting at a time"
                )
