"""The verb `eval`: makes the plan, runs it, and shows the comparison."""

from __future__ import annotations

from collections.abc import Sequence

from app.console import report_json
from app.eval.plan import EVAL, make_plan
from app.eval.study import Study


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
    study = Study(make_plan(args), "quiet" in args.switches)
    study.run()
    report_json(study.rows)
    return 130 if study.interrupted else 1 if study.failed else 0
