"""The papers' methods by name: each a combination of draft source, length policy and rule.

Any other combination works as well; these are the ones that have a name.  Methods with
another source than a draft model come from `traces.sources.registry.SYSTEMS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from policies.arrays import ranges
from policies.core import DraftPolicy
from policies.registry import POLICIES, describe, parse_policy
from policies.rules.base import VerifyRule
from policies.rules.registry import RULES, parse_rule
from policies.rules.threshold import CMASDVerification
from policies.spec import choice
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.layout import layout_of
from traces.replay.vectorised import columns_of, replay_many
from traces.sources.registry import DRAFT_MODEL, SYSTEMS
from traces.sources.registry import Method as Method  # noqa: PLC0414

FIXED_WINDOW = 5
"""Tokens of CM-ASD's fixed window, which the paper does not give: ours."""
CSD_WINDOW = "fixed:gamma=6"
MEAN_TAU = "MEAN"
"""Stands in a rule's text for the mean of CM-ASD's tau_t over what the run judges (`resolved`)."""
_EQUAL_MEAN = f"spec-verification:beta=5,tau={MEAN_TAU}"
"""CM-ASD's rule without what adapts: the threshold that is as lenient on average.  At any other
the comparison would be one of how lenient the two are."""
FIXED_TAUS: Mapping[float, str] = {
    0.1: "tau_base alone, below every tau_t",
    3.0: "what SpecDec's own script takes",
}
"""Thresholds that `draftsim papers` also shows the ablation at, and why."""


_drafted = partial(Method, DRAFT_MODEL)


def _single(weights: str, what: str) -> Method:
    return _drafted(f"cm-asd:weights={weights}", f"cm-asd:weights={weights}", what)


CMASD_ABLATION: Mapping[str, Method] = {
    "transformer-base": Method(
        "none", "autoregressive", "exact", "CM-ASD, Table III: the target alone (greedy here)"
    ),
    "cm-asd-fixed-window": _drafted(
        f"fixed:gamma={FIXED_WINDOW}", "cm-asd", "CM-ASD, Table III: without adaptive drafting"
    ),
    "cm-asd-fixed-threshold": _drafted(
        "cm-asd", _EQUAL_MEAN, "CM-ASD, Table III: without adaptive verification"
    ),
    "cm-asd-no-confidence": _drafted(
        f"fixed:gamma={FIXED_WINDOW}", _EQUAL_MEAN, "CM-ASD, Table III: fixed window and threshold"
    ),
    "cm-asd-entropy": _single("[1,0,0]", "CM-ASD, Table III: entropy-only confidence"),
    "cm-asd-margin": _single("[0,1,0]", "CM-ASD, Table III: margin-only confidence"),
    "cm-asd-softmax": _single("[0,0,1]", "CM-ASD, Table III: softmax-only confidence"),
    "cm-asd": _drafted("cm-asd", "cm-asd", "CM-ASD (arXiv:2508.15371)"),
}
"""The eight variants of CM-ASD, Table III, in its order."""

CSD_ABLATION: Mapping[str, Method] = {
    "csd-specdecode": _drafted(
        CSD_WINDOW, "exact", "CSD's baseline: lossless speculative decoding"
    ),
    "csd-ocm": _drafted(CSD_WINDOW, "csd-ocm", "CSD's correction memory alone"),
    "csd-scg": _drafted(CSD_WINDOW, "csd-scg", "CSD's consistency gate alone"),
    "csd": _drafted(CSD_WINDOW, "csd", "CSD (arXiv:2604.13634)"),
    "lossy-sd": _drafted(CSD_WINDOW, "lossy-global", "CSD's lossy baseline: one global threshold"),
}
"""CSD's ablation; a memory calibrated beforehand is given to the run, not named here."""

METHODS: Mapping[str, Method] = {
    "specdecode": _drafted("fixed:gamma=5", "exact", "Speculative decoding, fixed length"),
    "hf-heuristic": _drafted(
        "hf-heuristic", "exact", "transformers' heuristic (GammaTune, Table 2)"
    ),
    "assistant-threshold": _drafted(
        "confidence", "exact", "transformers' confidence threshold (GammaTune)"
    ),
    "gammatune": _drafted("gammatune", "exact", "GammaTune (arXiv:2504.00030)"),
    "gammatune+": _drafted("gammatune-plus", "exact", "GammaTune with a confidence stop"),
    **CMASD_ABLATION,
    **CSD_ABLATION,
    "spec-verification": _drafted(
        "fixed:gamma=8", "spec-verification", "SpecDec's verification (2203.16487)"
    ),
    "bild": _drafted("bild", "bild", "BiLD (2302.07863): fallback and rollback"),
    **SYSTEMS,
}
"""Every named method."""


def method(name: str) -> Method:
    """Return the method called `name`; DraftsimError with the nearest if there is none."""
    if name not in METHODS:
        raise DraftsimError(f"unknown method {name!r}{choice(name, METHODS)}")
    return METHODS[name]


