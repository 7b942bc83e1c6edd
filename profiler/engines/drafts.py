"""Sources of drafts in an engine: a recording that dictates verdicts, a lookup, or the engine."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from policies.core import Load
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.replay.decoder import RecordedToken, ReplayDecoder
from traces.sources.lookups.sources import LookupSource, ServedRequest, proposed
from traces.sources.lookups.text import Lookup
from traces.store.files import read_trace, write_trace
from traces.store.text import read_object
from traces.store.writing import write_atomically


class Asked(NamedTuple):
    """A request as the engine got it."""

    id: str
    prompt: Sequence[int]
    limit: int
    """Most output tokens."""


class DraftSource(ABC):
    """Opens the drafts of every request.  Constructors only store parameters."""

    signals: frozenset[str] = frozenset({"token_id"})
    """Signals that its tokens carry, of `policies.core.SIGNALS`."""
    longest: int | None = None
    """Tokens that a draft may have; None if the source sets no bound."""
    vocab_size: int | None = None
    """Size of the vocabulary that the signals are over; None if it is the engine's."""

    @abstractmethod
    def open(self, request: Asked, output: Sequence[int]) -> Drafts:
        """Return drafts for one request that has emitted `output` so far, a token or more."""

    def close(self, request: Asked, output: Sequence[int]) -> None:
        """Note that the request has ended with this output."""
        del request, output


class Forced(DraftSource):
    """Dictates every verdict: drafts the engine's own tokens where the recording matched.

    Where the recording did not match, the drafted token differs from the engine's.  So acceptance
    is exactly the recorded one at any draft length.  Signals are the recorded ones.  A request
    named ``SEQUENCE/ANYTHING`` follows that sequence.

    Parameters
    ----------
    trace: The acceptance to follow.
    texts: By sequence, the tokens that the engine emits on its own (`profiler.engines.texts`).
    vocabulary: Number of token ids of the engine's model.
    """

    def __init__(self, trace: Trace, texts: Mapping[int, Sequence[int]], vocabulary: int) -> None:
        self.trace, self.texts, self.vocabulary = trace, texts, vocabulary
        self.signals, self.vocab_size = trace.signals, trace.vocab_size
        self.longest = trace.max_gamma

    def open(self, request: Asked, output: Sequence[int]) -> Drafts:
        """Return the drafts of a request; DraftsimError if it names no recorded sequence."""
        name = request.id.partition("/")[0]
        if not name.isdigit() or int(name) not in self.texts:
            raise DraftsimError(
                f"request {request.id!r} names no recorded sequence: forced drafts need ids "
                "like 3/0, of a sequence whose text is known"
            )
        text = self.texts[int(name)]
        return ForcedDrafts(self.trace, int(name), text, self.vocabulary, len(output))

    def write(self, folder: Path) -> Path:
        """Write files from which another process can `read` this object; return the main one."""
        write_trace(self.trace, folder / "forced.parquet")
        path = folder / "forced.json"
        kept = {
            "vocabulary": self.vocabulary,
            "texts": {str(i): list(t) for i, t in self.texts.items()},
        }
        write_atomically(path, json.dumps(kept).encode())
        return path

    @classmethod
    @lru_cache(maxsize=1)
    def read(cls, path: Path) -> Forced:
        """Read the file that `write` wrote.  Raises FileError if that cannot be read."""
        try:
            kept = read_object(path)
            texts = {int(i): text for i, text in kept["texts"].items()}
            return cls(read_trace(path.with_suffix(".parquet")), texts, int(kept["vocabulary"]))
        except (FileError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} holds no forced drafts: {error}") from None


