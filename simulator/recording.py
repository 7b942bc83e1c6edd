"""A recording to replay and price: outputs, drafter and latencies of one pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.rules.base import VerifyRule
from simulator.chosen import Say, Text, load_rule, one_rule, silent
from traces.acceptance.survival import impute
from traces.acceptance.synthetic import OUTPUT, trace_by_position
from traces.acceptance.trace import UNKNOWN, Trace
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
from traces.store.recordings import find_latency, find_trace, folder_of, models_of, pair_label

if TYPE_CHECKING:
    from simulator.aggregate.positions import Positions

FEWEST, REQUESTS = 20, 200
"""Requests that acceptance by position is replayed as: at least for an interval, and at most."""
COMMON_LENGTH = 8
"""Tokens that policies commonly draft up to."""
Tables = Mapping[str, LatencyTable]
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

    def alike(
        self, texts: Sequence[Text] | None, verify: str | None, memory: Path | None = None,
        say: Say = silent,
    ) -> tuple[Sequence[Text] | Sequence[str] | None, VerifyRule | None]:  # fmt: skip
        """Return policies and the rule by which all of them are verified (`one_rule`, `rule`)."""
        policies, verify = one_rule(texts, verify, say)
        return policies, self.rule(verify, memory)

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


def observed_trace(
    told: str | Sequence[float], say: Say = silent, sizes: Mapping[str, int] | None = None, *,
    named: str | None = None, source: str | None = None, costs: bool = True,
) -> tuple[str, Trace]:  # fmt: skip
    """Return a name and a trace of acceptance that a server counted; `say` is told whose it is.

    ``told`` is a text as `read_acceptance` takes, or chances that the first 1, 2, ... tokens are
    all accepted.  ``sizes`` are the requests' ``prompt_length`` and ``tokens``, by default the
    server's.

    Raises DraftsimError if it cannot be read, a recording (`named`) or a `source` was named as
    well, or nothing says what passes cost (`costs`).
    """
    if named is not None:
        raise DraftsimError(f"--acceptance and --trace {named} are two acceptances: give one")
    if source is not None:
        raise DraftsimError(
            f"--acceptance is that of your drafter, and --source {source} names one: drop one"
        )
    if not costs:
        raise DraftsimError(
            "--acceptance says nothing of what passes cost: give --latency, such as costs of "
            "`draftsim calibrate RUNS --out FILE` or const:target=SECONDS,draft=SECONDS"
        )
    from simulator.aggregate.observed import read_acceptance
    from simulator.aggregate.positions import of_survival

    found = (
        read_acceptance(told) if isinstance(told, str)
        else of_survival(",".join(f"{chance:g}" for chance in told), told)
    )  # fmt: skip
    size = {**found.sizes, **(sizes or {})}
    alike = _alike(found, size.get("tokens", OUTPUT))
    trace = trace_by_position(
        found.survival, requests=min(max(alike, FEWEST), REQUESTS), meta=found.meta, **size
    )
    one = trace.requests[0]
    say(
        f"{found.said}: {counted(len(trace.requests), 'request')} of {one.prompt_length} prompt "
        f"and {one.tokens} output tokens, rounds drawn independently, {said_longest(trace)}"
    )
    if found.error is not None:
        say(
            f"{found.label}: tokens per round are known to within ±{found.error:.1%} (95%) from "
            f"{counted(found.rounds or 0, 'round')}"
            + (", too few for the intervals, which are narrower" if alike < FEWEST else "")
        )
    if found.note:
        say(f"{found.label}: {found.note}")
    return found.named, trace


def _alike(found: Positions, tokens: int) -> int:
    """Return how many requests of that many output tokens have the rounds that were counted.

    Intervals over this many requests are as wide as the counts are uncertain.
    """
    if found.rounds is None:
        return REQUESTS
    return round(found.rounds * (1 + sum(found.survival)) / tokens)


def said_longest(trace: Trace) -> str:
    """Return in words how long the recorded drafts are at most."""
    if trace.max_gamma is None:
        return "drafts of any length"
    return f"drafts of up to {counted(trace.max_gamma, 'token')}"


PLAIN_DECODING = "plain decoding"
"""Source of a trace that drafts nothing."""


def plain_trace(sizes: Mapping[str, int] | None = None) -> tuple[str, Trace]:
    """Return a name and a trace for plain decoding, which drafts nothing.

    ``sizes`` are the requests' ``prompt_length`` and ``tokens`` (`trace_by_position`); None if a
    file of arrivals has them.
    """
    trace = trace_by_position((0.0,), **(sizes or {}), meta={"source": PLAIN_DECODING})
    one = trace.requests[0]
    if sizes is None:
        return PLAIN_DECODING, trace
    return f"requests of {one.prompt_length} prompt and {one.tokens} output tokens", trace


def load_latency(name: str | None, trace_name: str, say: Say = silent) -> LatencyTable:
    """Return the latency table called `name`, by default the one recorded with the trace.

    ``say`` is told how the table is known.
    Raises DraftsimError if the trace is a file by itself, as in a log, and none is named.
    """
    if name is None and folder_of(trace_name) is None:
        raise DraftsimError(
            f"{trace_name} says nothing of what passes cost: give --latency: a run folder, a "
            "recording (`draftsim list`) or const:target=SECONDS,draft=SECONDS"
        )
    table = find_latency(trace_name if name is None else name)
    if said := table.meta.get("said"):
        say(str(said))
    return table


def load_source(text: str | None) -> Source | None:
    """Return the source that `text` describes; None for the trace's own drafts."""
    try:
        source = parse_source(text or DraftModelSource.name)
    except ValueError as error:
        raise DraftsimError(str(error)) from None
    return None if isinstance(source, DraftModelSource) else source


