"""The shape of the project: banners, shared settings, sizes, what imports what."""

import ast
import difflib
import functools
import importlib
import itertools
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAMILY = {"ddpo": "trajectory", "flow_grpo": "trajectory", "vgrpo": "x0", "dgpo": "x0"}
FAMILY |= {"baselines/rwr": "regression"}
SCRIPTS = [name for name in FAMILY if (ROOT / f"{name}.py").exists()]
FOLDERS = ("baselines", "bench", "prompts", "tiny")
TOP = sorted(path.name for path in ROOT.glob("*.py"))
ALL = [*TOP, *sorted(str(p.relative_to(ROOT)) for d in FOLDERS for p in ROOT.glob(f"{d}/*.py"))]
BANNERS = ["1. Settings", "2. Algorithm", "3. Main"]
SHARED = """
    model weights reward combine heldout_reward prompts iterations curriculum P G micro_batch T
    guidance solver lr anneal_lr lora_r lora_alpha weight_decay max_grad_norm adv_std adv_clip ema
    eval_every eval_prompts eval_guidance eval_T save_every max_fail seed device dtype
    gradient_checkpointing compile out resume overwrite track
""".split()  # noqa: SIM905
MAIN_BANNERS = ["prompts and rollout", "reward and advantage", "update", "log, save"]
# Variables of main whose assignments must be the same text in every script.
SHARED_MAIN = """
    first args train weights rewards stages watched heldout ranks policy optimizer run mine rows c
    values everyone start
""".split()  # noqa: SIM905

every_script = pytest.mark.parametrize("name", SCRIPTS)
every_pair = pytest.mark.parametrize("pair", list(itertools.combinations(SCRIPTS, 2)), ids=str)


@functools.cache
def text(name):
    return (ROOT / (name if name.endswith(".py") else name + ".py")).read_text()


@functools.cache
def tree(name):
    return ast.parse(text(name))


def module(name):
    return name.replace("/", ".")


def find(name, kind, what):
    return next(n for n in tree(name).body if isinstance(n, kind) and n.name == what)


def imports(name):
    out = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            out |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            out.add((node.module or "").partition(".")[0])
    return out


def fields(name):
    """Args: name -> (annotation, default, help), in order."""
    body = find(name, ast.ClassDef, "Args").body
    out = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr), f"{node.target.id} has no help"
            words = after.value.value
            out[node.target.id] = ast.unparse(node.annotation), ast.unparse(node.value), words
    return out


def own_fields(name):
    """Names of the fields below `# ---- this algorithm only ----`."""
    line = 1 + text(name).splitlines().index("    # ---- this algorithm only ----")
    body = find(name, ast.ClassDef, "Args").body
    return [n.target.id for n in body if isinstance(n, ast.AnnAssign) and n.lineno > line]


def test_there_is_a_script():
    assert SCRIPTS
    assert {n.removesuffix(".py") for n in TOP} <= {"common", "rewards", *FAMILY}


# ---- sizes ----


def test_number_of_files_at_the_top():
    assert len(TOP) <= 8


def test_common_is_short():
    assert len(text("common").splitlines()) <= 1270  # models, run folder, stages


@every_script
def test_a_script_is_short(name):
    assert len(text(name).splitlines()) <= 500


@pytest.mark.parametrize("name", ALL)
def test_lines_and_functions_are_short(name):
    for number, line in enumerate(text(name).splitlines(), 1):
        assert len(line) <= 100, f"{name}:{number}"
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef):
            limit = 90 if node.name == "main" else 60
            assert node.end_lineno - node.lineno + 1 <= limit, f"{name}: {node.name}"


@pytest.mark.parametrize("name", ALL)
def test_at_most_five_indents(name):
    depth = 0
    with (ROOT / name).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
            assert depth <= 5, f"{name}:{token.start[0]}"


@pytest.mark.parametrize("name", ALL)
def test_everything_public_is_documented(name):
    for node in [tree(name), *tree(name).body]:
        if isinstance(node, ast.Module) and not node.body:
            continue  # an empty __init__.py
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            public = isinstance(node, ast.Module) or not node.name.startswith("_")
            assert not public or ast.get_docstring(node), f"{name}: {getattr(node, 'name', '')}"


# ---- common.py and rewards.py ----


def test_parts_of_common():
    banners = re.findall(r"^# (?:----|====) (Part \w+)", text("common"), re.M)
    assert banners == ["Part I", "Part II", "Part III"]


