"""Text and prompts of the bundled pair: the running Python's standard library, in documents.

Every file becomes many short documents (a function, a class head, a run of constants, a
section of reference text), each ended by the end-of-sequence token in training. Short
documents are the point: a small model trained on whole files never sees an end, so its greedy
text falls into a loop; trained on documents it learns to stop.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

CATEGORIES = (
    "reference",
    "docstring",
    "function",
    "method",
    "class",
    "header",
    "table",
)
# Tests are stripped from many Python builds and idlelib is optional: leaving them out keeps the
# text the same wherever the same Python version is installed.
_SKIPPED_DIRS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "idlelib", "lib2to3", "turtledemo"}
)
_HELD_OUT_ONE_IN = 8  # one file (or reference topic) in eight is held out
_MIN_CHARS = 60  # shorter documents teach little but the end token
_SECTION_CHARS = 900  # reference text and tables are cut to about this size
MAX_NEW_TOKENS = 128  # limit of a greedy continuation when prompts are picked or measured
MIN_UNIQUE_4GRAMS = 0.3  # a prompt whose continuation repeats itself more than this is dropped
PROMPTS_PER_CATEGORY = 14
_PROMPT_TOKENS = (48, 128)  # least and most
_MIN_LEFT_TOKENS = 24  # of a document after the prompt, so that there is something to continue
_MIN_TABLE_LINES = 12  # an assignment this long is a table, not a constant


@dataclass(frozen=True)
class Document:
    """One training document: its text, its category (of CATEGORIES) and the file it is from."""

    category: str
    source: str
    text: str


def stable_hash(text: str) -> int:
    """A 32-bit hash of `text` that is the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def is_held_out(source: str) -> bool:
    """Whether documents of `source` (path, or path#topic) stay out of training."""
    return stable_hash(source) % _HELD_OUT_ONE_IN == 0


def load_documents(root: Path | None = None) -> tuple[list[Document], list[Document]]:
    """The (training, held-out) documents of the standard library, in path order.

    `root` is the library's folder, the running Python's by default. A text that occurs twice is
    kept once, and a held-out text that also occurs in training is dropped.

    Raises FileNotFoundError where `root` holds no Python source.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    train: dict[str, Document] = {}
    held_out: dict[str, Document] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_DIRS.isdisjoint(relative.parts):
            for category, source, piece in _file_pieces(path, relative.as_posix()):
                text = "\n".join(map(str.rstrip, piece.splitlines())).strip("\n")
                if len(text) >= _MIN_CHARS:
                    split = held_out if is_held_out(source) else train
                    split.setdefault(text, Document(category, source, text))
    if not train:
        raise FileNotFoundError(
            f"no Python source under {root}; give the standard library's folder"
        )
    return list(train.values()), [d for text, d in held_out.items() if text not in train]


def _file_pieces(path: Path, source: str) -> Iterator[tuple[str, str, str]]:
    """(category, source, text) of each piece of one file; none where this Python cannot parse it.

    In the language reference each topic is its own source, so that topics are split, not the file.
    """
    try:
        code = path.read_text(encoding="utf-8").expandtabs()
        module = ast.parse(code)
    except (SyntaxError, UnicodeDecodeError):
        return
    if source != "pydoc_data/topics.py":
        for category, text in _module_pieces(module, code.splitlines()):
            yield category, source, text
        return
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            for topic, text in ast.literal_eval(statement.value).items():
                for section in _sections(text, separator="\n\n"):
                    yield "reference", f"{source}#{topic}", section


def _module_pieces(module: ast.Module, lines: list[str]) -> Iterator[tuple[str, str]]:
    """(category, text) of each top-level piece; a comment goes with the statement below it."""
    header: list[str] = []  # statements that are no table, function or class, up to the next one
    end = 0
    for node in module.body:
        start, end = end, node.end_lineno or node.lineno
        text = "\n".join(lines[start:end])
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        table = isinstance(node, ast.Assign) and end - node.lineno >= _MIN_TABLE_LINES
        definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not (docstring or table or definition):
            header.append(text)
            continue
        yield "header", "\n".join(header)
        header = []
        if isinstance(node, ast.ClassDef):
            yield from _class_pieces(node, lines, start)
        elif table:
            yield from (("table", section) for section in _sections(text, separator="\n"))
        elif definition:
            yield "function", text
        elif node is module.body[0]:
            body = ast.get_docstring(module) or ""
            yield from (("docstring", section) for section in _sections(body, separator="\n\n"))
    yield "header", "\n".join(header)


def _class_pieces(node: ast.ClassDef, lines: list[str], start: int) -> Iterator[tuple[str, str]]:
    """A class: whole where short, else its head up to the first method, then each method."""
    whole = "\n".join(lines[start : node.end_lineno])
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if len(whole) <= 2 * _SECTION_CHARS or not methods:
        yield "class", whole
        return
    # Decorators stand above the `def`; the head and each method end where the next one starts.
    starts = [min([m.lineno, *(d.lineno for d in m.decorator_list)]) - 1 for m in methods]
    yield "class", "\n".join(lines[start : starts[0]])
    for method, first in zip(methods, starts, strict=True):
        yield "method", textwrap.dedent("\n".join(lines[first : method.end_lineno]))


def _sections(text: str, separator: str) -> Iterator[str]:
    """`text` cut at `separator` into runs of about _SECTION_CHARS characters."""
    section: list[str] = []
    for part in inspect.cleandoc(text).split(separator):
        section.append(part)
        if sum(map(len, section)) >= _SECTION_CHARS:
            yield separator.join(section)
            section = []
    yield separator.join(section)


def cut_prompt(text: str, encode: Callable[[str], list[int]]) -> str | None:
    """The first lines of a document as a prompt of _PROMPT_TOKENS tokens, or None if none fits.

    The length aimed at differs by document. The cut is at the end of a line, before its line
    break: there the prompt's tokens are the first tokens of the document, as in training.
    """
    shortest, longest = _PROMPT_TOKENS
    aim = shortest + stable_hash(text) % (longest - shortest + 1)
    total = len(encode(text))
    lines = text.split("\n")
    for count in range(len(lines) - 1, 0, -1):
        prompt = "\n".join(lines[:count])
        length = len(encode(prompt))
        if lines[count - 1] and shortest <= length <= min(aim, total - _MIN_LEFT_TOKENS):
            return prompt
    return None


@torch.inference_mode()
def continue_greedily(
    model: LlamaForCausalLM, prompt: Sequence[int], limit: int = MAX_NEW_TOKENS
) -> list[int]:
    """Token ids that follow `prompt`, the likeliest each time: at most `limit`, EOS included."""
    cache = DynamicCache(config=model.config)
    new: list[int] = []
    step = torch.tensor([list(prompt)])
    while len(new) < limit and (not new or new[-1] != model.config.eos_token_id):
        step = model(input_ids=step, past_key_values=cache).logits[:, -1:].argmax(-1)
        new.append(int(step))
    return new


def unique_4gram_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams of `tokens` (1.0 = no repetition; 1.0 below 4 tokens)."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _screen(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> list[bool]:
    """Whether each greedy continuation repeats itself little enough, all prompts in one batch."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    model: Any = target  # the type hints of `generate` do not fit the class they are on
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    width = inputs["input_ids"].shape[1]
    rows = [
        [token for token in row[width:] if token != tokenizer.pad_token_id] for row in out.tolist()
    ]
    return [unique_4gram_share(row) >= MIN_UNIQUE_4GRAMS for row in rows]


