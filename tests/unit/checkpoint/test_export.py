"""What is exported: its dtype, its stop tokens, and that it is the model that was trained."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from app.push.files import read_for_push
from tests.families import save_small
from tests.made_runs import made_run
from trainers.checkpoint import export, export_check
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.layout import AttentionMetadata
from trainers.data.prepare import load_tokenizer, prepare
from trainers.embedded import BASE_DIR
from trainers.model.load import build_model, stored_dtype
from trainers.model.small_model import small_config
from trainers.monitor import heartbeat
from trainers.run.compatibility import plain
from trainers.run.errors import TrainingError
from trainers.run.lineage import EXPORT_RECORD


def saved_base(folder: Path, dtype: torch.dtype) -> Path:
    """The embedded model with its weights in a dtype."""
    AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=dtype).save_pretrained(folder)
    for path in [*BASE_DIR.glob("tokenizer*"), BASE_DIR / "chat_template.jinja"]:
        shutil.copy(path, folder)
    return folder


def config(base: Path, **changes: Any) -> TrainConfig:
    return build({"model_name_or_path": str(base), "dataset_name": "embedded", "max_train_samples": 20, **changes})


def trained(choice: TrainConfig) -> Any:
    """A model whose adapters, or weights, are not those that it began with."""
    model = build_model(choice)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=generator) * 0.02
    return model


def dtypes(folder: Path) -> set[str]:
    """Dtypes in the safetensors files of a folder."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("kind", "stored", "chosen", "wanted"),
    [
        ("full", torch.bfloat16, "auto", "BF16"), ("merged", torch.bfloat16, "float32", "F32"),
        ("adapter", torch.float32, "bfloat16", "BF16"),
        pytest.param("merged", torch.bfloat16, "auto", "BF16", marks=pytest.mark.long),
        pytest.param("adapter", torch.bfloat16, "auto", "BF16", marks=pytest.mark.long),
        pytest.param("full", torch.float16, "auto", "F16", marks=pytest.mark.long),
        pytest.param("full", torch.float32, "auto", "F32", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_an_export_has_the_dtype_of_the_base_or_the_one_asked_for(
    kind: str, stored: torch.dtype, chosen: str, wanted: str, tmp_path: Path
) -> None:
    method = "full" if kind == "full" else "lora"
    choice = config(saved_base(tmp_path / "base", stored), method=method, export_dtype=chosen)
    checked = export.export(lambda _: trained(choice), choice, tmp_path / "model", kind, {})
    assert dtypes(tmp_path / "model") == {wanted}
    assert checked.deviation is not None
    assert checked.deviation <= checked.limit
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"difference {checked.difference:.1e}" in card
    assert checked.texts is not None
    same = checked.texts[0] == checked.texts[1]
    assert same or wanted != "F32", "nothing was rounded"
    assert ("the greedy text of 16 tokens is the same" in card) is same
    loader = AutoPeftModelForCausalLM if kind == "adapter" else AutoModelForCausalLM
    assert loader.from_pretrained(tmp_path / "model").generation_config.eos_token_id == 0


@torch.no_grad()
def test_merged_weights_are_rounded_once(tmp_path: Path) -> None:
    """Not before they are merged, where a small adapter would be lost."""
    choice = config(saved_base(tmp_path / "base", torch.bfloat16), mixed_precision="bf16")
    model = trained(choice)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    base, delta = layer.base_layer.weight.float(), layer.get_delta_weight("default").float()
    twice = base.bfloat16() + delta.bfloat16()
    export.export(lambda _: model, choice, tmp_path / "model", "merged", {})
    weight = load_file(tmp_path / "model" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(weight, (base + delta).bfloat16())
    assert not torch.equal(weight, twice)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    choice = config(saved_base(tmp_path / "base", torch.bfloat16), method="full")
    export.export(lambda _: trained(choice), choice, tmp_path / "model", "full", {})
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@torch.no_grad()
def test_an_adapter_on_one_of_two_tied_weights_is_merged_into_that_one(target: str, tmp_path: Path) -> None:
    """Merged into both, the model would be another one, by less than rounding to bf16 may change a loss."""
    choice = config(BASE_DIR, lora_target_modules=[target])
    model, ids = trained(choice).eval(), torch.arange(20)[None]
    assert model.get_base_model().config.tie_word_embeddings
    wanted = model(ids, attention_metadata=AttentionMetadata()).logits
    export.export(lambda _: model, choice, tmp_path / "model", "merged", {})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    again.tie_weights()
    head, embedding = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    (head if target == "embed_tokens" else embedding).copy_(embedding if target == "embed_tokens" else head)
    assert (again(ids).logits - wanted).abs().max() > 1e-2, "control"


def test_the_model_card_says_how_to_load_the_stop_tokens_of_an_adapter(tmp_path: Path) -> None:
    choice = config(BASE_DIR)
    export.export(lambda _: trained(choice), choice, tmp_path / "model", "adapter", {})
    stated = json.loads((tmp_path / "model" / "generation_config.json").read_text()) | {"eos_token_id": [0, 7]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(stated))
    code = re.search(r"```python\n(.*?)```", (tmp_path / "model" / "README.md").read_text(), re.DOTALL)
    assert code
    scope: dict[str, Any] = {"AutoPeftModelForCausalLM": AutoPeftModelForCausalLM, "GenerationConfig": GenerationConfig}
    exec(code[1], scope | {"folder": tmp_path / "model"}, scope)  # noqa: S102 - our own
    assert scope["model"].generation_config.eos_token_id == [0, 7]


def test_the_names_in_an_adapter_are_those_of_peft_which_other_programs_read(tmp_path: Path) -> None:
    """vLLM and Unsloth load what peft saves; anything that wraps a layer here would be another name there."""
    choice = config(BASE_DIR)
    export.export(lambda _: trained(choice), choice, tmp_path / "model", "adapter", {})
    stock = get_peft_model(
        AutoModelForCausalLM.from_pretrained(BASE_DIR), LoraConfig(r=choice.lora_r, target_modules="all-linear")
    )
    stock.save_pretrained(tmp_path / "stock")
    ours, others = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("model", "stock"))
    assert {name: weight.shape for name, weight in ours.items()} == {
        name: weight.shape for name, weight in others.items()
    }
    layers = r"base_model\.model\.model\.layers\.\d+\.(self_attn|mlp)\.\w+\.lora_[AB]\.weight"
    assert all(re.fullmatch(layers, name) for name in ours)
    settings, expected = (
        json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("model", "stock")
    )
    assert set(settings) == set(expected)
    assert sorted(settings["target_modules"]) == sorted(expected["target_modules"])


@pytest.mark.parametrize(("method", "kind"), [("full", "full"), ("lora", "merged"), ("lora", "adapter")])
def test_a_model_of_images_and_text_keeps_its_tower_and_how_it_prepares_images(
    method: str, kind: str, tmp_path: Path
) -> None:
    base = save_small(tmp_path / "base", "qwen3_vl")
    (base / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    choice, folder = config(base, method=method), tmp_path / "model"
    export.export(lambda _: trained(choice), choice, folder, kind, {})
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code
    scope: dict[str, Any] = {
        name: getattr(transformers, name) for name in re.findall(r"\b[AG]\w+(?=\.from_p)", code[1])
    }
    exec(code[1], scope | {"PeftModel": PeftModel, "folder": folder, "base_folder": base}, scope)  # noqa: S102 - ours
    before = {name: weight for name, weight in load_file(base / "model.safetensors").items() if "visual" in name}
    after = scope["model"].state_dict()
    assert before
    assert all(torch.equal(after[f"base_model.model.{name}" if kind == "adapter" else name], weight)
               for name, weight in before.items())  # fmt: skip
    assert (folder / "preprocessor_config.json").exists() == (kind != "adapter")


def test_a_model_without_stop_tokens_is_exported(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", torch.float32)
    for name in ("tokenizer_config.json", "config.json"):
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({key: value for key, value in values.items() if "eos_token" not in key}))
    (base / "generation_config.json").unlink()
    choice = config(base, method="full", packing=False)
    export.export(lambda _: trained(choice), choice, tmp_path / "model", "full", {})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.eos_token_id is None


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", "float32"), ("merged", "float32"), ("adapter", "float32"), ("full", "bfloat16"), ("merged", "bfloat16")],
)
def test_an_export_that_is_another_model_fails(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, by less than what rounding changes: that is measured."""
    choice = config(BASE_DIR, method="full" if kind == "full" else "lora", export_dtype=dtype)
    write = export._write

    def spoil(model: Any, *rest: Any) -> None:
        weight = next(weight for name, weight in model.named_parameters() if "layers.1" in name and weight.ndim == 2)
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
        if kind == "adapter":
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.data.zero_()
        write(model, *rest)

    monkeypatch.setattr(export, "_write", spoil)
    with pytest.raises(TrainingError, match=r"difference .* limit .* greedy text.* it is not the trained model"):
        export.export(lambda _: trained(choice), choice, tmp_path / "model", kind, {})
    assert not (tmp_path / "model").exists()
    assert (tmp_path / "model-failed" / "README.md").is_file()
    with pytest.raises(ConfigError, match=r"model-failed failed its check: .* --output DIR --dtype float32`, then"):
        read_for_push(tmp_path / "model-failed")


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (([5, 6, 7], [5, 6, 7]), "the greedy text of 3 tokens is the same"),
        (([5, 6, 7], [5, 9, 7]), "the greedy texts part at token 2 of 3"),
    ],
)
def test_what_is_said_of_the_greedy_texts(texts: tuple[list[int], list[int]], sentence: str) -> None:
    checked = export_check.LoadedBack("bfloat16", 9, 1.0, 1.0, 0.1, texts=texts)
    assert str(checked).endswith(f"; {sentence}")
    assert not checked.failed, "rounding may flip a token"


@torch.no_grad()
def test_the_greedy_text_is_that_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = config(BASE_DIR, method="full")
    model, probes = trained(choice), export_check.sample(choice, load_tokenizer(choice), "A text. " * 20)
    text = export_check.greedy_text(model, probes, torch.float32)
    assert text is not None
    assert len(text) == export_check.GREEDY_TOKENS
    prompt, greedy = probes[0].ids[:, : int(probes[0].positions[0]) + 1], list[int]()
    stock = AutoModelForCausalLM.from_pretrained(BASE_DIR)
    for _ in text:  # one by one, without a cache
        greedy.append(
            int(stock(torch.cat([prompt, torch.tensor([greedy], dtype=torch.long)], 1)).logits[0, -1].argmax())
        )
    assert export_check.greedy_text(stock, probes, torch.float32) == greedy
    assert greedy != text, "control: other weights"
    monkeypatch.setattr(export_check, "available", lambda: 1000)
    assert export_check.greedy_text(model, probes, torch.float32) is None, (
        "it would be read from its file for each token"
    )


def test_a_model_that_cannot_generate_has_no_greedy_text(tmp_path: Path) -> None:
    """transformers asks the cache of a hybrid for an attention layer, which is there only in the control."""
    layers = {"linear": ["linear_attention"] * 2, "hybrid": ["linear_attention", "full_attention"]}
    texts = {}
    for name, kinds in layers.items():
        save_small(tmp_path / name, "granitemoehybrid", layer_types=kinds)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        choice = config(tmp_path / name, method="full")
        probes = export_check.sample(choice, load_tokenizer(choice), "A text. " * 20)
        texts[name] = export_check.greedy_text(model, probes, torch.float32)
    assert texts["linear"] is None
    assert len(texts["hybrid"] or []) == export_check.GREEDY_TOKENS


def test_rounding_fails_no_export_whose_data_train_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one word: a single token, whose loss rounding to bf16 changes by more than another kernel may."""
    choice = config(BASE_DIR, method="full", export_dtype="bfloat16", cache_dir=str(tmp_path / "cache"))
    data, moved = prepare(choice, "train"), list[float]()
    for number in range(3):
        ids, mask = (torch.from_numpy(np.array(values)) for values in data.document(number))
        probe = export_check.Probe(ids.long()[None], mask[1:].nonzero()[:1, 0])
        monkeypatch.setattr(export, "sample", lambda *_, probe=probe: [probe])
        checked = export.export(lambda _: trained(choice), choice, tmp_path / f"model-{number}", "full", {})
        assert checked.difference is not None
        moved.append(checked.difference / export_check.tolerance(checked.trainer_loss, 1, torch.float32))
    assert max(moved) > 1, "control: without the measured rounding, the limit would be too small"


def test_an_export_that_cannot_be_loaded_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, write = config(BASE_DIR, method="full"), export._write

    def spoil(model: Any, tokenizer: Any, folder: Path, *rest: Any) -> None:
        write(model, tokenizer, folder, *rest)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    monkeypatch.setattr(export, "_write", spoil)
    with pytest.raises(TrainingError, match="the export cannot be loaded back: "):
        export.export(lambda _: trained(choice), choice, tmp_path / "model", "full", {})


def test_a_model_with_attention_of_its_own_is_exported(tmp_path: Path) -> None:
    """Bloom adds a bias for the distance between tokens."""
    small = small_config(AutoConfig.for_model("bloom")).to_dict() | {"vocab_size": 1030}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**small)).save_pretrained(tmp_path / "base")
    for path in BASE_DIR.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "base")
    choice = config(tmp_path / "base", method="full", packing=False)
    checked = export.export(lambda _: trained(choice), choice, tmp_path / "model", "full", {})
    assert checked.deviation is not None
    assert checked.deviation <= checked.limit


