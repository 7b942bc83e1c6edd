"""Reading Spec-Bench result files (hemingkx/Spec-Bench, ``model_answer/*.jsonl``).

A file holds one row a question: per turn ``decoding_steps``, ``new_tokens`` and
``wall_time``, and ``accept_lengths`` flat over the turns, each value accepted + 1.  In the
files of draft models and of plain decoding the values of a turn sum to its ``new_tokens``
exactly: the first round includes the prompt, so decoding begins at output position 0.
The file does not hold the draft lengths.
Source of the format: hemingkx/Spec-Bench, ``evaluation/eval.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from traces.acceptance.trace import MOST_DRAFTED, MOST_TOKENS, Request, Trace
from traces.errors import FileError
from traces.importers.base import Importer, Options
from traces.importers.rows import (
    NO_NAME,
    LoggedTurn,
    baseline_of,
    check_once,
    only_file,
    read_json_rows,
    trace_of,
    turns_of,
)
from traces.importers.schedules import infer, is_known, reading
from traces.store.text import MOST_COUNT, label, wholes


class SpecBench(Importer):
    """Spec-Bench's ``model_answer/*.jsonl`` of a method that drafts a chain. A turn is a request.

    Options
    -------
    baseline:
        The file of plain decoding of the same questions.  Gives each request its
        ``wall_s`` (the turn's seconds per token times this file's tokens, as the two
        outputs can differ in length) and ``meta["baseline"]`` (`baseline_of`).
    draft_lengths:
        ``infer`` takes the known schedule that fits the log, and ``none`` if
        none or several fit; ``meta["draft_lengths_found"]`` says which.  Turns are separate
        calls: a schedule starts again in each unless its policy learns across requests.

        A log that accepted more than was drafted contradicts a schedule.  With ``none`` and
        ``at-least`` the ends of longer runs are hidden, so survival estimates and imputation
        by hazard are refused (`traces.acceptance.survival.impute` offers ``rejected``).
    max_new_tokens:
        Limit of a turn; a shorter one ended with EOS.

    Notes
    -----
    Where a turn ended with EOS and a draft of known length reached it, the log does not
    tell a drafted EOS from a rejected draft; the position is taken as a mismatch, which
    emits the same tokens.  Turns that failed (``ERROR``, or no tokens) are left out and
    named in ``meta["left_out"]``.
    """

    name = "specbench"
    summary = "Spec-Bench result file of a method that drafts a chain"
    takes = ("baseline", "draft_lengths", "max_new_tokens")

    def sniff(self, text: str) -> bool:
        return '"accept_lengths"' in text and '"decoding_steps"' in text

    def read(self, files: Sequence[Path], options: Options) -> Trace:
        file, lengths = only_file(self.name, files), options.draft_lengths
        read = None if lengths == "infer" else reading(lengths)
        logged, models, left_out = read_turns(file)
        _check_chain(file, models)
        if not any(max(t.accepted) for t in logged) and lengths in ("infer", "none"):
            raise FileError(
                f"{file}: is a log without speculation, no round of it accepted a draft: name the "
                "speculative method's file, and this one as --baseline"
            )
        first = _first(logged)
        turns = [t._replace(limit=max(options.max_new_tokens, t.tokens)) for t in logged]
        found: dict[str, Any] = {}
        if read is None:
            fit = infer(turns, first, options.progress)
            lengths, read = fit.text, reading(fit.text)
            found = {"draft_lengths_found": fit.said(), "draft_lengths_fit": list(fit.fits)}
        token_s: dict[tuple[str, int], float] = {}
        if (baseline := options.baseline) is not None:
            plain, _, _ = read_turns(baseline)
            found["baseline"] = baseline_of(baseline, plain, turns)
            token_s = {(t.question, t.turn): t.wall_s / t.tokens for t in plain}
        requests = []
        for turn in turns:
            ended: Literal["eos", "length"] = "length" if turn.tokens == turn.limit else "eos"
            each = token_s.get((turn.question, turn.turn))
            requests.append(
                Request(
                    f"{turn.question}/{turn.turn}", turn.category, 0, turn.tokens, turn.limit,
                    ended, wall_s=None if each is None else each * turn.tokens,
                )
            )  # fmt: skip
        rounds = sum(t.rounds for t in turns)
        measured = {
            "tokens": sum(t.tokens for t in turns), "rounds": rounds,
            "wall_s": sum(t.wall_s for t in turns),
            "per_round": sum(t.emitted for t in turns) / rounds,
            "request_wall_s": [t.wall_s for t in turns],
        }  # fmt: skip
        meta = self.meta(
            files, first=first, draft_lengths=lengths, draft_lengths_known=is_known(lengths),
            prompt_lengths_known=False, left_out=left_out, sampling={"temperature": 0.0},
            measured=measured, **found,
        )  # fmt: skip
        return trace_of(requests, [read(turn, first) for turn in turns], meta)


TREES = (
    "medusa", "eagle", "hydra", "recycling", "rest", "samd", "sam-decoding", "lookahead", "lade",
    "clover", "amphista", "opt-tree", "sequoia", "glide", "ouroboros",
)  # fmt: skip
"""Methods of Spec-Bench that verify several branches at once, as their files' model_id names."""


