"""A recording as commands replay and price it: outputs, drafter and latencies of one pair."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.devices import carried, latencies
from commands.common.inputs import TRACE_VARIABLE, Defaulted, imputed
from commands.common.output import note
from commands.common.sources import load_source
from traces.errors import DraftsimError, FileError

if TYPE_CHECKING:
    from policies.rules.base import VerifyRule
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.sources.base import Recordings, Source

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


@dataclass(frozen=True, eq=False)
class Recording:
    """A recording, and the drafter whose drafts are replayed."""

    name: str
    outputs: Trace
    """The target's outputs, with the draft model's drafts."""
    trace: Trace
    """The outputs with the drafts that are replayed."""
    tables: Mapping[str, LatencyTable]
    """Latencies by name, as they were measured."""
    models: Mapping[str, Mapping[str, Any]]
    """Names, sizes and fingerprints of the target and the draft model, by role."""
    label: str
    """Target, drafter, engine and device, in a few words; empty where none is known."""
    source: Source | None
    """Drafts in the draft model's place; None: the draft model."""
    recordings: Recordings
    assume_batch_free: bool = False
    stream: Source | None = None
    """Source to replay one request at a time instead, where another than its own was named."""
    observed: bool = False
    """True if the trace is made from acceptance by position (`--acceptance`)."""
    one_pass: bool = False
    """True if the drafter drafts all tokens of a round in one pass (`--one-pass`)."""

    @property
    def latency(self) -> LatencyTable:
        """The one latency table, as it was measured.

        Raises DraftsimError if there are several.
        """
        if len(self.tables) != 1:
            raise DraftsimError(
                f"--latency holds {len(self.tables)} tables, expected one: name "
                f"{', '.join(self.tables)}"
            )
        return next(iter(self.tables.values()))

    def priced(self, largest: int = 1, table: LatencyTable | None = None) -> LatencyTable:
        """Return a table (by default the only one) that prices the replayed drafts.

        Raises DraftsimError if it does not know the drafter's passes at batches up to `largest`,
        unless they are to cost the same at all, or if the drafter runs layers of another target.
        """
        from traces.replay.always import in_one_pass
        from traces.sources.replay import check_same_layers
        from traces.sources.starts.as_draft import drafted_latency
        from traces.sources.starts.sources import LayerSkip

        table = self.latency if table is None else table
        if self.one_pass:
            table = in_one_pass(table)
        if self.source is None:
            return table
        if isinstance(self.source, LayerSkip):
            check_same_layers(self.trace.source, self.outputs, table)
        priced = drafted_latency(table, self.source, self.recordings, self.assume_batch_free)
        priced.check_sizes("draft", "forward", largest, 1)
        return priced

    @property
    def drafter(self) -> Mapping[str, Any]:
        """The provenance of the source's recording; empty for a draft model."""
        from traces.sources.starts.as_draft import check_drafts

        return {} if self.source is None else check_drafts(self.source, self.recordings).meta

    @property
    def said(self) -> str:
        """Name of the recording with its models and device, and whose costs they are run at."""
        names = [PurePath(name).name or name for name in (self.name, *self.tables)]
        costs = ""
        if self.tables and list(self.tables) != [self.name]:
            costs = f", at the costs of {' and '.join(names[1:])}"
        return names[0] + (f" ({self.label})" if self.label else "") + costs

    def check_rule(self, rule: VerifyRule | None) -> None:
        """Raise DraftsimError if `rule` asks for what is not known of the drafts."""
        from traces.sources.replay import check_rule

        if self.source is not None:
            check_rule(rule, self.source, self.outputs)

    def check_ratios(self, ratios: Sequence[float]) -> None:
        """Raise DraftsimError if cost ratios are asked of a source without a cost per token."""
        if ratios and self.one_pass:
            raise DraftsimError(
                "--c is the cost of a drafted token, and with --one-pass they have one pass: give "
                "--latency, const:target=1,draft=C"
            )
        if ratios and self.trace.drafts_end:
            raise DraftsimError(
                f"--c is the cost of a drafted token, and {self.trace.source} drafts all of a "
                "round's at once: leave it out"
            )


