"""The ranking of policies: which are replayed, which is fastest, and the rows that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from policies.batch.base import Policy
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive, Fixed, Oracle
from policies.registry import PLAIN, is_bound
from policies.rules.base import VerifyRule
from simulator import summary
from simulator.chosen import (
    Named,
    is_default,
    is_unfitted,
    load_policies,
    named,
    say_left_out,
)
from simulator.pricing import Priced, price
from simulator.whatif.ladder import GAMMAS, split_prompts
from simulator.whatif.rate import Estimates, RateFit, fit_rate_optimal
from traces.acceptance.trace import Trace
from traces.aliases import Count, Row, Say, silent
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.methods import said_of
from traces.sources.replay import check_layers

LOWER_BOUND = "lower bound"
"""Note on a row from a log that does not tell its draft lengths."""
BEST_FIXED = "best fixed"
"""Said of the fastest fixed draft length, chosen in hindsight on the prompts it is shown for."""
FITTED = "fitted on other prompts"
UNFITTED = "unfitted"
"""Said of a rate-optimal rule with the estimates and the rate it comes with."""
TEXTBOOK = "weighs a draft pass as a tenth of a target pass"
"""Said of a policy that weighs costs, where those of its source have no such form."""
FEWEST_PROMPTS = 4
"""Prompts from which a rule is fitted to one half and judged on the other."""
LOSSLESS = ("exact", "rejection-sampling")
"""Verification under which the output is the target's own."""


