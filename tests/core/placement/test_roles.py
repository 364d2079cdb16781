"""Row and position axes of a user's own: what follows them beside the gradients of a step.

The oracle is the same model without a pipeline, on all rows and positions at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, add_loss, make_optimizer
from pipeline.processes.batch import local_rows, shard_batch
from pipeline.training.step import Step
from tests.support import split_axes
from tests.support.close import assert_close
from tests.support.split_axes import EXPERT, LENGTH, ROWS, WIDTH, Attention, Experts, is_split

X, T = split_axes.batch()
KINDS = pytest.mark.parametrize(
    "kind", [Experts, pytest.param(Attention, marks=pytest.mark.slow)], ids=["expert", "context"]
)


def make(kind=Experts, stages=None, num_microbatches=4, data=2, size=2, **options):
    mesh = split_axes.mesh_of(kind, data=data, size=size)
    own = {"mesh": mesh, "batch": split_axes.spec_of(kind, data=True), "remat": None}
    own |= {"loss_fn": split_axes.squares, "schedule": "1f1b"} | options
    return Pipeline(stages or split_axes.build(kind, 2), num_microbatches, **own)


def layers(pipe, tree):
    return pipe.to_layers(tree)["stages"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data_parallel", ["zero1", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fsdp", "none"))]
)
def test_norms_clipping_and_updates(data_parallel, standard_promotion):
    """An expert's weight counts once, whatever shares it."""
    data_parallel = "replicated" if data_parallel == "none" else data_parallel
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    pipe = make(data_parallel=data_parallel)
    step = Step(pipe, make_optimizer(pipe, tx), clip=1e6)
    found = step(X, T)
    want, grads = split_axes.plain(split_axes.build(Experts, 2))
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    assert norm > 0.05
    assert_close([found.loss, found.grad_norm], [want, norm])
    plain = nnx.List(split_axes.build(Experts, 2))
    optimizer = nnx.Optimizer(plain, tx, wrt=nnx.Param)
    optimizer.update(plain, nnx.State(dict(enumerate(grads))))
    after = [nnx.state(stage, nnx.Param) for stage in plain]
    assert_close([nnx.state(stage, nnx.Param) for stage in pipe.stages()], after)


@pytest.mark.slow
@KINDS
def test_metrics_and_weights(kind):
    def loss_fn(outputs, targets):
        size = jnp.int32(outputs.shape[0] * outputs.shape[1])
        pair = jnp.sum(jnp.abs(outputs)), jnp.asarray(outputs.size, jnp.float32)
        mean = jnp.mean(outputs)
        return split_axes.counted(outputs, targets), {"pair": pair, "count": size, "mean": mean}

    pipe = make(kind, loss_fn=loss_fn)
    outputs = X
    for stage in split_axes.build(kind, 2):
        outputs = stage(outputs)
    total, weight = split_axes.counted(outputs, T)
    (loss, metrics), _ = pipe.value_and_grad(X, T, has_aux=True)
    assert_close([loss, metrics["pair"]], [total / weight, jnp.mean(jnp.abs(outputs))])
    assert metrics["count"] == ROWS * LENGTH
    weighed, _ = pipe.loss(X, T, has_aux=True, weighed=True)
    assert_close(list(weighed), [total / weight, weight])
    mean = make(kind).loss(X, T, weighed=True)  # of a mean the weight is its rows
    assert_close(list(mean), [jnp.mean((outputs - T) ** 2), ROWS])


@pytest.mark.slow
@KINDS
def test_gradients_of_inputs_and_of_outputs(kind):
    stages, pipe = split_axes.build(kind, 2), make(kind)
    ct = jax.random.normal(jax.random.key(5), X.shape)

    def plain(x):
        for stage in stages:
            x = stage(x)
        return x

    found = jax.grad(lambda x: pipe.loss(x, T))(X)
    assert_close(found, jax.grad(lambda x: split_axes.squares(plain(x), T))(X))
    found = jax.grad(lambda x: jnp.sum(pipe(x) * ct))(X)
    assert_close(found, jax.grad(lambda x: jnp.sum(plain(x) * ct))(X))


def test_an_input_that_is_whole_over_positions_has_one_gradient():
    """Each rank of `context` has an addend of the gradient of a bias that all positions see."""

    class Biased(nnx.Module):
        def __call__(self, pair):
            x, bias = pair
            return jnp.tanh(x + bias[:, None]), bias

    given = X, jax.random.normal(jax.random.key(3), (ROWS, WIDTH))
    batch = {"inputs": (P("data", "context"), P("data")), "targets": P("data", "context")}
    pipe = make(Attention, stages=[Biased(), Biased()], batch=batch, head=lambda pair: pair[0])

    def plain(given):
        x, bias = given
        for _ in range(2):
            x = jnp.tanh(x + bias[:, None])
        return split_axes.squares(x, T)

    assert_close(jax.grad(lambda given: pipe.loss(given, T))(given), jax.grad(plain)(given))


