"""What a whole iteration costs above its bare network passes: one process, one run, a ratio.

    python -m bench.speed                                  # target: at most 1.15
    python -m bench.speed --P 4 --G 8 --T 6 --repeats 3

Whole: one iteration of flow_grpo as its main makes it (prompts, rollout, decode, reward, advantage,
update, log), without the evaluation. Bare: the same passes through the same network and nothing
else, i.e. forwards without gradient (rollout), forwards and backwards (update), and the decoder,
which counts as a bare forward too. The batch sizes of the passes are recorded while the whole
iteration runs, since images without advantage are left out of the update. The two alternate; each
pair gives one ratio, and the median of the ratios counts.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import common
import flow_grpo
from bench.learn import ROOT, version, write_json
from rewards import load_rewards, parse_rewards, read_splits, reward_metrics, score

TARGET = 1.15


@dataclass
class Args:
    """Settings of the benchmark; None takes the value of the model's preset."""

    model: str = "tiny"
    """preset of flow_grpo"""
    weights: str | None = None
    """hub id or local folder instead of the model's own"""
    reward: str | None = None
    """reward of the iteration"""
    P: int | None = None
    """prompts per iteration"""
    G: int | None = None
    """images per prompt"""
    T: int | None = None
    """denoising steps"""
    micro_batch: int | None = None
    """images per forward"""
    repeats: int = 7
    """pairs of a whole iteration and its bare passes, after one to warm up"""
    out: str = str(ROOT / "bench" / "results" / "speed.json")
    """file to write"""


class Pass(NamedTuple):
    """One pass through the network or the decoder."""

    kind: str  # "forward" (no gradient), "update" (forward and backward) or "decode"
    size: int  # images, doubled under guidance


class Pair(NamedTuple):
    """Seconds of a whole iteration and of its bare passes."""

    whole: float
    bare: float


# ---- the whole iteration -------------------------------------------------------------------------


def script_args(args: Args, out: str) -> flow_grpo.Args:
    """The settings of flow_grpo: its preset, and what this benchmark overrides."""
    if args.model not in flow_grpo.PRESETS:
        raise SystemExit(f"--model: known: {', '.join(flow_grpo.PRESETS)}")
    if args.repeats < 1:
        raise SystemExit(f"--repeats: {args.repeats} is below 1")
    keys = ("weights", "reward", "P", "G", "T", "micro_batch")
    flags = {k: v for k in keys if (v := getattr(args, k)) is not None}
    preset = {**flow_grpo.PRESETS[args.model], **flags}
    own = replace(flow_grpo.Args(), model=args.model, out=out, overwrite=True, **preset)
    own = replace(own, iterations=args.repeats + 1, micro_batch=min(own.micro_batch, own.P * own.G))
    common.check_args(own)
    flow_grpo.check_own(own)
    return own


