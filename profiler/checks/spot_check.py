"""Full runs of policies, one stream or a batch, and of transformers' own assisted generation.

Runs are interleaved (`profiler.checks.interleaved`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch

from policies.core import DraftPolicy, Round, own_copy, speculate
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from policies.together import Together, together_of
from profiler.checks.differences import output_of, solves
from profiler.checks.interleaved import Attempt, CheckWork, Unit, UnitRun, run_interleaved
from profiler.decoding.batch import BatchedDecoder, Stream, enter, speculate_batch
from profiler.decoding.forced import ForcedDecoder, ForcedStream
from profiler.decoding.single import ModelDecoder, judge_again
from profiler.machine import timed
from profiler.models.loading import Pair, check_same_models
from profiler.models.runner import Runner
from profiler.models.seq2seq import decoder_prefix, is_seq2seq, make_runner
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.machine import State
from traces.replay.rounds import RoundLog
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import MEASURED_COLUMNS, OFF_COLUMNS
from traces.store.outputs import Output, RealRun

if TYPE_CHECKING:
    from profiler.sources.run import SourceRunner
    from traces.sources.base import Source


@dataclass(frozen=True)
class PlannedPolicy:
    """A policy to run, under the name it is reported by; losslessly unless a rule is given.

    In batches (`run_batches`) the policy may decide for the whole batch.  Drafts are the draft
    model's unless a `source` is given.
    """

    name: str
    policy: Any
    rule: VerifyRule | None = None
    source: Source | None = None

    @property
    def label(self) -> str:
        """The label of its runs: the name, and the rule if it is lossy."""
        return self.name if self.lossy is None else f"{self.name} {describe_rule(self.lossy)}"

    @property
    def lossy(self) -> VerifyRule | None:
        """The rule, unless it is lossless: then the decoder needs none."""
        return None if self.rule is None or self.rule.lossless else self.rule

    def verify(self, trace: Trace) -> str:
        """Return the name of the rule that verifies its drafts along `trace`."""
        if self.lossy is not None:
            return describe_rule(self.lossy)
        return "exact" if trace.temperature == 0 else "rejection-sampling"


@dataclass
class _Requests(CheckWork):
    """Single requests; a policy and its rule learn from one to the next."""

    planned: Sequence[PlannedPolicy]
    units: Sequence[Unit]
    trace: Trace
    model: DraftModel
    drafters: SourceRunner | None

    def captured(self) -> int:
        return self.model.captured()

    def label(self, run: PlannedPolicy, unit: Unit) -> str:
        return run.label

    def begun(self, run: PlannedPolicy, unit: Unit) -> tuple[DraftPolicy, VerifyRule | None]:
        """Return the repeat's own copies of the policy and rule; no rule where it is lossless."""
        vocab_size = self.trace.vocab_size or self.model.target.vocab_size
        policy: DraftPolicy = own_copy(run.policy, vocab_size)
        if run.lossy is None:
            return policy, None
        rule, sampling = run.lossy.fresh(), self.trace.sampling
        try:
            rule.begin_run(vocab_size, sampling.temperature, sampling.top_p)
        except ValueError as error:
            raise DraftsimError(f"{describe_rule(run.lossy)}: {error}") from None
        return policy, rule

    def attempt(self, repeat: int, unit: Unit, run: PlannedPolicy, learnt: Any) -> Attempt:
        (learner, rule), [request] = deepcopy(learnt), unit[1]
        decoder: Any
        if run.source is None:
            decoder = self.model.decoder(run, request, rule)
        else:
            assert self.drafters is not None
            decoder = self.drafters.decoder(run.source, request)
        device, fresh = self.model.target.device, learner.fresh()
        timing, rounds = timed(device, lambda: _rounds(decoder, fresh, run))
        if rule is not None:
            rule.end_request()
        found: dict[str, Any] = {"rounds": rounds, "output": decoder.output}
        if run.lossy:
            found |= {
                "mismatched": decoder.mismatched, "log_probs": decoder.log_probs,
                "shown": decoder.shown,
            }  # fmt: skip
        return timing, ((learner, rule), {"requests": [found], "iterations": len(rounds)})

    def relearnt(self, done: UnitRun, run: PlannedPolicy, learnt: Any, policy: bool) -> Any:
        """Return the state after an earlier run; a rule learns from what it was shown there."""
        learner, _ = super().relearnt(done, run, learnt, policy)
        rule = deepcopy(learnt[1])
        if rule is not None:
            for shown in done.found["requests"][0]["shown"]:
                judge_again(rule, shown)
            rule.end_request()
        return learner, rule


