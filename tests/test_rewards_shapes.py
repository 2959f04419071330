"""The GenEval rewards with the detector of the embedded world."""

import pytest
import torch

from rewards import make_reward

world = pytest.importorskip("tiny.world")
CIRCLE = world.Shape("circle", "red", 16.0, 16.0, 10.0)
SQUARE = world.Shape("square", "blue", 46.0, 16.0, 10.0)
SECOND = world.Shape("circle", "red", 16.0, 46.0, 10.0)
THIRD = world.Shape("circle", "green", 46.0, 46.0, 10.0)


def picture(*shapes) -> torch.Tensor:
    return world.render(world.Scene(tuple(shapes), 0.95))


def scores(name: str, images: list[torch.Tensor], meta: dict, **opts) -> list[float]:
    B = len(images)
    return make_reward(name, **opts)(torch.stack(images), [""] * B, [meta] * B).tolist()


@pytest.mark.parametrize("name", ["geneval", "geneval_soft"])
def test_self_test_passes(name):
    make_reward(name, detector="shapes").self_test()


def test_a_relation_and_colours():
    meta = {
        "tag": "position",
        "include": [
            {"class": "circle", "count": 1, "color": "red"},
            {"class": "square", "count": 1, "position": ["right of", 0]},
        ],
    }
    other = world.Shape("square", "blue", 16.0, 46.0, 10.0)
    images = [picture(CIRCLE, SQUARE), picture(CIRCLE, other), picture(SQUARE), picture()]
    assert scores("geneval", images, meta) == [1, 0, 0, 0]
    soft = scores("geneval_soft", images, meta)
    # wrong relation: 1, 1 | 1, 0, 1; the square alone: 0, 0 | 1, 0 (no target)
    assert soft == pytest.approx([1, 4 / 5, 1 / 4, 0])


def test_extra_objects_cost_at_most_everything_when_clipped():
    meta = {"tag": "single_object", "include": [{"class": "circle", "count": 1}]}
    images = [picture(CIRCLE), picture(CIRCLE, SECOND), picture(CIRCLE, SECOND, THIRD)]
    assert scores("geneval", images, meta) == [1, 1, 1]
    assert scores("geneval_soft", images, meta) == [1, 0, -1]
    assert scores("geneval_soft", images, meta, clip=True) == [1, 0, 0]


def test_counting_wants_the_exact_number():
    meta = {
        "tag": "counting",
        "include": [{"class": "circle", "count": 2}],
        "exclude": [{"class": "circle", "count": 3}],
    }
    images = [picture(CIRCLE, SECOND), picture(CIRCLE), picture(CIRCLE, SECOND, THIRD)]
    assert scores("geneval", images, meta) == [1, 0, 0]
