"""The Python of a model card that loads an export with transformers and peft."""

from __future__ import annotations

from trainers.checkpoint.export_check import BASE
from trainers.config.options import TrainConfig
from trainers.model.load import compute_dtype
from trainers.run.model_card import base_in_words, hub_id, starts_from_result


def loading_code(config: TrainConfig, kind: str, auto: str = "AutoModelForCausalLM") -> str:
    """The code that loads the export; an adapter needs the base as it was trained on: in 4 bits, with the same RoPE.

    Args:
        config: the run's config.
        kind: `adapter`, `merged` or `full`.
        auto: the class of transformers that loads the model.
    """
    if config.objective_spec.scalar_head:
        return _loading_scores(config, kind)
    if kind != "adapter":
        return f"model = {auto}.from_pretrained(folder)  # from transformers"
    lines, more = [], ""
    if config.method == "qlora":
        dtype = str(compute_dtype(config))
        lines += [
            "base = BitsAndBytesConfig(  # from transformers",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            "    bnb_4bit_use_double_quant=True,",
            f"    bnb_4bit_compute_dtype={dtype},",
            ")",
        ]
        more = f", dtype={dtype}, quantization_config=base"
    if config.rope_scaling == "none" and auto == "AutoModelForCausalLM":
        if starts_from_result(config):
            where = base_in_words(config.model_name_or_path, config.from_run)
            lines.append(f"# Needs {where} where adapter_config.json names it; a merged export needs no base.")
        lines.append(f"model = AutoPeftModelForCausalLM.from_pretrained(folder{more})  # from peft")
    else:
        lines += _about_base(config)
        if config.rope_scaling != "none":
            lines += [
                f"# Trained with rope_scaling={config.rope_scaling}, which the base model does not have by itself.",
                f'scaled = AutoConfig.from_pretrained(folder, subfolder="{BASE}")  # from transformers',
            ]
            more = f", config=scaled{more}"
        lines += [
            f"model = {auto}.from_pretrained({_base(config)}{more})",
            *_enlarging(config),
            "model = PeftModel.from_pretrained(model, folder)  # from peft",
        ]
    return "\n".join(
        [
            *lines,
            "model.generation_config = GenerationConfig.from_pretrained(folder)  # from transformers: its stop tokens",
        ]
    )


def _enlarging(config: TrainConfig) -> list[str]:
    """The line that gives a base model rows for new tokens, where `AutoPeftModel` does not; the adapter has them."""
    return ["model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))"] if config.new_tokens else []


def _loading_scores(config: TrainConfig, kind: str) -> str:
    """The code that loads a reward model; the config of an adapter's base knows neither its output nor its padding."""
    lines = ["tokenizer = AutoTokenizer.from_pretrained(folder)  # from transformers"]
    if kind != "adapter":
        lines.append("model = AutoModelForSequenceClassification.from_pretrained(folder)  # from transformers")
    else:
        scaled = f', subfolder="{BASE}"' if config.rope_scaling != "none" else ""
        base = _base(config)
        lines += [
            *_about_base(config),
            f"settings = AutoConfig.from_pretrained({'folder' + scaled if scaled else base}, num_labels=1)",
            f"model = AutoModelForSequenceClassification.from_pretrained({base}, config=settings)",
            *_enlarging(config),
            "model.config.pad_token_id = tokenizer.pad_token_id",
            "model = PeftModel.from_pretrained(model, folder)  # from peft",
        ]
    return "\n".join([*lines, "scores = model(**tokenizer(texts, padding=True, return_tensors='pt')).logits[:, 0]"])


def _base(config: TrainConfig) -> str:
    """The arguments that load the base model; a local one is where its reader has it."""
    if (name := hub_id(config.model_name_or_path)) is None:
        return "base_folder"
    return f'"{name}"' + (f', revision="{config.model_revision}"' if config.model_revision else "")


def _about_base(config: TrainConfig) -> list[str]:
    """What a local base is called, where its reader has to say where it is."""
    name = config.model_name_or_path
    if hub_id(name):
        return []
    return [f"# base_folder: where you have {base_in_words(name, config.from_run)}"]
