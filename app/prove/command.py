"""The verb `prove`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.console import report_json
from app.prove.plan import PROVE, make_plan
from app.prove.proof import Proof
from app.prove.report import show
from app.prove.resume import ResumeProof


def prove_verb(argv: Sequence[str]) -> int:
    """`tunesmith prove`.

    Returns:
        The exit status: 0 when every row that ran has passed (with a control: has failed, as it must) and one has run.

    Raises:
        ConfigError: for a request that is wrong; nothing is left behind then.
    """
    args = PROVE.read(argv)
    if args is None:
        return 0
    plan, quiet = make_plan(args), "quiet" in args.switches
    proof = (ResumeProof if "resume" in args.own else Proof)(plan, argv, quiet)
    proof.run()
    if "json" in args.switches:
        report_json(proof.document)
    else:
        show(proof.document)
    return exit_status(proof.document)


def exit_status(document: Mapping[str, Any]) -> int:
    """0 done, 1 a row failed or none could be judged, 130 interrupted.

    A row without a verdict cannot run on this machine, which is not a failure beside rows that pass; alone it proves
    nothing.
    """
    if document["interrupted"]:
        return 130
    if control := document["control"]:
        return 0 if control["rows"] == control["seen"] > 0 else 1
    passed = [row["passed"] for row in document["rows"]]
    return 0 if True in passed and False not in passed else 1
