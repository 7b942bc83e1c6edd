"""The runs under lossy rules that the comparison is better off with than with replays."""

from __future__ import annotations

from simulator.papers.cmasd import at_tau
from simulator.papers.csd import TRAINING_SHARE, csd_rule
from traces.sources.methods import CMASD_ABLATION, FIXED_TAUS, MEAN_TAU
from traces.sources.methods import CSD_ABLATION as CSD_METHODS

REAL_RUNS: tuple[tuple[str, str, float | None], ...] = (
    *((m.policy, m.rule, None) for m in CMASD_ABLATION.values() if m.rule != "exact"),
    *(
        (m.policy, at_tau(m, tau).rule, None)
        for m in CMASD_ABLATION.values()
        if MEAN_TAU in m.rule
        for tau in FIXED_TAUS
    ),
    *((m.policy, csd_rule(m), TRAINING_SHARE) for m in CSD_METHODS.values() if m.rule != "exact"),
)
"""(policy, rule, share to calibrate on) of what is better decoded for real than replayed."""