def test_one_model_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, alive = config(BASE_DIR, method="full"), list[Any]()
    load_back, build_it = export.load_back, export.build_unread

    def build_and_watch(choice: TrainConfig) -> Any:
        model, stored = build_it(choice)
        alive.append(weakref.ref(model))
        return model, stored

    def look(*words: Any) -> Any:
        gc.collect()
        assert alive[0]() is None, "the trainer's model is still there"
        return load_back(*words)

    monkeypatch.setattr(export, "build_unread", build_and_watch)
    monkeypatch.setattr(export, "load_back", look)
    manifest = {"base": "", "config": {}, "step": 1, "world": 1, "versions": {}, "data_fingerprint": ""}
    monkeypatch.setattr(export, "read_manifest", lambda folder: manifest)
    monkeypatch.setattr(export, "load_weights", lambda *_: None)
    export.export_checkpoint(tmp_path, choice, tmp_path / "model", "full", {}, None)
    assert len(alive) == 1


def test_a_comparison_without_the_memory_is_left_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = config(BASE_DIR, method="full")
    monkeypatch.setattr(export_check, "available", lambda: 1000)
    checked = export.export(lambda _: trained(choice), choice, tmp_path / "model", "full", {})
    assert (checked.difference, checked.failed) == (None, False)
    assert "not loaded back, which takes 512 KiB of memory where 1.0 KiB are free" in capsys.readouterr().out
    assert "not loaded back" in (tmp_path / "model" / "README.md").read_text()
    assert "it was not loaded back" in read_for_push(tmp_path / "model").notes[0]


