"""Pipelines whose weights are sharded over `tensor`, manual or left to the compiler.

Letters: D data shards, S ranks, T tensor shards, K stages, M microbatches.
"""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collectives.tensor import split_sequence
from pipeline import Pipeline
from pipeline.core.options import choose
from pipeline.layers import ColumnLinear, RMSNorm, RowLinear
from tests.support import mixed, models, tensor_stages
from tests.support.close import assert_close
from tests.support.grids import covering, effort
from tests.support.hlo import computations, groups, in_loops
from tests.support.models import WIDTH
from tests.support.tensor_stages import Parallel, Sequence

M, ROWS = 4, 32
MESHES = ((2, 2, 2), (1, 4, 2), (2, 4, 1), (4, 2, 1))
FAMILIES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_v", "zb_h1")
KINDS, REMATS = (Parallel, Sequence), ("stage", None)
GRID = list(itertools.product(MESHES, FAMILIES, KINDS, REMATS))
FAST = (
    ((2, 2, 2), "1f1b", Sequence, "stage"),
    ((1, 4, 2), "zb_h1", Parallel, None),
)


def mesh(D: int, S: int, T: int) -> Mesh:
    devices = np.array(jax.devices()[: D * S * T]).reshape(D, S, T)
    return Mesh(devices, ("data", "stage", "tensor"), axis_types=(AxisType.Auto,) * 3)


@functools.cache
def batch() -> tuple:
    return models.words(ROWS), models.words(ROWS, most=models.CLASSES, seed=4)


@functools.cache
def wanted(kind, K: int):
    return models.reference(
        models.build(kind, K), *batch(), models.cross_entropy, **tensor_stages.ends(kind)
    )


def pipeline(kind, *, shape=(2, 2, 2), family="1f1b", V=1, **options) -> Pipeline:
    return Pipeline(
        models.build(kind, V * shape[1]),
        M,
        schedule=family,
        mesh=mesh(*shape),
        loss_fn=models.cross_entropy,
        **tensor_stages.ends(kind),
        **options,
    )


def check(pipe: Pipeline, kind, found=None) -> None:
    found = pipe.value_and_grad(*batch()) if found is None else found
    models.assert_matches(pipe, found, wanted(kind, pipe.schedule.num_stages))


def cases() -> list:
    """A few in `make test`; in CI every two values meet but those of a mesh and of a family.

    What crosses the axis `tensor` is in a stage, which no family knows.
    """
    slow = covering(GRID, FAST, elsewhere={(0, 1)})
    return [
        pytest.param(*case, marks=effort(case, FAST, slow), id="-".join(map(name, case)))
        for case in GRID
    ]


def name(value) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return getattr(value, "__name__", str(value))


# --- parity ---


@pytest.mark.few
@pytest.mark.parametrize(("shape", "family", "kind", "remat"), cases())
def test_the_grid(shape, family, kind, remat):
    V = 2 if family in ("interleaved_1f1b", "zb_v") else 1
    check(pipeline(kind, shape=shape, family=family, V=V, remat=remat), kind)


@pytest.mark.slow
def test_a_checkpoint_policy():
    policy = jax.checkpoint_policies.dots_saveable
    check(pipeline(Sequence, family="zb_h1", remat=policy), Sequence)


@pytest.mark.slow
def test_any_trainer_may_differentiate_it():
    """`pipe.loss` and `pipe(inputs)` under `nnx.value_and_grad`."""
    x, t = batch()
    pipe = pipeline(Parallel)
    check(pipe, Parallel, nnx.value_and_grad(lambda m: m.loss(x, t))(pipe))
    check(pipe, Parallel, nnx.value_and_grad(lambda m: models.cross_entropy(m(x), t))(pipe))
    assert_close(pipe.loss(x, t), wanted(Parallel, 2)[0])


