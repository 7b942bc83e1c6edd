"""The requests that an engine decodes under one setup, and their rounds, for every drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from policies.core import Round
from policies.together import Member, Together, together_of
from profiler.engines.drafts import Asked, Drafts, caller_name
from profiler.engines.server.lines import lines
from profiler.engines.setup import Setup, setup_from, version


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


class Session:
    """A policy's prototype at work on the rows of an engine's batch.

    The prototype is copied for each request, told the load before every round, and told the result.
    It sees as the batch the requests that decode in the next iteration, and also how many were in
    this one (`policies.core.Load.scheduled`); prompts that join are not known when drafts are asked
    for.

    Parameters
    ----------
    setup:
        The policy, and where its drafts come from.
    longest:
        Tokens a draft may have.
    vocabulary:
        Size of the engine's, where the source's own is not known.
    keep:
        Whether the streams of requests that ended are kept in `finished`.
    booked:
        Whether the engine's records hold what was just sampled.
    ended:
        Called with every stream that has ended.
    """

    def __init__(
        self, setup: Setup, longest: int, vocabulary: int, keep: bool = False, booked: bool = True,
        ended: Callable[[Stream], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.setup, self.keep, self.booked, self._ended = setup, keep, booked, ended
        self.finished: dict[str, Stream] = {}
        """Streams that have ended, by the request's own name."""
        self._streams: dict[str, tuple[Stream, Asked]] = {}
        self._together = together_of(
            setup.policy, vocab_size=setup.source.vocab_size or vocabulary, longest=longest
        )

    @property
    def idle(self) -> bool:
        """Return True if no request is known."""
        return not self._streams

    def advance(
        self, names: Sequence[str], sampled: Sequence[Sequence[int]],
        verified: Mapping[str, Sequence[int]], requests: Mapping[str, Any],
    ) -> list[list[int]]:  # fmt: skip
        """Drafts of each row of the batch for the next iteration.

        ``sampled``: the tokens that each row emitted in this one, none where its prompt is not
        finished; ``verified``: the drafts it looked at, by name; ``requests``: the engine's
        records of those that it still knows.
        """
        for name in [n for n in self._streams if n not in requests]:
            self._leave(name)
        emitting = {name: t for name, t in zip(names, sampled, strict=False) if t}
        decoding = [name for name in emitting if name in self._streams]
        settled: list[tuple[Stream, Sequence[int], int]] = []
        for name in decoding:
            stream, _ = self._streams[name]
            stream.output.extend(emitting[name])
            settled.append((stream, emitting[name], len(verified.get(name, ()))))
        if settled:
            streams, emitted, seen = zip(*settled, strict=True)
            settle(self._together, streams, emitted, seen)
        self._leave_ended(decoding)
        # As in the simulator: places are free when others take them, who came first before who
        # came later, whatever rows of its batch the engine gave them.
        for name in [n for n in requests if n in emitting and n not in decoding]:
            self._join(name, requests[name], [] if self.booked else emitting[name])
            self._leave_ended([name])
        going_on = [name for name in emitting if name in self._streams]
        streams_on = [self._streams[n][0] for n in going_on]
        drafts = draft(self._together, streams_on, len(sampled)) if going_on else []
        by_name = dict(zip(going_on, drafts, strict=True))
        return [by_name.get(name, []) for name in names[: len(sampled)]]

    def _join(self, name: str, state: Any, tokens: Sequence[int]) -> None:
        # vLLM appends a number of its own to the name that the caller gave.
        limit = state.sampling_params.max_tokens
        asked = Asked(caller_name(name), state.prompt_token_ids, limit)
        output = [*state.output_token_ids, *tokens]
        stream = Stream(asked.id, self.setup.source.open(asked, output), output)
        self._streams[name] = stream, asked
        self._together.join(stream)

    def _leave_ended(self, names: Sequence[str]) -> None:
        for name in names:
            if self._streams[name][0].drafts.remaining <= 0:
                self._leave(name)

    def _leave(self, name: str) -> None:
        stream, asked = self._streams.pop(name)
        self._together.leave(stream)
        self.setup.source.close(asked, stream.output)
        if self.keep:
            self.finished.setdefault(asked.id, stream)
        self._ended(stream)


class Governed:
    """A drafter of an engine whose rounds a policy of ours decides.

    Without `use`, the setup is that of the environment (`profiler.engines.setup`); where that is a
    file, which was changed, it is read again before a request that finds no other.

    Parameters
    ----------
    longest, vocabulary:
        Of `Session`.
    """

    own_passes: ClassVar[bool] = False
    """True if a drafter of the engine's own runs passes."""
    booked: ClassVar[bool] = True
    """As in `Session`."""

    def __init__(self, longest: int, vocabulary: int) -> None:
        self.longest, self.vocabulary = longest, vocabulary
        self._session: Session | None = None
        self._version: tuple[int, int] | None = None

    def use(self, setup: Setup) -> Session:
        """Draft so from now on, forgetting every request; keep the rounds of those that end."""
        session = self._begun(setup, keep=True)
        self.go_on(session)
        return session

    def go_on(self, session: Session) -> None:
        """Draft as an earlier `use` said, for the requests that it knows."""
        self._session, self._version = session, None

    @property
    def finished(self) -> Mapping[str, Stream]:
        """Streams that have ended since `use`, by the request's own name."""
        return {} if self._session is None else self._session.finished

    @property
    def session(self) -> Session:
        """Return the session of `use` or of the environment; DraftsimError if there is none."""
        known = self._session
        watched = known is not None and self._version is not None and known.idle
        if known is None or (watched and version() not in (None, self._version)):
            self._version = version()
            known = self._session = self._begun(setup_from(longest=self.longest))
        return known

    def _begun(self, setup: Setup, keep: bool = False) -> Session:
        return Session(setup, self.longest, self.vocabulary, keep, self.booked, _note)


def _note(stream: Stream) -> None:
    """Note the rounds of a request that has ended, where anybody asks for notes."""
    if (notes := lines()) is not None:
        notes.put(rounds=stream.name, of=stream.rounds)
