"""Choosing among settings of an engine that decodes one request, each replayed and priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive
from simulator.pricing import autoregressive
from simulator.tune.choice import (
    Choice,
    Objective,
    can_hold_back,
    choose,
    cross_fitted,
    folds,
    gain,
    resamples,
)
from simulator.tune.costs import Slo, longest_draft, price_grid
from simulator.tune.evidence import about_recording, about_row, origin, summed_up
from simulator.tune.settings import Tuned
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.latency.table import LatencyTable
from traces.replay.lanes import replay_many
from traces.replay.rounds import RoundLog


class SingleSetting(Protocol):
    """One setting of an engine, hashable; its text is what rows show."""

    @property
    def tokens(self) -> int:
        """Longest draft."""
        ...

    def policy(self) -> DraftPolicy:
        """The decisions of the engine under it."""
        ...

    def document(self) -> dict[str, Any]:
        """What the engine reads."""
        ...


@dataclass(frozen=True)
class SingleEngine:
    """What to know of an engine to choose its setting."""

    name: str
    default: SingleSetting
    """What it does where nothing is set; gains are over this."""
    first: int
    """Output position that decoding begins at, see `traces.replay.rounds.RoundLog`."""
    off: str
    """What to do where speculation does not pay."""
    threshold: str
    """The draft signal that its threshold is held against."""
    worked: Callable[[RoundLog], RoundLog] | None = None
    """The rounds with the passes that this engine makes for them; None: as replayed."""


def tune_single(
    engine: SingleEngine, trace: Trace, latency: LatencyTable, settings: Sequence[SingleSetting],
    *, slo: Slo | None = None, draws: int = 1000, seed: int = 0,
) -> Tuned:  # fmt: skip
    """The setting that drafts least of those that the best does not beat beyond its interval.

    Settings that draft past the recorded tails are left out.

    Raises
    ------
    DraftsimError
        If the default, cut to the longest recorded draft, cannot be replayed.
    """
    default, most = engine.default, longest_draft(trace)
    asked = {
        str(s): s for s in (default, *settings) if most is None or s.tokens <= most
    }  # fmt: skip
    replayed = replay_many(
        trace, {name: s.policy() for name, s in asked.items()}, first=engine.first,
        leave_out=lambda _, error: isinstance(error, TailError),
    )  # fmt: skip
    logs: dict[SingleSetting, RoundLog] = {
        asked[log.policy]: log if engine.worked is None else engine.worked(log) for log in replayed
    }
    if default not in logs:
        raise DraftsimError(
            f"the default of {engine.name} ({default}) drafts past the recorded tails: "
            "record with a larger --max-gamma"
        )
    ordered = sorted(logs, key=lambda s: int(logs[s].rounds["draft_forwards"].sum()))
    grid = price_grid([logs[s] for s in ordered], latency, slo=slo)
    plain = price_grid([autoregressive(logs[default])], latency, slo=slo)
    weights = resamples(len(trace.requests), draws, seed)
    objective = Objective(grid.tokens, grid.seconds, weights)
    second = folds([r.category for r in trace.requests])
    held_out = can_hold_back(second)
    option, base = choose(objective), ordered.index(default)
    halves = (choose(objective.on(~second)), choose(objective.on(second))) if held_out else None
    chosen = cross_fitted(
        objective, second, (objective.tokens[base], objective.seconds[base]), option, halves,
        default_option=base,
    )  # fmt: skip
    best = ordered[option]
    plain_rate = float(plain.tokens.sum() / plain.seconds.sum())
    pays = plain_rate < objective.rates[option]
    if not pays:
        base_pair = np.stack([objective.tokens[base], objective.seconds[base]])
        own = np.stack([plain.tokens[0], plain.seconds[0]])
        chosen = Choice(option, *gain(own, base_pair, weights))
    row: dict[str, Any] = {
        "engine": engine.name, "batch": 1, "context": None,
        "setting": str(best) if pays else "off", "deploy": "on" if pays else "off",
        "throughput_tok_s": float(objective.rates[option]) if pays else plain_rate,
        "default": str(default),
        "gain": chosen.gain, "gain_lo": chosen.lo, "gain_hi": chosen.hi,
        "within_slo": float(grid.within[option]), "outside": float(grid.outside[option]),
        "held_out": held_out or not pays, "served_gain": None, **origin(latency, 1),
    }  # fmt: skip
    row["warnings"] = about_row(row)
    warnings = [*about_recording(trace, latency), *summed_up([row])]
    if engine.threshold not in trace.signals:
        warnings.append(
            f"the trace lacks the draft signal {engine.threshold} (`draftsim profile` records it): "
            "no threshold was searched"
        )
    if pays:
        return Tuned(engine.name, best.document(), best.policy(), [row], warnings)
    warnings.append(f"plain decoding is faster ({plain_rate:.3g} tokens/s): {engine.off}")
    return Tuned(engine.name, None, Autoregressive(), [row], warnings)
