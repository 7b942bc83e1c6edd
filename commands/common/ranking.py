"""The logs that a ranking holds: policies as named, the best fixed length, a fitted rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from commands.common.inputs import load_policies, replay_all, say_left_out
from commands.common.output import note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from policies.lengths.rate_optimal import RateOptimal
    from policies.rules.base import VerifyRule
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

Named = list[tuple[str, "DraftPolicy"]]


@dataclass(frozen=True)
class Ranking:
    """Logs to rank, and what has to be said of some of them, by policy name."""

    logs: list[RoundLog]
    notes: Mapping[str, str] = field(default_factory=dict)
    added: RoundLog | None = None
    """That of the best fixed length, where policies were named and it is none of them."""

    def noted(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of a summary with a ``note`` in those of a log that has one."""
        told = {(log.policy, log.verify, log.source) for log in self.logs}
        return [
            {**row, "note": self.notes.get(row["policy"])
             if (row["policy"], row["verify"], row["source"]) in told else None}
            for row in rows
        ]  # fmt: skip


def rank(
    trace: Trace, latency: LatencyTable, texts: Sequence[str] | None,
    rule: VerifyRule | None = None,
) -> Ranking:  # fmt: skip
    """The policies of `texts` (none or ``all``: every one) replayed, to be ranked.

    ``rate-optimal`` is fitted to the recording and the latencies, each half of the prompts
    judging what the other one gave; where that cannot be done, or a lossy `rule` accepts other
    tokens than it would be fitted to, it is noted as unfitted.  The fixed draft length that is
    fastest here is ranked, too, whatever the texts name.

    Where the trace is a lower bound alone (`Trace.is_lower_bound`) nothing is fitted or chosen,
    and every row says so.
    """
    from simulator.whatif.ranking import FITTED, LOWER_BOUND, UNFITTED

    lacking: dict[str, DraftPolicy] = {}
    chosen = without_plain(named(load_policies(texts, trace, lacking=lacking)))
    if trace.is_lower_bound:
        say_left_out(lacking, trace.signals)
        # The best of bounds is not the best: least wrong is the policy behind the log.
        bounds = replay_all(trace, chosen, rule=rule)
        return Ranking(bounds, {log.policy: LOWER_BOUND for log in bounds})
    notes: dict[str, str] = {}
    found: dict[int, RoundLog] = {}
    for i, (name, policy) in enumerate(chosen):
        if is_default(policy) and rule is None:
            fitted = fitted_log(trace, latency, name, policy.gamma_max)
            if fitted is not None:
                found[i] = fitted
                notes[name] = FITTED
                continue
        if is_unfitted(policy):
            notes[name] = UNFITTED
    rest = [i for i in range(len(chosen)) if i not in found]
    found |= zip(rest, replay_all(trace, [chosen[i] for i in rest], rule=rule), strict=True)
    logs = [found[i] for i in range(len(chosen))]
    every = not texts or "all" in texts
    if every and rule is None and not any(name.startswith("rate-optimal") for name, _ in chosen):
        # As it comes it reads a signal, which this recording lacks; fitted it need not.
        fitted = fitted_log(trace, latency)
        if fitted is not None:
            logs.append(fitted)
            notes[fitted.policy] = FITTED
            lacking.pop("rate-optimal", None)
    say_left_out(lacking, trace.signals)
    return with_best_fixed(
        Ranking(logs, notes), latency, trace.max_gamma,
        lambda some: replay_all(trace, some, rule=rule), every,
    )  # fmt: skip


def fitted_log(
    trace: Trace, latency: LatencyTable, name: str = "rate-optimal", gamma_max: int | None = None
) -> RoundLog | None:
    """The rate-optimal rule fitted across the halves of the prompts; None where it cannot be."""
    from simulator.whatif.ranking import cross_fitted_rule

    try:
        return cross_fitted_rule(trace, latency, gamma_max=gamma_max, name=name)
    except DraftsimError:
        return None  # too few prompts, or a rule that cannot be fitted to them


