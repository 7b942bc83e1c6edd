"""Recording: tree-masked tails against drafting one after another, and the coupling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TopPLogitsWarper

from profiler.models.runner import Runner
from profiler.models.sampling import log_probs_at, signals
from profiler.recording.trace import Recorder, lacking, with_signals
from tests import bundled
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import MATCH, Trace
from traces.errors import DraftsimError
from traces.store.files import read_trace, write_trace

LONG = 40
"""Tokens of an output in which some tail is as long as tails become."""


@pytest.mark.invariant(8)
def test_recorded_output_is_what_transformers_generates() -> None:
    trace, pair = bundled.greedy_trace(), bundled.pair()
    for i, request in enumerate(trace.requests):
        ids = torch.tensor([request.prompt_ids])
        out = pair.target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=request.max_new_tokens,
        )  # fmt: skip
        mine = trace.on_path[trace.request_starts[i] : trace.request_starts[i + 1]]
        assert out[0, ids.shape[1] :].tolist() == trace.columns["token"][mine].tolist()


def test_tree_masked_tails_equal_sequential_drafting() -> None:
    """Each tail again, alone: token by token on a fresh cache, both models."""
    trace = bundled.record(6, max_new=LONG)
    target, draft = bundled.runners()
    c = trace.columns
    compared = 0
    for i, request in enumerate(trace.requests[:3]):
        mine = np.flatnonzero(c["request"] == i)
        output = c["token"][mine][c["offset"][mine] == 0].tolist()
        wrong = [
            r
            for r in mine
            if c["offset"][r] == 0 and r + 1 < len(trace) and c["offset"][r + 1] == 1
        ]
        for row in wrong[::3]:
            at = int(c["position"][row])
            fed, start = [*(request.prompt_ids or ()), *output[:at], int(c["draft_token"][row])], 0
            tail = row + 1
            while tail < len(trace) and c["offset"][tail] > 0:
                for name, runner in (("draft", draft), ("target", target)):
                    logits = runner.forward(torch.tensor(fed), start, keep=1)
                    of = torch.stack(tuple(signals(logits)), -1)[0].numpy()
                    columns = [f"{name}_{k}" for k in ("top1", "top2", "logsumexp", "entropy")]
                    recorded = [c[k][tail] for k in columns]
                    np.testing.assert_allclose(recorded, of, atol=2e-3)
                    assert int(logits.argmax()) == c[f"{name}_token"][tail]
                    if name == "draft":
                        token = logits.argmax(-1)
                        log_prob = float(log_probs_at(logits, token, GREEDY))
                        assert c["draft_logprob"][tail] == pytest.approx(log_prob, abs=1e-3)
                        kept = logits[0].sort(descending=True).values[:10]
                        mine = float(kept.log_softmax(-1)[0])
                        assert c["draft_top10_logprob"][tail] == pytest.approx(mine, abs=1e-3)
                start, fed = start + len(fed), [int(c["draft_token"][tail])]
                compared += 1
                tail += 1
    assert compared > 100


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, 0.9)], ids=lambda s: s.label)
def test_signals_added_afterwards_are_those_recorded(sampling: Sampling) -> None:
    trace = bundled.record(3, sampling, max_new=24)
    names = {"draft_top10_logprob", "draft_entropy", "draft_top2", "draft_raw_logprob"}
    names &= trace.columns.keys()
    columns = {name: values for name, values in trace.columns.items() if name not in names}
    older = Trace(columns, trace.requests, trace.max_gamma, trace.meta)
    assert lacking(older) == sorted(names)
    done: list[int] = []
    again = with_signals(older, bundled.pair().draft, lambda: done.append(1))
    assert len(done) == len(trace.requests)
    assert again.signals == trace.signals
    assert not lacking(again)
    for name, values in trace.columns.items():
        if name in names:
            np.testing.assert_allclose(again.columns[name], values, atol=2e-3)
        else:
            np.testing.assert_array_equal(again.columns[name], values)


def test_tails_stop_at_the_limit_at_max_gamma_and_at_a_drafted_eos() -> None:
    trace = bundled.record(6, max_new=LONG)
    c = trace.columns
    offset, position = c["offset"], c["position"]
    tails = offset > 0
    limit = np.array([r.max_new_tokens for r in trace.requests])[c["request"]]
    assert offset.max() == bundled.MAX_GAMMA - 1
    # The last position of the limit is never drafted: verification fills it.
    assert (position + offset)[tails].max() <= limit.max() - 2
    eos = np.isin(c["draft_token"], trace.meta["eos_token_ids"])
    followed = np.append(offset[1:] > offset[:-1], False)
    assert not (eos & followed).any()


HOT, CUT = Sampling(1.0), Sampling(1.0, 0.9)


@pytest.mark.parametrize("sampling", [HOT, CUT], ids=["all", "top-p"])
def test_sampled_matches_are_coins_of_the_recorded_ratio(sampling: Sampling) -> None:
    """Leviathan et al., Alg. 1: accepted with min(1, draft(x) / target(x)) given x."""
    trace = bundled.record(6, sampling)
    rows = trace.on_path
    gap = trace.columns["draft_path_logprob"][rows] - trace.columns["target_path_logprob"][rows]
    chance = np.minimum(1.0, np.exp(gap.astype(float)))
    match = trace.columns["match"][rows] == MATCH
    assert (chance == 0).any() == (sampling == CUT)
    assert not match[chance == 0].any()
    error = np.sqrt((chance * (1 - chance)).sum())
    assert abs((match - chance).sum()) < 4 * error
    assert (trace.columns["draft_token"][rows] == trace.columns["token"][rows])[match].all()
    assert (trace.columns["draft_token"][rows] != trace.columns["token"][rows])[~match].all()


@pytest.mark.parametrize("sampling", [HOT, CUT], ids=["all", "top-p"])
def test_overlap_is_the_chance_of_acceptance_on_average(sampling: Sampling) -> None:
    """E over x ~ target of min(1, draft/target) is the sum of the smaller probability."""
    trace = bundled.record(6, sampling)
    rows = trace.on_path
    gap = trace.columns["draft_path_logprob"][rows] - trace.columns["target_path_logprob"][rows]
    chance = np.minimum(1.0, np.exp(gap.astype(float)))
    overlap = trace.columns["overlap"][rows].astype(float)
    difference = chance - overlap
    assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(len(difference))


def test_under_top_p_everything_drawn_lies_in_its_own_cut(tmp_path: Path) -> None:
    """Output and proposals, against transformers' warper on logits of other passes."""
    trace = bundled.record(6, CUT)
    write_trace(trace, tmp_path / "sampled.parquet")
    trace = read_trace(tmp_path / "sampled.parquet")
    assert trace.sampling == CUT
    assert np.isfinite(trace.columns["draft_logprob"]).all()
    assert np.isfinite(trace.columns["target_path_logprob"][trace.on_path]).all()
    target, draft = bundled.runners()
    warp = TopPLogitsWarper(CUT.top_p)
    outside = compared = 0
    for i, request in enumerate(trace.requests[:3]):
        mine = trace.on_path[trace.request_starts[i] : trace.request_starts[i + 1]]
        output = trace.columns["token"][mine]
        ids = torch.tensor([*(request.prompt_ids or ()), *output[:-1].tolist()])
        for runner, column, log_prob in (
            (target, "token", "target_path_logprob"), (draft, "draft_token", "draft_logprob")
        ):  # fmt: skip
            logits = runner.forward(ids, 0, keep=len(output))
            kept = torch.log_softmax(warp(ids[None], logits), -1)
            tokens = torch.from_numpy(trace.columns[column][mine].astype(np.int64))
            own = kept.gather(1, tokens[:, None])[:, 0].numpy()
            near = np.abs(own - trace.columns[log_prob][mine]) < 1e-3
            # Another pass rounds the logits otherwise, which may move a token over the edge.
            outside += int((~near).sum())
            compared += len(near)
    assert compared > 100
    assert outside <= 0.01 * compared


