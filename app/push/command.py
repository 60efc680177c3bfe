"""The verb `push`: reads an export, lists what goes, and uploads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from app.console import clean, report, report_json, say, shortened, show_table
from app.push.files import Export, find_export, read_for_push
from app.push.upload import Pushed, PushFailed, Target, upload
from app.services.chat import HUB_ID
from trainers.config.mistakes import Mistake, Mistakes

_BRANCH = re.compile(r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))[A-Za-z0-9_](?:[\w./+-]{0,98}[\w+-])?", re.ASCII)


def push_verb(
    name: str, target: Target, base_model: str | None, dry_run: bool, runs_dir: Path, as_json: bool
) -> int:  # fmt: skip
    """`tunesmith push`.

    Returns:
        The exit status: 0 if it was pushed, 1 if the Hub or the network failed.

    Raises:
        ConfigError: for an invalid request, or one that the Hub refuses.
    """
    mistakes = Mistakes()
    for option, value in (("the repository", target.repo), ("--base_model", base_model)):
        if value is not None and not HUB_ID.fullmatch(value):
            mistakes.append(Mistake(option, repr(shortened(value)), "is not a Hub id", "write ORG/NAME"))
    if target.branch is not None and not _BRANCH.fullmatch(target.branch):
        problem = "is not a name that git allows for a branch"
        mistakes.append(Mistake("--revision", repr(shortened(target.branch)), problem, "use one such as main or v1.2"))
    with mistakes:
        export = read_for_push(find_export(name, runs_dir), base_model)
    mistakes.refuse()
    pushed, failure = None, ""
    _announce(export, target, as_json)
    if not dry_run:
        try:
            pushed = upload(export, target)
        except PushFailed as error:
            failure = str(error)
            say("error: " + clean(failure))
    for name in pushed.deleted if pushed else ():
        say(clean(f"deleted there: {name} of the model before"))
    if as_json:
        report_json(_document(export, target, pushed) | ({"cause": failure} if failure else {}))
    elif pushed:
        report(pushed.url)
    return 1 if failure else 0


def _announce(export: Export, target: Target, as_json: bool) -> None:
    """Says what goes where, before it goes."""
    visibility = "public" if target.public else "private"
    branch = f", branch {target.branch}" if target.branch else ""
    say(clean(f"{export.folder} -> {target.repo} ({visibility}{branch})"))
    for name in export.left_out:
        say(clean(f"not pushed: {name} is no file of the export"))
    for note in export.notes:
        say(clean(f"note: {note}"))
    if not as_json:
        show_table(["file", "bytes"], [[name, f"{size:,}"] for name, size in sorted(export.sizes().items())])


def _document(export: Export, target: Target, pushed: Pushed | None) -> dict[str, Any]:
    return {
        "repo": target.repo,
        "private": not target.public,
        "branch": target.branch or "main",
        "revision": pushed and pushed.commit,
        "url": pushed and pushed.url,
        "card": export.card(),
        "files": [
            {"path": name, "bytes": size, "sha256": export.weights.get(name)}
            for name, size in sorted(export.sizes().items())
        ],
        "left_out": export.left_out,
        "deleted": pushed.deleted if pushed else [],
        "notes": export.notes,
    }
