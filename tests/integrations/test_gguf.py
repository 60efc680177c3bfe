"""GGUF files of a real run, by llama.cpp's converter and quantiser, read back by llama.cpp and transformers.

The converter is in the source of llama-cpp-python, which `make test-integrations` unpacks beside the packages.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from llama_cpp import Llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaTokenizer

from app.push.files import read_for_push
from tests.launching import environment
from tests.unit.checkpoint.test_modelfile import published, renders
from trainers.checkpoint.modelfile import conversations, modelfile, turns_of
from trainers.embedded import BASE_DIR
from trainers.run.lineage import EXPORT_RECORD

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP") or Path(sys.prefix, "llama_cpp_python", "vendor", "llama.cpp"))
TYPES = "f16,q8_0,q4_k_m"
LIMITS = {"f16": 2e-4, "q8_0": 2e-3, "q4_k_m": 3e-2}
"""Of the difference of the mean loss; measured on this model: 1.5e-5, 2.1e-4 and 2.6e-3."""
PROMPT = [{"role": "user", "content": "How many legs has a spider?"}]
TURN_END = "<|im_end|>"
TUNESMITH = [sys.executable, "-m", "app.cli"]


def save_base(folder: Path) -> Path:
    """A small random Llama with a SentencePiece tokenizer of the embedded data; rows of 256 weights."""
    folder.mkdir()
    rows = (BASE_DIR.parent / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:400]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(rows), model_prefix=str(folder / "tokenizer"), vocab_size=600, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", TURN_END]})
    tokenizer.eos_token = TURN_END
    tokenizer.chat_template = published("qwen2_5")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model_config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, bos_token_id=1, eos_token_id=4)
    LlamaForCausalLM(model_config).save_pretrained(folder)
    return folder


def tunesmith(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TUNESMITH, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has trained."""
    folder = tmp_path_factory.mktemp("gguf")
    base = save_base(folder / "base")
    options = ["--model_name_or_path", str(base), "--dataset_name", "embedded", "--max_train_samples", "20"]
    options += ["--method", "lora", "--learning_rate", "0.003", "--max_steps", "4", "--output_dir", "run"]
    options += ["--per_device_train_batch_size", "2", "--global_batch_size", "2", "--num_processes", "1"]
    done = tunesmith("train", "--strategy", "single", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> dict[str, Any]:
    """The document of `tunesmith export` with GGUF files."""
    options = ["--merged", "--gguf", TYPES, "--llama_cpp", str(LLAMA_CPP), "--output", "model", "--json"]
    done = tunesmith("export", str(run), *options, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture
def folder(exported: dict[str, Any]) -> Path:
    return Path(exported["export_dir"])


def test_the_losses_are_the_trainers(exported: dict[str, Any], folder: Path) -> None:
    assert [file["type"] for file in exported["gguf"]] == TYPES.split(",")
    for file in exported["gguf"]:
        assert abs(file["difference"]) <= LIMITS[file["type"]]
        assert file["other_tokens"] == 0
    assert set(exported["gguf"][-1]["matrices"]) == {"Q4_K", "Q6_K"}
    differences = [abs(file["difference"]) for file in exported["gguf"]]
    assert differences == sorted(differences), "fewer bits must cost more: otherwise nothing was quantised"
    record = json.loads((folder / EXPORT_RECORD).read_text())
    assert [file["loss"] for file in record["gguf"]] == [file["loss"] for file in exported["gguf"]]
    assert "## GGUF" in (folder / "README.md").read_text()
    assert not {"probes.json", "tokenizer.model", "model-F32.gguf"} & set(os.listdir(folder))


def llama_text(path: Path, ids: list[int], count: int = 24) -> list[int]:
    """Greedy tokens from llama.cpp."""
    model = Llama(str(path), n_ctx=256, verbose=False, n_gpu_layers=0, logits_all=True)
    model.eval(ids)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(tokens[-1:])
    return tokens


@torch.no_grad()
def test_f16_gives_the_same_text(folder: Path) -> None:
    """In llama.cpp and in transformers' own reader; the base model, which is another, is the control."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def greedy(model: Any) -> list[int]:
        answer = model.generate(torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        result: list[int] = answer[0, len(ids) :].tolist()
        return result

    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).float()
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model-F16.gguf", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    for model in (ours, read, base):
        model.generation_config.eos_token_id = None
    expected = greedy(ours)
    assert llama_text(folder / "model-F16.gguf", ids) == expected
    assert greedy(read) == expected
    assert greedy(base) != expected


def test_ollamas_template_gives_the_text_of_the_models_own(folder: Path, tmp_path: Path) -> None:
    """Go itself renders it, as Ollama calls it; a template with a changed letter is the control."""
    binary = tmp_path / "ollama_template"
    source = Path(__file__).with_name("ollama_template.go")
    settings = {"GOCACHE": str(tmp_path / "cache"), "GOPATH": str(tmp_path / "path"), "GOPROXY": "off"}
    go = [str(Path(sys.prefix, "bin", "go"))]
    subprocess.run([*go, "build", "-o", str(binary), str(source)], check=True, env={**os.environ, **settings})

    def render(text: str, system: bool) -> list[str]:
        template = text.partition('TEMPLATE """')[2].partition('"""')[0]
        request = json.dumps({"template": template, "conversations": conversations(system)})
        done = subprocess.run([str(binary)], input=request, capture_output=True, text=True, check=True)
        texts: list[str] = json.loads(done.stdout)
        return texts

    own = renders(published("qwen2_5"))
    expected = [own(conversation) for conversation in conversations(True)]
    written = (folder / "Modelfile").read_text(encoding="utf-8")
    assert render(written, True) == expected
    assert render(written.replace("im_start", "im_stort", 1), True) != expected
    assert "FROM ./model-Q4_K_M.gguf" in written
    assert 'PARAMETER stop "<|im_end|>"' in written
    for name in ("llama3_2", "gemma", "phi3", "deepseekv3", "qwen3"):
        own = renders(published(name))
        turns = turns_of(own)
        assert turns is not None
        texts = render(modelfile("m.gguf", [], turns, "", [], {}), turns.takes_system)
        pairs = list(zip(texts, conversations(turns.takes_system), strict=True))
        same = [
            (text, own(conversation))
            for text, conversation in pairs
            if not turns.strips or all(message["content"] == message["content"].strip() for message in conversation)
        ]
        assert len(same) >= 9
        assert all(text == expected for text, expected in same), name


def test_what_is_pushed_has_them(folder: Path) -> None:
    export = read_for_push(folder)
    assert {"model-F16.gguf", "model-Q4_K_M.gguf", "Modelfile", "model.safetensors"} <= export.files.keys()
    assert "model-Q8_0.gguf" in export.weights
    assert not export.left_out


def test_a_kill_leaves_nothing_that_looks_complete(run: Path, tmp_path: Path) -> None:
    options = ["--merged", "--gguf", TYPES, "--llama_cpp", str(LLAMA_CPP), "--output", str(tmp_path / "model")]
    program = subprocess.Popen([*TUNESMITH, "export", str(run), *options], env=environment(), start_new_session=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".model.*/*.gguf")):
        assert program.poll() is None, "it ended before its first GGUF file was there"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program.send_signal(signal.SIGTERM)
    program.wait(60)
    assert not (tmp_path / "model").exists()
