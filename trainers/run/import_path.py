"""What a process imports: never a file of the working folder, where the user's data lies. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def child_environment(outer: Mapping[str, str], root: str | None = None) -> dict[str, str]:
    """An environment whose processes, and those that they start, import nothing from the folder they run in.

    A `yaml.py` or `queue.py` beside the data would otherwise take over the launcher and every rank. `-P` keeps the
    folder out of one process and is not inherited; an empty or relative entry of PYTHONPATH brings it back.

    Args:
        outer: environment to extend.
        root: folder to import from before any other.
    """
    absolute = [path for path in outer.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    paths = os.pathsep.join([*([root] if root else []), *absolute])
    environment = {name: value for name, value in outer.items() if name != "PYTHONPATH"}
    return {**environment, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": paths} if paths else {})}


def leave_out_working_folder() -> None:
    """Takes the working folder off this process's path, unless PYTHONPATH names it in full, and off its children's."""
    environment, folder = child_environment(os.environ), os.getcwd()
    if folder not in environment.get("PYTHONPATH", "").split(os.pathsep):
        sys.path[1:] = [path for path in sys.path[1:] if path not in ("", folder)]
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(environment)
