"""The papers' own pairs and GPUs, priced from measured operators at our recorded acceptance.

Acceptance is that of the recording, whatever its pair; latencies are composed for the paper's pair
on the paper's GPU (`traces.store.operators.find_composed`), in CUDA graphs.  A row compares with a
published number where the paper gives one, and its note says how far the two are apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from policies.lengths.basic import Fixed
from policies.lengths.gammatune import GammaTune
from simulator.bootstrap import interval, ratio, resamples
from simulator.formulas import general, leviathan
from simulator.papers.gammatune import REFERENCE, gammatune_families
from simulator.papers.ours import Ours, Row, experiment, method_outcome
from simulator.papers.specbound import FITTED_SHARE, SettingReplays, search
from simulator.pricing import autoregressive, price
from simulator.published import CMASD_1, GAMMATUNE_1, GAMMATUNE_2, SPECBOUND_1, SPECBOUND_3
from simulator.ratios import own_ratios
from simulator.robustness import robustness, seconds_at_each
from traces.digits import three_digits
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.corrections import split_requests
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many
from traces.sources.early_exit import EarlyExit
from traces.sources.found import read_recordings
from traces.sources.methods import METHODS
from traces.store.operators import at_depths
from traces.store.recordings import BUNDLED, find_latency, find_trace

TABLE = "Papers' settings, composed"
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
CMASD_BATCH = 16
CURVE = (1, 4, 16, 64)
"""Batch sizes at which every pair is priced."""
EAGER = "published in eager transformers, ours in CUDA graphs"
OTHER_PAIR = "acceptance is the recording's, of another pair"


GAMMATUNE_PAIRS = (
    ("Vicuna-7B + 68M, H100", "h100/vicuna-7b+vicuna-68m", "lmsys/vicuna-7b-v1.5",
     "double7/vicuna-68m", "vicuna7b_68m_mean", EAGER),
    ("Vicuna-13B + 160M, H100", "h100/vicuna-13b+vicuna-160m", "lmsys/vicuna-13b-v1.5",
     "double7/vicuna-160m", "vicuna13b_160m_mean", EAGER),
    ("Llama-3.1-70B + 8B, four H100", "h100/llama-3.1-70b@tp4+llama-3.1-8b",
     "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B", "llama70b_8b_mean",
     "published of a quantised 70B on one GPU, of which no kernel explains the 925 ms"),
)  # fmt: skip
"""GammaTune's pairs on its H100: label, latencies, target, draft, column of Table 2, and a note."""
EXITS = "smollm2-cpu"
"""Bundled recording of early exits, for recordings that have none."""


def setting_rows(ours: Ours) -> list[Row]:
    """Return rows of GammaTune's pairs on H100, SpecBound's on H800 and CM-ASD's batch on A100."""
    fixed = [Fixed(k) for k in LENGTHS if k <= (ours.trace.max_gamma or LENGTHS[-1])]
    logs = list(replay_many(ours.trace, [(f"fixed:gamma={p.gamma}", p) for p in fixed]))
    return [*_gammatune_rows(ours, logs), *_specbound_rows(ours), *_cmasd_rows(ours, logs)]


def speedups(logs: list[RoundLog], latency: LatencyTable, batch: int = 1) -> list[float]:
    """Return the decode speedup of each log over plain decoding, in batches of equal requests."""
    plain_s = price(autoregressive(logs[0]), latency, batch=batch).total_s
    return [float(plain_s / price(log, latency, batch=batch).total_s) for log in logs]


def _gammatune_rows(ours: Ours, logs: list[RoundLog]) -> Iterator[Row]:
    families, gammas = gammatune_families(ours.trace)[:2]
    families = {name: families[name] for name in (REFERENCE, "GammaTune")}
    tables = [find_latency(name) for _, name, *_ in GAMMATUNE_PAIRS]
    seconds = seconds_at_each(ours.trace, families, tables, gammas)
    for pair, latency, found in zip(GAMMATUNE_PAIRS, tables, seconds, strict=True):
        label, _, *models, column, note = pair
        yield from _pair_rows(ours, label, latency, logs, 1)
        target_ms, draft_ms = (GAMMATUNE_1.number(name, "ms per token") for name in models)
        own = own_ratios(ours.trace, latency)
        yield _row(label, "c", draft_ms / target_ms, own.ratio, note)
        relative = robustness(found.speedups(), REFERENCE).set_index("policy")["mean"]
        note = f"mean over {len(gammas)} initial gammas; {OTHER_PAIR}"
        published = GAMMATUNE_2.value("GammaTune", column)
        mean = float(relative["GammaTune"])
        yield _row(label, "GammaTune over fixed lengths", published, mean, note)


