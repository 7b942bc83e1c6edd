"""Runs a real vLLM with a miniature model, in the engine's own environment; JSON of what came.

.venv-vllm/bin/python -m tests.engine_runs FOLDER

Once with drafts of ours (FOLDER/ours), and once with vLLM drafting by itself, with the first of the
model's layers (FOLDER/own); and what its lookups draft without any model (FOLDER/lookups).
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commands.engine.check import compare_loads, runnable, tried
from commands.engine.options import named_loads
from policies import parse_policy, policy_names
from policies.batch.base import BatchPolicy, Policy, SingleStream
from profiler.engines import loads as running
from profiler.engines.cells import EngineGrid
from profiler.engines.drafts import EngineDrafts, Forced, LookedUp
from profiler.engines.engine import EngineOptions
from profiler.engines.measure import EngineTable
from profiler.engines.session import Setup, policy_from
from profiler.engines.texts import own_texts, prompts_of
from profiler.engines.vllm.engine import VllmEngine
from simulator.engines import Workload
from simulator.serving import ClosedLoop
from simulator.tune.vllm import tune_vllm
from tests.engine_lookups import looked_up
from tests.own_policy import Told
from tests.traces_of_kinds import random_trace
from traces.acceptance.synthetic import synthetic_trace
from traces.sources.lookups.sources import PLD
from traces.store.files import write_latency

LONGEST, BATCH = 6, 4
SLICE_S = 0.03
"""A load takes a tenth of a second, in which its arms are to take turns."""
MODEL: dict[str, Any] = {
    "max_model_len": 256, "dtype": "float32", "more": {"num_gpu_blocks_override": 512},
}  # fmt: skip
"""Options of an engine of the miniature: to fill two gigabytes of cache with zeros takes longer
than all that is run."""
TRACE = synthetic_trace(
    0.7, requests=6, tokens=24, concentration=5.0, eos_fraction=0.3, prompt_length=20, seed=3
)
BY_START = random_trace("by start", 1, LONGEST)
"""Each start has drafts of its own, as a drafter on the target's features makes them."""
BY_BATCH = (
    "batch-table:table=[[1,2,3],[3,3,1],[4,64,0]]",
    "batch-table-hysteresis:table=[[1,2,3],[3,64,0]],patience=2",
    "turbospec:interval=2",
)
"""Batches that come and go cross the ends of these rows, with drafts before and after."""
OWN = "tests.own_policy.StopWhenUnsure"
OWN_FILE = f"{Path(__file__).with_name('own_policy.py')}:StopWhenUnsure"
"""The same policy by its file, as every command takes it."""


def miniature(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A Llama of two tiny layers with random weights, or of its first alone; saved once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.2)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    return folder


def names() -> list[str]:
    """Every policy for a single stream, and a user's own, by its module and by its file."""
    single = [n for n in policy_names() if not isinstance(parse_policy(n), SingleStream)]
    return [*single, OWN, OWN_FILE]


def policy(name: str) -> Policy:
    if name in (OWN, OWN_FILE):
        return policy_from(name, LONGEST)
    return parse_policy(name, max_gamma=LONGEST)


SEARCHED, LOOKING = random_trace("by start, ending", 1, LONGEST), ["fixed:gamma=3", "gammatune"]
"""Drafts as a lookup makes them, none at some positions, and what drafts by them."""


class Alike(BatchPolicy):
    """Drafts as many tokens as there are requests in the batch."""

    def plan(self, loads: Any) -> int:
        return len(loads)


def served(engine: VllmEngine, setup: Setup, prompts: dict[int, list[int]]) -> dict[str, Any]:
    """All requests at once: every request's rounds, and what each iteration ran."""
    engine.proposer.use(setup)
    for i, prompt in prompts.items():
        engine.add(f"{i}/0", prompt, TRACE.requests[i].tokens)
    steps = []
    while engine.busy:
        step = engine.step()
        if step is not None:
            steps.append({"kind": step.kind, "drafted": [d.drafted for d in step.decoded]})
    rounds = {n: [list(r) for r in s.rounds] for n, s in engine.proposer.finished.items()}
    return {"rounds": rounds, "steps": steps}


