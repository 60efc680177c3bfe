"""How all verbs show `--help`: `-h` works too, and switches are shown without a value type, as they take no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

SETTINGS = {"help_option_names": ["-h", "--help"]}


class Interrupted(Exception):
    """A verb was interrupted; used because typer turns KeyboardInterrupt into a silent exit."""


def _is_empty(value: Any) -> bool:
    """Whether a value, or one of several, is an empty text; of typer's own parser, before any conversion."""
    return value == "" or (isinstance(value, list | tuple) and "" in value)


def _without_value(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


class PlainCommand(TyperCommand):
    """A verb whose `--help` is shown without a value type, and which raises `Interrupted` on KeyboardInterrupt.

    An empty value is refused where the default is none: as a name it would be no name, and as a path this folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        unread = super().parse_args(ctx, args)
        # Unread words are those of another verb, which reads them itself.
        params = [param for param in self.params if param.nargs == 1 or not ctx.ignore_unknown_options]
        if empty := [param for param in params if _is_empty(values.get(param.name)) and param.default != ""]:
            from trainers.config.mistakes import ConfigError, Mistake, no_value

            raise ConfigError(
                no_value(param.opts[0])
                if param.param_type_name == "option"
                else Mistake(param.metavar or param.name, None, "is empty", "write one")
                for param in empty
            )
        return unread

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None

    def get_help_option(self, ctx: Any) -> Any:
        return _without_value(super().get_help_option(ctx))


class PlainGroup(TyperGroup):
    """A group of verbs whose `--help` is shown without a value type."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_value(super().get_help_option(ctx))


class Verbs(typer.Typer):
    """A `Typer` whose commands and groups are `PlainCommand` and `PlainGroup`.

    Args:
        **settings: arguments of `Typer`.
    """

    def __init__(self, **settings: Any):
        shared = {"cls": PlainGroup, "context_settings": SETTINGS, "add_completion": False}
        super().__init__(**{**shared, "pretty_exceptions_enable": False, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": PlainCommand, **settings})
