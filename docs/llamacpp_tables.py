"""Counts of llama.cpp's server, and the replay of the recording that it was asked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs.engine_tables import RECORDED
from docs.reading import code, table
from policies import Fixed
from simulator.tune.formats import LLAMACPP_KEYS, check_llamacpp
from simulator.tune.single import values_said
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.lookups.sources import NGramSimple
from traces.sources.replay import replay_source
from traces.store.recordings import find_trace

SERVED = RECORDED / "smollm2-llamacpp-cpu"
"""Folder of the answers: a file of lines and a scrape for every setting."""
NGRAM_KEYS = ["spec-ngram-simple-size-n", "spec-ngram-simple-size-m"]
COUNTS = ("draft_n", "draft_n_accepted")


def settings() -> Mapping[str, Mapping[str, Any]]:
    """Return, by name of a run with a draft model: the drafting that the server was started
    with.
    """
    return {run: own for run, own in _started().items() if [*own] == [*LLAMACPP_KEYS]}


def lookups() -> Mapping[str, NGramSimple]:
    """Return, by name of a run under ``--spec-type ngram-simple``: its lookup."""
    return {run: NGramSimple(*v.values()) for run, v in _started().items() if [*v] == NGRAM_KEYS}


def _started() -> dict[str, dict[str, Any]]:
    given: dict[str, dict[str, Any]] = json.loads((SERVED / "settings.json").read_text("utf-8"))
    return given


def answers(run: str) -> list[dict[str, Any]]:
    """Return the server's answers, one a request."""
    text = (SERVED / f"{run}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def asked(given: list[dict[str, Any]]) -> Trace:
    """Return the recording of the requests that were answered."""
    trace = find_trace("smollm2-cpu")
    at = {request.id: i for i, request in enumerate(trace.requests)}
    return trace.select([at[answer["id"]] for answer in given])


def same_text(given: list[dict[str, Any]], trace: Trace) -> list[bool]:
    """Return, per answer, whether its tokens are those recorded."""
    on_path = trace.columns["offset"] == 0
    found, request = trace.columns["token"][on_path], trace.columns["request"][on_path]
    return [a["tokens"] == found[request == i].tolist() for i, a in enumerate(given)]


def llamacpp_counts() -> str:
    """Return a row a setting: what the server counted and what replay predicts."""
    rows = []
    for run, setting in settings().items():
        given = answers(run)
        trace = asked(given)
        policy = check_llamacpp(setting)
        known = trace.signals.issuperset(policy.reads)
        rows.append(
            _row(
                values_said(setting),
                given,
                trace,
                replay(trace, policy, first=1) if known else None,
            )
        )
    for run, source in lookups().items():
        given = answers(run)
        trace = asked(given)
        log = replay_source(trace, source, Fixed(source.size_m), first=1)
        rows.append(_row(f"ngram-simple {source.size_n}, {source.size_m}", given, trace, log))
    return table(
        ("setting", "texts as recorded", "`draft_n`", "predicted",
         "`draft_n_accepted`", "predicted"), rows,
    )  # fmt: skip


def _row(
    setting: str, given: list[dict[str, Any]], trace: Trace, log: RoundLog | None
) -> tuple[Any, ...]:
    """Return a row; ``log`` is the replay, None where what its policy reads was not recorded."""
    drafted, accepted = (sum(a["timings"].get(name, 0) for a in given) for name in COUNTS)
    mine = [
        "not recorded" if log is None else log.rounds[name].sum()
        for name in ("drafted", "accepted")
    ]
    texts = f"{sum(same_text(given, trace))} of {len(given)}"
    return code(setting), texts, drafted, mine[0], accepted, mine[1]
