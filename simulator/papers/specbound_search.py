"""The optimum of SpecBound's parameters on our pair, searched by replay on some of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.lengths.basic import Fixed
from simulator.papers.ours import Ours
from traces.errors import TailError
from traces.replay.rounds import RoundLog
from traces.sources.exits.early_exit import EarlyExit, StandInExit
from traces.sources.registry import describe_source
from traces.sources.replay import replay_source


class Setting(NamedTuple):
    """SpecBound's parameters."""

    tau: float = 0.5
    omega: float = 0.3
    depth: float = 0.5
    width: float = 6

    @property
    def text(self) -> str:
        """In words, every parameter named."""
        return f"tau={self.tau:g}, omega={self.omega:g}, depth={self.depth:g}, width={self.width:g}"

    def source(self, kind: type[EarlyExit] = EarlyExit) -> EarlyExit:
        """The source of drafts; the width is the length policy's."""
        return kind(tau=self.tau, omega=self.omega, depth=self.depth)


START = Setting()
FOLLOWED: dict[str, tuple[float, ...]] = {
    "tau": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "omega": (0.0, 0.1, 0.2, 0.3, 0.5, 1.0),
    "depth": (0.25, 0.5, 0.75, 1.0),
}
FOLLOWED_SOURCES = tuple(
    dict.fromkeys(
        describe_source(START._replace(**{name: value}).source())
        for name, values in FOLLOWED.items()
        for value in values
    )
)
"""What a recording follows behind wrong exits around `START`, as text."""
CHOICES: dict[str, tuple[float, ...]] = {
    **FOLLOWED, "tau": (0.05, 0.1, 0.2, *FOLLOWED["tau"]), "width": (1, 2, 4, 6, 8, 12, 24)
}  # fmt: skip
"""The values that the search and Figure 3 go through; the paper's own are lost in the text at
hand.  A threshold of 0 is none: it is not among them."""


def choices(ours: Ours) -> dict[str, tuple[float, ...]]:
    """`CHOICES` as far as the recording has them."""
    exits = ours.recordings.exits
    return CHOICES if exits is None else {**CHOICES, "omega": tuple(exits.omegas)}


class Replayed(NamedTuple):
    """A setting's rounds, and how much faster than plain decoding they are."""

    log: RoundLog
    speedup: float


@dataclass
class Replays:
    """SpecBound's settings replayed on some of the requests, each once.

    A setting that drafts past what was recorded behind a wrong exit is replayed with a stand-in
    there (`StandInExit`): its log is ``approximate``.
    """

    ours: Ours
    requests: Sequence[int]
    found: dict[Setting, Replayed] = field(default_factory=dict)

    def run(self, setting: Setting) -> Replayed:
        """Rounds and speedup; raises what `traces.sources.replay.replay_source` raises."""
        if setting not in self.found:
            try:
                log = self._replay(setting, EarlyExit)
            except TailError:
                log = self._replay(setting, StandInExit)
            self.found[setting] = Replayed(log, self.ours.speedup(log))
        return self.found[setting]

    def _replay(self, setting: Setting, kind: type[EarlyExit]) -> RoundLog:
        return replay_source(
            self.ours.trace, setting.source(kind), Fixed(int(setting.width)), name=setting.text,
            recordings=self.ours.recordings, requests=self.requests,
        )  # fmt: skip


def search(replays: Replays) -> Setting:
    """The setting from which no parameter can be changed alone for more speed on these requests.

    From `START` to better neighbours along one parameter after another, then over all values
    of each.  Raises what `traces.sources.replay.replay_source` raises.
    """
    best = START
    replays.run(best)  # whatever was not recorded is said of the start
    values = choices(replays.ours)
    while True:
        best = _climbed(best, replays, values)
        others = [best._replace(**{n: v}) for n in values for v in values[n]]
        top = max([best, *others], key=lambda setting: replays.run(setting).speedup)
        if top == best:
            return best
        best = top


def _climbed(
    best: Setting, replays: Replays, values: dict[str, tuple[float, ...]]
) -> Setting:  # fmt: skip
    """The last of ever better neighbours along single parameters."""
    moved = True
    while moved:
        moved = False
        for name, ordered in values.items():
            at = ordered.index(getattr(best, name))
            for step in (-1, 1):
                while 0 <= at + step < len(ordered):
                    other = best._replace(**{name: ordered[at + step]})
                    if replays.run(other).speedup <= replays.run(best).speedup:
                        break
                    best, at, moved = other, at + step, True
    return best
