"""The command line: its commands, other names of their options, errors, and how it is stopped."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer

from commands.common.configured import configured_in
from commands.lazy import Listed, lazy_group

# typer carries its own copy of click, whose errors it exports only in part.
UsageError: Any = typer.BadParameter.__mro__[1]

INTERRUPTED = 130
STOPPED = "stopped; nothing is half-written, and the same command continues where it can"
NUMBERS = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
"""Signals that end a command as Ctrl-C does, with all processes that it started."""
TOGETHER_S = 1.0
"""Signals that arrive within this time are one: `timeout` sends two of them."""

NAMES = {
    "batches": ("batch",), "contexts": ("context",), "draws": ("resamples",),
    "concurrency": ("batch",), "max-concurrency": ("batch",), "request-rate": ("rate",),
    "max-num-seqs": ("max-batch", "engine-batch"), "max-num-batched-tokens": ("token-budget",),
    "num-gpu-blocks": ("kv-blocks",), "num-gpu-blocks-override": ("kv-blocks",),
    "max-model-len": ("engine-length",), "num-prompts": ("requests",),
    "num-speculative-tokens": ("k", "draft-length", "gamma", "engine-longest", "max-gamma"),
}  # fmt: skip
"""Our names of options, by former names and those of vLLM, which also work."""
ELSEWHERE = {
    ("simulate", "--batch"): "it replays one request at a time: `draftsim serve --batch` or "
    "`draftsim sweep --batch`",
    ("simulate", "--gpu"): "it keeps the device of its latencies: `draftsim sweep --policy P --gpu "
    "NAME` extrapolates",
    ("simulate", "--weights"): "it keeps the weights of its latencies: `draftsim sweep --policy P "
    "--weights FORMAT` extrapolates",
    ("simulate", "--rate"): "it has no arrivals: `draftsim serve --rate`",
    ("sweep", "--rate"): "it has no arrivals: `draftsim serve --rate`",
    ("sweep", "--verify"): "it replays exact verification: `draftsim simulate --verify`",
    ("report", "--trace"): "name a recording or a run folder: `draftsim report --run`",
    ("report", "--latency"): "it reads the run folder's: `draftsim simulate --latency`",
    ("serve", "--robustness"): "it is for one request at a time: `draftsim simulate robustness`",
    ("tune", "--policy"): "it searches the draft lengths itself: compare with `draftsim serve`",
}
"""Where an option is that a command does not have, by command and option."""

_TRY, _SERVER, _PAIR = "Try it", "You have a server", "You have a model pair or a recording"
_LOAD, _STUDY = "You have a load", "You study speculative decoding"
_RECORDED = (
    "--prompts", "--limit", "--category", "--chat", "--max-new-tokens", "--temperature", "--top-p",
    "--seed", "--record-batch",
)  # fmt: skip
PROFILE = {
    "pair": Listed("profile.command:pair", "Time passes and record which drafts are accepted."),
    "sources": Listed(
        "profile.command:sources", "Record other draft sources and time them.",
        chosen_by=("--exit-layers", "--source"),
    ),
    "decode": Listed(
        "profile.command:decode", "Decode under lossy rules for real.",
        chosen_by=("--verify", "--method", "--papers", "--run-code"),
    ),
    "latency": Listed(
        "profile.command:latency", "Measure the latencies again; keep the recording.",
        chosen_by=("--latency-only",), left_out=_RECORDED,
    ),
    "signals": Listed(
        "profile.command:signals", "Add the draft signals that an older recording lacks.",
        chosen_by=("--signals-only",),
        left_out=(*_RECORDED, "--max-gamma", "--repeats", "--batch"),
    ),
    "engine": Listed("profile.command:engine", "Time the steps of vLLM.", chosen_by=("--engine",)),
}  # fmt: skip
"""Verbs of `draftsim profile`, each with its help, and the older options that choose it."""
VALIDATE = {
    "run": Listed("validate.command:run", "Compare predicted with real rounds and seconds."),
    "sources": Listed(
        "validate.command:sources", "The same with another draft source.",
        chosen_by=("--source",), left_out=("--no-assisted",),
    ),
    "batch": Listed(
        "validate.command:batch", "The same in static batches.",
        chosen_by=("--batch",), left_out=("--no-assisted",),
    ),
    "lossy": Listed(
        "validate.command:lossy", "Measure the bias of replaying a lossy rule.",
        chosen_by=("--verify", "--memory"), left_out=("--no-assisted",),
    ),
    "engine": Listed(
        "validate.command:engine", "Compare predicted steps and seconds with those of vLLM.",
        chosen_by=("--engine",),
    ),
    "recorded": Listed(
        "validate.command:recorded", "Compare recorded GPU runs with predictions; runs nothing.",
        chosen_by=("--recorded",),
    ),
}  # fmt: skip
"""Verbs of `draftsim validate`."""
SIMULATE = {
    "replay": Listed("simulate.command:replay", "Rank policies by their speedup on a recording."),
    "phases": Listed(
        "simulate.command:phases", "The same, and by phase of the answer, such as thinking.",
        chosen_by=("--phase",),
    ),
    "rounds": Listed(
        "simulate.command:rounds", "Price rounds that were decoded under lossy rules.",
        chosen_by=("--rounds",),
    ),
    "robustness": Listed(
        "simulate.command:robustness", "Compare policies over their initial draft lengths.",
        chosen_by=("--robustness",),
    ),
}  # fmt: skip
"""Verbs of `draftsim simulate`."""
BREAKEVEN = {
    "surface": Listed("breakeven:surface", "Find them from latencies and acceptance."),
    "bench": Listed("breakeven:bench", "Find them from runs of a server.", chosen_by=("--bench",)),
    "plan": Listed("breakeven:plan", "Choose the fewest runs to measure.", chosen_by=("--plan",)),
}  # fmt: skip
"""Verbs of `draftsim breakeven`."""
SWEEP = {
    "grid": Listed("sweep:grid", "Price every policy at every point of a grid."),
    "ladder": Listed(
        "sweep:ladder", "Compare policies, from no speculation up to the oracle.",
        chosen_by=("--ladder",), left_out=("--jobs",),
    ),
    "tune": Listed("sweep:tune", "Search the parameters of policies.", chosen_by=("--tune",)),
}  # fmt: skip
"""Verbs of `draftsim sweep`."""
PAPERS = {
    "tables": Listed("papers:tables", "Compare the tables of four papers with ours."),
    "measured": Listed(
        "papers:measured", "Predict public GPU measurements from a part of each study.",
        chosen_by=("--measured", "--logs"),
    ),
}  # fmt: skip
"""Verbs of `draftsim papers`."""
TUNE = {
    "search": Listed("tune:search", "Search the setting in simulation, and write it."),
    "engine": Listed(
        "tune:tried", "The same, and serve with it in vLLM.", chosen_by=("--try",)
    ),
}  # fmt: skip
"""Verbs of `draftsim tune`."""
_LISTS = {
    "policies": "Length policies and their parameters.",
    "rules": "Verification rules and their parameters.",
    "sources": "Draft sources and the named methods.",
    "formats": "Logs that `draftsim import` reads.",
    "devices": "GPUs, and what is measured, composed or a roofline on each.",
    "weight-formats": "Weight formats that latencies are extrapolated to.",
    "published": "The roofline model against published times.",
    "columns": "What every printed column means.",
}
LIST = {
    "recordings": Listed("catalogue:recordings", "The bundled recordings."),
    **{
        name: Listed(f"catalogue:{name.replace('-', '_')}", says, chosen_by=(f"--{name}",))
        for name, says in _LISTS.items()
    },
}
"""Verbs of `draftsim list`."""
COMMANDS = {
    "demo": Listed("demo:demo", "Profile the bundled pair here, predict, and check.", _TRY),
    "list": Listed("", "Show the recordings, or the names that options take.", _TRY, verbs=LIST),
    "fetch": Listed("fetch:fetch", "Download SmolLM2 or Qwen2.5-Coder with drafters.", _TRY),
    "recommend": Listed(
        "calibrate:recommend", "Recommend a draft length from benchmark runs.", _SERVER
    ),
    "doctor": Listed(
        "acceptance:doctor",
        "Check if acceptance is as expected, and name the cause if not.", _SERVER,
    ),
    "calibrate": Listed(
        "calibrate:calibrate", "Fit costs to tokens/s of your own server.", _SERVER
    ),
    "curve": Listed(
        "acceptance:curve", "Predict acceptance lengths at draft lengths not measured.", _SERVER
    ),
    "import": Listed(
        "imports:import_file", "Turn another program's log into a recording.", _SERVER
    ),
    "profile": Listed("", "Measure a pair: latencies and acceptance.", _PAIR, verbs=PROFILE),
    "simulate": Listed("", "Predict every policy's speedup.", _PAIR, verbs=SIMULATE),
    "tune": Listed("", "Write the setting that an engine reads.", _PAIR, True, TUNE),
    "report": Listed("report:report", "Write all results as one HTML page.", _PAIR),
    "validate": Listed("", "Run policies, and check predictions.", _PAIR, True, VALIDATE),
    "export": Listed(
        "acceptance:export", "Write a recording's acceptance as other programs read it.", _PAIR
    ),
    "serve": Listed("serve:serve", "Simulate batches, queues and fleets.", _LOAD, True),
    "capacity": Listed(
        "capacity:capacity", "Find the fewest replicas that meet an SLO.", _LOAD, True
    ),
    "breakeven": Listed(
        "", "Find the loads above which speculation is slower.", _LOAD, verbs=BREAKEVEN
    ),
    "sweep": Listed(
        "", "Vary costs, acceptance, batch, GPU or parameters.", _STUDY, verbs=SWEEP
    ),
    "check": Listed("papers:check", "Check the papers' formulas by simulation.", _STUDY),
    "papers": Listed("", "Compare the papers' tables with ours.", _STUDY, verbs=PAPERS),
    "calibrate-memory": Listed(
        "memory:calibrate_memory", "Count a run's corrections, for the rule csd.", _STUDY
    ),
}  # fmt: skip
"""Commands by name, in groups of what people have."""

app = typer.Typer(
    cls=lazy_group(COMMANDS, NAMES),
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Predicts what speculative decoding will do, from one profiling run of a real pair.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"draftsim {version('draftsim')}")
        except PackageNotFoundError:
            print("draftsim, not installed")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Predict what speculative decoding will do, from one profiling run of a real pair."""
    del version


