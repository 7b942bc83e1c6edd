"""Grids of what-if questions: axes, cells, prices, files, and break-even points."""
