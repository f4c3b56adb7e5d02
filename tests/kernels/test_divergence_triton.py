"""The Triton kernel under its interpreter against the torch way, and compiled for GPUs that are not there."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it comes with torch for CUDA)")

INTERPRETED = """
import torch
from spectrain.kernels import divergence_triton
from spectrain.kernels.divergence import Mix, divergence, law_of

divergence_triton.BLOCK = 16  # three blocks, the last one not full
one = ["soft_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "top_k"]
mixes = [Mix(**{name: 1.0}, k=3) for name in one] + [Mix(**{name: 0.3 + 0.1 * i for i, name in enumerate(one)}, k=4, lk_scale=0.8)]
g = torch.Generator().manual_seed(0)
V = 37
full = 2 * torch.randn(6, V + 20, generator=g)
z, log_p, best = full[:, :V] + torch.randn(6, V, generator=g), full.log_softmax(-1)[:, :V].contiguous(), full.argmax(-1)
best = torch.where(best < V, best, -1)
z[2] = 0.0  # ties
assert (best >= 0).any() and (best < 0).any()
for mix in mixes:
    found, slopes = {}, {}
    for backend in ("torch", "triton"):
        slopes[backend] = z.clone()
        law = law_of(log_p.clone(), mix, renormalise=mix.k == 4, backend=backend)
        found[backend] = divergence(slopes[backend], law, mix, best_N=best, backend=backend)
    for name in ("loss_N", "alpha_N", "rank_N"):
        torch.testing.assert_close(getattr(found["triton"], name), getattr(found["torch"], name), atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(slopes["triton"], slopes["torch"], atol=1e-6, rtol=1e-4)
    assert slopes["torch"].abs().amax() > 1e-3
print("same")
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spectrain.kernels.divergence_triton import _divergence_kernel as kernel

flags = {"MORE": True, "LOGS": True, "OVERLAP": True, "GRADIENT": True, "BLOCK": 4096}
kinds = {"z_ptr": "*fp32", "log_p_ptr": "*fp32", "best_ptr": "*i64", "more_ptr": "*fp32", "loss_ptr": "*fp32", "alpha_ptr": "*fp32"}
kinds |= {"rank_ptr": "*i64", "lse_ptr": "*fp32", "z_stride": "i32", "log_p_stride": "i32", "V": "i32"}
signature = {name: kinds.get(name, "constexpr" if name in flags else "fp32") for name in kernel.arg_names}
source = ASTSource(fn=kernel, signature=signature, constexprs=flags)
found = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 8})
assert f".target sm_{sys.argv[1]}" in found.asm["ptx"] and len(found.asm["cubin"]) > 1000
print("compiled")
"""


def run(code: str, *args: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_kernel_differs_from_the_torch_way() -> None:
    assert run(INTERPRETED, TRITON_INTERPRET="1") == "same"


@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernel_does_not_compile(capability: str, tmp_path: object) -> None:
    assert run(COMPILED, capability, TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
