"""How a run ends when it cannot go on."""


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what to do, in one sentence."""


class RollBack(TrainingError):
    """A loss spike: every rank ends, and the next launch goes on from an earlier checkpoint without its batches."""
