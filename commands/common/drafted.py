"""A recorded source in the place of the draft model, for commands that replay one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.output import note
from commands.common.sources import load_source
from traces.errors import DraftsimError

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
        help="Draft with this source, recorded by start, instead of the draft model: "
        "eagle:model=NAME, medusa, blockwise, specdec or layer-skip.",
    ),
]


@dataclass(frozen=True, eq=False)
class Drafted:
    """A recording with a source's drafts in the place of the draft model's."""

    source: Source
    recordings: Recordings
    trace: Trace

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The provenance of the source's recording, with its ``kind`` and ``model`` if it has."""
        from traces.sources.starts.as_draft import check_drafts

        return check_drafts(self.source, self.recordings).meta

    def priced(
        self, latency: LatencyTable, largest: int, assume_batch_free: bool = False
    ) -> LatencyTable:
        """`latency` with the source's passes in the place of the draft model's.

        Raises DraftsimError if it does not know them at batches up to `largest`, unless they are
        to cost the same at all.
        """
        from traces.sources.starts.as_draft import drafted_latency

        table = drafted_latency(latency, self.source, self.recordings, assume_batch_free)
        table.check_sizes("draft", "forward", largest, 1)
        return table

    def check_costs(self, ratios: Sequence[float], gpu: str | None) -> None:
        """Raise DraftsimError where the source's cost cannot be told as asked."""
        name = self.trace.source
        if gpu is not None:
            raise DraftsimError(
                f"--gpu and --weights carry latencies over by the models' shapes, and that of "
                f"{name} is not kept: measure it there (`draftsim profile --device cuda`), or "
                "drop --source"
            )
        if ratios and self.trace.drafts_end:
            raise DraftsimError(
                f"--c is the cost of a drafted token, and {name} drafts all of a round's at once: "
                "leave it out"
            )


def drafted_by(
    text: str | None, name: str, trace: Trace, rule: VerifyRule | None = None
) -> Drafted | None:
    """The trace called `name` with the drafts of the source that `text` describes.

    None for the draft model.  Raises DraftsimError where the source was not recorded, is none
    that can stand for a draft model, or `rule` asks for what is not known of its drafts.
    """
    from traces.sources.found import find_recordings
    from traces.sources.replay import check_rule
    from traces.sources.starts.as_draft import check_drafts, drafted_trace

    source = load_source(text)
    if source is None:
        return None
    recordings = find_recordings(name, trace)
    check_drafts(source, recordings)
    check_rule(rule, source, trace)
    drafted = drafted_trace(trace, source, recordings)
    note(f"drafting with {drafted.source}, drafts of up to {drafted.max_gamma} tokens")
    return Drafted(source, recordings, drafted)
