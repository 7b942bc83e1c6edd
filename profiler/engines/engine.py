"""Interface between draftsim and a serving engine: the functions of an engine's folder.

The folder ``profiler/engines/NAME/`` holds everything that knows the engine NAME.  Its ``__init__``
has the functions of `EngineKind`, and it is found by its name: a new engine is one new folder.
Everything else in `profiler.engines` is shared by all engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from profiler.engines.session import Governed
from profiler.recording.run import model_path
from traces.errors import DraftsimError
from traces.store.engine_runs import Apart, Demand, EngineStep
from traces.store.text import read_object


@dataclass(frozen=True)
class EngineOptions:
    """Options that an engine is started with.

    Models are folders, or names (`profiler.recording.run.model_path`).  ``draft`` is a draft model
    and ``eagle`` an EAGLE head that the engine drafts with by itself; with neither, drafts come
    from a policy's own source (`profiler.engines.drafts`).  A draft has at most `longest` tokens.
    """

    target: str
    draft: str | None = None
    eagle: str | None = None
    longest: int = 8
    max_batch: int = 16
    max_model_len: int = 1024
    token_budget: int = 8192
    dtype: str = "auto"
    threads: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, by the engine's own names."""

    @property
    def own_drafter(self) -> bool:
        """Return True if drafts are the engine's own."""
        return bool(self.eagle or self.draft)

    @property
    def vocabulary(self) -> int:
        """Tokens of the target, from its configuration; DraftsimError without one."""
        target = model_path(self.target, "target")
        file = Path(target) / "config.json"
        config = read_object(file) if file.is_file() else {}
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        if not isinstance(size, int):  # it is on the hub, or the default of its architecture
            from profiler.models.loading import load_config

            size = getattr(load_config(target).get_text_config(), "vocab_size", None)
        if not isinstance(size, int):
            raise DraftsimError(f"{target}: says no vocab_size: name a language model")
        return size


class Engine(Protocol):
    """An engine in this process, called step by step, with a draftsim policy."""

    options: EngineOptions
    meta: dict[str, Any]
    """Metadata kept with its figures: ``engine`` (name, version, settings), ``target``, ``draft``,
    ``dtype``, ``device``, ``threads``."""
    vocabulary: int
    blocks: int
    """Blocks of its cache, of `block_size` tokens each."""
    block_size: int
    cache_settings: str
    """Names of the settings that make its cache larger."""
    proposer: Governed
    """The class that the engine asks for drafts in every step."""

    def add(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Queue a request for exactly `tokens` greedy output tokens."""
        ...

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests, and let the engine forget them."""
        ...

    def step(self) -> EngineStep | None:
        """Run one iteration; None if there was nothing to run."""
        ...

    @property
    def busy(self) -> bool:
        """Return True if any request is unfinished."""
        ...

    def tenants(self, blocks: Sequence[int]) -> AbstractContextManager[list[Any]]:
        """Yield further schedulers, each with this many blocks of the cache for itself alone.

        `enter` one, and requests are added to it.  None may have any when they are given back.
        """
        ...

    def enter(self, tenant: Any = None) -> None:
        """Add requests to one of the `tenants` and step it from now on; without one, the engine's.

        Requests of the others wait where they are, and keep their cache.
        """
        ...


class Server(Protocol):
    """An engine's HTTP server on this machine; a context manager that ends it on leaving.

    Its processes write `profiler.engines.notes` of what they do.
    """

    options: EngineOptions
    folder: Path
    """A folder for this server alone, the caller's to remove."""
    notes: Path
    """The folder with its notes."""
    unnoted: str
    """The likely reason if its processes write no notes, and the remedy."""

    def __enter__(self) -> Server: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def url(self) -> str:
        """The server's address."""
        ...

    def decide(self, policy: str, source: str) -> None:
        """Set policy and drafts of the requests that arrive while no other is served."""
        ...

    def failed(self, how: str) -> DraftsimError:
        """Return an error that says `how` it failed, and the reason if its log has one."""
        ...


class EngineKind(Protocol):
    """The functions that the ``__init__`` of an engine's folder has.

    All raise DraftsimError where the engine is not installed or refuses the options.
    """

    NAME: str

    def check_installed(self, server: bool = False) -> None:
        """Raise DraftsimError unless the engine, and with `server` its server, can run here."""
        ...

    def settings(
        self, async_scheduling: bool, cudagraph_mode: str | None, prefix_caching: bool
    ) -> dict[str, Any]:
        """Return `EngineOptions.more` for these settings; all of them are off in a measured engine
        by default."""
        ...

    def start(self, options: EngineOptions) -> Engine:
        """Start an engine in this process."""
        ...

    def serve(self, options: EngineOptions, folder: Path) -> Server:
        """Return a server that keeps its files in `folder`; it starts on entry."""
        ...

    def run_apart(
        self, options: EngineOptions, demands: Mapping[str, Demand],
        prompts: Mapping[int, Sequence[int]], repeats: int,
        synthetic: Sequence[float] | None = None,
    ) -> Apart:  # fmt: skip
        """Run loads in an engine in a separate process, without code of draftsim.

        ``demands`` are by load, ``prompts`` by sequence.  Without `synthetic` the
        engine does not speculate and keeps its own defaults; with it, its own drafter drafts and
        the token at every position is accepted with these unconditional chances.
        """
        ...


def engine_names() -> list[str]:
    """Return the names of the engines: the folders here."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))


def find_engine(name: str) -> EngineKind:
    """Return the engine of this name.  Raises DraftsimError that names those known."""
    known = engine_names()
    if name not in known:
        raise DraftsimError(f"--engine is {name!r}, expected {' or '.join(known)}")
    return cast(EngineKind, import_module(f"profiler.engines.{name}"))
