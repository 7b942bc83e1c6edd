"""Loads in a real engine, stepped by hand, and in the simulator; and in an engine apart.

An engine apart has its own defaults, or synthetic acceptance.  A drafter can force asynchronous
scheduling, graphs or prefix caching off, and the measured engine has them off throughout.  So a
speedup over that engine without speculation is not the gain over the engine with its own defaults:
both are printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.output import note, say_launch
from commands.common.progress import progress_bar, working
from commands.engine.options import named_loads
from policies.from_file import Cut, said_cut
from policies.registry import NO_SPECULATION, PLAIN, parse_serving_policy
from profiler.engines.engine import Engine, EngineKind, EngineOptions, find_engine
from profiler.engines.session import policy_from
from profiler.recording.run import digest_of
from simulator.chosen import FITTED, every_policy, fitted_as_asked, is_unfitted
from simulator.engines import (
    Workload,
    batches_decoded,
    row_of_load,
    simulated_rounds,
    with_defaults,
    with_profile_errors,
    with_speedups,
)
from simulator.serving import Limits, simulate
from simulator.serving.run import lookahead_of
from simulator.serving.scenario import Scenario
from simulator.tune.costs import longest_draft
from simulator.tune.launch import launch_line
from simulator.tune.served import rivals
from simulator.tune.settings import Tuned
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, graphs_of
from traces.sources.registry import parse_source
from traces.sources.starts.parallel import Parallel
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import Apart
from traces.store.identity import identity

if TYPE_CHECKING:
    from profiler.engines.cells import EngineGrid
    from profiler.engines.measure import EngineTable

OFTEN, NEAR = 0.1, 0.15
"""Share of a load's steps from which the batch that decodes in them is measured itself, and the
relative distance from a batch that is measured anyway up to which it is not."""
USUAL = ("fixed:gamma=2", "fixed:gamma=4", "gammatune")
"""Policies run where none is named, with no speculation and those predicted fastest."""


def compare_loads(
    engine: Engine, latency: LatencyTable, work: Workload, between: EngineTable | None = None,
    kept: Checkpoint | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run every load under every policy in the engine (`run_loads`) and in the simulator.

    Speedups are over the first policy.  A table measured `between` the runs predicts instead of
    `latency`, whose errors are then in columns ``profile_*``.  What `kept` holds of an earlier
    call, of fewer repeats perhaps, is not run again.
    """
    from profiler.engines.drafts import Forced
    from profiler.engines.loads import run_loads
    from profiler.engines.texts import own_texts, policy_runs, prompts_of, texts_once

    trace, chosen = work.trace, work.policies
    prompts = prompts_of(trace, engine.vocabulary, work.seed, work.sequences)
    during_runs = None if kept is None else kept.within("during_runs")

    def decoded(some: dict[int, list[int]]) -> dict[int, list[int]]:
        why = "as reference" if len(some) == len(prompts) else "again, to warm up"
        note(f"decoding {len(some)} outputs in the engine, {why}")
        with working("decoding them"):
            return own_texts(engine, trace, some)

    texts = texts_once(during_runs, prompts, engine.options.max_batch, decoded)
    forced = Forced(trace, texts, engine.vocabulary)
    measured = run_loads(
        engine, chosen, work.demands, prompts, forced, work.repeats, between, kept, note, _bar
    )
    scenarios = scenarios_in(engine, work)
    found = policy_runs(measured, trace, texts, engine.meta["dtype"])
    first = next(iter(chosen))

    def rows_from(table: LatencyTable) -> list[dict[str, Any]]:
        rows = [
            row_of_load(found[load, text], table, trace, policy, scenario)
            for load, scenario in scenarios.items()
            for text, policy in chosen.items()
        ]
        return with_speedups(rows, first)

    rows = rows_from(latency)
    return rows if between is None else with_profile_errors(rows_from(between.table()), rows)


@contextmanager
def _bar() -> Iterator[Callable[[float], None]]:
    """Show how much of the loads that run side by side is done."""
    # Without a thread, which could wake while the engine is timed.
    with progress_bar(alone=True) as bar:
        task = bar.add_task("% of these runs", total=100)
        yield lambda share: bar.update(task, completed=share * 100)


def scenarios_in(engine: Any, work: Workload) -> dict[str, Scenario]:
    """Return the simulated loads, within the limits of an engine."""
    options = engine.options
    limits = Limits(
        options.max_batch, options.token_budget, kv_blocks=engine.blocks,
        block_size=engine.block_size,
    )  # fmt: skip
    return work.scenarios(limits, options.own_drafter)


