"""``draftsim validate --batch``: static batches really decoded, against the simulator's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from commands.common.options import batch_sizes
from commands.common.output import note
from commands.common.progress import progress_bar
from commands.common.quiet import AGAIN, say_machine, with_machine
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

BATCH_ARMS = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "confidence", "cm-asd", "gammatune",
    "batch-table", "confidence-freeze",
)  # fmt: skip
"""Policies run where none is named, with those predicted fastest."""


def batch_check(
    run: Path,
    policy: list[str] | None,
    batch: str,
    forced: bool = False,
    repeats: int = 3,
    limit: int | None = None,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Return the rows of ``validate --batch``; the measured times are kept in the run folder.

    ``rounds_differ`` counts requests whose rounds, drafted or accepted tokens were not the
    simulated ones.  A pass is priced as the rectangle that the real decoder runs.

    ``texts_diverged`` counts requests whose output is not the recorded one.  Their rounds are not
    compared, nor those of requests whose batch policy or learning policy has seen them; seconds
    are compared over the groups in which no text diverged under any policy.
    """
    import torch

    from commands.validate.spot_check import as_recorded, check_ids, spread_over_categories
    from commands.validate.texts import with_diverged
    from profiler.checks.batch_runs import BatchArm, groups_of, run_batches
    from profiler.checks.differences import divergences
    from profiler.recording.run import read_run
    from simulator.chosen import load_serving_policies
    from simulator.serving.groups import predict_groups
    from simulator.validation import compare
    from traces.store.files import read_latency, read_trace
    from traces.store.measured import MeasuredRuns, write_measured

    info = read_run(run, trust_remote_code)
    trace, latency = read_trace(run / "trace.parquet"), read_latency(run / "latency.parquet")
    check_ids(trace)
    batches = batch_sizes("--batch", batch)
    _check_measured(latency, batches)
    if limit is not None:
        trace = trace.select(spread_over_categories(trace, limit))
    names = list(policy or as_recorded(BATCH_ARMS, trace))
    if "autoregressive" not in names:
        names.insert(0, "autoregressive")
    policies = load_serving_policies(names, trace, latency, "static", say=note)
    if not policy:
        policies |= fastest_by_batch(trace, latency, batches, policies)
    predicted, requests = predict_groups(trace, latency, policies, batches)
    pair = info.load()
    total = repeats * len(policies) * sum(len(groups_of(len(trace.requests), b)) for b in batches)
    with progress_bar() as progress:
        task = progress.add_task("decoding batches for real", total=total)
        measured = run_batches(
            pair, trace, [BatchArm(n, p) for n, p in policies.items()], batches=batches,
            forced=forced, repeats=repeats, advance=lambda: progress.advance(task),
        )  # fmt: skip
    dtype, count = getattr(torch, str(pair.meta["dtype"])), len(trace.requests)
    diverged = {
        arm: {} if forced else divergences(trace, outputs, dtype)
        for arm, outputs in measured.outputs.items()
    }
    out = {size: groups_left_out(diverged, size, count) for size in batches}
    ids = {(size, trace.requests[i].id) for size, firsts in out.items() for i in firsts}
    of_texts = [(b, r) not in ids for b, r in measured.times[["batch", "request"]].to_numpy()]
    times = measured.times[of_texts].reset_index(drop=True)
    rows = compare(predicted, times)
    arms = list(zip(rows["policy"], rows["batch"], strict=True))
    rows["rounds_differ"] = [
        requests_differ(
            measured.logs[name, size], requests[name, size],
            unlike(diverged[name, size], policies[name], size, count),
        )
        for name, size in arms
    ]  # fmt: skip
    if not forced:
        rows = with_diverged(rows, [[*diverged[arm].values()] for arm in arms], 0)
        rows["requests_left_out"] = [
            sum(min(size, count - first) for first in out[size]) for _, size in arms
        ]
    if outside := sum(frame.attrs["extrapolated"] for frame in requests.values()):
        note(f"{outside} predicted passes lie outside the measured sizes: a fitted roofline")
    rows = with_machine(rows, latency, measured.machine)
    say_machine(latency, measured.machine, AGAIN)
    meta = {**pair.meta, "machine": measured.machine}
    write_measured(MeasuredRuns(times, meta), run / "measured_batches.parquet")
    return rows.sort_values("batch", kind="stable", ignore_index=True)


def fastest_by_batch(
    trace: Trace, latency: LatencyTable, batches: Sequence[int], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the policies predicted fastest at a size, but for those `known`; a note names them."""
    from simulator.chosen import load_serving_policies
    from simulator.serving.groups import predict_groups
    from simulator.whatif.ladder import GAMMAS

    lengths = [f"fixed:gamma={g}" for g in GAMMAS if g <= (trace.max_gamma or g)]
    every = load_serving_policies([*lengths, "all"], trace, latency, "static", say=note)
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
    from policies.core import DraftPolicy

    if not diverged or (isinstance(policy, DraftPolicy) and not policy.learns_across_requests):
        return set(diverged)
    first = min(diverged)
    return set(range(first - first % size, requests))


def requests_differ(real: RoundLog, simulated: pd.DataFrame, skipped: Collection[int] = ()) -> int:
    """Count requests whose rounds, drafted, accepted tokens or draft passes differ in number."""
    simulated = simulated.drop(index=list(skipped))
    rounds = pd.DataFrame(real.rounds)
    columns = ["drafted", "accepted", "draft_forwards"]
    sums = rounds.groupby("request")[columns].sum().reindex(simulated.index, fill_value=0)
    sums["rounds"] = rounds.groupby("request").size().reindex(simulated.index, fill_value=0)
    own = simulated[[*columns, "rounds"]]
    return int((sums[own.columns].to_numpy() != own.to_numpy()).any(axis=1).sum())


def _check_measured(latency: LatencyTable, batches: list[int]) -> None:
    cells = latency.cells
    own = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]
    if not latency.is_constant and max(batches) > (largest := int(own["batch"].max())):
        raise DraftsimError(
            f"--batch {max(batches)} is beyond the largest batch measured, {largest}: profile the "
            f"pair again with --batch 1,...,{max(batches)}"
        )
