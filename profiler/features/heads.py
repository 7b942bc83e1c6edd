"""Trained modules on a frozen target: exit, parallel and Hydra heads, masks, an adapter."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.json_text import parse_json
from profiler.models.loading import fingerprint
from profiler.models.stack import LayerRunner
from traces.errors import DraftsimError


class ResidualBlock(nn.Module):
    """``x + B silu(A x)``, B starting at zero: at first the identity."""

    def __init__(self, width: int, rank: int, inputs: int | None = None) -> None:
        super().__init__()
        self.down = nn.Linear(inputs or width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor, seen: Tensor | None = None) -> Tensor:
        """Map (..., width) -> (..., width); `seen` (..., inputs) is read in place of `states`."""
        out: Tensor = states + self.up(
            nn.functional.silu(self.down(states if seen is None else seen))
        )
        return out


class MedusaBlock(nn.Module):
    """``x + silu(W x)``, W starting at zero (Medusa, arXiv:2401.10774, sec. 2.1.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.inner.weight)

    def forward(self, states: Tensor, seen: Tensor | None = None) -> Tensor:
        """Map (..., width) -> (..., width)."""
        out: Tensor = states + nn.functional.silu(self.inner(states))
        return out


class ExitHeads(nn.Module):
    """A head per exit layer: low-rank residual, RMS norm, then the target's output projection.

    Untrained it is the logit lens: the final norm applied to an intermediate state.
    """

    def __init__(self, layers: tuple[int, ...], width: int, rank: int = 32) -> None:
        super().__init__()
        if not layers:
            raise ValueError("layers is empty, expected at least one exit layer")
        self.layers, self.width, self.rank = layers, width, rank
        self.blocks = nn.ModuleList(ResidualBlock(width, rank) for _ in layers)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in layers)

    def states(self, at: int, hidden: Tensor) -> Tensor:
        """Map (tokens, width) states at exit `at` -> the output projection's input, likewise."""
        raw: Tensor = self.blocks[at](hidden.float())
        return _norm(raw, self.norms[at])

    def start_from(self, norm: Tensor) -> ExitHeads:
        """Set every norm to the target's final one, (width,)."""
        for own in self.norms:
            own.data.copy_(norm)
        return self


class ParallelHeads(nn.Module):
    """`k` heads that each predict one further token from the target's last (normed) state.

    ``kind`` is ``blockwise`` (a feed-forward block with `rank` hidden units), ``medusa``
    (`MedusaBlock`) or ``specdec`` (a feed-forward block that also reads the embedding of the
    last emitted token).  All share the target's output projection.
    """

    KINDS = ("blockwise", "medusa", "specdec")

    def __init__(self, kind: str, k: int, width: int, rank: int = 64) -> None:
        super().__init__()
        if kind not in self.KINDS:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(self.KINDS)}")
        self.kind, self.k, self.width, self.rank = kind, k, width, rank
        inputs = 2 * width if kind == "specdec" else width
        self.blocks = nn.ModuleList(
            MedusaBlock(width) if kind == "medusa" else ResidualBlock(width, rank, inputs)
            for _ in range(k)
        )

    def states(self, normed: Tensor, embedded: Tensor) -> Tensor:
        """Map (starts, width) state and last token's embedding -> (starts, k, width)."""
        seen = torch.cat([normed, embedded], -1) if self.kind == "specdec" else normed
        return torch.stack([block(normed, seen) for block in self.blocks], 1)


class HydraHeads(nn.Module):
    """`k` heads in turn: each also reads the tokens drafted so far (Hydra, arXiv:2402.05109).

    Head i (from 0) reads the target's last normed state and the embeddings of the last emitted
    token and of the i tokens drafted after it (sec. 3), by a feed-forward block with `rank` hidden
    units.  All share the target's output projection.  The authors' blocks
    (github.com/zankner/Hydra) read the same, with full rank and an output projection each.
    """

    def __init__(self, k: int, width: int, rank: int = 64) -> None:
        super().__init__()
        self.k, self.width, self.rank = k, width, rank
        self.blocks = nn.ModuleList(ResidualBlock(width, rank, (2 + i) * width) for i in range(k))

    def state(self, at: int, normed: Tensor, embedded: Tensor) -> Tensor:
        """Return head `at`'s input of the output projection, (starts, width).

        ``normed`` (starts, width); ``embedded`` (starts, at + 1, width): the last emitted token
        and those drafted.
        """
        state: Tensor = self.blocks[at](normed, torch.cat([normed, embedded.flatten(1)], -1))
        return state

    def states(self, normed: Tensor, embedded: Tensor) -> Tensor:
        """Return all heads' states after given tokens, (starts, k, width).

        ``normed`` (starts, width); ``embedded`` (starts, k, width).
        """
        each = [self.state(at, normed, embedded[:, : at + 1]) for at in range(self.k)]
        return torch.stack(each, 1)


class MaskEmbeddings(nn.Module):
    """Embeddings of `k` mask tokens, SPACE's prompts for the tokens to come."""

    def __init__(self, k: int, width: int) -> None:
        super().__init__()
        self.k, self.width = k, width
        self.weight = nn.Parameter(torch.zeros(k, width))