@pytest.mark.parametrize("data_parallel", [pytest.param("zero1", marks=pytest.mark.slow), "fsdp"])
def test_with_weights_or_gradients_sharded_over_data(data_parallel):
    pipe = pipeline(Sequence, data_parallel=data_parallel)
    loss, grads = pipe.value_and_grad(*batch())
    check(pipe, Sequence, (loss, grads))
    found = {path[-1]: v.get_value().sharding.spec for path, v in nnx.to_flat_state(grads)}
    assert found["up"] == P("stage", "data", "tensor")
    assert found["down"] == P("stage", "tensor", "data")
    assert found["bias"] == P("stage", None, ("tensor", "data"))  # no other dim has room
    assert found["scale"] == P("stage", None, "data")


# --- stages that are not alike ---


UNEVEN = [
    ((2, 2, 2), "1f1b", Sequence, {}),
    ((2, 2, 2), "zb_h1", Parallel, {"remat": None, "data_parallel": "fsdp"}),
    ((1, 2, 4), "interleaved_1f1b", Sequence, {}),
    ((2, 2, 2), "zb_v", Sequence, {"data_parallel": "zero1", "remat": None}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "family", "kind", "options"), UNEVEN)
def test_uneven_numbers_of_equal_layers(shape, family, kind, options):
    V = 2 if family in ("interleaved_1f1b", "zb_v") else 1
    counts = (1, 2, 2, 1)[: V * shape[1]]
    layers = iter(models.build(kind, sum(counts)))
    stages = [mixed.Chain(*itertools.islice(layers, count)) for count in counts]
    ends = tensor_stages.ends(kind)
    want = models.reference(stages, *batch(), models.cross_entropy, **ends)
    given = {"schedule": family, "mesh": mesh(*shape), "loss_fn": models.cross_entropy}
    pipe = Pipeline(stages, M, **given, **ends, **options)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)
    stored = pipe.chunks[0].named.layers
    specs = nnx.get_partition_spec(nnx.state(stored, nnx.Param))["1"]
    fsdp = "data" if options.get("data_parallel") == "fsdp" else None
    assert specs["up"].get_value() == P("stage", fsdp, "tensor")
    for stage, was in zip(pipe.stages(), stages, strict=True):
        assert nnx.graphdef(stage) == nnx.graphdef(was)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(stage), nnx.state(was))


class Stacked(nnx.Module):
    """Layers in one array, of which the stages have different numbers."""

    def __init__(self, rngs, layers):
        made = [Parallel(rngs) for _ in range(layers)]
        for name in ("scale", "up", "bias", "down"):
            of = [getattr(layer, name) for layer in made]
            names = of[0].get_metadata("out_sharding", None)
            said = {"out_sharding": (None, *names), "eager_sharding": False} if names else {}
            setattr(self, name, nnx.Param(jnp.stack([v.get_value() for v in of]), **said))

    def __call__(self, x):
        def layer(x, weights):
            scale, up, bias, down = weights
            norm = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) * (1 + scale)
            return x + tensor_stages.total(jnp.tanh(norm @ up + bias) @ down), None

        weights = [v.get_value() for v in (self.scale, self.up, self.bias, self.down)]
        return jax.lax.scan(layer, x, tuple(weights))[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_uneven_numbers_of_layers_in_one_array(family):
    """A stage reads the first rows of what its rank has, which are sharded along another dim."""
    stages = [Stacked(nnx.Rngs(7), 1), Stacked(nnx.Rngs(8), 3)]
    ends = tensor_stages.ends(Parallel)
    want = models.reference(stages, *batch(), models.cross_entropy, **ends)
    given = {"schedule": family, "mesh": mesh(2, 2, 2), "loss_fn": models.cross_entropy}
    pipe = Pipeline(stages, M, **given, **ends)
    assert pipe.chunks[0].named.up.get_value().sharding.spec == P("stage", None, None, "tensor")
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["replicated", "fsdp"])
def test_an_axis_of_one_rank_is_no_obstacle_to_stages_of_another_kind(data_parallel):
    """Weights of unlike shapes are packed: a run's mesh has ``tensor`` whatever its size is."""
    stages = [Parallel(nnx.Rngs(0)), Parallel(nnx.Rngs(1), hidden=3 * WIDTH)]
    ends = tensor_stages.ends(Parallel)
    want = models.reference(stages, *batch(), models.cross_entropy, **ends)
    given = {"mesh": mesh(2, 2, 1), "loss_fn": models.cross_entropy}
    pipe = Pipeline(stages, M, **given, **ends, data_parallel=data_parallel)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)
    for stage, was in zip(pipe.stages(), stages, strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(stage), nnx.state(was))


