"""Real decoding of a trained pair: every policy against replay, and against transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from policies.core import DraftPolicy, Round, speculate
from policies.lengths.basic import Fixed
from profiler.checks.assisted import assisted_generation
from profiler.decoding.single import ModelDecoder
from profiler.machine import timed
from profiler.models.loading import Pair
from profiler.models.runner import Runner
from profiler.suite.environment import Workplace
from profiler.suite.latency.passes import EAGER, GRAPH, make_runner
from profiler.suite.runs.arms import arms_of
from profiler.suite.runs.compared import compared_runs
from profiler.suite.runs.forced_stage import prepare
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog
from traces.replay.run import replay

NAME = "trained-12+3"
TRAINED_MODES = (EAGER, GRAPH)
"""Modes of real decoding: what it tests is verdicts, and compiled passes are no other ones."""
ASSISTED = {
    "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}  # fmt: skip


class Checks:
    """Real decoding of some recorded requests, against replay and against transformers."""

    def __init__(
        self, place: Workplace, pair: Pair, trace: Trace, new: int, name: str = NAME
    ) -> None:
        self.place, self.pair, self.new, self.name = place, pair, new, name
        # The first requests are of every category in turn.
        self.trace = trace.select(range(min(2 if place.quick else 7, len(trace.requests))))
        self._all = trace
        self._made: dict[str, tuple[Runner, Runner]] = {}

    def own_text(self, request: int) -> torch.Tensor:
        """The last tokens of a request's prompt and output, as many for every request."""
        info, starts = self._all.requests[request], self._all.request_starts
        rows = self._all.on_path[starts[request] : starts[request + 1]]
        ids = [*(info.prompt_ids or ()), *self._all.columns["token"][rows].tolist()]
        return torch.tensor(ids[-self.new :], device=self.pair.device)

    def run(self, mode: str, seconds: float, requests: int) -> dict[str, Any]:
        """Every policy on the first `requests`, interleaved; real rounds against replay.

        Returns the measured ``times``, rows of `profiler.suite.runs.arms.COLUMNS`, and what was
        ``checked``.  Raises NoTimeError if there is no time to run every policy once.
        """
        trace = self.trace.select(range(min(requests, len(self.trace.requests))))
        target, draft = self._runners(mode)
        return compared_runs(
            self.place, self.name, mode, arms_of(trace, self.place.quick), trace,
            lambda _, i: self._decoder(target, draft, i), seconds=seconds,
        )  # fmt: skip

    def plain(self, i: int) -> ModelDecoder:
        """A decoder of a request for policies that draft nothing, launched kernel by kernel."""
        return self._decoder(*self._runners(EAGER), i)

    def against_assisted(self, prompts: int, within: float) -> dict[str, Any]:
        """Tokens per second, prefill included, of our decoder and of transformers', interleaved.

        At most `prompts` prompts, none begun after `within` seconds but the first; raises
        NoTimeError if the stage has no time left for that one.
        """
        begin = time.monotonic()
        pair, trace = self.pair, self.trace
        runners = {mode: self._runners(mode) for mode in TRAINED_MODES}
        spent: dict[str, list[float]] = {}
        for i in range(-1, min(prompts, len(trace.requests))):  # the first one warms up
            if spent and (self.place.left <= 0 or time.monotonic() - begin > within):
                break
            self.place.check_time()
            info = trace.requests[max(i, 0)]
            prompt = torch.tensor(info.prompt_ids, device=pair.device)
            seconds: dict[str, float] = {}
            for mode, (target, draft) in runners.items():
                for gamma in (0, 5):
                    seconds[f"ours, {mode}, gamma {gamma}"] = self._whole(
                        target, draft, max(i, 0), Fixed(gamma)
                    )
            _, _, seconds["transformers assisted, gamma 5"] = assisted_generation(
                pair, prompt, info.max_new_tokens, **ASSISTED
            )
            with torch.inference_mode(), timed(pair.device) as plain:
                pair.target.generate(
                    input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None],
                    max_new_tokens=info.max_new_tokens, do_sample=False,
                )  # fmt: skip
            seconds["transformers plain"] = plain()
            if i >= 0:
                for name, value in seconds.items():
                    spent.setdefault(name, []).append(info.max_new_tokens / value)
        return {
            name: {"tokens_per_s": float(np.median(v)), "prompts": len(v)}
            for name, v in spent.items()
        }

    def _whole(self, target: Runner, draft: Runner, i: int, policy: DraftPolicy) -> float:
        with timed(self.pair.device) as spent:
            list(speculate(self._decoder(target, draft, i), policy.for_run().fresh()))
        return spent()

    def _runners(self, mode: str) -> tuple[Runner, Runner]:
        """Target and draft in a mode; captured once, as that takes a good part of the time."""
        if mode in self._made:
            return self._made[mode]
        slots = self.trace.longest
        target = make_runner(mode, self.pair.target, slots)
        draft = make_runner(mode, self.pair.draft, slots)
        prepare(target, draft, slots, self.trace.max_gamma or 1, self.place.check_time)
        self._made[mode] = target, draft
        return target, draft

    def _decoder(self, target: Runner, draft: Runner, i: int) -> ModelDecoder:
        info, starts = self.trace.requests[i], self.trace.request_starts
        runs = self.trace.run_lengths[starts[i] : starts[i + 1]].tolist()
        prompt = torch.tensor(info.prompt_ids, device=self.pair.device)
        return ModelDecoder(
            target, draft, prompt, info.max_new_tokens, self.pair.eos, run_lengths=runs
        )


def sampled_rounds(pair: Pair, trace: Trace, gamma: int = 4) -> dict[str, Any]:
    """Accepted per full round in real rejection sampling and in replay, and how far apart."""
    some = trace.select(range(min(16, len(trace.requests))))
    slots = some.longest
    target, draft = make_runner(GRAPH, pair.target, slots), make_runner(GRAPH, pair.draft, slots)
    generator = torch.Generator(pair.device).manual_seed(7)
    real: list[Sequence[Round]] = []
    for info in some.requests:
        decoder = ModelDecoder(
            target, draft, torch.tensor(info.prompt_ids, device=pair.device), info.max_new_tokens,
            pair.eos, sampling=trace.sampling, generator=generator,
        )  # fmt: skip
        real.append(list(speculate(decoder, Fixed(gamma))))
    means = []
    for log in (RoundLog.pack(real), replay(some, Fixed(gamma)).rounds):
        full = log["drafted"] == gamma
        sums, counts = (
            np.bincount(log["request"][full], weights=w, minlength=len(some.requests))
            for w in (log["accepted"][full].astype(float), np.ones(int(full.sum())))
        )
        means.append(sums / np.maximum(counts, 1))
    gap = means[0] - means[1]
    error = float(gap.std(ddof=1) / np.sqrt(len(gap))) if len(gap) > 1 else float("nan")
    return {
        "accepted_real": float(means[0].mean()), "accepted_replayed": float(means[1].mean()),
        "standard_error": error, "gamma": gamma,
    }  # fmt: skip
