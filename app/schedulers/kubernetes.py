"""The Kubernetes manifest of a run: an indexed Job with one pod per node, which join as machines do by hand."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from app.console import shortened
from trainers.config.mistakes import ConfigError, Mistake

PORT = 29500
"""Port of the rendezvous; each pod has an address of its own, so that it is free."""
_SETTINGS = "/etc/tunesmith"
_RETRIES = 6
"""How many pods may fail before the Job gives up; a pod that its node has lost or evicted does not count."""
_TAKEN = ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr")
_USER = 1000
"""User and group in the container; the image of the Dockerfile has them."""
_CONFIG_ERROR, _STOPPED = 2, 130
"""Exit statuses after which another pod would only end in the same way."""
_LONGEST_NAME = 50
"""Characters of a Job's name, of the 63 of a pod's: an index and six random characters follow."""
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_Name = Annotated[str, StringConstraints(pattern=rf"^{_LABEL}$")]


class KubernetesOptions(BaseModel):
    """What a manifest needs to know about the cluster.

    Args:
        image: container image with Tunesmith in it.
        volume_claim: PersistentVolumeClaim that all nodes can write to (`ReadWriteMany` for several); holds run
            folders, data, models and the cache.
        volume_path: where the pods mount it.
        nodes: number of nodes, with one pod on each.
        gpus_per_node: GPUs of each pod, with a process on each; 0: processes on the CPU.
        cpus_per_node: CPUs that each pod requests; default: none.
        memory_per_node: memory that each pod requests, such as `64Gi`; default: none.
        namespace: namespace of all objects; default: that of `kubectl`.
        secret: Secret whose entries, such as `HF_TOKEN`, the pods get as environment variables.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$")]
    volume_claim: Annotated[str, StringConstraints(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253)]
    volume_path: Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$", max_length=255)] = (
        "/shared"
    )
    nodes: int = Field(default=1, ge=1, le=128)
    gpus_per_node: int = Field(default=1, ge=0, le=64)
    cpus_per_node: int | None = Field(default=None, ge=1, le=4096)
    memory_per_node: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}(Ki|Mi|Gi|Ti|k|M|G|T)?$")] | None = None
    namespace: _Name | None = None
    secret: Annotated[str, StringConstraints(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253)] | None = None

    @field_validator("volume_path")
    @classmethod
    def _is_free(cls, value: str) -> str:
        if value.split("/")[1] in _TAKEN:
            raise ValueError(f"is in /{value.split('/')[1]}, which belongs to the container")
        return value

    @classmethod
    def read(cls, chosen: Mapping[str, Any]) -> Self:
        """The options given on a command line.

        Raises:
            ConfigError: with every mistake.
        """
        try:
            return cls.model_validate(dict(chosen))
        except ValidationError as error:
            raise ConfigError(_mistake(part, chosen) for part in error.errors()) from None

    def holds(self, path: str) -> bool:
        """Whether a path of the pods lies on the volume, below the folder where it is mounted."""
        parts = PurePosixPath(path)
        return PurePosixPath(self.volume_path) in parts.parents and ".." not in parts.parts


_EXPECTED = {
    "image": "the name of an image, such as registry.example/team/tunesmith:1",
    "volume_claim": "the name of a PersistentVolumeClaim: small letters, digits and hyphens",
    "volume_path": "an absolute path of letters, digits and ._-",
    "memory_per_node": "an amount of memory, such as 64Gi",
    "namespace": "the name of a namespace: small letters, digits and hyphens",
    "secret": "the name of a Secret: small letters, digits and hyphens",
}


def _mistake(error: Any, values: Mapping[str, Any]) -> Mistake:
    """The mistake of a validation error of pydantic."""
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return Mistake(f"--{name}", None, "is missing", f"give {_EXPECTED[name]}")
    if error["type"] == "extra_forbidden":
        return Mistake(f"--{name}", None, "is not for Kubernetes", f"use {', '.join(KubernetesOptions.model_fields)}")
    value = " ".join(shortened(str(values[name])).split())
    if error["type"] == "value_error":
        return Mistake(name, value, str(error["ctx"]["error"]), "mount it elsewhere")
    if name in _EXPECTED:
        return Mistake(name, value, f"is not {_EXPECTED[name]}", "check the value")
    return Mistake(name, value, f"is refused: {error['msg'][0].lower()}{error['msg'][1:]}", "check the value")