# --- weights that each rank uses on activations of its own ---


class Normed(nnx.Module):
    """[b, t / T, d] to the same; scale and bias are whole on all ranks."""

    def __init__(self, rngs):
        own = {"sequence_parallel": True}
        self.norm = RMSNorm(WIDTH, **own)
        self.up = ColumnLinear(WIDTH, 2 * WIDTH, rngs, **own)
        self.down = RowLinear(2 * WIDTH, WIDTH, rngs, bias=True, **own)
        self.down.bias.set_value(rngs.params.normal((WIDTH,)))

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Divided(nnx.Module):
    def __call__(self, x):
        return split_sequence(x, sequence_axis=-2)


class Joined(nnx.Module):
    def __call__(self, x):
        if not tensor_stages.is_manual():
            return x
        return jax.lax.all_gather(x, "tensor", axis=-2, tiled=True, to="invarying")


def normed(counts=(1, 1), **options):
    """The pipeline, its batch, and what the plain model gives."""
    layers = (Normed(nnx.Rngs(k)) for k in range(sum(counts)))
    stages = [mixed.Chain(*itertools.islice(layers, count)) for count in counts]
    x, t = (models.rows(ROWS * 4, seed=s).reshape(ROWS, 4, WIDTH) for s in (0, 3))
    ends = {"embed": Divided(), "head": Joined()}
    want = models.reference(stages, x, t, models.squares, **ends)
    options = {"schedule": "1f1b", "mesh": mesh(1, 2, 2), "loss_fn": models.squares} | options
    return Pipeline(stages, M, **ends, **options), (x, t), want


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"schedule": "zb_h1", "remat": None, "mesh": mesh(2, 2, 2), "data_parallel": "fsdp"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh": mesh(2, 2, 2), "data_parallel": "fsdp", "gather": "action"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "counts": (1,) * 6,
                "schedule": "looped_bfs",
                "mesh": mesh(2, 2, 2),
                "data_parallel": "fsdp",
                "gather": "repeat",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"counts": (1, 2)}, marks=pytest.mark.slow),
        pytest.param(
            {"counts": (2,), "mesh": mesh(1, 1, 4), "remat": None}, marks=pytest.mark.slow
        ),
    ],
    ids=range(6),
)
def test_their_gradient_is_summed_once_a_step(options):
    pipe, given, want = normed(**options)
    models.assert_matches(pipe, pipe.value_and_grad(*given), want)
    found = computations(pipe.lower(*given).compile().as_text())
    assert not [line for line in in_loops(found) if " all-reduce(" in line]
    sums = [line for line in found["ENTRY"] if " all-reduce(" in line]
    T = pipe.mesh.shape["tensor"]
    rows = WIDTH // (pipe.mesh.shape["data"] if pipe.plan.data_parallel == "fsdp" else 1)
    over = [line for line in sums if groups(line)[0] == set(range(T))]
    assert sum(line.split(" all-reduce(")[0].count(f"f32[{rows}]") for line in over) >= 2


# --- activations of which only some differ along the axis ---


