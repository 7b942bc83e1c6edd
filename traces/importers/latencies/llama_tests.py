"""The tests in llama-bench's output, whichever form it was printed in."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np

from policies.json_text import JSONError, parse_json
from traces.errors import FileError
from traces.importers.bounds import MOST_SECONDS, MOST_TOKENS, decimal, digits, label, whole
from traces.store.text import json_lines

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


def read_tests(file: Path, text: str) -> list[Test]:
    """Return the tests of a file in json, jsonl, csv or md.

    Raises
    ------
    FileError
        If it has another form, or a row does not hold what its form has.
    """
    start = text.lstrip()
    if start.startswith(("[", "{")):
        return [_from_record(at, row) for at, row in _json(file, text)]
    if start.startswith("|"):
        return [_from_table(at, row) for at, row in _markdown(file, text)]
    rows = csv.DictReader(text.splitlines())
    if not {"n_prompt", "n_gen", "avg_ns"} <= set(rows.fieldnames or ()):
        raise FileError(f"{file}: is no output of llama-bench: expected -o json, jsonl, csv or md")
    return [_from_record(f"{file} line {n}", row) for n, row in enumerate(rows, 2)]


def _json(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    if not text.lstrip().startswith("["):
        for number, row in json_lines(file, text):
            yield f"{file} line {number}", row
        return
    try:
        rows = parse_json(text)
    except JSONError as error:
        raise FileError(f"{file}: is not JSON ({error}): copy the file again") from None
    for number, row in enumerate(rows, 1):
        yield f"{file} entry {number}", row


def _from_record(at: str, row: Any) -> Test:
    if not isinstance(row, Mapping) or None in row:
        raise FileError(f"{at}: is no test of llama-bench")
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
        low, high = np.percentile(each, [25, 75])
        spread, repeats = float(high - low) / 2, len(samples)
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
    try:
        size = float(number) * 1024 ** _SIZES[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 0 <= size < float("inf"):
        size = 0.0
    return Test(
        at, row["model"], size, prompt, generated, depth, seconds,
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
