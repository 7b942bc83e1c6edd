"""A recording to replay and price: outputs, drafter and latencies of one pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from policies.rules.base import VerifyRule
from simulator.chosen import load_rule
from traces.acceptance.survival import impute
from traces.acceptance.synthetic import PLAIN_DECODING
from traces.acceptance.trace import UNKNOWN, Trace
from traces.aliases import Say, silent
from traces.digits import counted
from traces.errors import DraftsimError, FileError
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.replay.calls import in_one_pass
from traces.sources.as_draft import check_drafts, drafted_latency, drafted_trace
from traces.sources.base import Source
from traces.sources.draft_model import DraftModelSource
from traces.sources.found import engine_source, find_recordings, own_source
from traces.sources.recording import Recordings
from traces.sources.registry import parse_source
from traces.sources.replay import check_rule, check_same_layers
from traces.store.identity import (
    ROLES,
    engine_head,
    is_named_by_folder,
    model_in,
    model_label,
    same_model,
)
from traces.store.operators import at_depths, in_graphs
from traces.store.recordings import (
    Defaulted,
    find_latency,
    find_trace,
    folder_of,
    models_of,
    pair_label,
)

COMMON_LENGTH = 8
"""Tokens that policies commonly draft up to."""
Tables = Mapping[str, LatencyTable]
Costs = str | LatencyTable | Tables | None
Models = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Recording:
    """A recording, and the drafter whose drafts are replayed."""

    name: str
    outputs: Trace
    """The target's outputs, with the draft model's drafts."""
    trace: Trace
    """The outputs with the drafts that are replayed."""
    tables: Tables
    """Latencies by name, as they were measured."""
    models: Models
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
    """True if the trace is made from acceptance by position (`observed_trace`)."""
    one_pass: bool = False
    """True if the drafter drafts all tokens of a round in one pass."""

    @property
    def latency(self) -> LatencyTable:
        """The one latency table, as it was measured; DraftsimError if there are several."""
        return only_table(self.tables)

    def priced(self, largest: int = 1, table: LatencyTable | None = None) -> LatencyTable:
        """Return a table (by default the only one) that prices the replayed drafts.

        Raises DraftsimError if it does not know the drafter's passes at batches up to `largest`,
        unless they are to cost the same at all, or if the drafter runs layers of another target.
        """
        table = self.latency if table is None else table
        if self.one_pass:
            table = in_one_pass(table)
        table = at_depths(table, model_in(self.outputs.meta, "target").get("layers"))
        if self.source is None:
            return table
        if self.source.runs_layers:
            check_same_layers(self.trace.source, self.outputs, table)
        priced = drafted_latency(table, self.source, self.recordings, self.assume_batch_free)
        priced.check_sizes("draft", "forward", largest, 1)
        return priced

    @property
    def said_free(self) -> str:
        """That drafts cost nothing, since the timed engine had no drafter; else empty."""
        drawn = self.outputs.meta.get("source") != PLAIN_DECODING
        of_a_model = self.outputs.meta.get("draft") is not None or (self.observed and drawn)
        engines = [table.meta.get("engine") for table in self.tables.values()]
        without = [e for e in engines if isinstance(e, Mapping) and not e.get("own_drafter")]
        if not without or not of_a_model or self.source is not None or self.stream is not None:
            return ""
        return ", where drafts cost nothing because the engine had no drafter"

    @property
    def drafter(self) -> Mapping[str, Any]:
        """The provenance of the source's recording; empty for a draft model, or a lookup."""
        if self.source is None or self.source.recorded_as is None:
            return {}
        meta: Mapping[str, Any] = self.source.recording(self.recordings).meta
        return meta

    @property
    def unpriced(self) -> str:
        """Name of the recording with its models and device."""
        return (PurePath(self.name).name or self.name) + in_brackets(self.label)

    @property
    def said(self) -> str:
        """Name of the recording with its models and device, and whose costs they are run at."""
        costs = ""
        if not self.tables:
            costs = ", at given cost ratios"
        elif list(self.tables) != [self.name]:
            # The device of a single table is in the label.
            alone = len(self.tables) == 1
            names = [
                short_name(name, table) + ("" if alone else in_brackets(device_of(table)))
                for name, table in self.tables.items()
            ]
            costs = f", at the costs of {' and '.join(names)}"
        return self.unpriced + costs + self.said_free

    @property
    def said_depths(self) -> str:
        """How single layers are priced if the latencies' target has more or fewer; else empty."""
        layers = model_in(self.outputs.meta, "target").get("layers")
        for table in self.tables.values():
            if "at_depths_of" in at_depths(table, layers).meta:
                own = model_in(table.meta, "target")["layers"]
                return (
                    f"single layers were recorded of a target with {layers} and are priced as the "
                    f"same share of {own}"
                )
        return ""

    def rule(self, verify: str | None, memory: Path | None = None) -> VerifyRule | None:
        """Return the rule that `verify` describes (`load_rule`).

        Raises DraftsimError if it asks for what is not known of the drafts.
        """
        rule = load_rule(verify, memory)
        if (source := self.stream or self.source) is not None:
            check_rule(rule, source, self.outputs)
        return rule

    def in_graphs(self, graphs: CUDAGraphs | None, largest: int) -> Recording:
        """Return the recording with its latencies in these graphs (`traces.store.operators`)."""
        tables = {name: in_graphs(t, graphs, largest) for name, t in self.tables.items()}
        return replace(self, tables=tables)

    def swept(self, ratios: Sequence[float], largest: int) -> dict[str, LatencyTable]:
        """Return every table that prices a sweep over batches up to `largest`, by name.

        Raises DraftsimError if a table does not know such batches, or if cost ratios are asked of
        them, or of a source without a cost per token.
        """
        if ratios and self.one_pass:
            raise DraftsimError(
                "--c is the cost of one drafted token, and --one-pass drafts all in one pass: give "
                "the cost of that pass as --latency const:target=1,draft=C"
            )
        if ratios and self.trace.drafts_end:
            raise DraftsimError(
                f"--c is the cost of one drafted token, and {self.trace.source} drafts all of a "
                "round at once: drop --c"
            )
        if ratios and largest > 1 and not self.assume_batch_free:
            raise DraftsimError(
                "--c gives the cost of a draft pass relative to a target pass, not that of a "
                "batch: leave --batch at 1, give --latency measured at batches, or take every "
                "batch to cost the same (--assume-batch-free)"
            )
        tables = {name: self.priced(largest, table) for name, table in self.tables.items()}
        for table in tables.values():
            table.check_sizes("target", "forward", largest, 1)
        return tables


