"""Verification rules by name: the one mapping the command line reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.rules.base import ExactMatch, RejectionSampling, VerifyRule
from policies.rules.context import CSD, FLy
from policies.rules.threshold import (
    BiLDRollback,
    CMASDVerification,
    Ensemble,
    GlobalThreshold,
    Lenience,
    RelaxedAcceptance,
    SpecVerification,
    TypicalAcceptance,
)
from policies.spec import describe_spec, parameters, parse_spec

RULES: Mapping[str, type[VerifyRule]] = {
    "exact": ExactMatch,
    "rejection-sampling": RejectionSampling,
    "spec-verification": SpecVerification,
    "cm-asd": CMASDVerification,
    "csd": CSD,
    "csd-ocm": CSD,
    "csd-scg": CSD,
    "lossy-global": GlobalThreshold,
    "relaxed": RelaxedAcceptance,
    "typical": TypicalAcceptance,
    "lenience": Lenience,
    "ensemble": Ensemble,
    "bild": BiLDRollback,
    "fly": FLy,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "csd-ocm": {"use_gate": False},
    "csd-scg": {"use_memory": False},
}
"""Names of a class with some parameters fixed."""


def parse_rule(text: str, **resources: Any) -> VerifyRule:
    """Return the rule that `text` describes: ``name`` or ``name:key=value,...``.

    ``resources`` are given to a rule with a parameter of that name which `text` leaves
    unset, such as ``memory``.

    Raises
    ------
    ValueError
        For an unknown name or parameter (naming the nearest) or an impossible value.

    >>> parse_rule("csd:threshold=3,tau=0.1").tau
    0.1
    """
    fixed = PRESETS.get(text.strip().partition(":")[0], {})
    name, cls, given = parse_spec(text, "rule", RULES, fixed)
    known = parameters(cls)
    extra = {k: v for k, v in resources.items() if k in known and k not in given and v is not None}
    try:
        return RULES[name](**{**extra, **given, **fixed})
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        # A JSON value of the wrong shape surfaces as one of the latter three.
        raise ValueError(f"rule {name!r}: {error}") from None


def describe_rule(rule: VerifyRule) -> str:
    """Return the text form of `rule`: its name and the parameters that differ from the defaults.

    >>> describe_rule(parse_rule("csd-scg:tau=0.3"))
    'csd-scg:tau=0.3'
    """
    for name, fixed in PRESETS.items():
        if type(rule) is RULES[name] and all(getattr(rule, k) == v for k, v in fixed.items()):
            return describe_spec(rule, name, fixed)
    names = {cls: name for name, cls in RULES.items() if name not in PRESETS}
    return describe_spec(rule, names.get(type(rule), type(rule).__name__))
