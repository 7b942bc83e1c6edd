"""Draft lengths of a log that holds only accepted tokens: given by the user, or inferred.

The user names a schedule (`reading`), or it is inferred (`infer`): a schedule that depends on past
outcomes alone can be run over the log's outcomes.  Most are soon contradicted by a round that
accepted more than they would have drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core import DraftPolicy, Load, Round, drafting
from policies.lengths.basic import Autoregressive, Fixed
from policies.lengths.huggingface import Confidence
from policies.registry import describe, parse_policy, policy_names
from traces.aliases import Progress, silent
from traces.errors import DraftsimError, FileError
from traces.importers.rows import LoggedRound, LoggedTurn
from traces.replay.decoder import BLANK

TurnReader = Callable[[LoggedTurn, int], list[LoggedRound]]
"""The rounds of a turn, with what is known of their drafts, from the turn and ``first``."""

STARTS = range(1, 25)
"""Initial lengths that are tried of transformers' heuristic."""
CHANCE = 1e-6
"""A schedule is taken only if its full drafts would otherwise be a coincidence this rare."""
ALIKE = 0.01
"""Share of the rounds in which two schedules may differ and be taken as one."""
UNEXPLAINED = 0.05
"""Share of a round's time that may go with accepted tokens beyond what the drafts explain."""
FEWEST_TURNS = 30
"""Turns below which the wall times are not asked."""
SIGNIFICANT = 4.0
"""Standard errors from which a dependence on accepted tokens counts."""
RULED_OUT = 2.0
"""Standard errors by which the dependence found must stay below `UNEXPLAINED`."""

FORMS = "infer, none, at-least:N, fixed:N, hf-heuristic:N or another policy that reads no signal"


def reading(text: str) -> TurnReader:
    """Return the schedule that `text` describes.

    * ``none``: nothing is known, so the target's own token of every round is unknown: it may
      have replaced a wrong draft or followed a right one.
    * ``at-least:N``: every draft had N tokens or more, so a round that accepted fewer was
      rejected.  ``at-least:1`` holds for any draft model.
    * any policy that reads no signal, as it is written elsewhere: ``fixed:N``,
      ``hf-heuristic:N`` (the number is ``gamma``), ``gammatune:eta=0.2``.

    Raises DraftsimError if `text` is not one of these.
    """
    name, _, body = text.partition(":")
    try:
        if name == "none" and not body:
            return lambda turn, first: [LoggedRound(a, 0) for a in turn.accepted]
        if name == "at-least" and body:
            count = int(body)
            if count < 1:
                raise ValueError(f"N is {count}, expected >= 1")
            return lambda turn, first: _at_least(turn, first, count)
        if name in policy_names("single") and (body or name != "fixed"):
            policy = parse_policy(f"{name}:gamma={body}" if body.isdigit() else text)
            if policy.reads:
                raise ValueError("it reads signals that the log does not hold")
            return replayed(policy)
    except ValueError as error:
        raise DraftsimError(f"--draft-lengths {text}: {error}") from error
    raise DraftsimError(f"--draft-lengths is {text!r}: expected {FORMS}")


def is_known(text: str) -> bool:
    """Return True if a reading tells the length of every draft."""
    return not text.startswith(("none", "at-least"))


def _at_least(turn: LoggedTurn, first: int, count: int) -> list[LoggedRound]:
    rounds, position = [], first
    for accepted in turn.accepted:
        rounds.append(LoggedRound(accepted, min(count, turn.limit - position - 1)))
        position += accepted + 1
    return rounds


def replayed(policy: DraftPolicy) -> TurnReader:
    """Return draft lengths found by running the policy that made the log over its outcomes."""
    shared = policy.for_run()

    def read(turn: LoggedTurn, first: int) -> list[LoggedRound]:
        mine = shared.fresh()
        rounds, position = [], first
        for number, accepted in enumerate(turn.accepted, 1):
            mine.begin_round(Load(1, position))
            draft: list[Any] = []
            for _ in drafting(mine.keep_drafting, turn.limit - position - 1, draft, draft):
                draft.append(BLANK)
            drafted = len(draft)
            if accepted > drafted:
                raise FileError(
                    f"{turn.where}, round {number}: {accepted} drafts were accepted where "
                    f"{type(policy).__name__} drafts {drafted}, so another policy made this "
                    "log: give its own --draft-lengths, or none"
                )
            emitted = min(accepted + 1, turn.tokens - position)
            mine.observe(Round(position, drafted, accepted, emitted, drafted, 1), draft)
            rounds.append(LoggedRound(accepted, drafted))
            position += accepted + 1
        return rounds

    return read


