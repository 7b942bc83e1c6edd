"""Batch policies that choose the length of highest goodput, tokens per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from policies.batch import BatchPolicy, IterationCost, TextbookCost
from policies.batch_confidence import CONTEXT_BUCKET
from policies.core import Load, Round
from policies.parameters import one_of, whole, within


class _CostByLength(BatchPolicy):
    """Shared by the policies here: seconds of an iteration for every draft length."""

    def __init__(self, gamma_max: int, cost: IterationCost | None) -> None:
        whole("gamma_max", gamma_max, 1)
        self.gamma_max = gamma_max
        self.cost = cost
        self._cost = cost or TextbookCost()
        self._costs: dict[tuple[int, int], list[float]] = {}

    def _seconds(self, loads: Sequence[Load]) -> list[float]:
        """Seconds for each draft length 0 to gamma_max at this batch and mean context."""
        batch = loads[0].batch
        context = sum(load.context for load in loads) // len(loads)
        key = (batch, context // CONTEXT_BUCKET)
        if key not in self._costs:
            middle = (key[1] + 0.5) * CONTEXT_BUCKET
            self._costs[key] = [
                self._cost(batch, k, batch * (k + 1), middle) for k in range(self.gamma_max + 1)
            ]
        return self._costs[key]


class Goodput(_CostByLength):
    """K maximising (1 + sum of r_i, i <= K) / ITL(B, K), r_i measured per position.

    vLLM ``DynamicSpeculativeDecodingManager`` (one stored version).  r_i is the share of
    drafts of i tokens or more whose i-th was accepted; a position never drafted counts as
    0, so the length can only fall after the warm-up.  Ties go to the smaller K.  Reads no
    signal.

    Parameters
    ----------
    gamma_max:
        Largest K, drafted during the warm-up.
    warmup:
        Iterations before the first choice.
    cost:
        Seconds of an iteration (`policies.batch.IterationCost`), the ITL above.
    """

    def __init__(
        self, gamma_max: int = 8, warmup: int = 10, cost: IterationCost | None = None
    ) -> None:
        super().__init__(gamma_max, cost)
        whole("warmup", warmup, 0)
        self.warmup = warmup
        self._iterations = 0
        self._drafted = [0] * gamma_max
        self._accepted = [0] * gamma_max

    def plan(self, loads: Sequence[Load]) -> int:
        if self._iterations < self.warmup:
            return self.gamma_max
        rates = (a / d if d else 0.0 for a, d in zip(self._accepted, self._drafted, strict=True))
        tokens = accumulate(rates, initial=1.0)
        goodput = [t / s for t, s in zip(tokens, self._seconds(loads), strict=True)]
        return goodput.index(max(goodput))

    def observe(self, outcomes: Sequence[Round]) -> None:
        self._iterations += 1
        for outcome in outcomes:
            for i in range(min(outcome.drafted, self.gamma_max)):
                self._drafted[i] += 1
                self._accepted[i] += i < outcome.accepted


class TurboSpec(_CostByLength):
    """K maximising the modelled goodput (TurboSpec/SmartSpec, eqs. 1-4; the authors' forks).

    Goodput(k) = B (1 - a^(k+1)) / (1 - a) / seconds(B, k), with one acceptance rate a for
    the whole engine, estimated as accepted / (accepted + rejected) tokens.  Reads no
    signal.  K holds between two scans, which climb from the smallest k and stop at the
    first that does not improve.

    Parameters
    ----------
    variant:
        ``dsd``: scans every 20 iterations from k = 0, whose goodput counts 1.1-fold;
        a <- 0.85 a + 0.15 observed.  ``batch-dsd``: every 200 iterations, a = mean of the
        last 100 observed, 5 % of the plain target step added as overhead, and from the second
        scan on it starts at k = 1, so that speculation never stops altogether.
    gamma_max:
        Largest k scanned; 8 is what `dsd` proposes.
    acceptance:
        Initial a, 0.7 there.
    interval:
        Iterations between scans; None: as the variant has it.
    cost:
        Seconds of an iteration (`policies.batch.IterationCost`).
    """

    def __init__(
        self,
        variant: Literal["dsd", "batch-dsd"] = "dsd",
        gamma_max: int = 8,
        acceptance: float = 0.7,
        interval: int | None = None,
        cost: IterationCost | None = None,
    ) -> None:
        super().__init__(gamma_max, cost)
        one_of("variant", variant, ("dsd", "batch-dsd"))
        within("acceptance", acceptance, 0, 1)
        whole("interval", interval, 1, none=True)
        self.variant = variant
        self.acceptance = acceptance
        self.interval = interval
        self._every = interval or {"dsd": 20, "batch-dsd": 200}[variant]
        self._acceptance = acceptance
        self._recent: deque[float] = deque(maxlen=100)
        self._iterations = 0
        self._length = 0

    def plan(self, loads: Sequence[Load]) -> int:
        if self._iterations % self._every == 0:
            self._length = self._scan(self._seconds(loads))
        return self._length

    def observe(self, outcomes: Sequence[Round]) -> None:
        self._iterations += 1
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
