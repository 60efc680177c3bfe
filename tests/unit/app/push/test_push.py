"""`tunesmith push`: with the real client, against a stand-in of the Hub's HTTP interface on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.cli import run_verb
from tests import fake_hub
from tests.e2e.test_commands import wait_for
from tests.fake_hub import Refusal, serve_hub, use_hub
from tests.launching import ROOT, environment, free_port
from tests.made_runs import add_checkpoint, made_run
from tests.parity.runs import mostly_long
from tests.receiving_hub import ReceivingHub, digest
from tests.unit.checkpoint.test_export import config, saved_base, trained
from trainers.checkpoint import export
from trainers.embedded import BASE_DIR
from trainers.run.folder import RunFolder
from trainers.run.hub_errors import push_problem
from trainers.run.manifest import sha256
from trainers.run.model_card import History

TOKEN = "hf_only-in-the-environment"  # noqa: S105
EVALUATED = {"before": {"eval_loss": 2.5}, "after": {"eval_loss": 0.5}}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exports: `full`, its weights in several files, and `adapter`, of a base in a folder of this machine."""
    root = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "SHARD_SIZE", "1MB")
        full, history = config(BASE_DIR, method="full", learning_rate=0.01), History(processes=2, **EVALUATED)
        export.export(lambda _: trained(full), full, root / "full", "full", {}, history=history)
    local = config(saved_base(root / "my-base", torch.float32), lora_r=4)
    export.export(lambda _: trained(local), local, root / "adapter", "adapter", {})
    return root


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceivingHub]:
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with serve_hub(tmp_path / "hub", ReceivingHub) as served:
        use_hub(served.url, tmp_path / "cache", monkeypatch)
        yield served


@pytest.fixture
def run(exports: Path, tmp_path: Path) -> RunFolder:
    """A run in `runs/mine` that exported full weights."""
    run = made_run(tmp_path / "runs", "mine")
    shutil.copytree(exports / "full", run.model)
    return run


Push = Callable[..., int]


@pytest.fixture
def push(run: RunFolder) -> Push:
    """Runs the verb in this process."""
    return lambda *words: run_verb(["push", *map(str, words), "--runs_dir", str(run.path.parent)])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.usefixtures("by_hand")
