"""Counts in servers' responses: of SGLang, TensorRT-LLM, llama.cpp and LM Studio."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any, ClassVar

from traces.acceptance.trace import MOST_DRAFTED, MOST_TOKENS
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import LocatedRow, choices_of, read_json_rows
from traces.importers.totals import Summary, Totals, check_drafted, pooled, summed
from traces.store.text import MOST_COUNT, is_seconds, read_text, whole, wholes

HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")
CORRECT = ("spec_num_correct_drafts", "spec_accept_token_num")
"""Counts by their names in newer and older versions; they hold drafts that a limit cut off."""


class SGLang(Importer):
    """SGLang's responses.

    ``spec_verify_ct`` verifications, ``completion_tokens``, and in newer versions
    ``spec_num_proposed_drafts``, ``spec_num_correct_drafts`` and ``spec_correct_drafts_histogram``
    (rounds by accepted drafts); before that ``spec_draft_token_num``, ``spec_accept_token_num`` and
    ``spec_accept_histogram``.  The histogram ends with the most that a round accepted.  Where more
    was proposed, the drafts were trees or longer chains; ``fixed:N`` says that they were chains.
    Rounds are not in order, so there is no trace.  Source of the format: sgl-project/sglang,
    ``managers/io_struct.py`` and ``tokenizer_manager.py``.
    """

    name = "sglang"
    summary = "SGLang's responses (meta_info with spec_verify_ct)"
    takes = ("draft_lengths",)

    def sniff(self, text: str) -> bool:
        return '"spec_verify_ct"' in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        fixed = _fixed(options.draft_lengths)
        logged = [pair for file in files for pair in _infos(file)]
        found = [(at, info) for at, info in logged if _is_finished(info)]
        if logged and not found:
            raise FileError(
                f"{files[0]}: no response of it finished: log the last chunk of each response"
            )
        if not found:
            raise FileError(
                f"{files[0]}: no response with meta_info.spec_verify_ct: serve with speculative "
                "decoding switched on"
            )
        rounds = sum(_count(at, info, "spec_verify_ct") for at, info in found)
        if not rounds:
            raise FileError(f"{files[0]}: is a log without speculation: spec_verify_ct is 0 in it")
        accepted = sum(_accepted(at, info) for at, info in found)
        drafted = None
        if all(_name(info, PROPOSED) for _, info in found):
            drafted = sum(_count(at, info, _name(info, PROPOSED)) for at, info in found)
            check_drafted(str(files[0]), PROPOSED[0], drafted, rounds)
        histograms = [_histogram(at, info) for at, info in found]
        per_position = longest = None
        if all(histograms) or fixed is not None:
            most = max(len(h) for h in histograms) - 1
            longest = _chain(files[0], rounds, drafted, most, fixed)
            per_position = summed(histograms, longest) if all(histograms) else None
        meta = self.meta(files)
        return Totals(rounds, drafted, accepted, longest, per_position, len(found), meta=meta)


def _chain(file: Path, rounds: int, drafted: int | None, most: int, fixed: int | None) -> int:
    """Return the draft length of `rounds` that accepted `most` drafts, at the most.

    Raises FileError if it contradicts the counts, or they may be those of trees.
    """
    if drafted is None:
        return max(most, fixed or 0)
    each = drafted / rounds
    if fixed is not None and (drafted != fixed * rounds or most > fixed):
        raise FileError(
            f"{file}: {each:.3g} tokens proposed a verification and up to {most} accepted are no "
            f"drafts of {fixed} each: say the server's own draft length"
        )
    if drafted > most * rounds and fixed is None:
        chain = "chains of several lengths: give --acceptance the acceptance length instead (3:2.1)"
        if each.is_integer():
            chain = f"a chain of {each:g}: then import with --draft-lengths fixed:{each:g}"
        raise FileError(
            f"{file}: proposes {each:.3g} tokens a verification and accepts at most {most}: a "
            f"tree, or {chain}"
        )
    return max(most, fixed or 0)


def _infos(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, row in read_json_rows(file):
        for holder in (row, *choices_of(row)):
            info = holder.get("meta_info")
            if isinstance(info, dict) and info.get("spec_verify_ct") is not None:
                yield where, info


def _is_finished(info: Mapping[str, Any]) -> bool:
    """Return False for a response that was aborted, and for a streamed chunk before the last.

    The last chunk's counts hold those of the chunks before.
    """
    reason = info.get("finish_reason", {})
    aborted = isinstance(reason, dict) and reason.get("type") == "abort"
    return not (aborted or reason is None)


def _count(at: str, info: Mapping[str, Any], name: str) -> int:
    return whole(at, f"meta_info.{name}", info.get(name))


def _name(info: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the name that a version of SGLang gives to a count; empty if it has none."""
    return next((name for name in names if info.get(name) is not None), "")


