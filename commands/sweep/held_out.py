"""``draftsim sweep --tune``: a policy's own parameters, searched on some prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from traces.errors import DraftsimError

if TYPE_CHECKING:
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

SEARCHED = (
    "policy", "tried", "train_speedup", "speedup", "speedup_lo", "speedup_hi",
    "block_efficiency", "share_below_1",
)  # fmt: skip


def tuned_rows(
    trace: Trace, latency: LatencyTable, texts: Sequence[str], *, resamples: int, seed: int,
    jobs: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Per policy the setting it came with and the best found, on the prompts held out.

    `texts` name the values to try in braces.  ``tried`` is the number of settings searched and
    ``train_speedup`` the best one's speedup on the prompts it was searched on.

    Raises
    ------
    DraftsimError
        If a text has no braces, or its search is impossible.
    """
    from simulator.summary import to_rows
    from simulator.whatif.sweep.grid import search_space
    from simulator.whatif.tuning import tune

    rows: list[dict[str, Any]] = []
    for text in texts:
        name, space = search_space(text)
        if not space:
            raise DraftsimError(
                f"--tune searches values in braces, which {text!r} has none of: "
                "write them as in gammatune:eta={0.1,0.3,0.5}"
            )
        found = tune(trace, latency, name, space, resamples=max(resamples, 1), seed=seed, jobs=jobs)
        for row in to_rows(found.held_out)[1 if rows else 0 :]:
            best = row["policy"] == found.text
            rows.append(
                {
                    **row, "tried": len(found.tried) if best else None,
                    "train_speedup": float(found.tried["train_speedup"][0]) if best else None,
                }
            )  # fmt: skip
    return rows
