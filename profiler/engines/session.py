"""A policy inside an engine: its setup, its requests, and their rounds."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from policies.batch.base import Policy
from policies.core import Round
from policies.from_file import Cut, bounded, is_file, load_file, said_cut
from policies.json_text import parse_json
from policies.registry import parse_serving_policy
from policies.together import Member, together_of
from profiler.engines.drafts import Asked, Drafts, DraftSource, EngineDrafts, Forced, LookedUp
from profiler.engines.notes import lines
from traces.errors import DraftsimError
from traces.sources.lookups.sources import LookupSource
from traces.sources.methods import exact_policy
from traces.sources.registry import parse_source
from traces.store.text import read_json

VARIABLE = "DRAFTSIM_PROPOSER"
"""Environment variable that holds the setup as JSON, or the name of a file that does."""
ENGINE = "engine"
"""Name of the source that means the engine's own draft model or EAGLE head."""
FORCED = "forced:"
"""Prefix of the file of drafts that dictate verdicts (`profiler.engines.drafts.Forced.write`)."""


@dataclass(frozen=True)
class Setup:
    """A policy's prototype and the source of its drafts.

    Raises DraftsimError if the policy reads a signal that the drafts do not carry.
    """

    policy: Policy
    source: DraftSource

    def __post_init__(self) -> None:
        if missing := [name for name in self.policy.reads if name not in self.source.signals]:
            raise DraftsimError(
                f"{type(self.policy).__name__} reads {', '.join(missing)}, which these drafts do "
                "not carry: choose a policy that reads none"
            )


def setup_from(text: str, *, longest: int) -> Setup:
    """Return the setup that the text of `VARIABLE` describes, drafting at most `longest` tokens.

    ``{"policy": "gammatune", "source": "pld:max_ngram=3"}``: the policy as the command line
    writes it, or your own class as ``FILE.py:Class[:key=value,...]`` or ``module.Class[:...]``.
    The source is a lookup, `ENGINE`, or `FORCED` followed by a file.

    Raises DraftsimError if the text is empty, or naming what is wrong with it.
    """
    policy, source = _given(text)
    try:
        drafts = _source(source)
        found = policy_from(policy, min(longest, drafts.longest or longest))
        if isinstance(found, Cut):
            said = said_cut(policy, found.longest, "the engine's")
            print(f"draftsim: {said}", file=sys.stderr)
        return Setup(found, drafts)
    except ValueError as error:
        raise DraftsimError(f"{VARIABLE}: {error}") from None


def _version(text: str) -> tuple[int, int] | None:
    """Return a value that changes with the file that `text` names; None if it names none."""
    try:
        found = os.stat(text)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns


def asks_for_engine(text: str) -> bool:
    """Return True if `VARIABLE` is set and names `ENGINE` as source.  Raises as `setup_from`."""
    return bool(text) and _given(text)[1] == ENGINE


def _given(text: str) -> tuple[str, str]:
    """Return policy and source as `VARIABLE` has them."""
    if not text:
        raise DraftsimError(
            f'{VARIABLE} is not set: give it {{"policy": "gammatune", "source": "pld"}}, or a file'
        )
    try:
        given = parse_json(text) if text.lstrip().startswith("{") else read_json(text)
        policy, source = given["policy"], given["source"]
        if not (isinstance(policy, str) and isinstance(source, str)):
            raise TypeError("text for both")
        return policy, source
    except (KeyError, TypeError) as error:
        raise DraftsimError(f"{VARIABLE}: expected policy and source, missing {error}") from None
    except ValueError as error:
        raise DraftsimError(f"{VARIABLE}: {error}") from None


