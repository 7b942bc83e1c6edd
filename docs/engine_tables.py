"""Tables of what engines measured and predicted, from the JSON kept with recordings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from docs.reading import table

RECORDED = Path(__file__).resolve().parent.parent / "traces" / "recorded"
Row = Mapping[str, Any]


def _iterations(row: Row) -> str:
    if after := row.get("iterations_after"):
        return f"{row['iterations']} ({after} after)"
    if row["iterations"] == row["iterations_predicted"]:
        return f"{row['iterations']}"
    return f"{row['iterations']}, predicted {row['iterations_predicted']}"


TEXTS = "texts diverged"
"""A column that checks made before there was one have not."""
MEASURED = (
    ("load", lambda r: r["load"]),
    ("policy", lambda r: r["policy"]),
    ("iterations", _iterations),
    ("rounds differ", lambda r: f"{r['rounds_differ']}"),
    (TEXTS, lambda r: f"{r['texts_diverged']}"),
    ("tokens/s", lambda r: f"{r['throughput']:.1f}"),
    ("predicted", lambda r: f"{r['throughput_predicted']:.1f}"),
    ("error", lambda r: f"{r['error']:+.1%}"),
)  # fmt: skip
SPEEDUP = (
    ("speedup", lambda r: f"{r['speedup']:.2f}"),
    ("predicted", lambda r: f"{r['speedup_predicted']:.2f}"),
    ("error", lambda r: f"{r['speedup_predicted'] / r['speedup'] - 1:+.1%}"),
)
STEPPED = (*MEASURED, *SPEEDUP)
NOT_IN_GUIDE = ("load", "iterations", TEXTS)
"""Columns that the table of a single load leaves out."""
SERVED = (
    *MEASURED,
    *SPEEDUP,
    ("server, ms a request", lambda r: f"{1000 * r['request_s']:.1f}"),
    ("ms an iteration", lambda r: f"{1000 * r['iteration_s']:.1f}"),
    ("share of time", lambda r: f"{r['share']:.1%}"),
    ("predicted", lambda r: f"{r['share_predicted']:.1%}"),
)  # fmt: skip


def engine_checks(name: str) -> str:
    """Return what ``validate engine`` measured and predicted, as kept with a recording."""
    return _table(name, "engine-*.json", STEPPED)


def check_errors(name: str) -> str:
    """Return a row per engine check of a recording, in the order of their numbers."""
    rows = []
    for path in sorted((RECORDED / name).glob("engine-*.json")):
        own = checks(name, path.name)
        drafting = [row for row in own if row["speedup"] != 1]
        speedups = sorted(abs(row["speedup_predicted"] / row["speedup"] - 1) for row in drafting)
        wrong = sum((row["speedup_predicted"] - 1) * (row["speedup"] - 1) < 0 for row in drafting)
        rows.append((
            path.stem.rpartition("-")[2], f"{len({row['policy'] for row in drafting})}",
            f"{own[0]['repeats']}",
            f"{sum(row['rounds_differ'] for row in own)} of "
            f"{sum(row['rounds_compared'] * row['repeats'] for row in own):,}",
            f"{median(speedups):.1%} (worst {speedups[-1]:.1%})",
            f"{median(abs(row['error']) for row in own):.1%}", f"{wrong} of {len(drafting)}",
        ))  # fmt: skip
    heads = (
        "check", "policies", "repeats", "rounds that differ", "error of speedups",
        "error of tokens/s", "wrong side of 1x",
    )  # fmt: skip
    return table(heads, rows)


def engine_load(name: str) -> str:
    """Return the rows of one load of a recording's engine checks; `name` is RECORDING/LOAD."""
    recording, _, load = name.partition("/")
    rows = [row for row in checks(recording, "engine-*.json") if row["load"] == load]
    if not rows:
        raise KeyError(name)
    shown = [column for column in (*MEASURED, *SPEEDUP[:2]) if column[0] not in NOT_IN_GUIDE]
    return table([head for head, _ in shown], [[cell(row) for _, cell in shown] for row in rows])


def server_checks(name: str) -> str:
    """Return the same over HTTP, with the time that the server took."""
    return _table(name, "http-*.json", SERVED)


def checks(name: str, files: str) -> list[Row]:
    """Return the rows of these files of a recording, loads in order; KeyError if there are none."""
    found = sorted((RECORDED / name).glob(files))
    rows = [row for path in found for row in json.loads(path.read_text())["results"]]
    if not rows:
        raise KeyError(name)
    return sorted(rows, key=lambda row: int(row["load"].partition(":")[2]))