def test_a_push_that_is_killed_in_mid_upload_goes_on_with_what_is_missing(hub: ReceivingHub, run: RunFolder) -> None:
    shards = {path.name: sha256(path) for path in run.model.glob("*.safetensors")}
    sizes = {sha256(path): path.stat().st_size for path in run.model.glob("*.safetensors")}
    assert len(shards) >= 3
    hub.held = min(sizes, key=lambda oid: sizes[oid])
    line = [sys.executable, "-m", "app.cli", "push", str(run.path), "owner/tuned"]
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    env = environment(PYTHONPATH=str(ROOT), HF_HOME=str(run.path.parent / "home"), **variables)
    program = subprocess.Popen(line, env=env, cwd=run.path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    others = sizes.keys() - {hub.held}
    wait_for(lambda: program.poll() is not None or (hub.objects.keys() == others and hub.received[hub.held or ""] > 0))
    assert program.poll() is None, program.communicate()
    program.send_signal(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert sorted(os.listdir(hub.folder / "tuned")) == [".gitattributes"], "a reader sees all of it or nothing"
    hub.goes_on.set()
    again = subprocess.run(line, env=env, cwd=run.path.parent, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1].startswith(f"{hub.url}/owner/tuned/commit/")
    assert {oid: hub.received[oid] for oid in others} == {oid: sizes[oid] for oid in others}, "each byte once"
    assert sizes[hub.held] < hub.received[hub.held] <= 2 * sizes[hub.held]
    assert sorted(os.listdir(hub.folder / "tuned")) == sorted([".gitattributes", *os.listdir(run.model)])
    hub.forgetful = True  # control: the count sees content that is sent twice
    once_more = subprocess.run(
        [*line[:-1], "owner/other"], env=env, cwd=run.path.parent, capture_output=True, text=True
    )
    assert once_more.returncode == 0, once_more.stderr
    assert {oid: hub.received[oid] for oid in others} == {oid: 2 * sizes[oid] for oid in others}
    assert TOKEN not in again.stdout + again.stderr
    assert hub.tokens - {None} == {f"Bearer {TOKEN}"}, "the client asks for a list of its own without a token"


def test_stock_transformers_loads_what_was_pushed(hub: ReceivingHub, run: RunFolder, push: Push) -> None:
    assert push("mine", "owner/tuned") == 0
    model = AutoModelForCausalLM.from_pretrained("owner/tuned")
    wanted = weights(run.model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items() if name in wanted)
    assert "tuned" in hub.private
    sent = list(hub.received.values())
    assert push("mine", "owner/tuned") == 0, "nothing has changed"
    assert list(hub.received.values()) == sent


def test_the_card_says_what_was_trained_on_what_with_which_result(hub: ReceivingHub, push: Push) -> None:
    assert push("mine", "owner/tuned", "--public") == 0
    assert "tuned" not in hub.private
    pushed = hub.folder / "tuned"
    card = ModelCard.load(pushed / "README.md")
    assert (card.data.library_name, card.data.base_model, card.data.license) == ("transformers", None, None)
    assert card.data.tags == ["tunesmith", "sft", "full"]
    assert "| eval_loss | 2.5 | 0.5 |" in card.text
    assert "learning_rate: 0.01" in card.text
    assert (
        "tunesmith train --num_processes 2 --model_name_or_path base --method full --dataset_name embedded" in card.text
    )
    for path in pushed.glob("*.safetensors"):
        assert f"| {path.name} | {path.stat().st_size} | `{sha256(path)}` |" in card.text


def test_an_adapter_on_the_result_of_a_run_asks_for_that_result(
    hub: ReceivingHub, exports: Path, push: Push, tmp_path: Path, capsys: Any
) -> None:
    folder = shutil.copytree(exports / "adapter", tmp_path / "second")
    record = json.loads((folder / "tunesmith.json").read_text())
    record["config"]["from_run"] = record["config"]["model_name_or_path"]
    (folder / "tunesmith.json").write_text(json.dumps(record))
    assert push(folder, "owner/second") == 0
    note = "the result of my-base is not on the Hub, so others cannot load this adapter: push it too, and name it with "
    assert f"{note}--base_model ORG/NAME" in capsys.readouterr().err


def test_no_path_of_this_machine_is_pushed(hub: ReceivingHub, exports: Path, push: Push, capsys: Any) -> None:
    """Not in the adapter's config either, where stock peft writes the folder of the base model."""
    folder = exports / "adapter"
    local = str(exports)
    assert local in (folder / "adapter_config.json").read_text(), "control"
    assert local in (folder / "tunesmith.json").read_text(), "control"
    assert push(folder, "owner/adapter") == 0
    assert "the base model my-base is not on the Hub, so others cannot load this adapter" in capsys.readouterr().err
    for path in (hub.folder / "adapter").iterdir():
        assert local.encode() not in path.read_bytes()
        assert str(ROOT).encode() not in path.read_bytes()
    base = AutoModelForCausalLM.from_pretrained(exports / "my-base")
    tuned = PeftModel.from_pretrained(base, "owner/adapter")
    ours = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(exports / "my-base"), folder)
    assert all(torch.equal(a, b) for a, b in zip(tuned.parameters(), ours.parameters(), strict=True))


def test_a_local_base_gets_its_name_on_the_hub(hub: ReceivingHub, exports: Path, push: Push) -> None:
    assert push(exports / "adapter", "owner/adapter", "--base_model", "org/base") == 0
    pushed = hub.folder / "adapter"
    assert json.loads((pushed / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    assert json.loads((pushed / "tunesmith.json").read_text())["config"]["model_name_or_path"] == "org/base"
    card = ModelCard.load(pushed / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("org/base", "adapter")
    assert "Adapter weights of `org/base`, fine-tuned" in card.text
    assert "--model_name_or_path org/base " in card.text
    assert "my-base" in (exports / "adapter" / "README.md").read_text(), "control"
    assert "my-base" not in card.text


def test_a_dry_run_lists_files_and_sends_nothing(
    hub: ReceivingHub, run: RunFolder, push: Push, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (run.model / "notes.txt").write_text("mine")
    assert push("mine", "owner/tuned", "--dry_run", "--json") == 0
    out, errors = capsys.readouterr()
    document = json.loads(out)
    names = {file["path"] for file in document["files"]}
    assert names == set(os.listdir(run.model)) - {"notes.txt"}
    assert (document["left_out"], document["revision"], document["private"]) == (["notes.txt"], None, True)
    assert "not pushed: notes.txt" in errors
    assert hub.requests == []


@pytest.mark.long
def test_a_branch_is_made(hub: ReceivingHub, run: RunFolder, push: Push) -> None:
    assert push("mine", "owner/tuned", "--revision", "second") == 0
    assert os.listdir(hub.folder / "tuned") == [".gitattributes"]
    assert sorted(os.listdir(hub.folder / "tuned--second")) == sorted(os.listdir(run.model))


REFUSED: dict[str, tuple[dict[str, Refusal], int, str]] = {
    "token": ({"/": fake_hub.BAD_TOKEN}, 2, r"the Hub refuses your token \(status 401\); set HF_TOKEN to a token that"),
    "no right": (
        {"/repos/create": (403, "", "over quota")},
        2,
        r"may not write to .* \(status 403: .*over quota",
    ),
    "right to read": ({"/preupload/": (403, "", "no")}, 2, r"your token may not write to owner/tuned \(status 403: "),
    "no owner": ({"/": (404, "RepoNotFound", "no")}, 2, r"owner/tuned is not on the Hub, or .* \(status 404\); check"),
    "changed": ({"/commit/": (412, "", "no")}, 1, r"owner/tuned was changed by someone else .*; run the same command"),
    "conflict": ({"/commit/": (409, "", "no")}, 1, r"owner/tuned was changed by someone else .* \(status 409\)"),
    "broken": ({"/commit/": fake_hub.BROKEN}, 1, "the Hub answers with status 500; run the same command again later"),
    "limited": ({"/repos/": fake_hub.LIMITED}, 1, "the Hub answers with status 429; run the same command again later"),
    "a card it does not take": ({"/commit/": (400, "", "bad card")}, 2, r"the Hub refuses owner/tuned \(status 400\)"),
}


@pytest.mark.parametrize("case", mostly_long([*REFUSED], ["token", "no right", "changed"]))
def test_the_hub_s_refusal_is_one_sentence_with_the_way_out(
    case: str, hub: ReceivingHub, push: Push, capsys: Any
) -> None:
    hub.refusals, status, sentence = REFUSED[case]
    assert push("mine", "owner/tuned") == status
    _one_error(capsys, sentence)


def _one_error(capsys: Any, sentence: str) -> None:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1

    assert re.search(sentence, lines[0]), lines[0]
    assert TOKEN not in lines[0]


def test_without_a_network_it_says_so(
    hub: ReceivingHub, push: Push, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert push("mine", "owner/tuned") == 1
    _one_error(capsys, "the Hub is unreachable .*; run the same command again later: files that are there are not sent")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert push("mine", "owner/tuned") == 2
    _one_error(capsys, "cannot be reached: HF_HUB_OFFLINE is set; unset it")


def test_a_token_is_needed(hub: ReceivingHub, push: Push, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert push("mine", "owner/tuned") == 2
    _one_error(capsys, "you are not logged in to the Hub; set HF_TOKEN")
    assert hub.requests == []


def test_private_weights_do_not_go_to_a_public_repository(hub: ReceivingHub, push: Push, capsys: Any) -> None:
    hub.make("open", private=False)
    hub.make("closed", private=True)
    assert push("mine", "owner/open") == 2
    _one_error(capsys, "owner/open is public, and everybody would see these weights; pass --public")
    assert push("mine", "owner/closed", "--public") == 2
    _one_error(capsys, "owner/closed is private; change that in its settings")
    assert hub.received == {}
    assert push("mine", "owner/open", "--public") == push("mine", "owner/closed") == 0, "control"


@pytest.mark.parametrize("name", ["model-00001-of-00009.safetensors", "tokenizer.json", "model.gguf"])
def test_another_model_is_replaced_only_where_that_is_said(
    name: str, hub: ReceivingHub, push: Push, capsys: Any
) -> None:
    """Also files of the same name, which the commit would overwrite."""
    there = hub.make("used", True, **{name: b"other", "LICENSE": b"mine"})
    assert push("mine", "owner/used") == 2
    _one_error(capsys, f"owner/used has files of another model: {name}; pass --replace to put this one in its place")
    assert ((there / name).read_bytes(), hub.received) == (b"other", {})
    assert push("mine", "owner/used", "--replace") == 0
    assert not (there / name).exists() or (there / name).read_bytes() != b"other"
    assert (there / "LICENSE").read_bytes() == b"mine"


def test_files_of_the_model_before_that_this_one_lacks_are_deleted(
    hub: ReceivingHub, run: RunFolder, push: Push, capsys: Any
) -> None:
    before = {"tunesmith.json": b"{}", "added_tokens.json": b"{}", "model-00009-of-00009.safetensors": b"x"}
    there = hub.make("used", True, **before, **{"chat_template.json": b"{}", "notes.json": b"{}"})
    assert push("mine", "owner/used") == 0
    assert {*os.listdir(there)} - {*os.listdir(run.model)} == {".gitattributes", "notes.json"}
    printed = capsys.readouterr().err
    assert "deleted there: added_tokens.json of the model before" in printed
    assert "notes.json" not in printed


def test_a_file_that_the_hub_leaves_out_is_missed(hub: ReceivingHub, push: Push, capsys: Any) -> None:
    hub.ignored = {"tokenizer.json"}
    assert push("mine", "owner/tuned") == 2
    _one_error(capsys, "owner/tuned did not take tokenizer.json; see whether a .gitignore there names it")


@pytest.mark.long
def test_a_hub_with_other_bytes_is_noticed(hub: ReceivingHub, push: Push, capsys: Any) -> None:
    assert digest(b"other", True) != digest(b"", True)
    entry = hub._entry
    hub._entry = lambda root, path: entry(root, path) | {"size": 1}  # type: ignore[method-assign]
    assert push("mine", "owner/tuned") == 1
    _one_error(capsys, "owner/tuned has another .* than was sent; push again")


def damage(run: RunFolder, case: str) -> None:
    """Changes an export in one way."""
    model, (first, *_) = run.model, sorted(run.model.glob("*.safetensors"))
    if case == "link":
        shutil.move(model / "tokenizer.json", run.path / "tokenizer.json")
        (model / "tokenizer.json").symlink_to(run.path / "tokenizer.json")
    elif case == "pipe":
        (model / "tokenizer_config.json").unlink()
        os.mkfifo(model / "tokenizer_config.json")
    elif case == "missing":
        first.unlink()
    elif case == "changed":
        content = bytearray(first.read_bytes())
        content[-1] ^= 1
        first.write_bytes(content)
    elif case == "path":
        (model / "README.md").write_text(f"see {run.path}/log.txt")
    elif case == "secret":
        (model / "config.json").write_text(json.dumps({"note": TOKEN}))
    elif case == "older":
        (model / "tunesmith.json").write_text(json.dumps({"config": {}, "stages": []}))
    elif case == "elsewhere":
        record = json.loads((model / "tunesmith.json").read_text())
        (model / "tunesmith.json").write_text(json.dumps({**record, "files": [*record["files"], "../log.txt"]}))
    elif case == "no export":
        shutil.rmtree(model)
    else:
        shutil.rmtree(model)
        add_checkpoint(run, 20)


DAMAGES = {
    "link": "tokenizer.json leads out of the export, to .*/mine/tokenizer.json; put the file itself there",
    "pipe": "tokenizer_config.json is not a regular file; export the run again",
    "missing": "model-00001-of-0000.*safetensors cannot be read: No such file or directory; export the run again",
    "changed": "model-00001-of-.* was changed after it was exported, so the model card does not fit it",
    "path": r"README.md contains the path .*/runs/mine of this machine; remove it there",
    "secret": "config.json contains a secret of this machine; remove it there",
    "older": "was exported by an older version, or is damaged; export the run again: `tunesmith export RUN",
    "elsewhere": "log.txt leads out of the export, to .*/mine/log.txt; put the file itself there",
    "no export": "run mine is done and has no finished export, nor a checkpoint to export; let it train",
    "a checkpoint": "has no finished export; write one with `tunesmith export mine --checkpoint step-00000020 --output",
}


@pytest.mark.parametrize(
    "case", mostly_long([*DAMAGES], ["link", "elsewhere", "changed", "path", "secret", "a checkpoint"])
)
def test_what_is_not_an_export_as_it_was_written_is_refused(
    case: str, hub: ReceivingHub, run: RunFolder, push: Push, capsys: Any
) -> None:
    damage(run, case)
    assert push("mine", "owner/tuned") == 2
    _one_error(capsys, DAMAGES[case])
    if case == "changed":  # weights are read after the refusals that cost nothing
        assert sorted(os.listdir(hub.folder / "tuned")) == [".gitattributes"]
    else:
        assert hub.requests == []


def test_weights_are_read_after_the_refusals_that_cost_nothing(
    hub: ReceivingHub, run: RunFolder, push: Push, capsys: Any
) -> None:
    damage(run, "changed")
    hub.make("open", private=False)
    assert push("mine", "owner/open") == 2
    _one_error(capsys, "owner/open is public")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("XetAuthenticationError", "no", r"refuses your token \(status 401\)"),
        ("XetError", "HTTP status client error (404 Not Found)", r"is not on the Hub, or .* \(status 404\)"),
        (
            "ConnectionError",
            "HTTP status client error (403 Forbidden) for url",
            r"may not write to .* \(status 403: HTTP",
        ),
        ("ConnectionError", "connect to host 10.0.0.401 failed", "the Hub is unreachable"),
    ],
)
def test_errors_of_xet_are_explained_by_their_status(name: str, text: str, sentence: str) -> None:
    """Its classes are not those of the Hub's client, and some are of lost connections."""
    kind = ConnectionError if name == "ConnectionError" else type(name, (Exception,), {})
    explained = push_problem("owner/tuned", None, kind(text))
    assert explained
    assert re.search(sentence, str(explained[0]))
    assert explained[1] == ("unreachable" in sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("mine", "tuned"), "the repository='tuned' is not a Hub id; write ORG/NAME"),
        (("mine", "../tuned"), "the repository='../tuned' is not a Hub id"),
        (("gone", "owner/tuned"), "gone"),
        (("mine@step-00000020", "owner/tuned"), "run mine has no export 'step-00000020'; push mine@model"),
        (("mine", "owner/tuned", "--base_model", "x"), "--base_model='x' is not a Hub id"),
        (("mine", "owner/tuned", "--revision", ""), "--revision has no value; write --revision VALUE"),
        (("mine", "owner/tuned", "--revision", "a..b"), "--revision='a..b' is not a name"),
    ],
)
def test_what_cannot_be_pushed_is_refused(
    words: tuple[str, ...], sentence: str, hub: ReceivingHub, push: Push, capsys: Any
) -> None:
    assert push(*words) == 2
    _one_error(capsys, sentence)
    assert hub.requests == []


def test_a_checkpoint_is_exported_first(hub: ReceivingHub, run: RunFolder, push: Push, capsys: Any) -> None:
    add_checkpoint(run, 20)
    assert push("mine@step-00000020", "owner/tuned") == 2
    _one_error(
        capsys, "write one with `tunesmith export mine --checkpoint step-00000020 --output DIR`, then `tunesmith"
    )
