"""A round as a list of calls, each a cell of the latency table.

The calls of a draft model follow from the columns of its rounds (`passes_of`).  Those of other
sources are recorded: a round of early exit runs single layers over changing numbers of tokens, a
lookup searches text, heads run once.  The replayed and the real decoder count them with the same
object, so a test can compare them call by call.

Some engines call the drafter in every round, even without drafts; others always fill all draft
slots.  A table that says so prices at least that many passes in each round of a policy that
speculates (`passes_always`); plain decoding, of an engine without a drafter, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats, Ints
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

Sizes = Floats | Ints
"""Tokens; fractions where they are means over the sequences of a batch."""

CALL_KINDS: tuple[tuple[str, str], ...] = (
    ("target", "forward"),
    ("target", "layer"),
    ("target", "head"),
    ("exit", "head"),
    ("heads", "forward"),
    ("pld", "forward"),
    ("rest", "forward"),
    ("lookahead", "forward"),
    ("adapter", "forward"),
    ("target", "pass"),
    ("ngram", "forward"),
    ("suffix", "forward"),
    ("drafter", "forward"),
    ("drafter", "tree"),
    ("target", "tree"),
    ("ngram-simple", "forward"),
    ("drafter", "catch_up"),
    ("hydra", "forward"),
)
"""(model, phase) of the latency table that a call's time is read from; ``drafter`` means the log's
own (`traces.replay.rounds.RoundLog.drafter`).
"""

CALL_DTYPE = np.dtype(
    [
        ("round", np.int32),
        ("verify", np.bool_),
        ("kind", np.int8),
        ("new_tokens", np.int32),
        ("count", np.int32),
    ]
)
"""One row: `count` calls of ``CALL_KINDS[kind]`` over `new_tokens` tokens in round `round`."""
CallRows = npt.NDArray[np.void]
"""Rows of `CALL_DTYPE`, in the order of their rounds."""

Call = tuple[bool, int, int, int]
"""(verify, kind, new_tokens, count): verify tells the verification from the drafting."""
CallKey = tuple[bool, int, int]
"""A call without its count."""

LAYER, HEAD, EXIT_HEAD = (
    CALL_KINDS.index(k) for k in (("target", "layer"), ("target", "head"), ("exit", "head"))
)
ADAPTER = CALL_KINDS.index(("adapter", "forward"))
PASS = CALL_KINDS.index(("target", "pass"))
DRAFTER = CALL_KINDS.index(("drafter", "forward"))
"""A pass of a drafter on the target's features."""
ONE_PASS = CALL_KINDS.index(("drafter", "catch_up"))
"""The one pass of a round in which a drafter drafts all tokens."""
DRAFTER_TREE, TREE = (CALL_KINDS.index((model, "tree")) for model in ("drafter", "target"))
"""A pass of such a drafter over nodes of a tree, and the target's over those it verifies."""

ALWAYS, AT_ONCE = "always_drafts", "drafts_at_once"
"""Entries of a latency table's provenance: passes of every round; all tokens in one pass."""
WIDEST = 1 << 20
"""A width beyond any: cells at both ends hold for all widths between."""


class Calls(NamedTuple):
    """Calls of one kind in many rounds: arrays of one shape, (calls,), or one number for all."""

    model: str
    """Model of the latency table; `OWN`: the log's drafter."""
    phase: str
    round: Ints
    new_tokens: Sizes | int = 1
    context: Sizes | int = 0
    """Tokens in the cache before it."""
    times: Ints | int = 1
    """How often it ran.  A negative number takes out what is booked elsewhere."""
    verify: bool = False
    """True for a part of the verification."""
    advancing: bool = False
    """True if each of these `times` begins at the token after the one before."""
    attends: bool = True
    """False if it costs the same at every context: it is read within the contexts measured."""

    @classmethod
    def of(
        cls, kind: int, round: Ints, new_tokens: Ints | int = 1, times: Ints | int = 1,
        verify: bool = False, cached: Ints | None = None,
    ) -> Calls:  # fmt: skip
        """Return calls of ``CALL_KINDS[kind]`` in rounds after `cached` tokens, (rounds,)."""
        model, phase = CALL_KINDS[kind]
        context = 0 if cached is None else cached[round]
        attends = phase == "layer" or (model in ("target", OWN) and phase != "head")
        return cls(model, phase, round, new_tokens, context, times, verify, attends=attends)

    @property
    def kind(self) -> int:
        """Index in `CALL_KINDS`."""
        return CALL_KINDS.index((self.model, self.phase))


