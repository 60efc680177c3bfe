"""Objectives in a file of one's own: what is read of them without running them, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.services.allowed_paths import path_mistakes
from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError
from trainers.config.objective_file import file_spec, file_version, short_name, split_objective
from trainers.config.objectives import OBJECTIVES, ObjectiveSpec, evaluation_metrics
from trainers.config.validation import build
from trainers.run.compatibility import plain, recorded_versions, refusals

MARGIN = """
import torch
from trainers.objectives.pairs import PairLoss

class Margin(PairLoss):
    spec = {"like": "dpo", "summary": "DPO with a margin."}

    def losses(self, pairs):
        chosen, rejected = self.rewards(pairs)
        return -torch.nn.functional.logsigmoid(chosen - rejected - 0.5)

    def rewards(self, pairs):
        return (
            self.beta * (pairs.chosen - pairs.chosen_reference), self.beta * (pairs.rejected - pairs.rejected_reference)
        )
"""


def config(objective: str, **options: Any) -> Any:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": objective, **options})


@pytest.fixture
def margin(tmp_path: Path) -> str:
    """`path.py:Name` of a file that ends the process that runs it."""
    path = tmp_path / "margin.py"
    path.write_text(f"raise SystemExit('it was run')\n{MARGIN}")
    return f"{path}:Margin"


def test_its_data_options_and_metrics_are_those_of_the_objective_it_is_like(margin: str) -> None:
    spec, like = file_spec(margin), OBJECTIVES["dpo"]
    assert (spec.name, spec.title, spec.summary) == (margin, "Margin", "DPO with a margin.")
    assert (short_name(margin), short_name("dpo")) == ("Margin", "dpo")
    for name in ("parts", "formats", "divisor", "metrics", "defaults", "reference"):
        assert getattr(spec, name) == getattr(like, name)
    assert spec.loss_types == ("sigmoid",)  # for a class that derives from Tunesmith's
    assert config(margin, beta=0.3).objective_options() == {
        "loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.0, "nll_weight": 0.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="dataset_format=chat with objective"):
        config(margin, dataset_format="chat")


def test_columns_and_metrics_of_its_own_come_beside_those_of_the_other(tmp_path: Path) -> None:
    def spec_of(like: str, more: str) -> ObjectiveSpec:
        (tmp_path / "margin.py").write_text(f"class Margin: spec = {{'like': {like!r}, {more}}}")
        return file_spec(f"{tmp_path}/margin.py:Margin")

    spec = spec_of("dpo", "'columns': ['weight', 'margin'], 'metrics': ('gap', 'spread')")
    assert (spec.columns, spec.optional_columns) == (("weight", "margin"), ())
    assert spec.metrics == (*OBJECTIVES["dpo"].metrics, "gap", "spread")
    assert evaluation_metrics(spec)[-2:] == ("eval_gap", "eval_spread")
    assert spec_of("reward", "'columns': ['weight']").columns == ("margin", "weight")
    assert spec_of("reward", "'columns': ['weight']").optional_columns == ("margin",)
    assert spec_of("reward", "'columns': ['margin']").optional_columns == (), "named, it is needed"
    assert spec_of("kto", "'summary': 'x'").columns == ()


def test_roles_of_columns_are_those_of_the_objective(tmp_path: Path) -> None:
    (tmp_path / "margin.py").write_text("class Margin: spec = {'like': 'dpo', 'columns': ['weight']}")
    own = f"{tmp_path}/margin.py:Margin"
    assert config(own, columns={"weight": "score"}).columns == {"weight": "score"}
    assert config("reward", columns={"margin": "score"}).columns == {"margin": "score"}
    with pytest.raises(ConfigError, match=r"columns.margin=score with objective=dpo, which does not read it; leave"):
        config("dpo", columns={"margin": "score"})
    with pytest.raises(ConfigError, match=r"columns.weight is not an option"):
        config("dpo", columns={"weight": "score"})
    with pytest.raises(ConfigError, match=r"metric_for_best_model='eval_gap' is not a valid value"):
        config(own, metric_for_best_model="eval_gap")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Other: pass", "has no class Margin; its classes are Other"),
        ("def broken(", "is no Python"),
        ("class Margin: pass", "has no spec in its class Margin; such as spec ="),
        ("class Margin: spec = dict(like='dpo')", "is no literal; it is read without running the file"),
        ("class Margin: spec = 'dpo'", "has a spec that is not a dict"),
        ("class Margin: spec = {'like': 3}", "like=3; use one of dpo"),
        ("class Margin: spec = {'like': ['dpo']}", "like=['dpo']; use one of dpo"),
        (f"class Margin: spec = {{'like': 0x{'f' * 6000}}}", "like=a number; use one of dpo"),
        ("class Margin: spec = {'like': 'sft'}", "like='sft'; use one of dpo, simpo, cpo, orpo, kto, reward"),
        ("class Margin: spec = {}", "like=None"),
        ("class Margin: spec = {'like': 'dpo', 'metric': 'x'}", "'metric', which is no key of it; use like, summary"),
        ("class Margin: spec = {'like': 'dpo', 3: 'x'}", "3, which is no key of it"),
        ("class Margin: spec = {'like': 'dpo', 'summary': 'a\\nb'}", "summary is not one line of text"),
        ("class Margin: spec = {'like': 'dpo', 'summary': ['a']}", "summary is not one line of text"),
        ("class Margin: spec = {'like': 'dpo', 'columns': 'weight'}", "columns are no list of at most 8 names"),
        ("class Margin: spec = {'like': 'dpo', 'columns': {'weight': 1}}", "columns are no list of at most 8 names"),
        (f"class Margin: spec = {{'like': 'dpo', 'columns': {list('abcdefghi')}}}", "no list of at most 8 names"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['weight', 3]}", "3 among its columns, which is no name"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['']}", "'' among its columns, which is no name"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['a\\nb']}", r"'a\nb' among its columns, which is no name"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['a-b']}", "'a-b' among its columns, which is no name"),
        (f"class Margin: spec = {{'like': 'dpo', 'columns': ['{'a' * 41}']}}", "among its columns, which is no name"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['a', 'a']}", "names one of its columns twice"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['label']}", "the column 'label', which row formats have"),
        ("class Margin: spec = {'like': 'dpo', 'columns': ['image']}", "the column 'image', which row formats have"),
        ("class Margin: spec = {'like': 'dpo', 'metrics': 'gap'}", "metrics are no list of at most 8 names"),
        ("class Margin: spec = {'like': 'dpo', 'metrics': [['gap']]}", "['gap'] among its metrics, which is no name"),
        ("class Margin: spec = {'like': 'dpo', 'metrics': ['gap', 'gap']}", "names one of its metrics twice"),
        *(
            (f"class Margin: spec = {{'like': 'dpo', 'metrics': ['{name}']}}", f"the metric {name!r}, a name that rows")
            for name in ("loss", "Loss", "step", "kl", "reward_margin", "reward_x", "eval_gap", "gap_by_rank", "eta_s")
        ),
        ("#" * (1 << 21), "has a file of more than 1,048,576 bytes"),
    ],
)
def test_a_file_without_a_valid_spec_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "margin.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        config(f"{tmp_path}/margin.py:Margin")
    assert problem in str(caught.value)


def test_what_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\nclass Margin: spec = {'like': 'dpo'}\n")
    (tmp_path / "deep.py").write_text(f"{'(' * 5000}1{')' * 5000}\nclass Margin: spec = {{'like': 'dpo'}}\n")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    expected = {
        "latin": "is no Python",
        "deep": "is no Python",
        "folder": "is not a regular file",
        "pipe": "is not a regular file",
    }
    for name, problem in expected.items():
        with pytest.raises(ConfigError) as caught:
            config(f"{tmp_path}/{name}.py:Margin")
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        (
            "dop",
            "is not a valid value; use 'sft', 'dpo', 'simpo', 'cpo', 'orpo', 'kto', 'distill', 'reward', 'grpo', "
            "or path.py:Name",
        ),
        ("nowhere/margin.py:Margin", "cannot be read: No such file or directory; check the path"),
        ("margin.py", "is not a valid value"),
        ("margin.py:1", "is not a valid value"),
        ("margin.txt:Margin", "is not a valid value"),
    ],
)
def test_what_is_neither_an_objective_nor_a_file_is_refused(objective: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(objective)
    assert problem in str(caught.value)


def test_no_page_runs_a_file_of_code(margin: str, tmp_path: Path) -> None:
    (mistake,) = path_mistakes({"objective": margin}, [tmp_path])
    assert str(mistake).endswith(
        "is a file of code, which no page runs; start the run from a terminal: tunesmith train"
    )
    assert path_mistakes({"objective": "dpo"}, [tmp_path]) == []


def test_a_resume_with_another_file_is_refused(margin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = split_objective(margin)[0]  # type: ignore[index]
    monkeypatch.chdir(path.parent)
    resolved = absolute_paths(config("margin.py:Margin"))
    assert resolved.objective == margin, "a saved config works from any folder"
    saved = {"config": plain(resolved), "versions": recorded_versions(resolved), "step": 3}
    assert refusals(saved, plain(resolved), recorded_versions(resolved)) == []
    path.write_text(path.read_text().replace("0.5", "0.7"))
    (change,) = refusals(saved, plain(resolved), recorded_versions(resolved))
    assert "the objective Margin of margin.py is " in str(change)
    assert refusals(saved, plain(resolved), recorded_versions(resolved), force=True) == []
    assert file_version("objective", "dpo") == {}
