"""Options that several commands share, and the groups of them that commands take together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from commands.common.configured import MOST_BATCH, check_most
from commands.common.drafted import load_recording
from commands.common.output import remark
from policies.registry import PLAIN
from simulator.chosen import DEFAULT
from simulator.executors import Cluster, Executor, Local
from simulator.whatif.axes import parse_axis
from traces.errors import DraftsimError
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.operators import compose
from traces.replay.calls import drafting_always
from traces.store.recordings import DEFAULT_TRACE, TRACE_VARIABLE, Defaulted

if TYPE_CHECKING:
    from simulator.recording import Recording
    from simulator.serving import Limits
    from simulator.serving.arrivals import ArrivalFile, AtRate


def as_named(context: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Mark a recording that comes by default: a callback of the options that name one."""
    source = context.get_parameter_source(str(param.name))
    in_file = context.default_map or {}
    if source is not None and source.name == "ENVIRONMENT" and param.name in in_file:
        return str(in_file[param.name])  # click asks the environment before a file of options
    if source is None or source.name != "DEFAULT":
        return value
    name = Defaulted(value)
    name.option = f"--{param.name}"
    return name


TraceOption = Annotated[
    str,
    typer.Option(
        "--trace", metavar="T", envvar=TRACE_VARIABLE, callback=as_named,
        help="Trace file, run folder, or recording's name.",
    ),
]  # fmt: skip
LatencyOption = Annotated[
    str | None,
    typer.Option(
        "--latency", metavar="L",
        help="Latency file, run folder, bundled recording's name, GPU/TARGET[@tpN][+DRAFT] "
        "composed from measured operators (a100/llama-2-70b@tp4+llama-2-7b), or "
        "const:target=S,draft=S[,verify=S] in seconds. Default: the trace's own.",
    ),
]  # fmt: skip
AcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance", metavar="FILE|P,P,..",
        help="Instead of --trace: chances that the first 1, 2, ... drafted tokens are all accepted "
        "(0.76,0.60,0.43), or a server's /metrics (BEFORE,AFTER), its benchmark's result, or "
        "counts of `draftsim import`. Takes --latency.",
    ),
]  # fmt: skip
OtherAcceptanceOption = Annotated[
    str | None,
    typer.Option(
        "--acceptance", metavar="FILE|P,P,..",
        help="Predict for this acceptance instead of the runs' own: chances that the first 1, 2, "
        "... drafted tokens are all accepted (0.76,0.60,0.43), a server's /metrics "
        "(BEFORE,AFTER), or a benchmark's result.",
    ),
]  # fmt: skip
DraftedOption = Annotated[
    str | None,
    typer.Option(
        "--source", metavar="S",
        help="Draft with this source (`draftsim list sources`): eagle:model=NAME, parallel, heads "
        "such as medusa, layer-skip, a lookup such as ngram, or draft-model. Default: the drafter "
        "that the latencies were measured with.",
    ),
]  # fmt: skip
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source", metavar="S",
        help="Draft with this source, name[:key=value,...], instead of the draft model "
        "(`draftsim list sources`).",
    ),
]  # fmt: skip
AssumeOption = Annotated[
    bool,
    typer.Option(
        "--assume-batch-free",
        help="If the latencies hold one batch size: assume that every other costs the same.",
    ),
]
AlwaysOption = Annotated[
    int | None,
    typer.Option(
        "--always-draft", metavar="K", min=1,
        help="Draft passes that the engine runs in every round, even without drafts: 1 if it calls "
        "the drafter every round, all slots if it always fills them. For a draft model.",
    ),
]  # fmt: skip
OnePassOption = Annotated[
    bool,
    typer.Option(
        "--one-pass",
        help="The drafter drafts all tokens of a round in one pass: a round costs one draft pass "
        "of --latency, whatever the draft length.",
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME",
        help="Extrapolate latencies measured on another GPU to this one, approximately (`draftsim "
        "list devices`).",
    ),
]  # fmt: skip
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="FORMAT",
        help="Extrapolate latencies to weights in this format, approximately: awq-int4, fp8, ... "
        "for both models, or target=...,draft=... (`draftsim list weight-formats`).",
    ),
]  # fmt: skip


