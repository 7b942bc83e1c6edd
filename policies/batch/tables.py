"""Draft lengths looked up by batch size: vLLM's table, a steadier one, and vLLM's older switch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from policies.batch.base import KeptInStep, Planned
from policies.core import Load
from policies.spec import flag, parameter, whole
from policies.vectorised import Lengths, OwnStop, Starts, VectorisedPlan

DEFAULT_TABLE = ((1, 4, 5), (5, 16, 3), (17, 64, 1), (65, 65, 0))


@dataclass(eq=False, repr=False)
class BatchTable(KeptInStep):
    """K by concurrency (vLLM ``num_speculative_tokens_per_batch_size``).

    Rows are ``[lo, hi, K]``, batch sizes lo to hi inclusive.  The first row must start at
    1; a batch size in a gap has the K of the row before it, and one past the last row
    that row's.  The batch size is the number of requests of the step before (`policies.core.Load`),
    prompts included, as in vLLM's scheduler, which looks up
    ``dynamic_sd_lookup[len(num_scheduled_tokens)]`` for the drafts that the iteration ends with.
    Reads no signal.

    Rows may instead be ``[lo, hi, context_lo, context_hi, K]`` (mean cached tokens per
    sequence, inclusive), read in the same way: among rows of the batch range, the last
    that starts at or below the context.

    The default table is ours; `draftsim tune` writes one from a profile.

    Parameters
    ----------
    table:
        The rows.
    in_step:
        True if the draft model reads along at K = 0, as vLLM's does (`KeptInStep`).
    """

    table: Sequence[Sequence[int]] = DEFAULT_TABLE
    in_step: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ranges = _checked(self.table)
        self._starts = [start for start, _ in self._ranges]
        self.draft_up_to(max(row[-1] for row in self.table))

    def row_of(self, batch: int) -> int:
        """Return the index of the batch range of `batch` requests, or that a gap inherits."""
        return max(bisect_right(self._starts, batch) - 1, 0)

    def row(self, loads: Sequence[Load]) -> int:
        """Return the index of the batch range whose K is in force now."""
        return self.row_of(requests_asked(loads))

    def planned_at(self, scheduled: int) -> Planned | None:
        if any(len(rows) > 1 for _, rows in self._ranges):
            return None
        [(_, length)] = self._ranges[self.row_of(scheduled)][1]
        return Planned(max(length, int(self.in_step)), length)

    def plan(self, loads: Sequence[Load]) -> int:
        rows = self._ranges[self.row(loads)][1]
        if len(rows) == 1:
            return rows[0][1]
        context = sum(load.context for load in loads) / len(loads)
        length = rows[0][1]
        for start, k in rows:
            if start > context:
                break
            length = k
        return length

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(stop=OwnStop(partial(self._lengths, batch)))

    def _lengths(self, batch: int, starts: Starts) -> Lengths:
        contexts, own = np.unique(starts.context, return_inverse=True)
        planned = [self.plan((Load(batch, c),)) for c in contexts.tolist()]
        verified = np.array(planned, dtype=np.int64)[own]
        forwards = np.minimum(np.maximum(verified, int(self.in_step)), starts.most)
        return Lengths(forwards, np.minimum(forwards, verified))


class BatchTableHysteresis(BatchTable):
    """K by concurrency, changed only after several steps well beyond the end of a row.

    A batch that wanders about the end of a row makes `BatchTable` change K back and forth,
    and one prompt among few sequences ends speculation for its iteration
    (vllm-project/vllm issue 49548).  Here a row is left only where the batch lies more than
    `margin` requests beyond its end (a Schmitt trigger), and only after `patience` iterations
    in a row have said so; the K of the row that was in force holds until then.  No engine does
    this.

    Parameters
    ----------
    table, in_step:
        See `BatchTable`.
    margin:
        Requests beyond the end of the row in force at which it still holds; 0: none.
    patience:
        Iterations that must agree; 1: the first decides.
    """

    def __init__(
        self,
        table: Sequence[Sequence[int]] = DEFAULT_TABLE,
        margin: int = 1,
        patience: int = 4,
        in_step: bool = True,
    ) -> None:
        whole("margin", margin, 0)
        whole("patience", patience, 1)
        super().__init__(table, in_step)
        self.margin = margin
        self.patience = patience
        self._row: int | None = None
        self._agreed = 0

    def row(self, loads: Sequence[Load]) -> int:
        batch = requests_asked(loads)
        if self._row is None:
            self._row = self.row_of(batch)
        low, high = self.row_of(batch - self.margin), self.row_of(batch + self.margin)
        self._agreed = 0 if low <= self._row <= high else self._agreed + 1
        if self._agreed >= self.patience:
            self._row, self._agreed = self.row_of(batch), 0
        return self._row


def _checked(table: Sequence[Sequence[int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return [(first batch size, [(first context, K), ...]), ...] in rising order."""
    if not table:
        raise ValueError("table is empty, expected rows [lo, hi, K]")
    widths = {len(row) for row in table}
    if widths not in ({3}, {5}):
        raise ValueError(
            "table rows must all be [lo, hi, K] or all [lo, hi, context_lo, context_hi, K], "
            f"got lengths {sorted(widths)}"
        )
    ranges: list[tuple[int, list[tuple[int, int]]]] = []
    previous = (0, 0)
    context_end = -1
    for row in table:
        low, high, k = row[0], row[1], row[-1]
        for value in row:
            whole(f"table row {list(row)}", value, 0)
        if low > high:
            raise ValueError(f"table row {list(row)}: batch range {low}..{high} is empty")
        if not ranges and low != 1:
            raise ValueError(f"table must start at batch size 1, its first row is {list(row)}")
        start = row[2] if len(row) == 5 else 0
        if (low, high) == previous and len(row) == 5:
            if start <= context_end:
                raise ValueError(f"table row {list(row)}: its contexts overlap the row before")
            ranges[-1][1].append((start, k))
        elif low <= previous[1]:
            raise ValueError(
                f"table row {list(row)}: batch size {low} overlaps or precedes the row before, "
                f"which ends at {previous[1]}"
            )
        else:
            ranges.append((low, [(start, k)]))
        if len(row) == 5:
            if row[2] > row[3]:
                raise ValueError(f"table row {list(row)}: contexts {row[2]}..{row[3]} are empty")
            context_end = row[3]
        previous = (low, high)
    return ranges