def _table(name: str, files: str, shown: tuple[tuple[str, Callable[[Row], str]], ...]) -> str:
    found = checks(name, files)
    if any("texts_diverged" not in row for row in found):
        shown = tuple(column for column in shown if column[0] != TEXTS)
    if len({row.get("repeats") for row in found}) > 1:
        shown = (*shown[:2], ("repeats", lambda r: f"{r['repeats']}"), *shown[2:])
    rows = [tuple(cell(row) for _, cell in shown) for row in found]
    return table(tuple(head for head, _ in shown), rows)


def stepped(name: str) -> str:
    """Return how far off the predictions of a recording's engine checks are, in one sentence."""
    return stepped_in_words(checks(name, "engine-*.json"))


def over_defaults(name: str) -> str:
    """Return speedups over the same engine and over the engine with its own defaults, by load."""
    found = [row for row in checks(name, "*-closed-*.json") if "speedup_defaults" in row]
    if not found:
        raise KeyError(name)
    rows = []
    for (load, plain), own in groupby(found, lambda row: (row["load"], row["throughput_defaults"])):
        for row in own:
            rows.append((
                load, row["policy"], f"{row['throughput']:.1f}", f"{row['speedup']:.2f}x",
                f"{row['speedup_defaults']:.2f}x",
            ))  # fmt: skip
        rows.append((load, "the engine with its defaults, no drafter", f"{plain:.1f}", "", "1.00x"))
    heads = (
        "load", "policy", "tokens/s", "over the same engine, drafts off",
        "over the defaults, no drafter",
    )  # fmt: skip
    return table(heads, rows)


def over_http(name: str) -> str:
    """Return what a server added in a recording's checks, as one sentence."""
    words = served_in_words(checks(name, "http-*.json"))
    return f"{words[0].upper()}{words[1:]}."


def speedups(loads: Mapping[str, Sequence[int]], policies: Sequence[str]) -> str:
    """Return predicted and measured speedups, a row per policy and a column per load.

    ``loads`` are those of each recording.  Of several checks of a policy under a load, the last one
    is shown.
    """
    found: dict[tuple[int, str], Row] = {}
    for name, sizes in loads.items():
        for row in checks(name, "engine-*.json"):  # in the order of their numbers
            size = int(row["load"].partition(":")[2])
            if size in sizes:
                found[size, row["policy"]] = row
    columns = [n for sizes in loads.values() for n in sizes]
    rows = []
    for policy in policies:
        own = [found[n, policy] for n in columns]
        told = [f"{r['speedup_predicted']:.2f} | {r['speedup']:.2f}" for r in own]
        rows.append((policy, *told))
    return table(("policy", *(f"{n} request{'s' * (n > 1)}" for n in columns)), rows)


def stepped_in_words(rows: Sequence[Row]) -> str:
    """Return how far off predictions of an engine stepped by hand are, plain decoding left out."""
    speedups = [r["speedup_predicted"] / r["speedup"] - 1 for r in rows if r["speedup"] != 1]
    wrong = sum((r["speedup_predicted"] - 1) * (r["speedup"] - 1) < 0 for r in rows)
    return (
        f"Median errors: {_errors(speedups, 'speedups')}, "
        f"{_errors([r['error'] for r in rows], 'tokens/s')}, "
        f"{_errors([_relative(r, 'ttft_s') for r in rows], 'TTFT')}. "
        f"{wrong} of {len(speedups)} speedups {'is' if wrong == 1 else 'are'} on the wrong side "
        "of 1x."
    )


def served_in_words(rows: Sequence[Row]) -> str:
    """Return what a server adds to its engine, measured and predicted."""
    ends = {
        name: " to ".join(f"{scale * end(r[name] for r in rows):.0f}" for end in (min, max))
        for name, scale in (
            ("iteration_s", 1000), ("request_s", 1000), ("share", 100), ("share_predicted", 100),
        )
    }  # fmt: skip
    return (
        f"the server adds {ends['iteration_s']} ms around an iteration and {ends['request_s']} ms "
        f"around a request, {ends['share']}% of the requests' time "
        f"(predicted {ends['share_predicted']}%)"
    )


def _relative(row: Row, name: str) -> float:
    return float(row[f"{name}_predicted"] / row[name] - 1)


def _errors(errors: Sequence[float], what: str) -> str:
    sizes = sorted(map(abs, errors))
    return f"{100 * median(sizes):.1f}% of {what} (worst {100 * sizes[-1]:.0f}%)"