def policy_from(text: str, longest: int | None = None) -> Policy:
    """Return a policy by its name, its class in a file, or the dotted name of its class.

    If your own policy sets no longest draft, its drafts are cut at `longest` tokens.
    Raises ValueError naming what is wrong.
    """
    if is_file(text):
        return load_file(text, longest).policy
    name = text.partition(":")[0].strip()
    if "." not in name:
        return parse_serving_policy(exact_policy(text), max_gamma=longest)
    module, _, cls = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {name!r} cannot be imported: {error}") from None
    if not isinstance(found, type) or not issubclass(found, Policy):
        raise ValueError(f"policy {name!r} is no DraftPolicy and no BatchPolicy")
    return bounded(found, name, text, longest).policy


def _source(text: str) -> DraftSource:
    if text == ENGINE:
        return EngineDrafts()
    if text.startswith(FORCED):
        return Forced.read(Path(text.removeprefix(FORCED)))
    source = parse_source(text)
    if not isinstance(source, LookupSource):
        raise ValueError(
            f"source {text!r} needs a recording: name a lookup, such as pld or rest, or {ENGINE}, "
            "the engine's own drafter"
        )
    return LookedUp(source)


class EngineStream(Member):
    """One request from its first token to its last."""

    def __init__(self, asked: Asked, drafts: Drafts, output: Sequence[int]) -> None:
        super().__init__(asked.id)
        self.asked, self.drafts = asked, drafts
        self.output = [*output]
        """Tokens emitted so far."""
        self.rounds: list[Round] = []

    @property
    def remaining(self) -> int:
        """Tokens to the limit."""
        return self.drafts.remaining

    def end_round(self, tokens: Sequence[int], verified: int) -> Round:
        """Return the round that emitted `tokens` and had `verified` drafted tokens verified."""
        position = self.drafts.position
        self.draft = self.draft[:verified]
        self.drafts.advance(tokens)
        accepted = min(len(tokens) - 1, verified)
        self.rounds.append(self.settled(position, accepted, self.drafts.position - position))
        return self.rounds[-1]


class Session:
    """A policy applied to the rows of an engine's batch.

    Each request has its own copy of the prototype, which gets the load before every round and the
    result after it.  Its batch is the requests that decode in the next iteration; it also gets how
    many this iteration had (`policies.core.Load.scheduled`).  Prompts that join are not known yet
    when drafts are asked for.

    Parameters
    ----------
    setup: The policy, and where its drafts come from.
    drafter: The drafter of the engine that it decides for.
    keep: True if the streams of requests that ended are kept in `finished`.
    """

    def __init__(self, setup: Setup, drafter: Governed, keep: bool) -> None:
        self.setup, self.keep, self._drafter = setup, keep, drafter
        self.finished: dict[str, EngineStream] = {}
        """Streams that have ended, by the request's own name."""
        self._streams: dict[str, EngineStream] = {}
        vocab_size = setup.source.vocab_size or drafter.vocabulary
        self._together = together_of(setup.policy, vocab_size=vocab_size, longest=drafter.longest)

    @property
    def idle(self) -> bool:
        """Return True if no request is known."""
        return not self._streams

    def advance(
        self, names: Sequence[str], sampled: Sequence[Sequence[int]],
        verified: Mapping[str, Sequence[int]], requests: Mapping[str, Any],
    ) -> list[list[int]]:  # fmt: skip
        """Return drafts of each row of the batch for the next iteration.

        ``sampled``: the tokens that each row emitted in this one, none if its prompt is not
        finished; ``verified``: the drafts that it verified, by name; ``requests``: the engine's
        records of the requests that it still knows, with their ``prompt_token_ids``,
        ``output_token_ids`` and ``sampling_params.max_tokens``.

        Raises PolicyError if the policy reads a signal that it does not declare.
        """
        for name in [n for n in self._streams if n not in requests]:
            self._leave(name)
        emitting = {name: t for name, t in zip(names, sampled, strict=False) if t}
        decoding = [name for name in emitting if name in self._streams]
        streams, rounds = [self._streams[name] for name in decoding], []
        for name, stream in zip(decoding, streams, strict=True):
            # The last iteration of a request may sample more than it asked for.
            stream.output.extend(emitting[name][: stream.asked.limit - len(stream.output)])
            rounds.append(stream.end_round(emitting[name], len(verified.get(name, ()))))
        if streams:
            self._together.observe(streams, rounds)
        for stream in streams:
            stream.draft, stream.forwards = [], 0
        self._leave_ended(decoding)
        # As in the simulator: places are free when others take them, who came first before who
        # came later, whatever rows of its batch the engine gave them.
        for name in [n for n in requests if n in emitting and n not in decoding]:
            self._join(name, requests[name], [] if self._drafter.booked else emitting[name])
            self._leave_ended([name])
        going_on = {name: self._streams[name] for name in emitting if name in self._streams}
        # `scheduled` includes requests that ended here, and those whose prompts were processed.
        batch, scheduled = len(going_on), len(sampled)
        if going_on:
            self._together.draft(
                [*going_on.values()],
                lambda s: s.drafts.load._replace(batch=batch, scheduled=scheduled),
                lambda active: [s.drafts.draft(s.draft) for s in active],
            )
        drafts = {name: s.drafts.ids(s.draft) for name, s in going_on.items()}
        return [drafts.get(name, []) for name in names[: len(sampled)]]

    def _join(self, name: str, state: Any, tokens: Sequence[int]) -> None:
        limit = state.sampling_params.max_tokens
        asked = Asked(self._drafter.caller_name(name), state.prompt_token_ids, limit)
        output = [*state.output_token_ids, *tokens]
        self._streams[name] = EngineStream(asked, self.setup.source.open(asked, output), output)
        self._together.join(self._streams[name])

    def _leave_ended(self, names: Sequence[str]) -> None:
        for name in names:
            if self._streams[name].remaining <= 0:
                self._leave(name)

    def _leave(self, name: str) -> None:
        stream = self._streams.pop(name)
        self._together.leave(stream)
        self.setup.source.close(stream.asked, stream.output)
        if self.keep:
            self.finished.setdefault(stream.asked.id, stream)
        if (notes := lines()) is not None:
            notes.put(rounds=stream.name, of=stream.rounds)


