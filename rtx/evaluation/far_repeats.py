"""Far-repeated units: what precedes them also occurred far back, so that far context helps there.

Shapes: B windows, N units of a window, S positions at which runs of units start.
"""

import numpy as np

RUN_LENGTH = 8
"""How many units before a unit must also have occurred together earlier.

A power of two: `numbered_runs` doubles the length of runs until it is this one.
"""


def far_repeated(tokens_BN: np.ndarray, reach: int) -> np.ndarray:
    """Return which units of windows are far-repeated, boolean `[B, N]`.

    The `RUN_LENGTH` units before such a unit also occurred together earlier in the window. The
    latest such place is more than `reach` units before them.

    Args:
        tokens_BN: int64, at least 0.
    """
    is_far_BN = np.zeros(tokens_BN.shape, bool)
    if tokens_BN.shape[1] <= RUN_LENGTH:
        return is_far_BN
    run_BS = numbered_runs(tokens_BN)
    # Sorted by run, equal runs are neighbours, in the order of their positions. Equal runs are of
    # one window, so a difference of flat positions is a distance in that window.
    order = run_BS.ravel().argsort(kind="stable")
    is_same_run = np.diff(run_BS.ravel()[order]) == 0
    distance = np.diff(order)
    is_far = np.zeros(len(order), bool)
    is_far[order[1:]] = is_same_run & (distance > reach)
    # The last run ends with the window: no unit follows it.
    is_far_BN[:, RUN_LENGTH:] = is_far.reshape(run_BS.shape)[:, :-1]
    return is_far_BN


def numbered_runs(tokens_BN: np.ndarray) -> np.ndarray:
    """Return a number for the run of `RUN_LENGTH` units from each position on, `[B, S]`.

    Equal runs of a window have the same number. Different windows have different numbers.
    """
    window_B1 = np.arange(len(tokens_BN))[:, None]
    run_BS = tokens_BN + window_B1 * (tokens_BN.max() + 1)
    size = 1
    while size < RUN_LENGTH:
        # Two neighbouring runs of `size` units are a run of twice as many.
        pair_BS = run_BS[:, :-size] * (run_BS.max() + 1) + run_BS[:, size:]
        _, number = np.unique(pair_BS, return_inverse=True)
        run_BS = number.reshape(pair_BS.shape)
        size *= 2
    return run_BS