def check_key(engine: Any, latency: LatencyTable, work: Workload, **more: Any) -> dict[str, Any]:
    """Return the identity of a check without its repeats: requests, prompts, and each run's rounds.

    The rounds that the simulator predicts tell what names do not: a policy's own file that has
    changed since, or another recording.
    """
    from profiler.checks.interleaved import version
    from profiler.engines.texts import prompts_of

    trace, scenarios = work.trace, scenarios_in(engine, work)
    prompts = prompts_of(trace, engine.vocabulary, work.seed, work.sequences)
    return {
        "version": version(), "trace": identity(trace.meta), "seed": work.seed,
        "prompts": digest_of({str(i): prompts[i] for i in sorted(prompts)}),
        "loads": [
            (load, demand.concurrency, digest_of({"jobs": demand.jobs}))
            for load, demand in work.demands.items()
        ],
        "arms": [
            (text, [
                digest_of({"rounds": simulated_rounds(trace, latency, policy, s)})
                for s in scenarios.values()
            ])
            for text, policy in work.policies.items()
        ],
        **more,
    }  # fmt: skip


def policies_predicted(latency: LatencyTable, work: Workload, longest: int) -> list[str]:
    """Return the policies to run by default: `USUAL` ones, and the fixed lengths predicted fastest.

    A note names those that would not run otherwise.
    """
    trace = work.trace
    lengths = (f"fixed:gamma={g}" for g in range(1, min(longest, trace.max_gamma or longest) + 1))
    usual = [text for text in USUAL if _can_run(text, trace, longest)]
    every = runnable([*usual, *lengths], trace, longest)
    best: dict[str, list[str]] = {}
    own_drafter = bool(latency.meta["engine"].get("own_drafter"))
    for load, scenario in work.scenarios(Limits.of_engine(latency), own_drafter).items():
        speed = {
            text: simulate(trace, latency, policy, scenario, name=text).row()["throughput_tok_s"]
            for text, policy in every.items()
        }
        best.setdefault(max(speed, key=lambda text: speed[text]), []).append(load)
    for text in best.keys() - {PLAIN, *usual}:
        note(f"also running {text}, predicted to be the fastest under {', '.join(best[text])}")
    return [*usual, *best]


def grid_of(options: EngineOptions, work: Workload, latency: LatencyTable) -> EngineGrid:
    """Return the sizes that the loads can reach under their policies.

    Batches that often decode are among them (`often`).  No prompt joins requests that decode if
    every closed loop runs one request at a time, or all at once and their prompts fit into one
    iteration.  ``latency`` is the profile of the engine, which tells its CUDA graphs.
    """
    from profiler.engines.cells import EngineGrid

    requests, base = work.trace.requests, EngineGrid()
    jobs = [job for demand in work.demands.values() for job in demand.jobs]
    lengths = [requests[job.sequence].prompt_length for job in jobs]
    shortest, longest = min(lengths), max(lengths)
    last = max(requests[job.sequence].prompt_length + job.tokens for job in jobs)
    at_once = {min(a.concurrency or options.max_batch, work.requests) for a in work.loads.values()}
    most = max(lookahead_of(policy, work.trace) for policy in work.policies.values())
    own = replace(options, max_batch=max(at_once), longest=max(most, 1))
    last = max(min(last, base.room(own) - 1), 1)
    joins = sum(lengths) > options.token_budget or any(
        demand.concurrency is None or 1 < demand.concurrency < len(demand.jobs)
        for demand in work.demands.values()
    )
    # Near an end of the contexts, one in between tells nothing.
    between = [c for c in base.contexts if 2 * shortest < c < last / 2]
    batches = [*base.batches, max(at_once)]
    for batch in often(batches_decoded(latency, work)):
        if all(abs(batch - known) > NEAR * batch for known in batches):
            batches.append(batch)
    graphs = graphs_of(latency.meta["engine"])
    grid = replace(
        base,
        batches=batches,
        contexts=sorted({shortest, *between, last}),
        prompts=(
            *((n, t) for n, t in base.prompts if t < longest),
            (1, longest),
            *((n, round(float(np.mean(lengths)))) for n in sorted(at_once) if n > 1),
        ),
        beside_prompts=[t for t in base.beside_prompts if t < longest] + [longest] if joins else (),
    )
    return grid.fitted(own, graphs if most == options.longest else None)


def often(loads: Iterable[Counter[int]]) -> list[int]:
    """Return the batches that decode in `OFTEN` or more of a load's steps, the most frequent first.

    A pass over 12 sequences can take longer than one over 16 (a matrix kernel of a CPU), and load
    that only falls from 16 is mostly in between.
    """
    shares: dict[int, float] = {}
    for steps in loads:
        for batch, count in steps.items():
            shares[batch] = max(shares.get(batch, 0.0), count / steps.total())
    return sorted((b for b, s in shares.items() if s >= OFTEN), key=lambda b: -shares[b])


