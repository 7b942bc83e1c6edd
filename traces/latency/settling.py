"""The time of a round's draft passes while the caches fill with the draft's weights.

The target's pass leaves the caches full of its own weights.  A round's first draft pass has cells
of its own (``catch_up``).  The next passes also take longer than later ones, and less so from pass
to pass.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from traces.latency.table import LatencyTable


def settling_s(latency: LatencyTable, model: str, batch: int, passes: npt.ArrayLike) -> Floats:
    """Return the extra seconds, over ``forward``, of rounds' draft passes after the first.

    ``passes`` counts them, of any shape.  Zeros for a table without ``settling`` cells.
    """
    sums = settling_sums(latency, model, batch)
    return np.asarray(sums[np.clip(passes, 0, len(sums) - 1)])


def settling_sums(latency: LatencyTable, model: str, batch: int) -> Floats:
    """Return the same sum for the first 0, 1, ... passes after the first, as far as measured.

    Read at the nearest batch measured, as a mean over contexts: what comes back into the caches
    are weights.
    """
    by_model = _known.setdefault(latency, {})
    known = by_model.get(model)
    if known is None:
        known = by_model[model] = _by_batch(latency, model)
    nearest = min(known, key=lambda size: abs(size - batch), default=None)
    return np.zeros(1) if nearest is None else known[nearest]


def _by_batch(latency: LatencyTable, model: str) -> dict[int, Floats]:
    cells = latency.cells
    own = cells[(cells["model"] == model) & (cells["phase"] == "settling")]
    found = {}
    for batch in own["batch"].unique():
        part = own[own["batch"] == batch]
        later = latency.seconds(model, "forward", batch=batch, context=part["context"])
        beyond = (part["median_s"] - later).groupby(part["new_tokens"]).mean()
        found[int(batch)] = np.cumsum([0.0, *beyond.sort_index()])
    return found


# A search prices one table hundreds of times.
_known: WeakKeyDictionary[LatencyTable, dict[str, dict[int, Floats]]] = WeakKeyDictionary()
