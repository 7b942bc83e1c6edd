"""``draftsim validate recorded``: runs measured before, compared with their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from commands.common.output import emit, note
from commands.common.printed import cell_text
from commands.common.written import Shown
from simulator.validation import (
    MEDIAN_BOUND,
    WORST_BOUND,
    Verdict,
    anchor_drift,
    check_recording,
    verdict,
)
from traces.errors import DraftsimError
from traces.store.files import read_latency
from traces.store.recordings import BUNDLED
from traces.store.writing import write_atomically

SHOWN = (
    "pair", "mode", "batch", "policy", "predicted_s", "measured_s", "error", "spread", "drift",
    "rounds_differ",
)  # fmt: skip
BOUNDS = (
    "recording", "runs", "median |error|", "without drift", "worst", "misranked",
    "wrong side of 1x",
)  # fmt: skip
"""Columns of the table of bounds."""


def recorded_check(
    names: Sequence[str], markdown: Path | None, json: str | None, out: Path | None = None
) -> None:
    """Print predicted | measured | error | spread of the recordings, and the bounds kept.

    ``names``: bundled recordings, folders of one, or folders of several.  What cannot be predicted
    is named and left out.  Raises DraftsimError if there are no measured runs under a name, or
    nothing can be predicted.
    """
    folders = dict.fromkeys(folder for name in names for folder in recorded_folders(name))
    parts, skipped = [], {}
    for folder in folders:
        try:
            parts.append(rows := recorded_rows(folder))
        except DraftsimError as error:
            skipped[folder.name] = str(error)
        else:
            for batch, why in rows.attrs["left_out"].items():
                skipped[f"{folder.name} at batch {batch}"] = why
    for name, why in skipped.items():
        note(f"left out {name}: {why}")
    if not parts:
        raise DraftsimError(
            f"none of {len(folders)} recordings can be predicted: measure their "
            "latencies in the stage that lacks them, and unpack again"
        )
    kept = {f"{p['pair'].iloc[0]}, {p['mode'].iloc[0]}": verdict(p) for p in parts}
    kept["all"] = verdict(*parts)
    rows = pd.concat(parts, ignore_index=True)
    shown = [
        {name.removesuffix("_s"): cell_text(name, row[name]) for name in SHOWN}
        for row in rows.to_dict("records")
    ]
    said = [bounds_row(name, one) for name, one in kept.items()]
    remarks = [bounds_said(), *remarks_on(parts)]

    bounds = [
        {
            "recording": name, **one._asdict(), "misranked": len(one.misranked),
            "wrong_sign": len(one.wrong_sign), "met": one.met,
        }
        for name, one in kept.items()
    ]  # fmt: skip
    more = {
        "bounds": bounds, "remarks": remarks,
        "skipped": [{"recording": name, "why": why} for name, why in skipped.items()],
    }  # fmt: skip
    emit(
        "validate", rows, json, more=more, out=out,
        tables=lambda: [
            Shown(shown, "predicted and measured"), Shown(said, "errors", notes=remarks)
        ],
    )  # fmt: skip
    if markdown is not None:
        lines = "".join(f"\n* {remark}" for remark in remarks)
        tables = f"{markdown_table(shown)}\n{markdown_table(said)}"
        write_atomically(markdown, (f"{tables}{lines}\n" if lines else tables).encode())
        note(f"wrote {markdown}")


def recorded_folders(name: str) -> list[Path]:
    """Return the recordings with measured runs that `name` means."""
    path = Path(name)
    for place in ([BUNDLED / path] if len(path.parts) == 1 else []) + [path]:
        if (place / "measured.parquet").is_file():
            return [place]
        if inside := sorted(file.parent for file in place.glob("*/measured.parquet")):
            return inside
    bundled = sorted(file.parent.name for file in BUNDLED.glob("*/measured.parquet"))
    raise DraftsimError(
        f"{name}: no measured runs there: name a folder that `python -m profiler.suite "
        f"unpack` wrote, or a bundled recording ({', '.join(bundled) or 'none has measured runs'})"
    )


def recorded_rows(folder: Path) -> pd.DataFrame:
    """Return `simulator.validation.check_recording`'s rows with pair, mode and drift."""
    meta = read_latency(folder / "latency.parquet").meta
    rows, drift = check_recording(folder), anchor_drift(folder)
    rows.insert(0, "pair", str(meta.get("pair", folder.name)))
    rows.insert(1, "mode", str(meta.get("mode", "-")))
    rows["drift"] = [drift.get(batch, float("nan")) for batch in rows["batch"]]
    rows.attrs["meta"] = meta
    return rows


def bounds_said() -> str:
    """Return the bounds that `met` and `MISSED` are about, in words."""
    return (
        f"met, MISSED: median |error| up to {MEDIAN_BOUND:.0%}, worst up to {WORST_BOUND:.0%}, "
        "no pair misranked, no wrong side of 1x"
    )


def remarks_on(parts: Sequence[pd.DataFrame]) -> list[str]:
    """Return the facts about the figures: each mode's kernels, library versions, and batches."""
    kernels, versions = {}, {}
    for rows in parts:
        meta = rows.attrs["meta"]
        if meta.get("kernels"):
            kernels[rows["mode"].iloc[0]] = meta["kernels"]
        about = [f"{name} {v}" for name, v in sorted(meta.get("versions", {}).items())]
        if about:
            versions[f"{meta.get('device', 'measured')}: {', '.join(about)}"] = True
    said = [f"{mode}: {text}" for mode, text in sorted(kernels.items())]
    said += versions
    if any((rows["batch"] > 1).any() for rows in parts):
        said.append(
            "batches: verification is padded to the longest draft, unlike an engine's; eager "
            "batches copy or pack heads, depending on the version of transformers"
        )
    return said


def bounds_row(name: str, kept: Verdict) -> dict[str, str]:
    """Return one line of the table of bounds."""
    met = {what: "met" if good else "MISSED" for what, good in kept.met.items()}
    values = (
        name, str(kept.rows), f"{kept.median_error:.1%} {met['median']}",
        f"{kept.undrifted_error:.1%}",
        f"{kept.worst_error:+.1%} ({kept.worst_policy}) {met['worst']}",
        f"{len(kept.misranked)} of {kept.ranked_pairs} {met['ranking']}",
        f"{len(kept.wrong_sign)} of {kept.sign_arms} {met['sign']}",
    )  # fmt: skip
    return dict(zip(BOUNDS, values, strict=True))


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the rows as a Markdown table, the first one's keys as its head."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
