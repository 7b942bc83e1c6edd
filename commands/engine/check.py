"""``draftsim validate --engine``: the same requests in a real engine and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.drafted import load_recording
from commands.common.output import note
from commands.engine.baseline import Loads, chances, say_defaults, synthetic_rows, with_defaults
from commands.engine.compare import compare_loads
from commands.engine.profile import check_engine
from commands.engine.rounds import check_key
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.files import CHECKED, read_latency, write_latency

if TYPE_CHECKING:
    from commands.engine.options import CheckedEngine
    from profiler.engines.plan import Grid
    from profiler.engines.start import EngineOptions
    from simulator.serving.arrivals import Arrivals
    from traces.latency.table import LatencyTable

OFF = "autoregressive"
ENGINE_ARMS = ("fixed:gamma=2", "fixed:gamma=4", "gammatune")
"""Policies run where none is named, with no speculation and those predicted fastest."""
SHOWN = (
    "load", "policy", "iterations", "iterations_predicted", "iterations_differ", "rounds_differ",
    "texts_diverged", "throughput", "throughput_predicted", "error", "noise", "busy_error",
    "ttft_s", "ttft_s_predicted", "tpot_s", "tpot_s_predicted", "speedup", "speedup_predicted",
    "speedup_error", "speedup_noise", "machine",
)  # fmt: skip


def engine_check(
    served: CheckedEngine, run: Path, source: str | None, policies: Sequence[str] | None,
    loads: Mapping[str, Arrivals], repeats: int, limit: int | None, remeasure: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of `validate --engine`, one per load and policy.

    With ``defaults`` an engine with vLLM's own settings serves the loads too; with ``synthetic``
    nothing but vLLM's synthetic acceptance is run (`commands.engine.baseline`).

    What is accepted are the drafts of `source`, recorded along the trace; by default those of the
    drafter that the engine was measured with.
    With `remeasure` the table is measured once more between the runs, predicts instead of the
    profile's own, and is kept with it (`CHECKED`).  With ``http`` the engine runs in its HTTP
    server (`commands.engine.http`).  The runs of a stopped check are kept in the run folder; the
    same call continues with them.  More `repeats` are added to the runs of a finished check.
    """
    from profiler.checks.unfinished import unfinished
    from profiler.engines.engine import Engine
    from profiler.engines.loads import TURN_S
    from profiler.engines.measure import BetweenTable

    name, requests, seed = str(served.engine), served.requests, served.seed
    check_engine(name)
    latency = read_latency(run / "latency.parquet")
    if latency.meta.get("kind") != "engine":
        raise DraftsimError(
            f"{run} holds no engine's latencies: `draftsim profile --engine {name}`"
        )
    recording = load_recording(served.trace, str(run), source)
    if latency.meta["engine"].get("own_drafter"):
        recording.priced()  # refuses latencies of drafting with another
    trace = recording.trace
    if limit is not None:
        trace = trace.select(range(min(limit, len(trace.requests))))
    longest, options = latency.meta["engine"]["longest"], engine_options(latency, trace)
    if not policies:
        policies = [*ENGINE_ARMS, *predicted(latency, trace, longest, loads, requests, seed)]
    chosen = arms(policies, trace, longest, latency if not served.http else None)
    for load, arrivals in loads.items():
        if (arrivals.concurrency or 0) > options.max_batch:
            raise DraftsimError(
                f"--load {load} is more than the {options.max_batch} requests the engine runs"
            )
    apart = Loads(options, trace, loads, requests, repeats, seed)
    if served.synthetic is not None:
        return synthetic_rows(latency, apart, chances(served.synthetic))
    # Before the engine that is stepped by hand: a GPU holds one of them.
    plain = apart.run() if served.defaults else None
    if served.http:
        from commands.engine.http import compare_served

        return compare_served(
            options, latency, trace, chosen, loads, requests, repeats, seed, run
        )  # fmt: skip
    engine = Engine(options)
    grid = grid_of(options, trace, chosen, loads, requests) if remeasure else None
    key = check_key(
        engine, latency, trace, chosen, loads, requests, seed, meta=engine.meta,
        grid=None if grid is None else vars(grid), turn_s=TURN_S,
    )  # fmt: skip
    total = repeats * len(loads) * len(chosen)
    with unfinished(run, key, total, note, grows=True) as kept:
        between = None
        if grid is not None:
            between = BetweenTable(engine, grid, seed, kept.within("table"))
        rows = compare_loads(
            engine, latency, trace, chosen, loads, requests, repeats, seed, between, kept
        )
        if between is not None:
            write_latency(between.table(), run / CHECKED)
    if plain is not None:
        rows = with_defaults(rows, plain)
        say_defaults(rows, plain)
    return rows


def predicted(
    latency: LatencyTable, trace: Trace, longest: int, loads: Mapping[str, Arrivals],
    requests: int, seed: int,
) -> list[str]:  # fmt: skip
    """Return the fixed lengths, or `ENGINE_ARMS`, predicted to be the fastest under the loads.

    A note names those that would not run by default.
    """
    from simulator.serving import Limits, Scenario
    from simulator.serving.run import simulate

    lengths = (f"fixed:gamma={g}" for g in range(1, min(longest, trace.max_gamma or longest) + 1))
    every = arms([*ENGINE_ARMS, *lengths], trace, longest)
    best: dict[str, list[str]] = {}
    for load, arrivals in loads.items():
        limits = Limits.of_engine(latency, None, None, None)
        scenario = Scenario(
            arrivals, limits, requests, warmup=0.0, seed=seed,
            drafter_loaded=bool(latency.meta["engine"].get("own_drafter")),
        )  # fmt: skip
        speed = {
            text: simulate(trace, latency, policy, scenario, name=text).row()["throughput_tok_s"]
            for text, policy in every.items()
        }
        best.setdefault(max(speed, key=lambda text: speed[text]), []).append(load)
    for text in best.keys() - {OFF, *ENGINE_ARMS}:
        note(f"also running {text}, predicted to be the fastest under {', '.join(best[text])}")
    return list(best)


