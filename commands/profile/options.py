"""Options that verbs of ``draftsim profile`` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from commands.common.options import TrustOption, batch_sizes

if TYPE_CHECKING:
    from profiler.latency.table import Grid
    from profiler.profile import Settings
    from profiler.recording.run import RunInfo

RunOption = Annotated[Path, typer.Option(metavar="RUN", help="Folder for the recordings.")]
TargetOption = Annotated[
    str, typer.Option(metavar="DIR", help="Target model: directory or hub id.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; default float32 on cpu, bfloat16 on cuda."),
]
ThreadsOption = Annotated[
    int, typer.Option(min=1, help="CPU threads; 1 gives the steadiest times.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Record over what the folder holds, finished or not.")
]


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of a pair, and how they are loaded."""

    heading: ClassVar[str] = "The pair"

    target: TargetOption
    draft: Annotated[str, typer.Option(metavar="DIR", help="Draft model: directory or hub id.")]
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    dtype: DtypeOption = None
    threads: ThreadsOption = 1
    trust_remote_code: TrustOption = False

    @property
    def info(self) -> RunInfo:
        """The pair as its run folder names it."""
        from profiler.recording.run import RunInfo

        return RunInfo(
            kept_name(self.target), kept_name(self.draft), self.device, self.dtype,
            self.threads if self.device == "cpu" else None,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TimedPasses:
    """The sizes of passes that are timed, and how often."""

    heading: ClassVar[str] = "Latencies"

    max_gamma: Annotated[int, typer.Option(min=1, help="Longest draft that can be replayed.")] = 24
    repeats: Annotated[int, typer.Option(min=3, help="Timed sweeps over all latency cells.")] = 15
    batch: Annotated[
        str,
        typer.Option(metavar="B,...", help="Batch sizes whose latencies are measured, 1 included."),
    ] = "1"
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure passes at contexts of up to this many tokens, prompts included. Default: "
            "as many as the recording reaches; `latency`: 512 or more.",
        ),
    ] = None

    @property
    def grid(self) -> Grid:
        """The cells that are timed; DraftsimError if the batch sizes are none."""
        from profiler.latency.table import Grid

        grid = Grid(repeats=self.repeats, batches=sorted({1, *batch_sizes("--batch", self.batch)}))
        return grid.drafting(self.max_gamma)


@dataclass(frozen=True, kw_only=True)
class RecordedTexts:
    """The prompts, and how their outputs are decoded and recorded."""

    heading: ClassVar[str] = "The recording"

    prompts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="JSON lines with prompt and category, or plain lines."),
    ]
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use this many prompts, in turn from each category.")
    ] = None
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Use only the prompts of this category; repeatable."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Put every prompt into the target's chat template.")
    ] = False
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Output limit per prompt.")] = 128
    temperature: Annotated[
        float,
        typer.Option(help="Also record sampled outputs at this temperature; 0 = greedy only."),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw sampled outputs and drafts from the likeliest tokens alone, as many as "
            "reach this probability; 1 = from all."
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of sampled outputs.")] = 0
    record_batch: Annotated[
        int,
        typer.Option(
            "--record-batch",
            min=1,
            help="Decode this many prompts at once while recording: several times faster.",
        ),
    ] = 1

    def settings(self, timing: TimedPasses) -> Settings:
        """Return the settings of a recording with these latencies."""
        from profiler.profile import Settings
        from traces.acceptance.sampling import Sampling

        return Settings(
            self.max_new_tokens, timing.max_gamma, Sampling(self.temperature, self.top_p),
            self.seed, timing.grid, self.chat, self.record_batch,
        )  # fmt: skip


def kept_name(name: str) -> str:
    """Return a directory as an absolute path, so that the run can be used from anywhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
