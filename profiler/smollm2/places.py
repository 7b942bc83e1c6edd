"""Names of SmolLM2's drafters, and the folder of their weights in the project."""

from __future__ import annotations

from pathlib import Path

from profiler.fetched.models import SMOLLM2

NAME, DRAFTERS = SMOLLM2.name, SMOLLM2.drafters
STORED = Path(__file__).parent / "weights"
"""The drafters' weights as the project holds them (see `profiler.smollm2.drafters`)."""
HEADS = "heads"
"""Folder of exit heads and parallel heads in STORED."""
