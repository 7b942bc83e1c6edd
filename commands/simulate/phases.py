"""``draftsim simulate --phase``: phases by their markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.output import note
from traces.errors import DraftsimError, missing

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from simulator.phases import Phase
    from traces.acceptance.trace import Trace

FILE = "tokenizer.json"


def load_phases(texts: Sequence[str]) -> list[Phase]:
    """Return the phases that ``NAME=BEGIN..END`` texts describe; DraftsimError for a wrong one."""
    from simulator.phases import Phase

    phases = [Phase.parse(text) for text in texts]
    names = [phase.name for phase in phases]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DraftsimError(f"--phase {twice}=... is given twice: name each phase once")
    return phases


def phases_in(
    trace: Trace, phases: Sequence[Phase], tokenizer: Path | None
) -> npt.NDArray[np.int64]:
    """Return the phase of every output position (`simulator.phases.phases_of`).

    Raises DraftsimError if none of `phases` occurs, or a marker needs a tokenizer.
    """
    from simulator.phases import phases_of

    found = phases_of(trace, phases, token_text(tokenizer, trace))
    absent = [phase.name for i, phase in enumerate(phases, 1) if not (found == i).any()]
    if len(absent) == len(phases):
        raise DraftsimError(
            f"--phase: none of {', '.join(absent)} occurs in the outputs: check the markers"
        )
    for name in absent:
        note(f"phase {name} occurs in no output")
    return found


def token_text(folder: Path | None, trace: Trace) -> Callable[[int], str] | None:
    """Return a function from a token id to its text, by the tokenizer in `folder`; None for None.

    Raises DraftsimError if there is no tokenizer, or it is of another vocabulary than the trace.
    """
    if folder is None:
        return None
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise DraftsimError(f"--tokenizer {folder}: holds no {FILE}: name the target's folder")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing(["tokenizers"], "--tokenizer") from None
    tokenizer = Tokenizer.from_file(str(path))
    known = (trace.meta.get("tokenizer") or {}).get("vocab_size") or trace.vocab_size
    size = tokenizer.get_vocab_size()
    if known is not None and size > known:
        raise DraftsimError(
            f"--tokenizer {folder}: has {size} tokens and the recording's target {known}: name "
            "the target's own"
        )
    texts: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in texts:
            texts[token] = tokenizer.decode([token], skip_special_tokens=False)
        return texts[token]

    return text