def grid_of(
    options: EngineOptions, trace: Trace, chosen: Mapping[str, Any], loads: Mapping[str, Arrivals],
    requests: int,
) -> Grid:  # fmt: skip
    """Return the sizes that loads of `requests` requests can reach under the policies.

    Prompts sent at once share a pass: as many of the trace's mean length as an iteration may have.
    """
    from profiler.engines.plan import Grid
    from simulator.serving.run import lookahead_of

    at_once = {min(a.concurrency or options.max_batch, requests) for a in loads.values()}
    longest = max(lookahead_of(policy, trace) for policy in chosen.values())
    mean = round(float(np.mean([r.prompt_length for r in trace.requests])))
    grid = Grid(prompts=(*Grid.prompts, *((n, mean) for n in sorted(at_once) if n > 1)))
    return grid.fitted(replace(options, max_batch=max(at_once), longest=max(longest, 1)))


def engine_options(latency: LatencyTable, trace: Trace) -> EngineOptions:
    """The options that the engine had when `latency` was measured, with room for `trace`."""
    from profiler.engines.start import EngineOptions

    said: Mapping[str, Any] = latency.meta["engine"]
    room = max(r.prompt_length + r.tokens for r in trace.requests) + said["longest"] + 1
    drafter = {} if latency.meta.get("draft") is None else {
        "draft" if said["method"] == "draft_model" else "eagle": latency.meta["draft"]
    }  # fmt: skip
    return EngineOptions(
        latency.meta["target"], **drafter, longest=said["longest"], max_batch=said["max_batch"],
        max_model_len=max(said["max_model_len"], room), token_budget=said["token_budget"],
        dtype=latency.meta["dtype"], threads=latency.meta["threads"], more=_chosen(said),
    )  # fmt: skip


def _chosen(said: Mapping[str, Any]) -> dict[str, bool]:
    """Return the settings of a measured engine that are not `profiler.engines.start.FIXED`."""
    from profiler.engines.start import FIXED

    names = {"enforce_eager": "eager", "enable_prefix_caching": "prefix_caching"}
    own = {name: said.get(names.get(name, name), fixed) for name, fixed in FIXED.items()}
    return {name: bool(value) for name, value in own.items() if value != FIXED[name]}


def arms(
    policies: Sequence[str], trace: Trace, longest: int, latency: LatencyTable | None = None
) -> dict[str, Any]:
    """Return the policies by their texts, no speculation first; ``all`` are those that can be run.

    ``rate-optimal`` is fitted to the whole trace at the costs of `latency`.
    Raises DraftsimError for a policy that cannot run or drafts more than `longest` tokens, for
    ``rate-optimal`` without `latency`, as in the processes of a server, and for one that is given a
    rate, since it would weigh textbook costs.
    """
    from policies.from_file import Cut, said_cut
    from profiler.engines.setup import policy_from
    from simulator.chosen import FITTED, every_policy, fitted
    from simulator.serving.run import lookahead_of
    from simulator.whatif.ranking import is_default, is_unfitted

    chosen: dict[str, Any] = {}
    recorded = trace.max_gamma or longest
    policies = list(policies)
    if "all" in policies:
        policies.remove("all")
        policies += [
            text for text in every_policy()
            if _can_run(text, trace, longest) and (text != FITTED or latency is not None)
        ]  # fmt: skip
    for text in dict.fromkeys([OFF, *policies]):
        try:
            made = policy_from(text, min(longest, recorded))
            if is_unfitted(made):
                if latency is None:
                    raise DraftsimError(
                        f"{text} is fitted to a recording, which a server's processes do not have: "
                        "leave out --http"
                    )
                if not is_default(made):
                    raise DraftsimError(f"{text}: it is fitted here, so only gamma_max can be set")
                made = fitted(trace, latency, made.gamma_max)
            chosen[text] = made
        except ValueError as reason:
            raise DraftsimError(str(reason)) from None
        if isinstance(chosen[text], Cut):
            whose = "the engine's" if longest <= recorded else "the recording's"
            note(said_cut(text, chosen[text].longest, whose))
        if (own := lookahead_of(chosen[text], trace)) > longest:
            raise DraftsimError(
                f"{text} drafts up to {own} tokens, the engine was measured up to {longest}: "
                f"profile it with --engine-longest {own}"
            )
    return chosen


def _can_run(text: str, trace: Trace, longest: int) -> bool:
    """Return True if `longest` drafted tokens suffice and the recording holds the signals."""
    from policies.registry import parse_serving_policy
    from simulator.serving.run import lookahead_of

    policy = parse_serving_policy(text, max_gamma=min(longest, trace.max_gamma or longest))
    return set(policy.reads) <= trace.signals and lookahead_of(policy, trace) <= longest
