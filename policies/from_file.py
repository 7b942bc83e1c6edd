"""A policy of a user's own: the class of a file, ``FILE.py:Class[:key=value,...]``."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import ModuleType
from typing import Any, NamedTuple

from policies.batch.base import BatchPolicy, Policy
from policies.checks import PolicyError, check_policy
from policies.core import DraftPolicy, Load, Round
from policies.registry import FILE_MARK, capped, describe
from policies.spec import parse_spec
from policies.wrapper import Wrapper, unwrapped

_HELPERS = "_draftsim_helpers"
"""Name in a file's module for the files of the modules next to it that it imports."""
_LOADED: dict[str, set[str]] = {}
"""Files that were run, with their helpers, as tracebacks name them; the policies of each."""


_SENT = "<dynamic-code>"
"""The file's name in tracebacks of a worker process (cloudpickle)."""


class LoadedPolicy(NamedTuple):
    """A policy from a file."""

    name: str
    """``FILE.py:Class`` without the folder, and the parameters that differ from their defaults."""
    policy: Policy
    cut: int | None = None
    """Draft length that it is cut at, because it sets none of its own; None: it is not cut."""


def is_file(text: str) -> bool:
    """Return True if `text` names a class in a file."""
    return ".py:" in text


def split_name(text: str) -> tuple[str, str]:
    """Return what `text` names, a policy or a class in a file, and its parameters.

    >>> split_name("my/file.py:Mine:gamma=3"), split_name("svip")
    (('my/file.py:Mine', 'gamma=3'), ('svip', ''))
    """
    place, mark, rest = text.partition(".py:")
    if not mark:
        place, rest = "", text
    name, _, given = rest.partition(":")
    return place + mark + name, given


def load_file(text: str, max_gamma: int | None = None) -> LoadedPolicy:
    """Return the policy that `text` names, which has passed `check_policy`.

    The file is run, as Python would run it: it may import, at its top, modules next to it.  What
    it prints with `print` goes to standard error, as results may be on standard output.  Longest
    drafts that `text` leaves at a larger default are lowered to `max_gamma`; a policy that sets
    none (`DraftPolicy.longest_draft`) is cut there.

    Raises ValueError if the file cannot be run, has no such policy, or that breaks the contract.
    """
    place, _, rest = text.partition(".py:")
    path, name = Path(f"{place}.py"), rest.partition(":")[0].strip()
    module, digest = _run(text, path)
    found = vars(module).get(name)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        what = "has no class" if found is None else "has, but as no DraftPolicy or BatchPolicy,"
        raise ValueError(f"{text}: {path} {what} {name!r}: name a subclass of policies.DraftPolicy")
    if _is_elsewhere(found, module):
        # The mark would stay on a class that others use, too.
        raise ValueError(f"{text}: {path} imports {name!r}: name a class that the file defines")
    setattr(found, FILE_MARK, (f"{path.name}:{name}", digest))
    for file in (str(path), *vars(module)[_HELPERS]):
        _LOADED.setdefault(file, set()).add(f"{path.name}:{name}")
    try:
        return bounded(found, name, rest, max_gamma)
    except PolicyError as error:
        where = "" if error.__cause__ is None else _where(error.__cause__)
        raise ValueError(f"{text} breaks the contract of policies: {error}{where}") from None
    except SystemExit as error:
        raise ValueError(f"{text}: {_exits(error)}") from None
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    except Exception as error:  # whatever a user's constructor may do
        raise ValueError(f"{text}: {type(error).__name__}: {error}{_where(error)}") from None


