"""Recorded predictions of a target's exit heads, along its output and after wrong exits.

Along a sampled output an exit's token is a draw, coupled to the output as rejection sampling
couples a draft model's (see `profiler.recording.trace`): it is the emitted token x with probability
min(1, head(x) / target(x)), and otherwise a draw from the normalised positive part of head -
target, never x.  So a token is right where it is the emitted one, as along greedy output.

One node per prefix.  The nodes of the true path come first; after a wrong exit token the
text depends on which layer exited, so continuations form a trie: a node is found from its
parent and the token fed.  All distinct wrong tokens of the path have a node; deeper ones
exist for the recorded `settings` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError
from traces.sources.columns import DRAWN, Floats, check_shapes, read_columns

NODE_COLUMNS: dict[str, str] = {
    "request": "int32",
    "parent": "int32",
    "position": "int32",
    "token": "int32",
}
"""Per node: its request; parent (-1 on the path); output position it predicts; token fed."""

SIGNALS = ("top1", "top2", "logsumexp", "entropy")
"""Float32 arrays of shape (nodes, exits): raw logits, and entropy in nats, all at T = 1."""

OMEGAS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
"""The annealing strengths recorded by default."""


class ExitSetting(NamedTuple):
    """One way to choose exits; the recording goes on after the wrong tokens that it gives."""

    tau: float
    omega: float
    depth: float
    layers: tuple[int, ...] | None
    """Exit layers used, None for all that were recorded."""
    gamma_max: int
    """Longest draft that can be replayed under this setting."""


def temperature(omega: float, layer: int, layers: int) -> float:
    """Confidence temperature 1 + omega (1 - l / L) (SpecBound, arXiv:2604.12247, eq. 1)."""
    return 1.0 + omega * (1.0 - layer / layers)


def depth_layers(depth: float, layers: int) -> int:
    """The deepest layer a drafted token may reach: `depth` of `layers`, at least one."""
    return max(1, round(depth * layers))


def log_threshold(tau: float) -> float:
    """Return the log confidence needed to exit; tau = 0 exits always."""
    return math.log(tau) if tau > 0 else -math.inf


@dataclass(frozen=True, eq=False)
class ExitRecording:
    """The exit heads' record of every request of one trace.

    Parameters
    ----------
    nodes:
        Columns of `NODE_COLUMNS`; the path nodes of request 0, 1, ... first, in order.
    argmax:
        (nodes, exits) int32: the token each exit layer would draft, its argmax; along sampled
        outputs its draw.
    log_confidence:
        (nodes, exits, omegas) float32: log of the largest softmax(z / T) (SpecBound, eq. 2),
        which the top logit and the log-sum-exp at temperature T amount to.
    signals:
        `SIGNALS`, (nodes, exits) float32 each.
    exit_layers:
        Layers with a head, ascending, 1 = after the first; all below `layers`.
    layers:
        Layers of the target.
    omegas:
        The annealing strengths recorded.
    settings:
        The settings whose wrong exits were followed.
    path_starts:
        First path node of each request, and the number of path nodes at the end.
    meta:
        Provenance; of sampled outputs also what `sampling` is read from.
    log_prob:
        (nodes, exits) float32: log-probability that token was drawn with;
        None along greedy outputs, where it follows from the signals.
    raw_log_prob:
        Likewise at T = 1 without top-p; None where it is `log_prob`, and in older recordings.

    Raises
    ------
    DraftsimError
        If the arrays disagree.
    """

    nodes: Mapping[str, npt.NDArray[Any]]
    argmax: npt.NDArray[np.int32]
    log_confidence: npt.NDArray[np.float32]
    signals: Mapping[str, npt.NDArray[np.float32]]
    exit_layers: tuple[int, ...]
    layers: int
    omegas: tuple[float, ...]
    settings: tuple[ExitSetting, ...]
    path_starts: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    log_prob: npt.NDArray[np.float32] | None = None
    raw_log_prob: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        count, exits = len(self.nodes["token"]), len(self.exit_layers)
        shapes = {
            **{name: (values, (count,)) for name, values in self.nodes.items()},
            "argmax": (self.argmax, (count, exits)),
            "log_confidence": (self.log_confidence, (count, exits, len(self.omegas))),
            **{name: (values, (count, exits)) for name, values in self.signals.items()},
        }
        drawn = {name: getattr(self, name) for name in DRAWN}
        shapes |= {name: (values, (count, exits)) for name, values in drawn.items()}
        check_shapes("early-exit recording", shapes)
        if (self.log_prob is None) != self.sampling.greedy:
            raise DraftsimError(
                f"early-exit recording: outputs that are {self.sampling.label} and the "
                "probabilities of draws do not fit together: record it again"
            )
        if sorted(set(self.exit_layers)) != list(self.exit_layers) or not (
            self.exit_layers and self.exit_layers[0] >= 1 and self.exit_layers[-1] < self.layers
        ):
            raise DraftsimError(
                f"early-exit recording: exit layers {list(self.exit_layers)} are not ascending "
                f"within 1..{self.layers - 1}: record it again"
            )
        if not np.isfinite(self.log_confidence).all():
            raise DraftsimError(
                "early-exit recording: a confidence is not finite: check the exit heads"
            )

    @cached_property
    def sampling(self) -> Sampling:
        """How the outputs it follows were drawn."""
        return Sampling.of(self.meta)

    @cached_property
    def columns(self) -> Floats:
        """(nodes, exits, 6): what policies read of each draft (`read_columns`)."""
        own = None if self.sampling.plain else self.raw_log_prob
        return read_columns(self.signals, self.log_prob, own)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(node, wrong token fed) -> node."""
        branch = np.flatnonzero(self.nodes["parent"] >= 0)
        pairs = zip(
            self.nodes["parent"][branch].tolist(), self.nodes["token"][branch].tolist(), strict=True
        )
        return dict(zip(pairs, branch.tolist(), strict=True))

    @cached_property
    def branches(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`children` as sorted keys (`branch_keys`) and their nodes."""
        branch = np.flatnonzero(self.nodes["parent"] >= 0)
        keys = branch_keys(self.nodes["parent"][branch], self.nodes["token"][branch])
        order = np.argsort(keys, kind="stable")
        return keys[order], branch[order]

    def behind(
        self, nodes: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int64]:
        """Return the nodes after wrong `tokens` fed at `nodes`, equally many; -1 where there is
        none.
        """
        keys, children = self.branches
        if not len(keys):
            return np.full(len(nodes), -1)
        wanted = branch_keys(nodes, tokens)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, children[at], -1)

    def choices(
        self, tau: float, omega: float, depth: float, layers: Sequence[int] | None
    ) -> npt.NDArray[np.int64]:
        """Index of the exit each node takes, -1 where it reaches the bound; shape (nodes,).

        Raises
        ------
        DraftsimError
            If `omega` or one of `layers` was not recorded.
        """
        used = usable_exits(self.exit_layers, depth_layers(depth, self.layers), layers)
        confident = self.log_confidence[:, :, self._omega(omega)] >= log_threshold(tau)
        chosen = np.full(len(confident), -1)
        for i in reversed(used):
            chosen[confident[:, i]] = i
        return chosen

    def _omega(self, omega: float) -> int:
        for i, recorded in enumerate(self.omegas):
            if math.isclose(recorded, omega, abs_tol=1e-9):
                return i
        # A softmax at one temperature does not determine another: no interpolation is exact.
        raise DraftsimError(
            f"omega={omega:g} was not recorded (recorded: "
            f"{', '.join(f'{o:g}' for o in self.omegas)}): choose one of these, or record it"
        )


def branch_keys(
    nodes: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """One number for each node and token fed."""
    return (nodes.astype(np.int64) << 32) + tokens


def usable_exits(recorded: Sequence[int], deepest: int, layers: Sequence[int] | None) -> list[int]:
    """Indices into `recorded` of the exit layers up to `deepest`, of `layers` if given.

    Raises DraftsimError if a layer of `layers` has no exit head.
    """
    if layers is not None and (missing := sorted(set(layers) - set(recorded))):
        raise DraftsimError(
            f"no exit head at layer {', '.join(map(str, missing))} (there are heads at "
            f"{', '.join(map(str, recorded))}): choose among these, or train one"
        )
    return [
        i
        for i, layer in enumerate(recorded)
        if layer <= deepest and (layers is None or layer in layers)
    ]
