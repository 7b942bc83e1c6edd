"""The cost model: its limits in closed form, what it recovers, and its published error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.hardware.record import (
    by_library,
    check_published,
    evidence_for,
    outside_launches,
    passes,
    plain_model,
    predicted_runs,
    ratio_errors,
    reach,
    unpacking,
    width_errors,
)
from simulator.hardware.roofline import (
    FORMATS,
    SHAPES,
    ModelShape,
    Observation,
    Roofline,
    Unpacking,
    find_format,
    observations,
)
from simulator.hardware.scaling import carry_over, table_shapes
from simulator.published import GAMMATUNE, GAMMATUNE_MS, SOURCES, SPECBOUND_4, STUDIES
from tests.conftest import Run
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable, as_cells
from traces.operators.devices import DEVICES, find_device
from traces.operators.shapes import find_architecture
from traces.store.recordings import find_latency

EIGHT = SHAPES["meta-llama/Llama-3.1-8B"]
SEVEN = SHAPES["lmsys/vicuna-7b-v1.5"]


def test_sizes_are_those_the_models_are_named_for() -> None:
    """Matrices and projection, without the input embedding, in billions."""
    for name, billions in (
        ("meta-llama/Llama-3.1-8B", 8.03 - 0.525), ("lmsys/vicuna-7b-v1.5", 6.74 - 0.131),
        ("lmsys/vicuna-13b-v1.5", 13.02 - 0.164), ("meta-llama/Llama-3.2-1B-Instruct", 1.236),
        ("double7/vicuna-68m", 0.068 - 0.0246), ("double7/vicuna-160m", 0.162 - 0.0246),
        ("Qwen/Qwen2.5-0.5B", 0.494), ("Qwen/Qwen2.5-7B", 7.616 - 0.545),
        ("Qwen/Qwen2.5-32B", 32.76 - 0.779), ("Qwen/Qwen3-0.6B", 0.596),
        ("Qwen/Qwen3-8B", 8.19 - 0.622), ("Qwen/Qwen3-32B", 32.76 - 0.778),
    ):  # fmt: skip
        assert SHAPES[name].weights / 1e9 == pytest.approx(billions, rel=0.01), name
    # One token of the cache: 2 x layers x kv heads x head width x 2 bytes.
    assert EIGHT.kv_values * EIGHT.kv_bytes == 2 * 32 * 8 * 128 * 2


def test_one_token_is_bound_by_memory_and_many_by_arithmetic() -> None:
    for device in DEVICES.values():
        model = Roofline(device, "graph", 0.0, 0.0, 1.0, 1.0)
        reading, each = 2 * SEVEN.weights / device.bandwidth, 2 * SEVEN.weights / device.flops
        assert float(model.seconds(SEVEN)) == pytest.approx(reading + each, rel=1e-4)
        many = 4096
        assert many * each <= float(model.seconds(SEVEN, new_tokens=many)) < 1.3 * many * each
        # The knee: as many tokens as the device does operations per byte, both as long.
        knee = float(model.seconds(SEVEN, new_tokens=device.flops / device.bandwidth))
        assert knee == pytest.approx(2 * reading, rel=0.05)


@given(
    batch=st.integers(1, 64), tokens=st.integers(1, 32), context=st.integers(0, 20_000),
    mode=st.sampled_from(["eager", "graph"]), grow=st.sampled_from(["batch", "tokens", "context"]),
)  # fmt: skip
def test_more_work_never_takes_less_time(
    batch: int, tokens: int, context: int, mode: str, grow: str
) -> None:
    model = Roofline(DEVICES["h100"], "graph" if mode == "graph" else "eager")
    sizes = {"batch": batch, "tokens": tokens, "context": context}
    more = {**sizes, grow: sizes[grow] * 2 + 1}
    small, large = (
        float(model.seconds(EIGHT, s["batch"], s["tokens"], s["context"])) for s in (sizes, more)
    )
    assert small <= large
    faster = model.on(DEVICES["h200"])
    assert float(faster.seconds(EIGHT, batch, tokens, context)) <= small


def observed(model: Roofline, noise: float = 0.0) -> list[Observation]:
    rng = np.random.default_rng(0)
    points = [
        (shape, b, n, c)
        for shape in (EIGHT, SHAPES["double7/vicuna-160m"])
        for b in (1, 16, 64) for n in (1, 5, 25, 64) for c in (128, 4096)
    ]  # fmt: skip
    return [
        Observation(s, b, n, c, float(model.seconds(s, b, n, c)) * np.exp(noise * rng.normal()))
        for s, b, n, c in points
    ]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_fit_recovers_the_model_that_made_the_times(mode: str) -> None:
    how = "graph" if mode == "graph" else "eager"
    layer_s = 4e-4 if how == "eager" else 4e-6
    truth = Roofline(DEVICES["h200"], how, 6e-5, layer_s, 0.62, 0.48)
    exact = Roofline(DEVICES["h200"], how).fitted(observed(truth))
    for name in ("fixed_s", "layer_s", "memory_share", "compute_share"):
        assert getattr(exact, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    noisy = observed(truth, noise=0.02)
    again = Roofline(DEVICES["h200"], how).fitted(noisy)
    # Four parameters over 48 points: the fit lies no further off than the noise.
    assert np.sqrt(np.mean(again.errors(noisy) ** 2)) < 1.2 * 0.02


def test_launches_decide_in_eager_mode_and_bytes_under_graphs() -> None:
    """Why the cost ratio follows layers in one mode and parameters in the other."""
    target, draft = EIGHT, SHAPES["meta-llama/Llama-3.2-1B-Instruct"]
    eager = Roofline(DEVICES["h200"], "eager", 0.0, 4.5e-4)
    graph = Roofline(DEVICES["h200"], "graph", 0.0, 0.0)
    c_eager, c_graph = (float(m.seconds(draft)) / float(m.seconds(target)) for m in (eager, graph))
    assert c_eager == pytest.approx(draft.layers / target.layers)
    assert c_graph == pytest.approx(draft.weights / target.weights, rel=1e-3)


def table_from(model: Roofline) -> LatencyTable:
    rows = [
        (role, "forward", b, n, c, float(model.seconds(shape, b, n, c)) * wrinkle, 1e-6, 5)
        for role, shape in (("target", EIGHT), ("draft", SHAPES["double7/vicuna-160m"]))
        for b in (1, 16) for n in (1, 5, 25) for c, wrinkle in ((128, 1.0), (4096, 1.01))
    ]  # fmt: skip
    rows += [("target", p, 1, 1, 0, s, 0.0, 5) for p, s in (("host_round", 3e-4), ("head", 2e-4))]
    frame = as_cells(rows)
    meta = {"device": "NVIDIA H200", "mode": "graph", "kind": "measured"}
    return LatencyTable(frame, meta)


def test_a_carried_table_is_the_other_devices_and_says_so() -> None:
    truth = Roofline(DEVICES["h200"], "graph", 5e-5, 5e-6, 0.7, 0.5)
    shapes = {"target": "llama-3.1-8b", "draft": "double7/vicuna-160m"}
    known = {role: find_architecture(name).meta() for role, name in shapes.items()}
    bare = table_from(truth)
    home = LatencyTable(bare.cells, {**bare.meta, "shapes": known})
    for name in ("h100", "a100-80gb", "rtx-3090"):
        away = carry_over(home, DEVICES[name])
        expected = table_from(truth.on(DEVICES[name])).cells
        passes = away.cells["phase"] == "forward"
        np.testing.assert_allclose(
            away.cells["median_s"][passes], expected["median_s"][passes], rtol=0.03
        )
        host = away.cells[away.cells["phase"] == "host_round"]["median_s"]
        assert host.tolist() == [3e-4]
        assert away.meta["scaled"]["from"] == "h200"
        assert away.meta["scaled"]["fit_error"] < 0.02
        assert "scaled" not in home.meta
    same = carry_over(home, DEVICES["h200"])
    np.testing.assert_allclose(same.cells["median_s"], home.cells["median_s"])


def test_sequences_that_decode_with_prompts_are_carried_as_other_passes_are() -> None:
    home = find_latency("rtx-4090/llama-3.1-8b")
    away = carry_over(home, DEVICES["l4"])
    ratio = home.cells.assign(ratio=away.cells["median_s"] / home.cells["median_s"])
    alone, along = (
        ratio[ratio["phase"] == phase].set_index(["batch", "new_tokens", "context"])["ratio"]
        for phase in ("forward", "with_prompts")
    )
    assert along.min() > 1
    np.testing.assert_allclose(along, alone[along.index])
    with pytest.raises(DraftsimError, match="2 GPUs share a model of these latencies"):
        carry_over(find_latency("a100/llama-3.1-8b@tp2"), DEVICES["rtx-3090"])


def test_shapes_are_read_from_provenance() -> None:
    meta = {"layers": 32, "hidden_size": 4096, "vocab_size": 128256, "parameters": 8.03e9,
            "kv_values": 65536, "name": "llama"}  # fmt: skip
    shape = ModelShape.from_meta(meta)
    assert shape.weights == pytest.approx(EIGHT.weights, rel=0.01)
    assert shape.kv_values == EIGHT.kv_values
    tied = ModelShape.from_meta(
        {
            "layers": 16,
            "hidden_size": 2048,
            "vocab_size": 128256,
            "parameters": 1.236e9,
            "tied": True,
        }
    )
    assert tied.weights == pytest.approx(1.236e9)
    table = LatencyTable(table_from(Roofline(DEVICES["h200"])).cells, {"dtype": "float32",
                         "shapes": {"target": meta}})  # fmt: skip
    assert table_shapes(table)["target"].weight_bytes == 4
    assert {o.shape.name for o in observations(table, table_shapes(table))} == {"llama"}
    with pytest.raises(DraftsimError, match="does not say the vocab_size, parameters"):
        ModelShape.from_meta({"layers": 1, "hidden_size": 2})
    with pytest.raises(DraftsimError, match="does not say its models' shapes"):
        carry_over(table_from(Roofline(DEVICES["h200"])), DEVICES["h100"])


def test_published_numbers_are_those_of_the_papers() -> None:
    folder = Path(__file__).parents[2] / "shared" / "tables"
    if not folder.is_dir():
        pytest.skip("the papers' tables are not here")
    gammatune = pd.read_csv(folder / "gammatune_table1.csv", comment="#").set_index("model")
    assert dict(gammatune["ms_per_token"]) == dict(GAMMATUNE_MS)
    bound = pd.read_csv(folder / "specbound_table4.csv", comment="#").set_index("device")
    for task in SPECBOUND_4.columns:
        for device in ("H800", "RTX 3090"):
            assert bound.loc[device, task] == SPECBOUND_4.value(device, task)


def test_published_latencies_are_met_within_a_quarter() -> None:
    """The bound that the docs state; launches outside of layers are of other studies."""
    rows = check_published()
    plain = rows[rows["kind"] == "left out"].set_index("row")["error"]
    assert (plain.abs() < 0.25).all()
    assert rows[rows["table"] == "SpecBound 3, ms"]["error"].abs().item() < 0.25
    assert (rows[rows["table"].str.startswith("SpecBound 4")]["error"].abs() < 0.1).all()
    # int4 by dequantisation is another regime: named, not fitted.
    assert rows[rows["kind"] == "left out, quantised"]["error"].item() < -0.9
    scaled = check_published(Roofline(DEVICES["h200"], "eager", 1e-4, 4.5e-4))
    assert set(scaled["kind"]) == {"scaled", "scaled, quantised"}


def test_devices_are_found_by_the_names_torch_gives_them() -> None:
    for name, key in (
        ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("a100", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA H800", "h800"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("5090", "rtx-5090"),
        ("NVIDIA B200", "b200"), ("NVIDIA H20", "h20"), ("AMD Instinct MI300X OAM", "mi300x"),
    ):  # fmt: skip
        assert find_device(name).name == key
    for other in (
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "A10G", "L40",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    ):  # fmt: skip
        with pytest.raises(DraftsimError, match="has no data-sheet entry"):
            find_device(other)
    with pytest.raises(DraftsimError, match=r"'h2o' has no data-sheet entry \(did you mean 'h20"):
        find_device("h2o")
    with pytest.raises(DraftsimError, match="h100-pcie"):
        find_device("h100-pcie")


def test_impossible_parameters_are_refused_with_the_value() -> None:
    with pytest.raises(DraftsimError, match=r"memory_share is 1\.5, expected"):
        Roofline(DEVICES["h100"], memory_share=1.5)
    with pytest.raises(DraftsimError, match="1 observation"):
        Roofline(DEVICES["h100"]).fitted([Observation(EIGHT, 1, 1, 0, 0.01)])
    with pytest.raises(DraftsimError, match="'speed' is no parameter"):
        Roofline(DEVICES["h100"]).fitted([], ["speed"])


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
    checked = 0
    for row in predicted_runs("graph"):
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
            checked += 1
    assert checked


def test_evidence_names_what_is_known_and_where_it_is_from() -> None:
    assert len({study.name for study in STUDIES}) == len(STUDIES)
    for study in STUDIES:
        source = SOURCES[study.name]
        assert "github.com/" in source or "arXiv:" in source
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
    rows = [r for r in predicted_runs("graph") if r.study.name == "llama.cpp, tokens a pass of 1B"]
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
    blind = {(r.study.name, r.run): r for mode in ("eager", "graph") for r in predicted_runs(mode)}
    for study in (s for s in STUDIES if s.libraries):
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
    listed = run("list", "weight-formats", "--json", "-")
    assert {row["name"] for row in listed.rows} == set(FORMATS)
    assert all(row["bits"] <= 16 and row["source"] for row in listed.rows)
    tables = {row["table"] for row in run("list", "published", "--json", "-").rows}
    assert {f"{study.name}, ms" for study in STUDIES if study is not GAMMATUNE} <= tables
    assert "GammaTune 1, ms" in tables
    measured = run("papers", "measured", "--table", "Qwen2.5, vLLM", "--json", "-")
    # All of them once, and the quantised ones from vLLM's own kernels as well.
    by_roofline = [row for row in measured.rows if not row["given"].startswith("operators")]
    assert len(by_roofline) == 24 + 18