def _rounds(decoder: Any, policy: DraftPolicy, run: PlannedPolicy) -> list[Round]:
    try:
        return list(speculate(decoder, policy))
    except ValueError as error:
        # `Oracle` asks how far the drafts match, which a lossy path does not know.
        if decoder.remaining and decoder.load.run_length is None:
            raise DraftsimError(
                f"{run.label} cannot be decoded for real: {error}; drop this policy"
            ) from error
        raise


@dataclass(frozen=True, eq=False)
class Measured:
    """Times of every run (`MEASURED_COLUMNS`); rounds and outputs of every policy, by label.

    Those of batches are keyed by policy and batch size.  ``log_likelihoods`` holds, for policies
    with a lossy rule, the target's log-likelihood of each output at T = 1, in nats; ``machine`` how
    quiet the machine was (`traces.machine`).
    """

    times: pd.DataFrame
    logs: dict[Any, RoundLog]
    outputs: dict[Any, list[list[int]]]
    log_likelihoods: dict[str, list[float]] = field(default_factory=dict)
    machine: State = field(default_factory=dict)


class DraftModel:
    """Opens requests of a trace with both models of a pair.

    ``forced`` and ``runner`` are those of `run_requests`.
    """

    def __init__(
        self, pair: Pair, trace: Trace, forced: bool, runner: Callable[..., Runner]
    ) -> None:
        slots = trace.longest
        self.target, self.draft = runner(pair.target, slots), runner(pair.draft, slots)
        self._pair, self._trace, self._forced = pair, trace, forced
        self._generator = torch.Generator(pair.device)

    def captured(self) -> int:
        """Return the shapes captured as CUDA graphs so far."""
        return self.target.captured + self.draft.captured

    def decoder(self, run: PlannedPolicy, i: int, rule: VerifyRule | None) -> ModelDecoder:
        """Return a decoder after the prefill of request `i`; every repeat draws the same numbers.

        So it samples the same text, and its seconds are those of the same work.
        """
        del run
        trace = self._trace
        if self._forced:
            return ForcedDecoder(self.target, self.draft, trace, i)
        info, starts, runs = trace.requests[i], trace.request_starts, None
        if trace.temperature == 0 and rule is None:
            runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist()
        prompt = torch.tensor(info.prompt_ids, device=self._pair.device)
        return ModelDecoder(
            self.target, self.draft, prompt, info.max_new_tokens, self._pair.eos,
            sampling=trace.sampling, generator=self._generator.manual_seed(i),
            first=trace.first, run_lengths=runs, rule=rule,
        )  # fmt: skip


def check_decodable(pair: Pair, trace: Trace) -> None:
    """Raise DraftsimError unless the trace holds prompts, recorded with the pair's models."""
    if any(r.prompt_ids is None for r in trace.requests):
        raise DraftsimError(
            "this trace holds no prompts to decode again: record one with prompts, or add --forced "
            "where the check has it"
        )
    check_same_models(trace.meta, pair)


def run_requests(
    pair: Pair,
    trace: Trace,
    planned: Sequence[PlannedPolicy],
    *,
    requests: Sequence[int] | None = None,
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None,
    in_time: Callable[[], bool] | None = None,
    runner: Callable[..., Runner] = make_runner,
    drafters: SourceRunner | None = None,
) -> Measured:
    """Decode `requests` of the trace (None: all) for real as `planned`, `repeats` times.

    ``forced`` takes drafts and verdicts from the trace instead of the models (see
    `profiler.decoding.forced`).  ``advance`` is called after every run of a request.
    Policies that learn across requests, and lossy rules, start each repeat without what they
    learnt.  What `kept` holds of an earlier call is not run again, and with `in_time` as many
    requests are run as there is time for (`run_interleaved`).
    ``runner`` makes a model's runner for a number of slots; ``drafters`` makes the decoders where
    another source drafts, and is needed if that has trained modules.

    Raises
    ------
    DraftsimError
        If the trace has no prompts to run (and the run is not forced), or a rule or policy
        cannot run here.
    """
    if forced and any(run.lossy for run in planned):
        raise DraftsimError("a forced run takes its verdicts from the trace: drop --verify")
    if not forced:
        check_decodable(pair, trace)
    some = range(len(trace.requests)) if requests is None else requests
    if drafters is None and any(run.source for run in planned):
        from profiler.sources.run import SourceRunner

        drafters = SourceRunner(pair.target, trace)
    model = DraftModel(pair, trace, forced, runner)
    work = _Requests(planned, [(1, (i,)) for i in some], trace, model, drafters)
    keys = {run.label: (run, 1) for run in planned}
    timing = repeats, advance, kept, in_time
    return _measured(pair, trace, work, keys, forced, *timing)


