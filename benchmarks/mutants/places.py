"""Where the core can be changed by a hair, and a seeded sample of these places."""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SCOPE = (
    "policies/*.py", "policies/*/*.py",
    "traces/acceptance/*.py", "traces/replay/*.py", "traces/sources/*.py", "traces/sources/*/*.py",
    "simulator/pricing.py", "simulator/serving/scheduler.py", "simulator/serving/run.py",
    "simulator/serving/sequence.py", "simulator/serving/cost.py", "simulator/serving/compiled/*.py",
)  # fmt: skip
"""Patterns of the files that are changed."""

OPERATORS = re.compile(
    r"core/(AddNot|NumberReplacer|ExceptionReplacer|ZeroIterationForLoop|RemoveDecorator"
    r"|Replace(TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd|BreakWithContinue|ContinueWithBreak)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul"
    r"|BitOr_BitAnd|BitAnd_BitOr|BitXor_BitOr|LShift_RShift|RShift_LShift)"
    r"|ReplaceUnaryOperator_(USub_UAdd|Delete_Not|Delete_Invert))"
)
"""Cosmic Ray's operators that turn something into its nearest neighbour.  The others raise at once
or change so much that every test fails: they would flatter the tests."""

Span = tuple[tuple[int, int], tuple[int, int]]
"""(line, column) of the first character and of the one after the last."""


class Mutant(NamedTuple):
    """One change of one file."""

    path: str
    operator: str
    occurrence: int
    """Which of the operator's occurrences in the file, from 0."""
    line: int
    column: int


def files(root: Path) -> list[str]:
    """Return the files in `SCOPE`, relative to `root`."""
    found = {path for pattern in SCOPE for path in root.glob(pattern)}
    return [str(path.relative_to(root)) for path in sorted(found)]


def mutants(root: Path, path: str) -> list[Mutant]:
    """Return every mutant of a file that could change what it does."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    text = (root / path).read_text(encoding="utf-8")
    never_run, binary = unevaluated(text) + guards(text), binary_operators(text)
    nodes = list(ast_nodes(get_ast(text)))
    found = []
    for name in filter(OPERATORS.fullmatch, plugins.operator_names()):
        operator = plugins.get_operator(name)()
        spans = (span for node in nodes for span in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(spans):
            # Cosmic Ray also takes the stars of parameters and arguments for operators.
            if "BinaryOperator" in name and not inside((start, end), binary):
                continue
            if not inside((start, end), never_run):
                found.append(Mutant(path, name, occurrence, *start))
    return found


def sample(found: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return one mutant for each of `size` places of a file; a larger sample holds the smaller."""
    places = defaultdict(list)
    for mutant in sorted(found):
        places[mutant.line, mutant.column].append(mutant)
    generator = random.Random(f"{seed} {found[0].path if found else ''}")
    order = sorted(places)
    generator.shuffle(order)
    return [generator.choice(places[place]) for place in order][:size]


def unevaluated(text: str) -> list[Span]:
    """Return annotations, protocols and what else only type checkers read, abstract methods'
    marks.
    """
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            spans.append(span_of(node.annotation))
        elif isinstance(node, ast.FunctionDef):
            if node.returns:
                spans.append(span_of(node.returns))
            for mark in node.decorator_list:
                (line, column), _ = span_of(mark)
                if ast.unparse(mark) in ("abstractmethod", "overload", "override"):
                    spans.append(((line, column - 1), (line + 1, 0)))
        elif (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING") or (
            isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        ):
            spans.append(span_of(node))
    return spans


def guards(text: str) -> list[Span]:
    """Return the spans of error texts, and of checks that only a mistake in the code would meet.

    An ``assert`` fails at once when it is negated, and ``strict=`` or ``frozen=`` make no
    difference to code that is right; nor do tests hold what a message says.
    """
    spans = []
    for node in ast.walk(ast.parse(text)):
        mark = isinstance(node, ast.keyword) and node.arg in ("strict", "frozen")
        if mark or isinstance(node, ast.Assert):
            spans.append(span_of(node))
        elif isinstance(node, ast.Raise):
            spans += [span_of(part) for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
    return spans


def binary_operators(text: str) -> list[Span]:
    """Return where binary operators stand: between their operands."""
    return [
        (span_of(node.left)[1], span_of(node.right)[0])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.BinOp)
    ]


def statement(text: str, line: int) -> range:
    """Return lines of the innermost statement at `line`; of a compound one, its head.

    A place in the head of a function, a default or a decorator, belongs to the body.
    """
    best = range(line, line + 1)
    least = float("inf")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            first, last, body = _first_line(node), span_of(node)[1][0], getattr(node, "body", None)
            head = range(first, max(_first_line(body[0]) if body else last + 1, first + 1))
            if line in head and len(head) < least:
                own = isinstance(node, ast.FunctionDef)
                best, least = range(head.stop, last + 1) if own else head, len(head)
    return best


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])


def span_of(node: ast.AST) -> Span:
    at = vars(node)
    return (at["lineno"], at["col_offset"]), (at["end_lineno"], at["end_col_offset"])


def inside(span: Span, spans: list[Span]) -> bool:
    """Return True if `span` lies in one of `spans`."""
    return any(first <= span[0] and span[1] <= last for first, last in spans)
