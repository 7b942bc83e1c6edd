"""Lookups: the rounds of a policy that drafts so many tokens, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from policies.core import Round
from policies.lanes.base import Ints, LanePlan, own_word
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import CALL_KINDS, Call, Counted, pack_calls, pack_counted
from traces.replay.layout import Foreseen
from traces.replay.rounds import RoundLog
from traces.replay.walk import Rounds, Walk
from traces.sources.base import SourceReplay, true_tokens
from traces.sources.lookups.sources import LookupReplay, LookupSource


def lookup_rounds(
    trace: Trace, source: LookupSource, decoder_of: Callable[[int], SourceReplay], plan: LanePlan,
    first: int, chosen: Sequence[int],
) -> tuple[Rounds, npt.NDArray[np.void]] | None:  # fmt: skip
    """The rounds of the requests `chosen`, ascending, and the calls that they ran.

    ``plan`` has a length alone.  None where tokens were not recorded.
    """
    try:
        proposed: Ints | None = own_word(source, "drafted", trace)
    except DraftsimError:
        return None
    if proposed is None:
        return _one_by_one(decoder_of, plan.cap, chosen)
    places = Foreseen(trace)
    places.foresee((proposed >= 0).sum(axis=1), _right(trace, proposed[:, : plan.cap], places.ends))
    walk = Walk(places, first, False)
    drafts = walk.drafts(plan)
    assert drafts is not None
    drafted, accepted = drafts[0], np.minimum(drafts[0], walk.runs)
    start = walk.begun(accepted + 1, chosen)
    rounds = walk.told(start, *(values[start] for values in (drafted, drafted, accepted)))
    rounds["request"] = np.searchsorted(chosen, rounds["request"])
    # A search that finds nothing is one too.
    asked = np.flatnonzero(np.minimum(places.left[start], plan.cap) > 0)
    kind, ones = CALL_KINDS.index((source.name, "forward")), np.ones_like(asked)
    return rounds, pack_counted([Counted(False, kind, asked, ones, ones)])


def _right(trace: Trace, proposed: Ints, ends: Ints) -> Ints:
    """Leading proposals that are the target's own tokens, at every position."""
    output = np.array(true_tokens(trace))
    at = np.arange(len(output))[:, None] + np.arange(proposed.shape[1])
    right = (at < ends[:, None]) & (proposed == output.take(at, mode="clip"))
    found: Ints = np.cumprod(right, axis=1).sum(axis=1)
    return found


def _one_by_one(
    decoder_of: Callable[[int], SourceReplay], longest: int, chosen: Sequence[int]
) -> tuple[Rounds, npt.NDArray[np.void]]:
    """As each decoder makes them."""
    calls: list[list[list[Call]]] = []

    def decoded(request: int) -> list[Round]:
        decoder = decoder_of(request)
        assert isinstance(decoder, LookupReplay)
        rounds = list(decoder.rounds(longest))
        calls.append(decoder.calls.rounds)
        return rounds

    return RoundLog.pack(map(decoded, chosen)), pack_calls(calls)
