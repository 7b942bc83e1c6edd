"""Acceptance by round, by start and by position, as files of ours and of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from traces.acceptance.trace import MOST_DRAFTED, MOST_TOKENS, Request, Trace
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import LoggedRound, head, only_file, read_json_rows, trace_of
from traces.importers.totals import Totals, summed
from traces.store.speculation_profile import KEYS, read_profile
from traces.store.text import MOST_ID, csv_rows, digits, label, read_text, whole, wholes

COLUMNS = ("request", "category", "first", "drafted", "accepted")


class RoundsCSV(Importer):
    """Rounds as CSV.

    One row a round, in order; ``request`` and ``category`` are optional columns.  Decoding is taken
    to begin after the prompt's own token, as in engines, or at the first token if the column
    ``first`` says 0.  A format of ours, for programs that have no importer.
    """

    name = "rounds"
    summary = "CSV, a row per round: drafted,accepted; optional request, category, first"

    def sniff(self, text: str) -> bool:
        return {"drafted", "accepted"} <= head(text)

    def read(self, files: Sequence[Path], options: Options) -> Trace:
        file = only_file(self.name, files)
        groups: dict[str, list[LoggedRound]] = {}
        categories: dict[str, str] = {}
        firsts = set()
        for at, row in csv_rows(file, read_text(file), ("accepted", "drafted"), COLUMNS):
            drafted, accepted = (
                digits(at, name, row[name], most=MOST_DRAFTED) for name in ("drafted", "accepted")
            )
            if accepted > drafted:
                raise FileError(f"{at}: accepted={accepted} exceeds drafted={drafted}")
            request = row.get("request") or "0"
            groups.setdefault(request, []).append(LoggedRound(accepted, drafted))
            categories.setdefault(request, row.get("category", ""))
            firsts.add(digits(at, "first", row.get("first") or "1"))
        if not groups:
            raise FileError(f"{file}: holds no rounds: expected a row a round")
        if firsts - {0, 1} or len(firsts) > 1:
            raise FileError(f"{file}: column first holds {sorted(firsts)}, expected 0, or 1, alone")
        if not any(r.drafted for rounds in groups.values() for r in rounds):
            raise FileError(f"{file}: is a log without speculation, no round drafted a token")
        first = firsts.pop()
        requests = []
        for name, rounds in groups.items():
            tokens = first + sum(r.accepted + 1 for r in rounds)
            whole(f"{file}, request {name}", "its number of tokens", tokens, most=MOST_TOKENS)
            limit = tokens + max(r.drafted for r in rounds) + 1
            requests.append(Request(name, categories[name], 0, tokens, limit, "eos"))
        meta = self.meta(
            files, first=first, draft_lengths="recorded", draft_lengths_known=True,
            prompt_lengths_known=False,
        )  # fmt: skip
        return trace_of(requests, list(groups.values()), meta)


_PREFIX = "acc_"


class ByStart(Importer):
    """SpecDecode-Bench's ``combined_*.jsonl``.

    One row a request: ``id``, ``prompt_token_ids``, ``generated_token_ids`` and, for each way of
    drafting, an entry like ``acc_eagle`` with ``acc_len``: per output position the tokens that a
    round emits which begins there, the target's own included.  A drafter on the target's features
    drafts otherwise from every start, so these are no runs of matches; fixed lengths and the oracle
    replay exactly from them.  Published files hold more accepted lengths than tokens, of starts
    after the last token: these are left out.  Source of the format: SpecDecode-Bench/simulator,
    ``request.py`` and ``data/``.
    """

    name = "by-start"
    summary = "accepted lengths by start (acc_eagle.acc_len), as in SpecDecode-Bench's simulator"
    takes = ("drafter",)

    def sniff(self, text: str) -> bool:
        return '"acc_len"' in text or '"acc_eagle_three"' in text

    def read(self, files: Sequence[Path], options: Options) -> Trace:
        requests: list[Request] = []
        lengths: list[Any] = []
        tokens: list[int] = []
        drafter, beyond = options.drafter, 0
        for file in files:
            for where, row in read_json_rows(file):
                drafter, found = _lengths(where, row, drafter)
                output = _ids(where, row, "generated_token_ids")[: len(found)]
                if 2 * len(output) < len(found):
                    raise FileError(
                        f"{where}: {len(found)} accepted lengths and {len(output)} output tokens: "
                        "use an unedited file"
                    )
                beyond += len(found) - len(output)
                found = found[: len(output)]
                prompt = tuple(_ids(where, row, "prompt_token_ids"))
                lengths.append(found)
                tokens += output
                requests.append(
                    Request(
                        label(where, "id", row.get("id"), str(len(requests))),
                        label(where, "category", row.get("category"), file.stem),
                        len(prompt), len(output), len(output), "length", prompt,
                    )
                )  # fmt: skip
        accepted = np.concatenate(lengths) - 1
        if not (longest := int(accepted.max())):
            raise FileError(f"{files[0]}: no draft of {drafter} was ever accepted")
        meta = self.meta(files, drafter=drafter, draft_lengths="by start", draft_lengths_known=True)
        if beyond:
            meta["left_out"] = [f"{beyond} accepted lengths of starts after the last token"]
        return Trace.without_tails(
            requests, longest, meta, accepted=accepted, token=np.array(tokens)
        )


def _lengths(where: str, row: dict[str, Any], drafter: str | None) -> tuple[str, Any]:
    """Return the drafter's name, and the tokens of a round from each position, (positions,)."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key.startswith(_PREFIX):
            entry = value.get("acc_len") if isinstance(value, dict) else value
            if entry is not None:
                found[key.removeprefix(_PREFIX)] = entry
    have = ", ".join(found) or "none"
    if drafter is None:
        if len(found) != 1:
            raise FileError(f"{where}: holds accepted lengths of {have}: name one with --drafter")
        return _lengths(where, row, next(iter(found)))
    if drafter not in found:
        raise FileError(f"{where}: has no accepted lengths of {drafter!r} (there are: {have})")
    entry = found[drafter]
    if not wholes(where, f"{_PREFIX}{drafter}", entry, 1, MOST_DRAFTED + 1):
        raise FileError(f"{where}: {_PREFIX}{drafter} holds no accepted length")
    return drafter, np.array(entry, dtype=np.int64)


def _ids(where: str, row: dict[str, Any], name: str) -> list[int]:
    if row.get(name) is None:
        raise FileError(f"{where}: has no {name}: expected a list of token ids")
    return wholes(where, name, row[name], most=MOST_ID)


class SpeculationProfiles(Importer):
    """NVIDIA Model-Optimizer's ``speculation_profile.json``."""

    name = "speculation-profile"
    summary = "speculation_profile.json of NVIDIA's Model-Optimizer, or of `draftsim export`"

    def sniff(self, text: str) -> bool:
        return any(f'"{key}"' in text for key in KEYS)

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        profile = read_profile(only_file(self.name, files))
        meta = self.meta(files, method=profile.method, conditions=dict(profile.conditions))
        if rounds := sum(profile.histogram):
            at_least = summed([profile.histogram], profile.longest)
            return Totals(
                rounds, rounds * profile.longest, sum(at_least), profile.longest, at_least,
                meta=meta,
            )  # fmt: skip
        # Means of an unknown number of rounds: rates take the place of counts.
        rates = list(profile.marginal)
        return Totals(None, profile.longest, sum(rates), profile.longest, rates, meta=meta)