def test_part_one_of_common_stands_alone():
    """Copied up to the next banner, it runs with torch alone."""
    part = text("common").partition("# ==== Part II")[0]
    code = part + "\nprint(flow_sde_step(torch.ones(1, 2), torch.ones(1, 2), 0.5, 0.4, 0.7).mean)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- scripts: order and names ----


@every_script
def test_docstring(name):
    words = ast.get_docstring(tree(name))
    assert len(words.splitlines()) <= 25
    assert re.search(r"arXiv \d{4}\.\d{5}v\d", words)
    assert (f"python -m {module(name)}" if "/" in name else f"python {name}.py") in words
    if len(SCRIPTS) > 1:  # which sibling to diff it against
        assert any(f"{other}.py" in words for other in SCRIPTS if other != name)


@every_script
def test_banners_and_their_contents(name):
    source = text(name)
    assert re.findall(r"^# ==== (.+?) =+$", source, re.M) == BANNERS
    lines = source.splitlines()
    starts = [next(i for i, line in enumerate(lines) if f"==== {b} =" in line) for b in BANNERS]
    assert {len(lines[i]) for i in starts} == {100}
    sections = {b: [] for b in BANNERS}
    for node in tree(name).body:
        for banner, start in reversed(list(zip(BANNERS, starts))):
            if node.lineno > start:
                names = [getattr(t, "id", "") for t in getattr(node, "targets", [])]
                names += [node.target.id] if isinstance(node, ast.AnnAssign) else []
                sections[banner] += names or [getattr(node, "name", type(node).__name__)]
                break
    settings, algorithm, main = (sections[b] for b in BANNERS)
    assert settings[:2] == ["Args", "PRESETS"]
    assert settings[-1] == "parse_args"
    assert [f for f in algorithm if f in ("rollout", "loss", "update")] == [
        "rollout",
        "loss",
        "update",
    ]
    assert main == ["main", "If"]
    assert source.endswith('if __name__ == "__main__":\n    main(parse_args())\n')


@every_script
def test_shared_settings(name):
    own = own_fields(name)
    shared = [f for f in fields(name) if f not in own]
    assert shared == [f for f in SHARED if f in shared]
    assert not {*own} & {*SHARED}
    for field, (_, _, words) in fields(name).items():
        assert words, field
        assert "\n" not in words, field


@every_pair
def test_shared_settings_are_the_same_word_for_word(pair):
    one, other = (fields(name) for name in pair)
    for field in SHARED:
        if field in one and field in other:
            assert (one[field][0], one[field][2]) == (other[field][0], other[field][2]), field


@every_script
def test_presets_set_known_fields(name):
    import common

    script = importlib.import_module(module(name))
    known = fields(name)
    assert script.Args().model in script.PRESETS
    for model, preset in script.PRESETS.items():
        assert model in common.MODELS
        assert preset.keys() <= known.keys() - {"model"}


@every_script
def test_main(name):
    main = find(name, ast.FunctionDef, "main")
    source = ast.get_source_segment(text(name), main)
    assert re.findall(r"# ---- (.+) ----", source) == MAIN_BANNERS
    assert "for iteration in run.iterations():" in source


def optional(name):
    """Nodes of main below `if args.X:`, X one of the script's own settings."""
    own, out = own_fields(name), set()
    for node in ast.walk(find(name, ast.FunctionDef, "main")):
        if isinstance(node, ast.If) and not node.orelse:
            test = node.test
            if isinstance(test, ast.Attribute) and ast.unparse(test.value) == "args":
                out |= {n for b in node.body for n in ast.walk(b) if test.attr in own}
    return out


def assignments(name):
    """Text of every assignment in main to the shared names, in order."""
    out, skip = {}, optional(name)
    for node in ast.walk(find(name, ast.FunctionDef, "main")):
        own = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "policy.behaviour"
        if isinstance(node, ast.Assign) and node not in skip and not own:  # --rollout
            for target in ast.walk(node.targets[0]):
                if isinstance(target, ast.Name) and target.id in SHARED_MAIN:
                    out.setdefault(target.id, []).append(ast.unparse(node))
    return out


@every_pair
def test_the_shared_lines_of_main_are_the_same(pair):
    one, other = map(assignments, pair)
    for variable in one.keys() & other.keys():
        assert one[variable] == other[variable]


@every_pair
def test_the_same_helpers_have_the_same_text(pair):
    """check_own, rollout, loss and update differ by design; parse_args and SCRIPT's uses do not."""
    one, other = (ast.unparse(find(name, ast.FunctionDef, "parse_args")) for name in pair)
    assert one == other


