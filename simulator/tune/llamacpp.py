"""llama.cpp's server: longest and shortest draft, and the probability below which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from policies.lengths.llamacpp import LlamaCppDraft
from simulator.targets import Targets
from simulator.tune.formats import LLAMACPP_KEYS
from simulator.tune.settings import Tuned
from simulator.tune.single import SingleEngine, SingleSetting, tune_single
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog


def _setting(tokens: int, fewest: int = 0, p_min: float = 0.0) -> dict[str, Any]:
    """Return the options by name, without their dashes, as the server's preset files hold them."""
    return dict(zip(LLAMACPP_KEYS, (tokens, fewest, p_min), strict=True))


DEFAULT = _setting(3)
"""llama.cpp since May 2026; 16, 0, 0.75 before."""
(THRESHOLD,) = LlamaCppDraft.reads
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = (0.2, 0.4, 0.6, 0.75, 0.9)
CAPS = (3, 5, 8, 16)
FEWEST = (0, 2)


def llamacpp_options(signals: bool) -> list[SingleSetting]:
    """Return settings to search; thresholds only if the trace holds the signal they need."""
    found: list[SingleSetting] = [_setting(n) for n in LENGTHS]
    if signals:
        found += [_setting(n, m, p) for n in CAPS for m in FEWEST for p in THRESHOLDS]
    return found


def tune_llamacpp(
    trace: Trace,
    latency: LatencyTable,
    *,
    slo: Targets | None = None,
    draws: int = 1000,
    seed: int = 0,
    settings: Sequence[SingleSetting] | None = None,
) -> Tuned:
    """Tune ``--spec-draft-n-max``, ``--spec-draft-n-min`` and ``--spec-draft-p-min``.

    Every setting is replayed as the server drafts for one slot, and of those that the best does
    not beat beyond the interval the one is taken that drafts least.  The server's draft model also
    reads every verified batch, in a pass of its own, which is priced (`mirrored`).  The gain is
    over no speculation, ``default_gain`` over the server's default of 3 tokens.

    Raises
    ------
    DraftsimError
        If nothing can be replayed.
    """
    engine = SingleEngine(
        "llamacpp", DEFAULT, first=1, off="start the server without a draft model",
        threshold=THRESHOLD, worked=mirrored,
    )  # fmt: skip
    found = tune_single(
        engine, trace, latency, settings or llamacpp_options(THRESHOLD in trace.signals), slo=slo,
        draws=draws, seed=seed,
    )  # fmt: skip
    more = "one setting serves every load: with more slots (--parallel) drafts gain less"
    warnings = [*found.warnings, more]
    if latency.meta.get("passes_apart") is False:
        warnings.append(
            "these latencies come from runs that cannot separate a draft pass from a verified "
            "token, and p-min depends on that: calibrate with runs at two p-min or two "
            "concurrencies"
        )
    return replace(found, warnings=warnings)


def mirrored(log: RoundLog) -> RoundLog:
    """Return the rounds with the draft's pass over what was verified, its catching up.

    After every pass of the target the server runs the draft model over the same tokens; drafting
    then begins with a pass over the target's own.  Source of the behaviour: ggml-org/llama.cpp,
    ``common/speculative.cpp``, ``common_speculative_impl_draft_simple::process`` (2026).
    """
    rounds = np.array(log.rounds)
    rounds["catch_up"] = rounds["drafted"] + 1
    rounds["draft_forwards"] += 1
    return replace(log, rounds=rounds)
