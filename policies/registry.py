"""Policies by name: the one mapping the command line reads.

A policy is written ``name`` or ``name:key=value,key=value`` (see `policies.spec`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from policies.batch.base import BatchPolicy, Policy, SingleStream
from policies.batch.confidence import (
    AdaptiveVerification,
    ConfidenceFreeze,
    ConfidenceScheduled,
)
from policies.batch.engines import GraphAware, SGLangThroughput, TensorRTLLM
from policies.batch.goodput import Goodput, TurboSpec
from policies.batch.sglang import SGLangAdaptive
from policies.batch.tables import BatchTable, BatchTableHysteresis, DisableByBatchSize
from policies.core import DraftPolicy, longest_of
from policies.lengths.bandit import EXP3Spec, UCBSpec
from policies.lengths.basic import Autoregressive, Fixed, Oracle
from policies.lengths.bild import BiLDFallback
from policies.lengths.cmasd import CMASD
from policies.lengths.draft_and_verify import DraftAndVerify
from policies.lengths.entropy import SVIP, AdaEDL
from policies.lengths.gammatune import GammaTune, GammaTunePlus
from policies.lengths.huggingface import Confidence, HFHeuristic
from policies.lengths.llamacpp import LlamaCppDraft
from policies.lengths.rate_optimal import RateOptimal
from policies.lengths.specdec_pp import Disco, SpecDecPP
from policies.spec import describe_spec, parameters, parse_spec
from policies.wrapper import unwrapped

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)

POLICIES: Mapping[str, type[DraftPolicy] | type[BatchPolicy]] = {
    "autoregressive": Autoregressive,
    "fixed": Fixed,
    "confidence": Confidence,
    "hf-heuristic": HFHeuristic,
    "llama-cpp": LlamaCppDraft,
    "gammatune": GammaTune,
    "gammatune-plus": GammaTunePlus,
    "svip": SVIP,
    "adaedl": AdaEDL,
    "draft-and-verify": DraftAndVerify,
    "oracle": Oracle,
    "cm-asd": CMASD,
    "specdec-pp": SpecDecPP,
    "disco": Disco,
    "bild": BiLDFallback,
    "ucb": UCBSpec,
    "exp3": EXP3Spec,
    "rate-optimal": RateOptimal,
    "batch-table": BatchTable,
    "batch-table-hysteresis": BatchTableHysteresis,
    "disable-by-batch-size": DisableByBatchSize,
    "goodput": Goodput,
    "turbospec": TurboSpec,
    "confidence-freeze": ConfidenceFreeze,
    "adaptive-verification": AdaptiveVerification,
    "confidence-scheduled": ConfidenceScheduled,
    "sglang-adaptive": SGLangAdaptive,
    "sglang-throughput": SGLangThroughput,
    "tensorrt-llm": TensorRTLLM,
    "graph-aware": GraphAware,
}


FILE_MARK = "__policy_file__"
"""Attribute of a class from a user's file: its name on the command line, the file's digest."""


def policy_names(kind: Literal["all", "single", "batch"] = "all") -> list[str]:
    """Return the names of the built-in policies: all, those per request, or those per batch."""
    batch = {name for name, cls in POLICIES.items() if issubclass(cls, BatchPolicy)}
    return [n for n in POLICIES if kind == "all" or (n in batch) == (kind == "batch")]


def parse_policy(text: str, *, max_gamma: int | None = None, **resources: Any) -> DraftPolicy:
    """Return the policy that `text` describes, for a single stream.

    A policy for whole batches comes wrapped in `SingleStream`; `parse_serving_policy`
    gives it bare.

    Parameters
    ----------
    text:
        ``name`` or ``name:key=value,...``.
    max_gamma:
        Longest draft the trace allows: maxima that `text` leaves at a larger default are
        lowered to it (see `capped`).
    resources:
        Given to policies with a parameter of that name which `text` leaves unset:
        ``cost`` (`policies.batch.base.IterationCost`), ``estimator``
        (`policies.estimators.AcceptanceEstimator`).

    Raises
    ------
    ValueError
        For an unknown name or parameter (naming the nearest) or an impossible value.

    >>> parse_policy("hf-heuristic:gamma=4,full_accept_means=budget").gamma
    4
    """
    policy = parse_serving_policy(text, max_gamma=max_gamma, **resources)
    return SingleStream(policy) if isinstance(policy, BatchPolicy) else policy


def parse_serving_policy(text: str, *, max_gamma: int | None = None, **resources: Any) -> Policy:
    """Return the policy that `text` describes, per request or for a whole batch."""
    name, cls, given = parse_spec(text, "policy", POLICIES)
    known = parameters(cls)
    extra = {k: v for k, v in resources.items() if k in known and k not in given and v is not None}
    try:
        policy: Policy = cls(**given, **extra)
        return policy if max_gamma is None else capped(policy, max_gamma, explicit=given)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        # A JSON value of the wrong shape surfaces as one of the latter three.
        raise ValueError(f"policy {name!r}: {error}") from None


PLAIN = "autoregressive"
"""The policy that decodes without drafts."""
NO_SPECULATION = "no speculation"
"""The word for an engine that runs without a drafter."""


def is_bound(name: str) -> bool:
    """Return True if the policy of this name knows what no real one can: it is not recommended.

    >>> is_bound("oracle:gamma_max=6"), is_bound("oracle (2)"), is_bound("gammatune")
    (True, True, False)
    """
    return POLICIES.get(name.partition(":")[0].partition(" (")[0]) is Oracle


def describe(policy: Policy) -> str:
    """Return the text form of `policy`: its name and the parameters that differ from the defaults.

    A cost or an estimator has no text form and is left out.

    >>> describe(Fixed(gamma=3))
    'fixed:gamma=3'
    """
    policy = unwrapped(policy)
    names = {cls: name for name, cls in POLICIES.items()}
    own, _ = vars(type(policy)).get(FILE_MARK, (type(policy).__name__, ""))
    return as_bound(policy, describe_spec(policy, names.get(type(policy), own)))


def as_bound(policy: Policy, name: str) -> str:
    """Return the name of a policy; of a user's subclass of the oracle as one that `is_bound`.

    >>> class Half(Oracle): ...
    >>> as_bound(Half(), "Half"), is_bound(as_bound(Half(), "Half")), as_bound(Fixed(), "mine")
    ('oracle (Half)', True, 'mine')
    """
    derived = isinstance(policy, Oracle) and type(policy) is not Oracle
    return f"oracle ({name})" if derived else name


def lacks(policy: Policy, resource: str) -> bool:
    """Return True if a shipped `policy` takes the parameter `resource`, and was given none.

    False for `RateOptimal`, whose rate is in units of its own cost.

    >>> lacks(UCBSpec(), "cost"), lacks(Fixed(), "cost")
    (True, False)
    """
    inner = policy.policy if isinstance(policy, SingleStream) else policy
    shipped = type(inner) in POLICIES.values() and not isinstance(inner, RateOptimal)
    return shipped and resource in parameters(type(inner)) and getattr(inner, resource) is None


def supplied(policy: AnyPolicy, **resources: Any) -> AnyPolicy:
    """Return a new prototype of `policy` with those of `resources` that it `lacks`."""
    if isinstance(policy, SingleStream):
        return type(policy)(supplied(policy.policy, **resources))
    lacking = {key: value for key, value in resources.items() if lacks(policy, key)}
    values = {key: getattr(policy, key) for key in parameters(type(policy))} if lacking else {}
    return type(policy)(**{**values, **lacking}) if lacking else policy


def capped(policy: AnyPolicy, max_gamma: int, explicit: Collection[str] = ()) -> AnyPolicy:
    """Return `policy` with its maximum draft length lowered to `max_gamma` where the default is
    larger.

    A parameter set to another value than its default, or named in `explicit`, is its
    user's choice and stays, even if a trace then proves too short for it.  The result is
    a new prototype: nothing learnt is carried over.

    >>> describe(capped(SVIP(), 24)), describe(capped(SVIP(gamma_max=30), 24))
    ('svip:gamma_max=24', 'svip:gamma_max=30')
    """
    if isinstance(policy, SingleStream):
        return type(policy)(capped(policy.policy, max_gamma, explicit))
    known = parameters(type(policy))
    values = {key: getattr(policy, key) for key in known}
    chosen = {k for k in known if k in explicit or values[k] != known[k].default}
    if "gamma_max" in known and "gamma" in chosen:
        # A chosen start implies room for it.
        max_gamma = max(max_gamma, longest_of(values["gamma"]) or 0)
    lowered: dict[str, Any] = {}
    for key in {"gamma_max", "gamma", "gamma_min"} & (known.keys() - chosen):
        unset = key == "gamma_max" and values[key] is None
        if unset or ((longest := longest_of(values[key])) is not None and longest > max_gamma):
            lowered[key] = max_gamma
    gammas = None if "gammas" in chosen else values.get("gammas")
    if isinstance(gammas, list | tuple) and (longest_of(gammas) or 0) > max_gamma:
        lowered["gammas"] = tuple(g for g in gammas if g <= max_gamma) or (max_gamma,)
    if not lowered:
        return policy
    made = type(policy)(**{**values, **lowered})
    # A user's parameters that leave the longest draft as it is are no lengths.
    shipped = type(policy) in POLICIES.values()
    return made if shipped or made.longest_draft() != policy.longest_draft() else policy
