"""The proposer in a pretended vLLM: rounds are the replay's, whatever the batch does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from commands.engine.check import runnable
from policies import DraftPolicy, Load, parse_policy, policy_names
from policies.batch.base import BatchPolicy, Policy, SingleStream
from policies.lengths.rate_optimal import RateOptimal
from policies.registry import parse_serving_policy
from profiler.engines import drafts
from profiler.engines.drafts import Asked, Forced, LookedUp
from profiler.engines.session import FORCED, Setup, policy_from, setup_from
from profiler.engines.vllm.proposer import Proposer
from simulator.serving.run import lookahead_of
from tests.own_policy import StopWhenUnsure, Told
from tests.pretend_vllm import PretendRunner, config
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.lookups.sources import PLD, LookupSource
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source

LONGEST, VOCABULARY = 8, 97
TRACE = synthetic_trace(
    0.7, requests=7, tokens=40, concentration=5.0, eos_fraction=0.4, prompt_length=9, seed=3
)
TEXTS = {i: [(7 * i + 3 * k) % 31 for k in range(r.tokens)] for i, r in enumerate(TRACE.requests)}
PROMPTS = {i: [i] * 9 for i in TEXTS}


def drafted(policy: Policy, batch: int = 3, chunks: int = 1) -> tuple[Proposer, PretendRunner]:
    proposer = Proposer(config(LONGEST))
    proposer.use(Setup(policy, Forced(TRACE, TEXTS, VOCABULARY)))
    runner = PretendRunner(proposer, TEXTS, PROMPTS, batch, chunks)
    outputs = runner.run()
    assert {int(n.partition("/")[0]): t for n, t in outputs.items()} == TEXTS
    return proposer, runner


def rounds(log: RoundLog, request: int) -> list[tuple[int, ...]]:
    own = log.rounds[log.rounds["request"] == request]
    names = ("position", "drafted", "accepted", "emitted", "draft_forwards", "catch_up")
    return [tuple(int(r[n]) for n in names) for r in own]


def one_stream() -> list[DraftPolicy]:
    named = [parse_policy(n, max_gamma=LONGEST) for n in policy_names()]
    kept = [p for p in named if not isinstance(p, SingleStream)]
    return [*kept, StopWhenUnsure()]


@pytest.mark.invariant(1)
@pytest.mark.parametrize("policy", one_stream(), ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(("batch", "chunks"), [(1, 1), (3, 2)])
def test_rounds_are_the_replays(policy: DraftPolicy, batch: int, chunks: int) -> None:
    if policy.learns_across_requests and batch > 1:
        pytest.skip("learns per place in the batch: a replay has one place")
    proposer, _ = drafted(policy, batch, chunks)
    log = replay(TRACE, policy)
    assert {name: stream.rounds for name, stream in proposer.finished.items()} == {
        f"{i}/0": rounds(log, i) for i in TEXTS
    }


@pytest.mark.parametrize("gamma", [2, 5])
def test_a_text_ends_where_its_request_does(gamma: int) -> None:
    """The last iteration samples a token more than a recording that ends early asks for."""
    proposer, runner = drafted(parse_policy(f"fixed:gamma={gamma}"))
    assert runner.sampled_too_many
    assert {int(n.partition("/")[0]): s.output for n, s in proposer.finished.items()} == TEXTS


class Watching(BatchPolicy):
    """Remembers the loads it was shown."""

    seen: ClassVar[list[list[Load]]] = []

    def plan(self, loads: Sequence[Load]) -> int:
        self.seen.append(list(loads))
        return len(loads)


def test_batch_policies_see_the_requests_that_decode_next() -> None:
    Watching.seen.clear()
    _, runner = drafted(Watching())
    decoding = [sum(n in drafts for n in drafts) for drafts in runner.iterations]
    assert {load.batch for loads in Watching.seen for load in loads} == {1, 2, 3}
    assert all(load.batch == len(loads) for loads in Watching.seen for load in loads)
    assert max(decoding) == 3
    # A draft is as long as the batch was large, cut at the request's end alone.
    sizes = {n for drafts in runner.iterations for n in drafts.values()}
    assert sizes <= {0, 1, 2, 3}
    assert 3 in sizes


def test_whoever_was_in_the_iteration_that_drafts_is_counted() -> None:
    Watching.seen.clear()
    drafted(Watching(), chunks=3)
    beside = [load.scheduled - load.batch for loads in Watching.seen for load in loads]
    assert min(beside) == 0  # all go on
    assert max(beside) > 0  # prompts that are not finished, and requests that have just ended


@pytest.mark.parametrize("name", ["batch-table", "turbospec", "sglang-adaptive", "goodput"])
def test_built_in_batch_policies_run(name: str) -> None:
    policy = parse_serving_policy(name, max_gamma=LONGEST)
    proposer, _ = drafted(policy)
    assert sorted(proposer.finished) == sorted(f"{i}/0" for i in TEXTS)


def test_drafts_never_exceed_what_the_engine_reserves() -> None:
    proposer = Proposer(config(2))
    proposer.use(Setup(parse_policy("fixed:gamma=8"), Forced(TRACE, TEXTS, VOCABULARY)))
    runner = PretendRunner(proposer, TEXTS, PROMPTS)
    runner.run()
    assert max(n for drafts in runner.iterations for n in drafts.values()) == 2


@pytest.mark.parametrize("source", ["pld", "lookahead"])
def test_lookups_draft_what_their_replay_drafts(source: str) -> None:
    trace = _with_prompts(TRACE)
    policy = parse_policy("fixed:gamma=5")
    chosen = parse_source(source)
    log = replay_source(trace, chosen, policy)  # type: ignore[arg-type]
    proposer = Proposer(config(LONGEST))
    eos = frozenset(trace.meta["eos_token_ids"])
    proposer.use(Setup(policy, LookedUp(chosen, eos)))  # type: ignore[arg-type]
    PretendRunner(proposer, _texts(trace), PROMPTS).run()
    ours = {name: [r[:4] for r in s.rounds] for name, s in proposer.finished.items()}
    assert ours == {f"{i}/0": [r[:4] for r in rounds(log, i)] for i in TEXTS}
    assert sum(r[2] for own in ours.values() for r in own) > 0


@pytest.mark.parametrize(
    ("source", "kept"),
    [("pld", []), ("suffix:cached=false", []), ("suffix", [2, 3, 4]), ("rest", [2, 3, 4])],
)
def test_earlier_requests_are_kept_where_they_are_searched_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, source: str, kept: list[int]
) -> None:
    """A server drafts for weeks."""
    monkeypatch.setattr(drafts, "SERVED", 3)
    chosen = parse_source(source)
    assert isinstance(chosen, LookupSource)
    opened: list[Any] = []

    def lookup(eos: frozenset[int], corpus: Any) -> Any:
        opened.append(corpus)
        return type(chosen).lookup(chosen, eos, corpus)

    monkeypatch.setattr(chosen, "lookup", lookup)
    looked_up = LookedUp(chosen)
    for i in range(5):
        asked = Asked(f"{i}/0", [i, i], 4)
        looked_up.open(asked, [7])
        looked_up.close(asked, [7, 8])
    assert [served.prompt[0] for served in opened[-1]()] == kept


def _texts(trace: Trace) -> dict[int, list[int]]:
    tokens, starts = trace.columns["token"][trace.on_path], trace.request_starts
    return {i: tokens[starts[i] : starts[i + 1]].tolist() for i in range(len(trace.requests))}


def _with_prompts(trace: Trace) -> Trace:
    """The recording with repetitive texts, prompt ids, and outputs that end at their limit."""
    requests = [
        r.__class__(r.id, r.category, 9, r.tokens, r.tokens, "length", tuple(PROMPTS[i]))
        for i, r in enumerate(trace.requests)
    ]
    columns = dict(trace.columns)
    token = columns["token"].copy()
    token[trace.on_path] = [t for text in TEXTS.values() for t in text]
    columns["token"] = token
    return Trace(columns, requests, trace.max_gamma, {**trace.meta, "eos_token_ids": []})


def test_policies_are_told_the_vocabulary_that_signals_are_over() -> None:
    Told.sizes.clear()
    drafted(Told(2))  # a recording's signals are over its own vocabulary
    proposer = Proposer(config(LONGEST, vocabulary=512))
    proposer.use(Setup(Told(2), LookedUp(PLD())))
    assert Told.sizes == [TRACE.vocab_size, 512]
    assert TRACE.vocab_size != VOCABULARY


def test_the_setup_comes_from_the_environment(tmp_path: Any) -> None:
    text = json.dumps({"policy": "gammatune:eta=0.2", "source": "pld:max_ngram=3"})
    file = tmp_path / "proposer.json"
    file.write_text(text)
    for given in (text, str(file)):
        setup = setup_from(given, longest=4)
        assert setup.policy.eta == 0.2  # type: ignore[union-attr]
        assert isinstance(setup.source, LookedUp)
        assert isinstance(setup.source.source, PLD)
        assert setup.source.source.max_ngram == 3


def test_a_policy_of_ones_own_is_named_by_its_class() -> None:
    own = policy_from("tests.own_policy.StopWhenUnsure:threshold=0.25")
    assert isinstance(own, DraftPolicy)
    assert own.threshold == 0.25  # type: ignore[attr-defined]


OWN_FILE = Path(__file__).with_name("own_policy.py")


def test_a_policy_of_ones_own_is_named_by_its_file() -> None:
    """As on the command line, wherever the engine's process was started."""
    given = json.dumps({"policy": f"{OWN_FILE}:StopWhenUnsure:threshold=0.25,gamma=3",
                        "source": "pld"})  # fmt: skip
    with pytest.raises(DraftsimError, match="reads prob"):  # which a lookup does not have
        setup_from(given, longest=4)
    own = policy_from(f"{OWN_FILE}:StopWhenUnsure:threshold=0.25,gamma=3", LONGEST)
    assert isinstance(own, DraftPolicy)
    proposer, _ = drafted(own)
    log = replay(TRACE, StopWhenUnsure(0.25, 3))
    assert [tuple(r) for r in proposer.finished["2/0"].rounds] == rounds(log, 2)
    with pytest.raises(ValueError, match="no such file"):
        policy_from("none.py:StopWhenUnsure")


