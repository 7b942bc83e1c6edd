"""SpecBound on our pair: its figures from a searched optimum, Tables 1, 3 and 5."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest

from simulator.papers.ours import EXPERIMENT, Ours, Row
from simulator.papers.quantities import SPECBOUND
from simulator.papers.specbound import (
    FIGURE_3,
    FIGURE_4,
    FULL,
    START,
    Setting,
    SettingReplays,
    choices_recorded,
    early_exit_rows,
    order_rows,
    search,
    system_rows,
)
from simulator.published import SPECBOUND_1
from tests.test_cli_sources import tokens_alone
from tests.test_sources_early_exit import recording
from traces.acceptance.trace import Request, Trace
from traces.errors import TailError
from traces.latency.table import LatencyTable
from traces.replay.corrections import split_requests
from traces.sources.early_exit import EarlyExit
from traces.sources.exit_recording import OMEGAS

LAYERS, EXITS, LENGTH, STEP_S, PREFILL_S = 8, (2, 4, 6), 40, 0.008, 0.02
LATENCY = LatencyTable.constant(STEP_S, 0.001, layer=STEP_S / LAYERS, head=0.0, prefill=PREFILL_S)


class Made:
    """Exits of every position of made-up outputs, and the speedup of SpecBound by hand."""

    def __init__(self, rates: tuple[float, ...] = (0.6, 0.75, 0.9), requests: int = 8) -> None:
        rng = np.random.default_rng(3)
        count = requests * LENGTH
        self.true = rng.integers(10, 60, count)
        right = rng.random((count, len(EXITS))) < rates
        self.argmax = np.where(right, self.true[:, None], 9)
        # Sure where it is right, more often than not.
        self.confidence = np.clip(0.25 + 0.5 * right + rng.normal(0, 0.2, right.shape), 0.02, 0.98)
        columns = {
            "request": np.repeat(np.arange(requests), LENGTH),
            "position": np.tile(np.arange(LENGTH), requests),
            "offset": np.zeros(count, int), "match": np.zeros(count, int), "token": self.true,
        }  # fmt: skip
        rows = [
            Request(str(i), f"category {i % 2}", 6, LENGTH, LENGTH, "length", (1,) * 6)
            for i in range(requests)
        ]
        self.trace = Trace(columns, rows, 1, {"eos_token_ids": []})
        outputs = [self.true[i * LENGTH : (i + 1) * LENGTH].tolist() for i in range(requests)]
        exits = recording(outputs, list(self.argmax), list(self.confidence), LAYERS, EXITS)
        self.ours = Ours(self.trace, LATENCY, (), {"early-exit": exits})

    def by_hand(self, setting: Setting, requests: list[int]) -> tuple[float, float]:
        """Tokens a round and speedup, a round's layers counted from eqs. 1 to 3.

        After a wrong exit the true text's exits stand in, as nothing was recorded there.
        """
        usable = [i for i, layer in enumerate(EXITS) if layer <= round(setting.depth * LAYERS)]
        deepest = max(1, round(setting.depth * LAYERS))
        tokens = rounds = layers = 0
        for request in requests:
            at = 1
            while at < LENGTH:
                room = min(int(setting.width), LENGTH - at - 1)
                depths: list[int] = []
                exits: list[int | None] = []
                while len(exits) < room:
                    node = request * LENGTH + min(at + len(exits), LENGTH - 1)
                    sure = [i for i in usable if self.confidence[node, i] >= setting.tau]
                    depths.append(EXITS[sure[0]] if sure else deepest)
                    if not sure:
                        break
                    exits.append(sure[0])
                right = 0
                for k, chosen in enumerate(exits):
                    node = request * LENGTH + at + k
                    if chosen is None or self.argmax[node, chosen] != self.true[node]:
                        break
                    right += 1
                difficult = len(depths) > len(exits)
                everything = right == len(exits) and not difficult and exits
                emitted = right if everything else right + 1
                layers += sum(depths) + LAYERS - (depths[-1] if depths else 0)
                tokens, rounds, at = tokens + emitted, rounds + 1, at + emitted
        return tokens / rounds, tokens * LAYERS / layers


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


@pytest.fixture(scope="module")
def rows(made: Made) -> list[Row]:
    return early_exit_rows(made.ours)


def settings_of(best: Setting, ours: Ours) -> dict[str, Setting]:
    return {
        f"{name}={value:g}": best._replace(**{name: value})
        for name, values in choices_recorded(ours).items()
        for value in values
    }


def test_no_parameter_of_the_optimum_can_be_changed_alone(made: Made) -> None:
    fit, _ = split_requests(made.trace, 0.5)
    best = search(SettingReplays(made.ours, fit))
    _, top = made.by_hand(best, fit)
    assert top > made.by_hand(START, fit)[1]
    assert best.tau > 0
    for other in settings_of(best, made.ours).values():
        assert made.by_hand(other, fit)[1] <= top + 1e-9


def test_figure_3_is_around_the_optimum_on_the_other_half(made: Made, rows: list[Row]) -> None:
    fit, shown = split_requests(made.trace, 0.5)
    assert not set(fit) & set(shown)
    best = search(SettingReplays(made.ours, fit))
    figure = {(r.row, r.column): r for r in rows if r.table == FIGURE_3}
    for label, setting in settings_of(best, made.ours).items():
        rate, speed = made.by_hand(setting, shown)
        assert figure[label, "CR"].ours == pytest.approx(rate), label
        assert figure[label, "SD"].ours == pytest.approx(speed), label
    optima = [label for (label, column), r in figure.items() if "optimum" in r.note]
    assert set(optima) == {f"{n}={getattr(best, n):g}" for n in best._fields}
    # One temperature was recorded: all strengths of annealing are one.
    marked = [label for (label, _), r in figure.items() if "identical to" in r.mark]
    assert {f"omega={o:g}" for o in OMEGAS[1:]} <= set(marked)


def test_figure_4_says_what_each_part_is_worth(made: Made, rows: list[Row]) -> None:
    fit, shown = split_requests(made.trace, 0.5)
    best = search(SettingReplays(made.ours, fit))
    figure = {r.row: r for r in rows if r.table == FIGURE_4 and r.column == "SD"}
    full = made.by_hand(best, shown)[1]
    assert figure[FULL].ours == pytest.approx(full)
    assert best.text in figure[FULL].note
    without = {
        "without the width bound": best._replace(width=24), "without annealing":
        best._replace(omega=0), "without the depth bound": best._replace(depth=1),
    }  # fmt: skip
    for label, setting in without.items():
        row, speed = figure[label], made.by_hand(setting, shown)[1]
        assert row.ours == pytest.approx(speed)
        if row.mark:
            assert speed == pytest.approx(full)
        else:
            assert f"{100 * (full / speed - 1):+.1f}% with it" in row.note
    assert figure["without annealing"].mark


def test_a_stand_in_is_for_what_no_recording_followed(made: Made) -> None:
    replays = SettingReplays(made.ours, [0, 1])
    wide = START._replace(tau=0.05, width=8)
    with pytest.raises(TailError):
        replays._replay(wide, EarlyExit)
    assert replays.run(wide).log.fidelity == "approximate"
    assert replays.run(START._replace(width=1)).log.fidelity == "exact"


def test_table_3_is_prefill_and_rounds(made: Made, rows: list[Row]) -> None:
    fit, shown = split_requests(made.trace, 0.5)
    speed = made.by_hand(search(SettingReplays(made.ours, fit)), shown)[1]
    table = {(r.row, r.column): r.ours for r in rows if r.table == "SpecBound Table 3"}
    decode = (LENGTH - 1) * STEP_S
    want = {
        "AR_base": (PREFILL_S, STEP_S, decode),
        "SpecBound": (PREFILL_S, STEP_S / speed, decode / speed),
    }
    for column, (first, token, rest) in want.items():
        assert table["TTFT (ms)", column] == pytest.approx(1e3 * first)
        assert table["Per-token latency (ms)", column] == pytest.approx(1e3 * token)
        assert table["End-to-End Latency (s)", column] == pytest.approx(first + rest)
        assert table["Throughput (tokens/s)", column] == pytest.approx(LENGTH / (first + rest))
    gained = table["End-to-End Latency (s)", "improvement (our pair)"]
    assert gained == pytest.approx((PREFILL_S + decode) / (PREFILL_S + decode / speed))


def test_table_5_counts_every_shown_prompt(made: Made, rows: list[Row]) -> None:
    shares = [r.ours or 0 for r in rows if r.table == "SpecBound Table 5"]
    assert sum(shares) == pytest.approx(100)


def lookup_rounds(trace: Trace, request: int, longest: int = 10, ngram: int = 2) -> list[int]:
    """Tokens emitted a round by prompt lookup, by brute force (P A3)."""
    start = request * trace.requests[0].tokens
    output = trace.columns["token"][start : start + trace.requests[request].tokens].tolist()
    prompt = list(trace.requests[request].prompt_ids or ())
    emitted, at = [], 1
    while at < len(output):
        text, draft = prompt + output[:at], []
        for n in range(min(ngram, len(text) - 1), 0, -1):
            places = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
            if places:
                draft = text[places[0] + n : places[0] + n + longest]
                break
        draft = draft[: len(output) - at - 1]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == output[at + accepted]:
            accepted += 1
        emitted.append(accepted + 1)
        at += accepted + 1
    return emitted


def test_table_1_has_every_system_that_the_recording_allows() -> None:
    made = Made(rates=(1, 1, 1))  # nothing after wrong exits needs a recording
    found: dict[tuple[str, str], Row] = {(r.row, r.column): r for r in system_rows(made.ours)}
    trace = made.trace
    rounds = [n for i in range(len(trace.requests)) for n in lookup_rounds(trace, i)]
    rate = found["our pair, pld", "CR"]
    assert rate.ours == pytest.approx(np.mean(rounds))
    # Nobody timed the lookup, and nobody recorded Medusa's heads: both are said, neither guessed.
    assert found["our pair, pld", "SD"].ours is None
    assert "'pld'" in found["our pair, pld", "SD"].note
    assert found["our pair, Medusa", "SD"].ours is None
    assert "medusa" in found["our pair, Medusa", "SD"].note
    by_hand = made.by_hand(START, list(range(len(trace.requests))))
    for column, value in zip(("CR", "SD"), by_hand, strict=True):
        assert found["our pair, SpecBound", column].ours == pytest.approx(value)
    grouped = defaultdict(list)
    for i, request in enumerate(trace.requests):
        grouped[request.category].append(i)
    for category, mine in grouped.items():
        row = found[f"our pair, SpecBound, {category}", "CR"]
        assert row.ours == pytest.approx(made.by_hand(START, mine)[0])


def test_another_order_is_told_by_tokens_and_by_what_rounds_cost() -> None:
    told = {
        "SpecBound": (1.1, 0.9), "Medusa": (1.2, 0.5), "Kangaroo": (1.3, 1.0), "REST": (1.1, None),
    }  # fmt: skip
    found = [
        Row(SPECBOUND, f"our pair, {method}", column, None, value, EXPERIMENT)
        for method, values in told.items()
        for column, value in zip(("CR", "SD"), values, strict=True)
    ]
    rows = {row.row: row for row in order_rows(found)}
    assert {name: (row.published, row.ours) for name, row in rows.items()} == {
        "order, SpecBound": (1, 2), "order, Medusa": (2, 3), "order, Kangaroo": (3, 1),
    }  # fmt: skip
    for method, (rate, speed) in told.items():
        if speed is None:
            continue
        line = SPECBOUND_1["Vicuna-7B", method]
        printed = float(np.mean(line.compression))
        note = rows[f"order, {method}"].note
        whole, tokens, cost = (float(x) for x in re.findall(r"(\d\.\d\d) (?:of|by)", note))
        assert whole == pytest.approx(speed / line.overall, abs=0.006)
        assert tokens == pytest.approx(rate / printed, abs=0.006)
        assert tokens * cost == pytest.approx(whole, abs=0.01)
    assert rows["order, SpecBound"].note.endswith("by tokens")
    assert rows["order, Kangaroo"].note.endswith("by tokens")
    assert rows["order, Medusa"].note.endswith("by what a round costs")


def test_text_that_repeats_is_found_by_lookups() -> None:
    trace = tokens_alone()
    rounds = [n for i in range(len(trace.requests)) for n in lookup_rounds(trace, i)]
    found = {(r.row, r.column): r.ours for r in system_rows(Ours(trace, LATENCY))}
    assert found["our pair, pld", "CR"] == pytest.approx(np.mean(rounds))
    assert np.mean(rounds) > 3
