"""The real outputs of a run under a verification rule, kept with its round log.

A run folder holds them as ``rounds/<name>.parquet`` (the rounds, see
`traces.store.files.write_rounds`) and ``rounds/<name>.json`` (the outputs, in the order the
requests were decoded, which is part of the run where the rule learns).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policies.core import DraftPolicy
from policies.json_text import parse_json
from policies.registry import describe
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from policies.spec import split_items
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.replay.quality import output_log_likelihood, relative_bleu, token_agreement
from traces.replay.rounds import RoundLog
from traces.store.files import read_rounds, write_rounds
from traces.store.header import (
    FieldCheck,
    PathLike,
    are_wholes,
    from_row,
    is_number,
    meta_of,
    named,
)
from traces.store.text import read_object
from traces.store.writing import write_atomically

SCHEMA = 1
FOLDER = "rounds"
DIGEST = "sha256"
"""Field of the outputs that holds the checksum of the others; older files have none."""
REMEDY = "record the run again with `draftsim profile decode --verify`"

NEAR = 4.0
"""Units in the last place within which two logits count as tied."""


class Divergence(NamedTuple):
    """The first token of an output that is not the expected one, and how near a tie it was.

    The logits are those that the recording holds of the target at this position; None if it
    holds none, or is of another text.
    """

    request: str
    position: int
    """Output position, 0 = first generated token."""
    token: int | None
    """Token emitted; None after the end."""
    expected: int | None
    """Token expected; None after the end."""
    target_top1: float | None = None
    target_top2: float | None = None
    target_units: float | None = None
    """Margin of the two in units in the last place of the run's number format."""

    @property
    def near_tie(self) -> bool | None:
        """True if rounding can have decided the token; None if the margin is not known."""
        return None if self.target_units is None else self.target_units <= NEAR

    def __str__(self) -> str:
        """Return the difference in words."""
        said = f"{self.request} at position {self.position}"
        if self.target_top1 is None or self.target_top2 is None:
            return said
        return f"{said} (logits {self.target_top1:.5g} and {self.target_top2:.5g})"


@dataclass(frozen=True)
class Output:
    """The output of one request."""

    id: str
    tokens: list[int]
    text: str
    reference: str
    """Text of the target's own greedy output."""
    log_likelihood: float
    """Sum over the tokens of the target's log-probability at T = 1, nats."""
    solved: bool | None = None
    """True if it ends in the number that the prompt asks for, before its token limit; None where
    the prompt asks for none, or none was known."""
    greedy_solved: bool | None = None
    """The same of the target's own greedy output."""
    passed: bool | None = None
    """True if its code passes the prompt's tests; None if the prompt has none, or it was not
    run (`draftsim profile decode --run-code`)."""
    greedy_passed: bool | None = None
    """The same of the target's own greedy output."""


@dataclass(frozen=True, eq=False)
class RealRun:
    """Rounds and outputs of really decoding under a verification rule."""

    log: RoundLog
    outputs: Sequence[Output]
    meta: Mapping[str, Any]
    """Provenance; ``memory`` holds what is known of a learning rule's memory, ``sampling`` how
    outputs were drawn (greedily where it is missing), ``part`` which of the run's prompts were
    decoded (all where it is missing)."""