def policy_option(default: str) -> Any:
    """Return the option ``--policy`` of a command that takes `default` where none is named."""
    return typer.Option(
        "--policy", metavar="P",
        help="name[:key=value,...], FILE.py:Class[:...] for a policy of your own, or the name "
        "of a paper's method; repeatable; all = every policy (`draftsim list policies`). "
        f"Default: {default}.",
    )  # fmt: skip


VerifyOption = Annotated[
    str | None,
    typer.Option(
        "--verify", metavar="RULE",
        help="Verification rule, name[:key=value,...] (`draftsim list rules`). Default: "
        "lossless.",
    ),
]  # fmt: skip
MemoryOption = Annotated[
    Path | None,
    typer.Option(
        "--memory", metavar="FILE",
        help="File of `draftsim calibrate-memory`, for the rule csd. Without a rule it means "
        "--verify csd.",
    ),
]  # fmt: skip
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the code that a model's folder brings; read it first."
    ),
]
PassesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Drafter passes of every step that drafts: 1 for a drafter that drafts all tokens at "
        "once. Default: one per drafted token.",
    ),
]
JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Processes here. Default: one per core.")
]
ClusterOption = Annotated[
    str | None, typer.Option(metavar="tcp://HOST:PORT", help="Run on a Dask cluster instead.")
]


@dataclass(frozen=True)
class Recorded:
    """Options for a recording, and what its passes cost."""

    heading: ClassVar[str] = "Acceptance and costs"

    trace: TraceOption = DEFAULT_TRACE
    latency: LatencyOption = None

    def load(self, **how: Any) -> Recording:
        """Return the recording (`commands.common.drafted.load_recording`, with its options)."""
        given = {**vars(self), **how}
        given.pop("always_draft", None)  # of a price, see `Inputs.priced`
        return load_recording(given.pop("trace"), **given)


@dataclass(frozen=True)
class Inputs(Recorded):
    """Options for whose drafts are accepted, and what passes cost."""

    acceptance: AcceptanceOption = None
    source: DraftedOption = None
    always_draft: AlwaysOption = None
    one_pass: OnePassOption = False

    def priced(self, recording: Recording, largest: int = 1) -> LatencyTable:
        """Return the table that prices batches up to `largest`, with the passes always drafted."""
        return drafting_always(recording.priced(largest), self.always_draft)


@dataclass(frozen=True)
class BatchInputs(Inputs):
    """The inputs of commands that price batches."""

    assume_batch_free: AssumeOption = False


@dataclass(frozen=True)
class CarriedInputs(BatchInputs):
    """The inputs of commands that carry latencies over to another device."""

    gpu: GpuOption = None
    weights: WeightsOption = None


@dataclass(frozen=True)
class AskedLoads:
    """Options for the loads and draft lengths of an answer."""

    heading: ClassVar[str] = "Loads"

    batch: Annotated[
        str | None, typer.Option(metavar="N,...", help="Concurrencies. Default: those measured.")
    ] = None
    context: Annotated[
        str | None, typer.Option(metavar="N,...", help="Tokens of context. Default: as measured.")
    ] = None
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="N,...", help="Draft lengths. Default: those measured."),
    ] = None


@dataclass(frozen=True)
class Policies:
    """Options for draft lengths, and how drafts are verified."""

    heading: ClassVar[str] = "Policies"

    policy: Annotated[list[str] | None, policy_option("all")] = None
    verify: VerifyOption = None
    memory: MemoryOption = None

    @property
    def plain(self) -> bool:
        """True if plain decoding alone is named."""
        return set(self.policy or ()) == {PLAIN}


@dataclass(frozen=True)
class ServedPolicies(Policies):
    """The same for commands that serve requests."""

    policy: Annotated[list[str] | None, policy_option(", ".join(DEFAULT))] = None


