"""Part III of common.py: noise, prompts, rewards, evaluation, settings and the run folder."""

import dataclasses
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import randomise
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import common
import ddpo
import dgpo
import flow_grpo
import rewards
import vgrpo
from baselines import rwr

ROOT = Path(__file__).parent.parent
exact = functools.partial(assert_close, rtol=0, atol=0)
close = functools.partial(assert_close, rtol=1e-6, atol=1e-6)


# ---- noise ----


def one(seed=0, purpose="x_T", iteration=0, index=0, step=0):
    return common.keyed_noise((2, 3), seed, purpose, iteration, [index], step)[0]


def test_noise_is_a_function_of_its_key_alone():
    whole = common.keyed_noise((2, 3), 1, "x_T", 2, range(5), 3)
    torch.manual_seed(9)
    state = torch.get_rng_state()
    parts = [common.keyed_noise((2, 3), 1, "x_T", 2, r, 3) for r in (range(2), range(2, 5))]
    exact(torch.cat(parts), whole)
    exact(common.keyed_noise((2, 3), 1, "x_T", 2, [4, 0], 3), whole[[4, 0]])
    exact(torch.get_rng_state(), state)
    assert whole.shape == (5, 2, 3)
    assert whole.dtype == torch.float32


def test_noise_differs_in_every_part_of_the_key():
    keys = [
        (seed, purpose, iteration, index, step)
        for seed in range(4) for purpose in ("x_T", "step") for iteration in range(4)
        for index in range(4) for step in range(4)
    ]  # fmt: skip
    seen = {tuple(one(*key).flatten().tolist()) for key in keys}
    assert len(seen) == len(keys)  # seed + index, iteration + step, ...: none of them alias


