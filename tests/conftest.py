import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports diffusers

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import common

# the same examples on every machine, and no flaky deadline on a busy one
settings.register_profile("ci", derandomize=True, max_examples=60, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
torch.set_num_threads(1)

SMALL = dict(WIDTH=32, HEADS=2, LAYERS=2, TEXT_WIDTH=32)  # of the networks in tiny/pretrain.py


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> str:
    """Folder of a small untrained StableDiffusion3Pipeline: the classes of tiny/sd3, random weights."""
    from tiny import pretrain

    root = tmp_path_factory.mktemp("pipelines")
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        for name, value in SMALL.items():
            patch.setattr(pretrain, name, value)
        torch.manual_seed(0)
        models = pretrain.make_models(len(pretrain.make_tokenizer(root / "tokenizer")))
        vae = pretrain.make_vae(shift=0.1, scale=1.3)
        last = vae.decoder.layers[-1]
        with torch.no_grad():  # pictures in mid-range, where nothing saturates
            last.weight.mul_(6)
            last.bias.fill_(0.5)
        pretrain.export(models, vae, root, root / "sd3")
    return str(root / "sd3")


@pytest.fixture(scope="session")
def shifted_weights(weights, tmp_path_factory) -> str:
    """The same pipeline with the scheduler settings of Stable Diffusion 3.5: shift 3."""
    folder = tmp_path_factory.mktemp("shifted") / "sd3"
    shutil.copytree(weights, folder)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shift": 3.0}))
    return str(folder)


def randomise(policy, seed: int = 0, scale: float = 0.1) -> None:
    """Give the LoRA's B matrices, which start at 0, values: a policy that is not the base."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.params:
            p.add_(scale * torch.randn(p.shape, generator=g))


class Counting(torch.optim.SGD):
    """Plain gradient descent that keeps count and the gradients it was given."""

    def __init__(self, params, lr=0.0):
        super().__init__(params, lr=lr)
        self.gradients = []

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.gradients.append(torch.cat([g.flatten().clone() for g in grads]))
        super().step(closure)


class OtherRank(common.Ranks):
    """One of two ranks whose other rank has three samples to learn from, and gradients of 0."""

    def __init__(self):
        super().__init__("cpu")
        self.calls = 0

    def gather(self, x):
        return [x, 3] if isinstance(x, int) else [x]

    def average_gradients(self, params):
        self.calls += 1
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / 2


class Half(common.Ranks):
    """One of two ranks; the test averages the gradients."""

    def __init__(self, rank):
        self.world, self.rank, self.device = 2, rank, "cpu"

    def gather(self, x):
        return [1, 1]

    def average_gradients(self, params):
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@pytest.fixture
def make_policy(weights):
    """make_policy(random=True, ...): a Policy of the small pipeline; its LoRA starts at the base."""

    def make(random: bool = True, lora_r: int = 4, lora_alpha: int = 8, folder=None, **options):
        policy = common.load_policy(
            "tiny", folder or weights, lora_r=lora_r, lora_alpha=lora_alpha, **options
        )
        if random:
            randomise(policy)
        return policy

    return make


@pytest.fixture
def policy(make_policy):
    return make_policy()


@pytest.fixture
def red(monkeypatch):
    """A cheap reward that always varies, under the name `red`: the mean of the red channel."""
    import rewards

    def factory(device, dtype):
        return rewards.Reward(lambda images, prompts, metas: images[:, 0].float().mean((1, 2)))

    monkeypatch.setitem(rewards.REWARDS, "red", factory)
    return "red"


@pytest.fixture
def quick(weights, tmp_path, red, monkeypatch):
    """quick(script, **flags) -> Args of a run of a second: 1 iteration, 1 prompt, 2 images, 3 steps."""
    import flow_grpo

    monkeypatch.setattr(common, "draw_curves", lambda rows, path: Path(path).touch())
    monkeypatch.setattr(common, "draw_samples", lambda records, names, path: Path(path).touch())

    def make(script=flow_grpo, **flags):
        small = dict(
            weights=weights, reward=red, heldout_reward=None, iterations=1, P=1, G=2, T=3,
            micro_batch=2, lora_r=4, lora_alpha=8, eval_prompts=2, eval_T=2, device="cpu",
            out=str(tmp_path / "run"),
        )  # fmt: skip
        args = script.Args(**{**small, **flags})
        args.micro_batch = min(args.micro_batch, args.P * args.G)
        return args

    return make