def load_recording(
    name: str, latency: str | Sequence[str] | None, source: str | None = None, *,
    acceptance: str | None = None, chooses: str | None = None, gpu: str | None = None,
    weights: str | None = None, assume_batch_free: bool = False, by_ratio: bool = False,
    one: bool = True, one_stream: bool = False, one_pass: bool = False,
) -> Recording:  # fmt: skip
    """Return the recording called `name`, the latencies to price it with, and who drafts.

    Every command takes recordings from here, so that all of them draft with the same drafter: the
    `source` named, else the one that the latencies were measured with, else the one that the
    recording's own latencies were measured with.

    Parameters
    ----------
    name:
        Trace file, run folder or bundled recording; `Defaulted` where the user named none.
    latency:
        The latencies named; None stands for the recording's own.
    acceptance:
        Acceptance by position to take instead of a recording's (`read_acceptance`).
    chooses:
        What could not choose between lower bounds (`imputed`).
    gpu, weights:
        Where the one table is carried over to; with ``one=False`` only checked.
    by_ratio:
        Whether cost ratios price where no latencies are named.
    one:
        Whether exactly one table is expected.
    one_stream:
        Whether a `source` named may be any: the caller replays it one request at a time
        (`Recording.stream`), unless it is the recording's own.

    Raises
    ------
    DraftsimError
        If the latencies are of other models than a recording that the user did not name, the
        drafts of the source were not recorded, or as of the parts.
    """
    from traces.sources.base import Recordings
    from traces.sources.found import find_recordings
    from traces.sources.starts.as_draft import check_drafts, drafted_trace
    from traces.store.identity import model_in
    from traces.store.recordings import find_trace, models_of

    given = [latency] if isinstance(latency, str) else list(latency or ())
    if acceptance is not None:
        _check_alone(name, source, given, by_ratio)
        name, outputs = _observed(acceptance)
    else:
        outputs = find_trace(name)
    tables = latencies(given, name, by_ratio, assume_batch_free)
    if one and len(tables) != 1:
        raise DraftsimError(
            f"--latency {', '.join(given)} holds {len(tables)} tables, expected one: name "
            f"{', '.join(tables)}"
        )
    stream = load_source(source) if one_stream and source is not None else None
    if acceptance is not None:
        drafter, recordings = None, Recordings()
    elif stream is None:
        drafter, recordings = _drafter(name, outputs, tables, source, bool(given))
    else:
        drafter, recordings = None, find_recordings(name, outputs)
        if _is_own(stream, next(iter(tables.values())), recordings):
            stream, drafter = None, stream
    for chosen in (drafter, stream):
        if chosen is not None:
            recordings = chosen.completed(outputs, recordings)
    if acceptance is not None:
        models = {"target": model_in(outputs.meta, "target"), "draft": {}}
    else:
        models = models_of(name, outputs)
    if given:
        _check_models(name, models, tables, drafter)
    for table in tables.values():
        if remark := table.meta.get("remark"):
            note(str(remark))
    if one_pass and (drafter is not None or stream is not None):
        raise DraftsimError(
            "--one-pass is for acceptance that comes without its drafter: "
            f"{(drafter or stream).name} has passes of its own"  # type: ignore[union-attr]
        )
    if drafter is not None and (gpu or weights):
        raise DraftsimError(
            f"--gpu and --weights carry latencies over by the models' shapes, and that of "
            f"{drafter.label(recordings)} is not kept: measure it there (`draftsim profile "
            "--device cuda`), or give a recording of a draft model"
        )
    if one:
        tables = carried(tables, gpu, weights)
    trace = outputs = imputed(name, outputs, chooses)
    if drafter is not None:
        check_drafts(drafter, recordings)
        trace = drafted_trace(outputs, drafter, recordings)
        note(f"drafting with {trace.source}, drafts of up to {trace.max_gamma} tokens")
    by = trace.source if stream is None else stream.label(recordings)
    label = _label(models, tables, "" if drafter is None and stream is None else by)
    return Recording(
        name, outputs, trace, tables, models, label, drafter, recordings, assume_batch_free,
        stream, acceptance is not None, one_pass,
    )  # fmt: skip


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


def _observed(text: str) -> tuple[str, Trace]:
    """Return a name and a trace of acceptance that a server counted; a note says whose it is."""
    from simulator.aggregate.observed import read_acceptance
    from traces.acceptance.synthetic import trace_by_position

    found = read_acceptance(text)
    trace = trace_by_position(found.survival, **found.sizes, meta=found.meta)
    one = trace.requests[0]
    note(
        f"{found.said}: {len(trace.requests)} requests of {one.prompt_length} prompt and "
        f"{one.tokens} output tokens, rounds drawn independently, drafts of up to "
        f"{trace.max_gamma} tokens"
    )
    return found.named, trace


