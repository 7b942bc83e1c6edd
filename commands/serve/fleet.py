"""Options of fleets: who takes a request, and where many requests are simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.workers import chosen_executor
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.executors import Executor
    from simulator.serving import Router

DEFAULT_ROUTER = "round-robin"
MANY = 50_000
"""Requests from which on starting processes for them pays."""

RouterOption = Annotated[
    str | None,
    typer.Option(
        help="Who takes a request: random, round-robin (default), least-requests or least-tokens."
    ),
]


def chosen_router(name: str | None, replicas: int) -> Router:
    """The router of that name; raises DraftsimError where nothing is to be routed."""
    from simulator.serving.routers import parse_router

    if name is not None and replicas == 1:
        raise DraftsimError("--router chooses among replicas: give --replicas 2 or more")
    return parse_router(name or DEFAULT_ROUTER)


def where(
    jobs: int | None, cluster: str | None, requests: int, timeline: Path | None
) -> Executor | None:
    """Where that many requests are simulated; None: in this process."""
    if timeline is not None and (cluster is not None or (jobs or 1) > 1):
        raise DraftsimError("--timeline is drawn by this process: drop --jobs and --cluster")
    if cluster is None and (jobs == 1 or timeline is not None or (not jobs and requests < MANY)):
        return None
    return chosen_executor(jobs, cluster)
