"""``python -m profiler.suite STAGE``: see `profiler.suite`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

STAGES = ("latency", "forced", "trained", "unpack")
SECONDS = 490.0
"""A stage stops starting new work in time to end within nine minutes."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(prog="python -m profiler.suite", description="Calibrate a GPU.")
    line.add_argument("stage", choices=STAGES)
    line.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    line.add_argument("--out", type=Path, required=True, help="folder for the recordings")
    line.add_argument("--dtype", help="bfloat16, float16 or float32; bfloat16 where there is one")
    line.add_argument("--pairs", nargs="+", metavar="PAIR", help="some of the pairs, by name")
    line.add_argument("--seconds", type=float, default=SECONDS, help="time of the stage")
    line.add_argument("--quick", action="store_true", help="miniature models and grids")
    line.add_argument("--into", type=Path, help="unpack: folder that gets a folder per pair")
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage; 2 if something was wrong with what was asked, said in one line."""
    options = parser().parse_args(arguments)
    from traces.errors import DraftsimError

    try:
        if options.stage == "unpack":
            from profiler.suite.unpack import unpack

            for folder in unpack(options.out, options.into or options.out / "recorded"):
                print(folder)
            return 0
        from profiler.suite.environment import open_workplace

        place = open_workplace(
            options.device, options.out, seconds=options.seconds, quick=options.quick,
            dtype=options.dtype,
        )  # fmt: skip
        if place.device.type == "cuda":
            gc.freeze()  # every capture collects garbage: let it not walk what never is
        if options.stage == "latency":
            from profiler.suite.latency_stage import run_latency

            run_latency(place, options.pairs)
        elif options.stage == "forced":
            from profiler.suite.forced_stage import run_forced

            run_forced(place, options.pairs)
        else:
            from profiler.suite.trained_stage import run_trained

            run_trained(place)
    except DraftsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "CUDA" not in str(error):
            raise
        # The driver takes no more work of this process; what was finished is kept.
        print(
            f"error: {str(error).splitlines()[0]}: the same command goes on with what is left",
            file=sys.stderr,
        )
        return 2
    place.say(f"done: {', '.join(sorted(f.name for f in options.out.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
