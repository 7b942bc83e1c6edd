"""``draftsim sweep --gpu``: tables carried over to other devices, and where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import draftsim
from commands import app
from simulator.hardware.record import published_error
from simulator.hardware.roofline import FORMATS, Roofline
from simulator.hardware.scaling import (
    bounds_of,
    carry_over,
    interval_words,
    reach_of,
    reaches,
)
from simulator.whatif.breakeven import overview
from simulator.whatif.cells import Prices
from tests.carried import SHAPES, TRUTH, cells, measured, write_carried
from tests.studies import read_sweep
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.operators.devices import DEVICES
from traces.store.files import write_latency


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_carried(tmp_path_factory.mktemp("gpu"))


def run(files: Path, *arguments: str, expect: int = 0) -> Any:
    common = ("--trace", str(files / "trace.parquet"), "--jobs", "1", "--resamples", "0")
    result = CliRunner().invoke(app.app, ["sweep", *common, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expect, result.output
    return result


def test_a_figure_of_one_gpu_names_no_other(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: dict[str, str] = {}

    def saved(_: Any, path: Path, label: str, title: str) -> Path:
        titles[path.stem] = title
        return path

    monkeypatch.setattr("simulator.plots.look.save_all_kinds", saved)
    run(
        files, "--latency", str(files / "latency.parquet"), "--gpu", "h100,rtx3090,h200",
        "--policy", "fixed:gamma={2,4}", "--batch", "1,4", "--plots", str(tmp_path),
    )  # fmt: skip
    for number, gpu in enumerate(("h100", "rtx-3090"), 1):
        assert titles[f"map_batch_gamma_{number}"].endswith(f", scaled to {gpu}")
    assert "scaled to" not in titles["map_batch_gamma_3"]  # measured there
    assert titles["speedup_batch"].endswith(", scaled to h100 and rtx-3090")  # a panel each


def test_gpus_are_an_axis_of_the_grid(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    table = str(files / "latency.parquet")
    result = run(
        files, "--latency", table, "--gpu", "h100,rtx3090, h200", "--policy", "fixed:gamma={2,4}",
        "--batch", "1,4", "--context", "100,1000", "--out", str(out), "--json", "-",
    )  # fmt: skip
    frame = read_sweep(out)
    assert len(frame) == 3 * 2 * 2 * 2
    scaled = dict(frame.groupby("gpu", observed=True)["scaled"].all())
    assert scaled == {"h100": True, "rtx-3090": True, "h200": False}
    assert (frame.loc[~frame["scaled"], "scale_error"] == 0).all()
    # What a reader must expect is the published check's error, not what the fit leaves.
    assert set(frame.loc[frame["scaled"], "scale_error"]) == {published_error(TRUTH).median}
    assert (frame.loc[frame["scaled"], "fit_error"] < 1e-3).all()
    assert (frame.loc[~frame["scaled"], "fit_error"] == 0).all()
    notes = frame.attrs["sweep"]["gpus"]
    assert [n["scaled"] and n["scaled"]["to"] for n in notes] == ["h100", "rtx-3090", None]
    rows = json.loads(result.stdout)["results"]
    assert {(r["gpu"], r["policy"]) for r in rows} == {
        (gpu, f"fixed:gamma={g}") for gpu in scaled for g in (2, 4)
    }
    assert "measured on h200, scaled to h100 and rtx-3090: approximate" in result.stderr
    # The first line, which is also the figures' title, names the GPUs priced.
    assert "scaled to h100 and rtx-3090: fastest" in result.stderr.splitlines()[0]
    known = published_error(TRUTH)
    assert (
        f"a median error of {known.median:.0%} (worst {known.worst:.0%}) for "
        f"{known.figures} published figures of a100-80gb, h20, rtx-3090, rtx-4090"
    ) in result.stderr
    assert {r["scale_error"] for r in rows if r["scaled"]} == {known.median}
    # Also the speedup were the model as wrong as before; for measured rows, nothing.
    carried = frame[frame["scaled"]]
    assert (carried["carried_lo"] < carried["speedup"]).all()
    assert (carried["carried_hi"] > carried["speedup"]).all()
    assert frame.loc[~frame["scaled"], ["carried_lo", "carried_hi"]].isna().all(axis=None)
    assert all((r["carried_lo"] is None) != r["scaled"] for r in rows)
    assert result.stderr.count("draftsim calibrate") == 1
    # Every row is what the carried table gives by itself.
    alone = tmp_path / "alone.parquet"
    carried = tmp_path / "h100.parquet"
    write_latency(carry_over(measured(), DEVICES["h100"]), carried)
    run(files, "--latency", str(carried), "--policy", "fixed:gamma={2,4}", "--batch", "1,4",
        "--context", "100,1000", "--out", str(alone))  # fmt: skip
    same = frame[frame["gpu"] == "h100"].reset_index(drop=True)
    np.testing.assert_allclose(read_sweep(alone)["speedup"], same["speedup"])


def test_weights_of_a_format_are_carried_to_on_the_device_measured_too(
    files: Path, tmp_path: Path
) -> None:
    """Change the target alone: it gets faster, the draft does not, so the speedup falls.

    A draft of 160M gets slower in 4 bits, as Qwen2.5-0.5B does in vLLM: 262 tokens/s, not 312.
    """
    table = ("--latency", str(files / "latency.parquet"), "--policy", "fixed:gamma=4")
    found = {}
    for name, more in (
        ("measured", ()), ("both", ("--weights", "awq-int4")),
        ("target", ("--weights", "target=awq-int4")),
        ("away", ("--weights", "fp8", "--gpu", "h100")),
    ):  # fmt: skip
        out = tmp_path / f"{name}.parquet"
        result = run(files, *table, *more, "--out", str(out), "--json", "-")
        found[name] = read_sweep(out)
        assert found[name]["scaled"].all() == (name != "measured")
        if name == "target":
            assert "measured on h200, target in awq-int4: approximate" in result.stderr
            first = " ".join(result.stderr.split())
            assert ", target in awq-int4: fastest" in first
            assert "scaled to" not in first
    assert set(found["away"]["gpu"]) == {"h100"}
    wall = {name: float(frame["wall_s"].iloc[0]) for name, frame in found.items()}
    assert wall["target"] < min(wall["both"], wall["measured"])
    pays = {name: float(frame["speedup"].iloc[0]) for name, frame in found.items()}
    assert pays["target"] < pays["measured"]
    with pytest.raises(DraftsimError, match="--weights belongs to `draftsim sweep grid`"):
        run(files, *table, "--weights", "fp8", "--ladder")


def test_ratios_belong_to_no_device(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    run(files, "--latency", str(files / "latency.parquet"), "--gpu", "a100", "--c", "0.1,0.2",
        "--policy", "fixed", "--out", str(out))  # fmt: skip
    frame = read_sweep(out)
    assert frame["gpu"].tolist() == ["any", "any", "a100-80gb"]
    assert set(overview(frame)["gpu"]) == {"any", "a100-80gb"}


def test_a_table_of_the_suite_stands_for_its_pairs(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid.parquet"
    suite = f"{files / 'suite.parquet'}"
    run(files, "--latency", suite, "--gpu", "h800", "--policy", "fixed", "--out", str(out))
    names = {f"{suite}:vicuna-7b+160m/{mode}" for mode in ("eager", "graph")}
    assert set(read_sweep(out)["latency"]) == names
    run(files, "--latency", f"{suite}:vicuna-7b+160m/graph", "--policy", "fixed", "--out", str(out))
    assert read_sweep(out)["gpu"].tolist() == ["h200"]
    with pytest.raises(DraftsimError, match=r"vicuna-7b\+160m/graph, not 'vicuna-7b/graph'"):
        run(files, "--latency", f"{suite}:vicuna-7b/graph", "--policy", "fixed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--latency", "{}/cpu.parquet", "--gpu", "h100"), r"'Intel\(R\) Xeon\(R\)'.* no GPU data"),
        (("--latency", "const:target=1,draft=0.1", "--gpu", "h100"), "were assumed, not measured"),
        (("--latency", "{}/latency.parquet", "--gpu", "h2o"), "did you mean 'h20"),
        (("--latency", "{}/latency.parquet", "--weights", "awk-int4"), "did you mean 'awq-int4'"),
        (
            ("--latency", "{}/latency.parquet", "--weights", "fp8=target"),
            "no model 'fp8': choose from target, draft",
        ),
        (("--latency", "{}/latency.parquet", "--gpu", "h100", "--ladder"), "--gpu belongs to"),
    ],
)
def test_what_cannot_be_carried_over_says_so(
    files: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DraftsimError, match=message) as caught:
        run(files, *(a.format(files) for a in arguments))
    assert "\n" not in str(caught.value)


def test_the_command_line_ends_with_2_and_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--trace", f"{files}/trace.parquet", "--latency", f"{files}/cpu.parquet"]
    monkeypatch.setattr("sys.argv", ["draftsim", "sweep", *arguments, "--gpu", "h100"])
    with pytest.raises(SystemExit) as left:
        draftsim.main()
    assert left.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_fit_that_does_not_hold_is_refused() -> None:
    with pytest.raises(DraftsimError, match="measured in float32"):
        carry_over(measured(dtype="float32"), DEVICES["h100"])
    wild = LatencyTable(cells(TRUTH, wrinkle=1.5), measured().meta)
    with pytest.raises(DraftsimError, match=r"misses the passes measured on h200 by \d+%"):
        carry_over(wild, DEVICES["h100"])
    large = {**SHAPES, "target": {**SHAPES["target"], "parameters": 14e9}}
    # Heavier weights than the passes show are fitted by a larger share of the bandwidth.
    with pytest.raises(DraftsimError, match="24 GB of memory and the models' weights take 28 GB"):
        carry_over(measured(shapes=large), DEVICES["rtx-3090"])
    with pytest.raises(DraftsimError, match="--gpu needs a latency table"):
        Prices((0.1,), gpus=("h100",))


def test_first_draft_passes_scale_as_the_others() -> None:
    away = carry_over(measured(), DEVICES["rtx-3090"])
    key = ["model", "phase", "batch", "new_tokens", "context"]
    before, after = (t.cells.set_index(key).sort_index()["median_s"] for t in (measured(), away))
    ratio = after / before
    np.testing.assert_allclose(
        ratio.xs(("draft", "catch_up")).to_numpy(), ratio.xs(("draft", "forward")).to_numpy()
    )
    assert (ratio.xs(("draft", "forward")) > 1.5).all()  # a fifth of the bandwidth
    assert ratio["target", "host_round", 1, 1, 0] == 1


def test_published_error_is_of_the_tables_own_fit_where_the_papers_ran_as_it_did() -> None:
    eager = Roofline(DEVICES["h200"], "eager", 1e-4, 4.5e-4)
    slow = Roofline(DEVICES["h200"], "eager", 1e-4, 9e-4)
    assert published_error(slow).median > published_error(eager).median
    # GammaTune's models, SpecBound's step and its tasks, and Qwen's models on two GPUs.
    assert published_error().figures == 6 + 1 + 7 + 6 + 6
    graph, packed = published_error(TRUTH), published_error(TRUTH, quantised=True)
    assert "h100" not in graph.devices
    assert packed.figures > graph.figures > 10


def test_bounds_are_the_records_factors_and_leave_a_step_alone() -> None:
    table = carry_over(measured(), DEVICES["h100"])
    how, bounds = reach_of(table), bounds_of(table)
    assert how is not None
    assert bounds is not None
    assert how == reaches("graph", False)
    assert min(how) > 1
    assert "80% of the time" in interval_words(table)
    quantised = carry_over(measured(), DEVICES["h100"], weights={"target": FORMATS["awq-int4"]})
    assert reach_of(quantised) == reaches("graph", True)
    for one, (draft, verify) in zip(bounds, (how, (1 / how[0], 1 / how[1])), strict=True):
        assert one.seconds("draft", "forward", context=16) == pytest.approx(
            draft * table.seconds("draft", "forward", context=16)
        )
        step = table.seconds("target", "forward", context=16)
        assert one.seconds("target", "forward", context=16) == pytest.approx(step)
        wide = table.seconds("target", "forward", new_tokens=9, context=16)
        assert one.seconds("target", "forward", new_tokens=9, context=16) == pytest.approx(
            max(step, verify * wide)
        )
    assert bounds_of(measured()) is None
    assert interval_words(measured()) == ""
