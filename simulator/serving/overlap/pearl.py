"""PEARL: the target verifies while the drafter drafts, in steps of the slower of the two."""

from __future__ import annotations

from typing import Any

from policies.core import Round
from simulator.serving.overlap.base import Overlapped
from simulator.serving.sequence import Slot
from simulator.serving.source import Events


class Pearl(Overlapped):
    """PEARL (Liu et al. 2024; smart-lty/ParallelSpeculativeDecoding).

    Every step drafts a block while the target verifies.  *Pre-verify*: it checks the
    first token of that very block.  *Post-verify*: it checks what is left of the previous
    block and the first token of this one.  A rejection emits the correction and wastes
    the block being drafted.  There is no bonus token.  A block of a policy that reads
    signals holds at most half the recorded tail (`Limits.lookahead` says otherwise).
    """

    def decode(self, slot: Slot) -> Events:
        """Steps of max(draft, verify) until the request's last token."""
        decoder = slot.decoder
        pending: list[Any] = []
        while not decoder.ended:
            left = decoder.limit_left
            # Nothing follows a drafted end of the output, right or wrong.
            ended = bool(pending) and pending[-1].ends
            # A recording holds no draft of the limit's last token after a mismatch.
            room = left - len(pending) - (not self._blank)
            block = self.block(
                slot, len(pending), 0 if ended else max(min(self.lookahead, room), 0)
            )
            checked = [*pending, *block[:1]]
            draft_s = self.passes_s(slot.context + len(pending), len(block))
            # A pass's logits judge the token after each it reads: as many tokens as checked.
            target_s = self.verify_s(len(checked), slot.context)
            run = decoder.judge([None] * len(checked))
            drafter = self.env.process(self._busy(1, draft_s, target_s, drafted=len(block)))
            verified = {"drafted": len(checked), "accepted": run}
            target = self.env.process(self._busy(0, target_s, draft_s, **verified))
            yield drafter & target
            position = decoder.position
            rejected = run < len(checked) or not checked
            decoder.commit(run if rejected else run - 1)
            emitted = decoder.position - position
            kept = [] if rejected or decoder.ended else block[1:]
            wasted = len(pending) + len(block) - run - len(kept)
            pending = kept
            outcome = Round(position, len(checked), run, emitted, len(block), 1)
            self.emit(slot, outcome, checked, wasted)

    def _busy(self, track: int, own_s: float, other_s: float, **args: int) -> Events:
        start = self.env.now
        yield self.env.timeout(self.devices.together(own_s, other_s)[0])
        if self.timeline is not None and own_s:
            name, label = (("target model", "verify"), ("draft model", "draft"))[track]
            self.timeline.device(track, name, start, self.env.now - start, label, **args)