def _measured(
    pair: Pair, trace: Trace, work: CheckWork, keys: Mapping[Any, tuple[PlannedPolicy, int]],
    forced: bool, *timing: Any,
) -> Measured:  # fmt: skip
    """Run the policies and batch sizes of `keys`; rounds and outputs are the first repeat's."""
    runs, learnt, machine = run_interleaved(pair, work, *timing)
    labels = {work.label(run, (batch, ())): key for key, (run, batch) in keys.items()}
    rows: list[tuple[Any, ...]] = []
    first: dict[Any, list[tuple[int, dict[str, Any]]]] = {key: [] for key in keys}
    for one in runs:
        key, (batch, group), found = labels[one.label], one.unit, one.found
        run, _ = keys[key]
        rows.append(
            (run.name, run.verify(trace), batch, forced, one.repeat, trace.requests[group[0]].id,
             one.timing.wall_s, found["iterations"], one.timing.off_s, one.repeated)
        )  # fmt: skip
        if one.repeat == 0:
            first[key] += zip(group, found["requests"], strict=True)
    measured = Measured(
        pd.DataFrame(rows, columns=[*MEASURED_COLUMNS, *OFF_COLUMNS]), {}, {}, machine=machine
    )
    for label, key in labels.items():
        (run, _), (_, rule) = keys[key], learnt[label]
        done = [ran for _, ran in first[key]]
        if not done:  # with `in_time` only the first units were run
            continue
        decoded = [trace.requests[i] for i, _ in first[key]]
        mismatched = None
        if rule is not None:
            pairs = zip(decoded, done, strict=True)
            decoded = [_emitted(r, ran["output"], pair.eos) for r, ran in pairs]
            mismatched = np.array([n for ran in done for n in ran["mismatched"]], dtype=np.int32)
            measured.log_likelihoods[key] = [sum(ran["log_probs"]) for ran in done]
        measured.logs[key] = RoundLog(
            RoundLog.pack([Round(*r) for r in ran["rounds"]] for ran in done), decoded, run.name,
            verify=run.verify(trace), reads=run.policy.reads, first=trace.first,
            mismatched=mismatched, rule=rule, sampling=trace.sampling,
        )  # fmt: skip
        measured.outputs[key] = [ran["output"] for ran in done]
    return measured


def _emitted(request: Request, output: Sequence[int], eos: frozenset[int]) -> Request:
    """Return `request` with the length and end of an output of its own."""
    ended: Literal["eos", "length"] = "eos" if output[-1] in eos else "length"
    return replace(request, tokens=len(output), ended=ended, wall_s=None)


def real_run(
    pair: Pair, greedy: Trace, run: PlannedPolicy, measured: Measured, meta: Mapping[str, Any],
    answers: Mapping[str, str] | None = None,
) -> RealRun:  # fmt: skip
    """Return the rounds and outputs of a run with a lossy rule.

    ``greedy`` is the recording of the target's own outputs, which may hold more requests; `answers`
    are those of `profiler.checks.differences.answers_to`.
    """
    place = {request.id: i for i, request in enumerate(greedy.requests)}
    log = measured.logs[run.label]
    outputs = []
    for request, tokens, nats in zip(
        log.requests, measured.outputs[run.label], measured.log_likelihoods[run.label], strict=True
    ):
        at, answer = place[request.id], (answers or {}).get(request.id)
        own, ended = output_of(greedy, at), greedy.requests[at].ended
        outputs.append(
            Output(
                request.id, tokens, pair.tokenizer.decode(tokens), pair.tokenizer.decode(own),
                float(nats), solves(pair, tokens, request.ended, answer),
                solves(pair, own, ended, answer),
            )
        )  # fmt: skip
    table = getattr(log.rule, "table", None)
    memory = {} if table is None else {"sizes": list(table.sizes), "evictions": table.evictions}
    return RealRun(log, outputs, {**pair.meta, **meta, "memory": memory})


