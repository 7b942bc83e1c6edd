"""The default and the bounds of every number and flag of a policy, rule or source."""

from __future__ import annotations

TINY = 1e-12
"""The least value tried of a range that leaves out 0."""
Limits = tuple[float | None, float, float | None]
"""Default, least, and most that is allowed; None: no value, or no upper bound."""

POLICIES: dict[str, dict[str, Limits]] = {
    "fixed": {"gamma": (5, 0, None)},
    "confidence": {"gamma": (20, 1, None), "confidence_threshold": (0.4, 0.0, 1.0)},
    "hf-heuristic": {
        "gamma": (5, 1, None),
        "confidence_threshold": (0.0, 0.0, 1.0),
        "gamma_max": (None, 5, None),
    },
    "llama-cpp": {"gamma": (3, 1, None), "gamma_min": (0, 0, 3), "p_min": (0.0, 0.0, 1.0)},
    "batch-table-hysteresis": {"margin": (1, 0, None), "patience": (4, 1, None)},
    "gammatune": {
        "gamma": (5, 1, 24),
        "eta": (0.3, 0.0, 1.0),
        "delta": (2.0, 0.0, None),
        "gamma_min": (1, 1, 5),
        "gamma_max": (24, 5, None),
    },
    "gammatune-plus": {
        "gamma": (5, 1, 24),
        "eta": (0.3, 0.0, 1.0),
        "delta": (2.0, 0.0, None),
        "gamma_min": (1, 1, 5),
        "gamma_max": (24, 5, None),
        "threshold": (0.4, 0.0, 1.0),
    },
    "svip": {"threshold": (0.3, 0.0, None), "scale": (0.15, 0.0, None), "gamma_max": (40, 1, None)},
    "adaedl": {
        "threshold": (0.5, 0.0, 1.0),
        "entropy_scale": (0.2, 0.0, None),
        "gamma_max": (16, 1, None),
        "target": (0.9, 0.0, 1.0),
        "step": (0.01, 0.0, 1.0),
        "rate_memory": (0.5, 0.0, 1.0),
        "value_memory": (0.9, 0.0, 1.0),
        "initial_rate": (0.0, 0.0, 1.0),
    },
    "draft-and-verify": {
        "threshold": (0.8, 0.0, 1.0),
        "gamma_max": (8, 1, None),
        "target": (0.9, 0.0, 1.0),
        "step": (0.01, 0.0, 1.0),
        "rate_memory": (0.5, 0.0, 1.0),
        "value_memory": (0.9, 0.0, 1.0),
    },
    "oracle": {"gamma_max": (None, 1, None)},
    "cm-asd": {
        "gamma_min": (1, 1, 16),
        "gamma_max": (16, 1, None),
        "alpha": (1.0, 0.0, None),
        "beta": (1.0, 0.0, None),
        "vocab_size": (None, 2, None),
        "initial_confidence": (0.5, 0.0, 1.0),
    },
    "specdec-pp": {
        "threshold": (0.3, 0.0, 1.0),
        "gamma_min": (2, 1, 20),
        "gamma_max": (20, 2, None),
    },
    "disco": {
        "threshold": (0.5, 0.0, 1.0),
        "gamma_max": (20, 1, None),
    },
    "bild": {"threshold": (0.6, 0.0, 1.0), "gamma_max": (10, 1, None)},
    "ucb": {"confidence": (0.1, TINY, 1.0)},
    "exp3": {"seed": (0, 0, None)},
    "rate-optimal": {
        "rate": (1.5, 0.0, None),
        "gamma_max": (20, 1, None),
        "acceptance": (0.7, 0.0, 1.0),
        "recalibrate": (0.0, 0.0, 1.0),
    },
    "disable-by-batch-size": {"gamma": (5, 0, None), "threshold": (32, 1, None)},
    "goodput": {"gamma_max": (8, 1, None), "warmup": (10, 0, None), "acceptance": (0.7, 0.0, 1.0)},
    "turbospec": {
        "gamma_max": (8, 1, None),
        "acceptance": (0.7, 0.0, 1.0),
        "interval": (None, 1, None),
    },
    "confidence-freeze": {"gamma": (5, 1, None), "threshold": (0.4, 0.0, 1.0)},
    "adaptive-verification": {
        "gamma": (5, 1, None),
        "budget": (None, 1, None),
    },
    "confidence-scheduled": {
        "gamma": (7, 1, None),
        "ema": (0.8, 0.0, 1.0),
        "captured": (None, 1, None),
        "budget": (None, 1, None),
    },
    "sglang-adaptive": {"initial_steps": (3, 0, None)},
    "sglang-throughput": {"initial_steps": (3, 0, None)},
    "tensorrt-llm": {"window": (0, 0, None), "threshold": (0.5, 0.0, None)},
    "graph-aware": {"gamma": (3, 1, 8), "gamma_max": (8, 3, None)},
}

