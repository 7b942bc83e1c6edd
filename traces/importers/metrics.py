"""Scrapes of a server's ``/metrics``, in the Prometheus text format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from traces.acceptance.trace import MOST_DRAFTED
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.totals import Totals
from traces.store.text import MOST_COUNT, decimal, digits, read_text

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:\\.|[^"\\])*)"', re.ASCII)
TOTAL = "_total"
"""The format's suffix of a counter's name."""

Counts = Mapping[tuple[str, int], int]
"""Counts by name and position; position 0 of a counter that has none."""


def read_samples(file: Path, prefix: str) -> Iterator[tuple[str, str, Mapping[str, str], str]]:
    """Yield the place, name, labels and text of the samples whose names begin with `prefix`."""
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if line.startswith(prefix) and (parts := _SAMPLE.match(line)) is not None:
            name, labels, text = parts.groups()
            yield f"{file} line {number}", name, dict(_LABEL.findall(labels or "")), text


def read_counts(
    files: Sequence[Path], prefix: str, plain: Collection[str], placed: Collection[str] = (),
    label: str = "position",
) -> Counts:  # fmt: skip
    """Read counters by name (without `prefix`), summed over engines and models.

    ``files`` are a scrape, or one before and one after; ``placed`` counters have the `label` that
    gives a draft position, ``plain`` ones have not.  Raises FileError if a value is no count, a
    label does not belong there, or the second scrape counts less.
    """
    if len(files) > 2:
        raise FileError(f"prometheus takes a scrape, or two, not {len(files)} files")
    counts = _count(files[-1], prefix, plain, placed, label)
    if len(files) == 2:
        before = _count(files[0], prefix, plain, placed, label)
        counts = {key: value - before.get(key, 0) for key, value in counts.items()}
        if any(value < 0 for value in counts.values()):
            raise FileError(
                f"{files[1]}: counts less than {files[0]}: name the earlier scrape first, and "
                "scrape a restarted server again"
            )
    return counts


STARTED = "process_start_time_seconds"
CREATED = "_created"
"""The suffix of the time at which a counter began to count."""


def starts(file: Path, prefix: str) -> dict[str, float]:
    """Return the times at which a server, or else its counters, began, by what has the time."""
    for begin in (STARTED, prefix):
        found = {
            f"{name} {sorted(labels.items())}": decimal(text)
            for _, name, labels, text in read_samples(file, begin)
            if name == STARTED or name.endswith(CREATED)
        }
        if found:
            return found
    return {}


def by_position(counts: Counts, name: str, file: Path) -> list[int]:
    """Return a counter's values at draft positions 0, 1, ...; empty if it is not there."""
    positions = sorted(p for n, p in counts if n == name)
    if positions != list(range(len(positions))):
        raise FileError(f"{file}: positions {positions} are not 0, 1, 2, ...")
    return [counts[name, p] for p in positions]


def _count(
    file: Path, prefix: str, plain: Collection[str], placed: Collection[str], label: str
) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for where, full, labels, text in read_samples(file, prefix):
        name = full.removeprefix(prefix).removesuffix(TOTAL)
        if name not in plain and name not in placed:
            continue
        if (name in placed) != (label in labels):
            raise FileError(f"{where}: the label {label} does not belong there")
        position = digits(where, f"the label {label}", labels.get(label, "0"), most=MOST_DRAFTED)
        value = decimal(text)
        if not 0 <= value <= MOST_COUNT or not value.is_integer():
            raise FileError(f"{where}: {shown(text)} is no count of at most {MOST_COUNT:,}")
        key = name, position
        counts[key] = counts.get(key, 0) + int(value)
    return counts


_DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")
_ACCEPTED = "accepted_tokens_per_pos"
_EMITTED = ("generation_tokens", "request_success")
"""vLLM's counters of output tokens and of finished requests."""
SELDOM = 0.9
"""Below this part of the steps, drafts are missing; requests that end take some of them, too."""


