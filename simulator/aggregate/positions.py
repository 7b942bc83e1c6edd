"""Acceptance by position of a draft: rates, counted rounds, and where they are from.

Logs, counters, benchmark results, profiles, published curves and recordings all become
`Positions`, which every command that takes acceptance works with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from policies.lengths.basic import Fixed
from simulator.aggregate.hazard import check_totals, emitted_at, median_survival
from simulator.aggregate.server import ServerRun, mean_lengths
from simulator.bootstrap import Interval
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.importers.totals import Totals
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

EXPECTED = (
    "expected chances from 1 to 0 that do not rise, such as 0.76,0.60,0.43; acceptance lengths are "
    "given as 1:1.8,2:2.4"
)


NORMAL_95 = 1.96
"""Standard errors on either side of a mean in its 95% interval."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Acceptance by position.

    Parameters
    ----------
    label:
        Name of the source of this acceptance.
    known:
        Acceptance lengths (tokens per round, the target's own included) by draft length.
    reached, accepted:
        Rounds whose draft reached positions 1, 2, ... (drafted that far, all tokens before
        accepted), and those of them that accepted the token there; (K,).  Empty where only
        lengths are known, chances of a round where its counts are not (`counted`).
    counted:
        True if `reached` and `accepted` are numbers of rounds.
    log:
        The rounds themselves, where they are known.
    source:
        Names of the files it was read from; empty for numbers.
    model:
        The target, where a file names it.
    prompt, answer:
        Mean prompt and output tokens of a request, where a file says so.
    note:
        A reservation about the counts, in words; empty if there is none.
    drafting:
        Part of the steps that had a draft; acceptance is that of all steps.

    Raises DraftsimError for impossible lengths.
    """

    label: str
    known: Mapping[int, float]
    reached: Floats = field(default_factory=lambda: np.empty(0))
    accepted: Floats = field(default_factory=lambda: np.empty(0))
    counted: bool = False
    log: RoundLog | None = None
    source: str = ""
    model: str | None = None
    prompt: float | None = None
    answer: float | None = None
    note: str = ""
    drafting: float = 1.0

    def __post_init__(self) -> None:
        check_totals(self.known)

    @property
    def longest(self) -> int:
        """Longest draft length with a measured acceptance length."""
        return max(self.known)

    @property
    def rounds(self) -> int | None:
        """Rounds counted; None if they are not known."""
        return int(self.reached[0]) if self.counted and len(self.reached) else None

    @cached_property
    def rates(self) -> Floats:
        """Chance of each token to be accepted if those before it were, (K,); NaN if unknown."""
        if len(self.reached):
            seen = np.where(self.reached > 0, self.reached, np.nan)
            return np.asarray(self.accepted / seen)
        # Lengths at K and K - 1 differ by the chance that all K are accepted.
        from scipy.optimize import isotonic_regression

        longest = self.longest
        if set(self.known) != set(range(1, longest + 1)):
            return np.full(longest, np.nan)
        lengths = np.array([1.0, *(self.known[k] for k in range(1, longest + 1))])
        # Noise lets some differences rise: pooling neighbours keeps the acceptance length.
        falling = isotonic_regression(np.diff(lengths), increasing=False).x
        alive = np.append(1.0, np.clip(falling, 0.0, 1.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(alive[1:] / alive[:-1])

    @property
    def estimated(self) -> bool:
        """True if acceptance lengths alone are known: the positions follow from the prior."""
        return bool(len(self.reached) == 0 and np.isnan(self.rates).any())

    @cached_property
    def survival(self) -> tuple[float, ...]:
        """Chances that the first 1, 2, ... drafted tokens of a round are all accepted."""
        if self.estimated:
            return median_survival(self.known, self.longest)
        return tuple(np.cumprod(np.nan_to_num(self.rates)).tolist())

    @property
    def error(self) -> float | None:
        """Half the 95% interval of the tokens per round over their mean; None without counts."""
        if not self.rounds:
            return None
        alive = np.array(self.survival)
        tokens = 1 + alive.sum()
        # The squares of accepted tokens have the mean sum of (2 k - 1) P(accepted >= k).
        squares = ((2 * np.arange(1, len(alive) + 1) - 1) * alive).sum()
        variance = squares - (tokens - 1) ** 2
        return float(NORMAL_95 * np.sqrt(max(variance, 0.0) / self.rounds) / tokens)

    @property
    def named(self) -> str:
        """A name for titles."""
        return f"acceptance of {self.source}" if self.source else "the acceptance given"

    @property
    def sizes(self) -> dict[str, int]:
        """Prompt and output tokens of a request, where they are told."""
        told = {"prompt_length": self.prompt, "tokens": self.answer}
        return {name: max(2, round(size)) for name, size in told.items() if size is not None}

    @property
    def meta(self) -> dict[str, Any]:
        """Provenance of a trace made from it."""
        of = {} if self.model is None else {"target": {"name": self.model}}
        return {"source": self.source, **of}

    @property
    def said(self) -> str:
        """The chances and where they come from, in words."""
        chances = ", ".join(f"{chance:.2f}" for chance in self.survival)
        where = f" ({self.source})" if self.source else ""
        how = ", estimated from the acceptance length" if self.estimated else ""
        return f"acceptance by position {chances}{where}{how}"

    def emitted(self, k: int, level: float = 0.8) -> Interval:
        """Return acceptance length at draft length `k`, extended where it was not measured."""
        return emitted_at(self.known, k, level)

    def cut(self, k: int) -> Positions:
        """Return the acceptance of positions up to `k`; raise DraftsimError if `k` is not known."""
        if k == self.longest:
            return self
        if k not in self.known:
            raise DraftsimError(
                f"{self.label}: counts drafts of {self.longest}, and the draft length is {k}"
            )
        known = {n: length for n, length in self.known.items() if n <= k}
        # The log's rounds drafted further than `k`.
        return replace(
            self, known=known, reached=self.reached[:k], accepted=self.accepted[:k], log=None
        )


def of_survival(label: str, survival: Sequence[float], **more: Any) -> Positions:
    """Return positions whose first 1, 2, ... tokens are all accepted with these chances.

    ``more`` are further fields of `Positions`.  Raises DraftsimError if one is no chance, or they
    rise.
    """
    if not all(0 <= b <= a for a, b in pairwise((1.0, *survival))):
        raise DraftsimError(f"acceptance {label}: {EXPECTED}")
    alive = np.asarray(survival, dtype=float)
    known = {k: float(e) for k, e in enumerate(1 + np.cumsum(alive), 1)}
    return Positions(label, known, np.append(1.0, alive[:-1]), alive, **more)


def of_runs(label: str, runs: Sequence[ServerRun], model: str | None = None) -> Positions:
    """Return the mean acceptance by position of the runs with the longest drafts that hold it.

    If no run holds it by position, the result has the acceptance lengths of all draft lengths.

    Raises DraftsimError if no run with speculation tells its acceptance.
    """
    told = [run for run in runs if run.k and run.round_tokens is not None]
    if not told:
        raise DraftsimError(f"{label}: holds no run with speculation and acceptance")
    longest = max(run.k for run in told)
    of = [run for run in told if run.k == longest]
    sizes: dict[str, Any] = {
        name: float(np.mean(known))
        for name in ("prompt", "answer")
        if (known := [size for run in of if (size := getattr(run, name)) is not None])
    }
    if all(run.accepted for run in of):
        survival = np.mean([run.accepted for run in of], axis=0).tolist()
        return of_survival(label, survival, model=model, **sizes)
    return Positions(label, mean_lengths(told), model=model, **sizes)


def of_totals(label: str, totals: Totals, drafts: int | None = None) -> Positions:
    """Return acceptance by position from counts.

    ``drafts`` is the draft length, if the counts do not hold it.

    Raises DraftsimError for trees, or counts without any draft length or of another one.
    """
    if totals.tree:
        raise DraftsimError(
            f"{label}: counts draft trees, which do not give the acceptance of a chain"
        )
    if totals.per_position is None:
        told = totals.longest if totals.drafted is None else None  # SGLang's chains are as long
        k = totals.reach if totals.fixed_length else told or drafts
        if k is None:
            raise DraftsimError(
                f"{label}: counts no acceptance by position, and its drafts differ in length or "
                "their lengths are unknown: give the acceptance length by draft length, such as "
                f"3:{1 + totals.mean_accepted:.3g} for drafts of 3"
            )
        if drafts not in (None, k):
            raise DraftsimError(f"{label}: counts drafts of {k}, and the draft length is {drafts}")
        return Positions(label, {k: 1.0 + totals.mean_accepted}, note=reservation(totals))
    alive = np.asarray(totals.per_position, dtype=float)
    counted = totals.rounds is not None
    reached = np.append(float(totals.rounds or 1), alive[:-1])
    emitted = 1 + np.cumsum(alive / reached[0])
    lengths = dict(enumerate(emitted.tolist(), 1))
    return Positions(
        label, lengths, reached, alive, counted, note=reservation(totals),
        drafting=float(totals.meta.get("drafting", 1.0)),
    )  # fmt: skip


def reservation(totals: Totals) -> str:
    """Return in words what makes the counts doubtful; empty if nothing does.

    It is a restart between two scrapes, steps without a draft, or drafts that differ in length.
    """
    said = [totals.meta["scrapes"]] if "scrapes" in totals.meta else []
    if (part := totals.meta.get("drafting")) is not None:
        said.append(f"{part:.0%} of the steps had a draft: acceptance is taken over all steps")
    elif totals.per_position and totals.drafted is not None and not totals.fixed_length:
        said.append(
            "its drafts differ in length, and counts by position do not say how many were "
            "shorter: later positions accept more than this"
        )
    return "; ".join(said)


def of_trace(label: str, trace: Trace, k: int) -> Positions:
    """Return the positions of a recording's rounds at draft length `k`.

    Acceptance lengths at 1 to `k` are those of rounds of that length: rounds of shorter drafts
    begin less often in hard stretches.  A position for which a drafter proposed nothing
    (`Trace.drafts_end`) counts as rejected; one that the end of the output cut off is not reached.

    Raises TailError if drafts of `k` were not recorded.
    """
    fixed = [(f"fixed:gamma={n}", Fixed(n)) for n in range(1, k + 1)]
    known: dict[int, float] = {}
    for n, log in enumerate(replay_many(trace, fixed), 1):
        drafted, accepted = judged(trace, log, n), log.rounds["accepted"]
        place = np.arange(1, n + 1)
        reached = ((drafted[:, None] >= place) & (accepted[:, None] >= place - 1)).sum(axis=0)
        passed = (accepted[:, None] >= place).sum(axis=0)
        known[n] = 1 + float(np.cumprod(passed / np.maximum(reached, 1)).sum())
    return Positions(label, known, reached.astype(float), passed.astype(float), True, log)


def judged(trace: Trace, log: RoundLog, k: int) -> npt.NDArray[np.int64]:
    """Return the positions of each round, of drafts of `k`, that were accepted or rejected.

    A position for which a drafter proposed nothing (`Trace.drafts_end`) is one of them; those
    that the end of the output cut off are not.
    """
    drafted = log.rounds["drafted"]
    if not trace.drafts_end:
        return drafted
    request = log.rounds["request"]
    limits = np.array([r.max_new_tokens for r in log.requests])
    left = limits[request] - log.rounds["position"] - 1
    # What ends a request ends its last draft.
    last = np.append(request[1:] != request[:-1], True)
    return np.where(last, drafted, np.minimum(k, left))
