"""``draftsim import``: logs of other tools, made into traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.output import note

if TYPE_CHECKING:
    from traces.trace import Trace

app = typer.Typer(help="Turn another tool's log into a trace.", no_args_is_help=True)

OutOption = Annotated[Path, typer.Option(metavar="T", help="Trace file to write.")]


@app.command("specbench")
def specbench(
    file: Annotated[Path, typer.Argument(help="Spec-Bench result file of a speculative method.")],
    out: OutOption,
    baseline: Annotated[
        Path | None, typer.Option(help="Result file of plain decoding: target time and speedup.")
    ] = None,
    draft_lengths: Annotated[
        str, typer.Option(help="none, or how the log's drafts were chosen: hf-heuristic:N.")
    ] = "none",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Limit the log was decoded under.")
    ] = 1024,
) -> None:
    """Read a Spec-Bench result file."""
    from traces.specbench import import_specbench

    _write(import_specbench(file, baseline, draft_lengths, max_new_tokens), out)


@app.command("vllm")
def vllm(
    files: Annotated[
        list[Path], typer.Argument(help="JSON or JSON lines with vLLM's per-request metrics.")
    ],
    out: OutOption,
) -> None:
    """Read vLLM's per-request speculative-decoding metrics."""
    from traces.vllm import import_vllm

    _write(import_vllm(files), out)


def _write(trace: Trace, out: Path) -> None:
    from traces.files import write_trace
    from traces.trace import UNKNOWN

    write_trace(trace, out)
    unknown = int((trace.columns["match"] == UNKNOWN).sum())
    note(
        f"wrote {out}: {len(trace.requests)} requests, {trace.tokens} tokens, "
        f"{unknown} position(s) not observed"
    )
    for key in ("target_s", "measured_speedup", "block_efficiency"):
        if key in trace.meta:
            note(f"{key}: {trace.meta[key]:.5g}")
