"""Draft lengths looked up by batch size: vLLM's table and its older switch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from policies.batch import BatchPolicy, KeptInStep
from policies.core import Load
from policies.parameters import flag, whole

_DEFAULT_TABLE = ((1, 4, 5), (5, 16, 3), (17, 64, 1), (65, 65, 0))


class BatchTable(KeptInStep):
    """K by concurrency (vLLM ``num_speculative_tokens_per_batch_size``).

    Rows are ``[lo, hi, K]``, batch sizes lo to hi inclusive.  The first row must start at
    1; a batch size in a gap has the K of the row before it, and one past the last row
    that row's.  A request whose prompt shares the iteration counts as one that decodes does,
    as in vLLM's scheduler (``dynamic_sd_lookup[len(num_scheduled_tokens)]``).  Reads no signal.

    Rows may instead be ``[lo, hi, context_lo, context_hi, K]`` (mean cached tokens per
    sequence, inclusive), read in the same way: among rows of the batch range, the last
    that starts at or below the context.

    The default table is ours; `draftsim tune` writes one from a profile.

    Parameters
    ----------
    table:
        The rows.
    in_step:
        Whether the draft model reads along at K = 0, as vLLM's does (`KeptInStep`).
    """

    def __init__(
        self, table: Sequence[Sequence[int]] = _DEFAULT_TABLE, in_step: bool = True
    ) -> None:
        self.table = table
        self._ranges = _checked(table)
        super().__init__(max(row[-1] for row in table), in_step)

    def plan(self, loads: Sequence[Load]) -> int:
        batch = loads[0].batch + loads[0].prefilling
        rows = self._ranges[0][1]
        for start, candidates in self._ranges:
            if start > batch:
                break
            rows = candidates
        if len(rows) == 1:
            return rows[0][1]
        context = sum(load.context for load in loads) / len(loads)
        length = rows[0][1]
        for start, k in rows:
            if start > context:
                break
            length = k
        return length


def _checked(table: Sequence[Sequence[int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """[(first batch size, [(first context, K), ...]), ...] in rising order."""
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


class DisableByBatchSize(BatchPolicy):
    """No speculation at `threshold` running requests or more (vLLM v0 ``disable_by_batch_size``).

    Reads no signal.  In v0 every request of such a batch lost speculation for good, not
    just for the step: with ``forever`` the requests are remembered by the ids that
    `plan_each` receives.  An engine that calls `plan` alone sees the step's decision.

    Parameters
    ----------
    gamma:
        Draft length below the threshold.
    threshold:
        Batch size from which on nothing is drafted; 32 is ours.
    """

    def __init__(self, gamma: int = 5, threshold: int = 32, forever: bool = True) -> None:
        whole("gamma", gamma, 0)
        whole("threshold", threshold, 1)
        flag("forever", forever)
        self.gamma = gamma
        self.threshold = threshold
        self.forever = forever
        self._disabled: set[Hashable] = set()

    def plan(self, loads: Sequence[Load]) -> int:
        return 0 if loads[0].batch >= self.threshold else self.gamma

    def plan_each(self, requests: Sequence[Hashable], loads: Sequence[Load]) -> Sequence[int]:
        cap = self.plan(loads)
        if not self.forever:
            return [cap] * len(loads)
        if cap == 0:
            self._disabled.update(requests)
        return [0 if request in self._disabled else cap for request in requests]