@dataclass(frozen=True)
class Inference:
    """The result of inferring the draft lengths of a log."""

    tried: int
    """Schedules that were run over the log."""
    fits: tuple[str, ...] = ()
    """Schedules that fit, as `reading` takes them; (nearly) the same lengths are one."""
    why: str = ""
    """Where none or several fit: what that says, in a few words."""
    also: tuple[str, ...] = ()
    """Further schedules of (nearly, `ALIKE`) the same lengths here."""

    @property
    def text(self) -> str:
        """The reading to take: the only schedule that fits, else ``none``."""
        return self.fits[0] if len(self.fits) == 1 else "none"

    def said(self) -> str:
        """Return the finding in a sentence."""
        if len(self.fits) == 1:
            also = f", {', '.join(self.also)} to within {ALIKE:.0%} of the rounds" * bool(self.also)
            return (
                f"the draft lengths follow {self.fits[0]}{also}: no other of {self.tried} "
                "schedules tried fits the log"
            )
        found = f"{', '.join(self.fits)} fit alike" if self.fits else "no schedule tried fits"
        return f"the draft lengths are not known, as {found} ({self.tried} tried): {self.why}"


def infer(turns: Sequence[LoggedTurn], first: int, progress: Progress = silent) -> Inference:
    """Return the schedule that made `turns`, if exactly one of the known ones fits them.

    A schedule fits under three conditions:

    * no round accepted more than it drafts;
    * rounds accepted all that it drafts more often than by chance (`CHANCE`): otherwise each of
      them was rejected exactly there, at the hazard of the other rounds;
    * wall times are known not to rise with accepted tokens more than its drafts explain.  This
      separates a fixed length from a rule that stops by the draft's signals under a cap, which has
      the same accepted lengths.
    """
    longest = max((a for turn in turns for a in turn.accepted), default=0)
    shown: list[tuple[str, list[list[LoggedRound]]]] = []
    refused = ""
    schedules = list(known_schedules(longest))
    tried = len(schedules)
    for done, policy in enumerate(schedules):
        progress("trying schedules of draft lengths", done, tried)
        read = replayed(policy)
        try:
            rounds = [read(turn, first) for turn in turns]
        except FileError:
            continue
        name = describe(policy)
        if isinstance(policy, Fixed):
            name = f"fixed:gamma={policy.gamma}"
        remedy = f"name it with --draft-lengths {name}, or log more requests"
        if _coincidence(rounds) > math.log(CHANCE):
            continue
        unexplained = unexplained_share(turns, rounds, first)
        if unexplained is None:
            refused = refused or (
                f"{name} is not contradicted, but with fewer than {FEWEST_TURNS} requests a "
                "rule that stops by the draft's own signals cannot be told from it: "
                f"{remedy}"
            )
            continue
        share, error = unexplained
        if share + RULED_OUT * error <= UNEXPLAINED:
            shown.append((name, rounds))
        elif share > max(UNEXPLAINED, SIGNIFICANT * error):
            refused = refused or (
                f"{name} is not contradicted round by round, but {share:.0%} of a round's "
                "time goes with the accepted tokens, so the drafts followed the draft's own signals"
            )
        else:
            refused = refused or (
                f"{name} is not contradicted, but the times of these {len(turns)} requests scatter "
                "too much to tell a rule that stops by the draft's own signals from it: "
                f"{remedy}"
            )
    if not shown:
        return Inference(tried, why=refused or "every one is contradicted by a round of the log")
    # The plainest name first: a fixed length, then the one with most of its defaults.
    shown.sort(key=lambda found: (not found[0].startswith("fixed:"), len(found[0])))
    chosen, lengths = shown[0]
    apart = {name: _apart(rounds, lengths) for name, rounds in shown[1:]}
    if others := [name for name, share in apart.items() if share > ALIKE]:
        return Inference(tried, (chosen, *others), "name the right one with --draft-lengths")
    return Inference(tried, (chosen,), also=tuple(apart))


