"""Speculative decoding of several sequences at once with two real models, greedily.

The passes are in `profiler.decoding.batch_passes`, the decisions in `policies.together`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from policies.core import Round
from policies.together import Together
from profiler.decoding.batch_passes import BatchedDecoder
from profiler.decoding.batch_stream import Stream


def speculate_batch(
    decoder: BatchedDecoder, together: Together, waiting: Iterable[Stream] = ()
) -> Iterator[list[tuple[Stream, Round]]]:
    """Decode until every sequence has ended; yields each iteration's rounds.

    Sequences of `waiting` are admitted as there is room, first come first served.
    """
    queue = deque(waiting)
    while decoder.streams or queue:
        if queue and len(decoder.streams) < decoder.size:
            room = min(len(queue), decoder.size - len(decoder.streams))
            enter(decoder, together, [queue.popleft() for _ in range(room)])
            continue
        streams = decoder.streams
        together.draft(streams, lambda s: s.load(len(decoder.streams)), decoder.draft)
        verdicts = decoder.verify()
        kept = together.keep([v.accepted for v in verdicts], [v.ends for v in verdicts])
        rounds = decoder.commit(verdicts, kept)
        together.observe(streams, rounds)
        yield list(zip(streams, rounds, strict=True))
        _retire(decoder, together)


def enter(decoder: BatchedDecoder, together: Together, newcomers: Sequence[Stream]) -> None:
    """Admit `newcomers`; one whose first token is its last leaves at once."""
    decoder.admit(newcomers)
    for stream in newcomers:
        together.join(stream)
    _retire(decoder, together)


def _retire(decoder: BatchedDecoder, together: Together) -> None:
    for stream in decoder.streams:
        if stream.remaining <= 0:
            together.leave(stream)
    decoder.retire()
