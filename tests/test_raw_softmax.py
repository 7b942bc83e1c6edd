"""Policies that stop on the draft's softmax at T = 1, however its tokens are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policies import DraftAndVerify, DraftPolicy, GammaTunePlus, Round
from policies.core import speculate
from profiler.decoding.single import DraftStep, ModelDecoder, ModelToken
from simulator.chosen import load_policies
from tests import bundled
from tests.outputs import trace_of
from tests.test_sources_early_exit import recording
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import SignalError
from traces.replay.decoder import ReplayDecoder
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.sources.early_exit import EarlyExit
from traces.sources.replay import replay_source

SAMPLED = [Sampling(0.7), Sampling(1.0, 0.9), Sampling(0.7, 0.9)]


@cache
def recorded(sampling: Sampling) -> Trace:
    return bundled.record(3, sampling, max_new=24)


class FollowedDecoder(ModelDecoder):
    """Runs both real models; what is left to chance is as recorded.

    ``logits``: per round those that each drafted token was drawn from.
    """

    def __init__(self, trace: Trace, request: int) -> None:
        info, starts = trace.requests[request], trace.request_starts
        self._script = ReplayDecoder(trace, request, first=0)
        true = trace.columns["token"][trace.on_path]
        self._true = true[starts[request] : starts[request + 1]].tolist()
        self.logits: list[list[Tensor]] = []
        super().__init__(
            *bundled.runners(), torch.tensor(info.prompt_ids), info.max_new_tokens,
            frozenset(trace.meta["eos_token_ids"]), sampling=trace.sampling,
        )  # fmt: skip
        self.logits.clear()  # the prefill's own round

    def draft(self, so_far: Sequence[Any]) -> Any:
        drawn = torch.tensor([self._script.draft(so_far).token_id])
        step = DraftStep(super().draft(so_far).logits, drawn, self._sampling)
        return ModelToken(step, eos=self._watch)

    def _verdict(
        self, draft: Sequence[Any], drafted: Tensor, logits: Tensor
    ) -> tuple[int, Tensor, list[int]]:
        before = self._script.position
        self.logits.append([token.logits[0] for token in draft])
        accepted = self._script.verify(draft)
        tokens = self._true[before : before + accepted + 1]
        padded = tokens + [0] * (accepted + 1 - len(tokens))
        return accepted, torch.tensor(padded), tokens


class PlainGammaTunePlus:
    """Its rule written down again: a moving average, and the top-1 probability."""

    def __init__(self, policy: GammaTunePlus) -> None:
        self.mean, self.policy = float(policy.gamma), policy

    def stops(self, logits: Tensor, token: int, count: int) -> bool:
        del token
        top = float(torch.softmax(logits.double(), 0).max())
        return top < self.policy.threshold or count == math.ceil(self.mean)

    def after(self, drafted: int, accepted: int) -> None:
        p = self.policy
        if drafted:
            reward = accepted + p.delta * (accepted == drafted)
            mean = (1 - p.eta) * self.mean + p.eta * reward
            self.mean = sorted([p.gamma_min, mean, p.gamma_max])[1]


class PlainDraftAndVerify:
    """The released loop's rule written down again: the drawn token's probability at T = 1."""

    def __init__(self, policy: DraftAndVerify) -> None:
        self.bar, self.rate, self.policy = policy.threshold, policy._threshold.rate, policy

    def stops(self, logits: Tensor, token: int, count: int) -> bool:
        own = float(torch.softmax(logits.double(), 0)[token])
        return own < self.bar or count == self.policy.gamma_max

    def after(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.rate = 0.5 * self.rate + 0.5 * accepted / drafted
        wanted = self.bar
        if self.rate < 0.9:
            wanted += 0.01
        elif drafted != self.policy.gamma_max:
            wanted -= 0.01
        self.bar = 0.9 * self.bar + 0.1 * wanted


PLAIN: dict[type[DraftPolicy], Any] = {
    GammaTunePlus: PlainGammaTunePlus, DraftAndVerify: PlainDraftAndVerify,
}  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLED, ids=lambda s: s.label)
@pytest.mark.parametrize(
    "policy",
    [GammaTunePlus(gamma_max=8), GammaTunePlus(threshold=0.7), DraftAndVerify(0.6)],
    ids=["gammatune-plus", "gammatune-plus-0.7", "draft-and-verify"],
)
def test_real_rounds_are_the_replayed_and_stop_where_the_raw_softmax_says(
    sampling: Sampling, policy: Any
) -> None:
    trace = recorded(sampling)
    log = replay(trace, policy)
    for i in range(len(trace.requests)):
        decoder = FollowedDecoder(trace, i)
        rounds = list(speculate(decoder, policy.fresh()))
        mine = log.rounds[log.rounds["request"] == i]
        assert [tuple(r)[1:] for r in mine.tolist()] == [tuple(r) for r in rounds]
        _stops_match(PLAIN[type(policy)](policy), trace, i, rounds, decoder.logits)


def _stops_match(
    plain: Any, trace: Trace, request: int, rounds: list[Round], logits: list[list[Tensor]]
) -> None:
    """Every draft ends where `plain`, which reads the logits alone, stops, the limit or EOS."""
    eos, limit = trace.meta["eos_token_ids"], trace.requests[request].max_new_tokens
    script = ReplayDecoder(trace, request, first=1)
    for outcome, rows in zip(rounds, logits, strict=True):
        tokens: list[Any] = []
        while len(tokens) < outcome.drafted:
            tokens.append(script.draft(tokens))
        stops = [
            plain.stops(row, t.token_id, n) or t.token_id in eos
            for n, (row, t) in enumerate(zip(rows, tokens, strict=True), 1)
        ]
        assert not any(stops[:-1])
        assert stops[-1:] == [True] or outcome.drafted == limit - outcome.position - 1
        plain.after(outcome.drafted, outcome.accepted)
        script.verify(tokens)


@pytest.mark.parametrize("sampling", SAMPLED, ids=lambda s: s.label)
def test_the_drawn_tokens_probability_is_another(sampling: Sampling) -> None:
    trace = recorded(sampling)
    prob, top, raw = (trace.signal(s) for s in ("prob", "top_prob", "raw_prob"))
    # A colder or cut distribution gives what it keeps more than the raw softmax does.
    assert ((prob < 0.4) != (raw < 0.4)).any()
    assert ((raw < 0.4) != (top < 0.4)).any()
    assert (raw <= top * (1 + 1e-6)).all()
    if sampling.temperature == 1:
        assert (raw <= prob * (1 + 1e-5)).all()
    # The rounds that the drawn probability would give are others.
    stale = {**trace.columns, "draft_raw_logprob": trace.columns["draft_logprob"]}
    other = Trace(stale, trace.requests, trace.max_gamma, trace.meta)
    differ = [
        replay(trace, policy).rounds.tolist() != replay(other, policy).rounds.tolist()
        for policy in map(DraftAndVerify, np.arange(0.1, 0.9, 0.1).tolist())
    ]
    assert any(differ)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=lambda s: s.label)
def test_where_nothing_is_tempered_or_cut_nothing_more_is_recorded(sampling: Sampling) -> None:
    trace = recorded(sampling)
    assert "draft_raw_logprob" not in trace.columns
    assert np.array_equal(trace.signal("raw_prob"), trace.signal("prob"))
    assert np.array_equal(trace.signal("top_prob"), trace.signal("prob")) == sampling.greedy


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLED], ids=lambda s: s.label)
def test_many_settings_at_once_read_the_same(sampling: Sampling) -> None:
    trace = recorded(sampling)
    policies = [("", GammaTunePlus(gamma_max=8)), ("", GammaTunePlus(threshold=0.7))]
    for log, (_, policy) in zip(replay_many(trace, policies), policies, strict=True):
        assert (log.rounds == replay(trace, policy).rounds).all()


def test_a_recording_without_it_is_refused() -> None:
    trace = recorded(SAMPLED[0])
    columns = {n: v for n, v in trace.columns.items() if n != "draft_raw_logprob"}
    older = Trace(columns, trace.requests, trace.max_gamma, trace.meta)
    refused = "DraftAndVerify reads raw_prob, which this trace does not hold .*: record it again"
    with pytest.raises(SignalError, match=refused):
        replay(older, DraftAndVerify())
    assert len(replay(older, GammaTunePlus())) == len(replay(trace, GammaTunePlus()))
    said: list[str] = []
    every, fewer = (dict(load_policies(["all"], t, say=said.append)) for t in (trace, older))
    assert set(every) - set(fewer) == {"draft-and-verify"}
    assert said == [
        "left out: draft-and-verify; not recorded: raw_prob (record again with `draftsim profile`)"
    ]


def test_exits_recorded_without_it_lack_that_signal_alone() -> None:
    """Along draws that were tempered or cut; elsewhere it is what was recorded anyhow."""
    output = [10, 11, 12]
    greedy = recording([output], [[t] for t in output], [[1.0]] * 3, 8, (4,))
    drawn = np.zeros((3, 1), np.float32)
    every = EarlyExit().signals
    assert "raw_prob" in every
    for sampling, raw, lacks in (
        (GREEDY, None, set()), (Sampling(1.0), None, set()), (Sampling(0.7), drawn, set()),
        (Sampling(0.7), None, {"raw_prob"}), (Sampling(1.0, 0.9), None, {"raw_prob"}),
    ):  # fmt: skip
        own = {"log_prob": None if sampling.greedy else drawn, "raw_log_prob": raw}
        arrays = {**greedy.arrays, **{n: v for n, v in own.items() if v is not None}}
        held = {"early-exit": replace(greedy, meta=sampling.meta, arrays=arrays)}
        assert every - EarlyExit().held(held) == lacks, sampling.label
        plain = trace_of([output], 3)
        trace = Trace(
            plain.columns, plain.requests, None, {**plain.meta, "sampling": sampling.meta}
        )
        source = EarlyExit(tau=0.5, omega=0)
        if lacks:
            with pytest.raises(SignalError, match="raw_prob"):
                replay_source(trace, source, DraftAndVerify(), recordings=held)
        else:
            assert len(replay_source(trace, source, DraftAndVerify(), recordings=held))
    assert EarlyExit().held({}) == every
