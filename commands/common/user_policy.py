"""A user's own policy on the command line: ``FILE.py:Class`` with parameters behind it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from traces.errors import DraftsimError

if TYPE_CHECKING:
    from policies.core import DraftPolicy


def is_file(text: str) -> bool:
    """Whether `text` names a class in a file."""
    return ".py:" in text


def load_file(text: str) -> tuple[str, DraftPolicy]:
    """(name, policy) of ``FILE.py:Class[:key=value,...]``, which has passed `check_policy`.

    The file is run, as Python would run it.

    Raises
    ------
    DraftsimError
        If the file cannot be run, has no such policy, or the policy breaks the contract.
    """
    from policies.checks import PolicyError, check_policy
    from policies.core import DraftPolicy
    from policies.spec import describe_spec, parse_spec

    place, _, rest = text.partition(".py:")
    path, name = Path(f"{place}.py"), rest.partition(":")[0].strip()
    found = vars(_run(path)).get(name)
    if not (isinstance(found, type) and issubclass(found, DraftPolicy)):
        what = "has no class" if found is None else "has, but as no DraftPolicy,"
        raise DraftsimError(
            f"--policy {text}: {path} {what} {name!r}: name a subclass of policies.DraftPolicy"
        )
    try:
        given = parse_spec(rest, "policy", {name: found}).given
        policy: DraftPolicy = found(**given)
        check_policy(policy)
    except (PolicyError, ValueError, TypeError) as error:
        raise DraftsimError(f"--policy {text}: {error}") from None
    except SystemExit as error:
        raise DraftsimError(f"--policy {text}: {_exits(error)}") from None
    return describe_spec(policy, f"{path.name}:{name}"), policy


class _AsItStands(SourceFileLoader):
    """Compiles the file anew: bytecode of a text as long, a second old, passes for its own."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _run(path: Path) -> object:
    loader = _AsItStands(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    if spec is None or spec.loader is None or not path.is_file():
        raise DraftsimError(f"--policy {path}: no such file: check the path")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise DraftsimError(f"--policy {path}: {_exits(error)}") from None
    except Exception as error:  # whatever a user's file may do
        raise DraftsimError(
            f"--policy {path}: cannot be run ({type(error).__name__}: {error})"
        ) from error
    return module


def _exits(error: SystemExit) -> str:
    return f"it calls sys.exit({error.code!r}), which would end draftsim: remove that call"
