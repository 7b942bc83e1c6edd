"""Acceptance by position for commands: what is told (`read_acceptance`), and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commands.common.output import remark
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.aggregate.positions import Positions
    from simulator.recording import Recording
    from traces.acceptance.trace import Trace

FORMS = (
    "numbers: 0.76,0.60,0.43 (chance that the first 1, 2, ... tokens are all accepted, as vLLM "
    "logs it), 0.8 (every position, if those before were), 1:1.8,2:2.4 (acceptance length by draft "
    "length); or a recording, a server's /metrics (also its URL on this machine; two files are "
    "before and after), a benchmark's result, speculation_profile.json, FILE.yaml[#CURVE], or a "
    "log that `draftsim import` reads"
)
LONGEST = 8
"""Longest draft that a recording is replayed at where no draft length is asked for."""


def load_positions(
    given: str | Sequence[str], k: int | None = None, *, form: str = "auto",
    source: str | None = None, drafts: int | None = None,
) -> Positions:  # fmt: skip
    """Return acceptance by position, from a text or the files of one log (`FORMS`).

    ``k`` is the draft length that recordings are replayed at: by default their longest, up to
    `LONGEST`, or the longest draft that an imported log shows.  ``source`` is as in ``--source``,
    ``drafts`` the draft length of counts that do not say theirs.

    Raises
    ------
    DraftsimError
        As in `read_acceptance`, or if a recording does not have the drafts.
    """
    from simulator.aggregate.observed import is_told, read_acceptance
    from simulator.aggregate.positions import of_trace
    from simulator.recording import imputed

    def rounds(label: str, read: Trace) -> Positions:
        trace = imputed(label, read, "acceptance by position", remark)
        seen = (trace.meta.get("imputed") or {}).get("longest_seen")
        return of_trace(label, trace, k or int(seen or trace.max_gamma or LONGEST))

    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) == 1 and texts[0].strip() and not is_told(texts[0]):
        trace = load_unpriced(texts[0], source, "acceptance by position").trace
        return of_trace(texts[0], trace, k or min(trace.max_gamma or LONGEST, LONGEST))
    if source is not None:
        raise DraftsimError(
            f"--source {source} chooses a drafter of a recording, and {', '.join(texts)} has no "
            "drafters: drop it"
        )
    one = texts[0] if len(texts) == 1 else texts
    found = read_acceptance(one, k, form=form, rounds=rounds, drafts=drafts)
    if found.note:
        remark(f"{found.label}: {found.note}")
    return found


def load_unpriced(name: str, source: str | None, chooses: str) -> Recording:
    """Return the recording called `name`, for what needs no costs: it may have no latencies.

    ``source`` is as in ``--source``; ``chooses`` and errors are those of `load_recording`.
    """
    from commands.common.drafted import load_recording
    from traces.store.recordings import folder_of

    folder = folder_of(name)
    timed = folder is not None and (folder / "latency.parquet").is_file()
    latency = None if timed else "const:target=1,draft=0.1"  # nothing is priced
    return load_recording(name, latency, source, chooses=chooses)
