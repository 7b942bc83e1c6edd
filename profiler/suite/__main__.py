"""``python -m profiler.suite STAGE``: see `profiler.suite`."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.suite import MODES

if TYPE_CHECKING:
    from profiler.suite.environment import Units, Workplace

RUN = ("device", "dtype", "seconds", "quick")
OPTIONS = {
    "latency": (*RUN, "pairs", "modes", "profile"),
    "forced": (*RUN, "pairs", "modes"),
    "trained": (*RUN, "target", "draft", "prompts", "drafters"),
    "unpack": ("into",),
}
"""Options of each stage; all have ``--out``."""
SECONDS = 490.0
"""A stage stops starting new work in time to end within nine minutes."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m profiler.suite", description="Calibrate a GPU.")
    line.add_argument("stage", choices=OPTIONS)
    line.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    line.add_argument("--out", type=Path, required=True, help="folder for the recordings")
    line.add_argument("--dtype", help="bfloat16, float16 or float32; bfloat16 where there is one")
    line.add_argument(
        "--pairs", nargs="+", metavar="PAIR", help="latency, forced: some of the pairs, by name"
    )
    line.add_argument(
        "--modes", nargs="+", choices=MODES, help="latency, forced: some of the modes"
    )
    line.add_argument(
        "--profile", action="store_true", help="latency: keep the kernels of some rounds per mode"
    )
    line.add_argument(
        "--target",
        help="trained: a target of yours, folder or name, for ours; smollm2 alone has its drafters",
    )
    line.add_argument("--draft", help="trained: its draft")
    line.add_argument("--prompts", type=Path, help="trained: the prompts to record with them")
    line.add_argument(
        "--drafters", nargs="+", default=[], metavar="DIR",
        help="trained: drafters on its features (EAGLE, EAGLE-3), each recorded, timed and run",
    )  # fmt: skip
    line.add_argument("--seconds", type=float, default=SECONDS, help="time of the stage")
    line.add_argument("--quick", action="store_true", help="miniature models and grids")
    line.add_argument("--into", type=Path, help="unpack: folder that gets a folder per pair")
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage.

    Returns 0 if all was done; 1 if something failed, or the stage was stopped; 2, with one line, if
    the request was wrong; 3 if the time was too short.  Finished work is written in any case, and
    the same command continues with the rest.
    """
    options = parser().parse_args(arguments)
    from profiler.suite.environment import FAILED, REFUSED, StoppedError
    from traces.errors import DraftsimError

    try:
        _check(options)
        if options.stage == "unpack":
            from profiler.suite.unpack import unpack

            for folder in unpack(options.out, options.into or options.out / "recorded"):
                print(folder)
            return 0
        with _told_to_end():
            return _run(options)
    except DraftsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except StoppedError as error:
        print(f"error: {error}: the same command goes on with what is left", file=sys.stderr)
        return FAILED
    except RuntimeError as error:
        if "CUDA" not in str(error):
            raise
        # The driver takes no more work of this process; what was finished is kept.
        print(
            f"error: {str(error).splitlines()[0]}: the same command goes on with what is left",
            file=sys.stderr,
        )
        return FAILED


def _check(options: argparse.Namespace) -> None:
    """Raise DraftsimError for an option that the stage does not have."""
    from traces.errors import DraftsimError

    known, asked = parser(), options.stage
    for name, value in vars(options).items():
        stages = [stage for stage, names in OPTIONS.items() if name in names]
        if stages and asked not in stages and value != known.get_default(name):
            raise DraftsimError(
                f"--{name} is an option of {', '.join(stages)}, not of {asked}: leave it out"
            )


def _run(options: argparse.Namespace) -> int:
    from profiler.suite.environment import open_workplace

    place = open_workplace(
        options.device, options.out, seconds=options.seconds, quick=options.quick,
        dtype=options.dtype,
    )  # fmt: skip
    place.settle()
    try:
        units = _stage(place, options)
    finally:
        gc.unfreeze()
    for note in units.notes:
        place.say(f"left out: {note}")
    place.say(f"written: {', '.join(sorted(f.name for f in options.out.iterdir()))}")
    return units.status


def _stage(place: Workplace, options: argparse.Namespace) -> Units:
    if options.stage == "latency":
        from profiler.suite.latency_stage import run_latency

        return run_latency(place, options.pairs, options.modes, profile=options.profile)
    elif options.stage == "forced":
        from profiler.suite.forced_stage import run_forced

        return run_forced(place, options.pairs, options.modes)
    from profiler.suite.trained_stage import run_trained

    return run_trained(place, options.target, options.draft, options.prompts, options.drafters)


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Make SIGTERM, as `timeout` sends it, an error inside the block."""
    from profiler.suite.environment import StoppedError

    def end(number: int, frame: object) -> None:
        raise StoppedError(f"stopped by {signal.Signals(number).name}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
