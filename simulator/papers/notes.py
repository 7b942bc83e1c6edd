"""Where the papers contradict themselves, by table.  The numbers follow from `published`."""

from __future__ import annotations

CONTRADICTIONS: tuple[tuple[str, str], ...] = (
    (
        "SpecBound Table 1",
        "CodeLlama-13B RAG (SD 3.25 at CR 3.82) costs 1.18 steps a round where its other tasks "
        "cost 1.41 to 1.59; it enters the row's mean, so the headline 2.33x depends on one cell "
        "(the other five tasks average 2.14x).",
    ),
    (
        "SpecBound Table 1",
        "'Overall' is the mean of the six tasks for SpecBound, but not for AdaDecode (1.45 and "
        "1.52 printed, 1.48 and 1.60 computed), nor for REST and some Lookahead and Medusa rows.",
    ),
    (
        "SpecBound Table 1",
        "Medusa's SD exceeds its CR in 23 of 24 cells, impossible if CR counts every emitted token "
        "and a round costs at least one step: CR cannot be compared between methods.",
    ),
    (
        "SpecBound Table 2",
        "'Overall' is the mean of the tasks for greedy decoding, but not at T=0.3 (2.08 printed, "
        "2.05 computed), T=1.0 (1.88 and 1.92) or top-p (1.94 and 1.98); in Table 4 not on the "
        "RTX 3090 (2.01 and 2.04).",
    ),
    (
        "SpecBound Table 3",
        "Latency per token (17.5 / 8.8 = 1.99x), throughput (2.15x) and end-to-end latency (1.75x) "
        "are three different speedups; Table 1's is the throughput's.",
    ),
    (
        "CM-ASD Table III",
        "Speed over Tok is 1.10 for the full method and 0.99 to 1.13 for its ablations: a round "
        "then costs less than one step of the baseline although it drafts and verifies. The "
        "baseline is a beam-5 step and the cost of verification is not given, so only Tok and the "
        "drafting time can be checked.",
    ),
    (
        "CM-ASD Table IV",
        "The text gives SpecDec the ROUGE values 41.90 / 18.30 / 38.10, which the table gives to "
        "CM-ASD, and calls CM-ASD at least as fast as SpecDec at larger k, while Tables I and IV "
        "show SpecDec(k=25) faster everywhere.",
    ),
    (
        "CM-ASD Table V",
        "Relative BLEU is against the target's greedy output, not against a reference text.",
    ),
    (
        "CM-ASD eqs. 1-6",
        "The printed confidence adds an entropy that is high when the drafter is unsure, and the "
        "printed threshold is then most lenient; the prose asks for the opposite of both. Ours "
        "follow the prose; `cm-asd:entropy_sign=literal` and `tau_sign=literal` the print.",
    ),
    (
        "CSD main results",
        "'+2.0 points' on MATH500 is over plain decoding; over speculative decoding it is +2.6.",
    ),
    (
        "GammaTune Table 1",
        "The table marks Llama-70B int4, section 5 says int8; the text calls T_target / T_draft "
        "'typically 4 to 10', its own table gives 3.6, 8.1, 1.9 and 55.6.",
    ),
    (
        "GammaTune Table 2",
        "The average's sd is the root mean square of the four pairs' sds, not their mean.",
    ),
    (
        "GammaTune eqs. 7-8",
        "As printed, delta never reaches the average, and gamma could never grow; ours adds delta "
        "to the accepted count, as the prose says.",
    ),
)
"""(table, what it contradicts)."""


def notes_on(table: str) -> list[str]:
    """What is known of a table."""
    return [text for name, text in CONTRADICTIONS if name == table]