def load_recording(
    name: str, outputs: Trace, tables: Tables, source: str | None = None, *,
    given: bool = False, option: str | None = None, chooses: str | None = None,
    carry: Callable[[Tables], Tables] | None = None, assume_batch_free: bool = False,
    one: bool = True, one_stream: bool = False, one_pass: bool = False, observed: bool = False,
    say: Say = silent, announce: Say | None = None,
) -> Recording:  # fmt: skip
    """Return the recording called `name`, the latencies to price it with, and who drafts.

    Everything that predicts takes recordings from here, so that all of it drafts with the same
    drafter: the `source` named, else the one that the latencies were measured with, else the one
    that the recording's own latencies were measured with.

    Parameters
    ----------
    name, outputs:
        Trace file, run folder or bundled recording, and the trace found there.
    tables, given:
        Latencies by name, and True if the user named them; False if they are the recording's own.
    option:
        The option that would have named the recording, if the user named none.
    chooses:
        The command that could not choose between lower bounds (`imputed`).
    carry:
        Carries the tables over to another device, which needs the models' shapes; applied if `one`.
    one:
        True if exactly one table is expected.
    one_stream:
        True if a `source` named may be any: the caller replays it one request at a time
        (`Recording.stream`), unless it is the recording's own.
    one_pass:
        True if the drafter, which is not recorded, drafts all tokens of a round in one pass.
    observed:
        True if `outputs` is an `observed_trace`, which has no folder and no drafter.
    say:
        Told which drafter drafts.
    announce:
        Told whose acceptance is priced at whose costs, if the models differ; by default `say`.

    Raises DraftsimError if the latencies are of other models than a recording that the user did not
    name, the drafts of the source were not recorded, or one of its parts raises it.
    """
    if one:
        only_table(tables)
    stream = load_source(source) if one_stream and source is not None else None
    drafter: Source | None = None
    recordings: Recordings = {}
    if stream is not None and not observed:
        recordings = find_recordings(name, outputs)
        if _is_own(stream, next(iter(tables.values())), recordings):
            stream, drafter = None, stream
    elif not observed:
        drafter, recordings = _drafter(name, outputs, tables, source, given, option is None, say)
    chosen = stream if drafter is None else drafter
    if chosen is not None:
        recordings = chosen.completed(outputs, recordings)
    if observed:
        models: Models = {"target": model_in(outputs.meta, "target"), "draft": {}}
    else:
        models = models_of(name, outputs)
    if given:
        check_models(name, models, tables, drafter, option, announce or say)
    for table in tables.values():
        if remark := table.meta.get("remark"):
            say(str(remark))
    if one_pass and chosen is not None:
        raise DraftsimError(
            "--one-pass is for acceptance without a known drafter, and the passes of "
            f"{chosen.name} are known: drop it"
        )
    if carry is not None:
        check_carried(drafter, recordings, one_pass)
        tables = carry(tables) if one else tables
    trace = outputs = imputed(name, outputs, chooses, say)
    if drafter is not None:
        check_drafts(drafter, recordings)
        trace = drafted_trace(outputs, drafter, recordings)
        say(f"drafting with {trace.source}, {said_longest(trace)}")
    by = "" if drafter is None else trace.source
    by = by if stream is None else stream.label(recordings)
    label = _label(models, tables, by, is_drawn(outputs))
    found = Recording(
        name, outputs, trace, tables, models, label, drafter, recordings, assume_batch_free,
        stream, observed, one_pass,
    )  # fmt: skip
    if chosen is not None and chosen.runs_layers and found.said_depths:
        say(found.said_depths)
    return found


