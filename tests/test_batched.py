"""The batched decoder with tiny random models: against one stream, the replay, and oracles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from policies import (  # noqa: E402
    SVIP,
    AdaptiveVerification,
    Autoregressive,
    Confidence,
    ConfidenceFreeze,
    DraftPolicy,
    Fixed,
    GammaTune,
    HFHeuristic,
    Oracle,
    Round,
    UCBSpec,
)
from policies.batch import BatchPolicy  # noqa: E402
from profiler.batch_latency import batch_blocks, measure_batch_host  # noqa: E402
from profiler.batched import decode_batch, enter, speculate_batch  # noqa: E402
from profiler.batched_decoder import BatchedDecoder, Verdict  # noqa: E402
from profiler.batched_forced import ForcedStream  # noqa: E402
from profiler.batched_runs import BatchArm, groups_of, run_batches  # noqa: E402
from profiler.batched_stream import Stream  # noqa: E402
from profiler.batched_styles import PerRequest as EachAlone  # noqa: E402
from profiler.batched_styles import TruncateToMinimum as TruncatedRounds  # noqa: E402
from profiler.batched_styles import style_of  # noqa: E402
from profiler.decoder import greedy  # noqa: E402
from profiler.latency import Grid, Sweeps  # noqa: E402
from profiler.loading import Pair  # noqa: E402
from profiler.profile import Settings, profile_latency, progress_bar  # noqa: E402
from profiler.record import Recorder  # noqa: E402
from profiler.runner import Runner  # noqa: E402
from profiler.spotcheck import output_of, rounds_differ  # noqa: E402
from simulator.serving.arrivals import Job  # noqa: E402
from simulator.serving.sequence import EngineState, ServedSequence, Slot  # noqa: E402
from simulator.serving.speculation import (  # noqa: E402
    Jointly,
    PerRequest,
    Speculation,
    StopAtMean,
    TruncateToMinimum,
)
from traces.errors import DraftsimError  # noqa: E402
from traces.latency import INTERPOLATED, LatencyTable  # noqa: E402
from traces.replay import replay  # noqa: E402
from traces.trace import MATCH, Request, Trace  # noqa: E402

VOCAB, NEW, GAMMA = 61, 24, 8
LENGTHS = (5, 17, 1, 9, 30, 3, 12, 2, 21)
SLOTS = max(LENGTHS) + NEW
END = frozenset({7, 11})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models run fastest alone, and the same way every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(layers: int, seed: int) -> Any:
    """A random model, sharp enough that argmaxes are no near ties."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, eos_token_id=sorted(END),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.eval()


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A target, and a draft that is the same model slightly disturbed."""
    target, draft = llama(2, 1), llama(2, 1)
    torch.manual_seed(3)
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(0.12 * weights.std(unbiased=False) * torch.randn_like(weights))
    return Pair(target, draft, None, {})


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=rng) for n in LENGTHS]


@pytest.fixture(scope="module")
def trace(pair: Pair, prompts: list[Any]) -> Trace:
    slots = max(LENGTHS) + NEW * (GAMMA + 1)
    recorder = Recorder(
        Runner(pair.target, slots), Runner(pair.draft, slots), max_new_tokens=NEW,
        max_gamma=GAMMA, eos=END,
    )  # fmt: skip
    parts, requests = [], []
    for i, prompt in enumerate(prompts):
        columns = recorder.record(prompt)
        tokens = columns["token"][columns["offset"] == 0]
        columns["request"] = np.full(len(columns["token"]), i, dtype=np.int32)
        ended = "eos" if int(tokens[-1]) in END else "length"
        requests.append(
            Request(str(i), "random", len(prompt), len(tokens), NEW, ended, tuple(prompt.tolist()))
        )
        parts.append(columns)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    meta = {"sampling": {"temperature": 0.0}, "eos_token_ids": sorted(END)}
    return Trace(columns, requests, GAMMA, meta)


def runners(pair: Pair, batch: int) -> tuple[Runner, Runner]:
    return Runner(pair.target, SLOTS, batch), Runner(pair.draft, SLOTS, batch)


def run_lengths(trace: Trace) -> list[list[int]]:
    starts = trace.request_starts
    return [trace.run_lengths[a:b].tolist() for a, b in pairwise(starts)]


def replayed(trace: Trace, policy: DraftPolicy) -> list[list[Round]]:
    rounds = replay(trace, policy).rounds
    return [
        [
            Round(*(int(row[name]) for name in Round._fields))
            for row in rounds[rounds["request"] == i]
        ]
        for i in range(len(trace.requests))
    ]


def test_the_recording_exercises_what_the_tests_are_about(trace: Trace) -> None:
    """Acceptance is ragged, some outputs end early and at different times, others do not."""
    assert 0.2 < (trace.run_lengths > 0).mean() < 0.95
    assert len({r.tokens for r in trace.requests}) > 2
    assert {r.ended for r in trace.requests} == {"eos", "length"}


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 9, 16])
def test_outputs_are_those_of_each_sequence_alone(
    pair: Pair, trace: Trace, prompts: list[Any], batch: int, continuous: bool
) -> None:
    alone = Runner(pair.target, SLOTS)
    expected = [greedy(alone, prompt, NEW, END) for prompt in prompts]
    done = decode_batch(*runners(pair, batch), prompts, NEW, END, Fixed(3), continuous=continuous)
    assert done.outputs == expected
    assert done.outputs == [output_of(trace, i) for i in range(len(prompts))]


POLICIES = [
    Autoregressive(), Fixed(1), Fixed(8), GammaTune(gamma_max=GAMMA), HFHeuristic(gamma_max=GAMMA),
    Oracle(gamma_max=GAMMA), Oracle("run+1", gamma_max=GAMMA), SVIP(gamma_max=GAMMA),
    Confidence(gamma=GAMMA, confidence_threshold=0.6, roc_update="in_call"),
    UCBSpec(gammas=(1, 3, 6)),
]  # fmt: skip


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_rounds_are_the_replays(
    pair: Pair, trace: Trace, prompts: list[Any], policy: DraftPolicy, continuous: bool
) -> None:
    """Work included: draft passes and catch-up agree, too."""
    done = decode_batch(
        *runners(pair, 4), prompts, NEW, END, policy, continuous=continuous,
        run_lengths=run_lengths(trace),
    )  # fmt: skip
    assert done.rounds == replayed(trace, policy)


def test_a_learner_has_one_copy_per_place_in_the_batch(
    pair: Pair, trace: Trace, prompts: list[Any]
) -> None:
    policy = UCBSpec(gammas=(1, 3, 6), learns_across_requests=True)
    done = decode_batch(*runners(pair, 3), prompts, NEW, END, policy)
    for seat in range(3):
        own = range(seat, len(prompts), 3)
        fresh = UCBSpec(gammas=(1, 3, 6), learns_across_requests=True)
        assert [done.rounds[i] for i in own] == replayed(trace.select(own), fresh)


def test_iterations_of_a_static_batch_are_those_of_its_slowest(
    pair: Pair, trace: Trace, prompts: list[Any]
) -> None:
    alone = [len(rounds) for rounds in replayed(trace, Fixed(2))]
    done = decode_batch(*runners(pair, 4), prompts, NEW, END, Fixed(2))
    assert done.iterations == sum(max(alone[i] for i in g) for g in groups_of(len(alone), 4))
    flowing = decode_batch(*runners(pair, 4), prompts, NEW, END, Fixed(2), continuous=True)
    # Places are never idle while someone waits (list scheduling, Graham 1969).
    assert -(-sum(alone) // 4) <= flowing.iterations <= sum(alone) / 4 + max(alone)


class Alone(DraftPolicy):
    """Notes the batch sizes it is told."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def begin_round(self, load: Any) -> None:
        self.batches.append(load.batch)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return not draft


