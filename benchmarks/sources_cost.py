"""Sources of drafts on the device: predicted against measured time, and what recording costs.

    python -m benchmarks.sources_cost [--heads FOLDER] [--prompts 8] [--tokens 64] [--repeats 3]

On a CPU that others use too, ``--cpu-time`` counts this process's own seconds on one thread.
``--heads`` is a folder that ``python -m benchmarks.training heads`` wrote for the target.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from policies.registry import parse_policy
from profiler.latency.host import measure_host
from profiler.latency.passes import pass_blocks
from profiler.latency.table import Grid, Sweeps
from profiler.models.loading import load_pair
from profiler.models.runner import Runner
from profiler.models.stack import LayerRunner
from profiler.prompts import read_prompts
from profiler.recording.trace import Recorder
from profiler.sources.run import SourceRunner, load_modules, measure_sources, record_sources
from profiler.sources.start_record import RecordOptions
from simulator.pricing import autoregressive, price
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.sources.base import Source
from traces.sources.early_exit import EarlyExit
from traces.sources.registry import SYSTEMS, parse_source
from traces.sources.replay import replay_source

BUNDLED = Path(__file__).parents[1] / "profiler" / "bundled"


Run = tuple[float, list[list[Round]], list[list[int]]]
"""Decode seconds (after prefill) of all requests, the rounds of each, and their outputs."""


def decoded(runner: SourceRunner, source: Source, policy: DraftPolicy) -> Run:
    """Really decode every request of the runner's trace, in recording order."""
    shared, rounds, outputs = own_copy(policy, runner.target.vocab_size), [], []
    spent_s = 0.0
    for i in range(len(runner.trace.requests)):
        decoder, mine = runner.decoder(source, i), shared.fresh()
        begin = time.perf_counter()
        rounds.append(list(speculate(decoder, mine)))
        spent_s += time.perf_counter() - begin
        outputs.append(decoder.output)
    return spent_s, rounds, outputs


def main() -> None:
    """Record, replay, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=BUNDLED / "target")
    parser.add_argument("--draft", default=BUNDLED / "draft")
    parser.add_argument("--heads", type=Path, default=BUNDLED / "exit_heads")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    if given.cpu_time:
        time.perf_counter = time.process_time
    torch.set_num_threads(1)
    pair = load_pair(given.target, given.draft)
    prompts = read_prompts(BUNDLED / "prompts.jsonl", given.prompts)
    encoded = [pair.encode(p.text) for p in prompts]
    plain = Recorder(
        Runner(pair.target, 512), Runner(pair.draft, 512), max_new_tokens=given.tokens,
        max_gamma=1, eos=pair.eos,
    )  # fmt: skip
    plain.record(encoded[0])
    plain_s, outputs = [], []
    for ids in encoded:
        columns = plain.record(ids)
        outputs.append(columns["token"][columns["offset"] == 0].tolist())
        plain_s.append(plain.decode_s)
    lengths = [len(o) for o in outputs]
    requests = [
        Request(p.id, p.category, len(ids), len(o), given.tokens,
                "eos" if o[-1] in pair.eos else "length", tuple(ids.tolist()))
        for p, ids, o in zip(prompts, encoded, outputs, strict=True)
    ]  # fmt: skip
    said = {
        "request": np.repeat(np.arange(len(outputs)), lengths),
        "position": np.concatenate([np.arange(n) for n in lengths]),
        "offset": np.zeros(sum(lengths), int),
        "match": np.zeros(sum(lengths), int),
        "token": np.concatenate(outputs),
    }
    trace = Trace(said, requests, None, {"eos_token_ids": sorted(pair.eos)})
    modules = load_modules(given.heads, pair.target)
    systems: dict[str, Source] = {n: parse_source(s.source) for n, s in SYSTEMS.items()}
    policies = {n: parse_policy(s.policy) for n, s in SYSTEMS.items()}
    settings = [
        source.setting(getattr(policies[n], "gamma", 8))
        for n, source in systems.items()
        if isinstance(source, EarlyExit)
    ]
    begin = time.perf_counter()
    spent: dict[str, float] = {}

    def done(name: str) -> None:
        nonlocal begin
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
        begin = time.perf_counter()

    recordings = record_sources(pair.target, trace, modules, RecordOptions(settings), advance=done)
    print(f"plain decoding {sum(plain_s):.2f} s; recording, as a share of it:")
    for name, seconds in spent.items():
        print(f"  {name:14s} {seconds / sum(plain_s):6.2f}")
    layered = LayerRunner(pair.target, 384)
    grid = Grid(widths=(1, 2, 3, 5, 9, 13), contexts=(32, 128, 256), prompts=(64,), repeats=15)
    blocks = pass_blocks(Runner(pair.target, 320), Runner(pair.draft, 320), grid)
    sweeps = Sweeps(blocks, pair.device)
    for _ in range(grid.repeats):
        sweeps.run()
    cells = [
        sweeps.cells(),
        measure_host(Runner(pair.target, 320), Runner(pair.draft, 320)),
        measure_sources(layered, modules, trace),
    ]
    latency = LatencyTable(pd.concat(cells, ignore_index=True), {"kind": "measured"})
    real = SourceRunner(pair.target, trace, modules)
    print(f"{'system':26s} {'diff':>6s} {'tok/round':>9s} {'predicted':>9s} {'measured':>9s} err")
    logs = {
        name: replay_source(trace, source, policies[name], recordings=recordings, name=name)
        for name, source in systems.items()
    }
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for _ in range(given.repeats):  # interleaved: a slow minute falls on all
        for name, source in systems.items():
            with contextlib.suppress(DraftsimError):  # a source without a real decoder
                runs[name].append(decoded(real, source, policies[name]))
    base = price(autoregressive(next(iter(logs.values()))), latency).total_s
    print(f"{'autoregressive':26s} {'':6s} {1:9.2f} {base:9.3f} (prefill apart)")
    for name, log in logs.items():
        predicted = price(log, latency).total_s
        tokens = log.rounds["emitted"].mean()
        if not runs[name]:
            print(f"{name:26s} {'-':>6s} {tokens:9.2f} {predicted:9.3f} {'-':>9s}")
            continue
        measured = float(np.median([seconds for seconds, _, _ in runs[name]]))
        _, rounds, said_again = runs[name][0]
        mine = RoundLog.pack(rounds)
        differ = (
            int((mine != log.rounds).sum()) if len(mine) == len(log) else abs(len(mine) - len(log))
        )
        assert said_again == outputs
        off = predicted / measured - 1
        print(f"{name:26s} {differ:6d} {tokens:9.2f} {predicted:9.3f} {measured:9.3f} {off:+.1%}")


if __name__ == "__main__":
    main()