def test_noise_is_standard_normal():
    x = common.keyed_noise((64,), 0, "x_T", 0, range(500))
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02
    neighbours = torch.corrcoef(torch.stack([x[:-1].flatten(), x[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.02


def test_keyed_seed_is_stable_across_processes():
    assert common.keyed_seed(0, "x_T", 1) == 3323599327804076139  # Python's hash() would change


# ---- prompts and batches ----


@given(n=st.integers(1, 9), P=st.integers(1, 5), G=st.integers(2, 3), seed=st.integers(0, 3))
def test_prompt_rows_cover_every_row_once_per_pass(n, P, G, seed):
    rows = [{"prompt": str(i)} for i in range(n)]
    drawn = []
    for iteration in range(2 * n):
        batch = common.prompt_rows(rows, P, G, seed, iteration)
        assert len(batch) == P * G
        groups = [batch[i : i + G] for i in range(0, P * G, G)]
        assert all(row is group[0] for group in groups for row in group)
        drawn += [group[0]["prompt"] for group in groups]
        assert common.prompt_rows(rows, P, G, seed, iteration) == batch
    passes = [drawn[i : i + n] for i in range(0, len(drawn), n)]
    assert all(sorted(p) == sorted(passes[0]) for p in passes if len(p) == n)
    assert all(set(Counter(p).values()) == {1} for p in passes)


def test_prompt_order_depends_on_seed_and_pass():
    rows = [{"prompt": str(i)} for i in range(20)]
    orders = [
        tuple(r["prompt"] for r in common.prompt_rows(rows, 20, 1, seed, i))
        for seed, i in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(set(orders)) == 3


def test_micro_batches_cut_condition_and_indices_alike():
    c = {"a": torch.arange(7), "b": torch.arange(14).view(7, 2)}
    parts = list(common.micro_batches(c, range(10, 17), 3))
    assert [list(r) for _, r in parts] == [[10, 11, 12], [13, 14, 15], [16]]
    exact(common.cat_batches(part for part, _ in parts), c)


def test_one_process_needs_no_launcher():
    ranks = common.Ranks("cpu")
    assert (ranks.world, ranks.rank, ranks.device) == (1, 0, "cpu")
    assert ranks.mine(6) == range(6)
    assert ranks.gather("x") == ["x"]
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, 2.0])
    ranks.average_gradients([p])
    exact(p.grad, torch.tensor([1.0, 2.0]))


# ---- rewards ----


def test_advantage_mode_ignores_the_scale_of_a_reward():
    values = torch.tensor([[1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 1.0, 0.0]])
    scaled = values * torch.tensor([[100.0], [1.0]])
    for std in ("group", "global"):
        A = common.combine_rewards(values, [1, 2], 2, "advantage", std)
        assert_close(
            common.combine_rewards(scaled, [1, 2], 2, "advantage", std), A, rtol=1e-3, atol=1e-3
        )
        each = [common.group_advantages(v.double(), 2, std=std) for v in values]
        assert_close(A, ((each[0] + 2 * each[1]) / 3).float())
        assert_close(common.combine_rewards(values, [2, 4], 2, "advantage", std), A)


def test_reward_mode_adds_raw_rewards():
    values = torch.tensor([[1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 1.0, 0.0]])
    A = common.combine_rewards(values, [1, 2], 2, "reward", "group")
    wanted = common.group_advantages(torch.tensor([1.0, 4.0, 5.0, 5.0]), 2, std="group")
    assert_close(A, wanted)
    scaled = values * torch.tensor([[100.0], [1.0]])
    assert (common.combine_rewards(scaled, [1, 2], 2, "reward") - A).abs().max() > 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["advantage", "reward"])
@pytest.mark.parametrize("std", ["group", "global", "none"])
def test_a_sample_that_failed_in_one_reward_is_masked_in_all(mode, std, bad):
    values = torch.tensor([[1.0, 2.0, 4.0, 0.0, 1.0, 5.0], [0.0, 3.0, 1.0, 2.0, 0.0, 1.0]])
    values[1, 1] = bad
    A = common.combine_rewards(values, [1, 1], 3, mode, std)
    assert A.isfinite().all()
    assert A[1] == 0
    assert_close(A[[0, 2]].sum(), torch.tensor(0.0), atol=1e-5, rtol=0)  # without it
    values[0, 1] = 1e9  # nothing of it counts
    exact(common.combine_rewards(values, [1, 1], 3, mode, std), A)
    values[:] = math.nan
    exact(common.combine_rewards(values, [1, 1], 3, mode, std), torch.zeros(6))


def test_negative_weights_and_clip():
    values = torch.tensor([[0.0, 1.0]])
    up = common.combine_rewards(values, [1], 2, "advantage")
    assert_close(common.combine_rewards(values, [-1], 2, "advantage"), -up)
    assert common.combine_rewards(values, [1], 2, "advantage", clip=0.25).tolist() == [-0.25, 0.25]
    assert common.combine_rewards(values, [1], 2, "reward", clip=0.25).tolist() == [-0.25, 0.25]


def test_score_keeps_order_and_names(red):
    images = torch.rand(3, 3, 8, 8)
    fns = {name: rewards.make_reward(name) for name in ("red", "jpeg_compressibility")}
    values = rewards.score(fns, images, [{"prompt": "a"}] * 3)
    assert values.shape == (2, 3)
    exact(values[0], fns["red"](images, [""] * 3))


# ---- evaluation ----


@pytest.mark.parametrize("size", [1, 2, 64])
def test_evaluation_scores_every_prompt_once(policy, quick, size):
    rows = [{"prompt": p} for p in ("a circle", "two squares", "a red circle", "a circle", "x")]
    args = dataclasses.replace(quick(), micro_batch=size, eval_T=3, eval_guidance=2.0)
    fns = {"red": rewards.make_reward("red")}
    metrics, records = common.evaluate(policy, fns, rows, args, common.Ranks("cpu"))
    assert [r["index"] for r in records] == list(range(5))
    assert [r["prompt"] for r in records] == [r["prompt"] for r in rows]
    eps = common.keyed_noise(policy.latent_shape, common.EVAL_SEED, "eval", 0, range(5))
    c = policy.encode([r["prompt"] for r in rows])
    images = policy.decode(policy.sample(eps, c, 3, 2.0))
    assert_close(torch.stack([r["image"] for r in records]), images, rtol=0, atol=1e-5)
    wanted = rewards.score(fns, images, rows).mean().item()
    assert metrics["eval/red"] == pytest.approx(wanted, abs=0.2)
    assert metrics["eval/kl_ref"] > 0
    values = rewards.score(fns, torch.stack([r["image"] for r in records]), rows)[0]
    assert metrics["eval/heldout_se"] == pytest.approx(float(values.std()) / 5**0.5)
    other = dataclasses.replace(args, seed=7)
    assert common.evaluate(policy, fns, rows, other, common.Ranks("cpu"))[0] == metrics


def test_evaluation_shares_the_prompts_among_ranks(policy, quick):
    class Half(common.Ranks):
        def __init__(self, rank):
            self.world, self.rank, self.device = 2, rank, "cpu"

    rows = [{"prompt": "a circle"}] * 5
    fns = {"red": rewards.make_reward("red")}
    parts = []
    for rank in (0, 1):
        ranks = Half(rank)
        ranks.gather = lambda x: [x]
        parts.append([r["index"] for r in common.evaluate(policy, fns, rows, quick(), ranks)[1]])
    assert parts == [[0, 2, 4], [1, 3]]


def test_evaluation_of_the_base_has_no_distance(make_policy, quick):
    policy = make_policy(random=False)
    fns = {"red": rewards.make_reward("red")}
    metrics, _ = common.evaluate(policy, fns, [{"prompt": "x"}], quick(), common.Ranks("cpu"))
    assert metrics["eval/kl_ref"] == 0


@pytest.mark.parametrize("size", [2, 64])
def test_diversity_is_the_spread_of_two_pictures_of_one_prompt(policy, quick, size, monkeypatch):
    monkeypatch.setattr(common, "TWINS", 3)
    rows = [{"prompt": p} for p in ("a circle", "two squares", "a red circle", "x", "y")]
    args = quick(micro_batch=size, eval_T=3, eval_guidance=2.0)
    fns = {"red": rewards.make_reward("red")}
    metrics, _ = common.evaluate(policy, fns, rows, args, common.Ranks("cpu"))
    c = policy.encode([row["prompt"] for row in rows[:3]])
    shape = policy.latent_shape
    one, two = (
        policy.sample(common.keyed_noise(shape, 0, name, 0, range(3)), c, 3, 2.0)
        for name in ("eval", "twin")
    )
    wanted = (one - two).abs().mean() / 2**0.5  # the std of two numbers, n - 1
    assert metrics["eval/diversity"] == pytest.approx(float(wanted), rel=1e-3)


def test_a_collapsed_policy_has_no_diversity(policy, quick, monkeypatch):
    monkeypatch.setattr(policy, "sample", lambda eps, *inputs: torch.ones_like(eps))
    fns = {"red": rewards.make_reward("red")}
    metrics, _ = common.evaluate(policy, fns, [{"prompt": "x"}] * 3, quick(), common.Ranks("cpu"))
    assert metrics["eval/diversity"] == 0


# ---- watching ----


def history(trained, heldout, se=0.0, stages=None):
    """Rows of a run with one training iteration between evaluations, the last row without it."""
    rows = []
    for i, (reward, value) in enumerate(zip(trained, heldout, strict=True)):
        row = {"iteration": i, "reward/mean": reward, "eval/strict": value, "eval/heldout_se": se}
        rows.append(row | ({"stage": stages[i]} if stages else {}))
    del rows[-1]["reward/mean"]
    return rows


RISING, FALLING = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("trained", "heldout", "settings", "hacked"),
    [
        (RISING, [0.4, 0.6, 0.7, 0.5, 0.5, 0.5], {}, True),
        (RISING, [0.4, 0.6, 0.7, 0.5, 0.5, 0.5], dict(se=0.1), True),  # sqrt(2) se = 0.14 < 0.2
        (RISING, [0.4, 0.6, 0.7, 0.5, 0.5, 0.5], dict(se=0.15), None),  # within the noise
        (FALLING, [0.4, 0.6, 0.7, 0.5, 0.5, 0.5], {}, None),  # not hacked: both fall
        (RISING, [0.4, 0.6, 0.7, 0.5, 0.5, 0.7], {}, None),  # back at its best
        (RISING, [0.4, 0.6, 0.6, 0.7, 0.5, 0.5], {}, None),  # two evaluations only
        (RISING, [0.4, 0.5, 0.6, 0.7, 0.8, 0.9], {}, None),
        (FALLING, [0.4, 0.6, 0.5, 0.3, 0.3, 0.3], {}, False),  # below the start
        (RISING, [0.4, 0.3, 0.3, 0.3, 0.3, 0.2], {}, True),
        # rewards of different stages are not compared: 1 -> 9 is no rise, 9 -> 8 a fall
        ([*RISING[:3], 9.0, 8.0, 0], [0.4, 0.7, 0.5, 0.5, 0.5, 0.5], dict(stages="111222"), None),
        ([*RISING[:3], 8.0, 9.0, 0], [0.4, 0.7, 0.5, 0.5, 0.5, 0.5], dict(stages="111222"), True),
    ],
)
def test_decline(trained, heldout, settings, hacked):
    line = common.decline(history(trained, heldout, **settings), "eval/strict")
    assert bool(line) == (hacked is not None), line
    assert ("over-optimisation" in line) == bool(hacked)
    if line:
        best = max(heldout)
        assert line.startswith(f"WARNING: held-out strict was {best:.3f} at iteration ")
        assert f"iteration {heldout.index(best)} (best/), is {heldout[-1]:.3f}" in line


def test_decline_skips_what_was_not_measured():
    rows = history(RISING, [0.4, 0.6, 0.7, 0.5, 0.5, 0.5])
    del rows[3]["eval/strict"], rows[4]["reward/mean"]
    assert common.decline(rows, "eval/strict") == ""  # two evaluations since the best
    assert common.decline(rows[:1], "eval/strict") == ""


# ---- moving average ----


def test_ema_follows_the_official_trace():
    """flow_grpo@9745241: an average that starts at 1 of weights at 2, after steps 7, 15 and 23."""
    p = torch.nn.Parameter(torch.tensor([1.0]))
    ema = common.Ema([p], 0.9)
    with torch.no_grad():
        p.fill_(2.0)
    trace = []
    for _ in range(24):
        before = ema.values[0].clone()
        ema.update()
        if not torch.equal(before, ema.values[0]):
            trace.append((ema.n - 1, round(ema.values[0].item(), 4)))
    assert trace == [(7, 1.5294), (15, 1.6988), (23, 1.7810)]
    assert p.item() == 2


def test_ema_does_not_alias_and_swaps_exactly():
    p = torch.nn.Parameter(torch.tensor([1.0, 3.0]))
    ema = common.Ema([p], 0.9)
    with torch.no_grad():
        p.add_(1)
    exact(ema.values[0], torch.tensor([1.0, 3.0]))
    with ema.active():  # nothing has been averaged yet
        exact(p.detach(), torch.tensor([2.0, 4.0]))
    ema.n = ema.every
    with ema.active():
        exact(p.detach(), torch.tensor([1.0, 3.0]))
    exact(p.detach(), torch.tensor([2.0, 4.0]))
    exact(ema.values[0], torch.tensor([1.0, 3.0]))
    assert not ema.values[0].requires_grad


def test_ema_cap():
    p = torch.nn.Parameter(torch.zeros(1))
    off, on = common.Ema([p], 0.0), common.Ema([p], 0.3)
    on.values = [torch.ones(1)]
    with off.active():
        assert p.item() == 0
    for _ in range(8):
        on.update()
    assert on.values[0].item() == pytest.approx(0.3)  # min(0.3, 8 / 17)


# ---- small parts ----


def test_merge_logs():
    rows = [{"a": 1.0, "log_rho_max": 1.0}, {"a": 3.0, "log_rho_max": 5.0}, {"grad_norm": 2.0}]
    assert common.merge_logs(rows) == {"a": 2, "log_rho_max": 5, "grad_norm": 2}
    assert common.merge_logs([]) == {}
    uneven = [{"images": 3, "a": 1.0, "b_max": 2.0}, {"images": 1, "a": 5.0, "b_max": 1.0}]
    assert common.merge_logs(uneven) == {"a": 2, "b_max": 2}


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "args.json"
    for text in ("one", "two"):
        common.write_atomic(path, text)
        assert path.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["args.json"]


def test_pictures_are_drawn_whatever_the_prompt_says(tmp_path):
    prompts = [
        "a sign $5, $x^{$",
        "$\\frac$",
        "100 % \\frac",
        "word " * 60,
        "x" * 500,
        "ein Füßchen",
    ]
    records = [dict(prompt=p, image=torch.rand(3, 8, 8), values=[0.5, math.nan]) for p in prompts]
    common.draw_samples(records, ["geneval", "red"], tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 1000
    common.draw_samples(records, ["geneval", "red"], tmp_path / "titled.png", "$5 | strict 0.4")
    assert (tmp_path / "titled.png").read_bytes() != (tmp_path / "sheet.png").read_bytes()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows", [[], [{"iteration": 0, "reward/mean": 1.0}], [{"iteration": 3, "eval/red": 1.0}]]
)
def test_curves_are_drawn_however_short_the_run(tmp_path, rows):
    common.draw_curves(rows, tmp_path / "curves.png")
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_curves_show_what_is_watched(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    shown, add = [], Figure.add_subplot
    monkeypatch.setattr(
        Figure, "add_subplot", lambda f, *a, **k: shown.append(k["title"]) or add(f, *a, **k)
    )
    watched = ["eval/diversity", "eval/kl_ref", "eval/strict", "reward/mean", "stage"]
    row = dict.fromkeys([*watched, "iteration", "nfe"], 1.0)
    common.draw_curves([row], tmp_path / "curves.png")
    assert shown == watched


# ---- whole runs ----


def read(folder):
    def strict(name):
        raise ValueError(f"{name} is not strict JSON")

    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=strict) for line in lines]


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def state(folder):
    return torch.load(Path(folder) / "state.pt", weights_only=True)


