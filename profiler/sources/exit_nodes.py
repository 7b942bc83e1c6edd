"""Nodes of an early-exit recording as they grow, and the recording they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.acceptance.sampling import GREEDY, Sampling
from traces.sources.exits.recording import SIGNALS, ExitRecording, ExitSetting

Columns = dict[str, "npt.NDArray[Any]"]


@dataclass
class ExitNodes:
    """Nodes of one request, as they grow."""

    parent: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    columns: list[Columns] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token)

    def add(self, parent: Iterable[int], position: Iterable[int], token: Iterable[int],
            columns: Columns) -> None:  # fmt: skip
        self.parent += parent
        self.position += position
        self.token += token
        self.columns.append(columns)


def assemble(
    requests: Iterable[ExitNodes], counts: Sequence[int], layers: tuple[tuple[int, ...], int],
    omegas: tuple[float, ...], settings: tuple[ExitSetting, ...], sampling: Sampling = GREEDY,
) -> ExitRecording:  # fmt: skip
    """One recording: all path nodes first, then the continuations, request by request.

    ``counts``: output tokens of each request; ``layers``: those with a head, and how many the
    target has; ``sampling``: of the outputs.
    """
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(int)
    total, branches = int(starts[-1]), []
    parts: list[tuple[npt.NDArray[np.int64], Columns]] = []
    for i, nodes in enumerate(requests):
        own = len(nodes) - counts[i]
        number = np.concatenate(
            [np.arange(starts[i], starts[i + 1]), np.arange(total, total + own)]
        )
        total += own
        parent = np.array(nodes.parent)
        values: Columns = {
            "request": np.full(len(nodes), i),
            "parent": np.where(parent < 0, -1, number[parent]),
            "position": np.array(nodes.position),
            "token": np.array(nodes.token),
        }
        for name in nodes.columns[0]:
            values[name] = np.concatenate([c[name] for c in nodes.columns])
        parts.append((number, values))
        branches.append(own)
    order = np.concatenate([number for number, _ in parts])
    merged = {
        name: np.concatenate([values[name] for _, values in parts])[np.argsort(order)]
        for name in parts[0][1]
    }
    nodes32 = {n: merged[n].astype(np.int32) for n in ("request", "parent", "position", "token")}
    meta: dict[str, Any] = {"off_path_nodes": int(sum(branches))}
    if not sampling.greedy:
        meta |= sampling.meta
    return ExitRecording(
        nodes32, merged["argmax"].astype(np.int32), merged["log_confidence"].astype(np.float32),
        {name: merged[name].astype(np.float32) for name in SIGNALS},
        *layers, omegas, settings,
        tuple(starts.tolist()), meta,
        *(
            merged[n].astype(np.float32) if n in merged else None
            for n in ("log_prob", "raw_log_prob")
        ),
    )  # fmt: skip
