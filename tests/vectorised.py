"""Policies that have a plan, with any parameters: strategies for tests of the vectorised replay."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies import CMASD, DraftPolicy, Fixed, HFHeuristic
from policies.batch.base import SingleStream, TextbookCost
from policies.batch.sglang import SGLangAdaptive
from policies.batch.tables import BatchTable
from policies.estimators import ConstantAcceptance, IsotonicAcceptance, LogisticAcceptance
from policies.lengths.bandit import EXP3Spec, UCBSpec
from policies.lengths.basic import Autoregressive, Oracle
from policies.lengths.bild import BiLDFallback
from policies.lengths.draft_and_verify import DraftAndVerify
from policies.lengths.entropy import SVIP, AdaEDL
from policies.lengths.gammatune import GammaTune, GammaTunePlus
from policies.lengths.huggingface import Confidence
from policies.lengths.llamacpp import LlamaCppDraft
from policies.lengths.rate_optimal import RateOptimal
from policies.lengths.specdec_pp import Disco, SpecDecPP

SOME = st.integers(0, 9)
UNIT = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.77, 0.95, 1.0])
FULL = st.sampled_from(["sent", "budget"])
LOGISTIC = LogisticAcceptance(("prob", "entropy"), (3.0, -0.4, -0.1), -0.5)
ESTIMATORS = st.sampled_from(
    [None, ConstantAcceptance(0.6), IsotonicAcceptance("prob", [0.1, 0.4, 0.8], [0.2, 0.5, 0.9]),
     LOGISTIC]
)  # fmt: skip
RATES = st.sampled_from([0.0, 0.4, 1.0, 1.7, 4.0])
ARMS = st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True)
COSTS = st.sampled_from([None, TextbookCost(1.0, 0.02), TextbookCost(1.0, 0.3, 0.05)])


class Bumps:
    """Seconds that grow, fall and jump with the draft's length, and with the context."""

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        bump = (0.0, 0.3, 0.1, 0.1, 0.6, 0.2)[verify_tokens // batch % 6]
        return 1 + bump + 0.07 * draft_length + context / 400

    def __deepcopy__(self, memo: dict[int, Any]) -> Bumps:
        return self


def gammas(low: int = 1) -> st.SearchStrategy[int]:
    return st.integers(low, 9)


def _tuned(kind: type[GammaTune], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[GammaTune]:
    return st.builds(
        kind, gamma=st.integers(2, 5), eta=UNIT, delta=st.sampled_from([0.0, 0.6, 2.0]),
        gamma_min=st.integers(1, 2), gamma_max=st.integers(5, 9), full_accept_means=FULL, **more,
    )  # fmt: skip


def _tiers(steps: list[int], start: int, weight: float, every: int, up: float, ceiling: float,
           in_step: bool) -> SingleStream:  # fmt: skip
    slot = {"candidate_steps": steps, "warmup_batches": 2, "ceiling_coeff": ceiling}
    config = {"1": slot, "ema_alpha": weight, "update_interval": every, "up_hysteresis": up}
    return SingleStream(SGLangAdaptive(config, start, in_step=in_step))


VECTORISED: st.SearchStrategy[DraftPolicy] = st.one_of(
    st.builds(Autoregressive),
    st.builds(Fixed, gammas(0)),
    st.builds(Oracle, st.sampled_from(["run", "run+1"]), st.none() | gammas()),
    st.builds(Confidence, gammas(), UNIT),
    st.builds(HFHeuristic, st.integers(1, 4), FULL, UNIT,
              persist=st.sampled_from(["transient", "persistent"]),
              gamma_max=st.none() | st.integers(4, 9)),
    _tuned(GammaTune), _tuned(GammaTunePlus, threshold=UNIT),
    st.builds(SVIP, UNIT, UNIT, gammas()),
    st.builds(AdaEDL, UNIT, UNIT, gammas(), UNIT, UNIT, UNIT, UNIT, UNIT, st.booleans()),
    st.builds(DraftAndVerify, UNIT, gammas(), UNIT, UNIT, UNIT, UNIT),
    st.builds(BiLDFallback, UNIT, gammas(), st.booleans(), st.booleans()),
    st.builds(SpecDecPP, UNIT, st.integers(1, 3), st.integers(3, 9), st.booleans(), ESTIMATORS),
    st.builds(LlamaCppDraft, st.integers(4, 9), st.integers(0, 4), UNIT),
    st.builds(Disco, UNIT, gammas(), ESTIMATORS),
    st.builds(CMASD, alpha=st.sampled_from([0.5, 1.0, 1.6]), gamma_min=st.integers(1, 2),
              gamma_max=st.integers(2, 9), entropy_sign=st.sampled_from(["intended", "literal"]),
              weights=st.sampled_from([(1 / 3, 1 / 3, 1 / 3), (1, 0, 0), (0, 0.5, 0.5)])),
    st.builds(RateOptimal, RATES, gammas(), UNIT, st.booleans(), estimator=ESTIMATORS,
              following=ESTIMATORS, cost=COSTS | st.builds(Bumps)),
    st.builds(UCBSpec, st.sampled_from(["ucb_paper", "ucb_cost", "greedy_code"]), ARMS,
              st.sampled_from([0.01, 0.1, 1.0]), COSTS, st.booleans()),
    st.builds(EXP3Spec, ARMS, st.integers(0, 2), st.booleans()),
    st.builds(_tiers, st.lists(SOME, min_size=1, max_size=4), SOME, UNIT, st.integers(1, 4),
              st.sampled_from([-0.5, 0.0, 0.4]), st.sampled_from([0.0, 1.2]), st.booleans()),
    st.builds(BatchTable, st.sampled_from([
        ((1, 4, 5), (5, 16, 3)), ((1, 1, 0),),
        ((1, 2, 0, 40, 2), (1, 2, 41, 60, 0), (1, 2, 61, 900, 6), (3, 4, 0, 900, 1)),
    ]), st.booleans()).map(SingleStream),
)  # fmt: skip
MANY = st.lists(st.tuples(VECTORISED, st.sampled_from([1, 1, 1, 4])), min_size=1, max_size=8)
