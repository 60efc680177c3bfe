"""SLURM in the Train page's form: what it starts from, what it refuses, and that its command submits the same job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.command_line import TRAIN
from app.launch.slurm import slurm_job
from app.schedulers.slurm import script
from app.schedulers.slurm_options import SlurmOptions, site_file
from app.services.form import Preview, preview
from app.services.slurm_form import SLURM_FIELDS, slurm_offered, slurm_texts
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder


@pytest.fixture(autouse=True)
def _no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def write_site(text: str) -> None:
    site_file().parent.mkdir(parents=True)
    site_file().write_text(text)


def shown(**slurm: Any) -> Preview:
    return preview({}, "tiny-lora", slurm=slurm)


def test_fields_start_with_the_sites_defaults_and_blank_ones_mean_them() -> None:
    write_site("slurm:\n  partition: gpu\n  nodes: 2\n  gpus_per_node: 0\n  slurm_extra: exclusive\n")
    assert slurm_texts() == {**dict.fromkeys(SLURM_FIELDS, ""), "partition": "gpu", "nodes": "2", "gpus_per_node": "0"}
    for texts in (slurm_texts(), dict.fromkeys(SLURM_FIELDS, " "), dict.fromkeys(SLURM_FIELDS), {}):
        lines = shown(**texts).script.splitlines()
        assert {"#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --exclusive"} <= set(lines)


def test_it_is_offered_where_jobs_can_be_submitted_or_a_site_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not slurm_offered()
    write_site("slurm: {}\n")
    assert slurm_offered()


@pytest.mark.parametrize(
    ("values", "field", "problem"),
    [
        ({"nodes": "0"}, "nodes", "nodes=0 is refused"),
        ({"nodes": "2\n#SBATCH --wrap=x"}, "nodes", "nodes=2"),
        ({"partition": "a b"}, "partition", "is not a name"),
        ({"time": "1"}, "time", "is over before the run would save"),
        ({"gpus_per_node": [1, 2]}, "gpus_per_node", "is refused"),
        ({"account": {"a": object()}}, "account", "values that are not text"),
        ({"qos": "x" * 5000}, "qos", "is too long"),
        ({"constraint": "\ud800"}, "constraint", "not valid Unicode"),
    ],
)
def test_a_mistake_is_told_beside_its_field(values: dict[str, Any], field: str, problem: str) -> None:
    refused = preview({"learning_rate": "abc"}, "tiny-lora", slurm=values)
    assert refused.job is None
    assert problem in str(refused.error_lines()[field])
    assert "learning_rate" in refused.errors, "with all others"


def test_a_mistake_in_the_site_file_is_told() -> None:
    write_site("slurm:\n  partitions: gpu\n")
    assert list(shown().errors) == [""]
    assert "site.yaml: partitions is not an option of a SLURM job" in str(shown().error_lines())
    assert slurm_texts()["nodes"] == "1"


@pytest.mark.parametrize("name", sorted(set(SlurmOptions.model_fields) - set(SLURM_FIELDS)))
def test_what_is_code_comes_from_no_page(name: str) -> None:
    assert getattr(shown(**{name: "prolog=/tmp/x"}).slurm, name) == getattr(SlurmOptions(), name)


@pytest.mark.parametrize("path", ["/tmp/a\nb", '/tmp/"', "/tmp/\\"])
def test_a_folder_that_no_script_can_name_is_a_mistake(path: str) -> None:
    assert preview({"output_dir": path}, "tiny-lora", slurm={}).error_lines()["output_dir"]


VALUES = st.fixed_dictionaries({}, optional={
    "nodes": st.sampled_from(["1", "2"]), "gpus_per_node": st.sampled_from(["0", "2", "4"]),
    "partition": st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True), "time": st.sampled_from(["30", "8:00:00", "2-0"]),
    "constraint": st.sampled_from(["a100|h100", "[a&b]", "(x)"]), "qos": st.just("high"),
})  # fmt: skip


@given(VALUES)
@settings(max_examples=25, deadline=None)
def test_the_command_submits_the_job_that_is_shown(values: dict[str, str]) -> None:
    current = preview({"output_dir": "/tmp/no-such/run"}, "tiny-lora", slurm=values)
    assert current.errors == {}
    arguments = shlex.split(current.command)
    args = TRAIN.read(arguments[arguments.index("train") + 1 :])
    assert args is not None
    job, options = slurm_job(args)
    assert (job.config, job.devices, job.strategy.values) == (
        current.job and current.job.config, current.job and current.job.devices,
        current.job and current.job.strategy.values,
    )  # fmt: skip
    assert script(RunFolder(Path("/tmp/no-such/run")), options) == current.script


@given(st.dictionaries(
    st.sampled_from(list(SLURM_FIELDS)),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)),
))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_every_kind_of_value_is_an_option_or_a_mistake(values: dict[str, Any]) -> None:
    current = preview({}, "tiny-lora", slurm=values)
    assert (current.job is None) == bool(current.errors)
    for line in current.script.splitlines():
        assert not line.startswith("#SBATCH") or line.isprintable()


def test_a_refused_script_would_be_seen() -> None:
    """Control: nothing else checks the options."""
    with pytest.raises(ConfigError):
        SlurmOptions.checked({"partition": "a\nb"})
