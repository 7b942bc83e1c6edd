"""Commands that are imported where they are run: listing them costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from commands.common.bounds import bounded
from commands.common.configured import configured, expanded


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
        """Return the function itself, whose docstring and options are the command's own help."""
        module, _, name = self.place.partition(":")
        found: Callable[..., None] = getattr(import_module(module), name)
        return expanded(found)


class Sectioned(TyperCommand):
    """A command whose help shows its own options, then groups of shared ones by heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                own = "Arguments" if param.param_type_name == "argument" else "Options"
                heading = getattr(param, "rich_help_panel", None) or own
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class _Loaded(Mapping[str, Any]):
    """Click's command of each name, made when it is asked for.

    ``names`` are other names of options, each with what commands call it.
    """

    def __init__(self, listed: Mapping[str, Listed], names: Mapping[str, Sequence[str]]) -> None:
        self.listed, self.names = listed, names
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            one = self.listed[name]
            function = configured(one.function()) if one.configured else one.function()
            alone.command(name, cls=Sectioned)(bounded(function))
            made = self.made[name] = typer.main.get_command(alone)
            own = {option.lstrip("-") for param in made.params for option in param.opts}

            def called(option: str) -> str:
                others = self.names.get(option, (option,))
                return next((other for other in others if other in own), others[0])

            made.context_settings["token_normalize_func"] = called
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


def lazy_group(
    listed: Mapping[str, Listed], names: Mapping[str, Sequence[str]]
) -> type[TyperGroup]:
    """Return the class of a group of the commands `listed`, for ``typer.Typer(cls=...)``.

    ``names`` are other names of options, each with what commands call it: the first of these that
    a command has.
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "commands": _Loaded(listed, names)})

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
