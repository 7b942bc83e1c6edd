"""Which sources and policies go without the loop, and their rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy
from policies.lanes.base import plan_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import HEAD, LAYER, ONE_PASS, PASS, Counted, pack_counted
from traces.replay.lanes import replay_many
from traces.replay.rounds import RoundLog
from traces.replay.run import own_policy
from traces.sources.base import Recordings, Source, SourceReplay
from traces.sources.exits.early_exit import EarlyExitReplay
from traces.sources.exits.walked import KINDS, exit_rounds
from traces.sources.lookups.sources import LookupReplay, LookupSource
from traces.sources.lookups.walked import lookup_rounds
from traces.sources.starts.as_draft import chained_trace
from traces.sources.starts.features import EagleReplay
from traces.sources.starts.parallel import ParallelReplay
from traces.sources.starts.recording import StartReplay, StartSource
from traces.sources.starts.sources import HEADS, HeadsReplay, LayerSkipReplay, SpaceReplay
from traces.sources.starts.tree_source import TreeReplay
from traces.sources.starts.walked import tree_rounds

Walked = tuple[npt.NDArray[np.void], npt.NDArray[np.void]]
"""Rounds, and the calls that they ran."""
CHAINS = (HeadsReplay, SpaceReplay, LayerSkipReplay, EagleReplay, ParallelReplay)
"""Decoders of sources recorded by start, whose draft from there is one chain."""


def rounds_at_once(
    trace: Trace, source: Source, decoder_of: Callable[[int], SourceReplay], policy: DraftPolicy,
    recordings: Recordings, first: int, chosen: Sequence[int],
) -> Walked | None:  # fmt: skip
    """The rounds of the requests `chosen` as the loop would make them with decoders of `source`.

    None where the policy has to be asked before every token, where a decoder is of a class of
    the caller's own, and where a draft leaves what was recorded: there the loop says what is
    missing.
    """
    if not len(chosen) or any(one >= other for one, other in pairwise(chosen)):
        return None
    try:
        plan = plan_of(own_policy(trace, policy))
    except DraftsimError:
        return None
    if plan is None:
        return None
    decoder = decoder_of(chosen[0])
    kind = type(decoder)
    if kind is LookupReplay and plan.stop is None and plan.state is None:
        assert isinstance(source, LookupSource)
        return lookup_rounds(trace, source, decoder_of, plan, first, chosen)
    if kind is TreeReplay and plan.stop is None and plan.state is None:
        assert isinstance(decoder, TreeReplay)
        return tree_rounds(trace, decoder, plan, first, chosen)
    if kind in KINDS and isinstance(decoder, EarlyExitReplay):
        return exit_rounds(trace, decoder, plan, first, chosen)
    if kind in CHAINS and isinstance(source, StartSource) and len(chosen) == len(trace.requests):
        assert isinstance(decoder, StartReplay)
        if isinstance(decoder, EagleReplay) and not decoder.by_passes:
            return None
        try:
            drafted = chained_trace(trace, source, recordings)
            [log] = replay_many(drafted, [("", policy)], first=first)
        except DraftsimError:
            return None
        return log.rounds, _calls(decoder, log)
    return None


def _calls(decoder: StartReplay, log: RoundLog) -> npt.NDArray[np.void]:
    """What the rounds of a source recorded by start ran besides passes of a drafter."""
    drafted, forwards = (log.rounds[n].astype(np.int64) for n in ("drafted", "draft_forwards"))
    each, ones = np.arange(len(forwards)), np.ones_like(forwards)
    parts: list[Counted] = []
    if isinstance(decoder, HeadsReplay):
        parts.append(Counted(False, HEADS, each, ones, np.minimum(forwards, 1)))
    elif isinstance(decoder, ParallelReplay):
        width = _read(log, np.flatnonzero(forwards)) + decoder.width - 1
        parts.append(Counted(False, ONE_PASS, each, width, np.minimum(forwards, 1)))
    elif isinstance(decoder, SpaceReplay):
        parts.append(Counted(True, PASS, each, (drafted + 1) * (decoder.width + 1), ones))
    elif isinstance(decoder, LayerSkipReplay):
        layers = int(decoder.recording.meta["layers"])
        parts.append(Counted(False, LAYER, each, ones, forwards * layers))
        parts.append(Counted(False, HEAD, each, ones, forwards))
    return pack_counted(parts)


def _read(log: RoundLog, ran: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Tokens that a pass over what was verified since the one before reads, (rounds,).

    ``ran`` are the rounds that have such a pass; a request's first begins at its prompt's end.
    """
    position, request = (log.rounds[n].astype(np.int64) for n in ("position", "request"))
    before = np.append(0, position[ran][:-1])
    before[np.diff(request[ran], prepend=-1) > 0] = 0
    prompt = np.array([r.prompt_length for r in log.requests], dtype=np.int64)[request[ran]]
    read = np.zeros(len(position), dtype=np.int64)
    read[ran] = np.minimum(position[ran] - before, prompt + position[ran] - 1)
    return read