@pytest.mark.filterwarnings("ignore:the mesh axis")
@pytest.mark.parametrize(
    ("mesh", "batch"),
    [
        ({"data": 2, "expert": 2}, P(("data", "expert"))),
        ({"data": 2, "context": 2}, P("data", "context")),
        ({"expert": 2, "tensor": 2}, P("expert")),
    ],
    ids=str,
)
def test_dropout_keys(mesh, batch):
    """Rows and positions drop different things; ranks along a shared axis drop the same."""

    class Drop(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(x)

    mesh = make_mesh(stage=2, **mesh)
    stages = [Drop(nnx.Rngs(0, dropout=k)) for k in range(2)]
    pipe = Pipeline(stages, 2, mesh=mesh, batch=batch)
    kept = np.asarray(pipe(jnp.ones((ROWS, LENGTH, WIDTH)))) != 0
    parts = np.split(kept, pipe.plan.axes.num_rows)
    parts = [p for part in parts for p in np.split(part, pipe.plan.axes.num_positions, axis=1)]
    assert len(parts) == pipe.plan.axes.num_parts
    assert len({part.tobytes() for part in parts}) == len(parts)


class Counting(nnx.Module):
    """Experts that count: state of each rank's own, of all ranks, and a running mean."""

    def __init__(self, rngs):
        self.inner = Experts(rngs)
        self.load = nnx.BatchStat(
            jnp.zeros(4, jnp.int32), out_sharding=(EXPERT,), eager_sharding=False
        )
        self.rows = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        first, own = 0, self.load[...].shape[0]
        seen = x
        if is_split(EXPERT):
            first = jax.lax.axis_index(EXPERT) * own
            seen = jax.lax.all_gather(x, EXPERT, axis=0, tiled=True)
        likes = jnp.argmax(seen[:, 0, :4], axis=-1)
        ones = likes[:, None] == first + jnp.arange(own)[None]
        self.load[...] = self.load[...] + ones.astype(jnp.int32).sum(axis=0)
        self.rows[...] = self.rows[...] + x.shape[0]
        self.mean[...] = self.mean[...] + jnp.mean(x)
        return self.inner(x)


def test_declared_state_of_experts_counts_once():
    """Not over `expert` where the state names it, also where a backward runs a forward again."""
    stages = split_axes.build(Counting, 2)
    pipe = make(stages=stages, state=nnx.BatchStat, remat="stage")
    pipe.value_and_grad(X, T)
    first = pipe.stages()[0]
    likes = np.bincount(np.asarray(jnp.argmax(X[:, 0, :4], axis=-1)), minlength=4)
    assert np.asarray(first.load[...]).tolist() == likes.tolist()
    assert int(first.rows[...]) == ROWS
    assert_close(first.mean[...], 4 * jnp.mean(X))  # the sum over 4 microbatches


class Adding(nnx.Module):
    """A stage that adds the mean of what it sees to the loss."""

    def __init__(self, rngs):
        self.inner = Attention(rngs)

    def __call__(self, x):
        y = self.inner(x)
        return add_loss(y, 0.3 * jnp.mean(y**2))


@pytest.mark.slow
def test_losses_that_stages_add():
    pipe = make(Attention, stages=split_axes.build(Adding, 2))
    loss, grads = pipe.value_and_grad(X, T)
    graphdef, params = nnx.split(nnx.List(split_axes.build(Attention, 2)))

    def plain(params):
        y, added = X, 0.0
        for stage in nnx.merge(graphdef, params):
            y = stage(y)
            added += 0.3 * jnp.mean(y**2)
        return split_axes.squares(y, T) + added

    want, wanted = jax.value_and_grad(plain)(params)
    assert_close(loss, want)
    assert_close([tree["inner"] for tree in layers(pipe, grads)], [wanted[k] for k in range(2)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mesh axis")
@pytest.mark.parametrize("kind", [Experts, Attention])
def test_beside_a_shared_axis(kind):
    """Types are tracked over all axes there; the same collectives stay exact."""
    axis = {EXPERT: 2} if kind is Experts else {"context": 2}
    mesh = make_mesh(stage=2, tensor=2, **axis)
    pipe = make(kind, mesh=mesh, schedule="zb_h1")
    loss, grads = pipe.value_and_grad(X, T)
    want, wanted = split_axes.plain(split_axes.build(kind, 2))
    assert_close(loss, want)
    assert_close(layers(pipe, grads), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["step", "action"])
def test_weights_that_are_gathered_over_rows_that_they_do_not_name(gather):
    pipe = make(data_parallel="fsdp", gather=gather)
    specs = {
        path[-1]: v.get_raw_value().sharding.spec
        for path, v in nnx.to_flat_state(nnx.state(pipe.chunks[0]))
    }
    assert specs["dense"] == P("stage", ("data", EXPERT))
    assert specs["up"] == P("stage", EXPERT, "data")
    _, grads = pipe.value_and_grad(X, T)
    _, wanted = split_axes.plain(split_axes.build(Experts, 2))
    assert_close(layers(pipe, grads), wanted)


@pytest.mark.slow
def test_stages_that_are_not_alike():
    def build():
        first, second = split_axes.build(Experts, 2)
        second.more = nnx.Param(jnp.ones(3))
        return [first, second]

    pipe = make(stages=build(), data_parallel="zero1")
    with pytest.warns(UserWarning, match="more"):
        loss, grads = pipe.value_and_grad(X, T)
    want, wanted = split_axes.plain(build())
    assert_close(loss, want)
    assert_close(layers(pipe, grads), wanted)


@pytest.mark.few
@pytest.mark.parametrize("data_parallel", ["fsdp", "replicated", "zero1"])
def test_all_state_lies_where_its_names_say(data_parallel):
    stages = split_axes.build(Experts, 2, dropout=0.1)
    embed = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
    pipe = make(stages=stages, embed=embed, data_parallel=data_parallel)
    state = nnx.state(pipe)
    said = dict(nnx.to_flat_state(nnx.get_named_sharding(state, pipe.mesh)))
    for path, variable in nnx.to_flat_state(state):
        array = variable.get_raw_value()
        assert array.sharding.is_equivalent_to(said[path].get_raw_value(), array.ndim), path


@pytest.mark.slow
def test_another_mesh():
    """`replace` to other sizes of the axis, and to a mesh without it."""
    _, wanted = split_axes.plain(split_axes.build(Experts, 2))
    pipe = make()
    other = pipe.replace(mesh=split_axes.mesh_of(Experts, data=1, size=4))
    _, grads = other.value_and_grad(X, T)
    assert_close(layers(other, grads), wanted)
    alone = pipe.replace(mesh=make_mesh(stage=2), batch=P("data"), sharding=lambda *_: ())
    _, grads = alone.value_and_grad(X, T)
    assert_close(layers(alone, grads), wanted)
    with pytest.raises(ValueError, match="names 'expert', and the mesh has the axes"):
        pipe.replace(mesh=make_mesh(stage=2))


def test_describe_says_how_a_batch_is_split():
    text = make(data_parallel="zero1").describe(X, T)
    assert "a batch is split: rows over data x expert\n" in text
    assert "gradients and optimizer state sharded over 4 data shards" in text
    assert "over expert " in text  # bytes that experts' collectives send
    text = make(Attention).describe(X, T)
    assert "a batch is split: rows over data, positions over context" in text
    assert (
        "a batch is split" not in make(batch=P("data"), mesh=make_mesh(stage=2, data=2)).describe()
    )


def test_rows_of_a_process():
    mesh = split_axes.mesh_of(Experts, data=2)
    spec = P(("data", EXPERT))
    assert local_rows(mesh, 8, split=spec).tolist() == list(range(8))
    batch = shard_batch({"x": np.zeros((8, 4)), "t": np.zeros(8)}, mesh, split=spec)
    assert [batch[name].sharding.spec for name in "xt"] == [spec, spec]
    mesh = split_axes.mesh_of(Attention, data=2)
    (x, t) = shard_batch((np.zeros((4, 6)), np.zeros(4)), mesh, split=P("data", "context"))
    assert (x.sharding.spec, t.sharding.spec) == (P("data", "context"), P("data"))
    with pytest.raises(ValueError) as error:
        local_rows(mesh, 3, split=P("data", "context"))
    assert str(error.value) == (
        "num_rows=3: the mesh's data axis has 2 shards, which take equally many; use a multiple of "
        "2"
    )
    with pytest.raises(ValueError, match="takes one PartitionSpec for all leaves of a batch"):
        shard_batch((np.zeros(4), np.zeros(4)), mesh, split=(P("data"), P("data")))
