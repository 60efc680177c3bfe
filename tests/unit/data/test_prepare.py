"""Prepared data: done once and found again, whoever asks; the same in parallel; flat in memory; every loss counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.unit.data.test_support import (
    MARKED,
    PLAIN,
    ROOT,
    SPECIAL,
    chat,
    child,
    configure,
    save_tokenizer,
    write_jsonl,
)
from trainers.config.mistakes import ConfigError
from trainers.data import fill_cache
from trainers.data import prepare as prepare_module
from trainers.data import training_template as training_template_module
from trainers.data.prepare import data_fingerprint, prepare, report_lines
from trainers.data.report import Report
from trainers.data.template import training_encoder
from trainers.data.tokenizer import load_tokenizer
from trainers.tools.preflight import plan_training

ROWS = [chat(f"question {i}", f"answer {i} " + "x" * (i % 7)) for i in range(40)]


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", ROWS)


def content(tokens):
    """Everything in a token set, as plain values."""
    documents = [tuple(array.tolist() for array in tokens.document(i)) for i in range(len(tokens))]
    return documents, tokens.lengths.tolist(), tokens.trained.tolist(), [tokens.where(i) for i in range(len(tokens))]


def forbid_building(monkeypatch):
    def fail(*arguments):
        raise AssertionError("built again")

    monkeypatch.setattr(prepare_module, "build_set", fail)


def test_documents_lengths_and_masks_belong_together(tmp_path, data):
    tokens = prepare(configure(tmp_path, data), "train")
    tokenizer = load_tokenizer(configure(tmp_path, data))
    for index in (0, 17, 39):
        ids, mask = tokens.document(index)
        assert (ids.dtype, mask.dtype, type(ids)) == (np.int32, np.bool_, np.ndarray)
        assert (len(ids), mask.sum()) == (tokens.lengths[index], tokens.trained[index])
        assert tokenizer.decode(ids[mask]) == ROWS[index]["messages"][1]["content"] + "<|im_end|>"
        assert not ids.flags.writeable
    assert tokens.report.tokens == tokens.lengths.sum()
    assert tokens.report.trained_tokens == tokens.trained.sum()
    assert tokens.where(17) == f"{data}:18"


def test_documents_are_gathered_one_after_another(tmp_path, data):
    tokens = prepare(configure(tmp_path, data), "train")
    asked = np.array([17, 3, 39, 3, 0], dtype=np.int32)
    ids, mask = tokens.gather(asked)
    parts = [tokens.document(int(index)) for index in asked]
    assert np.array_equal(ids, np.concatenate([part for part, _ in parts]))
    assert np.array_equal(mask, np.concatenate([part for _, part in parts]))
    assert 0 < mask.sum() < len(mask)


def test_a_second_time_it_is_found(tmp_path, data, monkeypatch):
    config = configure(tmp_path, data)
    made = prepare(config, "train")
    forbid_building(monkeypatch)
    found = prepare(config, "train")
    assert content(found) == content(made)
    assert found.report == made.report
    with pytest.raises(AssertionError, match="built again"):
        prepare(config.model_copy(update={"max_length": 99}), "train")


def test_data_that_moved_is_found_and_named_as_it_is_now(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "old.jsonl", [*ROWS, b"{"])
    made = prepare(configure(tmp_path, data, bad_rows="skip"), "train")
    assert made.report.examples()[0].startswith(f"{data}:{len(ROWS) + 1}: ")
    (tmp_path / "elsewhere").mkdir()
    moved = data.rename(tmp_path / "elsewhere" / data.name)
    forbid_building(monkeypatch)
    found = prepare(configure(tmp_path, moved, bad_rows="skip"), "train")
    assert found.report.examples()[0].startswith(f"{moved}:{len(ROWS) + 1}: ")
    assert found.report.dataset == str(moved)
    assert found.where(0) == f"{moved}:1"


def test_processes_that_come_at_once_do_the_work_once(tmp_path, data):
    config = configure(tmp_path, data)
    code = (
        "import json, sys\nfrom trainers.config.validation import build\n"
        "from trainers.data import prepare as module\n"
        "original = module.build_set\n"
        "def counted(*arguments):\n    print('built')\n    return original(*arguments)\n"
        "module.build_set = counted\n"
        "sys.stdin.readline()\n"
        "print(len(module.prepare(build(json.loads(sys.argv[1])), 'train')))"
    )
    command = [sys.executable, "-c", code, config.model_dump_json()]
    pipe = subprocess.PIPE
    callers = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    for caller in callers:
        caller.stdin.write("\n")
        caller.stdin.flush()
    said = [caller.communicate(timeout=120)[0].split() for caller in callers]
    assert sorted(word for words in said for word in words) == ["40", "40", "40", "built"]


@pytest.mark.parametrize("name", ["input_ids", "mask", "lengths", "trained", "files", "lines", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_made_again(tmp_path, data, name, damage):
    config = configure(tmp_path, data)
    made = prepare(config, "train")
    before, path = content(made), made.folder / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.unlink()
        path.write_bytes(raw if damage == "flip" else raw[: len(raw) // 2])
    assert content(prepare(config, "train")) == before
    assert {entry.name for entry in made.folder.parent.iterdir()} == {made.fingerprint, f"{made.fingerprint}.lock"}


def test_the_cache_is_readable_by_its_owner_alone(tmp_path, data):
    before = os.umask(0)
    try:
        made = prepare(configure(tmp_path, data), "train")
    finally:
        os.umask(before)
    assert made.folder.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_run_left_is_removed(tmp_path, data):
    config = configure(tmp_path, data)
    left = tmp_path / "cache" / f"{data_fingerprint(config, 'train')}.tmp-1"
    left.mkdir(parents=True)
    (left / "input_ids").write_bytes(b"half")
    prepare(config, "train")
    assert not left.exists()


def test_tokenised_in_parallel_equals_tokenised_by_one(tmp_path, monkeypatch):
    rows = [*ROWS, b"{", *ROWS, {"messages": 7}, *ROWS]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    monkeypatch.setattr(fill_cache, "SHARD_BYTES", 1000)
    started = []
    original = fill_cache.Pool
    monkeypatch.setattr(fill_cache, "Pool", lambda *given: started.append(given[0]) or original(*given))
    one = prepare(configure(tmp_path, data, bad_rows="skip", dataset_num_proc=1), "train")
    kept, report = content(one), one.report
    shutil.rmtree(one.folder)
    two = prepare(configure(tmp_path, data, bad_rows="skip", dataset_num_proc=2), "train")
    assert started == [1, 2]
    assert content(two) == kept
    assert two.report == report
    assert [line.split(": ")[0] for line in report.examples()] == [f"{data}:41", f"{data}:82"]


def test_mistakes_and_deaths_of_processes_are_told(tmp_path, data, monkeypatch):
    monkeypatch.setattr(fill_cache, "SHARD_BYTES", 1000)
    save_tokenizer(tmp_path / "bare", None)
    with pytest.raises(ConfigError, match="has no chat template"):
        prepare(configure(tmp_path, data, model_name_or_path=str(tmp_path / "bare")), "train")
    config = configure(tmp_path, data, dataset_num_proc=2)
    load_tokenizer(config)
    monkeypatch.setattr("trainers.data.workers.sys.executable", "/bin/false")  # a worker that dies at once
    with pytest.raises(ConfigError, match=r"crashes \(status 1\) on a few rows; .* or set dataset_num_proc below 2"):
        prepare(config, "train")


def test_memory_stays_flat(tmp_path):
    """Four times the rows: the peaks of both processes grow by less than half of what was added."""
    code = (
        "import json, sys, resource\nfrom trainers.config.validation import build\n"
        "from trainers.data import fill_cache as module, prepare as entry\n"
        "module.SHARD_BYTES = 1 << 18\n"
        "for config in sys.argv[1:]:\n"
        "    tokens = entry.prepare(build(json.loads(config)), 'train')\n"
        "    used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
        "    print(tokens.report.tokens, sum(used))"
    )
    rows = [json.dumps({"text": f"row {i} " + "some words " * 10}).encode() for i in range(1000)]
    files = [write_jsonl(tmp_path / f"{times}.jsonl", rows * times) for times in (6, 24)]
    said = child(code, *(configure(tmp_path, path).model_dump_json() for path in files)).split()
    tokens, before, more_tokens, after = map(int, said)
    assert more_tokens == 4 * tokens
    assert (after - before) * 1024 < (more_tokens - tokens) * 5 / 2


@pytest.mark.parametrize(
    ("overlong", "lengths", "counts"),
    [
        ("truncate", [32, 12], {"truncated": 1, "dropped": 1, "split_rows": 0}),
        ("drop", [12], {"truncated": 0, "dropped": 2, "split_rows": 0}),
        ("split", [32, 32, 32, 8, 32, 12], {"truncated": 0, "dropped": 0, "split_rows": 2}),
    ],
)
def test_rows_too_long(tmp_path, overlong, lengths, counts):
    rows = [
        {"prompt": "", "completion": "y" * 102},  # 104 tokens with <s> and </s>
        {"prompt": "x" * 60, "completion": "zz"},  # 64 tokens, the trained ones at the end
        {"prompt": "a" * 5, "completion": "b" * 5},
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    tokens = prepare(configure(tmp_path, path, max_length=32, overlong=overlong), "train")
    assert tokens.lengths.tolist() == lengths
    report = tokens.report
    assert {name: getattr(report, name) for name in counts} == counts
    assert (report.longest, report.tokens, report.cut_tokens) == (104, sum(lengths), 104 + 64 + 12 - sum(lengths))
    assert all(not tokens.document(i)[1][0] for i in range(len(tokens)))
    assert "tokens lost" in report.lines()[1]


def test_a_max_length_that_drops_most_rows_is_told_before_a_batch_size_is_advised(tmp_path):
    rows = [{"prompt": "x" * 60, "completion": "y"}] * 148 + [{"prompt": "x", "completion": "y"}] * 9
    config = configure(tmp_path, write_jsonl(tmp_path / "data.jsonl", rows), max_length=32, packing=False)
    tokens = prepare(config, "train")
    with pytest.raises(ConfigError) as caught:
        plan_training(config, tokens, 1)
    first, second = caught.value.lines
    assert first.startswith("148 of 157 rows are dropped")
    assert "the longest has 63 tokens); raise max_length" in first
    assert second.startswith("global_batch_size=16 is larger than the data")
    assert any("148 of 157 rows are dropped" in line for line in tokens.report.lines())
    assert not prepare(config.model_copy(update={"max_length": 64}), "train").report.dropped_note()


@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_rows_too_long_are_refused_when_asked(tmp_path, bad_rows):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "a" * 50}, {"text": "b"}])
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path, max_length=32, overlong="refuse", bad_rows=bad_rows), "train")
    assert caught.value.lines[0] == f"{path}:1: too long: 52 tokens, over max_length=32"
    assert "raise max_length, or set overlong=truncate" in caught.value.lines[-1]
    assert "bad_rows=skip" not in caught.value.lines[-1]  # it would help none of them


def test_each_kind_of_bad_row_has_its_own_remedy(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "a" * 50}, {"text": 7}, {"text": "b"}])
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path, max_length=32, overlong="refuse"), "train")
    assert "set bad_rows=skip to leave them out; for those too long, raise max_length" in caught.value.lines[-1]


def test_nothing_left_is_refused_with_counts(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a" * 50, "completion": "b"}] * 3)
    with pytest.raises(
        ConfigError, match=r"no document is left .* 3 rows read, 0 bad, 3 dropped \(longest 53 tokens\)"
    ):
        prepare(configure(tmp_path, path, max_length=32), "train")
    assert list((tmp_path / "cache").glob("*.tmp-*")) == []


def test_max_train_samples_takes_the_first_rows(tmp_path, data, monkeypatch):
    monkeypatch.setattr(fill_cache, "SHARD_BYTES", 500)
    tokens = prepare(configure(tmp_path, data, max_train_samples=23), "train")
    assert [tokens.where(i) for i in (0, 22)] == [f"{data}:1", f"{data}:23"]
    assert (len(tokens), tokens.report.rows) == (23, 23)
    assert tokens.report.left_out == 17
    assert f"train data {data}: 17 rows left out by max_train_samples" in tokens.report.lines()
    assert prepare(configure(tmp_path, data, max_train_samples=40), "train").report.left_out == 0
    count = len(prepare(configure(tmp_path, data, eval_share=0.25), "eval"))
    assert count > 3
    evaluation = prepare(configure(tmp_path, data, eval_share=0.25, max_eval_samples=3), "eval")
    held_out = evaluation.report
    assert held_out.left_out == count - 3
    assert any(f"{count - 3} rows left out by max_eval_samples" in line for line in held_out.lines())
    tokens = prepare(configure(tmp_path, data, eval_share=0.25, max_train_samples=20), "train")
    train = tokens.report
    assert (train.rows, train.held_out, train.left_out, held_out.held_out) == (20, count, 20 - count, 0)
    lines = report_lines(tokens, evaluation)
    assert f"train data {data}: {count} rows held out for evaluation by eval_share" in lines
    assert len([line for line in lines if line.startswith("chat template")]) == len(train.template[:1])
    assert set(held_out.lines()) <= set(lines)
    assert report_lines(tokens, None) == train.lines()


def test_evaluation_data_must_be_asked_for(tmp_path, data):
    with pytest.raises(ConfigError, match="set eval_dataset_name or eval_share"):
        prepare(configure(tmp_path, data), "eval")
    assert len(prepare(configure(tmp_path, data, eval_dataset_name=str(data)), "eval")) == 40


def test_the_fingerprint_follows_what_decides_the_tokens(tmp_path, data):
    (tmp_path / "t.jinja").write_text(MARKED)
    base = data_fingerprint(configure(tmp_path, data), "train")
    changes = [
        {"max_length": 99},
        {"overlong": "drop"},
        {"assistant_only_loss": False},
        {"thoughts": "drop"},
        {"max_train_samples": 3},
        {"dataset_format": "chat"},
        {"chat_template": str(tmp_path / "t.jinja")},
        {"eval_share": 0.5},
    ]
    prints = [data_fingerprint(configure(tmp_path, data, **change), "train") for change in changes]
    assert len({base, *prints}) == len(changes) + 1
    same = [{"seed": 7}, {"learning_rate": 1.0}, {"bad_rows": "skip"}, {"packing": False}, {"dataset_num_proc": 2}]
    assert {data_fingerprint(configure(tmp_path, data, **change), "train") for change in same} == {base}
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "eos_token_id": 260}')
    assert data_fingerprint(configure(tmp_path, data), "train") != base
    save_tokenizer(tmp_path / "model", MARKED)
    assert data_fingerprint(configure(tmp_path, data), "train") != base
    save_tokenizer(tmp_path / "model")
    write_jsonl(data, ROWS[:-1])
    assert data_fingerprint(configure(tmp_path, data), "train") != base


def test_the_date_belongs_to_the_fingerprint_of_a_template_that_asks_for_it(tmp_path, data):
    later = {"template_date": "2025-01-02"}
    plain = [data_fingerprint(configure(tmp_path, data, **change), "train") for change in ({}, later)]
    assert plain[0] == plain[1]
    save_tokenizer(tmp_path / "model", "{{ strftime_now('%d') }}" + MARKED)
    dated = [data_fingerprint(configure(tmp_path, data, **change), "train") for change in ({}, later, later)]
    assert dated[0] != dated[1] == dated[2]


def test_trls_training_template_belongs_to_the_fingerprint_and_the_tokenizer_keeps_its_own(tmp_path, data, monkeypatch):
    folder = tmp_path / "trl"
    folder.mkdir()
    (folder / "mine.jinja").write_text(PLAIN)
    (folder / "mine_training.jinja").write_text(MARKED)
    config = configure(tmp_path, data)
    own = data_fingerprint(config, "train")
    assert prepare(config, "train").report.template[0] == "chat template: the model's own"
    monkeypatch.setattr("trainers.data.training_template._trl_folder", lambda: folder)
    training_template_module._trl_names.cache_clear()
    assert data_fingerprint(config, "train") != own
    report = prepare(config, "train").report
    assert report.template[0].endswith("'s training version (mine) of the model's own")
    assert report.template == report.lines()[-3:]
    assert training_encoder(config).options.chat_template == MARKED
    assert load_tokenizer(config).chat_template == PLAIN
    (tmp_path / "t.jinja").write_text(PLAIN)
    own_file = configure(tmp_path, data, chat_template=str(tmp_path / "t.jinja"))
    assert training_encoder(own_file).options.chat_template == PLAIN
    training_template_module._trl_names.cache_clear()


@pytest.mark.parametrize("date", ["tomorrow", "2024-13-01", "26 Jul 2024"])
def test_a_template_date_is_a_date(tmp_path, data, date):
    with pytest.raises(ConfigError, match="template_date"):
        configure(tmp_path, data, template_date=date)


def test_the_report_survives_json(tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", [*ROWS, b"{"])
    report = prepare(configure(tmp_path, data, bad_rows="skip"), "train").report
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert report.lines()[0].startswith(f"train data {data}: 40 documents from 41 rows in 1 file (chat)")


def test_a_cache_folder_that_cannot_be_written(tmp_path, data):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set cache_dir"):
        prepare(configure(tmp_path, data, cache_dir=str(tmp_path / "file" / "cache")), "train")


def test_a_full_disk_leaves_nothing_behind(tmp_path, data, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainers.data.cache.shutil.copyfileobj", full)
    with pytest.raises(ConfigError, match=r"No space left on device; free space there, or set cache_dir"):
        prepare(configure(tmp_path, data), "train")
    assert list((tmp_path / "cache").glob("*.tmp-*")) == []


def test_the_default_cache_folder_is_the_users(tmp_path, data, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    made = prepare(configure(tmp_path, data, cache_dir=None), "train")
    assert made.folder == tmp_path / "xdg" / "tunesmith" / made.fingerprint


def test_a_data_set_of_several_formats(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS[:2])
    (folder / "b.csv").write_text("prompt,completion\nx,y\n")
    (folder / "c.txt").write_text("a line\nanother\n")
    tokens = prepare(configure(tmp_path, folder), "train")
    assert tokens.report.formats == ["chat", "prompt_completion", "text"]
    assert (len(tokens), tokens.report.files) == (5, 3)
    assert tokens.where(4) == f"{folder}/c.txt:2"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/modle", "did you mean .*model"),
        ("{}/data.jsonl", "is a file; pass the folder"),
        ("{}/empty", "has no tokenizer; it needs tokenizer.json"),
        ("../../no/such", "does not exist"),
    ],
)
def test_a_model_that_is_not_there_says_so(tmp_path, data, name, said):
    save_tokenizer(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(configure(tmp_path, data, model_name_or_path=name.format(tmp_path)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "HF_TOKEN"),
        ("RepositoryNotFoundError", "neither a local folder nor a model"),
        ("RevisionNotFoundError", "model_revision=v9 does not exist"),
        ("LocalEntryNotFoundError", "go online once"),
    ],
)
def test_a_model_that_cannot_be_fetched_says_the_way_out(tmp_path, data, monkeypatch, error, said):
    from huggingface_hub import errors

    kind = getattr(errors, error)

    def fail(*names, **options):
        raise kind.__new__(kind, "no")  # some of these cannot be made without a response

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(configure(tmp_path, data, model_name_or_path="org/model", model_revision="v9"))


def test_the_pad_token_never_grows_the_vocabulary(tmp_path, data):
    save_tokenizer(tmp_path / "model", pad_token=None)
    tokenizer = load_tokenizer(configure(tmp_path, data))
    assert tokenizer.pad_token_id == SPECIAL.index("<pad>") + 256
    assert len(tokenizer) == 261


def test_a_chat_template_file_replaces_the_tokenizers(tmp_path, data):
    (tmp_path / "t.jinja").write_text(MARKED)
    config = configure(tmp_path, data, chat_template=str(tmp_path / "t.jinja"))
    assert load_tokenizer(config).chat_template == MARKED
    assert prepare(config, "train").trained.sum() == prepare(configure(tmp_path, data), "train").trained.sum()
    with pytest.raises(ConfigError, match="cannot read chat_template"):
        load_tokenizer(configure(tmp_path, data, chat_template=str(tmp_path / "gone.jinja")))


def test_no_worker_outlives_its_caller(tmp_path):
    """A worker whose parent is killed ends by itself: its standard input closes."""
    code = (
        "import os, sys, json\nfrom pathlib import Path\nfrom trainers.config.validation import build\n"
        "from trainers.data.template import Encoder\nfrom trainers.data.tokenizer import load_tokenizer\n"
        "from trainers.data.tokenise import Options\nfrom trainers.data.workers import Pool\n"
        "config = build(json.loads(sys.argv[1]))\n"
        "encoder = Encoder.of(load_tokenizer(config), True)\n"
        "pool = Pool(2, Path(sys.argv[2]), encoder, Options('line', {}, 99, 'drop', True), 'm')\n"
        "pool.__enter__()\nprint(*[worker.pid for worker in pool._all], flush=True)\nos.kill(os.getpid(), 9)"
    )
    config = configure(tmp_path, "unused")
    command = [sys.executable, "-c", code, config.model_dump_json(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    until = time.monotonic() + 20
    while time.monotonic() < until and any(_lives(pid) for pid in workers):
        time.sleep(0.1)
    assert not any(_lives(pid) for pid in workers)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_jsonl_that_is_a_symlink_is_read_as_what_it_points_to(tmp_path, data):
    link = tmp_path / "link.jsonl"
    os.symlink(data, link)
    assert len(prepare(configure(tmp_path, link), "train")) == 40
