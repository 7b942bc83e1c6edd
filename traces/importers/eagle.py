"""Reading EAGLE's answer files: rounds, tokens and seconds of each turn.

One row a question with ``choices[0]``: ``idxs`` (verifications), ``new_tokens`` and
``wall_time`` (seconds), one entry per turn.  EAGLE verifies a tree, and the file holds only sums of
accepted tokens, so no chain can be replayed from it.  In files of
plain decoding ``idxs`` is the last step's index, one less than the tokens, and
``new_tokens`` is 0, or in other versions the number of tokens.  Source of the format:
SafeAILab/EAGLE, ``evaluation/gen_ea_answer_*.py`` and ``gen_baseline_answer_*.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.acceptance.trace import MOST_TOKENS
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import (
    NO_NAME,
    LoggedTurn,
    baseline_of,
    check_once,
    only_file,
    read_json_rows,
    turns_of,
)
from traces.importers.totals import Totals
from traces.store.text import label


class EagleLog(Importer):
    """EAGLE's ``*.jsonl`` answers."""

    name = "eagle"
    summary = "EAGLE's answer file (idxs, new_tokens, wall_time): a tree's totals"
    takes = ("baseline",)

    def sniff(self, text: str) -> bool:
        return '"idxs"' in text and '"new_tokens"' in text and '"accept_lengths"' not in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        file = only_file(self.name, files)
        turns = read_turns(file)
        if is_plain(turns):
            raise FileError(
                f"{file}: is a log without speculation (a token a step): name the speculative "
                "method's file, and this one as --baseline"
            )
        rounds, tokens = sum(t.rounds for t in turns), sum(t.tokens for t in turns)
        # Every verification counts its accepted tokens and one more.
        accepted = tokens - rounds
        if accepted < 0:
            raise FileError(
                f"{file}: {tokens} tokens in {rounds} rounds of {len(turns)} turns: a round emits "
                "one token or more; use an unedited file"
            )
        measured = {
            "tokens": tokens, "rounds": rounds, "wall_s": sum(t.wall_s for t in turns),
            "per_round": tokens / rounds,
        }  # fmt: skip
        meta = self.meta(files, measured=measured)
        if (baseline := options.baseline) is not None:
            plain = read_turns(baseline)
            if not is_plain(plain):
                raise FileError(
                    f"{baseline}: is no log without speculation: give the file of the baseline"
                )
            counted = [t._replace(tokens=t.tokens or t.rounds) for t in plain]
            meta["baseline"] = baseline_of(baseline, counted, turns)
        return Totals(rounds, None, accepted, requests=len(turns), tree=True, meta=meta)


def is_plain(turns: Sequence[LoggedTurn]) -> bool:
    """Return whether the file is one of plain decoding: no tokens counted, or one a step."""
    return all(t.tokens in (0, t.rounds - 1, t.rounds) for t in turns)


def read_turns(file: Path) -> list[LoggedTurn]:
    """Return the turns of a file; FileError if it is damaged."""
    turns = []
    for where, row in read_json_rows(file):
        question = label(where, "question_id", row.get("question_id"), NO_NAME)
        _, *lists = turns_of(where, row, {"idxs": MOST_TOKENS, "new_tokens": MOST_TOKENS})
        for i, (last, tokens, wall_s) in enumerate(zip(*lists, strict=True), 1):
            # ``idxs`` is the index of the last verification.
            turns.append(LoggedTurn(where, question, i, "", last + 1, tokens, wall_s))
    check_once(file, turns)
    return turns
