"""The interface of a draft source, and the replay that all sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from policies.arrays import Ints
from policies.core import SIGNALS, Load
from policies.spec import Checked
from traces.acceptance.trace import Trace, once_per_trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import CallCounter, CallRows, Calls, pack_calls
from traces.replay.decoder import RecordedToken
from traces.replay.rounds import Fidelity, RoundLog, Rounds
from traces.sources.recording import Recordings, SourceRecording

DRAFTER_SIGNALS = frozenset(SIGNALS) - {"top10_prob"}
"""Signals recorded of a drafter along a trace, which leave out its ten likeliest tokens."""


class Source(Checked):
    """A source of proposals.  Its constructor has parameters, and no recordings."""

    name: ClassVar[str]
    signals: ClassVar[frozenset[str]] = frozenset({"token_id"})
    """The draft signals its tokens carry, of `policies.core.SIGNALS`."""
    fidelity: ClassVar[Fidelity] = "exact"
    """How its replay relates to really decoding with this source."""
    unlike: ClassVar[str | None] = (
        "its drafts are not recorded by start, and requests of a batch share no pass for them"
    )
    """Why it cannot replace a draft model; None if it can."""
    what: ClassVar[str]
    """One line: the method, where it is from, and what its label refers to."""
    recorded_as: ClassVar[type[SourceRecording] | None] = None
    """Class of its recordings; None: nothing is recorded, the trace's tokens decide its drafts."""
    record: ClassVar[str] = "`draftsim profile sources --exit-layers`"
    """Command that records it and measures its latencies, for messages."""
    runs_layers: ClassVar[bool] = False
    """True if its rounds run single layers of the target."""
    sampled: ClassVar[bool] = False
    """True if it can be replayed along sampled outputs."""
    scored: ClassVar[bool] = False
    """True if the target's scores of its wrong drafts are recorded, which lossy rules need."""
    chained: ClassVar[bool] = False
    """True if it drafts one chain from each start (`drafts_along`), under every policy."""
    model: str | None = None
    """The folder or name of the drafter that it was given; None if it has none, or any."""

    @property
    def key(self) -> str:
        """Name of its recording."""
        return self.name

    def recorded(self, recordings: Recordings) -> str:
        """Return the name of its recording; DraftsimError if it is not there."""
        if self.key not in recordings:
            raise DraftsimError(
                f"no recording of {self.key!r} drafts (there are: "
                f"{', '.join(sorted(recordings)) or 'none'}): record them with {self.record}"
            )
        return self.key

    def recording(self, recordings: Recordings) -> Any:
        """Return its recording, a `recorded_as`; DraftsimError if it is not there."""
        return recordings[self.recorded(recordings)]

    def label(self, recordings: Recordings) -> str:
        """Return its name in tables, which tells it from the others of these recordings."""
        return self.name

    def drafter(self, recordings: Recordings) -> str:
        """Return the model of latency tables that drafts; by default the draft model."""
        return "draft"

    def by_passes(self, recordings: Recordings) -> bool:
        """Return True if a drafted token is a pass, the first over what was verified since.

        Such rounds cost what a draft model's do, any others their calls.
        """
        return False

    def longest(self, trace: Trace, recordings: Recordings) -> int | None:
        """Return the longest draft that it can be replayed with; None if nothing bounds it.

        Raises DraftsimError if what it needs was not recorded.
        """
        return trace.max_gamma

    def unlike_a_draft_model(self, recordings: Recordings) -> str | None:
        """Return why `traces.sources.as_draft` cannot take it; None if it can."""
        return self.unlike

    def drafts_along(self, trace: Trace, recordings: Recordings) -> Trace:
        """Return the outputs of `trace` with what the source drafts from every start, whatever its
        verification costs (`traces.sources.as_draft.laid_out`).

        Raises DraftsimError if it was not recorded along this trace.
        """
        raise NotImplementedError

    def as_draft(self, latency: LatencyTable, recordings: Recordings) -> LatencyTable:
        """Return `latency` with the passes of the source instead of the draft model's.

        Raises DraftsimError if the table lacks them.
        """
        raise NotImplementedError

    def held(self, recordings: Recordings) -> frozenset[str]:
        """Return the signals among `signals` that the tokens of these recordings carry."""
        return self.signals

    def completed(self, trace: Trace, recordings: Recordings) -> Recordings:
        """Return `recordings` with what follows from the source's parameters and `trace` alone."""
        return recordings

    def for_decoding(self, recordings: Recordings) -> Source:
        """Return the source completed from its recording, as real decoding needs it."""
        return self

    def with_each(self, recordings: Recordings) -> Sequence[Self]:
        """Return the source once for each recorded drafter that it names; at least once."""
        return [self]

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """(model, phase) of the calls that every draft makes; empty where rounds differ."""
        return ()

    def counted(self, log: RoundLog, recording: Any) -> list[Calls]:
        """Return the calls of rounds of a `chained` source, unless it drafts `by_passes`."""
        raise NotImplementedError

    def open(
        self, trace: Trace, recordings: Recordings, first: int
    ) -> Callable[[int], SourceReplay]:
        """Return a function from a request's index to its decoder, which begins at ``first``.

        Raises DraftsimError naming the remedy where what it needs was not recorded.
        """
        raise NotImplementedError

    def counted_in(self, rounds: Rounds, noted: Sequence[Any]) -> CallRows:
        """Return the calls of `rounds`, given what each request's decoder `noted`."""
        return pack_calls(noted)

    def check(self, trace: Trace, recordings: Recordings, first: int) -> None:
        """Raise DraftsimError naming the remedy where what it needs was not recorded."""
        self.open(trace, recordings, first)(0)


