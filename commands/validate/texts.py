"""Texts that diverged in real runs: counted, named, and left out of what is compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from profiler.checks.differences import Divergence
    from traces.acceptance.trace import Trace
    from traces.replay.rounds import RoundLog


class Texts:
    """The outputs of real runs and those of `trace`, by run.

    Parameters
    ----------
    outputs:
        Token ids by arm and request; an arm that is not in it decoded no text of its own.
    dtype:
        Number format that the models ran in.
    learners:
        Arms whose policy remembers earlier requests.
    """

    def __init__(
        self, trace: Trace, outputs: Mapping[str, Sequence[Sequence[int]]], dtype: str,
        learners: Collection[str] = (),
    ) -> None:  # fmt: skip
        import torch

        from profiler.checks.differences import divergences

        self.trace, self.outputs, self.dtype = trace, outputs, getattr(torch, dtype)
        self.learners, count = learners, len(trace.requests)
        self.diverged = {name: divergences(trace, own, self.dtype) for name, own in outputs.items()}
        found = {i for own in self.diverged.values() for i in own}
        self.left_out = found if len(found) < count else set()
        """Requests whose seconds are compared under no arm, so that all arms are of the same texts.

        Where every request diverged under some arm none would remain, and none is left out.
        """

    def times(self, times: pd.DataFrame) -> pd.DataFrame:
        """Return the measured times of the requests that are not left out."""
        ids = [self.trace.requests[i].id for i in self.left_out]
        return times[~times["request"].isin(ids)].reset_index(drop=True)

    def compared(
        self, rows: pd.DataFrame, real: Mapping[str, RoundLog], replayed: Mapping[str, RoundLog],
        draft_model: bool = False,
    ) -> pd.DataFrame:  # fmt: skip
        """Return `rows` with what their rounds and texts did.

        ``rounds_differ`` counts rounds up to a divergence, ``texts_diverged`` the requests whose
        text diverged.  In the JSON, ``diverged`` names position, both tokens and the recorded
        logits of each, and ``requests_left_out`` is the number of requests whose seconds are not
        compared.

        Where the `draft_model` drafted, ``drafts_diverged`` counts the requests whose text is the
        recorded one, and in which it proposed another token at a near-tie: their rounds are
        compared up to there, too.
        """
        from profiler.checks.spot_check import rounds_differ

        names = list(rows["policy"])
        diverged = [self.diverged.get(name, {}) for name in names]
        differ, ties = [], []
        for name, own in zip(names, diverged, strict=True):
            until, tied = self._until(real[name], replayed[name], own, draft_model)
            differ.append(rounds_differ(real[name], replayed[name], until))
            ties.append(tied)
        rows = rows.assign(rounds_differ=differ)
        if not self.outputs:
            return rows
        rows = with_diverged(rows, [[*own.values()] for own in diverged], len(self.left_out))
        if draft_model:
            rows.insert([*rows.columns].index("texts_diverged") + 1, "drafts_diverged", ties)
        return rows

    def _until(
        self, real: RoundLog, replayed: RoundLog, diverged: Mapping[int, Divergence],
        draft_model: bool,
    ) -> tuple[dict[int, int], int]:  # fmt: skip
        """Return the position up to which each request compares, and how many drafts diverged."""
        from profiler.checks.differences import comparable, draft_ties

        count, learns = len(self.trace.requests), real.policy in self.learners
        positions = {i: one.position for i, one in diverged.items()}
        until = comparable(positions, count, learns)
        if not draft_model or real.policy not in self.outputs:
            return until, 0
        ties = draft_ties(real, replayed, self.trace, self.dtype, until)
        if learns and ties:
            ties = {min(ties): ties[min(ties)]}  # what follows was learnt from other rounds
        # The round of the tie has another draft: those before it compare.
        before_ties = {i: begin - 1 for i, begin in ties.items()}
        return comparable(positions | before_ties, count, learns), len(ties)


def with_diverged(
    rows: pd.DataFrame, diverged: Sequence[Sequence[Divergence]], left_out: int
) -> pd.DataFrame:
    """Return `rows` with the columns that tell of each row's divergences."""
    counts = [len(own) for own in diverged]
    rows = with_lists(rows, "diverged", [[one._asdict() for one in own] for own in diverged])
    rows = rows.assign(requests_left_out=left_out)
    rows.insert([*rows.columns].index("rounds_differ") + 1, "texts_diverged", counts)
    return rows


def with_lists(
    rows: pd.DataFrame, name: str, lists: Sequence[list[dict[str, Any]]]
) -> pd.DataFrame:
    """Return `rows` with a list in each cell of the column `name`."""
    import pandas as pd

    cells: Any = lists
    return rows.assign(**{name: pd.Series(cells, index=rows.index, dtype=object)})
