"""Models of images and of physics from other packages."""

from __future__ import annotations

import importlib.util
import sys
from unittest.mock import MagicMock

import flax.nnx
import jax.numpy as jnp
from flax import nnx

from tests.splitting.parity import cross_entropy, squares
from tests.zoo.entry import WORDS, Case, Entry, N, normal, stirred, words

# --- glue: what a user writes beside `split(model, 4, *batch, call=...)` ---


def of_dit(model, images, times, labels):
    return model(images, times, labels, deterministic=True)


# --- models ---


def dit() -> Case:
    """An embedding of times and labels modulates every block."""
    from artifex.generative_models.models.backbones.dit import DiffusionTransformer

    sizes = {"img_size": 8, "patch_size": 4, "hidden_size": 16, "depth": 5, "num_heads": 2}
    model = stirred(DiffusionTransformer(num_classes=4, rngs=nnx.Rngs(0), **sizes))
    args = normal(N, 8, 8, 3), 0.1 * jnp.arange(N), jnp.arange(N) % 4
    return Case(model, args, normal(N, 8, 8, 3, seed=2), squares, of_dit)


def without_torch() -> None:
    """Stand in for torchvision, which jaxnn's transforms of images alone use."""
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            sys.modules.setdefault(name, MagicMock())


def resnet() -> Case:
    """Convolutions, and statistics of BatchNorm that blocks write."""
    without_torch()
    from jaxnn.models import resnet as module

    model = module.ResNet(
        module.BasicBlock,
        (2, 2, 2, 2),
        num_classes=WORDS,
        channels=(8, 8, 16, 16),
        rngs=nnx.Rngs(0),
    )
    return Case(stirred(model), (normal(N, 32, 32, 3),), words()[:, 0], cross_entropy)


def fno() -> Case:
    """Convolutions in Fourier space; the last layer is called by its methods."""
    from opifex.neural.operators.fno.base import FourierNeuralOperator

    model = FourierNeuralOperator(1, 1, hidden_channels=8, modes=3, num_layers=5, rngs=nnx.Rngs(0))
    return Case(stirred(model), (normal(N, 1, 8, 8),), normal(N, 1, 8, 8, seed=2), squares)


def transolver() -> Case:
    """Attention among learned slices of a mesh; the last block projects."""
    from opifex.neural.operators.specialized.transolver import Transolver, TransolverConfig

    config = TransolverConfig(
        space_dim=2, fun_dim=1, out_dim=1, hidden_dim=16, num_heads=2, num_layers=5, slice_num=4
    )
    model = stirred(Transolver(config, rngs=nnx.Rngs(0)))
    return Case(
        model, (normal(N, 12, 2), normal(N, 12, 1, seed=3)), normal(N, 12, 1, seed=2), squares
    )


def uno() -> Case:
    """A U-shaped neural operator: resolutions change, skips go from early to late blocks."""
    from opifex.neural.operators.specialized.uno import create_uno

    model = create_uno(
        hidden_channels=8,
        uno_out_channels=[4, 8, 8, 8, 4],
        uno_n_modes=[[2, 2]] * 5,
        rngs=nnx.Rngs(0),
    )
    return Case(stirred(model), (normal(N, 1, 8, 8),), normal(N, 1, 8, 8, seed=2), squares)


def dino() -> Case:
    """A vision transformer with a class token and register tokens.

    The package was written for a flax whose modules lay in `flax.nnx.nnx`.
    """
    sys.modules.setdefault("flax.nnx.nnx", flax.nnx)
    sys.modules.setdefault("flax.nnx.nnx.module", flax.nnx.module)
    from jimmy.models.vit import DinoV2

    model = DinoV2(img_size=8, patch_size=4, embed_dim=16, depth=5, num_heads=2, rngs=nnx.Rngs(0))
    return Case(stirred(model), (normal(N, 8, 8, 3),), normal(N, 6, 16, seed=2), squares)


STATE = (("state", nnx.BatchStat),)
OTHERS = (
    Entry("Diffusion transformer (DiT)", "avitai-artifex", dit, (of_dit,)),
    Entry("ResNet with BatchNorm", "jaxnn", resnet, pipe=STATE, by_microbatch=True),
    Entry("Fourier neural operator (FNO)", "opifex", fno),
    Entry("Transolver", "opifex", transolver),
    Entry("U-shaped neural operator (U-NO)", "opifex", uno),
    Entry("DINOv2", "jimmy-vision", dino),
)
