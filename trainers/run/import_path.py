"""Keeps processes from importing files in the working folder, which holds the user's data. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def child_environment(outer: Mapping[str, str], root: str | None = None) -> dict[str, str]:
    """Returns an environment in which processes and their descendants import nothing from the working folder.

    Otherwise a `yaml.py` or `queue.py` next to the data would be imported by the launcher and every rank. `-P` is not
    enough: it is not inherited, and empty or relative entries of PYTHONPATH override it.

    Args:
        outer: Environment to extend.
        root: Folder to import from before any other.
    """
    absolute = [path for path in outer.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    paths = os.pathsep.join([*([root] if root else []), *absolute])
    environment = {name: value for name, value in outer.items() if name != "PYTHONPATH"}
    return {**environment, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": paths} if paths else {})}


WORKING_FOLDER = "TUNESMITH_WORKING_FOLDER"
"""Environment variable with the folder in which a supervised run was started; its launcher runs in another."""


def leave_out_working_folder() -> None:
    """Removes the working folder from the import path of this process and its children.

    It stays if PYTHONPATH contains its absolute path.
    """
    environment, folder = child_environment(os.environ), os.getcwd()
    if folder not in environment.get("PYTHONPATH", "").split(os.pathsep):
        sys.path[1:] = [path for path in sys.path[1:] if path not in ("", folder)]
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(environment)