OWN = "drafter"
"""Name of the log's own drafter in `CALL_KINDS` and `Calls`."""


def passes_of(forwards: Ints, catch_up: Sizes, context: Sizes, model: str = OWN) -> list[Calls]:
    """Return the passes of the draft model `model` in rounds, arrays of shape (rounds,).

    The first reads the ``catch_up`` tokens up to ``context``, of which 0 make no pass.  Each of the
    later ones reads the token that the one before drafted.
    """
    first = np.flatnonzero((forwards > 0) & (catch_up > 0))
    later = np.flatnonzero(forwards > 1)
    read = catch_up[first]
    return [
        Calls(model, "catch_up", first, read, np.maximum(context[first] - read, 0)),
        Calls(model, "forward", later, 1, context[later], forwards[later] - 1, advancing=True),
    ]


def verification(drafted: Sizes, cached: Sizes, light: bool = False) -> list[Calls]:
    """Return the target's passes over what rounds drafted, after `cached` tokens; (rounds,).

    A pass takes longer after passes that left other weights in the processor's caches: `light`
    drafts, such as those of heads and lookups, leave few.  A round without drafts is a step of
    plain decoding, and costs that.
    """
    apart = drafted > 0 if light else np.zeros(len(drafted), dtype=bool)
    return [
        Calls("target", phase, of, drafted[of] + 1, cached[of], verify=True)
        for phase, of in (("forward", np.flatnonzero(~apart)), ("pass", np.flatnonzero(apart)))
    ]


def unpacked(calls: CallRows, cached: Ints) -> list[Calls]:
    """Return recorded calls, rows of `CALL_DTYPE`, of rounds after `cached` tokens, (rounds,)."""
    slots = calls["kind"].astype(np.int64) + len(CALL_KINDS) * calls["verify"]
    found = []
    for slot in np.flatnonzero(np.bincount(slots)).tolist():
        mine = calls[slots == slot]
        verify, kind = divmod(slot, len(CALL_KINDS))
        of, width, times = (
            mine[name].astype(np.int64) for name in ("round", "new_tokens", "count")
        )
        found.append(Calls.of(kind, of, width, times, bool(verify), cached))
    return found


class CallCounter:
    """Collects the calls of one sequence's rounds."""

    def __init__(self) -> None:
        self.rounds: list[list[Call]] = []
        self._open: dict[CallKey, int] = {}

    def add(self, kind: int, new_tokens: int, count: int = 1, *, verify: bool = False) -> None:
        """Count `count` calls over `new_tokens` tokens each."""
        if count:
            key = (verify, kind, new_tokens)
            self._open[key] = self._open.get(key, 0) + count

    def end_round(self) -> None:
        """Close the round: what is counted from now on belongs to the next."""
        self.rounds.append([(*key, count) for key, count in sorted(self._open.items())])
        self._open.clear()


def pack_calls(sequences: Iterable[Sequence[Sequence[Call]]]) -> CallRows:
    """Return rows of `CALL_DTYPE` from the calls of each round of each sequence in turn."""
    rounds = list(chain.from_iterable(sequences))
    each = list(map(len, rounds))
    # Number by number: an array of tuples is made many times slower.
    numbers = chain.from_iterable(chain.from_iterable(rounds))
    columns = np.fromiter(numbers, np.int64, 4 * sum(each)).reshape(-1, 4).T
    packed = np.empty(columns.shape[1], dtype=CALL_DTYPE)
    packed["round"] = np.repeat(np.arange(len(rounds)), each)
    for name, column in zip(("verify", "kind", "new_tokens", "count"), columns, strict=True):
        packed[name] = column
    return packed


def pack_counted(parts: Sequence[Calls]) -> CallRows:
    """Return what `pack_calls` makes of the same calls, counted one by one."""
    slots = sorted({(part.verify, part.kind) for part in parts})
    if not slots:
        return np.empty(0, dtype=CALL_DTYPE)
    sizes = [[np.broadcast_to(n, part.round.shape) for n in (part.new_tokens, part.times)]
             for part in parts]  # fmt: skip
    width = 1 + max(int(tokens.max(initial=0)) for tokens, _ in sizes)
    keys = [
        (part.round * len(slots) + slots.index((part.verify, part.kind))) * width + tokens
        for part, (tokens, _) in zip(parts, sizes, strict=True)
    ]
    cells, of = distinct(np.concatenate(keys))
    times = np.bincount(of, np.concatenate([times for _, times in sizes])).astype(np.int64)
    cells, times = cells[times > 0], times[times > 0]
    at, tokens = np.divmod(cells, width)
    rows = np.empty(len(cells), dtype=CALL_DTYPE)
    rows["round"], slot = np.divmod(at, len(slots))
    rows["verify"], rows["kind"] = np.array(slots)[slot].T
    rows["new_tokens"], rows["count"] = tokens, times
    return rows


