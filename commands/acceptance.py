"""Acceptance by position: compared with a profile, at other draft lengths, and exported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import typer

from commands.common.configured import MOST_LENGTH
from commands.common.drafted import FORMS, LONGEST, load_positions, load_unpriced
from commands.common.options import DraftedOption, TraceOption, batch_sizes
from commands.common.output import JsonOption, LevelOption, OutOption, emit, note, placed_as, remark
from commands.common.written import Shown
from simulator.aggregate.acceptance import contradiction, extended, is_curves, read_curves
from simulator.aggregate.doctor import DIFFERS, diagnose
from simulator.aggregate.positions import judged, of_trace
from simulator.recording import Recording
from simulator.tune.costs import longest_draft
from simulator.tune.launch import METHODS
from traces.digits import counted, three_digits
from traces.errors import DraftsimError
from traces.store.identity import model_label
from traces.store.recordings import DEFAULT_TRACE, TRACE_VARIABLE
from traces.store.speculation_profile import SpeculationProfile, write_profile
from traces.store.text import decimal


def doctor(
    observed: Annotated[
        list[str], typer.Argument(metavar="OBSERVED...", help=f"Acceptance of the server: {FORMS}.")
    ],
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="PROFILE",
            envvar=TRACE_VARIABLE,
            help="Acceptance to compare with, in the same forms.",
        ),
    ] = DEFAULT_TRACE,
    form: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="Format of the log, if not recognised."),
    ] = "auto",
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="S", help="Drafter, if --against is a recording of several."
        ),
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(min=1, help="Draft length of the server, if its log does not say.")
    ] = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Compare a server's acceptance with a profile, by position, and name the likely cause.

    The first line says if the acceptance is as expected, else which fault the pattern looks like.
    z is the difference in standard errors, which include the usual difference of two sound runs.
    """
    mine = load_positions(observed, draft_length, form=form, drafts=draft_length)
    its = load_positions(against, draft_length, source=source, most=mine.longest)
    shorter = min(mine.longest, its.longest)
    if draft_length is not None or shorter in mine.known:
        mine = mine.cut(draft_length or shorter)
    found = diagnose(mine, its)
    rows = [place._asdict() for place in found.places if not math.isnan(place.observed)]
    parts = [part._asdict() for part in found.contexts]
    more = {
        "cause": found.cause, "advice": found.advice, "position": found.at,
        "draft_length": found.draft_length, "tokens_per_round": found.observed,
        **found.expected.columns("expected"), "unexplained_z": found.leaves, "by_context": parts,
    }  # fmt: skip
    if json is None:
        note(f"{found.cause}: {found.advice}")
    span = found.expected
    low, high = three_digits(span.low), three_digits(span.high)
    note(
        f"{three_digits(found.observed)} tokens per round at K = {found.draft_length}, expected "
        f"{three_digits(span.value)}"
        + (f" ({low} to {high})" if span.high > span.low else "")
        + ("" if mine.rounds is None else f"; {mine.rounds:,} rounds")
    )

    tables = [Shown(rows, f"Acceptance by position: {mine.label} against {its.label}")]
    tables += [Shown(parts, "Tokens per round by context")] if parts else []
    emit("doctor", rows, json, more=more, out=out, tables=lambda: tables)
    if far := [row["position"] for row in rows if abs(row["z"]) >= DIFFERS]:
        places = f"position{'s' * (len(far) > 1)} {', '.join(map(str, far))}"
        note(f"|z| is {DIFFERS:g} or more at {places}")
    if not rows:
        note("no acceptance by position: only tokens per round are compared")


CURVES = (
    "curve", "k", "measured", "hazard", "low", "high", "inside", "iid", "two_state",
    "hazard_error",
)  # fmt: skip
JUDGED = ("measured", "inside", "hazard_error", "iid_error", "two_state_error")
"""Columns of a row whose acceptance length was measured; None elsewhere."""