def method_of(text: str) -> Method | None:
    """Return the method that `text` names; None for a policy, or an unknown name.

    That is a name in `METHODS`, or ``POLICY+RULE``.  A name that is a policy's, too, such as
    ``cm-asd``, is the policy: its whole method is ``cm-asd+cm-asd``.

    Raises DraftsimError if a method's name has parameters, or the rule after a plus is unknown.

    >>> method_of("csd").rule, method_of("gammatune:gamma=3+csd:tau=0.1").policy
    ('csd', 'gammatune:gamma=3')
    >>> method_of("cm-asd") is None
    True
    """
    name = text.partition(":")[0].strip()
    if name in METHODS and name not in POLICIES:
        chosen = METHODS[name]
        if name != text.strip():
            raise DraftsimError(
                f"{text!r}: the method {name} takes no parameters: write its parts, "
                f"{parts_of(name)}"
            )
        return chosen
    for i, sign in enumerate(text):
        rule = text[i + 1 :].strip()
        if sign == "+" and rule.partition(":")[0] in RULES:
            return Method(DRAFT_MODEL, text[:i].strip(), rule)
    policy, plus, rule = text.partition("+")
    if plus and policy.strip() in POLICIES:
        raise DraftsimError(f"{text!r}: unknown rule {rule!r}{choice(rule, RULES)}")
    return None


def parts_of(name: str) -> str:
    """Return the options that say what the method called `name` consists of."""
    chosen = METHODS[name]
    if not chosen.by_model:
        return f"--source {chosen.source} --policy {chosen.policy}"
    rule = chosen.rule.removesuffix(f",tau={MEAN_TAU}")
    return f"--policy {chosen.policy}" + ("" if rule == "exact" else f" --verify {rule}")


def exact_policy(text: str) -> str:
    """Return the policy that `text` names, for commands that verify alike for all policies.

    Raises DraftsimError, with what to write, if `text` has another source or a rule of its own.
    """
    chosen = method_of(text)
    if chosen is None:
        return text
    if not chosen.by_model:
        raise DraftsimError(
            f"--policy {text} drafts with {chosen.source}, and this command drafts alike for all "
            f"policies: write {parts_of(text)}, or use `draftsim simulate`"
        )
    if not parse_rule(chosen.rule.partition(":")[0]).lossless:
        parts = f"--policy {chosen.policy} --verify {chosen.rule}"
        raise DraftsimError(
            f"--policy {text} verifies by {chosen.rule.partition(':')[0]}, which changes the text, "
            "and this command verifies alike for all policies: write "
            f"{parts_of(text) if text in METHODS else parts}, or use `draftsim simulate`"
        )
    return chosen.policy


def same_rule(
    texts: Sequence[str] | None, verify: str | None
) -> tuple[list[str] | None, str | None]:
    """Return policies and the rule that all are verified by, for commands that take one rule.

    Where every text (plain decoding apart) names a method with the draft model and one lossy rule,
    these are their policies and that rule; else `texts` and `verify` as they are.
    """
    given = [text for text in texts or () if text != "autoregressive"]
    found = [method_of(text) for text in given]
    rules = {None if m is None or m.source != DRAFT_MODEL else m.rule for m in found}
    if verify is not None or len(rules) != 1:
        return None if texts is None else list(texts), verify
    rule = rules.pop()
    if rule is None or MEAN_TAU in rule or parse_rule(rule).lossless:
        return None if texts is None else list(texts), verify
    own = {text: m.policy for text, m in zip(given, found, strict=True) if m is not None}
    return [own.get(text, text) for text in texts or ()], rule


def said_of(name: str, exact: bool) -> str | None:
    """Return what a row called `name`, verified `exact` or not, consists of; None if clear."""
    head = name.partition(":")[0]
    chosen = METHODS.get(head)
    if chosen is None or head in SYSTEMS:
        return None
    if head not in POLICIES:
        rule = "exactly" if chosen.rule == "exact" else f"by {chosen.rule.partition(':')[0]}"
        return f"{chosen.policy}, verified {rule}"
    if exact and chosen.rule != "exact":
        whole = f"{chosen.policy}+{chosen.rule}"
        return f"the draft lengths alone, verified exactly; the whole method is {whole}"
    return None


def build(chosen: Method, trace: Trace, **resources: object) -> tuple[DraftPolicy, VerifyRule]:
    """Return policy and rule of a method for the pair of `trace`; ``resources`` go to the rule."""
    chosen = resolved(chosen, trace)
    policy = parse_policy(chosen.policy, max_gamma=trace.max_gamma)
    return policy, parse_rule(chosen.rule, **resources)


def resolved(chosen: Method, trace: Trace) -> Method:
    """Return the method with `MEAN_TAU` replaced; SignalError if that was not recorded."""
    if MEAN_TAU not in chosen.rule:
        return chosen
    policy = parse_policy(chosen.policy, max_gamma=trace.max_gamma)
    return chosen._replace(rule=chosen.rule.replace(MEAN_TAU, f"{mean_tau(trace, policy):.3f}"))


def mean_tau(trace: Trace, policy: DraftPolicy) -> float:
    """Return the mean tau_t, nats, of tokens that CM-ASD judges and does not refuse by rank."""
    [log] = replay_many(trace, [(describe(policy), policy)], rule=CMASDVerification())
    rule, layout = log.rule, layout_of(trace)
    assert isinstance(rule, CMASDVerification)
    rounds = log.rounds
    begin = layout.rows[layout.begins[rounds["request"]] + rounds["position"]]
    # What follows a refusal is not judged.
    count = np.minimum(rounds["accepted"] + 1, rounds["drafted"])
    row = ranges(count, begin)
    tokens, scores = columns_of(trace, rule)
    taus = rule.threshold(tokens)[row[scores.draft_rank[row] < rule.top]]
    return float(taus.mean()) if len(taus) else rule.tau_base
