"""Does real decoding take the rounds that replay takes?  Needs a recording, and no latencies.

    draftsim profile --target qwen-coder --draft qwen-coder --dtype float32 --chat --out RUN \\
        --prompts prompts.jsonl --max-new-tokens 32 --max-gamma 5  # stop it before latencies
    python -m benchmarks.real_rounds RUN --target qwen-coder --draft qwen-coder --dtype float32

Prints, for each policy, how many of its rounds differ, and why.
"""

from __future__ import annotations

import argparse
import sys

import torch

from policies.registry import parse_policy
from profiler.checks.differences import explain, rounds_differ
from profiler.checks.spot_check import PlannedPolicy, run_requests
from profiler.models.loading import choose_dtype, load_pair
from profiler.recording.run import model_path
from traces.replay.run import replay
from traces.store.recordings import find_trace

POLICIES = (
    "autoregressive", "fixed:gamma=3", "gammatune", "gammatune-plus", "hf-heuristic", "confidence",
    "cm-asd", "svip", "adaedl", "draft-and-verify", "oracle",
)  # fmt: skip


def main() -> None:
    """Decode every request under every policy once, and compare the rounds with the replay's."""
    line = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    line.add_argument("run", help="folder of the recording, made with the same dtype")
    line.add_argument("--target", required=True)
    line.add_argument("--draft", required=True)
    line.add_argument("--dtype", default="float32")
    line.add_argument("--threads", type=int, default=1)
    line.add_argument("--limit", type=int, help="use this many requests")
    line.add_argument("--policy", action="append", help="a policy; can be given several times")
    options = line.parse_args()
    torch.set_num_threads(options.threads)
    trace = find_trace(options.run)
    if options.limit is not None:
        trace = trace.select(range(min(options.limit, len(trace.requests))))
    pair = load_pair(
        model_path(options.target, "target"), model_path(options.draft, "draft"),
        dtype=options.dtype,
    )  # fmt: skip
    kind = choose_dtype(options.dtype, pair.device)
    planned = [
        PlannedPolicy(p, parse_policy(p, max_gamma=trace.max_gamma))
        for p in options.policy or POLICIES
    ]
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        print(f"{done} of {len(planned) * len(trace.requests)} runs", file=sys.stderr, flush=True)

    runs = run_requests(pair, trace, planned, repeats=1, advance=advance)
    for run in planned:
        real, expected = runs.logs[run.label], replay(trace, run.policy, name=run.name)
        causes = explain(real, expected, runs.outputs[run.label], trace, kind)
        why = sorted({difference["cause"] for difference in causes})
        print(
            f"{run.name}: {rounds_differ(real, expected)} of {len(expected)} rounds differ"
            + (f" ({', '.join(why)})" if why else "")
        )


if __name__ == "__main__":
    main()
