"""What `--check` and the start of a run say about a model: its files, its sizes, its family, its tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from tests.families import config_for as config
from tests.families import save_small as saved
from tests.made_runs import made_run
from tests.parity.runs import mostly_long
from trainers import train
from trainers.config.mistakes import ConfigError
from trainers.data.layout import MetadataRoute
from trainers.model.attention import KERNELS
from trainers.model.config_checks import is_causal
from trainers.model.load import build_model, load_base
from trainers.model.probe import ForwardPass, ProbeError, check_model_computes, compare, probe_rows
from trainers.model.reachability import silent_weights
from trainers.model.small_model import _reference, choose_attention, small_config
from trainers.objectives.loss_module import LossModule
from trainers.run.disk import bytes_needed, local_tensors
from trainers.run.errors import RollBack
from trainers.run.weight_headers import read_headers
from trainers.strategy.strategy import load_strategy
from trainers.tools.model_check import inspect_model
from trainers.tools.preflight import check

Change = Callable[[Path], object]


def checked(folder: Path, **changes: Any) -> list[str]:
    return check(config(folder, **changes), load_strategy("single"), has_gpu=False)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def without(name: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in weights.items() if name not in key}


UNFIT: dict[str, tuple[Change, str]] = {
    "a layer more than in the files": (
        partial(edit_config, num_hidden_layers=3), r"not in its files: model\.layers\.2\.input_layernorm\.weight"
    ),
    "a weight less": (
        partial(edit_weights, change=partial(without, "1.mlp.up_proj")),
        r"not in its files: model\.layers\.1\.mlp\.up_proj\.weight; what is missing would be random",
    ),
    "another width": (
        partial(edit_config, intermediate_size=50),
        r"model\.layers\.0\.mlp\.down_proj\.weight is 32x48 in the files and 32x50 in config\.json \(so are 5 others\)",
    ),
    "names of another program": (
        partial(edit_weights, change=lambda weights: {f"x.{name}": one for name, one in weights.items()}),
        r"they have x\.lm_head\.weight, .* which the model does not use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNFIT)
def test_weights_that_would_be_random_are_refused(fault: str, tmp_path: Path) -> None:
    """By the check from the headers, and by the start from what transformers says after loading, in the same words."""
    folder = saved(tmp_path)
    assert checked(folder), "control"
    change, message = UNFIT[fault]
    change(folder)
    with pytest.raises(ConfigError, match=message) as early:
        checked(folder)
    with pytest.raises(ConfigError) as late:
        load_base(config(folder))
    assert early.value.lines == late.value.lines


def test_a_base_without_its_head_is_refused_unless_the_head_is_the_embedding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not in its files: lm_head\.weight"):
        checked(saved(tmp_path / "untied", auto=AutoModel, tie_word_embeddings=False))
    checked(saved(tmp_path / "tied", auto=AutoModel, tie_word_embeddings=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_in_the_config_is_no_other_model(dtype: str) -> None:
    """As nearly every model's config has one; its small copy computes in fp32, in which it is compared."""
    small = small_config(AutoConfig.for_model("llama"))
    assert choose_attention(AutoConfig.for_model(**{**small.to_dict(), "dtype": dtype}), True) == KERNELS["sdpa"]


def test_weights_without_a_place_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    edit_weights(folder, lambda weights: {**weights, "value_head.weight": torch.ones(3)})
    assert "not used by the model: value_head.weight" in checked(folder)
    shorter = checked(folder, num_hidden_layers=1)
    assert not [line for line in shorter if "not used by the model" in line], "to leave them out was asked for"


@pytest.mark.parametrize(
    ("family", "refusal"),
    [("qwen2_5_vl", ""), ("llava", ""), ("paligemma", "attend in both directions")],
)
def test_a_model_of_images_and_text_is_taken_where_it_predicts_the_next_token(
    family: str, refusal: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, family)
    with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
        checked(folder)
    assert not is_causal(AutoConfig.for_model("florence2")), "it has an encoder"


@pytest.mark.parametrize(("family", "vision"), [("llama4", "vision_model"), ("qwen3_5", "")])
def test_of_a_multimodal_model_the_language_model_is_taken(family: str, vision: str, tmp_path: Path) -> None:
    lines = checked(saved(tmp_path, family, AutoModelForImageTextToText))
    unused = [line for line in lines if line.startswith("not used by the model")]
    assert bool(unused) == bool(vision), "transformers itself skips the vision tower of Qwen 3.5"
    assert all(vision in line for line in unused)


