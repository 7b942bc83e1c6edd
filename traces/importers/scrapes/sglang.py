"""SGLang's ``/metrics``: what its counters imply, or the means that its gauges tell.

``sglang:spec_verify_calls_total``, ``generation_tokens_total`` and ``num_requests_total`` grow
as requests finish: a verification emits its accepted tokens and one more, a prompt its first
token, so the accepted are what was generated beyond these.  Where the first is missing (older
versions) the gauges ``spec_accept_length`` (accepted drafts and the bonus token of a round) and
``spec_accept_rate`` (accepted of proposed) tell the last batches' means, of how many rounds is
not known.  ``spec_num_steps`` and ``spec_num_draft_tokens`` are the lengths in force; more draft
tokens than a chain of those steps verifies make a tree.  Source of the format:
sgl-project/sglang, ``srt/observability/metrics_collector.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown

from traces.errors import FileError
from traces.importers.bounds import MOST_DRAFTED, decimal
from traces.importers.scrapes.text import read_counts, read_samples
from traces.importers.totals import Totals

PREFIX = "sglang:"
_COUNTERS = ("spec_verify_calls", "generation_tokens", "num_requests")


def read_sglang(files: Sequence[Path]) -> Totals:
    """Totals from counters where they are, else means from gauges.

    Raises
    ------
    FileError
        If nothing was decoded speculatively, the counts contradict each other, or engines'
        gauges differ, which nothing weighs.
    """
    file = files[-1]
    counts = read_counts(files, PREFIX, _COUNTERS)
    steps, tree = _lengths(files)
    meta = {
        "kind": "prometheus", "server": "sglang", "source": [name.name for name in files],
    }  # fmt: skip
    if not all((name, 0) in counts for name in _COUNTERS):
        return _means(file, steps, tree, meta)
    rounds, tokens, requests = (counts[name, 0] for name in _COUNTERS)
    if not rounds:
        raise FileError(f"{file}: counts no verification: nothing was decoded speculatively")
    accepted = tokens - requests - rounds
    if accepted < 0 or (steps is not None and accepted > rounds * steps):
        raise FileError(
            f"{file}: {tokens} tokens of {requests} requests in {rounds} verifications of "
            f"{steps or 'unknown'} steps: the counts do not belong together"
        )
    return Totals(rounds, None, accepted, steps, requests=requests, tree=tree, meta=meta)


def _means(file: Path, steps: int | None, tree: bool, meta: Mapping[str, object]) -> Totals:
    length = _gauge(file, "spec_accept_length")
    if length is None:
        raise FileError(
            f"{file}: has neither {PREFIX}spec_verify_calls_total nor {PREFIX}spec_accept_length: "
            "expected SGLang's /metrics (--enable-metrics) with speculative decoding switched on"
        )
    if not length:
        raise FileError(f"{file}: its mean acceptance length is 0: nothing was decoded yet")
    if length < 1:
        raise FileError(f"{file}: its mean acceptance length is {length:g}, expected 1 or more")
    rate = _gauge(file, "spec_accept_rate")
    drafted = (length - 1) / rate if rate else None
    return Totals(None, drafted, length - 1, steps, tree=tree, meta=meta)


def _lengths(files: Sequence[Path]) -> tuple[int | None, bool]:
    """Steps in force, None where they are not told or changed; whether a tree was verified."""
    told = {(_gauge(f, "spec_num_steps"), _gauge(f, "spec_num_draft_tokens")) for f in files}
    tree = any(steps and drafts and drafts > steps + 1 for steps, drafts in told)
    ((steps, _), *changed) = told
    return (int(steps) if steps and not changed else None), tree


def _gauge(file: Path, name: str) -> float | None:
    """A gauge's value: ranks repeat it, and draft engines that decode nothing hold 0."""
    found = []
    for where, full, _, text in read_samples(file, PREFIX):
        if full != PREFIX + name:
            continue
        value = decimal(text)
        if not 0 <= value <= MOST_DRAFTED + 1:
            raise FileError(f"{where}: {shown(text)} is no length or rate")
        found.append(value)
    values = sorted(set(found) - {0.0})
    if len(values) > 1:
        raise FileError(
            f"{file}: {PREFIX}{name} differs between engines "
            f"({', '.join(f'{v:g}' for v in values)}), and a gauge does not say of how many "
            "rounds: scrape them one at a time"
        )
    return values[0] if values else (0.0 if found else None)