def read_drafts(files: Sequence[Path], meta: dict[str, Any]) -> Totals:
    """Return the totals of a server whose counters are called ``SERVER:spec_decode_num_…``.

    ``spec_decode_num_drafts``, ``…_num_draft_tokens``, ``…_num_accepted_tokens`` and
    ``…_num_accepted_tokens_per_pos`` with the label ``position``, each with the suffix ``_total``.
    vLLM counts the steps with a draft alone.  Where n-grams found none in many steps, these count
    as rounds with an empty draft, and ``drafting`` of the provenance is the part of the steps that
    had one.  Sources of the format:
    vllm-project/vllm, ``v1/spec_decode/metrics.py``; ggml-org/llama.cpp, ``tools/server``
    (``/metrics``, 2026).
    """
    server = meta["server"]
    prefix = f"{server}:spec_decode_num_"
    counts = read_counts(files, prefix, _DRAFTS, (_ACCEPTED,))
    for name in _DRAFTS:
        if (name, 0) not in counts:
            raise FileError(
                f"{files[-1]}: has no {prefix}{name}: expected {server}'s /metrics with "
                "speculative decoding switched on"
            )
    rounds, drafted, accepted = (counts[name, 0] for name in _DRAFTS)
    if not rounds:
        raise FileError(f"{files[-1]}: counts no draft: nothing was decoded speculatively")
    per_position = by_position(counts, _ACCEPTED, files[-1]) or None
    emitted = read_counts(files, f"{server}:", _EMITTED)
    if all((name, 0) in emitted for name in _EMITTED):
        # A request's first token comes with its prompt.
        steps = emitted[_EMITTED[0], 0] - emitted[_EMITTED[1], 0] - accepted
        if rounds < SELDOM * steps:
            meta["drafting"] = rounds / steps
            rounds = steps
    longest = len(per_position) if per_position else None
    return Totals(rounds, drafted, accepted, longest, per_position, meta=meta)


SGLANG = "sglang:"
WHOLE = 1e-3
"""Largest distance of a draft length from a whole number, for gauges that are rounded."""
_SGLANG_COUNTERS = ("spec_verify_calls", "generation_tokens", "num_requests")


def read_sglang(files: Sequence[Path], meta: dict[str, Any]) -> Totals:
    """Return the totals from counters where they are, else means from gauges.

    ``sglang:spec_verify_calls_total``, ``generation_tokens_total`` and ``num_requests_total`` grow
    as requests finish: a verification emits its accepted tokens and one more, a prompt its first
    token, so the accepted are what was generated beyond these.  Where the first is missing (older
    versions) the gauges ``spec_accept_length`` (accepted drafts and the bonus token of a round) and
    ``spec_accept_rate`` (accepted of proposed) tell the last batches' means, of how many rounds is
    not known.  Some versions count the bonus token among the accepted and the proposed: the draft
    length is told where one reading alone gives a whole number.  ``spec_num_steps`` and
    ``spec_num_draft_tokens`` are the lengths in force; more draft tokens than a chain of those
    steps verifies make a tree.  Source of the format: sgl-project/sglang,
    ``srt/observability/metrics_collector.py``.

    Raises FileError if nothing was decoded speculatively, the counts contradict each other, or
    engines' gauges differ, which nothing weighs.
    """
    file = files[-1]
    counts = read_counts(files, SGLANG, _SGLANG_COUNTERS)
    steps, tree = _lengths(files)
    if not all((name, 0) in counts for name in _SGLANG_COUNTERS):
        return _means(file, steps, tree, meta)
    rounds, tokens, requests = (counts[name, 0] for name in _SGLANG_COUNTERS)
    if not rounds:
        raise FileError(f"{file}: counts no verification: nothing was decoded speculatively")
    accepted = tokens - requests - rounds
    if accepted < 0 or (steps is not None and accepted > rounds * steps):
        raise FileError(
            f"{file}: {tokens} tokens of {requests} requests in {rounds} verifications of "
            f"{steps or 'unknown'} steps: the counts do not belong together"
        )
    return Totals(rounds, None, accepted, steps, requests=requests, tree=tree, meta=meta)