def load(a: flow_grpo.Args) -> tuple[common.Run, Callable[[int], None]]:
    """Set up as flow_grpo.main does -> (run, one whole iteration as a function of its number)."""
    train, _ = read_splits(a.prompts)
    ranks = common.Ranks(a.device)
    weights = parse_rewards(a.reward)
    rewards = load_rewards(list(weights), common.MODELS[a.model].reward_options, ranks.device)
    policy = common.load_policy(
        a.model, a.weights, ranks.device, getattr(torch, a.dtype), a.lora_r, a.lora_alpha, a.seed,
        a.gradient_checkpointing, a.compile,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(policy.params, lr=a.lr, weight_decay=a.weight_decay)
    ema = common.Ema(policy.params, a.ema)
    grid = policy.grid(a.T)
    run = common.Run(a, flow_grpo.SCRIPT, ranks, policy, optimizer, ema)

    def whole(iteration: int) -> None:
        """The body of flow_grpo.main's loop, evaluation left out."""
        start, metrics = time.time(), dict[str, float]()
        rows = common.prompt_rows(train, a.P, a.G, a.seed, iteration)
        mine = ranks.mine(len(rows))
        rows = rows[mine.start : mine.stop]
        c = policy.encode([row["prompt"] for row in rows])
        policy.calls = 0
        steps = flow_grpo.trained_steps(iteration, a)
        batch = common.cat_batches(
            flow_grpo.rollout(policy, part, grid, steps, iteration, indices, a)
            for part, indices in common.micro_batches(c, mine, a.micro_batch)
        )
        images = policy.decode(batch["x0"]).cpu()

        values = score(rewards, images, rows)
        everyone = torch.cat(ranks.gather(values), 1)
        metrics |= reward_metrics(weights, everyone, a.max_fail)
        A = common.combine_rewards(
            everyone, list(weights.values()), a.G, a.combine, a.adv_std, a.adv_clip
        )[mine.start : mine.stop]
        valid = values.isfinite().all(0)

        logs = flow_grpo.update(
            policy, optimizer, ema, batch, c, A, valid, grid, steps, iteration, a, ranks
        )

        metrics |= common.merge_logs([row for part in ranks.gather(logs) for row in part])
        metrics["diversity"] = float(batch["x0"].unflatten(0, (-1, a.G)).std(1).mean())
        metrics["nfe"] = policy.calls / len(rows)
        metrics["seconds"] = time.time() - start
        run.log(iteration, metrics)

    return run, whole


# ---- the bare passes -----------------------------------------------------------------------------


@contextmanager
def recorded(policy: common.Policy) -> Iterator[list[Pass]]:
    """The passes that policy makes inside, in order."""
    passes: list[Pass] = []

    def forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kind = "update" if torch.is_grad_enabled() else "forward"
        passes.append(Pass(kind, len(kwargs["hidden_states"])))

    def decode(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        passes.append(Pass("decode", len(args[0])))

    handles = [
        policy.transformer.register_forward_pre_hook(forward, with_kwargs=True),
        policy.vae.decoder.register_forward_pre_hook(decode, with_kwargs=True),
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def make_inputs(policy: common.Policy, size: int) -> dict[str, torch.Tensor]:
    """Inputs of one forward; made once and off the clock."""
    g = torch.Generator().manual_seed(0)
    c = policy.encode([""] * size)
    x = torch.randn(size, *policy.latent_shape, generator=g).to(policy.device, policy.dtype)
    return dict(
        hidden_states=x,
        timestep=torch.full((size,), 500.0, device=policy.device),
        encoder_hidden_states=c["tokens"].to(policy.dtype),
        pooled_projections=c["pooled"].to(policy.dtype),
    )


def bare(policy: common.Policy, passes: Sequence[Pass], inputs: dict[int, Any]) -> None:
    """The passes alone: forwards, backwards from a gradient of ones, decodes."""
    for p in policy.params:
        p.grad = None
    for kind, size in passes:
        x = inputs[size]
        if kind == "update":
            out = policy.network(**x, return_dict=False)[0]
            out.backward(torch.ones_like(out))
        elif kind == "forward":
            with torch.no_grad():
                policy.network(**x, return_dict=False)
        else:
            with torch.no_grad():
                policy.vae.decode(x["hidden_states"].float())


# ---- timing --------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    """Seconds, kernels of a GPU included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(a: flow_grpo.Args) -> tuple[list[Pair], list[Pass]]:
    """One pair an iteration, the first dropped -> (pairs, passes of the last iteration)."""
    run, whole = load(a)
    policy, pairs, passes = run.policy, [], []
    inputs: dict[int, Any] = {}
    with run:
        iterations = run.iterations()
        for iteration in iterations:
            with recorded(policy) as passes:
                seconds = timed(partial(whole, iteration))
            for size in {p.size for p in passes} - inputs.keys():
                inputs[size] = make_inputs(policy, size)
            pairs.append(Pair(seconds, timed(partial(bare, policy, passes, inputs))))
    return pairs[1:], passes


def peak_memory() -> float:
    """Largest resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians and the ratio, which is the median over the pairs: their batch sizes differ."""
    ratios = [whole / bare for whole, bare in pairs]
    return {
        "ratio": round(median(ratios), 4),
        "target": TARGET,
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "seconds_whole": round(median(p.whole for p in pairs), 4),
        "seconds_bare": round(median(p.bare for p in pairs), 4),
        "repeats": len(pairs),
    }


def count(passes: Sequence[Pass]) -> dict[str, int]:
    """Images sent through each kind of pass."""
    kinds = ("forward", "update", "decode")
    return {kind: sum(p.size for p in passes if p.kind == kind) for kind in kinds}


def main(args: Args) -> dict[str, Any]:
    """Measure, print, write."""
    commit = version()
    with tempfile.TemporaryDirectory() as folder:
        a = script_args(args, folder)
        pairs, passes = measure(a)
    shape = {key: getattr(a, key) for key in ("model", "reward", "P", "G", "T", "micro_batch")}
    result = {
        "script": flow_grpo.SCRIPT,
        **shape,
        **summarise(pairs),
        "images": count(passes),
        "peak_memory_mib": round(peak_memory()),
        "device": a.device,
        "commit": commit,
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    write_json(Path(args.out), result)
    met = "met" if result["ratio"] <= TARGET else "missed"
    low, high = result["ratio_range"]
    print(
        f"whole iteration {result['seconds_whole']:.2f} s | bare passes "
        f"{result['seconds_bare']:.2f} s | ratio {result['ratio']:.3f} ({low:.3f} to {high:.3f}, "
        f"{len(pairs)} repeats) | target {TARGET} {met} | peak {result['peak_memory_mib']} MiB"
    )
    print(f"written: {args.out}")
    return result


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
