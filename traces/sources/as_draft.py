"""A source whose drafts are known from every start, used like a draft model.

Its drafts (`Source.drafts_along`) are a trace whose starts have drafts of their own
(`Trace.by_start`), and the cost of a drafted token (`Source.as_draft`) is a cell of a latency
table.  So everything that replays a draft model (batches in simulated time, what-if grids, searches
of settings) replays such a source as well, exactly: round by round as
`traces.sources.replay.replay_source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Ints
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, as_cells
from traces.replay.calls import drafting_always, passes_always
from traces.sources.base import Source, leading_right, true_tokens
from traces.sources.recording import Recordings

PASSES = ("forward", "catch_up", "settling", "along", "prefill", "layer", "rollback")
"""Phases of a draft model that a source in its place does not have."""
MOST_BATCH = 1024
"""A batch beyond any: a search for each sequence takes as long again."""
ANY = 1 << 20
"""A width or context beyond any: cells at both ends hold for all sizes between."""


def check_drafts(source: Source, recordings: Recordings) -> Source:
    """Return `source`; DraftsimError if it cannot replace a draft model, or was not recorded."""
    if (why := source.unlike_a_draft_model(recordings)) is not None:
        raise DraftsimError(
            f"{source.name!r} cannot be replayed like a draft model: {why}; `draftsim "
            "simulate --source` prices one stream of it"
        )
    if source.recorded_as is not None:
        source.recording(recordings)
    return source


def drafted_trace(trace: Trace, source: Source, recordings: Recordings) -> Trace:
    """Return the outputs of `trace` with what `source` drafts from every start.

    The first output token comes with the prompt, and nothing drafts it.  Where a recording begins
    again (arrivals longer than it), the drafts of its second token are used there.

    Raises DraftsimError if the source was not recorded along this trace, or cannot replace a draft
    model (`check_drafts`).
    """
    return check_drafts(source, recordings).drafts_along(trace, recordings)


def laid_out(
    trace: Trace, drafted: Ints, held: npt.NDArray[np.bool_],
    signals: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any],
) -> Trace:  # fmt: skip
    """Return the outputs of `trace` with the tokens `drafted` from every start, where `held`.

    All arrays have the shape (positions of all requests, longest draft).
    """
    true, stop = np.array(true_tokens(trace, sampled=True)), trace.request_ends
    request, position = (trace.columns[name][trace.on_path] for name in ("request", "position"))
    rows = np.arange(len(true))
    from_row = np.where((position == 0) & (stop - rows > 1), rows + 1, rows)
    accepted = leading_right(drafted, true, stop)[from_row]
    drafted, held = drafted[from_row], held[from_row]
    start, offset = np.nonzero(held)
    columns: dict[str, npt.NDArray[Any]] = {
        "request": request[start],
        "position": position[start],
        "offset": offset,
        "match": (offset < accepted[start]).astype(np.int8),
        "accepted": np.where(offset == 0, accepted[start], 0),
        "token": np.where(offset == 0, true[start], -1),
        "draft_token": drafted[held],
        **{name: values[from_row][held] for name, values in signals.items()},
    }
    return Trace(columns, trace.requests, drafted.shape[1], {**trace.meta, **meta})


def drafted_latency(
    latency: LatencyTable, source: Source, recordings: Recordings, batch_free: bool = False
) -> LatencyTable:
    """Return `latency` with the passes of `source` instead of the draft model's.

    Timed at one batch size, they are refused at others, unless ``batch_free`` takes them to cost
    the same.  Raises DraftsimError if the table lacks them.
    """
    table = check_drafts(source, recordings).as_draft(latency, recordings)
    return table.assumed_batch_free("draft") if batch_free else table


def with_drafter(latency: LatencyTable, drafter: str, name: str = "") -> LatencyTable:
    """Return `latency` with the passes of its model `drafter` instead of the draft model's.

    Rounds know it as `name`, by default its own.  Raises DraftsimError if it has none.
    """
    cells = latency.cells
    own = cells[(cells["model"] == latency.drafter(drafter)) & cells["phase"].isin(PASSES)]
    return standing_in(latency, cells, own, name or drafter)


def in_an_engine(latency: LatencyTable, drafter: str, name: str) -> LatencyTable:
    """Return the table of an engine that drafts with `drafter`; DraftsimError if it does not."""
    own = str(latency.meta["draft"])
    if PurePath(own).name != PurePath(drafter).name:
        raise DraftsimError(
            f"the engine's latencies are those of {own}, not of {drafter}: "
            f"`draftsim profile engine --eagle {drafter}`"
        )
    return with_drafter(latency, "draft", name)


def standing_in(
    latency: LatencyTable, cells: pd.DataFrame, own: pd.DataFrame, name: str
) -> LatencyTable:
    """Return `cells` with its `own` passes as the draft model's, and under its `name` as well."""
    others = cells[~((cells["model"] == "draft") & cells["phase"].isin(PASSES))]
    others = others[others["model"] != name]
    named = [own.assign(model=model) for model in dict.fromkeys(("draft", name))]
    return LatencyTable(pd.concat([others, *named], ignore_index=True), latency.meta)


