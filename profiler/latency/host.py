"""Timing of a round outside the models: the loop, the policy's call, the verdict.

On a CPU the passes of a run are timed as they are made; a batch's are left out.  That would keep a
GPU and its host from working at the same time; there the run is timed as a whole, and the host's
share is what the passes' own cells do not explain.

A lossy rule adds its scores and its verdict (`measure_choosing`).  Lossless verification compares
token ids.  A lossy rule reads the target's scores of every drafted token (top logits, log-sum-exp,
entropy, rank), and some rules the draft's signals as well; both are computed when the target's pass
is done.  That work depends on what a rule reads, hardly on what it then decides.  So there is one
phase for each of the two families, over the number of drafted tokens: the seconds of a real
decoder's verification under a rule less those of its lossless one.  Sampled decoding draws tokens
and compares distributions instead of token ids; with top-p it also sorts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import nnls
from torch import Tensor

from policies.arrays import half_iqr
from policies.core import DraftPolicy, Round, speculate
from policies.lengths.basic import Fixed
from policies.rules.base import VerifyRule
from policies.rules.threshold import CMASDVerification, SpecVerification
from policies.together import PerRequest
from profiler.decoding.batch import BatchedDecoder, Stream, enter, speculate_batch
from profiler.decoding.forced import ForcedDecoder, ForcedStream
from profiler.decoding.single import DraftStep, ModelDecoder, ModelToken
from profiler.latency.passes import random_ids
from profiler.latency.table import CellKey, rows_of_samples
from profiler.machine import Repeats, Stopwatch, Timing, sweeps, timed
from profiler.models.runner import Runner
from profiler.models.sampling import pick
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable, as_cells

HOST_GAMMAS = (0, 1, 2, 4, 8, 16)
"""Draft lengths over which the host's time per round and per drafted token is fitted."""
GPU_GAMMAS = (0, 2, 8)
"""The same on a GPU (`host_beyond`)."""
ACCEPTED = 0.7
"""Acceptance rate of dictated runs, so that some rounds catch up on two tokens."""
DRAFTED = (0, 1, 2, 4, 8, 16, 24)
"""Drafted tokens at which a rule's judging is measured."""
RULES: dict[str, VerifyRule] = {"judge": SpecVerification(), "judge_signals": CMASDVerification()}
"""Phase -> the rule that is timed for its family."""
DRAWS = {"draw": Sampling(1.0), "draw_top_p": Sampling(1.0, 0.9)}
TOSSES = {"toss": Sampling(1.0), "toss_top_p": Sampling(1.0, 0.9)}
"""Phase -> the sampling that is timed for it.  The time does not depend on its numbers."""
DRAWN = (1, 8, 64)
"""Sequences whose drafted tokens are drawn at once."""
GREEDILY = "greedily"
"""Name of lossless greedy verification, which the phases are compared with."""

Spent = tuple[float, int, int]
"""The host's seconds in a run, its rounds (a batch's iterations), and its draft steps."""


class _WatchedRunner:
    """A model's runner whose passes are made for real, and timed."""

    def __init__(self, runner: Runner, watch: Stopwatch) -> None:
        self._runner, self._watch = runner, watch
        self.spent = Timing(0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, *args: Any, **settings: Any) -> Tensor:
        """Return the runner's own pass."""
        taken, out = self._watch.measure(partial(self._runner.forward, *args, **settings))
        self.spent += taken
        return out


def measure_host(
    target: Runner, draft: Runner, *, repeats: int = 7, tokens: int = 10,
    longest: int = max(HOST_GAMMAS),
) -> pd.DataFrame:  # fmt: skip
    """Return seconds per round and per drafted token outside the models, by a linear fit.

    The real loop decodes `tokens` tokens with every one of `HOST_GAMMAS` up to `longest`, the
    longest draft of the pair, and the seconds of its passes are subtracted.  A loop without real
    passes would be several times too fast, because real passes fill the processor's caches with
    weights.  `host_beyond` does the same for a GPU.
    """
    prompt, watch, again = random_ids(draft, 4), Stopwatch(target.device), Repeats()

    def run(gamma: int) -> tuple[Timing, Spent]:
        models: list[Any] = [_WatchedRunner(runner, watch) for runner in (target, draft)]
        decoder = ModelDecoder(models[0], models[1], prompt, tokens, watch_eos=False)
        before = sum((m.spent for m in models), Timing(0.0))
        whole, log = watch.measure(lambda: list(speculate(decoder, Fixed(gamma))))
        passes = sum((m.spent for m in models), Timing(0.0))
        host = whole.wall_s - whole.off_s
        for timing, sign in ((passes, -1), (before, 1)):
            host += sign * (timing.wall_s - timing.off_s)
        return whole, (host, len(log), sum(r.draft_forwards for r in log))

    gammas = [gamma for gamma in HOST_GAMMAS if gamma <= longest]
    return host_cells(1, gammas, repeats, lambda gamma: again.best(partial(run, gamma))[1])


