"""CM-ASD's Figure 2 on our pair: latency against throughput over batch sizes, by serving."""

from __future__ import annotations

from simulator.papers.ours import REPLAYED, Ours
from simulator.papers.rows import EXPERIMENT, Row
from simulator.serving import ClosedLoop, Limits, Scenario, over_batches, serve
from traces.errors import DraftsimError
from traces.sources.methods import CMASD_ABLATION, METHODS, build

FIGURE_2 = "CM-ASD Figure 2"
SERVED = {
    "plain decoding": CMASD_ABLATION["transformer-base"], "fixed window": METHODS["specdecode"],
    "GammaTune": METHODS["gammatune"], "CM-ASD": METHODS["cm-asd"],
}  # fmt: skip
"""What is served: the figure's own points are a drawing."""
LARGEST = 32
"""Batches above are those of engines with another bound than the figure's."""


def batch_rows(ours: Ours) -> list[Row]:
    """Tokens per second and milliseconds a token, with as many requests kept in the engine.

    At the batch sizes that the latencies know; DraftsimError where that is one.
    """
    if not ours.latency.knows_batches:
        raise DraftsimError(
            "these latencies know one batch size, and the figure is over several: measure them "
            "(`draftsim profile --batch 1,4,16`)"
        )
    cells = ours.latency.cells
    mine = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]
    batches = sorted({int(b) for b in mine["batch"] if b <= LARGEST})
    rows: list[Row] = []
    for name, chosen in SERVED.items():
        policy, rule = build(chosen, ours.trace)
        how = "exact replay" if rule.lossless else REPLAYED
        for batch in batches:
            requests = max(len(ours.trace.requests), 4 * batch)
            base = Scenario(ClosedLoop(batch), Limits(max_batch=batch), requests=requests)
            [scenario] = over_batches(base, [batch])
            [row] = serve(ours.trace, ours.latency, {name: policy}, scenario, rule=rule).rows()
            note = f"closed loop of {requests} requests, continuous batching; {how}"
            values = {
                "tokens/s": float(row["throughput_tok_s"]),
                "ms a token": 1e3 * float(row["tpot_s"]["mean"]),
            }
            rows += [
                Row(FIGURE_2, f"{name}, batch {batch}", column, None, value, EXPERIMENT, note)
                for column, value in values.items()
            ]
    return rows