def check_carried(drafter: Source | None, recordings: Recordings, one_pass: bool = False) -> None:
    """Raise DraftsimError if the drafter's passes cannot be extrapolated to another device."""
    if one_pass:
        raise DraftsimError(
            "--gpu and --weights extrapolate by the models' shapes, and with --one-pass the "
            "drafter's is not known: drop them"
        )
    if drafter is not None:
        raise DraftsimError(
            f"--gpu and --weights extrapolate by the models' shapes, and that of "
            f"{drafter.label(recordings)} is not kept: measure on the GPU (`draftsim profile "
            "--device cuda`), or give a recording of a draft model"
        )


def _drafter(
    name: str,
    outputs: Trace,
    tables: Tables,
    source: str | None,
    given: bool,
    chosen: bool,
    say: Say,
) -> tuple[Source | None, Recordings]:
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
    if folder_of(name) is None:
        return None
    try:
        return find_latency(name)
    except FileError:
        return None


GIVEN = "the given latencies"
"""Name of latencies that were given as an object."""


def _latencies_of(label: str) -> str:
    return label if label == GIVEN else f"the latencies of {label}"


def check_models(
    name: str, known: Models, tables: Tables, drafter: Source | None,
    option: str | None, say: Say,
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
        whose = " + ".join(filter(None, map(model_label, said.values())))
        told = same["target"] is not None or table.is_constant
        given = label == GIVEN  # an object, which no option names
        named = label if given else f"--latency {label}"
        unnamed = f"{'do not name their' if given else 'does not name its'} models"
        if differ:
            other = f"{' and '.join(differ)} {'differ' if len(differ) > 1 else 'differs'}"
            if option is not None:
                remedy = "name the recording to draft from" + (
                    "" if given else f", {option} {label}"
                )
                if not given and not _has_trace(label):
                    remedy = (
                        "add an acceptance: --acceptance 0.72,0.50,0.33 from your server's log, or "
                        f"{option} {name} to borrow that pair's"
                    )
                raise DraftsimError(
                    f"{named}: the {other} from the default recording's, {name} ({pair}): {remedy}"
                )
            costs.append(f"{label} ({whose}: the {other})")
        elif option is not None and known["target"] and not (told and said["target"]):
            if not table.is_constant:
                raise DraftsimError(
                    f"{named} {unnamed}, and the default recording {name} is of {pair}: name the "
                    "recording whose acceptance fits" + ("" if given else f", {option} RUN "
                    f"(`draftsim import` makes one from a server's log; {option} {name} is the "
                    "default)")
                )  # fmt: skip
            costs.append(label + ("" if given else f"; {option} names another recording"))
        elif known["target"] and not told:
            costs.append(f"{label}, which {unnamed}")
    if costs:
        whose = name.removeprefix("acceptance of ")
        say(f"acceptance of {whose} ({pair}) at the costs of {', '.join(costs)}")


def _share_trace(name: str, label: str) -> bool:
    """Return True if latencies and a recording, by name, are recorded with one trace.

    Only the latency.parquet of a folder is recorded with the folder's trace.
    """
    path = Path(label)
    try:
        folder = folder_of(path.parent if path.name == "latency.parquet" else label)
        return folder is not None and folder == folder_of(name)
    except FileError:
        return False


def _has_trace(label: str) -> bool:
    """Return True if the name of latencies is a recording's, with a pair's own trace as well."""
    try:
        return folder_of(label) is not None and not is_drawn(find_trace(label))
    except FileError:
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
