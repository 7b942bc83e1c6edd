"""The cost of recording an acceptance trace, as a multiple of plain decoding of the same outputs.

python -m benchmarks.recording_cost [--prompts 14] [--tokens 128] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from profiler.models.loading import load_pair
from profiler.models.runner import Runner
from profiler.prompts import read_prompts
from profiler.recording.trace import Recorder
from traces.acceptance.sampling import Sampling

BUNDLED = Path(__file__).parents[1] / "profiler" / "bundled"


def main() -> None:
    """Record every prompt greedily and sampled, in turn, and print the ratio of each repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=BUNDLED / "target")
    parser.add_argument("--draft", default=BUNDLED / "draft")
    parser.add_argument("--file", default=BUNDLED / "prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--top-p", type=float, nargs="*", default=[0.9], help="Each at T = 1.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(given.target, given.draft)
    prompts = [pair.encode(p.text) for p in read_prompts(given.file, given.prompts)]
    recorders = []
    samplings = [Sampling(t) for t in given.temperatures] + [Sampling(1.0, p) for p in given.top_p]
    for sampling in samplings:
        generator = None if sampling.greedy else torch.Generator().manual_seed(0)
        slots = max(len(p) for p in prompts) + given.tokens * 25
        recorder = Recorder(
            Runner(pair.target, slots), Runner(pair.draft, slots), max_new_tokens=given.tokens,
            eos=pair.eos, sampling=sampling, generator=generator,
        )  # fmt: skip
        recorder.record(prompts[0])  # warm
        recorders.append(recorder)
    print(
        "sampling        plain s  recording / plain decoding: median (least to most of the repeats)"
    )
    plain = np.zeros((len(recorders), given.repeats))
    whole = np.zeros_like(plain)
    for repeat in range(given.repeats):
        for prompt in prompts:  # interleaved: a slow minute falls on all
            for i, recorder in enumerate(recorders):
                begin = time.perf_counter()
                recorder.record(prompt)
                whole[i, repeat] += time.perf_counter() - begin
                plain[i, repeat] += recorder.decode_s
    for recorder, a, b in zip(recorders, plain, whole, strict=True):
        share = b / a
        print(
            f"{recorder.sampling.label:14s}  {np.median(a):7.2f}  {np.median(share):.3f} "
            f"({share.min():.3f} to {share.max():.3f})"
        )


if __name__ == "__main__":
    main()
