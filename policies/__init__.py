"""Draft-length policies, verification rules and the loop that drives them."""

from policies.batch.base import BatchPolicy, IterationCost, SingleStream, TextbookCost
from policies.batch.confidence import (
    AdaptiveVerification,
    ConfidenceFreeze,
    ConfidenceScheduled,
)
from policies.batch.goodput import Goodput, TurboSpec
from policies.batch.sglang import SGLangAdaptive
from policies.batch.tables import BatchTable, BatchTableHysteresis, DisableByBatchSize
from policies.checks import PolicyError, check_policy
from policies.confidence import CMASDConfidence
from policies.core import DraftPolicy, DraftToken, Load, Round, speculate
from policies.estimators import (
    AcceptanceEstimator,
    ConstantAcceptance,
    DraftProbability,
    IsotonicAcceptance,
    LogisticAcceptance,
)
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
from policies.registry import (
    POLICIES,
    capped,
    describe,
    parse_policy,
    parse_serving_policy,
    policy_names,
)

__distribution__ = "draftsim"

__all__ = [
    "CMASD",
    "POLICIES",
    "SVIP",
    "AcceptanceEstimator",
    "AdaEDL",
    "AdaptiveVerification",
    "Autoregressive",
    "BatchPolicy",
    "BatchTable",
    "BatchTableHysteresis",
    "BiLDFallback",
    "CMASDConfidence",
    "Confidence",
    "ConfidenceFreeze",
    "ConfidenceScheduled",
    "ConstantAcceptance",
    "DisableByBatchSize",
    "Disco",
    "DraftAndVerify",
    "DraftPolicy",
    "DraftProbability",
    "DraftToken",
    "EXP3Spec",
    "Fixed",
    "GammaTune",
    "GammaTunePlus",
    "Goodput",
    "HFHeuristic",
    "IsotonicAcceptance",
    "IterationCost",
    "LlamaCppDraft",
    "Load",
    "LogisticAcceptance",
    "Oracle",
    "PolicyError",
    "RateOptimal",
    "Round",
    "SGLangAdaptive",
    "SingleStream",
    "SpecDecPP",
    "TextbookCost",
    "TurboSpec",
    "UCBSpec",
    "capped",
    "check_policy",
    "describe",
    "parse_policy",
    "parse_serving_policy",
    "policy_names",
    "speculate",
]
