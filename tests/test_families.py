"""Eps models (Stable Diffusion 1.x) and FLUX: small random pipelines of the same classes."""

import functools
import json

import pytest
import torch
from torch.testing import assert_close

import common
import dgpo
import flow_grpo
import vgrpo

exact = functools.partial(assert_close, rtol=0, atol=0)
close = functools.partial(assert_close, rtol=0, atol=1e-5)
PROMPTS = ["a red circle", "draw two squares", "a blue triangle"]
families = pytest.mark.parametrize("family", ["sd15", "flux"])


def stock(family, folder):
    """The pipeline as a user loads it; Stable Diffusion with DDIM in place of its own PNDM."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    if family == "sd15":
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_images(pipe, policy, x, T, guidance):
    more = dict(max_sequence_length=policy.spec.text_tokens) if policy.abars is None else {}
    return pipe(
        PROMPTS[: len(x)], latents=x, num_inference_steps=T, guidance_scale=guidance,
        height=policy.pixels, width=policy.pixels, output_type="pt", **more,
    ).images  # fmt: skip


def noise(policy, n=2):
    return common.keyed_noise(policy.latent_shape, 0, "test", 0, range(n))


@families
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_samples_are_those_of_the_stock_pipeline(family, guidance, load):
    policy = load(family, random=False)
    x = noise(policy)
    own = policy.decode(policy.sample(x, policy.encode(PROMPTS[:2]), 4, guidance))
    theirs = stock_images(stock(family, load.folders[family]), policy, x, 4, guidance)
    close(own, theirs)
    assert own.std() > 1e-3  # not all black


@families
@pytest.mark.parametrize("alpha", [4, 16])
def test_the_stock_pipeline_loads_the_lora(family, alpha, load, tmp_path):
    policy = load(family, lora_alpha=alpha)
    x, c = noise(policy), policy.encode(PROMPTS[:2])
    own = policy.decode(policy.sample(x, c, 3, 2.0))
    policy.save_lora(tmp_path / "lora")
    pipe = stock(family, load.folders[family])
    base = stock_images(pipe, policy, x, 3, 2.0)
    pipe.load_lora_weights(str(tmp_path / "lora"))
    close(stock_images(pipe, policy, x, 3, 2.0), own)
    assert (base - own).abs().max() > 1e-3


def test_the_grid_of_an_eps_model_is_that_of_its_timesteps(load):
    policy = load("sd15")
    grid = policy.grid(20)
    steps = policy.scheduler("euler", 20)
    exact(grid, torch.tensor([*steps.timesteps, 0]).add(1).div(1000))
    assert steps.timesteps[0] == 951
    # the pipeline's last step ends at the abar of timestep 0, not at 1
    exact(policy.coefficients(grid[-1])[0] ** 2, steps.alphas_cumprod[0].sqrt() ** 2)
    abar = policy.coefficients(grid)[0].square()
    close(abar[:-1], steps.alphas_cumprod[steps.timesteps])


def test_the_grid_of_flux_is_shifted_by_its_resolution(load):
    policy = load("flux")
    pipe = stock("flux", load.folders["flux"])
    pipe(
        "a", height=16, width=16, num_inference_steps=5, output_type="latent", max_sequence_length=8
    )
    exact(policy.grid(5), pipe.scheduler.sigmas)


@families
def test_noise_and_velocity_are_consistent(family, load):
    """x0 and eps come back from (x_t, v), and errors convert by the coefficients."""
    policy = load(family)
    x0, eps = noise(policy, 3), noise(policy, 6)[3:]
    t = torch.tensor([0.2, 0.5, 0.9])
    x_t, v = policy.noised(x0, eps, t)
    a, b = (k.view(-1, *[1] * (x0.dim() - 1)) for k in policy.coefficients(t))
    if family == "sd15":
        close(a * x_t - b * v, x0)
        close(b * x_t + a * v, eps)
        abar = a.square().flatten()
        close(common.eps_to_velocity(x_t, eps, abar), v)
        close(common.eps_to_x0(x_t, eps, abar), x0)
    else:
        close(common.velocity_to_x0(x_t, v, t), x0)
        close(common.velocity_to_eps(x_t, v, t), eps)
    dv = torch.randn_like(v)
    wrong = (a * x_t - b * (v + dv)) if family == "sd15" else common.velocity_to_x0(x_t, v + dv, t)
    close((wrong - x0).square().flatten(1).mean(1), (b * dv).square().flatten(1).mean(1))


def test_the_velocity_of_an_eps_model_is_its_noise_in_v_form(load):
    policy = load("sd15")
    x, c = noise(policy), policy.encode(PROMPTS[:2])
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        eps = policy.net(x, 1000 * t - 1, c["tokens"], return_dict=False)[0]
        v = policy.velocity(x, t, c)
    abar = policy.pipe.scheduler.alphas_cumprod[torch.tensor([299, 799])]
    close(v, common.eps_to_velocity(x, eps, abar))


@families
def test_pictures_go_to_latents_and_back(family, load):
    policy = load(family)
    images = torch.rand(2, 3, policy.pixels, policy.pixels)
    x0 = policy.encode_images(images)
    assert x0.shape == (2, *policy.latent_shape)
    assert policy.decode(x0).shape == images.shape
    mode = policy.vae.encode(2 * images - 1).latent_dist.mode()
    back = (
        policy.pipe._unpack_latents(x0, policy.pixels, policy.pixels, 2) if family == "flux" else x0
    )
    config = policy.vae.config
    close(back / config.scaling_factor + (config.shift_factor or 0), mode)


def test_the_second_order_solver_agrees_on_many_steps(load):
    policy = load("flux")
    x, c = noise(policy), policy.encode(PROMPTS[:2])
    euler, dpm = policy.sample(x, c, 100), policy.sample(x, c, 100, solver="dpm2")
    assert (euler - dpm).abs().mean() < 0.05 * euler.abs().mean()
    few = policy.sample(x, c, 5)
    assert (euler - few).abs().mean() > (euler - dpm).abs().mean()


def test_the_second_order_solver_of_an_eps_model_is_that_of_the_stock_pipeline(load):
    """Its leading timesteps start lower than DDIM's, so that the two cannot be compared directly."""
    import diffusers

    policy = load("sd15", random=False)
    x = noise(policy)
    own = policy.decode(policy.sample(x, policy.encode(PROMPTS[:2]), 5, solver="dpm2"))
    pipe = stock("sd15", load.folders["sd15"])
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    close(own, stock_images(pipe, policy, x, 5, 1.0))


