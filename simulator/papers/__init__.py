"""The four papers' published tables and ours: SpecBound, CM-ASD, CSD and GammaTune.

Every published cell is a row, marked with how ours relates to it (`simulator.papers.ours.Kind`).
The papers contradict themselves in places; `simulator.published.CONTRADICTIONS` lists where.
"""
