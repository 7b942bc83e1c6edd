"""The training text: the target writes its own user turns and answers them.

A row starts after the chat's beginning up to the user's name, goes on sampled at temperature 1
until the turn ends, and is then answered, greedily in three rows of four. Two thirds of the user
turns are the model's own from the first token; the others start with one of OPENINGS, because
left to itself the model seldom asks for a translation or a sum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from profiler.smollm2.writer import RowWriter

OPENINGS = (
    "Translate this German sentence into English:",
    "Translate into English:",
    "Summarize:",
    "Summarize the following article:",
    "Give a short summary of this text:",
    "Who was",
    "Where is",
    "When did",
    "What is the name of",
    "Which",
    "How many",
    "A shop sells",
    "If a train",
    "Anna has",
    "Solve the equation",
    "Write a Python function that",
    "Imagine you are",
    "Write an email",
    "Explain",
    "Answer the question from the passages below.",
    "Here is some background:",
)
USER_TOKENS, ANSWER_TOKENS = 96, 150
ROWS, STEPS = 96, 800  # of a shard


PROMPT, USER, ANSWER = 0, 1, 2  # what the token after a position is


@dataclass
class _Row:
    """Where a row of the writer stands in its chat."""

    forced: list[int]
    greedy: bool
    answering: bool = False
    written: int = 0
    read: list[int] = field(default_factory=list)  # the steps that read its tokens
    kinds: list[int] = field(default_factory=list)  # PROMPT, USER or ANSWER, of each of them

    def following(self, proposed: int, between: list[int], end: int) -> int | None:
        """The token to read next, given the model's proposal; None where the chat has ended."""
        if self.forced:
            self.kinds.append(PROMPT)
            return self.forced.pop(0)
        self.kinds.append(ANSWER if self.answering else USER)
        self.written += 1
        if self.answering:
            over = proposed == end or self.written >= ANSWER_TOKENS
            return None if over else proposed
        if proposed != end and self.written < USER_TOKENS:
            return proposed
        self.answering, self.written, self.forced = True, 0, between[1:]
        return between[0]


class ChatWriter:
    """Writes chats in shards; a shard depends on its number alone, so they may be made one by one.

    `depths`: whose hidden states are kept, as indices of transformers' `output_hidden_states`.
    """

    def __init__(self, model: Any, tokenizer: Any, depths: Sequence[int]) -> None:
        self.model, self.depths = model, tuple(depths)
        turn = [{"role": "user", "content": "\0"}]
        chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids

        before, after = chat.split("\0")
        self.prefix, self.between = encode(before), encode(after)
        self.openings = [encode(text) for text in OPENINGS]
        self.end: int = tokenizer.eos_token_id

    def shard(self, number: int, rows: int = ROWS, steps: int = STEPS) -> dict[str, Tensor]:
        """The chats of one shard, (n,) tokens in all, those unfinished at its end included.

        `tokens` (n,) int32; `kinds` (n,) uint8, see PROMPT; `starts` (chats + 1,) int64;
        `features` (n, depths, hidden) and `final` (n, hidden): the states where the token was read;
        `prefix_tokens`, `prefix_features`, `prefix_final`: of the beginning that all chats share.
        """
        generator = torch.Generator().manual_seed(1_000 + number)
        longest = max(map(len, self.openings)) + USER_TOKENS + ANSWER_TOKENS
        positions = len(self.prefix) + longest + len(self.between)
        writer = RowWriter(self.model, self.prefix, rows, positions, self.depths)
        hidden, dtype = self.model.config.hidden_size, writer.embedding.dtype
        final = torch.empty(steps, rows, hidden, dtype=dtype)
        features = torch.empty(steps, rows, len(self.depths), hidden, dtype=dtype)
        tokens = torch.empty(steps, rows, dtype=torch.int32)
        first = writer.logits(writer.prefix_final[-1:]).softmax(-1)[0]
        current = [self._row(generator) for _ in range(rows)]
        reading = [self._first(row, first, generator) for row in current]
        ended: list[tuple[int, _Row]] = []
        for step in range(steps):
            tokens[step] = torch.tensor(reading)
            final[step], features[step] = writer.step(tokens[step].long())
            proposed = self._propose(writer.logits(final[step]), current, generator)
            for index, row in enumerate(current):
                row.read.append(step)
                following = row.following(proposed[index], self.between, self.end)
                if following is None:
                    ended.append((index, row))
                    writer.restart(index)
                    current[index] = self._row(generator)
                    following = self._first(current[index], first, generator)
                reading[index] = following
        ended += enumerate(current)
        chats = [(torch.tensor(row.read), index) for index, row in ended if row.read]
        kinds = [kind for _, row in ended for kind in row.kinds]
        return {
            "tokens": torch.cat([tokens[steps_read, index] for steps_read, index in chats]),
            "kinds": torch.tensor(kinds, dtype=torch.uint8),
            "starts": torch.tensor([0] + [len(steps_read) for steps_read, _ in chats]).cumsum(0),
            "features": torch.cat([features[steps_read, index] for steps_read, index in chats]),
            "final": torch.cat([final[steps_read, index] for steps_read, index in chats]),
            "prefix_tokens": torch.tensor(self.prefix, dtype=torch.int32),
            "prefix_features": writer.prefix_features,
            "prefix_final": writer.prefix_final,
        }

    def _row(self, generator: torch.Generator) -> _Row:
        opened, which, greedy = torch.rand(3, generator=generator).tolist()
        opening = self.openings[int(which * len(self.openings))] if opened < 1 / 3 else []
        return _Row(forced=list(opening), greedy=greedy < 0.75)

    def _first(self, row: _Row, probabilities: Tensor, generator: torch.Generator) -> int:
        """The first token of a user turn."""
        if row.forced:
            return row.forced.pop(0)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def _propose(self, logits: Tensor, rows: list[_Row], generator: torch.Generator) -> list[int]:
        """The model's next token of every row: likeliest, or sampled at temperature 1."""
        chosen = logits.argmax(-1)
        drawn = [
            i for i, row in enumerate(rows) if not row.forced and not (row.answering and row.greedy)
        ]
        if drawn:
            probabilities = logits[drawn].softmax(-1)
            chosen[drawn] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        proposed: list[int] = chosen.tolist()
        return proposed


def shard_path(folder: Path, number: int) -> Path:
    """Where shard `number` of a text folder is."""
    return folder / f"text-{number:03}.safetensors"


def write_text(
    model: Any, tokenizer: Any, depths: Sequence[int], folder: Path, shards: int
) -> None:
    """Writes the shards that are not in `folder` yet, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = ChatWriter(model, tokenizer, depths)
    for number in range(shards):
        path = shard_path(folder, number)
        if path.exists():
            continue
        begin = time.perf_counter()
        arrays = writer.shard(number)
        save_file(arrays, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        elapsed_s = time.perf_counter() - begin
        answers = int((arrays["kinds"] == ANSWER).sum())
        print(
            f"text {number + 1}/{shards}: {len(arrays['tokens'])} tokens, {answers} of answers, "
            f"{len(arrays['starts']) - 1} chats, {elapsed_s:.0f} s, "
            f"{elapsed_s * (shards - number - 1) / 60:.0f} min left",
            flush=True,
        )