class Governed:
    """A drafter of an engine with a draftsim policy.

    Without `use`, the setup is that of the environment (`setup_from`).  If that is a file and it
    has changed, it is read again as soon as a request arrives while no other runs.

    Parameters
    ----------
    longest: Most tokens of a draft.
    vocabulary: Size of the engine's vocabulary, used if the source does not know its own.
    caller_name: Returns the name that a request's caller gave, from the engine's name of it.
    """

    own_passes: ClassVar[bool] = False
    """True if a drafter of the engine's own runs passes."""
    booked: ClassVar[bool] = True
    """True if the engine's records hold what was just sampled."""

    def __init__(
        self, longest: int, vocabulary: int, caller_name: Callable[[str], str] = str
    ) -> None:
        self.longest, self.vocabulary, self.caller_name = longest, vocabulary, caller_name
        self._session: Session | None = None
        self._version: tuple[int, int] | None = None

    def use(self, setup: Setup) -> Session:
        """Use this setup from now on for new requests only; keep the rounds of those that end."""
        session = Session(setup, self, keep=True)
        self.go_on(session)
        return session

    def go_on(self, session: Session) -> None:
        """Continue with the session of an earlier `use` and the requests that it knows."""
        self._session, self._version = session, None

    @property
    def finished(self) -> Mapping[str, EngineStream]:
        """Streams that have ended since `use`, by the request's own name."""
        return {} if self._session is None else self._session.finished

    @property
    def session(self) -> Session:
        """Return the session of `use` or of the environment; DraftsimError if there is none."""
        known, text = self._session, os.environ.get(VARIABLE, "")
        watched = known is not None and self._version is not None and known.idle
        if known is None or (watched and _version(text) not in (None, self._version)):
            self._version = _version(text)
            known = self._session = Session(setup_from(text, longest=self.longest), self, False)
        return known
