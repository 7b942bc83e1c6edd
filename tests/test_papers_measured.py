"""Public GPU measurements, predicted from a part of each; and the family of acceptance curves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from simulator.aggregate.acceptance import TwoState
from simulator.aggregate.hazard import check_totals, emitted_at
from simulator.formulas.leviathan import acceptance_rate, expected_tokens
from simulator.hardware.roofline import SHAPES
from simulator.papers import measured
from simulator.papers.measured import measured_rows
from simulator.papers.measured.engines import ONE, SERVER, TWO, cycle_at, ladder_rows
from simulator.papers.measured.logs import (
    EAGLE,
    EAGLE_STUDY,
    SPECBENCH_STUDY,
    log_rows,
    read_eagle,
)
from simulator.papers.measured.rows import (
    LARGE,
    NOTES,
    Evidence,
    by_study,
    evidence,
    ranked,
    record,
)
from simulator.published import CLASSES, GAMMATUNE_MS, RTX3090, SOURCES
from tests.conftest import Run
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.errors import DraftsimError
from traces.operators.devices import DEVICES
from traces.replay.run import replay

STUDIES = ("ladder_rows", "engine_rows", "roofline_rows", "operator_rows")
TABLE = Path(__file__).parents[2] / "shared" / "tables" / "rtx3090-qwen3.8-27b-nmax.csv"


@pytest.fixture(scope="module", autouse=True)
def _predicted_once() -> Iterator[None]:
    """Public measurements are predicted once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in STUDIES:
            patch.setattr(measured, name, cache(getattr(measured, name)))
        yield