def host_cells(
    batch: int, gammas: Sequence[int], repeats: int, run: Callable[[int], Spent]
) -> pd.DataFrame:
    """Return seconds per round and per draft step, ``host_round`` and ``host_draft``.

    They are fitted to the results of `run` for the draft lengths `gammas`.  Both are non-negative,
    because a negative one would be balanced by a too large other one.
    """
    fits = np.empty((repeats, 2))
    for repeat in sweeps(repeats):  # what warms up is overwritten
        spent = np.array([run(gamma) for gamma in gammas])
        fits[repeat] = nnls(spent[:, 1:], spent[:, 0])[0]
    return rows_of_samples(
        [("target", phase, batch, 1, 0) for phase in ("host_round", "host_draft")], fits
    )


class _Fixed(Runner):
    """A replacement for a model whose passes do no work: they return some of `rows`, its logits."""

    def __init__(self, like: Runner, *shape: int) -> None:
        self.device, self.cache, self.max_positions = like.device, like.cache, like.max_positions
        self.rows = torch.zeros(*shape, like.vocab_size, device=like.device, dtype=like.model.dtype)

    def forward(
        self, tokens: Tensor, start: int, *, keep: int = 0, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.rows[-keep:]

    def forward_batch(
        self, tokens: Tensor, positions: Tensor, visible: int, *, first: int = 0, keep: int = 0
    ) -> Tensor:
        return self.rows[: tokens.shape[0], : keep or tokens.shape[1]]


def _idle(like: Runner) -> _Fixed:
    """Return a replacement in batches, so that only the host's time is left."""
    idle = _Fixed(like, 1, max(HOST_GAMMAS) + 1)
    # Alike for all sequences: they then accept alike and end together.
    idle.rows = torch.randn_like(idle.rows).repeat(like.cache.batch, 1, 1)
    return idle


def measure_batch_host(
    target: Runner, draft: Runner, batches: Sequence[int], *, repeats: int = 15, tokens: int = 40
) -> pd.DataFrame:
    """Measure seconds per iteration and per batched draft step outside the models, by a linear fit.

    The real loop decodes `tokens` tokens a sequence, fewer where the caches are smaller, both
    models replaced by ones that do nothing; one row per phase and batch above 1, named
    ``host_round`` and ``host_draft``.
    """
    room = min(target.cache.slots, target.max_positions, draft.cache.slots, draft.max_positions)
    tokens = min(tokens, room - 4)
    idle, watch, again = (_idle(target), _idle(draft)), Stopwatch(target.device), Repeats()

    def run(batch: int, gamma: int) -> tuple[Timing, list[int]]:
        decoder, together = BatchedDecoder(*idle, watch_eos=False), PerRequest(Fixed(gamma))
        prompt = torch.zeros(4, dtype=torch.long, device=target.device)
        enter(decoder, together, [Stream(k, prompt, tokens) for k in range(batch)])
        return watch.measure(lambda: [  # steps of the draft, by iteration
            max(outcome.draft_forwards for _, outcome in iteration)
            for iteration in speculate_batch(decoder, together)
        ])  # fmt: skip

    def spent(batch: int, gamma: int) -> Spent:
        taken, steps = again.best(partial(run, batch, gamma))
        return taken.seconds, len(steps), sum(steps)

    parts = [host_cells(b, HOST_GAMMAS, repeats, partial(spent, b)) for b in batches if b > 1]
    return pd.concat(parts, ignore_index=True)


def dictating_trace(requests: int, tokens: int, prompt: int, max_gamma: int) -> Trace:
    """Return the recording that dictates the verdicts of `dictated_run`."""
    return synthetic_trace(
        ACCEPTED, requests=requests, tokens=tokens, prompt_length=prompt, max_gamma=max_gamma,
        concentration=4.0, seed=11,
    )  # fmt: skip


def dictated_run(
    target: Runner, draft: Runner, trace: Trace, group: Sequence[int], policy: DraftPolicy
) -> tuple[float, list[list[Round]]]:
    """Decode requests with dictated verdicts: seconds after prefill, each iteration's rounds.

    A request by itself is decoded by `ModelDecoder`, several by `BatchedDecoder`.
    """
    policy = policy.for_run()
    if len(group) == 1:
        decoder = ForcedDecoder(target, draft, trace, group[0])
        taken, log = timed(
            target.device, lambda: [[one] for one in speculate(decoder, policy.fresh())]
        )
        return taken.seconds, log
    together = PerRequest(policy)
    batched = BatchedDecoder(target, draft, watch_eos=False)
    enter(
        batched, together,
        [ForcedStream(trace, i, target.vocab_size, target.device) for i in group],
    )  # fmt: skip
    taken, log = timed(
        target.device,
        lambda: [[one for _, one in it] for it in speculate_batch(batched, together)],
    )
    return taken.seconds, log


def passes_s(iterations: Sequence[Sequence[Round]], prompt: int, latency: LatencyTable) -> float:
    """Return the seconds of the passes of decoded rounds, according to the cells.

    A pass of several sequences is the widest and longest rectangle.
    """
    total = 0.0
    for rounds in iterations:
        batch, drafting = len(rounds), [r for r in rounds if r.draft_forwards]
        context = prompt + max(r.position for r in rounds)
        total += float(latency.seconds(
            "target", "forward", batch=batch, new_tokens=max(r.drafted for r in rounds) + 1,
            context=max(context - 1, 0),
        ))  # fmt: skip
        if drafting:
            first = max(r.catch_up for r in drafting)
            total += float(latency.seconds(
                "draft", latency.first_draft_phase("draft"), batch=batch, new_tokens=first,
                context=max(context - first, 0),
            ))  # fmt: skip
            later = max(r.draft_forwards for r in drafting) - 1
            at = context + np.arange(later)
            total += float(latency.seconds("draft", "forward", batch=batch, context=at).sum())
            total += float(latency.settling_s("draft", batch, later))
    return total


def host_beyond(
    target: Runner, draft: Runner, passes: pd.DataFrame, *, batch: int = 1, repeats: int = 3,
    tokens: int = 24, prompt: int = 128, gammas: Sequence[int] = GPU_GAMMAS,
    check: Callable[[], None] = lambda: None,
) -> pd.DataFrame:  # fmt: skip
    """Return seconds per iteration and per draft step: those of whole runs less their passes.

    Dictated runs decode `tokens` tokens a sequence after prompts of `prompt` tokens, at the draft
    lengths `gammas`; fewer tokens where the caches are smaller.  ``passes``: cells of the passes,
    at this batch too.  `check`, called before every run, may raise.
    """
    room = min(target.cache.slots, target.max_positions)
    prompt = min(prompt, max(room - tokens, room // 2))
    trace = dictating_trace(batch, min(tokens, room - prompt), prompt, max(gammas))
    latency = LatencyTable(passes)

    def run(gamma: int) -> Spent:
        check()
        spent, log = dictated_run(target, draft, trace, range(batch), Fixed(gamma))
        steps = sum(max(r.draft_forwards for r in rounds) for rounds in log)
        return spent - passes_s(log, prompt, latency), len(log), steps

    return host_cells(batch, gammas, repeats, run)


def measure_choosing(
    target: Runner,
    draft: Runner,
    *,
    drafted: Sequence[int] = DRAFTED,
    longest: int = max(DRAFTED),
    repeats: int = 25,
) -> pd.DataFrame:
    """Return seconds that choosing tokens takes beyond lossless greedy decoding.

    They are those of a round's verdict under a rule of each family and by rejection sampling, and
    those of drawing a drafted token.  Every draft is one that the target agrees with, so that a
    rule judges all of it.  Numbers of drafted tokens that do not fit the caches are left out, and
    those above `longest`.

    Parameters
    ----------
    target, draft: Runners over a shared vocabulary; their caches are overwritten.
    drafted: Drafted tokens per round, the ``new_tokens`` of the cells.
    longest: Tokens of the pair's longest draft.
    repeats: Timed repeats; within one the cells and families come in a fresh random order.

    Returns rows as in `traces.latency.table.CELL_COLUMNS`: of the target, phases as in `RULES` and
    (at every second of the sizes and the largest) `TOSSES`, and of the draft as in `DRAWS`.
    """
    room = min(target.cache.slots, target.max_positions, draft.cache.slots, draft.max_positions)
    counts = [n for n in drafted if n <= longest and 2 * n + 8 <= room]
    ways: dict[str, tuple[VerifyRule | None, Sampling]] = {GREEDILY: (None, GREEDY)}
    for phase, rule in RULES.items():
        ways[phase] = own, _ = rule.fresh(), GREEDY
        own.begin_run(target.vocab_size, 0.0)
    drawn = {phase: (None, sampling) for phase, sampling in TOSSES.items()}
    tossed = {*counts[::2], *counts[-1:]}
    watch, again, rng = Stopwatch(target.device), Repeats(), np.random.default_rng(0)
    given = _Fixed(target, 1), _Fixed(draft, 1)
    smaller = min(target, draft, key=lambda runner: runner.vocab_size)
    ids = random_ids(smaller, max([0, *counts]) + 1).to(target.device)
    # An encoder-decoder needs a source before any pass.
    prompts = target.begin(ids[:1]), draft.begin(ids[:1])

    def judge(count: int, rule: VerifyRule | None, sampling: Sampling) -> tuple[Timing, object]:
        models = target, draft
        return watch.measure(_round(given, models, prompts, ids[:count], rule, sampling))

    def choose(batch: int, sampling: Sampling) -> tuple[Timing, object]:
        made: list[Tensor] = []

        def propose() -> None:
            logits = draft.forward(torch.cat([prompts[1], ids[:1]]), 0, keep=1)
            made.append(logits.repeat(batch, 1))

        # As in decoding, the host of a GPU prepares the draw while the pass still runs.
        _, taken = watch.each([propose, lambda: pick(made[0], sampling, None)])
        return taken, None

    # The cells of a group are compared: they are timed in a row.
    groups: list[dict[CellKey, Callable[[], tuple[Timing, object]]]] = [
        {
            ("target", phase, 1, count, 0): partial(judge, count, *how)
            for phase, how in (ways | (drawn if count in tossed else {})).items()
        }
        for count in counts
    ]
    draws = {GREEDILY: GREEDY, **DRAWS}
    groups += [
        {("draft", phase, batch, 1, 0): partial(choose, batch, how) for phase, how in draws.items()}
        for batch in DRAWN
    ]
    seconds: dict[CellKey, list[float]] = {cell: [] for group in groups for cell in group}
    for repeat in sweeps(repeats, 2):
        for g in rng.permutation(len(groups)):
            cells = list(groups[g])
            for c in rng.permutation(len(cells)):
                taken, _ = again.best(groups[g][cells[c]])
                if repeat >= 0:
                    seconds[cells[c]].append(taken.seconds)
    rows = []
    for (model, phase, *sizes), own_s in seconds.items():
        if phase != GREEDILY:
            batch, count, context = sizes
            extra = np.subtract(own_s, seconds[model, GREEDILY, batch, count, context])
            middle, spread = max(0.0, float(np.median(extra))), float(half_iqr(extra))
            rows.append((model, phase, *sizes, middle, spread, repeats))
    return as_cells(rows)


def _round(
    given: tuple[_Fixed, _Fixed], models: tuple[Runner, Runner], prompts: tuple[Tensor, Tensor],
    ids: Tensor, rule: VerifyRule | None, sampling: Sampling,
) -> Callable[[], int]:  # fmt: skip
    """Return the verification of the drafted `ids`, ready to be timed: its passes are done."""
    count = int(ids.shape[0])
    prompt = ids.new_zeros(4)
    decoder = ModelDecoder(*given, prompt, count + 4, watch_eos=False, rule=rule, sampling=sampling)
    # Real passes come first: what they leave in the processor's caches is part of the cost.
    proposals = models[1].forward(torch.cat([prompts[1], ids]), 0, keep=count or 1)
    given[0].rows = models[0].forward(torch.cat([prompts[0], ids]), 0, keep=count + 1)
    picks = given[0].rows.argmax(-1).clamp(max=models[1].vocab_size - 1)
    parts = [slice(i, i + 1) for i in range(count)]
    tokens = [ModelToken(DraftStep(proposals[at], picks[at])) for at in parts]
    return partial(decoder.verify, tokens)
