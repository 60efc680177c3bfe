"""Versions of the packages: against Tunesmith's bounds, against each other, and against known faults."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from app.doctor.check import Check, judged
from trainers.strategy.strategy import Strategy

LISTED = ("tunesmith", "torch", "accelerate", "transformers", "peft", "datasets", "gradio", "deepspeed", "bitsandbytes")
EXTRAS = ("", "ui", "quant", "deepspeed", "fp8", "s3")
_UPDATE = "install the versions that are asked for: `pip install --upgrade tunesmith`, or `make setup` in a clone"


@dataclass(frozen=True)
class Setting:
    """What a fault may depend on besides versions.

    Args:
        strategy: the strategy of the run.
        has_gpu: whether the run uses GPUs.
    """

    strategy: Strategy
    has_gpu: bool


@dataclass(frozen=True)
class BadPair:
    """Versions that install together and do not work together.

    Args:
        versions: specifier by package; the fault needs all of them.
        problem: what happens.
        remedy: how to avoid it.
        source: where it is documented or how it was found.
        applies: whether the run meets it.
    """

    versions: Mapping[str, str]
    problem: str
    remedy: str
    source: str
    applies: Callable[[Setting], bool] = lambda setting: True


def _zbv_on_gloo(setting: Setting) -> bool:
    return setting.strategy.pp_schedule == "zbv" and setting.strategy.pp_size > 1 and not setting.has_gpu


BAD_PAIRS = (
    BadPair({"torch": "<2.12"}, "gloo refuses a message of a rank to itself, which the zbv pipeline schedule sends",
            "update torch to 2.12 or later, or use pp_schedule 1f1b", "measured with torch 2.11", _zbv_on_gloo),
    BadPair({"gradio": "<6.20"}, "pages leak files and login tokens to whoever reaches the port",
            'pip install "gradio>=6.31"', "CVE-2026-27167, -28414, -28416, -48545, -49119, -59806"),
    BadPair({"peft": ">=0.21", "torchao": "<0.16"}, "peft refuses to add adapters while an older torchao is installed",
            'pip install "torchao>=0.18", or uninstall it', "peft.import_utils.TORCHAO_MINIMUM_VERSION"),
)  # fmt: skip
"""Faults that training does not avoid by itself; those that it does (cuDNN attention under masks on Hopper, compiled
tensor parallelism) need no check."""


def installed() -> dict[str, str]:
    """Version by normalized name of every installed distribution; the first on the path counts, as for imports."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            versions.setdefault(canonicalize_name(name), distribution.version)
    return versions


def version_checks(setting: Setting, versions: Mapping[str, str] | None = None) -> list[Check]:
    """Checks of all that is installed.

    Args:
        setting: what the run is like.
        versions: version by package; default: the installed ones.
    """
    known = installed() if versions is None else versions
    return [_bounds(known), _requirements(known), _pairs(known, setting)]


def _bounds(known: Mapping[str, str]) -> Check:
    """Tunesmith's own requirements; those of its extras only for packages that are installed."""
    value = ", ".join([f"python {platform.python_version()}", *(f"{name} {known[name]}" for name in LISTED
                                                                if name in known)])  # fmt: skip
    try:
        lines = metadata.requires("tunesmith") or []
    except metadata.PackageNotFoundError:
        return Check("versions", None, f"Tunesmith is not installed, so its bounds are not known here; {value}")
    faults = []
    for requirement in map(Requirement, lines):
        extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        wanted = any(requirement.marker is None or requirement.marker.evaluate({"extra": name}) for name in EXTRAS)
        if wanted and (fault := _unmet(requirement, known, optional=extra)):
            faults.append(fault)
    return judged("versions", faults, value, _UPDATE)


def _requirements(known: Mapping[str, str]) -> Check:
    """What the other packages ask of each other, as `pip check` does: a torchvision built for another torch."""
    faults, seen = [], set[str]()
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name in seen or name == "tunesmith":
            continue
        seen.add(name)
        for requirement in _valid(distribution.requires or []):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and (fault := _unmet(requirement, known, optional=True)):
                faults.append(f"{name} {distribution.version} wants {fault}")
    value = f"the {len(seen)} installed packages suit each other"
    return judged("package requirements", sorted(faults), value, "`pip check` lists them; install matching versions")


def _valid(lines: Iterable[str]) -> Iterable[Requirement]:
    for line in lines:
        try:
            yield Requirement(line)
        except ValueError:  # an old package with a requirement that no longer counts as one
            continue


def _unmet(requirement: Requirement, known: Mapping[str, str], optional: bool) -> str | None:
    """What is wrong with a requirement; None if it is met, or if it is optional and not installed."""
    version = known.get(canonicalize_name(requirement.name))
    if version is None:
        return None if optional else f"{requirement.name}{requirement.specifier}, which is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name}{requirement.specifier}, and {version} is installed"


def _pairs(known: Mapping[str, str], setting: Setting) -> Check:
    met = [pair for pair in BAD_PAIRS if pair.applies(setting) and _holds(pair, known)]
    faults = [
        f"{' with '.join(f'{name} {known[name]}' for name in pair.versions)}: {pair.problem} ({pair.source})"
        for pair in met
    ]
    remedy = "; ".join(pair.remedy for pair in met)
    return judged("known bad pairs", faults, f"none of {len(BAD_PAIRS)}", remedy)


def _holds(pair: BadPair, known: Mapping[str, str]) -> bool:
    return all(
        name in known and SpecifierSet(specifier).contains(known[name], prereleases=True)
        for name, specifier in pair.versions.items()
    )
