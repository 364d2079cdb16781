"""The dtypes in which parameters are kept and in which a step computes.

Parameters may be kept in more bits than a step computes in, because an optimizer's small updates
would be lost in bfloat16 (P. Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740).
Parameters are cast where they are used. Gradients pass back through the cast and are summed in the
dtype that ``grad_dtype`` gives.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.tree import Tree

GradDtype = Any  # None, "weights" or a floating dtype
TINY, MOST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
NAN_CHECKS = {"NaN": "jax_debug_nans", "infinity": "jax_debug_infs"}  # options of JAX


def check_dtype(name: str, dtype: Any, others: str = "None, for what the model has, or ") -> Any:
    """Check a dtype in which a model is kept or computed; return its canonical form.

    Args:
      others: a text on other values of the option; if it is not empty, None is one of them and is
        returned.

    Raises:
      ValueError: the dtype is no float of 16 bits or more, or needs jax_enable_x64.
    """
    if dtype is None and others:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(
            f"{name}={dtype!r}: must be {others}a floating dtype of 16 bits or more, such as "
            f"'bfloat16'"
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(
            f"{name}={dtype!r}: JAX has no {found.name} unless jax_enable_x64 is set; set it, or "
            f"use 'float32'"
        )
    return found


def as_computed(tree: Tree, dtype: Any) -> Tree:
    """Cast real float leaves to a dtype; None casts nothing."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if _is_real(x) else x, tree)


def checks_nans() -> bool:
    """Tell whether JAX looks for NaN or infinities."""
    return any(getattr(jax.config, option) for option in NAN_CHECKS.values())


def keep_params_in(module: nnx.Module, dtype: Any) -> None:
    """Cast a module's real float parameters in place, one after the other."""
    if dtype is None:
        return
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_value(jax.tree.map(lambda x: _cast(x, dtype), variable.get_value()))


def _cast(x: Any, dtype: Any) -> Any:
    if not _is_real(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jax.jit(lambda x: x.astype(dtype), out_shardings=x.sharding)(x)


def _is_real(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