def test_an_earlier_checkpoint_is_exported_with_the_options_that_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later attempt may have others; where its base is may change freely."""
    then, now = config(BASE_DIR, lora_alpha=4, learning_rate=0.5), config(BASE_DIR, lora_alpha=64, eval_split="other")
    manifest = {"base": "", "config": plain(then), "step": 1, "world": 1, "versions": {}, "data_fingerprint": ""}
    built: list[TrainConfig] = []

    def build_it(folder: Path, choice: TrainConfig, averaged: bool, scratch: Any) -> Any:
        built.append(choice)
        return trained(choice)

    monkeypatch.setattr(export, "read_manifest", lambda folder: manifest)
    monkeypatch.setattr(export, "_trained", build_it)
    export.export_checkpoint(tmp_path / "run" / "c" / "step", now, tmp_path / "model", "adapter", {}, None)
    assert (built[0].lora_alpha, built[0].eval_split) == (4, "other")
    stated = json.loads((tmp_path / "model" / EXPORT_RECORD).read_text())["config"]
    assert (stated["lora_alpha"], stated["learning_rate"], stated["eval_split"]) == (4, 0.5, then.eval_split)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "learning_rate: 0.5" in card
    assert "eval_split" not in card
    assert json.loads((tmp_path / "model" / "adapter_config.json").read_text())["lora_alpha"] == 4


def test_the_run_s_data_are_compared_and_a_text_without_them(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    choice = config(BASE_DIR, cache_dir=str(tmp_path / "cache"))
    text = export_check.sample(choice, tokenizer, "name: Ada Lovelace")
    assert tokenizer.decode(text[0].ids[0]) == "name: Ada Lovelace"
    ids, mask = prepare(choice, "train").document(0)
    probes = export_check.sample(choice, tokenizer, "")
    assert probes[0].ids[0].tolist() == ids.tolist()
    assert probes[0].labels.tolist() == ids[mask].tolist()
    assert 200 < sum(probe.ids.shape[1] for probe in probes) <= export_check.TOKENS


def test_files_decide_the_dtype_and_not_what_the_config_says(tmp_path: Path) -> None:
    folder = saved_base(tmp_path / "base", torch.bfloat16)
    stated = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(stated))
    assert stored_dtype(config(folder)) == torch.bfloat16
    assert stored_dtype(config(folder, random_init=True, method="full")) == torch.float32


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|endoftext|>", "<|im_end|>"]),
        (CHATML.replace("<|im_end|>\n", " <|im_end|><|endoftext|>"), ["<|endoftext|>", "<|im_end|>"]),
        (PLAIN, ["<|endoftext|>"]),
        (None, ["<|endoftext|>"]),
        ("{{ raise_exception('never') }}", ["<|endoftext|>"]),
    ],
)
def test_the_end_of_the_assistants_turn_stops_generation(template: str | None, ends: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", template
    ids = tokenizer.convert_tokens_to_ids(ends)
    assert export.stop_tokens(tokenizer, GenerationConfig()) == sorted(ids)
    assert export.stop_tokens(tokenizer, GenerationConfig(eos_token_id=[5, ids[0]])) == sorted({5, *ids})


def test_a_text_is_cut_to_the_positions_of_the_model(tmp_path: Path) -> None:
    tokenizer, text = AutoTokenizer.from_pretrained(BASE_DIR), "name: Ada Lovelace " * 200
    folder = saved_base(tmp_path / "base", torch.float32)
    found = {}
    for positions in (48, 512):
        stated = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": positions}
        (folder / "config.json").write_text(json.dumps(stated))
        [probe] = export_check.sample(config(folder, cache_dir=str(tmp_path / "cache")), tokenizer, text)
        found[positions] = probe.ids.shape[1]
    assert found == {48: 48, 512: export_check.TOKENS}


def test_the_export_of_a_large_model_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """A section that may take long has a limit of its own, which grows with the weights that are written and read."""
    base, chosen = saved_base(tmp_path / "base", torch.bfloat16), tmp_path / "step-00000003"
    chosen.mkdir()
    with contextlib.closing(heartbeat.Heartbeat(made_run(tmp_path, "a", "running"), 0, hang_timeout=1)) as beat:
        limits = []
        for size in (0, 100 << 30):
            with open(chosen / "model.safetensors", "wb") as file:
                file.truncate(size)  # a hole, which takes no room
            beat.at("export", 3, export.export_seconds(chosen, config(base)))
            limits.append(beat._limit(beat.position))
        assert limits[0] == heartbeat.LONG_LIMIT
        assert limits[1] >= (100 << 30) / export._SLOWEST > limits[0]
        beat.at("save", 3)
        assert beat._limit(beat.position) == heartbeat.LONG_LIMIT, "the next place has the usual one"
