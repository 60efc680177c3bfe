"""How all verbs show `--help`: `-h` works too, and switches are shown without a value type, as they take no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

SETTINGS = {"help_option_names": ["-h", "--help"]}


class Interrupted(Exception):
    """A verb was interrupted; used because typer turns KeyboardInterrupt into a silent exit."""


def _without_value(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


class PlainCommand(TyperCommand):
    """A verb whose `--help` is shown without a value type, and which raises `Interrupted` on KeyboardInterrupt."""

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