def lora(folder, name="lora"):
    from safetensors.torch import load_file

    return load_file(Path(folder) / name / "pytorch_lora_weights.safetensors")


def command(weights, out, **flags):
    small = dict(
        model="tiny", weights=weights, out=str(out), reward="jpeg_compressibility",
        heldout_reward="None", P=2, G=2, T=3, window=0, micro_batch=4, lora_r=4, lora_alpha=8, eval_prompts=3, eval_T=2, eval_every=2,
        save_every=1, ema=0.5, updates=4, iterations=4, device="cpu",
    )  # fmt: skip
    out = []
    for key, value in {**small, **flags}.items():
        name = "--" + key.replace("_", "-")
        if value is None:  # a setting that another script does not have
            continue
        if value is True or value is False:
            out.append(name if value else name.replace("--", "--no-", 1))
        else:
            out += [name, str(value)]
    return out


def launch(monkeypatch, argv, script=flow_grpo):
    """The script's command line, in this process."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *argv])
    args = script.parse_args()
    script.main(args)
    return args


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(common, "draw_curves", lambda rows, path: Path(path).touch())
    monkeypatch.setattr(common, "draw_samples", lambda a, b, path, title: Path(path).touch())


@pytest.fixture(scope="module")
def whole_run(weights, tmp_path_factory):
    """Four iterations without a break, figures and all."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        launch(patch, command(weights, folder))
    return folder


def test_the_run_folder_is_complete(whole_run, weights):
    names = {p.name for p in whole_run.iterdir()}
    assert names == {
        "args.json", "metrics.jsonl", "curves.png", "samples", "lora", "best", "state.pt"
    }  # fmt: skip
    assert sorted(p.name for p in (whole_run / "samples").iterdir()) == [
        "00000.png", "00002.png", "00004.png"
    ]  # fmt: skip
    for name in ("lora", "best"):
        settings = json.loads((whole_run / name / "settings.json").read_text())
        assert settings["guidance"] == settings["eval_guidance"] == 1
        assert settings["weights"] == weights
        assert settings["iteration"] in ((4,) if name == "lora" else (0, 2, 4))
    args = json.loads((whole_run / "args.json").read_text())
    assert args["script"] == "flow_grpo"
    assert args.keys() - {"script"} == {f.name for f in dataclasses.fields(flow_grpo.Args)}


def test_metrics(whole_run):
    rows = read(whole_run)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    each = {
        "reward/mean", "reward/jpeg_compressibility", "reward/fail_frac", "clip_fraction",
        "log_rho_max", "grad_norm", "nfe", "seconds", "diversity",
    }  # fmt: skip
    assert all(each <= row.keys() for row in rows[:4])
    evaluated = {"eval/jpeg_compressibility", "eval/kl_ref", "eval/diversity", "eval/heldout_se"}
    assert [evaluated <= row.keys() for row in rows] == [True, False, True, False, True]
    assert all("kl_ref" not in row for row in rows)  # beta is 0: it does not exist
    assert rows[0]["eval/kl_ref"] == 0
    assert rows[-1]["eval/kl_ref"] > 0


def test_best_is_the_best_evaluation(whole_run):
    rows = [row for row in read(whole_run) if "eval/kl_ref" in row]
    best = max(rows, key=lambda row: row["eval/jpeg_compressibility"])
    same = all(
        torch.equal(a, b)
        for a, b in zip(lora(whole_run).values(), lora(whole_run, "best").values())
    )
    assert same == (best is rows[-1])


