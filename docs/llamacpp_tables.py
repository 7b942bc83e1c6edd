"""What llama.cpp's server counted, beside the replay of the recording that it was asked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs.engine_tables import RECORDED
from docs.reading import code, table
from simulator.tune.llamacpp import LlamaCppSetting
from traces import Trace, find_trace, replay

SERVED = RECORDED / "smollm2-llamacpp-cpu"
"""Folder of the answers: a file of lines and a scrape for every setting."""
COUNTS = ("draft_n", "draft_n_accepted")


def settings() -> Mapping[str, LlamaCppSetting]:
    """By name of a run: the drafting that the server was started with."""
    given = json.loads((SERVED / "settings.json").read_text(encoding="utf-8"))
    return {run: LlamaCppSetting(*options.values()) for run, options in given.items()}


def answers(run: str) -> list[dict[str, Any]]:
    """The server's answers, one a request."""
    text = (SERVED / f"{run}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def asked(given: list[dict[str, Any]]) -> Trace:
    """The recording of the requests that were answered."""
    trace = find_trace("smollm2-cpu")
    at = {request.id: i for i, request in enumerate(trace.requests)}
    return trace.select([at[answer["id"]] for answer in given])


def same_text(given: list[dict[str, Any]], trace: Trace) -> list[bool]:
    """Whether an answer's tokens are those recorded."""
    on_path = trace.columns["offset"] == 0
    found, request = trace.columns["token"][on_path], trace.columns["request"][on_path]
    return [a["tokens"] == found[request == i].tolist() for i, a in enumerate(given)]


def llamacpp_counts() -> str:
    """A row a setting: what the server counted and what replay predicts."""
    rows = []
    for run, setting in settings().items():
        given = answers(run)
        trace = asked(given)
        policy = setting.policy()
        predicted: tuple[Any, Any] = ("not recorded", "not recorded")
        if trace.signals.issuperset(policy.reads):
            rounds = replay(trace, policy, first=1).rounds
            predicted = rounds["drafted"].sum(), rounds["accepted"].sum()
        drafted, accepted = (sum(a["timings"].get(name, 0) for a in given) for name in COUNTS)
        rows.append((
            code(setting), f"{sum(same_text(given, trace))} of {len(given)}",
            drafted, predicted[0], accepted, predicted[1],
        ))  # fmt: skip
    return table(
        ("n-max, n-min, p-min", "texts as recorded", "`draft_n`", "predicted",
         "`draft_n_accepted`", "predicted"), rows,
    )  # fmt: skip