def engine_options(latency: LatencyTable, trace: Trace, kind: EngineKind) -> EngineOptions:
    """Return the options that `latency` was measured with, with room for `trace`."""
    said: Mapping[str, Any] = latency.meta["engine"]
    room = max(r.prompt_length + r.tokens for r in trace.requests) + said["longest"] + 1
    drafter = {} if latency.meta.get("draft") is None else {
        "draft" if said["method"] == "draft_model" else "eagle": latency.meta["draft"]
    }  # fmt: skip
    return EngineOptions(
        latency.meta["target"], **drafter, longest=said["longest"], max_batch=said["max_batch"],
        max_model_len=max(said["max_model_len"], room), token_budget=said["token_budget"],
        dtype=latency.meta["dtype"], threads=latency.meta["threads"],
        more=kind.settings(
            said.get("async_scheduling", False), graphs_of(said),
            said.get("prefix_caching", False),
        ),
    )  # fmt: skip


def runnable(
    policies: Sequence[str], trace: Trace, longest: int, latency: LatencyTable | None = None
) -> dict[str, Any]:
    """Return the policies by their texts, no speculation first; ``all`` are those that can be run.

    ``rate-optimal`` is fitted to the whole trace at the costs of `latency`
    (`simulator.chosen.fitted_as_asked`).
    Raises DraftsimError for a policy that cannot run or drafts more than `longest` tokens, and for
    ``rate-optimal`` without `latency`, as in the processes of a server.
    """
    chosen: dict[str, Any] = {}
    recorded = trace.max_gamma or longest
    policies = list(policies)
    if "all" in policies:
        policies.remove("all")
        policies += [
            text for text in every_policy()
            if _can_run(text, trace, longest) and (text != FITTED or latency is not None)
        ]  # fmt: skip
    for text in dict.fromkeys([PLAIN, *policies]):
        try:
            made = policy_from(text, min(longest, recorded))
            if is_unfitted(made):
                if latency is None:
                    raise DraftsimError(
                        f"{text} is fitted to a recording, which a server's processes do not have: "
                        "drop --http, or this policy"
                    )
                made = fitted_as_asked(text, made, trace, latency)
            chosen[text] = made
        except ValueError as reason:
            raise DraftsimError(str(reason)) from None
        if isinstance(chosen[text], Cut):
            whose = "the engine's" if longest <= recorded else "the recording's"
            note(said_cut(text, chosen[text].longest, whose))
        if (own := lookahead_of(chosen[text], trace)) > longest:
            raise DraftsimError(
                f"{text} drafts up to {counted(own, 'token')}, and the engine was measured up to "
                f"{longest}: profile it with --engine-longest {own}"
            )
    return chosen


def _can_run(text: str, trace: Trace, longest: int) -> bool:
    """Return True if `longest` drafted tokens suffice and the recording holds the signals."""
    policy = parse_serving_policy(text, max_gamma=min(longest, trace.max_gamma or longest))
    return set(policy.reads) <= trace.signals and lookahead_of(policy, trace) <= longest


WITH_DEFAULTS = ("throughput_defaults", "speedup_defaults")
"""Columns that a run with the engine's defaults adds."""
SYNTHETIC = ("load", "policy", "throughput", "throughput_predicted", "error")
"""Columns that are printed of a run with synthetic acceptance."""
ENGINE = "vllm"
"""The engine whose settings are tried."""
TUNED = "tuned"
"""Name of the found setting in the column ``policy``."""
TRIED = (
    "load", "policy", "iterations", "iterations_predicted", "rounds_differ", "texts_diverged",
    "throughput", "throughput_predicted", "gain", "gain_predicted", "gain_error", "gain_noise",
    "machine",
)  # fmt: skip
"""Columns of `tried` that are printed."""


def run_apart(
    kind: EngineKind, options: EngineOptions, work: Workload,
    synthetic: Sequence[float] | None = None,
) -> Apart:  # fmt: skip
    """Run the loads in an engine apart (`profiler.engines.engine.EngineKind.run_apart`)."""
    from profiler.engines.texts import prompts_of

    prompts = prompts_of(work.trace, options.vocabulary, work.seed, work.sequences)
    return kind.run_apart(options, work.demands, prompts, work.repeats, synthetic)