def _drafter(
    name: str, outputs: Trace, tables: Mapping[str, LatencyTable], source: str | None, given: bool
) -> tuple[Source | None, Recordings]:
    """Return the source that drafts, and what was recorded of sources beside the outputs.

    None stands for the drafts of the trace itself.
    """
    from traces.sources.base import Recordings
    from traces.sources.found import find_recordings, own_source
    from traces.store.identity import engine_head

    told = {n: t for n, t in tables.items() if (t.meta.get("engine") or {}).get("own_drafter")}
    heads = {label: engine_head(table.meta) for label, table in told.items()}
    if source is not None:
        drafter = load_source(source)
        of = next((label for label, head in heads.items() if head is not None), None)
        if drafter is None and of is not None and outputs.meta.get("draft") is not None:
            raise DraftsimError(
                f"--source {source}: the latencies of {of} are of drafting with {heads[of]}, and "
                "have no passes of the draft model: drop --source, or name a recording of the "
                "draft model (`draftsim list`)"
            )
        return drafter, Recordings() if drafter is None else find_recordings(name, outputs)
    if len(set(heads.values())) > 1:
        pairs = ", ".join(f"{head or 'a draft model'} ({label})" for label, head in heads.items())
        raise DraftsimError(f"the latencies are of several drafters: {pairs}: name one at a time")
    own = _own_latency(name) if given or not tables else next(iter(tables.values()))
    deciding = next(iter(told.values()), own)
    before = None if own is None else engine_head(own.meta)
    head = None if deciding is None else engine_head(deciding.meta)
    if given and before != head and own is not None and not isinstance(name, Defaulted):
        note(
            f"drafting with {head or 'the draft model'}, as the latencies of {next(iter(told))}; "
            f"{name} was measured with {before or 'the draft model'}"
        )
    if deciding is None or head is None:
        return None, Recordings()
    recordings = find_recordings(name, outputs)
    return own_source(deciding, outputs, recordings), recordings


def _is_own(source: Source, latency: LatencyTable, recordings: Recordings) -> bool:
    """Return whether a source is the head that an engine ran while `latency` was measured."""
    from traces.sources.starts.features import Eagle
    from traces.store.identity import engine_head

    head = engine_head(latency.meta)
    if head is None or not isinstance(source, Eagle):
        return False
    try:
        return source.recorded(recordings) == Eagle(head).key
    except DraftsimError:
        return False  # none recorded, or several that fit: said where it is replayed


def _own_latency(name: str) -> LatencyTable | None:
    """Return the latencies in the folder that a recording's name stands for, if there are any."""
    from traces.store.recordings import find_latency, folder_of

    if folder_of(name) is None:
        return None
    try:
        return find_latency(name)
    except FileError:
        return None


def _check_models(
    name: str, known: Mapping[str, Mapping[str, Any]], tables: Mapping[str, LatencyTable],
    drafter: Source | None,
) -> None:  # fmt: skip
    """Refuse latencies of other models than a recording that the user did not name.

    Where the user named both, a note says whose acceptance and whose costs are used.
    """
    from traces.store.identity import ROLES, engine_head, model_in, model_label, same_model
    from traces.store.recordings import pair_label

    pair = pair_label(known, {}) or "models it does not name"
    costs: list[str] = []
    for label, table in tables.items():
        said = {role: model_in(table.meta, role) for role in ROLES}
        roles = ROLES[:1] if drafter is not None or engine_head(table.meta) else ROLES
        differ = [role for role in roles if same_model(known[role], said[role]) is False]
        whose = " + ".join(filter(None, map(model_label, said.values())))
        told = same_model(known["target"], said["target"]) is not None or table.is_constant
        if differ:
            other = f"{' and '.join(differ)} {'differ' if len(differ) > 1 else 'differs'}"
            if isinstance(name, Defaulted):
                raise DraftsimError(
                    f"--latency {label}: the {other} from the default recording's, {name} "
                    f"({pair}): name the recording to draft from, {name.option} "
                    f"{label if _has_trace(label) else 'RUN'}"
                )
            costs.append(f"{label} ({whose}: the {other})")
        elif isinstance(name, Defaulted) and known["target"] and not (told and said["target"]):
            if not table.is_constant:
                raise DraftsimError(
                    f"--latency {label} does not say whose costs it holds, and the default "
                    f"recording {name} is of {pair}: name the recording whose drafts are accepted "
                    f"as yours are, {name.option} RUN (`draftsim import` makes one from a server's "
                    f"log; {name.option} {name} for this one)"
                )
            costs.append(f"{label}; {name.option} names another recording")
        elif known["target"] and not told:
            costs.append(f"{label}, which does not say whose they are")
    if costs:
        note(f"acceptance of {name} ({pair}) at the costs of {', '.join(costs)}")


def _has_trace(label: str) -> bool:
    """Return whether the name of latencies stands for a recording with a trace as well."""
    from traces.store.recordings import folder_of

    try:
        return folder_of(label) is not None
    except FileError:
        return False


def _label(
    models: Mapping[str, Mapping[str, Any]], tables: Mapping[str, LatencyTable], drafter: str
) -> str:
    """Return target, drafter, engine and device in a few words."""
    from traces.store.recordings import pair_label

    metas = [table.meta for table in tables.values()] if len(tables) == 1 else [{}]
    measured = dict(metas[0])
    pair = pair_label(models, measured, drafter.rpartition("model=")[2])
    device = "" if measured.get("kind") == "constant" else str(measured.get("device") or "")
    return ", ".join(filter(None, (pair, device)))
