"""All code that depends on a release of JAX or flax, or on their private names.

It is tested on jax 0.10.2 and 0.12. Each use names the releases in which it was seen and what could
replace it. Classes are imported and not compared by name, so that a release without one fails here
at once. Errors are known only by their text, so `tests/unit_collectives/test_compat.py` provokes
them.

*Varying* is shard_map's word: a value varies over a mesh axis if ranks along that axis may hold
different values. JAX tracks this in the type of every array inside `jax.shard_map(...,
check_vma=True)`, and inserts the reductions of gradients from these types.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

# Private, seen from 0.10.2 to 0.12.0. `jax.extend` has no effects. If it had, or if an equation
# declared whether it may be repeated, these could go.
from jax._src.callback import IOEffect, OrderedIOEffect  # isort: skip
from jax._src.debugging import OrderedDebugEffect  # isort: skip
from jax._src.core import NamedAxisEffect, extend_axis_env_nd, to_concrete_value  # isort: skip
from jax._src.state.types import AccumEffect, ReadEffect, WriteEffect  # isort: skip

# Private, seen from 0.10.2 to 0.12.0: the errors of `checkify` with their own text have no public
# base class.
from jax._src.checkify import ErrorEffect, JaxException  # isort: skip

# Private, seen from 0.10.2 to 0.12.0: the value of a `jit` equation's shardings if it has none. A
# public predicate could replace it.
from jax._src.named_sharding import UnspecifiedValue  # isort: skip

# Private, seen from 0.10.2 to 0.12.0: the coordination service's client and this process's number,
# and the detection of the surrounding cluster. A public key-value store, and a public way to get
# this process's number without connecting, could replace them.
from jax._src.clusters import ClusterEnv  # isort: skip
from jax._src.distributed import global_state  # isort: skip

Axes = str | tuple[str, ...]
Tree = TypeVar("Tree")

# Whether JAX keeps refs whole if they are differentiated, or belong to a function that JAX must not
# split. It does in 0.12, not in 0.10.2; 0.11 was not tried. This goes with the last jax of Python
# 3.11, and most of `pipeline.core.autodiff.in_place` goes with it.
REFS_ARE_WHOLE = jax.__version_info__ >= (0, 12)

HOST_MEMORY = "pinned_host"  # jax's name of the memory of a device's host

CheckError = JaxException  # the base class of the errors that a failed check raises

_HARMLESS = NamedAxisEffect, ReadEffect, WriteEffect, AccumEffect
_ONCE = IOEffect, OrderedIOEffect
# Texts of the errors of reverse mode through the kernel's refs, seen in 0.10.2 and in 0.12.0. A
# public class of such errors could replace them.
_OF_REFS = "AbstractRef", "Linearization failed"


# --- varying types ---


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[str]:
    """The manual mesh axes over which one array varies; empty outside shard_map."""
    # Up to jax 0.9 this was `.vma`, which is gone from 0.10 on.
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying_in(aval: Any, otherwise: Any = ()) -> Any:
    """Return the sorted manual mesh axes over which values of a type vary.

    Args:
      aval: a type, or an array whose type counts.
      otherwise: the result if the type does not track varying axes.
    """
    aval = jax.typeof(aval) if isinstance(aval, jax.Array) else aval
    found = getattr(aval, "manual_axis_type", None)
    return otherwise if found is None else tuple(sorted(found.varying))


def manual_axes(axes: Axes) -> tuple[str, ...]:
    """List the axes that the surrounding shard_map is manual over, in the order given.

    Empty outside shard_map; an axis that shard_map leaves to the compiler (auto) is omitted.

    Raises:
      ValueError: inside shard_map, an axis that the mesh does not have.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ()
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"axes={axes!r}: the mesh has no axis {unknown[0]!r}; its axes are "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    return tuple(name for name in names if name in mesh.manual_axes)


def tracks_varying(axis: str) -> bool:
    """Tell whether the surrounding shard_map over `axis` runs with `check_vma=True`."""
    # pcast costs nothing at run time, and with check_vma=False it does not change the type.
    return axis in varying_axes(jax.lax.pcast(jnp.zeros(()), axis, to="varying"))


