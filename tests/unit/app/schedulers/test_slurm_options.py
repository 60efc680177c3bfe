"""The options of a SLURM job: what may set them, and that none can add a line to the script."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.schedulers.slurm import script
from app.schedulers.slurm_options import REPOSITORY_FILE, SlurmOptions, site_file
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

TEXT_OPTIONS = ("partition", "account", "qos", "time", "constraint", "container", "slurm_extra")


@pytest.fixture(autouse=True)
def _config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_command_line_wins_over_the_users_file_and_that_over_the_repositorys(tmp_path: Path) -> None:
    write(tmp_path / REPOSITORY_FILE, "slurm:\n  partition: a\n  account: a\n  time: '1:00:00'\n  gpus_per_node: 4\n")
    write(site_file(), "slurm:\n  partition: b\n  account: b\n  qos: b\n  nodes: 2\n")
    options = SlurmOptions.read({"partition": "c", "nodes": "3"}, tmp_path)
    assert (options.partition, options.account, options.qos, options.nodes) == ("c", "b", "b", 3)
    assert (options.time, options.gpus_per_node) == ("1:00:00", 4)


@pytest.mark.parametrize("name", [name for name in SlurmOptions.model_fields if name not in
                                  ("partition", "account", "time", "gpus_per_node")])  # fmt: skip
def test_a_repository_sets_neither_code_nor_what_a_user_would_not_expect(tmp_path: Path, name: str) -> None:
    write(tmp_path / REPOSITORY_FILE, f"slurm:\n  {name}: 1\n")
    with pytest.raises(ConfigError, match=f"{name} cannot be set by a repository's file; set it in "):
        SlurmOptions.read({}, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "holds a list"),
        ("slurm: 3\n", "slurm is not a mapping"),
        ("ray:\n  a: 1\n", "ray is not a section of a site file"),
        ("slurm:\n  partitions: a\n", "partitions is not an option of a SLURM job; use nodes, "),
        ("slurm:\n  time: 8:00:00\n", "time=28800 .*write it in quotes"),
        ("slurm:\n  nodes: many\n", "nodes=many is refused: "),
        ("slurm:\n  partition: [a]\n", r"partition=\['a'\] is refused: "),
    ],
)
def test_a_wrong_site_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(site_file(), text)
    with pytest.raises(ConfigError, match=message) as error:
        SlurmOptions.read({}, tmp_path)
    assert str(site_file()) in str(error.value)


@pytest.mark.parametrize("extra", ["mem=0", "--mem=0", "exclusive mem=0", "--gres=gpu:a100:2", ""])
def test_extras_are_options_of_sbatch(extra: str, tmp_path: Path) -> None:
    lines = script(RunFolder(tmp_path / "r"), SlurmOptions.checked({"slurm_extra": extra})).splitlines()
    expected = [f"#SBATCH --{word.removeprefix('--')}" for word in extra.split()]
    assert [line for line in lines if line.startswith(("#SBATCH --mem", "#SBATCH --ex", "#SBATCH --gres"))] == expected


@pytest.mark.parametrize(
    "extra",
    ["mem=0\n#SBATCH --uid=0", "mem=$(id)", "mem=`id`", "a b;c", "'", "--output=x", "wrap=x", "mem 0 = 3", "-p x"],
)
def test_an_extra_that_is_no_option_or_not_the_users_to_set_is_refused(extra: str) -> None:
    with pytest.raises(ConfigError, match="slurm_extra="):
        SlurmOptions.checked({"slurm_extra": extra})


def plain_script(folder: Path) -> list[str]:
    return script(RunFolder(folder), SlurmOptions()).splitlines()


@given(name=st.sampled_from(TEXT_OPTIONS), value=st.text(max_size=40))
def test_no_value_changes_the_script_beyond_its_directive(name: str, value: str) -> None:
    """Every text is refused, or appears in directives alone, each a line of its own."""
    folder = Path("/runs/one")
    try:
        options = SlurmOptions.checked({name: value})
    except ConfigError:
        return
    lines = script(RunFolder(folder), options).splitlines()
    added = [line for line in lines if line not in plain_script(folder)]
    assert len(added) == (len(value.split()) if name == "slurm_extra" else 1)
    assert all(line.startswith("#SBATCH --") for line in added)
    assert [line for line in lines if line not in added] == plain_script(folder)


def test_a_line_end_in_a_value_would_be_seen() -> None:
    """Control of the property: the options as they would be unchecked."""
    folder = Path("/runs/one")
    options = SlurmOptions.model_construct(**{**SlurmOptions().model_dump(), "partition": "a\nrm -r /"})
    added = [line for line in script(RunFolder(folder), options).splitlines() if line not in plain_script(folder)]
    assert not all(line.startswith("#SBATCH --") for line in added)


@given(st.text(max_size=30).filter(lambda name: "/" not in name and name not in (".", "..", "")))
def test_the_path_of_a_run_is_one_word_or_refused(name: str) -> None:
    run = RunFolder(Path("/runs") / name)
    try:
        lines = script(run, SlurmOptions()).split("\n")
    except ConfigError:
        return
    assert shlex.split(next(line for line in lines if line.startswith("run="))) == [f"run={run.path}"]
    assert len(lines) == len(script(RunFolder(Path("/runs/one")), SlurmOptions()).split("\n"))


@pytest.mark.parametrize("value", [None, True, -1, 0, 10**30, "", [], {}, 1.5, "\uff11"])
@pytest.mark.parametrize("name", ["nodes", "signal_before", "cpus_per_node"])
def test_every_kind_of_number_is_used_or_named(name: str, value: Any) -> None:
    fits = value in (None, True) and (value is not None or name == "cpus_per_node") and name != "signal_before"
    if fits:
        assert getattr(SlurmOptions.checked({name: value}), name) == value
        return
    with pytest.raises(ConfigError, match=f"^{name}="):
        SlurmOptions.checked({name: value})
