"""Passes put together from operators, and the latency tables that hold them.

    pass = layers x (operators at batch x width tokens + attention + 2 all-reduces)
           + embedding, final norm, output projection, sampler

CUDA graphs are captured for some numbers of tokens (`traces.latency.graphs.CUDAGraphs`), and a pass
over fewer costs what the next captured one costs; attention alone keeps its own sizes.  What the
framework adds around a step is taken to be nothing: an engine that schedules ahead prepares a step
while the one before it runs.  The whole steps timed on an RTX PRO 6000 bound it (`FRAMEWORK_S`).

Where a GPU has whole steps, passes take what those say, unless the sum of the operators is asked
for (``rtx-pro-6000:operators/...``).

    step = host + (1 + dense) x (operators but attention) + (1 + attended) x attention

The three are never negative, and fitted to relative errors.  On the RTX PRO 6000, factors fitted
to steps of 1 and 64 tokens predict the other steps, and factors from 1k of context predict 8k; the
median error is below 3%.  The excess may be the way in which the steps were timed: on an RTX 4090,
whose operators were timed in the same way, a server's 300 requests took what the operators add up
to, and LLMServingSim has withdrawn its table of steps.  So a pass of a kind that no step covers
(`covered`) has an interval from the sum of its operators to the corrected time.

`kv_blocks` counts the cache blocks that fit into memory with a table's models, as an engine does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from traces.errors import DraftsimError
from traces.latency.graphs import CUDAGraphs
from traces.latency.interpolate import non_negative
from traces.latency.table import LatencyTable, cells_of, combined
from traces.operators.attention import AttentionOperators, heads_of
from traces.operators.dense import ASSUMED, CORRECTED, MEASURED, DenseOperators
from traces.operators.devices import Device, find_device
from traces.operators.shapes import BYTES, Placed, find_architecture
from traces.operators.table import OperatorTable

LAUNCHED_S = 17.5e-6
"""Seconds a layer takes longer where the host launches its kernels one by one: CUDA graphs saved
0.57 ms in 32 layers, the median of 64 steps of 1 to 256 tokens on the RTX PRO 6000 (0.25 to 0.72).
The GPU was busy meanwhile: a small model on a fast GPU waits longer for the host."""
FRAMEWORK_S = (-0.0006, 0.0013)
"""Seconds that a step may take less or more than its operators: a CUDA graph saves 0.3 to 0.7 ms of
launches, and a step's own host time was at most 1.3 ms."""
UNLIKE = {
    "openai/gpt-oss": "gpt-oss is published with experts in 4 bits, and every second layer attends "
    "to 128 tokens: composed with 16 bits and whole contexts, its passes are too slow, and the "
    "cache blocks that are counted for it too few",
}
"""Differences of composed passes from a family of models, by the beginning of its hub name."""
DRAFT_GRAPH = (
    ". A draft pass is taken for one CUDA graph: where the host starts it layer by layer, as in "
    "vLLM 0.26, speedups are far lower"
)
"""The assumption about a draft model that matters most (docs/log/gpu.md)."""
VERIFIED = 64
"""Tokens a sequence up to which a pass is taken for a verification, with a row of logits each."""

BATCHES = (
    1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 25, 32, 33, 40, 41, 48, 56, 64, 80, 96, 128, 192, 256,
)  # fmt: skip
WIDTHS = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 24, 25, 32, 33, 64, 128, 192, 256, 384, 512, 640, 768,
    896, 1024, 1280, 1536, 1792, 2048, 4096,
)  # fmt: skip
"""Widths of drafts, and both sides of the sizes at which a CUDA graph of one sequence ends."""
CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PROMPTS = (
    16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536,
    1664, 1792, 1920, 2048, 4096, 8192, 16384, 32768, 65536, 131072,
)  # fmt: skip
"""Longer than a step's tokens, too: a chunk takes what its prompt takes up to its end, less what it
takes up to its beginning."""
MOST_TOKENS = 8192
"""Tokens of the largest pass over several sequences that has a cell."""

