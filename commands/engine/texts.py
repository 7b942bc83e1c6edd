"""Texts of an engine's runs, held to what the engine writes on its own.

The drafts of a check are forced along the engine's own output of plain decoding, which a request
under a policy therefore repeats token by token.  In bfloat16 a pass of another width or batch may
decide a near-tie otherwise: from there on the text is another, the drafts forced on it are wrong,
and the request takes more rounds than predicted.  That is no error of the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commands.engine.rounds import index_of
from profiler.checks.differences import Divergence, divergence, output_of
from traces.acceptance.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

    from profiler.engines.loads import LoadRun


@dataclass(frozen=True)
class PolicyRuns:
    """The runs of a load under one policy, and what diverged in them."""

    load: str
    text: str
    """The policy's."""
    runs: Sequence[LoadRun]
    diverged: Sequence[Mapping[str, Divergence]]
    """By run, the divergences by request."""
    left_out: frozenset[str]
    """Requests of the load that diverged in any run under any policy."""
    unlike_recording: int | None
    """Requests whose text is not the recorded one, in the run with most; None if the recording
    is of another model or other prompts."""

    @property
    def texts_diverged(self) -> int:
        """Requests that diverged in any run."""
        return len({name for own in self.diverged for name in own})

    def kept(self, requests: pd.DataFrame) -> pd.DataFrame:
        """The requests, measured or predicted, that are not left out; all, if that leaves none."""
        column = requests["index"] if "index" in requests else requests["name"].map(index_of)
        kept = requests[~column.isin({index_of(name) for name in self.left_out})]
        return kept if len(kept) else requests

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row about texts; ``diverged`` is for the JSON."""
        return {
            "texts_diverged": self.texts_diverged,
            "diverged": [
                {**one._asdict(), "repeat": repeat}
                for repeat, own in enumerate(self.diverged)
                for one in own.values()
            ],
            "requests_left_out": len(self.left_out),
            "texts_unlike_recording": self.unlike_recording,
        }


def policy_runs(
    measured: Mapping[tuple[str, str], Sequence[LoadRun]], trace: Trace,
    own: Mapping[int, Sequence[int]], dtype: str,
) -> dict[tuple[str, str], PolicyRuns]:  # fmt: skip
    """Return the runs by load and policy.

    ``own``: by sequence, what the engine writes by plain decoding; ``dtype``: its number format.
    """
    import torch

    kind = getattr(torch, dtype)

    def diverged_in(run: LoadRun) -> dict[str, Divergence]:
        found = {}
        for name, text in run.texts.items():
            i = int(name.partition("/")[0])
            one = divergence(trace, i, text, kind, expected=own[i][: len(text)])
            if one is not None:
                found[name] = one
        return found

    diverged = {key: [diverged_in(run) for run in runs] for key, runs in measured.items()}
    left_out: dict[str, set[str]] = {}
    for (load, _), each in diverged.items():
        left_out.setdefault(load, set()).update(*each)
    known = is_recorded(trace, own)
    return {
        (load, text): PolicyRuns(
            load, text, runs, diverged[load, text], frozenset(left_out[load]),
            max(unlike_recording(run, trace) for run in runs) if known else None,
        )
        for (load, text), runs in measured.items()
    }  # fmt: skip


def is_recorded(trace: Trace, own: Mapping[int, Sequence[int]]) -> bool:
    """Return True if the engine's outputs are of the recorded model and prompts.

    Then most of them begin with the recorded token.
    """
    if "token" not in trace.columns:
        return False
    same = sum(output_of(trace, i)[:1] == [*text[:1]] for i, text in own.items())
    return 2 * same > len(own)


def unlike_recording(run: LoadRun, trace: Trace) -> int:
    """Count the requests of a run whose text is not the recorded one."""
    return sum(
        [*text] != output_of(trace, int(name.partition("/")[0]))[: len(text)]
        for name, text in run.texts.items()
    )
