"""``draftsim validate batch``: static batches really decoded, against the simulator's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.options import batch_sizes
from commands.common.output import MEASURE_MORE, note
from commands.validate.flow import CheckedPair, RealRuns, as_recorded
from policies.core import DraftPolicy
from profiler.recording.run import digest_of
from simulator.chosen import load_serving_policies
from simulator.serving.study import predict_groups
from simulator.whatif.ranking import fixed_lengths
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.store.checkpoint import Checkpoint

if TYPE_CHECKING:
    from profiler.checks.spot_check import Measured

BATCH_ARMS = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "confidence", "cm-asd", "gammatune",
    "batch-table", "confidence-freeze",
)  # fmt: skip
"""Policies run where none is named, with those predicted fastest."""


COUNTED = ["drafted", "accepted", "draft_forwards"]
"""Columns of a request's rounds that are compared, besides their number."""


class BatchRuns(RealRuns):
    """Static batches of several sizes.

    ``rounds_differ`` counts requests whose rounds, drafted or accepted tokens were not the
    simulated ones.  A pass is priced as the rectangle that the real decoder runs.

    ``texts_diverged`` counts requests whose output is not the recorded one.  Their rounds are not
    compared, nor those of requests whose batch policy or learning policy has seen them; seconds
    are compared over the groups in which no text diverged under any policy.
    """

    name = "measured_batches"

    def __init__(self, given: CheckedPair, batch: str, forced: bool = False) -> None:
        super().__init__(given, forced=forced)
        self.logs = []
        trace, latency, cells = self.trace, self.latency, self.latency.cells
        self.batches = batch_sizes("--batch", batch)
        measured = cells.query("model == 'target' and phase == 'forward'")["batch"]
        if not latency.is_constant and max(self.batches) > (largest := int(measured.max())):
            raise DraftsimError(
                f"--batch {max(self.batches)} is beyond the largest batch measured, {largest}: "
                "measure it with `draftsim profile latency --batch "
                f"{','.join(map(str, sorted({1, *self.batches})))}`"
            )
        names = given.policy or as_recorded(BATCH_ARMS, trace)
        self.policies = load_serving_policies(names, trace, latency, "static", say=note)
        if not given.policy:
            self.policies |= fastest_by_batch(trace, latency, self.batches, self.policies)
        self.groups, self.requests = predict_groups(trace, latency, self.policies, self.batches)
        predicted = {
            f"{name} {size}": digest_of({"rounds": frame[["rounds", *COUNTED]].to_numpy().tolist()})
            for (name, size), frame in self.requests.items()
        }
        self.conditions = {"batches": self.batches, "forced": forced, "predicted": predicted}

    @property
    def total(self) -> int:
        """Runs of a policy over a group."""
        from profiler.checks.spot_check import groups_of

        groups = sum(len(groups_of(len(self.chosen), size)) for size in self.batches)
        return self.given.repeats * len(self.policies) * groups

    def decode(self, kept: Checkpoint, advance: Callable[[], None]) -> Measured:
        """Decode group by group."""
        from profiler.checks.spot_check import run_batches

        return run_batches(
            self.pair, self.trace, self.planned, batches=self.batches, forced=self.forced,
            repeats=self.given.repeats, advance=advance, kept=kept,
        )  # fmt: skip

    def times(self, measured: Measured) -> pd.DataFrame:
        """Return the times of groups in which no text diverged under any policy."""
        import torch

        from profiler.checks.differences import divergences

        trace, count = self.trace, len(self.trace.requests)
        dtype = getattr(torch, str(self.pair.meta["dtype"]))
        self.diverged = {
            key: {} if self.forced else divergences(trace, outputs, dtype)
            for key, outputs in measured.outputs.items()
        }
        self.out = {size: groups_left_out(self.diverged, size, count) for size in self.batches}
        ids = {(size, trace.requests[i].id) for size, firsts in self.out.items() for i in firsts}
        told = measured.times[["batch", "request"]].to_numpy()
        return measured.times[[(b, r) not in ids for b, r in told]].reset_index(drop=True)

    def predicted(self, measured: Measured, latency: LatencyTable) -> pd.DataFrame:
        """Return the simulated groups."""
        del measured, latency
        return self.groups

    def compared(self, rows: pd.DataFrame, measured: Measured, progress: Any) -> pd.DataFrame:
        """Compare the requests one by one."""
        from profiler.checks.differences import with_diverged

        del progress
        keys, count = list(zip(rows["policy"], rows["batch"], strict=True)), len(self.chosen)
        rows["rounds_differ"] = [
            requests_differ(
                measured.logs[name, size], self.requests[name, size],
                unlike(self.diverged[name, size], self.policies[name], size, count),
            )
            for name, size in keys
        ]  # fmt: skip
        if not self.forced:
            rows = with_diverged(rows, [[*self.diverged[key].values()] for key in keys], 0)
            rows["requests_left_out"] = [
                sum(min(size, count - first) for first in self.out[size]) for _, size in keys
            ]
        if outside := sum(frame.attrs["extrapolated"] for frame in self.requests.values()):
            note(
                f"{outside} predicted passes lie outside the measured sizes, priced by a fitted "
                f"roofline; {MEASURE_MORE}"
            )
        return rows.sort_values("batch", kind="stable", ignore_index=True)


def fastest_by_batch(
    trace: Trace, latency: LatencyTable, batches: Sequence[int], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the policies predicted fastest at a size, but for those `known`; a note names them."""
    lengths = fixed_lengths(trace.max_gamma)
    every = load_serving_policies([*lengths, "all"], trace, latency, "static")
    predicted, _ = predict_groups(trace, latency, every, batches)
    seconds = predicted.groupby(["batch", "policy"])["predicted_s"].sum().unstack("policy")
    best = dict(zip(seconds.index.tolist(), seconds.idxmin(axis=1).tolist(), strict=True))
    found = {str(name): every[str(name)] for name in best.values() if name not in known}
    for name in found:
        at = ", ".join(str(batch) for batch, own in best.items() if own == name)
        note(f"also decoding {name}, which is predicted to be the fastest at batch {at}")
    return found


def groups_left_out(
    diverged: Mapping[tuple[str, int], Collection[int]], size: int, requests: int
) -> set[int]:
    """Return the first request of each group of `size` in which a text diverged under any policy.

    Empty if that is every group.
    """
    firsts = {i - i % size for (_, at), own in diverged.items() if at == size for i in own}
    return firsts if len(firsts) < math.ceil(requests / size) else set()


def unlike(diverged: Collection[int], policy: Any, size: int, requests: int) -> set[int]:
    """Return the requests whose rounds are not those of the recording.

    They are the `diverged` ones and, where a policy decides for a batch or remembers earlier
    requests, all from the first such group on.
    """
    if not diverged or (isinstance(policy, DraftPolicy) and not policy.learns_across_requests):
        return set(diverged)
    first = min(diverged)
    return set(range(first - first % size, requests))


def requests_differ(real: RoundLog, simulated: pd.DataFrame, skipped: Collection[int] = ()) -> int:
    """Count requests whose rounds, drafted, accepted tokens or draft passes differ in number."""
    simulated = simulated.drop(index=list(skipped))
    rounds = pd.DataFrame(real.rounds)
    sums = rounds.groupby("request")[COUNTED].sum().reindex(simulated.index, fill_value=0)
    sums["rounds"] = rounds.groupby("request").size().reindex(simulated.index, fill_value=0)
    own = simulated[[*COUNTED, "rounds"]]
    return int((sums[own.columns].to_numpy() != own.to_numpy()).any(axis=1).sum())