GIB = 2**30
USABLE = 0.985
"""Share of a GPU's memory that CUDA reports: 0.98 to 0.99 of as many GiB as the data sheet says
GB."""
OVERHEAD_B = (0.7e9, 1.2e9, 1.7e9)
"""Bytes of activations, buffers and the CUDA context, least, assumed and most: 1.24 GB on the one
server whose blocks are known (an 8B model, 2,048 tokens an iteration)."""
UTILISATION = 0.9
"""Share of the memory that an engine takes, as vLLM's gpu_memory_utilization."""
BLOCK = 16
"""Tokens of a cache block."""


class Parts(NamedTuple):
    """Seconds of passes."""

    dense_s: Floats
    """Seconds of all operators except attention."""
    attended_s: Floats


class StepFactors(NamedTuple):
    """Factors and seconds that steps take beyond their operators."""

    host_s: float = 0.0
    dense: float = 0.0
    attended: float = 0.0

    def of(self, parts: Parts) -> Floats:
        """Return seconds of steps whose operators are `parts`."""
        more = self.host_s + self.dense * parts.dense_s + self.attended * parts.attended_s
        return np.asarray(parts.dense_s + parts.attended_s + more)


NOTHING = StepFactors()


def covered(
    steps: pd.DataFrame, placed: Placed, batch: Floats, width: Floats, context: Floats
) -> npt.NDArray[np.bool_]:
    """Return which passes lie among the `steps`: the same model, no larger sizes.

    Steps were timed of sequences that decode one token, and of a prompt's chunk in an empty cache.
    """
    found = np.zeros(len(batch), dtype=bool)
    if steps.empty or model_of_steps(steps) != placed:
        return found
    chunk, sequences, cached = (
        steps[name].to_numpy(float) for name in ("tokens", "batch", "batch_context")
    )
    for size in np.unique(sequences[chunk == 0]).tolist():
        longest = cached[(chunk == 0) & (sequences >= size)].max()
        found |= (width == 1) & (batch <= size) & (context + 1 <= longest)
    prompts = chunk[sequences == 0].max(initial=0)
    return np.asarray(found | ((batch == 1) & (context == 0) & (width <= prompts)))


def fit_steps(parts: Parts, seconds: Floats) -> StepFactors:
    """Return the factors of steps that took these seconds and whose operators are `parts`."""
    features = np.stack([np.ones(len(seconds)), parts.dense_s, parts.attended_s], axis=1)
    beyond = 1 - (parts.dense_s + parts.attended_s) / seconds
    return StepFactors(*non_negative(features / seconds[:, None], beyond).tolist())


def model_of_steps(steps: pd.DataFrame) -> Placed:
    """Return the model that whole steps were timed of, and the GPUs that share it."""
    name, shared = steps[["model", "tensor_parallel"]].iloc[0]
    return Placed(find_architecture(str(name)), int(shared))


