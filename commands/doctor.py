"""``draftsim doctor``: compare acceptance with what is expected, and name the cause."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from commands.common.drafted import FORMS, load_positions
from commands.common.output import JsonOption, OutOption, emit, note
from commands.common.printed import print_table
from traces.digits import three_digits
from traces.store.recordings import DEFAULT_TRACE


def doctor(
    observed: Annotated[
        list[str],
        typer.Argument(
            metavar="OBSERVED...",
            help=f"Acceptance of the server: {FORMS}.",
        ),
    ],
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="PROFILE", help="Acceptance to compare with, in the same forms."
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
    from simulator.aggregate.doctor import DIFFERS, diagnose

    mine = load_positions(observed, draft_length, form=form, drafts=draft_length)
    its = load_positions(against, draft_length or mine.longest, source=source)
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

    def printed() -> None:
        print_table(rows, title=f"Acceptance by position: {mine.label} against {its.label}")
        if parts:
            print_table(parts, title="Tokens per round by context")

    emit("doctor", rows, json, more=more, out=out, printed=printed)
    if far := [row["position"] for row in rows if abs(row["z"]) >= DIFFERS]:
        note(f"|z| is {DIFFERS:g} or more at position {', '.join(map(str, far))}")
    if not rows:
        note("no acceptance by position: only tokens per round are compared")
