"""Errors that end a run."""


class TrainingError(RuntimeError):
    """The run cannot continue; the message says why and what to do, in one sentence."""


class Interrupted(TrainingError):
    """Something outside of the run, such as a server, is gone or too slow: a supervised run is started again."""


class RollBack(TrainingError):
    """A loss spike: every rank exits, and the next launch resumes from an earlier checkpoint without those batches."""
