"""Published numbers and ours, one row per cell of a table; and our side of the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from policies.core import DraftPolicy
from policies.registry import describe
from policies.rules.base import VerifyRule
from simulator.pricing import Priced, autoregressive, price
from simulator.published import TABLES, PaperTable
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import PHASES, LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.methods import Method, build
from traces.sources.recording import Recordings
from traces.store.outputs import Quality, RealRun, find_run, quality

Kind = Literal["same quantity", "same experiment on our pair", "needs their weights"]
"""How a row's two numbers relate: computed from the paper's own published numbers; the same
experiment with another pair of models, so that shapes compare and values need not; or ours
missing, because only the paper's models could tell."""

QUANTITY: Kind = "same quantity"
EXPERIMENT: Kind = "same experiment on our pair"
WEIGHTS: Kind = "needs their weights"


class Row(NamedTuple):
    """One cell."""

    table: str
    row: str
    column: str
    published: float | None
    ours: float | None
    kind: Kind
    note: str = ""
    """How ours was got, or what is wrong with the published number."""
    mark: str = ""
    """Reason why the run of our value is degenerate (`simulator.summary`)."""


def missing_rows(table: PaperTable, done: list[Row]) -> list[Row]:
    """Return rows for the cells that `done` does not compare: they need the paper's models."""
    compared = {(row.row, row.column) for row in done if row.table == table.name}
    return [
        Row(table.name, row, column, value, None, WEIGHTS)
        for row, values in table.cells.items()
        for column, value in zip(table.columns, values, strict=True)
        if value is not None and (row, column) not in compared
    ]


def experiment(
    table: str, row: str, column: str, ours: float | None, note: str = "",
    published: float | None = None, mark: str = "",
) -> Row:  # fmt: skip
    """Return a cell of the papers' experiment on our pair.

    Without `published` the number is that of the paper's table, if it has such a cell.
    """
    paper = TABLES.get(table)
    if published is None and paper is not None and row in paper.cells and column in paper.columns:
        published = paper.value(row, column)
    return Row(table, row, column, published, ours, EXPERIMENT, note, mark)


REAL, REPLAYED = "decoded for real under the rule", "replayed along the recorded text: approximate"


@dataclass(frozen=True, eq=False)
class Ours:
    """A recording of a pair, its latencies, and what else was recorded of it."""

    trace: Trace
    latency: LatencyTable
    runs: Sequence[RealRun] = ()
    """Real runs under lossy rules, preferred to a replay."""
    recordings: Recordings = field(default_factory=dict)
    """Early exits and the like."""
    sampled: Sequence[tuple[Trace, Recordings]] = ()
    """Sampled outputs of the pair and their early exits, at most one of each `Sampling`."""
    _plain: dict[tuple[Any, ...], Priced] = field(default_factory=dict, init=False)

    def plain(self, log: RoundLog) -> Priced:
        """Return plain decoding of the requests of `log`, priced once for each set of them.

        Outputs that were sampled cost draws, which greedy ones of the same lengths do not.
        """
        key = log.first, log.sampling, *((r.id, r.prompt_length, r.tokens) for r in log.requests)
        if key not in self._plain:
            self._plain[key] = price(autoregressive(log), self.latency)
        return self._plain[key]

    def ran(self, log: RoundLog, how: str = "", quality: Quality | None = None) -> MethodOutcome:
        """Return the run of a method with these rounds; ``how`` they were got, by default replayed.

        Raises DraftsimError if a part of a round was not timed.
        """
        priced, how = price(log, self.latency), how or f"replayed: {log.fidelity}"
        extras = {PHASES[phase].extra for phase in priced.extras} - {"signal"}
        if lacks := extras.intersection(priced.unpriced(self.latency)):
            parts = " and ".join(sorted(lacks))
            how += f"; {parts} time not included: these latencies were measured without it"
        return MethodOutcome(priced, self.plain(log).total_s, how, quality)


@dataclass(frozen=True, eq=False)
class MethodOutcome:
    """One method on our pair."""

    priced: Priced
    plain_s: float
    """Decode seconds of plain decoding on the same requests."""
    how: str
    """How the numbers were obtained, for a row's note."""
    quality: Quality | None = None
    """Only of real runs: a replay has no text of its own."""

    @property
    def log(self) -> RoundLog:
        """Its rounds."""
        return self.priced.log

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per verification."""
        return float(self.log.rounds["emitted"].mean())

    @property
    def accepted_per_round(self) -> float:
        """Accepted drafts per verification."""
        return float(self.log.rounds["accepted"].mean())

    @property
    def rollback_rate(self) -> float:
        """Share of the rounds that drafted of which drafts were thrown away."""
        rounds = self.log.rounds[self.log.rounds["drafted"] > 0]
        return float((rounds["accepted"] < rounds["drafted"]).mean())

    @property
    def mismatched_share(self) -> float:
        """Share of the accepted drafts that the target would not have chosen."""
        wrong = 0 if self.log.mismatched is None else int(self.log.mismatched.sum())
        return wrong / max(int(self.log.rounds["accepted"].sum()), 1)

    @property
    def speedup(self) -> float:
        """Speedup: seconds per token of plain decoding over its own."""
        return self.plain_s / self.priced.total_s


def outcome(
    ours: Ours, policy: DraftPolicy, rule: VerifyRule | None = None, trace: Trace | None = None
) -> MethodOutcome:
    """Return a method's run: the real one where it was recorded on these requests, else a replay.

    ``trace`` is a part of ``ours.trace`` to run on; by default all of it.
    Raises what `traces.replay.run.replay` raises.
    """
    trace = ours.trace if trace is None else trace
    lossy = rule is not None and not rule.lossless
    run = find_run(ours.runs, policy, rule, trace) if rule is not None and lossy else None
    if run is not None:
        return ours.ran(run.log, REAL, quality(run.outputs, ours.trace))
    [log] = replay_many(trace, [(describe(policy), policy)], rule=rule)
    return ours.ran(log, REPLAYED if lossy else "")


def method_outcome(
    ours: Ours, chosen: Method, trace: Trace | None = None, **resources: object
) -> MethodOutcome:
    """Return a named method's run; ``resources`` go to its rule."""
    try:
        policy, rule = build(chosen, ours.trace, **resources)
    except ValueError as error:
        raise DraftsimError(str(error)) from None
    return outcome(ours, policy, rule, trace)


def quality_note(seen: Quality) -> str:
    """Return how far outputs are from the target's own, in words."""
    said = (
        f"{seen.agreement:.0%} of tokens agree with greedy output; log-likelihood "
        f"{seen.log_likelihood:.2f} nats a token, greedy {seen.reference_log_likelihood:.2f}"
    )
    return f"{said}; {seen.score}" if seen.score else said
