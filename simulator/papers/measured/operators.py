"""Predictions from operators against published measurements: steps, cells and decoding.

A step is composed from operators alone, and from a few whole steps besides; a cell of attention or
of an MoE block from half of the others; a published decode step from operators, and from them with
the host's time seen in the study's other models.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from simulator.papers.measured.logs import EAGLE_STUDY, read_eagle
from simulator.papers.measured.rows import Evidence, evidence
from simulator.published import CONTEXT, SPECBOUND_3, STUDIES, published_rows
from traces.operators.attention import Plane, heads_of, timed_planes
from traces.operators.compose import NOTHING, Composer, fit_steps
from traces.operators.dense import DenseOperators
from traces.operators.devices import DEVICES
from traces.operators.shapes import ARCHITECTURES, BYTES, Placed, find_architecture
from traces.operators.table import OperatorTable
from traces.store.operators import STANDS_FOR, bundled_operators, timed_devices
from traces.store.recordings import find_latency

STEPS = "Whole steps of Llama-3.1-8B, RTX PRO 6000"
CELLS = "Cells of operators"
ALONE, WITH_HOST = "operators alone", "operators, and the host's time in its other models"
EAGER = "operators alone, of passes that a host launches kernel by kernel"
EAGLE_TREE, EAGLE_DEPTH = 26, 5
"""Tokens that EAGLE verifies in a round, the root included, and draft passes that make them
(arXiv:2401.15077, appendix A)."""


def operator_rows(named: str = "") -> list[Evidence]:
    """Return the rows of studies whose name contains `named`, none of which needs a log."""
    rows: list[Evidence] = []
    if named.lower() in STEPS.lower():
        rows += step_rows()
    if named.lower() in CELLS.lower():
        rows += [*product_rows(), *attention_rows(), *law_rows(), *expert_rows()]
    return [*rows, *decode_rows(), *specbound_rows(), *concurrency_rows()]


@cache
def composer_of(device: str) -> Composer:
    """Return the composer of passes on one GPU."""
    return Composer(bundled_operators(device), device)


def step_rows() -> Iterator[Evidence]:
    """Yield every whole step, from operators, and from some of the steps besides."""
    composer, placed = composer_of("rtx-pro-6000"), Placed(find_architecture("llama-3.1-8b"))
    steps = composer.steps
    tokens = (steps["tokens"] + steps["batch"]).to_numpy()
    full = (steps["mode"] == "full").to_numpy()
    short = full & (steps["batch_context"] == 1024).to_numpy()
    every, ends = np.ones(len(steps), bool), np.isin(tokens, (1, 64))
    parts, measured = composer.parts_of_steps(placed, steps), steps["seconds"].to_numpy(float)
    for given, known, asked in (
        (ALONE, None, every), ("operators, and steps of 1 and 64 tokens", ends, ~ends),
        ("operators, and steps at 1k of context", short, full & ~short),
    ):  # fmt: skip
        factors = NOTHING if known is None else fit_steps(
            composer.parts_of_steps(placed, steps[known]), measured[known]
        )  # fmt: skip
        predicted = factors.of(parts)
        for i in np.flatnonzero(asked).tolist():
            mode, chunk, batch, context = (
                steps[name].iloc[i] for name in ("mode", "tokens", "batch", "batch_context")
            )
            what = f"ms, {mode}, {batch} x {context} cached, {chunk} of a prompt"
            yield evidence(STEPS, given, what, 1e3 * predicted[i], 1e3 * measured[i])


def product_rows() -> Iterator[Evidence]:
    """Yield a layer's matrix products of each of Vidur's models, from its GPU's other models."""
    tokens = np.array([float(2**i) for i in range(12)])
    for device in ("a100-80gb", "h100"):
        rows = bundled_operators(device).of(source="microsoft/vidur")
        whole = DenseOperators(OperatorTable(rows, {}), DEVICES[device])
        for name, shared in whole.models:
            model = ARCHITECTURES[name]
            alike = [m.name for m in ARCHITECTURES.values() if m.layer_shape == model.layer_shape]
            rest = OperatorTable(rows[~rows["model"].isin(alike)], {})
            others = DenseOperators(rest, DEVICES[device])
            measured, predicted = (
                np.sum([of.once_s(m, model, shared, tokens) for m in model.matrices], axis=0)
                for of in (whole, others)
            )
            for i, size in enumerate(tokens.tolist()):
                what = f"microseconds of a layer's products, {name}@tp{shared}, {size:g} tokens"
                yield evidence(
                    CELLS, f"products of the GPU's other models: {device}", what,
                    1e6 * predicted[i], 1e6 * measured[i],
                )  # fmt: skip


