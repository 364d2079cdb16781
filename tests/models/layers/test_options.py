"""Options of layers: by name, in a record, and both."""

from __future__ import annotations

import inspect
from dataclasses import fields

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pipeline.layers import (
    Attention,
    AttentionOptions,
    Context,
    ExpertOptions,
    MixtureOfExperts,
    SequenceSlice,
    attend_slice,
)
from tests.support.close import assert_close, distance

X = jnp.zeros((1, 4, 2, 8))


def test_options_by_name_override_those_of_a_record():
    options = AttentionOptions(window=8, softcap=2.0, context_axis="context", context="ring")
    layer = Attention(8, 4, 2, nnx.Rngs(0), options=options, window=3, head_dim=6)
    assert (layer.rule.window, layer.rule.softcap) == (3, 2.0)
    assert layer.rule.context == Context("context", "ring")
    assert layer.out.weight.shape == (24, 8)


def test_experts_take_a_record():
    options = ExpertOptions(dispatch="capacity", bias_rate=0.1, z_weight=0.5)
    layer = MixtureOfExperts(8, 4, 4, 2, nnx.Rngs(0), options=options, z_weight=0.0)
    assert (layer.dispatch, layer.bias_rate, layer.z_weight) == ("capacity", 0.1, 0.0)
    assert layer.is_counting


def test_the_signature_of_a_layer_names_its_options():
    names = list(inspect.signature(Attention).parameters)
    assert names[:4] == ["width", "num_heads", "num_kv_heads", "rngs"]
    assert {one.name for one in fields(AttentionOptions)} <= {*names}
    names = list(inspect.signature(MixtureOfExperts).parameters)
    assert names[:5] == ["width", "hidden", "num_experts", "top_k", "rngs"]
    assert {one.name for one in fields(ExpertOptions)} <= {*names}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Attention(8, 4, 2, nnx.Rngs(0), windw=3),
            "Attention() has no option 'windw'; did you mean 'window'?",
        ),
        (
            lambda: Attention(8, 4, 2, nnx.Rngs(0), width=8),
            "Attention(): multiple values for argument 'width'",
        ),
        (
            lambda: Attention(8, 4, 2, nnx.Rngs(0), options={"window": 3}),
            "Attention(): options= is a dict, and must be an AttentionOptions",
        ),
        (
            lambda: MixtureOfExperts(8, 4, 4, 2, nnx.Rngs(0), dispach="gather"),
            "MixtureOfExperts() has no option 'dispach'; did you mean 'dispatch'?",
        ),
        (
            lambda: attend_slice(X, X, X, None, windw=3),
            "attend_slice() has no option 'windw'; did you mean 'window'?",
        ),
    ],
)
def test_options_that_there_are_not(call, text):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == text


def test_sinks_are_refused_by_kernels_of_slices_too():
    part = SequenceSlice(0, 2)
    with pytest.raises(ValueError) as caught:
        attend_slice(X, X, X, None, part, sinks=jnp.zeros(2), implementation="xla")
    assert str(caught.value) == (
        "implementation='xla' with sinks: only the formula has them; take implementation=None or "
        "'chunked'"
    )


@pytest.mark.slow
def test_options_that_are_set_later_are_those_of_the_next_call():
    layer = Attention(16, 4, 2, nnx.Rngs(0), window=4)
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    before = layer(x)
    layer.window = 2
    narrow = Attention(16, 4, 2, nnx.Rngs(0), window=2)
    assert (layer.window, layer.softcap, layer.implementation) == (2, None, None)
    assert_close(layer(x), narrow(x))
    assert distance(layer(x), before) > 1e-3
    with pytest.raises(ValueError, match=r"^window=0: how many positions a query reads is an int"):
        layer.window = 0
