"""Batch policies that choose the length of highest goodput, tokens per second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from policies.batch.base import IterationCost, KeptInStep, TextbookCost
from policies.batch.confidence import CONTEXT_BUCKET
from policies.batch.tables import SwitchedOff
from policies.core import Load, Round
from policies.spec import flag, one_of, parameter, whole, within

GoodputVariant = Literal["dsd", "batch-dsd"]


class _CostByLength(KeptInStep):
    """Shared by the policies here: seconds of an iteration for every draft length."""

    gamma_max: int
    cost: IterationCost | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._costs: dict[tuple[int, int], list[float]] = {}

    def _seconds(self, loads: Sequence[Load]) -> list[float]:
        """Return seconds for each draft length 0 to gamma_max at this batch and mean context."""
        batch = loads[0].batch
        context = sum(load.context for load in loads) // len(loads)
        key = (batch, context // CONTEXT_BUCKET)
        if key not in self._costs:
            cost, middle = self.cost or TextbookCost(), (key[1] + 0.5) * CONTEXT_BUCKET
            self._costs[key] = [
                cost(batch, self.passes_of(k), batch * (k + 1), middle)
                for k in range(self.gamma_max + 1)
            ]
        return self._costs[key]


@dataclass(eq=False)
class Goodput(_CostByLength):
    """K maximising (1 + sum of r_i, i <= K) / ITL(B, K), r_i measured per position.

    vLLM ``DynamicSpeculativeDecodingManager`` (one stored version, a pull request's).  During
    the warm-up r_i is what was configured; then it is the share of drafts of i tokens or more,
    of all iterations so far, whose i-th was accepted.  A position never drafted counts as 0, so
    that the length can only fall.  Ties go to the smaller K.  Reads no signal.

    Parameters
    ----------
    gamma_max:
        Largest K.
    warmup:
        Iterations before anything measured counts, 10 there.
    acceptance:
        The configured r_i, for i = 1 ... gamma_max at least; a number a means r_i = a ** i.
        vLLM has no default; 0.7 is ours.
    cost:
        Seconds of an iteration (`policies.batch.base.IterationCost`), the ITL above.
    in_step:
        True if the draft model reads along at K = 0, as vLLM's does (`KeptInStep`).  The ITL at
        K = 0 then has that draft pass.
    """

    gamma_max: int = parameter(8, whole, 1)
    warmup: int = parameter(10, whole, 0)
    acceptance: float | Sequence[float] = 0.7
    cost: IterationCost | None = None
    in_step: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        most, rates = self.gamma_max, self.acceptance
        if isinstance(rates, int | float):
            within("acceptance", rates, 0, 1)
            rates = [rates**i for i in range(1, most + 1)]
        for rate in rates:
            within("acceptance", rate, 0, 1)
        if len(rates) < most:
            raise ValueError(
                f"acceptance has {len(rates)} rates, expected one for each of gamma_max={most}"
            )
        self.draft_up_to(most)
        self._configured = list(rates)[:most]
        self._iterations = 0
        self._drafted = [0] * most
        self._accepted = [0] * most

    def plan(self, loads: Sequence[Load]) -> int:
        rates = self._configured
        if self._iterations >= self.warmup:
            counts = zip(self._accepted, self._drafted, strict=True)
            rates = [a / d if d else 0.0 for a, d in counts]
        tokens = accumulate(rates, initial=1.0)
        goodput = [t / s for t, s in zip(tokens, self._seconds(loads), strict=True)]
        return goodput.index(max(goodput))

    def observe(self, outcomes: Sequence[Round]) -> None:
        self._iterations += 1
        for outcome in outcomes:
            for i in range(min(outcome.drafted, self.gamma_max)):
                self._drafted[i] += 1
                self._accepted[i] += i < outcome.accepted


@dataclass(eq=False)
class TurboSpec(SwitchedOff, _CostByLength):
    """K maximising the modelled goodput (TurboSpec/SmartSpec, eqs. 1-4; the authors' forks).

    Goodput(k) = B (1 - a^(k+1)) / (1 - a) / seconds(B, k), with one acceptance rate a for
    the whole engine, estimated as accepted / (accepted + rejected) tokens.  Reads no
    signal.  K holds between two scans, which climb from the smallest k and stop at the
    first that does not improve.

    A scan that finds k = 0 best switches speculation off for every request of the batch, for
    good, and for all others while as many requests run as did then (`dsd`,
    spec_decode_worker.py).  After `REOPENED` such iterations, or at once where fewer run in the
    next one, requests that were not switched off may speculate again.  Iterations that draft
    nothing do not count towards the next scan.

    Parameters
    ----------
    variant:
        ``dsd``: scans every 20 iterations from k = 0, whose goodput counts 1.1-fold;
        a <- 0.85 a + 0.15 observed.  ``batch-dsd``: every 200 iterations, a = mean of the
        last 100 observed, 5% of the plain target step added as overhead, and from the second
        scan on it starts at k = 1, so that speculation never stops altogether.
    gamma_max:
        Largest k scanned; 8 is what `dsd` proposes.
    acceptance:
        Initial a, 0.7 there.
    interval:
        Iterations between scans; None: as the variant has it.
    cost:
        Seconds of an iteration (`policies.batch.base.IterationCost`).
    forever:
        As described, read in `dsd`; False: k = 0 lasts until the next scan, for every request.
    in_step:
        See `SwitchedOff`.
    """

    variant: GoodputVariant = parameter("dsd", one_of, get_args(GoodputVariant))
    gamma_max: int = parameter(8, whole, 1)
    acceptance: float = parameter(0.7, within, 0, 1)
    interval: int | None = parameter(None, whole, 1)
    cost: IterationCost | None = None
    forever: bool = parameter(True, flag)
    in_step: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_up_to(self.gamma_max)
        self._every = self.interval or {"dsd": 20, "batch-dsd": 200}[self.variant]
        self._acceptance = self.acceptance
        self._recent: deque[float] = deque(maxlen=100)
        self._iterations = 0
        self._planned = False
        self._length = 0
        self._closed = math.inf
        self._rested = 0

    def resting(self, queue: int) -> bool:
        self._rested += queue >= self._closed
        if self._rested % REOPENED == 0:
            self._closed, self._rested = math.inf, 0
        return queue >= self._closed

    def switched(self, queue: int) -> None:
        self._closed = queue

    def plan(self, loads: Sequence[Load]) -> int:
        self._planned = True
        if self._iterations % self._every == 0:
            self._length = self._scan(self._seconds(loads))
        return self._length

    def observe(self, outcomes: Sequence[Round]) -> None:
        self._iterations += self._planned
        self._planned = False
        accepted = sum(o.accepted for o in outcomes)
        rejected = sum(o.accepted < o.drafted for o in outcomes)
        if not accepted + rejected:
            return
        observed = accepted / (accepted + rejected)
        if self.variant == "dsd":
            self._acceptance = 0.85 * self._acceptance + 0.15 * observed
        else:
            self._recent.append(observed)
            self._acceptance = sum(self._recent) / len(self._recent)

    def _scan(self, seconds: Sequence[float]) -> int:
        first = int(self.variant == "batch-dsd" and self._iterations > 0)
        overhead = 0.05 * seconds[0] if self.variant == "batch-dsd" else 0.0
        best, best_goodput = first, 0.0
        tokens = sum(self._acceptance**i for i in range(first))
        for k in range(first, self.gamma_max + 1):
            tokens += self._acceptance**k
            goodput = tokens / (seconds[k] + overhead * (k > 0))
            if k == 0 and self.variant == "dsd":
                goodput *= 1.1
            if goodput <= best_goodput:
                break
            best, best_goodput = k, goodput
        return best


REOPENED = 100
"""Iterations that rested after which TurboSpec's fork lets new requests speculate again."""