class Composer:
    """Passes of any model on one device (a name of `draftsim list devices`).

    ``graphs`` are the engine's CUDA graphs, by default vLLM's.  With ``by_steps``, passes take what
    the whole steps timed on the device say, if there are any.

    Raises DraftsimError if the table has no matrix products of the device.
    """

    def __init__(
        self, table: OperatorTable, device: str | Device, graphs: CUDAGraphs | None = None,
        by_steps: bool = True,
    ) -> None:  # fmt: skip
        self.device = find_device(device) if isinstance(device, str) else device
        self.dense = DenseOperators(table, self.device)
        self.attention = AttentionOperators(table, self.device)
        self.graphs = graphs or CUDAGraphs()
        if not self.dense.models:
            raise DraftsimError(
                f"no layer's operators were timed on {self.device.name} (the table has "
                f"{', '.join(table.devices) or 'none'}): import Vidur's mlp.csv or LLMServingSim's "
                "dense.csv or layers.csv of it"
            )
        self.factors = NOTHING
        self.steps = table.of(device=self.device.name, operator="step")
        if by_steps and len(self.steps):
            parts = self.parts_of_steps(model_of_steps(self.steps), self.steps)
            self.factors = fit_steps(parts, self.steps["seconds"].to_numpy(float))

    def layer_s(self, placed: Placed, batch: Floats, width: Floats, context: Floats) -> Floats:
        """Return the seconds of one layer."""
        attended_s = self._attended_s(placed, batch, width, context, with_prompts=False)
        parts = Parts(self._dense_layer_s(placed, batch * width), attended_s)
        return self.factors._replace(host_s=0.0).of(parts)

    def _dense_layer_s(self, placed: Placed, tokens: Floats) -> Floats:
        run = self.graphs.padded(tokens)
        launched_s = np.where(self.graphs.launched(tokens), LAUNCHED_S, 0.0)
        summed, _ = self.dense.all_reduce_s(run * placed.model.hidden * BYTES, placed.shared)
        layer_s = self.dense.layer_s(placed.model, placed.shared, run)
        return np.asarray(layer_s + 2 * summed + launched_s)

    def _attended_s(
        self, placed: Placed, batch: Floats, width: Floats, context: Floats, with_prompts: bool
    ) -> Floats:
        attend = self.attention.with_prompts_s if with_prompts else self.attention.pass_s
        return attend(heads_of(placed.model, placed.shared), batch, width, context)

    def head_s(self, placed: Placed, rows: Floats) -> Floats:
        """Return seconds from the last layer to chosen tokens, of this many rows of logits."""
        parts = ("final_norm", "lm_head", "sampler")
        return np.asarray(
            sum(self.dense.once_s(part, placed.model, placed.shared, rows) for part in parts)
        )

    def pass_s(
        self, placed: Placed, batch: npt.ArrayLike, width: npt.ArrayLike, context: npt.ArrayLike,
        with_prompts: bool = False,
    ) -> Floats:  # fmt: skip
        """Return seconds of a pass over `width` tokens each of `batch` sequences; broadcasts."""
        given = (np.asarray(v, dtype=float) for v in (batch, width, context))
        sizes = np.broadcast_arrays(*given)
        b, n, c = (v.ravel() for v in sizes)
        rows = np.where(n <= VERIFIED, b * n, b)
        parts = self.parts(placed, b, n, c, rows, with_prompts)
        return self.factors.of(parts).reshape(sizes[0].shape)

    def parts(
        self, placed: Placed, batch: Floats, width: Floats, context: Floats,
        rows: Floats | None = None, with_prompts: bool = False,
    ) -> Parts:  # fmt: skip
        """Return the seconds of passes by operator, with `rows` rows of logits (one a sequence)."""
        attended_s = self._attended_s(placed, batch, width, context, with_prompts)
        dense_s = self.dense_pass_s(placed, batch * width, batch if rows is None else rows)
        return Parts(dense_s, placed.model.layers * attended_s)

    def parts_of_steps(self, placed: Placed, steps: pd.DataFrame) -> Parts:
        """Return the operators' seconds of `steps`: a prompt's chunk, decoding, or both."""
        chunk, batch, context = (
            steps[name].to_numpy(float) for name in ("tokens", "batch", "batch_context")
        )
        one, none = np.ones(len(steps)), np.zeros(len(steps))
        sizes = np.maximum(batch, 1), one, np.maximum(context - 1, 0)
        decoding = self._attended_s(placed, *sizes, with_prompts=False)
        aside = self._attended_s(placed, *sizes, with_prompts=True)
        prompt = self._attended_s(placed, one, np.maximum(chunk, 1), none, with_prompts=False)
        dense_s = self.dense_pass_s(placed, chunk + batch, batch + (chunk > 0))
        layers, mixed = placed.model.layers, (chunk > 0) & (batch > 0)
        attended_s = layers * np.where(chunk > 0, prompt, decoding)
        return Parts(dense_s, attended_s + np.where(mixed, layers * aside, 0.0))

    def dense_pass_s(self, placed: Placed, tokens: Floats, rows: Floats) -> Floats:
        """Return seconds of all operators of a pass but attention."""
        model, shared = placed.model, placed.shared
        once = self.dense.once_s("embedding", model, shared, self.graphs.padded(tokens))
        layers = model.layers * self._dense_layer_s(placed, tokens)
        return np.asarray(layers + once + self.head_s(placed, rows))

    def origins(self, placed: Placed) -> dict[str, str]:
        """Return how each part of a model's passes is known."""
        model, shared = placed.model, placed.shared
        found = {name: part.origin for name, part in self.dense.layer(model, shared).items()}
        if model.experts:
            found["experts"] = self.dense.experts_origin(model, shared)
        found["attention"] = self.attention.origin(model, shared)
        if shared > 1:
            found["all_reduce"] = self.dense.all_reduce_s(np.ones(1), shared)[1]
        for name in ("embedding", "final_norm", "lm_head", "sampler"):
            found[name] = self.dense.part(name, model, shared).origin
        return found

    def cells(self, role: str, placed: Placed, batches: Sequence[int] = BATCHES) -> pd.DataFrame:
        """Return cells of a model's passes, layers and head; ``repeats`` 1: a step covers them."""
        parts = []
        b, n, c = _grid(batches, WIDTHS, CONTEXTS)
        timed = covered(self.steps, placed, b, n, c)
        parts.append(cells_of(role, "forward", b, n, c, self.pass_s(placed, b, n, c), timed))
        if role == "target":
            narrow = n <= VERIFIED
            b1, n1, c1 = b[narrow], n[narrow], c[narrow]
            aside = self.pass_s(placed, b1, n1, c1, with_prompts=True)
            parts.append(cells_of(role, "with_prompts", b1, n1, c1, aside))
        few = np.isin(b, (1, 2, 4, 8, 16, 32, 64, 128)) & (n <= VERIFIED)
        b, n, c = b[few], n[few], c[few]
        parts.append(cells_of(role, "layer", b, n, c, self.layer_s(placed, b, n, c)))
        first = c == 0
        b, n, c = b[first], n[first], c[first]
        parts.append(cells_of(role, "head", b, n, c, self.head_s(placed, b * n)))
        b, n, c = _grid((1, 2, 3, 4, 6, 8, 16), PROMPTS, (0,))
        prompts = self.factors.of(self.parts(placed, b, n, c))
        timed = covered(self.steps, placed, b, n, c)
        parts.append(cells_of(role, "prefill", b, n, c, prompts, timed))
        return pd.concat(parts, ignore_index=True)

    def table(
        self, target: Placed, draft: Placed | None = None, name: str = "", largest: int = 0
    ) -> LatencyTable:
        """Return the latency table of a target and its draft, every batch up to `largest` included.

        Raises DraftsimError if the weights do not fit into the memory of the GPUs.
        """
        roles = {"target": target, **({} if draft is None else {"draft": draft})}
        self._check_memory(roles)
        batches = sorted({*BATCHES, *range(1, largest + 1)})
        cells = pd.concat([self.cells(role, placed, batches) for role, placed in roles.items()])
        origins = {role: self.origins(placed) for role, placed in roles.items()}
        meta: dict[str, Any] = {
            "kind": "composed", "device": self.device.name, "dtype": "bfloat16", "mode": "graph",
            "estimator": "median", "composed": name, "origins": origins,
            "models": {role: placed.model.hub for role, placed in roles.items()},
            "tensor_parallel": {role: placed.shared for role, placed in roles.items()},
            "shapes": {role: placed.model.meta() for role, placed in roles.items()},
            "framework_s": list(FRAMEWORK_S), "steps": self.factors._asdict(),
            **self.graphs.meta(), "every_batch_to": largest,
        }  # fmt: skip
        unlike = [
            f". {text}" for family, text in UNLIKE.items()
            if any(placed.model.hub.startswith(family) for placed in roles.values())
        ]  # fmt: skip
        one_graph = "" if draft is None else DRAFT_GRAPH
        meta["said"] = (
            said(name, self.device, origins) + "".join(unlike) + self._said_of_steps() + one_graph
        )
        return LatencyTable(cells.reset_index(drop=True), meta)

    def _said_of_steps(self) -> str:
        if not len(self.steps):
            return ""
        if self.factors == NOTHING:
            return ". Whole steps timed on this GPU took longer: leave out ':operators'"
        host_s, dense, attended = self.factors
        name = model_of_steps(self.steps).name
        return (
            f". Corrected by whole steps of {name}: {1e3 * host_s:.2g} ms more, "
            f"attention {1 + attended:.2f} times and the rest {1 + dense:.2f} times its operators; "
            f"other passes take between their operators ({self.device.name}:operators/...) and this"
        )

    def _check_memory(self, roles: Mapping[str, Placed]) -> None:
        # Every GPU of a target holds its share; a draft that is not shared lies on one of them.
        shares = {role: BYTES * one.model.parameters_on(one.shared) for role, one in roles.items()}
        held = sum(shares.values())
        if held > self.device.memory:
            largest = max(shares, key=lambda role: shares[role])
            more = 2
            while held - shares[largest] * (1 - 1 / more) > self.device.memory and more < 64:
                more *= 2
            names = " + ".join(placed.name for placed in roles.values())
            raise DraftsimError(
                f"{names}: the weights take {held / 1e9:.0f} GB of one {self.device.name}, which "
                f"has {self.device.memory / 1e9:.0f}: share the {largest}, as in "
                f"{roles[largest].model.name}@tp{more * roles[largest].shared}"
            )


