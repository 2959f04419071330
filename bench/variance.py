"""Variance of V-GRPO's ELBO surrogate with each of its techniques on and off.

    python -m bench.variance

For every setting the same images are rolled out from the base and scored by vgrpo.errors. Printed
are two coefficients of variation (std / mean) of the surrogate, the error averaged over its pairs:
over all images of an iteration, and over the images of one group (mean of the groups). The paper
(arXiv 2604.23380) gives 0.230 -> 0.128 and 0.170 -> 0.038, naive baseline and full method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import common
import vgrpo
from bench.learn import version, write_json
from rewards import read_splits

FULL: dict[str, Any] = dict(share="group", stratified=True, space="x", weight="self")
SETTINGS: dict[str, dict[str, Any]] = {
    "V-GRPO": FULL,
    "pairs not shared": FULL | dict(share="none"),
    "not stratified": FULL | dict(stratified=False),
    "plain error": FULL | dict(weight="none"),
    "naive, x": dict(share="none", stratified=False, space="x", weight="none"),
    "naive, v": dict(share="none", stratified=False, space="v", weight="none"),
    "naive, eps (FPO)": dict(share="none", stratified=False, space="eps", weight="none"),
}


@dataclass
class Args:
    """Settings of the measurement."""

    model: str = "tiny"
    """preset of vgrpo.py"""
    iterations: int = 8
    """batches of --P prompts and --G images, each with pairs of its own"""
    P: int = 6
    """prompts per iteration"""
    G: int = 16
    """images per prompt"""
    M: int = 4
    """(t, eps) pairs per image"""
    out: str = "bench/results/variance.json"
    """file to write"""


@torch.no_grad()
def measure(args: Args) -> dict[str, dict[str, float]]:
    """Setting -> both coefficients, means over the iterations."""
    preset = vgrpo.PRESETS[args.model]
    base = vgrpo.Args(**{**preset, "model": args.model, "P": args.P, "G": args.G, "M": args.M})
    policy = common.load_policy(args.model)
    grid, train = policy.grid(base.T), read_splits(base.prompts)[0]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for iteration in range(args.iterations):
        rows = common.prompt_rows(train, args.P, args.G, base.seed, iteration)
        c, indices = policy.encode([row["prompt"] for row in rows]), range(len(rows))
        x0 = vgrpo.rollout(policy, c, grid, iteration, indices, base)["x0"]
        for name, setting in SETTINGS.items():
            own = replace(base, **setting)
            t, eps = vgrpo.draw_pairs(policy, grid, iteration, indices, own)
            err, _ = vgrpo.errors(policy, c, dict(x0=x0, t=t, eps=eps), own, 1.0)
            groups = err.mean(0).view(args.P, args.G)
            within = groups.std(1) / groups.mean(1)
            found[name].append((float(groups.std() / groups.mean()), float(within.mean())))
    return {
        name: dict(zip(("cv", "cv_group"), (round(mean(x), 4) for x in zip(*pairs))))
        for name, pairs in found.items()
    }


def main(args: Args) -> None:
    """Measure, print a Markdown table, write the file."""
    result = measure(args)
    print("| setting | CV over images | CV within groups |\n|---|---|---|")
    for name, row in result.items():
        print(f"| {name} | {row['cv']:.3f} | {row['cv_group']:.3f} |")
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    write_json(Path(args.out), {**settings, "commit": version(), "results": result})


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
