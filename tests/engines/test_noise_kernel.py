"""The noise kernel equals torch's operations, and compiles for current GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import torch
from flexrlhf.engines.sampling import place_hash
from flexrlhf.engines.noise_kernel import gumbel_noise_of
from flexrlhf.engines.sampling import gumbel_noise

rows, positions = torch.tensor([0, 3, 77, 2**40]), torch.tensor([0, 5, 13, 4000])
for vocabulary in (1, 1024, 2500):
    expected = gumbel_noise(5, 9, rows, positions, vocabulary)
    found = gumbel_noise_of(place_hash(5, 9, rows, positions), vocabulary)
    # logarithms of two libraries
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flexrlhf.engines.noise_kernel import _kernel

signature = {"keys": "*i64", "noise": "*fp64", "vocabulary": "i32", "block": "constexpr"}
# V100, A100, H100, B200
for capability in (70, 80, 90, 100):
    source = ASTSource(fn=_kernel, signature=signature, constexprs={"block": 1024})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"], capability
"""


def run(program: str, **variables: str) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kernel_is_the_noise() -> None:
    run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_kernel_compiles_without_a_gpu() -> None:
    run(COMPILED)