@dataclass(frozen=True)
class Quality:
    """A comparison of a lossy run's outputs with the target's own."""

    agreement: float
    """Share of tokens equal to the target's own output at the same position."""
    log_likelihood: float
    """The target's mean log-probability of the output, nats per token at T = 1."""
    reference_log_likelihood: float
    """The same of its own greedy output."""
    relative_bleu: float | None
    """BLEU against that output, 0..100 (CM-ASD, Table V); None without sacrebleu."""
    scored: int = 0
    """Prompts that have a number for an answer."""
    solved: int = 0
    """Scored prompts that the output solves (see `Output.solved`)."""
    solved_greedy: int = 0
    """Scored prompts that the target's own greedy output solves."""
    tested: int = 0
    """Prompts whose outputs' code was run (see `Output.passed`)."""
    passed: int = 0
    """Tested prompts whose code passes."""
    passed_greedy: int = 0
    """Tested prompts whose greedy output has code that passes."""

    @property
    def score(self) -> str:
        """Return in words how many prompts were solved and tests passed; empty without any."""
        return "; ".join(
            f"{done} {own} of {count} (greedy {greedy} of {count})"
            for done, count, own, greedy in (
                ("solved", self.scored, self.solved, self.solved_greedy),
                ("code passed", self.tested, self.passed, self.passed_greedy),
            )
            if count
        )


def find_run(
    runs: Sequence[RealRun], policy: DraftPolicy, rule: VerifyRule, trace: Trace
) -> RealRun | None:
    """Return the run that decoded the requests of `trace` under `policy` and `rule`, or None.

    Names are compared as a person would type them: without defaults, and without a vocabulary
    size that is the recorded pair's own.  A run along sampled outputs is one of that sampling.
    """
    wanted = (describe(policy), describe_rule(rule))
    typed = tuple(_typed(name, trace) for name in wanted)
    ids = [r.id for r in trace.requests]
    for run in runs:
        names = tuple(_typed(name, trace) for name in (run.log.policy, run.log.verify))
        alike = Sampling.of(run.meta.get("sampling")) == trace.sampling
        if alike and names == typed and [r.id for r in run.log.requests] == ids:
            return run
    return None


def _typed(name: str, trace: Trace) -> tuple[str, frozenset[str]]:
    """Return a policy's or rule's name and what its text sets beyond the recording's."""
    head, _, rest = name.partition(":")
    supplied = f"vocab_size={trace.vocab_size}"
    return head, frozenset(part for part in split_items(rest) if part != supplied)


def quality(outputs: Sequence[Output], trace: Trace) -> Quality:
    """Compare `outputs` with the greedy outputs recorded in `trace`, matched by request id.

    Raises DraftsimError if `trace` lacks a request or its output tokens.
    """
    places = {request.id: i for i, request in enumerate(trace.requests)}
    if missing := [o.id for o in outputs if o.id not in places]:
        raise DraftsimError(
            f"the trace has no request {missing[0]!r} to compare an output with: use the trace "
            "of the same prompts"
        )
    if not outputs:
        raise DraftsimError("there are no outputs to compare: decode at least one prompt")
    own = trace.select([places[o.id] for o in outputs])
    if "token" not in own.columns:
        raise DraftsimError("this trace lacks the column token: record it with `draftsim profile`")
    path = np.asarray(own.columns["token"])[own.on_path].tolist()
    starts = own.request_starts
    references = [path[a:b] for a, b in pairwise(starts)]
    emitted = sum(len(o.tokens) for o in outputs)
    bleu = None
    if find_spec("sacrebleu") is not None:
        bleu = relative_bleu([o.text for o in outputs], [o.reference for o in outputs])
    scored = [o for o in outputs if o.solved is not None]
    return Quality(
        token_agreement([o.tokens for o in outputs], references),
        sum(o.log_likelihood for o in outputs) / emitted,
        output_log_likelihood(own),
        bleu,
        len(scored),
        sum(o.solved is True for o in scored),
        sum(o.greedy_solved is True for o in scored),
        *quality_of_code(outputs),
    )


def quality_of_code(outputs: Sequence[Output]) -> tuple[int, int, int]:
    """Return outputs whose code was run, those that pass, and those whose greedy text passes."""
    tested = [o for o in outputs if o.passed is not None]
    passed = sum(o.passed is True for o in tested)
    return len(tested), passed, sum(o.greedy_passed is True for o in tested)


