"""Real runs under every tracker, each writing to local files: killed, resumed and cloned, with keys all around."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.test_commands import pid_of, start, steps_of, tunesmith, wait_for
from tests.integrations import stores
from trainers.run.folder import RunFolder, read_json

STEPS, SAVE = 24, 5
SMALL = {"max_length": 64, "global_batch_size": 2, "per_device_train_batch_size": 2, "max_train_samples": 60}
TRACKERS = "tensorboard,wandb,trackio,mlflow,swanlab,comet_ml"
SHORT = ("tiny-lora", "--max_steps", "2", "--logging_steps", "1", "--strategy", "single")
KEYS = {
    name: f"{name.lower().replace('_', '')}0f1e2d3c4b5a69788796a5b4c3d2e1f0"[-40:]
    for name in (
        "WANDB_API_KEY", "COMET_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
        "HF_TOKEN", "TRACKIO_WRITE_TOKEN",
    )
}  # fmt: skip
GIT_TOKEN, URL_PASSWORD, URL_TOKEN = "glpat-of-the-git-remote", "pass-in-an-address", "token-in-an-address"
SECRETS = [*KEYS.values(), GIT_TOKEN, URL_PASSWORD, URL_TOKEN]


def holders(folder: Path, secrets: list[str]) -> list[str]:
    """Files below a folder, and members of archives, that hold a secret, plain or as base64 aligned to its bytes."""
    needles = [secret.encode() for secret in secrets]
    needles += [base64.b64encode(secret[shift:].encode())[:-4] for secret in secrets for shift in range(3)]

    def contents(file: Path) -> Iterator[tuple[str, bytes]]:
        yield str(file.relative_to(folder)), file.read_bytes()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from ((f"{file.name}:{name}", archive.read(name)) for name in archive.namelist())

    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink())
    return [name for file in files for name, data in contents(file) if any(needle in data for needle in needles)]


class Tracked(NamedTuple):
    """A run that was killed and went on, and a clone of it."""

    folder: Path
    run: RunFolder
    clone: RunFolder
    printed: str


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    folder = tmp_path_factory.mktemp("tracked")
    run = RunFolder(folder / "out")
    remote = f"https://oauth2:{GIT_TOKEN}@git.example/some/project.git"
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "HOME": str(folder), "WANDB_MODE": "offline", "SWANLAB_MODE": "offline",
                            "COMET_START_ONLINE": "false", "TRACKIO_DIR": str(folder / "trackio"),
                            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
                            "SOME_PROXY": f"http://someone:{URL_PASSWORD}@proxy:3128"}.items():  # fmt: skip
            patch.setenv(name, value)
        with start(run, folder, **SMALL, max_steps=STEPS, save_steps=SAVE, strategy="single",
                   report_to=TRACKERS) as process:  # fmt: skip
            wait_for(lambda: steps_of(run) > 1.5 * SAVE or process.poll() is not None)
            os.kill(pid_of(run, "rank", 0), signal.SIGKILL)
            process.communicate(timeout=500)
        clone = tunesmith("runs", "clone", "out", "--runs_dir", ".", "--output_dir", "again", "--max_steps", "2",
                          cwd=folder, timeout=400)  # fmt: skip
        assert clone.returncode == 0, clone.stderr
        outputs = [tunesmith("runs", verb, "out", "--runs_dir", ".", cwd=folder) for verb in ("show", "logs")]
        yield Tracked(folder, run, RunFolder(folder / "again"), "".join(done.stdout + done.stderr for done in outputs))


def ids_in(run: RunFolder) -> dict[str, str]:
    return (read_json(run.trackers) or {})["ids"]


def points(tracked: Tracked, name: str, run: RunFolder | None = None) -> dict[str, stores.Points]:
    run = run or tracked.run
    return {
        "tensorboard": lambda: stores.tensorboard(run.path / "tunesmith", "loss"),
        "wandb": lambda: stores.wandb(run.path, "loss"),
        "trackio": lambda: stores.trackio(tracked.folder / "trackio", "loss"),
        "mlflow": lambda: stores.mlflow(f"sqlite:///{tracked.folder}/mlflow.db", "loss"),
        "swanlab": lambda: stores.swanlab(run.path / "swanlog", "loss"),
        "comet_ml": lambda: stores.comet(run.path / "comet", "loss"),
    }[name]()


def rows_of(run: RunFolder) -> list[dict[str, float]]:
    return [row for row in map(json.loads, run.metrics.read_text().splitlines()) if "loss" in row]


def test_the_run_was_killed_between_checkpoints_and_went_on(tracked: Tracked) -> None:
    steps = [row["step"] for row in rows_of(tracked.run)]
    assert len(steps) > len(set(steps)) == STEPS, "some steps were trained twice"
    assert (tracked.run.read_state() or {})["state"] == "done"
    assert "warning: " not in tracked.run.log.read_text().replace("FutureWarning: ", "")


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "mlflow"])
def test_a_resume_goes_on_in_the_same_tracked_run_with_each_step_once(name: str, tracked: Tracked) -> None:
    """But for rows that the kill lost: the last one on its way, and those up to the checkpoint that Trackio had not
    written yet."""
    rows, tracked_points = rows_of(tracked.run), points(tracked, name)
    known = ids_in(tracked.run)
    own_points = tracked_points["" if name == "tensorboard" else known[name]]
    steps = [step for step, _ in own_points]
    first_attempt = [row["step"] for row in rows if row["attempt"] == 0]
    assert len(steps) == len(set(steps))
    again = {row["step"] for row in rows if row["attempt"] == 1}
    lost = {step for step in first_attempt if step not in again} if name == "trackio" else set(first_attempt[-1:])
    assert set(range(1, STEPS + 1)) - set(steps) <= lost
    by_step = {row["step"]: row["loss"] for row in rows}
    assert dict(own_points) == pytest.approx({step: by_step[step] for step in steps}, abs=1e-6)


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_the_same_id_gets_again_what_a_kill_may_have_lost(name: str, tracked: Tracked) -> None:
    """They write through buffers; their servers drop a step that they have."""
    known, tracked_points = ids_in(tracked.run), points(tracked, name)
    assert list(tracked_points) == [known[name]]
    own_points = tracked_points[known[name]]
    second_attempt = [row["step"] for row in rows_of(tracked.run) if row["attempt"] == 1]
    assert [step for step, _ in own_points][-len(second_attempt) :] == second_attempt


def test_comet_goes_on_with_the_same_key_and_has_lost_the_killed_attempt(tracked: Tracked) -> None:
    known = ids_in(tracked.run)
    tracked_points = points(tracked, "comet_ml")
    assert list(tracked_points) == [known["comet_ml"]]
    assert [step for step, _ in tracked_points[known["comet_ml"]]] == [
        row["step"] for row in rows_of(tracked.run) if row["attempt"] == 1
    ]


def test_a_clone_is_a_new_tracked_run(tracked: Tracked) -> None:
    before, after = ids_in(tracked.run), ids_in(tracked.clone)
    assert list(before) == list(after) == TRACKERS.split(",")
    assert all(before[name] != after[name] for name in before if name != "tensorboard")
    for name in TRACKERS.split(","):
        tracked_points = points(tracked, name, tracked.clone)
        assert [step for step, _ in tracked_points["" if name == "tensorboard" else after[name]]] == [1, 2]


def test_mlflow_says_that_both_are_finished(tracked: Tracked) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked.folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tunesmith")
    assert experiment is not None
    runs = [run.info for run in client.search_runs([experiment.experiment_id])]
    assert sorted((run.run_name, run.status) for run in runs) == [("again", "FINISHED"), ("out", "FINISHED")]


def test_no_key_is_in_any_file_or_page(tracked: Tracked) -> None:
    remote = f"{tracked.folder.name}/.git/config"  # where git itself has it
    assert [name for name in holders(tracked.folder, SECRETS) if not name.endswith(".git/config")] == [], remote
    assert not any(secret in tracked.printed for secret in SECRETS)


def test_a_key_in_a_file_an_archive_or_a_database_would_be_found(tmp_path: Path) -> None:
    key = KEYS["WANDB_API_KEY"]
    (tmp_path / "plain.log").write_text(f"the key is {key}.")
    (tmp_path / "header.log").write_bytes(b"Basic " + base64.b64encode(f"me:{key}".encode()))
    with zipfile.ZipFile(tmp_path / "archive.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", key * 20)
    (tmp_path / "other.log").write_text("nothing")
    assert holders(tmp_path, SECRETS) == ["archive.zip:inside", "header.log", "plain.log"]


class Silent:
    """A server that takes connections and never answers."""

    def __enter__(self) -> int:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        return int(self.socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def warnings_of(run: RunFolder) -> list[str]:
    return [line.partition("warning: ")[2] for line in run.log.read_text().splitlines() if "] warning: " in line]


def test_trackers_that_cannot_be_reached_or_never_answer_are_named_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With passwords and tokens in their addresses, none of which is shown."""
    for name in ("WANDB_MODE", "SWANLAB_MODE", "COMET_START_ONLINE"):  # which the run of the other tests needs
        monkeypatch.delenv(name, raising=False)
    with Silent() as port:
        host = f"127.0.0.1:{port}"
        for name, value in {
            **KEYS, "HOME": str(tmp_path), "MLFLOW_TRACKING_URI": f"http://someone:{URL_PASSWORD}@{host}",
            "TRACKIO_SERVER_URL": f"http://127.0.0.1:9/?write_token={URL_TOKEN}", "WANDB_BASE_URL": f"http://{host}",
            "COMET_URL_OVERRIDE": f"http://{host}/clientlib/", "SWANLAB_API_HOST": f"http://{host}",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        done = tunesmith("train", *SHORT, "--output_dir", "out", "--report_to", TRACKERS, "--hang_timeout", "120",
                         cwd=tmp_path, timeout=500)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "out")
    assert [step for step, _ in stores.tensorboard(run.path / "tunesmith", "loss")[""]] == [1, 2]
    warnings = warnings_of(run)
    assert "report_to=mlflow did not start (no answer within 10 s); this attempt trains without it" in " ".join(
        warnings
    )
    for name in ("wandb", "swanlab", "comet_ml"):
        assert any(line.startswith((f"report_to={name} did not", f"{name} gets no more")) for line in warnings), name
    assert holders(tmp_path, SECRETS) == []
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
