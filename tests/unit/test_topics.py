"""docs/topics.md: its commands can be typed, its tests exist, and every item of the guides is settled.

Commands are parsed and checked by the program's own code, and not run: most need several GPUs.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from app.bench.plan import BENCH
from app.bench.scaling import scaling_plan
from app.cli import app as verbs
from app.cli_errors import mistakes_of as said
from app.command_line import RESUME, TRAIN, Args, Verb
from app.launch.job import train_job
from app.plan.command import PLAN
from app.plan.command import _read as read_plan
from app.sweep.plan import SWEEP
from app.sweep.plan import make_plan as sweep_plan
from tests.launching import ROOT
from tests.unit.test_docs import anchors
from trainers.config.mistakes import ConfigError
from trainers.config.parse import parse_request
from trainers.strategy import topics
from trainers.strategy.strategy import from_launcher, load_strategy, strategy_names

PAGE = ROOT / "docs" / "topics.md"
ITEMS = Path(__file__).with_name("topic_items.txt")
"""The items of the guides, one a line."""
WORKS, NEEDS_GPU, NOT_HERE = "**works**", "**needs a GPU**", "**not here**"
PARTS = ("Command", "Memory per rank", "Sent per step", "Shown by", "Not when")
_ROW = re.compile(r'^\| (.+?) \| (?:-: )?"(.*)" \| (\*\*[\w ]+\*\*): (.+) \|$')
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_COMMAND = re.compile(r"`((?:tunesmith|accelerate launch|torchrun) [^`]+)`")


def page_of(text: str) -> dict[str, str]:
    """Section by heading."""
    return {head: body for head, _, body in (part.partition("\n") for part in text.split("\n## ")[1:])}


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """Item, state and text of each settled item."""
    matches = (_ROW.match(line) for line in text.splitlines())
    return [(row[1], row[3], row[4]) for row in matches if row]


def unsettled(text: str, items: list[str]) -> list[str]:
    """What is wrong with the tables of a page: each item stands there once, with a test or a reason."""
    rows = rows_of(text)
    names = [item for item, _, _ in rows]
    wrong = [f"{item} is there {names.count(item)} times" for item in items if names.count(item) != 1]
    wrong += [f"{item} is no item" for item in names if item not in items]
    for item, state, about in rows:
        files = [file for file, _ in _TEST.findall(about)]
        on_gpu = [file for file in files if file.startswith("tests/gpu/")]
        if state == WORKS and (not files or on_gpu):
            wrong.append(f"{item} works without a test")
        if state == NEEDS_GPU and (not on_gpu or on_gpu != files):
            wrong.append(f"{item} needs a GPU and no test of tests/gpu")
        if state == NOT_HERE and (files or len(about) < 40):
            wrong.append(f"{item} is not here without a reason")
        if state not in (WORKS, NEEDS_GPU, NOT_HERE):
            wrong.append(f"{item} is {state}")
    return wrong


@cache
def collected_from(file: Path) -> frozenset[str]:
    """Names of the tests that pytest would collect from a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(part.name for part in tree.body if isinstance(part, ast.FunctionDef))


def missing_tests(text: str) -> list[str]:
    """Tests that a page names and that are not there."""
    tests = dict.fromkeys(_TEST.findall(text))
    return [
        f"{file}::{name}"
        for file, name in tests
        if not (ROOT / file).is_file() or name not in collected_from(ROOT / file) or not name.startswith("test_")
    ]


def commands_of(text: str) -> Iterator[str]:
    """Commands in the `Command` lines."""
    for block in re.findall(r"^- \*\*Command\*\*: (.+?)(?=^- |^\n|\Z)", text, re.MULTILINE | re.DOTALL):
        yield from _COMMAND.findall(block)


def check_command(line: str) -> None:
    """Raises what the program would raise of this command line before anything is started."""
    program, *argv = shlex.split(line)
    if program == "accelerate":
        script = next(index for index, word in enumerate(argv) if word.endswith("train.py"))
        from_launcher(argv, "train.py")
        parse_request(argv[script + 1 :]).resolve()
    elif program == "torchrun":
        after = argv[argv.index("trainers/train.py") + 1 :]
        at = after.index("--accelerate_config")
        load_strategy(after[at + 1])
        parse_request(after[:at] + after[at + 2 :]).resolve()
    elif argv[0] in VERBS:
        verb, check = VERBS[argv[0]]
        args = verb.read(argv[1:])
        assert args is not None
        if args.request.mistakes or args.names == [] == argv[1:]:
            raise ConfigError(list(args.request.mistakes))
        if not {"on", "table"} & set(args.own):
            check(args)
    else:
        command: Any = typer.main.get_command(verbs)
        try:
            while hasattr(command, "commands"):
                command, argv = command.commands.get(argv[0]), argv[1:]
            if command is None:
                raise ConfigError(f"no such verb: {line}")
            command.make_context(line, argv)
        except Exception as error:
            if mistakes := said(error):
                raise ConfigError("; ".join(mistakes)) from error
            raise


def start_of(args: Args) -> None:
    """Checks a command of `train`."""
    try:
        train_job(args)
    except ConfigError as error:  # of this machine and not of the command
        if "needs an accelerator, but there is none" not in str(error):
            raise


VERBS: dict[str, tuple[Verb, Callable[[Args], object]]] = {
    "train": (TRAIN, start_of), "resume": (RESUME, lambda args: None), "plan": (PLAN, read_plan),
    "bench": (BENCH, scaling_plan), "sweep": (SWEEP, sweep_plan),
}  # fmt: skip
"""How the verbs that take training options read theirs, up to the first thing that is started."""