@pytest.mark.parametrize("place", ["tests.own_policy.", f"{OWN_FILE}:"])
def test_a_policy_without_a_bound_is_cut_and_said_before_the_run(
    place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Else the replay's drafts are longer than the engine's, which cuts what it is handed."""
    text = f"{place}Unbounded"
    own = runnable([text, f"{place}StopWhenUnsure"], TRACE, LONGEST)[text]
    said = capsys.readouterr().err
    assert f"{text} sets no longest draft: it is cut at length 8, the engine's longest" in said
    assert "StopWhenUnsure sets" not in said
    assert lookahead_of(own, TRACE) == LONGEST
    proposer, _ = drafted(own)
    log = replay(TRACE, own)
    assert int(log.rounds["drafted"].max()) == LONGEST
    for request in TEXTS:
        found = proposer.finished.get(f"{request}/0")
        assert [tuple(r) for r in (found.rounds if found else ())] == rounds(log, request)
    # Nor does a server of one's own take it without a word.
    forced = FORCED + str(Forced(TRACE, TEXTS, VOCABULARY).write(tmp_path))
    setup = setup_from(json.dumps({"policy": text, "source": forced}), longest=6)
    assert lookahead_of(setup.policy, TRACE) == 6
    assert "cut at length 6, the engine's longest" in capsys.readouterr().err
    # What is read back of a recording has no longer drafts than that.
    short = synthetic_trace(0.7, requests=3, tokens=20, concentration=5.0, max_gamma=5, seed=3)
    assert lookahead_of(runnable([text], short, LONGEST)[text], short) == 5
    assert "cut at length 5, the recording's longest" in capsys.readouterr().err


def test_the_rate_optimal_rule_is_fitted_before_it_runs() -> None:
    latency = LatencyTable.constant(0.01, 0.001, 0.012)
    fitted = runnable(["rate-optimal"], TRACE, LONGEST, latency)["rate-optimal"]
    assert isinstance(fitted, RateOptimal)
    proposer, _ = drafted(fitted)
    log = replay(TRACE, fitted)
    assert int(log.rounds["drafted"].max()) > 1
    for request in TEXTS:
        assert [tuple(r) for r in proposer.finished[f"{request}/0"].rounds] == rounds(log, request)
    short = runnable(["rate-optimal:gamma_max=2"], TRACE, LONGEST, latency)
    assert lookahead_of(short["rate-optimal:gamma_max=2"], TRACE) == 2
    assert short["rate-optimal:gamma_max=2"].cost is not None
    with pytest.raises(DraftsimError, match=r"rate-optimal is fitted .* drop --http"):
        runnable(["rate-optimal"], TRACE, LONGEST)
    with pytest.raises(DraftsimError, match="only gamma_max can be set"):
        runnable(["rate-optimal:acceptance=0.9"], TRACE, LONGEST, latency)
    own = runnable(["rate-optimal:rate=200"], TRACE, LONGEST, latency)["rate-optimal:rate=200"]
    assert own.rate == 200
    assert own.cost is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "is not set"),
        ("/nowhere.json", "no such file"),
        ('{"policy": "fixed"}', "missing 'source'"),
        ('{"policy": "fixd", "source": "pld"}', "unknown policy 'fixd'"),
        ('{"policy": "no.such.Policy", "source": "pld"}', "cannot be imported"),
        ('{"policy": "json.JSONDecoder", "source": "pld"}', "no DraftPolicy"),
        ('{"policy": "fixed", "source": "kangaroo"}', "needs a recording"),
        ('{"policy": "svip", "source": "pld"}', "reads entropy"),
        ("{", "Expecting property name"),
    ],
)
def test_a_setup_that_cannot_be_is_refused(given: str, said: str) -> None:
    with pytest.raises(DraftsimError, match=said):
        setup_from(given, longest=4)


def test_forced_drafts_need_a_recorded_name() -> None:
    with pytest.raises(DraftsimError, match="names no recorded sequence"):
        Forced(TRACE, TEXTS, VOCABULARY).open(Asked("chat-1", [1], 9), [1])


def test_another_callers_arrays_are_refused() -> None:
    runner = PretendRunner(Proposer(config(2)), TEXTS, PROMPTS)
    runner.input_batch = SimpleNamespace(req_ids=[], token_ids_cpu=None)
    proposer = runner.proposer
    with pytest.raises(DraftsimError, match=r"install vllm==0\.32\.0"):
        proposer.propose([], None, object())
