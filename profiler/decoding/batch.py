"""Speculative decoding of several sequences at once with two real models, greedily.

Each sequence keeps as many tokens as it had accepted: a token's cache slot is its
position, so acceptance may be ragged and nothing is ever compacted within a sequence.
A pass is a rectangle: all sequences, as wide as the widest; shorter ones are padded, and no
sequence sees padding.

The decisions are those of `policies.together`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.core import Round
from policies.together import Member, Together
from profiler.decoding.single import DraftStep, Emitting, ModelToken, check_prompt
from profiler.models.runner import Runner
from profiler.models.sampling import count_matches, refuse_nan
from traces.errors import DraftsimError


class Stream(Emitting, Member):
    """The host's knowledge of one sequence of a batch.

    Parameters
    ----------
    request: The number it is reported under.
    prompt: (prompt_tokens,) token ids.
    max_new_tokens: Output limit.
    eos: Ids that end the output.
    run_lengths: Known matches ahead of each output position, for the oracle policy.
    """

    def __init__(
        self,
        request: int,
        prompt: Tensor,
        max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
        run_lengths: Sequence[int] | None = None,
    ) -> None:
        self.known = int(prompt.shape[0])
        """True tokens; once decoding, the target's cache holds all but the last."""
        Member.__init__(self, request)
        Emitting.__init__(self, self.known, max_new_tokens, eos, run_lengths)
        self.request, self.prompt = request, prompt
        self.row = -1
        """Row of the caches now."""
        self.in_draft = 0
        """Tokens that the draft model's cache holds."""

    def proposed(self, token: ModelToken) -> Any:
        """Return what the loop drafts where the draft model proposes `token`."""
        return token

    def judge(self, accepted: int) -> int:
        """Return how many drafted tokens are accepted, where the models agree on `accepted`."""
        return accepted

    def ends_after(self, accepted: int, tokens: Sequence[int]) -> bool:
        """Return True if `emit` with these arguments would end the sequence."""
        emitted = tokens[: accepted + 1]
        return len(emitted) >= self.remaining or not self.eos.isdisjoint(emitted)

    def emit(self, accepted: int, tokens: Sequence[int]) -> None:
        """Append the first ``accepted + 1`` of the target's `tokens`, up to an EOS."""
        self.extend(tokens[: accepted + 1])


class BatchVerdict(NamedTuple):
    """The result of a verification for one sequence."""

    accepted: int
    tokens: Sequence[int]
    """The target's own token after each drafted one, and before the first."""
    ends: bool
    """True if emitting what was accepted ends the sequence."""


