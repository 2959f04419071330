"""The shipped model learns: a cheap reward rises on held-out prompts for each of several seeds."""

from dataclasses import replace

import pytest

import flow_grpo
from bench.learn import read_run

# kB of JPEG saved on held-out prompts by 12 iterations of 64 images; measured: 0.62, 0.57, 0.61
MARGIN = 0.3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pictures_become_easier_to_compress(seed, tmp_path):
    out = tmp_path / "run"
    flow_grpo.main(
        replace(
            flow_grpo.Args(**{**flow_grpo.PRESETS["tiny"], "iterations": 12, "eval_every": 100}),
            reward="jpeg_compressibility", heldout_reward="geneval", P=4, G=16, micro_batch=64,
            lr=1e-3, ema=0.0, eval_prompts=48, eval_T=8, seed=seed, device="cpu", out=str(out),
        )
    )  # fmt: skip
    _, rows = read_run(out)
    start, end = rows[0]["eval/jpeg_compressibility"], rows[-1]["eval/jpeg_compressibility"]
    assert end - start > MARGIN
