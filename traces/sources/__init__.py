"""Draft sources other than a draft model: early exit, parallel heads, lookup."""

from traces.sources.base import Source
from traces.sources.early_exit import EarlyExit
from traces.sources.exit_recording import ExitRecording, ExitSetting
from traces.sources.found import (
    find_drafted,
    find_recordings,
    read_recordings,
    write_recordings,
)
from traces.sources.lookups.sources import PLD, REST, Lookahead, NGram, NGramSimple, Suffix
from traces.sources.recording import Recordings, SourceRecording
from traces.sources.registry import (
    SOURCES,
    SYSTEMS,
    Method,
    describe_source,
    parse_source,
)
from traces.sources.replay import replay_source
from traces.sources.starts.parallel import Eagle
from traces.sources.starts.sources import (
    Blockwise,
    Hydra,
    LayerSkip,
    Medusa,
    MedusaTree,
    Space,
    SpecDec,
    StartRecording,
)
from traces.sources.starts.trees import Eagle2, TreeRecording

__all__ = [
    "PLD",
    "REST",
    "SOURCES",
    "SYSTEMS",
    "Blockwise",
    "Eagle",
    "Eagle2",
    "EarlyExit",
    "ExitRecording",
    "ExitSetting",
    "Hydra",
    "LayerSkip",
    "Lookahead",
    "Medusa",
    "MedusaTree",
    "Method",
    "NGram",
    "NGramSimple",
    "Recordings",
    "Source",
    "SourceRecording",
    "Space",
    "SpecDec",
    "StartRecording",
    "Suffix",
    "TreeRecording",
    "describe_source",
    "find_drafted",
    "find_recordings",
    "parse_source",
    "read_recordings",
    "replay_source",
    "write_recordings",
]
