"""What was recorded of sources beside a trace, found by the trace's name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.sources.base import Recordings, true_tokens
from traces.sources.files import read_recordings
from traces.sources.registry import parse_source
from traces.sources.starts.as_draft import drafted_latency, drafted_trace
from traces.store.recordings import find_latency, find_trace, folder_of

STAMP = "outputs_sha256"
"""Field of a recording's provenance that says which outputs it follows."""


def stamp_of(trace: Trace) -> str:
    """A digest of the target's outputs and their prompts."""
    digest = hashlib.sha256(np.asarray(true_tokens(trace, sampled=True), dtype=np.int64).tobytes())
    for request in trace.requests:
        digest.update(np.asarray(request.prompt_ids or (), dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def find_recordings(name: str, trace: Trace) -> Recordings:
    """What was recorded of sources beside `trace`, which goes by this name, folder or file.

    Raises DraftsimError if it belongs to other outputs than the trace now holds.
    """
    folder = folder_of(name)
    if folder is None and trace.temperature > 0:
        folder = Path(name).parent  # sampled outputs are named by their file
    if folder is None:
        return Recordings()
    found = read_recordings(folder, sampled=trace.temperature > 0)
    metas = [part.meta for part in (found.exits, found.adapter) if part is not None]
    metas += [part.meta for part in found.starts.values()]
    metas += [part.meta for part in found.trees.values()]
    stamps = {meta[STAMP] for meta in metas if STAMP in meta}
    if stamps and stamps != {stamp_of(trace)}:
        raise DraftsimError(
            f"the recordings of other draft sources in {folder} belong to other outputs than its "
            "trace: record them again with `draftsim profile --exit-layers`"
        )
    return found


def find_drafted(name: str, source: str) -> tuple[Trace, LatencyTable]:
    """The recording called `name` with a source in the place of its draft model, and its costs.

    >>> trace, latency = find_drafted("smollm2-vllm-eagle3-cpu", "eagle:model=smollm2-eagle3")
    >>> trace.max_gamma
    8

    Raises DraftsimError where there is no such recording, or the source is none that can stand for
    a draft model (`traces.sources.starts.as_draft`).
    """
    trace, drafter = find_trace(name), parse_source(source)
    recordings = find_recordings(name, trace)
    drafted = drafted_trace(trace, drafter, recordings)
    return drafted, drafted_latency(find_latency(name), drafter, recordings)