def _means(file: Path, steps: int | None, tree: bool, meta: Mapping[str, object]) -> Totals:
    length = _gauge(file, "spec_accept_length")
    if length is None:
        raise FileError(
            f"{file}: has neither {SGLANG}spec_verify_calls_total nor {SGLANG}spec_accept_length: "
            "expected SGLang's /metrics (--enable-metrics) with speculative decoding switched on"
        )
    if not length:
        raise FileError(f"{file}: its mean acceptance length is 0: nothing was decoded yet")
    if length < 1:
        raise FileError(f"{file}: its mean acceptance length is {length:g}, expected 1 or more")
    rate = _gauge(file, "spec_accept_rate")
    # Some versions count the bonus token, and its place among the proposed; others count neither.
    readings = (length / rate - 1, (length - 1) / rate) if rate and not tree else ()
    whole = {round(k) for k in readings if abs(k - round(k)) < WHOLE and round(k) >= 1}
    found = whole if steps is None else whole & {steps}
    drafted = float(found.pop()) if len(found) == 1 else None
    return Totals(None, drafted, length - 1, steps, tree=tree, meta=meta)


def _lengths(files: Sequence[Path]) -> tuple[int | None, bool]:
    """Return steps in force, None if they are not told or changed; whether a tree was verified.

    Before its first request a server tells none, or 0.
    """
    names = ("spec_num_steps", "spec_num_draft_tokens")
    *before, last = [tuple(_gauge(file, name) for name in names) for file in files]
    told = {last, *(pair for pair in before if pair[0])}
    tree = any(steps and drafts and drafts > steps + 1 for steps, drafts in told)
    ((steps, _), *changed) = told
    return (int(steps) if steps and not changed else None), tree


def _gauge(file: Path, name: str) -> float | None:
    """Return a gauge's value: ranks repeat it, and draft engines that decode nothing hold 0."""
    found = []
    for where, full, _, text in read_samples(file, SGLANG):
        if full != SGLANG + name:
            continue
        value = decimal(text)
        if not 0 <= value <= MOST_DRAFTED + 1:
            raise FileError(f"{where}: {shown(text)} is no length or rate")
        found.append(value)
    values = sorted(set(found) - {0.0})
    if len(values) > 1:
        raise FileError(
            f"{file}: {SGLANG}{name} differs between engines "
            f"({', '.join(f'{v:g}' for v in values)}), and a gauge does not say of how many "
            "rounds: scrape them one at a time"
        )
    return values[0] if values else (0.0 if found else None)


TENSORRT_LLM = "trtllm_spec_decode_"
_BY_POSITION = ("drafted_tokens", "accepted_tokens")


def read_tensorrt_llm(files: Sequence[Path], meta: dict[str, Any]) -> Totals:
    """Read totals with counts per position.

    ``trtllm_spec_decode_drafted_tokens_total`` and ``…_accepted_tokens_total`` with the label
    ``token_position`` count finished requests: the first position was drafted once a round.  The
    iterations' own ``trtllm_spec_decode_num_draft_tokens_total`` and
    ``…_num_accepted_tokens_total`` count tokens of an unknown number of rounds.  Source of the
    format: NVIDIA/TensorRT-LLM, ``tensorrt_llm/metrics/collector.py``.

    Raises FileError if those counters are missing, or count nothing.
    """
    file = files[-1]
    counts = read_counts(files, TENSORRT_LLM, (), _BY_POSITION, "token_position")
    drafted, accepted = (by_position(counts, name, file) for name in _BY_POSITION)
    if not drafted:
        raise FileError(
            f"{file}: has no {TENSORRT_LLM}drafted_tokens_total by token_position, and the tokens "
            "of iterations alone do not say in how many rounds: ask for per-request metrics "
            "(return_perf_metrics: true), or import the iterations' JSON as tensorrt-llm"
        )
    if not drafted[0]:
        raise FileError(f"{file}: counts no draft: nothing was decoded speculatively")
    # A position that was never accepted has no sample yet.
    accepted += [0] * (len(drafted) - len(accepted))
    return Totals(
        drafted[0], sum(drafted), sum(accepted), len(drafted), accepted, meta=meta
    )  # fmt: skip


