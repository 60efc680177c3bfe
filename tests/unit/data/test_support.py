"""A tiny tokenizer and helpers for the data tests, and the rule that none of the data modules imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers.config.options import TrainConfig
from trainers.config.validation import build

ROOT = Path(__file__).resolve().parents[3]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def save_tokenizer(
    folder: Path, template: str | None = PLAIN, bos: bool = True, special: Sequence[str] = (), **extra: Any
) -> Path:
    """A byte-level tokenizer without merges (one token per byte), as a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    values |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**values, **extra}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def configure(tmp_path: Path, data: Path | str, **options: Any) -> TrainConfig:
    """A config with the tiny tokenizer (made when missing), this data and a cache of its own."""
    model = tmp_path / "model"
    if "model_name_or_path" not in options and not model.exists():
        save_tokenizer(model)
    values = {"model_name_or_path": str(model), "dataset_name": str(data), "cache_dir": str(tmp_path / "cache")}
    return build({**values, **options})


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSONL; bytes are written as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def chat(*turns: str) -> dict[str, Any]:
    """A chat row of turns, the user's first."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]}


def child(code: str, *arguments: str, timeout: float = 60) -> str:
    """What a fresh interpreter prints that runs `code`."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_data_module_imports_torch_or_transformers():
    names = sorted(path.stem for path in (ROOT / "trainers" / "data").glob("*.py"))
    modules = [f"trainers.data.{name}" for name in names if name not in ("__init__", "batches")]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print([name for name in ('torch', 'transformers', 'datasets', 'tokenizers') if name in sys.modules])"
    assert len(modules) > 8
    assert child(code, *modules).strip() == "[]"


def test_a_cache_hit_imports_neither(tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", [chat("hi", "ho")] * 3)
    config = configure(tmp_path, data)
    from trainers.data.prepare import prepare

    made = prepare(config, "train")
    code = (
        "import json, sys\nfrom trainers.config.validation import build\nfrom trainers.data.prepare import prepare\n"
        "found = prepare(build(json.loads(sys.argv[1])), 'train')\n"
        "print(found.fingerprint, len(found), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert child(code, config.model_dump_json()).split() == [made.fingerprint, "3", "False", "False"]
