"""Coding prompts with unit tests for Qwen2.5-Coder, and the card of that pair."""

from pathlib import Path

CODING_PROMPTS = Path(__file__).parent / "coding_prompts.jsonl"
"""91 prompts of our own writing; `profiler.prompts.read_prompts` reads them."""
