"""The public object: K NNX stages that train as one module."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import STAGE
from pipeline import differentiable, runtime
from pipeline.accumulate import check_grad_dtype
from pipeline.cell import Batch, Model, Weights
from pipeline.choose import (
    choose_mesh,
    choose_pattern,
    choose_schedule,
    exchanges_are_barriers,
)
from pipeline.describe import describe
from pipeline.loss import LossFn
from pipeline.microbatch import make_batch, place
from pipeline.plan import Bubbles, Plan, Remat
from pipeline.randomness import advance
from pipeline.stage import Ends, count_stages, define, make_chunks, seats, take_stage
from pipeline.tree import Tree
from schedules import Schedule


class Pipeline(nnx.Module):
    """A deep model whose stages live on different devices and work at the same time.

    Letters: S ranks on the mesh axis ``stage``, K stages, V = K // S chunks per rank, M
    microbatches, D data shards, N rows of a batch.

    Args:
      stages: K modules, or one module stacked on a leading axis of length K. ``stage(x)`` takes
        what the stage before it returns; ``x`` may be a pytree. Stages may differ in structure and
        in what they return; where they are alike, all ranks share their code and a rank stores
        them as they are.
      num_microbatches: M; a batch of N rows is split into M * D equal parts.
      schedule: a name out of `schedules.names()`, a `Schedule`, the path of a CSV timetable, or
        None to choose one.
      mesh: with an axis ``stage`` whose size divides K, and perhaps ``data``; by default as many
        devices as share K stages equally.
      embed: a module or function of one microbatch of inputs; makes the first stage's input.
      head: a module or function of the last stage's output; makes what the user sees.
      loss_fn: ``loss_fn(outputs, targets)`` of one microbatch: a scalar mean, or (sum, weight).
      remat: "stage" keeps each stage's input and runs its forward again in the backward; None
        keeps its residuals; a `jax.checkpoint` policy keeps what it says.
      bubbles: "skip" branches around idle slots; "masked" computes through them without any
        conditional.
      pattern: the slots of a tick, "single", "paired", "unit" or "partner" (`schedules.lower`); by
        default the fastest on this mesh.
      delayed: whether a message between ranks travels beside the work of the slot after its own,
        which hides exchanges that are no longer than that work; an edge takes one slot more.
      grad_dtype: in which gradients are summed over microbatches and data shards: None for each
        weight's dtype, but at least float32; "weights" for each weight's own; or a dtype, such as
        jnp.bfloat16, which halves their memory but keeps 8 bits of a sum: what is less than 1/512
        of it is lost, the more the larger M. Gradients are returned in their weight's dtype.

    Attributes:
      chunks: [V] modules with leaves of leading length S, sharded over ``stage``; index r of chunk
        v is the stage that rank r runs as its v-th. With V = 1 that is layer order. Where the
        stages of a chunk differ it is a `pipeline.unlike.Overlaid`; `stages()` gives them as they
        are.
      ends: embed and head, on every rank.

    Raises:
      ValueError: options that do not fit each other; the message says which and what to do.
    """

    def __init__(
        self,
        stages: Any,
        num_microbatches: int,
        *,
        schedule: Any = None,
        mesh: Mesh | None = None,
        embed: Any = None,
        head: Any = None,
        loss_fn: LossFn | None = None,
        remat: Remat = "stage",
        bubbles: Bubbles = "skip",
        pattern: str | None = None,
        delayed: bool = False,
        grad_dtype: Any = None,
    ) -> None:
        num_stages = count_stages(stages)
        _check_options(num_microbatches, remat, bubbles)
        _check_functions(loss_fn=loss_fn, embed=embed, head=head)
        pattern = choose_pattern(pattern, bubbles)
        mesh = choose_mesh(mesh, num_stages, schedule)
        partners = not exchanges_are_barriers(mesh)
        timetable, why = choose_schedule(
            schedule,
            num_ranks=mesh.shape[STAGE],
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            partners=partners,
            delayed=delayed,
            pattern=pattern,
        )
        self.plan = Plan(
            mesh,
            timetable,
            loss_fn,
            remat,
            bubbles,
            why,
            pattern,
            partners,
            delayed,
            check_grad_dtype(grad_dtype),
        )
        self.chunks = nnx.List(make_chunks(stages, mesh, timetable.stages_of))
        self.ends = _replicate(Ends(embed, head), mesh)

    @property
    def schedule(self) -> Schedule:
        """The timetable that runs."""
        return self.plan.schedule

    @property
    def mesh(self) -> Mesh:
        """Where it runs."""
        return self.plan.mesh

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.plan.schedule.num_microbatches

    @property
    def embed(self) -> Any:
        """What makes the first stage's input."""
        return self.ends.embed

    @property
    def head(self) -> Any:
        """What follows the last stage."""
        return self.ends.head

    def __call__(self, inputs: Tree, *, extras: dict[str, Tree] | None = None) -> Tree:
        """Forward only: [N, ...] outputs, on every rank of ``stage``.

        May be differentiated with respect to parameters and inputs; the backward pass runs the
        schedule.
        """
        operands = self._operands(inputs, (), extras)
        advance(self)
        return differentiable.outputs(self.plan, *operands)

    def loss(
        self, inputs: Tree, targets: Tree, *, extras: dict[str, Tree] | None = None
    ) -> jax.Array:
        """The mean loss, a float32 scalar on every rank.

        Differentiated, it runs the whole schedule once; otherwise forward actions alone.
        """
        self._require_loss("loss")
        operands = self._operands(inputs, targets, extras)
        advance(self)
        return differentiable.loss(self.plan, *operands)

    def value_and_grad(
        self, inputs: Tree, targets: Tree, *, extras: dict[str, Tree] | None = None
    ) -> tuple[jax.Array, nnx.State[Any, Any]]:
        """The mean loss and its gradients, laid out as ``nnx.state(pipe, nnx.Param)``."""
        self._require_loss("value_and_grad")
        operands = self._operands(inputs, targets, extras)
        advance(self)
        value, grads, _ = runtime.train(self.plan, *operands)
        layout = jax.tree.structure(nnx.state(self, nnx.Param))
        return value, jax.tree.unflatten(layout, jax.tree.leaves(grads))

    def lower(
        self, inputs: Tree, targets: Tree, *, extras: dict[str, Tree] | None = None
    ) -> jax.stages.Lowered:
        """The training step, traced and not yet compiled, to see its memory or its HLO.

        Leaves may be `jax.ShapeDtypeStruct`, of the batch as of the stages: nothing is run.
        """
        self._require_loss("lower")
        operands = self._operands(inputs, targets, extras)
        return runtime.train.lower(self.plan, *operands)

    def stages(self) -> list[nnx.Module]:
        """Copies of the K stages in layer order, each whole."""
        found = {
            k: take_stage(chunk, rank)
            for rank, held in enumerate(self.schedule.stages_of)
            for chunk, k in zip(self.chunks, held, strict=True)
        }
        return [found[k] for k in range(len(found))]

    def describe(self) -> str:
        """What runs, where, and what it is predicted to cost."""
        return describe(self.plan, self.chunks)

    def _operands(self, inputs: Tree, targets: Tree, extras: Any) -> tuple[Model, Weights, Batch]:
        batch = make_batch(
            inputs,
            targets,
            extras,
            num_microbatches=self.num_microbatches,
            data_size=self.plan.data_size,
        )
        batch = place(batch, self.mesh)
        definitions, params, rests = zip(
            *(define(chunk, "a stage") for chunk in self.chunks), strict=True
        )
        ends, ends_params, ends_rest = define(self.ends, "embed or head")
        model = Model(
            stages=seats(self.chunks, definitions, self.schedule.stages_of),
            chunk=definitions[0],
            ends=ends,
            has_embed=self.embed is not None,
            has_head=self.head is not None,
            loss_fn=self.plan.loss_fn,
            policy=self.plan.remat if callable(self.plan.remat) else None,
            grad_dtype=self.plan.grad_dtype,
        )
        return model, Weights(params, ends_params, rests, ends_rest), batch

    def _require_loss(self, method: str) -> None:
        if self.plan.loss_fn is None:
            raise ValueError(
                f"{method}() needs a loss, and this pipeline was made with loss_fn=None; give "
                f"Pipeline(..., loss_fn=f) with f(outputs, targets) of one microbatch"
            )


def _replicate(ends: Ends, mesh: Mesh) -> Ends:
    """Embed and head on every device of the mesh; the user's modules stay as they are."""
    graphdef, state = nnx.split(ends)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        return jax.device_put(leaf, everywhere)

    return nnx.merge(graphdef, jax.tree.map(place, state))


def _check_options(num_microbatches: Any, remat: Any, bubbles: Any) -> None:
    is_integer = isinstance(num_microbatches, int) and not isinstance(num_microbatches, bool)
    if not is_integer or num_microbatches < 1:
        raise ValueError(
            f"num_microbatches={num_microbatches!r}: must be an integer >= 1, the number of equal "
            f"parts into which each data shard's rows are split"
        )
    if not (remat in ("stage", None) or callable(remat)):
        raise ValueError(
            f"remat={remat!r}: must be 'stage', None, or a jax.checkpoint policy such as "
            f"jax.checkpoint_policies.dots_saveable"
        )
    if bubbles not in ("skip", "masked"):
        raise ValueError(f"bubbles={bubbles!r}: must be 'skip' or 'masked'")


def _check_functions(**functions: Any) -> None:
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}={value!r}: must be callable, or None")
