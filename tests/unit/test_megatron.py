"""`megatron.yaml`: checked strictly, resolved, read by Accelerate's own launcher, and refused before any launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_multi_gpu_env
from accelerate.utils import MegatronLMPlugin

from trainers.config import ConfigError
from trainers.parallel.mesh import MeshSizes
from trainers.strategies import STRATEGIES_DIR, cannot_run, load_strategy, resolve

FILE = STRATEGIES_DIR / "megatron.yaml"


def plugin(folder: Path, processes: int, pp_size: int | None = None) -> MegatronLMPlugin:
    """What the training script's Accelerate would be given: the resolved file, through the launcher's own code."""
    path = folder / "resolved.yaml"
    path.write_text(resolve(load_strategy("megatron"), processes, "no", pp_size).dump())
    arguments, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    )
    assert arguments.use_megatron_lm
    given = {key: value for key, value in prepare_multi_gpu_env(arguments).items() if key.startswith("MEGATRON_LM_")}
    with mock.patch.dict(os.environ, given):
        return MegatronLMPlugin()


def test_accelerate_reads_what_the_file_says(tmp_path: Path) -> None:
    found = plugin(tmp_path, 8)
    assert (found.tp_degree, found.pp_degree, found.context_parallel_size) == (2, 2, 1)
    assert (found.sequence_parallelism, found.use_distributed_optimizer) == (True, True)
    assert (found.attention_dropout, found.hidden_dropout, found.calculate_per_token_loss) == (0.0, 0.0, True)
    assert not found.recompute_activations


def test_the_copies_follow_the_processes(tmp_path: Path) -> None:
    assert load_strategy("megatron").sizes == MeshSizes(pp=2, dp_replicate=2, tp=2)
    assert resolve(load_strategy("megatron"), 16, "no").sizes == MeshSizes(pp=2, dp_replicate=4, tp=2)
    assert plugin(tmp_path, 16, pp_size=4).pp_degree == 4
    with pytest.raises(ConfigError, match=r"leaves 2; use a multiple of 4, or write other degrees into a YAML"):
        resolve(load_strategy("megatron"), 6, "no")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_every_launch_is_refused(has_gpu: bool) -> None:
    reason = cannot_run(load_strategy("megatron"), "full", has_gpu)
    assert reason is not None
    assert "builds a model of its own" in reason
    assert reason.endswith("use 3d")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"megatron_lm_context_parallel_size": None}, "is missing, and Accelerate would take 2; write 1"),
        ({"megatron_lm_tp_degree": 1}, "megatron_lm_sequence_parallelism=True is of use with tensor parallelism alone"),
        ({"megatron_lm_pp_degree": None}, "megatron_lm_pp_degree is missing"),
        ({"tp_degree": 2}, "the Accelerate key has a prefix; write megatron_lm_tp_degree"),
        ({"megatron_lm_gradient_clipping": 1.0}, "max_grad_norm of the config says where to clip"),
        ({"megatron_lm_num_micro_batches": 4}, "accumulation is derived from global_batch_size"),
        ({"megatron_lm_attention_dropout": 0.1}, "dropout would be of this strategy alone; write 0"),
        ({"megatron_lm_recompute_activations": True}, "use gradient_checkpointing: true in the config"),
        ({"megatron_lm_use_precision_aware_optimizer": True}, "it keeps Adam's states in less than fp32"),
        ({"megatron_lm_attention_softmax_in_fp32": False}, "it would leave the compute rule; write true"),
        ({"megatron_lm_expert_model_parallel_size": 2}, "experts are not spread over processes"),
        ({"megatron_lm_tp_degree": 3}, "megatron_lm_config: pp 2 x tp 3 x cp 1 = 6, but num_processes=8"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    values = yaml.safe_load(FILE.read_text())
    section = {**values["megatron_lm_config"], **changes}
    values["megatron_lm_config"] = {key: value for key, value in section.items() if value is not None}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as caught:
        load_strategy(str(path))
    assert line in str(caught.value)


def test_two_words_for_the_stages_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# pp_size: 4\n" + FILE.read_text())
    with pytest.raises(ConfigError, match=r"pp_size=4 beside megatron_lm_pp_degree=2"):
        load_strategy(str(path))
