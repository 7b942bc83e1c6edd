"""A pretended GPU: the values are a CPU's, the rules are those of CUDA.

On a CPU every mistake about devices works: tensors mix, reading a number costs nothing.  Inside
`pretended()` tensors made "on cuda" are ordinary ones whose storage is marked, so models,
optimisers and autograd run for real, and

* an operation on tensors of both devices raises, where CUDA would;
* `.numpy()` of a marked tensor and a generator of the other device raise;
* whatever makes the host wait for the device is counted, with the line it came from;
* a captured graph is replayed from its recorded operations, hence from its own buffers alone,
  and what may not be captured raises (see `tests.pretend_graphs`).

It knows nothing of kernels, memory or time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ROOT = Path(__file__).resolve().parents[1]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Wait(NamedTuple):
    """Something the host waited for, and where in the project."""

    what: str
    where: str


class PretendedError(RuntimeError):
    """An operation that CUDA refuses."""


class PretendedGPU:
    """The pretended device: the tensors on it, and what the host has waited for."""

    def __init__(self) -> None:
        self._here: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.waits: list[Wait] = []
        self.masked_prompts: list[Wait] = []
        """Whole prompts whose attention was given a mask: no flash attention takes one."""
        self.breaks_captures = False
        """True if capturing a graph fails, as where a library allocates within it."""
        self.tape: list[Any] | None = None
        """Operations of the graph that is being captured."""
        self.makes: list[Any] = []
        """True if the calls under way make tensors on the device; None: as their operands.

        The arguments of a call decide if no operand does.
        """
        self.moving = False
        """True if a tensor is just moved, which says itself what it is."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lies on the device."""
        return _listed(tensor, self._here)

    def places(self, tensors: Iterable[torch.Tensor]) -> list[bool]:
        """Return True for each that lies on the device; asked for every operation, so it calls
        nothing.
        """
        table, strided = self._here, torch.strided
        return [t.layout == strided and t.untyped_storage()._cdata in table for t in tensors]

    def touched(self, branches: Iterable[Any]) -> bool:
        """Return True if any tensor in nested lists, tuples and mappings lies on the device."""
        # Asked at every call: it stops at the first.
        for branch in branches:
            if isinstance(branch, torch.Tensor):
                if _listed(branch, self._here):
                    return True
            elif isinstance(branch, (tuple, list)):
                if branch and self.touched(branch):
                    return True
            elif isinstance(branch, dict) and branch and self.touched(branch.values()):
                return True
        return False

    def makes_here(self, touched: bool) -> bool:
        """Return True if an operation's result lies on the device; `touched`: an operand does."""
        makes = self.makes[-1] if self.makes else None
        if touched:
            return makes is not False
        return self.touched(makes) if type(makes) is tuple else bool(makes)

    def mark(self, tensors: Any, pinned: bool = False) -> Any:
        """Say that all tensors lie on the device (or in pinned memory); returns them."""
        table = self._pinned if pinned else self._here
        if len(table) > 20_000:
            for key in [key for key, ref in table.items() if ref.expired()]:
                del table[key]
        for leaf in tensors_of(tensors):
            storage = leaf.untyped_storage()
            if storage._cdata not in table:  # a view's is
                table[storage._cdata] = StorageWeakRef(storage)
        return tensors

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if a host tensor lies in pinned memory."""
        return _listed(tensor, self._pinned)

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.refuse_capture(what)
        self.waits.append(Wait(what, _where()))

    def refuse_capture(self, what: str) -> None:
        """Raise if a graph is being captured."""
        if self.tape is not None:
            raise PretendedError(f"operation not permitted when stream is capturing: {what}")

    @contextmanager
    def counted(self) -> Iterator[list[Wait]]:
        """The waits of the block, in a list that fills up."""
        outer, self.waits = self.waits, []
        try:
            yield self.waits
        finally:
            self.waits = outer


def _listed(tensor: torch.Tensor, table: dict[int, StorageWeakRef]) -> bool:
    # A reference keeps the address from being used again, so it tells storages apart.
    return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in table


def tensors_of(*trees: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    found: list[torch.Tensor] = []
    _gather(trees, found)
    return found


def _gather(branches: Iterable[Any], found: list[torch.Tensor]) -> None:
    # Asked for every operation: a call for every list, not for every argument.
    for branch in branches:
        if isinstance(branch, torch.Tensor):
            found.append(branch)
        elif isinstance(branch, (tuple, list)):  # a union takes twice as long
            _gather(branch, found)
        elif isinstance(branch, dict) and branch:
            _gather(branch.values(), found)


def _where() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = _module(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _module(file: str) -> str:
    """The profiler's module that a file holds, "" for any other file."""
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT / "profiler") else ""


class Generator(torch.Generator):
    """A generator that says it belongs to the pretended device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = super().__new__(cls)
        made.place = CUDA if torch.device(device).type == "cuda" else CPU
        return made

    @property
    def device(self) -> torch.device:
        """As asked for."""
        return self.place  # type: ignore[no-any-return]


@contextmanager
def pretended() -> Iterator[PretendedGPU]:
    """Inside the block there is a GPU; the names of ``torch.cuda`` are those that torch has."""
    from tests.pretend_graphs import installed
    from tests.pretend_kernels import kernels
    from tests.pretend_rules import Calls, Rules

    gpu = PretendedGPU()
    with installed(gpu, Generator), kernels(), Calls(gpu), Rules(gpu):
        yield gpu