def model_of(source: Source, recordings: Recordings) -> str:
    """Return the model of the latency table that its passes are of."""
    drafter = source.drafter(recordings)
    # Rounds of the draft model's name are priced as its own, one pass per drafted token.
    return source.name if drafter == "draft" else drafter


def _frame(rows: list[tuple[str, str, int, int, int, float]]) -> pd.DataFrame:
    return as_cells([(*row, 0.0, 1) for row in rows])


def heads(latency: LatencyTable, model: str, *, in_turn: bool = False) -> pd.DataFrame:
    """Return the cells of heads that are timed as `model`, as passes of a draft model.

    All run before a round's first draft, or with `in_turn` one before each.  No head reads the
    prompt, so it costs them nothing.
    """
    timed = "draft" if latency.is_constant else model
    seconds = float(latency.estimate(timed, "forward").seconds)
    ends = [(n, c) for n in (1, ANY) for c in (0, ANY)]
    return _frame(
        [("draft", "catch_up", 1, n, c, seconds) for n, c in ends]
        + [("draft", "forward", 1, n, c, seconds if in_turn else 0.0) for n, c in ends]
        + [("draft", "prefill", 1, n, 0, 0.0) for n in (1, ANY)]
    )


def with_searches(latency: LatencyTable, name: str) -> LatencyTable:
    """Return the table of a lookup that searches for every sequence in every round.

    A round in which it finds nothing is charged as one drafted token by the host, too.  Raises
    DraftsimError if the search was not timed.
    """
    model = "draft" if latency.is_constant else name
    if not latency.has(model, "forward"):
        raise DraftsimError(
            f"latency table has no 'forward' cells of {name!r}, the time of its search: `draftsim "
            "profile sources` measures it, and `draftsim profile engine` without --draft"
        )
    search_s = float(latency.estimate(model, "forward").seconds)
    sizes = [(b, n, c) for b in (1, MOST_BATCH) for n in (1, ANY) for c in (0, ANY)]
    own = _frame(
        [("draft", "catch_up", b, n, c, b * search_s) for b, n, c in sizes]
        + [("draft", "forward", b, 1, c, 0.0) for b, n, c in sizes if n == 1]
        + [("draft", "prefill", b, n, c, 0.0) for b, n, c in sizes if c == 0]
    )
    table = standing_in(latency, with_passes_alone(latency.cells), own, name)
    return drafting_always(table, max(passes_always(latency), 1))


def one_pass(latency: LatencyTable, name: str, width: int) -> pd.DataFrame:
    """Return cells in which a pass over what was verified and ``width - 1`` masks drafts all."""
    model = latency.drafter(name)
    phase = latency.first_draft_phase(model)
    cells = latency.cells[(latency.cells["model"] == model) & (latency.cells["phase"] == phase)]
    rows = []
    sizes = cells[["batch", "context"]].drop_duplicates().to_numpy().tolist()
    for batch, context in sizes:
        for caught in range(1, width + 2):
            seconds = float(latency.estimate(
                model, phase, batch=batch, new_tokens=caught + width - 1, context=context
            ).seconds)  # fmt: skip
            rows.append(("draft", "catch_up", int(batch), caught, int(context), seconds))
        rows.append(("draft", "forward", int(batch), 1, int(context), 0.0))
    prompts = latency.cells[latency.cells["model"].eq(model) & latency.cells["phase"].eq("prefill")]
    return pd.concat([_frame(rows), prompts], ignore_index=True)


def skipping(latency: LatencyTable, layers: int) -> pd.DataFrame:
    """Return the cells of a pass through `layers` layers and the head per drafted token.

    These layers find the prompt in the target's cache, at no cost.
    """
    model = "exit" if latency.has("exit", "layer") else "target"
    if not latency.has(model, "layer"):
        raise DraftsimError(
            "latency table has no single layers: `draftsim profile sources --exit-layers` measures "
            "them"
        )
    cells = latency.cells
    own = cells[
        (cells["model"] == model) & (cells["phase"] == "layer") & (cells["new_tokens"] == 1)
    ]
    rows = []
    for batch in sorted(set(own["batch"].astype(int).tolist())):
        at = own[own["batch"] == batch]
        head = float(latency.estimate("target", "head", batch=batch).seconds)
        rows += [("draft", "prefill", batch, n, 0, 0.0) for n in (1, ANY)]
        for context, layer in zip(at["context"], at["median_s"], strict=True):
            seconds = layers * layer + head
            rows += [("draft", "catch_up", batch, n, context, seconds) for n in (1, ANY)]
            rows.append(("draft", "forward", batch, 1, context, seconds))
    return _frame(rows)


def with_passes_alone(cells: pd.DataFrame) -> pd.DataFrame:
    """Price verifications of one stream as target passes with no pass before, where timed."""
    alone = (cells["model"] == "target") & (cells["batch"] == 1) & (cells["new_tokens"] > 1)
    measured = cells[alone & (cells["phase"] == "pass")].assign(phase="forward")
    if not len(measured):
        return cells
    return pd.concat([cells[~(alone & (cells["phase"] == "forward"))], measured])
