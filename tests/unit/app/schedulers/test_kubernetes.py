"""The manifest for Kubernetes: valid by the published schemas, and nothing in it but what was meant."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.launch.foreground import EXIT_CODES
from app.schedulers.kubernetes import KubernetesOptions, manifest, object_name
from trainers.config.mistakes import ConfigError

REQUIRED = {"image": "registry.example/tunesmith:1", "volume_claim": "data"}
FULL = REQUIRED | {
    "volume_path": "/data", "cpus_per_node": "8", "memory_per_node": "64Gi", "namespace": "team", "secret": "hub"
}  # fmt: skip
VERSIONS = ("1.30", "1.33", "1.37")


def documents(chosen: dict[str, Any], output_dir: str = "/shared/runs/first") -> list[dict[str, Any]]:
    options = KubernetesOptions.read(chosen)
    return list(yaml.safe_load_all(manifest(output_dir, 2, "seed: 1\n", "# strategy: ddp\n", options)))


def job(chosen: dict[str, Any], output_dir: str = "/shared/runs/first") -> dict[str, Any]:
    return documents(chosen, output_dir)[-1]


def container(document: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any] = document["spec"]["template"]["spec"]["containers"][0]
    return only


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("chosen", [REQUIRED, FULL], ids=["required", "full"])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 0), (1, 8), (3, 0), (3, 8)])
def test_each_object_is_valid_by_the_published_schema(
    version: str, chosen: dict[str, Any], nodes: int, gpus: int
) -> None:
    objects = documents(chosen | {"nodes": nodes, "gpus_per_node": gpus})
    kinds = [document["kind"] for document in objects]
    assert kinds == ["ConfigMap", *(["Service"] if nodes > 1 else []), "Job"]
    for document in objects:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("damage", ["completionmode", "backofflimit"])
def test_the_schema_refuses_a_misspelled_key(damage: str) -> None:
    document = job(REQUIRED)
    document["spec"][damage] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_a_pod_that_another_would_only_repeat_ends_the_job_and_a_lost_one_does_not_count() -> None:
    rules = job(REQUIRED)["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]  # in this order: a drained pod exits with 130
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["onExitCodes"]["values"] == [2, EXIT_CODES["stopped"]]
    assert EXIT_CODES["failed"] not in rules[1]["onExitCodes"]["values"]


def test_no_pod_is_root_or_holds_a_token_of_the_cluster() -> None:
    pod = job(FULL)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    security = container(job(FULL))["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_machines_find_the_first_by_its_name_in_the_service() -> None:
    first, service, last = documents(REQUIRED | {"nodes": 3, "gpus_per_node": 0}, "/shared/runs/My_Run.2")
    command = container(last)["command"]
    name = last["metadata"]["name"]
    assert re.fullmatch("my-run-2-[0-9a-f]{8}", name)
    assert command[command.index("--main_process_ip") + 1] == f"{name}-0.{name}"
    assert last["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == name
    assert command[command.index("--machine_rank") + 1] == "$(MACHINE_RANK)"
    rank = next(entry for entry in container(last)["env"] if entry["name"] == "MACHINE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert first["data"] == {"config.yaml": "seed: 1\n", "strategy.yaml": "# strategy: ddp\n"}


def expanded(word: str) -> str:
    """What Kubernetes makes of a word of a command whose variables are all set to `x`."""
    return re.sub(r"\$\$|\$\(\w+\)", lambda match: "$" if match[0] == "$$" else "x", word)


@given(st.text(st.sampled_from("$()aA_/ "), min_size=1, max_size=12))
def test_kubernetes_replaces_nothing_in_a_folders_name(name: str) -> None:
    command = container(job(REQUIRED, f"/shared/{name}"))["command"]
    assert expanded(command[command.index("--output_dir") + 1]) == f"/shared/{name}"


def test_a_variable_in_a_name_would_otherwise_be_replaced() -> None:
    assert expanded("/shared/$(HOME)") == "/shared/x"


@given(st.text(max_size=80))
def test_any_folder_gives_a_valid_name(folder: str) -> None:
    name = object_name(f"/shared/{folder}", "data")
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
    assert len(f"{name}-127-abcde") <= 63, "the name of a pod"


LONG = "x" * 80
PAIRS = [
    ("a/first", "b/first"), ("first", "First"), ("my run", "my-run"), ("\u00e4", "\u00f6"), ("a/b-c", "a-b/c"),
    (f"{LONG}1", f"{LONG}2"),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "other"), PAIRS)
def test_no_two_folders_share_a_name(folder: str, other: str) -> None:
    assert object_name(f"/shared/{folder}", "data") != object_name(f"/shared/{other}", "data")


def test_the_same_folder_on_another_volume_is_another_run() -> None:
    assert object_name("/shared/first", "data") != object_name("/shared/first", "other")


def test_the_name_of_a_folder_stays() -> None:
    """Another manifest of the same run replaces its objects; so it must also be the same in later versions."""
    assert object_name("/shared/a/first", "data") == "first-33785431"
    assert {object_name(path, "data") for path in ("/shared/a/first", "/shared/a//first", "/shared/a/first/")} == {
        object_name("/shared/a/first", "data")
    }


def test_all_objects_of_a_run_are_found_by_its_label() -> None:
    objects = documents(REQUIRED | {"nodes": 2})
    labels = [document["metadata"]["labels"] for document in objects]
    labels.append(objects[-1]["spec"]["template"]["metadata"]["labels"])
    name = object_name("/shared/runs/first", "data")
    assert labels == 4 * [{"app.kubernetes.io/name": "tunesmith", "app.kubernetes.io/instance": name}]
    assert objects[-1]["metadata"]["annotations"] == {"tunesmith/output_dir": "/shared/runs/first"}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, "--image is missing; give the name of an image"),
        ({"image": "a b"}, "image=a b is not the name of an image"),
        ({"image": "a\n- b"}, "image=a - b is not the name of an image"),
        ({"volume_claim": "Data"}, "volume_claim=Data is not the name of a PersistentVolumeClaim"),
        ({"volume_path": "shared"}, "volume_path=shared is not an absolute path"),
        ({"volume_path": "/a/../b"}, "volume_path=/a/../b is not an absolute path"),
        ({"volume_path": "/etc/data"}, "volume_path=/etc/data is in /etc, which belongs to the container"),
        ({"nodes": "0"}, "nodes=0 is refused: input should be greater than or equal to 1"),
        ({"gpus_per_node": "many"}, "gpus_per_node=many is refused: "),
        ({"memory_per_node": "64 GB"}, "memory_per_node=64 GB is not an amount of memory, such as 64Gi"),
        ({"partition": "a"}, "--partition is not for Kubernetes; use image, volume_claim"),
        ({"secret": "TOKEN=abc"}, "secret=TOKEN=abc is not the name of a Secret"),
    ],
)
def test_a_wrong_option_is_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KubernetesOptions.read((REQUIRED | chosen) if chosen else {})


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.text()))


@given(name=st.sampled_from(list(KubernetesOptions.model_fields)), value=VALUES)
def test_every_kind_of_value_gives_a_valid_manifest_or_a_mistake_of_its_option(name: str, value: object) -> None:
    chosen = REQUIRED | {name: value}
    try:
        KubernetesOptions.read(chosen)
    except ConfigError as error:
        mistakes = [mistake.option.removeprefix("--") for mistake in error.mistakes]
    else:
        mistakes = [name]
        for document in documents(chosen):
            kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    assert mistakes == [name]


def test_what_lies_on_the_volume() -> None:
    options = KubernetesOptions.read(REQUIRED)
    assert options.holds("/shared/runs/first")
    inside = ["/shared", "/shared/../etc", "/sharedx/a", "shared/a", "", "/data/a"]
    assert not any(map(options.holds, inside))
