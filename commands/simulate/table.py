"""Output of ``draftsim simulate``: a sentence, the ranking, and lossy rules in their own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from commands.common import printed
from commands.common.columns import COLUMNS
from commands.common.written import Shown
from policies.registry import PLAIN, is_bound
from simulator.summary import row_key
from simulator.whatif.ranking import BEST_FIXED, are_bounds, is_called, lossless, winner
from traces.aliases import Row
from traces.digits import three_digits
from traces.sources.methods import method_of
from traces.sources.registry import DRAFT_MODEL


def over_all(rows: Sequence[Row]) -> list[Row]:
    """Return the rows over all prompts, of no category."""
    return [row for row in rows if row.get("category") is None]


def by_prompts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by the set of prompts that they are of; rows of one set do not name it."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.get("prompts", ""), []).append(row)
    return parts


def _named(recording: str, prompts: str) -> str:
    return ", ".join(filter(None, (recording, prompts)))


def headline(rows: Sequence[Row], recording: str = "") -> str:
    """Return the recommendation in a sentence: the fastest policy, against no speculation.

    ``recording`` says whose models and device the rows are of.  The gain over another row, such
    as the best fixed length, is told only if that row is itself faster than no speculation.
    """
    if len(parts := by_prompts(rows)) > 1:
        found = (headline(part, _named(recording, name)) for name, part in parts.items())
        return " ".join(filter(None, found))
    begin = f"{recording}: " if recording else ""
    if are_bounds(rows):
        return (
            f"{begin}lower bounds, which are not ranked: the log does not hold its draft lengths."
        )
    index = winner(rows)
    if index is None:
        changed = any(not lossless(row["verify"]) for row in rows)
        return f"{begin}no lossless policy is shown, so none is recommended." if changed else ""
    best = rows[index]
    lo, hi = best["speedup_lo"], best["speedup_hi"]
    span = (
        f" ({three_digits(lo)} to {three_digits(hi)})" if lo is not None and hi is not None else ""
    )
    factor = f"{three_digits(best['speedup'])}x no speculation{span}"
    if best["speedup"] <= 1:
        return (
            f"{begin}no policy is faster than no speculation: the best, {best['policy']}, is at "
            f"{factor}."
        )
    lossy = [row["speedup"] or 0.0 for row in rows if not lossless(row["verify"])]
    # Rules that change the text are in the same table or the next one.
    among = " of the lossless" if max(lossy, default=0.0) > best["speedup"] else ""
    said = f"{begin}{best['policy']} is fastest{among}, {factor}"
    rival = next((r for r in rows if is_called(r, best["against"] or "")), None)
    if rival is None or best["gain"] is None:
        return f"{said}."
    at = f"{rival['policy']}, is at {three_digits(rival['speedup'])}x"
    if rival["speedup"] <= 1 and _is_best_fixed(rival):
        alike = [r for r in rows if r["source"] == rival["source"]]
        first = winner(alike)
        drafter = "the draft model" if rival["source"] == DRAFT_MODEL else rival["source"]
        slow = first is not None and alike[first]["speedup"] <= 1
        return f"{said}; {f'with {drafter} no policy is: ' * slow}the best fixed length, {at}."
    gain, low, high = (best[k] for k in ("gain", "gain_lo", "gain_hi"))
    said += f"; {percent(gain)} against {best['against']}"
    if low is None:
        return f"{said}."
    apart = "" if not low <= 1 <= high else ": these prompts cannot tell them apart"
    return f"{said} ({percent(low)} to {percent(high)}){apart}."


def _is_best_fixed(row: Row) -> bool:
    return BEST_FIXED in (row.get("note") or "").split("; ")


def percent(ratio: float) -> str:
    """Return a ratio as a difference in percent, with its sign."""
    return f"{100 * (ratio - 1):+.1f}%"


def print_ranked(
    rows: Sequence[Row], by_name: bool = False, recording: str = "", gains: bool = False
) -> None:
    """Print the sentence (`headline`), the tables (`ranked_tables`), and what their marks mean."""
    console = printed.table_console()
    tables = ranked_tables(rows, by_name, gains)
    if said := headline(over_all(rows), recording):
        console.print(printed.printable(said))
    for table in tables:
        printed.print_table(table.rows, table.show, table.title)
    console.print()
    for line in dict.fromkeys(line for table in tables for line in table.notes):
        console.print(printed.printable(line))


def ranked_tables(
    rows: Sequence[Row], by_name: bool = False, gains: bool = False, recording: str = ""
) -> list[Shown]:
    """Return the tables that show `rows`: lossy rules in one of their own, then categories.

    Fastest first, but for lower bounds, which keep the order in which they were asked for. Where
    policies were named one by one, they share one table, lossy rules below. Rows of other prompts
    have tables of their own (`by_prompts`). Every category then
    shows them all, as it does where all rows are lossy and their rules differ. ``gains`` adds the
    gain over the row that rows are compared with; titles begin with `recording`.
    """
    if len(sets := by_prompts(rows)) > 1:
        return [
            table for name, own in sets.items()
            for table in ranked_tables(own, by_name, gains, _named(recording, name))
        ]  # fmt: skip
    rival = next((r["against"] for r in rows if r["against"]), None) if gains else None
    overall = over_all(rows)
    if not are_bounds(overall):
        overall = sorted(overall, key=lambda r: -(r["speedup"] or 0.0))
    if rival is None:
        overall = [{**row, "gain": None} for row in overall]
    exact = [r for r in overall if lossless(r["verify"])]
    lossy = [r for r in overall if not lossless(r["verify"])]
    gained = "" if rival is None else f"; gain: speed over {rival}'s"
    begin = f"{recording}: " if recording else ""
    tables = []
    if by_name and lossy:
        title = f"{begin}lossless first, then lossy (the output changes){gained}"
        tables.append(_shown(title, [*exact, *lossy], BOTH))
    else:
        if exact:
            tables.append(_shown(f"{begin}lossless{gained}", exact, LOSSLESS))
        if lossy:
            tables.append(_shown(f"{begin}lossy (the output changes){gained}", lossy, LOSSY))
    parts = [r for r in rows if r.get("category") is not None]
    if parts and are_bounds(parts):
        said = "categories are not ranked, too: --json has their rows"
        tables = [replace(table, notes=[*table.notes, said]) for table in tables]
    elif parts:
        if by_name or (not exact and len({row["verify"] for row in lossy}) > 1):
            lines = category_rows([*exact, *lossy], parts)
            tables.append(Shown(lines, f"{begin}speedup by category", BY_CATEGORY))
        elif ladder := category_ladder(
            exact or lossy, [r for r in parts if not exact or lossless(r["verify"])]
        ):
            title = f"{begin}speedup by category, {'lossless' if exact else lossy[0]['verify']}"
            tables.append(Shown(ladder, title, list(ladder[0])))
    return tables


CODE = "passes\n/greedy"
LOSSLESS = ("policy", "speedup", "95%", "gain, %", "tokens\n/round", "accepted")
LOSSY = ("policy", "rule", "speedup", "95%", "gain, %", "wrong", "like\ngreedy", "BLEU", CODE)
BOTH = ("policy", "verify", "speedup", "95%", "gain, %", "wrong")
"""Columns of the tables of each kind of row, and of one that holds both kinds."""
SPEEDUP = ("speedup", "speedup_lo", "speedup_hi")
BY_CATEGORY = ("category", "policy", "verify", *SPEEDUP)
BY_PHASE = ("phase", "share", "policy", "block_efficiency", "acceptance_rate", *SPEEDUP)
"""Columns of the tables of rows by category and by phase of the answer."""


def _shown(title: str, rows: Sequence[Row], columns: Sequence[str]) -> Shown:
    """Return the table of these columns, without those that no row has."""
    cells = [_cells(row) for row in rows]
    if len({row["verify"] for row in rows if row["policy"] != PLAIN}) > 1:
        # Decoding without drafts has no rule; where all others share one, it is said once.
        for row, cell in zip(rows, cells, strict=True):
            cell["rule"] = "-" if row["policy"] == PLAIN else cell["rule"]
    names = [name for name in columns if any(row.get(name, "-") != "-" for row in cells)]
    return Shown(cells, title, names, _footnotes(rows, names))


def _cells(row: Row) -> dict[str, Any]:
    """Return the row's cells as text, by column, and its note; bounds colour the speedup."""
    bound = are_bounds([row])
    about = row["fidelity"] == "approximate" and lossless(row["verify"])
    name = row["policy"] + (" ~" if about else "") + (" *" if row["note"] and not bound else "")
    least = "\u2265 " if bound else ""
    cells = {name: None if bound else row[name] for name in ("speedup_lo", "speedup_hi")}
    cells |= {
        "policy": name, "rule": row["verify"], "speedup": least + _speed(row), "95%": _span(row),
        "verify": "-" if row["policy"] == PLAIN else row["verify"], "note": row["note"] or "",
        "tokens\n/round": _number(row["block_efficiency"], 2),
        "accepted": _share(row["acceptance_rate"]), "wrong": _share(row.get("mismatches_accepted")),
        "like\ngreedy": _share(row.get("agreement")), "BLEU": _number(row.get("relative_bleu"), 1),
    }  # fmt: skip
    if row["gain"] is not None:
        low, high = (row[k] for k in ("gain_lo", "gain_hi"))
        span = "" if low is None else f" ({percent(low)[:-1]}, {percent(high)[:-1]})"
        cells["gain, %"] = percent(row["gain"])[:-1] + span
    if tested := row.get("tested"):
        own, greedy = (100 * row[name] / tested for name in ("passed", "passed_greedy"))
        cells[CODE] = f"{own:.0f}/{greedy:.0f}"
    return cells


