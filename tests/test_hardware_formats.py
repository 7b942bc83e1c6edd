"""Quantised weights and small models in the cost model, against published runs not seen."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.hardware.formats import FORMATS, SHAPES, Unpacking, find_format
from simulator.hardware.record import (
    by_library,
    evidence_for,
    outside_launches,
    passes,
    plain_model,
    predictions,
    ratio_errors,
    reach,
    unpacking,
    width_errors,
)
from simulator.hardware.roofline import Roofline
from simulator.published import GAMMATUNE, STUDIES
from tests.conftest import Run
from traces.errors import DraftsimError
from traces.operators.devices import DEVICES

EIGHT = SHAPES["meta-llama/Llama-3.1-8B"]


@pytest.mark.parametrize(
    ("name", "model", "gigabytes", "embedding_bits"),
    [
        # File sizes of the Hugging Face hub, which hold the embedding as well.
        ("q4_k_m", "meta-llama/Llama-3.1-8B", 4.92, 4.5),
        ("q8_0", "meta-llama/Llama-3.1-8B", 8.54, 8.5),
        ("q6_k", "meta-llama/Llama-3.1-8B", 6.6, 6.5625),
        ("q5_k_m", "meta-llama/Llama-3.1-8B", 5.73, 5.5),
        ("awq-int4", "Qwen/Qwen2.5-7B", 5.57, 16),
        ("gptq-int8", "Qwen/Qwen2.5-7B", 8.90, 16),
    ],
)
def test_a_format_takes_the_bytes_of_its_files(
    name: str, model: str, gigabytes: float, embedding_bits: float
) -> None:
    shape = SHAPES[model]
    held = shape.kept_as(FORMATS[name]).held_bytes + shape.head * embedding_bits / 8
    assert held / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert shape.kept_as(FORMATS["bf16"]).held_bytes == shape.held_bytes == 2 * shape.weights


def test_formats_are_found_by_their_usual_names() -> None:
    for text, name in (("AWQ", "awq-int4"), ("Q4_K_M", "q4_k_m"), ("float16", "bf16")):
        assert find_format(text).name == name
    with pytest.raises(
        DraftsimError, match=r"'q4_k' is no weight format .*did you mean 'q4_0'|q4_k_m"
    ):
        find_format("q4_k")


def test_unpacking_is_charged_by_pass_token_and_tile() -> None:
    """On a device without memory or launches to pay for, in closed form."""
    how = Unpacking(weight_ops=3.0, token_ops=2.0, tokens=8, tile_ops=20.0)
    device = DEVICES["rtx-3090"]
    shape = EIGHT.kept_as(FORMATS["q4_0"], how)
    model, bare = Roofline(device, "graph", 0.0, 0.0), EIGHT.kept_as(FORMATS["q4_0"])
    for tokens, ops in ((1, 3.0), (4, 9.0), (8, 17.0), (9, 23.0), (16, 23.0)):
        more = float(model.seconds(shape, 1, tokens) - model.seconds(bare, 1, tokens))
        assert more == pytest.approx(ops * EIGHT.weights / device.vector_flops, rel=1e-9)
        # A batch's tokens are a pass's tokens.
        assert float(model.seconds(shape, tokens, 1) - model.seconds(bare, tokens, 1)) == (
            pytest.approx(more)
        )
    assert np.all(np.diff(how.operations(np.arange(1, 9))) == 2.0)


def test_no_run_enters_its_own_prediction() -> None:
    """A run ten times slower than it was changes what is seen of it, not what is predicted."""
    for row in predictions("graph"):
        if row.run.new_tokens > 1 or FORMATS[row.run.weights].quantised:
            continue
        seen = plain_model(row.study, row.run.device)
        own = [r for r in row.study.runs if r.model == row.run.model]
        blind = plain_model(row.study, row.run.device, tuple((row.study.name, r) for r in own))
        exact = float(seen.seconds(SHAPES[row.run.model], 1, 1, row.run.context))
        if len({r.device for r in row.study.runs}) == 1:
            predicted = float(blind.seconds(SHAPES[row.run.model], 1, 1, row.run.context))
            assert predicted == pytest.approx(row.seconds)
            assert predicted != pytest.approx(exact, rel=1e-6)


def test_evidence_names_what_is_known_and_where_it_is_from() -> None:
    assert len({study.name for study in STUDIES}) == len(STUDIES)
    for study in STUDIES:
        assert "github.com/" in study.source or "arXiv:" in study.source
        for run in study.runs:
            assert {run.device in DEVICES, run.model in SHAPES, run.weights in FORMATS} == {True}


def test_the_record_is_as_good_as_the_docs_say() -> None:
    """Bounds as stated in docs/gpu.md; the worst of each kind stays named there."""
    for mode, quantised, median, worst in (
        ("eager", False, 0.06, 0.25), ("graph", False, 0.12, 0.40),
        ("graph", True, 0.16, 0.55), ("eager", True, 0.40, 1.10),
    ):  # fmt: skip
        errors = np.abs([row.error for row in passes(mode, quantised)])  # type: ignore[arg-type]
        assert np.median(errors) < median, (mode, quantised)
        assert errors.max() < worst, (mode, quantised)


def test_bytes_alone_would_be_further_off_where_unpacking_shows() -> None:
    """llama.cpp's quantised kernels: another GPU's unpacking brings the times nearer."""
    rows = [r for r in passes("graph", True) if r.study.name == "llama.cpp, several GPUs"]
    assert rows
    for row in rows:
        model = plain_model(row.study, row.run.device)
        shape = SHAPES[row.run.model].kept_as(FORMATS[row.run.weights])
        by_bytes = float(model.seconds(shape, 1, 1, row.run.context)) / row.run.seconds - 1
        assert abs(row.error) < abs(by_bytes)


def test_wide_passes_cost_more_and_a_tile_less_than_eight_alone() -> None:
    """A 27B model's times on the RTX 3090 are predicted from an 8B's kernels."""
    how = unpacking(FORMATS["q4_k_m"], "graph")
    assert how.tokens == 8
    ops = how.operations(np.arange(1, 17))
    assert np.all(np.diff(ops[:8]) > 0)
    assert ops[8] < ops[7]
    assert np.all(ops[8:] == ops[8])


def test_reading_and_arithmetic_add_up() -> None:
    """Passes over 2 to 64 tokens of a study in view of which nothing was chosen or fitted."""
    rows = [r for r in predictions("graph") if r.study.name == "llama.cpp, tokens a pass of 1B"]
    assert [r.run.new_tokens for r in rows] == [2, 4, 8, 16, 32, 64]
    assert max(abs(r.error) for r in rows) < 0.12
    for row in rows:
        model = plain_model(row.study, row.run.device)
        shape = SHAPES[row.run.model]
        one = float(model.seconds(shape, 1, 1, row.run.context))
        arithmetic = 2 * shape.weights * row.run.new_tokens / model.device.flops
        # Were the shorter of the two hidden by the longer, every pass would be too fast.
        hidden = max(one, arithmetic / model.compute_share) / row.run.seconds - 1
        assert hidden < -0.09
        assert abs(row.error) < -hidden


def test_a_library_s_kernels_are_known_from_its_other_models_alone() -> None:
    """A known library gives smaller errors, without any sight of the model."""
    rows = by_library()
    assert {r.study.name for r in rows} == {s.name for s in STUDIES if s.libraries}
    blind = {(r.study.name, r.run): r for mode in ("eager", "graph") for r in predictions(mode)}
    for study in {r.study for r in rows}:
        mine = [abs(r.error) for r in rows if r.study is study]
        theirs = [abs(blind[study.name, r.run].error) for r in rows if r.study is study]
        assert np.median(mine) < 0.06
        assert np.median(mine) < 0.5 * np.median(theirs)
    seven = next(r for r in rows if r.run.weights == "gptq-int8" and "7B" in r.run.model)
    extra = unpacking(
        FORMATS["gptq-int8"], "eager",
        tuple((s.name, r) for s, r in evidence_for(FORMATS["gptq-int8"], "eager")
              if s is not seven.study or r.model == seven.run.model),
    )  # fmt: skip
    model = plain_model(seven.study, seven.run.device)
    shape = SHAPES[seven.run.model].kept_as(FORMATS["gptq-int8"], extra)
    assert seven.seconds == pytest.approx(float(model.seconds(shape, 1, 1, seven.run.context)))


def test_a_format_without_published_runs_costs_its_bytes() -> None:
    assert not evidence_for(FORMATS["nf4"], "graph")
    assert unpacking(FORMATS["nf4"], "graph") == Unpacking() == unpacking(FORMATS["bf16"], "eager")


def test_small_models_pay_for_what_is_launched_outside_of_layers() -> None:
    """As many launches as a layer or so, by studies that agree without having seen each other."""
    eager = [study.name for study in STUDIES if study.mode == "eager"]
    found = [outside_launches(without) for without in ("", *eager)]
    assert all(0.2 < value < 3 for value in found)
    shape = SHAPES["double7/vicuna-68m"]
    bare, floor = (
        float(Roofline(DEVICES["h100"], "eager", 0.0, 4.5e-4, outside=o).seconds(shape))
        for o in (0.0, found[0])
    )
    assert floor / bare == pytest.approx(1 + found[0] / 2)


def test_reach_is_what_as_many_further_errors_stay_within() -> None:
    """Conformal: four of five new errors lie within the reach of the others, on average."""
    random = np.random.default_rng(5)
    inside = []
    for _ in range(400):
        seen = np.expm1(random.normal(0, 0.2, 24)).tolist()
        factor = reach(seen, 0.8)
        inside.append(abs(random.normal(0, 0.2)) <= np.log(factor))
    error = np.sqrt(0.8 * 0.2 / len(inside))
    assert abs(np.mean(inside) - 0.8) < 4 * error
    assert reach([0.1, -0.5], 0.9) == pytest.approx(2.0)


def test_ratios_of_a_draft_and_a_target_are_nearer_than_times_in_graphs() -> None:
    times = [row.error for row in passes("graph", False)]
    assert reach(ratio_errors("graph", False), 0.8) < reach(times, 0.8)
    assert max(map(abs, width_errors(quantised=False))) < 0.15


def test_formats_and_runs_are_listed(run: Run) -> None:
    listed = run("list", "--weight-formats", "--json", "-")
    assert {row["name"] for row in listed.rows} == set(FORMATS)
    assert all(row["bits"] <= 16 and row["source"] for row in listed.rows)
    tables = {row["table"] for row in run("list", "--published", "--json", "-").rows}
    assert {f"{study.name}, ms" for study in STUDIES if study is not GAMMATUNE} <= tables
    assert "GammaTune 1, ms" in tables
    measured = run("papers", "--measured", "--table", "Qwen2.5, vLLM", "--json", "-")
    # All of them once, and the quantised ones from vLLM's own kernels as well.
    by_roofline = [row for row in measured.rows if not row["given"].startswith("operators")]
    assert len(by_roofline) == 24 + 18