def attention_rows() -> Iterator[Evidence]:
    """Yield every other cell of attention from those of every other size and context."""
    for device in timed_devices():
        for name, planes in timed_planes(bundled_operators(device), device).items():
            for kind, plane in zip(("decoding", "prompts"), planes, strict=False):
                what = f"microseconds of attention, {kind}, {name}"
                yield from _half(f"half the cells: {device}", what, plane)


def law_rows() -> Iterator[Evidence]:
    """Yield attention with one token a sequence, by the law fitted to another GPU's timings."""
    timed = {name: composer_of(name).attention for name in timed_devices()}
    timed = {name: of for name, of in timed.items() if timed_planes(bundled_operators(name), name)}
    for device, own in timed.items():
        others = [of.law for name, of in timed.items() if name != device]
        law = tuple(float(np.mean(column)) for column in zip(*others, strict=True))
        for name, planes in timed_planes(bundled_operators(device), device).items():
            model, _, shared = name.partition("@tp")
            heads = heads_of(find_architecture(model), int(shared or 1))
            plane = planes.split
            for i, batch in enumerate(plane.sizes.tolist()):
                for j, context in enumerate(plane.contexts.tolist()):
                    sizes = np.array([batch]), np.array([context])
                    predicted = float(own.by_law(law, heads, *sizes)[0])  # type: ignore[arg-type]
                    what = f"microseconds of attention, {name}: {batch:g} at {context:g}"
                    yield evidence(
                        CELLS, f"another GPU's attention: {device}", what, 1e6 * predicted,
                        1e6 * plane.seconds[i, j],
                    )  # fmt: skip


def _half(given: str, what: str, plane: Plane) -> Iterator[Evidence]:
    sizes, contexts = np.arange(len(plane.sizes)), np.arange(len(plane.contexts))
    left = Plane(plane.sizes[::2], plane.contexts[::2], plane.seconds[::2, ::2])
    for i in sizes[(sizes % 2 == 1) & (sizes < len(sizes) - 1)].tolist():
        for j in contexts[(contexts % 2 == 1) & (contexts < len(contexts) - 1)].tolist():
            size, context = plane.sizes[i], plane.contexts[j]
            predicted = float(left.at(np.array([size]), np.array([context]))[0])
            asked = f"{what}: {size:g} at {context:g}"
            yield evidence(CELLS, given, asked, 1e6 * predicted, 1e6 * plane.seconds[i, j])


def expert_rows() -> Iterator[Evidence]:
    """Predict every other cell of an MoE block from its neighbours in tokens and experts."""
    rows = bundled_operators("rtx-pro-6000").of(operator="moe")
    table = rows.pivot_table(index="tokens", columns="experts", values="seconds")
    for j, experts in enumerate(table.columns):
        own = table[experts].dropna()
        tokens, seconds = own.index.to_numpy(float), own.to_numpy(float)
        for i in range(1 + j % 2, len(tokens) - 1, 2):
            others = np.arange(len(tokens)) != i
            predicted = np.interp(tokens[i], tokens[others], seconds[others])
            what = f"microseconds of an MoE block, {tokens[i]:g} tokens, {experts} experts"
            yield evidence(
                CELLS, "half the cells: experts", what, 1e6 * predicted, 1e6 * seconds[i]
            )


