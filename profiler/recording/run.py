"""What a run folder says about itself, so that its pair can be loaded again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.fetched import places
from profiler.smollm2 import places as smollm2
from traces.errors import DraftsimError
from traces.store.identity import RUN_ID, check_folder
from traces.store.parquet import write_atomically

if TYPE_CHECKING:
    from profiler.models.loading import Pair

BUNDLED = Path(__file__).parents[1] / "bundled"
NAME = "run.json"
TRUST = "trust_remote_code"


@dataclass(frozen=True)
class RunInfo:
    """The pair of a run and how it was loaded."""

    target: str
    draft: str
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    run_id: str | None = field(default=None, compare=False)
    """What tells this run from another of the same pair (see `traces.store.identity`)."""
    trust_remote_code: bool = field(default=False, compare=False)
    """Whether code that a model brings may run: said on the command line, never by the folder."""

    def load(self) -> Pair:
        """The pair, as the run had it; DraftsimError if it cannot be loaded."""
        # Only now: what a run says of itself is also read where no model is to be loaded.
        from profiler.models.loading import load_pair

        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        paths = (model_path(self.target, "target"), model_path(self.draft, "draft"))
        pair = load_pair(
            *paths, device=self.device, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )
        if self.run_id is None:
            return pair
        return replace(pair, meta={**pair.meta, RUN_ID: self.run_id})


def model_path(name: str, role: str) -> str:
    """The folder or hub id of a model's name, in the role of target or draft.

    ``bundled`` is the pair that comes with the project; what `draftsim fetch` brings has names
    too (see `profiler.fetched.places`).
    """
    if name == "bundled":
        return str(BUNDLED / role)
    name = places.name_in_role(name, role)
    return str(places.fetched(name)) if name in places.NAMES else name


def shipped_heads(name: str) -> Path | None:
    """The folder of trained heads that the project has for a target, by its name or folder."""
    folder = Path(model_path(name, "target")).resolve()
    for target, heads in (
        (BUNDLED / "target", BUNDLED / "exit_heads"),
        (places.folder(smollm2.NAME), smollm2.STORED / smollm2.HEADS),
    ):
        if folder == target.resolve() and heads.is_dir():
            return heads
    return None


def write_run(info: RunInfo, folder: Path) -> None:
    """Keep `info` in the run folder."""
    fields = asdict(info)
    del fields[TRUST]
    write_atomically(folder / NAME, json.dumps(fields, indent=2).encode())


def read_run(folder: Path, trust_remote_code: bool = False) -> RunInfo:
    """What the run folder holds.

    Raises DraftsimError if it is no run folder, or its files are of several runs.
    """
    try:
        fields = json.loads((folder / NAME).read_text())
        if TRUST in fields:
            raise TypeError(f"it may not say {TRUST}")
        info = RunInfo(**fields, trust_remote_code=trust_remote_code)
    except OSError:
        raise DraftsimError(
            f"{folder} is not a run folder (it has no {NAME}): "
            "make one with `draftsim profile --out`"
        ) from None
    except (json.JSONDecodeError, TypeError) as error:
        raise DraftsimError(
            f"{folder / NAME} is damaged ({error}): profile the pair again"
        ) from None
    check_folder(folder)
    return info