class SwitchedOff(KeptInStep):
    """Speculation is switched off for requests, for good, as vLLM v0's worker does.

    spec_decode/spec_decode_worker.py: a step that plans no drafts sets the number of drafts of
    every request in it to 0, and nothing ever sets it back.  Such a step skips the draft model.  A
    step that could draft, but whose requests are all switched off, runs it once, so that its cache
    stays in step (`KeptInStep`).  Without ``forever``, K = 0 is for one step alone.
    """

    forever: bool

    def draft_up_to(self, longest: int) -> None:
        super().draft_up_to(longest)
        self._off: set[Hashable] = set()

    def passes_of(self, length: int) -> int:
        # A step that plans no drafts skips the draft model.
        return length

    def resting(self, queue: int) -> bool:
        """Return True if nothing is drafted at this many requests, whatever `plan` says."""
        return False

    def switched(self, queue: int) -> None:
        """Note that `plan` gave 0, with the requests that were running."""

    def plan_each(self, requests: Sequence[Hashable], loads: Sequence[Load]) -> Sequence[int]:
        queue = requests_asked(loads)
        self._verified = 0
        if not self.forever:
            self._verified = self.plan(loads)
        elif self.resting(queue):
            self._off.update(requests)
        elif self._off.issuperset(requests):
            return [int(self.in_step)] * len(requests)
        else:
            self._verified = self.plan(loads)
            if not self._verified:
                self._off.update(requests)
                self.switched(queue)
        return [0 if request in self._off else self._verified for request in requests]


def requests_asked(loads: Sequence[Load]) -> int:
    """Return the requests by whose number an engine looks up what to draft.

    vLLM v0 asked about the step at hand; a present engine asks at the end of the step before.
    """
    load = loads[0]
    return load.batch if load.scheduled is None else load.scheduled


@dataclass(eq=False)
class DisableByBatchSize(SwitchedOff):
    """No speculation at `threshold` running requests or more (vLLM v0 ``disable_by_batch_size``).

    Reads no signal.  In v0 every request of such a batch lost speculation for good, not
    just for the step: with ``forever`` the requests are remembered by the ids that
    `plan_each` receives (`SwitchedOff`).  An engine that calls `plan` alone sees the step's
    decision.

    Parameters
    ----------
    gamma:
        Draft length below the threshold.
    threshold:
        Running requests from which on nothing is drafted; 32 is ours.
    forever, in_step:
        See `SwitchedOff`.
    """

    gamma: int = parameter(5, whole, 0)
    threshold: int = parameter(32, whole, 1)
    forever: bool = parameter(True, flag)
    in_step: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_up_to(self.gamma)

    def resting(self, queue: int) -> bool:
        return queue >= self.threshold

    def planned_at(self, scheduled: int) -> Planned | None:
        # Requests that were switched off for good differ from those that were not.
        length = 0 if self.resting(scheduled) else self.gamma
        return None if self.forever else Planned(length, length)

    def plan(self, loads: Sequence[Load]) -> int:
        return 0 if self.resting(requests_asked(loads)) else self.gamma
