"""Rewards: score images with one callable each, loaded only when asked for.

    reward = make_reward("geneval_soft", clip=True)
    values = reward(images, prompts, metadata)      # (B,) float32, native scale, NaN = not scored

Nothing is rescaled, clipped or averaged here beyond what the source of a reward does itself. This
file imports torch and the standard library; what else a reward needs, its factory imports.
"""

import inspect
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Metadata = Mapping[str, Any]  # one prompt in GenEval's JSONL format
Scorer = Callable[[Tensor, Sequence[str], Sequence[Metadata]], Iterable[float]]

log = logging.getLogger("rewards")


class RewardUnavailable(RuntimeError):
    """A package, file or server that a reward needs is missing; one line with the remedy."""


# --------------------------------------------------------------------------------------------------
# The contract: what every reward accepts and returns
# --------------------------------------------------------------------------------------------------


def to_uint8(images: Tensor) -> Tensor:
    """round(255 x) in fp32 for any float dtype in [0, 1]; uint8 passes (ddpo-pytorch@1958463)."""
    if images.dtype == torch.uint8:
        return images
    return (images.float() * 255).round().clamp(0, 255).to(torch.uint8)


class Reward:
    """(images (B, 3, H, W), prompts, metadata=None) -> (B,) float32 on the images' device, no grad.

    images: float in [0, 1] of any float dtype, or uint8; a broken contract is a ValueError. A
    sample that cannot be scored (non-finite pixels or score, bad metadata, an exception) is NaN,
    with one warning a call; the others keep their score. kind: "cpu", "gpu" (on `device`), "http".
    """

    def __init__(
        self,
        score: Scorer,
        kind: str = "cpu",
        device: str | torch.device = "cpu",
        check: Callable[[Any], None] | None = None,
        self_test_case: Callable[[], tuple[Tensor, Sequence[Metadata]]] | None = None,
    ) -> None:
        self.name = "reward"
        self.kind = kind
        self.batch_size = 16
        self._score, self._check, self._self_test_case = score, check, self_test_case
        self._device = device if kind == "gpu" else "cpu"

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None
    ) -> Tensor:
        _check_images(images)
        B = len(images)
        _check_length("prompts", prompts, B)
        if metadata is None and self._check is not None:
            raise ValueError(f"reward {self.name!r} needs metadata: one GenEval dict per image")
        metas = [{}] * B if metadata is None else metadata
        _check_length("metadata", metas, B)

        errors = self._unusable(images, metas)  # sample index -> reason
        usable = [i for i in range(B) if i not in errors]
        values = torch.full((B,), math.nan)
        for start in range(0, len(usable), self.batch_size):
            self._score_into(
                values, errors, usable[start : start + self.batch_size], images, prompts, metas
            )
        if errors:
            first = min(errors)
            log.warning(
                f"reward {self.name!r}: {len(errors)} of {B} samples not scored (NaN); "
                f"sample {first}: {errors[first]}"
            )
        return values.to(images.device)

    def _unusable(self, images: Tensor, metas: Sequence[Metadata]) -> dict[int, str]:
        errors = {}
        finite = images.isfinite().flatten(1).all(1).tolist()
        for i, meta in enumerate(metas):
            if not finite[i]:
                errors[i] = "non-finite pixels"
            elif self._check is not None:
                try:
                    self._check(meta)
                except ValueError as error:
                    errors[i] = str(error)
        return errors

    def _score_into(
        self,
        values: Tensor,
        errors: dict[int, str],
        chosen: list[int],
        images: Tensor,
        prompts: Sequence[str],
        metas: Sequence[Metadata],
    ) -> None:
        """Score the chosen samples; when a batch raises, each of its samples is tried alone."""
        batch = to_uint8(images[chosen]).to(self._device)
        try:
            scores = list(
                self._score(batch, [prompts[i] for i in chosen], [metas[i] for i in chosen])
            )
            if len(scores) != len(chosen):
                raise ValueError(f"{len(scores)} scores for {len(chosen)} images")
            rounded = torch.tensor([float(score) for score in scores])
        except RewardUnavailable:
            raise
        except Exception as error:
            if len(chosen) == 1:
                errors[chosen[0]] = _one_line(error)
                return
            for i in chosen:
                self._score_into(values, errors, [i], images, prompts, metas)
            return
        for i, value in zip(chosen, rounded, strict=True):
            if value.isfinite():
                values[i] = value
            else:
                errors[i] = f"the score is {value.item()}"

    def self_test(self) -> None:
        """Score pictures whose answer is known, if any: RuntimeError unless every score is 1."""
        if self._self_test_case is None:
            return
        images, metas = self._self_test_case()
        scores = self(images, [str(meta.get("prompt", "")) for meta in metas], metas).tolist()
        if not scores or any(score != 1 for score in scores):
            raise RuntimeError(
                f"reward {self.name!r} fails its self-test: scores {scores} where all must be 1"
            )


def _check_images(images: Tensor) -> None:
    wanted = "images must be a (B, 3, H, W) tensor, float in [0, 1] or uint8"
    if not isinstance(images, Tensor):
        raise ValueError(f"{wanted}, got {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise ValueError(f"{wanted}, got shape {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"{wanted}, got dtype {images.dtype}")
    finite = images[images.isfinite()].float()
    if finite.numel() and (finite.min() < 0 or finite.max() > 1):
        raise ValueError(f"{wanted}, got values in [{finite.min():.4g}, {finite.max():.4g}]")


def _check_length(what: str, values: object, B: int) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{what} must be a list, one entry per image, got {type(values).__name__}")
    if len(values) != B:
        raise ValueError(f"{what} has {len(values)} entries for {B} images")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# --------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------

Factory = Callable[..., Reward]  # (device, dtype, **options) -> Reward
REWARDS: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: file a factory under a name of REWARDS."""
    return lambda factory: REWARDS.setdefault(name, factory)


def make_reward(
    name: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch_size: int = 16,
    **opts: Any,
) -> Reward:
    """Load a reward; ValueError: bad name or option, RewardUnavailable: a missing dependency.

    device and dtype are where and how its network runs (rewards without one ignore them);
    batch_size is the most images scored at once and never changes a score.
    """
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; known rewards: {', '.join(sorted(REWARDS))}")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    known = [
        option
        for option in inspect.signature(REWARDS[name]).parameters
        if option not in ("device", "dtype")
    ]
    for option in opts:
        if option not in known:
            raise ValueError(
                f"reward {name!r} has no option {option!r}; its options: {', '.join(known)}"
            )
    reward = REWARDS[name](device=device, dtype=dtype, **opts)
    reward.name, reward.batch_size = name, batch_size
    return reward


# --------------------------------------------------------------------------------------------------
# JPEG size
# --------------------------------------------------------------------------------------------------


def jpeg_kilobytes(image: Tensor) -> float:
    """kB (1000 bytes) of a uint8 (3, H, W) image as JPEG of quality 95 (ddpo-pytorch@1958463)."""
    from PIL import Image

    buffer = io.BytesIO()
    pixels = image.permute(1, 2, 0).contiguous().numpy()  # (H, W, 3)
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)
    return len(buffer.getvalue()) / 1000


def _jpeg(sign: int, scale: float) -> Reward:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise RewardUnavailable("JPEG rewards need Pillow: pip install pillow") from error
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"scale must be a finite number > 0, got {scale!r}")
    return Reward(
        lambda images, prompts, metas: [sign * jpeg_kilobytes(image) / scale for image in images]
    )


@register("jpeg_compressibility")
def _(device: object, dtype: object, scale: float = 1) -> Reward:
    """-kB / scale; ddpo-pytorch has scale 1, flow_grpo@ac4c86e 500."""
    return _jpeg(-1, scale)


@register("jpeg_incompressibility")
def _(device: object, dtype: object, scale: float = 1) -> Reward:
    """kB / scale."""
    return _jpeg(1, scale)
