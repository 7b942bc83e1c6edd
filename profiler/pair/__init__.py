"""The bundled pair: its text, training, prompts and figures (`python -m profiler.pair`)."""