def decode_rows() -> Iterator[Evidence]:
    """Yield published times a token in 16 bits, on every GPU whose operators were timed."""
    for study in STUDIES:
        runs = [
            run for run in study.runs
            if run.weights == "bf16"
            and STANDS_FOR.get(run.device, run.device) in timed_devices()
        ]  # fmt: skip
        if not runs:
            continue
        composed = np.array([
            float(
                composer_of(run.device).pass_s(
                    Placed(find_architecture(run.model)), 1, run.new_tokens, run.context
                )
            )
            for run in runs
        ])  # fmt: skip
        measured = np.array([run.seconds for run in runs])
        eager = study.mode == "eager"
        for i, run in enumerate(runs):
            what = f"ms, {run.model.rpartition('/')[2]}, {run.device}, {run.new_tokens} tokens"
            given = EAGER if eager else ALONE
            yield evidence(study.name, given, what, 1e3 * composed[i], 1e3 * measured[i])
            others = [
                j for j, other in enumerate(runs)
                if other.device == run.device and other.model != run.model
            ]  # fmt: skip
            if others and not eager:
                host_s = max(float(np.median(measured[others] - composed[others])), 0.0)
                predicted = 1e3 * (composed[i] + host_s)
                yield evidence(study.name, WITH_HOST, what, predicted, 1e3 * measured[i])


def specbound_rows() -> Iterator[Evidence]:
    """Yield SpecBound's plain decoding of Vicuna-7B on an H800, in eager transformers."""
    step_s = composer_of("h800").pass_s(Placed(find_architecture("vicuna-7b")), 1, 1, CONTEXT)
    published = SPECBOUND_3.number("Per-token latency (ms)", "AR_base")
    what = "ms, vicuna-7b, h800, 1 tokens"
    yield evidence("SpecBound Tables 3 and 4", EAGER, what, 1e3 * float(step_s), published)


def eagle_rows(folder: Path) -> Iterator[Evidence]:
    """Yield EAGLE's 70B, whose layers lie on four A100s of 40 GB, in turn, in eager transformers.

    A round is a verification of `EAGLE_TREE` tokens and `EAGLE_DEPTH` passes of the draft, which
    is one layer of the target, its head, and a matrix of twice its width to its width.
    """
    turns = read_eagle(folder)
    if turns is None:
        return
    composer, placed = composer_of("a100-80gb"), Placed(find_architecture("llama-2-70b"))
    slower = DEVICES["a100-80gb"].bandwidth / DEVICES["a100-40gb"].bandwidth
    spec, plain = turns
    # The log does not say how long prompts are: about 150 tokens.
    context = 150 + float((plain.tokens**2).sum() / plain.tokens.sum()) / 2
    one, wide = (composer.pass_s(placed, 1, width, context).item() for width in (1, EAGLE_TREE))
    sizes = np.ones(1), np.ones(1), np.full(1, context)
    draft = composer.layer_s(placed, *sizes) + composer.head_s(placed, np.ones(1))
    narrowing = BYTES * 2 * placed.model.hidden**2 / composer.device.bandwidth
    round_s = wide + EAGLE_DEPTH * (draft.item() + narrowing)
    per_round = float(spec.tokens.sum() / spec.rounds.sum())
    measured_s = float(plain.seconds.sum() / plain.tokens.sum())
    measured_round_s = float(spec.seconds.sum() / spec.rounds.sum())
    for what, predicted, measured in (
        ("ms a token, plain", 1e3 * slower * one, 1e3 * measured_s),
        ("ms a round", 1e3 * slower * round_s, 1e3 * measured_round_s),
        ("speedup", per_round * one / round_s, per_round * measured_s / measured_round_s),
    ):
        given = "operators of the 80 GB A100, slower by the 40 GB one's bandwidth"
        yield evidence(EAGLE_STUDY, given, what, predicted, measured)


def concurrency_rows() -> Iterator[Evidence]:
    """Yield a server's time between tokens by concurrency: a step, and the prompts in it."""
    latency = find_latency("a100/llama-3-8b")
    for row in published_rows("servers"):
        # The study does not say the prompts' lengths; the file has an estimate.
        requests, prompt, output = (int(row[name]) for name in ("load", "prompt", "output"))
        at = {"batch": requests, "context": prompt + output / 2}
        step_s = latency.seconds("target", "forward", **at).item()
        added_s = latency.seconds("target", "prefill", new_tokens=prompt).item()
        added_s -= latency.seconds("target", "forward").item()
        # Every request ends and begins once in its output; alone, it interrupts nobody.
        predicted = step_s + (requests - 1) / output * max(added_s, 0.0)
        what = f"ms between tokens, {requests} requests at a time"
        yield evidence(row["study"], ALONE, what, 1e3 * predicted, 1e3 * float(row["itl_s"]))
