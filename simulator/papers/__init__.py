"""The four papers' published tables and ours: SpecBound, CM-ASD, CSD and GammaTune.

Every published cell is a row, marked with how ours relates to it (`rows.Kind`).  The papers
contradict themselves in places; `simulator.published.CONTRADICTIONS` lists where.
"""

from simulator.papers.compare import side_by_side
from simulator.papers.ours import Kind, Ours, Row, Sampled
from simulator.papers.quantities import quantity_rows
from simulator.published import CONTRADICTIONS, PaperTable, notes_on

__all__ = [
    "CONTRADICTIONS",
    "Kind",
    "Ours",
    "PaperTable",
    "Row",
    "Sampled",
    "notes_on",
    "quantity_rows",
    "side_by_side",
]
