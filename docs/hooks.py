"""Hooks of MkDocs: lines like ``{{ columns trace }}`` become what `docs.made` makes of the code.

``{{ readme NAME }}`` is the part of README.md between the comments ``<!-- NAME -->`` and
``<!-- end of NAME -->``, so that what both say is written once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.made import MAKERS  # noqa: E402

LINE = re.compile(r"^\{\{ (\w+)(?: (\S+))? \}\}$", re.MULTILINE)
PICTURES = {"img/validation.png": "traces/recorded/bundled/demo-validation.png"}
"""Pictures of the pages that are kept with the recordings that they show."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures kept with recordings."""
    for name, path in PICTURES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace every generated line; an unknown one fails the build."""

    def made(found: re.Match[str]) -> str:
        name, argument = found.groups()
        try:
            return MAKERS[name](*([argument] if argument else []))
        except (KeyError, TypeError, AttributeError) as error:
            raise PluginError(f"{page.file.src_path}: {found[0]}: {error!r}") from error

    return LINE.sub(made, markdown)
