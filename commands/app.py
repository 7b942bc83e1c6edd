"""The command line: every command, its options' former names, and how errors are said."""

from __future__ import annotations

import errno
import gc
import sys
from typing import Annotated, Any, NoReturn

import typer

from commands import calibrate, catalogue, check, demo, fetch, imports, memory, report, tune
from commands.capacity import command as capacity
from commands.papers import command as papers
from commands.profile import command as profile
from commands.serve import command as serve
from commands.simulate import command as simulate
from commands.sweep import command as sweep
from commands.validate import command as validate
from traces.errors import DraftsimError

# typer carries its own copy of click, whose errors it exports only in part.
UsageError: Any = typer.BadParameter.__mro__[1]


INTERRUPTED = 130
STOPPED = "stopped; nothing is half-written, and the same command goes on where it can"


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"draftsim {version('draftsim')}")
        except PackageNotFoundError:
            print("draftsim, not installed")
        raise typer.Exit


RENAMED = {"batches": "batch", "contexts": "context", "draws": "resamples"}
"""What options were called before one name stood for one thing; still understood."""

app = typer.Typer(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: RENAMED.get(name, name),
    },
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
app.command("calibrate-memory")(memory.calibrate_memory)
app.command("serve")(serve.serve)
app.command("capacity")(capacity.capacity)
app.command("sweep")(sweep.sweep)
app.command("tune")(tune.tune)
app.command("report")(report.report)
app.command("papers")(papers.papers)
app.command("fetch")(fetch.fetch)
app.command("list")(catalogue.list_all)
app.command("import")(imports.import_file)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Predicts what speculative decoding will do, from one profiling run of a real pair."""
    del version


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
    except OSError as error:
        # Where nobody said it better: a full disk, a folder that may only be read.
        if error.errno == errno.EPIPE or error.errno is None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror}: free some space, or choose another place to write to", 2)
    except RuntimeError as error:
        # By name: torch is not imported for commands that need no models.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(
            "the device's memory is full: use a smaller pair, --dtype bfloat16 or --device cpu, or "
            "lower --max-new-tokens, --max-gamma or --batch; the same command goes on where it "
            "can", 2,
        )  # fmt: skip
    except (KeyboardInterrupt, typer.Abort):
        _fail(STOPPED, INTERRUPTED)
    else:
        # typer turns Ctrl-C into this code, without a word.
        if code == INTERRUPTED and sys.argv[1:2] != ["serve"]:
            _fail(STOPPED, INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"draftsim: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
