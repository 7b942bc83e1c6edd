"""Options that say where a study runs: processes here, or a Dask cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.executors import Executor

JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Processes here. Default: one per core.")
]
ClusterOption = Annotated[
    str | None, typer.Option(metavar="tcp://HOST:PORT", help="Run on a Dask cluster instead.")
]


def chosen_executor(jobs: int | None, cluster: str | None) -> Executor:
    """Where the options say that a study runs; raises DraftsimError if they say two things."""
    from simulator.executors import Cluster, Local

    if cluster is not None:
        if jobs is not None:
            raise DraftsimError("--jobs counts processes here, --cluster has its own: give one")
        return Cluster(cluster)
    return Local(jobs)
