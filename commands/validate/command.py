"""``draftsim validate``: predictions held against real runs, verb by verb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from commands.common import options
from commands.common.output import JsonOption, OutOption, emit, placed
from commands.common.quiet import columns_shown
from commands.engine.options import CheckedEngine
from commands.validate.batched import BatchRuns
from commands.validate.engine import columns_of, engine_check, say_checked
from commands.validate.flow import CheckedPair, CheckedRun, RealRuns
from commands.validate.recorded import recorded_check
from commands.validate.spot_check import LossyRuns, SourceRuns, SpotCheck, say_verdict
from profiler.recording.run import only_writer, read_info
from traces.errors import DraftsimError

COPY = "the measured times are kept there, so copy it and name the copy"
ForcedOption = Annotated[
    bool,
    typer.Option("--forced", help="Take drafts and verdicts from the trace: tests cost alone."),
]
SampledOption = Annotated[bool, typer.Option("--sampled", help="Use the sampled trace of the run.")]
RemeasureOption = Annotated[
    bool,
    typer.Option(
        "--remeasure",
        help="Predict from latencies measured again, between the real runs: leaves out how the "
        "machine has changed since the profile.",
    ),
]


def check(
    asked: CheckedPair, kind: Callable[[CheckedPair], RealRuns], policies: Sequence[str] | None,
    remeasure: bool = False,
) -> None:  # fmt: skip
    """Run, compare and print a kind of check."""
    # Refused now where it is no run or may only be read, and not once torch is loaded or after
    # minutes of decoding.
    read_info(asked.run, asked.trust_remote_code)
    chosen = None if policies is None else [*policies]
    with only_writer(asked.run, COPY):
        rows = kind(replace(asked, policy=chosen)).rows(remeasure)
    emit("validate", rows, asked.json, show=columns_shown(rows), out=asked.out)
    if asked.json is None:
        say_verdict(rows)


def run(
    asked: CheckedPair,
    forced: ForcedOption = False,
    sampled: SampledOption = False,
    assisted: Annotated[
        bool,
        typer.Option(
            help="Also run transformers' own assisted generation, and compare its rounds: its "
            "seconds contain the prompt's."
        ),
    ] = True,
    remeasure: RemeasureOption = False,
) -> None:
    """Run policies for real, interleaved, and compare with what was predicted.

    A stopped check goes on where it stopped when the command is repeated.

    --policy also takes the papers' methods: with a draft source of their own they are run as by
    `draftsim validate sources`, with a lossy rule as by `draftsim validate lossy`.

    `texts_diverged` counts requests that wrote another text than the recorded one: low precision
    can decide a near-tie of two tokens otherwise.  From that token on their rounds are not
    compared, and their seconds are left out.
    """
    policies, rule, systems = asked.methods()
    kind: Callable[[CheckedPair], RealRuns] = partial(
        SpotCheck, forced=forced, sampled=sampled, assisted=assisted
    )
    if systems:
        if sampled or forced:
            raise DraftsimError(
                "methods with a draft source of their own are run greedily: drop --sampled and "
                "--forced"
            )
        kind = partial(SourceRuns, source=None)
    elif rule is not None:
        if forced or remeasure:
            raise DraftsimError(
                f"the methods' rule {rule} changes the text: drop --forced and --remeasure"
            )
        kind = partial(LossyRuns, verify=rule, memory=None, sampled=sampled)
    check(asked, kind, policies, remeasure)


def sources(
    asked: CheckedPair, source: options.SourceOption = None, remeasure: RemeasureOption = False
) -> None:
    """Run policies for real with another draft source, and compare with what was predicted.

    The source drafts in place of the draft model; --policy also takes named methods with a source
    of their own.  Record it first, with `draftsim profile sources`.

    A stopped check goes on where it stopped when the command is repeated.
    """
    policies, rule, systems = asked.methods()
    if rule is not None:
        raise DraftsimError(
            f"other draft sources are verified exactly, and these methods by {rule}: name other "
            "policies"
        )
    if source is None and not systems:
        raise DraftsimError(
            "no source is named: add --source NAME, or a --policy that has one of its own "
            "(`draftsim list sources`)"
        )
    check(asked, partial(SourceRuns, source=source), policies, remeasure)


def batch(
    asked: CheckedPair,
    batch: Annotated[
        str, typer.Option(metavar="B,...", help="Sizes of the static batches that are decoded.")
    ],
    forced: ForcedOption = False,
) -> None:
    """Decode the prompts in static batches, and compare with the simulator's.

    A batch is decoded until its slowest request has ended.  Profile the pair with the same --batch
    first.

    A stopped check goes on where it stopped when the command is repeated.
    """
    policies, rule, systems = asked.methods()
    if rule is not None or systems:
        raise DraftsimError(
            "batches are drafted by the draft model and verified exactly: name policies that are "
            "no methods with a source or a rule of their own"
        )
    check(asked, partial(BatchRuns, batch=batch, forced=forced), policies)


def lossy(
    asked: CheckedPair,
    verify: options.VerifyOption = None,
    memory: options.MemoryOption = None,
    sampled: SampledOption = False,
) -> None:
    """Run policies for real under a lossy rule; tell the bias of the replay, and the quality.

    The predicted seconds price the rounds really decoded.  Further columns have what the replay
    along the recorded text would have said instead, and the quality of the output.

    A stopped check goes on where it stopped when the command is repeated.
    """
    policies, rule, systems = asked.methods(verify)
    if systems:
        raise DraftsimError(
            "methods with a draft source of their own are verified exactly: name other policies, "
            "or run them with `draftsim validate sources`"
        )
    if rule is None and memory is None:
        raise DraftsimError("no rule is named: add --verify RULE, or --memory FILE")
    kind = partial(LossyRuns, verify=rule or "csd", memory=memory, sampled=sampled)
    check(asked, kind, policies)


def engine(
    asked: CheckedRun,
    served: CheckedEngine,
    source: options.SourceOption = None,
    remeasure: RemeasureOption = False,
) -> None:
    """Serve the same requests in a real engine and in the simulator, and compare.

    --run is a folder of `draftsim profile engine`, in whose environment this runs.  Rounds and, in
    closed loops, iterations are to be equal; seconds are compared by load and by kind of iteration.
    --source names the recorded drafter whose drafts decide acceptance.  A larger --repeats extends
    a finished check.

    `machine` is how much slower a control load ran than when the engine was measured, and
    --remeasure measures it again between the runs.  `texts_diverged` counts requests whose
    text is not that of plain decoding.

    With --http the requests go to vLLM's HTTP server.  `request_s` and `iteration_s` are the
    seconds that it adds per request and per step, `share` their part of the request time.  They are
    predicted from control loads without speculation, which the table does not show.  `slowdown`
    is how much slower the engine ran than its latencies say.
    """
    served.check(asked.policy, remeasure)
    folder = asked.run
    with only_writer(folder, COPY) if folder.is_dir() else nullcontext():
        found = engine_check(
            served, folder, source, asked.policy, asked.repeats, asked.limit, remeasure
        )
    emit("validate", found, asked.json, show=columns_of(served, remeasure), out=asked.out)
    if asked.json is None:
        say_checked(served, found)


def recorded(
    recorded: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Recordings with measured runs: names of bundled ones, or folders that the GPU "
            "suite unpacked.",
        ),
    ],
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=placed, help="The tables, as Markdown.")
    ] = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Compare runs measured before with what their latencies predict; nothing is run.

    The comparison is by pair, mode, batch and policy.  A second table says, for each pair and mode,
    which bounds on the errors and on the order of policies are met.  `drift` is how much slower
    single passes were during those runs than when the latencies were measured.
    """
    recorded_check(recorded, markdown, json, out)
