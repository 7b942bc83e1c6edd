"""Reads prompts from files; every failure is one clear line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from traces.errors import DraftsimError


@dataclass(frozen=True)
class Prompt:
    """One prompt of a prompts file."""

    id: str
    category: str
    text: str


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts from JSON lines (``prompt``, ``text`` or ``turns``; ``category``) or plain lines.

    With ``limit`` prompts are taken in turn from each category, so that none is left out.
    Raises DraftsimError naming file and line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DraftsimError(f"cannot read prompts from {path}: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompts.append(
            _prompt(line, f"{path}:{number}", number)
            if path.suffix in (".jsonl", ".json")
            else Prompt(str(number), "all", line)
        )
    if not prompts:
        raise DraftsimError(f"{path} holds no prompts: give one JSON object or one text a line")
    return prompts if limit is None else _round_robin(prompts, limit)


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DraftsimError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DraftsimError(f"{where} is not a JSON object")
    text = row.get("prompt") or row.get("text") or (row.get("turns") or [None])[0]
    if not isinstance(text, str) or not text:
        raise DraftsimError(f"{where} has no text under 'prompt', 'text' or 'turns'")
    name = row.get("id", row.get("question_id", number))
    return Prompt(str(name), str(row.get("category", "all")), text)


def _round_robin(prompts: Iterable[Prompt], limit: int) -> list[Prompt]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    chosen: list[Prompt] = []
    depth = 0
    while len(chosen) < limit and any(len(g) > depth for g in groups.values()):
        chosen += [g[depth] for g in groups.values() if len(g) > depth]
        depth += 1
    return chosen[:limit]
