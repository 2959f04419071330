"""Part II of common.py against diffusers itself: grid, sampling, guidance, adapters, export."""

import copy
import dataclasses
import functools
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import randomise
from torch.testing import assert_close

import common

ROOT = Path(__file__).parent.parent
TABLES = json.loads((ROOT / "tests/golden/trajectory.json").read_text())["tables"]
PROMPTS = ["a red circle", "draw two squares", "a blue triangle left of a circle"]
exact = functools.partial(assert_close, rtol=0, atol=0)
close = functools.partial(assert_close, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def stock(weights):
    """diffusers' own pipeline, untouched by this project."""
    from diffusers import StableDiffusion3Pipeline

    parts = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
    pipe = StableDiffusion3Pipeline.from_pretrained(weights, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise(policy, B=3, seed=0):
    return common.keyed_noise(policy.latent_shape, seed, "test", 0, range(B))


def run_stock(pipe, x, T, guidance, output="latent", prompts=PROMPTS):
    return pipe(
        list(prompts), latents=x.clone(), num_inference_steps=T, guidance_scale=guidance, height=64,
        width=64, max_sequence_length=1, output_type=output,
    ).images  # fmt: skip


def snapshot(policy):
    """Everything about the network that a pass must leave as it was."""
    named = list(policy.net.named_parameters())
    return {
        "values": {name: p.detach().clone() for name, p in named},
        "requires_grad": {name: p.requires_grad for name, p in named},
        "modes": [m.training for m in policy.net.modules()],
        "rng": torch.get_rng_state(),
    }


def assert_same(before, after):
    assert before["requires_grad"] == after["requires_grad"]
    assert before["modes"] == after["modes"]
    exact(after["values"], before["values"])
    exact(after["rng"], before["rng"])


# ---- loading ----


def test_load_by_folder(make_policy):
    policy = make_policy()
    assert type(policy.pipe).__name__ == "StableDiffusion3Pipeline"
    assert type(policy.net).__name__ == "SD3Transformer2DModel"
    assert policy.latent_shape == (4, 16, 16)
    trained = {n for n, p in policy.net.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    frozen = [*policy.vae.parameters(), *policy.pipe.text_encoder.parameters()]
    assert not policy.vae.training
    assert not policy.net.training
    c = policy.encode(PROMPTS)
    v = policy.velocity(noise(policy), 0.5, c)
    v.square().mean().backward()
    assert all(p.grad is not None for p in policy.params)
    assert all(p.grad is None for p in frozen)


def test_the_base_is_that_of_the_folder(make_policy, stock):
    policy = make_policy(random=False)
    base = stock.transformer.state_dict()
    own = {k.replace(".base_layer", ""): v for k, v in policy.net.state_dict().items()}
    exact({k: own[k] for k in base}, base)


def test_lora_depends_on_the_seed_alone(make_policy):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    one = make_policy(random=False, seed=5).params
    exact(torch.get_rng_state(), state)
    torch.manual_seed(321)
    exact(make_policy(random=False, seed=5).params, one)
    other = make_policy(random=False, seed=6).params
    assert sum(not torch.equal(a, b) for a, b in zip(one, other)) == len(one) // 2  # all the A


def test_rank_and_alpha(make_policy):
    policy = make_policy(lora_r=3, lora_alpha=12)
    config = policy.net.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, 12)
    assert {min(p.shape) for p in policy.params} == {3}


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_folder_without_a_pipeline_is_refused(tmp_path, kind):
    folder = tmp_path / "model"
    if kind == "empty":
        folder.mkdir()
    elif kind == "file":
        folder.write_text("no pipeline")
    with pytest.raises(SystemExit, match=r"^--weights: .*model_index\.json[^\n]*$"):
        common.load_policy("tiny", str(folder))


def test_a_model_out_of_reach_says_how_to_pass_a_folder(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit, match=r"^--model sd35m: [^\n]*--weights FOLDER$"):
        common.load_policy("sd35m")


def test_every_lora_target_must_match(make_policy, monkeypatch):
    spec = common.MODELS["tiny"]
    broken = dataclasses.replace(spec, lora_targets=(*spec.lora_targets, "to_nothing"))
    monkeypatch.setitem(common.MODELS, "tiny", broken)
    with pytest.raises(SystemExit, match=r"^LoRA target 'to_nothing' [^\n]*$"):
        make_policy()


def test_every_lora_target_is_adapted(policy):
    adapted = {n.split(".lora_A")[0] for n, _ in policy.net.named_modules() if "lora_A" in n}
    for target in common.MODELS["tiny"].lora_targets:
        assert any(name.endswith("." + target) for name in adapted), target


# ---- text ----


def test_encoding_is_the_pipeline_s(policy, stock):
    c = policy.encode(PROMPTS)
    tokens, _, pooled, _ = stock.encode_prompt(
        PROMPTS, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    close(c, {"tokens": tokens, "pooled": pooled})


def test_encoding_ignores_its_neighbours(make_policy):
    policy = make_policy()
    together = policy.encode([*PROMPTS, PROMPTS[0]])
    for i, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        alone = make_policy().encode([prompt])
        exact({k: x[i : i + 1] for k, x in together.items()}, alone)


def test_encodings_are_cached(policy, monkeypatch):
    calls = []
    original = policy.pipe.encode_prompt
    monkeypatch.setattr(
        policy.pipe, "encode_prompt", lambda *a, **k: calls.append(a[0]) or original(*a, **k)
    )
    first = policy.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert calls == PROMPTS[:2]
    again = policy.encode([PROMPTS[1], PROMPTS[0]])
    assert calls == PROMPTS[:2]
    exact({k: x.flip(0) for k, x in again.items()}, {k: x[:2] for k, x in first.items()})
    again["tokens"].zero_()  # a caller may write into its copy
    exact(policy.encode(PROMPTS[:1])["tokens"], first["tokens"][:1])


# ---- grid and sampling ----


@pytest.mark.parametrize("T", [1, 2, 3, 10, 28])
@pytest.mark.parametrize("shift", [1, 3])
def test_grid_is_the_stock_pipeline_s(make_policy, weights, shifted_weights, shift, T):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
        retrieve_timesteps,
    )

    folder = weights if shift == 1 else shifted_weights
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    assert scheduler.config.shift == shift
    retrieve_timesteps(scheduler, 7)  # a used scheduler, as a pipeline has it
    retrieve_timesteps(scheduler, T)
    policy = make_policy(folder=folder)
    grid = policy.grid(T)
    assert grid.dtype == torch.float32
    exact(grid, scheduler.sigmas)
    assert grid[0] == 1
    assert grid[-1] == 0
    exact(policy.grid(T), grid)


def test_grid_of_stable_diffusion_35(make_policy, shifted_weights):
    grid = make_policy(folder=shifted_weights).grid(10)
    exact(grid, torch.tensor(TABLES["sd3_sigmas_10"], dtype=torch.float32))


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_grid_is_what_the_sampler_visits(make_policy, shifted_weights, solver, T):
    """Noise levels of a solver, as its network calls see them, and then 0."""
    policy, seen = make_policy(folder=shifted_weights), []
    policy.net.register_forward_pre_hook(
        lambda module, _, kwargs: seen.append(kwargs["timestep"][0].item()), with_kwargs=True
    )
    policy.sample(noise(policy, B=1), policy.encode(PROMPTS[:1]), T, solver=solver)
    grid = policy.grid(T, solver)
    assert len(grid) == T + 1
    assert grid[-1] == 0
    assert (grid.diff() < 0).all()
    # DPM-Solver++ hands out whole timesteps
    assert_close(1000 * grid[:-1], torch.tensor(seen), rtol=0, atol=1.0 if solver == "dpm2" else 0)
    if T == 3:  # another scheduler has another grid: the first level is not 1
        assert (policy.grid(T, "dpm2") != policy.grid(T, "euler")).any()


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("shift", [1, 3])
def test_sample_is_the_stock_pipeline(make_policy, stock, shifted_weights, guidance, shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    own = stock.scheduler
    policy = make_policy(random=False, folder=None if shift == 1 else shifted_weights)
    x, prompts = noise(policy, B=1), PROMPTS[2:]  # one: a batch may round differently
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    try:
        wanted = run_stock(stock, x, 5, guidance, prompts=prompts)
    finally:
        stock.scheduler = own
    x0 = policy.sample(x, policy.encode(prompts), 5, guidance)
    assert_close(x0, wanted, rtol=1e-6, atol=1e-6)


def test_a_ragged_batch_samples_the_same(policy):
    x, c = noise(policy), policy.encode(PROMPTS)
    whole = policy.sample(x, c, 3, 4.5)
    parts = [policy.sample(x[i], {k: v[i] for k, v in c.items()}, 3, 4.5) for i in ([0, 1], [2])]
    close(torch.cat(parts), whole)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_decode_is_the_stock_pipeline(make_policy, stock, guidance):
    policy = make_policy(random=False)
    x = noise(policy)
    images = policy.decode(policy.sample(x, policy.encode(PROMPTS), 4, guidance))
    assert images.shape == (3, 3, 64, 64)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1
    assert images.std() > 0.02
    assert_close(images, run_stock(stock, x, 4, guidance, "pt"), rtol=0, atol=1e-5)


def test_decode_takes_any_number_of_latents(policy):
    """Eight at a time inside: more than one such part, and one that is not full."""
    x0 = torch.randn(19, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    images = policy.decode(x0)
    assert images.shape == (19, 3, 64, 64)
    assert_close(images, torch.cat([policy.decode(x) for x in x0.split(1)]), rtol=0, atol=1e-5)
    assert (images[1:] != images[:-1]).flatten(1).any(1).all()


@pytest.mark.parametrize("kl", [False, True])
def test_encode_images_inverts_the_stock_scaling(policy, stock, monkeypatch, kl):
    """Both kinds of autoencoder: latents, or a distribution of which the mode is taken."""
    images = torch.rand(2, 3, policy.pixels, policy.pixels)
    raw = stock.vae.encode(stock.image_processor.preprocess(images)).latents.detach()
    if kl:
        dist = types.SimpleNamespace(mode=lambda: raw, sample=lambda: 1 / 0)
        encoded = types.SimpleNamespace(latent_dist=dist)
        monkeypatch.setattr(policy.vae, "encode", lambda x: encoded)
    x0 = policy.encode_images(images)
    assert x0.shape == (2, *policy.latent_shape)
    assert not x0.requires_grad
    config = policy.vae.config
    assert config.shift_factor != 0
    assert config.scaling_factor != 1
    # what decode gives to the VAE is what the VAE's encoder gave
    close(x0 / config.scaling_factor + config.shift_factor, raw)


def test_sampling_is_deterministic_and_leaves_its_inputs(policy):
    x, c = noise(policy), policy.encode(PROMPTS)
    copies = x.clone(), {k: v.clone() for k, v in c.items()}
    before = snapshot(policy)
    first = policy.sample(x, c, 3, 2.0)
    exact(policy.sample(x, c, 3, 2.0), first)
    exact((x, c), copies)
    assert_same(before, snapshot(policy))


@pytest.mark.parametrize("shift", [1, 3])
def test_dpm_converges_to_the_same_picture_faster(make_policy, shifted_weights, shift):
    policy = make_policy(folder=None if shift == 1 else shifted_weights)
    x, c = noise(policy), policy.encode(PROMPTS)
    truth = policy.sample(x, c, 200)
    errors = {
        solver: float((policy.sample(x, c, 12, solver=solver) - truth).norm() / truth.norm())
        for solver in ("euler", "dpm2")
    }
    assert errors["dpm2"] < errors["euler"] < 0.2
    scheduler = policy.scheduler(
        "dpm2", 2
    )  # its own grid of flow sigmas, shifted: 3 u / (1 + 2 u) at u = 1/2
    assert scheduler.sigmas[1].item() == pytest.approx(shift / (1 + shift), abs=2e-3)


@pytest.mark.parametrize("T", [1, 2, 5])
def test_dpm_is_finite_for_few_steps(policy, T):
    x = policy.sample(noise(policy), policy.encode(PROMPTS), T, solver="dpm2")
    assert x.isfinite().all()


def test_p_mix(make_policy):
    policy = make_policy()
    base = make_policy(random=False)
    x, c = noise(policy), policy.encode(PROMPTS)
    plain = policy.sample(x, c, 4)
    untrained = base.sample(x, c, 4)
    assert (plain - untrained).abs().max() > 1e-3
    exact(policy.sample(x, c, 4, p_mix=1.0), plain)
    exact(policy.sample(x, c, 4, p_mix=0.0), untrained)
    grid = policy.grid(4)
    half = x
    for i in range(4):
        v = (policy if i < 2 else base).velocity(half, grid[i], c)
        half = common.euler_step(half, v, grid[i], grid[i + 1])
    close(policy.sample(x, c, 4, p_mix=0.5), half.detach())


# ---- guidance ----


def test_guidance_is_linear_and_counts_its_calls(policy):
    x, c = noise(policy), policy.encode(PROMPTS)
    with torch.no_grad():
        policy.calls = 0
        cond = policy.velocity(x, 0.5, c, 1.0)
        assert policy.calls == 3
        uncond = policy.velocity(x, 0.5, c, 0.0)
        assert policy.calls == 9
        for w in (-1.0, 0.5, 4.5):
            close(policy.velocity(x, 0.5, c, w), uncond + w * (cond - uncond))
        empty = {k: v.expand(3, *v.shape[1:]) for k, v in policy.encode([""]).items()}
        close(policy.velocity(x, 0.5, empty, 1.0), uncond)
    assert (cond - uncond).abs().max() > 1e-3


def test_guidance_is_one_forward_uncond_first(policy):
    seen = []
    policy.net.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    x, c = noise(policy), policy.encode(PROMPTS)
    policy.velocity(x, 0.25, c, 1.0)
    policy.velocity(x, 0.25, c, 3.0)
    assert [len(k["hidden_states"]) for k in seen] == [3, 6]
    empty = policy.encode([""])
    both = seen[1]
    exact(both["encoder_hidden_states"][:3], empty["tokens"].expand(3, -1, -1))
    exact(both["encoder_hidden_states"][3:], c["tokens"])
    exact(both["pooled_projections"][:3], empty["pooled"].expand(3, -1))
    exact(both["pooled_projections"][3:], c["pooled"])
    exact(both["hidden_states"], torch.cat([x, x]))
    exact(both["timestep"], torch.full((6,), 250.0))


def test_gradient_reaches_both_halves(policy):
    x, c = noise(policy), policy.encode(PROMPTS)

    def gradient(w):
        v = policy.velocity(x, 0.5, c, w)
        return torch.autograd.grad((v * x).sum(), policy.params)

    for g, u, p in zip(gradient(3.0), gradient(0.0), gradient(1.0)):
        assert_close(g, u + 3 * (p - u), rtol=1e-3, atol=1e-3)


def test_velocity_takes_t_as_float_scalar_or_batch(policy):
    x, c = noise(policy), policy.encode(PROMPTS)
    v = policy.velocity(x, 0.5, c)
    assert v.dtype == torch.float32
    exact(policy.velocity(x, torch.tensor(0.5), c), v)
    exact(policy.velocity(x, torch.tensor([0.5, 0.5, 0.5]), c), v)
    mixed = policy.velocity(x, torch.tensor([0.5, 0.9, 0.1]), c)
    close(mixed[:1], v[:1])
    assert (mixed[1:] - v[1:]).abs().max() > 1e-4


# ---- adapters ----


def test_reference_is_the_base_and_leaves_no_trace(make_policy):
    policy, base = make_policy(), make_policy(random=False)
    x, c = noise(policy), policy.encode(PROMPTS)
    before, v = snapshot(policy), policy.velocity(x, 0.5, c)
    with policy.reference():
        exact(policy.velocity(x, 0.5, c), base.velocity(x, 0.5, c))
    assert_same(before, snapshot(policy))
    exact(policy.velocity(x, 0.5, c), v)
    with pytest.raises(ZeroDivisionError), policy.reference():
        raise ZeroDivisionError
    assert_same(before, snapshot(policy))
    exact(policy.velocity(x, 0.5, c), v)
    assert (v - base.velocity(x, 0.5, c)).abs().max() > 1e-3


def test_reference_between_forward_and_backward_keeps_the_gradient(policy):
    x, c = noise(policy), policy.encode(PROMPTS)
    plain = torch.autograd.grad(policy.velocity(x, 0.5, c).square().sum(), policy.params)
    v = policy.velocity(x, 0.5, c)
    with torch.no_grad(), policy.reference():
        policy.velocity(x, 0.5, c)
    v.square().sum().backward()
    exact([p.grad for p in policy.params], list(plain))


def test_old_is_what_was_remembered(policy):
    x, c = noise(policy), policy.encode(PROMPTS)
    with pytest.raises(RuntimeError, match="remember"), policy.old():
        pass
    v_old = policy.velocity(x, 0.5, c).detach()
    policy.remember()
    randomise(policy, seed=1)  # in place: `old` must not alias the live weights
    before, v = snapshot(policy), policy.velocity(x, 0.5, c).detach()
    with torch.no_grad(), policy.old():
        exact(policy.velocity(x, 0.5, c), v_old)
    assert_same(before, snapshot(policy))
    with pytest.raises(ZeroDivisionError), policy.old():
        raise ZeroDivisionError
    assert_same(before, snapshot(policy))
    exact(policy.velocity(x, 0.5, c).detach(), v)
    assert (v - v_old).abs().max() > 1e-3


def test_remember_moves_by_its_decay(make_policy):
    """P15: 0 copies, 1 freezes, between them a convex combination, and never an alias."""
    policy = make_policy(random=False)
    policy.remember(0.9)  # nothing kept yet: the adapter itself
    first = [p.detach().clone() for p in policy.params]
    exact(policy.kept, first)
    randomise(policy)
    policy.remember(1.0)
    close(policy.kept, first)
    policy.remember(0.3)
    close(policy.kept, [0.3 * a + 0.7 * p.detach() for a, p in zip(first, policy.params)])
    policy.remember(0.0)
    now = [p.detach().clone() for p in policy.params]
    exact(policy.kept, now)
    assert not any(p.requires_grad for p in policy.kept)
    randomise(policy, seed=1)
    exact(policy.kept, now)


def test_swapped_is_exact_and_does_not_alias():
    params = [
        torch.nn.Parameter(torch.randn(3, 2)),
        torch.nn.Parameter(torch.tensor([-0.0, 1e-40])),
    ]
    values = [torch.randn(3, 2), torch.ones(2)]
    kept = copy.deepcopy((params, values))
    with common.swapped(params, values):
        exact([p.detach() for p in params], values)
        with torch.no_grad():
            params[0].add_(1)  # must not reach `values`
    exact((params, values), kept)
    assert torch.signbit(params[1][0])
    with pytest.raises(ZeroDivisionError), common.swapped(params, values):
        raise ZeroDivisionError
    exact((params, values), kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_lora_over_a_half_precision_base(make_policy, dtype):
    policy = make_policy(dtype=dtype)
    lora = {id(p) for p in policy.params}
    assert {p.dtype for p in policy.params} == {torch.float32}
    assert {p.dtype for p in policy.net.parameters() if id(p) not in lora} == {dtype}
    x, c = noise(policy), policy.encode(PROMPTS)
    v = policy.velocity(x, 0.5, c, 2.0)
    assert v.dtype == torch.float32
    (v * x).sum().backward()
    assert {p.grad.dtype for p in policy.params} == {torch.float32}
    optimizer = torch.optim.AdamW(policy.params, lr=1e-5)
    before = [p.detach().clone() for p in policy.params]
    for _ in range(20):  # a bf16 LoRA would round most of these steps away
        optimizer.step()
    moved = [float((p != old).float().mean()) for p, old in zip(policy.params, before)]
    assert min(moved) > 0.99
    x0 = policy.sample(x, c, 2)
    assert x0.dtype == torch.float32
    assert policy.decode(x0).dtype == torch.float32


def test_the_optimizer_holds_the_trained_tensors_after_every_pass(policy):
    optimizer = torch.optim.AdamW(policy.params)
    x, c = noise(policy), policy.encode(PROMPTS)
    policy.remember()
    ema = common.Ema(policy.params, 0.9)
    ema.n = ema.every  # there is an average to bring in
    policy.sample(x, c, 2, 2.0, p_mix=0.5)
    with torch.no_grad(), policy.reference():
        policy.velocity(x, 0.5, c)
    with policy.old(), ema.active():
        policy.sample(x, c, 2)
    live = [p for p in policy.net.parameters() if p.requires_grad]
    (group,) = optimizer.param_groups
    assert [*map(id, live)] == [*map(id, policy.params)] == [*map(id, group["params"])]
    assert {p.dtype for p in live} == {torch.float32}


def test_gradient_checkpointing_changes_memory_only(make_policy, monkeypatch):
    import torch.utils.checkpoint as module

    calls, original = [], module.checkpoint
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: calls.append(1) or original(*a, **k))
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy(gradient_checkpointing=checkpointing)
        policy.velocity(noise(policy), 0.5, policy.encode(PROMPTS)).square().sum().backward()
        assert bool(calls) == checkpointing
        gradients.append([p.grad for p in policy.params])
    close(gradients[1], gradients[0])


def test_compile_follows_the_adapters(make_policy, monkeypatch):
    compiled = []

    def compile(module):
        compiled.append(module)
        return original(module, backend="eager")  # dynamo without a C++ compiler

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    policy, plain = make_policy(compile=True), make_policy()
    assert compiled == [policy.net]
    x, c = noise(policy), policy.encode(PROMPTS)
    v, v_plain = (p.velocity(x, 0.5, c) for p in (policy, plain))
    close(v, v_plain)
    for value in (v, v_plain):
        value.square().sum().backward()
    close([p.grad for p in policy.params], [p.grad for p in plain.params])
    with torch.no_grad(), policy.reference(), plain.reference():
        close(policy.velocity(x, 0.5, c), plain.velocity(x, 0.5, c))


# ---- export ----


def test_a_torn_save_leaves_the_last_lora(policy, tmp_path, monkeypatch):
    policy.save_lora(tmp_path / "lora", guidance=1.0)
    before = {p.name: p.read_bytes() for p in (tmp_path / "lora").iterdir()}
    assert before.keys() == {"pytorch_lora_weights.safetensors", "settings.json"}

    def torn(folder, **layers):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "pytorch_lora_weights.safetensors").write_text("half")
        raise KeyboardInterrupt

    randomise(policy, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(policy.pipe, "save_lora_weights", torn)
        with pytest.raises(KeyboardInterrupt):
            policy.save_lora(tmp_path / "lora", guidance=2.0)
    assert {p.name: p.read_bytes() for p in (tmp_path / "lora").iterdir()} == before
    policy.save_lora(tmp_path / "lora", guidance=2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["lora"]
    after = {p.name: p.read_bytes() for p in (tmp_path / "lora").iterdir()}
    assert all(after[name] != before[name] for name in before)


FRESH = """
import sys, torch
from diffusers import StableDiffusion3Pipeline

torch.set_num_threads(1)
weights, work = sys.argv[1:]
parts = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
given = torch.load(work + "/inputs.pt")
images = {}
for name in (None, *given["folders"]):
    pipe = StableDiffusion3Pipeline.from_pretrained(weights, **parts)
    if name:
        pipe.load_lora_weights(f"{work}/{name}")
    for w in (1.0, 4.5):
        images[name, w] = pipe(
            given["prompts"], latents=given["x"].clone(), num_inference_steps=3, guidance_scale=w,
            max_sequence_length=1, output_type="pt", height=64, width=64,
        ).images
torch.save(images, work + "/images.pt")
"""


def test_a_fresh_stock_pipeline_reproduces_the_trained_pictures(make_policy, weights, tmp_path):
    shapes = {"same": (4, 4), "times four": (4, 16)}  # folder: (r, alpha)
    wanted, x = {}, None
    for name, (r, alpha) in shapes.items():
        policy = make_policy(lora_r=r, lora_alpha=alpha)
        policy.save_lora(tmp_path / name, guidance=4.5, model="tiny")
        assert json.loads((tmp_path / name / "settings.json").read_text())["guidance"] == 4.5
        x, c = noise(policy, B=1), policy.encode(PROMPTS[2:])
        for w in (1.0, 4.5):
            wanted[name, w] = policy.decode(policy.sample(x, c, 3, w))
    torch.save({"folders": [*shapes], "prompts": PROMPTS[2:], "x": x}, tmp_path / "inputs.pt")
    run = subprocess.run(
        [sys.executable, "-c", FRESH, weights, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    images = torch.load(tmp_path / "images.pt")
    for (name, w), image in wanted.items():
        assert_close(images[name, w], image, rtol=0, atol=1e-6)
        assert (images[name, w] - images[None, w]).abs().max() > 1e-2
    assert (images["same", 1.0] - images["times four", 1.0]).abs().max() > 1e-2


def test_geneval_looks_at_photographs_through_a_real_detector():
    for name, spec in common.MODELS.items():
        for reward in ("geneval", "geneval_soft"):
            detector = spec.reward_options.get(reward, {}).get("detector", "shapes")
            assert detector == ("shapes" if name.startswith("tiny") else "mask2former"), name
