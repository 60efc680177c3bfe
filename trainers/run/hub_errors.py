"""Explains errors of the Hub and of the network in one sentence. Imports no torch."""

from __future__ import annotations

from functools import partial

from trainers.config.mistakes import Mistake


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
    network = ("ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError", "RemoteProtocolError", "ConnectionError")
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
        if any(kind.__name__ in network for kind in type(cause).__mro__):
            first = str(cause).partition("\n")[0][:200] or type(cause).__name__
            problem = f"is not a local folder and the Hub is unreachable ({first})"
            return about(problem, "use a local folder, or go online")
    return None


def _causes(error: BaseException | None) -> list[BaseException]:
    """Returns the chain of causes, root cause first, as it is the most specific."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.insert(0, error)
        error = error.__cause__ or error.__context__
    return chain
