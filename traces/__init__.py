"""Recorded acceptance and latency: what was measured, and its clock-free replay."""

from traces.acceptance.survival import Survival, survival
from traces.acceptance.synthetic import Bursty, Iid, MatchProcess, synthetic_trace
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace
from traces.errors import DraftsimError, FileError, SignalError, TailError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED
from traces.latency.table import Estimate, LatencyTable
from traces.replay.decoder import ReplayDecoder
from traces.replay.rounds import Fidelity, RoundLog
from traces.replay.run import replay
from traces.store.files import (
    read_latency,
    read_rounds,
    read_trace,
    write_latency,
    write_rounds,
    write_trace,
)
from traces.store.recordings import Bundled, find_latency, find_trace, parse_latency, recordings

__distribution__ = "draftsim"

__all__ = [
    "EXTRAPOLATED",
    "INTERPOLATED",
    "MATCH",
    "MEASURED",
    "MISMATCH",
    "UNKNOWN",
    "Bundled",
    "Bursty",
    "DraftsimError",
    "Estimate",
    "Fidelity",
    "FileError",
    "Iid",
    "LatencyTable",
    "MatchProcess",
    "ReplayDecoder",
    "Request",
    "RoundLog",
    "SignalError",
    "Survival",
    "TailError",
    "Trace",
    "find_latency",
    "find_trace",
    "parse_latency",
    "read_latency",
    "read_rounds",
    "read_trace",
    "recordings",
    "replay",
    "survival",
    "synthetic_trace",
    "write_latency",
    "write_rounds",
    "write_trace",
]