def test_the_export_is_the_average(whole_run):
    saved = state(whole_run)
    exported = sorted(tuple(x.flatten()[:3].tolist()) for x in lora(whole_run).values())
    assert exported == sorted(tuple(x.flatten()[:3].tolist()) for x in saved["ema"])
    assert exported != sorted(tuple(x.flatten()[:3].tolist()) for x in saved["params"])


KILLED = """
import os, signal, sys
import common, flow_grpo, rewards

def score(*inputs, original=rewards.score, seen=[]):
    seen.append(1)
    if len(seen) == 5:  # evaluations before iterations 0 and 2, rollouts 0, 1 and now 2
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*inputs)

rewards.score = flow_grpo.score = score
common.draw_samples = common.draw_curves = lambda *inputs: None
flow_grpo.main(flow_grpo.parse_args())
"""


def run_python(code, *argv, **env):
    return subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def assert_same_run(folder, whole):
    exact(lora(folder), lora(whole))
    exact(lora(folder, "best"), lora(whole, "best"))
    one, other = state(folder), state(whole)
    assert without_time(one.pop("rows")) == without_time(other.pop("rows"))
    exact(one.pop("optimizer"), other.pop("optimizer"))
    exact(one, other)
    assert without_time(read(folder)) == without_time(read(whole))


def test_kill_and_resume_is_bit_for_bit(whole_run, weights, tmp_path, monkeypatch, no_figures):
    folder = tmp_path / "run"
    run = run_python(KILLED, *command(weights, folder))
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert state(folder)["done"] == 2
    assert len(read(folder)) == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "half a li')  # what a kill may leave
    launch(monkeypatch, ["--resume", str(folder)])
    assert_same_run(folder, whole_run)


def test_two_iterations_and_two_more_are_four(
    whole_run, weights, tmp_path, monkeypatch, no_figures
):
    """The same command line again, with --resume and more iterations."""
    folder = tmp_path / "run"
    launch(monkeypatch, command(weights, folder, iterations=2, micro_batch=64))
    launch(monkeypatch, [*command(weights, folder, micro_batch=64), "--resume", str(folder)])
    rows = read(folder)
    assert without_time(rows) == without_time(read(whole_run))
    exact(state(folder)["params"], state(whole_run)["params"])
    exact(lora(folder, "best"), lora(whole_run, "best"))


def test_resume_restores_a_policy_that_another_seed_began(whole_run, tmp_path, make_policy):
    """Nothing of the fresh LoRA or optimizer survives: only what was saved."""
    saved = state(whole_run)
    policy = make_policy(seed=9)
    randomise(policy, 3)
    optimizer = torch.optim.AdamW(policy.params)
    ema = common.Ema(policy.params, 0.5)
    values = json.loads((whole_run / "args.json").read_text())
    values.pop("script")
    args = flow_grpo.Args(**{**values, "resume": str(whole_run)})
    run = common.Run.__new__(common.Run)
    run.args, run.policy, run.optimizer, run.ema = args, policy, optimizer, ema
    run.folder = whole_run
    run._load()
    exact([p.detach() for p in policy.params], saved["params"])
    exact(ema.values, saved["ema"])
    assert (run.done, ema.n) == (4, 16)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_saves_and_resumes(
    number, whole_run, weights, tmp_path, monkeypatch, no_figures, capsys
):
    folder, original, seen = tmp_path / "run", rewards.score, []

    def score(*inputs):
        seen.append(1)
        if len(seen) == 3:  # the rollout of iteration 1
            os.kill(os.getpid(), number)
        return original(*inputs)

    handler = signal.getsignal(number)
    for module in (rewards, flow_grpo):
        monkeypatch.setattr(module, "score", score)
    launch(monkeypatch, command(weights, folder, save_every=100))
    assert signal.getsignal(number) is handler
    assert state(folder)["done"] == 2
    assert len(read(folder)) == 2
    assert f"--resume {folder}" in capsys.readouterr().out
    assert {"lora", "curves.png", "args.json"} <= {p.name for p in folder.iterdir()}
    for module in (rewards, flow_grpo):
        monkeypatch.setattr(module, "score", original)
    launch(monkeypatch, ["--resume", str(folder), "--save-every", "1"])
    assert_same_run(folder, whole_run)


def test_a_second_interrupt_stops_at_once(weights, tmp_path, monkeypatch, no_figures):
    def score(*inputs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return inputs

    for module in (rewards, flow_grpo):
        monkeypatch.setattr(module, "score", score)
    with pytest.raises(KeyboardInterrupt):
        launch(monkeypatch, command(weights, tmp_path / "run"))
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"args.json", "metrics.jsonl", "curves.png", "lora"} <= left


def test_a_second_run_refuses_and_overwrite_works(weights, tmp_path, monkeypatch, no_figures):
    folder = tmp_path / "run"
    launch(monkeypatch, command(weights, folder, iterations=1))
    (folder / "samples" / "stale.png").touch()
    with pytest.raises(SystemExit, match=r"^--out: [^\n]*--resume [^\n]*--overwrite$"):
        launch(monkeypatch, command(weights, folder, iterations=1))
    assert len(read(folder)) == 2
    launch(monkeypatch, [*command(weights, folder, iterations=2), "--overwrite"])
    assert len(read(folder)) == 3
    assert not (folder / "samples" / "stale.png").exists()


def test_overwrite_deletes_run_folders_only(weights, tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match=r"^--overwrite: [^\n]*$"):
        launch(monkeypatch, [*command(weights, tmp_path), "--overwrite"])
    assert (tmp_path / "thesis.tex").exists()


def test_no_iterations_is_an_evaluation(weights, tmp_path, monkeypatch, no_figures):
    folder = tmp_path / "run"
    launch(monkeypatch, command(weights, folder, iterations=0))
    (row,) = read(folder)
    assert row["iteration"] == 0
    assert row["eval/kl_ref"] == 0
    assert {"args.json", "metrics.jsonl", "curves.png", "lora"} <= {
        p.name for p in folder.iterdir()
    }


def test_the_printed_lines_sample_from_the_result(
    weights, tmp_path, monkeypatch, capsys, no_figures
):
    import diffusers

    folder, evaluated, original = tmp_path / "run", [], common.evaluate

    def evaluate(policy, rewards, rows, args, ranks, p_mix=1.0):
        out = original(policy, rewards, rows, args, ranks, p_mix)
        evaluated.append((policy, rows[0]["prompt"]))
        return out

    monkeypatch.setattr(common, "evaluate", evaluate)
    launch(monkeypatch, command(weights, folder, iterations=1, ema=0, lr=0.1, eval_guidance=2.0))
    text = capsys.readouterr().out
    text = text[text.index("pipe = diffusers.") :]
    policy, prompt = evaluated[-1]
    eps = common.keyed_noise(policy.latent_shape, 0, "eval", 0, [0])
    wanted = policy.decode(policy.sample(eps, policy.encode([prompt]), 2, 2.0))
    names = {"diffusers": diffusers, "PROMPT": prompt, "eps": eps}
    exec(text, names)
    call = re.search(r"pipe\(PROMPT, .*\)\.images", text)[0]
    assert len(eval(call, names)) == 1  # as printed
    call = call.replace("(PROMPT,", "(PROMPT, latents=eps, output_type='pt',")
    assert_close(eval(call, names), wanted, rtol=0, atol=1e-5)