def object_name(folder: str, volume_claim: str) -> str:
    """A name for the objects of a run, the same each time and no other run's.

    It is the folder's last name, as far as Kubernetes allows its letters, and the beginning of a hash.

    Args:
        folder: the run folder.
        volume_claim: the volume on which it lies.
    """
    path = PurePosixPath(folder)
    digest = hashlib.sha256(f"{volume_claim}:{path}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"  # names of Services start with a letter
    return f"{name[: _LONGEST_NAME - len(digest) - 1].rstrip('-')}-{digest}"


def head_name(folder: str, volume_claim: str) -> str:
    """The name by which the pods of a run find the first of them."""
    name = object_name(folder, volume_claim)
    return f"{name}-0.{name}"


def manifest(output_dir: str, processes: int, config: str, strategy: str, options: KubernetesOptions) -> str:
    """The manifest of a run, for `kubectl apply -f -`.

    Args:
        output_dir: run folder, on the volume.
        processes: number of ranks over all nodes.
        config: text of its `config.yaml`.
        strategy: text of its Accelerate file.
        options: the cluster.
    """
    name = object_name(output_dir, options.volume_claim)
    labels = {"app.kubernetes.io/name": "tunesmith", "app.kubernetes.io/instance": name}
    namespace = {"namespace": options.namespace} if options.namespace else {}
    annotations = {"tunesmith/output_dir": output_dir}
    metadata: dict[str, Any] = {"name": name, **namespace, "labels": labels, "annotations": annotations}
    settings = {"config.yaml": _Text(config), "strategy.yaml": _Text(strategy)}
    documents: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": settings},
    ]
    if options.nodes > 1:  # gives machine 0 a name that the other pods can resolve
        addresses = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _selector(name)}
        ports = [{"name": "rendezvous", "port": PORT}]
        documents.append(
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {**addresses, "ports": ports}}
        )
    job = _job(name, labels, _arguments(output_dir, processes, options), options)
    documents.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job})
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _arguments(output_dir: str, processes: int, options: KubernetesOptions) -> list[str]:
    """The command of each pod: what one would type on each machine."""
    arguments = ["tunesmith", "train", "--config", f"{_SETTINGS}/config.yaml", "--strategy"]
    arguments += [f"{_SETTINGS}/strategy.yaml", "--output_dir", _literal(output_dir)]
    arguments += ["--resume_from_checkpoint", "auto"]  # a pod in place of a lost one goes on
    if options.gpus_per_node:
        arguments += ["--gpus", ",".join(map(str, range(options.gpus_per_node)))]
    else:
        arguments += ["--num_processes", str(processes)]
    if options.nodes > 1:
        arguments += ["--num_machines", str(options.nodes), "--machine_rank", "$(MACHINE_RANK)"]
        arguments += [
            "--main_process_ip",
            head_name(output_dir, options.volume_claim),
            "--main_process_port",
            str(PORT),
        ]
    return arguments


def _literal(value: str) -> str:
    """Protects a value from Kubernetes, which replaces `$(NAME)` in commands."""
    return value.replace("$", "$$")


def _selector(name: str) -> dict[str, str]:
    return {"batch.kubernetes.io/job-name": name}


def _job(name: str, labels: Mapping[str, str], arguments: list[str], options: KubernetesOptions) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,  # SIGTERM saves
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(arguments, options)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.volume_claim}},
            {"name": "settings", "configMap": {"name": name}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and data workers; the default is 64 MiB
        ],
    }  # fmt: skip
    if options.nodes > 1:
        term = {"labelSelector": {"matchLabels": _selector(name)}, "topologyKey": "kubernetes.io/hostname"}
        pod["subdomain"] = name
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = {"containerName": "tunesmith", "operator": "In", "values": [_CONFIG_ERROR, _STOPPED]}
    return {
        "completionMode": "Indexed", "completions": options.nodes, "parallelism": options.nodes,
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": [lost, {"action": "FailJob", "onExitCodes": final}]},
        "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
    }  # fmt: skip


def _container(arguments: list[str], options: KubernetesOptions) -> dict[str, Any]:
    rank = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    requests: dict[str, str] = {"cpu": str(options.cpus_per_node)} if options.cpus_per_node else {}
    requests |= {"memory": options.memory_per_node} if options.memory_per_node else {}
    gpus = {"nvidia.com/gpu": str(options.gpus_per_node)} if options.gpus_per_node else {}
    return {
        "name": "tunesmith",
        "image": options.image,
        "command": arguments,
        "env": [
            {"name": "HOME", "value": "/tmp"},  # noqa: S108  (the only folder of the container that can be written)
            {"name": "HF_HOME", "value": f"{options.volume_path}/huggingface"},
            *([{"name": "MACHINE_RANK", "valueFrom": {"fieldRef": rank}}] if options.nodes > 1 else []),
        ],
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        **({"resources": {"requests": {**requests, **gpus}, "limits": gpus}} if requests or gpus else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shared", "mountPath": options.volume_path},
            {"name": "settings", "mountPath": _SETTINGS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }  # fmt: skip


class _Text(str):
    """Text of a file, written line by line."""


class _Dumper(yaml.SafeDumper):
    """Writes files as blocks, and no anchors for what stands in several places."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)
