"""Accelerate configs are checked strictly: what Accelerate would ignore in silence is refused."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.strategy.strategy import (
    STRATEGIES_DIR,
    Machines,
    cannot_run,
    default_strategy,
    from_launcher,
    load_strategy,
    over_machines,
    refusal,
    resolve,
    strategy_names,
)
from trainers.tools.preflight import machine_mistakes

SHIPPED = sorted(STRATEGIES_DIR.rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_strategy_is_whole_and_documented(path: Path) -> None:
    strategy = load_strategy(path.stem)
    text = path.read_text(encoding="utf-8")
    for word in ("Parameters, gradients and optimizer state", "Use it when", "Communication", "Command:"):
        assert word in text
    preset = "gpt-oss-20b-lora" if strategy.ep_size > 1 else "tiny-lora"  # the tiny model has no experts
    command = "# Command: accelerate launch --config_file accelerate_configs/{}.yaml trainers/train.py --preset {}"
    assert command.format(path.stem, preset) in text
    assert load_config_from_file(str(path)).num_processes == strategy.num_processes
    assert len(strategy.summary) > 20


@pytest.mark.parametrize(
    ("name", "kind", "version", "stage", "offload", "sharded", "wrapped"),
    [
        ("single", "NO", 0, 0, "none", False, None),
        ("ddp", "MULTI_GPU", 0, 0, "none", False, "DistributedDataParallel"),
        ("fsdp1", "FSDP", 1, 0, "none", True, "FullyShardedDataParallel"),
        ("fsdp1_grad_op", "FSDP", 1, 0, "none", True, "FullyShardedDataParallel"),
        ("fsdp2", "FSDP", 2, 0, "none", True, "FSDPLossModule"),
        ("fsdp2_offload", "FSDP", 2, 0, "cpu", True, "FSDPLossModule"),
        ("hsdp", "FSDP", 2, 0, "none", True, "FSDPLossModule"),
        ("zero1", "DEEPSPEED", 0, 1, "none", False, "DeepSpeedEngine"),
        ("zero2", "DEEPSPEED", 0, 2, "none", False, "DeepSpeedEngine"),
        ("zero3", "DEEPSPEED", 0, 3, "none", True, "DeepSpeedEngine"),
        ("zero3_offload", "DEEPSPEED", 0, 3, "cpu", True, "DeepSpeedEngine"),
        ("sp", "FSDP", 2, 0, "none", True, "FSDPLossModule"),
        ("cp", "FSDP", 2, 0, "none", True, "FSDPLossModule"),
        ("tp", "MULTI_GPU", 0, 0, "none", False, "DistributedDataParallel"),
        ("fsdp2_tp", "FSDP", 2, 0, "none", True, "FSDPLossModule"),
        ("hsdp_tp", "FSDP", 2, 0, "none", True, "FSDPLossModule"),
        ("pp", "MULTI_GPU", 0, 0, "none", False, "PipelineStages"),
        ("pp_interleaved", "MULTI_GPU", 0, 0, "none", False, "PipelineStages"),
        ("pp_dp", "MULTI_GPU", 0, 0, "none", False, "PipelineStages"),
        ("pp_fsdp2", "FSDP", 2, 0, "none", True, "PipelineStages"),
        ("3d", "FSDP", 2, 0, "none", True, "PipelineStages"),
        ("zero2_tp", "DEEPSPEED", 0, 2, "none", False, "DeepSpeedEngine"),
    ],
)
def test_what_a_strategy_says_of_itself(
    name: str, kind: str, version: int, stage: int, offload: str, sharded: bool, wrapped: str | None
) -> None:
    strategy = load_strategy(name)
    assert (strategy.distributed_type, strategy.fsdp_version, strategy.zero_stage) == (kind, version, stage)
    assert (strategy.offload, strategy.sharded, strategy.wrapped_class) == (offload, sharded, wrapped)
    cut = strategy.sizes.sequence_shards * strategy.sizes.tp * strategy.sizes.pp
    assert strategy.data_parallel_size * cut == strategy.num_processes == strategy.sizes.world
    assert (bool(strategy.fsdp), bool(strategy.deepspeed)) == (kind == "FSDP", kind == "DEEPSPEED")
    assert strategy.outside_parity() == []


def test_fsdp2_names_its_class_so() -> None:
    """`fully_shard` makes a class of its own out of the module's; the self-check asks for its name."""
    code = inspect.getsource(importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard"))
    assert 'cls_to_fsdp_cls, FSDPModule, "FSDP"' in code


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_runs_copy_is_the_same_strategy(path: Path, tmp_path: Path) -> None:
    strategy = load_strategy(path.stem)
    resolved = resolve(strategy, 2 * strategy.num_processes if path.stem != "single" else 1, "bf16")
    copy = tmp_path / "accelerate.yaml"
    copy.write_text(resolved.dump())
    again = load_strategy(str(copy))
    assert (again.name, again.values) == (path.stem, resolved.values)
    assert resolve(again, again.num_processes, "bf16") == again
    accelerates = load_config_from_file(str(copy))
    assert accelerates.fsdp_config == resolved.fsdp
    assert accelerates.deepspeed_config == resolved.deepspeed
    assert accelerates.num_processes == resolved.num_processes


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_launcher_hands_the_ranks_what_the_strategy_says(path: Path) -> None:
    """Accelerate's own reading of each file, up to the environment of the ranks."""
    strategy = load_strategy(path.stem)
    words = ["--config_file", str(path), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (arguments.num_processes, arguments.mixed_precision) == (strategy.num_processes, "no")
    assert (arguments.use_fsdp, arguments.use_deepspeed) == (bool(strategy.fsdp), bool(strategy.deepspeed))
    if strategy.deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(strategy.deepspeed)
        _, given = prepare_deepspeed_cmd_env(arguments)
        assert given["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(strategy.zero_stage)
        assert given.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") == strategy.offload
        assert given.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false") == "false"
    else:
        given = prepare_multi_gpu_env(arguments)
        assert given.get("FSDP_VERSION", "0") == str(strategy.fsdp_version)
        for key, value in strategy.fsdp.items():
            assert given[key.upper()].lower() == str(value).lower()
        for axis, size in strategy.mesh.items():
            assert given[f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"] == str(size)


def test_a_pipeline_over_parts_of_rows_is_refused_under_fsdp(tmp_path: Path) -> None:
    """There the weights of a stage would stay whole on every rank with a part of the rows."""
    text = (STRATEGIES_DIR / "cp.yaml").read_text().replace("num_processes: 2", "num_processes: 4")
    (tmp_path / "mine.yaml").write_text("# pp_size: 2\n" + text)
    with pytest.raises(ConfigError, match=r"pp 2 x cp 2 under FSDP is not verified; use MULTI_GPU, or leave out pp"):
        load_strategy(str(tmp_path / "mine.yaml"))


def test_resolve_fits_the_mesh_to_the_processes() -> None:
    hsdp = load_strategy("hsdp")
    assert hsdp.mesh == {"dp_replicate": 2, "dp_shard": 2}
    assert resolve(hsdp, 8, "no").mesh == {"dp_replicate": 2, "dp_shard": 4}
    assert hsdp.mesh == {"dp_replicate": 2, "dp_shard": 2}
    with pytest.raises(
        ConfigError, match=r"strategy hsdp: num_processes=5 / dp_replicate 2 leaves 1; use a multiple of 2"
    ):
        resolve(hsdp, 5, "no")
    with pytest.raises(
        ConfigError, match=r"num_processes=2 / dp_replicate 2 = 1, nothing to shard over; use at least 4"
    ):
        resolve(hsdp, 2, "no")


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "zero2"])
def test_a_backends_own_mixed_precision_is_off(name: str) -> None:
    """Autocast is applied inside the wrapped module, by one rule for all backends."""
    strategy = load_strategy(name)
    for precision in ("no", "bf16"):
        assert resolve(strategy, strategy.num_processes, precision).values["mixed_precision"] == "no"
    if name in ("single", "ddp"):
        assert resolve(strategy, strategy.num_processes, "fp16").values["mixed_precision"] == "fp16"
    else:
        with pytest.raises(
            ConfigError, match="mixed_precision=fp16 needs loss scaling, which is only done under single"
        ):
            resolve(strategy, strategy.num_processes, "fp16")


def test_resolve_sets_processes_and_drops_device_ids() -> None:
    strategy = resolve(load_strategy("ddp"), 4, "bf16")
    assert (strategy.num_processes, strategy.values["mixed_precision"]) == (4, "no")
    with pytest.raises(ConfigError, match="num_processes=1"):
        resolve(load_strategy("ddp"), 1, "no")
    with pytest.raises(ConfigError, match="num_processes=2"):
        resolve(load_strategy("single"), 2, "no")


def test_a_precision_that_differs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    with pytest.raises(ConfigError, match="mixed_precision=bf16 in the file and the config no"):
        resolve(load_strategy(str(path)), 2, "no")
    assert resolve(load_strategy(str(path)), 2, "bf16").num_processes == 2


def test_defaults() -> None:
    assert (default_strategy(1), default_strategy(2)) == ("single", "ddp")
    assert (default_strategy(1, "phi-4-full"), default_strategy(8, "phi-4-full")) == ("single", "fsdp2")
    assert strategy_names()[0] == "single"


def launcher(*flags: str) -> list[str]:
    return ["python", "-m", "accelerate.commands.launch", *flags, "/x/trainers/train.py", "--preset", "tiny-lora"]


def test_the_launchers_own_command_line_says_the_strategy() -> None:
    ddp = str(STRATEGIES_DIR / "ddp.yaml")
    assert from_launcher(launcher("--config_file", ddp), "train.py").num_processes == 2
    assert from_launcher(launcher("--config_file", ddp, "--num_processes", "4"), "train.py").num_processes == 4
    assert from_launcher(launcher(f"--config_file={ddp}"), "train.py").name == "ddp"


@pytest.mark.parametrize("flag", [["--cpu"], ["--use_fsdp"], ["--multi_gpu"], ["--mixed_precision", "bf16"]])
def test_flags_that_change_the_strategy_are_refused(flag: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"the launcher was given .*write it there"):
        from_launcher(launcher("--config_file", str(STRATEGIES_DIR / "ddp.yaml"), *flag), "train.py")


def test_a_count_that_does_not_fit_the_mesh_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"with the launcher's flags: parallelism_config: .* = 4, but num_processes=8"
    ):
        from_launcher(launcher("--config_file", str(STRATEGIES_DIR / "hsdp.yaml"), "--num_processes", "8"), "train.py")


def test_without_config_file_the_cached_default_would_decide() -> None:
    with pytest.raises(ConfigError, match="no --config_file"):
        from_launcher(launcher("--num_processes", "2"), "train.py")


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ddp"):
        load_strategy("dddp")


@pytest.mark.parametrize("name", strategy_names())
def test_what_can_run_has_no_reason(name: str) -> None:
    assert cannot_run(load_strategy(name), "full", has_gpu=True) is None
    assert (cannot_run(load_strategy(name), "full", has_gpu=False) is None) == (name != "fsdp2_offload")
    fits_four_bits = not name.startswith(("fsdp1", "zero3"))
    assert (cannot_run(load_strategy(name), "qlora", has_gpu=True) is None) == fits_four_bits


@pytest.mark.parametrize(
    ("name", "method", "missing", "part"),
    [
        ("fsdp2_offload", "full", "", "fsdp_offload_params=true uses pinned memory, which needs an accelerator"),
        ("zero2", "full", "deepspeed", 'DeepSpeed is not installed; `pip install "tunesmith[deepspeed]"`'),
        ("zero3_offload", "full", "c++", "with a C++ compiler, but there is none; install g++"),
        ("fsdp1", "qlora", "", "method=qlora: FSDP 1 would put 4-bit and fp32 weights into one flat tensor"),
        ("zero3", "qlora", "", "method=qlora: ZeRO 3 would shard and cast 4-bit weights"),
    ],
)
def test_what_cannot_run_says_why(
    name: str, method: str, missing: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == missing else object())
    monkeypatch.setattr("shutil.which", lambda tool: None if missing == "c++" else f"/usr/bin/{tool}")
    assert part in str(cannot_run(load_strategy(name), method, has_gpu=False))


TINY = {"model_name_or_path": "embedded", "dataset_name": "embedded"}
PIPELINE = "# A pipeline.\n# pp_size: {size}\n# pp_schedule: {schedule}\n{rest}"


def pipeline_file(folder: Path, size: object = 2, schedule: str = "1f1b", name: str = "ddp") -> str:
    """A strategy file of our own, whose stages stand in comments."""
    file = folder / "mine.yaml"
    rest = (STRATEGIES_DIR / f"{name}.yaml").read_text()
    file.write_text(PIPELINE.format(size=size, schedule=schedule, rest=rest))
    return str(file)


def test_stages_stand_in_comments_and_go_into_the_runs_copy(tmp_path: Path) -> None:
    mine = resolve(load_strategy(pipeline_file(tmp_path, schedule="gpipe")), 4, "no")
    assert (mine.pp_size, mine.pp_schedule, str(mine.sizes)) == (2, "gpipe", "pp 2 x dp_replicate 2")
    copy = tmp_path / "accelerate.yaml"
    copy.write_text(mine.dump())
    again = load_strategy(str(copy))
    assert (again.pp_size, again.pp_schedule, again.sizes) == (mine.pp_size, mine.pp_schedule, mine.sizes)
    assert resolve(load_strategy("ddp"), 2, "no").pp_size == 1


def test_options_go_before_the_files_stages() -> None:
    pipelined = resolve(load_strategy("ddp"), 4, "no", pp_size=4, pp_schedule="zero_bubble")
    assert (str(pipelined.sizes), pipelined.pp_schedule, pipelined.wrapped_class) == (
        "pp 4",
        "zero_bubble",
        "PipelineStages",
    )
    assert resolve(load_strategy("pp"), 2, "no", pp_size=1).wrapped_class == "DistributedDataParallel"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ({"size": 0}, "pp_size=0 is not a number of stages; write 1 to 65536"),
        ({"size": "two"}, "pp_size=two is not a number of stages"),
        ({"schedule": "1f2b"}, "pp_schedule=1f2b is not a schedule; use gpipe, 1f1b, interleaved, zero_bubble, zbv"),
        ({"name": "zero2"}, "pp_size=2 cannot be combined with distributed_type=DEEPSPEED; use MULTI_GPU or FSDP"),
        ({"size": 3}, "pp 3 = 3, but num_processes=2; use a multiple of that"),
        (
            {"name": "fsdp2"},
            "fsdp_config.fsdp_reshard_after_forward=true with pp=2: a stage's layers are sharded one by one",
        ),
        ({"name": "hsdp"}, "pp 2 x dp_replicate 2 x dp_shard 2 = 8, but num_processes=4; make them equal"),
    ],
)
def test_stages_that_cannot_be_are_told(file: dict[str, object], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        load_strategy(pipeline_file(tmp_path, **file))  # type: ignore[arg-type]


def test_too_few_micro_batches_fp16_and_compiled_blocks_are_refused_for_a_pipeline() -> None:
    values = TINY | {"global_batch_size": 8}
    pipeline = resolve(load_strategy("pp"), 2, "no")
    few = build(values | {"per_device_train_batch_size": 8})
    assert "needs at least 2 micro-batches in a step, not 1" in str(refusal(pipeline, few, has_gpu=False))
    assert refusal(pipeline, build(values), has_gpu=False) is None
    compiled = build(values | {"torch_compile": True})
    assert "torch_compile=true is not verified with pp 2" in str(refusal(pipeline, compiled, has_gpu=False))
    assert "torch_compile=true is not verified with tp 2" in str(
        refusal(resolve(load_strategy("tp"), 2, "no"), compiled, has_gpu=False)
    )
    assert refusal(load_strategy("ddp"), compiled, has_gpu=False) is None
    quantised = build(values | {"method": "qlora"})
    for name, processes in (("pp", 2), ("tp", 2), ("3d", 8)):
        cut = resolve(load_strategy(name), processes, "no")
        assert "4-bit layers are not split" in str(refusal(cut, quantised, has_gpu=True))
    assert refusal(load_strategy("fsdp2"), quantised, has_gpu=True) is None
    saving = build(values | {"method": "lora", "modules_to_save": "lm_head"})
    dora = build(values | {"method": "lora", "use_dora": True})
    stacks = build(values | {"method": "lora", "lora_target_parameters": "experts.w"})
    assert "adapters on stacks of experts" in str(refusal(resolve(load_strategy("tp"), 2, "no"), stacks, has_gpu=False))
    grown = build(values | {"method": "lora", "new_tokens": "<a>"})
    for name in ("pp", "tp"):
        reason = str(refusal(resolve(load_strategy(name), 2, "no"), grown, has_gpu=False))
        assert reason.startswith(f"new_tokens=<a> with adapters and {name} 2")
        full = grown.model_copy(update={"method": "full"})
        assert refusal(resolve(load_strategy(name), 2, "no"), full, has_gpu=False) is None
    for name, divided in (("pp", saving), ("tp", saving), ("tp", dora)):
        reason = str(refusal(resolve(load_strategy(name), 2, "no"), divided, has_gpu=False))
        assert reason.startswith("modules_to_save=lm_head with" if divided is saving else "use_dora=true with tp 2")
    assert all(refusal(load_strategy("fsdp2"), divided, has_gpu=False) is None for divided in (saving, dora))
    experts = resolve(load_strategy("ep"), 2, "no")  # which divides nothing but experts
    assert all(refusal(experts, each, has_gpu=False) is None for each in (saving, stacks, grown))
    rounding = build(values | {"method": "full", "qat": "int4"})
    for name, processes, axes in (("pp", 2, "pp 2"), ("tp", 2, "tp 2"), ("3d", 8, "pp 2 x"), ("zero2", 2, "DeepSpeed")):
        reason = str(refusal(resolve(load_strategy(name), processes, "no"), rounding, has_gpu=False))
        assert reason.startswith(f"qat=int4 with {axes}")
        assert reason.endswith("use single, ddp or fsdp2")
    for name in ("single", "ddp", "fsdp1", "fsdp2", "cp"):
        assert refusal(load_strategy(name), rounding, has_gpu=False) is None
    hooked = build(values | {"ddp_comm_hook": "fp16"})
    tensor = resolve(load_strategy("tp"), 2, "no")
    assert "whose weights differ under tp, pp and ep" in str(refusal(tensor, hooked, has_gpu=False))
    assert refusal(load_strategy("ddp"), hooked, has_gpu=False) is None
    with pytest.raises(ConfigError, match="fp16 needs loss scaling"):
        resolve(load_strategy("tp"), 2, "fp16")
    assert resolve(load_strategy("ddp"), 2, "fp16").values["mixed_precision"] == "fp16"


@pytest.mark.parametrize(
    ("name", "has_gpu", "refused"),
    [("ddp", True, False), ("single", True, False), ("fsdp2", True, True), ("zero2", True, True), ("pp", True, True),
     ("tp", True, True), ("fsdp2", False, False), ("pp", False, False)],
)  # fmt: skip
def test_gloo_on_gpus_is_for_ddp(name: str, has_gpu: bool, refused: bool) -> None:
    strategy = resolve(load_strategy(name), 1 if name == "single" else 2, "no")
    reason = str(refusal(strategy, build(TINY | {"ddp_backend": "gloo"}), has_gpu))
    assert ("ddp_backend=gloo on GPUs is for ddp" in reason) == refused
    assert "ddp_backend" not in str(refusal(strategy, build(TINY | {"ddp_backend": "cpu:gloo,cuda:nccl"}), has_gpu))


@pytest.mark.parametrize(
    ("chosen", "has_gpu", "mistakes"),
    [({"ddp_backend": "nccl"}, False, ["ddp_backend=nccl needs GPUs, but there are none; use gloo or auto"]),
     ({"ddp_backend": "cpu:gloo,cuda:nccl"}, False,
      ["ddp_backend=cpu:gloo,cuda:nccl needs GPUs, but there are none; use gloo or auto"]),
     ({"ddp_backend": "gloo"}, False, []), ({"ddp_backend": "nccl"}, True, []),
     ({"ddp_backend": "gloo", "ddp_comm_hook": "bf16"}, True,
      ["ddp_comm_hook=bf16 needs NCCL; leave ddp_backend=gloo out, or use fp16 or none"])],
)  # fmt: skip
def test_a_backend_that_the_machine_cannot_have_is_refused(
    chosen: dict[str, str], has_gpu: bool, mistakes: list[str]
) -> None:
    assert [str(mistake) for mistake in machine_mistakes(build(TINY | chosen), has_gpu)] == mistakes


@pytest.mark.parametrize("name", ["mpi", "ucc", "NCCL", "gloo,nccl", ""])
def test_a_backend_that_pytorch_is_not_built_with_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"ddp_backend={name!r} is not a valid value; use .auto"):
        build(TINY | {"ddp_backend": name})