def _accepted(at: str, info: Mapping[str, Any]) -> int:
    if name := _name(info, CORRECT):
        return _count(at, info, name)
    # Versions without counts: what was emitted beyond a token a round and the prompt's own.
    rounds, tokens = _count(at, info, "spec_verify_ct"), _count(at, info, "completion_tokens")
    return max(0, tokens - rounds - 1)


def _histogram(at: str, info: Mapping[str, Any]) -> list[int]:
    """Return rounds by accepted drafts; empty if it is not there."""
    values: Any = info.get(_name(info, HISTOGRAMS), [])
    wholes(at, "its histogram of accepted drafts", values)
    whole(at, "the length of its histogram", len(values), most=MOST_DRAFTED + 1)
    if values and sum(values) != info["spec_verify_ct"]:
        raise FileError(
            f"{at}: the histogram counts {sum(values)} rounds, spec_verify_ct "
            f"{info['spec_verify_ct']}: they do not belong together"
        )
    return list(values)


STATS = "specDecodingStats"
CHOICE = "speculative_decoding"
_ITERATION = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
_SUMMED = (
    "acceptance_histogram", "num_spec_steps", "total_draft_tokens", "total_accepted_draft_tokens",
)  # fmt: skip


class TRTLLMLog(Importer):
    """TensorRT-LLM's iteration statistics or responses.

    An iteration (``trtllm-serve``'s ``/metrics``, ``LLM.get_stats``, ``trtllm-bench
    --iteration_log``) holds ``specDecodingStats``: ``numDraftTokens``, ``numAcceptedTokens`` and
    ``numRequestsWithDraftTokens``, one round each; where only single requests drafted, every
    iteration is one round and the survival curve follows.  A response's choice holds
    ``speculative_decoding`` (``per_request_spec_decode_stats: true``): ``num_spec_steps``,
    ``total_draft_tokens``, ``total_accepted_draft_tokens``, ``acceptance_histogram`` and
    ``num_spec_tokens``.  Source of the format: NVIDIA/TensorRT-LLM, ``_torch/pyexecutor`` and
    ``serve/openai_protocol.py``; ai-dynamo/aiperf, ``spec_decode/trtllm_adapter.py``.
    """

    name = "tensorrt-llm"
    summary = "TensorRT-LLM's iterations (specDecodingStats) or responses (speculative_decoding)"

    def sniff(self, text: str) -> bool:
        response = f'"{CHOICE}"' in text and f'"{_SUMMED[-1]}"' in text
        return response or f'"{STATS}"' in text or f"'{STATS}'" in text

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        rows = [row for file in files for row in _rows(file)]
        meta = self.meta(files)
        responses = [pair for where, row in rows for pair in _choices(where, row)]
        if responses:
            return pooled([Summary(at, *map(c.get, _SUMMED)) for at, c in responses], meta)
        # Other ranks' rows hold the same iterations.
        own = [(at, row) for at, row in rows if not (row.get("attentionDpRank") or row.get("rank"))]
        return _iterations(files[0], own, meta)


