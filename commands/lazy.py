"""Commands that are imported where they are run: listing them costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from commands.common.bounds import bounded
from commands.common.configured import configured


class Listed(NamedTuple):
    """A command as it is listed."""

    place: str
    """``module:function``."""
    says: str
    """Line of the program's ``--help``, which fits a terminal."""
    group: str = "Commands"
    """Heading that the program's ``--help`` lists it under."""
    configured: bool = False
    """True if its options may come from a file, by ``--config``."""

    def function(self) -> Callable[..., None]:
        """The function itself, whose docstring and options are the command's own help."""
        module, _, name = self.place.partition(":")
        found: Callable[..., None] = getattr(import_module(module), name)
        return found


class _Loaded(Mapping[str, Any]):
    """Click's command of each name, made when it is asked for."""

    def __init__(self, listed: Mapping[str, Listed]) -> None:
        self.listed = listed
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            one = self.listed[name]
            function = configured(one.function()) if one.configured else one.function()
            alone.command(name)(bounded(function))
            self.made[name] = typer.main.get_command(alone)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


def lazy_group(listed: Mapping[str, Listed]) -> type[TyperGroup]:
    """The class of a group of the commands `listed`, for ``typer.Typer(cls=...)``."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "commands": _Loaded(listed)})

        def list_commands(self, ctx: Any) -> list[str]:
            del ctx
            return list(listed)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            del ctx
            for group in dict.fromkeys(one.group for one in listed.values()):
                rows = [(name, one.says) for name, one in listed.items() if one.group == group]
                with formatter.section(group):
                    formatter.write_dl(rows)

    return LazyGroup
