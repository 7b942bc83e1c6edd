"""Real answers of llama.cpp's server: they are read, and replay predicts its drafts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from docs.llamacpp_tables import COUNTS, SERVED, answers, asked, lookups, same_text, settings
from policies import Fixed
from simulator.tune.formats import check_llamacpp
from tests.conftest import Run
from tests.logs import counts, written
from traces.errors import FileError
from traces.replay.run import replay
from traces.sources.lookups.text import NGramSimpleLookup
from traces.sources.replay import replay_source

RUNS = sorted(path.stem for path in SERVED.glob("*.jsonl"))
SURE = sorted(run for run, setting in settings().items() if not setting["spec-draft-p-min"])
"""Runs whose drafts end at no probability."""


@pytest.mark.parametrize("run", RUNS)
def test_answers_and_metrics_tell_the_same(run: str) -> None:
    said = counts("llamacpp", SERVED / f"{run}.jsonl")
    scraped = counts("prometheus", SERVED / f"{run}.txt")
    assert said.requests == len(answers(run))
    assert (said.drafted, said.accepted) == (scraped.drafted, scraped.accepted)
    assert scraped.per_position is not None
    # The last rounds of a request draft less; with a threshold many others do.
    assert scraped.fixed_length == (run in SURE)
    # Of rounds without a draft the answers' tokens tell, not the metrics.
    assert said.rounds is not None
    assert scraped.rounds is not None
    assert said.rounds >= scraped.rounds


@pytest.mark.parametrize("run", SURE)
def test_the_server_drafts_and_accepts_as_replayed(run: str) -> None:
    """Request by request; its draft goes on past an end of the text, which ends ours."""
    given, setting = answers(run), settings()[run]
    trace = asked(given)
    assert all(same_text(given, trace))
    rounds = replay(trace, check_llamacpp(setting), first=1).rounds
    for i, (answer, request) in enumerate(zip(given, trace.requests, strict=True)):
        own = rounds[rounds["request"] == i]
        drafted = np.minimum(
            setting["spec-draft-n-max"], request.max_new_tokens - 1 - own["position"]
        )
        assert (drafted >= own["drafted"]).all()
        # An accepted end inside the server's draft is counted as the target's own token.
        last = own[-1]
        inside = last["emitted"] == last["accepted"] and last["accepted"] < drafted[-1]
        assert (request.ended == "eos") or not inside
        said = tuple(answer["timings"][name] for name in COUNTS)
        assert said == (drafted.sum(), own["accepted"].sum() - inside), request.id
    assert counts("llamacpp", SERVED / f"{run}.jsonl").rounds == len(rounds)


def test_draft_lengths_can_be_said(run: Run) -> None:
    """`--draft-lengths fixed:3` bounds the curve; another length contradicts the counts."""
    bare = run("import", "llamacpp", SERVED / "n3.jsonl", "--json", "-")
    said = run("import", "llamacpp", SERVED / "n3.jsonl", "--draft-lengths", "fixed:3",
               "--json", "-")  # fmt: skip
    lows = [r.rows[0]["survival_lo"] for r in (bare, said)]
    assert lows[0] == 0 < lows[1]
    for run_name, length, message in (
        ("n3", "fixed:5", "are no drafts of 5 each"),
        ("p05", "fixed:3", "are no drafts of 3 each"),
        ("n3", "at-least:2", "drafts of one length alone"),
        ("n3", "fixed:²", "drafts of one length alone"),
    ):
        ran = run("import", "llamacpp", SERVED / f"{run_name}.jsonl", "--draft-lengths", length)
        assert message in ran.refusal


@pytest.mark.parametrize("run", SURE)
def test_its_metrics_are_those_of_the_replayed_rounds(run: str) -> None:
    given, setting = answers(run), settings()[run]
    rounds = replay(asked(given), check_llamacpp(setting), first=1).rounds
    scraped = counts("prometheus", SERVED / f"{run}.txt")
    assert scraped.rounds == (rounds["drafted"] > 0).sum()
    accepted = [(rounds["accepted"] > k).sum() for k in range(setting["spec-draft-n-max"])]
    ended = sum(a["stop_type"] == "eos" for a in given)
    assert scraped.per_position is not None
    assert 0 <= sum(accepted) - sum(scraped.per_position) <= ended
    assert np.abs(np.subtract(accepted, scraped.per_position)).sum() <= ended


@pytest.mark.parametrize("run", sorted(settings().keys() - SURE))
def test_under_a_threshold_it_drafts_and_accepts_as_replayed(run: str) -> None:
    """To the token, but where the text ends: there its last draft goes on."""
    given, policy = answers(run), check_llamacpp(settings()[run])
    trace = asked(given)
    if not trace.signals.issuperset(policy.reads):
        pytest.skip("smollm2-cpu lacks top10_prob: `draftsim profile signals` adds it")
    rounds = replay(trace, policy, first=1).rounds
    compared = 0
    for i, (answer, request) in enumerate(zip(given, trace.requests, strict=True)):
        own = rounds[rounds["request"] == i]
        said = np.array([answer["timings"].get(name, 0) for name in COUNTS])
        predicted = own["drafted"].sum(), own["accepted"].sum()
        if request.ended == "eos":
            beyond = policy.gamma - own["drafted"][-1]
            assert 0 <= said[0] - predicted[0] <= beyond, request.id
            assert 0 <= predicted[1] - said[1] <= 1, request.id
        else:
            assert said.tolist() == list(predicted), request.id
            compared += 1
    assert compared > 9


@pytest.mark.parametrize("run", sorted(lookups()))
def test_its_lookup_drafts_and_accepts_as_replayed(run: str) -> None:
    """Request by request; what it copies past an end of the text is not drafted here."""
    given, source = answers(run), lookups()[run]
    trace = asked(given)
    assert all(same_text(given, trace))
    rounds = replay_source(trace, source, Fixed(source.size_m), first=1).rounds
    behind = 0
    for i, (answer, request) in enumerate(zip(given, trace.requests, strict=True)):
        own = rounds[rounds["request"] == i]
        lookup = NGramSimpleLookup(source.size_n, source.size_m)
        lookup.extend(request.prompt_ids or ())
        drafted = at = 0
        for position in own["position"].tolist():
            lookup.extend(answer["tokens"][at:position])
            at = position
            drafted += min(len(lookup.propose()), request.max_new_tokens - 1 - position)
        said = tuple(answer["timings"].get(name, 0) for name in COUNTS)
        assert said == (drafted, own["accepted"].sum()), request.id
        behind += drafted - own["drafted"].sum()
    assert behind
    scraped = counts("prometheus", SERVED / f"{run}.txt")
    assert scraped.rounds == (rounds["drafted"] > 0).sum()
    accepted = [(rounds["accepted"] > k).sum() for k in range(source.size_m)]
    assert scraped.per_position is not None
    assert accepted == list(scraped.per_position)


def test_a_text_that_ends_in_its_first_draft_has_one_round(tmp_path: Path) -> None:
    timings = {"predicted_n": 3, "predicted_ms": 9.0, "draft_n": 8, "draft_n_accepted": 8}
    line = json.dumps({"timings": timings})
    assert counts("llamacpp", written(tmp_path, line)).rounds == 1
    timings["draft_n"] = 7
    with pytest.raises(FileError, match="draft_n_accepted=8 of draft_n=7"):
        counts("llamacpp", written(tmp_path, json.dumps({"timings": timings})))
