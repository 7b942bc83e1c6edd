"""Positions of a bfloat16 recording where the target in float32 prefers another token.

    python -m benchmarks.near_ties --trace qwen-coder-cpu --model qwen-coder --limit 65

The float32 target reads every recorded output once.  A position counts where its likeliest token
is not the recorded one.  The gap is how much less likely the recorded token is, in nats.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
import torch
import transformers

from profiler.recording.run import model_path
from traces.acceptance.trace import Request, Trace
from traces.store.recordings import find_trace


def gaps(trace: Trace, model: transformers.PreTrainedModel) -> Iterator[tuple[Request, np.ndarray]]:
    """Yield the gap at every output token, in nats, 0 where both prefer the recorded one."""
    tokens = trace.columns["token"][trace.on_path]
    for request, begin, end in zip(
        trace.requests, trace.request_starts, trace.request_starts[1:], strict=False
    ):
        output = torch.from_numpy(np.array(tokens[begin:end], np.int64))
        prompt = torch.tensor(request.prompt_ids)
        with torch.inference_mode():
            read = model(torch.cat([prompt, output])[None], logits_to_keep=len(output) + 1)
        chances = read.logits[0, :-1].float().log_softmax(-1)
        own = chances.gather(1, output[:, None])[:, 0]
        yield request, (chances.max(1).values - own).numpy()


def by_category(trace: Trace, limit: int) -> Trace:
    """Return the trace of `limit` requests, in turn from each category."""
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(trace.requests):
        groups.setdefault(request.category, []).append(index)
    turns = itertools.zip_longest(*groups.values())
    order = [index for turn in turns for index in turn if index is not None]
    return trace.select(sorted(order[:limit]))


def main() -> None:
    """Parse the command line and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="qwen-coder-cpu")
    parser.add_argument("--model", default="qwen-coder", help="a folder, or a fetched model")
    parser.add_argument("--limit", type=int, default=65, help="at most this many outputs")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path(given.model, "target"), dtype=torch.float32
    )
    found: list[np.ndarray] = []
    for request, gap in gaps(by_category(find_trace(given.trace), given.limit), model.eval()):
        found.append(gap)
        positions = np.flatnonzero(gap)
        told = ", ".join(f"{at} ({gap[at]:.3f})" for at in positions)
        print(f"{request.id:24}{len(gap):5} tokens; other at: {told or 'none'}", flush=True)
    every = np.concatenate(found)
    other = every[every > 0]
    texts = sum(bool(gap.any()) for gap in found)
    print(
        f"{len(other)} of {len(every)} positions ({len(other) / len(every):.2%}) in {texts} of "
        f"{len(found)} texts; gap: median {np.median(other) if len(other) else 0:.3f} nats, "
        f"largest {every.max():.3f}"
    )


if __name__ == "__main__":
    main()
