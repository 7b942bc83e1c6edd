"""vLLM 0.32, with the functions of `profiler.engines.engine.EngineKind`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.engines.engine import Engine, EngineOptions, Server
    from traces.store.engine_runs import Apart, Demand


NAME = "vllm"
PLUGIN = "profiler.engines.vllm.proposer:register"
"""The function that vLLM calls in each of its processes, as `pyproject.toml` names it."""


def check_installed(server: bool = False) -> None:
    """Raise DraftsimError unless vLLM is here and, with `server`, loads this project's plugin."""
    if find_spec("vllm") is None:
        raise DraftsimError("vLLM is not installed here: `make vllm`, then .venv-vllm/bin/draftsim")
    # An installation of an earlier draftsim names another function.
    plugins = {p.name: p.value for p in entry_points(group="vllm.general_plugins")}
    chosen = os.environ.get("VLLM_PLUGINS", "draftsim").split(",")
    if server and (plugins.get("draftsim") != PLUGIN or "draftsim" not in chosen):
        raise DraftsimError(
            "vLLM here does not load draftsim's plugin: install draftsim in its environment "
            "(`make vllm`), and leave VLLM_PLUGINS unset"
        )


def settings(
    async_scheduling: bool = False, cudagraph_mode: str | None = None,
    prefix_caching: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return arguments of ``vllm.LLM``: those that differ from a measured engine's usual ones."""
    found: dict[str, Any] = {"async_scheduling": True} if async_scheduling else {}
    if cudagraph_mode is not None:
        config = {"cudagraph_mode": cudagraph_mode}
        found |= {"enforce_eager": False, "compilation_config": config}
    return found | {"enable_prefix_caching": True} if prefix_caching else found


def start(options: EngineOptions) -> Engine:
    """Start an engine in this process."""
    from profiler.engines.vllm.engine import VllmEngine

    return VllmEngine(options)


def serve(options: EngineOptions, folder: Path) -> Server:
    """Return a server that keeps its files in `folder`; it starts on entry."""
    check_installed(server=True)
    from profiler.engines.vllm.server import VllmServer

    return VllmServer(options, folder)


def run_apart(
    options: EngineOptions, demands: Mapping[str, Demand], prompts: Mapping[int, Sequence[int]],
    repeats: int, synthetic: Sequence[float] | None = None,
) -> Apart:  # fmt: skip
    """Run loads in an engine of its own process, as `EngineKind.run_apart` says."""
    from profiler.engines.vllm.apart import arguments_apart, run

    given = arguments_apart(options, synthetic)
    return run(given, demands, prompts, repeats, options.threads)
