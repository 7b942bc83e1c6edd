"""Latencies that papers publish, from data sheets and launches seen in other models."""

from __future__ import annotations

from simulator.hardware.formats import FORMATS
from simulator.hardware.published import check_published
from simulator.hardware.record import by_library, predictions
from simulator.papers.measured.rows import Evidence, evidence, ranked
from simulator.published import GAMMATUNE

GIVEN = {
    "GammaTune 1, ms": ("GammaTune Table 1", "data sheet and the table's other models"),
    "SpecBound 3, ms": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
    "SpecBound 4, 3090/H800": ("SpecBound Tables 3 and 4", "data sheet and GammaTune's models"),
}


def roofline_rows() -> list[Evidence]:
    """`check_published` and `predictions` as rows of evidence; quantised models apart."""
    groups: dict[str, list[Evidence]] = {}
    for row in check_published().to_dict("records"):
        study, given = GIVEN[str(row["table"])]
        if "quantised" in str(row["kind"]):
            given += ", quantised"
        quantity = f"{str(row['table']).partition(', ')[2]}, {row['row']}"
        groups.setdefault(str(row["table"]), []).append(
            evidence(study, given, quantity, float(row["ours"]), float(row["published"]))
        )
    for one in (*predictions("eager"), *by_library(), *predictions("graph")):
        if one.study is GAMMATUNE:
            continue  # above
        given = f"data sheet; {one.given}"
        if FORMATS[one.run.weights].quantised:
            given = given.replace("its unquantised", "quantised from its unquantised")
        if one.run.new_tokens > 1:
            given += ", wider"
        groups.setdefault(f"{one.study.name}, {given}", []).append(evidence(
            one.study.name, given, f"ms, {one.label}, {one.run.device}", 1e3 * one.seconds,
            1e3 * one.run.seconds,
        ))  # fmt: skip
    return [row for rows in groups.values() for row in ranked(rows)]