def test_tensor_parallelism_across_machines_is_told() -> None:
    machines = Machines(2, 0, "10.0.0.1", 29500)
    inside = resolve(over_machines(load_strategy("fsdp2_tp"), machines), 4, "no")
    assert inside.cautions(build(TINY)) == []
    across = resolve(over_machines(load_strategy("tp"), machines), 2, "no")
    (line,) = across.cautions(build(TINY))
    assert line.startswith("tp=2 spans machines of 1 processes each")
    here = resolve(load_strategy("tp"), 2, "no")
    assert here.cautions(build(TINY)) == []
    assert here.cautions(build(TINY | {"pp_schedule": "gpipe"})) == ["pp_schedule=gpipe is ignored: there is one stage"]


def test_a_pipeline_says_that_it_ignores_the_class_to_wrap(tmp_path: Path) -> None:
    policy = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    key = "fsdp_transformer_layer_cls_to_wrap"
    text = (STRATEGIES_DIR / "pp_fsdp2.yaml").read_text()
    assert policy in text
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(policy, f"{policy}  {key}: LlamaDecoderLayer\n"))
    [line] = load_strategy(str(file)).cautions(build(TINY))
    assert line.startswith(f"fsdp_config.{key} is ignored: each layer of a stage is sharded by itself; remove")
    assert load_strategy("pp_fsdp2").cautions(build(TINY)) == []


def test_comments_of_any_shape_say_the_stages(tmp_path: Path) -> None:
    for line in ("#pp_size: 2", "  ## pp_size = 2", "# pp_size:2"):
        file = tmp_path / "mine.yaml"
        file.write_text(
            f"# Mine, which speaks of pp_size and more.\n{line}\n{(STRATEGIES_DIR / 'ddp.yaml').read_text()}"
        )
        assert load_strategy(str(file)).pp_size == 2
