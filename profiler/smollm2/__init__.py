"""SmolLM2's drafters: their names, their weights in this folder, and the card of the pair."""

from __future__ import annotations

from pathlib import Path

from profiler.fetched.places import SMOLLM2

NAME, DRAFTERS = SMOLLM2.name, SMOLLM2.drafters
STORED = Path(__file__).parent / "weights"
"""The drafters' weights as the project holds them (see `profiler.smollm2.stored`)."""
HEADS = "heads"
"""Folder of exit heads and parallel heads in STORED."""