def main() -> None:
    """Run the command line; bad input is one line on standard error and exit code 2."""
    _open_streams()
    # Replays make millions of short-lived tuples and no cycles: a fifth of their time otherwise.
    gc.set_threshold(1_000_000, 20, 20)
    # At its end Python would walk through all that is left, more than once, to free what goes.
    atexit.register(gc.freeze)
    if "_DRAFTSIM_COMPLETE" in os.environ:  # a shell asks: it reads the output and the exit code
        app(prog_name="draftsim")
    with stop_signals() as stop:
        try:
            code = app(sys.argv[1:] or ["--help"], "draftsim", standalone_mode=False)
            if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt, without a word
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            _fail(STOPPED, stop.code)
        except SystemExit as error:
            ends = {"--install-completion", "--show-completion"}  # by typer itself
            if _is_closed_pipe(error.__context__) or {*sys.argv[1:2]} & ends:
                raise
            # Commands give their codes back: this is code of the user's own, a policy's say.
            _fail(f"a policy or its file called sys.exit({error.code!r}): remove that call", 2)
        except typer.Abort as error:
            # So typer calls the end of a file, at a terminal Ctrl-D; nothing is asked there.
            raise error.__cause__ or error from None
        except Exception as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                # Cleaning up after the stop failed, as an archive that was being written does.
                _fail(STOPPED, stop.code)
            said = _said(error)
            if said is None:
                raise
            _fail(said, 2)
        finally:
            _end_workers()
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Keep printing from failing if a stream is closed or cannot encode a character."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@dataclass
class CommandStop:
    """The exit code of a command that is stopped: 130 after Ctrl-C, 143 after SIGTERM."""

    code: int = INTERRUPTED


