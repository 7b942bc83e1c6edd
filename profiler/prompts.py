"""Reads prompts from files; every failure is one clear line."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, TypeVar

from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError
from traces.replay.quality import reference_number
from traces.store.text import json_lines, read_text

if TYPE_CHECKING:
    from profiler.models.loading import Pair

TEXTS = "prompt_texts"
"""Provenance of a trace: `Prompt.digest` of what it was recorded on, by id."""


@dataclass(frozen=True)
class CodeTask:
    """A task whose answer is code, and its tests (see `profiler.checks.sandbox`)."""

    entry: str
    """The function or class that the answer defines, or tests."""
    unit_tests: str = ""
    """Python statements that fail unless the answer is right; empty if it is itself tests."""
    solution: str = ""
    """Code that tests must pass on."""
    mutant: str = ""
    """Code that tests must fail on."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prompts file."""

    id: str
    category: str
    text: str
    answer: str | None = None
    """The number that solves it, in digits; None if it asks for no number."""
    code: CodeTask | None = None
    """Tests of the code that answers it; None if it asks for no code."""

    @property
    def digest(self) -> str:
        """A short digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


Item = TypeVar("Item", Prompt, Request)


def read_prompts(
    path: str | Path, limit: int | None = None, categories: Collection[str] = ()
) -> list[Prompt]:
    """Read prompts from JSON lines (``prompt``, ``text`` or ``turns``; ``category``) or lines.

    A ``reference`` (of the first turn, if it is a list) or an ``answer`` is reduced to the number
    that solves the prompt, if it names one: ``#### 72`` at its end as in GSM8K
    and Spec-Bench's math_reasoning, or nothing but a number.  With ``unit_tests``, or with
    ``solution`` and ``mutant``, the prompt asks for code, or for tests, of ``entry``.

    With ``categories`` only their prompts; with ``limit`` prompts are taken in turn from each
    category, so that none is left out.  Raises DraftsimError naming file and line.
    """
    path = Path(path)
    text = read_text(path)
    prompts: dict[int, Prompt] = {}
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        for number, row in json_lines(path, text, "write one JSON object a line"):
            prompts[number] = _prompt(row, f"{path} line {number}", number)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                prompts[number] = Prompt(str(number), "all", line)
    if not prompts:
        raise DraftsimError(f"{path} holds no prompts: give one JSON object or one text a line")
    _check_ids(path, prompts)
    return chosen_of(prompts.values(), str(path), limit, categories)


def _check_ids(path: Path, prompts: Mapping[int, Prompt]) -> None:
    """Raise DraftsimError if two prompts have the same id, which is the key of results."""
    lines: dict[str, int] = {}
    for number, prompt in prompts.items():
        if (before := lines.setdefault(prompt.id, number)) != number:
            raise DraftsimError(
                f"{path} line {number}: has the id {shown(prompt.id)} of line {before}: give each "
                "prompt an id of its own, or none"
            )


def chosen_of(
    items: Iterable[Item], where: str, limit: int | None, categories: Collection[str]
) -> list[Item]:
    """Return the items of the categories, if any are named, and `limit` of them, in turn from each.

    Raises DraftsimError for a category that is not `where` they are from.
    """
    groups: dict[str, list[Item]] = {}
    kept = list(items)
    for item in kept:
        groups.setdefault(item.category, []).append(item)
    if unknown := [name for name in categories if name not in groups]:
        raise DraftsimError(
            f"--category {unknown[0]!r}: {where} has the categories {', '.join(groups)}"
        )
    if categories:
        groups = {name: group for name, group in groups.items() if name in categories}
        kept = [item for item in kept if item.category in groups]
    if limit is None:
        return kept
    depth = range(max(map(len, groups.values()), default=0))
    return [group[i] for i in depth for group in groups.values() if i < len(group)][:limit]


def prompts_held(trace: Trace, prompts: Iterable[Prompt], pair: Pair) -> list[Prompt]:
    """Return the prompts that `trace` was recorded on: id, category and text are the same."""
    requests = {(r.id, r.category): r.prompt_ids for r in trace.requests}
    texts, chat = trace.meta.get(TEXTS), bool(trace.meta.get("chat_template"))

    def is_held(prompt: Prompt) -> bool:
        key = prompt.id, prompt.category
        if key not in requests:
            return False
        if texts is not None:
            # Not by ids: a chat template may put the date into them.
            return bool(texts.get(prompt.id) == prompt.digest)
        return requests[key] == tuple(pair.encode(prompt.text, chat).tolist())

    return [prompt for prompt in prompts if is_held(prompt)]


def _prompt(row: Any, where: str, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise DraftsimError(f"{where} is not a JSON object")
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    text = row.get("prompt") or row.get("text") or first
    if not isinstance(text, str) or not text:
        raise DraftsimError(f"{where} has no text under 'prompt', 'text' or 'turns'")
    name = row.get("id", row.get("question_id", number))
    category = row.get("category", "all")
    for key, value in (("id", name), ("category", category)):
        if type(value) not in (str, int):
            raise DraftsimError(f"{where}: {key!r} is {shown(value)}, expected text or a number")
    answers = [_answer(row, key, where) for key in ("reference", "answer")]
    answer = next((found for found in answers if found is not None), None)
    return Prompt(str(name), str(category), text, answer, _code(row, where))


def _code(row: dict[str, Any], where: str) -> CodeTask | None:
    """Return the tests of the code that answers the prompt; None if the row has none."""
    tests = row.get("unit_tests")
    names = ("entry", "unit_tests") if tests else ("entry", "solution", "mutant")
    if not tests and not all(row.get(name) for name in names[1:]):
        return None
    for name in names:
        if not isinstance(row.get(name), str):
            raise DraftsimError(f"{where}: {name!r} must be a text: see docs/profile.md")
    return CodeTask(**{name: row[name] for name in names})


def _answer(row: dict[str, Any], key: str, where: str) -> str | None:
    """Return the number that solves the prompt, as the field `key` names it; None without."""
    given = row.get(key)
    if isinstance(given, list):
        given = given[0] if given else None
        if isinstance(given, list):
            return None  # several texts, any of which will do
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        kind = type(given).__name__
        raise DraftsimError(
            f"{where}: {key!r} holds a {kind}: give a text, a number, or a list of one a turn"
        )
    return reference_number(str(given))