@dataclass(frozen=True)
class Graphs:
    """Options for the CUDA graphs of an engine."""

    heading: ClassVar[str] = "Engine"

    cudagraph_capture_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Sizes, in tokens, of the engine's CUDA graphs: a pass costs as much as the next "
            "captured size. Default: vLLM's list if latencies are composed, else as measured.",
        ),
    ] = None
    cudagraph_mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE", help="FULL (default), PIECEWISE or NONE, for composed latencies."
        ),
    ] = None

    @property
    def graphs(self) -> CUDAGraphs | None:
        """The graphs named, if any; DraftsimError for sizes and modes that are none."""
        sizes, mode = self.cudagraph_capture_sizes, self.cudagraph_mode
        return None if sizes is None and mode is None else CUDAGraphs.parsed(sizes, mode)


@dataclass(frozen=True)
class EngineLimits(Graphs):
    """Options for the limits of an engine, and of several."""

    max_batch: Annotated[
        int | None,
        typer.Option(
            show_default="the measured engine's, else 64",
            help="Most requests that an engine runs at a time, where they arrive by the clock "
            "(max_num_seqs).",
        ),
    ] = None
    token_budget: Annotated[
        int | None,
        typer.Option(
            show_default="the measured engine's, else 8192",
            help="Most tokens in a step (max_num_batched_tokens).",
        ),
    ] = None
    kv_blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="KV-cache blocks of 16 tokens (num_gpu_blocks), or auto[:UTILISATION] for those "
            "that fit next to the weights on a composed table's GPU. Default: no limit.",
        ),
    ] = None
    async_scheduling: Annotated[
        bool,
        typer.Option(
            "--async-scheduling",
            help="Plan a step while the one before it runs, as recent vLLM does by default.",
        ),
    ] = False

    def limits(
        self, table: LatencyTable, mode: str = "continuous", arrive: bool = True
    ) -> Limits:  # fmt: skip
        """Return the limits of one engine (`simulator.serving.scenario.engine_limits`)."""
        from simulator.serving.scenario import engine_limits

        return engine_limits(
            table, mode, arrive, max_batch=self.max_batch, token_budget=self.token_budget,
            kv_blocks=blocks_of(self.kv_blocks, table), async_scheduling=self.async_scheduling,
        )  # fmt: skip


RATES = (1e-6, 1e9)
"""Least and largest rate: with less, simulated seconds are too many for a float to time a token."""


@dataclass(frozen=True)
class OfferedLoad:
    """Options for the requests that arrive."""

    heading: ClassVar[str] = "Load"

    rate: Annotated[
        str | None,
        typer.Option(
            metavar="[PROCESS:]R,...",
            help="Requests per second, at random times (poisson). deterministic:R has equal gaps, "
            "burstiness=B:R those of vLLM's --burstiness. 2x replays --arrivals twice as fast.",
        ),
    ] = None
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay a file, at its own pace or at --rate: CSV with TIMESTAMP,ContextTokens,"
            "GeneratedTokens, the result of `vllm bench serve --save-detailed`, or requests.jsonl "
            "of LLMServingSim's benchmark.",
        ),
    ] = None
    prompt: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1,
            help="Prompt tokens of every request. Default: as recorded; with --acceptance the "
            "server's, else 256.",
        ),
    ] = None  # fmt: skip
    output: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2,
            help="Output tokens of every request, as --prompt. A recorded output is cut or "
            "repeated, and the rows are approximate.",
        ),
    ] = None  # fmt: skip
    process: Annotated[
        str | None, typer.Option(hidden=True, help="The process of --rate PROCESS:R.")
    ] = None
    scale: Annotated[
        str | None, typer.Option(hidden=True, metavar="S,...", help="As --rate Sx.")
    ] = None

    @property
    def drawn_sizes(self) -> dict[str, int] | None:
        """The lengths named, for requests that are not recorded; None with a file of arrivals.

        Raises DraftsimError if both are named.
        """
        found = {"prompt_length": self.prompt, "tokens": self.output}
        named = {name: value for name, value in found.items() if value is not None}
        if named and self.arrivals is not None:
            raise DraftsimError(
                f"{self.arrivals} has the requests' lengths: drop --prompt and --output"
            )
        return named if self.arrivals is None else None

    def offered(self, recording: Recording) -> dict[str, Any]:
        """Return the load as `simulator.serving.study.over_loads` takes it.

        Raises DraftsimError if it is said twice, or a value is impossible.
        """
        named, text = re.findall(r"(?s)\A(?:([a-z][^:]*):)?(.*)", self.rate or "")[0]
        if named and self.process:
            raise DraftsimError(f"--rate {self.rate} names a process: drop --process")
        if named and self.arrivals is not None:
            raise DraftsimError(
                f"--rate {self.rate} names a process, and {self.arrivals} has its own gaps: drop "
                f"{named}:, or --arrivals"
            )
        multiples = {part.strip().endswith("x") for part in text.split(",")}
        if len(multiples) > 1:
            raise DraftsimError(
                f"--rate {self.rate}: expected requests per second, or multiples of the file's "
                "rate, not both"
            )
        [relative] = multiples
        if relative and self.scale:
            raise DraftsimError(f"--rate {self.rate} and --scale are one thing: drop --scale")
        scale = re.sub(r"x(?=\s*(,|$))", "", text) if relative else self.scale
        found = {"prompt": self.prompt, "output": self.output}
        sizes = {} if recording.observed else {k: v for k, v in found.items() if v is not None}
        return {
            "arrivals": self.arrivals, "process": named or self.process, "sizes": sizes,
            "rate": None if relative or self.rate is None else rates("--rate", text),
            "scale": None if scale is None else rates("--rate" if relative else "--scale", scale),
        }  # fmt: skip

    def planned(self, recording: Recording) -> tuple[float | None, AtRate | ArrivalFile]:
        """Return the one rate of a plan, None for a file's own, and the arrivals."""
        from simulator.serving.arrivals import ArrivalFile, arrivals_of

        given = self.offered(recording)
        several = [value for name in ("rate", "scale") for value in given[name] or ()]
        rate = None if given["rate"] is None else several[0]
        scaled = given["scale"] is not None
        arrivals = arrivals_of(rate, self.arrivals, given["process"], scaled=scaled)
        if len(several) > 1:
            raise DraftsimError(f"--rate is {self.rate or self.scale}: a plan is for one rate")
        if isinstance(arrivals, ArrivalFile):
            return rate, arrivals.scaled(several[0]) if scaled else arrivals
        return rate, replace(arrivals, **given["sizes"])