ReplayedRounds = tuple[Rounds, CallRows]
"""Rounds, and the calls that they ran."""


class SourceReplay(ABC):
    """One recorded request, decoded again with another source than a draft model.

    Only the target's own output is taken from the trace.  ``first`` is the output position
    decoding begins at.

    A class may define a method that spares the loop for policies with a plan
    (`policies.vectorised`).  It counts for the class that defines it, not for its subclasses::

        def at_once(self, trace, plan, first, chosen) -> ReplayedRounds | None

    It returns the rounds of the requests `chosen`, ascending, and their calls; None leaves them to
    the loop.
    """

    def __init__(self, trace: Trace, request: int, first: int, sampled: bool = False) -> None:
        self.info = trace.requests[request]
        starts = trace.request_starts
        true = true_tokens(trace, sampled=sampled)
        self.output = true[int(starts[request]) : int(starts[request + 1])]
        self.eos = eos_of(trace)
        self.length = len(self.output)
        self.limit = self.info.max_new_tokens
        self.position = min(first, self.length)
        self.calls = CallCounter()

    @property
    def noted(self) -> Any:
        """Notes from which the calls of its rounds follow (`Source.counted_in`)."""
        return self.calls.rounds

    @property
    def remaining(self) -> int:
        """Tokens to the limit; 0 at the end, known from the recording."""
        return self.limit - self.position if self.position < self.length else 0

    @property
    def load(self) -> Load:
        """A single stream; the run length is how many proposals would be accepted from here."""
        run = min(self.run_length(), self.limit - self.position - 1)
        return Load(1, self.info.prompt_length + self.position, run)

    @abstractmethod
    def run_length(self) -> int:
        """Return how many proposals would be accepted if drafting went on while they are right."""

    @abstractmethod
    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the proposal after the output so far and `so_far`; None where there is none."""

    def charge(self, submitted: int) -> int:
        """Count the verification's calls; return the positions that it gives true tokens for."""
        return submitted + 1

    def verify(self, draft: Sequence[Any]) -> int:
        """Accept the leading matches, extend the output, and return how many matched.

        Without a bonus position a full match emits those tokens and nothing more.
        """
        positions, at = self.charge(len(draft)), self.position
        accepted = leading((t.token_id for t in draft), self.output[at : at + len(draft)])
        self.calls.end_round()
        self.position = min(at + min(accepted + 1, positions), self.length)
        return accepted


def eos_of(trace: Trace) -> frozenset[int]:
    """Return ids that end a sequence."""
    return frozenset(trace.meta.get("eos_token_ids") or ())


def true_tokens(trace: Trace, *, sampled: bool = False) -> list[int]:
    """Return the target's output tokens of all requests, in on-path order.

    Raises DraftsimError if there are none, or unless ``sampled`` if they were sampled.
    """
    if "token" not in trace.columns:
        raise DraftsimError(
            "this trace holds no output tokens, which every source but a draft model is replayed "
            "from: record one with `draftsim profile`"
        )
    if trace.temperature > 0 and not sampled:
        raise DraftsimError(
            "this trace was sampled, and sources other than a draft model, early exit and drafters "
            "on features are replayed along greedy output: record with --temperature 0"
        )
    return _outputs(trace)


@once_per_trace
def _outputs(trace: Trace) -> list[int]:
    tokens: list[int] = np.asarray(trace.columns["token"])[trace.on_path].tolist()
    return tokens


def leading(tokens: Iterable[int], true: Iterable[int]) -> int:
    """Return how many of the leading tokens are the true ones."""
    count = 0
    for token, own in zip(tokens, true, strict=False):
        if token != own:
            break
        count += 1
    return count


def leading_right(drafts: npt.ArrayLike, true: npt.ArrayLike, ends: npt.ArrayLike) -> Ints:
    """Return the leading right tokens of the draft from every output position, shape (positions,).

    ``drafts`` (positions, offsets); the others as in `tokens_ahead`.
    """
    drafts = np.asarray(drafts)
    wanted = tokens_ahead(true, ends, drafts.shape[1])
    right = (wanted >= 0) & (drafts == wanted)
    return np.asarray(np.cumprod(right, axis=1).sum(axis=1), dtype=np.int64)


def tokens_ahead(true: npt.ArrayLike, ends: npt.ArrayLike, count: int) -> Ints:
    """Return the next `count` output tokens from every position; -1 after a request's last.

    ``true`` (positions,) are the output tokens of all requests; ``ends`` (positions,) is one past
    the last position of each one's request.  The shape is (positions, count).
    """
    true = np.asarray(true, dtype=np.int64)
    at = np.arange(len(true))[:, None] + np.arange(count)
    return np.where(at < np.asarray(ends)[:, None], true.take(at, mode="clip"), -1)


def prompt_tokens(trace: Trace, request: int) -> list[int]:
    """Return prompt ids of a request; DraftsimError if they were not recorded."""
    ids = trace.requests[request].prompt_ids
    if ids is None:
        raise DraftsimError(
            f"request {trace.requests[request].id!r} has no prompt tokens in this trace: "
            "record one with `draftsim profile`"
        )
    return list(ids)