class Adapter(nn.Module):
    """One attention block with two norms in front of the target's output projection.

    Kangaroo (Liu et al., arXiv:2404.18911, sec. 3.1): multi-head attention and two RMS norms,
    no feed-forward part, and the target's own output projection.  Untrained it is the logit
    lens of its layer.

    ``layer``: the exit whose states it reads, 1 = after the first layer.  ``width``, ``heads``,
    ``head_dim``: sizes of the target, whose rotary positions are used, too.
    """

    def __init__(self, layer: int, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        if layer < 1:
            raise ValueError(f"layer is {layer}, expected at least 1")
        self.layer, self.width, self.heads, self.head_dim = layer, width, heads, head_dim
        self.layers = (layer,)
        self.before = nn.Parameter(torch.ones(width))
        self.after = nn.Parameter(torch.ones(width))
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, heads * head_dim, bias=False)
        self.value = nn.Linear(width, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        nn.init.zeros_(self.out.weight)

    def start_from(self, norm: Tensor) -> Adapter:
        """Set the last norm to the target's final one, (width,)."""
        self.after.data.copy_(norm)
        return self

    def projected(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (..., tokens, width) -> queries, keys and values (..., heads, tokens, head_dim).

        ``cos``, ``sin``: (tokens, head_dim) of the tokens' positions.
        """
        seen = _norm(hidden.float(), self.before)
        shape = (*seen.shape[:-1], self.heads, self.head_dim)
        query, key, value = (
            part(seen).view(shape).transpose(-3, -2) for part in (self.query, self.key, self.value)
        )
        return rotated(query, cos, sin), rotated(key, cos, sin), value

    def attended(
        self, hidden: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the input of the output projection, (..., tokens, width).

        ``keys``, ``values`` (..., heads, seen, head_dim); ``mask`` (tokens, seen) booleans.
        """
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        joined = mixed.transpose(-3, -2).flatten(-2)
        return _norm(hidden.float() + self.out(joined), self.after)


class AdapterRunner:
    """An adapter with the keys and values of one sequence, slot for slot as its target's."""

    def __init__(self, adapter: Adapter, target: LayerRunner) -> None:
        self.adapter = adapter
        self._cos, self._sin = (t[0].float() for t in target.rotary)
        shape = (adapter.heads, target.cache.slots, adapter.head_dim)
        self._keys = torch.zeros(shape, device=target.device)
        self._values = torch.zeros(shape, device=target.device)

    @torch.inference_mode()
    def run(
        self,
        hidden: Tensor,
        start: int,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return states for the output projection, (tokens, width), of exit states (tokens, width).

        ``start``, ``mask`` and ``positions`` as in `LayerRunner.run_layers`.
        """
        count = hidden.shape[0]
        stop = start + count
        if mask is None:
            mask = torch.ones(count, stop, dtype=torch.bool, device=hidden.device).tril(start)
        at = slice(start, stop) if positions is None else positions
        query, key, value = self.adapter.projected(hidden, self._cos[at], self._sin[at])
        self._keys[:, start:stop], self._values[:, start:stop] = key, value
        keys, values = self._keys[:, :stop], self._values[:, :stop]
        return self.adapter.attended(hidden, query, keys, values, mask)


def mask_layout(length: int, at: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return attention mask and positions of a sequence with k mask tokens after each index `at`.

    Returns ((length + n k) x itself booleans, (length + n k,) positions), n = len(at).  A mask
    token sees the sequence up to its index and the masks before it in its group.
    """
    count = at.shape[0]
    whole = torch.zeros(length + count * k, length + count * k, dtype=torch.bool, device=at.device)
    whole[:length, :length] = torch.ones(length, length, dtype=torch.bool, device=at.device).tril()
    sees = torch.arange(length, device=at.device)[None] <= at[:, None]
    whole[length:, :length] = sees.repeat_interleave(k, 0)
    own = torch.ones(k, k, dtype=torch.bool, device=at.device).tril()
    whole[length:, length:] = torch.block_diag(*[own] * count)
    ahead = at[:, None] + 1 + torch.arange(k, device=at.device)
    return whole, torch.cat([torch.arange(length, device=at.device), ahead.flatten()])


MODULES = ("exit", *ParallelHeads.KINDS, "hydra", "space", "kangaroo")
FILES = {name: f"{name}_heads.safetensors" for name in MODULES}
"""File of each module in the folder of a target's modules."""


def save_module(module: nn.Module, target: Any, path: Path) -> None:
    """Write a module's weights in half precision, with what it takes to build it again.

    The latter is the arguments of its class, which it keeps under their names.
    """
    names = inspect.signature(type(module)).parameters
    settings = {name: getattr(module, name) for name in names}
    weights = {name: w.detach().half().contiguous() for name, w in module.state_dict().items()}
    header = {
        "settings": json.dumps(settings), "target": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
    }  # fmt: skip
    save_file(weights, path, metadata=header)
    path.chmod(0o644)  # safetensors writes 0600


def load_module(path: Path, target: Any, factory: type[nn.Module]) -> Any:
    """Return the module kept at `path`, in float32 on the target's device.

    Raises DraftsimError if the file is missing or damaged, or the module was trained for another
    target (told by the weights in the precision it was trained in, else by the width).
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        settings = parse_json(header["settings"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DraftsimError(
            f"cannot load trained heads from {path}: {error}: train them again"
        ) from None
    # Another precision rounds the same weights to other values: not comparable.
    comparable = str(target.dtype) == f"torch.{header.get('dtype', 'float32')}"
    fits = settings.get("width") == target.config.get_text_config().hidden_size
    if not fits or (comparable and header.get("target") != fingerprint(target)):
        raise DraftsimError(f"{path} was trained for another target: train heads for this one")
    if "layers" in settings:
        settings["layers"] = tuple(settings["layers"])
    module = factory(**settings)
    module.load_state_dict(weights)
    return module.to(target.device).eval()


def log_confidence(logits: Tensor, temperature: float) -> Tensor:
    """Log of the largest softmax(z / T) per row (SpecBound, eq. 2): (rows, vocab) -> (rows,)."""
    scaled = logits.float() / temperature
    return scaled.amax(-1) - scaled.logsumexp(-1)


def _norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to states (..., head_dim); cos and sin broadcast to them."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin
