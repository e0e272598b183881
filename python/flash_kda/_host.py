"""Any framework's arrays as NumPy arrays on the host, for the reference and the error measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def to_numpy(x: Any, name: str = "array") -> Array:
    """``x`` as a NumPy array on the host; bfloat16 becomes float32 where NumPy cannot hold it.

    Takes NumPy arrays (ml_dtypes included), torch tensors on any device, CuPy and JAX arrays, and
    whatever else has ``__array__`` or ``__dlpack__``. Raises TypeError for anything else.
    """
    if isinstance(x, np.ndarray):
        return x
    if type(x).__module__.partition(".")[0] == "torch":
        x = x.detach()
        if str(x.dtype) == "torch.bfloat16":
            x = x.float()  # exact
        return np.asarray(x.cpu().numpy())
    if type(x).__module__.partition(".")[0] == "cupy":
        return np.asarray(x.get())
    if hasattr(x, "__array__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)
    raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
