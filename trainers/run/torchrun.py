"""Ranks that torchrun starts, rather than `accelerate launch`: their Accelerate file is named among their own options.

torchrun says how many ranks there are and where they meet; how the model is distributed over them it does not know.
`accelerate launch` passes that to the ranks in their environment, so here each rank sets the same variables itself, by
Accelerate's own functions. Imports no torch before they are set.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainers.config.mistakes import ConfigError
from trainers.config.parse import whole_number
from trainers.strategy.accelerate_rules import check
from trainers.strategy.strategy import STRATEGIES_DIR, Strategy, load_strategy, strategy_names

OPTION = "accelerate_config"
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK", "RANK", "LOCAL_RANK")
_MOST_RANKS = 1 << 20
_SET_BY_ACCELERATE = re.compile(
    r"(ACCELERATE_(USE|DEEPSPEED|DYNAMO|MIXED|CONFIG|GRADIENT)_|FSDP_|PARALLELISM_CONFIG_|MEGATRON_LM_)"
)
_OWN = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that Accelerate sets for its launcher's processes, and that torchrun or the user have set already."""


def is_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun (`python -m torch.distributed.run`) has started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def strategy_of_environment(name_or_path: str | None, environment: Mapping[str, str]) -> Strategy:
    """The strategy of a rank that torchrun has started, with torchrun's number of ranks and machines.

    Args:
        name_or_path: name or file of the strategy, from `--accelerate_config`; None if it is not given.
        environment: the rank's environment.

    Raises:
        ConfigError: if it is not given, or is not for so many ranks; names the line to type.
    """
    counts = {name: whole_number(environment.get(name, ""), 0, _MOST_RANKS) for name in _COUNTS}
    unset = [name for name in (*_COUNTS, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if unset or None in counts.values():
        raise ConfigError(f"torchrun has not set {', '.join(unset) or 'all ranks to numbers'}; {_other_way('ddp')}")
    ranks, local, machines = (int(counts[name] or 0) for name in _COUNTS[:3])
    if name_or_path is None:
        problem = f"torchrun starts {ranks} ranks, and does not say how the model is distributed over them"
        raise ConfigError(
            f"{problem}; add --{OPTION} with the name of a strategy or an Accelerate file, such as "
            f"`torchrun --nproc_per_node {local} trainers/train.py --{OPTION} ddp ...`, or {_other_way('ddp')}"
        )
    strategy = load_strategy(name_or_path)
    if ranks != local * machines:
        raise ConfigError(f"torchrun starts {local} ranks here and {ranks} in all on {machines} machines; each machine "
                          "needs the same --nproc_per_node")  # fmt: skip
    if ranks == 1:
        raise ConfigError(f"torchrun starts a single rank, which shares its work with no other; {_other_way('single')}")
    network = {"main_process_ip": environment["MASTER_ADDR"], "main_process_port": int(environment["MASTER_PORT"])}
    values = {**strategy.values, "num_processes": ranks, "num_machines": machines}
    values |= {"machine_rank": counts["GROUP_RANK"], **network} if machines > 1 else {}
    if mistakes := check(values, strategy.pp_size, strategy.ep_size):
        raise ConfigError(mistakes, f"with torchrun's {ranks} ranks")
    return replace(strategy, values=values)


def refuse_fresh_restart(resume_from: str | None, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if torchrun has started the ranks again, and they would begin again rather than resume.

    Args:
        resume_from: the option `resume_from_checkpoint`.
        environment: the rank's environment.
    """
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and resume_from != "auto":
        problem = "the launcher has started the ranks again, which would begin at the first step"
        raise ConfigError(f"{problem}; add --resume_from_checkpoint auto, or leave its --max_restarts out")


def _other_way(strategy: str) -> str:
    return f"start with `accelerate launch --config_file accelerate_configs/{strategy}.yaml trainers/train.py ...`"


def set_environment(name_or_path: str, ranks: int) -> None:
    """Sets the variables by which `accelerate launch` passes an Accelerate file to its ranks.

    Args:
        name_or_path: name or file of the strategy.
        ranks: number of ranks.

    Raises:
        ConfigError: if a variable is set already, to another value than the file says.
    """
    already_set = {name: os.environ.pop(name) for name in list(os.environ) if _SET_BY_ACCELERATE.match(name)}
    file = str(STRATEGIES_DIR / f"{name_or_path}.yaml") if name_or_path in strategy_names() else name_or_path
    wanted = _variables(str(Path(file).expanduser()), ranks)
    different = [f"{name}={value}" for name, value in sorted(already_set.items()) if wanted.get(name) != value]
    if different:
        names = " ".join(shlex.quote(text.partition("=")[0]) for text in different)
        problem = f"the environment sets {' '.join(different)}, which is not what {name_or_path} says"
        raise ConfigError(f"{problem}; the Accelerate file alone decides: `unset {names}`")
    os.environ.update(wanted)


def _variables(file: str, ranks: int) -> dict[str, str]:
    """The variables that Accelerate would add for a file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import check_cuda_p2p_ib_support
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    # On one machine and any free port: where the ranks meet, torchrun has said, and the rest does not depend on it.
    argv = ["--config_file", file, "--num_processes", str(ranks), "--num_machines", "1", "--main_process_port", "0"]
    args, defaults, precision_from_file = _validate_launch_command(launch_command_parser().parse_args([*argv, "-"]))
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, variables = prepare_deepspeed_cmd_env(args)
    else:
        variables = prepare_multi_gpu_env(args)
        if not check_cuda_p2p_ib_support():
            variables = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", **variables}
    return {name: value for name, value in variables.items() if name not in (*_OWN, *os.environ)}
