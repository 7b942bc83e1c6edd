"""Commands that are imported where they are run: listing them costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from commands.common.configured import LEFT_OUT, check_most, configured, expanded, read_config


class Listed(NamedTuple):
    """A command as it is listed, or a verb of one."""

    place: str
    """``module:function`` in `commands`; empty if the command has verbs."""
    says: str
    """Line of the ``--help`` that lists it, which fits a terminal."""
    group: str = "Commands"
    """Heading that the program's ``--help`` lists it under."""
    configured: bool = False
    """True if its options may come from a file, by ``--config``."""
    verbs: Mapping[str, Listed] = MappingProxyType({})
    """Verbs by name; the first is meant where no verb is named and no option chooses another."""
    chosen_by: tuple[str, ...] = ()
    """Options that choose this verb where none is named.  One that the verb itself lacks is left
    out; its value stays, as an argument."""
    left_out: tuple[str, ...] = ()
    """Options of the first verb that mean nothing here.  A command that names no verb may have
    them, so that an option that chooses this verb can be added to an older command."""

    def function(self) -> Callable[..., None]:
        """Return the function itself, whose docstring and options are the command's own help."""
        module, _, name = self.place.partition(":")
        found: Callable[..., None] = getattr(import_module(f"commands.{module}"), name)
        return expanded(found)


def leaves(listed: Mapping[str, Listed]) -> dict[str, Listed]:
    """Return commands without verbs, and the verbs of the others, by what is typed for them."""
    found: dict[str, Listed] = {}
    for name, one in listed.items():
        found |= {f"{name} {verb}": own for verb, own in one.verbs.items()} or {name: one}
    return found


class Sectioned(TyperCommand):
    """A command whose help shows its own options, then groups of shared ones by heading."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as click does, and say which option was given again though the last one counts."""
        if not ctx.resilient_parsing:
            given = Counter(
                param for param in self.make_parser(ctx).parse_args([*args])[2]
                if not (param.multiple or getattr(param, "is_flag", False))
            )  # fmt: skip
            for param in (param for param, count in given.items() if count > 1):
                from commands.common.output import note

                note(f"{param.opts[0]} is given {given[param]} times: the last one counts")
        return super().parse_args(ctx, args)

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


