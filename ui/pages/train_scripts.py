"""Endpoints of the Train page for scripts that use `gradio_client`."""

from __future__ import annotations

from collections.abc import Callable

import gradio as gr

from app.launch.background import start
from app.launch.foreground import CheckBroke
from app.services.form import Preview
from app.services.memory_check import memory_verdict
from trainers.config.mistakes import ConfigError


def serve_scripts(preview_request: Callable[[object], Preview]) -> None:
    """Adds `/preview` and `/launch`, each taking one JSON object.

    Args:
        preview_request: what a request would do.
    """

    def script_preview(request: dict) -> dict:
        """What a request {preset, strategy, gpus, num_processes, options} would do; starts nothing."""
        try:
            return preview_request(request).as_json()
        except ConfigError as error:
            raise _refusal(error) from None

    def script_launch(request: dict) -> dict:
        """Starts the run of a request {preset, strategy, gpus, num_processes, options}."""
        try:
            requested = preview_request(request)
            if requested.job is None:
                raise ConfigError(requested.mistakes)
            memory = memory_verdict(requested.job).line  # a script cannot confirm: warn only
            start(requested.job)
        except (ConfigError, CheckBroke) as error:
            raise _refusal(error) from None
        warnings = [*requested.warnings, *([memory] if memory else [])]
        return {"run_dir": str(requested.job.run.path), "id": requested.job.run.id, "warnings": warnings}

    gr.api(script_preview, api_name="preview")
    gr.api(script_launch, api_name="launch", concurrency_limit=1, concurrency_id="launch")


def _refusal(error: Exception) -> gr.Error:
    """The error as Gradio returns it to a script."""
    return gr.Error(str(error), print_exception=False)