def curve(
    acceptance: Annotated[
        list[str], typer.Argument(metavar="ACCEPTANCE...", help=f"One or more curves: {FORMS}.")
    ],
    given: Annotated[
        str | None,
        typer.Option(
            metavar="K,...",
            help="Use only the acceptance lengths measured at these K. Default: K = 1, 2, 3 if a "
            "curve has more, else all; all of one chance.",
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="K,...", help="Draft lengths to predict. Default: up to 8."),
    ] = None,
    level: LevelOption = 0.8,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Predict acceptance lengths at draft lengths that were not measured.

    The chance that a position is accepted, once those before it were, is fitted and extended. Two
    other models are printed next to it: one rate for all positions, and easy and hard stretches.
    Acceptance lengths that a file holds and --given leaves out judge the prediction.
    """
    rows: list[dict[str, Any]] = []
    for name, lengths in _curves(acceptance).items():
        # Lengths that were computed from one chance hold at every K, and judge nothing.
        computed = math.isfinite(decimal(name))
        if given is None and computed:
            used = sorted(lengths)
        elif given is None:
            used = [n for n in (1, 2, 3) if n in lengths] if max(lengths) > 3 else sorted(lengths)
            used = used or sorted(lengths)
        else:
            used = batch_sizes("--given", given, MOST_LENGTH)
        if missing := [n for n in used if n not in lengths]:
            raise DraftsimError(f"{name} has no length at K = {missing[0]}: see --given")
        if said := contradiction({n: lengths[n] for n in used}):
            remark(f"{name}: {said}: the acceptance lengths are of other texts or settings")
        asked = (
            [
                n for n in range(1, max(LONGEST, *lengths) + 1)
                if n not in used or (computed and given is None)
            ]
            if k is None else batch_sizes("--k", k, MOST_LENGTH)
        )  # fmt: skip
        if not asked:
            raise DraftsimError(f"{name}: --given holds every K up to {max(used)}: name others "
                                "with --k")  # fmt: skip
        none = dict.fromkeys(JUDGED) if computed else {}
        rows += [{"curve": name, **row, **none} for row in extended(lengths, used, asked, level)]
    shown = [n for n in CURVES if any(row[n] is not None for row in rows)]
    if json is None:
        note(_predicted(rows, level))
    emit("curve", rows, json, show=shown, out=out)
    for line in _judged(rows, level):
        note(line)


def _curves(texts: list[str]) -> Mapping[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for text in texts:
        if is_curves(text) and "#" not in text:
            found |= read_curves(text)
        else:
            found[text] = dict(load_positions(text).known)
    return found


def _predicted(rows: Sequence[Mapping[str, Any]], level: float) -> str:
    """Return the first curve's acceptance lengths at its first and last draft length, as told."""
    mine = [row for row in rows if row["curve"] == rows[0]["curve"]]
    ends = mine[:: max(len(mine) - 1, 1)][:2]
    said = "; ".join(
        f"K = {row['k']}: {three_digits(row['hazard'])} tokens per round"
        + (
            f" ({three_digits(row['low'])} to {three_digits(row['high'])})"
            if row["low"] < row["high"] else ""
        )
        for row in ends
    )  # fmt: skip
    others = len({row["curve"] for row in rows}) - 1
    more = f"; and {counted(others, 'more curve')}" if others else ""
    ranges = f", {level:.0%} intervals" if any(row["low"] < row["high"] for row in ends) else ""
    return f"{rows[0]['curve']}: {said}{ranges}{more}"


def _judged(rows: list[dict[str, Any]], level: float) -> list[str]:
    """Return lines on how the predictions compare with what was measured."""
    told = [row for row in rows if row["inside"] is not None]
    if not told:
        return []
    errors = {
        name: median(abs(row[f"{name}_error"]) for row in told)
        for name in ("hazard", "iid", "two_state")
    }
    inside = sum(row["inside"] for row in told)
    return [
        f"{inside} of {len(told)} measured lengths are in their {level:.0%} intervals",
        "median error: "
        + ", ".join(f"{name.replace('_', '-')} {error:.1%}" for name, error in errors.items()),
    ]


def export(
    what: Annotated[
        Literal["speculation-profile"],
        typer.Argument(help="speculation-profile: NVIDIA's speculation_profile.json."),
    ],
    trace: TraceOption = DEFAULT_TRACE,
    source: DraftedOption = None,
    draft_length: Annotated[
        int | None, typer.Option(min=1, help="Default: the longest recorded, up to 8.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", callback=placed_as(b"{"), help="File to write.")
    ] = Path("speculation_profile.json"),
    json: JsonOption = None,
) -> None:
    """Write a recording's acceptance by position as a profile that other programs read."""
    del what
    recording = load_unpriced(trace, source, "export")
    profile = profile_of(recording, draft_length)
    write_profile(profile, out)
    note(f"{recording.unpriced}: {_exported(profile)}")
    rates = zip(profile.conditional, profile.marginal, strict=True)
    rows = [
        {"position": place, "alpha": alpha, "survival": survival}
        for place, (alpha, survival) in enumerate(rates, 1)
    ]
    emit("export", rows, json, title="Acceptance by position in the draft")
    note(f"wrote {out}; commands read it as --trace, with --latency")


def _exported(profile: SpeculationProfile) -> str:
    """Return the acceptance length of a profile in words, and what it is the mean of."""
    conditions = profile.conditions
    rounds = counted(conditions["rounds"], "round")
    short = conditions["rounds_left_out"]
    left_out = f" ({counted(short, 'round')} cut by a request's end left out)" if short else ""
    return (
        f"acceptance length {three_digits(profile.mean_length)} at draft length "
        f"{profile.longest}, from {rounds} of {counted(conditions['requests'], 'request')}"
        f"{left_out}"
    )


def profile_of(recording: Recording, k: int | None = None) -> SpeculationProfile:
    """Return the profile of a recording at draft length `k`, by default its longest up to 8.

    Rounds that a request's end cut are left out.  A position for which a lookup proposed nothing
    counts as rejected.
    Raises DraftsimError if no round can draft `k` tokens, or if such drafts were not recorded.
    """
    trace = recording.trace
    most = longest_draft(trace)
    if k is not None and most is not None and k > most:
        raise DraftsimError(
            f"--draft-length {k}: {recording.name} has drafts of up to "
            f"{counted(most, 'token')}: lower it, or profile with a larger --max-gamma"
        )
    longest = k or min(most or LONGEST, LONGEST)
    log = of_trace(recording.name, trace, longest).log
    assert log is not None
    whole = judged(trace, log, longest) == longest
    if not whole.any():
        raise DraftsimError(
            f"no round of {recording.name} drafts {counted(longest, 'token')}: see --draft-length"
        )
    accepted = log.rounds["accepted"][whole]
    of = log.rounds["request"][whole]
    histogram = np.bincount(accepted, minlength=longest + 1)
    marginal = histogram[::-1].cumsum()[::-1][1:] / histogram.sum()
    names = np.array([request.category for request in trace.requests])[of]
    categories = {
        str(name): {
            "mean_accept_length": round(1 + float(accepted[names == name].mean()), 6),
            "num_steps": int((names == name).sum()),
        }
        for name in np.unique(names)
    }
    means = [1 + accepted[of == i].mean() for i in np.unique(of)]
    meta = recording.drafter
    kind = str(meta.get("kind", "draft-model" if recording.source is None else trace.source))
    drafter = model_label(recording.models.get("draft", {}))
    conditions = {
        "recording": recording.name, "requests": len(trace.requests),
        "temperature": trace.temperature, "rounds": int(histogram.sum()),
        "rounds_left_out": int((~whole).sum()), "tool": "draftsim export speculation-profile",
    }  # fmt: skip
    return SpeculationProfile(
        marginal.tolist(), histogram.tolist(), METHODS.get(kind, kind),
        drafter or None if recording.source is None else trace.source,
        model_label(recording.models.get("target", {})) or None, conditions, categories,
        float(np.mean(means)),
    )  # fmt: skip