def only_table(tables: Tables) -> LatencyTable:
    """Return the one table; DraftsimError if there are several."""
    if len(tables) != 1:
        raise DraftsimError(
            f"--latency holds {len(tables)} tables, expected one: name {', '.join(tables)}"
        )
    return next(iter(tables.values()))


def imputed(name: str, trace: Trace, chooses: str | None = None, say: Say = silent) -> Trace:
    """Return the trace called `name` with unknown positions imputed, and the result marked.

    Raises DraftsimError if that is a lower bound and what is called `chooses` would have to
    choose between policies by it.
    """
    if trace.meta.get("drawn"):
        say(
            f"{name}: {len(trace.requests)} requests are drawn from the profile's acceptance by "
            "position, without easy and hard stretches"
        )
    if not np.any(trace.columns["match"] == UNKNOWN):
        return trace
    if trace.meta.get("draft_lengths_known") is False:
        # Full accepts cannot be told from rejections: taken as these, a lower bound.
        if chooses is not None:
            raise DraftsimError(
                f"{name}: the log does not tell how long its drafts were, and {chooses} cannot "
                "choose between lower bounds: import it with --draft-lengths"
            )
        say(
            f"{name}: the log does not hold its draft lengths, so every speedup is a lower bound "
            "and nothing is ranked: name them with `draftsim import --draft-lengths`"
        )
        return impute(trace, 0, "rejected")
    try:
        filled = impute(trace)
    except DraftsimError as error:
        raise DraftsimError(f"{name}: {error}") from None
    seen = filled.meta["imputed"]["longest_seen"]
    if seen < COMMON_LENGTH:
        say(
            f"{name}: the longest verified draft has {counted(seen, 'token')}; longer ones are "
            "extrapolated"
        )
    return filled


