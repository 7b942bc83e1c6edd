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