def distinct(keys: Ints) -> tuple[Ints, Ints]:
    """Return distinct keys and each key's index among them, by counting if that is faster."""
    if int(keys.max(initial=0)) > 100 * len(keys) + 1_000_000:
        found, inverse = np.unique(keys, return_inverse=True)
        return found, np.asarray(inverse, dtype=np.int64)
    present = np.bincount(keys) > 0
    return np.flatnonzero(present), (np.cumsum(present) - 1)[keys]


class LayerCounter:
    """The layers that each pending position has passed, and the calls for them.

    Position i of a round attends to the earlier ones at every layer it runs, so bringing the newest
    to a depth brings all earlier ones at least as deep; what they lack they run together with it,
    in one call (SpecBound, arXiv:2604.12247, sec. 2.3).  Depths never increase from a position to
    the next.  ``layers``: those of the target.
    """

    def __init__(self, layers: int, counter: CallCounter) -> None:
        self.layers = layers
        self.depths: list[int] = []
        self._counter = counter

    def enter(self) -> None:
        """Begin a new position, no layer run yet."""
        self.depths.append(0)

    def deepen(self, depth: int, *, verify: bool = False) -> list[tuple[int, int, int]]:
        """Bring the newest position to `depth`; return (first, last + 1, width) of its calls."""
        steps: list[tuple[int, int, int]] = []
        at, width = self.depths[-1], 1
        while at < depth:
            while width < len(self.depths) and self.depths[-1 - width] <= at:
                width += 1
            until = depth
            if width < len(self.depths):
                until = min(depth, self.depths[-1 - width])
            self._counter.add(LAYER, width, until - at, verify=verify)
            self.depths[-width:] = [until] * width
            steps.append((at, until, width))
            at = until
        return steps

    def finish(self, positions: int) -> list[tuple[int, int, int]]:
        """Verify the first `positions`, and no others: run what they lack, and the output head."""
        del self.depths[positions:]
        while len(self.depths) < positions:
            self.enter()
        steps = self.deepen(self.layers, verify=True)
        self._counter.add(HEAD, positions, verify=True)
        self.depths.clear()
        return steps


def drafting_always(latency: LatencyTable, passes: int | None) -> LatencyTable:
    """Return the table of an engine that runs `passes` draft passes in every round; None: as it is.

    Raises DraftsimError if ``passes < 1``.
    """
    if passes is None:
        return latency
    if passes < 1:
        raise DraftsimError(f"draft passes of every round are {passes}, expected at least 1")
    return LatencyTable(latency.cells, {**latency.meta, ALWAYS: passes})


def in_one_pass(latency: LatencyTable) -> LatencyTable:
    """Return the table of a drafter that drafts all tokens of a round in its first pass.

    Raises DraftsimError if the table has no draft passes.
    """
    cells = latency.cells
    own = cells[cells["model"] == "draft"]
    passes = own[own["phase"] == "forward"]
    if not len(passes):
        raise DraftsimError(
            "the latency table has no draft passes: what a drafter's one pass costs is not known"
        )
    others = cells[~cells.index.isin(own[own["phase"].isin(("forward", "settling"))].index)]
    once = passes[passes["new_tokens"] == 1].assign(phase="catch_up")
    first = [] if latency.has("draft", "catch_up") else [once, once.assign(new_tokens=WIDEST)]
    parts = [others, passes.assign(median_s=0.0, spread_s=0.0), *first]
    return LatencyTable(pd.concat(parts, ignore_index=True), {**latency.meta, AT_ONCE: True})


def is_one_pass(latency: LatencyTable) -> bool:
    """Return True if the table is of a drafter that drafts in one pass (`in_one_pass`)."""
    return bool(latency.meta.get(AT_ONCE))


def passes_always(latency: LatencyTable) -> int:
    """Return the draft passes of every round in a table's engine; 0 where it drafts as asked."""
    return int(latency.meta.get(ALWAYS) or 0)
