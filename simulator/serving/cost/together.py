"""Seconds of many iterations at once, each as `IterationCost.of_work` prices it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from simulator.serving.cost.drafts import DraftCost
from simulator.serving.cost.host import HostCost
from simulator.serving.cost.mixed import MixedPasses
from simulator.serving.cost.prompts import PromptsEach
from simulator.serving.cost.reader import PassReader, Tally
from simulator.serving.cost.slab import Floats
from simulator.serving.cost.work import Ints, Works, drafting_always_each

UNCOUNTED = 256
"""Readings of spans that wait to be counted together."""
KEPT = 8
"""Parts of a request's rounds whose seconds alone are kept."""


class Reading(NamedTuple):
    """Sizes read together, and the iteration of a span that each belongs to."""

    reader: PassReader
    batch: int
    widths: Floats
    contexts: Floats
    of: Ints


class Alone(NamedTuple):
    """Iterations of one request by itself, and what was read for them, by the reader's place."""

    seconds: Floats
    tallies: Sequence[tuple[int, Tally]]


Kept = dict[Hashable, Alone]
"""What was priced before of the rounds that it is kept beside."""


class TogetherCost:
    """Prices iterations whose totals say all, many at a time.

    ``target`` reads the target's passes, ``beside`` those beside prompts; ``always`` is as in
    `DraftCost`.  What was read is counted
    when the iterations have happened, for a span may be cut off.
    """

    def __init__(
        self, target: PassReader, drafts: DraftCost, hosts: HostCost, mixed: MixedPasses,
        always: int, beside: PassReader,
    ) -> None:  # fmt: skip
        self._target, self._drafts, self._hosts, self._always = target, drafts, hosts, always
        self._mixed, self._beside = mixed, beside
        self._uncounted: list[Reading] = []
        self._readers = target, drafts.along, drafts.first, drafts.later

    def alone(self, works: Callable[[], Works], kept: Kept, key: Hashable) -> Alone | None:
        """As `seconds` of one request by itself, whose `works` are always the same under `key`."""
        found = kept.get(key)
        if found is None:
            priced = self.seconds(works(), 1)
            if priced is None:
                return None
            tallies = [
                (self._readers.index(r.reader), r.reader.tally(1, r.widths, r.contexts))
                for r in priced[1]
            ]
            while len(kept) >= KEPT:
                del kept[next(iter(kept))]
            found = kept[key] = Alone(priced[0], tallies)
        return found

    def count_alone(self, priced: Alone) -> None:
        """Count what was read for all of these iterations."""
        for place, tally in priced.tallies:
            reader = self._readers[place]
            assert reader is not None
            reader.add(tally)

    def seconds(self, works: Works, batch: int) -> tuple[Floats, list[Reading]] | None:
        """(n,) seconds of n iterations of `batch` rounds, and what was read for them.

        None where `IterationCost.of_work` is quicker, one by one (`PassReader.many`).
        """
        if self._always:
            works = drafting_always_each(works, batch, self._always)
        readings: list[Reading] = []

        def read(reader: PassReader, widths: Floats, contexts: Floats, of: Ints) -> Floats | None:
            readings.append(Reading(reader, batch, widths, contexts, of))
            return reader.many(batch, widths, contexts)

        every = np.arange(len(works.context))
        seconds = read(
            self._target, works.drafted / batch + 1.0, works.context / batch - 1.0, every
        )
        if seconds is None:
            return None
        host = self._hosts.at(batch)
        seconds += host.round_s
        if host.target_rollback_s:
            seconds += host.target_rollback_s * (works.rejected > 0)
        if host.draft_rollback_s:
            seconds += host.draft_rollback_s * (works.unread > 0)
        at = works.longest.nonzero()[0]
        along_reader = self._drafts.along
        if along_reader is not None:
            idle = (works.drafted == 0) & (self._always < 2)
            none, at = idle.nonzero()[0], (~idle).nonzero()[0]
            if len(none):
                cached = works.context[none] / batch - 1.0
                along = read(along_reader, np.ones(len(none)), cached, none)
                if along is None:
                    return None
                seconds[none] += along
        if not len(at):
            return seconds, readings
        longest, drafting = works.longest[at], works.drafting[at]
        width, mean = works.catch_up[at] / drafting, works.draft_context[at] / drafting
        later, first = self._drafts.running()
        if along_reader is None:
            cached = np.maximum(mean - width, 0.0)
        else:
            width, cached = works.drafted[at] / batch + 1.0, works.context[at] / batch - 1.0
        drafts = read(first, width, cached, at)
        if drafts is None:
            return None
        steps = longest - 1
        owner = np.repeat(np.arange(len(at)), steps)
        if len(owner):
            within = np.arange(len(owner)) - np.repeat(np.cumsum(steps) - steps, steps)
            passes = read(later, np.ones(len(owner)), mean[owner] + within, at[owner])
            if passes is None:
                return None
            drafts += np.bincount(owner, passes, len(at))
        settled = self._drafts.settling(batch)
        drafts += np.take(settled, np.minimum(steps, len(settled) - 1))
        seconds[at] += drafts + host.draft_s * longest
        return seconds, readings

    def beside(
        self, works: Works, batch: int, prompts: PromptsEach
    ) -> tuple[Floats, list[Reading]] | None:
        """As `seconds`, with `prompts` in each of the iterations, which all happen."""
        priced = self.seconds(works, batch)
        if priced is None:
            return None
        seconds, readings = priced
        if prompts.tokens.any():
            # Read again: a pass of the target is what prompts change.
            first = readings[0]
            own = self._target.many(batch, first.widths, first.contexts)
            aside = self._beside.many(batch, first.widths, first.contexts)
            assert own is not None
            if aside is None:
                return None
            readings[0] = first._replace(reader=self._beside)
            seconds += self._mixed.each(aside, works.drafted + batch, prompts) - own
        return seconds + prompts.draft_s, readings

    def count(self, readings: Sequence[Reading], iterations: int | None = None) -> None:
        """Count what `seconds` read; of the first `iterations` alone where so many happened."""
        if iterations is not None:
            kept = [reading.of < iterations for reading in readings]
            readings = [
                reading._replace(widths=reading.widths[own], contexts=reading.contexts[own])
                for reading, own in zip(readings, kept, strict=True)
            ]
        self._uncounted.extend(readings)
        # Many at a time: counting a span costs as much as counting a hundred.
        if len(self._uncounted) > UNCOUNTED:
            self.count_all()

    def count_all(self) -> None:
        """Count what waits to be counted."""
        together: dict[tuple[PassReader, int], list[Reading]] = {}
        for reading in self._uncounted:
            together.setdefault((reading.reader, reading.batch), []).append(reading)
        for (reader, batch), group in together.items():
            widths, contexts = (
                np.concatenate(parts)
                for parts in ([r.widths for r in group], [r.contexts for r in group])
            )
            reader.count(batch, widths, contexts)
        self._uncounted.clear()