def load_source(text: str | None) -> Source | None:
    """Return the source that `text` describes; None for the trace's own drafts."""
    try:
        source = parse_source(text or DraftModelSource.name)
    except ValueError as error:
        raise DraftsimError(str(error)) from None
    return None if isinstance(source, DraftModelSource) else source


def load_recording(
    name: str | Trace, latency: Costs = None, source: str | None = None, *,
    acceptance: str | Sequence[float] | None = None, sizes: Mapping[str, int] | None = None,
    plain: bool = False, by_ratio: bool = False, one: bool = True, one_stream: bool = False,
    one_pass: bool = False, assume_batch_free: bool = False, chooses: str | None = None,
    carry: Callable[[Tables], Tables] | None = None, from_environment: bool = False,
    takes_acceptance: bool = True, say: Say = silent,
) -> Recording:  # fmt: skip
    """Return the recording that is asked for, the latencies to price it with, and who drafts.

    All commands and Python take recordings from here, so that all of them draft with the same
    drafter: the `source` named, else the one that the latencies were measured with, else the one
    that the recording's own latencies were measured with.

    Parameters
    ----------
    name:
        Trace file, run folder or bundled recording, or a trace.
    latency:
        A name, a table, or tables by name; None: the recording's own.
    acceptance, sizes:
        Instead of a recording: acceptance by position (`observed_trace`).
    plain, by_ratio:
        True if only plain decoding is asked for, so that named latencies need no recording, and if
        cost ratios price the rounds where no latency is named.
    one:
        True if exactly one table is expected.
    one_stream:
        True if a `source` named may be any: unless it is the recording's own, the caller replays
        it one request at a time (`Recording.stream`).
    one_pass, assume_batch_free:
        True if the drafter, which is not recorded, drafts all tokens of a round in one pass, and if
        latencies of one batch size hold for every other.
    chooses:
        The command that could not choose between lower bounds (`imputed`).
    carry:
        Carries the tables over to another device, which needs the models' shapes; applied if `one`.
    from_environment:
        True if the environment names the default recording.
    takes_acceptance:
        True if the caller may be given `acceptance`, which an error then recommends.
    say:
        Told which drafter drafts, and whose acceptance is priced at whose costs.

    Raises DraftsimError if the latencies are of other models than a recording that the user did not
    name, the drafts of the source were not recorded, or one of its parts raises it.
    """
    given, named = latency is not None, not isinstance(name, Defaulted) and not from_environment
    observed = acceptance is not None or (plain and given and not named)
    alone = isinstance(name, Trace) and not observed
    option = name.option if isinstance(name, Defaulted) and not observed else None
    if observed:
        from simulator.aggregate.observed import observed_trace, plain_trace
    if acceptance is not None:
        called, outputs = observed_trace(
            acceptance, say, sizes, source=source, costs=given or by_ratio,
            named=None if not named else "object" if isinstance(name, Trace) else name,
        )  # fmt: skip
    elif observed:
        called, outputs = plain_trace(sizes)
    elif not isinstance(name, Trace):
        called, outputs = name, find_trace(name)
    elif source is not None:
        by = "give the trace by its name, or one of traces.sources.find_drafted"
        raise DraftsimError(f"--source chooses the drafter of a named recording: {by}")
    elif not given and not by_ratio:
        raise DraftsimError("a trace alone does not say what passes cost: give --latency as well")
    else:
        called, outputs = "trace", name
    told: list[str] = []
    tables = load_tables(latency, called, by_ratio, assume_batch_free, told.append)
    if one:
        only_table(tables)
    stream, drafter = load_source(source) if one_stream else None, None
    recordings: Recordings = {}
    if alone:  # no folder holds other drafts of it
        for table in tables.values():
            if outputs.source == DraftModelSource.name:
                own_source(table, outputs, {})
            else:
                table.drafter(outputs.drafter)
    elif stream is not None and not observed:
        recordings = find_recordings(called, outputs)
        if _is_own(stream, next(iter(tables.values())), recordings):
            stream, drafter = None, stream
    elif not observed:
        drafter, recordings = _drafter(called, outputs, tables, source, given, option is None, say)
    chosen = stream if drafter is None else drafter
    if chosen is not None:
        recordings = chosen.completed(outputs, recordings)
    models: Models = {role: model_in(outputs.meta, role) for role in ROLES}
    if observed:
        models = {**models, "draft": {}}
    elif not alone:
        models = models_of(called, outputs)
    if given:
        check_models(called, models, tables, drafter, option, say, takes_acceptance)
    for line in [*told, *(str(t.meta["remark"]) for t in tables.values() if t.meta.get("remark"))]:
        say(line)
    if one_pass and chosen is not None:
        raise DraftsimError(
            "--one-pass is for acceptance without a known drafter, and the passes of "
            f"{chosen.name} are known: drop it"
        )
    if carry is not None:
        check_carried(drafter, recordings, one_pass)
        tables = carry(tables) if one else tables
    trace = outputs = imputed(called, outputs, chooses, say)
    if drafter is not None:
        check_drafts(drafter, recordings)
        trace = drafted_trace(outputs, drafter, recordings)
        say(f"drafting with {trace.source}, {trace.said_longest}")
    by = trace.source if drafter is not None else "" if stream is None else stream.label(recordings)
    label = _label(models, tables, by, is_drawn(outputs))
    found = Recording(
        called, outputs, trace, tables, models, label, drafter, recordings, assume_batch_free,
        stream, observed, one_pass,
    )  # fmt: skip
    if chosen is not None and chosen.runs_layers and found.said_depths:
        say(found.said_depths)
    return found