def _apart(mine: Sequence[Sequence[LoggedRound]], theirs: Sequence[Sequence[LoggedRound]]) -> float:
    """Return the share of the rounds in which two schedules draft other lengths."""
    pairs = [
        a.drafted != b.drafted
        for one, other in zip(mine, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(pairs) / max(1, len(pairs))


def known_schedules(longest: int) -> Iterator[DraftPolicy]:
    """Yield every schedule that is a function of past outcomes alone.

    The fixed length `longest`, transformers' heuristic in its versions, from every initial
    length, and the other built-in policies that read no signal, as they come.
    """
    yield Fixed(longest)
    for persist in ("transient", "persistent"):
        for gamma in STARTS:
            for meaning in ("sent", "budget"):
                yield parse_policy(
                    f"hf-heuristic:gamma={gamma},full_accept_means={meaning},persist={persist}"
                )
    for name in policy_names("single"):
        policy = parse_policy(name)
        if not (policy.reads or name in ("oracle", "ucb", "exp3")) and not isinstance(
            policy, Autoregressive | Fixed | Confidence
        ):
            yield policy


def _coincidence(rounds: Sequence[Sequence[LoggedRound]]) -> float:
    """Return the log of the chance that all fully accepted rounds were rejected at their end."""
    flat = np.array([r for turn in rounds for r in turn], dtype=np.int64)
    accepted, drafted = flat[:, 0], flat[:, 1]
    full = drafted[(accepted == drafted) & (drafted > 0)]
    if not full.size:
        return 0.0
    rejected = accepted < drafted
    stops = np.bincount(accepted[rejected], minlength=1)
    # A round was at risk at k if more than k were drafted and k accepted.
    risk = np.array([np.sum((accepted >= k) & (drafted > k)) for k in range(len(stops))])
    seen = np.flatnonzero(risk >= 20)
    if not seen.size:
        return 0.0
    # Beyond what was seen often the last hazards go on, taken together.
    last = seen[-min(3, len(seen)) :]
    beyond = (stops[last].sum() + 1) / (risk[last].sum() + 2)
    hazard = np.full(int(drafted.max()) + 1, beyond)
    hazard[seen] = (stops[seen] + 1) / (risk[seen] + 2)
    return float(np.log(hazard[full]).sum())


def unexplained_share(
    turns: Sequence[LoggedTurn], rounds: Sequence[Sequence[LoggedRound]], first: int
) -> tuple[float, float] | None:
    """Return the share of a round's time that accepted tokens take beyond what drafts explain, and
    its standard error.

    Least squares over the turns, given rounds, drafts and context; None with fewer than
    `FEWEST_TURNS` turns.  With right lengths the share is 0 to within its error.
    """
    if len(turns) < FEWEST_TURNS:
        return None
    wall = np.array([turn.wall_s for turn in turns], dtype=np.float64)
    accepted = np.array([sum(turn.accepted) for turn in turns], dtype=np.float64)
    count = np.array([turn.rounds for turn in turns], dtype=np.float64)
    drafted = np.array([sum(r.drafted for r in turn) for turn in rounds], dtype=np.float64)
    context = np.array([_positions(turn, first) for turn in turns])
    others = np.column_stack([np.ones(len(turns)), count, drafted, context])
    left = _residual(others, accepted)
    power = float(left @ left)
    if power < 1e-9 * float(accepted @ accepted):
        return None
    slope = float(left @ wall) / power
    noise = _residual(np.column_stack([others, accepted]), wall)
    error = math.sqrt(float(noise @ noise) / max(1, len(turns) - 5) / power)
    share = float(accepted.sum()) / float(wall.sum())
    return slope * share, error * share


def _positions(turn: LoggedTurn, first: int) -> float:
    """Return the sum of the output positions at which the rounds of a turn began."""
    steps = np.asarray(turn.accepted, dtype=np.float64) + 1
    return float(first * len(steps) + (np.cumsum(steps) - steps).sum())


def _residual(
    columns: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return `values` less what the columns explain."""
    scale = np.abs(columns).max(axis=0)
    columns = columns / np.where(scale > 0, scale, 1.0)
    found = np.linalg.lstsq(columns, values, rcond=None)[0]
    return np.asarray(values - columns @ found)
