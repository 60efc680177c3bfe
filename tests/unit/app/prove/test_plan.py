"""What `tunesmith prove` plans: what it takes out of a request, what it refuses, what cannot run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import run_verb
from app.hardware import Gpu
from app.prove.plan import PROVE, SETTINGS, Plan, _Command, _known, _overrides, make_plan, micro_batch
from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.config.validation import build
from trainers.strategy.strategy import Strategy, load_strategy

pytestmark = pytest.mark.usefixtures("elsewhere")


# -- the plan --------------------------------------------------------------------------------------------------------


def plan(*words: str) -> Plan:
    return make_plan(PROVE.read(words))


def test_the_plan_takes_out_what_leaves_the_promise() -> None:
    made = plan("tiny-lora", "--strategies", "single,ddp", "--steps", "7", "--lora_dropout", "0.1", "--mixed_precision",
                "bf16", "--learning_rate", "1e-4", "--checkpoint_url", "s3://bucket/run")  # fmt: skip
    for job in [made.reference, *(row.job for row in made.rows)]:
        assert job is not None
        config = job.config
        assert (config.mixed_precision, config.lora_dropout, config.deterministic) == ("no", 0.0, True)
        assert (config.max_steps, config.logging_steps, config.save_steps) == (7, 1, 0)
        assert config.eval_dataset_name is config.checkpoint_url is None
        assert (config.learning_rate, config.preset) == (1e-4, "tiny-lora")
        assert job.run.path.parent == made.folder
        assert config.runs_dir == str(made.folder)
        assert config.outside_parity() == []
    assert [(row.strategy, row.world_size) for row in made.rows] == [("single", 1), ("ddp", 2)]
    assert made.overrides == [
        {"option": "mixed_precision", "given": "bf16", "used": "no"},
        {"option": "lora_dropout", "given": "0.1", "used": "0"},
        {"option": "checkpoint_url", "given": "s3://bucket/run", "used": "none"},
    ]
    assert not made.folder.exists()


def test_bf16_is_for_all_runs(tmp_path: Path) -> None:
    text = own_yaml("my.yaml", "mixed_precision: bf16")
    made = plan("tiny-full", "--bf16", "--layers", "2", "--strategies", f"single,ddp,{text}")
    for job in [made.reference, *(row.job for row in made.rows)]:
        assert job is not None
        assert (job.config.mixed_precision, job.config.num_hidden_layers, job.config.deterministic) == ("bf16", 2, True)
    assert [line for line in made.overrides if line.get("why")] == [], "the file says the same"


def test_a_config_file_is_a_choice_and_a_preset_is_none(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("preset: tiny-lora\neval_steps: 5\nsave_steps: 3\n")
    assert [line["option"] for line in plan("--config", "my.yaml", "--strategies", "ddp").overrides] == [
        "save_steps",
        "eval_steps",
    ]
    assert plan("tiny-lora", "--strategies", "ddp").overrides == []


def test_a_preset_that_leaves_the_promise_is_told() -> None:
    given = build({"model_name_or_path": "x", "dataset_name": "y", "mixed_precision": "bf16", "save_steps": 7})
    used = given.model_copy(update={"mixed_precision": "no", "save_steps": 0})
    command = _Command({}, Request("its-name"), {}, {})
    assert [line["option"] for line in _overrides(command, given, used, _known(SETTINGS), {})] == ["mixed_precision"]


def test_an_optimizer_within_the_promise_is_proved_itself() -> None:
    lion = plan("tiny-lora", "--optim", "lion", "--strategies", "ddp")
    assert {lion.reference.config.optim, *(row.job.config.optim for row in lion.rows if row.job)} == {"lion"}
    assert lion.overrides == []
    eight_bit = plan("tiny-lora", "--optim", "adamw_8bit", "--strategies", "ddp")
    assert eight_bit.reference.config.optim == "adamw"
    assert eight_bit.overrides == [{"option": "optim", "given": "adamw_8bit", "used": "adamw"}]


def test_without_a_model_the_one_that_ships_is_proved() -> None:
    assert plan().reference.config.preset == "tiny-full"
    assert plan("--dataset_name", "x.jsonl", "--eval_dataset_name", "none").reference.config.preset == "tiny-full"


def test_only_the_rows_get_the_control() -> None:
    made = plan("--strategies", "single,ddp", "--control", "mean-of-means", "--global_batch_size", "8")
    assert made.reference.config.control == "none"
    assert [row.job.config.control for row in made.rows if row.job] == ["mean-of-means"] * 2
    assert made.reference.config.per_device_train_batch_size == 4, "two micro-batches at least"


def test_layers_cut_every_run() -> None:
    made = plan("--strategies", "ddp", "--layers", "2")
    assert [job.config.num_hidden_layers for job in (made.reference, made.rows[0].job) if job] == [2, 2]


@pytest.mark.parametrize(
    ("total", "asked", "sizes", "several", "micro"),
    [
        (16, 8, {"single": 1, "ddp": 2}, False, 8),
        (16, 8, {"ddp": 2, "hsdp": 4}, False, 4),
        (12, 8, {"ddp": 2, "hsdp": 4}, False, 3),
        (12, 8, {"ddp": 3, "hsdp": 4}, False, 1),
        (16, 16, {"single": 1}, False, 16),
        (16, 16, {"single": 1}, True, 8),
        (7, 7, {}, True, 1),
    ],
)
def test_one_micro_batch_suits_all_rows(
    total: int, asked: int, sizes: dict[str, int], several: bool, micro: int
) -> None:
    assert micro_batch(total, asked, sizes, several) == micro
    assert all(total % (micro * size) == 0 for size in sizes.values())


def test_no_batch_suits_and_the_arithmetic_is_told() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=6 .*hsdp 4; together 4.*use --global_batch_size 8"):
        micro_batch(6, 2, {"ddp": 2, "hsdp": 4}, False)
    assert run_verb(["prove", "--strategies", "ddp", "--global_batch_size", "3"]) == 2


def test_a_smaller_micro_batch_is_announced() -> None:
    (line,) = plan("tiny-full", "--strategies", "ddp", "--num_processes", "4").overrides
    assert (line["option"], line["given"], line["used"]) == ("per_device_train_batch_size", "8", "4")
    assert line["why"] == "16 rows on 1 and 4 ranks in micro-batches of one size"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("tiny-lroa", "there are full, lora, dpo, kto, distill, reward, grpo and pretrain"),
        ("--steps 0", "steps='0'"),
        ("--steps many", "steps='many'"),
        ("--layers x", "layers='x'"),
        ("--layers 0", "e.g. --layers 2"),
        ("--bogus 1", "`tunesmith prove --help` lists"),
        ("--layer 2", "did you mean layers?"),
        ("--step 2", "did you mean steps?"),
        ("--strategies all,ddp", "`all` cannot be combined"),
        ("--config steps.yaml", "write --steps on the command line of `tunesmith prove`"),
        ("--output_dir used/thesis.txt/x", "output_dir={}/used/thesis.txt/x cannot be created"),
        ("--output_dir used/thesis.txt/x", "choose another folder"),
        ("--runs_dir used/thesis.txt", "runs_dir={}/used/thesis.txt cannot be created"),
        ("--control upside-down", "control='upside-down'"),
        ("--strategies ddp,dddp", "did you mean ddp?"),
        ("--strategies ddp,ddp", "two runs would be named ddp"),
        ("--strategy ddp", "write --strategies a,b,c"),
        ("--resume_from_checkpoint auto --output_dir x", "leave it out"),
        ("--check", "no --check"),
        ("--learning_rte 1", "did you mean learning_rate?"),
        ("--gpus x", "is not a GPU id"),
        ("--gpus 0", "no GPU is visible"),
        ("--num_processes 0", "out of range"),
        ("--output_dir used", "holds other files"),
        ("--runs_dir " + "x" * 300, "runs_dir=xxx"),
        ("--runs_dir used/thesis.txt", "is a file, not a folder"),
        ("--layers 2 --num_hidden_layers 2", "keep one"),
        ("--control mean-of-means --global_batch_size 1 --strategies single", "two micro-batches"),
        ("--model_name_or_path embedded", "dataset_name is missing"),
        ("my.jsonl", "pass data with --dataset_name my.jsonl"),
        ("tiny-lora tiny-full", "unexpected argument 'tiny-full'"),
    ],
)
def test_a_slip_gets_a_line_and_leaves_nothing(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("used").mkdir()
    Path("used/thesis.txt").write_text("all of it")
    Path("steps.yaml").write_text("preset: tiny-full\nsteps: 3\n")
    part = part.replace("{}", str(Path.cwd()))
    assert run_verb(["prove", *words.split(), "--json"]) == 2
    mistakes = json.loads(capsys.readouterr().out)["mistakes"]
    assert len([line for line in mistakes if part in line]) == 1, mistakes
    assert not Path("runs").exists()


def test_all_mistakes_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "tiny-lroa --learning_rte 1 --steps x --strategies dddp --gpus y --control z"
    assert run_verb(["prove", *words.split(), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["mistakes"]) == 6


# -- a strategy of the user's own ------------------------------------------------------------------------------------


def own_yaml(name: str, text: str = "", processes: int = 2) -> str:
    Path(name).write_text(f"distributed_type: MULTI_GPU\nnum_processes: {processes}\n{text}")
    return name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_of_a_file_is_replaced_and_told(precision: str) -> None:
    made = plan("--strategies", f"ddp,{own_yaml('my.yaml', f'mixed_precision: {precision}')}")
    job = made.rows[1].job
    assert job is not None, made.rows[1].reason
    assert (job.strategy.name, job.strategy.values["mixed_precision"], job.config.mixed_precision) == ("my", "no", "no")
    assert made.overrides == [
        {"option": "mixed_precision", "given": precision, "used": "no", "why": "written in my.yaml"}
    ]


def test_a_file_that_says_no_precision_is_taken_as_it_is() -> None:
    made = plan("--strategies", own_yaml("my.yaml", "mixed_precision: 'no'"))
    assert (made.overrides, made.rows[0].reason) == ([], None)


@pytest.mark.parametrize("text", ["mixed_precision: fp9", "fsdp_config: {fsdp_version: 2}", "nonsense: 1"])
def test_another_slip_in_a_file_is_a_wrong_request(text: str) -> None:
    assert run_verb(["prove", "--strategies", own_yaml("my.yaml", text)]) == 2
    assert not Path("runs").exists()


def test_a_file_that_cannot_have_the_processes_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = load_strategy("hsdp").values
    Path("my.yaml").write_text(yaml.safe_dump(shipped))
    assert plan("--strategies", "hsdp", "--num_processes", "5").rows[0].job is None
    assert run_verb(["prove", "--strategies", "my.yaml", "--num_processes", "5"]) == 2
    assert "num_processes=5" in capsys.readouterr().err


# -- what cannot run here --------------------------------------------------------------------------------------------


def strategy(kind: str, **section: Any) -> Strategy:
    name = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(kind, "")
    return Strategy("x", "", {"distributed_type": kind, "num_processes": 2, **({name: section} if name else {})})


def test_too_few_gpus_are_a_row_that_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.hardware.find_gpus", lambda: [Gpu(0, "GPU-a", "H100", 2**30)])
    made = plan("--strategies", "single,ddp")
    assert made.reference.devices.gpu_ids == [0]
    assert made.rows[0].job is not None
    assert made.rows[1].job is None
    assert "needs 2 GPUs and has 1" in str(made.rows[1].reason)


def test_rows_of_several_ranks_replay_the_answers_of_the_reference() -> None:
    made = plan("tiny-full", "--objective", "grpo", "--strategies", "single,ddp,tp", "--num_generations", "2",
                "--max_completion_length", "64")  # fmt: skip
    folder = str(made.folder / "reference" / "rollouts")
    assert [row.job.config.recorded_answers for row in made.rows if row.job] == [None, folder, folder]
    assert made.reference.config.recorded_answers is None
    resumed = plan("tiny-full", "--objective", "grpo", "--strategies", "single", "--resume", "--num_generations", "2",
                   "--max_completion_length", "64")  # fmt: skip
    assert [row.job.config.recorded_answers for row in resumed.rows if row.job] == [
        str(resumed.folder / "reference" / "rollouts")
    ]
    other = plan("tiny-full", "--strategies", "ddp")
    assert [row.job.config.recorded_answers for row in other.rows if row.job] == [None]