def load_tables(
    latency: Costs, name: str, by_ratio: bool, assume_batch_free: bool, say: Say
) -> Tables:
    """Return the latencies of `load_recording`; `say` is told how they are known.

    Raises DraftsimError if none is named, and the recording is a file by itself.
    """
    if isinstance(latency, LatencyTable):
        tables: Tables = {GIVEN: latency}
    elif isinstance(latency, str) or (latency is None and not by_ratio):
        if latency is None and folder_of(name) is None:
            raise DraftsimError(
                f"{name} says nothing of what passes cost: give --latency: a run folder, a "
                "recording (`draftsim list`) or const:target=SECONDS,draft=SECONDS"
            )
        named = name if latency is None else latency
        tables = {named: find_latency(named)}
    else:
        tables = latency or {}
    for said in dict.fromkeys(table.meta.get("said") for table in tables.values()):
        if said:
            say(str(said))
    if assume_batch_free:
        tables = {label: table.assumed_batch_free() for label, table in tables.items()}
    return tables


def check_carried(drafter: Source | None, recordings: Recordings, one_pass: bool = False) -> None:
    """Raise DraftsimError if the drafter's passes cannot be extrapolated to another device."""
    if drafter is None and not one_pass:
        return
    lacks = "with --one-pass the drafter's is not known: drop them" if drafter is None else (
        f"that of {drafter.label(recordings)} is not kept: measure on the GPU (`draftsim profile "
        "--device cuda`), or give a recording of a draft model"
    )  # fmt: skip
    raise DraftsimError(f"--gpu and --weights extrapolate by the models' shapes, and {lacks}")


