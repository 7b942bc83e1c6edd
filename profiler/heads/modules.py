"""Small trained modules on a frozen target: exit heads, parallel heads, mask embeddings."""

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
from traces.errors import DraftsimError


class ResidualBlock(nn.Module):
    """``x + B silu(A x)``, B starting at zero: at first the identity."""

    def __init__(self, width: int, rank: int, inputs: int | None = None) -> None:
        super().__init__()
        self.down = nn.Linear(inputs or width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor, seen: Tensor | None = None) -> Tensor:
        """(..., width) -> (..., width); `seen` (..., inputs) is read in place of `states`."""
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
        """(..., width) -> (..., width)."""
        del seen
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
        """Input of the output projection from exit `at`: (tokens, width) -> (tokens, width)."""
        raw: Tensor = self.blocks[at](hidden.float())
        scaled = raw * torch.rsqrt(raw.pow(2).mean(-1, keepdim=True) + 1e-6)
        out: Tensor = scaled * self.norms[at]
        return out

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
        """(starts, width) state and last token's embedding -> (starts, k, width)."""
        seen = torch.cat([normed, embedded], -1) if self.kind == "specdec" else normed
        return torch.stack([block(normed, seen) for block in self.blocks], 1)


class MaskEmbeddings(nn.Module):
    """Embeddings of `k` mask tokens, SPACE's prompts for the tokens to come."""

    def __init__(self, k: int, width: int) -> None:
        super().__init__()
        self.k, self.width = k, width
        self.weight = nn.Parameter(torch.zeros(k, width))


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
    """The module kept at `path`, in float32 on the target's device.

    Raises
    ------
    DraftsimError
        If the file is missing or damaged, or the module was trained for another target (told
        by the weights in the precision it was trained in, else by the width).
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