def _iterations(
    file: Path, rows: Sequence[tuple[str, Mapping[str, Any]]], meta: dict[str, Any]
) -> Totals:
    if not any(STATS in row for _, row in rows):
        raise FileError(
            f"{file}: no iteration with {STATS} and no choice with {CHOICE}: serve with "
            "enable_iter_perf_stats: true, or per_request_spec_decode_stats: true"
        )
    found = []
    for at, row in rows:
        stats = row.get(STATS)
        if stats is None:
            continue
        if not isinstance(stats, dict):
            raise FileError(f"{at}: {STATS} is {shown(stats)}, expected an object")
        requests, drafted, accepted = counts = [
            whole(at, f"{STATS}.{name}", stats.get(name)) for name in _ITERATION
        ]
        if accepted > drafted or requests > drafted or (drafted and not requests):
            raise FileError(
                f"{at}: {STATS} counts {accepted} accepted of {drafted} drafted in {requests} "
                "requests: they do not belong together"
            )
        check_drafted(at, f"{STATS}.numDraftTokens", drafted, requests)
        if drafted:
            found.append(counts)
    if not found:
        raise FileError(f"{file}: is a log without speculation, no iteration drafted a token")
    rounds, drafted, accepted = (sum(column) for column in zip(*found, strict=True))
    longest = per_position = None
    if all(requests == 1 for requests, _, _ in found):
        longest = max(drafts for _, drafts, _ in found)
        per_position = [sum(a >= k for _, _, a in found) for k in range(1, longest + 1)]
    totals = Totals(rounds, drafted, accepted, longest, per_position, meta=meta)
    return replace(totals, differ=any(n > totals.reach * requests for requests, n, _ in found))


def _choices(where: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for i, choice in enumerate(choices_of(row)):
        if isinstance(stats := choice.get(CHOICE), dict):
            yield f"{where}, choice {i}", stats


def _rows(file: Path) -> list[LocatedRow]:
    """Return the rows of a file, of JSON or as Python prints a dictionary (the iteration log)."""
    text = read_text(file)
    if not text.lstrip().startswith("{'"):
        return read_json_rows(file)
    rows: list[LocatedRow] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        at = f"{file} line {number}"
        try:
            row = ast.literal_eval(line)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise FileError(f"{at}: is no dictionary (truncated?): copy the file again") from error
        if not isinstance(row, dict):
            raise FileError(f"{at}: is no dictionary: expected one iteration a line")
        rows.append((at, row))
    return rows


class LlamaCpp(Importer):
    """llama.cpp's server responses.

    ``predicted_n`` tokens in ``predicted_ms``, ``draft_n`` drafted and ``draft_n_accepted``
    accepted ones, the last two only where a draft was made.  A round emits its accepted tokens and
    one more, so there were ``predicted_n - draft_n_accepted`` of them, of which the first emitted
    the prompt's own token; rounds without a draft are among them.  The server ends a round at an
    end of the text that it finds in a draft, and counts that token as the target's own; only where
    it is the draft's last is it counted as accepted, and no token follows: such a request had one
    round more than this says (up to a draft's length more in versions that draft on past the end).
    Source of the format: ggml-org/llama.cpp, ``tools/server``.
    """

    name = "llamacpp"
    summary = "responses of llama.cpp's server (timings with draft_n)"
    takes = ("draft_lengths",)
    place: ClassVar[str] = "timings"
    """Where a response has its counts, for messages."""
    counts: ClassVar[tuple[str, str, str]] = ("predicted_n", "draft_n", "draft_n_accepted")
    """Names of a request's tokens, and of those drafted and accepted."""

    def sniff(self, text: str) -> bool:
        return '"draft_n"' in text or '"draft_n_accepted"' in text

    def told(self, response: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what a response counts; None if it counts nothing."""
        timings = response.get("timings")
        return timings if isinstance(timings, dict) else None

    def wall_s(self, where: str, told: Mapping[str, Any]) -> float:
        """Return seconds of decoding; 0 where they are not told."""
        return _positive(where, "predicted_ms", told, "milliseconds") / 1e3

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        longest = _fixed(options.draft_lengths)
        summaries, tokens, wall_s = [], 0, 0.0
        for where, row in (row for file in files for row in read_json_rows(file)):
            told, at = self.told(row), f"{where}, {self.place}"
            if told is None:
                if row.get("error") is not None:
                    continue  # a request that failed
                raise FileError(f"{where}: has no {self.place}: expected {self.summary}")
            n, d, a = (
                whole(where, f"{self.place}.{name}", told.get(name, 0), most=most)
                for name, most in zip(self.counts, _MOST, strict=True)
            )
            if a > d:
                _, drafted, accepted = self.counts
                raise FileError(f"{where}: {accepted}={a} of {drafted}={d}: they do not belong "
                                "together")  # fmt: skip
            rounds = max(n - a - 1, int(d > 0))
            summaries.append(Summary(at, None, rounds, d, a, longest))
            tokens, wall_s = tokens + n, wall_s + self.wall_s(f"{where}: {self.place}", told)
        if not any(summary.drafted for summary in summaries):
            raise FileError(
                f"{files[0]}: is a log without speculation, its {self.place} have no "
                f"{self.counts[1]}: serve with a draft model"
            )
        measured = {"tokens": tokens, "rounds": sum(s.rounds for s in summaries), "wall_s": wall_s}
        totals = pooled(summaries, self.meta(files, measured=measured))
        if longest is not None and not totals.fixed_length:
            raise FileError(
                f"{files[0]}: {totals.drafted} tokens drafted in {totals.rounds} rounds are no "
                f"drafts of {longest} each: say the --draft-max of a server with --draft-p-min 0, "
                "or leave --draft-lengths out"
            )
        return totals


_MOST = (MOST_TOKENS, MOST_COUNT, MOST_COUNT)
"""How large each count of a request can be."""


class LMStudio(LlamaCpp):
    """LM Studio's responses, of its own API and of the one like OpenAI's.

    ``usage.completion_tokens``, and in ``usage`` or ``stats`` ``total_draft_tokens_count`` and
    ``accepted_draft_tokens_count``; the rounds follow as in llama.cpp, which it runs.
    ``stats.tokens_per_second`` is there in its own API alone.  Source of the format: lmstudio.ai,
    REST API v0.
    """

    name = "lmstudio"
    summary = "responses of LM Studio (usage or stats with total_draft_tokens_count)"
    place = "usage and stats"
    counts = ("completion_tokens", "total_draft_tokens_count", "accepted_draft_tokens_count")

    def sniff(self, text: str) -> bool:
        return '"total_draft_tokens_count"' in text

    def told(self, response: Mapping[str, Any]) -> Mapping[str, Any] | None:
        usage, stats = response.get("usage"), response.get("stats", {})
        if isinstance(usage, dict) and isinstance(stats, dict) and self.counts[0] in usage:
            return {**stats, **usage}
        return None

    def wall_s(self, where: str, told: Mapping[str, Any]) -> float:
        speed = _positive(where, "tokens_per_second", told, "a speed")
        return float(told["completion_tokens"]) / speed if speed else 0.0


def _fixed(text: str) -> int | None:
    """Return the draft length that ``fixed:N`` says; None if nothing is said."""
    if text == "infer":
        return None
    kind, _, length = text.partition(":")
    plain = kind == "fixed" and length.isascii() and length.isdigit()
    if not plain or not 1 <= int(length) <= MOST_DRAFTED:
        raise FileError(
            f"--draft-lengths {text}: counts tell of drafts of one length alone: fixed:N, N the "
            "server's draft length (llama.cpp: --draft-max)"
        )
    return int(length)


def _positive(where: str, name: str, told: Mapping[str, Any], what: str) -> float:
    """Return the number of this name; 0 where it is not told."""
    value = told.get(name)
    if value is None or value == 0:
        return 0.0
    if not is_seconds(value):
        raise FileError(f"{where}.{name} is {shown(value)}, expected {what}")
    return float(value)
