"""SimPy's clock, moved on directly where nothing else can happen in between."""

from __future__ import annotations

from heapq import heappush

import simpy
from simpy.events import NORMAL


class Clock(simpy.Environment):
    """A SimPy environment that a process may move on without an event of its own.

    An engine alone in the system sleeps from iteration to iteration, each time only to be
    the next event itself.  `skip` saves that detour; whatever else is scheduled meanwhile
    still goes first, so a run is the same with and without it.
    """

    def skip(self, seconds: float) -> bool:
        """Advance the clock by `seconds` if no event is due before; return False otherwise.

        Only a process that does not share its current event may call this: time moves on while
        it runs.
        """
        then = self._now + seconds
        if self._queue and self._queue[0][0] <= then:
            return False
        self._now = then
        return True

    def at(self, then: float) -> simpy.Event:
        """An event at `then` exactly; a timeout over the difference would meet it to rounding."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (then, NORMAL, next(self._eid), event))
        return event
