"""Reading the responses of llama.cpp's server: ``timings`` with the draft's counts.

``predicted_n`` tokens in ``predicted_ms``, ``draft_n`` drafted and ``draft_n_accepted``
accepted ones, the last two only where a draft was made.  A round emits its accepted tokens and
one more, so there were ``predicted_n - draft_n_accepted`` of them, of which the first emitted
the prompt's own token; rounds without a draft are among them.  The server ends a round at an end
of the text that it finds in a draft, and counts that token as the target's own; only where it is
the draft's last is it counted as accepted, and no token follows: such a request had one round more
than this says (up to a draft's length more in versions that go on behind the end).
Source of the format: ggml-org/llama.cpp, ``tools/server``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from traces.errors import FileError
from traces.importers.base import Options
from traces.importers.bounds import MOST_COUNT, MOST_TOKENS, check_drafted, is_seconds, whole
from traces.importers.rows import read_json_rows
from traces.importers.totals import Totals


class LlamaCpp:
    """llama.cpp's server responses."""

    name = "llamacpp"
    summary = "responses of llama.cpp's server (timings with draft_n)"
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        return '"draft_n"' in text or '"draft_n_accepted"' in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        del options
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
        return Totals(rounds, drafted, accepted, requests=requests, meta=meta)


_COUNTS = {"predicted_n": MOST_TOKENS, "draft_n": MOST_COUNT, "draft_n_accepted": MOST_COUNT}
"""Counts of a request, and how large each can be."""


def _seconds(where: str, predicted_ms: Any) -> float:
    """Seconds of decoding; 0 where they are not told."""
    if predicted_ms is None or predicted_ms == 0:
        return 0.0
    if not is_seconds(predicted_ms):
        raise FileError(
            f"{where}: timings.predicted_ms is {shown(predicted_ms)}, expected milliseconds"
        )
    return float(predicted_ms) / 1e3