def _drafter(
    name: str, outputs: Trace, tables: Tables, source: str | None, given: bool, chosen: bool,
    say: Say,
) -> tuple[Source | None, Recordings]:  # fmt: skip
    """Return the source that drafts, and the recordings of sources along the outputs.

    None is for the drafts of the trace itself; ``chosen`` is True if the user named the recording.
    """
    told = {n: t for n, t in tables.items() if (t.meta.get("engine") or {}).get("own_drafter")}
    heads = {label: engine_head(table.meta) for label, table in told.items()}
    if source is not None:
        drafter = load_source(source)
        of = next((label for label, head in heads.items() if head is not None), None)
        if drafter is None and of is not None and outputs.meta.get("draft") is not None:
            raise DraftsimError(
                f"--source {source}: {_latencies_of(of)} are those of {heads[of]}, without "
                "passes of the draft model: drop --source, or name a recording of the draft model "
                "(`draftsim list`)"
            )
        return drafter, {} if drafter is None else find_recordings(name, outputs)
    if len(set(heads.values())) > 1:
        pairs = ", ".join(f"{head or 'a draft model'} ({label})" for label, head in heads.items())
        raise DraftsimError(f"the latencies are of several drafters, {pairs}: name one")
    own = _own_latency(name) if given or not tables else next(iter(tables.values()))
    deciding = next(iter(told.values()), own)
    before = None if own is None else engine_head(own.meta)
    head = None if deciding is None else engine_head(deciding.meta)
    if given and before != head and own is not None and chosen:
        say(
            f"drafting with {head or 'the draft model'}, like {_latencies_of(next(iter(told)))}; "
            f"{name} was measured with {before or 'the draft model'}"
        )
    if deciding is None or head is None:
        return None, {}
    recordings = find_recordings(name, outputs)
    return own_source(deciding, outputs, recordings), recordings


def _is_own(source: Source, latency: LatencyTable, recordings: Recordings) -> bool:
    """Return whether a source is the head that an engine ran while `latency` was measured."""
    own = engine_source(latency)
    if own is None or source.name != own.name:
        return False
    try:
        return source.recorded(recordings) == own.key
    except DraftsimError:
        return False  # none recorded, or several that fit: said where it is replayed


def _own_latency(name: str) -> LatencyTable | None:
    """Return the latencies in the folder of the recording with this name, if there are any."""
    with suppress(FileError):
        return None if folder_of(name) is None else find_latency(name)
    return None


GIVEN = "the given latencies"
"""Name of latencies that were given as an object."""


def _latencies_of(label: str) -> str:
    return label if label == GIVEN else f"the latencies of {label}"


def check_models(
    name: str, known: Models, tables: Tables, drafter: Source | None,
    option: str | None, say: Say, takes_acceptance: bool = True,
) -> None:  # fmt: skip
    """Refuse latencies of other models than a recording that the user did not name.

    Where the user named both, a note says whose acceptance and whose costs are used.  Latencies
    that were recorded with the same trace fit, whatever an engine called their models.
    """
    pair = pair_label(known, {}) or "models it does not name"
    costs: list[str] = []
    for label, table in tables.items():
        if _share_trace(name, label):
            continue
        said = {role: model_in(table.meta, role) for role in ROLES}
        roles = ROLES[:1] if drafter is not None or engine_head(table.meta) else ROLES
        same = {role: same_model(known[role], said[role]) for role in ROLES}
        if is_named_by_folder(said):  # another name of the folder is no other model
            same = {role: found or None for role, found in same.items()}
        differ = [role for role in roles if same[role] is False]
        told = same["target"] is not None or table.is_constant
        if differ:
            other = f"{' and '.join(differ)} {'differ' if len(differ) > 1 else 'differs'}"
            whose = " + ".join(filter(None, map(model_label, said.values())))
            costs.append(f"{label} ({whose}: the {other})")
            wrong = f": the {other} from the default recording's, {name} ({pair})"
        elif known["target"] and not (told and (said["target"] or option is None)):
            unnamed = "do not name their" if label == GIVEN else "does not name its"
            another = f"; {option} names another recording" if label != GIVEN else ""
            costs.append(label + (another if option else f", which {unnamed} models"))
            wrong = f" {unnamed} models, and the default recording {name} is of {pair}"
        else:
            continue
        if option is not None and (differ or not table.is_constant):
            remedy = ""
            if label != GIVEN and _has_trace(label):
                remedy = f", {option} {label}"
            elif label != GIVEN and takes_acceptance:
                remedy = (
                    f", {option} RUN, or add its acceptance, --acceptance 0.72,0.50,0.33 from your "
                    f"server's log ({option} {name} borrows that pair's)"
                )
            elif label != GIVEN:
                remedy = f", {option} RUN ({option} {name} borrows that pair's acceptance)"
            raise DraftsimError(
                f"{label if label == GIVEN else f'--latency {label}'}{wrong}: name the recording "
                f"to draft from{remedy}"
            )
    if costs:
        whose = name.removeprefix("acceptance of ")
        say(f"acceptance of {whose} ({pair}) at the costs of {', '.join(costs)}")


