"""The ladder by category: what ``draftsim simulate --by-category`` prints below its ranking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
PLAIN, ORACLE, RULE = "autoregressive", "oracle", "rate-optimal"


def category_ladder(overall: Sequence[Row], rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line a category, as text: the rungs from one fixed length up to the oracle.

    ``overall`` are the rows over all prompts, ``rows`` those by category, all of lossless rules.
    The fixed length is the one that is best over all prompts, so that it is one setting; the
    fastest policy is the category's own, chosen on the prompts shown.
    """
    from simulator.whatif.ranking import BEST_FIXED

    fixed = next((r["policy"] for r in overall if BEST_FIXED in (r.get("note") or "")), None)
    lines = []
    for category in dict.fromkeys(row["category"] for row in rows):
        own = {(r["policy"], r["source"]): r for r in rows if r["category"] == category}
        by_kind = {row["policy"].partition(":")[0]: row for row in own.values()}
        real = [r for r in own.values() if r["policy"].partition(":")[0] not in (ORACLE, PLAIN)]
        best = max(real, key=lambda r: r["speedup"] or 0.0, default=None)
        line = {"category": category}
        if fixed is not None:
            at = next(r for (policy, _), r in own.items() if policy == fixed)
            line[fixed.replace(":", ":\n")] = _speed(at)
        line["fastest"] = "-" if best is None else best["policy"]
        line["speedup"] = "-" if best is None else _speed(best)
        line["95 %"] = "-" if best is None else _span(best)
        for kind in (RULE, ORACLE):
            if kind in by_kind:
                line[kind.replace("-", "-\n")] = _speed(by_kind[kind])
        lines.append(line)
    return lines


def category_rows(overall: Sequence[Row], rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a line for each category and each row of `overall` but plain decoding, in its order.

    ``rows`` are those by category.
    """
    lossy = len({row["verify"] for row in overall if row["policy"] != PLAIN}) > 1
    lines = []
    for category in dict.fromkeys(row["category"] for row in rows):
        own = {_key(row): row for row in rows if row["category"] == category}
        shown = category
        for row in overall:
            if row["policy"] == PLAIN or (found := own.get(_key(row))) is None:
                continue
            line = {"category": shown, "policy": row["policy"]}
            line |= {"verify": row["verify"]} if lossy else {}
            lines.append({**line, "speedup": _speed(found), "95 %": _span(found)})
            shown = ""
    return lines


def _key(row: Row) -> tuple[str, ...]:
    return row["policy"], row["verify"], row["source"]


def _speed(row: Row) -> str:
    return "-" if row["speedup"] is None else f"{row['speedup']:.2f}"


def _span(row: Row) -> str:
    lo, hi = row["speedup_lo"], row["speedup_hi"]
    return "-" if lo is None or hi is None else f"{lo:.2f}-{hi:.2f}"