def _footnotes(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the meanings of the marks and columns of a table of `rows` over all prompts."""
    found = []
    if are_bounds(rows):
        found.append("\u2265 lower bound; its interval is over prompts alone")
    for row in rows:
        if are_bounds([row]):
            continue
        name = _row_name(row)
        if row["note"] and f"* {name}: {row['note']}" not in found:
            found.append(f"* {name}: {row['note']}")
    if any(r["fidelity"] == "approximate" and lossless(r["verify"]) for r in rows):
        found.append("~ approximate")
    if bounds := [r for r in rows if is_bound(r["policy"])]:
        found.append(_oracle_note(bounds, rows))
    told = {
        name: " ".join(name.split()).replace(" /", "/") for name in columns if name in LOSSY[5:]
    }
    found += [f"{name}: {COLUMNS[name]}" for name in told.values()]
    scored = [r for r in rows if r.get("scored")]
    if scored:
        found.append(
            "solved: prompts with a numeric answer whose text ends in that number, within the "
            "token limit"
        )
    for row in scored:
        count, own, greedy = (row[name] for name in ("scored", "solved", "solved_greedy"))
        found.append(f"{_row_name(row)}: solved {own} of {count} (greedy {greedy} of {count})")
    return found


def _oracle_note(bounds: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return what the oracle is: a bound only if no row with its drafts, or none, is faster."""
    best = max(row["speedup"] or 0.0 for row in bounds)
    faster = {
        row["source"] for row in rows
        if row not in bounds and lossless(row["verify"]) and (row["speedup"] or 0.0) > best
    }  # fmt: skip
    own = {row["source"] for row in bounds}
    if faster & {"none", *own}:
        return "oracle knows every outcome, but not what drafts cost: here it is no bound"
    if faster:
        return "oracle knows every outcome of its own drafter: a bound for that alone, not a policy"
    return "oracle knows every outcome: a bound, not a policy"


def _row_name(row: Row) -> str:
    """Return the policy, and a lossy rule where it is not a method that has one."""
    if lossless(row["verify"]) or method_of(row["policy"]) is not None:
        return str(row["policy"])
    return f"{row['policy']} / {row['verify']}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


ORACLE, RULE = "oracle", "rate-optimal"


def category_ladder(overall: Sequence[Row], rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return one line a category, as text: the rungs from one fixed length up to the oracle.

    Under a lossy rule there is no oracle: it knows what a lossless rule accepts.

    ``overall`` are the rows over all prompts, ``rows`` those by category: all of lossless rules,
    or of one other rule.
    The fixed length is the one that is best over all prompts, so that it is one setting; the
    fastest policy is the category's own, chosen on the prompts shown.
    """
    fixed = next((r["policy"] for r in overall if _is_best_fixed(r)), None)
    lines = []
    for category in dict.fromkeys(row["category"] for row in rows):
        own = {(r["policy"], r["source"]): r for r in rows if r["category"] == category}
        by_kind = {row["policy"].partition(":")[0]: row for row in own.values()}
        real = [r for r in own.values() if r["policy"] != PLAIN and not is_bound(r["policy"])]
        best = max(real, key=lambda r: r["speedup"] or 0.0, default=None)
        line = {"category": category}
        if fixed is not None:
            at = next(r for (policy, _), r in own.items() if policy == fixed)
            line[fixed.replace(":", ":\n")] = _speed(at)
        line["fastest"] = "-" if best is None else best["policy"]
        line["speedup"] = "-" if best is None else _speed(best)
        line["95%"] = "-" if best is None else _span(best)
        for kind in (RULE, ORACLE):
            if kind in by_kind and (kind == RULE or lossless(by_kind[kind]["verify"])):
                line[kind.replace("-", "-\n")] = _speed(by_kind[kind])
        lines.append(line)
    return lines


def category_rows(overall: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return those of `rows`, by category, in the order of `overall`, but for plain decoding."""
    own = {(row["category"], *row_key(row)): row for row in rows}
    drafting = [row_key(row) for row in overall if row["policy"] != PLAIN]
    categories = dict.fromkeys(row["category"] for row in rows)
    return [own[one, *key] for one in categories for key in drafting if (one, *key) in own]


def _speed(row: Row) -> str:
    return _number(row["speedup"], 2)


def _span(row: Row) -> str:
    lo, hi = row["speedup_lo"], row["speedup_hi"]
    return "-" if lo is None or hi is None else f"{lo:.2f}-{hi:.2f}"
