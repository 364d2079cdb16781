"""Transformers that nobody here wrote, unmodified, as stages: those of avitai-artifex.

An optional lane, as `tests/parity/test_foreign.py`: images whose condition, computed by embed, goes
along with the activation, and an encoder whose output goes along through the stages of a decoder.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models

dit = pytest.importorskip("artifex.generative_models.models.backbones.dit", exc_type=ImportError)
transformers = pytest.importorskip(
    "artifex.generative_models.core.layers.transformers", exc_type=ImportError
)

pytestmark = [pytest.mark.usefixtures("lenient"), pytest.mark.slow]
N, M, WIDTH, HEADS, LAYERS = 4, 4, 16, 2, 4


def assert_alike(pipe, found, loss, wanted):
    """Loss and gradients, each stage's and those of the ends, to 1e-5."""
    found_loss, grads = found
    assert models.distance(found_loss, loss) <= 1e-5
    stages = models.by_stage(pipe, grads)
    pairs = [*zip(stages, wanted[0], strict=True), (grads["ends"], wanted[1])]
    for pair in pairs:
        had, want = (dict(nnx.to_flat_state(tree)) for tree in pair)
        assert had.keys() == want.keys()
        for path in want:
            a, b = (np.asarray(tree[path][...]) for tree in (had, want))
            size = np.abs(b).max()
            if path[-2:] == ("key", "bias") and size <= 1e-5:
                size = 1.0  # what a softmax does not see has a gradient of rounding
            assert size, f"a gradient of zeros proves nothing: {path}"
            assert np.abs(a - b).max() <= 1e-5 * size, path


def check(model, plain, parts, given, targets, *, extras=None, **options):
    """A pipeline against `plain(model)`; ``parts(model)`` is (stages, embed, head)."""
    want, grads = nnx.jit(nnx.value_and_grad(plain))(model)
    stages, embed, head = parts(model)
    pipe = Pipeline(
        stages,
        M,
        embed=embed,
        head=head,
        loss_fn=models.squares,
        mesh=make_mesh(stage=2),
        **options,
    )
    found = pipe.value_and_grad(given, targets, extras=extras)
    of = nnx.clone(model)
    nnx.update(of, grads)  # a model of gradients, cut as the model is
    stages, embed, head = parts(of)
    ends = {"embed": embed, "head": head}
    wanted = (
        [nnx.state(stage, nnx.Param) for stage in stages],
        nnx.State({name: nnx.state(end, nnx.Param) for name, end in ends.items()}),
    )
    assert_alike(pipe, found, want, wanted)
    return pipe


# --- a diffusion transformer ---


class Patches(nnx.Module):
    """Patches of images, and the condition for all layers."""

    def __init__(self, model):
        self.patch_embed, self.pos_embed = model.patch_embed, model.pos_embed
        self.time_embed, self.label_embed = model.time_embed, model.label_embed

    def __call__(self, given):
        images, times, labels = given
        x = self.patch_embed(images)
        x = x.reshape(len(x), -1, x.shape[-1]) + self.pos_embed[...]
        return x, self.time_embed(times) + self.label_embed(labels)


class Blocks(nnx.Module):
    def __init__(self, blocks):
        self.blocks = nnx.List(blocks)

    def __call__(self, given):
        x, condition = given
        for block in self.blocks:
            x = block(x, condition)
        return x, condition


class Images(nnx.Module):
    unpatchify = dit.DiffusionTransformer.unpatchify

    def __init__(self, model):
        self.final_layer, self.num_patches = model.final_layer, model.num_patches
        self.patch_size, self.out_channels = model.patch_size, model.out_channels

    def __call__(self, given):
        return self.unpatchify(self.final_layer(*given))


def cut_images(model):
    blocks, half = list(model.blocks), LAYERS // 2
    return [Blocks(blocks[:half]), Blocks(blocks[half:])], Patches(model), Images(model)


@pytest.mark.parametrize("remat", ["stage", None])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_of_a_diffusion_transformer(schedule, remat):
    model = models.moved(
        dit.DiffusionTransformer(
            img_size=8,
            patch_size=4,
            hidden_size=WIDTH,
            depth=LAYERS,
            num_heads=HEADS,
            num_classes=5,
            rngs=nnx.Rngs(0),
        ),
        scale=0.1,
    )
    images, targets = jax.random.normal(jax.random.key(1), (2, N, 8, 8, 3))
    given = images, jnp.linspace(1.0, 40.0, N), models.words(N, most=5)
    pipe = check(
        model,
        lambda model: models.squares(model(*given), targets),
        cut_images,
        given,
        targets,
        schedule=schedule,
        remat=remat,
    )
    assert "alike" not in pipe.describe()


# --- an encoder and a decoder ---


class Two(nnx.Module):
    """An encoder with a decoder, which the package leaves to its user to join."""

    def __init__(self, kind, rngs):
        self.encoder, self.decoder = transformers.create_transformer(
            LAYERS // 2,
            LAYERS // 2,
            WIDTH,
            HEADS,
            normalize_qk=True,
            max_len=6,
            pos_encoding_type=kind,
            rngs=rngs,
        )
        self.source, self.target = (nnx.Embed(9, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, given, *, source_mask, target_mask, cross_mask):
        source, target = self.source(given["source"]), self.target(given["target"])
        encoded = self.encoder(source, source_mask)
        return self.decoder(target, encoded, target_mask, cross_mask)


class Words(nnx.Module):
    def __init__(self, model):
        self.source, self.target = model.source, model.target

    def __call__(self, given):
        return {name: getattr(self, name)(words) for name, words in given.items()}


class Encode(nnx.Module):
    def __init__(self, model):
        self.encoder = model.encoder

    def __call__(self, given, *, source_mask, target_mask, cross_mask):
        return given | {"source": self.encoder(given["source"], source_mask)}


class Decode(nnx.Module):
    def __init__(self, model):
        self.decoder = model.decoder

    def __call__(self, given, *, source_mask, target_mask, cross_mask):
        return self.decoder(given["target"], given["source"], target_mask, cross_mask)


def cut_two(model):
    return [Encode(model), Decode(model)], Words(model), None


@pytest.mark.parametrize("remat", ["stage", None])
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("1f1b", "sinusoidal"),
        ("zb_h1", "learned"),
        pytest.param("zb_h1", "rotary", marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_of_an_encoder_and_a_decoder(schedule, kind, remat):
    model = models.moved(Two(kind, nnx.Rngs(0)), scale=0.1)
    given = {
        "source": models.words(N * 6, most=9).reshape(N, 6),
        "target": models.words(N * 4, most=9, seed=1).reshape(N, 4),
    }
    lengths = jnp.arange(3, 3 + N)[:, None]
    real = (jnp.arange(6) < lengths).astype(jnp.float32)
    extras = {
        "source_mask": real,
        "target_mask": jnp.ones((N, 4)),
        "cross_mask": jnp.broadcast_to(real[:, None, :], (N, 4, 6)),
    }
    targets = jax.random.normal(jax.random.key(1), (N, 4, WIDTH))
    check(
        model,
        lambda model: models.squares(model(given, **extras), targets),
        cut_two,
        given,
        targets,
        extras=extras,
        schedule=schedule,
        remat=remat,
    )
