"""The outer step in numba: one pass over the tensor, the same bits as `fold.outer_step`.

Without fastmath numba never fuses a multiplication and an addition, so each is rounded, as in numpy. Importing this
module needs numba.
"""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def _plain(sum64: np.ndarray, anchor: np.ndarray, new_anchor: np.ndarray, eta: np.float32) -> None:
    for i in range(len(sum64)):
        new_anchor[i] = anchor[i] - eta * np.float32(sum64[i])


@njit(cache=True, nogil=True)
def _nesterov(
    sum64: np.ndarray, old: tuple[np.ndarray, ...], new: tuple[np.ndarray, ...], eta: np.float32, mu: np.float32
) -> None:
    for i in range(len(sum64)):
        direction = np.float32(sum64[i])
        momentum = mu * old[1][i] + direction
        new[1][i] = momentum
        new[0][i] = old[0][i] - eta * (direction + mu * momentum)


def outer_step(
    sum64: np.ndarray, old: tuple[np.ndarray, ...], new: tuple[np.ndarray, ...], rates: tuple[np.float32, np.float32]
) -> None:
    """`fold.outer_step`."""
    if len(old) == 2:
        _nesterov(sum64, old, new, *rates)
    else:
        _plain(sum64, old[0], new[0], rates[0])
