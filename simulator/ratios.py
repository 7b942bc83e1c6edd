"""The ratio model: costs as ratios c of a target pass, a whole range of them priced at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats
from simulator.pricing import Priced
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog


class RatioCosts(NamedTuple):
    """Costs in units of one target pass, of prompts, steps or whatever else takes time.

    The textbook cost model: a target pass costs 1, a draft pass c, a verification of drafts v.
    Arrays of one shape, (units,).
    """

    plain: Floats
    """Plain decoding of the same tokens."""
    forwards: Floats
    """Draft passes, each of which costs c."""
    verified: Floats
    """Verifications of drafts, each of which costs v."""
    rest: Floats
    """Times that neither ratio changes: rounds without drafts, and where they are carried over from
    measured latencies, signals and the host."""

    @classmethod
    def of(cls, emitted: npt.ArrayLike, forwards: npt.ArrayLike, drafts: Bools) -> RatioCosts:
        """Return the costs of rounds or steps, of which `drafts` says which verify drafts."""
        return cls(*(np.asarray(n, np.float64) for n in (emitted, forwards, drafts, ~drafts)))

    def summed(self, add: Callable[[Floats], Floats]) -> RatioCosts:
        """Return the same costs with every array put through `add`."""
        return RatioCosts(*map(add, self))

    def at(self, ratios: npt.ArrayLike, verify: float = 1.0) -> Floats:
        """Return costs at ratios c and one v, shape (ratios, units)."""
        c = np.atleast_1d(np.asarray(ratios, dtype=np.float64))
        return np.multiply.outer(c, self.forwards) + (self.verified * verify + self.rest)


def ratio_costs(log: RoundLog) -> RatioCosts:
    """Return the costs of each request of `log`, shape (requests,)."""
    rounds = log.rounds
    costs = RatioCosts.of(rounds["emitted"], rounds["draft_forwards"], rounds["drafted"] > 0)
    return costs.summed(log.per_request)


class RatioSums(NamedTuple):
    """`RatioCosts` summed over prompts, with the products for intervals.

    A prompt's rounds gain ``gain``: the cost of plain decoding, less the part of their own cost
    that depends on neither c nor v.
    """

    prompts: int
    plain: float
    forwards: float
    rest: float
    verified: float
    gain_gain: float
    gain_verified: float
    gain_forwards: float
    verified_verified: float
    verified_forwards: float
    forwards_forwards: float


class OwnRatios(NamedTuple):
    """A pair's own cost ratios, and the seconds of the target's pass that they are in units of."""

    ratio: float
    """c = T_draft / T_target."""
    verify: float
    """v = T_verify / T_target."""
    target_s: float


def own_ratios(
    trace: Trace, latency: LatencyTable, drafted: int = 1, batch: int = 1
) -> OwnRatios:  # fmt: skip
    """Return c = T_draft / T_target and v = T_verify / T_target at the recording's mean context.

    T_verify is that of `drafted` drafts; all are those of `batch` sequences.
    """
    context = sum(r.prompt_length + r.tokens / 2 for r in trace.requests) / len(trace.requests)
    at = {"batch": batch, "context": context}
    target = float(latency.seconds("target", "forward", **at))
    draft = float(latency.seconds("draft", "forward", **at))
    verify = latency.seconds("target", "forward", new_tokens=drafted + 1, **at)
    if not target > 0:
        return OwnRatios(0.0, 1.0, target)
    return OwnRatios(draft / target, float(verify) / target, target)


def carried_sums(run: Priced, plain: Priced, own: OwnRatios, drafts_at_c: bool = True) -> RatioSums:
    """Return the sums over priced rounds, with all that they cost carried over to other ratios.

    Seconds of drafting (catching up on the draft's cache and longer contexts included) are
    taken as proportional to c, those of verifying drafts to v, and signals, the host and plain
    decoding stay what they are.  Where drafts are free, every draft pass costs the other c.  At
    the pair's own ratios the speedup is then that of the seconds themselves
    (`simulator.summary.summarize`).  Without ``drafts_at_c`` the seconds of
    drafting stay as well: another source drafts than the model that c is the cost of.

    Raises DraftsimError if a ratio or the target's pass of `own` takes no time although the rounds
    did.
    """
    drafts = run.log.rounds["drafted"] > 0
    unit = own.target_s
    others = run.log.per_request(run.signal_s + run.host_s)
    drafting = run.log.per_request(run.draft_s)
    forwards = drafting / ((own.ratio or 1.0) * (unit or 1.0))
    if own.ratio == 0:  # free drafts have no seconds to scale
        forwards = run.log.per_request(run.log.rounds["draft_forwards"])
    if not drafts_at_c:
        others, drafting, forwards = others + drafting, 0 * drafting, 0 * forwards
    verifying, undrafted = (
        run.log.per_request(np.where(mask, run.verify_s, 0.0)) for mask in (drafts, ~drafts)
    )
    for name, ratio, seconds in (
        ("T_target", unit, plain.decode_s), ("c", own.ratio, drafting),
        ("T_verify / T_target", own.verify, verifying),
    ):  # fmt: skip
        if ratio <= 0 < seconds.sum():
            raise DraftsimError(
                f"{name} of this pair is {ratio:g}, from which no other cost ratio can be reached: "
                "give latencies above 0"
            )
    emitted = [float(p.log.rounds["emitted"].sum(dtype=np.int64)) for p in (run, plain)]
    return sums_of(
        RatioCosts(
            # A lossy run's outputs have other lengths: plain decoding of as many tokens.
            plain.decode_s * (emitted[0] / max(emitted[1], 1.0)) / (unit or 1.0),
            forwards,
            verifying / ((own.verify or 1.0) * (unit or 1.0)),
            (undrafted + others) / (unit or 1.0),
        )
    )


def speedup_at(sums: RatioSums, ratios: npt.ArrayLike, verify: float = 1.0) -> Floats:
    """Return the speedup over plain decoding at cost ratios c, shape (ratios,)."""
    parts = (sums.plain, sums.forwards, sums.verified, sums.rest)
    costs = RatioCosts(*(np.array([part]) for part in parts))
    return np.asarray(sums.plain / costs.at(ratios, verify)[:, 0])


def sums_of(costs: RatioCosts) -> RatioSums:
    """Return the sums of costs of prompts, shape (requests,)."""
    plain, forwards, verified, rest = costs
    own = np.stack([plain - rest, verified, forwards])
    products = (own @ own.T)[np.triu_indices(3)]
    totals = (plain.sum(), forwards.sum(), rest.sum(), verified.sum())
    return RatioSums(int((plain > 0).sum()), *(float(n) for n in (*totals, *products)))
