"""The setup of a proposer: a policy and the source of its drafts, as text or as objects."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.from_file import Cut, bounded, is_file, load_file, said_cut
from policies.json_text import parse_json
from policies.registry import parse_serving_policy
from policies.together import Policy
from profiler.engines.drafts import DraftSource, EngineDrafts, Forced, LookedUp
from traces.errors import DraftsimError
from traces.sources.lookups.sources import LookupSource
from traces.sources.methods import exact_policy
from traces.sources.registry import parse_source
from traces.store.text import read_json

VARIABLE = "DRAFTSIM_PROPOSER"
"""Environment variable that holds the setup as JSON, or the name of a file that does."""
ENGINE = "engine"
"""The source that is vLLM's own draft model or EAGLE head."""
FORCED = "forced:"
"""Before the file of drafts that dictate verdicts (`profiler.engines.drafts.Forced.write`)."""


@dataclass(frozen=True)
class Setup:
    """A policy's prototype and the source of its drafts.

    Raises DraftsimError if the policy reads a signal that the drafts do not carry.
    """

    policy: Policy
    source: DraftSource

    def __post_init__(self) -> None:
        if missing := [name for name in self.policy.reads if name not in self.source.signals]:
            raise DraftsimError(
                f"{type(self.policy).__name__} reads {', '.join(missing)}, which these drafts do "
                "not carry: choose a policy that reads none"
            )


def setup_from(environment: Mapping[str, str] | None = None, *, longest: int) -> Setup:
    """Return the setup that `VARIABLE` describes, drafting at most `longest` tokens.

    ``{"policy": "gammatune", "source": "pld:max_ngram=3"}``: the policy as the command line
    writes it, or a class of one's own as ``FILE.py:Class[:key=value,...]`` or by its dotted name,
    ``module.Class[:...]``; the source a lookup,
    `ENGINE`, or `FORCED` followed by a file.

    Raises
    ------
    DraftsimError
        If the variable is not set, or naming what is wrong with it.
    """
    policy, source = _given(environment)
    try:
        drafts = _source(source)
        found = policy_from(policy, min(longest, drafts.longest or longest))
        if isinstance(found, Cut):
            said = said_cut(policy, found.longest, "the engine's")
            print(f"draftsim: {said}", file=sys.stderr)
        return Setup(found, drafts)
    except ValueError as error:
        raise DraftsimError(f"{VARIABLE}: {error}") from None


def version(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Another value for every state of the file that `VARIABLE` names; None if it names none."""
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not text or text.lstrip().startswith("{"):
        return None
    try:
        found = os.stat(text)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def asks_for_engine(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if `VARIABLE` is set and names `ENGINE` as source.  Raises as `setup_from`."""
    values = os.environ if environment is None else environment
    return bool(values.get(VARIABLE)) and _given(values)[1] == ENGINE


def _given(environment: Mapping[str, str] | None) -> tuple[str, str]:
    """Policy and source as `VARIABLE` has them."""
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        raise DraftsimError(
            f'{VARIABLE} is not set: give it {{"policy": "gammatune", "source": "pld"}}, or a file'
        )
    try:
        given = parse_json(text) if text.lstrip().startswith("{") else read_json(text)
        policy, source = given["policy"], given["source"]
        if not (isinstance(policy, str) and isinstance(source, str)):
            raise TypeError("text for both")
        return policy, source
    except (KeyError, TypeError) as error:
        raise DraftsimError(f"{VARIABLE}: expected policy and source, missing {error}") from None
    except ValueError as error:
        raise DraftsimError(f"{VARIABLE}: {error}") from None


def policy_from(text: str, longest: int | None = None) -> Policy:
    """Return a policy by its name, its class in a file, or the dotted name of its class.

    A policy of one's own that sets no longest draft is cut at `longest` tokens.
    Raises ValueError naming what is wrong.
    """
    if is_file(text):
        return load_file(text, longest).policy
    name = text.partition(":")[0].strip()
    if "." not in name:
        return parse_serving_policy(exact_policy(text), max_gamma=longest)
    module, _, cls = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {name!r} cannot be imported: {error}") from None
    if not isinstance(found, type) or not issubclass(found, DraftPolicy | BatchPolicy):
        raise ValueError(f"policy {name!r} is no DraftPolicy and no BatchPolicy")
    return bounded(found, name, text, longest).policy


def _source(text: str) -> DraftSource:
    if text == ENGINE:
        return EngineDrafts()
    if text.startswith(FORCED):
        return Forced.read(Path(text.removeprefix(FORCED)))
    source = parse_source(text)
    if not isinstance(source, LookupSource):
        raise ValueError(
            f"source {text!r} needs a recording: name a lookup, such as pld or rest, or {ENGINE}, "
            "the engine's own drafter"
        )
    return LookedUp(source)