@pytest.mark.parametrize(
    "family", mostly_long(["mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_neox", "gemma2"], ["mixtral", "gpt2"])
)
def test_names_that_transformers_changes_as_it_loads_are_no_mistake(family: str, tmp_path: Path) -> None:
    """Experts are fused, prefixes added; GPT-2's own files have no `transformer.` before their names."""
    folder = saved(tmp_path, family)
    if family == "gpt2":
        edit_weights(folder, lambda weights: {name.removeprefix("transformer."): one for name, one in weights.items()})
    assert not [line for line in checked(folder) if "not used by the model" in line]
    edit_weights(folder, lambda weights: without(sorted(weights)[-1], weights))
    with pytest.raises(ConfigError, match="would be random"):
        checked(folder)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"hidden_size": -5}, r"its config\.json describes no model .*-5"),
    "zero": ({"hidden_size": 0}, r"its config\.json describes no model \(hidden_size=0 is not between 1 and"),
    "endless layers": ({"num_hidden_layers": 10**26}, r"num_hidden_layers=10{19} is not between 1 and 10,000"),
    "no names": ({"architectures": 7}, r"describes no model \(architectures is not a list of names\)"),
    "no number": ({"hidden_size": "x"}, r"its config\.json describes no model .*hidden_size"),
    "heads that do not divide": ({"num_attention_heads": 5, "head_dim": None}, "describes no model .*heads"),
    "an unknown family": ({"model_type": "nonsense"}, "does not know its model type 'nonsense'"),
    "another kind of model": ({"model_type": "t5"}, "t5 models are not causal language models"),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "has no language-modeling head"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_config_that_describes_no_model_gets_its_true_sentence(fault: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    changes, message = WRONG[fault]
    edit_config(folder, **changes)
    for look in (checked, lambda folder: load_base(config(folder))):
        with pytest.raises(ConfigError, match=message) as refused:
            look(folder)
        assert "HF_TOKEN" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ['{"max_new_tokens": -1}', "[1]", '{"a":' * 100_000 + "1" + "}" * 100_000, "no JSON", '{"eos']
)
def test_a_generation_config_that_cannot_be_used_is_found_by_the_check(content: str, tmp_path: Path) -> None:
    """transformers passes over one that is no JSON, and the export would have another."""
    folder = saved(tmp_path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert checked(folder), "control"
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"its generation_config\.json is refused by transformers .*; correct or rem"):
        checked(folder)


