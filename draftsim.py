"""The program ``draftsim``, and the public API: ``import draftsim`` (docs/api.md).

>>> import draftsim
>>> found = draftsim.predict("bundled", policies=["fixed:gamma=2", "gammatune"], resamples=100)
>>> found.best
'fixed:gamma=2'
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies import Autoregressive, BatchPolicy, DraftPolicy, Fixed, check_policy, parse_policy
    from profiler.checks.differences import rounds_differ
    from profiler.checks.spot_check import PlannedPolicy, run_requests
    from profiler.latency.table import Grid
    from profiler.profile import Settings, profile_latency, profile_trace
    from profiler.prompts import read_prompts
    from profiler.recording.run import BUNDLED, RunInfo
    from simulator import formulas, palette
    from simulator.api import Plan, Prediction, Served, Study, plan, predict, serve, sweep
    from simulator.check import run_checks
    from simulator.plots.recording import plot_cost_ratio, plot_survival
    from simulator.pricing import price
    from simulator.ratios import own_ratios
    from simulator.summary import summarize
    from simulator.validation import compare
    from traces.acceptance.trace import Trace
    from traces.errors import DraftsimError
    from traces.importers.registry import import_log
    from traces.latency.table import LatencyTable
    from traces.replay.run import replay
    from traces.store.recordings import find_latency, find_trace

PACKAGES = ("policies", "traces", "profiler", "simulator", "commands")
MARK = '__distribution__ = "draftsim"'
"""A line of each package's ``__init__.py``."""
EXPORTED = {
    "simulator.api": ("Plan", "Prediction", "Served", "Study", "plan", "predict", "serve", "sweep"),
    "policies": (
        "Autoregressive", "BatchPolicy", "DraftPolicy", "Fixed", "check_policy", "parse_policy",
    ),
    "traces.acceptance.trace": ("Trace",),
    "traces.errors": ("DraftsimError",),
    "traces.importers.registry": ("import_log",),
    "traces.latency.table": ("LatencyTable",),
    "traces.replay.run": ("replay",),
    "traces.store.recordings": ("find_latency", "find_trace"),
    "simulator": ("formulas", "palette"),
    "simulator.check": ("run_checks",),
    "simulator.plots.recording": ("plot_cost_ratio", "plot_survival"),
    "simulator.pricing": ("price",),
    "simulator.ratios": ("own_ratios",),
    "simulator.summary": ("summarize",),
    "simulator.validation": ("compare",),
    "profiler.checks.differences": ("rounds_differ",),
    "profiler.checks.spot_check": ("PlannedPolicy", "run_requests"),
    "profiler.latency.table": ("Grid",),
    "profiler.profile": ("Settings", "profile_latency", "profile_trace"),
    "profiler.prompts": ("read_prompts",),
    "profiler.recording.run": ("BUNDLED", "RunInfo"),
}  # fmt: skip
"""The public names, by the module that is imported when one is first asked for."""

__all__ = [
    "BUNDLED",
    "Autoregressive",
    "BatchPolicy",
    "DraftPolicy",
    "DraftsimError",
    "Fixed",
    "Grid",
    "LatencyTable",
    "Plan",
    "PlannedPolicy",
    "Prediction",
    "RunInfo",
    "Served",
    "Settings",
    "Study",
    "Trace",
    "check_policy",
    "compare",
    "find_latency",
    "find_trace",
    "formulas",
    "import_log",
    "own_ratios",
    "palette",
    "parse_policy",
    "plan",
    "plot_cost_ratio",
    "plot_survival",
    "predict",
    "price",
    "profile_latency",
    "profile_trace",
    "read_prompts",
    "replay",
    "rounds_differ",
    "run_checks",
    "run_requests",
    "serve",
    "summarize",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import a public name; ImportError if other packages would be imported as ours."""
    module = next((module for module, names in EXPORTED.items() if name in names), None)
    if module is None:
        raise AttributeError(f"draftsim has no {name!r}: it exports {', '.join(__all__)}")
    if found := stranger():
        raise ImportError(found)
    package = import_module(module)
    return getattr(package, name, None) or import_module(f"{module}.{name}")


def main() -> None:
    """Run the command line, unless other packages of these names would take the place of ours."""
    if found := stranger():
        print(f"draftsim: {found}", file=sys.stderr)
        sys.exit(2)
    try:
        from commands.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # nothing is begun yet
    run()


def stranger() -> str:
    """Return what is wrong with the first package that is not ours, or nothing; import none."""
    here = Path(__file__).resolve().parent
    for name in PACKAGES:
        try:
            spec = find_spec(name)
        except ModuleNotFoundError:
            continue  # who needs it says so
        if spec is None or spec.origin is None:
            continue
        origin, ours = Path(spec.origin).resolve(), here / name / "__init__.py"
        if origin != ours:
            return (
                f"`import {name}` finds {origin}, not draftsim's own {ours}: run it in a virtual "
                "environment of its own, and without that folder on PYTHONPATH"
            )
        if MARK not in ours.read_text(encoding="utf-8").splitlines():
            return (
                f"{ours} is another distribution's, installed over draftsim's own: install "
                "draftsim again, in a virtual environment of its own"
            )
    return ""


if __name__ == "__main__":
    main()
