"""The exports of a run that its page has started, `tunesmith export` in the background."""

from __future__ import annotations

from app.runs.run_work import RunWork
from app.runs.work_folder import WorkFolder


class ExportFolder(WorkFolder):
    """The work of one export. Its note also has `target`, the folder of the model when it began, and `options`."""

    note_name = "export.json"


EXPORTS = RunWork("exports", ExportFolder, "an export")