def said(name: str, device: Device, origins: Mapping[str, Mapping[str, str]]) -> str:
    """Say in one line how the parts of a composed table are known."""
    roles = []
    for role, parts in origins.items():
        by_origin: dict[str, list[str]] = {}
        for part, origin in parts.items():
            by_origin.setdefault(origin, []).append(part)
        ordered = sorted(by_origin, key=lambda o: (o not in (MEASURED, CORRECTED), o == ASSUMED))
        words = [f"{origin}: {', '.join(by_origin[origin])}" for origin in ordered]
        roles.append(f"{role} {'; '.join(words)}")
    return f"{name}: composed from operators on {device.name}. {'. '.join(roles)}"


def _grid(
    batches: Sequence[int], widths: Sequence[int], contexts: Sequence[int]
) -> tuple[Floats, Floats, Floats]:
    b, n, c = combined(batches, widths, contexts)
    kept = (b == 1) | (b * n <= MOST_TOKENS)
    return b[kept], n[kept], c[kept]


def overfull(meta: Mapping[str, Any], batch: int, held: float, then: str) -> str:
    """Return in words that the caches of `batch` requests do not fit next to the weights.

    Each holds `held` tokens in the mean.  ``then`` ends the sentence.  Where no cache fits at all,
    the error of `kv_blocks` says what to do.  Empty if they fit, or the latencies are not composed
    for their GPU.
    """
    if "composed" not in meta or meta.get("scaled"):
        return ""
    try:
        blocks = kv_blocks(meta).blocks
    except DraftsimError as error:
        return str(error)
    needed = batch * math.ceil(held / BLOCK)
    if needed <= blocks:
        return ""
    return (
        f"{batch:,} requests of {held:,.0f} tokens each take {needed:,} blocks of cache, and about "
        f"{blocks:,} fit next to the weights on {meta['device']}: {then}"
    )