def test_nan_logits_are_reported() -> None:
    target, draft = bundled.runners()
    broken = Runner.__new__(Runner)
    broken.__dict__.update(draft.__dict__)
    broken.forward = lambda *a, **k: draft.forward(*a, **k) * torch.nan  # type: ignore[method-assign]
    recorder = Recorder(target, broken, max_new_tokens=4, max_gamma=2)
    with pytest.raises(DraftsimError, match="the draft produced NaN logits"):
        recorder.record(bundled.pair().encode("import os\n"))


def test_an_impossible_length_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match="max_gamma is 0"):
        Recorder(*bundled.runners(), max_new_tokens=4, max_gamma=0)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, 0.9)], ids=lambda s: s.label)
def test_prompts_decoded_together_are_recorded_as_one_by_one(sampling: Sampling) -> None:
    """Five prompts through three rows, so that prompts take the rows of those that ended."""
    pair = bundled.pair()
    prompts = [pair.encode(prompt.text) for prompt in bundled.prompts(5)]

    def recorder(rows: int) -> Recorder:
        return Recorder(
            Runner(pair.target, bundled.SLOTS, rows), Runner(pair.draft, bundled.SLOTS),
            max_new_tokens=24, max_gamma=6, eos=pair.eos, sampling=sampling,
            generator=torch.Generator(),
        )  # fmt: skip

    alone, together = recorder(1), dict(recorder(4).record_together(prompts, range(5)))
    assert sorted(together) == list(range(5))
    for i, prompt in enumerate(prompts):
        assert alone.generator is not None
        alone.generator.manual_seed(i)
        for name, wanted in alone.record(prompt).items():
            values = together[i][name]
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(values, wanted, atol=2e-3, err_msg=name)
            else:
                np.testing.assert_array_equal(values, wanted, err_msg=name)


def test_decoding_together_needs_rows() -> None:
    target, draft = bundled.runners()
    recorder = Recorder(target, draft, max_new_tokens=4)
    with pytest.raises(DraftsimError, match="at least 2 sequences"):
        next(recorder.record_together([torch.tensor([1, 2])], [0]))