def diffable(name):
    """Lines outside the docstring, PRESETS and the algorithm's own Args."""
    lines = text(name).splitlines()
    skip = set(range(1, tree(name).body[0].end_lineno + 1))
    for node in tree(name).body:
        if isinstance(node, ast.AnnAssign) and node.target.id == "PRESETS":
            skip |= set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            first = lines.index("    # ---- this algorithm only ----") + 1
            skip |= set(range(first, node.end_lineno + 1))
    return [line for i, line in enumerate(lines, 1) if i not in skip]


@every_pair
def test_diff_budget(pair):
    one, other = map(diffable, pair)
    diff = difflib.unified_diff(one, other, n=0, lineterm="")
    changed = sum(line[0] in "+-" and line[:3] not in ("---", "+++") for line in diff)
    families = {FAMILY[name] for name in pair}
    assert changed <= (100 if len(families) == 1 else 240 if "regression" in families else 220)


# ---- no dead settings ----


def reads(node):
    """Attributes read from `args`, `self.args` or `a`."""
    out = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load):
            owner = n.value
            named = isinstance(owner, ast.Name) and owner.id in ("args", "a")
            if named or (isinstance(owner, ast.Attribute) and owner.attr == "args"):
                out.add(n.attr)
    return out


@every_script
def test_every_setting_is_read_beyond_its_check(name):
    used = set()
    for file in (name, "common"):
        for node in tree(file).body:
            if getattr(node, "name", "") not in ("check_args", "check_own"):
                used |= reads(node)
    unused = set(fields(name)) - used
    assert not unused


@every_script
def test_own_settings_are_read_by_the_script(name):
    used = set()
    for node in tree(name).body:
        if getattr(node, "name", "") != "check_own":
            used |= reads(node)
    assert set(own_fields(name)) <= used


# ---- imports ----

LIBRARIES = {"torch", "tyro", "tqdm", "diffusers", "transformers", "peft", "matplotlib", "wandb",
             "huggingface_hub"}  # fmt: skip


@every_script
def test_no_script_imports_another(name):
    others = {module(other).partition(".")[0] for other in FAMILY if other != name}
    assert not imports(name) & others
    assert imports(name) - {*sys.stdlib_module_names} <= {"torch", "common", "rewards"}


def test_dependency_direction():
    assert imports("common") - {*sys.stdlib_module_names} <= {*LIBRARIES, "rewards"}
    assert not imports("rewards") & {"common", *FAMILY}
    for path in ROOT.glob("tiny/*.py"):
        assert not imports(f"tiny/{path.name}") & {"common", "rewards", *FAMILY}


@pytest.mark.parametrize("name", ["common", "rewards", *SCRIPTS])
def test_imports_at_the_top_are_light(name):
    light = {"torch", "common", "rewards", *sys.stdlib_module_names}
    for node in tree(name).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert {n.partition(".")[0] for n in names} <= light


IMPORT = """
import os, random, signal, sys
from pathlib import Path
import torch

def state():
    return (
        torch.get_rng_state().tolist(), random.getstate(), torch.get_default_dtype(),
        torch.is_grad_enabled(), torch.get_num_threads(), dict(os.environ), signal.getsignal(2),
        sorted(os.listdir()), torch.backends.cuda.matmul.allow_tf32,
    )

before, modules = state(), set(sys.modules)
sys.argv = ["other.py", "--nonsense"]
for name in {names}:
    __import__(name)
assert state() == before, "an import has side effects"
print(*{{m.partition(".")[0] for m in set(sys.modules) - modules}})
"""


def test_importing_has_no_side_effects_and_loads_nothing_heavy(tmp_path):
    import os

    code = IMPORT.format(names=repr(["common", "rewards", *map(module, SCRIPTS)]))
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    heavy = {"diffusers", "transformers", "peft", "matplotlib", "torchvision", "tyro", "tqdm",
             "wandb", "scipy", "PIL", "huggingface_hub", "tiny"}  # fmt: skip
    assert not heavy & {*run.stdout.split()}
    assert len(run.stdout.splitlines()) == 1


# ---- comments ----


@pytest.mark.parametrize("name", ["common.py", *[f"{s}.py" for s in SCRIPTS]])
def test_equations_name_their_paper(name):
    """`Eq. n` alone belongs to the first paper of a script's docstring; common.py always names one."""
    if name != "common.py":
        assert "arXiv" in ast.get_docstring(tree(name))
        return
    for line in text(name).splitlines():
        if re.search(r"\bEq\. \d", line):
            assert re.search(r"\d{4}\.\d{5}|[A-Z][\w-]+GRPO|DDPO|MixGRPO", line), line
