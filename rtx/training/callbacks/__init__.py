"""The callbacks of a run: a job around the optimizer steps each, a file each."""

from lightning.pytorch import Callback

from rtx.analysis.speed import Meter
from rtx.progress import say
from rtx.training.callbacks.checkpoints import Checkpoints
from rtx.training.callbacks.end_of_run import EndOfRun
from rtx.training.callbacks.not_finite import NotFinite
from rtx.training.callbacks.prepare_passes import PreparePasses
from rtx.training.callbacks.profile import Profile
from rtx.training.callbacks.progress import Progress
from rtx.training.callbacks.rank_states import RankStates
from rtx.training.callbacks.restore import PendingValidation, Restore
from rtx.training.callbacks.rows import MetricsRows
from rtx.training.callbacks.stop_on_signal import StopOnSignal
from rtx.training.callbacks.timing import Timing
from rtx.training.callbacks.validations import Validations
from rtx.training.module import TrainingModule
from rtx.training.session import Session


def run_callbacks(session: Session, module: TrainingModule, meter: Meter) -> list[Callback]:
    """Return the callbacks of a run in the order in which each hook calls them.

    Before the first step: restore, compile, start the clock, validate if that is due. After a step:
    check that loss and gradient are finite, decide whether it is the last step, note its time,
    write a row, obey a signal, save, and show the progress. Lightning then validates, if due.
    """
    checkpoints = Checkpoints(session)
    callbacks = [
        Restore(session),
        RankStates(session, module),
        PreparePasses(session),
        NotFinite(session),
        EndOfRun(session),
        Timing(session),
        PendingValidation(session),
        MetricsRows(session, meter),
        Validations(session),
        StopOnSignal(session, checkpoints),
        checkpoints,
        Progress(session, meter),
    ]
    if session.config.trainer.profile and session.status:
        callbacks.append(Profile(session.folder, session.config.trainer.profile, say))
    return callbacks