def _checked(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the checks of every command; its remarks wait for its answer."""

    @wraps(command)
    def run(*values: Any, **options: Any) -> None:
        from commands.common.output import answering
        from commands.common.written import check_apart

        with answering():
            check_apart(options)
            check_most(options)
            command(*values, **options)

    return run


class _Loaded(Mapping[str, Any]):
    """Click's command of each name, made when it is asked for.

    ``names`` are other names of options, each with what commands call it.
    """

    def __init__(self, listed: Mapping[str, Listed], names: Mapping[str, Sequence[str]]) -> None:
        self.listed, self.names = listed, names
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made and self.listed[name].verbs:
            self.made[name] = WithVerbs(name, self.listed[name], self.names)
        if name not in self.made:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            one = self.listed[name]
            function = configured(one.function()) if one.configured else one.function()
            alone.command(name, cls=Sectioned)(_checked(function))
            made = self.made[name] = typer.main.get_command(alone)
            own = {option.lstrip("-") for param in made.params for option in param.opts}

            def called(option: str) -> str:
                others = self.names.get(option, (option,))
                return next((other for other in others if other in own), option)

            made.context_settings["token_normalize_func"] = called
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


class WithVerbs(TyperGroup):
    """A command with verbs, each with options of its own.

    Arguments that name no verb are those of the last verb that one of them chooses
    (`Listed.chosen_by`), else of the first, whose options the command's help shows, too.
    """

    def __init__(self, name: str, listed: Listed, names: Mapping[str, Sequence[str]]) -> None:
        self.names, self.configured = names, listed.configured
        self.verbs = {
            verb: one._replace(configured=listed.configured) for verb, one in listed.verbs.items()
        }
        commands: Any = _Loaded(self.verbs, names)
        self.first = next(iter(self.verbs))
        super().__init__(
            name=name, commands=commands, help=listed.says, rich_markup_mode=None,
            options_metavar="", subcommand_metavar="[VERB] [OPTIONS]",
        )  # fmt: skip

    def format_help(self, ctx: Any, formatter: Any) -> None:
        first: Any = self.commands[self.first]
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        with formatter.section("Verbs"):
            formatter.write_dl([(name, one.says) for name, one in self.verbs.items()])
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(
                f"`{ctx.command_path} VERB --help` shows the options of a verb. Without a verb it "
                f"is `{self.first}`:"
            )
        first.format_help_text(ctx, formatter)
        first.format_options(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        if not incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        every = [self.commands[name].shell_complete(ctx, incomplete) for name in self.verbs]
        return list({item.value: item for items in every for item in items}.values())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        helps, completes = {*ctx.help_option_names}, ctx.resilient_parsing
        chosen = None
        # While a shell completes, an empty line is the beginning of a verb.
        if (args and args[0].startswith("-") and args[0] not in helps) or not (args or completes):
            verb, chosen = self._chosen(self._given(args, completes))
            args = [verb, *self._translated(verb, args)]
            ctx.meta[LEFT_OUT] = self.verbs[verb].left_out
        if args and args[0] in self.verbs and not completes and not helps & {*args}:
            left_out = ctx.meta.get(LEFT_OUT, ())
            given = [option for option in self._given(args) if option not in left_out]
            self._check(args[0], given, chosen)
        return super().parse_args(ctx, args)

    def _given(self, args: Sequence[str], completes: bool = False) -> list[str]:
        """Return the options that arguments give, with those of the file of ``--config``."""
        found = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
        if self.configured and not completes:
            for arg, after in pairwise([*args, ""]):
                option, _, value = arg.partition("=")
                if option == "--config" and (file := value or after):
                    found += [f"--{name.replace('_', '-')}" for name in read_config(Path(file))]
        return found

    def _chosen(self, given: Sequence[str]) -> tuple[str, str | None]:
        """Return the verb that options choose, and the option that chooses it, if one does."""
        found: tuple[str, str | None] = (self.first, None)
        for verb, one in self.verbs.items():
            for option in given:
                others = self.names.get(option.lstrip("-"), ())
                if {option, *(f"--{other}" for other in others)} & {*one.chosen_by}:
                    found = verb, option
        return found

    def _param(self, verb: str, option: str) -> Any:
        """Return the parameter that a verb has for an option, also by another name, or None."""
        command = self.commands[verb]
        called = command.context_settings["token_normalize_func"](option.lstrip("-"))
        return next(
            (p for p in command.params if f"--{called}" in (*p.opts, *p.secondary_opts)), None
        )

    def _translated(self, verb: str, args: Sequence[str]) -> list[str]:
        """Return arguments that named no verb as those of the verb (`Listed`)."""
        one, found, rest = self.verbs[verb], list[str](), iter(args)
        flags = {
            option for param in self.commands[self.first].params if getattr(param, "is_flag", False)
            for option in (*param.opts, *param.secondary_opts)
        }  # fmt: skip
        for arg in rest:
            option, equals, value = arg.partition("=")
            if option in one.left_out:
                if option not in flags and not equals:
                    next(rest, None)
            elif option in one.chosen_by and self._param(verb, option) is None:
                found += [value] if equals else []
            else:
                found.append(arg)
        return found

    def _check(self, verb: str, given: Sequence[str], chosen: str | None) -> None:
        """Raise DraftsimError for an option that other verbs have and this one lacks.

        Likewise for one that this verb takes once, others repeatedly, and the arguments repeat.
        ``chosen`` is the option that chose the verb, if one did.
        """
        this = f"`draftsim {self.name} {verb}`"
        for option in given:
            own, said = self._param(verb, option), ""
            if own is not None and (own.multiple or given.count(option) == 1):
                continue
            params = {name: self._param(name, option) for name in self.verbs if name != verb}
            if own is not None:
                repeated = any(param is not None and param.multiple for param in params.values())
                said = f"{this} takes one {option}: drop the others" if repeated else ""
            elif others := [
                name for name, param in params.items()
                if param is not None or option in self.verbs[name].chosen_by
            ]:  # fmt: skip
                why = (
                    f"this is {this}: drop it, or name another verb" if chosen is None
                    else f"{chosen} chooses {this}: drop one of them"
                )  # fmt: skip
                places = f"`draftsim {self.name} {'` or `'.join(others)}`"
                said = f"{option} belongs to {places}; {why}"
            if said:
                from traces.errors import DraftsimError

                raise DraftsimError(said)


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