def main(folder: Path) -> dict[str, Any]:
    engine = VllmEngine(
        EngineOptions(
            str(miniature(folder / "miniature")), longest=LONGEST, max_batch=BATCH, **MODEL,
        )
    )  # fmt: skip
    prompts = prompts_of(TRACE, engine.vocabulary)
    texts = own_texts(engine, TRACE, prompts)
    forced = Forced(TRACE, texts, engine.vocabulary)
    found = {n: served(engine, Setup(policy(n), forced), prompts) for n in names()}
    batch = served(engine, Setup(Alike(), forced), prompts)
    Told.sizes.clear()
    lookup = served(engine, Setup(Told(4), LookedUp(PLD())), prompts)
    lookup["vocabularies"] = [*Told.sizes]
    small = EngineGrid((1, 2, 4), (1, 3), (32,), ((1, 16), (2, 16)), (1, 3), (1, 3), (16, 32), 1, 1)
    latency = EngineTable(engine, small.fitted(engine.options)).run()
    write_latency(latency, folder / "latency.parquet")
    chosen = runnable(["gammatune", *BY_BATCH], TRACE, LONGEST)
    arrivals = folder / "arrivals.csv"
    sent = [f"{0.02 * i},100,100" for i in range(6)]
    arrivals.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *sent]) + "\n")
    loads = named_loads("closed:1,3,4", "50", arrivals)
    looked = compare_loads(
        engine, latency, Workload(
            SEARCHED, runnable(LOOKING, SEARCHED, LONGEST), named_loads("closed:1,3", None, None),
            len(SEARCHED.requests),
        ),
    )  # fmt: skip
    tenants, side_by_side = engine.tenants, []

    def noted(blocks: Sequence[int]) -> Any:
        side_by_side.append(len(blocks))
        return tenants(blocks)

    engine.tenants = noted  # type: ignore[method-assign]
    work = Workload(TRACE, chosen, loads, len(TRACE.requests))
    rows = compare_loads(engine, latency, work)
    tuned = tune_vllm(TRACE, latency, [1, 3], lengths=range(LONGEST + 1), draws=40)
    closed = {f"closed:{n}": ClosedLoop(n) for n in (1, 3)}
    trial = tried(engine, latency, tuned, Workload(TRACE, {}, closed, len(TRACE.requests)))
    speculative = engine._engine.vllm_config.speculative_config
    return {
        "tuned": tuned.document, "tried": trial,
        "tables": hasattr(speculative, "num_speculative_tokens_per_batch_size"),
        "policies": found, "batch": batch, "lookup": lookup, "prompts": prompts, "texts": texts,
        "meta": engine.meta, "rows": rows, "looked": looked, "side_by_side": side_by_side,
    }  # fmt: skip


def own(folder: Path) -> dict[str, Any]:
    """Return rounds dictated to an engine with vLLM's own drafter, and rounds of its own tokens."""
    engine = VllmEngine(
        EngineOptions(
            str(miniature(folder / "miniature")), str(miniature(folder / "draft", layers=1)),
            longest=LONGEST, max_batch=BATCH, **MODEL,
        )
    )  # fmt: skip
    prompts = prompts_of(TRACE, engine.vocabulary)
    texts = own_texts(engine, TRACE, prompts)
    forced = Forced(TRACE, texts, engine.vocabulary)
    chosen = ["autoregressive", "fixed", "gammatune", "svip"]
    found = {n: served(engine, Setup(policy(n), forced), prompts) for n in chosen}
    own = {n: served(engine, Setup(policy(n), EngineDrafts()), prompts) for n in chosen[:3]}
    small = EngineGrid((1, 4), (1, 2, 4), (32,), ((1, 16), (1, 32)), (1,), (1,), (16,), 1, 1)
    latency = EngineTable(engine, small.fitted(engine.options)).run()
    write_latency(latency, folder / "latency.parquet")
    loads = named_loads("closed:1,3", None, None)
    between = EngineTable(engine, small)
    by_start, rows = (
        compare_loads(
            engine,
            latency,
            Workload(t, runnable(chosen[1:3], t, LONGEST), loads, len(t.requests)),
            beside,
        )
        for t, beside in ((BY_START, None), (TRACE, between))
    )
    write_latency(between.table(), folder / "between.parquet")
    return {
        "sweeps": between.done / len(small.blocks()),
        "policies": found, "own": own, "texts": texts, "meta": engine.meta, "rows": rows,
        "by_start": by_start,
        "outputs": own_outputs(engine, prompts),
    }  # fmt: skip


def own_outputs(engine: VllmEngine, prompts: dict[int, list[int]]) -> dict[str, list[int]]:
    """Return the texts that the engine writes with its own drafter's tokens."""
    served(engine, Setup(policy("fixed"), EngineDrafts()), prompts)
    return {name: stream.output for name, stream in engine.proposer.finished.items()}


def lookups(folder: Path) -> dict[str, Any]:
    return looked_up()


def run(made: Callable[[Path], dict[str, Any]], folder: Path) -> None:
    folder.mkdir()
    running.SLICE_S = SLICE_S
    (folder / "runs.json").write_text(json.dumps(made(folder)))


if __name__ == "__main__":
    # A process holds one engine, and a fork of this one begins with vLLM imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401

    gc.freeze()  # an engine collects again and again while it starts
    for name, made in (("ours", main), ("own", own), ("lookups", lookups)):
        fork = multiprocessing.get_context("fork").Process(
            target=run, args=(made, Path(sys.argv[1]) / name)
        )
        fork.start()
        fork.join()
        if fork.exitcode:
            sys.exit(1)
