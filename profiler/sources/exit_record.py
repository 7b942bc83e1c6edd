"""Recording of every exit head's tokens along the target's output and after its wrong exits.

One teacher-forced pass covers the output: an exit at a layer depends on the true prefix alone,
since skipped states are recomputed exactly.  After a wrong exit the draft goes on from the wrong
token; all such continuations grow together, a level a pass, under a tree mask (see
`traces.sources.exit_recording`).

Along sampled outputs every exit draws its token, coupled to the output as the draft model's in
`profiler.recording.trace`.  A position's exits share one coin and one noise: a setting uses one
exit a position, so each still draws from its own head, and settings differ by their exits alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from profiler.features.heads import Adapter, AdapterRunner, ExitHeads, log_confidence
from profiler.models.sampling import coupled, drafted, probs
from profiler.models.stack import LayerRunner
from profiler.sources.start_record import SourceRecorder
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.aliases import Columns
from traces.sources.exit_recording import (
    OMEGAS,
    ExitRecording,
    ExitSetting,
    depth_layers,
    log_threshold,
    temperature,
    usable_exits,
)
from traces.sources.recording import DRAWN, LOGITS

GROUP = 48
"""Wrong exits (by position) whose continuations share passes: bounds the masks' size."""


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


class SharedDraws:
    """One coin and one noise per row, whichever exit the row takes."""

    def __init__(
        self, rows: int, vocab_size: int, generator: torch.Generator | None, device: Any
    ) -> None:
        shape = (rows, vocab_size)
        self._noise = torch.empty(shape, device=device).exponential_(generator=generator)
        self._coins = torch.rand(rows, generator=generator, device=device)

    def tokens(self, head: Tensor, truth: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return one sampled token per row of `head` (rows, vocab), or `truth` if it is known."""
        if truth is None:
            return (head / self._noise).argmax(-1)
        emitted, target = truth
        match, residual = coupled(head, target, emitted, self._coins)
        return torch.where(match, emitted, (residual / self._noise).argmax(-1))


class ExitRecorder(SourceRecorder):
    """Records requests of one target with its exit heads.

    Parameters
    ----------
    target: Needs room in its cache for path and continuations: see `slots_needed`.
    heads: Exit heads of this target, or an adapter: one exit, whose head attends to its own past.
        Its drafts too depend on the fed tokens alone, as the states it reads are exact.
    settings: Settings whose wrong exits are followed beyond the first further token.
    omegas: Annealing strengths to record; must include those of the settings.
    sampling, generator: How the outputs were drawn, and of the exits' own draws.
    """

    def __init__(
        self, target: LayerRunner, heads: ExitHeads | Adapter, settings: Sequence[ExitSetting],
        omegas: Sequence[float] = OMEGAS, sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, sampling)
        self.heads, self.generator = heads, generator
        self._adapter = AdapterRunner(heads, target) if isinstance(heads, Adapter) else None
        self.settings, self.omegas = tuple(settings), tuple(omegas)
        layers = heads.layers
        self._temperatures = [
            [temperature(o, layer, target.layers) for o in self.omegas] for layer in layers
        ]
        self._rules = []
        for s in self.settings:
            if s.omega not in self.omegas:
                raise ValueError(f"omega is {s.omega}, expected one of the recorded {self.omegas}")
            used = usable_exits(layers, depth_layers(s.depth, target.layers), s.layers)
            column = self.omegas.index(s.omega)
            self._rules.append((used, column, log_threshold(s.tau), s.gamma_max))

    @staticmethod
    def slots_needed(longest: int, gamma_max: int) -> int:
        """Return the cache slots of a path of `longest` tokens and a group's continuations."""
        return longest + GROUP * (16 + 4 * gamma_max)

    @torch.inference_mode()
    def record(
        self, prompt: Tensor, output: list[int], limit: int, eos: frozenset[int]
    ) -> ExitNodes:
        count, width = len(output), int(prompt.shape[0])
        path = torch.cat([prompt, prompt.new_tensor(output[:-1])])
        # Greedy output needs nothing of the layers after the last head.
        end = () if self.sampling.greedy else (self.target.layers,)
        states = [*self.target.through(self.target.embed(path), 0, (*self.heads.layers, *end))]
        exits = [self._normed(i, states[i], 0, width - 1) for i in range(len(self.heads.layers))]
        truth = None
        if end:
            logits = self.target.logits(states[-1][width - 1 :])
            truth = prompt.new_tensor(output), probs(logits, self.sampling)
        nodes = ExitNodes()
        fed = [int(path[width - 1]), *output[:-1]]
        columns = self._columns(exits, truth)
        nodes.add([-1] * count, range(count), fed, columns)
        # The last drafted token of the limit is never continued.
        wrong = [
            (t, token)
            for t in range(min(count, limit - 2))
            for token in sorted(set(columns["argmax"][t].tolist()) - {output[t]} - eos)
        ]
        chosen = [self._choose(columns, rule) for rule in self._rules]
        for first in range(0, count, GROUP):
            some = [(t, token) for t, token in wrong if first <= t < first + GROUP]
            if some:
                self._grow(nodes, some, chosen, width, int(path.shape[0]), limit, eos)
        return nodes

    def joined(self, parts: Sequence[ExitNodes], trace: Trace) -> ExitRecording:
        """Return the nodes of all requests: all paths first, then what follows wrong exits."""
        starts = trace.request_starts
        total = int(starts[-1])
        numbers: list[npt.NDArray[np.int64]] = []
        columns: list[Columns] = []
        for i, nodes in enumerate(parts):
            on_path = np.arange(starts[i], starts[i + 1])
            own = len(nodes) - len(on_path)
            number = np.concatenate([on_path, np.arange(total, total + own)])
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
            numbers.append(number)
            columns.append(values)
        order = np.argsort(np.concatenate(numbers))
        meta: dict[str, Any] = {"off_path_nodes": total - int(starts[-1])}
        if not self.sampling.greedy:
            meta |= self.sampling.meta
        layers, omegas = self.heads.layers, tuple(self.omegas)
        layout = ExitRecording.layout({"exit_layers": layers, "omegas": omegas})
        arrays = {
            name: np.concatenate([values[name] for values in columns])[order].astype(dtype)
            for name, (dtype, _) in layout.items() if name in columns[0]
        }  # fmt: skip
        return ExitRecording(
            arrays, tuple(starts.tolist()), meta, layers, self.target.layers, omegas, self.settings
        )

    def _normed(
        self, at: int, hidden: Tensor, start: int, first: int = 0, *, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the output projection's input after exit `at`, for the tokens from `first` on.

        ``hidden`` (tokens, hidden): the states in slots ``start ...``, see `run_layers`.
        """
        if isinstance(self.heads, ExitHeads):
            return self.heads.states(at, hidden[first:])
        assert self._adapter is not None
        return self._adapter.run(hidden, start, mask=mask, positions=positions)[first:]

    def _columns(
        self, states: Sequence[Tensor], truth: tuple[Tensor, Tensor] | None = None
    ) -> Columns:
        """Return node columns from what each exit's output projection reads, (tokens, hidden) each.

        ``truth``: sampled tokens (tokens,) and the target's probabilities (tokens, vocab).
        """
        names: Sequence[str] = LOGITS
        chance = None
        if not self.sampling.greedy:
            names = (*LOGITS, *(DRAWN[:1] if self.sampling.plain else DRAWN))
            chance = SharedDraws(
                len(states[0]), self.target.vocab_size, self.generator, self.target.device
            )
        parts = []
        for i, normed in enumerate(states):
            logits = self.target.project(normed)
            token = (
                logits.argmax(-1) if chance is None
                else chance.tokens(probs(logits, self.sampling), truth)
            )  # fmt: skip
            of = drafted(logits, token, self.sampling)
            heats = [log_confidence(logits, heat) for heat in self._temperatures[i]]
            part = {"argmax": token, "log_confidence": torch.stack(heats, -1)}
            part |= {name: getattr(of, name) for name in names}
            parts.append(part)
        return {
            name: torch.stack([part[name] for part in parts], 1).cpu().numpy() for name in parts[0]
        }

    def _choose(
        self, columns: Columns, rule: tuple[list[int], int, float, int]
    ) -> npt.NDArray[np.int64]:
        """Return the token each row drafts under a setting, -1 at the bound; (rows,)."""
        used, column, threshold, _ = rule
        drafts = np.full(len(columns["argmax"]), -1, dtype=np.int64)
        for at in reversed(used):
            exits = columns["log_confidence"][:, at, column] >= threshold
            drafts = np.where(exits, columns["argmax"][:, at], drafts)
        return drafts

    def _grow(
        self, nodes: ExitNodes, wrong: list[tuple[int, int]], chosen: list[npt.NDArray[np.int64]],
        width: int, path: int, limit: int, eos: frozenset[int],
    ) -> None:  # fmt: skip
        """Add the continuations after some wrong exits of the path."""
        first = len(nodes)
        parents = [t for t, _ in wrong]
        tokens = [token for _, token in wrong]
        # Settings under which the node is reached, as bits.
        reached = [
            sum(1 << s for s, drafts in enumerate(chosen)
                if drafts[t] == token and self._rules[s][3] > 1)
            for t, token in wrong
        ]  # fmt: skip
        roots = list(parents)  # the path position each node's wrong exit is at
        sees = np.zeros((0, 0), dtype=bool)  # (tree nodes, tree nodes)
        level = 1
        while parents:
            positions = [nodes.position[p] + 1 for p in parents]
            sees = _extended(sees, [p - first for p in parents])
            columns = self._level(tokens, roots, positions, sees, width, path)
            base = len(nodes)
            nodes.add(parents, positions, tokens, columns)
            level += 1
            drafts = [self._choose(columns, rule) for rule in self._rules]
            children: dict[tuple[int, int], int] = {}
            for i, bits in enumerate(reached):
                if positions[i] >= limit - 2:
                    continue
                for s in range(len(self._rules)):
                    token = int(drafts[s][i])
                    if not bits >> s & 1 or token < 0 or token in eos:
                        continue
                    if level < self._rules[s][3]:
                        children[i, token] = children.get((i, token), 0) | 1 << s
            roots = [roots[i] for i, _ in children]
            parents = [base + i for i, _ in children]
            tokens = [token for _, token in children]
            reached = list(children.values())

    def _level(
        self, tokens: list[int], roots: list[int], positions: list[int],
        sees: npt.NDArray[np.bool_], width: int, path: int,
    ) -> Columns:  # fmt: skip
        """Run one tree-masked pass over the newest level, as deep as the last exit."""
        device = self.target.device
        count = len(tokens)
        ends = torch.tensor(roots, device=device) + width
        on_path = torch.arange(path, device=device)[None] < ends[:, None]  # (count, path)
        mask = torch.cat([on_path, torch.from_numpy(sees[-count:]).to(device)], 1)
        hidden = self.target.embed(torch.tensor(tokens, device=device))
        # A node at output position t is fed the token of position t - 1.
        where = torch.tensor(positions, device=device) + (width - 1)
        start, own = path + len(sees) - count, {"mask": mask, "positions": where}
        states = self.target.through(hidden, start, self.heads.layers, **own)
        return self._columns([self._normed(i, h, start, 0, **own) for i, h in enumerate(states)])


def _extended(sees: npt.NDArray[np.bool_], parents: list[int]) -> npt.NDArray[np.bool_]:
    """Return `sees` with a row per new node: itself and its parent's (negative: no parent)."""
    above = np.zeros((len(parents), len(sees)), dtype=bool)
    has_parent = np.array(parents) >= 0
    above[has_parent] = sees[np.array(parents)[has_parent]]
    own = np.eye(len(parents), dtype=bool)
    return np.block([[sees, np.zeros_like(above.T)], [above, own]])
