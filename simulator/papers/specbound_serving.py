"""SpecBound's Table 3 on our pair: time to first token, latency and throughput of one stream."""

from __future__ import annotations

from simulator.papers.ours import Ours
from simulator.papers.rows import EXPERIMENT, Row
from simulator.pricing import Priced, price
from simulator.published import SPECBOUND_3
from traces.replay.rounds import RoundLog

TTFT, PER_TOKEN, THROUGHPUT, END_TO_END = SPECBOUND_3.cells
FASTER_IS_LESS = (TTFT, PER_TOKEN, END_TO_END)
SAME_PREFILL = "the prompt is read alike: no draft model reads it"
NO_PROMPTS = "prompts not included: these latencies hold no prefill"


def serving_rows(log: RoundLog, ours: Ours, note: str) -> list[Row]:
    """Both columns of Table 3 from the prices of plain decoding and of SpecBound's rounds.

    Per-token latency is decoding's seconds over its tokens, throughput all tokens over all
    seconds, prompts included: the paper's three speedups differ for such reasons.
    """
    plain, fast = ours.plain(log), price(log, ours.latency)
    prompts = ours.latency.has("target", "prefill")
    rows = []
    columns = [_column(run, prompts) for run in (plain, fast)]
    for name in SPECBOUND_3.cells:
        said = note if prompts else f"{NO_PROMPTS}; {note}"
        said = f"{SAME_PREFILL}; {said}" if name == TTFT and prompts else said
        values = [column[name] for column in columns]
        for label, value in zip(SPECBOUND_3.columns, values, strict=False):
            published = SPECBOUND_3.value(name, label)
            rows.append(Row(SPECBOUND_3.name, name, label, published, value, EXPERIMENT, said))
        before, after = values
        if before and after:
            gain = before / after if name in FASTER_IS_LESS else after / before
            column = "improvement (our pair)"
            rows.append(Row(SPECBOUND_3.name, name, column, None, gain, EXPERIMENT, said))
    return rows


def _column(run: Priced, prompts: bool) -> dict[str, float | None]:
    log = run.log
    emitted = float(log.rounds["emitted"].sum())
    # The prompt's pass emits the tokens that no round did.
    tokens = emitted + (log.first * len(log.requests) if prompts else 0)
    return {
        TTFT: 1e3 * float(run.prefill_s.mean()) if prompts else None,
        PER_TOKEN: 1e3 * run.total_s / emitted,
        THROUGHPUT: tokens / float(run.wall_s.sum()),
        END_TO_END: float(run.wall_s.mean()),
    }