FLAGS: dict[str, dict[str, bool]] = {
    "adaedl": {"keep_trigger_token": True},
    "specdec-pp": {"lag": True},
    "bild": {"target_first": False, "target_after_rollback": True},
    "ucb": {"learns_across_requests": False},
    "exp3": {"learns_across_requests": False},
    "rate-optimal": {"trim": True},
    "batch-table": {"in_step": True},
    "batch-table-hysteresis": {"in_step": True},
    "disable-by-batch-size": {"forever": True, "in_step": True},
    "goodput": {"in_step": True},
    "turbospec": {"forever": True, "in_step": True},
    "confidence-freeze": {"stop_early": False},
    "sglang-adaptive": {"in_step": True},
    "sglang-throughput": {"in_step": True},
    "tensorrt-llm": {"in_step": False},
    "csd": {"use_memory": True, "use_gate": True, "count_first": False, "count_rescued": False},
    "early-exit": {"bonus": False},
    "suffix": {"cached": True},
}
"""Default of every flag of a policy, rule or source."""

RULES: dict[str, dict[str, Limits]] = {
    "spec-verification": {"beta": (5, 1, None), "tau": (3.0, 0.0, None)},
    "cm-asd": {
        "tau_base": (0.1, 0.0, None),
        "gamma": (1.0, 0.0, None),
        "top": (5, 1, None),
        "beta": (1.0, 0.0, None),
        "vocab_size": (None, 2, None),
    },
    "csd": {
        "threshold": (6, 0.0, None),
        "tau": (0.01, TINY, 1.0),
        "capacity": (None, 1, None),
    },
    "lossy-global": {"tau": (0.6, TINY, 1.0)},
    "relaxed": {"topk": (10, 1, None), "delta": (0.6, 0.0, None)},
    "typical": {
        "epsilon": (0.09, 0.0, 1.0),
        "delta": (0.3, 0.0, 1.0),
        "temperature": (1.0, 0.0, 1.0),
    },
    "lenience": {"factor": (0.5, TINY, 1.0), "seed": (0, 0, None)},
    "ensemble": {"weight": (0.5, TINY, 1.0), "seed": (0, 0, None)},
    "bild": {"threshold": (5.0, 0.0, None)},
    "fly": {
        "entropy_threshold": (0.3, 0.0, None),
        "window": (6, 0, None),
        "vocab_size": (None, 2, None),
    },
}

SOURCES: dict[str, dict[str, Limits]] = {
    "pld": {"num_tokens": (10, 1, None), "max_ngram": (2, 1, None)},
    "rest": {"num_tokens": (10, 1, None), "max_suffix": (16, 1, None), "min_suffix": (1, 1, 16)},
    "lookahead": {"ngram": (5, 2, None), "guesses": (5, 1, None)},
    "early-exit": {"tau": (0.5, 0.0, 1.0), "omega": (0.3, 0.0, None), "depth": (0.5, TINY, 1.0)},
    "eagle2": {"budget": (59, 1, None), "depth": (None, 1, None), "topk": (None, 1, None)},
    "blockwise": {"k": (None, 1, None)},
    "medusa": {"k": (None, 1, None)},
    "hydra": {"k": (None, 1, None)},
    "space": {"k": (None, 1, None)},
    "specdec": {"k": (None, 1, None)},
    "parallel": {"k": (None, 1, None), "seed": (0, 0, None)},
    "ngram": {"k": (5, 1, None), "min_n": (5, 1, 5), "max_n": (5, 5, None)},
    "ngram-simple": {"size_n": (12, 1, None), "size_m": (48, 1, None)},
    "suffix": {
        "num_tokens": (24, 1, None),
        "depth": (24, 1, None),
        "factor": (1.0, 0.0, None),
        "min_prob": (0.1, 0.0, 1.0),
    },
}