def test_policies_are_told_how_many_decode(pair: Pair, trace: Trace, prompts: list[Any]) -> None:
    decoder, style = BatchedDecoder(*runners(pair, 9)), EachAlone(Alone())
    streams = [Stream(i, prompt, NEW, END) for i, prompt in enumerate(prompts)]
    sizes = [len(iteration) for iteration in speculate_batch(decoder, style, streams)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    for stream in streams:
        told = stream.policy.batches
        assert told == sizes[: len(told)]


def synchronised(
    trace: Trace, group: Sequence[int], gamma: int, style: str
) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of a fixed-length policy, looked up in the recording row by row."""
    names = ("request", "position", "offset", "draft_token", "match")
    rows = zip(*(trace.columns[n].tolist() for n in names), strict=True)
    proposals = {(i, at, k): (token, match == MATCH) for i, at, k, token, match in rows}
    position = dict.fromkeys(group, 1)
    tokens = [r.tokens for r in trace.requests]
    out: dict[int, list[tuple[int, int]]] = {i: [] for i in group}
    while going := [i for i in group if position[i] < tokens[i]]:
        drafted, accepted = {}, {}
        for i in going:
            matched, count, wrong = 0, 0, None
            while count < min(gamma, NEW - position[i] - 1):
                on_path = (i, position[i] + count, 0)
                token, match = proposals[on_path if wrong is None else (i, wrong, count - matched)]
                if wrong is None and not match:
                    wrong = position[i] + count
                matched, count = matched + (wrong is None), count + 1
                if token in END:
                    break
            drafted[i], accepted[i] = count, matched
        if style == "minimum":
            on = [a for i, a in accepted.items() if position[i] + a + 1 < tokens[i]]
            floor = min(on) if on else max(accepted.values())
            accepted = {i: min(a, floor) for i, a in accepted.items()}
        for i in going:
            out[i].append((drafted[i], accepted[i]))
            position[i] += accepted[i] + 1
    return [out[i] for i in group]


@pytest.mark.parametrize("style", ["ragged", "minimum"])
def test_truncation_against_matches_alone(
    pair: Pair, trace: Trace, prompts: list[Any], style: Any
) -> None:
    done = decode_batch(*runners(pair, 5), prompts, NEW, END, Fixed(4), synchronise=style)
    assert done.outputs == [output_of(trace, i) for i in range(len(prompts))]
    for group in groups_of(len(prompts), 5):
        real = [[(r.drafted, r.accepted) for r in done.rounds[i]] for i in group]
        assert real == synchronised(trace, group, 4, style)


class Alternate(DraftPolicy):
    """Wants one token, and `more` in all if its context is even: votes that disagree."""

    def __init__(self, more: int) -> None:
        self.more = more
        self._even = False

    def begin_round(self, load: Any) -> None:
        self._even = load.context % 2 == 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < (self.more if self._even else 1)


@pytest.mark.parametrize("chosen", [range(len(LENGTHS)), (0, 6)])
def test_stopping_at_the_mean_is_a_vote(
    pair: Pair, prompts: list[Any], chosen: Sequence[int]
) -> None:
    decoder, style = BatchedDecoder(*runners(pair, 9)), style_of(Alternate(5), "mean")
    streams = [Stream(i, prompts[i], NEW) for i in chosen]
    outcomes, ties = set(), 0
    for iteration in speculate_batch(decoder, style, streams):
        if any(NEW - r.position - 1 <= 5 for _, r in iteration):
            continue
        # Everybody has room and nothing is EOS: all draft alike, so all votes are one vote.
        even = [(int(s.prompt.shape[0]) + r.position) % 2 == 0 for s, r in iteration]
        expected = 5 if 2 * sum(even) >= len(even) else 1
        assert [r.drafted for _, r in iteration] == [expected] * len(iteration)
        outcomes.add(expected)
        ties += 2 * sum(even) == len(even)
    assert outcomes == {1, 5}
    assert ties or len(chosen) % 2
    alone = Runner(pair.target, SLOTS)
    none: frozenset[int] = frozenset()
    assert [s.output for s in streams] == [greedy(alone, prompts[i], NEW, none) for i in chosen]


def test_a_sequence_that_ends_holds_nobody_back() -> None:
    """The minimum is over those that go on; if all end, each keeps its own."""
    keep = TruncatedRounds(Fixed(4)).keep
    assert keep([Verdict(3, (), False), Verdict(1, (), True), Verdict(2, (), False)]) == [2, 1, 2]
    assert keep([Verdict(3, (), True), Verdict(1, (), True)]) == [3, 1]


def test_padding_leaves_every_live_slot_as_it_is(pair: Pair) -> None:
    runner = Runner(pair.target, 12, 3)
    ids = torch.arange(30).reshape(3, 10)
    runner.forward_batch(ids, torch.arange(10).expand(3, 10), 10)
    layer: Any = runner.cache.layers[0]
    before = layer.keys[:, :, :10].clone()
    places = torch.tensor([[-1, 10], [-1, -1], [9, 10]])
    logits = runner.forward_batch(torch.full((3, 2), 60), places, 11)
    after = layer.keys[:, :, :10]
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[2, :, :9], before[2, :, :9])
    assert not torch.equal(after[2, :, 9], before[2, :, 9])
    alone = Runner(pair.target, 12)
    wanted = alone.forward(torch.cat([ids[0], torch.tensor([60])]), 0, keep=1)
    torch.testing.assert_close(logits[0, -1:], wanted, rtol=1e-4, atol=1e-4)


STYLES: list[tuple[Any, Any, type[Speculation]]] = [
    (SVIP(gamma_max=GAMMA), "ragged", PerRequest),
    (GammaTune(gamma_max=GAMMA), "minimum", TruncateToMinimum),
    (SVIP(gamma_max=GAMMA), "mean", StopAtMean),
    (ConfidenceFreeze(stop_early=True), "ragged", Jointly),
    (AdaptiveVerification(budget=12), "ragged", Jointly),
]


@pytest.mark.parametrize(("policy", "style", "simulated"), STYLES)
def test_rounds_are_those_the_simulator_serves(
    pair: Pair, trace: Trace, prompts: list[Any], policy: Any, style: Any,
    simulated: type[Speculation],
) -> None:  # fmt: skip
    done = decode_batch(*runners(pair, 4), prompts, NEW, END, policy, synchronise=style)
    speculation, engine = simulated(policy), EngineState()
    served: list[list[Round]] = [[] for _ in prompts]
    for group in groups_of(len(prompts), 4):
        slots = []
        for i in group:
            request = trace.requests[i]
            job = Job(0.0, i, request.prompt_length, request.tokens)
            slots.append(Slot(i, job, 0.0, ServedSequence(trace, job, NEW, engine)))
        for slot in slots:
            speculation.join(slot)
        while slots := [slot for slot in slots if not slot.decoder.ended]:
            engine.batch = len(slots)
            for slot, outcome in zip(slots, speculation.step(slots), strict=True):
                served[slot.index].append(outcome)
    assert done.rounds == served


class Script(BatchPolicy):
    """Caps, stops and allotments drawn at random; keeps what it was shown."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self.calls = 0

    def plan(self, loads: Sequence[Any]) -> int:
        return int(self._rng.integers(0, GAMMA + 1))

    def plan_each(self, requests: Sequence[Any], loads: Sequence[Any]) -> Sequence[int]:
        assert len(set(requests)) == len(requests) == len(loads) == loads[0].batch
        return [int(n) for n in self._rng.integers(0, GAMMA + 1, len(loads))]

    def keep_drafting(self, drafts: Sequence[Sequence[Any]]) -> bool:
        return bool(self._rng.random() < 0.85)

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        return [int(self._rng.integers(0, len(d) + 1)) for d in drafts]

    def observe(self, outcomes: Sequence[Round]) -> None:
        self.calls += 1
        assert all(o.accepted <= o.drafted <= o.draft_forwards for o in outcomes)


@pytest.mark.parametrize("seed", range(8))
def test_random_lengths_never_corrupt_a_cache(
    pair: Pair, trace: Trace, prompts: list[Any], seed: int
) -> None:
    """Caps, early stops, partial verification, leaving and joining, in any order."""
    rng = np.random.default_rng(100 + seed)
    order = rng.permutation(len(prompts))
    own = runners(pair, int(rng.integers(2, 7)))
    done = decode_batch(
        *own, [prompts[i] for i in order], NEW, END, Script(seed), continuous=bool(seed % 2)
    )
    assert done.outputs == [output_of(trace, int(i)) for i in order]
    runs = run_lengths(trace)
    for i, rounds in zip(order, done.rounds, strict=True):
        position = 1
        for r in rounds:
            assert (r.position, r.accepted) == (position, min(r.drafted, runs[i][position]))
            position += r.emitted
        assert position == trace.requests[i].tokens


def test_caches_hold_what_a_fresh_pass_would_write(pair: Pair, prompts: list[Any]) -> None:
    """After ragged rounds every live slot equals a one-pass prefill of the same tokens."""
    decoder, style = BatchedDecoder(*runners(pair, 4)), style_of(Script(5))
    streams = [Stream(i, prompt, NEW) for i, prompt in enumerate(prompts[:6])]
    checked = 0
    for _ in speculate_batch(decoder, style, streams):
        for s in decoder.streams:
            true = torch.cat([s.prompt, torch.tensor(s.output)])
            for model, held in ((decoder.target, s.known - 1), (decoder.draft_model, s.in_draft)):
                fresh = Runner(model.model, SLOTS)
                fresh.forward(true[:held], 0, keep=1)
                for mine, theirs in zip(model.cache.layers, fresh.cache.layers, strict=True):
                    for name in ("keys", "values"):
                        got = getattr(mine, name)[s.row, :, :held]
                        wanted = getattr(theirs, name)[0, :, :held]
                        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
                checked += held
    assert checked > 1000


@pytest.mark.parametrize("policy", [ConfidenceFreeze(), AdaptiveVerification()])
def test_batch_policies_of_one_are_the_single_stream_ones(
    pair: Pair, trace: Trace, prompts: list[Any], policy: BatchPolicy
) -> None:
    from policies.batch import SingleStream

    done = decode_batch(*runners(pair, 1), prompts, NEW, END, policy)
    assert done.rounds == replayed(trace, SingleStream(policy.fresh()))


def test_forced_runs_follow_the_recording_with_any_weights(trace: Trace) -> None:
    other = Pair(llama(1, 20), llama(1, 21), None, {})
    for policy in (Fixed(4), SVIP(gamma_max=GAMMA)):
        target, draft = runners(other, 4)
        decoder, style = BatchedDecoder(target, draft, watch_eos=False), style_of(policy)
        streams = [ForcedStream(trace, i, VOCAB, target.device) for i in range(len(LENGTHS))]
        rounds: list[list[Round]] = [[] for _ in streams]
        for iteration in speculate_batch(decoder, style, streams):
            for stream, outcome in iteration:
                rounds[stream.request].append(outcome)
        assert rounds == replayed(trace, policy)


def test_forced_and_real_agree_where_sequences_wait(pair: Pair, trace: Trace) -> None:
    arms = [BatchArm("least", Fixed(4), "minimum"), BatchArm("svip", SVIP(gamma_max=GAMMA), "mean")]
    both = [
        run_batches(pair, trace, arms, batches=(4,), forced=forced, repeats=1)
        for forced in (False, True)
    ]
    for arm in arms:
        assert rounds_differ(*(run.logs[arm.name, 4] for run in both)) == 0


def test_run_batches_reports_every_group(pair: Pair, trace: Trace) -> None:
    arms = [BatchArm("fixed", Fixed(3)), BatchArm("freeze", ConfidenceFreeze())]
    beats: list[int] = []
    run = run_batches(pair, trace, arms, batches=(1, 4), repeats=2, advance=lambda: beats.append(1))
    groups = {1: 9, 4: 3}
    assert len(beats) == 2 * sum(groups.values())
    counts = run.times.groupby(["policy", "batch", "repeat"]).size()
    assert {(b, n) for (_, b, _), n in counts.items()} == set(groups.items())
    assert (run.times["wall_s"] > 0).all()
    for batch in groups:
        assert rounds_differ(run.logs["fixed", batch], replay(trace, Fixed(3))) == 0
        assert run.outputs["freeze", batch] == [output_of(trace, i) for i in range(9)]
    slowest = run.logs["fixed", 4].per_request(np.ones(len(run.logs["fixed", 4])))
    own = run.times.query("policy == 'fixed' and batch == 4 and repeat == 0").set_index("request")
    assert own["rounds"].to_dict() == {str(g[0]): slowest[list(g)].max() for g in groups_of(9, 4)}


def test_grid_cells_cover_batches_and_host(pair: Pair) -> None:
    grid = Grid(
        widths=(1,), contexts=(4, 8), prompts=(4,), batches=(1, 2, 3), batch_widths=(1, 3),
        repeats=2,
    )  # fmt: skip
    target, draft = Runner(pair.target, 16, 3), Runner(pair.draft, 16, 3)
    sweeps = Sweeps(batch_blocks(target, draft, grid), target.device, warmup=1)
    sweeps.run()
    sweeps.run()
    cells = sweeps.cells()
    passes = cells.groupby(["model", "phase"]).size().to_dict()
    # Two batches, two contexts: as many widths of each pass as decoding knows.
    assert passes == {
        ("target", "prefill"): 2, ("target", "forward"): 8, ("draft", "prefill"): 2,
        ("draft", "forward"): 8, ("draft", "catch_up"): 12, ("draft", "signal"): 2,
    }  # fmt: skip
    assert set(cells["batch"]) == {2, 3}
    hosts = measure_batch_host(target, draft, grid.batches, repeats=3, tokens=9)
    table = LatencyTable(hosts)
    assert set(hosts["phase"]) == {"host_round", "host_draft"}
    assert (table.estimate("target", "host_round", batch=[2, 3], new_tokens=1).seconds > 0).all()


def test_a_profile_holds_batches_beside_the_single_stream(pair: Pair, tmp_path: Path) -> None:
    grid = Grid(
        widths=(1, 2), contexts=(4, 48), prompts=(4,), batches=(1, 3), batch_widths=(1, 2),
        repeats=1, warmup=0,
    )  # fmt: skip
    with progress_bar() as progress:
        table = profile_latency(pair, Settings(grid=grid), tmp_path, progress)
    for phase in ("prefill", "forward", "host_round", "host_draft"):
        own = table.cells[(table.cells["phase"] == phase) & (table.cells["model"] == "target")]
        assert set(own["batch"]) == {1, 3}, phase
    between = table.estimate("target", "forward", batch=2, new_tokens=2, context=6)
    assert between.origin == INTERPOLATED


def test_what_cannot_be_decoded_says_so(pair: Pair, prompts: list[Any]) -> None:
    with pytest.raises(DraftsimError, match="the prompt is empty"):
        decode_batch(*runners(pair, 2), [prompts[0], prompts[0][:0]], NEW, END, Fixed(2))
    with pytest.raises(DraftsimError, match=f"exceed the context of {SLOTS}"):
        decode_batch(*runners(pair, 2), prompts, NEW + 1, END, Fixed(2))
    decoder = BatchedDecoder(*runners(pair, 2))
    with pytest.raises(DraftsimError, match="3 sequences do not fit a batch of 2"):
        enter(decoder, style_of(Fixed(1)), [Stream(i, p, NEW) for i, p in enumerate(prompts[:3])])
    with pytest.raises(DraftsimError, match="batch is 0, expected at least 1"):
        Runner(pair.target, SLOTS, 0)
    with pytest.raises(DraftsimError, match="synchronise is 'best'"):
        style_of(Fixed(1), "best")  # type: ignore[arg-type]
    with pytest.raises(DraftsimError, match="policies per request"):
        style_of(ConfidenceFreeze(), "mean")
    target = runners(pair, 2)[0]
    ids = torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(DraftsimError, match="3 sequences do not fit the cache of 2"):
        target.forward_batch(ids, ids, 1)
    with pytest.raises(DraftsimError, match=f"{SLOTS + 1} tokens do not fit"):
        target.forward_batch(ids[:2], ids[:2] + SLOTS, SLOTS + 1)


def test_sampled_traces_and_bad_batches_are_refused(pair: Pair, trace: Trace) -> None:
    sampled = Trace(
        trace.columns, trace.requests, GAMMA, {**trace.meta, "sampling": {"temperature": 0.7}}
    )
    with pytest.raises(DraftsimError, match=r"sampled at temperature 0\.7"):
        run_batches(pair, sampled, [BatchArm("fixed", Fixed(2))])
    with pytest.raises(DraftsimError, match="batch is 0"):
        run_batches(pair, trace, [BatchArm("fixed", Fixed(2))], batches=(2, 0))


@pytest.mark.parametrize("which", ["target", "draft"])
def test_nan_is_an_error_not_an_output(pair: Pair, prompts: list[Any], which: str) -> None:
    broken = llama(1, 30)
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    models = {"target": pair.target, "draft": pair.draft, which: broken}
    own = Runner(models["target"], SLOTS, 2), Runner(models["draft"], SLOTS, 2)
    with pytest.raises(DraftsimError, match=f"the {which} produced NaN"):
        decode_batch(*own, prompts, NEW, END, Fixed(2))


def test_nan_met_while_decoding(pair: Pair, prompts: list[Any]) -> None:
    decoder, style = BatchedDecoder(*runners(pair, 2)), style_of(Fixed(2))
    enter(decoder, style, [Stream(i, p, NEW) for i, p in enumerate(prompts[:2])])
    with torch.inference_mode():
        decoder.target.cache.layers[0].keys[1, :, 0] = float("nan")
    with pytest.raises(DraftsimError, match="the target produced NaN"):
        list(speculate_batch(decoder, style))
