"""The chat's program: what it answers is what plain transformers and peft answer with the exported weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from app.services.rpc_client import Worker
from tests.launching import launch_well
from tests.made_runs import made_run
from tests.parrot import make_parrot
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data import template
from trainers.embedded import BASE_DIR
from trainers.model.load import load_base
from trainers.tools import answer_format, chat_memory
from trainers.tools import chat as program
from trainers.tools.chat import Chat, sampling_options
from trainers.tools.chat_models import Models
from trainers.tools.serve import Settings, _concurrent, _load
from trainers.tools.serve_generation import Finished, ServedModel
from trainers.tools.serve_requests import ApiError, Sampling

ASKED = [{"role": "user", "content": "title: Sea; city: Rome; author: Bo; year: 1999. Write it as JSON."}]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 40, "repetition_penalty": 1.0, "seed": 1}
STEP = "step-00000005"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A real run of five steps with adapters, and one with all weights."""
    home = tmp_path_factory.mktemp("chat")
    shared = {"max_steps": 5, "global_batch_size": 8, "max_train_samples": 100, "eval_dataset_name": "none"}
    for method in ("lora", "full"):
        options = {"preset": f"tiny-{method}", **shared, "cache_dir": home / "cache"}
        launch_well(home / method, 1, options, XDG_STATE_HOME=str(home / "state"), CUDA_VISIBLE_DEVICES="")
    return {method: home / method for method in ("lora", "full")}


def test_a_reward_model_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path, "scores", config={"objective": "reward"})
    run.model.mkdir()
    request = {"run_dir": str(run.path), "weights": "model"}
    with pytest.raises(ConfigError, match="trained a reward model, which gives text a score and writes none"):
        list(Chat().load(request))


def load(request: dict[str, Any]) -> Chat:
    """A program that has loaded what the request names."""
    chat = Chat()
    assert list(chat.load(request))[-1]["ready"]
    return chat


def ask(chat: Chat, side: str, messages: list[dict[str, str]] = ASKED, plain: bool = False, **sampling: Any) -> str:
    """The answer of one side."""
    request = {"side": side, "messages": messages, "plain": plain, "sampling": {**GREEDY, **sampling}}
    return str(list(chat.answer(request))[-1]["answer"])


def plainly(model: Any, folder: Path = BASE_DIR, messages: list[dict[str, str]] = ASKED) -> str:
    """What plain transformers answers, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.eval().generate(**given, do_sample=False, max_new_tokens=GREEDY["max_new_tokens"])
    return str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def exported(folder: Path) -> Any:
    """The model of a run's export, loaded as its model card says."""
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE_DIR), folder)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("weights", ["model", STEP])
def test_both_sides_answer_as_plain_transformers_does(trained: dict[str, Path], method: str, weights: str) -> None:
    chat = load({"run_dir": str(trained[method]), "weights": weights})
    base = plainly(AutoModelForCausalLM.from_pretrained(BASE_DIR))
    tuned = plainly(exported(trained[method] / "model"))
    assert tuned != base, "the control: five steps change the answer"
    assert [ask(chat, side) for side in ("base", "tuned", "base")] == [base, tuned, base]


def served(request: dict[str, Any]) -> ServedModel:
    """What `tunesmith serve` loads."""
    model = _load(Settings("any", {**request, "remote_code": False}, "127.0.0.1", -1, None, 0, 200))
    assert isinstance(model, ServedModel)
    return model


def prompt_of(model: ServedModel) -> list[int]:
    return model.tokens(model.text(ASKED, []))


