"""Grids of what-if questions: axes, cells, prices, files, and where policies stop paying."""
