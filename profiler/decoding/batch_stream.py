"""One sequence of a batch, and the tokens that a batched draft pass gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from policies.core import Load
from policies.together import Member
from profiler.decoding.tokens import Fetched
from profiler.models.signals import drafted, top10_log_prob
from traces.acceptance.sampling import GREEDY


class DraftStep:
    """The tokens of one batched draft pass, copied to the host as a whole when first read."""

    def __init__(self, logits: Tensor, picks: Tensor) -> None:
        self.logits, self.picks = logits, picks  # (batch, vocab), (batch,)
        self._ids: list[int] | None = None
        self._values: list[list[float]] | None = None
        self._top10: list[float] | None = None

    @property
    def ids(self) -> list[int]:
        """Proposed token of each row."""
        if self._ids is None:
            self._ids = self.picks.tolist()
        return self._ids

    @property
    def values(self) -> list[list[float]]:
        """`profiler.models.signals.Drafted` of each row."""
        if self._values is None:
            self._values = drafted(self.logits, self.picks, GREEDY).stack().tolist()  # (batch, 7)
        return self._values

    @property
    def top10(self) -> list[float]:
        """`profiler.models.signals.top10_log_prob` of each row."""
        if self._top10 is None:
            self._top10 = top10_log_prob(self.logits).tolist()
        return self._top10


class BatchToken(Fetched):
    """A token just drafted for one row; reading a signal fetches those of the whole batch."""

    __slots__ = ("_eos", "_row", "_step")

    def __init__(self, step: DraftStep, row: int, eos: frozenset[int] | None) -> None:
        self._step, self._row, self._eos = step, row, eos

    @property
    def token_id(self) -> int:
        """Vocabulary id."""
        return self._step.ids[self._row]

    def _fetch(self) -> Sequence[float]:
        return self._step.values[self._row]

    def _fetch_top10(self) -> float:
        return self._step.top10[self._row]

    @property
    def ends(self) -> bool:
        """Return True if the draft proposed EOS (never, if EOS is not watched for)."""
        return bool(self._eos) and self.token_id in (self._eos or ())


class Stream(Member):
    """The host's knowledge of one sequence of a batch.

    Parameters
    ----------
    request:
        The number it is reported under.
    prompt:
        (prompt_tokens,) token ids.
    max_new_tokens:
        Output limit.
    eos:
        Ids that end the output.
    run_lengths:
        Known matches ahead of each output position, for the oracle policy.
    """

    def __init__(
        self,
        request: int,
        prompt: Tensor,
        max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
        run_lengths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(request)
        self.request, self.prompt, self.max_new_tokens = request, prompt, max_new_tokens
        self.eos, self.run_lengths = eos, run_lengths
        self.row = -1
        """Row of the caches now."""
        self.known = int(prompt.shape[0])
        """True tokens; once decoding, the target's cache holds all but the last."""
        self.in_draft = 0
        """Tokens that the draft model's cache holds."""
        self.output: list[int] = []

    @property
    def position(self) -> int:
        """Output tokens emitted so far."""
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens to the limit, 0 after EOS."""
        if self.output and self.output[-1] in self.eos:
            return 0
        return self.max_new_tokens - len(self.output)

    def load(self, batch: int) -> Load:
        """State of an engine that decodes `batch` sequences."""
        at, run = len(self.output), None
        if (runs := self.run_lengths) is not None:
            # An output that diverged from the known one may be longer.
            run = min(runs[at], self.max_new_tokens - at - 1) if at < len(runs) else 0
        return Load(batch, int(self.prompt.shape[0]) + at, run)

    def proposed(self, token: BatchToken) -> Any:
        """Return what the loop drafts where the draft model proposes `token`."""
        return token

    def judge(self, accepted: int) -> int:
        """How many drafted tokens are accepted, where the models agree on `accepted`."""
        return accepted

    def ends_after(self, accepted: int, tokens: Sequence[int]) -> bool:
        """Return True if `emit` with these arguments would end the sequence."""
        emitted = tokens[: accepted + 1]
        return len(emitted) >= self.remaining or not self.eos.isdisjoint(emitted)

    def emit(self, accepted: int, tokens: Sequence[int]) -> None:
        """Append the first ``accepted + 1`` of the target's `tokens`, up to an EOS."""
        for token in tokens[: accepted + 1]:
            self.output.append(token)
            if token in self.eos:
                break
