"""What `teacher` may name, what identifies it, and which teachers and strategies are refused. Nothing is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.unit.run.test_from_run import finished, write_adapter, write_full
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.config.teacher import initial_config, teacher_config
from trainers.config.validation import build, ignored_choices
from trainers.data.vocabulary import refuse_other_vocabulary
from trainers.embedded import BASE_DIR
from trainers.run.compatibility import plain, recorded_versions, refusals
from trainers.run.from_run import refuse_adapter_start, resolve_request
from trainers.run.teacher import TEACHERS, teacher_digest
from trainers.strategy.strategy import load_strategy, refusal
from trainers.tools.preflight import check

DATA = {"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "distill"}


@pytest.fixture
def runs(tmp_path: Path, elsewhere: None) -> Path:
    return tmp_path / "runs"


def resolved(teacher: object, **options: Any) -> TrainConfig:
    return resolve_request(Request(options={**DATA, "teacher": str(teacher), **options}))


def refused(teacher: object, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(teacher, **options)
    return str(caught.value)


def test_a_teacher_is_a_run_a_folder_or_a_name_on_the_hub(runs: Path) -> None:
    run = finished(runs)
    assert {resolved(name).teacher for name in ("sft", run.path, run.model, "runs/sft")} == {str(run.model)}
    folder = write_full(runs.parent / "model")
    assert resolved("model").teacher == str(folder)
    assert [resolved(name).teacher for name in ("owner/model", "gpt2", "embedded")] == [
        "owner/model",
        "gpt2",
        "embedded",
    ]


def test_adapters_and_unfinished_runs_are_refused_by_name(runs: Path) -> None:
    finished(runs, method="lora")
    assert "teacher=sft holds an adapter, and a teacher needs full weights; merge it with" in refused("sft")
    folder = write_adapter(runs.parent / "adapter")
    assert f"teacher={folder} holds an adapter" in refused(folder)
    stopped = finished(runs, "stopped")
    stopped.write_state(state="stopped")
    assert "teacher=stopped is stopped, and has exported no result; finish it" in refused("stopped")
    empty = runs.parent / "empty"
    empty.mkdir()
    assert f"teacher={empty} holds neither a run nor a model" in refused(empty)


def test_distill_needs_a_teacher_and_others_ignore_it() -> None:
    with pytest.raises(ConfigError, match="teacher is not set, with objective=distill; name the model to learn from"):
        build(DATA)
    ignored = [str(line) for line in ignored_choices(build({**DATA, "objective": "sft", "teacher": "embedded"}))]
    assert ignored == ["teacher is ignored: objective=sft does not read it"]
    ignored = [str(line) for line in ignored_choices(build({**DATA, "teacher": "embedded", "jsd_beta": 0.3}))]
    assert ignored == ["jsd_beta is ignored: loss_type=forward_kl"]
    config = build({**DATA, "teacher": "embedded", "jsd_beta": 0.3, "loss_type": "jsd"})
    assert not ignored_choices(config)
    assert config.objective_options() == {
        "loss_type": "jsd", "teacher": "embedded", "teacher_log_probs": None, "jsd_beta": 0.3,
        "distill_temperature": 1.0, "nll_weight": 0.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="loss_type=sigmoid with objective=distill; use forward_kl"):
        build({**DATA, "teacher": "embedded", "loss_type": "sigmoid"})


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [("teacher", "the teacher is not split so"), ("teacher_log_probs", "recorded teachers are not read there")],
)
@pytest.mark.parametrize("name", ["pp", "ep"])
def test_strategies_that_do_not_split_a_teacher_are_refused_by_name(
    name: str, teacher: str, reason: str, tmp_path: Path
) -> None:
    strategy, options = load_strategy(name), {**DATA, "method": "full", "global_batch_size": 32}
    config = build({**options, teacher: "embedded" if teacher == "teacher" else str(tmp_path)})
    problem = refusal(strategy, config, has_gpu=False)
    assert problem is not None
    assert "objective=distill with" in problem
    assert f"{reason}; use fsdp2" in problem
    assert refusal(strategy, build({**options, "objective": "sft"}), has_gpu=False) is None
    for other in ("tp", "fsdp2_tp", "hsdp_tp", "zero2_tp"):  # controls
        assert refusal(load_strategy(other), config, has_gpu=False) is None


def save_heads(folder: Path, heads: int, vocab_size: int = 1024) -> Path:
    """A random Qwen3 with so many heads of 8 channels, and the embedded model's tokenizer."""
    shape = Qwen3Config(
        vocab_size=vocab_size, hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=1, head_dim=8,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (BASE_DIR / file).exists():
            shutil.copy(BASE_DIR / file, folder)
    return folder


@pytest.mark.parametrize(("name", "heads", "problem"), [
    ("tp", 3, "tp_size=2: qwen3 has 3 attention heads; use 1 or 3"),
    ("fsdp2_tp", 3, "tp_size=2: qwen3 has 3 attention heads; use 1 or 3"),
    ("sp", 3, "sp=2 does not divide the 3 attention heads of qwen3; use 3, or cp"),
    ("tp", 2, None),
])  # fmt: skip
def test_a_teacher_that_cannot_be_split_is_named_before_the_start(
    name: str, heads: int, problem: str | None, tmp_path: Path
) -> None:
    folder = save_heads(tmp_path / "teacher", heads)
    options = {**DATA, "max_train_samples": 40, "cache_dir": str(tmp_path), "packing": False}
    config = build({**options, "teacher": str(folder)})
    strategy = load_strategy(name)
    if problem is None:
        assert check(config, strategy, has_gpu=False)
        return
    with pytest.raises(ConfigError) as caught:
        check(config, strategy, has_gpu=False)
    assert str(caught.value).startswith(f"teacher={folder}: ")
    assert problem in str(caught.value)
    check(config, load_strategy("fsdp2"), has_gpu=False)  # control


def test_a_vocabulary_that_leaves_a_rank_nothing_is_named_before_the_start(tmp_path: Path) -> None:
    student, folder = save_heads(tmp_path / "student", 2, 2048), save_heads(tmp_path / "teacher", 2)
    options = {**DATA, "max_train_samples": 40, "cache_dir": str(tmp_path), "packing": False}
    config = build({**options, "model_name_or_path": str(student), "teacher": str(folder)})
    problem = "teacher=.*: tp_size=2: qwen3 has 1,024 tokens, and the model that learns from it 2,048, .* from 1,024 on"
    with pytest.raises(ConfigError, match=problem):
        check(config, load_strategy("tp"), has_gpu=False)
    check(config, load_strategy("fsdp2"), has_gpu=False)  # control


def test_a_teacher_is_loaded_as_it_is() -> None:
    config = build({**DATA, "teacher": "t", "trust_remote_code": True, "num_hidden_layers": 2, "rope_scaling": "linear",
                    "rope_factor": 2.0, "method": "lora"})  # fmt: skip
    other = teacher_config(config)
    assert (other.model_name_or_path, other.method, other.trust_remote_code) == ("t", "full", False)
    assert (other.num_hidden_layers, other.rope_scaling, other.from_run) == (None, "none", None)


GRPO: dict[str, Any] = {**DATA, "objective": "grpo", "beta": 0.1, "method": "full", "global_batch_size": 32}


def test_experts_of_a_copy_of_the_initial_model_are_not_divided(tmp_path: Path) -> None:
    options = {**GRPO, "recorded_answers": str(tmp_path)}
    problem = refusal(load_strategy("ep"), build(options), has_gpu=False)
    assert problem is not None
    assert "the copy of the initial model is not split so; use method=lora" in problem
    for changes in ({"method": "lora"}, {"beta": 0}):
        assert refusal(load_strategy("ep"), build({**options, **changes}), has_gpu=False) is None
    for other in ("tp", "fsdp2_tp"):  # controls
        assert refusal(load_strategy(other), build(options), has_gpu=False) is None


def test_the_initial_model_is_loaded_as_the_trained_one_was() -> None:
    changes = {"rope_scaling": "linear", "rope_factor": 2.0, "num_hidden_layers": 2}
    config = build({**GRPO, **changes, "gradient_checkpointing": True})
    initial = initial_config(config)
    assert {name: getattr(initial, name) for name in changes} == changes
    assert (initial.model_name_or_path, initial.gradient_checkpointing) == ("embedded", False)


def test_an_adapter_to_start_from_is_no_initial_model(runs: Path) -> None:
    folder = write_adapter(runs.parent / "adapter")
    for method in ("lora", "full"):
        config = build({**GRPO, "method": method, "from_run": str(folder)})
        with pytest.raises(ConfigError, match="is loaded without its adapter; merge it with"):
            check(config, load_strategy("single"), has_gpu=False)
        refuse_adapter_start(config.model_copy(update={"beta": 0.0}))


def test_a_resume_compares_the_content_of_the_initial_model(tmp_path: Path, elsewhere: None) -> None:
    first, changed = (write_full(tmp_path / name) for name in ("first", "changed"))
    (changed / "config.json").write_text((changed / "config.json").read_text() + " ")
    versions = [recorded_versions(build({**GRPO, "model_name_or_path": str(path)})) for path in (first, changed)]
    assert versions[0]["the initial model"] != versions[1]["the initial model"]
    for changes in ({"method": "lora"}, {"beta": 0}):
        assert "the initial model" not in recorded_versions(build({**GRPO, **changes}))


def other_tokenizer(folder: Path, change: str) -> Path:
    """The embedded model with a token that is named otherwise, or one more."""
    shutil.copytree(BASE_DIR, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    if change == "more":
        vocabulary["another"] = len(vocabulary) + len(content["added_tokens"])
    else:
        tokens = {number: token for token, number in vocabulary.items()}
        vocabulary[tokens[20]], vocabulary[tokens[21]] = 21, 20
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("change", ["swapped", "more"])
def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_token(change: str, tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "other", change)
    config = build({**DATA, "teacher": str(folder), "max_train_samples": 20, "cache_dir": str(tmp_path)})
    with pytest.raises(ConfigError) as caught:
        refuse_other_vocabulary(config)
    assert f"teacher={folder} has another tokenizer: its token " in str(caught.value)
    if change == "swapped":
        assert "its token 20 is " in str(caught.value)
    with pytest.raises(ConfigError, match="has another tokenizer"):
        check(config, load_strategy("single"), has_gpu=False)
    refuse_other_vocabulary(config.model_copy(update={"teacher": "embedded"}))  # control


def test_a_missing_teacher_is_refused_before_anything_is_launched(tmp_path: Path) -> None:
    config = build({**DATA, "teacher": str(tmp_path / "gone"), "max_train_samples": 20, "cache_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"teacher=.*gone is not a model folder"):
        check(config, load_strategy("single"), has_gpu=False)


def test_a_resume_compares_the_content_of_the_teacher(tmp_path: Path, elsewhere: None) -> None:
    first = write_full(tmp_path / "first")
    moved, changed = (Path(shutil.copytree(first, tmp_path / name)) for name in ("moved", "changed"))
    (changed / "config.json").write_text('{"rms_norm_eps": 1e-5}')
    assert teacher_digest(first) == teacher_digest(moved) != teacher_digest(changed)
    config = build({**DATA, "teacher": str(first)})
    manifest = {"config": plain(config), "step": 3, "versions": recorded_versions(config)}
    for folder, problem in ((moved, ""), (changed, "the teacher is")):
        other = config.model_copy(update={"teacher": str(folder)})
        mistakes = refusals(manifest, plain(other), recorded_versions(other))
        assert [str(mistake).startswith(problem) for mistake in mistakes] == ([True] if problem else [])
    assert "the teacher" not in recorded_versions(build({**DATA, "objective": "sft", "teacher": str(first)}))


STAYS = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "warmup_steps": 0}


def test_a_resume_that_changes_between_a_loaded_and_a_recorded_teacher_is_refused() -> None:
    def manifest(teacher: str) -> dict[str, object]:
        return {"config": {}, "versions": {teacher: "0123"}, "step": 4}

    loaded, recorded = TEACHERS
    for before, now in ((loaded, recorded), (recorded, loaded)):
        (refused,) = refusals(manifest(before), STAYS, {now: "0123"})
        assert f"{now} takes the place of {before}" in str(refused)
        assert refusals(manifest(before), STAYS, {before: "0123"}) == []


def test_a_run_grows_only_between_generations() -> None:
    """Its last steps were left out of what was sampled at once."""
    then = {**STAYS, "max_steps": 6, "steps_per_generation": 4}
    for step, count in ((8, 0), (6, 1)):
        assert len(refusals({"config": then, "versions": {}, "step": step}, {**then, "max_steps": 9}, {})) == count
