"""Maps of speedups read alike in greyscale: faster is darker, slower is hatched."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from simulator.plots.look import SHADES, draw_map, log_ticks, shading
from simulator.plots.whatif import MOST_LINES, figures, plot_break_even, plot_maps
from tests.test_whatif_breakeven import iid_grid

GREY = np.array([0.299, 0.587, 0.114])


def pixels(figure: Figure, dpi: int = 100) -> npt.NDArray[Any]:
    out = io.BytesIO()
    figure.savefig(out, dpi=dpi)
    out.seek(0)
    return np.asarray(matplotlib.image.imread(out)[..., :3] @ GREY)


def test_shades_only_darken_in_grey() -> None:
    grey = SHADES(np.linspace(0, 1, 50))[:, :3] @ GREY
    assert (np.diff(grey) < 0).all()
    assert grey[0] > 0.9
    assert grey[-1] < 0.3


def test_faster_and_slower_are_not_the_same_grey() -> None:
    # 1.25 and 0.8 lie as far from 1 as each other.
    figure = Figure(figsize=(4, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    draw_map(axes, [1, 2], [1], [[1.25, 0.8]], shading([1.25]))
    grey = pixels(figure)
    fast, slow = grey[20:-20, 20:180], grey[20:-20, 220:380]
    assert fast.std() < 0.01
    assert slow.mean() > fast.mean() + 0.3
    assert slow.min() < 0.75  # hatched, not blank
    # The line between them is ink.
    assert grey[20:-20, 196:204].min() < 0.2


def test_every_map_is_drawn_so() -> None:
    axes = plot_maps(iid_grid()).axes[0]
    assert axes.collections[0].get_cmap() == SHADES
    assert [p.get_hatch() for p in axes.patches] == ["////"]


def test_logarithmic_axes_have_few_labels_of_one_size() -> None:
    for points in (np.geomspace(0.01, 0.5, 30), [0.01, 0.1, 1.0], np.geomspace(1e-4, 1, 40)):
        figure = Figure()
        axes = figure.subplots()
        axes.plot(points, points)
        axes.set_xscale("log")
        log_ticks(axes.xaxis, points)
        figure.canvas.draw()
        inside = [t for t in axes.get_xticks() if points[0] <= t <= points[-1] * 1.01]
        assert 3 <= len(inside) <= 8
        assert not list(axes.get_xticks(minor=True))


def test_labels_of_near_points_do_not_touch() -> None:
    axes = Figure().subplots()
    axes.set_xscale("log")
    log_ticks(axes.xaxis, [0.05, 0.14, 0.23, 0.32, 0.41, 0.5])
    assert list(axes.get_xticks()) == [0.05, 0.14, 0.23, 0.32, 0.5]
    log_ticks(axes.xaxis, [1, 2, 4, 8, 16, 32])
    assert list(axes.get_xticks()) == [1, 2, 4, 8, 16, 32]


def test_lines_of_break_even_are_all_told_apart() -> None:
    frame = iid_grid()
    many = [frame]
    for i in range(2, 12):  # more policies than there are marks, each a little worse
        other = frame[frame["policy"] == "fixed:gamma=8"]
        columns = {k: other[k] / (1 + 0.01 * i) for k in ("speedup", "speedup_lo", "speedup_hi")}
        many.append(other.assign(policy=f"other-{i}", **columns))
    import pandas as pd

    axes = plot_break_even(pd.concat(many).astype({"policy": str})).axes[0]
    lines = axes.get_lines()
    named = [line for line in lines if line.get_marker() != "None"]
    looks = {(line.get_color(), line.get_marker()) for line in named}
    assert len(looks) == len(named) == MOST_LINES
    assert {"fixed:gamma=1", "fixed:gamma=2", "fixed:gamma=4"} <= {
        str(line.get_label()).partition(" ")[0] for line in named
    }
    assert lines[-1].get_label() == f"{15 - MOST_LINES} others"
    assert len([line for line in lines if line.get_color() == "#B8B8B8"]) == 15 - MOST_LINES + 1


def test_a_break_even_that_no_policy_has_is_not_drawn() -> None:
    frame = iid_grid()
    assert "break_even_c" in figures(frame)
    faster = frame.assign(**{k: 9 * frame[k] for k in ("speedup", "speedup_lo", "speedup_hi")})
    assert "break_even_c" not in figures(faster)
    assert "map_c_alpha" in figures(faster)


def test_a_grid_from_nothing_is_linear() -> None:
    frame = iid_grid()
    free = frame.assign(c=frame["c"] - frame["c"].min())
    assert plot_maps(free).axes[0].get_xscale() == "linear"
    assert plot_break_even(free).axes