@contextmanager
def stop_signals() -> Iterator[CommandStop]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, unless they are ignored."""
    stop, last_s = CommandStop(), -TOGETHER_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal last_s
        del frame
        now_s = time.monotonic()
        before_s, last_s = last_s, now_s
        stop.code = 128 + number
        if now_s - before_s >= TOGETHER_S:
            raise KeyboardInterrupt

    held: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for one in NUMBERS:
            if signal.getsignal(one) is signal.SIG_DFL:
                held[one] = signal.signal(one, interrupt)
    try:
        yield stop
    finally:
        for one, handler in held.items():
            signal.signal(one, handler)


def _end_workers() -> None:
    """End the worker processes of a study, if any run, and remove the folders they share."""
    loky = sys.modules.get("joblib.externals.loky.reusable_executor")
    executor = getattr(loky, "_executor", None)
    if executor is not None:
        executor.terminate(kill_workers=True)


def _is_closed_pipe(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _said(error: Exception) -> str | None:
    """Return the message of `error` for the user; None for a mistake of the program."""
    # It brings numpy, which a list of commands needs not.
    from traces.errors import DraftsimError, missing, missing_for

    if isinstance(error, DraftsimError):
        return _as_given(str(error))
    if isinstance(error, UsageError):
        shown: Any = error
        context = getattr(shown, "ctx", None)
        # A verb's command is named before it.
        command = str(getattr(context, "command_path", "")).removeprefix("draftsim ")
        command = command.partition(" ")[0]
        option = str(getattr(shown, "option_name", ""))
        for name in (option.lstrip("-"), *NAMES.get(option.lstrip("-"), ())):
            if (place := ELSEWHERE.get((command, f"--{name}"))) is not None:
                return f"{command} has no option {option}: {place}"
        if context is not None and option and option not in _options_of(context.command):
            known = sorted(name.lstrip("-") for name in _options_of(context.command))
            near = get_close_matches(option.lstrip("-"), known, 1)
            hint = f"`{context.command_path} --help` lists its options"
            if near:
                hint = f"did you mean --{near[0]}?"
            own = context.command_path.removeprefix("draftsim ")
            return f"{configured_in(shown)}{own} has no option {option}: {hint}"
        message = str(shown.format_message())  # the error by itself does not name the option
        if context is not None and (unknown := re.match(r"No such command '(.*?)'", message)):
            return _unknown(unknown[1], context)
        return configured_in(shown) + _as_given(_plainly(message))
    # Without a policy from a file its module is not imported.
    own = sys.modules.get("policies.from_file")
    if own is not None and (said := own.said_raised(error)) is not None:
        return str(said)
    if isinstance(error, OSError) and error.errno is not None and not _is_closed_pipe(error):
        # Where nobody said it better: a full disk, a folder that may only be read.
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}: free some space, or choose another place to write to"
    # By name: torch is not imported for commands that need no models.
    if isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError":
        return (
            "the device's memory is full: use a smaller pair, --dtype bfloat16 or --device cpu, or "
            "lower --max-new-tokens, --max-gamma or --batch; the same command then continues"
        )
    if packages := missing_for(error):
        return str(missing(packages, " ".join(["draftsim", *sys.argv[1:2]])))
    return None


def _unknown(name: str, context: Any) -> str:
    """Return the message for an unknown command, or an unknown verb of the command of `context`."""
    path = context.command_path
    _, _, command = path.partition(" ")
    kind, whose = ("verb", f"{command} has ") if command else ("command", "there is ")
    near = get_close_matches(name, [*context.command.commands], 1)
    hint = f"did you mean `{path} {near[0]}`?" if near else f"`{path} --help` lists its {kind}s"
    return f"{whose}no {kind} '{name}': {hint}"


def _options_of(command: Any) -> set[str]:
    """Return all names of a command's options, with those of other tools."""
    own = {o for param in command.params for o in (*param.opts, *param.secondary_opts)}
    return own | {f"--{o}" for o, ours in NAMES.items() if own & {f"--{name}" for name in ours}}


def _plainly(message: str) -> str:
    """Return a message of typer's about an option's value in our words."""
    found = re.fullmatch(
        r"Invalid value for '([^']+)': (?:Value error, |Input should be )(.*)", message
    )
    if found is None:
        return message
    option, said = found.groups()
    if (kind := re.match(r"a valid (\w+)", said)) is not None:
        said = "a whole number" if kind[1] == "integer" else f"a {kind[1]}"
    elif re.match(r"(greater|less) than", said):
        said = f"a value {said}"
    return f"{option}: " + (f"expected {said}" if "Input should be" in message else said)


def _as_given(message: str) -> str:
    """Return the message with our names of options as the command line spells them."""
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    for other, ours in NAMES.items():
        for name in ours:
            if f"--{other}" in given and f"--{name}" not in given:
                message = re.sub(rf"--{name}(?![\w-])", f"--{other}", message)
    return message


def _fail(message: str, code: int) -> NoReturn:
    from commands.common.printed import printable

    print(f"draftsim: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