def write_run(run: RealRun, folder: PathLike) -> Path:
    """Write `run` into the run folder; the path of its rounds."""
    place = Path(folder) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    sampling = Sampling.of(run.meta.get("sampling"))
    path = place / f"{file_name(run.log, sampling, run.meta.get('part') or '')}.parquet"
    write_rounds(run.log, path)
    write_outputs(run, path)
    return path


def write_outputs(run: RealRun, path: Path) -> None:
    """Write the outputs of `run` next to its rounds, which are in the file `path`."""
    document = {
        "schema": SCHEMA,
        "meta": dict(run.meta),
        "outputs": [asdict(output) for output in run.outputs],
    }
    # As it is read again: tuples are lists then.
    document[DIGEST] = digest_of_document(parse_json(json.dumps(document)))
    write_atomically(path.with_suffix(".json"), json.dumps(document).encode())


def digest_of_document(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document without its own digest, in hexadecimal."""
    rest = {name: value for name, value in document.items() if name != DIGEST}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def read_run(path: PathLike) -> RealRun:
    """Return the run whose rounds are in the file `path`.

    Raises FileError if one of its two files is missing or damaged, or they do not belong together.
    """
    path = Path(path)
    log, place = read_rounds(path), path.with_suffix(".json")
    if not place.exists():
        raise FileError(f"{place}: no such file: {REMEDY}")
    document = read_object(place, REMEDY)
    if (version := document.get("schema")) != SCHEMA:
        raise FileError(
            f"{place}: schema version {version}, this draftsim reads {SCHEMA}: record it again"
        )
    if extra := sorted(set(document) - {"schema", "meta", "outputs", DIGEST}):
        raise FileError(f"{place}: has an unknown field {extra[0]!r}: {REMEDY}")
    if document.get(DIGEST, digest_of_document(document)) != digest_of_document(document):
        raise FileError(f"{place}: the content does not match its checksum: {REMEDY}")
    meta, rows = meta_of(place, document), document.get("outputs")
    if not isinstance(rows, list):
        raise FileError(f"{place}: holds no list of outputs: {REMEDY}")
    outputs = [
        from_row(Output, f"{place}: output {i}", row, _OUTPUT, REMEDY) for i, row in enumerate(rows)
    ]
    lengths = [(r.id, r.tokens) for r in log.requests]
    if [(o.id, len(o.tokens)) for o in outputs] != lengths:
        raise FileError(f"{place}: its outputs are not those of {path.name}: record the run again")
    # Rounds written before do not say themselves how they were sampled.
    with named(place, REMEDY):
        log = replace(log, sampling=Sampling.of(meta.get("sampling")))
    return RealRun(log, outputs, meta)


_OUTPUT: Mapping[str, FieldCheck] = {
    **dict.fromkeys(("id", "text", "reference"), lambda value: isinstance(value, str)),
    "tokens": are_wholes,
    # Rounding may leave a sum of logarithms of 1 above 0.
    "log_likelihood": lambda value: is_number(value) and value < 1e-3,
    **dict.fromkeys(
        ("solved", "greedy_solved", "passed", "greedy_passed"),
        lambda value: value is None or isinstance(value, bool),
    ),
}
"""The check of each field of an output."""


def find_runs(path: PathLike) -> list[Path]:
    """Return the round files that `path` means: itself, or those of a run folder."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    return sorted((path / FOLDER).glob("*.parquet"))


def file_name(log: RoundLog, sampling: Sampling = GREEDY, part: str = "") -> str:
    """Return a name for the log's file: policy, rule, how outputs were drawn, and of which prompts.

    >>> from traces.replay.rounds import RoundLog
    >>> import numpy as np
    >>> file_name(RoundLog(np.empty(0), [], "fixed:gamma=6", verify="csd:tau=0.3"))
    'fixed_gamma-6+csd_tau-0.3'
    """
    drawn = "" if sampling.greedy else f"+{sampling.label}"
    some = f"+{part}" if part else ""
    text = f"{log.policy}+{log.verify}{drawn}{some}".replace("=", "-")
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
