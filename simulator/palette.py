"""Colours, markers and dashes of every plot, and of the report's page; matplotlib is not needed.

The colours are Okabe and Ito's, told apart by the colour-blind.
"""

from __future__ import annotations

from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
INK, GREY = "#222222", "#8C8C8C"
