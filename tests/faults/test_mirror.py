"""The machine is taken away with its disk: another goes on from the copies in an object store, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.detached import ended, state_of, step_of, train_words, tunesmith, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, STEPS
from tests.launching import Finished
from tests.parity.checks import weights
from trainers.run.folder import RunFolder

SECRET = "a-secret-that-must-not-be-seen"  # noqa: S105 - of no account anywhere


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """The variables with which a run reaches an S3 server on this machine."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    client = boto3.client("s3", endpoint_url=variables["AWS_ENDPOINT_URL"], region_name="us-east-1",
                          aws_access_key_id="me", aws_secret_access_key=SECRET)  # fmt: skip
    client.create_bucket(Bucket="runs")
    yield variables
    server.stop()


def test_a_run_goes_on_where_nothing_of_it_is_left(
    store: dict[str, str], home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, run = undisturbed("ddp"), RunFolder(home / "runs" / "mine")
    fault = noted("the machine is gone with its disk", "ddp")
    options = {**OPTIONS, "save_total_limit": 2, "strategy": "ddp", "checkpoint_url": "s3://runs/mine"}
    assert tunesmith(*train_words(run, 2, **options), home=home, **store).returncode == 0
    until(lambda: state_of(run) == "running" and step_of(run) >= 2 * INTERVAL + 1)
    assert tunesmith("stop", "mine", home=home).returncode == 0
    stopped = ended(run)["step"]
    assert f"copied step-{stopped:08d} to s3://runs/mine" in run.log.read_text()
    fault.at()
    first = run.log.read_text() + run.config.read_text() + run.command.read_text()
    shutil.rmtree(run.path)

    again = tunesmith(*train_words(run, 2, **options), home=home, **store)
    assert again.returncode == 0
    assert ended(run)["state"] == "failed", "control: a new run does not take the place of another"
    assert "holds checkpoints, the newest of step" in ended(run)["cause"]
    shutil.rmtree(run.path)

    words = train_words(run, 2, **options, resume_from_checkpoint="auto")
    assert tunesmith(*words, home=home, **store).returncode == 0
    assert (state := ended(run))["state"] == "done", state
    found = {row["step"]: float(row["loss"]).hex() for row in Finished(run, 0, "").rows()}
    assert found == {row["step"]: float(row["loss"]).hex() for row in Finished(whole, 0, "").rows()[stopped:]}
    mine, theirs = (weights(Finished(one, 0, "")) for one in (run, whole))
    assert all(mine[name].equal(theirs[name]) for name in mine)
    assert max(found) == STEPS
    fault.harmless()
    assert SECRET not in first + run.log.read_text() + run.config.read_text()
