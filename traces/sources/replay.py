"""Replay of a trace with any source of drafts, under any length policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from policies.core import DraftPolicy, Round, speculate
from policies.registry import describe
from policies.rules.base import VerifyRule
from policies.vectorised import own_word, plan_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError
from traces.latency.table import LatencyTable
from traces.replay.calls import LAYER, pack_calls, pack_counted
from traces.replay.rounds import RoundLog
from traces.replay.ruled import prepared_rule
from traces.replay.run import own_policy, source_under, text_fidelity
from traces.replay.vectorised import replay_many
from traces.sources.base import ReplayedRounds, Source, SourceReplay
from traces.sources.recording import Recordings
from traces.store.identity import model_in


def replay_source(
    trace: Trace,
    source: Source,
    policy: DraftPolicy,
    rule: VerifyRule | None = None,
    *,
    recordings: Recordings | None = None,
    name: str | None = None,
    first: int | None = None,
    requests: Sequence[int] | None = None,
) -> RoundLog:
    """Decode `requests` of `trace` (None: all) again with `source` drafting, in recording order.

    Drafts are verified losslessly: exactly, or by rejection sampling along a sampled trace,
    whose replay is exact in distribution; those of the draft model also by a lossy `rule`.  Only
    the target's output is taken from `trace` for other sources, and their recordings from
    `recordings`.  ``first`` is the output position
    decoding begins at, by default the trace's own (`Trace.first`); 0 (lookups only) lets the
    first verification process the prompt, as transformers does.

    Raises
    ------
    SignalError
        If the policy reads a signal that the source's tokens do not have.
    DraftsimError
        If what the source needs was not recorded, the rule is lossy (only a draft model's
        tokens were scored by the target), or it does not fit how the trace was decoded.
    TailError
        If the policy drafts past what was recorded off the path.
    """
    lossless = check_rule(rule, source, trace)
    recordings = source.completed(trace, recordings or {})
    check_signals(policy, source, recordings)
    first = trace.first if first is None else first
    chosen = range(len(trace.requests)) if requests is None else requests
    by_passes = source.by_passes(recordings)
    if source.chained:
        source.check(trace, recordings, first)
    if source.chained and len(chosen):
        chains = source.drafts_along(trace, recordings)
        chains = chains if chosen == range(len(trace.requests)) else chains.select(chosen)
        [log] = replay_many(chains, {describe(policy): policy}, rule=rule, first=first)
        log = replace(log, policy=name or log.policy)
        if by_passes:
            return log
        calls = pack_counted(source.counted(log, source.recording(recordings)))
        drafter = source.drafter(recordings)
        return replace(log, recorded_calls=calls, drafter=drafter, takes_verified=False)
    if source.chained:
        rounds, calls = RoundLog.pack([]), pack_calls([])
    else:
        # Some of them may look up what others said: the trace itself is not cut.
        decoder_of = source.open(trace, recordings, first)
        own = own_policy(trace, policy)
        known = _at_once(trace, decoder_of, own, first, chosen)
        rounds, calls = known or _asked(source, decoder_of, own, chosen)
    return RoundLog(
        rounds, [trace.requests[i] for i in chosen], name or describe(policy),
        source=source_under(policy, source.label(recordings)), verify=lossless,
        fidelity=text_fidelity(trace) if source.fidelity == "exact" else source.fidelity,
        reads=policy.reads, first=first, recorded_calls=None if by_passes else calls,
        drafter=source.drafter(recordings), takes_verified=by_passes, sampling=trace.sampling,
    )  # fmt: skip


def _at_once(
    trace: Trace, decoder_of: Callable[[int], SourceReplay], policy: DraftPolicy, first: int,
    chosen: Sequence[int],
) -> ReplayedRounds | None:  # fmt: skip
    """Return the rounds of the requests `chosen` as the loop would make them, without the loop.

    None if the policy has to be asked before every token, where a decoder is of a class of the
    caller's own, and where a draft leaves what was recorded: there the loop says what is missing.
    """
    try:
        plan = plan_of(policy)
    except DraftsimError:
        return None
    ascending = all(one < other for one, other in pairwise(chosen))
    if plan is None or not len(chosen) or not ascending:
        return None
    found: ReplayedRounds | None = own_word(
        decoder_of(chosen[0]), "at_once", trace, plan, first, chosen
    )
    return found


def _asked(
    source: Source, decoder_of: Callable[[int], SourceReplay], policy: DraftPolicy,
    chosen: Sequence[int],
) -> ReplayedRounds:  # fmt: skip
    """Return rounds and calls by the loop: the policy is asked before every token."""
    noted: list[Any] = []

    def decode() -> Iterator[list[Round]]:
        for i in chosen:
            decoder = decoder_of(i)
            yield list(speculate(decoder, policy.fresh()))
            noted.append(decoder.noted)

    rounds = RoundLog.pack(decode())
    return rounds, source.counted_in(rounds, noted)


def check_rule(rule: VerifyRule | None, source: Source, trace: Trace) -> str:
    """Name of the rule that `source` is verified with; DraftsimError if `rule` is another."""
    lossless = "rejection-sampling" if trace.temperature > 0 else "exact"
    if rule is not None and not (rule.lossless or source.scored):
        raise DraftsimError(
            f"{type(rule).__name__} needs the target's scores of wrong drafts, which are recorded "
            f"for a draft model alone, not for {source.name!r}: use --verify {lossless}"
        )
    prepared_rule(rule, trace)  # refuses a lossless rule that does not fit the recording
    return lossless


def check_signals(
    policy: DraftPolicy, source: Source, recordings: Recordings | None = None
) -> None:
    """Raise SignalError where `policy` reads what the source's tokens do not carry."""
    held = source.signals if recordings is None else source.held(recordings)
    if missing := [s for s in policy.reads if s in source.signals - held]:
        raise SignalError(
            f"{type(policy).__name__} reads {', '.join(missing)}, which this recording of "
            f"{source.name!r} drafts lacks: record it again"
        )
    if missing := [s for s in policy.reads if s not in held]:
        raise SignalError(
            f"{type(policy).__name__} reads {', '.join(missing)}, which {source.name!r} drafts do "
            f"not have (they have {', '.join(sorted(source.signals))}): choose a policy that "
            "reads none, such as fixed"
        )


def runs_layers(log: RoundLog) -> bool:
    """Return True if the rounds ran single layers of the target."""
    return log.recorded_calls is not None and bool(np.isin(log.recorded_calls["kind"], LAYER).any())


def check_layers(log: RoundLog, trace: Trace, latency: LatencyTable) -> None:
    """Refuse rounds that ran single layers at latencies of a target with other layers.

    They ran a share of the layers of the target that wrote `trace`, which another would not.
    Raises DraftsimError if both numbers of layers are known and differ.
    """
    if runs_layers(log):
        check_same_layers(log.source, trace, latency)


def check_same_layers(source: str, trace: Trace, latency: LatencyTable) -> None:
    """Raise DraftsimError if the latencies' target has more or fewer layers than the trace's."""
    ran, priced = (model_in(meta, "target").get("layers") for meta in (trace.meta, latency.meta))
    if "at_depths_of" in latency.meta:
        priced = latency.meta["at_depths_of"]
    if None not in (ran, priced) and ran != priced:
        raise DraftsimError(
            f"{source} runs single layers, recorded of a target with {ran}, and the latencies are "
            f"of a target with {priced}: give latencies of the recorded target, or a recording of "
            "the other"
        )
