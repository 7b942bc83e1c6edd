"""Rounds inside an engine, which verifies in one iteration what was drafted in the last."""

from __future__ import annotations

from collections.abc import Sequence

from policies.core import Round
from policies.together import Member, Together
from profiler.engines.drafts import Drafts


class Stream(Member):
    """One request between its first token and its last."""

    def __init__(self, name: str, drafts: Drafts, output: Sequence[int] = ()) -> None:
        super().__init__(name)
        self.drafts = drafts
        self.output = [*output]
        """Tokens emitted so far."""
        self.rounds: list[Round] = []

    @property
    def remaining(self) -> int:
        """Tokens to the limit."""
        return self.drafts.remaining


def draft(together: Together, streams: Sequence[Stream], scheduled: int) -> list[list[int]]:
    """Return token ids for every stream that decodes in the next iteration.

    ``scheduled`` counts the requests of this one, those included that end with it or whose prompts
    it processed.

    Raises
    ------
    UndeclaredSignal
        If the policy reads a signal that it does not declare.
    """
    batch = len(streams)
    together.draft(
        streams, lambda s: s.drafts.load._replace(batch=batch, scheduled=scheduled),
        lambda active: [s.drafts.draft(s.draft) for s in active],
    )  # fmt: skip
    return [s.drafts.ids(s.draft) for s in streams]


def settle(
    together: Together, streams: Sequence[Stream], emitted: Sequence[Sequence[int]],
    verified: Sequence[int],
) -> None:  # fmt: skip
    """End every stream's round with `emitted` tokens, `verified` drafted tokens having been sent.

    Raises as `draft` does.
    """
    rounds = []
    for stream, tokens, looked_at in zip(streams, emitted, verified, strict=True):
        position = stream.drafts.position
        stream.draft = stream.draft[:looked_at]
        stream.drafts.advance(tokens)
        accepted = min(len(tokens) - 1, looked_at)
        rounds.append(stream.settled(position, accepted, stream.drafts.position - position))
        stream.rounds.append(rounds[-1])
    together.observe(streams, rounds)
    for stream in streams:
        stream.draft, stream.forwards = [], 0
