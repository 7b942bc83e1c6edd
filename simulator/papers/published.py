"""The published tables of the four papers, transcribed: facts, with their source named.

A None is a value the paper does not give.  What the tables contradict is in
`simulator.papers.notes`.
"""

from __future__ import annotations

from simulator.papers.rows import PaperTable

CMASD_1 = PaperTable(
    "CM-ASD Table I",
    "arXiv:2508.15371, Table I: decoding speed over beam-5 autoregressive",
    ("EN-DE", "DE-EN", "EN-RO", "RO-EN"),
    {
        "Transformer-base (b=5)": (1.0, 1.0, 1.0, 1.0),
        "Transformer-base (b=1)": (1.1, 1.1, 1.1, 1.1),
        "Blockwise (k=10)": (1.9, 2.0, 1.4, 1.4),
        "Blockwise (k=25)": (1.6, 1.7, 1.2, 1.2),
        "SpecDec(k=10)": (4.2, 4.6, 3.9, 4.1),
        "SpecDec(k=25)": (5.1, 5.5, 4.6, 4.8),
        "CM-ASD": (4.7, 5.0, 4.2, 4.4),
    },
)
CMASD_2 = PaperTable(
    "CM-ASD Table II",
    "arXiv:2508.15371, Table II: BLEU",
    ("EN-DE", "DE-EN", "EN-RO", "RO-EN"),
    {
        "Transformer-base (b=5)": (28.89, 32.53, 34.96, 34.86),
        "Transformer-base (b=1)": (28.73, 32.18, 34.83, 34.65),
        "Blockwise (k=10)": (28.73, 32.18, 34.83, 34.65),
        "Blockwise (k=25)": (28.73, 32.18, 34.83, 34.65),
        "SpecDec(k=10)": (28.9, 32.61, 35.29, 34.88),
        "SpecDec(k=25)": (28.93, 32.55, 35.45, 35.03),
        "CM-ASD": (28.91, 32.58, 35.38, 34.94),
    },
)
CMASD_3 = PaperTable(
    "CM-ASD Table III",
    "arXiv:2508.15371, Table III: ablation on WMT14 EN-DE",
    ("Tok", "BLEU", "td_ms", "Speed"),
    {
        "Transformer-base (b=5)": (1.0, 28.89, None, 1.0),
        "w/o Adaptive Drafting (Fixed k, adaptive τ)": (3.1, 28.82, 3.72, 3.5),
        "w/o Adaptive Verification (adaptive k, fixed τ)": (3.95, 28.84, 3.51, 3.9),
        "w/o Confidence (Fixed k & tau)": (2.91, 28.73, 3.68, 3.2),
        "Entropy-only Confidence": (4.1, 28.85, 3.95, 4.2),
        "Margin-only Confidence": (4.08, 28.84, 3.98, 4.1),
        "Softmax-only Confidence": (4.03, 28.86, 3.9, 4.1),
        "CM-ASD (full)": (4.27, 28.91, 3.81, 4.7),
    },
)
CMASD_4 = PaperTable(
    "CM-ASD Table IV",
    "arXiv:2508.15371, Table IV: CNN/DailyMail",
    ("R-1", "R-2", "R-L", "Speed"),
    {
        "AR BART-base (b=5)": (43.08, 20.41, 40.15, 1.0),
        "AR BART-base (b=1)": (43.0, 20.28, 39.96, 1.1),
        "GLAT+CTC [11]": (37.76, 14.08, 33.69, 14.5),
        "DAT [41]": (38.95, 16.11, 35.43, 14.1),
        "CMLM [42]": (37.59, 15.17, 34.22, 1.8),
        "RewriteNAT [43]": (39.12, 16.24, 35.74, 3.1),
        "SpecDec(k=25)": (43.11, 20.43, 40.19, 5.1),
        "CM-ASD": (41.9, 18.3, 38.1, 4.0),
    },
)
CMASD_5 = PaperTable(
    "CM-ASD Table V",
    "arXiv:2508.15371, Table V: BLEU against greedy output",
    ("relative BLEU",),
    {
        "Transformer-base (Greedy)": (100.0,),
        "GLAT+CTC [11]": (59.1,),
        "DAT [41]": (63.79,),
        "CMLM [42]": (60.15,),
        "RewriteNAT [43]": (65.42,),
        "Deep-Shallow [44]": (64.66,),
        "SpecDec(k=25)": (86.52,),
        "CM-ASD": (87.34,),
    },
)
CSD_ABLATION = PaperTable(
    "CSD ablation",
    "arXiv:2604.13634, ablation as given in a note on the paper, percent",
    ("MATH500_Acc", "MATH500_AR", "HumanEval_Acc"),
    {
        "SpecDecode (baseline)": (45.4, 63.6, 76.8),
        "SD + OCM only": (37.8, 83.1, 70.7),
        "SD + SCG only": (43.6, 88.7, 70.7),
        "CSD (OCM + SCG)": (48.0, 79.6, 79.3),
    },
)
CSD_MAIN = PaperTable(
    "CSD main results",
    "arXiv:2604.13634, selected rows as given in a note on the paper",
    ("CSD", "SpecDecode", "Vanilla"),
    {
        "Llama-3 MATH500 Speedup": (2.33, 1.89, 1.0),
        "Llama-3 HumanEval Speedup": (2.33, 1.9, 1.0),
        "Llama-3 MATH500 Accuracy": (48.0, 45.4, 46.0),
        "Llama-3 HumanEval Accuracy": (79.3, 76.8, 76.8),
        "Llama-3 Average Speedup": (2.02, 1.75, 1.0),
        "Qwen-2.5 Average Speedup": (1.86, 1.66, 1.0),
    },
)
CSD_GAINS = {
    "Llama-3 MATH500 Speedup": 23.3,
    "Llama-3 HumanEval Speedup": 22.6,
    "Llama-3 MATH500 Accuracy": 2.0,
    "Llama-3 HumanEval Accuracy": 2.5,
    "Llama-3 Average Speedup": 15.4,
    "Qwen-2.5 Average Speedup": 12.0,
}
CSD_PATTERNS = PaperTable(
    "CSD rejection patterns",
    "arXiv:2604.13634, what motivates the memory, as given in a note on the paper",
    ("rejections, percent",),
    {"most frequent 20 % of (draft, target) pairs": (69.0,)},
)
GAMMATUNE_1 = PaperTable(
    "GammaTune Table 1",
    "arXiv:2504.00030, Table 1: ms per token",
    ("ms per token",),
    {
        "meta-llama/Llama-3.2-1B-Instruct": (8.87,),
        "meta-llama/Llama-3.1-8B": (16.65,),
        "meta-llama/Llama-3.1-70B": (925.05,),
        "double7/vicuna-68m": (1.76,),
        "double7/vicuna-160m": (5.61,),
        "lmsys/vicuna-7b-v1.5": (14.29,),
        "lmsys/vicuna-13b-v1.5": (20.15,),
    },
)
GAMMATUNE_2 = PaperTable(
    "GammaTune Table 2",
    "arXiv:2504.00030, Table 2: speedup over SpecDecode, mean and sd over 12 initial gammas",
    (
        "vicuna13b_160m_mean",
        "vicuna13b_160m_sd",
        "vicuna7b_68m_mean",
        "vicuna7b_68m_sd",
        "llama70b_8b_mean",
        "llama70b_8b_sd",
        "llama8b_1b_mean",
        "llama8b_1b_sd",
        "average_mean",
        "average_sd",
    ),
    {
        "SpecDecode": (1.0, 0.28, 1.0, 0.2, 1.0, 0.22, 1.0, 0.19, 1.0, 0.23),
        "HFHeuristic": (1.14, 0.14, 1.04, 0.05, 1.12, 0.16, 1.12, 0.09, 1.11, 0.12),
        "AssistantThreshold": (1.24, 0.03, 1.05, 0.04, 1.04, 0.04, 1.17, 0.11, 1.13, 0.06),
        "GammaTune": (1.23, 0.04, 1.13, 0.03, 1.13, 0.05, 1.12, 0.06, 1.15, 0.05),
        "GammaTune+": (1.28, 0.02, 1.13, 0.02, 1.06, 0.02, 1.18, 0.05, 1.16, 0.03),
    },
)
SPECBOUND_2 = PaperTable(
    "SpecBound Table 2",
    "arXiv:2604.12247, Table 2: Vicuna-7B by decoding strategy",
    ("Math", "Multi.", "QA", "RAG", "Sum.", "Trans.", "Overall"),
    {
        "greedy decoding": (1.89, 1.65, 2.16, 2.31, 1.95, 2.94, 2.15),
        "temperature sampling (T=0.3)": (1.82, 1.56, 2.01, 2.2, 1.86, 2.86, 2.08),
        "temperature sampling (T=1.0)": (1.71, 1.44, 1.92, 2.08, 1.73, 2.63, 1.88),
        "top-p sampling (p=0.9)": (1.78, 1.48, 1.99, 2.15, 1.78, 2.71, 1.94),
    },
)
SPECBOUND_3 = PaperTable(
    "SpecBound Table 3",
    "arXiv:2604.12247, Table 3: serving, Vicuna-7B, one H800",
    ("AR_base", "SpecBound", "improvement"),
    {
        "TTFT (ms)": (20.8, 21.1, None),
        "Per-token latency (ms)": (17.5, 8.8, 1.98),
        "Throughput (tokens/s)": (57.3, 123.1, 2.15),
        "End-to-End Latency (s)": (3.31, 1.89, 1.75),
    },
)
SPECBOUND_4 = PaperTable(
    "SpecBound Table 4",
    "arXiv:2604.12247, Table 4: Vicuna-7B by device",
    ("Math", "Multi-turn", "QA", "RAG", "Summary", "Translation", "Overall"),
    {
        "H800": (1.89, 1.65, 2.16, 2.31, 1.95, 2.94, 2.15),
        "RTX 3090": (1.81, 1.58, 2.12, 2.13, 1.92, 2.69, 2.01),
    },
)
SPECBOUND_5 = PaperTable(
    "SpecBound Table 5",
    "arXiv:2604.12247, Table 5: Vicuna-7B, prompts per speedup range, fastest first",
    ("prompts", "percent"),
    {
        "range 1 (Max)": (16.0, 3.33),
        "range 2": (48.0, 10.00),
        "range 3": (103.0, 21.46),
        "range 4": (197.0, 41.04),
        "range 5 (Min)": (116.0, 24.17),
    },
)
