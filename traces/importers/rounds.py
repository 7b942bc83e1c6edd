"""Reading plain rounds: a CSV with the columns ``drafted`` and ``accepted``.

One row a round, in order; ``request`` and ``category`` are optional columns.  Decoding is taken to
begin after the prompt's own token, as in engines, or at the first token if the column ``first``
says 0.  A format of ours, for programs that have no importer.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from traces.acceptance.schema import Request
from traces.acceptance.trace import Trace
from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import MOST_DRAFTED, MOST_TOKENS, digits, whole
from traces.importers.rows import LoggedRound, logged_trace, matches, only_file
from traces.store.text import read_text

COLUMNS = ("request", "category", "first", "drafted", "accepted")


class Rounds:
    """Rounds as CSV."""

    name = "rounds"
    summary = "CSV with drafted,accepted a round; request, category and first are optional"
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        head = {name.strip().lower() for name in text.partition("\n")[0].split(",")}
        return {"drafted", "accepted"} <= head

    def read(self, files: Sequence[Path], options: Options) -> Trace:
        del options
        file = only_file(self.name, files)
        reader = csv.DictReader(read_text(file).splitlines(), skipinitialspace=True)
        names = [str(name).strip().lower() for name in reader.fieldnames or ()]
        if missing := {"drafted", "accepted"} - set(names):
            raise FileError(f"{file}: lacks the column(s) {', '.join(sorted(missing))}")
        if unknown := sorted(set(names) - set(COLUMNS)):
            raise FileError(
                f"{file}: has unknown column(s) {', '.join(unknown)[:80]}: expected "
                f"{', '.join(COLUMNS)}"
            )
        reader.fieldnames = names
        groups: dict[str, list[LoggedRound]] = {}
        categories: dict[str, str] = {}
        firsts = set()
        for number, row in enumerate(reader, 2):
            at = f"{file} line {number}"
            if None in row or None in row.values():
                raise FileError(f"{at}: has not as many values as the header has columns")
            drafted, accepted = (
                digits(at, name, row[name], most=MOST_DRAFTED) for name in ("drafted", "accepted")
            )
            if accepted > drafted:
                raise FileError(f"{at}: accepted={accepted} exceeds drafted={drafted}")
            request = str(row.get("request") or "0")
            groups.setdefault(request, []).append(LoggedRound(accepted, drafted))
            categories.setdefault(request, str(row.get("category") or ""))
            firsts.add(digits(at, "first", row.get("first") or "1"))
        if not groups:
            raise FileError(f"{file}: holds no rounds: expected a row a round")
        if firsts - {0, 1} or len(firsts) > 1:
            raise FileError(f"{file}: column first holds {sorted(firsts)}, expected 0, or 1, alone")
        if not any(r.drafted for rounds in groups.values() for r in rounds):
            raise FileError(f"{file}: is a log of plain decoding, no round drafted a token")
        first = firsts.pop()
        requests, match = [], []
        for name, rounds in groups.items():
            tokens = first + sum(r.accepted + 1 for r in rounds)
            whole(f"{file}, request {name}", "its number of tokens", tokens, most=MOST_TOKENS)
            limit = tokens + max(r.drafted for r in rounds) + 1
            requests.append(Request(name, categories[name], 0, tokens, limit, "eos"))
            match.append(matches(rounds, tokens, first))
        meta = {
            "kind": "rounds",
            "source": file.name,
            "first": first,
            "draft_lengths": "recorded",
            "draft_lengths_known": True,
            "prompt_lengths_known": False,
        }
        return logged_trace(requests, match, meta)