def test_best_follows_the_held_out_reward(quick, tmp_path, monkeypatch):
    values = iter([1.0, 3.0, 2.0])  # of the evaluations before iterations 0 and 1, and at the end

    def factory(device, dtype):
        return rewards.Reward(lambda images, prompts, metas: [next(values)] * len(images))

    monkeypatch.setitem(rewards.REWARDS, "peak", factory)
    two = quick(heldout_reward="peak", iterations=2, eval_every=1, out=str(tmp_path / "two"))
    flow_grpo.main(two)
    one = quick(out=str(tmp_path / "one"))
    flow_grpo.main(one)
    exact(lora(two.out, "best"), lora(one.out))
    assert differ(lora(two.out).values(), lora(one.out).values())
    assert [row["eval/peak"] for row in read(two.out)] == [1, 3, 2]
    assert json.loads((Path(two.out) / "best/settings.json").read_text())["iteration"] == 1


def test_geneval_end_to_end(quick):
    """The defaults: GenEval's soft reward in training, its benchmark rule held out."""
    args = quick(reward="geneval_soft", heldout_reward="geneval")
    flow_grpo.main(args)
    for row in (read(args.out)[0], read(args.out)[-1]):
        assert 0 <= row["eval/strict"] <= 1
        assert 0 <= row["eval/soft"] <= 1
    assert read(args.out)[0]["reward/fail_frac"] == 0


def test_the_large_model_takes_the_same_path(quick):
    """Stable Diffusion 3.5's settings (targets, text length) on a small pipeline of its class."""
    args = quick(model="sd35m", guidance=4.5, beta=0.04, ema=0.9)
    flow_grpo.main(args)
    small = quick(guidance=4.5, beta=0.04, ema=0.9, out=args.out + "-tiny")
    flow_grpo.main(small)
    assert len(lora(args.out)) < len(lora(small.out))  # attention only
    assert read(args.out)[0]["grad_norm"] > 0


# ---- rewards that fail ----


def failing(monkeypatch, fails):
    """`red`, except for the samples of a call for which fails(call, index)."""
    calls = []

    def score(images, prompts, metas):
        calls.append(1)
        values = images[:, 0].float().mean((1, 2))
        return [math.nan if fails(len(calls), i) else float(v) for i, v in enumerate(values)]

    monkeypatch.setitem(rewards.REWARDS, "flaky", lambda device, dtype: rewards.Reward(score))
    return "flaky"


@pytest.mark.parametrize(("beta", "passes"), [(0.0, 2), (0.1, 4)])  # the KL masks it as well
def test_one_failed_sample_is_masked_and_counted(quick, monkeypatch, caplog, beta, passes):
    name = failing(monkeypatch, lambda call, i: call == 2 and i == 3)
    args = quick(reward=name, P=2, G=3, micro_batch=6, iterations=2, beta=beta)
    flow_grpo.main(args)
    rows = read(args.out)
    assert [row["reward/fail_frac"] for row in rows[:2]] == [pytest.approx(1 / 6), 0]
    assert all(math.isfinite(v) for row in rows for v in row.values())
    assert all(p.isfinite().all() for p in state(args.out)["params"])
    assert rows[0]["grad_norm"] > 0
    assert rows[0]["nfe"] == pytest.approx(3 + passes * 5 / 6)
    assert "1 of 6 samples not scored" in caplog.text


@pytest.mark.parametrize("combine", ["advantage", "reward"])
def test_a_sample_that_one_of_two_rewards_failed_is_masked(quick, monkeypatch, capsys, combine):
    name = failing(monkeypatch, lambda call, i: call == 2 and i == 3)
    args = quick(reward=f"red:1,{name}:2", combine=combine, P=2, G=3, micro_batch=6)
    updated, original = [], flow_grpo.update

    def update(*inputs):
        updated.append((inputs[5], inputs[6]))
        return original(*inputs)

    monkeypatch.setattr(flow_grpo, "update", update)
    flow_grpo.main(args)
    ((A, valid),) = updated
    assert valid.tolist() == [True] * 3 + [False, True, True]
    assert A[3] == 0
    assert (A[[0, 1, 2, 4, 5]] != 0).all()
    row = read(args.out)[0]
    assert row["reward/fail_frac"] == pytest.approx(1 / 6)
    assert row["reward/red"] != row["reward/flaky"]  # one mean has six samples, one has five
    assert row["reward/mean"] == pytest.approx(row["reward/red"] + 2 * row["reward/flaky"])
    assert row["grad_norm"] > 0
    assert "reward/fail_frac 0.1667" in capsys.readouterr().out


def test_the_line_names_the_reward_that_failed(quick, monkeypatch):
    name = failing(monkeypatch, lambda call, i: call > 1)
    with pytest.raises(SystemExit, match=r"^--max-fail: 100% [^\n]* no flaky reward[^\n]*$"):
        flow_grpo.main(quick(reward=f"red:1,{name}:2"))


def test_too_many_failures_stop_with_one_line(quick, monkeypatch):
    name = failing(monkeypatch, lambda call, i: call > 2 and i < 2)
    args = quick(reward=name, P=2, G=3, micro_batch=6, iterations=5, max_fail=0.3)
    with pytest.raises(SystemExit, match=r"^--max-fail: 33%[^\n]*flaky[^\n]*30%[^\n]*$"):
        flow_grpo.main(args)
    assert len(read(args.out)) == 1
    left = {p.name for p in Path(args.out).iterdir()}
    assert {"args.json", "metrics.jsonl", "curves.png", "lora"} <= left


@pytest.mark.parametrize("script", [flow_grpo, ddpo, vgrpo, dgpo, rwr], ids=lambda s: s.__name__)
@pytest.mark.parametrize("call", [1, 3])  # the evaluation before, the rollout of iteration 1
def test_a_reward_that_goes_away_leaves_a_run_to_resume(
    quick, tmp_path, monkeypatch, capsys, script, call
):
    """One line, and the resumed run is the one without the failure."""
    calls, gone = [], []

    def score(images, prompts, metas):
        calls.append(1)
        if gone and len(calls) == call:
            raise rewards.RewardUnavailable("no server; start one")
        return images[:, 0].float().mean((1, 2))

    monkeypatch.setitem(rewards.REWARDS, "far", lambda device, dtype: rewards.Reward(score))
    own = dict(M=2, t_min=0.0) if script in (vgrpo, dgpo) else {}
    flags = dict(reward="far", P=2, G=2, micro_batch=4, iterations=3, ema=0.5, **own)
    script.main(quick(script, **flags, out=str(tmp_path / "whole")))
    calls.clear()
    gone.append(1)
    args = quick(script, **flags, out=str(tmp_path / "part"))
    with pytest.raises(SystemExit, match=r"^--reward far: no server; start one$"):
        script.main(args)
    assert state(args.out)["done"] == (0 if call == 1 else 1)
    assert f"go on with --resume {args.out}" in capsys.readouterr().out
    gone.clear()
    launch(monkeypatch, ["--resume", args.out], script)
    assert_same_run(args.out, tmp_path / "whole")


