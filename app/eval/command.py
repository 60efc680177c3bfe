"""The verb `eval`: makes the plan, runs it, and shows the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.console import report, report_json
from app.eval.comparison import compare
from app.eval.plan import EVAL, make_plan
from app.eval.report import print_comparison
from app.eval.study import Study
from trainers.run.folder import write_json


def eval_verb(argv: Sequence[str]) -> int:
    """`tunesmith eval`.

    Returns:
        The exit status: 0 if all models were evaluated, 1 if one failed, 130 if interrupted.

    Raises:
        ConfigError: for an invalid request, which leaves no files behind.
    """
    args = EVAL.read(argv)
    if args is None:
        return 0
    plan = make_plan(args)
    study = Study(plan, "quiet" in args.switches)
    study.run()
    document: dict[str, Any] = {"metrics": [], "rows": [], "comparisons": [], "changed": [], "notes": []}
    if study.rows:
        document = compare(study.rows, plan.settings)
    document |= {"failed": study.failed, "interrupted": study.interrupted, "report_dir": str(plan.folder),
                 "command": ["tunesmith", "eval", *argv]}  # fmt: skip
    if plan.folder.is_dir():
        write_json(plan.folder / "report.json", document)
    if "json" in args.switches:
        report_json(document)
    else:
        print_comparison(document)
        report(f"\nreport {plan.folder / 'report.json'}")
    return 130 if study.interrupted else 1 if study.failed else 0