def pick_prompts(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train_documents: Sequence[Document],
    held_out: Sequence[Document],
) -> tuple[list[dict[str, str]], dict[str, tuple[int, int]]]:
    """The prompts, and per category how many candidates were (tried, dropped for repetition).

    Candidates come in hash order from held-out documents; one whose text occurs anywhere in the
    training text is no candidate. The first PROMPTS_PER_CATEGORY whose greedy continuation has a
    unique 4-gram share of at least MIN_UNIQUE_4GRAMS are kept. The draft takes no part in this.
    """
    seen_in_training = "\0".join(document.text for document in train_documents)
    encode = partial(tokenizer.encode, verbose=False)  # documents may be longer than the context
    rows: list[dict[str, str]] = []
    counts: dict[str, tuple[int, int]] = {}
    ordered = sorted(held_out, key=lambda document: stable_hash(document.text))
    for category in track(CATEGORIES, description="prompts     "):
        cuts = (cut_prompt(d.text, encode) for d in ordered if d.category == category)
        candidates = list(dict.fromkeys(c for c in cuts if c and c not in seen_in_training))
        kept: list[str] = []
        tried = 0
        while len(kept) < PROMPTS_PER_CATEGORY and tried < len(candidates):
            batch = candidates[tried : tried + PROMPTS_PER_CATEGORY]
            for prompt, passed in zip(batch, _screen(target, tokenizer, batch), strict=True):
                tried += 1
                # A batch rounds differently from one prompt alone, so what passed is done again.
                alone = continue_greedily(target, encode(prompt)) if passed else []
                if passed and unique_4gram_share(alone) >= MIN_UNIQUE_4GRAMS:
                    kept.append(prompt)
                if len(kept) == PROMPTS_PER_CATEGORY:
                    break
        counts[category] = (tried, tried - len(kept))
        rows += [
            {"id": f"{category}-{i:02}", "category": category, "prompt": prompt}
            for i, prompt in enumerate(kept)
        ]
    return rows, counts