def generated(model: ServedModel, max_tokens: int = GREEDY["max_new_tokens"]) -> str:
    """Its greedy answer."""
    events: list[Any] = []
    model.start(prompt_of(model), Sampling(max_tokens, 0.0, 1.0, None, ()), events.append).join()
    assert isinstance(events[-1], Finished), events[-1]
    return "".join(events[:-1])


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_server_answers_with_the_weights_that_it_is_given(trained: dict[str, Path], method: str) -> None:
    """An export, a checkpoint, and the folder of an export that is taken for itself."""
    run, folder = {"run_dir": str(trained[method])}, trained[method] / "model"
    alone = {"adapter" if method == "lora" else "model": str(folder)}
    models = [served(request) for request in ({**run, "weights": "model"}, {**run, "weights": STEP}, alone)]
    assert [generated(model) for model in models] == 3 * [plainly(exported(folder))]
    assert all(model.models.base is None for model in models[:2]), "no second model in memory"


def test_a_rope_scaling_with_a_state_allows_one_answer_at_a_time() -> None:
    model = served({"model": "embedded"})
    assert (model.most_concurrent, _concurrent(None, None), _concurrent(9, None)) == (None, 4, 9)
    model.model.config.rope_parameters = {**model.model.config.rope_parameters, "rope_type": "dynamic"}
    assert (model.most_concurrent, _concurrent(None, 1), _concurrent(1, 1)) == (1, 1, 1)
    with pytest.raises(ConfigError, match="max_concurrent=2 is too many"):
        _concurrent(2, 1)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mamba"])
def test_other_families_draw_as_stock_transformers_does(family: str, tmp_path: Path) -> None:
    """Random weights without an end: a chat template of ours, and positions, softcap and state of theirs."""
    folder = Path(shutil.copytree(BASE_DIR, tmp_path / family, ignore=shutil.ignore_patterns("*.safetensors")))
    sizes = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2}, "mamba": {"hidden_size": 32, "num_hidden_layers": 2}}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
    sizes["gemma2"] = {**sizes["mamba"], **heads, "intermediate_size": 64}
    tokens = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **tokens, **sizes[family])).save_pretrained(folder)
    model, events = served({"model": str(folder)}), list[Any]()
    prompt = prompt_of(model)
    model.start(prompt, Sampling(20, 0.9, 0.8, 4, ()), events.append).join()
    stock, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), torch.tensor([prompt])
    torch.manual_seed(4)
    out = stock.generate(ids, do_sample=True, temperature=0.9, top_p=0.8, top_k=0, max_new_tokens=20)
    expected = model.models.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(event for event in events if isinstance(event, str)) == expected, events[-1]


def test_tools_go_to_a_chat_template_that_knows_them() -> None:
    model, tools = served({"model": "embedded"}), [{"type": "function", "function": {"name": "weather"}}]
    with pytest.raises(ApiError, match="does not support tools"):
        model.text(ASKED, tools)
    options = model.models.encoder.options
    list_of_tools = "{%- for tool in tools or [] -%}{{ tool['function']['name'] }} {% endfor -%}"
    written = list_of_tools + (options.chat_template or "")
    model.models.encoder = template.Encoder(
        model.models.tokenizer.backend_tokenizer, replace(options, chat_template=written)
    )
    before, after = model.text(ASKED, []), model.text(ASKED, tools)
    assert (after.replace("weather ", ""), "weather " in after) == (before, True)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {}}}
    with pytest.raises(ApiError, match="does not support tool_calls"):
        model.text([*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)


def test_an_adapter_shares_its_base_and_other_weights_answer_otherwise(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    other = shutil.copytree(trained["lora"], tmp_path / "other")
    file = other / "model" / "adapter_model.safetensors"
    save_file({name: -3 * tensor for name, tensor in load_file(file).items()}, file)
    chats = [load({"run_dir": str(run), "weights": "model"}) for run in (trained["lora"], other)]
    assert all(chat.models is not None and chat.models.base is None for chat in chats)
    assert ask(chats[0], "tuned") != ask(chats[1], "tuned")
    assert ask(chats[0], "base") == ask(chats[1], "base")


def test_the_tokenizer_of_an_export_stands_in_for_that_of_a_deleted_first_stage(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained["lora"], tmp_path / "second"))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("from_run: null", f"from_run: {tmp_path / 'first'}"))
    assert ask(load({"run_dir": str(run), "weights": "model"}), "tuned") == plainly(exported(run / "model"))
    with pytest.raises(ConfigError, match="is gone, and its tokenizer is needed"):
        load({"run_dir": str(run), "weights": STEP})


