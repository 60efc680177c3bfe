"""How a run ends when it cannot go on."""


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to do, in one sentence."""


class GoBack(TrainingError):
    """This attempt ends on every rank, and the next one goes on otherwise from an earlier checkpoint."""
