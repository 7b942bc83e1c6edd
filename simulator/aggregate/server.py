"""A server's iteration as a sum of a few costs, and the runs that tell of them.

    iteration = fixed + token x tokens + context x cached tokens + step (above a number of tokens)
              + draft passes x (draft + draft_token x sequences)

tokens: verified in an iteration, batch x (K + 1); cached tokens: batch x context.  A batch
gives batch x E tokens an iteration, E the tokens of a round.  The sum holds where no part hides
behind another; a step is what a kernel for more tokens costs more, or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simulator.aggregate.acceptance import TwoState
from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]

BOUNDS = {
    "batch": (1, 65_536), "k": (0, 1024), "context": (0, 1e8), "tokens_per_s": (1e-6, 1e12),
}  # fmt: skip
"""Least and largest values of a run that can have been measured."""
COSTS = ("fixed_s", "token_s", "context_s", "draft_s", "draft_token_s", "step_s")


@dataclass(frozen=True)
class ServerRun:
    """One measured run: sequences at once, draft length (0: off), and tokens/s of all of them.

    ``context``: mean tokens in a sequence's cache.  ``emitted``: tokens a round, or
    ``accepted``: chances that the first 1, 2, ... drafted tokens are accepted; with neither the
    acceptance is fitted with the costs.

    Raises DraftsimError for impossible values.
    """

    batch: int
    k: int
    tokens_per_s: float
    context: float = 0.0
    emitted: float | None = None
    accepted: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise DraftsimError(
                    f"{name} is {getattr(self, name):g}, expected {least:g} to {most:g}"
                )
        if self.accepted and len(self.accepted) != self.k:
            raise DraftsimError(
                f"acceptance of {len(self.accepted)} positions at k = {self.k}: name all of them"
            )
        if self.round_tokens is not None and not 1 <= self.round_tokens <= self.k + 1:
            raise DraftsimError(
                f"{self.round_tokens:g} tokens a round at k = {self.k}: expected 1 to {self.k + 1}"
            )

    @property
    def round_tokens(self) -> float | None:
        """Tokens a round, if they are known."""
        if self.k == 0:
            return 1.0
        return 1.0 + sum(self.accepted) if self.accepted else self.emitted


@dataclass(frozen=True)
class Server:
    """The costs, seconds, and what else a prediction takes.

    ``threshold``: tokens above which ``step_s`` is added.  ``acceptance``: chance that a drafted
    token is accepted, where the runs do not say.  ``always``: draft passes of every iteration of
    an engine that drafts whatever is verified; None: as many as are verified.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    draft_s: float = 0.0
    draft_token_s: float = 0.0
    step_s: float = 0.0
    threshold: int | None = None
    acceptance: float | None = None
    always: int | None = None

    def columns(self, batch: npt.ArrayLike, k: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """What each of COSTS is multiplied by in an iteration, (..., 6)."""
        b, n, c = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (batch, k, context)))
        passes = n if self.always is None else np.full_like(n, self.always)
        tokens = b * (n + 1)
        over = tokens > (np.inf if self.threshold is None else self.threshold)
        return np.stack([np.ones_like(b), tokens, b * c, passes, passes * b, over], axis=-1)

    @property
    def costs(self) -> Floats:
        """The values of COSTS."""
        return np.array([getattr(self, name) for name in COSTS])

    def with_costs(self, costs: Sequence[float] | Floats) -> Server:
        """The same server with other costs."""
        fixed, token, context, draft, draft_token, step = map(float, costs)
        return replace(
            self, fixed_s=fixed, token_s=token, context_s=context, draft_s=draft,
            draft_token_s=draft_token, step_s=step,
        )  # fmt: skip

    def iteration_s(
        self, batch: npt.ArrayLike, k: npt.ArrayLike = 0, context: npt.ArrayLike = 0
    ) -> Floats:
        """Seconds of an iteration; sizes broadcast."""
        return np.asarray(self.columns(batch, k, context) @ self.costs)

    def round_tokens(self, k: int, known: float | None = None) -> float:
        """Tokens a round: those `known`, or by the i.i.d. acceptance.

        Raises DraftsimError if neither is there.
        """
        if k == 0 or known is not None:
            return 1.0 if k == 0 or known is None else known
        if self.acceptance is None:
            raise DraftsimError(f"no run says how many tokens a round of {k} emits: name emitted")
        return TwoState(self.acceptance).emitted(k)

    def tokens_per_s(
        self, batch: int, k: int = 0, context: float = 0.0, emitted: float | None = None
    ) -> float:
        """Tokens a second of all sequences."""
        return batch * self.round_tokens(k, emitted) / float(self.iteration_s(batch, k, context))
