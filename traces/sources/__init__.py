"""Draft sources other than a draft model: early exit, parallel heads, lookup."""

from traces.sources.base import Recordings, Source
from traces.sources.exits.early_exit import EarlyExit, Kangaroo
from traces.sources.exits.recording import ExitRecording, ExitSetting
from traces.sources.files import (
    read_exits,
    read_recordings,
    read_starts,
    read_trees,
    write_exits,
    write_recordings,
    write_starts,
    write_trees,
)
from traces.sources.found import find_drafted, find_recordings
from traces.sources.lookups.sources import PLD, REST, Lookahead, NGram, NGramSimple, Suffix
from traces.sources.registry import (
    SOURCES,
    SYSTEMS,
    System,
    describe_source,
    parse_source,
)
from traces.sources.replay import replay_source
from traces.sources.starts.features import Eagle
from traces.sources.starts.recording import StartRecording
from traces.sources.starts.sources import (
    Blockwise,
    LayerSkip,
    Medusa,
    MedusaTree,
    Space,
    SpecDec,
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
    "Kangaroo",
    "LayerSkip",
    "Lookahead",
    "Medusa",
    "MedusaTree",
    "NGram",
    "NGramSimple",
    "Recordings",
    "Source",
    "Space",
    "SpecDec",
    "StartRecording",
    "Suffix",
    "System",
    "TreeRecording",
    "describe_source",
    "find_drafted",
    "find_recordings",
    "parse_source",
    "read_exits",
    "read_recordings",
    "read_starts",
    "read_trees",
    "replay_source",
    "write_exits",
    "write_recordings",
    "write_starts",
    "write_trees",
]
