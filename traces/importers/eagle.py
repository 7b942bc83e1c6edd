"""Reading EAGLE's answer files: rounds, tokens and seconds of each turn.

One row a question with ``choices[0]``: ``idxs`` (verifications), ``new_tokens`` and
``wall_time`` (seconds), one entry per turn.  EAGLE verifies a tree, and the file holds only sums of
accepted tokens, so no chain can be replayed from it.  In files of
plain decoding ``idxs`` is the last step's index, one less than the tokens, and
``new_tokens`` is 0, or in other versions the number of tokens.  Source of the format:
SafeAILab/EAGLE, ``evaluation/gen_ea_answer_*.py`` and ``gen_baseline_answer_*.py``, which
`EagleTurn.rounds` follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown
from statistics import median
from typing import Any, NamedTuple

from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.bounds import MOST_TOKENS, is_seconds, label
from traces.importers.rows import only_file, read_json_rows
from traces.importers.totals import Totals


class EagleTurn(NamedTuple):
    """One generation."""

    key: tuple[str, int]
    """Question and turn."""
    rounds: int
    """Verifications: ``idxs`` is the index of the last one."""
    tokens: int
    wall_s: float


class EagleLog(Importer):
    """EAGLE's ``*.jsonl`` answers."""

    name = "eagle"
    summary = "EAGLE's answer file (idxs, new_tokens, wall_time): a tree's totals"
    takes = ("baseline",)

    def sniff(self, text: str) -> bool:
        return '"idxs"' in text and '"new_tokens"' in text and '"accept_lengths"' not in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        file = only_file(self.name, files)
        turns = _turns(file)
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
        wall_s = sum(t.wall_s for t in turns)
        meta: dict[str, Any] = {
            "kind": "eagle", "source": file.name,
            "measured": {
                "tokens": tokens, "rounds": rounds, "wall_s": wall_s, "per_round": tokens / rounds,
            },
        }  # fmt: skip
        if options.baseline is not None:
            meta["baseline"] = _baseline(options.baseline, turns, tokens / wall_s)
        return Totals(rounds, None, accepted, requests=len(turns), tree=True, meta=meta)


def is_plain(turns: Sequence[EagleTurn]) -> bool:
    """Return whether the file is one of plain decoding: no tokens counted, or one a step."""
    return all(t.tokens in (0, t.rounds - 1, t.rounds) for t in turns)


def _baseline(file: Path, turns: Sequence[EagleTurn], throughput: float) -> dict[str, Any]:
    plain = _turns(file)
    if not is_plain(plain):
        raise FileError(f"{file}: is no log without speculation: give the file of the baseline")
    known = {t.key for t in plain}
    if missing := [t.key for t in turns if t.key not in known]:
        raise FileError(
            f"{file}: has no question {missing[0][0]}, turn {missing[0][1]}: give the baseline of "
            "the same questions"
        )
    per_token = sum(t.wall_s for t in plain) / sum(t.tokens or t.rounds for t in plain)
    return {
        "source": file.name,
        "target_s": median(t.wall_s / (t.tokens or t.rounds) for t in plain),
        "per_token_s": per_token,
        "speedup": throughput * per_token,
    }


def _turns(file: Path) -> list[EagleTurn]:
    turns = []
    for where, row in read_json_rows(file):
        question = label(where, "question_id", row.get("question_id"), "?")
        choices = row.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        lists = [choice.get(n) if isinstance(choice, dict) else None for n in _FIELDS]
        if not all(isinstance(values, list) and values for values in lists):
            raise FileError(f"{where}: has no choices[0] with {', '.join(_FIELDS)}: expected EAGLE")
        if len({len(values) for values in lists if values is not None}) != 1:
            raise FileError(f"{where}: its lists differ in length: use an unedited file")
        for i, (last, tokens, wall) in enumerate(zip(*(v or [] for v in lists), strict=True), 1):
            counts = all(type(n) is int and 0 <= n <= MOST_TOKENS for n in (last, tokens))
            if not (counts and is_seconds(wall)):
                raise FileError(
                    f"{where}, turn {i}: idxs={shown(last)}, new_tokens={shown(tokens)}, "
                    f"wall_time={shown(wall)}: expected counts, at most {MOST_TOKENS:,}, and "
                    "seconds; use an unedited file"
                )
            turns.append(EagleTurn((question, i), last + 1, tokens, float(wall)))
    return turns


_FIELDS = ("idxs", "new_tokens", "wall_time")
