"""Speedups and quality of texts that were decoded under lossy rules."""

from __future__ import annotations

from commands.simulate.command import recorded_rounds
from docs.reading import code, table
from simulator.summary import accepted_mismatches, summarize
from traces.store.outputs import find_runs, quality, read_run
from traces.store.recordings import folder_of

HEAD = (
    "rule", "prompts", "speedup", "mismatches accepted", "tokens like greedy decoding's",
    "BLEU against it", "nats a token (greedy)",
)  # fmt: skip


def lossy_rules(name: str) -> str:
    """Return the table of ``simulate --rounds NAME``, the fastest rule first.

    Raises
    ------
    DraftsimError
        If no recording has this name, or it holds no recorded rounds.
    """
    folder = folder_of(name)
    logs, latency, trace = recorded_rounds(folder or name, None, name)
    found = []
    for log, file in zip(logs, find_runs(folder or name), strict=True):
        row = summarize([log], latency).iloc[1]
        seen = quality(read_run(file).outputs, trace)
        stood = accepted_mismatches(log)
        cells = (
            code(log.verify), len(log.requests),
            f"{row['speedup']:.2f} ({row['speedup_lo']:.2f} to {row['speedup_hi']:.2f})",
            "–" if stood is None else f"{stood:.0%}", f"{seen.agreement:.0%}",
            "–" if seen.relative_bleu is None else f"{seen.relative_bleu:.1f}",
            f"{seen.log_likelihood:.2f} ({seen.reference_log_likelihood:.2f})",
        )  # fmt: skip
        found.append((row["speedup"], cells))
    found.sort(key=lambda pair: -pair[0])
    return table(HEAD, [cells for _, cells in found])