def _pair_rows(
    ours: Ours, label: str, latency: LatencyTable, logs: list[RoundLog], batch: int
) -> list[Row]:
    speedup, log, gamma = _best(logs, latency, batch)
    own = own_ratios(ours.trace, latency, gamma, batch)
    emitted = float(log.rounds["emitted"].mean())
    said = f"gamma = {gamma}, {emitted:.2f} tokens a round, verification {own.verify:.2f} passes"
    said += f"; {OTHER_PAIR}"
    low, high = break_even_interval(log, own.verify, gamma)
    ends = f"95% over prompts {three_digits(low)} to {three_digits(high)}; "
    try:
        alpha = leviathan.break_even_alpha(gamma, own.ratio, own.verify)
    except DraftsimError:  # a speedup at every acceptance rate, or at none
        alpha = float("nan")
    return [
        _row(label, "speedup, best fixed length", None, speedup, said),
        _row(label, "break-even c", None, general.break_even_c(emitted, gamma, own.verify),
             said if np.isnan(low) else ends + said),
        _row(label, "break-even alpha", None, alpha,
             f"gamma = {gamma}, c = {own.ratio:.3f}, alike at every position"),
        *(_row(label, f"speedup at batch {b}", None, other, f"gamma = {length}")
          for b in CURVE if b != batch
          for other, _, length in [_best(logs, latency, b)]),
    ]  # fmt: skip


def _best(logs: list[RoundLog], latency: LatencyTable, batch: int) -> tuple[float, RoundLog, int]:
    """Return the largest speedup of fixed lengths, its log and its length."""
    found = speedups(logs, latency, batch)
    log = logs[int(np.argmax(found))]
    return max(found), log, int(log.rounds["drafted"].max())


def break_even_interval(log: RoundLog, verify: float, gamma: int) -> tuple[float, float]:
    """Return the bootstrap interval over prompts of `general.break_even_c`.

    Prompts differ in the tokens of their rounds; the costs are the same in every resample.  The
    interval is NaN with one prompt.
    """
    prompts = len(log.requests)
    if prompts < 2:
        return float("nan"), float("nan")
    own, emitted = log.rounds["request"], log.rounds["emitted"]
    drawn = resamples(prompts, 2000, 0)
    tokens = drawn @ np.bincount(own, emitted, prompts)
    rounds = drawn @ np.bincount(own, minlength=prompts)
    low, high = interval(ratio(tokens, rounds), prompts=prompts)
    return general.break_even_c(low, gamma, verify), general.break_even_c(high, gamma, verify)


def _specbound_rows(ours: Ours) -> Iterator[Row]:
    """Yield SpecBound's rounds priced layer by layer, and what its published figures imply.

    Early exit has no draft model: the rows also say which share of a pass a drafted token took.
    """
    ours, whose = with_exits(ours)
    for model in ("Vicuna-7B", "Vicuna-13B"):
        latency = find_latency(f"h800/{model.lower()}")
        line = SPECBOUND_1[model, "SpecBound"]
        tokens, speedup = float(np.mean(line.compression)), line.overall
        step, layer, head, wide = _passes_s(latency, tokens)
        label = f"{model}, H800"
        if model == "Vicuna-7B":
            published = SPECBOUND_3.value("Per-token latency (ms)", "AR_base")
            yield _row(label, "ms a token, plain", published, 1e3 * step, EAGER)
        yield from _early_exits(ours, whose, label, latency, speedup)
        verify = wide / step
        # A round emits `tokens`, all but one of them drafted.
        implied = (tokens / speedup - verify) / (tokens - 1)
        note = f"by the published {tokens:.2f} tokens a round and {speedup:g}x"
        yield _row(label, "c, implied", None, implied, note)
        depth = (implied * step - head) / layer
        yield _row(label, "layers a drafted token, implied", None, depth,
                   f"{note}; a layer {1e6 * layer:.0f} us, head {1e6 * head:.0f} us")  # fmt: skip
        for batch in CURVE[1:]:
            # All sequences of the batch are drafted for together, layer by layer.
            step, layer, head, wide = _passes_s(latency, tokens, batch)
            gain = tokens * step / ((tokens - 1) * (depth * layer + head) + wide)
            said = f"{tokens:.2f} tokens a round, drafts through {depth:.1f} layers and the head"
            yield _row(label, f"speedup at batch {batch}, published acceptance", None, gain, said)
        alone = f"{note}; no interval: the tokens are the paper's mean, not those of prompts"
        yield _row(label, "break-even c", None, (tokens - verify) / (tokens - 1), alone)


