"""rewards.py: the contract of every reward, JPEG size, GenEval's rule, prompt files."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from rewards import (
    jpeg_kilobytes,
    make_reward,
    to_uint8,
)

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "rewards.json").read_text())
ROOT = Path(__file__).parent.parent


def load_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reward_inputs", GOLDEN / "reward_inputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inputs = load_inputs()


def noise(B: int, size: int = 16) -> torch.Tensor:
    return torch.stack([torch.from_numpy(inputs.hash_u8((3, size, size), i)) for i in range(B)])


# ---- the vector file ----

SECTIONS = {
    "jpeg": "used",
    "geneval": "used",
    "ocr": "belongs to ocr and unifiedreward, not built yet",
    "legacy": "belongs to pickscore, clipscore, aesthetic and imagereward, not built yet",
    "hps": "belongs to hpsv2, not built yet",
    "fill_rule": "belongs to the rewards with a network, not built yet",
    "prompts": "belongs to the rewards with a text encoder, not built yet",
    "tiny_clip": "belongs to pickscore and clipscore, not built yet",
}
GENEVAL_SECTIONS = {
    "cases": "used",
    "relative_position": "used",
    "fuzz_equal": "a count of random cases, no numbers to compare; test_geneval_equals_the_oracle",
    "compute_iou_plus1": "only used when overlaps are suppressed, which the benchmark does not do",
    "colour_templates": "belongs to the detector of photographs, not built yet",
    "palette_stub": "belongs to the detector of photographs, not built yet",
    "object_names": "belongs to the detector of photographs, not built yet",
}


def test_every_section_of_the_vectors_is_used_or_says_why_not():
    assert set(VECTORS) == set(SECTIONS)
    assert set(VECTORS["geneval"]) == set(GENEVAL_SECTIONS)
    assert set(VECTORS["jpeg"]) == {"pillow", "libjpeg_turbo", "note", "float_case", "rows"}


# ---- JPEG ----


@pytest.mark.parametrize("row", VECTORS["jpeg"]["rows"], ids=lambda r: f"{r['image']}-{r['size']}")
def test_jpeg_vectors(row):
    image = torch.from_numpy(inputs.test_image(row["image"], row["size"])).permute(2, 0, 1)
    assert jpeg_kilobytes(image) == row["bytes"] / 1000 == row["ddpo_incompressibility_kb"]

    def score(name: str, **opts: float) -> float:
        return make_reward(name, **opts)(image[None], [""]).item()

    f32 = np.float32
    assert score("jpeg_incompressibility") == f32(row["ddpo_incompressibility_kb"])
    assert score("jpeg_compressibility") == f32(row["ddpo_compressibility"])
    assert score("jpeg_compressibility", scale=500) == f32(row["flow_grpo_compressibility"])
    assert score("jpeg_incompressibility", scale=500) == f32(-row["flow_grpo_compressibility"])


def test_jpeg_rounds_floats_to_the_nearest_level():
    levels = torch.from_numpy(inputs.test_image("sine", 64)).permute(2, 0, 1)[None]
    shifted = (levels.float() / 255 + 0.3 / 255).clamp(0, 1)
    assert torch.equal(to_uint8(shifted), levels)
    kb = make_reward("jpeg_incompressibility")(shifted, [""]).item()
    assert kb == np.float32(VECTORS["jpeg"]["float_case"]["kb"])
    lowered = (levels.float() / 255 - 0.3 / 255).clamp(0, 1)  # truncation would lose a level
    assert torch.equal(to_uint8(lowered), levels)


def test_jpeg_of_images_that_are_not_square():
    image = noise(1)[0]
    wide = torch.cat([image, image], dim=2)  # (3, 16, 32)
    tall = wide.transpose(1, 2)
    assert jpeg_kilobytes(wide) > jpeg_kilobytes(image)
    assert abs(jpeg_kilobytes(wide) - jpeg_kilobytes(tall)) < 0.2


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, "500"])
def test_jpeg_refuses_a_bad_scale(scale):
    with pytest.raises(ValueError, match="scale must be a finite number > 0"):
        make_reward("jpeg_compressibility", scale=scale)
