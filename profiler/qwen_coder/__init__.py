"""Coding prompts with unit tests for Qwen2.5-Coder, 91 of our own writing, and the pair's card."""