class BatchedDecoder:
    """Two models, their caches, and the sequences now decoded with them.

    Sequences occupy the first rows of the caches; when one leaves, the last row moves
    into its place.  ``streams`` lists them in the order they were admitted.  A lone
    sequence takes the same passes as `ModelDecoder`.

    ``target``, ``draft``: runners over a shared vocabulary; they hold as many sequences as either
    has room for.  ``watch_eos``: stop drafting at a drafted EOS, which makes the host wait for
    every draft step.
    """

    def __init__(self, target: Runner, draft: Runner, *, watch_eos: bool = True) -> None:
        self.target, self.draft_model, self.watch_eos = target, draft, watch_eos
        self.size = min(target.cache.batch, draft.cache.batch)
        self.streams: list[Stream] = []
        # True tokens and the drafted ones after them; the last column is for padding.
        self._scratch = min(target.cache.slots, draft.cache.slots)
        shape = (self.size, self._scratch + 1)
        self._tokens = torch.zeros(shape, dtype=torch.long, device=target.device)
        self._rows = torch.arange(self.size, device=target.device)
        self._columns = torch.arange(self._scratch, device=target.device)
        # The last pass's spans and the target's picks, on the device.
        self._spans = self._picks = self._tokens

    @torch.inference_mode()
    def admit(self, newcomers: Sequence[Stream]) -> None:
        """Prefill both models for `newcomers` together and emit each one's first token.

        Raises DraftsimError if there is no room, a prompt is empty or does not fit, or a model
        gives NaN.
        """
        first, count = len(self.streams), len(newcomers)
        if first + count > self.size:
            raise DraftsimError(
                f"{first + count} sequences do not fit a batch of {self.size}: decode fewer at once"
            )
        for row, stream in enumerate(newcomers, first):
            check_prompt(stream.known, stream.limit, self.target, self.draft_model)
            stream.row = row
            self._tokens[row, : stream.known] = stream.prompt
        spans = [(0, s.known) for s in newcomers]
        for model, name in ((self.draft_model, "draft"), (self.target, "target")):
            _, logits = self._pass(model, spans, keep=1, first=first)
            best, picks = logits[:, 0].max(-1)  # (count,)
            refuse_nan(bool(best.isnan().any()), name, "while decoding a batch")
        for stream, pick in zip(newcomers, picks.tolist(), strict=True):
            self._tokens[stream.row, stream.known] = pick
            stream.in_draft = stream.known
            stream.known += 1
            stream.emit(0, [pick])
        self.streams += newcomers

    @torch.inference_mode()
    def draft(self, active: Sequence[Stream]) -> list[Any]:
        """Run one draft pass: return a token more for each of `active`.

        The whole batch runs.  A sequence's first pass of a round also feeds what its draft
        model has not seen yet (catch-up).
        """
        spans = [(0, 0)] * len(self.streams)
        for s in active:
            spans[s.row] = (s.in_draft, s.known + len(s.draft))
        _, logits = self._pass(self.draft_model, spans, keep=1)  # (batch, 1, vocab)
        step = DraftStep(logits[:, 0], logits[:, 0].argmax(-1))
        if len(spans) == 1:
            self._tokens[0, spans[0][1]] = step.picks[0]
        else:
            stops = self._spans[:, 1]  # of this pass; 0 where nothing was fed
            slots = torch.where(stops > 0, stops, self._scratch)
            self._tokens[self._rows[: len(slots)], slots] = step.picks
        tokens = []
        for s in active:
            s.in_draft = s.known + len(s.draft)
            tokens.append(s.proposed(ModelToken(step, s.row, s.eos if self.watch_eos else ())))
        return tokens

    @torch.inference_mode()
    def verify(self) -> list[BatchVerdict]:
        """Run one target pass over every sequence's draft; a verdict each, in `streams` order."""
        spans = [(0, 0)] * len(self.streams)
        for s in self.streams:
            spans[s.row] = (s.known - 1, s.known + len(s.draft))
        fed, logits = self._pass(self.target, spans)  # (batch, width), (batch, width, vocab)
        best, self._picks = logits.max(-1)  # (batch, width)
        # One transfer per iteration: what was drafted, the target's own tokens, and sanity.
        table = torch.stack([fed, self._picks, best.isnan().long()], dim=1).tolist()
        verdicts = []
        for s in self.streams:
            drafted, tokens, bad = (row[: len(s.draft) + 1] for row in table[s.row])
            refuse_nan(any(bad), "target", "while decoding a batch")
            accepted = s.judge(count_matches(drafted[1:], tokens))
            verdicts.append(BatchVerdict(accepted, tokens, s.ends_after(accepted, tokens)))
        return verdicts

    @torch.inference_mode()
    def commit(self, verdicts: Sequence[BatchVerdict], kept: Sequence[int]) -> list[Round]:
        """Emit `kept` drafted tokens of each sequence, at most as many as were accepted, and
        the target's next one.

        The rest leaves both caches by being forgotten: its slots are rewritten.
        """
        slots, columns = [0] * len(self.streams), [0] * len(self.streams)
        rounds = []
        for s, verdict, accepted in zip(self.streams, verdicts, kept, strict=True):
            slots[s.row], columns[s.row] = s.known + accepted, accepted
            position = s.position
            s.emit(accepted, verdict.tokens)
            emitted = s.position - position
            rounds.append(s.settled(position, accepted, emitted))
            s.in_draft = min(s.in_draft, s.known + accepted)
            s.known += accepted + 1
        if len(slots) == 1:
            self._tokens[0, slots[0]] = self._picks[0, columns[0]]
            return rounds
        places = _on_device([slots, columns], self._picks.device)  # (2, batch)
        own = self._picks.gather(1, places[1][:, None])[:, 0]
        self._tokens[self._rows[: len(own)], places[0]] = own
        return rounds

    @torch.inference_mode()
    def retire(self) -> None:
        """Remove sequences that have ended; the last rows take the places they free."""
        staying = [s for s in self.streams if s.remaining > 0]
        rows = set(range(len(staying)))
        free = sorted(rows - {s.row for s in staying})
        for s in staying:
            if s.row not in rows:
                row = free.pop()
                self.target.cache.copy_row(s.row, row)
                self.draft_model.cache.copy_row(s.row, row)
                self._tokens[row] = self._tokens[s.row]
                s.row = row
        self.streams = staying

    def _pass(
        self, model: Runner, spans: Sequence[tuple[int, int]], *, keep: int = 0, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Feed the known tokens at `spans`; return them (rows, width) and the logits.

        A span has a cache row's positions (start, stop); (0, 0) feeds none.  With ``keep=1`` every
        row's last token is in the last column, else its first in the first.
        """
        width = max(stop - start for start, stop in spans)
        if len(spans) == 1 and first == 0:
            fed = self._tokens[:1, spans[0][0] : spans[0][1]]
            return fed, model.forward(fed[0], spans[0][0], keep=keep)[None]
        self._spans = _on_device(spans, self._tokens.device)  # (rows, 2)
        positions = span_positions(self._spans, self._columns[:width], right=bool(keep))
        fed = self._tokens[first : first + len(spans)].gather(1, positions.clamp(min=0))
        visible = max(stop for _, stop in spans)
        return fed, model.forward_batch(fed, positions, visible, first=first, keep=keep)


def span_positions(spans: Tensor, columns: Tensor, right: bool) -> Tensor:
    """Return positions (rows, width) of tokens that `spans` (rows, 2) feed, -1 where there is none.

    `columns` counts 0 to width - 1; a row's tokens are at the right end or the left.
    """
    starts, stops = spans[:, :1], spans[:, 1:]
    positions = columns + (stops - len(columns) if right else starts)
    fed = positions >= starts if right else positions < stops
    return torch.where(fed, positions, -1)


def _on_device(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return `values` as a tensor, for which neither host nor device waits."""
    host = torch.tensor(values)
    if device.type != "cuda":
        return host.to(device)
    # From pageable memory the host would wait until the device has worked off its queue.
    return host.pin_memory().to(device, non_blocking=True)


def speculate_batch(
    decoder: BatchedDecoder, together: Together, waiting: Iterable[Stream] = ()
) -> Iterator[list[tuple[Stream, Round]]]:
    """Decode until every sequence has ended; yields each iteration's rounds.

    Sequences of `waiting` are admitted as there is room, first come first served.
    """
    queue = deque(waiting)
    while decoder.streams or queue:
        if queue and len(decoder.streams) < decoder.size:
            room = min(len(queue), decoder.size - len(decoder.streams))
            enter(decoder, together, [queue.popleft() for _ in range(room)])
            continue
        streams = decoder.streams
        together.draft(streams, lambda s: s.load_in(len(decoder.streams)), decoder.draft)
        verdicts = decoder.verify()
        kept = together.keep([v.accepted for v in verdicts], [v.ends for v in verdicts])
        rounds = decoder.commit(verdicts, kept)
        together.observe(streams, rounds)
        yield list(zip(streams, rounds, strict=True))
        _retire(decoder, together)


def enter(decoder: BatchedDecoder, together: Together, newcomers: Sequence[Stream]) -> None:
    """Admit `newcomers`; one whose first token is its last leaves at once."""
    decoder.admit(newcomers)
    for stream in newcomers:
        together.join(stream)
    _retire(decoder, together)


def _retire(decoder: BatchedDecoder, together: Together) -> None:
    for stream in decoder.streams:
        if stream.remaining <= 0:
            together.leave(stream)
    decoder.retire()
