"""SpecBound (arXiv:2604.12247), Table 1: compression rate and speedup on Spec-Bench, one H800."""

from __future__ import annotations

from typing import NamedTuple

TASKS = ("Math", "Multi.", "QA", "RAG", "Sum.", "Trans.")


class Line(NamedTuple):
    """One method on one model: values by task, in the order of `TASKS`."""

    compression: tuple[float, ...]
    """CR, tokens per speculation round as the method counts them."""
    speedup: tuple[float, ...]
    overall: float
    """The printed overall speedup."""


SPECBOUND_1: dict[tuple[str, str], Line] = {
    ("Vicuna-7B", "Lookahead"): Line(
        (1.92, 1.74, 1.52, 1.53, 1.57, 1.28),
        (1.54, 1.49, 1.23, 1.24, 1.38, 1.16),
        1.35,
    ),
    ("Vicuna-7B", "Medusa"): Line(
        (1.77, 1.72, 1.54, 1.47, 1.53, 1.55),
        (1.96, 1.95, 1.67, 1.47, 1.59, 1.63),
        1.71,
    ),
    ("Vicuna-7B", "REST"): Line(
        (1.49, 2.04, 1.87, 1.96, 1.6, 1.58),
        (1.19, 1.65, 1.64, 1.75, 1.34, 1.33),
        1.47,
    ),
    ("Vicuna-7B", "Kangaroo"): Line(
        (2.14, 2.22, 1.87, 2.05, 1.87, 1.41),
        (1.61, 1.68, 1.43, 1.52, 1.5, 1.24),
        1.5,
    ),
    ("Vicuna-7B", "SPACE"): Line(
        (2.15, 2.31, 1.72, 1.88, 2.19, 1.73),
        (1.65, 1.71, 1.33, 1.24, 1.47, 1.37),
        1.46,
    ),
    ("Vicuna-7B", "SpecBound"): Line(
        (3.78, 3.05, 4.23, 5.48, 3.97, 6.41),
        (1.89, 1.65, 2.16, 2.31, 1.95, 2.94),
        2.15,
    ),
    ("Vicuna-13B", "Lookahead"): Line(
        (1.98, 1.64, 1.43, 1.48, 1.54, 1.22),
        (1.61, 1.41, 1.2, 1.19, 1.3, 1.07),
        1.3,
    ),
    ("Vicuna-13B", "Medusa"): Line(
        (1.76, 1.86, 1.53, 1.49, 1.57, 1.65),
        (2.06, 2.07, 1.71, 1.59, 1.64, 1.73),
        1.81,
    ),
    ("Vicuna-13B", "REST"): Line(
        (1.59, 1.94, 1.96, 1.83, 1.62, 1.57),
        (1.21, 1.5, 1.55, 1.53, 1.35, 1.19),
        1.37,
    ),
    ("Vicuna-13B", "Kangaroo"): Line(
        (2.42, 2.44, 1.79, 2.16, 2.0, 1.45),
        (1.63, 1.66, 1.34, 1.4, 1.41, 1.18),
        1.44,
    ),
    ("Vicuna-13B", "SpecBound"): Line(
        (4.09, 3.22, 4.54, 5.25, 4.73, 5.93),
        (1.91, 1.69, 2.18, 2.26, 2.18, 2.77),
        2.16,
    ),
    ("Codellama-7B-Instruct", "Lookahead"): Line(
        (1.88, 1.78, 1.49, 1.57, 1.45, 1.32),
        (1.52, 1.51, 1.21, 1.26, 1.32, 1.18),
        1.33,
    ),
    ("Codellama-7B-Instruct", "Medusa"): Line(
        (1.78, 1.68, 1.58, 1.44, 1.57, 1.51),
        (1.96, 1.92, 1.69, 1.45, 1.61, 1.61),
        1.7,
    ),
    ("Codellama-7B-Instruct", "REST"): Line(
        (1.45, 2.07, 1.84, 1.99, 1.57, 1.62),
        (1.17, 1.67, 1.62, 1.77, 1.32, 1.35),
        1.47,
    ),
    ("Codellama-7B-Instruct", "AdaDecode"): Line(
        (2.2, 2.0, 2.3, 2.5, 2.15, 2.4),
        (1.62, 1.4, 1.5, 1.48, 1.38, 1.52),
        1.45,
    ),
    ("Codellama-7B-Instruct", "SpecBound"): Line(
        (3.63, 2.74, 3.13, 3.98, 2.98, 4.74),
        (2.02, 1.66, 1.84, 1.88, 1.78, 2.42),
        1.93,
    ),
    ("Codellama-13B-Instruct", "Lookahead"): Line(
        (2.02, 1.61, 1.46, 1.45, 1.57, 1.18),
        (1.63, 1.39, 1.22, 1.17, 1.32, 1.05),
        1.31,
    ),
    ("Codellama-13B-Instruct", "Medusa"): Line(
        (1.74, 1.89, 1.42, 1.6, 1.47, 1.68),
        (2.04, 2.09, 1.65, 1.65, 1.58, 1.75),
        1.81,
    ),
    ("Codellama-13B-Instruct", "REST"): Line(
        (1.63, 1.91, 1.99, 1.8, 1.73, 1.46),
        (1.23, 1.48, 1.57, 1.51, 1.41, 1.13),
        1.39,
    ),
    ("Codellama-13B-Instruct", "AdaDecode"): Line(
        (2.4, 2.2, 2.5, 2.7, 2.35, 2.6),
        (1.75, 1.52, 1.6, 1.58, 1.48, 1.65),
        1.52,
    ),
    ("Codellama-13B-Instruct", "SpecBound"): Line(
        (3.49, 2.69, 2.97, 3.82, 3.0, 4.02),
        (2.2, 1.85, 1.97, 3.25, 2.13, 2.56),
        2.33,
    ),
}