def vary(tree: Tree, axes: Axes) -> Tree:
    """Mark every leaf as varying over `axes`; the values stay as they are.

    Loop carries, `lax.cond` branches and `jax.new_ref` contents must agree on the axes over which
    they vary. `jax.lax.pcast` raises on an axis over which an array already varies; this function
    adds only the missing axes. It does nothing outside shard_map, and for axes left to the
    compiler.

    The transpose is a sum: the gradient of a value that was replicated before `vary` is the total
    over the ranks that used it.

    Args:
      tree: arrays of any shape and dtype.
      axes: a mesh axis or several.

    Raises:
      ValueError: inside shard_map, an axis that the mesh does not have.
    """
    wanted = manual_axes(axes)

    def one(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        have = varying_axes(x)
        missing = tuple(axis for axis in wanted if axis not in have)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def typed_as(aval: Any, others: Sequence[Any]) -> Any:
    """Return the type of an array, varying over the axes of the most varying of `others`."""
    widest = max(others, key=lambda o: len(o.manual_axis_type.varying))
    spec = PartitionSpec(*(None,) * len(aval.shape))
    where = NamedSharding(widest.sharding.mesh, spec)
    return aval.update(sharding=where, manual_axis_type=widest.manual_axis_type)


def is_on_host(aval: Any) -> bool:
    """Tell whether a type, or a traced value, is in host memory; jax 0.10.2 to 0.12."""
    # A traced value's own attribute raises ValueError from 0.12 on.
    aval = jax.typeof(aval) if isinstance(aval, jax.Array) else aval
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def to_host(x: jax.Array) -> jax.Array:
    """Put a traced array into host memory; `jax.memory` has no stable release yet."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: jax.Array) -> jax.Array:
    """Put a traced array into device memory."""
    return jax.device_put(x, jax.memory.Space.Device)


def put_on_host(x: Any) -> Any:
    """Move an array, traced or not, to the host memory of its devices."""
    if isinstance(x, jax.core.Tracer):
        return to_host(x)
    return jax.device_put(x, x.sharding.with_memory_kind(HOST_MEMORY))


def on_device(tree: Tree) -> Tree:
    """Put the tree's traced arrays that are in host memory into device memory."""

    def one(x: Any) -> Any:
        return to_device(x) if isinstance(x, jax.core.Tracer) and is_on_host(x) else x

    return jax.tree.map(one, tree)


def has_host_memory(devices: Iterable[jax.Device]) -> bool:
    """Tell whether programs for these devices can keep arrays in host memory.

    Described devices, and devices of other processes, do not list their memories; then TPUs and
    GPUs count as having host memory.
    """
    for device in devices:
        try:
            kinds = [memory.kind for memory in device.addressable_memories()]
        except (NotImplementedError, RuntimeError, ValueError, AttributeError):
            kinds = []
        # Devices of other hosts have an empty list.
        known = HOST_MEMORY in kinds if kinds else device.platform in ("tpu", "gpu", "cuda", "rocm")
        if not known:
            return False
    return True


def typeless(aval: Any) -> Any:
    """Return the type of an array, varying over no axis."""
    return aval.update_manual_axis_type(jax.typeof(0.0).manual_axis_type)


def untyped() -> AbstractContextManager[None]:
    """Make a context that does not track varying types, as shard_map with `check_vma=False`.

    Private to JAX, seen in 0.10.2 and 0.12. There is no public way to trace a Pallas kernel within
    a shard_map that tracks types, unless the kernel's author declared the types of its results. A
    `jax.shard_map(..., check_vma=False)` that is allowed inside another shard_map over the same
    axes could replace this, and most of `collectives.local`.
    """
    from jax._src import config

    context: AbstractContextManager[None] = config._check_vma(False)  # noqa: SLF001
    return context


# --- platforms ---


def platform() -> str:
    """Return the platform of the current trace, "cpu", "gpu" or "tpu"; from the mesh if any.

    The devices of a mesh may be described and absent, while this process has other devices.
    """
    # Abstract meshes have had an attribute for the devices of their mesh since jax 0.6.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def is_gpu() -> bool:
    """Tell whether the current trace is for GPUs, which may be described."""
    # The platform of described GPUs is the name of their runtime.
    return platform() in ("gpu", "cuda", "rocm")


def device_kind() -> str:
    """Return the device kind of the current trace, such as "TPU v6 lite"; from the mesh if any."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str((device or jax.devices()[0]).device_kind)


def has_cudnn() -> bool:
    """Tell whether this process can call cuDNN. Private to JAX, seen in 0.10.2 and 0.12.

    `jax.nn.dot_product_attention(implementation="cudnn")` raises if the process cannot call cuDNN;
    a function that tells so beforehand could replace this.
    """
    from jax._src.lib import cuda_versions

    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # the library is not installed
        return False


# --- jaxprs ---


def loop_sizes(eqn: Any) -> tuple[int, int]:
    """Return the number of constants of a `scan`, and the number of its carried values.

    Up to 0.11 they are parameters, in 0.12 lengths of trees. A reader of a scan's equation in
    `jax.extend` could replace this.
    """
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())
    return len(consts), len(carry)


def called(eqn: Any) -> Any:
    """Return the jaxpr that the equation of a call runs.

    Under `jax_remat3` and `jax_custom_vjp3`, and in `jax.experimental.hijax`, a call is an object
    with a method that defines its computation; seen in 0.12.0. In 0.10.2 JAX itself fails under
    these flags, when it transposes a slice within `jax.checkpoint`, so they are not tested there. A
    `jaxprs_in_params` of `jax.extend` that knows such objects could replace this.
    """
    params = eqn.params
    if "_prim" not in params:
        return params["jaxpr" if "jaxpr" in params else "call_jaxpr"]
    types = [var.aval for var in eqn.invars]
    return jax.make_jaxpr(lambda *given: eqn.primitive.to_lojax(*given, **params))(*types)


def lowers_what_it_holds(primitive: Primitive) -> None:
    """Declare that the lowering of a primitive traces the jaxpr in its parameters again.

    For a primitive that holds calls as in `called`, JAX asks through a private method for another
    rule in addition to its lowering; seen in 0.12.0, without effect in 0.10.2.
    """
    primitive.is_high = lambda *_, **__: False  # type: ignore[method-assign]


def custom_vjp(
    f: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    nondiff_argnums: tuple[int, ...],
) -> Callable[..., Any]:
    """Make a `jax.custom_vjp` whose forward rule sees, by symbolic zeros, what is differentiated.

    With `jax_custom_vjp3`, seen in 0.12.0, `jax.checkpoint` marks all operands as differentiated,
    unless it is to call the function, and not its rule, for the second time. The way to ask for
    this is private, and is refused without that flag. A `jax.checkpoint` that marks the
    differentiated operands could replace it.
    """
    plain, called_again = (jax.custom_vjp(f, nondiff_argnums) for _ in range(2))
    for function in (plain, called_again):
        function.defvjp(forward, backward, symbolic_zeros=True)
    called_again.optimize_remat = True

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        is_new = jax.__version_info__ >= (0, 12) and getattr(jax.config, "jax_custom_vjp3", True)
        return (called_again if is_new else plain)(*args)

    return call


def fixes_shardings(eqn: Any) -> bool:
    """Tell whether the equation of a `jit` fixes shardings of operands or results."""
    params = eqn.params
    fixed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return not all(isinstance(sharding, UnspecifiedValue) for sharding in fixed)


def live(jaxpr: Any, *, keep_inputs: bool | list[bool]) -> tuple[Any, list[bool]]:
    """Remove the equations of a jaxpr that no output needs; tell which inputs some output needs.

    `jax.interpreters` is public but documented as internal; seen from 0.10.2 to 0.12.0. Dead code
    elimination in `jax.extend` could replace it.

    Args:
      keep_inputs: whether inputs that no output needs stay inputs, of all inputs or of each.
    """
    wanted = [True] * len(jaxpr.outvars)
    found, used = partial_eval.dce_jaxpr(jaxpr, wanted, instantiate=keep_inputs)
    return found, list(used)


def without_refs(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays in which values replace mutable buffers (`jax.new_ref`).

    A write to a ref returns nothing, so a transformation that selects a jaxpr's equations by their
    results drops the write. Values in place of refs can be split and differentiated. JAX's own
    derivatives of refs that are made in the body of a loop are wrong in 0.10.2 and in 0.12.0.

    The function that discharges the refs of a jaxpr is private, seen in 0.10.2 and 0.12.0; a public
    function in `jax.ref` could replace it.
    """

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        closed, like = jax.make_jaxpr(f, return_shape=True)(*args)
        leaves = jaxpr_as_fun(discharged(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    return call


def discharged(closed: Any) -> Any:
    """Replace the refs that a closed jaxpr makes by values, as in `without_refs`."""
    from jax._src.state.discharge import discharge_state

    return discharge_state(closed, lower=False)  # keeps custom derivatives


# --- effects and errors ---


def has_effect(effects: Iterable[Any]) -> bool:
    """Tell whether there is an effect other than effects of refs and mesh axes, such as a print."""
    return not all(isinstance(effect, _HARMLESS) for effect in effects)


def may_not_repeat(effects: Iterable[Any]) -> bool:
    """Tell whether there is an effect of `io_callback`, whose callers count its calls."""
    return any(isinstance(effect, _ONCE) for effect in effects)


def is_ordered(effects: Iterable[Any]) -> bool:
    """Tell whether a callback has ``ordered=True``, which JAX allows on one device only."""
    return any(isinstance(effect, OrderedIOEffect | OrderedDebugEffect) for effect in effects)


def has_check(effects: Iterable[Any]) -> bool:
    """Tell whether there is an effect of a check of `checkify`."""
    return any(isinstance(effect, ErrorEffect) for effect in effects)


def is_of_refs(error: Exception) -> bool:
    """Tell whether an error is JAX's, from reverse mode through a function that writes to refs."""
    return any(text in str(error) for text in _OF_REFS)


def renamed_errors(
    error: checkify.Error, where: Sequence[Any], rename: Callable[..., Any]
) -> checkify.Error:
    """Split an error of `checkify` into one exception per failed check.

    The flattened form of an error is private, seen from 0.10.2 to 0.12.0. A way to map over the
    exceptions of a `checkify.Error` could replace this.

    Args:
      error: the error that `checkify.checkify` returned.
      where: int32 scalars that the exceptions also hold.
      rename: a function that makes an exception from ``where`` and the check's own exception, and
        flattens to both.
    """
    (failed, codes, payloads), kinds = error.tree_flatten()
    types = tuple(jax.ShapeDtypeStruct((), jnp.int32) for _ in where)
    names = {
        effect: ErrorEffect(effect.error_type, (*types, *effect.shape_dtypes)) for effect in failed
    }

    def wrapped(kind: Any) -> Any:
        of_check = jax.tree.unflatten(kind, [0] * kind.num_leaves)
        return jax.tree.structure(rename((0,) * len(where), of_check))

    return checkify.Error(
        {names[effect]: value for effect, value in failed.items()},
        {names[effect]: code for effect, code in codes.items()},
        {code: wrapped(kind) for code, kind in kinds.items()},
        {names[effect]: [*where, *leaves] for effect, leaves in payloads.items()},
    )


def concrete(x: Any) -> jax.Array | None:
    """Return the array that a derivative's tracer represents; None if there is none."""
    value: jax.Array | None = to_concrete_value(x)
    return value


def axis_of_size(axis: str, size: int) -> AbstractContextManager[None]:
    """A context in which `jax.lax.axis_size` of an axis is ``size``."""
    context: AbstractContextManager[None] = extend_axis_env_nd([(axis, size)])
    return context


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """A context in which no mesh of `jax.set_mesh` is in force; it also opens under `jax.grad`."""
    from jax._src import config, mesh

    setting: Any = getattr(mesh, "device_context", None) or config.device_context
    before = setting.swap_local(mesh.empty_concrete_mesh)
    try:
        with jax.sharding.use_abstract_mesh(mesh.empty_abstract_mesh):
            yield
    finally:
        setting.set_local(before)


# --- processes ---


def coordination() -> tuple[Any, int]:
    """Return the client of jax's coordination service, and the number of this process."""
    return global_state.client, global_state.process_id


def find_cluster(*known: Any, seconds: int) -> tuple[Any, ...]:
    """Find (coordinator, processes, process, local devices) of the cluster; None if unknown.

    Args:
      known: coordinator, processes and process; a value that is not None is not detected.
      seconds: the time for which jax may wait for a name service.
    """
    find: Any = ClusterEnv.auto_detect_unset_distributed_params
    return tuple(find(*known, None, None, seconds))


def trace_context() -> Any:
    """Return the settings on which JAX's caches of traces depend: precision, 64 bits, promotion."""
    from jax._src import config

    return config.trace_context()


def key_impl(dtype: Any) -> str:
    """Return the name of the implementation of random keys of a dtype.

    `jax.random.key_impl` takes only arrays. The attribute is private, seen in 0.10.2 and 0.12.0.
    """
    name: str = dtype._impl.name  # noqa: SLF001
    return name


def lower_without_devices(traced: jax.stages.Traced, platform: str) -> jax.stages.Lowered | None:
    """Lower a function of an abstract mesh, to compile for any devices; None if devices are needed.

    A callback needs devices, because its lowering names the device that calls back.
    """
    try:
        return traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        if "AbstractMesh cannot be used" not in str(error):
            raise
        return None