def _check_chain(file: Path, models: Iterable[str]) -> None:
    """Raise FileError if the log is of a method that drafts trees."""
    for model in models:
        parts = set(re.split(r"[^a-z0-9]+", model.lower()))
        for tree in TREES:
            if tree in parts or any(p.startswith(tree) and p[len(tree) :].isdigit() for p in parts):
                raise FileError(
                    f"{file}: model_id {model!r} names {tree}, which verifies several branches in "
                    "a round: what a chain of drafts would have had accepted is not in its log; "
                    "import one of a method that drafts a chain"
                )


def _first(turns: list[LoggedTurn]) -> int:
    """Return where decoding began: 0 if the rounds of every turn emit all its tokens, else 1."""
    missing = {turn.tokens - turn.emitted for turn in turns}
    if max(missing) <= 0:
        bad = [t for t in turns if t.emitted - t.tokens > t.accepted[-1]]
        if not bad:
            return 0
    elif missing == {1}:
        return 1
    else:
        bad = [t for t in turns if t.tokens > t.emitted]
    turn = bad[0]
    raise FileError(
        f"{turn.where}: accept_lengths sum to {turn.emitted} for new_tokens={turn.tokens}: "
        "a round is missing or one too many; use an unedited result file"
    )


def read_turns(file: Path) -> tuple[list[LoggedTurn], Iterable[str], list[str]]:
    """Return the turns of a file, every ``model_id``, and which turns failed, and why.

    Raises FileError if it is damaged or contradicts itself, naming row, question and turn.
    """
    turns: list[LoggedTurn] = []
    models: dict[str, None] = {}
    left_out: list[str] = []
    for where, row in read_json_rows(file):
        question = label(where, "question_id", row.get("question_id"), NO_NAME)
        at = f"{where}, question {question}"
        choice, steps, tokens, walls = turns_of(
            at, row, {"decoding_steps": MOST_COUNT, "new_tokens": MOST_TOKENS}
        )
        models[label(at, "model_id", row.get("model_id"))] = None
        category = label(at, "category", row.get("category"))
        name, texts = "accept_lengths", choice.get("turns")
        lengths = wholes(at, name, choice.get(name), 1, MOST_DRAFTED + 1)
        if sum(steps) != len(lengths):
            raise FileError(
                f"{at}: accept_lengths has {len(lengths)} rounds, decoding_steps says "
                f"{sum(steps)}: use an unedited result file"
            )
        begin = 0
        for i, count in enumerate(steps):
            name = f"{at}, turn {i + 1}"
            mine = lengths[begin : begin + count]
            begin += count
            # Where generation failed, Spec-Bench writes this instead of the text, with the numbers
            # of the turn before.
            failed = isinstance(texts, list) and i < len(texts) and texts[i] == "ERROR"
            if failed or not (count and tokens[i]):
                left_out.append(f"{name}: {'failed' if failed else 'no tokens'}")
                continue
            accepted = [value - 1 for value in mine]
            turns.append(
                LoggedTurn(name, question, i + 1, category, count, tokens[i], walls[i], accepted)
            )
    check_once(file, turns)
    if not turns:
        raise FileError(f"{file}: every turn of it failed: decode the questions again")
    return turns, models, left_out