@families
@pytest.mark.parametrize("script", [vgrpo, dgpo, flow_grpo], ids=lambda m: m.__name__)
def test_a_run_trains_and_resumes(script, family, load, tmp_path, red, monkeypatch):
    if script is flow_grpo and family == "sd15":
        assert "sd15" not in flow_grpo.PRESETS  # an SDE of a flow; ddpo.py steps eps models
        return
    monkeypatch.setattr(common, "draw_curves", lambda rows, path: path.touch())
    monkeypatch.setattr(common, "draw_samples", lambda a, b, path, title: path.touch())
    small = dict(
        model=family, weights=load.folders[family], reward=red, heldout_reward=None, P=1, G=2, T=4,
        micro_batch=2, lora_r=4, lora_alpha=8, eval_prompts=2, eval_T=2, device="cpu", K=1, M=2,
        dtype="float32", iterations=2, out=str(tmp_path / "run"), t_min=0.0,
    )  # fmt: skip
    known = {
        f: v for f, v in {**script.PRESETS[family], **small}.items() if hasattr(script.Args, f)
    }
    script.main(script.Args(**known))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["grad_norm"] > 0 for row in rows[:2])
    assert rows[0]["eval/kl_ref"] == 0 < rows[2]["eval/kl_ref"]


@families
@pytest.mark.parametrize("script", [vgrpo, dgpo], ids=lambda m: m.__name__)
def test_one_update_moves_the_errors_apart(script, family, load):
    policy = load(family, random=False)
    args = script.Args(
        **{**script.PRESETS[family], "G": 2, "M": 2, "T": 4, "t_min": 0.0, "micro_batch": 2, "K": 1}
    )
    c = policy.encode([PROMPTS[0]] * 2)
    grid = policy.grid(4)[:-1]
    batch = script.rollout(policy, c, grid, 0, range(2), args)
    policy.remember()

    def errors():
        with torch.no_grad():
            return script.errors(policy, c, batch, args, args.train_guidance)[0].mean(0)

    before = errors()
    script.update(
        policy, torch.optim.SGD(policy.params, lr=1e-2), common.Ema(policy.params, 0), batch, c,
        torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool), 0, args, common.Ranks("cpu"),
    )  # fmt: skip
    change = errors() - before
    assert change[0] - change[1] < 0


def test_a_pipeline_of_another_class_is_refused(load):
    with pytest.raises(SystemExit, match=r"--weights: .* is a FluxPipeline, not a StableDiff"):
        common.load_policy("sd15", load.folders["flux"])


def test_a_step_distilled_model_is_refused(load, tmp_path):
    import shutil

    folder = tmp_path / "schnell"
    shutil.copytree(load.folders["flux"], folder)
    path = folder / "transformer/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "guidance_embeds": False}))
    with pytest.raises(SystemExit, match="distilled"):
        common.load_policy("flux", str(folder))


@pytest.mark.parametrize("model", ["sd15", "sd14", "flux"])
@pytest.mark.parametrize("script", [vgrpo, dgpo, flow_grpo], ids=lambda m: m.__name__)
def test_presets_are_possible(script, model, load):
    if script is flow_grpo and model != "flux":
        assert model not in flow_grpo.PRESETS  # its SDE is that of a flow
        return
    args = script.Args(**{**script.PRESETS[model], "model": model})
    script.check_own(args)
    if script is not flow_grpo:
        grid = load("flux" if model == "flux" else "sd15").grid(args.T, args.solver)
        levels = common.trained_levels(grid, args.t_min, args.t_max, args.M)
        assert len(levels) >= args.M
        assert model == "flux" or 0.9 < levels.max() <= 0.95