def _share_trace(name: str, label: str) -> bool:
    """Return True if latencies and a recording, by name, are recorded with one trace.

    Only the latency.parquet of a folder is recorded with the folder's trace.
    """
    path = Path(label)
    with suppress(FileError):
        folder = folder_of(path.parent if path.name == "latency.parquet" else label)
        return folder is not None and folder == folder_of(name)
    return False


def _has_trace(label: str) -> bool:
    """Return True if the name of latencies is a recording's, with a pair's own trace as well."""
    with suppress(FileError):
        return folder_of(label) is not None and not is_drawn(find_trace(label))
    return False


def is_drawn(trace: Trace) -> bool:
    """Return True if a trace's verdicts were drawn by a random process, and are no model's."""
    return trace.meta.get("kind") == "synthetic"


def _label(models: Models, tables: Tables, drafter: str, drawn: bool) -> str:
    """Return target, drafter, engine and device in a few words; `drawn`: the trace is synthetic."""
    found = [(dict(table.meta), device_of(table)) for table in tables.values()]
    measured, device = found[0] if len(found) == 1 else ({}, "")
    pair = pair_label(models, measured, drafter.rpartition("model=")[2])
    if drawn:
        # Verdicts dictated to models of random weights: no acceptance of the pair that was timed.
        shapes, mode = measured.get("pair"), measured.get("mode")
        pair = " in ".join(filter(None, (shapes, mode)))
        pair = f"synthetic acceptance, costs of {pair}" if pair else "synthetic acceptance"
    return ", ".join(filter(None, (pair, device)))


def said_costs(name: str, table: LatencyTable) -> str:
    """Return the name of latencies with their models and device, in a few words."""
    pair = pair_label({role: model_in(table.meta, role) for role in ROLES}, table.meta)
    return short_name(name, table) + in_brackets(pair, device_of(table))


def short_name(name: str, table: LatencyTable) -> str:
    """Return the name of latencies without their folder."""
    return name if "composed" in table.meta else PurePath(name).name or name


def device_of(table: LatencyTable) -> str:
    """Return the device of latencies, and the weights there if they were carried over.

    Empty for constants, and if it is not known.
    """
    device = "" if table.is_constant else str(table.meta.get("device") or "")
    note = table.meta.get("scaled")
    if not isinstance(note, Mapping):
        return device
    there = device if device == note["from"] else f"scaled to {device}"
    return ", ".join([
        there, *(f"{role} in {form}" for role, form in note["weights"].items())
    ])  # fmt: skip


def in_brackets(*parts: str) -> str:
    """Return the parts that are not empty in brackets, after a blank; empty if there is none."""
    known = ", ".join(filter(None, parts))
    return f" ({known})" if known else ""
