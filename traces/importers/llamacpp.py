"""Reading the responses of llama.cpp's server: ``timings`` with the draft's counts.

``predicted_n`` tokens in ``predicted_ms``, ``draft_n`` drafted and ``draft_n_accepted``
accepted ones, the last two only where a draft was made.  A round emits its accepted tokens and
one more, so there were ``predicted_n - draft_n_accepted`` of them, of which the first emitted
the prompt's own token; rounds without a draft are among them.  The server ends a round at an end
of the text that it finds in a draft, and counts that token as the target's own; only where it is
the draft's last is it counted as accepted, and no token follows: such a request had one round more
than this says (up to a draft's length more in versions that draft on past the end).
Source of the format: ggml-org/llama.cpp, ``tools/server``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import (
    MOST_COUNT,
    MOST_DRAFTED,
    MOST_TOKENS,
    check_drafted,
    is_seconds,
    whole,
)
from traces.importers.rows import read_json_rows
from traces.importers.totals import Totals


class LlamaCpp:
    """llama.cpp's server responses."""

    name = "llamacpp"
    summary = "responses of llama.cpp's server (timings with draft_n)"
    takes: tuple[str, ...] = ("draft_lengths",)

    def sniff(self, text: str) -> bool:
        return '"draft_n"' in text or '"draft_n_accepted"' in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        longest = _fixed(options.draft_lengths)
        rounds = drafted = accepted = tokens = requests = 0
        wall_s = 0.0
        for file in files:
            for where, row in zip(*read_json_rows(file), strict=True):
                timings = row.get("timings")
                if not isinstance(timings, dict):
                    if row.get("error") is not None:
                        continue  # a request that failed
                    raise FileError(f"{where}: has no timings: expected llama.cpp's responses")
                n, d, a = (
                    whole(where, f"timings.{name}", timings.get(name, 0), most=most)
                    for name, most in _COUNTS.items()
                )
                if a > d:
                    raise FileError(
                        f"{where}: draft_n_accepted={a} of draft_n={d}: they do not belong together"
                    )
                own = max(n - a - 1, int(d > 0))
                check_drafted(where, "timings.draft_n", d, own)
                requests, tokens, rounds = requests + 1, tokens + n, rounds + own
                drafted, accepted = drafted + d, accepted + a
                wall_s += _seconds(where, timings.get("predicted_ms"))
        if not drafted:
            raise FileError(
                f"{files[0]}: is a log of plain decoding, its timings have no draft_n: serve with "
                "a draft model"
            )
        meta: dict[str, Any] = {
            "kind": "llamacpp", "source": [file.name for file in files],
            "measured": {"tokens": tokens, "rounds": rounds, "wall_s": wall_s},
        }  # fmt: skip
        totals = Totals(rounds, drafted, accepted, longest, requests=requests, meta=meta)
        if longest is not None and not totals.fixed_length:
            raise FileError(
                f"{files[0]}: {drafted} tokens drafted in {rounds} rounds are no drafts of "
                f"{longest} each: say the --draft-max of a server with --draft-p-min 0, or leave "
                "--draft-lengths out"
            )
        return totals


_COUNTS = {"predicted_n": MOST_TOKENS, "draft_n": MOST_COUNT, "draft_n_accepted": MOST_COUNT}
"""Counts of a request, and how large each can be."""


def _fixed(text: str) -> int | None:
    """The draft length that ``fixed:N`` says; None where nothing is said."""
    if text == "infer":
        return None
    kind, _, length = text.partition(":")
    if kind != "fixed" or not length.isdigit() or not 1 <= int(length) <= MOST_DRAFTED:
        raise FileError(
            f"--draft-lengths {text}: counts of llama.cpp tell of drafts of one length alone: "
            "fixed:N, N the server's --draft-max"
        )
    return int(length)


def _seconds(where: str, predicted_ms: Any) -> float:
    """Seconds of decoding; 0 where they are not told."""
    if predicted_ms is None or predicted_ms == 0:
        return 0.0
    if not is_seconds(predicted_ms):
        raise FileError(
            f"{where}: timings.predicted_ms is {shown(predicted_ms)}, expected milliseconds"
        )
    return float(predicted_ms) / 1e3