def bounded(
    found: type[DraftPolicy] | type[BatchPolicy], name: str, text: str, max_gamma: int | None
) -> LoadedPolicy:
    """Return the policy of a user's class, with the parameters that ``name:...`` in `text` gives.

    ``max_gamma``: as in `load_file`.  Raises ValueError, or what the constructor raises.
    """
    _, _, given = parse_spec(text, "policy", {name: found})
    policy: Policy = found(**given)
    check_policy(policy)
    if max_gamma is not None:
        policy = capped(policy, max_gamma, explicit=given)
    shown = describe(policy)
    if max_gamma is None or policy.longest_draft() is not None:
        return LoadedPolicy(shown, policy)
    if isinstance(policy, BatchPolicy):
        return LoadedPolicy(shown, policy, max_gamma)
    return LoadedPolicy(shown, Cut(policy, max_gamma), max_gamma)


def said_cut(name: str, longest: int, whose: str, own: int | None = None) -> str:
    """Return the note that a policy is cut at the `longest` draft of `whose`.

    ``own`` is the policy's longest draft; None if it sets none.
    """
    if own is not None:
        return f"{name} drafts up to {own} tokens: it is cut at length {longest}, {whose} longest"
    return (
        f"{name} sets no longest draft: it is cut at length {longest}, {whose} longest "
        "(set an attribute gamma_max, or define longest_draft())"
    )


def file_of(policy: Any) -> tuple[str, str] | None:
    """Return name and digest of the file that a policy's class is from; None if built in."""
    mark: tuple[str, str] | None = vars(type(unwrapped(policy))).get(FILE_MARK)
    return mark


def digestible(policy: Any) -> Any:
    """Return what a digest takes of `policy`, as a class from a file can be pickled by no name."""
    if (mark := vars(type(policy)).get(FILE_MARK)) is not None:
        return (*mark, vars(policy))
    if isinstance(policy, Mapping):
        return {name: digestible(value) for name, value in policy.items()}
    inner = getattr(policy, "policy", None)
    if inner is not None and file_of(inner) is not None:
        return type(policy).__name__, {**vars(policy), "policy": digestible(inner)}
    return policy


def said_raised(error: BaseException) -> str | None:
    """Return in words what code of a user's own raised; None if `error` was not raised there."""
    if (place := _place(error)) is None:
        return None
    owners = [vars(type(frame.f_locals.get("self"))) for frame, _ in walk_tb(error.__traceback__)]
    named = [own[FILE_MARK][0] for own in owners if FILE_MARK in own]
    policies = named[-1:] or sorted(_LOADED.get(place[0]) or set().union(*_LOADED.values()))
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"the policy {' or '.join(policies)} raised {said}{_where(error)}"


def _where(error: BaseException) -> str:
    """Return the place of `_place` in brackets; empty if there is none."""
    place = _place(error)
    return "" if place is None else f" ({place[0]}, line {place[1]})"


def _place(error: BaseException) -> tuple[str, int] | None:
    """Return the innermost line of a user's files that `error` passed; None if it passed none.

    An error of a worker process brings only the text of its traceback, which names no file: classes
    were sent there by value.
    """
    places = [(at.filename, at.lineno or 0) for at in extract_tb(error.__traceback__)]
    if _LOADED and type(error.__cause__).__name__ == "_RemoteTraceback":
        found = re.findall(r'File "(.+)", line (\d+)', str(error.__cause__))
        sent = " or ".join(_LOADED)
        places = [(sent if file == _SENT else file, int(line)) for file, line in found]
        return next((place for place in reversed(places) if place[0] in (*_LOADED, sent)), None)
    return next((place for place in reversed(places) if place[0] in _LOADED), None)


class Cut(Wrapper, DraftPolicy):
    """A policy whose drafts end at `longest` tokens, whatever it would go on with."""

    policy: DraftPolicy

    def __init__(self, policy: DraftPolicy, longest: int) -> None:
        self.policy, self.longest = policy, longest
        vars(self)["reads"] = policy.reads
        self.learns_across_requests = policy.learns_across_requests
        self.reads_load = policy.decides_by_load()

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.longest and self.policy.keep_drafting(draft)

    def submit(self, draft: Sequence[Any]) -> int:
        return self.policy.submit(draft)

    def begin_run(self, vocab_size: int | None) -> None:
        self.policy.begin_run(vocab_size)

    def begin_round(self, load: Load) -> None:
        self.policy.begin_round(load)

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self.policy.observe(outcome, draft)

    def for_run(self) -> Cut:
        return Cut(self.policy.for_run(), self.longest)

    def fresh(self) -> Cut:
        mine = self.policy.fresh()
        return self if mine is self.policy else Cut(mine, self.longest)

    def copy(self) -> Cut:
        return Cut(self.policy.copy(), self.longest)


