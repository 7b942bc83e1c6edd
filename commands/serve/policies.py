"""The policies that ``draftsim serve`` runs, per request or per batch, from their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.batch.base import BatchPolicy
    from policies.core import DraftPolicy
    from policies.lengths.rate_optimal import RateOptimal
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

PLAIN = "autoregressive"
FITTED = "rate-optimal"
"""The policy that is fitted to the recording and to the latencies before it runs."""
BATCHES = (1, 4, 16, 64)
"""Batch sizes that its rates are fitted at."""
DEFAULT = ("autoregressive", "fixed:gamma=1", "fixed:gamma=4", "gammatune")
"""Policies served where none is named: those that read no signal run in any engine."""

LENGTHS = ("fixed:gamma=2", "fixed:gamma=4")
"""Fixed draft lengths among all policies."""


def every_policy() -> list[str]:
    """Return what ``all`` stands for: every policy that an engine could run."""
    from policies.registry import policy_names

    # Only a recording knows what the oracle asks.
    plain, *others = (name for name in policy_names() if name not in ("oracle", "fixed"))
    return [plain, *LENGTHS, *others]


def load_serving_policies(
    texts: Sequence[str] | None,
    trace: Trace,
    latency: LatencyTable,
    mode: str = "continuous",
    settings: Path | None = None,
    largest: int = 1,
) -> dict[str, DraftPolicy | BatchPolicy]:
    """The named policies, by the names given; none: `DEFAULT`, ``all``: `every_policy`.

    Policies that weigh cost get the table's; those that estimate acceptance, and the rate
    that ``rate-optimal`` works for, are fitted to the trace.  Those that came with ``all``
    or by default are left out where the trace lacks their signals or the mode does not fit.
    A file of `settings` is one more policy, named after it, and stands beside `RIVALS` where no
    text is given; it is to be served at batches up to `largest`.
    Raises DraftsimError naming what is wrong with a text.
    """
    from policies.batch.base import BatchPolicy
    from policies.from_file import is_file, load_file, said_cut
    from policies.registry import POLICIES, parse_serving_policy
    from policies.spec import parameters
    from simulator.serving import TableCost
    from simulator.tune import RIVALS, read_settings
    from simulator.whatif.rate import fit_estimates
    from traces.replay.run import can_replay
    from traces.sources.methods import exact_policy

    asked = [t for t in texts or () if t != "all"]
    implied = DEFAULT if not texts else every_policy() if "all" in texts else ()
    batched = mode in ("continuous", "static")
    chosen: dict[str, DraftPolicy | BatchPolicy] = {}
    if settings is not None:
        engine, chosen[settings.name] = read_settings(settings)
        if engine == "off":
            note(f"{settings} is null: it stands for decoding without speculation")
        if engine == "hf" and largest > 1:
            raise DraftsimError(
                f"{settings}: assisted generation of transformers decodes one request at a time: "
                "use --batch 1, or --max-batch 1 with --rate or --arrivals"
            )
        if not texts:
            return with_plain({**chosen, **RIVALS})
    for text in [*asked, *implied]:
        if is_file(text):
            try:
                own, policy, cut = load_file(text, trace.max_gamma)
            except ValueError as error:
                raise DraftsimError(str(error)) from None
            if cut is not None:
                note(said_cut(own, cut, "the recording's"))
            chosen.setdefault(own, policy)
            continue
        exact = exact_policy(text)
        name = exact.partition(":")[0].strip()
        resources: dict[str, Any] = {}
        wants = parameters(POLICIES[name]) if name in POLICIES else {}
        if "cost" in wants:
            resources["cost"] = TableCost(latency)
        if "estimator" in wants:
            resources["estimator"] = fit_estimates(trace, "isotonic", trace.max_gamma or 8)[0]
        try:
            made: DraftPolicy | BatchPolicy
            if exact == FITTED:
                made = fitted(trace, latency)
            else:
                made = parse_serving_policy(exact, max_gamma=trace.max_gamma, **resources)
        except ValueError as error:
            raise DraftsimError(str(error)) from None
        fits = (
            batched and set(made.reads) <= trace.signals
            if isinstance(made, BatchPolicy)
            else can_replay(trace, made)
        )
        longest = made.longest_draft()
        if trace.max_gamma is not None and longest is not None:
            fits = fits and longest <= trace.max_gamma  # no table's lengths are lowered
        if text in asked or fits:
            # A length left at its default is in the name all the same.
            name = f"fixed:gamma={made.gamma}" if text == "fixed" else text  # type: ignore[union-attr]
            chosen.setdefault(name, made)
    return with_plain(chosen)


def fitted(trace: Trace, latency: LatencyTable, longest: int | None = None) -> RateOptimal:
    """Return the rate-optimal rule, fitted to a recording and to latencies, to be served.

    It has a rate for each of `BATCHES`, or for one request if the latencies know no other batch;
    ``longest`` bounds its drafts.
    """
    from simulator.whatif.rate import fit_rate_optimal

    sizes = BATCHES if latency.knows_batches or latency.batch_free else (1,)
    return fit_rate_optimal(trace, latency, gamma_max=longest, batches=sizes).policy


def with_plain(
    chosen: dict[str, DraftPolicy | BatchPolicy],
) -> dict[str, DraftPolicy | BatchPolicy]:
    """The policies with plain decoding first: what a speedup is over."""
    from policies.lengths.basic import Autoregressive

    plain = {n: p for n, p in chosen.items() if isinstance(p, Autoregressive)}
    return {**(plain or {PLAIN: Autoregressive()}), **chosen}
