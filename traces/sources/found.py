"""The recordings of sources that belong to a trace, found by the trace's name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.sources.base import Recordings, Source, true_tokens
from traces.sources.files import read_recordings
from traces.sources.registry import DRAFT_MODEL, parse_source
from traces.sources.starts.as_draft import drafted_latency, drafted_trace
from traces.sources.starts.features import Eagle
from traces.store.identity import engine_head
from traces.store.recordings import find_latency, find_trace, folder_of

STAMP = "outputs_sha256"
"""Field of a recording's provenance that says which outputs it follows."""


def stamp_of(trace: Trace) -> str:
    """Return a digest of the target's outputs and their prompts."""
    digest = hashlib.sha256(np.asarray(true_tokens(trace, sampled=True), dtype=np.int64).tobytes())
    for request in trace.requests:
        digest.update(np.asarray(request.prompt_ids or (), dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def find_recordings(name: str, trace: Trace) -> Recordings:
    """Return the recordings of sources along `trace`, found by its name, folder or file.

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


def own_source(latency: LatencyTable, trace: Trace, recordings: Recordings) -> Source | None:
    """Return the source that drafted while `latency` was measured; None for the trace's own drafts.

    An engine's passes with an EAGLE head cost what that head costs.  So a recording of such an
    engine drafts with the head, whose drafts are recorded along the trace (``recordings``).

    Raises
    ------
    DraftsimError
        If the trace was recorded with a draft model, and has no drafts of the head.
    """
    head = engine_head(latency.meta)
    if head is None:
        return None
    source = Eagle(head)
    if source.key in source.found(recordings):
        return source
    if trace.meta.get("draft") is None:
        return None  # an imported log: its drafts may be those of any drafter
    raise DraftsimError(
        f"the engine's latencies are of drafting with {head}, whose drafts this trace does not "
        f"hold: record them with `draftsim profile --source eagle:model={head}`, or give latencies "
        "of the draft model"
    )


def find_drafted(name: str, source: str | None = None) -> tuple[Trace, LatencyTable]:
    """Return the recording called `name` with the drafts of a source, and its costs.

    By default it is the source that drafted while the recording's latencies were measured.

    >>> trace, latency = find_drafted("smollm2-vllm-eagle3-cpu")
    >>> trace.source, trace.max_gamma
    ('eagle:model=smollm2-eagle3', 8)
    >>> find_drafted("smollm2-vllm-draft-cpu")[0].source
    'draft-model'

    Raises DraftsimError if there is no such recording, or the source cannot replace a draft model
    (`traces.sources.starts.as_draft`).
    """
    trace, latency = find_trace(name), find_latency(name)
    if source is None and engine_head(latency.meta) is None:
        return trace, latency
    recordings = find_recordings(name, trace)
    if source is None:
        drafter = own_source(latency, trace, recordings)
    else:
        drafter = None if source == DRAFT_MODEL else parse_source(source)
    if drafter is None:
        return trace, latency
    recordings = drafter.completed(trace, recordings)
    drafted = drafted_trace(trace, drafter, recordings)
    return drafted, drafted_latency(latency, drafter, recordings)
