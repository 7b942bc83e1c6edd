"""``speculation_profile.json``: how good a drafter is, in a file that travels with its checkpoint.

The schema (version 1.0) is that of NVIDIA's Model-Optimizer,
``examples/specdec_bench/specdec_bench/speculation_profile.py``.  ``marginal_accept_rates[i]`` is
the chance that the first i + 1 drafted tokens are all accepted, ``conditional_accept_rates[i]`` the
chance that token i + 1 is accepted if those before it were.  ``acceptance_length_histogram`` counts
rounds by emitted tokens, the target's own included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NoReturn

import numpy as np

from traces.acceptance.trace import MOST_DRAFTED, Request, Trace
from traces.errors import DraftsimError, FileError
from traces.store.header import PathLike, is_number
from traces.store.text import read_object, sparse
from traces.store.writing import write_atomically

SCHEMA = "1.0"
CHAINS = ("eagle", "eagle1", "eagle2", "eagle3", "draft_model", "mtp", "ngram", "suffix")
"""Methods whose draft of K tokens begins a longer one, so that one profile answers for every K."""
TOLERANCE = 0.02
"""Largest difference between the mean length and that of the rates (the schema's own), and between
the rates and those of the histogram."""
REQUESTS, TOKENS = 64, 256
"""Requests of a trace drawn from a profile, and the output and prompt tokens of each."""
KEYS = ("marginal_accept_rates", "conditional_accept_rates")


@dataclass(frozen=True)
class SpeculationProfile:
    """Acceptance of a drafter by position.

    ``marginal`` are the chances that the first 1, 2, ... K drafted tokens are all accepted, and
    ``histogram`` rounds that accepted 0, 1, ... K (empty if not known).  ``method`` is named as by
    vLLM, ``draft`` and ``target`` are checkpoints, ``conditions`` the schema's
    ``measurement_conditions``.  ``categories`` has acceptance length and rounds by category of
    prompts, ``per_request`` the mean acceptance length over requests.

    Raises DraftsimError for rates that are no chances, or that rise.
    """

    marginal: Sequence[float]
    histogram: Sequence[int] = ()
    method: str | None = None
    draft: str | None = None
    target: str | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    categories: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    per_request: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.marginal) <= MOST_DRAFTED:
            raise DraftsimError(f"{len(self.marginal)} acceptance rates, expected 1 or more")
        if not all(0 <= b <= a + 1e-9 for a, b in pairwise((1.0, *self.marginal))):
            raise DraftsimError(
                f"marginal_accept_rates {list(self.marginal)}: expected chances that do not rise"
            )

    @property
    def longest(self) -> int:
        """Draft length of the measurement."""
        return len(self.marginal)

    @property
    def mean_length(self) -> float:
        """Acceptance length, tokens per round with the target's own."""
        return 1.0 + float(sum(self.marginal))

    @property
    def conditional(self) -> list[float]:
        """Chance of each token to be accepted if those before it were; 0 after a rate of 0."""
        return [b / a if a > 0 else 0.0 for a, b in pairwise((1.0, *self.marginal))]

    def document(self) -> dict[str, Any]:
        """Return the JSON object, keys as in the schema."""
        rates = {
            "conditional_accept_rates": [round(p, 6) for p in self.conditional],
            "marginal_accept_rates": [round(p, 6) for p in self.marginal],
        }
        mean = round(self.mean_length, 6)
        per_request = self.mean_length if self.per_request is None else self.per_request
        implied = round(1 + sum(rates["marginal_accept_rates"]), 6)
        chain = (self.method or "").lower() in CHAINS
        return {
            "schema_version": SCHEMA, "measured": True, "method": self.method,
            "draft_checkpoint": None if self.draft is None else {"id": self.draft},
            "target_model": None if self.target is None else {"id": self.target},
            "num_speculative_tokens": self.longest, "block_size": None,
            "max_supported_k": self.longest, "verification_method": "longest_prefix", **rates,
            "mean_accept_length": mean, "mean_accept_length_per_request": round(per_request, 6),
            "accept_length_model": "chain_analytic" if chain else "measured_per_k",
            "accept_length_by_k": {str(self.longest): mean},
            "acceptance_length_histogram": {
                str(k): n for k, n in enumerate(self.histogram, 1) if n
            } or None,
            "per_category": dict(self.categories) or None,
            "measurement_conditions": dict(self.conditions) or None,
            "validation": {
                "mean_consistency": {
                    "implied_mean_accept_length": implied, "reported_mean_accept_length": mean,
                    "abs_delta": round(abs(implied - mean), 6), "tolerance": TOLERANCE,
                    "passed": True,
                },
                "marginal_monotonicity": {"passed": True, "violations": []},
            },
        }  # fmt: skip

    def drawn(self, seed: int = 0, requests: int = REQUESTS, tokens: int = TOKENS) -> Trace:
        """Return a trace whose rounds accept as many tokens as the profile says, drawn at random.

        Accepted tokens are drawn for every position by itself, so fixed draft lengths up to
        `longest` have the profile's acceptance; easy and hard stretches of a text are lost.
        """
        random = np.random.default_rng(seed)
        below = random.random(requests * tokens)[:, None] < np.asarray(self.marginal)[None]
        accepted = below.sum(axis=1)
        meta = {
            "kind": "speculation-profile", "method": self.method,
            "target": {"name": self.target} if self.target else {},
            "draft": {"name": self.draft} if self.draft else {},
            "draft_lengths": "by start", "draft_lengths_known": True, "drawn": True,
            "sampling": {"temperature": 0.0}, "fidelity": "approximate",
        }  # fmt: skip
        rows = [
            Request(f"drawn-{i}", "profile", tokens, tokens, tokens, "length")
            for i in range(requests)
        ]
        return Trace.without_tails(rows, self.longest, meta, accepted=accepted)


def is_profile(path: PathLike) -> bool:
    """Return True if the file at `path` looks like a speculation profile."""
    place = Path(path)
    if place.suffix != ".json" or not place.is_file():
        return False
    with place.open("rb") as file:
        start = file.read(100_000)
    return any(f'"{key}"'.encode() in start for key in KEYS)


def read_profile(path: PathLike) -> SpeculationProfile:
    """Read and check a ``speculation_profile.json``.

    Raises FileError if it is damaged, was not measured, holds no rates, or contradicts itself.
    """
    held = read_object(path)
    if held.get("measured") is False:
        _fail(path, "measured is false: a placeholder that nobody measured")
    marginal, conditional = (_rates(path, held, key) for key in KEYS)
    if marginal is None and conditional is None:
        reason = held.get("vectors_unavailable_reason") or "they are null"
        _fail(path, f"no acceptance by position ({reason}): measure with longest-prefix acceptance")
    implied = np.cumprod(conditional if conditional is not None else []).tolist()
    if marginal is None:
        marginal = implied
    elif conditional is not None and (
        len(implied) != len(marginal) or not np.allclose(implied, marginal, atol=1e-3)
    ):
        _fail(path, "marginal_accept_rates are not the products of conditional_accept_rates")
    longest = held.get("num_speculative_tokens", len(marginal))
    if longest != len(marginal):
        _fail(path, f"num_speculative_tokens is {longest!r}, with {len(marginal)} acceptance rates")
    mean = held.get("mean_accept_length")
    if mean is not None and not (is_number(mean) and abs(mean - 1 - sum(marginal)) <= TOLERANCE):
        _fail(path, f"mean_accept_length is {mean!r}, and the rates sum to {1 + sum(marginal):g}")
    histogram = _histogram(path, held, len(marginal))
    at_least = np.cumsum(histogram[::-1])[::-1]
    if sum(histogram) and np.abs(at_least[1:] / at_least[0] - marginal).max() > TOLERANCE:
        _fail(path, "acceptance_length_histogram contradicts the acceptance rates")
    conditions = held.get("measurement_conditions")
    try:
        return SpeculationProfile(
            marginal, histogram, _text(held.get("method")),
            _text(held.get("draft_checkpoint")), _text(held.get("target_model")),
            conditions if isinstance(conditions, dict) else {},
        )  # fmt: skip
    except DraftsimError as error:
        _fail(path, str(error))


def write_profile(profile: SpeculationProfile, path: PathLike) -> None:
    """Write the JSON: whole, or not at all."""
    write_atomically(path, (json.dumps(profile.document(), indent=2) + "\n").encode())


def _histogram(path: PathLike, held: Mapping[str, Any], longest: int) -> list[int]:
    """Return rounds that accepted 0, 1, ... `longest` tokens."""
    if not (found := held.get("acceptance_length_histogram")):
        return []
    counts = sparse(str(path), "acceptance_length_histogram", found, 1, longest + 1)
    return [counts.get(emitted, 0) for emitted in range(1, longest + 2)]


def _rates(path: PathLike, held: Mapping[str, Any], key: str) -> list[float] | None:
    values = held.get(key)
    if values is None:
        return None
    sound = isinstance(values, list) and all(is_number(v) and 0 <= v <= 1 for v in values)
    if not sound or not values:
        _fail(path, f"{key} is {shown(values)}, expected a list of rates between 0 and 1")
    return [float(value) for value in values]


def _text(value: Any) -> str | None:
    """Return a name: the schema gives checkpoints as objects, whose id, name or path is shown."""
    if isinstance(value, dict):
        value = next((value[k] for k in ("id", "name", "model", "path") if value.get(k)), None)
    return None if value is None else str(value)


def _fail(path: PathLike, what: str) -> NoReturn:
    raise FileError(f"{path}: {what}")