def say_defaults(rows: Sequence[Mapping[str, Any]], apart: Apart, gain: str = "speedup") -> None:
    """Say both speedups of the fastest policy of every load, and what the defaults are."""
    on = [name for name, value in apart.settings.items() if value]
    note(f"the engine's defaults: no speculation, {', '.join(on) or 'none of the three'} on")
    for load in dict.fromkeys(row["load"] for row in rows):
        best = max((r for r in rows if r["load"] == load), key=lambda r: float(r["throughput"]))
        note(
            f"{load}: {best['policy']} has {best[gain]:.2f}x over the same engine with drafts off "
            f"(whose drafter still runs), {best['speedup_defaults']:.2f}x over the engine with its "
            "defaults and no drafter"
        )


def chances(text: str) -> list[float]:
    """Return the acceptance by position that ``--synthetic`` names; DraftsimError if impossible."""
    try:
        source = parse_source(f"parallel:acceptance=[{text}]")
    except ValueError as error:
        raise DraftsimError(f"--synthetic {text}: {error}") from None
    assert isinstance(source, Parallel)
    assert source.acceptance is not None
    return list(source.acceptance)


def check_trial(latency: LatencyTable) -> int:
    """Return the longest draft of the engine that `latency` is of, which can be tried here.

    Raises DraftsimError before anything is searched where it cannot.
    """
    if latency.meta.get("kind") != "engine" or "scaled" in latency.meta:
        raise DraftsimError(
            "`draftsim tune engine` starts the engine that the latencies were measured on: give "
            "--latency RUN of `draftsim profile engine`, and no --gpu"
        )
    find_engine(ENGINE).check_installed()
    return int(latency.meta["engine"]["longest"])


def try_settings(
    latency: LatencyTable, trace: Trace, tuned: Tuned, requests: int, repeats: int, seed: int,
    defaults: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows of `tried` in a vLLM started as it was when its latencies were measured.

    With `defaults` the loads are also served by one with its own settings (`run_apart`).
    """
    kind = find_engine(ENGINE)
    options = engine_options(latency, trace, kind)
    if large := [row["batch"] for row in tuned.rows if row["batch"] > options.max_batch]:
        raise DraftsimError(
            f"--batch {max(large)} is more than the {options.max_batch} requests the engine runs"
        )
    loads = named_loads("closed:" + ",".join(str(row["batch"]) for row in tuned.rows))
    work = Workload(trace, {}, loads, requests, repeats, seed)
    # Before the engine that is stepped by hand: a GPU holds one of them.
    plain = run_apart(kind, options, work) if defaults else None
    rows = tried(kind.start(options), latency, tuned, work)
    if plain is None:
        return rows
    rows = with_defaults(rows, plain)
    say_defaults(rows, plain, "gain")
    return rows


def tried(
    engine: Engine, latency: LatencyTable, tuned: Tuned, work: Workload
) -> list[dict[str, Any]]:
    """Return closed loops at every batch searched: no speculation, K = 1, 3, 5, and what was found.

    Drafts are the recording's, forced upon the engine; they cost the passes of the drafter that it
    was measured with, if any.  ``gain`` is the throughput over that of no speculation,
    ``gain_noise`` the part of its error that the repeats' scatter explains.
    """
    longest = engine.options.longest
    chosen: dict[str, Any] = rivals(min(longest, longest_draft(work.trace) or longest))
    if tuned.document is not None:
        chosen[TUNED] = tuned.policy
    rows = compare_loads(engine, latency, replace(work, policies=chosen))
    for row in rows:
        for key in [name for name in row if "speedup" in name]:
            row[key.replace("speedup", "gain")] = row.pop(key)
    return rows


def say_tried(rows: Sequence[Mapping[str, Any]], tuned: Tuned, latency: LatencyTable) -> None:
    """Print whether the setting is the best at each load, what was not tried, and how to launch."""
    for load in dict.fromkeys(row["load"] for row in rows):
        at = {row["policy"]: row["gain"] for row in rows if row["load"] == load}
        own = at.pop(TUNED, at[NO_SPECULATION])
        best = max(at, key=lambda name: at[name])
        note(
            f"{load}: the setting has {own:.2f}x; the best alternative is {best} with "
            f"{at[best]:.2f}x"
        )
    if not latency.meta["engine"].get("own_drafter"):
        note(
            "the recorded drafts came from a proposer, so neither the engine nor these latencies "
            "include a drafter's passes: to include them, profile with --draft or --eagle"
        )
    line = launch_line(ENGINE, tuned.document, target=latency.meta["target"])
    if tuned.document is not None:
        line += f" --max-num-seqs {latency.meta['engine']['max_batch']}"
    say_launch(line, [latency.meta["target"], (tuned.document or {}).get("model")])
