"""The recordings of sources in a run's folder, and those that belong to a trace of a name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.sources.as_draft import drafted_latency, drafted_trace
from traces.sources.base import Source, true_tokens
from traces.sources.draft_model import DraftModelSource
from traces.sources.exit_recording import ExitRecording
from traces.sources.recording import Recordings, SourceRecording
from traces.sources.registry import SOURCES, parse_source
from traces.sources.starts.parallel import Eagle
from traces.store.identity import engine_head
from traces.store.recordings import find_latency, find_trace, folder_of

STAMP = "outputs_sha256"
"""Field of a recording's provenance that says which outputs it follows."""


NAMED = re.compile(r"(?P<sampled>sampled-)?(?P<kind>[a-z]+)-(?P<key>.+)\.parquet")
"""Name of a recording's file in a run folder, along greedy or sampled outputs."""
OWN_NAMES = {("early-exit", False): "exits.parquet", ("early-exit", True): "exits-sampled.parquet"}
"""Files with other names, by the recording, and True if it is along sampled outputs."""


def write_recordings(recordings: Recordings, folder: Path) -> None:
    """Write each recording into its file in a run folder."""
    for key, recording in recordings.items():
        sampled = not recording.sampling.greedy
        name = f"{'sampled-' * sampled}{recording.kind}-{key}.parquet"
        recording.write(folder / OWN_NAMES.get((key, sampled), name))


def read_recordings(folder: Path, *, sampled: bool = False) -> dict[str, SourceRecording]:
    """Return what `write_recordings` wrote along greedy or ``sampled`` outputs.

    Raises FileError if a file is damaged.
    """
    kinds = {of.kind: of for source in SOURCES.values() if (of := source.recorded_as) is not None}
    own = {name: key for (key, drawn), name in OWN_NAMES.items() if drawn == sampled}
    found: dict[str, SourceRecording] = {}
    for path in sorted(folder.glob("*.parquet")):
        named = None if path.name in OWN_NAMES.values() else NAMED.fullmatch(path.name)
        if path.name in own:
            found[own[path.name]] = ExitRecording.read(path)
        elif named and named["kind"] in kinds and bool(named["sampled"]) == sampled:
            found[named["key"]] = kinds[named["kind"]].read(path)
    return found


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
        return {}
    found = read_recordings(folder, sampled=trace.temperature > 0)
    stamps = {part.meta[STAMP] for part in found.values() if STAMP in part.meta}
    if stamps and stamps != {stamp_of(trace)}:
        raise DraftsimError(
            f"the recordings of other draft sources in {folder} belong to other outputs than its "
            "trace: record them again with `draftsim profile sources --exit-layers`"
        )
    return found


def engine_source(latency: LatencyTable) -> Eagle | None:
    """Return the head that an engine ran while `latency` was measured; None if it ran none."""
    head = engine_head(latency.meta)
    return None if head is None else Eagle(head)


def own_source(latency: LatencyTable, trace: Trace, recordings: Recordings) -> Source | None:
    """Return the source that drafted while `latency` was measured; None for the trace's own drafts.

    An engine's passes with an EAGLE head cost what that head costs, so its drafts have to be
    recorded along the trace.  Raises DraftsimError if the trace has those of a draft model alone.
    """
    if (source := engine_source(latency)) is None:
        return None
    if source.key in recordings:
        return source
    if trace.meta.get("draft") is None:
        return None  # an imported log: its drafts may be those of any drafter
    raise DraftsimError(
        f"the engine's latencies are those of {source.model}, whose drafts this trace does "
        f"not hold: record them with `draftsim profile sources --source "
        f"eagle:model={source.model}`, or give latencies of the draft model"
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
    (`traces.sources.as_draft`).
    """
    trace, latency = find_trace(name), find_latency(name)
    if source is None and engine_source(latency) is None:
        return trace, latency
    recordings = find_recordings(name, trace)
    own = own_source(latency, trace, recordings) if source is None else parse_source(source)
    drafter = own or DraftModelSource()
    recordings = drafter.completed(trace, recordings)
    drafted = drafted_trace(trace, drafter, recordings)
    return drafted, drafted_latency(latency, drafter, recordings)
