"""Tries an installed flash_kda in an environment that has nothing else: try_wheel.py ON|OFF.

The argument says whether the CUDA kernels must be in it.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import numpy as np

import flash_kda


def main() -> int:
    """Runs a packed call on the CPU and compares it with the recurrence in fp64."""
    backends = {b.name: b for b in flash_kda.backends()}
    for backend in backends.values():
        print(f"  {backend}")
    has_kernels = "no CUDA kernels" not in backends["cuda-sm90"].detail
    assert has_kernels == (sys.argv[1] == "ON"), backends

    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal((1, 100, 2, 64)).astype(np.float32) for _ in range(4))
    beta = rng.standard_normal((1, 100, 2)).astype(np.float32)
    options = {"cu_seqlens": np.array([0, 37, 100]), "lower_bound": -5.0}
    o, state = flash_kda.chunk_kda(
        q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, **options,
    )  # fmt: skip
    want_o, want_state, *_ = flash_kda.reference.recurrent_kda(q, k, v, g, beta, **options)
    errors = [
        float(np.sqrt(((x - y) ** 2).sum() / (y**2).sum()))
        for x, y in ((o, want_o), (state, want_state))
    ]
    assert max(errors) < 1e-5, errors

    assert (pathlib.Path(flash_kda.cmake_dir()) / "flash_kdaConfig.cmake").is_file()
    assert (pathlib.Path(flash_kda.include_dir()) / "flash_kda" / "flash_kda.h").is_file()
    others = [n for n in ("torch", "jax", "cupy", "ml_dtypes") if importlib.util.find_spec(n)]
    print(
        f"  Python {sys.version.split()[0]}, NumPy {np.__version__}, flash_kda"
        f" {flash_kda.__version__} in {flash_kda.__path__[0]};"
        f" others installed: {others or 'none'}; errors {errors[0]:.1e}, {errors[1]:.1e}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
