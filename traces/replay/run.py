"""Clock-free replay: every request of a recording under a policy, and the log of the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from policies.core import DraftPolicy, P, Round, own_copy, speculate
from policies.registry import describe
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from traces.acceptance.trace import Trace
from traces.errors import SignalError, TailError
from traces.replay.decoder import ReplayDecoder
from traces.replay.rounds import Fidelity, RoundLog, Rounds
from traces.replay.ruled import RuleReplayDecoder, prepared_rule


def replay(
    trace: Trace,
    policy: DraftPolicy,
    rule: VerifyRule | None = None,
    *,
    name: str | None = None,
    first: int | None = None,
    batch: int = 1,
) -> RoundLog:
    """Replay every request of `trace` under `policy`, in recording order.

    ``first`` is the output position decoding begins at (see
    `traces.replay.decoder.ReplayDecoder`); by default the trace's own (`Trace.first`).
    ``batch`` is the number of sequences decoded together, as the policy is told.
    The fidelity is ``exact`` for a greedy trace, ``exact in distribution`` for a sampled one,
    and ``approximate`` where matches were imputed (`traces.acceptance.survival.impute`) or
    the trace says so of itself (``meta["fidelity"]``); ``lower bound`` where they were imputed
    as rejections.

    ``rule`` decides what is accepted; by default, as every lossless rule, the recorded
    verdicts do.  It is a prototype: one copy serves all requests in recording order,
    which is part of the run where the rule learns, and ends up in ``RoundLog.rule``.
    Under a lossy rule every round is exact in itself, and the run ``approximate`` from
    the first verdict that leaves the recorded path (see `traces.replay.ruled.RuleReplayDecoder`).

    Raises
    ------
    SignalError
        If the policy or rule reads something the trace does not hold, or the policy
        drafts where no outcome was observed.
    DraftsimError
        If the rule cannot run at the recording's temperature.
    TailError
        If the policy drafts past the recorded tails.
    """
    trace.check_reads(policy.reads, type(policy).__name__)
    if first is None:
        first = trace.first
    own_rule = prepared_rule(rule, trace)
    # A policy that learns across requests learns within this run, not in the caller's hands.
    shared = own_policy(trace, policy)
    mismatched: list[int] = []
    departed = False

    def decode() -> Iterator[list[Round]]:
        nonlocal departed
        for i in range(len(trace.requests)):
            mine = shared.fresh()
            if own_rule is None:
                yield _run(ReplayDecoder(trace, i, first, batch), mine)
                continue
            decoder = RuleReplayDecoder(trace, i, own_rule, first, batch)
            yield _run(decoder, mine)
            own_rule.end_request()
            mismatched.extend(decoder.mismatched)
            departed |= decoder.departed

    name = name or describe(policy)
    try:
        rounds = RoundLog.pack(decode())
    except TailError as error:
        raise TailError(f"{name}: {error}") from None
    log = recorded_log(trace, rounds, name, policy, first)
    return log if rule is None else ruled_log(log, rule, own_rule, mismatched, departed)


def ruled_log(
    log: RoundLog, rule: VerifyRule, own_rule: VerifyRule | None, mismatched: Sequence[int],
    departed: bool,
) -> RoundLog:  # fmt: skip
    """Return the log of a run under `rule`; ``own_rule``: its copy, None if it is lossless."""
    log = replace(log, verify=describe_rule(rule))
    if own_rule is not None:
        log = replace(log, mismatched=np.array(mismatched, dtype=np.int32), rule=own_rule)
    return replace(log, fidelity="approximate") if departed else log


def recorded_log(
    trace: Trace, rounds: Rounds, name: str, policy: DraftPolicy, first: int
) -> RoundLog:
    """Return a log of `rounds` under `policy` along the recorded output, verified losslessly."""
    return RoundLog(
        rounds, trace.requests, name, source=source_under(policy, trace.source),
        drafter=trace.drafter, verify="rejection-sampling" if trace.temperature > 0 else "exact",
        fidelity=fidelity_of(trace), reads=policy.reads, first=first,
        takes_verified=trace.takes_verified, sampling=trace.sampling,
    )  # fmt: skip


def source_under(policy: DraftPolicy, source: str) -> str:
    """Return the source of a log under `policy`: ``none`` if it never drafts, else `source`."""
    return "none" if policy.longest_draft() == 0 else source


def own_policy(trace: Trace, policy: P) -> P:
    """Return a run's copy of `policy`; SignalError if its vocabulary size is not known."""
    try:
        return own_copy(policy, trace.vocab_size)
    except ValueError as error:
        raise SignalError(str(error)) from None


def can_replay(trace: Trace, policy: DraftPolicy) -> bool:
    """Return True if the recording has the signals, and the vocabulary, that `policy` needs."""
    if not set(policy.reads) <= trace.signals:
        return False
    try:
        own_policy(trace, policy)
    except SignalError:
        return False
    return True


def _run(decoder: ReplayDecoder, policy: DraftPolicy) -> list[Round]:
    try:
        return list(speculate(decoder, policy))
    except ValueError as error:
        # `Oracle` asks for the run length, which `load` withholds where it is not known.
        if decoder.remaining and decoder.load.run_length is None:
            raise SignalError(
                f"{type(policy).__name__} asks how far the drafts match, which was not observed at "
                f"position {decoder.position} of an imported request: impute the trace first "
                "(`traces.acceptance.survival.impute`)"
            ) from error
        raise


LOW_PRECISION = ("bfloat16", "float16")
"""Number formats in which near-ties of the target's logits are common."""


def fidelity_of(trace: Trace) -> Fidelity:
    """Return how a lossless replay of `trace` relates to really decoding its requests."""
    if trace.is_lower_bound:
        return "lower bound"
    if "imputed" in trace.meta or trace.meta.get("fidelity") == "approximate":
        return "approximate"
    return text_fidelity(trace)


def text_fidelity(trace: Trace) -> Fidelity:
    """Return how well decoding again reproduces the recorded output.

    In low precision, a pass of another width can decide a near-tie of two tokens otherwise,
    and from there on the text differs from the recorded one.
    """
    if trace.temperature > 0:
        return "exact in distribution"
    return "exact up to near-ties" if trace.meta.get("dtype") in LOW_PRECISION else "exact"
