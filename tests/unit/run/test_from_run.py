"""What a run that starts from another one is made of, and what is refused. Nothing is trained."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, dump_yaml
from trainers.config.validation import build
from trainers.embedded import BASE_DIR
from trainers.run.compatibility import plain
from trainers.run.folder import Process, RunFolder, write_json
from trainers.run.from_run import adapter_of, record_start, resolve_request, start_line
from trainers.run.lineage import EXPORT_RECORD, Stage, as_stages, export_record, in_words, stages_of

ADAPTER = {
    "peft_type": "LORA", "base_model_name_or_path": str(BASE_DIR), "r": 4, "lora_alpha": 8.0, "lora_dropout": 0.25,
    "target_modules": ["v_proj", "q_proj"], "use_rslora": True, "bias": "none", "inference_mode": True,
    "rank_pattern": {}, "use_dora": False, "qalora_group_size": 16, "revision": None,
}  # fmt: skip


def write_adapter(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    save_file({"a": np.arange(4, dtype=np.float32)}, folder / "adapter_model.safetensors")
    return folder


def write_full(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.arange(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def finished(runs: Path, name: str = "sft", method: str = "full", merged: bool = False, **config: Any) -> RunFolder:
    """A run that is done, with its export."""
    given = {"method": method, "merge_adapter": merged, **config}
    run = made_run(runs, name, config=given)
    settings = build({"model_name_or_path": "embedded", "dataset_name": "embedded", **given})
    if method == "full" or merged:
        write_full(run.model)
    else:
        write_adapter(run.model, r=settings.lora_r, lora_alpha=settings.lora_alpha, use_rslora=settings.use_rslora)
    stage = Stage(name, settings.objective, method, "embedded", 60)
    write_json(run.model / EXPORT_RECORD, export_record(plain(settings), [stage]))
    return run


@pytest.fixture
def runs(tmp_path: Path, elsewhere: None) -> Path:
    return tmp_path / "runs"


def resolved(name: object, preset: str | None = None, **options: Any) -> TrainConfig:
    return resolve_request(Request(preset, options={"dataset_name": "embedded", "from_run": str(name), **options}))


def refusal(name: object, preset: str | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(name, preset, **options)
    return str(caught.value)


def test_full_weights_become_the_base_model(runs: Path) -> None:
    run = finished(runs, template_date="2025-01-02", num_hidden_layers=2)
    config = resolved("sft")
    assert (config.model_name_or_path, config.from_run) == (str(run.model), str(run.model))
    assert (config.method, config.template_date, config.num_hidden_layers) == ("full", "2025-01-02", None)
    assert adapter_of(config) is None
    assert resolved("sft", method="lora").method == "lora"


def test_a_run_is_named_by_id_by_path_or_by_the_folder_of_its_export(runs: Path) -> None:
    run = finished(runs)
    assert resolved("sft") == resolved(run.path) == resolved(run.model) == resolved("runs/sft")
    elsewhere = Path(shutil.copytree(run.model, runs.parent / "moved"))
    assert resolved(elsewhere).method == "full"


def test_a_preset_gives_way_to_the_run_and_options_do_not(runs: Path) -> None:
    run = finished(runs, method="lora", lora_r=8, lora_alpha=4.0)
    config = resolved("sft", "tiny-lora")
    assert (config.lora_r, config.lora_alpha, config.preset) == (8, 4.0, "tiny-lora")
    assert resolved("sft", "tiny-full").method == "full"
    text = refusal("sft", "tiny-lora", lora_r="16", model_name_or_path="other/model")
    assert "lora_r=16, and from_run=sft has 8; leave it out" in text
    assert "model_name_or_path=other/model, and from_run=sft has embedded; leave it out" in text
    assert resolved("sft", lora_r="8", lora_alpha="4", model_name_or_path=str(BASE_DIR)).from_run == str(run.model)


def test_a_run_s_adapter_is_trained_further_as_it_was(runs: Path) -> None:
    run = finished(runs, method="lora", lora_target_modules=["all-linear"], use_rslora=True, num_hidden_layers=2,
                   rope_scaling="linear", rope_factor=2.0)  # fmt: skip
    config = resolved("sft", objective="dpo", lora_dropout=0.5)
    assert (config.method, config.lora_target_modules, config.use_rslora) == ("lora", ["all-linear"], True)
    assert (config.num_hidden_layers, config.rope_scaling, config.rope_factor) == (2, "linear", 2.0)
    assert (config.model_name_or_path, config.lora_dropout) == ("embedded", 0.5)
    assert adapter_of(config) == run.model
    assert "trained further (rank 16)" in start_line(config, {"run": "sft", "folder": "x"})
    assert "merged" in start_line(resolved("sft", method="full"), {"run": "sft", "folder": "x"})


def test_a_merged_export_is_a_base_for_new_adapters(runs: Path) -> None:
    finished(runs, method="lora", merged=True)
    config = resolved("sft", lora_r=64)
    assert (config.method, config.lora_r, adapter_of(config)) == ("lora", 64, None)


def test_an_adapter_of_peft_says_itself_what_it_is(runs: Path) -> None:
    folder = write_adapter(runs / "adapter")
    config = resolved(folder)
    assert (config.lora_r, config.lora_alpha, config.use_rslora, config.lora_dropout) == (4, 8.0, True, 0.25)
    assert (config.model_name_or_path, config.lora_target_modules) == ("embedded", ["q_proj", "v_proj"])
    assert resolved(folder, method="qlora").lora_r == 4
    assert resolved(folder, method="full").lora_r == 16
    saves = write_adapter(runs / "saves", modules_to_save=["embed_tokens", "lm_head"])
    assert resolved(saves).modules_to_save == ["embed_tokens", "lm_head"]
    assert "modules_to_save=norm, and from_run" in refusal(saves, modules_to_save="norm")
    assert resolved(write_adapter(runs / "dora", use_dora=True)).use_dora
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.self_attn\.v_proj": 4.0}}
    config = resolved(write_adapter(runs / "patterns", **patterns))
    assert (config.lora_rank_pattern, config.lora_alpha_pattern) == tuple(patterns.values())
    assert "lora_rank_pattern=q_proj=3, and from_run" in refusal(runs / "patterns", lora_rank_pattern="q_proj=3")


def test_modules_that_an_adapter_leaves_out_everywhere_are_no_targets(runs: Path) -> None:
    """peft lists the kinds of layers of a vision tower among the targets, and excludes its layers by name."""
    targets, tower = ["q_proj", "attn.qkv", "proj"], {"exclude_modules": ["model.visual.0.attn.qkv"]}
    folder = write_adapter(runs / "adapter", target_modules=targets, **tower)
    weight = np.zeros((2, 2), dtype=np.float32)
    names = ("base_model.model.model.layers.0.q_proj.lora_A.weight",)
    save_file(dict.fromkeys(names, weight), folder / "adapter_model.safetensors")
    assert resolved(folder).lora_target_modules == ["q_proj"]
    other = write_adapter(runs / "other", target_modules=targets)
    assert resolved(other).lora_target_modules == sorted(targets), "the control: what is missing there is damage"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_config_of_such_a_run_resolves_to_itself(method: str, runs: Path) -> None:
    """As ranks and resumes read it."""
    finished(runs, method=method)
    config = resolved("sft", "tiny-lora", method=method, objective="dpo", dataset_name="pairs.jsonl")
    (runs / "again.yaml").write_text(dump_yaml(config))
    assert resolve_request(Request(config=str(runs / "again.yaml"))) == config


def without_model(run: RunFolder) -> None:
    shutil.rmtree(run.model)


def stopped(run: RunFolder) -> None:
    write_json(run.state_file, {**(run.read_state() or {}), "state": "stopped"})


def running(run: RunFolder) -> None:
    state = {"state": "running", "processes": [Process.of("rank", 0).as_json()]}
    write_json(run.state_file, {**(run.read_state() or {}), **state})


def died(run: RunFolder) -> None:
    write_json(run.state_file, {**(run.read_state() or {}), "state": "running"})


def exported_early(run: RunFolder) -> None:
    stopped(run)
    write_full(run.path / "export-full")
    write_full(run.path / "export-adapter-ema")  # other weights than those that were trained


def without_weights(run: RunFolder) -> None:
    (run.model / "model.safetensors").unlink()


def with_a_shard_missing(run: RunFolder) -> None:
    os.rename(run.model / "model.safetensors", run.model / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_json(run.model / "model.safetensors.index.json", {"weight_map": shards})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_model, ["has no export", "tunesmith export"]),
        (stopped, ["from_run=sft is stopped, and has exported no result", "tunesmith resume", "tunesmith export"]),
        (died, ["is running, and has exported no result", "tunesmith resume"]),
        (running, ["from_run=sft is running; wait until it is done"]),
        (exported_early, ["is stopped", "--from_run", "export-full"]),
        (without_weights, ["model.safetensors is missing", "export the run again"]),
        (with_a_shard_missing, ["model-00002-of-00002.safetensors is missing"]),
    ],
)  # fmt: skip
def test_a_run_without_its_result_is_refused_with_a_way_out(change: Any, expected: list[str], runs: Path) -> None:
    run = finished(runs)
    assert resolved("sft").from_run == str(run.model)
    change(run)
    text = refusal("sft")
    assert all(part in text for part in expected), text
    if change is exported_early:
        assert resolved(run.path / "export-full").model_name_or_path == str(run.path / "export-full")


def test_unknown_names_are_refused(runs: Path) -> None:
    finished(runs, "20261127-sft-1")
    assert "there is no such run in runs; did you mean 20261127-sft-1?" in refusal("sft")
    for name in ("runs/gone", "runs/" + "x" * 300, "x" * 300):
        assert "does not exist" in refusal(name)
    assert "there is no such run" in refusal("x\0y")
    (runs / "empty").mkdir()
    assert "holds neither a run nor a model" in refusal("runs/empty")
    assert "from_run" not in refusal("none")  # means no start; without a model then


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_bdlora": True}, "use_bdlora=True, which is not supported"),
        ({"trainable_token_indices": [1]}, "trains tokens of the vocabulary, and does not say which are new"),
        ({"rank_pattern": {"(": 2}}, "lora_rank_pattern={'(': 2} is refused"),
        ({"bias": "all"}, "bias=all"),
        ({"target_modules": ".*_proj"}, "not a list of names"),
        ({"peft_type": "IA3"}, "of type 'IA3'"),
        ({"base_model_name_or_path": None}, "names no base model"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_trained_further_are_refused(changes: Any, expected: str, runs: Path) -> None:
    assert expected in refusal(write_adapter(runs / "adapter", **changes))


SCORED = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}


def test_the_adapter_of_a_reward_model_goes_on_as_one_and_as_nothing_else(runs: Path) -> None:
    scored = write_adapter(runs / "scored", **SCORED)
    config = resolved(scored, objective="reward")
    assert (config.method, config.lora_r, adapter_of(config)) == ("lora", 4, scored)
    for objective in ("sft", "dpo"):
        assert f"has no language-modeling head for objective={objective}" in refusal(scored, objective=objective)
    spoken = write_adapter(runs / "spoken", task_type="CAUSAL_LM")
    assert "objective=reward trains a head that it lacks; start from merged weights" in refusal(
        spoken, objective="reward"
    )
    assert resolved(spoken, objective="dpo").lora_r == 4
    other = write_adapter(runs / "other", **{**SCORED, "modules_to_save": ["score", "embed_tokens"]})
    assert resolved(other, objective="reward").modules_to_save == ["embed_tokens"]
    assert config.modules_to_save == []


def test_damaged_adapters_are_refused(runs: Path) -> None:
    folder = write_adapter(runs / "adapter")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    assert "damaged" in refusal(folder)
    weights.unlink()
    assert "adapter_model.safetensors is missing" in refusal(folder)


def test_another_base_than_the_adapter_was_trained_on_is_refused(runs: Path) -> None:
    finished(runs, "four-bit", method="qlora")
    finished(runs, "lora", method="lora")
    assert resolved("four-bit").method == "qlora"
    assert "in 4 bits, and method=full; start from merged weights" in refusal("four-bit", method="full")
    assert "in 4 bits, and method=lora" in refusal("four-bit", method="lora")
    assert "not in 4 bits, and method=qlora" in refusal("lora", method="qlora")
    half = {"method": "full", "master_weights": "no", "mixed_precision": "bf16"}
    assert "round it away in bf16" in refusal("lora", **half)
    assert "master_weights" in refusal("lora", method="full", master_weights="perhaps", lora_r="x")


def test_weights_that_changed_since_the_start_are_refused_unless_a_checkpoint_has_them(runs: Path) -> None:
    run = finished(runs)
    config = resolved("sft")
    start = record_start(config, None, False)
    assert start
    assert (start["run"], start["step"], start["folder"]) == ("sft", 60, str(run.model))
    assert record_start(config, start, False) == start
    save_file({"a": np.arange(1, 5, dtype=np.float32)}, run.model / "model.safetensors")
    with pytest.raises(ConfigError, match="has other weights than when this run was started"):
        record_start(config, start, False)
    assert record_start(config, start, True) == start
    forced = record_start(config.model_copy(update={"force_resume": True}), start, False)
    assert forced
    assert forced["weights"] != start["weights"]
    assert record_start(build({"model_name_or_path": "embedded", "dataset_name": "embedded"}), None, False) is None


def test_the_stages_of_a_chain(runs: Path) -> None:
    finished(runs)
    config = resolved("sft", objective="dpo", dataset_name="pairs")
    manifest = {"config": plain(config), "step": 7, "from_run": record_start(config, None, False)}
    stages = stages_of(manifest, "second")
    assert in_words(stages) == (
        "sft (sft on embedded, method=full, step 60), then second (dpo on pairs, method=full, step 7)"
    )
    assert stages_of({**manifest, "from_run": None}, "second") == stages[1:]
    assert as_stages(export_record({}, stages)["stages"]) == stages
    assert as_stages([{"run": 3}, "x", {"run": "a", "step": "b"}]) == [Stage("a")]
    folder = write_full(runs / "plain")
    start = record_start(resolved(folder), None, False)
    assert start
    assert in_words(as_stages(start["stages"])) == f"the weights in {folder}"