class Starts(Parallel):
    """Takes what all ranks share or their own; returns what differs between them."""

    def __call__(self, x):
        y = super().__call__(x)
        if not tensor_stages.is_manual():
            return y
        return jax.lax.pcast(y, "tensor", to="varying") if not varies(y) else y


def varies(x) -> bool:
    return "tensor" in jax.typeof(x).manual_axis_type.varying


class Mean(nnx.Module):
    """A head that makes one value of those of all ranks."""

    def __init__(self, head):
        self.head = head

    def __call__(self, x):
        if tensor_stages.is_manual():
            x = jax.lax.pmean(x, "tensor")
        return self.head(x)


@pytest.mark.parametrize("family", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_the_first_stage_may_start_what_the_others_go_on_with(family):
    """Embed gives all ranks the same, every stage returns what differs: one kind of message."""
    ends = tensor_stages.ends(Parallel)
    ends["head"] = Mean(ends["head"])
    stages = models.build(Starts, 2)
    want = models.reference(stages, *batch(), models.cross_entropy, **ends)
    pipe = Pipeline(
        stages, M, schedule=family, mesh=mesh(2, 2, 2), loss_fn=models.cross_entropy, **ends
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)


# --- placement ---


def test_weights_lie_where_their_metadata_says():
    pipe = pipeline(Parallel, V=2, family="zb_v")
    chunk = pipe.chunks[0]
    assert chunk.up.get_value().sharding.spec == P("stage", None, "tensor")
    assert chunk.up.get_value().addressable_shards[0].data.shape == (1, WIDTH, WIDTH)
    assert chunk.scale.get_value().sharding.spec == P("stage")
    assert pipe.embed.table.get_value().sharding.spec == P(None, "tensor")
    specs = nnx.get_partition_spec(nnx.state(pipe, nnx.Param))
    assert specs["chunks"][0]["up"].get_value() == P("stage", None, "tensor")
    for stage, given in zip(pipe.stages(), models.build(Parallel, 4), strict=True):
        assert nnx.graphdef(stage) == nnx.graphdef(given)
        for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (stage, given)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_axes_that_the_mesh_lacks_are_left_out():
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "stage"))
    pipe = Pipeline(
        models.build(Block, 2),
        M,
        schedule="1f1b",
        mesh=two,
        loss_fn=models.squares,
        sharding=lambda path, _: (None, "tensor") if path == "up" else None,
    )
    assert pipe.chunks[0].up.get_value().sharding.spec == P("stage")
    x, t = models.rows(ROWS), models.rows(ROWS, seed=3)
    want = models.reference(models.build(Block, 2), x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


def test_a_stacked_module_is_sharded_as_the_list_of_its_stages():
    stages = models.build(Parallel, 2)
    graphdef, _ = nnx.split(stages[0])
    states = [nnx.state(stage) for stage in stages]
    stacked = nnx.merge(graphdef, jax.tree.map(lambda *xs: jnp.stack(xs), *states))
    named = nnx.clone(stacked)
    named.up.set_metadata(out_sharding=("layers", None, "tensor"))
    for given in (stacked, named):
        pipe = Pipeline(given, M, mesh=mesh(1, 2, 2), loss_fn=models.cross_entropy)
        for name in ("up", "down", "bias", "scale"):
            a, b = (getattr(p.chunks[0], name) for p in (pipe, pipeline(Parallel)))
            np.testing.assert_array_equal(a.get_value(), b.get_value())
            assert a.get_value().sharding.spec == b.get_value().sharding.spec


def test_logical_names_follow_the_rules_in_force():
    stages = models.build(Parallel, 2)
    for stage in stages:
        stage.up.set_metadata(out_sharding=("embed", "mlp"))
        stage.down.set_metadata(
            out_sharding=("mlp", "embed"), sharding_rules=(("mlp", "tensor"), ("embed", None))
        )
    with nnx.logical_axis_rules((("mlp", "tensor"), ("embed", None))):
        pipe = Pipeline(stages, M, mesh=mesh(1, 2, 2), loss_fn=models.cross_entropy)
    for name, spec in (("up", P("stage", None, "tensor")), ("down", P("stage", "tensor"))):
        assert getattr(pipe.chunks[0], name).get_value().sharding.spec == spec


# --- an axis left to the compiler ---


Block = models.Block
ROLES = {"up": (None, "tensor"), "down": ("tensor",)}


def by_role(path, _):
    return ROLES.get(path)


def automatic(**options) -> Pipeline:
    given = {"schedule": "1f1b", "sharding": by_role, "mesh": mesh(2, 2, 2), "engine": "programs"}
    stages = models.build(Block, 2)
    return Pipeline(stages, M, loss_fn=models.squares, auto_axes=("tensor",), **(given | options))


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"schedule": "zb_h1", "remat": None}, marks=pytest.mark.slow),
        {"data_parallel": "fsdp"},
        pytest.param({"data_parallel": "zero1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_that_know_nothing_of_the_axis(options):
    x, t = models.rows(ROWS), models.rows(ROWS, seed=3)
    want = models.reference(models.build(Block, 2), x, t, models.squares)
    pipe = automatic(**options)
    loss, grads = pipe.value_and_grad(x, t)
    models.assert_matches(pipe, (loss, grads), want)
    spec = grads["chunks"][0]["up"].get_value().sharding.spec
    assert spec == P("stage", "data" if "data_parallel" in options else None, "tensor")
    models.assert_matches(pipe, nnx.value_and_grad(lambda m: m.loss(x, t))(pipe), want)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_the_compiler_keeps_weights_and_gradients_in_parts(engine):
    if engine == "scan":
        x = jax.ShapeDtypeStruct((3 * ROWS, WIDTH), jnp.float32)
        texts = [automatic(mesh=mesh(2, 1, 2), engine=engine).lower(x, x).compile().as_text()]
    else:
        pipe, x = automatic(), models.rows(3 * ROWS)
        jax.block_until_ready(pipe.value_and_grad(x, x))
        (step,) = pipe.plan.compiled.functions.values()
        actions = [program for key, program in step.compiled.items() if key[0] in {"F", "B"}]
        texts = [program.as_text() for program in actions]
    assert any(re.search(rf"f32\[(1,)?{WIDTH},{WIDTH}\]", text) for text in texts)
    whole = rf"f32\[(1,)?({WIDTH},{2 * WIDTH}|{2 * WIDTH},{WIDTH})\]"
    assert not any(re.search(whole, text) for text in texts)


class Flax(nnx.Module):
    """Made of flax's own layers, with flax's own words."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        columns, rows = (nnx.with_partitioning(init, n) for n in ((None, "tensor"), ("tensor",)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=columns, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_an_unmodified_flax_stage():
    x, t = models.rows(ROWS), models.rows(ROWS, seed=3)
    where = mesh(2, 2, 2)
    with jax.set_mesh(where):
        stages = models.build(Flax, 2)
    plain = [nnx.clone(stage) for stage in stages]
    for stage in plain:
        nnx.update(stage, jax.tree.map(np.asarray, nnx.state(stage)))
    want = models.reference(plain, x, t, models.squares)
    options = {"auto_axes": ("tensor",), "engine": "programs", "schedule": "1f1b"}
    pipe = Pipeline(stages, M, mesh=where, loss_fn=models.squares, **options)
    assert pipe.chunks[0].up.kernel.get_value().sharding.spec == P("stage", None, "tensor")
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


class Halves(nnx.Module):
    """Cuts a dim in two that the compiler has sharded, so that halves change places."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = models.normal(rngs, WIDTH, 4 * WIDTH)
        self.down = models.normal(rngs, 2 * WIDTH, WIDTH)

    def __call__(self, x):
        a, b = jnp.split(x @ self.up[...], 2, axis=-1)
        return x + (jnp.tanh(a) * b) @ self.down[...]


def test_exchanges_of_the_compiler():
    x, t = models.rows(ROWS), models.rows(ROWS, seed=3)
    stages = models.build(Halves, 2)
    want = models.reference(stages, x, t, models.squares)
    options = {"schedule": "1f1b", "mesh": mesh(2, 2, 2), "loss_fn": models.squares}
    options |= {"sharding": by_role, "auto_axes": ("tensor",)}
    pipe = Pipeline(stages, M, engine="programs", **options)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [{"shape": (2, 1, 4)}, {"shape": (2, 1, 2), "remat": None}, {"shape": (4, 2, 1)}],
    ids=str,
)
def test_a_scan_in_which_all_devices_take_the_same_branch(options):
    """With one rank, or an axis of one device, no device waits in an exchange of the compiler."""
    x, t = models.rows(ROWS), models.rows(ROWS, seed=3)
    options = dict(options)
    stages, shape = models.build(Halves, 2), mesh(*options.pop("shape"))
    pipe = Pipeline(
        stages,
        M,
        mesh=shape,
        loss_fn=models.squares,
        sharding=by_role,
        auto_axes=("tensor",),
        **options,
    )
    want = models.reference(stages, x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


def test_devices_that_all_meet_in_the_compilers_exchanges(monkeypatch):
    """The ranks of a scan take different branches, and an exchange in one would wait for ever."""
    assert fails(auto_axes=("tensor",)) == (
        "auto_axes=('tensor',) with engine='scan' on virtual CPU devices of one process (stage=2, "
        "tensor=4): all of them meet in every exchange that the compiler adds to a stage, and "
        "ranks of other stages, which run other actions meanwhile, would not come; use "
        "engine='programs', or GPUs, TPUs or several processes"
    )
    monkeypatch.setattr(choose, "exchanges_are_barriers", lambda mesh: False)
    automatic(engine="scan")


# --- what is sent ---


MEETING = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\(")


@pytest.mark.few
@pytest.mark.parametrize("kind", [Parallel, Sequence])
def test_who_meets_in_a_collective(kind):
    """In the loop over ticks only ranks of one stage and one data shard; over data once, after."""
    D, S, T = 2, 2, 2
    pipe = pipeline(kind, shape=(D, S, T))
    found = computations(pipe.lower(*batch()).compile().as_text())
    place = {n: divmod(n % (S * T), T)[0] for n in range(D * S * T)}  # device to rank
    inside = [line for line in in_loops(found) if MEETING.search(line)]
    assert inside
    for line in inside:
        for group in groups(line):
            assert len({place[n] for n in group}) == 1, line
            assert len({n // (S * T) for n in group}) == 1, line
            assert len(group) == T
    after = [line for line in found["ENTRY"] if MEETING.search(line)]
    weight = re.compile(rf"f32\[{WIDTH},{WIDTH}\]")  # a part of `up`, of `down`
    gradients = [line for line in after if weight.search(line.split(MEETING.search(line)[0])[0])]
    assert sum(len(weight.findall(x.split(MEETING.search(x)[0])[0])) for x in gradients) == 2
    for line in gradients:
        assert all(len(group) == D for group in groups(line))
        assert all(len({place[n] for n in group}) == 1 for group in groups(line))


# --- bad input ---


def message(error) -> str:
    return str(error.value)


def fails(*, stages=None, sharding=None, **options) -> str:
    stages = models.build(Block, 2) if stages is None else stages
    options = {"mesh": mesh(1, 2, 4), "loss_fn": models.squares} | options
    with pytest.raises(ValueError, match=r".") as error:
        Pipeline(stages, M, sharding=sharding, **options)
    return message(error)


def test_a_dim_that_does_not_divide():
    stages = models.build(Block, 2, hidden=6)
    assert fails(stages=stages, sharding=by_role) == (
        "down: sharding shards dim 0 over 'tensor', but its 6 entries cannot be shared by 4 "
        "devices; use a multiple of 4, another mesh, or no sharding for this dim"
    )
    for stage in stages:
        stage.up.set_metadata(out_sharding=(None, "tensor"))
    assert fails(stages=stages) == (
        "up: its metadata out_sharding shards dim 1 over 'tensor', but its 6 entries cannot be "
        "shared by 4 devices; use a multiple of 4, another mesh, or no sharding for this dim"
    )


def test_names_that_do_not_fit():
    assert fails(sharding=lambda *_: (None, None, "tensor")) == (
        "down has 2 dims, but sharding names the axes of 3: (None, None, 'tensor'); give one "
        "name, or None, for each dim of a stage's own array"
    )
    assert fails(sharding=lambda *_: ("data",), mesh=mesh(2, 2, 2)) == (
        "down: sharding shards dim 0 over 'data', which is the pipeline's own axis: take "
        "data_parallel='fsdp', which shards weights over it; or let sharding= return names without "
        "it, as lambda path, variable: () does"
    )


NOT_ALIKE = (
    " is sharded over 'tensor', but stages[1] differs from stages[0] at down: Param float32[64,8] "
    "against Param float32[16,8]: stages that are not alike share their storage, in which a "
    "sharded weight needs a place under its own name and of its own length, and no rank stores "
    "more than the largest stage has; let such stages differ in the number of equal layers only, "
    "make the stages of a chunk alike (what only the first or the last one has belongs to embed= "
    "or head=), or leave these weights whole"
)


def test_stages_that_are_not_alike():
    stages = [Block(nnx.Rngs(0)), Block(nnx.Rngs(1), hidden=64)]
    assert fails(stages=stages, sharding=by_role) == "down" + NOT_ALIKE
    assert fails(stages=stages, sharding=lambda path, _: {"up": (None, "tensor")}.get(path)) == (
        "up" + NOT_ALIKE
    )


@pytest.mark.parametrize(
    ("auto_axes", "text"),
    [
        (
            ("expert",),
            (
                "auto_axes=('expert',): the mesh has no axis 'expert'; its axes are 'data', "
                "'stage', 'tensor'"
            ),
        ),
        (
            ("tensor", "data"),
            (
                "auto_axes=('tensor', 'data'): a pipeline exchanges and reduces over 'data' "
                "itself, so it cannot be left to the compiler; leave out 'data'"
            ),
        ),
        ("tensor", "auto_axes='tensor': must be a tuple of axes, such as ('tensor',)"),
    ],
)
def test_axes_that_cannot_be_left_to_the_compiler(auto_axes, text):
    assert fails(auto_axes=auto_axes) == text


OWN = (
    " returned a value that differs between the ranks of axis 'tensor'; each of them holds only "
    "its part of what is sharded over it: reduce it (jax.lax.psum), or gather what it is made of "
    "(jax.lax.all_gather(..., to='invarying')), before it is returned; or, if the layers know "
    "nothing of it, leave it to the compiler: Pipeline(..., auto_axes=('tensor',)); or, if these "
    "ranks hold rows or positions of their own, let Pipeline(..., batch=) split the batch over it"
)


def test_a_loss_or_outputs_that_differ_between_tensor_ranks():
    ends = tensor_stages.ends(Sequence)
    ends["head"] = ends["head"].head  # of the rank's own rows
    pipe = Pipeline(
        models.build(Sequence, 2),
        M,
        mesh=mesh(1, 2, 2),
        loss_fn=lambda y, t: models.cross_entropy(y, t[: y.shape[0]]),
        embed=ends["embed"],
    )
    with pytest.raises(ValueError, match="loss_fn") as error:
        pipe.value_and_grad(*batch())
    assert message(error) == "loss_fn" + OWN
    with pytest.raises(ValueError, match="last stage") as error:
        pipe(batch()[0])
    assert message(error) == "the last stage" + OWN