def with_best_fixed(
    ranking: Ranking,
    latency: LatencyTable,
    longest: int | None,
    replayed: Callable[[Named], list[RoundLog]],
    every: bool,
) -> Ranking:
    """Return `ranking` with the fastest fixed draft length, up to `longest`, as `replayed` runs it.

    It comes beside the fixed length that is there by default where `every` policy is ranked, and
    behind those that were named where not; then a recording that cannot tell it goes without.
    """
    from policies.lengths.basic import Fixed
    from simulator.whatif.ladder import GAMMAS
    from simulator.whatif.ranking import BEST_FIXED, fastest

    lengths = [g for g in GAMMAS if g <= (longest or g)]
    try:
        best = fastest(replayed([(f"fixed:gamma={g}", Fixed(g)) for g in lengths]), latency)
    except DraftsimError:
        if every:
            raise
        return ranking
    logs, notes = list(ranking.logs), {**ranking.notes, best.policy: BEST_FIXED}
    if best.policy in (log.policy for log in logs):
        return Ranking(logs, notes)
    fixed = (i for i, log in enumerate(logs) if log.policy.startswith("fixed:"))
    logs.insert(next(fixed, -1) + 1 if every else len(logs), best)
    return Ranking(logs, notes, None if every else best)


class Fastest(NamedTuple):
    """A policy predicted to be the fastest of several."""

    name: str
    policy: DraftPolicy
    log: RoundLog


def predicted_fastest(
    latency: LatencyTable,
    chosen: Named,
    longest: int | None,
    replayed: Callable[[Named], list[RoundLog]],
) -> Fastest:
    """Return the fastest of `chosen` and of all fixed draft lengths.

    Only of those that can decode for real: not the oracle, nor a rule that is fitted to nothing.
    ``longest`` and ``replayed`` are as of `with_best_fixed`.
    """
    from policies.lengths.basic import Autoregressive, Fixed, Oracle
    from simulator.whatif.ladder import GAMMAS
    from simulator.whatif.ranking import fastest

    real = {
        name: policy for name, policy in named(chosen)
        if not isinstance(policy, Autoregressive | Oracle) and not is_unfitted(policy)
    }  # fmt: skip
    real |= {f"fixed:gamma={g}": Fixed(g) for g in GAMMAS if g <= (longest or g)}
    best = fastest(replayed(list(real.items())), latency)
    return Fastest(best.policy, real[best.policy], best)


def fastest_for_real(trace: Trace, latency: LatencyTable) -> Fastest:
    """Return what `rank` puts first of all that can decode for real.

    Where that is the rate-optimal rule, it is fitted to all prompts.
    """
    from simulator.whatif.ranking import fastest
    from simulator.whatif.rate import fit_rate_optimal

    best = predicted_fastest(
        latency, load_policies(None, trace, say=False), trace.max_gamma,
        lambda some: replay_all(trace, some),
    )  # fmt: skip
    rule = fitted_log(trace, latency)
    if rule is not None and fastest([best.log, rule], latency) is rule:
        return Fastest(rule.policy, fit_rate_optimal(trace, latency).policy, rule)
    return best


def with_fastest(chosen: Named, best: Fastest) -> Named:
    """Return the policies of a check with the predicted fastest among them; a note names it."""
    if best.name in dict(chosen):
        return chosen
    note(f"also decoding {best.name}, which is predicted to be the fastest")
    return [*chosen, (best.name, best.policy)]


def named(chosen: Named) -> Named:
    """Return `chosen` with the draft length in the name of a fixed one left at its default."""
    from policies.lengths.basic import Fixed

    return [
        (f"fixed:gamma={p.gamma}" if isinstance(p, Fixed) and name == "fixed" else name, p)
        for name, p in chosen
    ]


def without_plain(chosen: Named) -> Named:
    """The policies without plain decoding, the first row of every summary already."""
    return [c for c in chosen if c[0] != "autoregressive"] or chosen


def is_unfitted(policy: object) -> bool:
    """Return True if this is the rate-optimal rule, and nothing is fitted to a recording."""
    from policies.lengths.rate_optimal import RateOptimal

    return isinstance(policy, RateOptimal) and policy.cost is None


def is_default(policy: object) -> TypeGuard[RateOptimal]:
    """Return True if this is the rate-optimal rule with its defaults, except its longest draft."""
    from policies.lengths.rate_optimal import RateOptimal
    from policies.spec import parameters

    if not isinstance(policy, RateOptimal):
        return False
    settings = {k: p.default for k, p in parameters(RateOptimal).items() if k != "gamma_max"}
    return all(getattr(policy, key) == value for key, value in settings.items())