class Blocks(NamedTuple):
    """Blocks of a pool."""

    least: int
    blocks: int
    most: int
    said: str
    """One sentence on how the blocks were computed."""


def kv_blocks(meta: Mapping[str, Any], utilisation: float = UTILISATION) -> Blocks:
    """Return the blocks of one GPU of an engine with the models of a composed latency table.

    ``(memory x utilisation - weights - overhead) / (block size x cached bytes of a token)``, draft
    included.  Raises DraftsimError if GPU or models are not told, or nothing is left for the cache.
    """
    if "composed" not in meta:
        raise DraftsimError(
            "cache blocks are counted for composed latencies alone (--latency GPU/TARGET+DRAFT): "
            "give their number"
        )
    if not 0 < utilisation <= 1:
        raise DraftsimError(f"memory utilisation is {utilisation}, expected a share in (0, 1]")
    device = find_device(str(meta["device"]))
    models = [
        (find_architecture(str(hub)), int(meta["tensor_parallel"][role]))
        for role, hub in meta["models"].items()
    ]
    memory = device.memory / 1e9 * GIB * USABLE * utilisation
    weights = sum(BYTES * model.parameters_on(shared) for model, shared in models)
    token = sum(model.layers * heads_of(model, shared).cached_bytes for model, shared in models)
    most, own, least = (
        int((memory - weights - overhead) // (BLOCK * token)) for overhead in OVERHEAD_B
    )
    if own < 1:
        names = " + ".join(model.name for model, _ in models)
        raise DraftsimError(
            f"{names}: the weights leave no memory for a cache on {device.name} at a utilisation "
            f"of {utilisation:g}: share the target between more GPUs"
        )
    sentence = (
        f"{own} blocks of {BLOCK} tokens ({max(least, 0)} to {most}): {memory / 1e9:.1f} GB "
        f"of {device.name} at {utilisation:g}, {weights / 1e9:.1f} GB of weights, an assumed "
        f"{OVERHEAD_B[1] / 1e9:.1f} GB of everything else, {token / 1e3:.0f} kB a token"
    )
    return Blocks(max(least, 0), own, most, sentence)
