"""Explains errors of the Hub and of the network in one sentence. Imports no torch."""

from __future__ import annotations

import re
from functools import partial

from trainers.config.mistakes import Mistake

_STATUS = re.compile(r"(?i)\b(?:status|error)\b[^\d\n:]{0,20}:? ?\(?(40[134])\b")
_XET = {"XetAuthenticationError": 401, "XetAuthorizationError": 403, "XetObjectNotFoundError": 404}


def hub_mistake(name: str, revision: str | None, error: BaseException) -> Mistake | None:
    """Explains why the base model cannot be read from the Hub.

    Args:
        name: Hub id of the model.
        revision: Revision of the model; None for the newest.
        error: The error raised, by huggingface_hub, httpx or the system, possibly wrapped in those of other libraries.

    Returns:
        The mistake; None if neither the Hub nor the network caused the error.
    """
    from huggingface_hub import constants, errors

    about = partial(Mistake, "model_name_or_path", name + (f" at revision {revision}" if revision else ""))
    sign_in = "set HF_TOKEN or run `hf auth login`"
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        match cause:
            case errors.HFValidationError():
                return about("is neither a local folder nor a Hub id (owner/name)", "check the spelling")
            case errors.GatedRepoError():
                return about("is gated", f"accept its terms at {constants.ENDPOINT}/{name}, then {sign_in}")
            case errors.RepositoryNotFoundError():
                remedy = "check the name, or set HF_TOKEN (or run `hf auth login`) if it is private"
                return about("is neither a local folder nor a model on the Hub that you may read", remedy)
            case errors.RevisionNotFoundError():
                remedy = "leave it out, or use another"
                return Mistake("model_revision", revision, f"does not exist in {name}", remedy)
            case errors.HfHubHTTPError() if status in (401, 403):
                return about(f": the Hub refuses your token (status {status})", sign_in)
            case errors.HfHubHTTPError() if status is not None and (status >= 500 or status == 429):
                return about(f": the Hub answers with status {status}", "try again later, or use a local folder")
            case errors.OfflineModeIsEnabled():
                return about("is not on this machine and HF_HUB_OFFLINE is set", "unset it, or use a local folder")
        if _is_network(cause):
            problem = f"is not a local folder and the Hub is unreachable ({_first_line(cause)})"
            return about(problem, "use a local folder, or go online")
    return None


def push_problem(name: str, branch: str | None, error: BaseException) -> tuple[Mistake, bool] | None:
    """Explains why nothing could be pushed to a repository of the Hub.

    Args:
        name: Hub id of the repository.
        branch: Branch of the repository; None for main.
        error: The error raised, by huggingface_hub, its HTTP client or the system.

    Returns:
        The mistake, and whether the same command may succeed later; None if neither the Hub nor the network caused the
        error.
    """
    from huggingface_hub import errors

    about, owner = partial(Mistake, "", None), name.partition("/")[0]
    again = "run the same command again later: files that are there are not sent again"
    may_write = f"set HF_TOKEN to a token that may write to {owner}, or run `hf auth login`"
    for cause in _causes(error):
        status, reason = _status(cause), str(getattr(cause, "server_message", None) or _first_line(cause))[:200]
        match cause:
            case errors.OfflineModeIsEnabled():
                return about(f"{name} cannot be reached: HF_HUB_OFFLINE is set", "unset it"), False
            case errors.RevisionNotFoundError():
                return about(f"{name} has no branch {branch or 'main'}", "check --revision"), False
            case _ if status == 401:
                return about("the Hub refuses your token (status 401)", may_write), False
            case _ if status == 403:
                return about(f"your token may not write to {name} (status 403: {reason})", may_write), False
            case _ if status == 404:
                problem = f"{name} is not on the Hub, or your token may not see it (status 404)"
                return about(problem, f"check the name, and {may_write}"), False
            case _ if status in (409, 412):
                return about(f"{name} was changed by someone else meanwhile (status {status})", again), True
            case _ if status is not None and (status >= 500 or status == 429):
                return about(f"the Hub answers with status {status}", again), True
            case _ if status is not None:
                return about(f"the Hub refuses {name} (status {status}): {reason}", "see its answer"), False
        if _is_network(cause):
            return about(f"the Hub is unreachable ({_first_line(cause)})", again), True
    return None


def _status(error: BaseException) -> int | None:
    """The status of an answer; that of Xet's storage stands in the text of its errors, whose classes hide it."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return getattr(error.response, "status_code", None)
    names = {kind.__name__ for kind in type(error).__mro__}
    if any(name.startswith("Xet") for name in names) or "ConnectionError" in names:
        if match := _STATUS.search(str(error)):
            return int(match[1])
        return next((status for name, status in _XET.items() if name in names), None)
    return None


def _is_network(error: BaseException) -> bool:
    network = ("ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError", "RemoteProtocolError", "ConnectionError",
               "NetworkError")  # fmt: skip
    return any(kind.__name__ in network for kind in type(error).__mro__)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _causes(error: BaseException | None) -> list[BaseException]:
    """Returns the chain of causes, root cause first, as it is the most specific."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.insert(0, error)
        error = error.__cause__ or error.__context__
    return chain
