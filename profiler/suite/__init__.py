"""The calibration of a GPU in three stages, a command each.

    python -m profiler.suite latency --device cuda --out DIR
    python -m profiler.suite forced  --device cuda --out DIR
    python -m profiler.suite trained --device cuda --out DIR
    python -m profiler.suite unpack  --out DIR --into FOLDER

Afterwards, on any machine: ``draftsim validate recorded FOLDER`` holds what was measured
against what the latencies predict.

Runs from a plain checkout: torch, transformers, tokenizers, numpy, scipy, pandas, pyarrow
and rich are all it needs.
"""

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled"
KERNELS = {
    EAGER: "Hugging Face modules, launched kernel by kernel",
    GRAPH: "Hugging Face kernels in a CUDA graph, attention grouped and split over the keys",
    COMPILED: "torch.compile and fused projections in a CUDA graph, attention as in graph",
}
"""Description of each measured mode; none is an engine."""
MODES = tuple(KERNELS)
