"""Runs a real vLLM server with the miniature model, in the engine's own environment.

.venv-vllm/bin/python -m tests.server_runs FOLDER

FOLDER holds the model (`with_words`).  Writes what came of it as JSON: rows of
`draftsim validate engine --http`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from commands.engine.check import runnable
from commands.engine.options import named_loads
from commands.validate.engine import compare_over_http
from profiler.engines import vllm
from profiler.engines.engine import EngineOptions
from simulator.engines import Workload
from tests.engine_runs import BATCH, LONGEST, MODEL, OWN_FILE, TRACE, miniature
from traces.latency.table import LatencyTable, as_cells

POLICIES = ("fixed:gamma=3", "gammatune", OWN_FILE)
ALONE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the engine's process, as on one GPU; on CPUs vLLM starts another for it."""


def with_words(folder: Path) -> None:
    """Save the miniature with a tokenizer, without which no server starts.

    By who holds transformers already: the server's client does without.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(512)}, unk_token="w0 "))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0 ")
    tokenizer.save_pretrained(miniature(folder))


def made_up(folder: Path) -> LatencyTable:
    """Latencies as an engine's profile has them; nothing here depends on their values."""
    rows = [
        ("target", "forward", batch, width, 16, 0.003 + 1e-4 * batch * width, 0.0, 3)
        for batch in (1, BATCH)
        for width in (1, LONGEST + 1)
    ]
    rows += [("target", "prefill", batch, 20, 0, 0.004, 0.0, 3) for batch in (1, BATCH)]
    rows += [("target", "host_round", 1, 1, 0, 5e-4, 0.0, 3)]
    free = [("draft", *row[1:5], 0.0, 0.0, 3) for row in rows if row[1] != "host_round"]
    parts = [{"batch": b, "output_s": 1e-4} for b in (1, BATCH)]
    meta = {
        "kind": "engine", "target": str(folder), "device": "cpu", "dtype": "float32",
        "host_parts": parts, "control_s": {"usual": 0.01}, "engine": {"own_drafter": False},
    }  # fmt: skip
    return LatencyTable(as_cells([*rows, *free]), meta)


def main(folder: Path) -> list[dict[str, Any]]:
    model = folder / "miniature"
    more = {**MODEL["more"], "distributed_executor_backend": ALONE}
    settings = {**MODEL, "more": more}
    options = EngineOptions(str(model), longest=LONGEST, max_batch=BATCH, **settings)
    chosen = runnable(POLICIES, TRACE, LONGEST)
    loads = named_loads("closed:1,3", "20")
    work = Workload(TRACE, chosen, loads, len(TRACE.requests))
    return compare_over_http(vllm, options, made_up(model), work, folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "rows.json").write_text(json.dumps(main(folder)))