def test_a_base_model_alone_has_one_side() -> None:
    chat = load({"model": "embedded"})
    assert ask(chat, "base") == plainly(AutoModelForCausalLM.from_pretrained(BASE_DIR))
    with pytest.raises(ConfigError, match="side=tuned is not loaded"):
        ask(chat, "tuned")


def test_a_damaged_or_missing_checkpoint_is_refused(trained: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(trained["lora"], tmp_path / "run")
    file = run / "checkpoints" / STEP / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=f"{STEP} cannot be loaded: rank-00000.safetensors was changed"):
        load({"run_dir": str(run), "weights": STEP})
    (run / "model" / "adapter_model.safetensors").rename(run / "model" / "adapter_model.bin")
    with pytest.raises(ConfigError, match="model cannot be loaded"):
        load({"run_dir": str(run), "weights": "model"})
    (run / "export-out").symlink_to(trained["full"] / "model")
    for name in ("../run/model", "..", "", "/etc", "export-out", "step-99999999"):
        with pytest.raises(ConfigError, match="does not exist in run"):
            load({"run_dir": str(run), "weights": name})


def test_an_adapter_of_another_base_is_refused(trained: dict[str, Path], tmp_path: Path) -> None:
    base = shutil.copytree(BASE_DIR, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    run = shutil.copytree(trained["lora"], tmp_path / "run")
    config = (run / "config.yaml").read_text()
    changed = config.replace("model_name_or_path: embedded", f"model_name_or_path: {base}")
    assert changed != config
    (run / "config.yaml").write_text(changed)
    with pytest.raises(ConfigError, match="not those that its adapters were trained on"):
        load({"run_dir": str(run), "weights": STEP})


def models_of(tmp_path: Path, chat_template: str) -> Models:
    """The embedded base with another chat template."""
    file = tmp_path / "chat.jinja"
    file.write_text(chat_template)
    config = TrainConfig(model_name_or_path="embedded", dataset_name="none", packing=False, chat_template=str(file))
    return Models(config, load_base(config), None)


def test_a_hostile_chat_template_neither_hangs_nor_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_SECONDS", 0.5)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match="still runs after"):
        models_of(tmp_path, loops).prompt(ASKED, plain=False)
    with pytest.raises(ConfigError, match=r"^chat template: it refuses these messages: .*unsafe.*; leave out"):
        models_of(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}").prompt(ASKED, plain=False)
    harmless = models_of(tmp_path, "{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    assert harmless.tokenizer.decode(harmless.prompt([{"role": "user", "content": "hello"}], plain=False)) == "<hello>"


def test_a_slow_response_template_ends_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control has the same answer and a template whose pattern is quick."""
    fields: dict[str, Any] = {"content": {}, "thinking": {"open_pattern": r"(?:a|aa|aaa)+\d(?=y)", "close": ">>"}}
    folder = make_parrot(tmp_path / "parrot", {"*": "a" * 80})
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(answer_format, "_PARSE_SECONDS", 0.5)
    for pattern in (fields["thinking"]["open_pattern"], "<<"):
        fields["thinking"]["open_pattern"] = pattern
        settings["response_template"] = {"start_anchor": "x", "fields": fields}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        chat = load({"model": str(folder)})
        if pattern == "<<":
            assert ask(chat, "base") == "a" * 80
            continue
        with pytest.raises(ConfigError, match="response_template of this model's tokenizer takes too long"):
            ask(chat, "base")


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = (BASE_DIR / "model.safetensors").stat().st_size
    assert load({"model": str(BASE_DIR)}), "the control"
    monkeypatch.setattr(chat_memory.host_memory, "available", lambda: needed)
    with pytest.raises(ConfigError, match=r"loading the weights takes 3\.5 MiB, and 3\.4 MiB of memory are free"):
        list(Chat().load({"model": str(BASE_DIR)}))


def test_the_weights_are_counted_as_they_are_loaded(trained: dict[str, Path]) -> None:
    """A fully trained model stands beside its base, an adapter on it."""
    counted = {}
    for method, folder in trained.items():
        request = {"run_dir": str(folder), "weights": STEP}
        counted[method] = chat_memory.weights_bytes(program.request_config(request), request)
    models = load({"model": str(BASE_DIR)}).models
    assert models is not None
    held = sum(each.numel() for each in models.base.parameters())
    assert counted == {"lora": 4 * held, "full": 2 * 4 * held}


def test_prompts_are_counted_against_the_context() -> None:
    chat = load({"model": "embedded"})
    with pytest.raises(ConfigError, match=r"the conversation has [\d,]+ tokens and the model's context holds 1,024"):
        ask(chat, "base", [{"role": "user", "content": "word " * 5000}])
    assert chat.models is not None
    long = [{"role": "user", "content": "Rome " * 330}]
    prompt = len(chat.models.prompt(long, plain=True))
    request = {"side": "base", "messages": long, "plain": True, "sampling": {**GREEDY, "max_new_tokens": 8000}}
    last = list(chat.answer(request))[-1]
    assert prompt < 1024
    assert last["tokens"] <= 1024 - prompt
    assert last["finish"] == "length" or last["tokens"] < 1024 - prompt


def test_the_pieces_make_up_the_answer_and_plain_text_is_completed() -> None:
    chat = load({"model": "embedded"})
    *pieces, last = chat.answer({"side": "base", "messages": ASKED, "sampling": GREEDY})
    assert len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == last["answer"]
    assert last["tokens_per_second"] == pytest.approx(last["tokens"] / last["seconds"])
    assert ask(chat, "base", plain=True) != ask(chat, "base")


def test_a_seed_decides_what_is_sampled() -> None:
    chat = load({"model": "embedded"})
    answers = [ask(chat, "base", temperature=1.5, seed=seed) for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]
    assert sampling_options(GREEDY) == {"repetition_penalty": 1.0, "use_cache": True, "do_sample": False}


@pytest.fixture
def worker() -> Iterator[Worker]:
    running = Worker("trainers.tools.chat", env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    try:
        yield running
    finally:
        running.close()


def test_an_answer_can_be_stopped_and_the_next_one_is_whole(worker: Worker) -> None:
    assert any(document.get("ready") for document in worker.ask({"ask": "load", "model": "embedded"}))
    # At a high temperature the end of the answer seldom comes first.
    endless = {**GREEDY, "temperature": 5.0, "max_new_tokens": 900}
    documents = []
    for document in worker.ask({"ask": "answer", "side": "base", "messages": ASKED, "sampling": endless}):
        documents.append(document)
        worker.cancel()
    assert documents[-1] == {"end": True, "cancelled": True}
    assert not any("answer" in document for document in documents)
    *_, last, end = worker.ask({"ask": "answer", "side": "base", "messages": ASKED, "sampling": GREEDY})
    assert end == {"end": True}
    assert last["answer"] == plainly(AutoModelForCausalLM.from_pretrained(BASE_DIR))


def test_a_wrong_request_leaves_the_process_as_it_is(worker: Worker) -> None:
    with pytest.raises(ConfigError, match="side=base is not loaded"):
        list(worker.ask({"ask": "answer", "side": "base", "messages": ASKED, "sampling": GREEDY}))
    with pytest.raises(ConfigError, match="/nowhere/at/all is neither a local folder nor a Hub id"):
        list(worker.ask({"ask": "load", "model": "/nowhere/at/all"}))
    assert worker.alive
