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
from unittest import mock

import torch

import common
import flow_grpo
from bench.learn import ROOT, version, write_json

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


# ---- settings ------------------------------------------------------------------------------------


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
        policy.net.register_forward_pre_hook(forward, with_kwargs=True),
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


def clock() -> float:
    """Seconds, kernels of a GPU included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    """Seconds that work takes."""
    start = clock()
    work()
    return clock() - start


def measure(a: flow_grpo.Args) -> tuple[list[Pair], list[Pass]]:
    """One pair an iteration, the first dropped -> (pairs, passes of the last iteration)."""
    pairs: list[Pair] = []
    last: list[Pass] = []
    inputs: dict[int, Any] = {}

    class Timed(common.Run):
        """Times the body of main's loop itself, then its bare passes; nothing is evaluated."""

        def iterations(self) -> Iterator[int]:
            for iteration in super().iterations():
                with recorded(self.policy) as passes:
                    start = clock()
                    yield iteration
                    seconds = clock() - start
                for size in {p.size for p in passes} - inputs.keys():
                    inputs[size] = make_inputs(self.policy, size)
                pairs.append(Pair(seconds, timed(partial(bare, self.policy, passes, inputs))))
                last[:] = passes

        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {}

        def finish(self, *_: Any, **__: Any) -> None:
            pass

    with mock.patch.object(flow_grpo, "Run", Timed):
        flow_grpo.main(a)
    return pairs[1:], last


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
