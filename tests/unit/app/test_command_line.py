"""What a verb reads of its command line, wherever the words stand, what it refuses, and what its help shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.plan import BENCH
from app.cli import run_verb
from app.command_line import CLONE, RESUME, TRAIN, Args, Verb
from app.commands.data import DATA
from app.plan.command import PLAN
from app.prove.plan import PROVE
from trainers.config.mistakes import ConfigError
from trainers.config.options import LAUNCH_OPTIONS, TrainConfig

VERBS = [TRAIN, RESUME, CLONE, DATA, BENCH, PLAN, PROVE]


def read(*argv: str, verb: Verb = TRAIN) -> Args:
    args = verb.read(argv)
    assert args is not None
    return args


def lines(args: Args) -> list[str]:
    return [str(mistake) for mistake in args.request.mistakes]


def test_words_are_read_wherever_they_stand() -> None:
    args = read("--seed", "-1", "tiny-lora", "--gpus=0,2", "--json", "--packing", "true", "--quiet", "--run_name=--y")
    assert (args.names, args.launch, args.switches) == (["tiny-lora"], {"gpus": "0,2"}, {"json", "quiet"})
    assert args.request.options == {"seed": "-1", "packing": "true", "run_name": "--y"}
    assert args.request.mistakes == []
    assert read() == Args()


@given(
    st.text(min_size=1).filter(lambda text: "\0" not in text), st.sampled_from(sorted(TrainConfig.model_fields)[:20])
)
def test_any_value_is_one_word(value: str, name: str) -> None:
    args = read(f"--{name}={value}", "x")
    options = {**args.request.options, **({"preset": args.request.preset} if args.request.preset is not None else {})}
    assert (args.names, options) == (["x"], {name: value})


def test_what_is_wrong_is_kept_until_all_is_known() -> None:
    args = read("--learning_rte", "1", "a", "--seed", "--gpus", "0", "--gpus", "1", "--zzz=2", "--strategy")
    assert lines(args) == [
        "--seed has no value; write --seed VALUE, or leave it out",
        "--strategy has no value; write --strategy VALUE, or leave it out",
        "learning_rte is not an option; did you mean learning_rate?",
        "zzz is not an option; `tunesmith train --help` lists all options",
        "--gpus is given twice; write --gpus VALUE once",
    ]
    assert args.names == ["a"]
    with pytest.raises(ConfigError, match="does not take a value"):
        read("--json=1")


@pytest.mark.parametrize("equals", [False, True])
def test_an_empty_value_is_none(equals: bool) -> None:
    """As a shell makes it of a variable that is not set; `none` is the word for no value."""
    names = [name for name, info in TRAIN.options().items() if info.default is not False]
    args = read("a", *(word for name in names for word in ([f"--{name}="] if equals else [f"--{name}", ""])), "--json")
    assert lines(args) == [f"--{name} has no value; write --{name} VALUE, or leave it out" for name in names]
    assert (args.names, args.launch, args.request.options, args.own) == (["a"], {}, {}, {})
    assert args.switches == {"json"}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["export", "x", "--checkpoint", ""], "--checkpoint has no value; write --checkpoint VALUE, or leave it out"),
        (["export", "x", "--output", ""], "--output has no value; write --output VALUE, or leave it out"),
        (["runs", "list", "--runs_dir="], "--runs_dir has no value; write --runs_dir VALUE, or leave it out"),
        (["ui", "--allow", "a", "--allow", ""], "--allow has no value; write --allow VALUE, or leave it out"),
        (["chat", "x", "--system", "", "--prompt", ""], "--prompt has no value; write --prompt VALUE, or leave it out"),
        (["chat", ""], "RUN is empty; write one"),
        (["runs", "compare", "a", ""], "RUN... is empty; write one"),
        (["runs", "move", "", "3"], "RUN is empty; write one"),
    ],
)
def test_an_empty_word_is_refused_by_every_verb(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_verb(argv) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert not list(tmp_path.iterdir())


def test_the_nearest_option_may_be_the_verbs_own() -> None:
    assert lines(read("--turn", "1", verb=BENCH)) == ["turn is not an option; did you mean turns?"]
    assert "turns" not in lines(read("--turn", "1"))[0]
    assert read("--turns", "3", "--control", "none", verb=BENCH).own == {"turns": "3"}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
@pytest.mark.parametrize("width", [80, 140])
def test_the_help_shows_what_makes_sense(
    verb: Verb, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert verb.read(["tiny-lora", "--help"]) is None
    words = capsys.readouterr().out.split()
    options = verb.options()
    assert {name for name in options if f"--{name}" in words} == {
        name for name, info in options.items() if not info.hidden
    }
    assert {name for name in LAUNCH_OPTIONS if f"--{name}" in words} == set(verb.launch)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_reads_every_option(verb: Verb) -> None:
    """So that one that makes no sense there is refused with its reason."""
    assert {*TrainConfig.model_fields, *LAUNCH_OPTIONS, "config", "json", "check", "force"} - {"preset"} <= set(
        verb.options()
    )