def winner(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the fastest row that one could run; None if there is none.

    Every table and page recommends this one.  ``rows`` have the keys ``policy``, ``verify``,
    ``speedup`` and ``fidelity`` (`simulator.summary.SUMMARY_COLUMNS`).  Rules that change the
    text are left out, and so are lower bounds, among which the largest need not be the best.
    """
    able = [
        i for i, row in enumerate(rows)
        if row["verify"] in LOSSLESS and not is_bound(row["policy"]) and row["policy"] != PLAIN
        and row.get("source") != "none"  # a draft length of 0 is no speculation, too
        and row["speedup"] is not None and row["fidelity"] != LOWER_BOUND
    ]  # fmt: skip
    return max(able, key=lambda i: rows[i]["speedup"]) if able else None


def fixed_lengths(longest: int | None) -> dict[str, DraftPolicy]:
    """Return every fixed draft length up to `longest`, by name."""
    return {f"fixed:gamma={g}": Fixed(g) for g in GAMMAS if g <= (longest or g)}


def is_fixed(log: RoundLog) -> bool:
    """Return True if a log is of a fixed draft length that its name tells."""
    return log.policy.startswith("fixed:gamma=")


def fastest(logs: Sequence[RoundLog], latency: LatencyTable) -> RoundLog:
    """Return the log of fewest seconds per emitted token, the first of equals.

    Raises DraftsimError if there is no log.
    """
    if not logs:
        raise DraftsimError("no round log was given: name at least one policy")
    return min(
        logs, key=lambda log: price(log, latency).total_s / max(int(log.rounds["emitted"].sum()), 1)
    )


def cross_fitted_rule(
    trace: Trace, latency: LatencyTable, name: str = "rate-optimal", gamma_max: int | None = None
) -> RoundLog | None:
    """Return the trace under the rate-optimal rule, every prompt under one fitted to other prompts.

    Each half of the prompts (`simulator.whatif.ladder.split_prompts`) is replayed under the
    rule that `simulator.whatif.rate.fit_rate_optimal` finds on the other half.  Where the
    halves would read other estimates, both take the kind that all prompts choose, so that one
    log has one price of reading.  None with fewer than `FEWEST_PROMPTS` prompts, or where the rule
    cannot be fitted.
    """
    if len(trace.requests) < FEWEST_PROMPTS:
        return None
    halves = split_prompts(trace)

    def fit(prompts: Sequence[int] | None, estimates: Estimates = "auto") -> RateFit:
        return fit_rate_optimal(trace, latency, prompts, estimates=estimates, gamma_max=gamma_max)

    parts, logs = [], []
    try:
        fits = [fit(half) for half in halves]
        if fits[0].estimates != fits[1].estimates:
            kind = cast(Estimates, fit(None).estimates)
            fits = [fit(half, kind) for half in halves]
        for found, held_out in zip(fits, reversed(halves), strict=True):
            [log] = replay_many(trace.select(held_out), {name: found.policy})
            rounds = log.rounds.copy()
            rounds["request"] = np.array(held_out)[rounds["request"]]
            parts.append(rounds)
            logs.append(log)
    except DraftsimError:
        return None
    joined = np.concatenate(parts)
    order = np.argsort(joined["request"], kind="stable")
    return replace(logs[0], rounds=joined[order], requests=trace.requests)


def are_bounds(rows: Sequence[Row]) -> bool:
    """Return True if speedups are lower bounds, of which the largest need not be the best."""
    return any(row["fidelity"] == LOWER_BOUND for row in rows)


def lossless(verify: str) -> bool:
    """Return whether the output under a rule, named as in rows, is the target's own."""
    return verify in LOSSLESS


def is_called(row: Mapping[str, Any], name: str) -> bool:
    """Return True if `name` is a row's policy, or its policy and rule as POLICY+RULE."""
    return name in (row["policy"], f"{row['policy']}+{row['verify']}")


@dataclass(frozen=True)
class Ranking:
    """Logs to rank, and what has to be said of some of them, by policy name."""

    logs: list[RoundLog]
    notes: Mapping[str, str] = field(default_factory=dict)
    added: RoundLog | None = None
    """The log of the best fixed length, where policies were named and it is not among them."""

    def noted(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of a summary, with a ``note`` in those of a log that has one."""
        told = {(log.policy, log.verify, log.source) for log in self.logs}
        return [
            {**row, "note": self.notes.get(row["policy"]) if summary.row_key(row) in told else None}
            for row in rows
        ]


def rank(
    trace: Trace, latency: LatencyTable,
    texts: Sequence[str | Policy] | None, rule: VerifyRule | None = None,
    say: Say = silent,
) -> Ranking:  # fmt: skip
    """Replay the policies of `texts` (none or ``all``: every one), to be ranked.

    ``rate-optimal`` is fitted to the recording and the latencies: on each half of the prompts, and
    judged on the other.  If that is impossible, or a lossy `rule` accepts other tokens, a note says
    that it is not fitted.  The fastest fixed draft length is ranked, too, whatever the texts name.
    `say` is called with what was left out.

    Where the trace is a lower bound alone (`Trace.is_lower_bound`) nothing is fitted or chosen,
    and every row says so.
    """
    lacking: dict[str, DraftPolicy] = {}
    loaded = load_policies(texts, trace, say=say, lacking=lacking, latency=latency)
    chosen = without_plain(named(loaded))
    if trace.is_lower_bound:
        say_left_out(lacking, trace.signals, say)
        # The best of bounds is not the best: least wrong is the policy that made the log.
        bounds = list(replay_many(trace, chosen, rule=rule))
        return Ranking(bounds, {log.policy: LOWER_BOUND for log in bounds})
    notes: dict[str, str] = {}
    found: dict[int, RoundLog] = {}
    for i, (name, policy) in enumerate(chosen):
        if is_default(policy) and rule is None:
            fitted = cross_fitted_rule(trace, latency, name, policy.gamma_max)
            if fitted is not None:
                found[i] = fitted
                notes[name] = FITTED
                continue
        if is_unfitted(policy):
            notes[name] = UNFITTED
    rest = [i for i in range(len(chosen)) if i not in found]
    found |= zip(rest, list(replay_many(trace, [chosen[i] for i in rest], rule=rule)), strict=True)
    logs = [found[i] for i in range(len(chosen))]
    every = not texts or "all" in texts
    if every and rule is None and not any(name.startswith("rate-optimal") for name, _ in chosen):
        # As it comes it reads a signal, which this recording lacks; fitted it need not.
        fitted = cross_fitted_rule(trace, latency)
        if fitted is not None:
            logs.append(fitted)
            notes[fitted.policy] = FITTED
            lacking.pop("rate-optimal", None)
    say_left_out(lacking, trace.signals, say)
    return with_best_fixed(
        Ranking(logs, notes), latency, trace.max_gamma,
        lambda some: list(replay_many(trace, some, rule=rule)), every,
    )  # fmt: skip


def with_best_fixed(
    ranking: Ranking,
    latency: LatencyTable,
    longest: int | None,
    replayed: Callable[[Named], list[RoundLog]],
    every: bool,
) -> Ranking:
    """Return `ranking` with the fastest fixed draft length, up to `longest`, as `replayed` runs it.

    Longer ones that are ranked already are among those it is chosen from.
    If `every` policy is ranked it follows the fixed length that is there by default; otherwise it
    comes last, and a recording that cannot tell it goes without.
    """
    try:
        usual = replayed([*fixed_lengths(longest).items()])
        named_too = [log for log in ranking.logs if is_fixed(log) and log.source == usual[0].source]
        best = fastest([*usual, *named_too], latency)
    except DraftsimError:
        if every:
            raise
        return ranking
    logs, notes = list(ranking.logs), {**ranking.notes, best.policy: BEST_FIXED}
    if (best.policy, best.source) in ((log.policy, log.source) for log in logs):
        return Ranking(logs, notes)
    fixed = (i for i, log in enumerate(logs, 1) if log.policy.startswith("fixed:"))
    logs.insert(next(fixed, len(logs)) if every else len(logs), best)
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

    Left out are those that cannot decode for real: the oracle, and a rule that is fitted to
    nothing.  ``longest`` and ``replayed`` are those of `with_best_fixed`.
    """
    real = {
        name: policy for name, policy in named(chosen)
        if not (
            type(policy) is Autoregressive or isinstance(policy, Oracle) or is_unfitted(policy)
        )
    }  # fmt: skip
    real |= fixed_lengths(longest)
    best = fastest(replayed(list(real.items())), latency)
    return Fastest(best.policy, real[best.policy], best)


def fastest_for_real(trace: Trace, latency: LatencyTable) -> Fastest:
    """Return what `rank` puts first of all that can decode for real.

    Where that is the rate-optimal rule, it is fitted to all prompts.
    """
    best = predicted_fastest(
        latency, load_policies(None, trace, latency=latency), trace.max_gamma,
        lambda some: list(replay_many(trace, some)),
    )  # fmt: skip
    rule = cross_fitted_rule(trace, latency)
    if rule is not None and fastest([best.log, rule], latency) is rule:
        return Fastest(rule.policy, fit_rate_optimal(trace, latency).policy, rule)
    return best


def with_fastest(chosen: Named, best: Fastest, say: Say) -> Named:
    """Return the policies of a check with the predicted fastest among them; `say` is told of it."""
    if best.name in dict(chosen):
        return chosen
    say(f"also decoding {best.name}, which is predicted to be the fastest")
    return [*chosen, (best.name, best.policy)]


def without_plain(chosen: Named) -> Named:
    """Return the policies without plain decoding, the first row of every summary already."""
    return [c for c in chosen if c[0] != PLAIN] or chosen


def ranked_rows(
    ranking: Ranking, latency: LatencyTable, trace: Trace,
    logs: Sequence[RoundLog] | None = None, *, against: str | None = None, resamples: int = 2000,
    prefill: bool = False, by_category: bool = False, progress: Count = silent,
) -> list[Row]:  # fmt: skip
    """Return a row for plain decoding and one for each of `logs`, by default the ranking's own.

    Their outputs are in `trace`.  With ``by_category`` rows of every category follow, whose gains
    are None: a category holds few prompts.  `progress` is that of `simulator.summary.price_all`,
    the other options and errors those of `compared`.
    """
    logs = ranking.logs if logs is None else logs
    # No speculation is the first row already.
    logs = [log for log in logs if log.policy != PLAIN] or logs
    for log in logs:
        check_layers(log, trace, latency)
    runs = summary.price_all(logs, latency, progress=progress)

    def made(by_category: bool) -> list[Row]:
        frame = summary.summarize_runs(
            runs, resamples=resamples, prefill=prefill, by_category=by_category
        )
        return ranking.noted(summary.to_rows(frame))

    overall = compared(made(False), runs, latency, against, resamples, prefill)
    if not by_category:
        return overall
    of_all = {summary.row_key(row): row for row in overall}
    blank = dict.fromkeys(("against", "gain", "gain_lo", "gain_hi"))
    return [{"category": None, **row} for row in overall] + [
        {**of_all[summary.row_key(row)], **blank, **row} for row in made(True)
    ]


def compared(
    rows: Sequence[Row], runs: Sequence[Priced], latency: LatencyTable, against: str | None,
    resamples: int, prefill: bool = False,
) -> list[Row]:  # fmt: skip
    """Return the rows of `runs` (plain decoding first) with their gains, notes and coverage.

    ``against`` names the row that ``gain`` compares with (`is_called`, or the only one of that name
    with more parameters), tokens per second over its own with the paired interval over prompts; by
    default the best fixed length, where there is one.
    A policy's name alone is its lossless row if there is one.
    ``outside`` is the share of passes read outside the measured cells, ``unpriced`` what the
    table has no cells of, ``mismatches_accepted`` a lossy rule's leniency.

    Raises DraftsimError if `against` names no row, or several, or would compare lower bounds.
    """
    rival = next((i for i, r in enumerate(rows) if r.get("note") == BEST_FIXED), None)
    if against is not None:
        if are_bounds(rows):
            raise DraftsimError(
                f"--against {against}: lower bounds cannot be compared: import the log with "
                "--draft-lengths"
            )
        named = [i for i, row in enumerate(rows) if is_called(row, against)]
        named = [i for i in named if lossless(rows[i]["verify"])] or named
        # A default that the recording's limit lowers is part of a row's name (`bounded`).
        longer = [
            r["policy"] for r in rows if r["policy"].startswith((f"{against}:", f"{against},"))
        ]
        if not named and longer:
            if len(set(longer)) > 1:
                raise DraftsimError(
                    f"--against {against} names {len(longer)} rows: write one, such as {longer[0]}"
                )
            return compared(rows, runs, latency, longer[0], resamples, prefill)
        if not named:
            raise DraftsimError(
                f"--against {against}: not among the policies shown: add --policy {against}"
            )
        rival = named[0]
        if len({rows[i]["verify"] for i in named}) > 1:
            raise DraftsimError(
                f"--against {against} names {len(named)} rows: write one as POLICY+RULE, such as "
                f"{against}+{rows[rival]['verify']}"
            )
    told = ["", *summary.degenerate([run.log for run in runs[1:]])]
    gains = (
        [] if rival is None
        else summary.gains_over(runs[rival], runs, resamples=resamples, prefill=prefill)
    )  # fmt: skip
    found = []
    for i, (row, run, said) in enumerate(zip(rows, runs, told, strict=True)):
        more: Row = {
            "outside": run.outside_with(prefill), "unpriced": run.unpriced(latency, prefill),
            "mismatches_accepted": summary.accepted_mismatches(run.log), "against": None,
            "gain": None, "gain_lo": None, "gain_hi": None,
        }  # fmt: skip
        if rival is not None and i != rival:
            known = gains[i].columns("gain").items()
            more |= {name: value if math.isfinite(value) else None for name, value in known}
            more["against"] = against or rows[rival]["policy"]
        what = said_of(row["policy"], lossless(row["verify"]))
        notes = [text for text in (row.get("note"), what, said) if text]
        found.append({**row, **more, "note": "; ".join(notes) or None})
    return found