@pytest.mark.parametrize(("alpha", "gamma"), [(0.3, 1), (0.7, 4), (0.9, 8)])
def test_an_even_member_is_the_textbook(alpha: float, gamma: int) -> None:
    assert TwoState(alpha).emitted(gamma) == pytest.approx(expected_tokens(alpha, gamma))
    assert acceptance_rate(expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_members_are_what_a_bursty_recording_replays(gamma: int) -> None:
    """Rounds of a long synthetic recording, within four standard errors of the closed form."""
    source = Bursty(0.9, 0.4, 20.0, 10.0)
    trace = synthetic_trace(source, requests=40, tokens=1000, max_gamma=8, seed=5)
    accepted = replay(trace, Fixed(gamma)).rounds["accepted"] + 1.0
    share = 20 / 30
    mean = 0.9 * share + 0.4 * (1 - share)
    variance = share * (1 - share) * 0.5**2
    member = TwoState(mean, variance / (mean * (1 - mean)), share, memory=1 - 1 / 20 - 1 / 10)
    assert member.chances() == pytest.approx([0.9, 0.4])
    # Neighbouring rounds are alike: blocks of them are not.
    blocks = np.array([block.mean() for block in np.array_split(accepted, 100)])
    error = blocks.std(ddof=1) / np.sqrt(len(blocks))
    assert abs(accepted.mean() - member.emitted(gamma)) < 4 * error


def test_one_total_leaves_an_interval_that_narrows_with_a_second() -> None:
    made = TwoState(0.7, uneven=0.15, memory=0.9)
    for given in (1, 2, 4, 8):
        for asked in (1, 2, 4, 8, 12):
            found = emitted_at({given: made.emitted(given)}, asked)
            assert found.low <= found.value <= found.high
            assert found.holds(made.emitted(asked)) or abs(asked - given) > 4
    two = {2: made.emitted(2), 6: made.emitted(6)}
    for asked in (4, 8):
        assert emitted_at(two, asked).value == pytest.approx(made.emitted(asked), rel=0.03)
        narrow, wide = emitted_at(two, asked), emitted_at({2: two[2]}, asked)
        assert narrow.high - narrow.low < wide.high - wide.low


def test_intervals_cover_the_public_ladder() -> None:
    """Tokens a round of every length from every other one: at least the 80% that are claimed."""
    held = total = 0
    for ladder in RTX3090.values():
        for given in ladder:
            for asked in ladder:
                found = emitted_at({given: ladder[given].emitted}, asked)
                held += given != asked and found.holds(ladder[asked].emitted)
                total += given != asked
    assert held >= 0.75 * total


@pytest.mark.parametrize("totals", [{2: 3.5}, {2: 0.9}, {0: 1.0}])
def test_impossible_totals_are_refused(totals: dict[int, float]) -> None:
    with pytest.raises(DraftsimError, match="tokens a round at draft length"):
        check_totals(totals)


def test_cycles_lie_on_a_line_from_a_plain_step() -> None:
    assert cycle_at({2: 1.5}, 4) == pytest.approx(2.0)
    assert cycle_at({2: 1.5, 4: 2.0}, 1) == pytest.approx(1.25)


def test_orders_and_sides_are_judged_where_they_can_be_told() -> None:
    rows = [
        evidence("s", "g", "a", 1.5, 1.4, plain=1.0), evidence("s", "g", "b", 1.2, 1.6, plain=1.0),
        evidence("s", "g", "c", 0.9, 1.01, plain=1.0),
    ]  # fmt: skip
    assert [row.sign_right for row in rows] == [True, True, None]
    assert [row.rank_right for row in ranked(rows)] == [False, False, True]
    said = record(ranked(rows))
    assert (said.rows, said.sign_right, said.signs, said.rank_right, said.ranks) == (3, 2, 2, 1, 3)
    assert said.worst == pytest.approx(-0.25)
    assert ranked([Evidence("s", "g", "a", 1.0, 1.0, 0.0)])[0].rank_right is None


@pytest.mark.skipif(not TABLE.is_file(), reason="the published table is not next to the project")
def test_the_ladder_is_the_published_one() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    head = lines[0].split(",")
    for line in lines[1:]:
        row = dict(zip(head, line.split(","), strict=True))
        if row["drafter"] == "none":
            continue
        name = {"mtp": "MTP head", "dflash": "DFlash drafter"}[row["drafter"]]
        run = RTX3090[name][int(row["n_max"])]
        assert run.tokens_per_s == float(row["tok_s"])
        assert run.emitted == float(row["mean_len"])
        assert run.cycle == float(row["k_mean"])
        assert run.gains == tuple(float(row[c]) for c in CLASSES)


def test_the_table_of_evidence(run: Run) -> None:
    ran = run("papers", "measured", "--json", "-").ok()
    document = ran.document
    assert {"study", "given", "quantity", "predicted", "measured", "error"} <= set(
        document["results"][0]
    )
    for row in document["results"]:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    records = {(r["study"], r["given"]): r for r in document["records"]}
    for drafter, lengths in (("MTP head", 8), ("DFlash drafter", 4)):
        study = f"RTX 3090 llama.cpp 27B 4-bit, {drafter}"
        for kind, of in ((TWO, lengths * (lengths - 1) // 2 * (lengths - 2)),
                         (ONE, lengths * (lengths - 1))):  # fmt: skip
            for name in (kind, *(f"{kind}, {c}" for c in CLASSES)):
                assert records[study, name]["rows"] == of
                assert records[study, name]["median"] < 0.12
    assert "thc1006" in ran.err
    assert "--logs" in ran.err
    assert run("papers", "measured", "--table", "TPU").code == 2


def test_every_large_error_is_explained_or_said_not_to_be(run: Run) -> None:
    records = by_study(measured_rows())
    for names, said in records.items():
        if abs(said.worst) > LARGE:
            assert any(note.on(*names) for note in NOTES), names
    for note in NOTES:
        # The server's requests are read where their folder is named.
        assert any(note.on(*names) for names in records) or SERVER.startswith(note.study), note
    for study in {study for study, _ in records} | {SERVER, EAGLE_STUDY, SPECBENCH_STUDY}:
        assert any(name in study for name in SOURCES), study
    ran = run("papers", "measured", "--table", "vLLM EAGLE, Llama")
    assert ran.out.count("2 of 2  2 of 2  2 of 2") == 1
    ran = run("papers", "measured", "--table", "GammaTune")
    assert "GammaTune Table 1 (quantised): Not explained by any kernel." in ran.out
    assert "SGLang" not in ran.out


def test_what_the_70b_model_would_have_to_copy() -> None:
    """The note's figures: 8 bits but for head and embedding, the draft model included."""
    large, draft = (SHAPES[f"meta-llama/Llama-3.1-{size}"] for size in ("70B", "8B"))
    held = (large.weights - large.head) + 4 * large.head + 2 * (draft.weights + draft.head)
    beyond = held - DEVICES["h100"].memory
    assert held / 1e9 == pytest.approx(89, abs=0.5)
    assert beyond / 1e9 == pytest.approx(8.7, abs=0.05)
    seconds = GAMMATUNE_MS["meta-llama/Llama-3.1-70B"] / 1e3
    assert beyond / seconds / 1e9 == pytest.approx(9.4, abs=0.05)


def test_a_cycle_is_read_from_the_same_kernel_where_one_is_known() -> None:
    """More than 8 tokens, a draft of 8 and one, are another kernel's in llama.cpp."""
    rows = {(row.given, row.quantity): row.error for row in ladder_rows("MTP")}
    quantity = "tokens/s at length 7"
    beside = rows[f"{TWO}: 6 and 8", quantity]
    assert abs(beside) < 0.05
    # What the line through both kernels' cycles would have said.
    cycles = {n: RTX3090["MTP head"][n].cycle for n in (6, 8)}
    blurred = (1 + beside) * cycle_at({6: cycles[6]}, 7) / cycle_at(cycles, 7) - 1
    assert blurred > 0.15


def test_half_a_log_predicts_the_other(shared_data: Path) -> None:
    records = by_study(log_rows(shared_data))
    for (study, given), said in records.items():
        if study.startswith(("EAGLE", "Spec-Bench")):
            assert said.median < (0.08 if "category" in given else 0.05), (study, given)
            assert said.sign_right == said.signs
    assert sum(said.signs for said in records.values()) > 20


def test_a_folder_without_logs_is_refused_before_anything_is_predicted(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in STUDIES:
        monkeypatch.setattr(measured, name, lambda *_: pytest.fail("predicted before the refusal"))
    ran = run("papers", "measured", "--logs", tmp_path)
    assert "holds neither eagle_logs" in ran.refusal


def test_a_damaged_line_of_a_log_is_refused(tmp_path: Path) -> None:
    turns = {"idxs": [3], "new_tokens": [9], "wall_time": [0.5]}
    for name in EAGLE:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"question_id": 1, "choices": [turns]}) + "\n")
    found = read_eagle(tmp_path)
    assert found is not None
    spec, plain = found
    assert spec[["rounds", "tokens"]].to_numpy().tolist() == [[4.0, 9.0]]
    assert plain[["rounds", "tokens"]].to_numpy().tolist() == [[4.0, 4.0]]
    for damaged in ({"question_id": 2}, {"question_id": 2, "choices": [{**turns, "idxs": [1, 2]}]}):
        lines = [json.dumps({"question_id": 1, "choices": [turns]}), json.dumps(damaged)]
        (tmp_path / EAGLE[0]).write_text("\n".join(lines))
        with pytest.raises(DraftsimError, match=r"line 2"):
            read_eagle(tmp_path)