SERVERS: Mapping[str, tuple[str, Callable[[Sequence[Path], dict[str, Any]], Totals]]] = {
    "vllm:spec_decode_": ("vllm", read_drafts),
    "llamacpp:spec_decode_": ("llamacpp", read_drafts),
    "sglang:spec_": ("sglang", read_sglang),
    "trtllm_spec_decode_": ("tensorrt-llm", read_tensorrt_llm),
}
"""How the names of a server's metrics of speculation begin, and who reads them."""


class Prometheus(Importer):
    """``/metrics`` of vLLM, SGLang, TensorRT-LLM or llama.cpp: since the start, or between two."""

    name = "prometheus"
    summary = (
        "/metrics of vLLM, SGLang, TensorRT-LLM or llama.cpp's server; two files: before and after"
    )

    sniffed = None  # other metrics may come first, of any length

    def sniff(self, text: str) -> bool:
        return not text.lstrip().startswith(("{", "[")) and bool(_servers(text))

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        found = [_servers(read_text(file)) for file in files]
        # Before its first request a server may have no sample yet.
        if len(found[-1]) != 1 or any(other not in ([], found[-1]) for other in found):
            told = sorted({name for names in found for name in names}) or ["none"]
            raise FileError(
                f"{files[-1]}: expected /metrics of one server with speculative decoding switched "
                f"on, whose names begin with {' or '.join(SERVERS)}; found {', '.join(told)}"
            )
        server, read = SERVERS[found[-1][0]]
        for file, names in zip(files, found, strict=True):
            if not names and not _is_fresh(read_text(file), found[-1][0]):
                raise FileError(f"{file}: is no /metrics of {server}: name an earlier scrape of it")
        meta = self.meta(files, server=server)
        if len(files) == 2:
            if not found[0]:
                meta["scrapes"] = (
                    f"{files[0].name} counts no draft yet: {files[1].name} counts from the start"
                )
            before, after = (starts(file, found[-1][0]) for file in files)
            both = before.keys() & after.keys()
            if any(before[name] > after[name] for name in both):
                raise FileError(
                    f"{files[1]}: began to count before {files[0]}: name the earlier scrape first"
                )
            restarted = {name for name in both if before[name] < after[name]}
            if restarted and restarted != both:
                raise FileError(
                    f"{files[1]}: some of its engines were restarted after {files[0]}, and others "
                    "were not: scrape twice without a restart between"
                )
            if restarted:
                meta["scrapes"] = (
                    f"the server was restarted after {files[0].name}: {files[1].name} alone counts"
                )
                files = files[1:]
            elif not both and found[0]:
                meta["scrapes"] = (
                    "the scrapes do not tell when the server started: a restart between them "
                    "cannot be told"
                )
        return read(files, meta)


def _is_fresh(text: str, begin: str) -> bool:
    """Return True for /metrics of a server, whose metrics of speculation begin with `begin`."""
    own = "|".join((re.split("[:_]", begin)[0] + "[:_]", STARTED))
    return not text.lstrip().startswith(("{", "[")) and bool(
        re.search(rf"^(?:# TYPE )?(?:{own})", text, re.MULTILINE)
    )


def _servers(text: str) -> list[str]:
    lines = "\n" + text
    return [begin for begin in SERVERS if f"\n{begin}" in lines]
