"""The calibration of a GPU in three stages, a command each.

    python -m profiler.suite latency --device cuda --out DIR
    python -m profiler.suite forced  --device cuda --out DIR
    python -m profiler.suite trained --device cuda --out DIR
    python -m profiler.suite unpack  --out DIR --into FOLDER

Runs from a plain checkout: torch, transformers, tokenizers, numpy, scipy, pandas, pyarrow
and rich are all it needs.
"""
