"""Latencies that papers publish, from data sheets and launches seen in other models."""

from __future__ import annotations

from simulator.hardware.published import check_published
from simulator.papers.measured.rows import Evidence, evidence, ranked

GIVEN = {
    "GammaTune 1, ms": ("GammaTune Table 1", "data sheet and the table's other models"),
    "SpecBound 3, ms": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
    "SpecBound 4, 3090/H800": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
}


def roofline_rows() -> list[Evidence]:
    """`simulator.hardware.check_published` as rows of evidence; quantised models apart."""
    groups: dict[str, list[Evidence]] = {}
    for row in check_published().to_dict("records"):
        study, given = GIVEN[str(row["table"])]
        if "quantised" in str(row["kind"]):
            given += ", quantised"
        quantity = f"{str(row['table']).partition(', ')[2]}, {row['row']}"
        groups.setdefault(str(row["table"]), []).append(
            evidence(study, given, quantity, float(row["ours"]), float(row["published"]))
        )
    return [row for rows in groups.values() for row in ranked(rows)]
