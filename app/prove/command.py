"""The verb `prove`: makes the plan, runs it, and shows the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.console import report_json
from app.prove.plan import PROVE, Plan, make_plan
from app.prove.proof import Proof
from app.prove.report import show
from app.prove.resume import ResumeProof
from trainers.config.mistakes import ConfigError
from trainers.run.record import KEPT_STEPS


def prove_verb(argv: Sequence[str]) -> int:
    """`tunesmith prove`.

    Returns:
        The exit status; see `exit_status`.

    Raises:
        ConfigError: for an invalid request, which leaves no files behind.
    """
    args = PROVE.read(argv)
    if args is None:
        return 0
    plan, quiet = make_plan(args), "quiet" in args.switches
    if plan.reference.config.objective_spec.samples:
        _refuse_sampled(plan)
    proof = (ResumeProof if "resume" in args.own else Proof)(plan, argv, quiet)
    proof.run()
    if "json" in args.switches:
        report_json(proof.document)
    else:
        show(proof.document)
    return exit_status(proof.document)


def _refuse_sampled(plan: Plan) -> None:
    """Raises ConfigError for what cannot be proved on the answers that the reference samples."""
    config = plan.reference.config
    if config.sampler_url is not None:
        problem = "in a proof: a server's answers are not the same twice, nor recorded for every row"
        raise ConfigError.about("sampler_url", config.sampler_url, problem, "leave it out: the reference samples")
    if plan.steps > KEPT_STEPS:
        problem = f"with objective={config.objective}: a run keeps the answers of {KEPT_STEPS} steps"
        raise ConfigError.about("--steps", plan.steps, problem, f"use {KEPT_STEPS} at most")


def exit_status(document: Mapping[str, Any]) -> int:
    """The exit status: 0 passed, 1 a row failed or none could be judged, 130 interrupted.

    With a control, passing means that every judged row showed the fault. A row without a verdict could not run on this
    machine, which is not a failure as long as another row passes.
    """
    if document["interrupted"]:
        return 130
    if control := document["control"]:
        return 0 if control["rows"] == control["seen"] > 0 else 1
    passed = [row["passed"] for row in document["rows"]]
    return 0 if True in passed and False not in passed else 1
