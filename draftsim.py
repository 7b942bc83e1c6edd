"""The program: ``draftsim --help`` lists what it answers."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("policies", "traces", "profiler", "simulator", "commands")
MARK = '__distribution__ = "draftsim"'
"""A line of each package's ``__init__.py``."""


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