class ForcedDrafts(ReplayDecoder):
    """A recorded request whose drafts are made of another model's tokens."""

    def __init__(
        self, trace: Trace, request: int, text: Sequence[int], vocabulary: int, first: int
    ) -> None:
        super().__init__(trace, request, first)
        self._text, self._vocabulary = text, vocabulary

    def ids(self, draft: Sequence[Any]) -> list[int]:
        """Return the text's own tokens as far as the recording matched, then wrong ones."""
        position, right = self.position, self._runs[self._start + self.position]
        last = len(self._text) - 1
        return [
            self._text[min(position + k, last)] if k < right
            else (self._text[min(position + k, last)] + 1) % self._vocabulary
            for k in range(len(draft))
        ]  # fmt: skip

    def advance(self, emitted: Sequence[int]) -> None:
        """Advance by the emitted tokens, even if the recording differs."""
        self._advance(len(emitted) - 1)


SERVED = 10_000
"""Earlier requests that a lookup searches at most: the usual size of suffix decoding's cache."""


class LookedUp(DraftSource):
    """Drafts that a lookup finds in the request's own tokens or in earlier requests.

    ``source``: one of `traces.sources.lookups.sources`.  ``eos``: ids never drafted.
    """

    def __init__(self, source: LookupSource, eos: frozenset[int] = frozenset()) -> None:
        self.source, self.eos = source, eos
        self.signals = source.signals
        self._served: deque[ServedRequest] = deque(maxlen=SERVED if source.reads_earlier else 0)

    def open(self, request: Asked, output: Sequence[int]) -> Drafts:
        return _Found(request, output, self.source.lookup(self.eos, lambda: self._served))

    def close(self, request: Asked, output: Sequence[int]) -> None:
        """Keep the output for lookups in earlier requests."""
        self._served.append(ServedRequest([*request.prompt], [*output]))


UNKNOWN = -1
"""A placeholder for a token that the engine's own drafter will find."""


class EngineDrafts(DraftSource):
    """Drafts of the engine's own drafter: only their number is decided here."""

    signals: frozenset[str] = frozenset()

    def open(self, request: Asked, output: Sequence[int]) -> Drafts:
        return CountedDrafts(request, len(output))


class CountedDrafts:
    """Drafts without tokens, for a request whose output is known by length only."""

    def __init__(
        self, request: Asked, position: int,
        ids: Callable[[int], list[int]] = lambda count: [UNKNOWN] * count,
    ) -> None:  # fmt: skip
        self._limit, self._prompt, self._ids = request.limit, len(request.prompt), ids
        self.position = position

    @property
    def remaining(self) -> int:
        """Output tokens that the request may still emit; 0 once it has ended."""
        return max(self._limit - self.position, 0)

    @property
    def load(self) -> Load:
        """Load of a single stream, because only the engine knows the batch."""
        return Load(1, self._prompt + self.position)

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return one token after the output so far and `so_far`; None if there is none."""
        return RecordedToken(UNKNOWN)

    def ids(self, draft: Sequence[Any]) -> list[int]:
        """Return the token ids to hand to the engine, placeholders by default."""
        return self._ids(len(draft))

    def advance(self, emitted: Sequence[int]) -> None:
        """Note that the engine emitted these tokens, the accepted drafts and its own."""
        self.position += len(emitted)


class _Found(CountedDrafts):
    """Drafts that a lookup finds after what is known of the request."""

    def __init__(self, request: Asked, output: Sequence[int], lookup: Lookup) -> None:
        super().__init__(request, len(output))
        self._lookup = lookup
        self._lookup.extend(request.prompt)
        self._lookup.extend(output)
        self._found: list[Any] | None = None

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        if self._found is None:
            self._found = self._lookup.propose()
        if len(so_far) >= len(self._found):
            return None
        return proposed(self._found[len(so_far)])

    def ids(self, draft: Sequence[Any]) -> list[int]:
        return [token.token_id for token in draft]

    def advance(self, emitted: Sequence[int]) -> None:
        super().advance(emitted)
        self._lookup.extend(list(emitted))
        self._found = None


Drafts = ForcedDrafts | CountedDrafts
"""Proposals for one request that is being decoded."""