QUANTISED = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "by an unknown method": {},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    ("how", "method"), [*product(QUANTISED, ("full", "lora")), ("fp8", "qlora"), ("mxfp4", "qlora")]
)
def test_a_base_that_is_quantised_already_is_refused(how: str, method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    edit_config(folder, quantization_config={**QUANTISED, "fp8": FP8, "mxfp4": MXFP4}[how])
    refusal = rf"is already quantized \({how}\) and cannot be trained with method={method}; use the model"
    for look in (checked, lambda folder, **options: build_model(config(folder, **options))):
        with pytest.raises(ConfigError, match=refusal):
            look(folder, method=method)
    assert checked(folder, random_init=True), "only its sizes are used"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_fp8_weights_are_dequantised(method: str, tmp_path: Path) -> None:
    """As DeepSeek stores them: blocks with a scale each."""
    folder = saved(tmp_path)
    expected = load_base(config(folder)).state_dict()
    blocks = {}

    def quantise(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            rows, columns = weights[name].shape
            blocks[name] = scale = 2.0 ** torch.arange(rows * columns // 256).view(rows // 16, columns // 16)
            wide = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
            weights[name] = (weights[name] / wide).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale
            expected[name] = weights[name].float() * wide
        return weights

    edit_weights(folder, quantise)
    edit_config(folder, quantization_config=FP8)
    assert checked(folder, method=method)
    base = load_base(config(folder, method=method))
    assert blocks
    assert not hasattr(base.config, "quantization_config")
    for name, weight in base.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    assert needs_disk_for(base, folder)
    norm, scale = "model.norm.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"
    weights = load_file(folder / "model.safetensors")
    for lost, message in ((norm, f"not in its files: {norm}"), (scale, "weights without scales .*0.mlp.down_proj")):
        edit_weights(folder, lambda _, lost=lost: {name: one for name, one in weights.items() if name != lost})
        with pytest.raises(ConfigError, match=message):
            checked(folder, method=method)
    with pytest.raises(ConfigError, match="weights without scales"):
        load_base(config(folder, method=method))


def needs_disk_for(base: torch.nn.Module, folder: Path) -> bool:
    """Whether a full run needs room for this model, dequantised: weights and both moments, and the export, in fp32."""
    full = config(folder, method="full", save_steps=0, export_dtype="float32")
    rest = bytes_needed(full, [], 1)
    return bytes_needed(full, local_tensors(full), 1) - rest == 16 * sum(weight.numel() for weight in base.parameters())


@pytest.mark.parametrize("method", ["full", "lora"])
def test_mxfp4_weights_are_dequantised(method: str, tmp_path: Path) -> None:
    """As GPT-OSS stores its experts: 32 weights of 4 bits with a power of two."""
    folder = saved(tmp_path, "gpt_oss", intermediate_size=64)
    expected, codes = load_base(config(folder)).state_dict(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([codes, -codes])

    def quantise(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = weights.pop(name).shape
            packed = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8)
            weights[f"{name}_blocks"], weights[f"{name}_scales"] = packed, scales
            values = table[torch.stack([packed & 15, packed >> 4], -1).long()].flatten(-2)
            wide = values * 2.0 ** (scales.float() - 127)[..., None]
            expected[name] = wide.flatten(-2).transpose(1, 2)
        return weights

    edit_weights(folder, quantise)
    edit_config(folder, quantization_config=MXFP4)
    assert checked(folder, method=method, packing=False)
    base = load_base(config(folder, method=method, packing=False))
    for name, weight in base.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    assert needs_disk_for(base, folder)
    edit_weights(folder, lambda weights: without("0.mlp.experts.down_proj_scales", weights))
    with pytest.raises(ConfigError, match=r"weights without scales in its files: model\.layers\.0\.mlp\.experts\.down"):
        checked(folder, method=method, packing=False)


def test_the_adapters_of_a_mixture_are_counted(tmp_path: Path) -> None:
    lora = config(saved(tmp_path, "mixtral"), method="lora", packing=False)
    facts = inspect_model(lora, read_headers(tmp_path), load_strategy("single"))
    assert facts["trained_weights"] == sum(one.numel() for one in build_model(lora).parameters() if one.requires_grad)


def test_a_pattern_that_matches_no_adapter_is_found_by_the_check(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(ConfigError, match="lora_rank_pattern=k_porj=4 matches no module that has an adapter"):
        checked(folder, method="lora", lora_rank_pattern="k_porj=4")
    assert checked(folder, method="lora", lora_rank_pattern="k_proj=4")


def test_weights_of_8_bits_are_refused_though_the_config_does_not_say_so(tmp_path: Path) -> None:
    """Their scales would be left out, as the model has no place for them."""
    folder = saved(tmp_path)
    edit_weights(folder, lambda weights: {name: one.to(torch.float8_e4m3fn) for name, one in weights.items()})
    with pytest.raises(ConfigError, match=r"is already quantized \(F8_E4M3\)"):
        checked(folder)


def test_a_saved_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a LlamaForSequenceClassification"):
        checked(saved(tmp_path, auto=AutoModelForSequenceClassification))


def test_a_url_and_an_adapter_are_no_models(tmp_path: Path) -> None:
    for url in ("gopher://x", "https://huggingface.co/gpt2", "file:///etc"):
        with pytest.raises(ConfigError, match=f"model_name_or_path={url} is a URL"):
            checked(Path("embedded"), model_name_or_path=url)
    folder = saved(tmp_path)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "another"}')
    with pytest.raises(ConfigError, match="holds an adapter"):
        checked(folder)


HEADERS: dict[str, dict[str, Any]] = {
    "another shape": {"shape": [32, 49]},
    "another dtype": {"dtype": "F16"},
    "an unknown dtype": {"dtype": "F7"},
    "negative sizes": {"shape": [-32, -48]},
    "sizes with a point": {"shape": [32.0, 48.0]},
    "no sizes": {"shape": None},
    "over another tensor": {"data_offsets": [0, 32 * 48 * 4]},
    "one offset": {"data_offsets": [0]},
}


@pytest.mark.parametrize("lie", HEADERS)
def test_a_header_that_does_not_describe_its_file_is_refused(lie: str, tmp_path: Path) -> None:
    """As safetensors does when it loads the file."""
    path = saved(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data])
    header["model.layers.0.mlp.down_proj.weight"] |= HEADERS[lie]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[data:])
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
    for look in (checked, lambda folder: load_base(config(folder))):
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or truncated|cannot be loaded"):
            look(tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_weights_that_are_cut_short_are_refused(cut: int, tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ConfigError, match=r"cannot be used \(model\.safetensors is damaged or truncated\)"):
        checked(tmp_path)


def test_only_files_that_would_be_loaded_are_looked_at(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "consolidated.safetensors").write_bytes(b"half a download")
    assert checked(folder)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with pytest.raises(ConfigError, match=r"has only consolidated\S+, model\.fp16\.safetensors; it needs model"):
        checked(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"its weight files cannot be used .*model-00001-of-00002"):
        checked(folder)


def write(name: str, content: str) -> Change:
    """A change that puts a file in the place of the weights."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_text(content)

    return change


DAMAGE: dict[str, tuple[Change, str]] = {
    "a pointer in place of weights": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        r"\(model\.safetensors is a pointer of Git LFS, which `git lfs pull` replaces by the weights\)",
    ),
    "an index that is a list": (write("model.safetensors.index.json", "[]"), "has no weight_map"),
    "an index without files": (write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), "has no weight_map"),
    "only a GGUF file": (write("model.gguf", "GGUF"), r"has only model\.gguf; it needs model\.safetensors"),
    "only a pickle": (write("pytorch_model.bin", ""), r"only pytorch_model\.bin, which would run code when read"),
    "a model type of tomorrow": (
        partial(edit_config, model_type="llama9"),
        r"transformers \d\S* does not know its model type 'llama9'; install a newer transformers",
    ),
    "a model type of its own": (
        partial(edit_config, model_type="mine", auto_map={"AutoConfig": "modeling.Config"}),
        "has its own code; review it, then pass --trust_remote_code true",
    ),
    "an unknown kind of positions": (
        partial(edit_config, rope_parameters={"rope_type": "magic", "rope_theta": 1.0}), "KeyError: 'magic'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_that_many_meet_is_named(damage: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(ConfigError, match=message):
        checked(folder)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_weight_that_is_not_a_number_is_named(is_damaged: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    if is_damaged:
        edit_weights(folder, lambda weights: {**weights, "model.norm.weight": weights["model.norm.weight"] * math.nan})
    base = load_base(config(folder))
    name = r"weights hold NaN or infinity \(the first is model\.norm\.weight\)"
    with pytest.raises(ConfigError, match=name) if is_damaged else nullcontext():
        check_model_computes(LossModule(base), base, True, torch.device("cpu"), torch.float32)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, vocab_size=1000)
    with pytest.raises(ConfigError, match=r"token 10\d\d but the model has embeddings for 1000 tokens, 0 to 999"):
        checked(folder)


@pytest.mark.parametrize("family", ["falcon", "gptj", "gpt_neo", "bloom", "codegen", "xglm"])
def test_families_with_attention_of_their_own_are_trained_unpacked(family: str) -> None:
    model_config = AutoConfig.for_model(family)
    with pytest.raises(ConfigError, match=f"packing=true: {family} models .*; use packing=false"):
        choose_attention(model_config, packing=True)
    assert choose_attention(model_config, packing=False) in ("sdpa", "eager")


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "deepseek_v3", "gpt_oss"]
)
def test_families_that_take_our_attention_get_it(family: str) -> None:
    assert choose_attention(AutoConfig.for_model(family), packing=True) == "tunesmith_fused"


@pytest.mark.parametrize("packing", [True, False])
def test_a_model_whose_head_is_called_decoder_is_looked_at(packing: bool) -> None:
    assert choose_attention(AutoConfig.for_model("modernbert-decoder"), packing)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "camembert"])
def test_encoders_are_refused_unless_they_are_decoders(family: str) -> None:
    for packing in (True, False):
        with pytest.raises(ConfigError, match=r"attend in both directions .*use another model"):
            choose_attention(AutoConfig.for_model(family), packing)
    assert choose_attention(AutoConfig.for_model(family, is_decoder=True), packing=False)


def test_an_encoder_that_leaves_out_the_token_that_would_show_it_is_refused() -> None:
    for packing in (True, False):
        with pytest.raises(ConfigError, match=r"^xlm models .*use another model"):
            choose_attention(AutoConfig.for_model("xlm"), packing)


def test_the_check_takes_packed_rows_for_a_hybrid(tmp_path: Path) -> None:
    assert checked(saved(tmp_path, "nemotron_h"), packing=True)


def test_a_small_copy_is_small_in_the_sizes_of_linear_attention_too() -> None:
    """In true size the reference implementation takes a minute."""
    small = small_config(AutoConfig.for_model("kimi_linear"))
    assert (small.linear_num_heads, small.linear_head_dim) == (4, 8)


def test_a_copy_of_mamba_2_has_heads_that_fill_its_layers() -> None:
    assert _reference(AutoConfig.for_model("mamba2"), False) is not None, "a small copy that runs"


def test_families_whose_documents_cannot_be_kept_apart_are_packed_never() -> None:
    """State runs on into the next document, little as it may be: MiniMax's linear attention has no convolution."""
    with pytest.raises(ConfigError, match="use packing=false"):
        choose_attention(AutoConfig.for_model("minimax"), packing=True)
    assert choose_attention(AutoConfig.for_model("minimax"), packing=False)
    assert choose_attention(AutoConfig.for_model("llama4_text"), packing=True), "within a chunk of its attention"


def test_a_copy_that_is_not_small_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is counted without memory: a family may name its sizes in a way that nobody knows."""
    devices, real = [], AutoModelForCausalLM.from_config

    def build_on(*shape: Any, **options: Any) -> Any:
        devices.append(str(torch.get_default_device()))
        return real(*shape, **options)

    monkeypatch.setattr("trainers.model.small_model.AutoModelForCausalLM.from_config", build_on)
    monkeypatch.setattr("trainers.model.small_model._LARGEST", 1000)
    assert choose_attention(AutoConfig.for_model("llama"), packing=True) == "tunesmith_fused"
    assert devices == ["meta"]


def test_the_choice_leaves_the_seed_and_the_documents_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    choose_attention(AutoConfig.for_model("llama"), packing=True)
    assert torch.equal(torch.rand(4), expected)
    assert MetadataRoute.current is None, "or the next forward pass of another length fails"


@pytest.mark.parametrize("packing", [True, False])
def test_a_loss_that_is_not_the_models_own_is_refused_with_numbers(packing: bool) -> None:
    """As it was for encoders; a head rule that is off by a little is one more way to it."""
    model = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model("llama")), attn_implementation="eager")
    model.set_attn_implementation("tunesmith_fused")
    loss, cpu = LossModule(model), torch.device("cpu")
    check_model_computes(loss, model, packing, cpu, torch.float32)
    loss.rule = (1.001, None)
    with pytest.raises(ConfigError, match=r"our loss is \d\.\d+ and the model's own forward pass gives \d\.\d+"):
        check_model_computes(loss, model, packing, cpu, torch.float32)


@pytest.mark.parametrize(
    ("packing", "splits_rows", "remedy"),
    [
        (True, False, "; use packing=false, another model"),
        (False, False, "; use another model"),
        (True, True, "; use a strategy without cp and sp, or another model"),
        (False, True, "; use a strategy without cp and sp, or another model"),
    ],
)
def test_the_remedy_is_one_that_applies(packing: bool, splits_rows: bool, remedy: str) -> None:
    """Where ranks share a row, packing=false changes nothing."""
    model = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model("llama")), attn_implementation="eager")
    model.set_attn_implementation("tunesmith_fused")
    loss = LossModule(model)
    loss.rule = (1.001, None)
    with pytest.raises(ConfigError) as caught:
        check_model_computes(loss, model, packing, torch.device("cpu"), torch.float32, splits_rows=splits_rows)
    assert str(caught.value).endswith(remedy)


def test_a_model_that_overflows_is_not_taken_for_an_encoder() -> None:
    model = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model("llama")))
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(3e38)
    with pytest.raises(ConfigError, match="llama models give NaN or infinity in float32"):
        check_model_computes(LossModule(model), model, False, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("loss", "fits"), [(0.055, True), (0.08, False)])
def test_a_small_loss_is_not_held_to_less_than_rounding(loss: float, fits: bool) -> None:
    """Sums of bf16 differ by as much for text that a model knows by heart."""
    hidden = probe_rows(64, torch.device("cpu"))[..., None].float()
    ours, own = ForwardPass(hidden.cumsum(1), loss), ForwardPass(hidden.cumsum(1), 0.05)
    with nullcontext() if fits else pytest.raises(ProbeError, match=r"our loss is 0\.080000"):
        compare(ours, own, "llama", False, torch.bfloat16)


def test_a_head_with_a_transform_is_trained() -> None:
    small = small_config(AutoConfig.for_model("bert", is_decoder=True))
    model = AutoModelForCausalLM.from_config(small)
    assert not silent_weights(model)


def test_a_refusal_that_one_rank_alone_meets_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads the note when it finds the other rank gone; there is none of a run that rolls back."""
    run, launch = made_run(tmp_path, "a", "running"), SimpleNamespace(supervised=True)
    monkeypatch.setattr(train, "wait_for_rank0", lambda: None)
    monkeypatch.setenv("RANK", "1")
    assert train.report_failure(RollBack("a spike"), run, launch) == 1
    assert run.noted_failure() is None
    assert train.report_failure(ConfigError("this model sees later tokens"), run, launch) == 2
    assert run.noted_failure() == "rank 1: this model sees later tokens"
