import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports diffusers

import dataclasses
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

# of the networks in tiny/pretrain.py
SMALL = dict(WIDTH=32, HEADS=2, LAYERS=2, TEXT_WIDTH=32, UNET_WIDTHS=(16, 32, 32))


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


PROMPTS = ["a red circle", "draw two squares"]


def stored(script, policy, args, P=2, iteration=0, micro_batch=64, x0=None):
    """A rollout of P prompts by vgrpo or dgpo, in micro-batches: condition and batch."""
    c = policy.encode([PROMPTS[i // args.G % 2] for i in range(P * args.G)])
    c |= {} if x0 is None else {"x0": x0}
    grid = common.trained_levels(policy.grid(args.T, args.solver), args.t_min, args.t_max, args.M)
    batch = common.cat_batches(
        script.rollout(policy, part, grid, iteration, indices, args)
        for part, indices in common.micro_batches(c, range(P * args.G), micro_batch)
    )
    return c, batch


def update(script, policy, data, A, args, optimizer=None, valid=None, ranks=None, iteration=0):
    """script.update on a stored rollout: the optimizer, which keeps its gradients, and the logs."""
    c, batch = data
    valid = torch.ones(len(A), dtype=torch.bool) if valid is None else valid
    optimizer = optimizer or Counting(policy.params)
    if policy.kept is None:
        policy.remember()  # as main does
    logs = script.update(
        policy, optimizer, common.Ema(policy.params, 0.0), batch, c, A, valid, iteration, args,
        ranks or common.Ranks("cpu"),
    )  # fmt: skip
    return optimizer, logs


def check_the_average_draws(script, args, monkeypatch):
    """Run main(args), two iterations of eight steps with --rollout ema: from the second iteration
    on the images are those of the averaged weights, and the weights themselves are trained.
    """
    moved, original = [], script.update

    def update(policy, optimizer, ema, batch, c, A, valid, iteration, args, ranks):
        x = common.keyed_noise(policy.latent_shape, args.seed, "x_T", iteration, range(len(A)))
        own = policy.sample(x, c, args.T)
        with common.swapped(policy.params, ema.values):
            wanted = policy.sample(x, c, args.T) if iteration else own
        torch.testing.assert_close(batch["x0"], wanted, rtol=0, atol=0)
        moved.append(not torch.equal(batch["x0"], own))
        before = [p.detach().clone() for p in policy.params]
        logs = original(policy, optimizer, ema, batch, c, A, valid, iteration, args, ranks)
        assert any((p != q).any() for p, q in zip(policy.params, before, strict=True))
        return logs

    monkeypatch.setattr(script, "update", update)
    script.main(args)
    assert moved == [False, True]
    one = torch.load(Path(args.out) / "state.pt", weights_only=True)
    assert any((a != b).any() for a, b in zip(one["ema"], one["params"], strict=True))


def gradient(policy, loss):
    """Of a loss, to all trained parameters, flat."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.params)])


def error(script, policy, data, args):
    """Errors (M, B) of the policy as it is now."""
    with torch.no_grad():
        return script.errors(policy, *data, args, 1.0)[0]


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
    monkeypatch.setattr(common, "draw_samples", lambda a, b, path, title: Path(path).touch())

    def make(script=flow_grpo, **flags):
        small = dict(
            model="tiny", weights=weights, reward=red, heldout_reward=None, iterations=1, P=1, G=2, T=3,
            micro_batch=2, lora_r=4, lora_alpha=8, eval_prompts=2, eval_T=2, device="cpu",
            out=str(tmp_path / "run"),
        )  # fmt: skip
        args = script.Args(**{**small, **flags})
        args.micro_batch = min(args.micro_batch, args.P * args.G)
        return args

    return make


# ---- small pipelines of the other families ----


def small_parts(folder, width):
    """Tokenizer, CLIP text encoder and autoencoder (f = 2, 4 channels), random weights."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    from tiny import pretrain

    tokenizer = pretrain.make_tokenizer(folder / "tokenizer")
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, latent_channels=4,
        scaling_factor=0.6,
    )  # fmt: skip
    return tokenizer, text, vae


@pytest.fixture(scope="session")
def sd15_folder(tmp_path_factory):
    """StableDiffusionPipeline with the scheduler settings of Stable Diffusion 1.5 (PNDM)."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    root = tmp_path_factory.mktemp("sd15")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tokenizer, text, vae = small_parts(root, 32)
        unet = UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
        )  # fmt: skip
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True,
        steps_offset=1,
    )  # fmt: skip
    pipe = StableDiffusionPipeline(
        vae, text, tokenizer, unet, scheduler, None, None, requires_safety_checker=False
    )
    pipe.save_pretrained(root / "pipe")
    path = root / "pipe/scheduler/scheduler_config.json"  # a key of DDIM that the hub's file holds
    path.write_text(json.dumps({**json.loads(path.read_text()), "clip_sample": False}))
    return root / "pipe"


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory):
    """FluxPipeline with the scheduler settings of FLUX.1-dev and its guidance embedding."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    root = tmp_path_factory.mktemp("flux")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        tokenizer, text, vae = small_parts(root, 32)
        vae.register_to_config(shift_factor=0.1)
        t5 = T5EncoderModel(
            T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
        )  # fmt: skip
        transformer = FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8), guidance_embeds=True,
        )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
    )
    pipe = FluxPipeline(scheduler, vae, text, tokenizer, t5, tokenizer, transformer)
    pipe.save_pretrained(root / "pipe")
    return root / "pipe"


@pytest.fixture
def load(sd15_folder, flux_folder, monkeypatch):
    """load(family, random=True, ...) -> Policy; FLUX at 16 pixels, 16 tokens."""
    small = dataclasses.replace(common.MODELS["flux"], resolution=16, text_tokens=8)
    monkeypatch.setitem(common.MODELS, "flux", small)
    folders = {"sd15": str(sd15_folder), "flux": str(flux_folder)}

    def make(family, random=True, **options):
        options = dict(lora_r=4, lora_alpha=8) | options
        policy = common.load_policy(family, folders[family], **options)
        if random:
            randomise(policy)
        return policy

    make.folders = folders
    return make


@pytest.fixture
def policies(make_policy, load):
    """policies(family, ...): a small flow model or a small eps model."""
    return lambda family, **o: make_policy(**o) if family == "tiny" else load(family, **o)
