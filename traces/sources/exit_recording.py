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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.acceptance.trace import MOST_DRAFTED
from traces.errors import DraftsimError
from traces.sources.recording import DRAWN, LOGITS, MOST_LAYERS, Layout, SourceRecording
from traces.store.header import PathLike, are_wholes, check, check_rows, is_number, is_whole

NODE_COLUMNS: dict[str, str] = {
    "request": "int32",
    "parent": "int32",
    "position": "int32",
    "token": "int32",
}
"""Per node: its request; parent (-1 on the path); output position it predicts; token fed."""

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
    """Return the temperature 1 + omega (1 - l / L) (SpecBound, arXiv:2604.12247, eq. 1)."""
    return 1.0 + omega * (1.0 - layer / layers)


def depth_layers(depth: float, layers: int) -> int:
    """Return the deepest layer a drafted token may reach: `depth` of `layers`, at least one."""
    return max(1, round(depth * layers))


def log_threshold(tau: float) -> float:
    """Return the log confidence needed to exit; tau = 0 exits always."""
    return math.log(tau) if tau > 0 else -math.inf


@dataclass(frozen=True, eq=False)
class ExitRecording(SourceRecording):
    """The exit heads' record of every request of one trace.

    The arrays are those of `NODE_COLUMNS`, (nodes,), the path nodes of request 0, 1, ... first, in
    order, and per exit, (nodes, exits): ``argmax``, the token that each exit layer would draft,
    which along sampled outputs is its draw; ``log_confidence``, (nodes, exits, omegas), the log of
    the largest softmax(z / T) (SpecBound, eq. 2); and `traces.sources.recording.LOGITS`.

    Parameters
    ----------
    exit_layers:
        Layers with a head, ascending, 1 = after the first; all below `layers`.
    layers:
        Layers of the target.
    omegas:
        The annealing strengths recorded.
    settings:
        The settings whose wrong exits were followed.

    Raises
    ------
    DraftsimError
        If the arrays disagree.
    """

    kind = "exits"
    said = "early-exit recording"
    starts_field = "path_starts"

    exit_layers: tuple[int, ...] = ()
    layers: int = 0
    omegas: tuple[float, ...] = ()
    settings: tuple[ExitSetting, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if ("log_prob" not in self.arrays) != self.sampling.greedy:
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
        if not np.isfinite(self["log_confidence"]).all():
            raise DraftsimError(
                "early-exit recording: a confidence is not finite: check the exit heads"
            )

    @property
    def rows(self) -> int:
        """Number of nodes."""
        return len(self["token"])

    @property
    def header(self) -> dict[str, Any]:
        """The exits, and what was recorded of them."""
        names = ("exit_layers", "layers", "omegas", "settings")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def layout(cls, header: Mapping[str, Any]) -> Layout:
        """Return the arrays of nodes and of their exits."""
        exits, omegas = len(header["exit_layers"]), len(header["omegas"])
        return {
            **{name: (dtype, ()) for name, dtype in NODE_COLUMNS.items()},
            "argmax": ("int32", (exits,)), "log_confidence": ("float32", (exits, omegas)),
            **dict.fromkeys((*LOGITS, *DRAWN), ("float32", (exits,))),
        }  # fmt: skip

    @classmethod
    def checked(cls, path: PathLike, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the exits, and what was recorded of them."""
        layers: Any = header.get("layers")
        check(path, "layers", layers, is_whole(layers, 1, MOST_LAYERS), f"1 to {MOST_LAYERS}")
        for name in ("exit_layers", "omegas", "settings"):
            check(path, name, header.get(name), isinstance(header.get(name), list), "a list")
        exits, omegas = tuple(header["exit_layers"]), tuple(header["omegas"])
        sound = are_wholes(list(exits), 1, MOST_LAYERS)
        check(path, "exit_layers", exits, sound, f"layers from 1 to {MOST_LAYERS}")
        check(path, "omegas", omegas, all(is_number(w) and w >= 0 for w in omegas), "numbers >= 0")
        for setting in header["settings"]:
            check(path, "settings", setting, _sound(setting), "tau, omega, depth, layers, gamma")
        settings = tuple(
            ExitSetting(tau, omega, depth, None if used is None else tuple(used), gamma_max)
            for tau, omega, depth, used, gamma_max in header["settings"]
        )
        return {"exit_layers": exits, "layers": layers, "omegas": omegas, "settings": settings}

    @classmethod
    def check_rows(
        cls, path: PathLike, arrays: Mapping[str, npt.NDArray[Any]], starts: Sequence[int]
    ) -> None:
        """Raise FileError if a node cannot be, naming its row."""
        rows = np.arange(len(arrays["token"]))
        on_path = rows < starts[-1]
        parent, request = arrays["parent"].astype(np.int64), arrays["request"]
        # Path nodes of the requests come first, in turn; a branch follows its parent.
        of = np.searchsorted(np.asarray(starts), rows, side="right") - 1
        check_rows(
            path,
            {
                "0 <= request": request >= 0,
                "the order of requests on the path": ~on_path | (request == of),
                "-1 <= parent < its own row": (parent >= -1) & (parent < np.maximum(rows, 1)),
                "parent = -1 on the path": (parent == -1) | ~on_path,
                "0 <= position": arrays["position"] >= 0,
                "0 <= token": arrays["token"] >= 0,
            },
        )

    @cached_property
    def branches(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Nodes with the wrong tokens fed, as sorted `branch_keys`, and the nodes after."""
        branch = np.flatnonzero(self["parent"] >= 0)
        keys = branch_keys(self["parent"][branch], self["token"][branch])
        order = np.argsort(keys, kind="stable")
        return keys[order], branch[order]

    def after(
        self, nodes: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int64]:
        """Return the node after each wrong token fed at its node; -1 where there is none."""
        keys, children = self.branches
        if not len(keys):
            return np.full(len(nodes), -1)
        wanted = branch_keys(nodes, tokens)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, children[at], -1)

    def choices(
        self, tau: float, omega: float, depth: float, layers: Sequence[int] | None
    ) -> npt.NDArray[np.int64]:
        """Return the index of the exit each node takes, -1 where it reaches the bound; shape
        (nodes,).

        Raises
        ------
        DraftsimError
            If `omega` or one of `layers` was not recorded.
        """
        used = usable_exits(self.exit_layers, depth_layers(depth, self.layers), layers)
        confident = self["log_confidence"][:, :, self._omega(omega)] >= log_threshold(tau)
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
    """Return one number for each node and token fed."""
    return (nodes.astype(np.int64) << 32) + tokens


def usable_exits(recorded: Sequence[int], deepest: int, layers: Sequence[int] | None) -> list[int]:
    """Return indices into `recorded` of the exit layers up to `deepest`, of `layers` if given.

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


def _sound(setting: Any) -> bool:
    """Return True if a header's list is a valid `ExitSetting`."""
    if not isinstance(setting, list) or len(setting) != 5:
        return False
    tau, omega, depth, layers, gamma_max = setting
    return (
        all(is_number(value) and value >= 0 for value in (tau, omega, depth))
        and 0 < depth <= 1
        and tau <= 1
        and (layers is None or (are_wholes(layers, 1, MOST_LAYERS) and layers != []))
        and is_whole(gamma_max, 1, MOST_DRAFTED)
    )