def test_all_failed_below_the_limit_trains_on(quick, monkeypatch):
    name = failing(monkeypatch, lambda call, i: call == 2)
    args = quick(reward=name, P=2, G=3, micro_batch=6, iterations=2, max_fail=1.0)
    flow_grpo.main(args)
    rows = read(args.out)
    assert rows[0]["reward/fail_frac"] == 1
    assert "reward/mean" not in rows[0]
    assert "grad_norm" not in rows[0]
    assert rows[1]["grad_norm"] > 0


def test_a_failed_evaluation_does_not_end_the_run(quick, monkeypatch):
    name = failing(monkeypatch, lambda call, i: call == 1)
    args = quick(reward=name, iterations=2, eval_every=1)
    flow_grpo.main(args)
    rows = read(args.out)
    assert ["eval/flaky" in row for row in rows] == [False, True, True]
    assert (Path(args.out) / "best").is_dir()


def test_a_decline_is_warned_of(quick, monkeypatch, capsys):
    values = iter(range(100, 0, -1))
    factory = lambda device, dtype: rewards.Reward(lambda i, p, m: [float(next(values))] * len(i))  # noqa: E731
    monkeypatch.setitem(rewards.REWARDS, "falling", factory)
    flow_grpo.main(quick(heldout_reward="falling", iterations=4, eval_every=1))
    assert capsys.readouterr().err.count("WARNING: held-out falling") == 2


