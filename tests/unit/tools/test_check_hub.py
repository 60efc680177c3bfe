"""What `--check` says of a model on the Hub, and what it fetches for that: headers, config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import fake_hub
from tests.fake_hub import FakeHub, serve_hub, use_hub
from tests.families import config_for, save_small
from trainers.config.mistakes import ConfigError
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check

INDEX = "model.safetensors.index.json"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shorten(name: str, length: int, folder: Path) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:length])


def remove(name: str, folder: Path) -> None:
    for path in folder.glob(name):
        path.unlink()


def split(folder: Path, lost: bool = False, twice: bool = False) -> None:
    """Two shards and their index; with `lost`, the second is not there, with `twice`, it repeats a tensor."""
    tensors, weight_map = load_file(folder / "model.safetensors"), {}
    remove("model.safetensors", folder)
    names = sorted(tensors)
    for number, half in enumerate((names[::2], names[1::2] + names[:1] * twice)):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        weight_map |= dict.fromkeys(half, file)
        if not (lost and number):
            save_file({name: tensors[name] for name in half}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def add_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer more": (partial(edit, num_hidden_layers=3), r"not in its files: model\.layers\.2\.input_layernorm"),
    "another width": (partial(edit, intermediate_size=50), r"down_proj\.weight is 32x48 in the files and 32x50"),
    "a header cut short": (partial(shorten, "model.safetensors", 100), "its weight files on the Hub cannot be used"),
    "cut short after its header": (
        lambda folder: shorten("model.safetensors", (folder / "model.safetensors").stat().st_size - 100, folder),
        r"cannot be used \(model\.safetensors is damaged or truncated\)",
    ),
    "a tensor in two shards": (
        partial(split, twice=True), r"cannot be used \(lm_head\.weight is in both model-00001-\S+ and model-00002-"
    ),
    "only a variant": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.fp16.safetensors"),
        r"has only model\.fp16\.safetensors; it needs model\.safetensors or model\.safetensors\.index\.json",
    ),
    "a pointer in place of weights": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3),
        "its weight files on the Hub cannot be used",
    ),
    "a shard that is not there": (partial(split, lost=True), r"cannot be used \(model-00002\S+ is missing\)"),
    "only a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), r"has only model\.bin, which would"
    ),
    "no config": (partial(remove, "config.json"), r"has no config\.json on the Hub"),
    "a config cut short": (partial(shorten, "config.json", 20), "not a valid JSON file"),
    "no tokenizer": (partial(remove, "tokenizer*"), r"has no tokenizer; it needs tokenizer\.json"),
    "an adapter": (add_adapter, "holds an adapter, not a full model"),
}  # fmt: skip

ANSWERS: dict[str, tuple[dict[str, fake_hub.Refusal], str]] = {
    "gated": ({"/resolve/": fake_hub.GATED}, r"is gated; accept its terms at .*/owner/whole, then set HF_TOKEN"),
    "gated, no token": ({"/resolve/": fake_hub.NO_TOKEN}, r"is gated; accept its terms"),
    "a token that is not valid": ({"/": fake_hub.BAD_TOKEN}, r"the Hub refuses your token \(status 401\)"),
    "broken": ({"/api/": fake_hub.BROKEN}, "the Hub answers with status 500; try again later"),
    "broken files": ({"/resolve/": fake_hub.BROKEN}, "the Hub answers with status 500; try again later"),
    "too many requests": ({"/": fake_hub.LIMITED}, "the Hub answers with status 429; try again later"),
    "private or not there": ({"/": fake_hub.NOT_FOUND}, "neither a local folder nor a model on the Hub that you may"),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("hub")
    save_small(folder / "whole", hidden_size=128, intermediate_size=2048)
    save_small(folder / "small")
    with serve_hub(folder) as server:
        yield server


@pytest.fixture
def checked(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Checks `owner/NAME` with an empty cache, without waiting between tries."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    use_hub(hub.url, tmp_path / "hub", monkeypatch)
    hub.sent.clear()

    def check_it(name: str, **options: Any) -> list[str]:
        config = config_for(Path("owner") / name, cache_dir=str(tmp_path / "cache"), **options)
        return check(config, load_strategy("single"), has_gpu=False)

    yield check_it
    hub.refusals, hub.delay = {}, 0.0


def test_no_weights_are_fetched(hub: FakeHub, checked: Callable[..., list[str]]) -> None:
    lines = checked("whole")
    assert not [line for line in lines if "could not be read" in line]
    size = (hub.folder / "whole" / "model.safetensors").stat().st_size
    assert hub.sent.pop("model.safetensors") < 110_000 < size / 20, "the header, of which the client takes 100 kB"
    assert set(hub.sent) <= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                             "chat_template.jinja"}  # fmt: skip
    assert sum(hub.sent.values()) < 60_000, "each once"


def test_shards_are_read_by_their_headers(hub: FakeHub, checked: Callable[..., list[str]]) -> None:
    split(shutil.copytree(hub.folder / "small", hub.folder / "shards", dirs_exist_ok=True))
    assert not [line for line in checked("shards") if "could not be read" in line]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_be_trained_is_refused_from_headers_and_config(
    fault: str, hub: FakeHub, checked: Callable[..., list[str]]
) -> None:
    name = fault.replace(" ", "-")
    change, message = FAULTS[fault]
    change(shutil.copytree(hub.folder / "small", hub.folder / name))
    with pytest.raises(ConfigError, match=message) as refused:
        checked(name)
    assert len(refused.value.mistakes) == 1
    assert "HF_TOKEN" not in str(refused.value)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_of_the_hub_gets_its_true_sentence(
    answer: str, hub: FakeHub, checked: Callable[..., list[str]]
) -> None:
    hub.refusals, message = ANSWERS[answer]
    with pytest.raises(ConfigError, match=message) as refused:
        checked("whole")
    assert len(refused.value.mistakes) == 1
    assert not hub.sent


def test_a_revision_that_is_not_there_is_named(checked: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError, match="model_revision=v9 does not exist in owner/whole; leave it out"):
        checked("whole", model_revision="v9")


def test_headers_that_the_hub_does_not_give_are_said(hub: FakeHub, checked: Callable[..., list[str]]) -> None:
    hub.refusals = {"model.safetensors": fake_hub.BROKEN}
    assert "the headers of the weight files could not be read from the Hub" in checked("small")[0]


def test_a_hub_out_of_reach_and_one_that_is_too_slow(
    hub: FakeHub, checked: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.delay = 2.0
    monkeypatch.setattr("trainers.tools.preflight.HUB_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"the Hub is unreachable \(.*timed out.*\); use a local folder"):
        checked("whole")
    use_hub("http://127.0.0.1:9", tmp_path / "other", monkeypatch)
    with pytest.raises(ConfigError, match=r"the Hub is unreachable \(.*refused\); use a local folder, or go online"):
        checked("whole")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="is not on this machine and HF_HUB_OFFLINE is set; unset it"):
        checked("whole")


def test_a_model_that_was_fetched_before_needs_no_hub(hub: FakeHub, checked: Callable[..., list[str]]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("owner/small")
    hub.refusals = {"/": fake_hub.BROKEN}
    hub.sent.clear()
    assert checked("small")
    assert not hub.sent
