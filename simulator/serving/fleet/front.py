"""Replicas on one clock with a router, as one server."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import simpy

from simulator.serving.arrivals import Job
from simulator.serving.fleet.routers import Router
from simulator.serving.replica import Replica


class Front:
    """Takes every request of a fleet and hands it to one of the replicas.

    Parameters
    ----------
    env:
        The clock that the replicas share.
    replicas, router, rng:
        Who serves, who chooses, and what a choice may draw from.
    marked:
        Indices of the requests whose arrival every replica's record has to know of.
    """

    def __init__(
        self,
        env: simpy.Environment,
        replicas: Sequence[Replica],
        router: Router,
        rng: np.random.Generator,
        marked: Container[int] = (),
    ) -> None:
        self.env = env
        self.replicas = replicas
        self.router = router
        self.rng = rng
        self.marked = marked

    def submit(self, job: Job) -> None:
        """Hand a request to the replica that the router chooses."""
        if job.number in self.marked:
            for replica in self.replicas:
                replica.recorder.mark(job.number, self.env.now, replica.emitted)
        self.replicas[self.router.choose(job.number, self.replicas, self.rng)].submit(job)

    def wake(self) -> None:
        """Let every replica look at its queue again."""
        for replica in self.replicas:
            replica.wake()