def test_over_optimisation_is_seen(quick, monkeypatch, capsys):
    """The reward in training rises, the held-out one rises and falls: a warning, and best/ before."""
    values = {"up": iter(range(100)), "peak": iter([1.0, 3.0, 2.0, 2.0, 1.0])}
    for name, v in values.items():

        def factory(device, dtype, v=v):
            return rewards.Reward(lambda images, prompts, metas: [float(next(v))] * len(images))

        monkeypatch.setitem(rewards.REWARDS, name, factory)
    titles = []
    monkeypatch.setattr(common, "draw_samples", lambda a, b, path, title: titles.append(title))
    args = quick(reward="up", heldout_reward="peak", iterations=4, eval_every=1)
    flow_grpo.main(args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert line.endswith("training reward rose: over-optimisation")
    assert "was 3.000 at iteration 1 (best/), is 1.000" in line
    assert json.loads((Path(args.out) / "best/settings.json").read_text())["iteration"] == 1
    assert titles[0].startswith("iteration 0 | eval/peak 1 | eval/diversity ")
    assert titles[-1].startswith("iteration 4 | reward/mean ")
    assert " | eval/peak 1 | eval/diversity " in titles[-1]
    assert " | eval/kl_ref " in titles[-1]


# ---- several processes ----


TWO = {
    ddpo: dict(window=None, updates=2, min_count=2),
    flow_grpo: dict(updates=2),
    vgrpo: dict(window=None, updates=None, M=2, t_min=0.0, K=2, clip=0.01, kl_old=0.3, kl_ema=1.0),
    dgpo: dict(window=None, updates=None, M=2, t_min=0.0, clip=0.01, beta=0.1),
    rwr: dict(window=None, updates=2, epochs=2, inverse_temperature=2.0),
}


@pytest.mark.parametrize("script", TWO, ids=lambda script: script.__name__)
def test_two_processes_are_one(script, weights, tmp_path, monkeypatch, no_figures):
    # One image a forward, as a batch of another size rounds differently; and small steps, or the
    # rounding of the first iteration would flip pixels, hence whole bytes of JPEG, in the second.
    flags = dict(iterations=2, eval_every=1, ema=0, P=2, G=3, micro_batch=1, lr=1e-6)
    flags |= TWO[script]
    launch(monkeypatch, command(weights, tmp_path / "one", **flags), script)
    start = ["-m", script.__name__] if "." in script.__name__ else [f"{script.__name__}.py"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *start,
         *command(weights, tmp_path / "two", **flags)],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert_close(two["params"], one["params"], rtol=0, atol=2e-8)
    moments = [[m["exp_avg"] for m in x["optimizer"]["state"].values()] for x in (one, two)]
    scale = max(float(m.abs().max()) for m in moments[0])
    assert_close(moments[1], moments[0], rtol=1e-3, atol=1e-6 * scale)
    rows = [without_time(read(tmp_path / name)) for name in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            kilobytes = "jpeg" in key or "reward" in key or key == "eval/heldout_se"
            atol = 0.02 if kilobytes else 1e-5  # whole bytes flip
            assert b[key] == pytest.approx(value, rel=1e-4, abs=atol), key
    assert run.stdout.count("trained parameters") == 1  # one rank speaks


# ---- settings ----


DRIVER = """
import contextlib, io, json, sys
import common, flow_grpo

def load(*inputs):
    raise RuntimeError("a model is loaded")

common.load_policy = load
HEAVY = ("diffusers", "transformers", "peft", "matplotlib", "torchvision")
results = {}
for name, argv in json.loads(sys.argv[1]).items():
    sys.argv[1:] = argv
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
            flow_grpo.main(flow_grpo.parse_args())
        code, text = 0, err.getvalue()
    except SystemExit as exit:
        text = err.getvalue() + (exit.code if isinstance(exit.code, str) else "")
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException as error:
        code, text = -1, err.getvalue() + f"{type(error).__name__}: {error}"
    results[name] = code, text, [m for m in HEAVY if m in sys.modules]
print(json.dumps(results))
"""

# what is wrong: (flags, words of the one line)
BAD = {
    "group of one": (["--G", "1"], ["--G"]),
    "no prompts an iteration": (["--P", "0"], ["--P"]),
    "no micro-batch": (["--micro-batch", "0"], ["--micro-batch"]),
    "no steps": (["--T", "0"], ["--T"]),
    "one step": (["--T", "1"], ["--T"]),
    "negative iterations": (["--iterations", "-1"], ["--iterations"]),
    "negative lr": (["--lr", "-1e-3"], ["--lr"]),
    "lr is not a number": (["--lr", "nan"], ["--lr"]),
    "guidance is not a number": (["--guidance", "nan"], ["--guidance"]),
    "no evaluation prompts": (["--eval-prompts", "0"], ["--eval-prompts"]),
    "never evaluated": (["--eval-every", "0"], ["--eval-every"]),
    "never saved": (["--save-every", "0"], ["--save-every"]),
    "rank of zero": (["--lora-r", "0"], ["--lora-r"]),
    "ema above one": (["--ema", "1.5"], ["--ema"]),
    "max-fail above one": (["--max-fail", "2"], ["--max-fail"]),
    "missing prompts": (["--prompts", "nowhere.jsonl"], ["--prompts", "nowhere.jsonl"]),
    "empty prompts": (["--prompts", "{tmp}/empty.jsonl"], ["--prompts", "no prompts"]),
    "broken prompts": (["--prompts", "{tmp}/broken.jsonl"], ["--prompts", "line 2"]),
    "unknown reward": (["--reward", "beauty"], ["--reward", "'beauty'", "jpeg_compressibility"]),
    "unknown held-out reward": (["--heldout-reward", "beauty"], ["--heldout-reward", "geneval"]),
    "reward weight": (["--reward", "geneval:x"], ["--reward", "NAME:WEIGHT"]),
    "reward named twice": (["--reward", "geneval,geneval:2"], ["--reward", "geneval", "twice"]),
    "reward weight is not a number": (["--reward", "geneval:nan"], ["--reward"]),
    "all reward weights zero": (["--reward", "geneval:0"], ["--reward"]),
    "unknown model": (["--model", "sd9"], ["--model", "'sd9'", "tiny", "sd35m"]),
    "window too long": (["--T", "10", "--window", "10"], ["--window", "10"]),
    "window outside": (["--T", "10", "--window-lo", "9"], ["--window-lo"]),
    "window end outside": (["--T", "10", "--window-hi", "10"], ["--window-hi"]),
    "negative window": (["--window", "-1"], ["--window"]),
    "negative noise level": (["--a", "-0.7"], ["--a"]),
    "no noise": (["--a", "0"], ["--a"]),
    "cps noise above one": (["--sde", "cps", "--a", "1.2"], ["--a", "cps"]),
    "no updates": (["--updates", "0"], ["--updates"]),
    "more updates than images": (["--P", "1", "--G", "2", "--updates", "3"], ["--updates"]),
    "negative clip": (["--clip", "-1"], ["--clip"]),
    "negative beta": (["--beta", "-1"], ["--beta"]),
    "negative train guidance": (["--train-guidance", "-1"], ["--train-guidance"]),
    "p-mix above one": (["--p-mix", "2"], ["--p-mix"]),
    "existing folder": (["--out", "{tmp}/old"], ["--out", "--resume", "--overwrite"]),
    "overwrite a file": (["--out", "{tmp}/empty.jsonl", "--overwrite"], ["--overwrite"]),
    "overwrite another folder": (["--out", "{tmp}", "--overwrite"], ["--overwrite"]),
    "resume nothing": (["--resume", "{tmp}/nowhere"], ["--resume", "nowhere"]),
    "resume another script": (["--resume", "{tmp}/other"], ["--resume", "flow_grpo.py"]),
    "resume other settings": (
        ["--resume", "{tmp}/old", "--lr", "0.5"],
        ["--resume", "--lr", "0.5"],
    ),
    "resume a falling learning rate for longer": (
        ["--resume", "{tmp}/annealed", "--iterations", "9"],
        ["--resume", "--iterations", "not 9"],
    ),
    "resume another version": (["--resume", "{tmp}/older"], ["--resume", "gone"]),
    "resume a broken file": (["--resume", "{tmp}/torn"], ["--resume", "args.json"]),
    "weights without a pipeline": (["--weights", "{tmp}"], ["--weights", "model_index.json"]),
    "missing weights": (["--weights", "./nowhere"], ["--weights", "model_index.json"]),
    "model out of reach": (
        ["--model", "sd35m", "--prompts", "tiny/prompts", "--reward", "jpeg_compressibility"],
        ["--model sd35m", "--weights FOLDER"],
    ),
    "no such device": (["--device", "cuda"], ["--device", "cpu"]),
    "device is no device": (["--device", "gpu"], ["--device", "cpu"]),
    "wandb is missing": (["--track"], ["--track", "pip install wandb"]),
}


@pytest.fixture(scope="module")
def refusals(weights, tmp_path_factory):
    """All bad command lines in one fresh interpreter: name -> (exit code, text, heavy modules)."""
    tmp = tmp_path_factory.mktemp("bad")
    (tmp / "empty.jsonl").write_text("\n")
    (tmp / "broken.jsonl").write_text('{"prompt": "a circle"}\n{"prompt": \n')
    saved = dataclasses.asdict(flow_grpo.Args(weights=weights, device="cpu", P=1, micro_batch=16))
    for name, text in {
        "old": json.dumps({"script": "flow_grpo", **saved}),
        "other": json.dumps({"script": "ddpo", **saved}),
        "annealed": json.dumps({"script": "flow_grpo", **saved, "anneal_lr": True}),
        "older": json.dumps({"script": "flow_grpo", **saved, "gone": 1}),
        "torn": '{"script": "flow_g',
    }.items():
        (tmp / name).mkdir()
        (tmp / name / "args.json").write_text(text)
        (tmp / name / "state.pt").touch()
    cases = {}
    for name, (flags, _) in BAD.items():
        flags = [flag.replace("{tmp}", str(tmp)) for flag in flags]
        base = [] if "--resume" in flags else ["--device", "cpu", "--out", str(tmp / "new")]
        if not {"--weights", "--model", "--resume"} & {*flags}:
            base += ["--weights", weights]
        cases[name] = [*base, *flags]
    run = run_python(DRIVER, json.dumps(cases))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(refusals, name):
    if name == "wandb is missing":
        pytest.importorskip("tyro")
        try:
            import wandb  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("wandb is installed")
    if name == "no such device" and torch.cuda.is_available():
        pytest.skip("there is one")
    code, text, heavy = refusals[name]
    assert code > 0, text
    assert len(text.strip().splitlines()) == 1, text
    for word in BAD[name][1]:
        assert word in text, text
    assert heavy == []


def test_the_command_line_ends_with_that_line(weights):
    run = run_python("import flow_grpo as f; f.main(f.parse_args())", "--G", "1")
    assert run.returncode == 1
    assert run.stderr.strip() == "--G: a group of 1 has no advantage; use 2 or more"


def test_help_shows_every_flag_with_its_text(monkeypatch, capsys):
    import ast

    monkeypatch.setattr(sys, "argv", ["flow_grpo.py", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        flow_grpo.parse_args()
    assert stop.value.code in (0, None)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    tree = ast.parse((ROOT / "flow_grpo.py").read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body
    texts = [n.value.value for n in body if isinstance(n, ast.Expr)][1:]
    fields = dataclasses.fields(flow_grpo.Args)
    assert len(texts) == len(fields)
    for field, text in zip(fields, texts):
        assert "--" + field.name.replace("_", "-") in shown
        assert " ".join(text.split())[:60] in shown, field.name


def parse(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py", *argv])
    return flow_grpo.parse_args()


def test_flags_win_over_presets_and_presets_over_defaults(monkeypatch, tmp_path, weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "find_weights", lambda model, weights: "here")
    args = parse(monkeypatch, "--model", "sd35m", "--device", "cpu", "--lr", "0.5")
    assert (args.G, args.guidance, args.lr, args.iterations) == (8, 4.5, 0.5, 100)
    args = parse(monkeypatch, "--model=sd35m", "--device=cpu")
    assert args.lr == 3e-4
    assert args.out == "runs/flow_grpo-sd35m-jpeg_compressibility-s0"
    args = parse(monkeypatch, "--device", "cpu", "--reward", "geneval:1,jpeg_compressibility:0.1",
                 "--seed", "3", "--P", "1", "--G", "3")  # fmt: skip
    assert args.out == "runs/flow_grpo-tiny-geneval+jpeg_compressibility-s3"
    assert args.micro_batch == 3


@pytest.mark.parametrize("model", flow_grpo.PRESETS)
def test_every_preset_is_accepted(monkeypatch, tmp_path, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "find_weights", lambda model, weights: "here")
    for P, G in ((None, None), (1, 2), (3, 5)):
        size = [] if P is None else ["--P", str(P), "--G", str(G)]
        args = parse(monkeypatch, "--model", model, "--device", "cpu", *size)
        assert args.micro_batch <= args.P * args.G


# ---- every flag, once away from its default ----

# Flags that change the numbers of a run of one iteration: name -> (value, what goes with it).
CHANGES = {
    "combine": ("reward", dict(reward="red:1,jpeg_compressibility:1")),
    "reward": ("jpeg_compressibility", {}),
    "prompts": ("{tmp}/prompts.txt", {}),
    "iterations": (2, {}),
    "P": (2, {}),
    "G": (3, {}),
    "T": (4, {}),
    "guidance": (3.0, {}),
    "lr": (1e-2, {}),
    "anneal_lr": (True, dict(iterations=2)),
    "lora_r": (2, {}),
    "lora_alpha": (16, {}),
    "weight_decay": (0.5, dict(lr=0.1)),
    "max_grad_norm": (1e-9, {}),
    "adv_std": ("none", {}),
    "adv_clip": (0.1, {}),
    "seed": (1, {}),
    "dtype": ("bfloat16", {}),
    "sde": ("cps", {}),
    "a": (0.3, {}),
    "window": (1, {}),
    "window_schedule": ("frozen", dict(T=8, window=1)),
    "window_lo": (1, {}),
    "window_hi": (1, {}),
    "window_every": (1, dict(T=8, window=1, window_schedule="progressive", iterations=2)),
    "window_stride": (2, dict(T=8, window=1, window_schedule="progressive", iterations=2,
                              window_every=1)),
    "same_latent": (True, {}),
    "updates": (1, {}),
    "clip": (0.5, dict(lr=0.1, P=2)),
    "beta": (10.0, dict(lr=0.1)),
    "kl": ("exact", dict(lr=0.1, beta=10.0)),
    "train_guidance": (3.0, {}),
}  # fmt: skip
# Flags that change what an evaluation sees.
EVALUATION = {
    "heldout_reward": "jpeg_compressibility",
    "solver": "dpm2",
    "ema": 0.5,
    "eval_prompts": 1,
    "eval_guidance": 3.0,
    "eval_T": 3,
    "p_mix": 0.0,
}
# Flags with a test of their own, and the ones that change speed, memory or files only.
ELSEWHERE = {
    "model", "weights", "micro_batch", "eval_every", "save_every", "max_fail", "device",
    "gradient_checkpointing", "compile", "out", "resume", "overwrite", "track", "curriculum",
}  # fmt: skip


def test_every_flag_is_exercised():
    names = {f.name for f in dataclasses.fields(flow_grpo.Args)}
    assert names == CHANGES.keys() | EVALUATION.keys() | ELSEWHERE


def outcome(args):
    """The trained weights and the metrics, but for the time."""
    flow_grpo.main(args)
    return state(args.out)["params"], without_time(read(args.out))


@pytest.fixture(scope="module")
def outcomes():
    return {}


def differ(a, b):
    return len(a) != len(b) or any(
        x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b)
    )


@pytest.mark.parametrize("name", CHANGES)
def test_the_flag_changes_the_training(quick, tmp_path, outcomes, name):
    (tmp_path / "prompts.txt").write_text("a green square\n")
    value, others = CHANGES[name]
    if isinstance(value, str):
        value = value.replace("{tmp}", str(tmp_path))
    key = repr(others)
    if key not in outcomes:
        outcomes[key] = outcome(quick(**others, out=str(tmp_path / "base")))
    params, rows = outcome(quick(**others, **{name: value}, out=str(tmp_path / "changed")))
    assert value != getattr(quick(**others), name)
    assert differ(params, outcomes[key][0])
    assert rows != outcomes[key][1]
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("name", EVALUATION)
def test_the_flag_changes_the_evaluation_only(quick, tmp_path, outcomes, name):
    others = dict(lr=0.1, P=4, G=2, micro_batch=8, updates=8)
    if "evaluation" not in outcomes:
        outcomes["evaluation"] = outcome(quick(**others, out=str(tmp_path / "base")))
    base, rows = outcomes["evaluation"]
    params, changed = outcome(
        quick(**others, **{name: EVALUATION[name]}, out=str(tmp_path / "changed"))
    )
    exact(params, base)
    assert changed[-1] != rows[-1]
    assert {k: v for k, v in changed[0].items() if "eval/" not in k} == {
        k: v for k, v in rows[0].items() if "eval/" not in k
    }


@pytest.mark.parametrize(
    "flags",
    [
        dict(micro_batch=1),
        dict(micro_batch=3),
        dict(gradient_checkpointing=True),
        dict(compile=True),
    ],
    ids=str,
)
def test_memory_and_speed_flags_change_nothing(quick, tmp_path, outcomes, flags, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda m: compiled.append(m) or m)  # see test_models.py
    others = dict(P=2, G=2, updates=1, beta=0.1)
    if "memory" not in outcomes:
        outcomes["memory"] = outcome(quick(**others, micro_batch=64, out=str(tmp_path / "base")))
    params, rows = outcome(quick(**{**others, **flags}, out=str(tmp_path / "changed")))
    assert len(compiled) == ("compile" in flags)
    assert_close(params, outcomes["memory"][0], rtol=0, atol=1e-4)  # Adam's first step is lr = 1e-3
    for a, b in zip(rows, outcomes["memory"][1], strict=True):
        assert a == pytest.approx(b, rel=2e-2, abs=1e-4)


def test_no_pass_is_larger_than_the_micro_batch(quick, monkeypatch):
    sizes, original = [], common.load_policy

    def load(*inputs):
        policy = original(*inputs)
        policy.vae.decoder.register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
        policy.net.register_forward_pre_hook(
            lambda m, args, kwargs: sizes.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        return policy

    monkeypatch.setattr(common, "load_policy", load)
    flow_grpo.main(quick(P=2, G=3, micro_batch=2, eval_prompts=5, beta=0.1))
    assert max(sizes) == 2


def test_eval_every_and_save_every(quick):
    args = quick(iterations=3, eval_every=2, save_every=2)
    flow_grpo.main(args)
    assert ["eval/red" in row for row in read(args.out)] == [True, False, True, True]
    samples = sorted(p.name for p in (Path(args.out) / "samples").iterdir())
    assert samples == ["00000.png", "00002.png", "00003.png"]


def test_track_logs_to_wandb(quick, monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    fake = types.SimpleNamespace(init=lambda **settings: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    args = quick(track=True)
    flow_grpo.main(args)
    assert [row for _, row in logged] == read(args.out)
    assert [step for step, _ in logged] == [0, 1]


def test_wandb_is_not_imported_unasked(quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    flow_grpo.main(quick())
