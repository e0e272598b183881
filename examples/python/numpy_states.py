"""NumPy: serve two conversations from a pool of states, a piece of text at a time.

Needs NumPy and ml_dtypes, nothing else. Prints that pieces give what one call gives.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import flash_kda

HEADS, DIM, SLOTS = 4, 128, 8
rng = np.random.default_rng(0)


def tokens(count: int) -> dict[str, np.ndarray]:
    """q, k, v, raw gate and strength of `count` tokens; a model would make these."""
    shape = (1, count, HEADS, DIM)
    arrays = {name: rng.standard_normal(shape, np.float32) for name in ("q", "k", "v", "g")}
    arrays["beta"] = rng.standard_normal(shape[:3], np.float32)
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}


def kda(arrays: dict[str, np.ndarray], **more: Any) -> np.ndarray:
    """The call of a KDA layer: l2norm, bounded gate, beta as logits. Returns [1, T, HEADS, DIM]."""
    out, _ = flash_kda.chunk_kda(
        **arrays,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        lower_bound=-5.0,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
        **more,
    )
    return out


def main() -> None:
    """Reads two conversations of 192 and 128 tokens, 64 tokens of each at a time."""
    first, second = tokens(192), tokens(128)

    # Conversation 1 lives in slot 5, 2 in slot 2. States are read and written in place.
    pool = np.zeros((SLOTS, HEADS, DIM, DIM), np.float32)
    slots = np.array([5, 2], np.int32)
    pieces: list[list[np.ndarray]] = [[], []]
    for start in range(0, 192, 64):
        parts = [
            {name: array[:, start : start + 64] for name, array in conversation.items()}
            for conversation in (first, second)
        ]
        counts = [part["q"].shape[1] for part in parts]  # the second one ends early: 64, 64, then 0
        packed = {name: np.concatenate([p[name] for p in parts], axis=1) for name in parts[0]}
        out = kda(
            packed,
            cu_seqlens=np.array([0, counts[0], sum(counts)], np.int32),
            initial_state=pool,
            initial_state_indices=slots,
            final_state=pool,
            final_state_indices=slots,
        )
        for i, piece in enumerate(np.split(out, [counts[0]], axis=1)):
            pieces[i].append(piece)

    for i, (conversation, slot) in enumerate(zip((first, second), slots, strict=True)):
        final = np.empty((1, HEADS, DIM, DIM), np.float32)
        whole = kda(conversation, final_state=final)
        same_out = whole.tobytes() == np.concatenate(pieces[i], axis=1).tobytes()
        same_state = final[0].tobytes() == pool[slot].tobytes()
        print(f"conversation {i + 1}: outputs equal {same_out}, state in slot {slot} {same_state}")


if __name__ == "__main__":
    main()