def blocks_of(text: str | None, table: LatencyTable) -> int | None:
    """Return the blocks that ``--kv-blocks`` asks for; with auto, said in a remark.

    Raises DraftsimError if it is no number, or the table does not say what GPU and models it is of.
    """
    if text is None:
        return None
    kind, _, share = text.partition(":")
    try:
        if kind != "auto":
            return int(text)
        utilisation = float(share) if share else compose.UTILISATION
    except ValueError:
        raise DraftsimError(
            f"--kv-blocks is {text!r}, expected a whole number or auto[:UTILISATION]"
        ) from None
    found = compose.kv_blocks(table.meta, utilisation)
    remark(found.said)
    return found.blocks


def chosen_executor(jobs: int | None, cluster: str | None) -> Executor:
    """Return the executor that the options name; raises DraftsimError if they say two things."""
    if cluster is not None:
        if jobs is not None:
            raise DraftsimError("--jobs counts processes here, --cluster has its own: give one")
        return Cluster(cluster)
    return Local(jobs)


def whole(option: str, text: str) -> int:
    """Return the number in `text`; DraftsimError naming `option` if it is no whole one."""
    try:
        number = int(text)
    except ValueError:
        raise DraftsimError(f"{option} is {text!r}, expected a whole number") from None
    check_most({option.removeprefix("--"): number})
    return number


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise DraftsimError if any of these options is given: it would have no effect."""
    if given := [name for name, value in options.items() if value is not None]:
        raise DraftsimError(f"{why}: drop {' and '.join(given)}")


def batch_sizes(option: str, text: str, most: int = MOST_BATCH, least: int = 1) -> list[int]:
    """Return the whole numbers in `text` (`simulator.whatif.axes.parse_axis`), ascending.

    Raises DraftsimError naming `option` if `text` is anything else.
    """
    name = option.removeprefix("--")
    return sorted(map(int, parse_axis(text, name, low=least, high=most, whole=True)))


def rates(option: str, text: str) -> list[float]:
    """Return the rates or factors in `text`, likewise, within `RATES`."""
    return list(parse_axis(text, option.removeprefix("--"), low=RATES[0], high=RATES[1]))
