"""Draft sources by name, and the named methods of other sources than a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.spec import describe_spec, parse_spec
from traces.sources.base import Source
from traces.sources.draft_model import DraftModelSource
from traces.sources.early_exit import EarlyExit, Kangaroo
from traces.sources.lookups.sources import PLD, REST, Lookahead, NGram, NGramSimple, Suffix
from traces.sources.starts.parallel import Eagle, Parallel
from traces.sources.starts.sources import (
    Blockwise,
    Hydra,
    LayerSkip,
    Medusa,
    MedusaTree,
    Space,
    SpecDec,
)
from traces.sources.starts.trees import Eagle2

DRAFT_MODEL = DraftModelSource.name

SOURCES: Mapping[str, type[Source]] = {
    cls.name: cls
    for cls in (
        DraftModelSource, PLD, REST, Lookahead, EarlyExit, Kangaroo, LayerSkip, Blockwise, Medusa,
        MedusaTree, Hydra, Space, SpecDec, Eagle, Eagle2, Parallel, NGram, Suffix, NGramSimple,
    )
}  # fmt: skip


class Method(NamedTuple):
    """A named method: a source, a length policy and a verification rule, each as text."""

    source: str
    policy: str
    rule: str = "exact"
    what: str = ""

    @property
    def by_model(self) -> bool:
        """True if the draft model drafts, or nothing does."""
        return self.source in (DRAFT_MODEL, "none")


SYSTEMS: Mapping[str, Method] = {
    "specbound": Method(
        "early-exit:tau=0.5,omega=0.3,depth=0.5", "fixed:gamma=6",
        what="SpecBound (arXiv:2604.12247): annealed threshold, depth bound, width bound",
    ),
    "specbound-no-annealing": Method(
        "early-exit:tau=0.5,omega=0,depth=0.5", "fixed:gamma=6",
        what="SpecBound without annealing (its Figure 4)",
    ),
    "specbound-no-depth-bound": Method(
        "early-exit:tau=0.5,omega=0.3,depth=1", "fixed:gamma=6",
        what="SpecBound without the depth bound (its Figure 4)",
    ),
    "specbound-no-width-bound": Method(
        "early-exit:tau=0.5,omega=0.3,depth=0.5", "fixed:gamma=24",
        what="SpecBound without the width bound (its Figure 4), at most 24 tokens a round",
    ),
    "adadecode": Method(
        "early-exit:tau=0.5,omega=0,depth=1", "fixed:gamma=24",
        what="AdaDecode (arXiv:2506.03700): early exit without bounds, at most 24 tokens a round",
    ),
    "kangaroo": Method(
        "kangaroo", "confidence:gamma=6,confidence_threshold=0.6",
        what="Kangaroo (arXiv:2404.18911): fixed exit, attention adapter, confidence stop",
    ),
    "kangaroo-head": Method(
        "early-exit:tau=0,omega=0,depth=1,bonus=true",
        "confidence:gamma=6,confidence_threshold=0.6",
        what="Kangaroo with a low-rank head instead of its adapter",
    ),
    "draft-and-verify-skip": Method(
        "layer-skip", "draft-and-verify",
        what="Draft & Verify (arXiv:2309.08168): layer skip with its adaptive threshold",
    ),
    "pld": Method(
        "pld", "fixed:gamma=10", what="Prompt lookup decoding, as transformers 5.23 does it"
    ),
    "ngram": Method(
        "ngram:k=5,min_n=2,max_n=5", "fixed:gamma=5",
        what="vLLM's n-gram proposer, n-grams of 2 to 5",
    ),
    "ngram-simple": Method(
        "ngram-simple", "fixed:gamma=48", what="llama.cpp's ngram-simple, as its server starts it"
    ),
    "suffix": Method(
        "suffix", "fixed:gamma=24", what="Suffix decoding (arXiv:2411.04975) as vLLM runs it"
    ),
    "rest": Method("rest", "fixed:gamma=10", what="REST (arXiv:2311.08252), heaviest chain"),
    "lookahead": Method(
        "lookahead", "fixed:gamma=4",
        what="Lookahead decoding (arXiv:2402.02057), text n-grams only",
    ),
    "blockwise": Method("blockwise", "fixed:gamma=4", what="Blockwise(k) (arXiv:1811.03115)"),
    "medusa": Method("medusa", "fixed:gamma=4", what="Medusa-1 (arXiv:2401.10774) as a chain"),
    "medusa-tree": Method(
        "medusa-tree", "fixed:gamma=3", what="Medusa's tree of candidates, approximate"
    ),
    "hydra": Method("hydra", "fixed:gamma=4", what="Hydra (arXiv:2402.05109) as a chain"),
    "space": Method("space", "fixed:gamma=4", what="SPACE (arXiv:2402.11809), frozen target"),
    "eagle": Method(
        "eagle:model=eagle", "fixed:gamma=4", what="EAGLE (arXiv:2401.15077) as a chain"
    ),
    "eagle3": Method(
        "eagle:model=eagle3", "fixed:gamma=4", what="EAGLE-3 (arXiv:2503.01840), a chain"
    ),
    "eagle2": Method(
        "eagle2:model=eagle,budget=59", "fixed:gamma=6",
        what="EAGLE-2 (arXiv:2406.16858): its dynamic tree, 60 tokens verified, 6 layers",
    ),
    "eagle3-tree": Method(
        "eagle2:model=eagle3,budget=59", "fixed:gamma=8",
        what="EAGLE-3 (arXiv:2503.01840) with its tree, 60 tokens verified, 8 layers",
    ),
    "mtp": Method("eagle:model=mtp", "fixed:gamma=2", what="MTP modules (arXiv:2412.19437)"),
    "specdec": Method("specdec", "fixed:gamma=4", what="SpecDec(k) (arXiv:2203.16487), one pass"),
}  # fmt: skip


def parse_source(text: str) -> Source:
    """Return the source that `text` (``name`` or ``name:key=value,...``) describes.

    Raises
    ------
    ValueError
        For an unknown name or parameter (naming the nearest) or an impossible value.

    >>> parse_source("pld:max_ngram=3").max_ngram
    3
    """
    name, cls, given = parse_spec(text, "source", SOURCES)
    try:
        source: Source = cls(**given)
        return source
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"source {name!r}: {error}") from None


def describe_source(source: Source) -> str:
    """Return the text form of `source`: its name and the parameters that differ from the defaults.

    >>> describe_source(PLD(num_tokens=5))
    'pld:num_tokens=5'
    """
    return describe_spec(source, source.name)
