"""Acceptance held against a profile: planted causes are named, sound runs are as expected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simulator.aggregate.doctor import diagnose, rounds_by_context
from simulator.aggregate.positions import Positions, of_survival, of_trace
from tests.conftest import Run
from tests.logs import vllm_counters
from traces.acceptance.trace import Request, Trace

EXPECTED = (0.72, 0.66, 0.62, 0.58, 0.55)
"""Acceptance by position of a drafter."""
FAULTS = {
    "as expected": EXPECTED,
    "better": (0.82, 0.76, 0.72, 0.68, 0.65),
    "dummy drafter": (0.01, 0.01, 0.01, 0.01, 0.01),
    "wrong head or template": (0.36, *EXPECTED[1:]),
    "domain": tuple(0.75 * rate for rate in EXPECTED),
    "cap": (0.72, 0.66, 0.0, 0.0, 0.0),
    "late positions": (0.72, 0.55, 0.42, 0.30, 0.20),
}


def counted(rates: tuple[float, ...], rounds: int, seed: int) -> Positions:
    """Rounds drawn with these chances, counted as a server does."""
    random = np.random.default_rng(seed)
    reached, accepted = [], []
    for rate in rates:
        reached.append(float(rounds))
        rounds = int(random.binomial(rounds, rate))
        accepted.append(float(rounds))
    alive = np.array(accepted) / reached[0]
    known = dict(enumerate((1 + np.cumsum(alive)).tolist(), 1))
    return Positions("drawn", known, np.array(reached), np.array(accepted), True)


@pytest.mark.parametrize("cause", FAULTS)
@pytest.mark.parametrize("rounds", [1500, 200_000])
def test_a_planted_cause_is_named(cause: str, rounds: int) -> None:
    profile = of_survival("profile", np.cumprod(EXPECTED).tolist())
    found = [diagnose(counted(FAULTS[cause], rounds, seed), profile) for seed in range(10)]
    # Once in a while a draw of few rounds looks like its neighbour.
    assert sum(one.cause == cause for one in found) >= 9
    if cause == "cap":
        assert {one.at for one in found} == {3}
        assert "positions from 3 on" in found[0].advice


def test_sound_runs_that_differ_as_runs_do_are_as_expected() -> None:
    random = np.random.default_rng(0)
    rates = np.array(EXPECTED)
    wrong = 0
    for seed in range(60):
        odds = np.log(rates / (1 - rates)) + 0.04 * random.standard_normal(len(rates))
        mine = counted(tuple(1 / (1 + np.exp(-odds))), 100_000, seed)
        found = diagnose(mine, counted(EXPECTED, 20_000, 1000 + seed))
        wrong += found.cause not in ("as expected", "better")
        assert max(abs(place.z) for place in found.places) < 5
    assert wrong <= 2


def collapsing(above: int, rate: float, seed: int = 1) -> Trace:
    """A recording whose acceptance falls to `rate` at contexts of `above` tokens or more."""
    random = np.random.default_rng(seed)
    prompts, tokens = (200, 600, 1500, 4000), 400
    requests = [
        Request(f"r{i}", "text", prompts[i % 4], tokens, tokens, "length") for i in range(24)
    ]
    context = np.concatenate([r.prompt_length + np.arange(tokens) for r in requests])
    chance = np.where(context >= above, rate, 0.7)
    columns = {
        "request": np.repeat(np.arange(len(requests)), tokens),
        "position": np.tile(np.arange(tokens), len(requests)),
        "offset": np.zeros(len(chance), np.int16),
        "match": (random.random(len(chance)) < chance).astype(np.int8),
    }
    return Trace(columns, requests, None, {"sampling": {"temperature": 0.0}})


def test_a_collapse_at_long_contexts_is_one_of_context_length() -> None:
    sound = of_trace("sound", collapsing(10**9, 0.7), 4)
    ill = of_trace("ill", collapsing(2000, 0.1), 4)
    found = diagnose(ill, sound)
    assert found.cause == "context length"
    parts = found.contexts
    assert parts[-1].low >= 2000
    assert parts[-1].tokens_per_round < 1.3
    assert parts[0].tokens_per_round > 2
    assert diagnose(sound, sound).cause == "as expected"
    assert rounds_by_context(of_survival("rates", EXPECTED)) == []


def scrape(path: Path, rates: tuple[float, ...], rounds: int = 10_000) -> Path:
    """A server's counters."""
    return vllm_counters(path, rounds, [round(rounds * float(r)) for r in np.cumprod(rates)])


def test_counters_against_a_profile_on_the_command_line(tmp_path: Path, run: Run) -> None:
    profile = tmp_path / "speculation_profile.json"
    ran = run("export", "speculation-profile", "--trace", "bundled", "--draft-length", 5, "--out",
              profile).ok()  # fmt: skip
    held = json.loads(profile.read_text())["conditional_accept_rates"]
    ill = scrape(tmp_path / "metrics.txt", (held[0] / 2, *held[1:]))
    ran = run("doctor", ill, "--against", profile).ok()
    assert ran.err.splitlines()[0].startswith("wrong head or template: position 1 alone is worse")
    assert "tokens per round at K = 5" in ran.err
    sound = run("doctor", scrape(tmp_path / "sound.txt", tuple(held)), "--against", "bundled",
                "--json", "-")  # fmt: skip
    document = sound.document
    assert document["cause"] == "as expected"
    assert len(document["results"]) == 5
    assert all(abs(row["z"]) < 3 for row in document["results"])


@pytest.mark.parametrize(
    ("first", "rounds", "cause"),
    [(0.8, 4_000, "few drafts"), (0.4, 8_000, "wrong head or template")],
    ids=["drafts are as good as expected", "half as good"],
)
def test_steps_without_a_draft_excuse_only_what_they_explain(
    tmp_path: Path, run: Run, first: float, rounds: int, cause: str
) -> None:
    """In 10,000 steps position 1 is accepted 3,200 times, instead of 8,000."""
    metrics = scrape(tmp_path / "metrics.txt", (first, 0.7, 0.6), rounds)
    accepted = 3_200 + 2_240 + 1_344
    more = ("generation_tokens", 10_000 + accepted + 50), ("request_success", 50)
    with metrics.open("a") as file:
        file.writelines(f"vllm:{name}_total {count}.0\n" for name, count in more)
    said = run("doctor", metrics, "--against", "0.8,0.56,0.336").ok().err
    assert said.startswith(f"{cause}: position 1 alone is worse")
    assert f"{rounds / 100:.0f}% of the steps had a draft" in said


def test_only_a_length_is_compared_as_a_length(run: Run) -> None:
    ran = run("doctor", "3:1.4", "--against", "1:1.8,2:2.4,3:2.8").ok()
    assert ran.err.startswith("mixed: ")
    assert "1.40 tokens per round at K = 3, expected 2.80" in ran.err
    assert "only tokens per round are compared" in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1.4", "expected chances"),
        ("1:1.8,1:1.9", "names a draft length twice"),
        ("3:9.0", "expected 1 to 4"),
        ("nothing-of-this-name", "no such file and no bundled recording"),
    ],
)
def test_what_is_no_acceptance_is_one_line(text: str, said: str, run: Run) -> None:
    ran = run("doctor", text)
    assert said in ran.refusal
    assert "Traceback" not in ran.err
