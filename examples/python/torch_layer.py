"""torch: a small KDA layer on packed sequences, eager and compiled. Runs on a GPU if one is served.

Needs torch. Prints the largest difference between the two, which is 0.
"""

from __future__ import annotations

import torch

import flash_kda


class KDALayer(torch.nn.Module):
    """Projections around `flash_kda.chunk_kda`; forward only."""

    def __init__(self, width: int, heads: int, dim: int = 128) -> None:
        """`width`: of the model. `heads`: H = HV. `dim`: K = V."""
        super().__init__()
        self.heads, self.dim = heads, dim
        inner = heads * dim
        # One fused projection. The operator takes its column blocks as they are, without copies.
        self.project = torch.nn.Linear(width, 4 * inner + heads, bias=False)
        self.sizes = [inner] * 4 + [heads]
        self.A_log = torch.nn.Parameter(torch.zeros(heads))
        self.dt_bias = torch.nn.Parameter(torch.zeros(inner))
        self.output = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[1, T, width], the offsets [N + 1] of the sequences in T -> [1, T, width]."""
        *blocks, beta = self.project(x).split(self.sizes, dim=-1)
        q, k, v, g = (block.unflatten(-1, (self.heads, self.dim)) for block in blocks)
        out, _ = flash_kda.chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            cu_seqlens=cu_seqlens,
        )
        return self.output(out.flatten(-2))


def main() -> None:
    """Runs the layer both ways."""
    served = any(b.name.startswith("cuda") and b.available for b in flash_kda.backends())
    device = "cuda" if served and torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = KDALayer(width=256, heads=4).to(device, torch.bfloat16)
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    x = torch.randn(1, 500, 256, device=device, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 123, 123, 500], device=device)
    with torch.inference_mode():
        eager = layer(x, cu_seqlens)
        # "eager" compiles nothing to machine code and so needs no compiler at run time.
        compiled = torch.compile(layer, fullgraph=True, backend="eager")(x, cu_seqlens)
    difference = (eager - compiled).abs().max().item()
    print(f"{device}: {list(eager.shape)}, largest difference eager - compiled {difference}")


if __name__ == "__main__":
    main()
