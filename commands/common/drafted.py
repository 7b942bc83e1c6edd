"""The recordings of the command line, and options that say who drafts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.devices import carried, latencies
from commands.common.inputs import TRACE_VARIABLE, Defaulted
from commands.common.output import note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.recording import Recording

DraftedOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="S",
        help="Draft with this source, recorded by start: eagle:model=NAME, medusa, blockwise, "
        "specdec, layer-skip, or draft-model. Default: the drafter that the latencies were "
        "measured with.",
    ),
]


def load_recording(
    name: str, latency: str | Sequence[str] | None, source: str | None = None, *,
    acceptance: str | None = None, chooses: str | None = None, gpu: str | None = None,
    weights: str | None = None, assume_batch_free: bool = False, by_ratio: bool = False,
    one: bool = True, one_stream: bool = False, one_pass: bool = False, plain: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Recording:  # fmt: skip
    """Return the recording called `name` (`simulator.recording.load_recording`), with its notes.

    The first note says whose acceptance is priced at whose costs, if the models differ.
    ``latency`` are the latencies named, None the recording's own, unless cost ratios price it
    (``by_ratio``); with `gpu` or `weights` one table is carried over there.  ``acceptance`` by
    position takes the recording's place (`read_acceptance`).  If only plain decoding is asked for
    (``plain``) at named latencies, no recording is needed.  ``sizes`` are the prompt and output
    tokens of requests that are not a recording's (`trace_by_position`).
    """
    from simulator import recording
    from traces.store.recordings import find_trace

    made_up = acceptance is not None
    first: list[str] = []
    notes: list[str] = []
    say = notes.append
    carry = partial(carried, gpu=gpu, weights=weights, say=say) if gpu or weights else None
    given = [latency] if isinstance(latency, str) else list(latency or ())
    try:
        if acceptance is not None:
            _check_alone(name, source, given, by_ratio)
            named, outputs = recording.observed_trace(acceptance, say, sizes)
            option = None
        elif plain and given and isinstance(name, Defaulted):
            made_up = True
            named, outputs = recording.plain_trace(sizes)
            option = None
        else:
            if sizes:
                raise DraftsimError(
                    f"the requests of {name} have lengths of their own: --prompt and --output go "
                    "with --acceptance, or with --policy autoregressive at a named --latency"
                )
            named, outputs = name, find_trace(name)
            option = name.option if isinstance(name, Defaulted) else None
        return recording.load_recording(
            named, outputs, latencies(given, named, by_ratio, assume_batch_free, say), source,
            given=bool(given), option=option, chooses=chooses, carry=carry,
            assume_batch_free=assume_batch_free, one=one, one_stream=one_stream,
            one_pass=one_pass, observed=made_up, say=say, announce=first.append,
        )  # fmt: skip
    finally:
        for line in (*first, *notes):
            note(line)


def _check_alone(name: str, source: str | None, given: Sequence[str], by_ratio: bool) -> None:
    """Refuse options that name another acceptance, or no costs."""
    if not isinstance(name, Defaulted) and name != os.environ.get(TRACE_VARIABLE):
        raise DraftsimError(f"--acceptance and --trace {name} are two acceptances: give one")
    if source is not None:
        raise DraftsimError(f"--source {source}: --acceptance is that of your drafter: drop one")
    if not given and not by_ratio:
        raise DraftsimError(
            "--acceptance says nothing of what passes cost: name --latency, such as costs of "
            "`draftsim calibrate RUNS --out FILE` or const:target=SECONDS,draft=SECONDS"
        )