def bare_topics(text: str) -> list[str]:
    """Topics that lack a part, in the order of the parts, or a picture."""
    wrong = []
    for name, body in page_of(text).items():
        headings = re.findall(r"^- \*\*([\w ]+)\*\*:", body, re.MULTILINE)
        complete = headings == list(PARTS) and "```text" in body
        if not complete and name != "Other frameworks":
            wrong.append(name)
    return wrong


def strategies_without_topic(text: str) -> set[str]:
    """Strategies that no command of a page names."""
    names = {name for line in commands_of(text) for name in re.findall(r"--strateg(?:y|ies) ([\w,]+)", line)}
    return set(strategy_names()) - {each for name in names for each in name.split(",")}


def dead_ends(anchors_of_messages: list[str]) -> list[str]:
    """Sections that messages name and a page lacks."""
    return [
        text for text in anchors_of_messages
        if not (ROOT / text.partition("#")[0]).is_file()
        or ("#" in text and text.partition("#")[2] not in anchors(ROOT / text.partition("#")[0]))
    ]  # fmt: skip


TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = list(dict.fromkeys(commands_of(TEXT)))


def test_every_item_is_settled_once() -> None:
    items = ITEMS.read_text(encoding="utf-8").splitlines()
    assert len(items) == 102
    assert unsettled(TEXT, items) == []


def test_every_topic_is_whole() -> None:
    assert bare_topics(TEXT) == []
    costs = re.findall(r"^- \*\*(?:Memory per rank|Sent per step)\*\*:", TEXT, re.MULTILINE)
    assert len(costs) == 2 * (len(page_of(TEXT)) - 1)


def test_every_test_that_is_named_is_there() -> None:
    assert len(set(_TEST.findall(TEXT))) > 60
    assert missing_tests(TEXT) == []


def test_every_strategy_has_a_topic() -> None:
    assert strategies_without_topic(TEXT) == set()


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_can_be_typed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = line.replace("/shared", str(tmp_path))
    check_command(line)


def test_every_message_names_a_section_that_is_there() -> None:
    files = [file for top in ("trainers", "app", "ui") for file in (ROOT / top).rglob("*.py")]
    links = re.findall(r"docs/[\w-]+\.md(?:#[\w-]+)?", "\n".join(file.read_text(encoding="utf-8") for file in files))
    constants = [value for name, value in vars(topics).items() if name.isupper()]
    assert {f"see {text}" for text in links if "topics.md#" in text} == set(constants)
    assert dead_ends(links) == []


def test_the_frameworks_are_compared() -> None:
    table = page_of(TEXT)["Other frameworks"]
    for name in ("DDP, FSDP", "Accelerate", "DeepSpeed", "Megatron-LM", "Lightning", "Ray Train", "Horovod"):
        assert re.search(rf"^\| (?:\w+ )*{name} \|(?: [^|]+ \|){{4}}$", table, re.MULTILINE), name


def test_what_is_wrong_is_seen() -> None:
    """Control of each check above."""
    row = '| {} | "words" | {}: {} |'
    works, gpu = "`tests/unit/test_docs.py::test_the_readme_is_a_door`", "`tests/gpu/test_sync.py::test_gone`"
    text = "\n".join([
        "\n## One", "- **Command**: `tunesmith train tiny-full --strategy ddp`", "",
        row.format("a", WORKS, works), row.format("a", WORKS, works), row.format("b", WORKS, "it does"),
        row.format("c", WORKS, gpu), row.format("d", NEEDS_GPU, works), row.format("e", NOT_HERE, "no"),
        row.format("f", "**untested**", "the code is there, and nothing ever ran it"), row.format("g", WORKS, works),
    ])  # fmt: skip
    assert unsettled(text, [*"abcdefh"]) == [
        "a is there 2 times", "h is there 0 times", "g is no item", "b works without a test", "c works without a test",
        "d needs a GPU and no test of tests/gpu", "e is not here without a reason", "f is **untested**",
    ]  # fmt: skip
    assert missing_tests(text) == ["tests/gpu/test_sync.py::test_gone"]
    assert bare_topics(text) == ["One"]
    assert "ddp" not in strategies_without_topic(text) > {"fsdp2", "single"}
    assert dead_ends(["docs/topics.md#precision", "docs/topics.md#gone", "docs/gone.md"]) == [
        "docs/topics.md#gone", "docs/gone.md",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "tunesmith train tiny-full --strategy fsdp9 --num_processes 2",
        "tunesmith train tiny-full --strategy 3d --num_processes 6",
        "tunesmith train tiny-full --mixed_precison bf16",
        "tunesmith plan tiny-full --gpu_memroy 80",
        "tunesmith bench tiny-full --scaling two",
        "tunesmith sweep tiny-lora --no_such_rate 1e-3,3e-3",
        "tunesmith doctor --prot 29500",
        "tunesmith runs shwo RUN",
        "tunesmith fly",
        "accelerate launch trainers/train.py --preset tiny-lora",
        "torchrun --nproc_per_node 2 trainers/train.py --accelerate_config fsdp9 --preset tiny-lora",
    ],
)
def test_a_wrong_command_is_seen(line: str) -> None:
    """Control."""
    with pytest.raises(ConfigError):
        check_command(line)