def _passes_s(latency: LatencyTable, tokens: float, batch: int = 1) -> list[float]:
    """Return seconds of a step, a layer, the head, and a pass over `tokens`, at context 512."""
    passes = (("forward", 1), ("layer", 1), ("head", 1), ("forward", round(tokens)))
    return [
        latency.seconds("target", phase, batch=batch, new_tokens=width, context=512).item()
        for phase, width in passes
    ]


def with_exits(ours: Ours) -> tuple[Ours, str]:
    """Return a recording with early exits, and whose they are: ours, else the bundled one."""
    if EarlyExit.name in ours.recordings:
        return ours, "the recording's"
    recordings = read_recordings(BUNDLED / EXITS)
    return Ours(find_trace(EXITS), ours.latency, recordings=recordings), f"those of {EXITS}"


def _early_exits(
    ours: Ours, whose: str, label: str, latency: LatencyTable, published: float
) -> Iterator[Row]:
    """Yield SpecBound at its optimum on these latencies, found on half of the prompts."""
    layers = EarlyExit().recording(ours.recordings).layers
    own = replace(ours, latency=at_depths(latency, layers))
    fit, shown = split_requests(ours.trace, FITTED_SHARE)
    best = search(SettingReplays(own, fit))
    log = SettingReplays(own, shown).run(best).log
    note = f"{best.text}, {float(log.rounds['emitted'].mean()):.2f} tokens a round; exits are "
    note += f"{whose}, of {layers} layers, each priced as the same share of the depth"
    found = {batch: speedups([log], own.latency, batch)[0] for batch in CURVE}
    yield _row(label, "speedup, SpecBound", published, found.pop(1), note)
    for batch, speedup in found.items():
        yield _row(label, f"speedup at batch {batch}", None, speedup, "SpecBound, same setting")


def _cmasd_rows(ours: Ours, logs: list[RoundLog]) -> Iterator[Row]:
    latency = find_latency("a100/llama-2-7b+vicuna-68m")
    label = f"Llama-2-7B + 68M, A100, batch {CMASD_BATCH}"
    yield from _pair_rows(ours, label, latency, logs, CMASD_BATCH)
    most = ours.trace.max_gamma or 12
    logs = list(replay_many(ours.trace, [("gammatune", GammaTune(gamma=4, gamma_max=most))]))
    [found] = speedups(logs, latency, CMASD_BATCH)
    yield _row(label, "speedup, GammaTune", None, found, OTHER_PAIR)
    try:
        run = method_outcome(replace(ours, latency=latency), METHODS["cm-asd"])
    except DraftsimError as error:
        yield _row(label, "speedup, CM-ASD", None, None, str(error))
        return
    [found] = speedups([run.log], latency, CMASD_BATCH)
    published = CMASD_1.value("CM-ASD", "EN-DE")
    note = f"{run.how}; published over beam 5, of a 65M translation model nobody timed on a GPU"
    yield _row(label, "speedup, CM-ASD", published, found, note)


def _row(label: str, column: str, published: float | None, ours: float | None, note: str) -> Row:
    if published and ours is not None:
        apart = ours / published - 1
        note = f"{'agrees' if abs(apart) <= 0.1 else 'differs'}: {apart:+.0%}; {note}"
    return experiment(TABLE, label, column, ours, note, published)