def assisted_generation(
    pair: Pair, prompt: torch.Tensor, max_new_tokens: int, **settings: Any
) -> tuple[list[int], int]:
    """Run transformers' own assisted generation: return (output ids, target passes).

    ``settings`` go to the draft's generation config: ``num_assistant_tokens``,
    ``num_assistant_tokens_schedule``, ``assistant_confidence_threshold``.
    """
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    config = pair.draft.generation_config
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    handle = pair.target.register_forward_pre_hook(count)
    try:
        with torch.inference_mode():
            out = pair.target.generate(
                input_ids=prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                assistant_model=pair.draft,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
    finally:
        handle.remove()
        for name, value in before.items():
            setattr(config, name, value)
    # An encoder-decoder's sequence begins with its start token, not with the prompt.
    fed = len(decoder_prefix(pair.target)) if is_seq2seq(pair.target) else prompt.shape[0]
    return out[0, fed:].tolist(), passes


def groups_of(requests: int, batch: int) -> list[range]:
    """Return the groups of consecutive requests that are decoded together.

    >>> groups_of(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(i, min(i + batch, requests)) for i in range(0, requests, batch)]


def run_batches(
    pair: Pair,
    trace: Trace,
    planned: Sequence[PlannedPolicy],
    *,
    batches: Sequence[int] = (1, 4, 16),
    forced: bool = False,
    repeats: int = 3,
    advance: Callable[[], None] = lambda: None,
    kept: Checkpoint | None = None,
    in_time: Callable[[], bool] | None = None,
    runner: Callable[[Any, int, int], Runner] = Runner,
) -> Measured:
    """Decode the trace's requests for real as `planned`, at every batch size.

    A batch is static: consecutive requests are decoded together until the slowest has ended, and
    the last group may be smaller (`groups_of`).  Every repeat has all batch sizes.

    The times have a row per policy, batch, repeat and group: ``request`` is the id of the group's
    first request, ``wall_s`` the seconds from the end of the group's prefill to its last token,
    ``rounds`` its iterations.  Round k of a request ran in iteration k of its group.

    ``forced`` takes drafts and verdicts from the trace instead of the models.  ``advance``
    is called after every run of a group.  What `kept` holds of an earlier call is not run
    again, and with `in_time` as many groups are run as there is time for (`run_interleaved`).
    ``runner`` makes a model's runner for a number of slots and of sequences.

    Raises DraftsimError if a batch size is below 1, or the trace was sampled or has no prompts (and
    the run is not forced).
    """
    if bad := [b for b in batches if b < 1]:
        raise DraftsimError(f"batch is {bad[0]}, expected at least 1")
    if not forced:
        check_decodable(pair, trace)
    if not forced and trace.temperature > 0:
        raise DraftsimError(
            f"this trace was sampled at temperature {trace.temperature:g}, and batches are decoded "
            "greedily: record at temperature 0, or use --forced"
        )
    work = _Groups(pair, trace, planned, batches, forced, runner)
    keys = {(run.name, batch): (run, batch) for batch in batches for run in planned}
    timing = repeats, advance, kept, in_time
    return _measured(pair, trace, work, keys, forced, *timing)


class _Groups(CheckWork):
    """Groups of requests at each batch size; the style of a policy decides what it learns."""

    def __init__(
        self, pair: Pair, trace: Trace, planned: Sequence[PlannedPolicy], batches: Sequence[int],
        forced: bool, runner: Callable[[Any, int, int], Runner],
    ) -> None:  # fmt: skip
        self.planned, self._pair, self._trace, self._forced = planned, pair, trace, forced
        self.units = [(b, group) for b in batches for group in groups_of(len(trace.requests), b)]
        self._decoders = {
            b: BatchedDecoder(
                *(runner(model, trace.longest, b) for model in (pair.target, pair.draft)),
                watch_eos=not forced,
            )
            for b in batches
        }

    def captured(self) -> int:
        return sum(d.target.captured + d.draft_model.captured for d in self._decoders.values())

    def label(self, run: PlannedPolicy, unit: Unit) -> str:
        return f"{run.name} at batch {unit[0]}"

    def begun(self, run: PlannedPolicy, unit: Unit) -> tuple[Together, None]:
        vocab_size = self._trace.vocab_size or self._decoders[unit[0]].target.vocab_size
        return together_of(run.policy, vocab_size=vocab_size), None

    def attempt(self, repeat: int, unit: Unit, run: PlannedPolicy, learnt: Any) -> Attempt:
        (batch, group), (style, _) = unit, deepcopy(learnt)
        decoder = self._decoders[batch]
        streams = [_stream(self._pair, self._trace, i, self._forced) for i in group]
        enter(decoder, style, streams)
        timing, log = timed(self._pair.device, lambda: list(speculate_batch(decoder, style)))
        rounds: dict[int, list[Round]] = {i: [] for i in group}
        for stream, outcome in chain.from_iterable(log):
            rounds[stream.request].append(outcome)
        found = [{"rounds": rounds[stream.request], "output": stream.output} for stream in streams]
        return timing, ((style, None), {"requests": found, "iterations": len(log)})


def _stream(pair: Pair, trace: Trace, i: int, forced: bool) -> Stream:
    if forced:
        vocab = int(pair.target.config.get_text_config().vocab_size)
        return ForcedStream(trace, i, vocab, pair.device)
    info, starts = trace.requests[i], trace.request_starts
    runs = trace.run_lengths[starts[i] : starts[i + 1]].tolist()
    prompt = torch.tensor(info.prompt_ids, device=pair.device)
    return Stream(i, prompt, info.max_new_tokens, pair.eos, runs)
