"""The training text: the target writes its own user turns and answers; the chats as batches.

A row starts after the chat's beginning up to the user's name, continues sampled at temperature 1
until the turn ends, and is then answered, greedily in three rows of four. Two thirds of the user
turns are the model's own from the first token; the others start with one of OPENINGS, because
left to itself the model seldom asks for a translation or a sum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from profiler.features.heads import rotated
from traces.errors import DraftsimError

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


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


class RowWriter:
    """A Llama model that writes `rows` texts at once, each after one common `prefix`.

    Every row has its own length in a preallocated cache of `positions` tokens: a row whose text
    has ended begins the next one, and a step always computes `rows` tokens. The forward pass is
    written out because a step must not copy the cache, which transformers' caches do, and because
    the hidden states of the chosen depths are wanted with every token.

    `depths` names the hidden states to return, as indices of `output_hidden_states`: entry i is
    the input of layer i. The model's weights are used as they are, in the model's own dtype.
    """

    def __init__(
        self, model: Any, prefix: Sequence[int], rows: int, positions: int, depths: Sequence[int]
    ) -> None:
        config = model.config
        self.config, self.rows, self.positions = config, rows, positions
        self.depths = tuple(depths)
        self.embedding = model.model.embed_tokens.weight
        self.head = model.lm_head.weight
        self.final_norm = model.model.norm.weight
        self.eps = config.rms_norm_eps
        self.layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{n}_proj").weight for n in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in model.model.layers
        ]
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        shape = (len(self.layers), rows, self.kv_heads, positions, self.head_dim)
        # Keys stand transposed: the product with few queries is twice as fast that way round.
        self.keys = torch.zeros(shape, dtype=self.embedding.dtype).mT.contiguous()
        self.values = torch.zeros(shape, dtype=self.embedding.dtype)
        at = torch.arange(positions, dtype=torch.float32)[:, None]
        cos, sin = model.model.rotary_emb(self.embedding[:1, None], at.T)
        self.cos, self.sin = cos[0], sin[0]  # (positions, head_dim)
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.row_index = torch.arange(rows)
        states = [self.step(torch.full((rows,), token)) for token in prefix]
        self.prefix_length = len(prefix)
        self.prefix_final = torch.stack([final[0] for final, _ in states])  # (prefix, hidden)
        self.prefix_features = torch.stack([kept[0] for _, kept in states])

    def restart(self, row: int) -> None:
        """Begin a new text in `row` after the common prefix."""
        self.lengths[row] = self.prefix_length

    @torch.no_grad()
    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Read one token of every row, (rows,) int64.

        Returns the final hidden state, after the norm, (rows, hidden), and those of `depths`,
        (rows, depths, hidden).
        """
        at = self.lengths
        used = int(at.max()) + 1
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        hidden_from = (torch.arange(used) > at[:, None])[:, None, None, :]  # (rows, 1, 1, used)
        kept = []
        hidden = self.embedding[tokens]  # (rows, hidden)
        heads = self.kv_heads * self.group
        for index, (norm_in, qkv, out, norm_mid, gate_up, down) in enumerate(self.layers):
            if index in self.depths:
                kept.append(hidden)
            mixed = F.linear(_norm(hidden, norm_in, self.eps), qkv)
            query, key, value = mixed.view(self.rows, -1, self.head_dim).split(
                [heads, self.kv_heads, self.kv_heads], 1
            )
            keys, values = self.keys[index], self.values[index]
            keys[self.row_index, :, :, at] = rotated(key, cos, sin)
            values[self.row_index, :, at] = value
            # The query heads of a group read one key head: they are laid out as positions.
            query = rotated(query, cos, sin).view(self.rows, self.kv_heads, self.group, -1)
            scores = query @ keys[..., :used] * self.head_dim**-0.5  # (rows, kv heads, group, used)
            weights = scores.masked_fill(hidden_from, -torch.inf).softmax(-1)
            attended = weights @ values[:, :, :used]
            hidden = hidden + F.linear(attended.reshape(self.rows, -1), out)
            gate, up = F.linear(_norm(hidden, norm_mid, self.eps), gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        self.lengths = at + 1
        return _norm(hidden, self.final_norm, self.eps), torch.stack(kept, 1)

    def logits(self, final: Tensor) -> Tensor:
        """Return logits (rows, vocabulary) in float32, of final hidden states (rows, hidden)."""
        return F.linear(final, self.head).float()


@dataclass
class _Row:
    """The position of a writer's row in its chat."""

    forced: list[int]
    greedy: bool
    answering: bool = False
    written: int = 0
    read: list[int] = field(default_factory=list)  # the steps that read its tokens
    kinds: list[int] = field(default_factory=list)  # PROMPT, USER or ANSWER, of each of them

    def following(self, proposed: int, between: list[int], end: int) -> int | None:
        """Return the token to read next, given the model's proposal; None if the chat has ended."""
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
        """Return the chats of one shard, (n,) tokens in all, those unfinished at its end included.

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
        """Return the first token of a user turn."""
        if row.forced:
            return row.forced.pop(0)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def _propose(self, logits: Tensor, rows: list[_Row], generator: torch.Generator) -> list[int]:
        """Return the model's next token of every row: likeliest, or sampled at temperature 1."""
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
    """Return the path of shard `number` of a text folder."""
    return folder / f"text-{number:03}.safetensors"


def write_text(
    model: Any, tokenizer: Any, depths: Sequence[int], folder: Path, shards: int
) -> None:
    """Write the shards that are not in `folder` yet, each whole or not at all."""
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


Weights = tuple[float, float, float]
BOTH: Weights = (0.0, 0.5, 1.0)
ANSWERS: Weights = (0.0, 0.0, 1.0)
"""Weights of positions in the loss, by the kind of the token that follows: PROMPT, USER, ANSWER."""


HELD_OUT = 16


@dataclass(frozen=True)
class Batch:
    """Chats padded on the right: (rows, length) each, states (rows, length, ...).

    `weights` is 0 on padding and wherever nothing is to be learnt.  `states` are the target's
    final normed ones, `features` those of the drafter's depths side by side.
    """

    tokens: Tensor
    weights: Tensor
    states: Tensor
    features: Tensor | None = None


class Chats:
    """The chats of a folder's first shards, each after the beginning that they share.

    `features`: whether the states of the depths are read too.  One chat in HELD_OUT is in
    `held_out`, the others in `training`; both are indices.
    """

    def __init__(self, folder: Path, shards: int, weights: Weights, features: bool = False) -> None:
        self.weights = torch.tensor(weights)
        names = ("tokens", "states", "features") if features else ("tokens", "states")
        self._parts: dict[str, list[Tensor]] = {name: [] for name in (*names, "kinds")}
        self._prefix: dict[str, Tensor] = {}
        bounds = [torch.zeros(1, dtype=torch.long)]
        for number in range(shards):
            path = shard_path(folder, number)
            if not path.is_file():
                raise DraftsimError(f"{path} is missing: write the training text first")
            with safe_open(path, "pt") as file:
                for name, parts in self._parts.items():
                    parts.append(_flat(file.get_tensor(_STORED.get(name, name))))
                for name in names:
                    self._prefix[name] = _flat(file.get_tensor(f"prefix_{_STORED.get(name, name)}"))
                bounds.append(file.get_tensor("starts")[1:] + bounds[-1][-1])
        self._arrays = {name: torch.cat(parts) for name, parts in self._parts.items()}
        self._parts.clear()
        self.bounds = torch.cat(bounds)
        indices = torch.arange(len(self.bounds) - 1)
        self.held_out = indices[indices % HELD_OUT == HELD_OUT - 1]
        self.training = indices[indices % HELD_OUT != HELD_OUT - 1]

    @property
    def counts(self) -> dict[str, int]:
        """Count tokens by their kind."""
        kinds = self._arrays["kinds"].long().bincount(minlength=3).tolist()
        return {"prompt": kinds[PROMPT], "user": kinds[USER], "answer": kinds[ANSWER]}

    @property
    def tokens(self) -> Tensor:
        """All tokens in one line, (n,)."""
        return self._arrays["tokens"]

    @property
    def states(self) -> Tensor:
        """The target's final states, (n, hidden)."""
        return self._arrays["states"]

    @property
    def features(self) -> Tensor:
        """The states of all depths side by side, (n, depths * hidden)."""
        return self._arrays["features"]

    def beginnings(self, length: int) -> Tensor:
        """Return the first tokens of every training chat that is long enough, (chats, length)."""
        prefix = self._prefix["tokens"]
        room = length - len(prefix)
        starts = [int(self.bounds[i]) for i in self.training if self.bounds.diff()[i] >= room]
        rows = [torch.cat([prefix, self.tokens[start : start + room]]) for start in starts]
        return torch.stack(rows).long()

    def batch(self, chosen: Sequence[int]) -> Batch:
        """Return the chats of these indices."""
        count = len(self._prefix["tokens"])
        spans = [(int(self.bounds[i]), int(self.bounds[i + 1])) for i in chosen]
        length = count + max(end - start for start, end in spans)

        def padded(name: str) -> Tensor:
            values, prefix = self._arrays[name], self._prefix.get(name)
            out = values.new_zeros(len(chosen), length, *values.shape[1:])
            for row, (start, end) in enumerate(spans):
                if prefix is not None:
                    out[row, :count] = prefix
                out[row, count : count + end - start] = values[start:end]
            return out

        return Batch(  # padding is of kind PROMPT, which weighs nothing
            padded("tokens").long(), self.weights[padded("kinds").long()], padded("states"),
            padded("features") if "features" in self._arrays else None,
        )  # fmt: skip

    def order(self, indices: Tensor, seed: int, tokens: int) -> Iterator[list[int]]:
        """Yield these chats in random order without end, in batches of about `tokens` tokens.

        A batch's chats are of similar length; padding counts.  What does not fill half a batch
        is left for another round.
        """
        generator = torch.Generator().manual_seed(seed)
        lengths = self.bounds.diff() + len(self._prefix["tokens"])
        while True:
            shuffled = indices[torch.randperm(len(indices), generator=generator)]
            batches: list[list[int]] = []
            current: list[int] = []
            for some in shuffled.split(512):
                for index in some[lengths[some].argsort()].tolist():
                    if current and (len(current) + 1) * int(lengths[index]) > tokens:
                        batches.append(current)
                        current = []
                    current.append(index)
                if len(current) * int(lengths[current[-1]]) >= tokens // 2 or not batches:
                    batches.append(current)
                current = []
            for at in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[at]


_STORED = {"states": "final"}


def _flat(values: Tensor) -> Tensor:
    """Return (n,) as it is, (n, depths, hidden) as (n, depths * hidden)."""
    return values.flatten(1) if values.ndim > 1 else values