def _run(text: str, path: Path) -> tuple[ModuleType, str]:
    """Return the module that `path` makes, and a digest of its source and of its helpers'."""
    if not path.is_file():
        raise ValueError(f"{text}: {path} is no such file: check the path")
    module = ModuleType(path.stem)
    # A dataclass looks up its module by this name, which must be no other module's.
    module.__name__ = f"{path.stem} {id(module)}"
    module.__file__ = str(path.absolute())
    vars(module)["print"] = _print
    sources, helpers = [path.read_bytes()], list[str]()
    vars(module)[_HELPERS] = helpers
    try:
        with redirect_stdout(sys.stderr), _helpers(path.absolute().parent, sources, helpers):
            sys.modules[module.__name__] = module
            # Not imported: Python's cache compares only size and time in seconds, so that a quick
            # edit of equal length would run the old code.
            exec(compile(sources[0], path, "exec", dont_inherit=True), vars(module))
    except SystemExit as error:
        raise ValueError(f"{text}: {_exits(error)}") from None
    except Exception as error:  # whatever a user's file may do
        lines = [at.lineno for at in extract_tb(error.__traceback__) if at.filename == str(path)]
        where = f", line {lines[-1]}," if lines else ""
        raise ValueError(
            f"{text}: {path}{where} cannot be run ({type(error).__name__}: {error})"
        ) from error
    finally:
        # Other processes could not import it: classes are sent to them by value.
        sys.modules.pop(module.__name__, None)
    return module, hashlib.sha256(b"".join(sources)).hexdigest()


@contextmanager
def _helpers(folder: Path, sources: list[bytes], files: list[str]) -> Iterator[None]:
    """Let the modules of `folder` be imported; forget them at the end, and add their `sources`.

    Their `files` are added, too.

    Another folder may have modules of these names, and they may be edited before the next run.
    """
    known, written = {*sys.modules}, sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        with suppress(ValueError):
            sys.path.remove(str(folder))
        new = sorted(sys.modules.keys() - known)
        near = {name for name in new if "." not in name and _is_in(folder, sys.modules[name])}
        for name in new:
            if name.partition(".")[0] in near:
                helper = sys.modules.pop(name)
                vars(helper).setdefault("print", _print)
                file = getattr(helper, "__file__", None)
                sources += [Path(file).read_bytes()] if file else []
                files += [file] if file else []


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Return True if `module` lies in `folder` itself, and is not draftsim's own."""
    file = getattr(module, "__file__", None) or ""
    place = next(iter(getattr(module, "__path__", ())), file)
    ours = getattr(module, "__distribution__", None) == "draftsim"
    return Path(place).parent == folder and not ours


def _is_elsewhere(found: type, module: ModuleType) -> bool:
    """Return True if a class in `module` is another module's.

    A class that `module` made by a call of `type` names the module of its metaclass, which has no
    such class.
    """
    if found.__module__ == module.__name__:
        return False
    named = sys.modules.get(found.__module__)  # None: a helper, which is forgotten
    return named is None or getattr(named, found.__name__, None) is found


def _print(*values: object, **how: Any) -> None:
    """Print to standard error by default, as results may be on standard output."""
    print(*values, **{"file": sys.stderr, **how})


def _exits(error: SystemExit) -> str:
    return f"it calls sys.exit({error.code!r}), which would end draftsim: remove that call"
