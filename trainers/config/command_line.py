"""The options of `TrainConfig` on a command line, for the training script and for every verb that takes them.

They are options of typer, made from the fields: reading a command line and showing its help use the same ones.
Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainers.config.fields import TITLES, fields
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import LAUNCH_OPTIONS, unknown_option

_VALUES = {"bool": "true|false", "int": "int", "float": "number", "text": "text", "list": "a,b", "map": "a=b,c=d"}


def option(name: str, metavar: str, text: str, panel: str = "Options", hidden: bool = False) -> Any:
    """`--name VALUE`.

    Args:
        name: without the dashes.
        metavar: what a value looks like, such as `<int>`.
        text: its help.
        panel: the section of the help that shows it.
        hidden: whether the help leaves it out.
    """
    import typer

    return typer.Option(
        None, f"--{name}", metavar=metavar, help=text, rich_help_panel=panel, show_default=False, hidden=hidden
    )


def switch(name: str, text: str, hidden: bool = False) -> Any:
    """`--name`, which takes no value."""
    import typer

    return typer.Option(False, f"--{name}", metavar="", help=text, hidden=hidden)


def config_options(hidden: Collection[str] = ()) -> dict[str, Any]:
    """Every option of `TrainConfig` by name.

    Args:
        hidden: those that the help leaves out, beside `preset`, which is given as an argument.
    """
    options = {"preset": option("preset", "<name>", "Preset to start from.", hidden=True)}
    for field in fields():
        values = "|".join(field.choices) or _VALUES[field.kind]
        default = (
            f"default: {field.default}" if field.default and not (field.optional and field.default == "none") else ""
        )
        details = ", ".join(part for part in (field.limits, default) if part)
        text = f"{field.help} ({details})" if details else field.help
        options[field.name] = option(field.name, f"<{values}>", text, TITLES[field.section], field.name in hidden)
    return options


def read(
    argv: Sequence[str], options: Mapping[str, Any], verb: str, argument: str = "names", **settings: Any
) -> tuple[list[str], dict[str, Any], list[Mistake]] | None:
    """Reads a command line.

    Args:
        argv: its words, without the program.
        options: made by `option` and `switch`, by name.
        verb: of `tunesmith`, whose help is named where an option is unknown.
        argument: what the help calls a positional argument.
        settings: those of `typer.Typer.command`, such as `help`.

    Returns:
        Positional arguments, the values given by option (True for a switch), and what is wrong so far: unknown
        options, and options without a value. None when the help was asked for, and printed.

    Raises:
        ConfigError: for a switch with a value.
    """
    import typer

    values: dict[str, Any] = {}

    def command(**parsed: Any) -> None:
        values.update(parsed)

    argument_info = typer.Argument(None, metavar=argument.upper(), help=settings.pop("argument_help", None))
    # The help of a list would promise several.
    argument_type = str if {"-h", "--help"} & set(argv) and settings.get("add_help_option", True) else list[str]
    kinds = {name: bool if info.default is False else str for name, info in options.items()}
    command.__annotations__ = {"names": argument_type, **kinds}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=command.__annotations__[name]
            )
            for name, info in {"names": argument_info, **options}.items()
        ]
    )
    context = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=context, **settings)(command)
    kept_argv, mistakes = _without_empty(argv, {f"--{name}" for name, kind in kinds.items() if kind is str})
    try:
        app(args=kept_argv, prog_name=f"tunesmith {verb}", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise ConfigError(str(error.format_message())) from None
    if not values:
        return None
    names, unknown = _sorted(values.pop("names") or [])
    known = [name for name in options if name not in LAUNCH_OPTIONS]
    mistakes += [unknown_option(name, known, verb) for name in unknown]
    return names, {name: value for name, value in values.items() if value not in (None, False)}, mistakes


def _without_empty(argv: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[Mistake]]:
    """The words without the flags that lack their value: typer would take the option that follows for it."""
    kept_argv, mistakes = [], []
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        if word in flags and following.startswith("--"):
            mistakes.append(Mistake(word, None, "has no value", f"write {word} VALUE"))
        else:
            kept_argv.append(word)
    return kept_argv, mistakes


def _sorted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Positional arguments, and the names of unknown options, each of which takes the word after it."""
    names, unknown, queue = [], [], list(argv)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            names.append(word)
            continue
        name, equals, _ = word.removeprefix("--").partition("=")
        unknown.append(name)
        if not equals and queue and not queue[0].startswith("--"):
            queue.pop(0)
    return names, unknown
