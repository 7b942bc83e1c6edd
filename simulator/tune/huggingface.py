"""transformers' assisted generation: length, schedule and confidence threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from policies.lengths.huggingface import Confidence
from simulator.targets import Targets
from simulator.tune.costs import longest_draft
from simulator.tune.formats import HF_KEYS, check_huggingface
from simulator.tune.settings import Tuned
from simulator.tune.single import SingleEngine, tune_single
from traces.acceptance.trace import Trace
from traces.digits import counted
from traces.latency.table import LatencyTable


class HuggingFaceSetting(NamedTuple):
    """The three keys that transformers reads from the draft's generation config."""

    tokens: int
    schedule: str
    threshold: float

    def policy(self) -> Confidence:
        """Return transformers 5.23 under this setting, scikit-learn installed."""
        return check_huggingface(self.document())

    def document(self) -> dict[str, Any]:
        """Return the keys of the draft's generation config."""
        return dict(zip(HF_KEYS, self, strict=True))

    def __str__(self) -> str:
        return f"{self.tokens}, {self.schedule}, {self.threshold:g}"


DEFAULT = HuggingFaceSetting(20, "constant", 0.4)
"""transformers since 4.45."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
CAPS = (3, 5, 10, 20)


def options(signals: bool) -> list[HuggingFaceSetting]:
    """Return settings searched; those with a threshold only where the trace holds the signal.

    ``heuristic`` is searched without a threshold: with one, what carries over from call to
    call differs between versions.
    """
    found = [HuggingFaceSetting(n, "constant", 0.0) for n in LENGTHS]
    found += [
        HuggingFaceSetting(n, s, 0.0)
        for s in ("heuristic_transient", "heuristic")
        for n in (1, 3, 5)
    ]
    if signals:
        found += [HuggingFaceSetting(n, "constant", t) for n in CAPS for t in THRESHOLDS]
        found += [HuggingFaceSetting(5, "heuristic_transient", t) for t in THRESHOLDS]
    return found


def tune_huggingface(
    trace: Trace,
    latency: LatencyTable,
    *,
    slo: Targets | None = None,
    draws: int = 1000,
    seed: int = 0,
    settings: Sequence[HuggingFaceSetting] | None = None,
) -> Tuned:
    """Tune ``num_assistant_tokens``, its schedule and ``assistant_confidence_threshold``.

    Every setting is replayed as transformers 5.23 decodes (the first verification includes
    the prompt, batch 1), and of those that the best does not beat beyond the interval the
    one is taken that drafts least.  The gain is over no speculation, ``default_gain`` over
    transformers' default, 20 tokens under a constant schedule with threshold 0.4.  Where the trace
    lacks the draft's probability, the default cannot be replayed, and 20 tokens without a
    threshold take its place.

    Settings that draft past the recorded tails are left out.

    Raises
    ------
    DraftsimError
        If nothing can be replayed.
    """
    signals = "prob" in trace.signals
    default = DEFAULT if signals else DEFAULT._replace(threshold=0.0)
    most = longest_draft(trace)
    if most is not None:
        default = default._replace(tokens=min(default.tokens, most))
    engine = SingleEngine("hf", default, first=0, off="pass no assistant model", threshold="prob")
    found = tune_single(
        engine, trace, latency, settings or options(signals), slo=slo, draws=draws, seed=seed
    )
    if most is None or default.tokens == DEFAULT.tokens:
        return found
    cut = f"recorded drafts have at most {counted(most, 'token')}, so the default is cut there"
    return replace(found, warnings=[*found.warnings, cut])
