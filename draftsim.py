"""The command line of draftsim: ``draftsim --help`` lists what it answers."""

from __future__ import annotations

import gc
import sys
from typing import Any, NoReturn

import typer

from commands import (
    calibrate,
    check,
    demo,
    fetch,
    imports,
    papers,
    profile,
    report,
    serve,
    simulate,
    sweep,
    tune,
    validate,
)
from traces.errors import DraftsimError

# typer carries its own copy of click, whose errors it exports only in part.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Predicts what speculative decoding will do, from one profiling run of a real pair.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("profile")(profile.profile)
app.command("simulate")(simulate.simulate)
app.command("validate")(validate.validate)
app.command("check")(check.check)
app.command("calibrate")(calibrate.calibrate)
app.command("serve")(serve.serve)
app.command("sweep")(sweep.sweep)
app.command("tune")(tune.tune)
app.command("report")(report.report)
app.command("papers")(papers.papers)
app.command("fetch")(fetch.fetch)
app.command("list")(simulate.list_recordings)
app.command("import")(imports.import_file)


def main() -> None:
    """Run the command line; bad input is one line on standard error and exit code 2."""
    # Replays make millions of short-lived tuples and no cycles: a fifth of their time otherwise.
    gc.set_threshold(100_000, 20, 20)
    try:
        code = app(standalone_mode=False)
    except DraftsimError as error:
        _fail(str(error), 2)
    except UsageError as error:
        # The message by itself does not name the option.
        _fail(error.format_message(), 2)
    except RuntimeError as error:
        # By name: torch is not imported for commands that need no models.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(
            "the device's memory is full: use a smaller pair, --dtype bfloat16 or --device cpu, or "
            "lower --max-new-tokens, --max-gamma or --batches; the same command goes on where it "
            "can", 2,
        )  # fmt: skip
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped; the same command goes on where it can", 130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"draftsim: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
