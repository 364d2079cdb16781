"""The sizes of a decoder, and what follows from them: parameters, operations, bytes.

Letters: d width, h heads, c width of a head, f hidden columns. RMSNorm, grouped queries, SwiGLU and
no biases, as in Llama. Operations are multiplications and additions, of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.arguments import is_whole
from pipeline.base.files import Kind, faults_of, read_json
from pipeline.planner.chips import known

COMPUTE_BYTES = 2  # of an activation, bfloat16


@dataclass(frozen=True)
class ModelSizes:
    """A decoder.

    Attributes:
      layers: blocks.
      width: d.
      heads: of queries.
      kv_heads: of keys and values.
      hidden: f, of the gated MLP.
      vocabulary: words.
      head_width: c; d over the heads by default.
      tied: whether embedding and head share their table.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    head_width: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        if self.head_width is not None:
            sizes["head_width"] = self.head_width
        wrong = [
            f"{name}={size!r} must be an integer >= 1"
            for name, size in sizes.items()
            if not is_whole(size, 1, numpy=True)
        ]
        if not wrong and self.heads % self.kv_heads:
            wrong = [f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}"]
        if not wrong and self.head_width is None and self.width % self.heads:
            wrong = [f"width={self.width} is no multiple of heads={self.heads}: give head_width"]
        if wrong:
            raise ValueError("ModelSizes: " + "; ".join(wrong))

    @property
    def queries(self) -> int:
        """Columns of all heads of queries, h c."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Columns of all heads of keys; of values as many."""
        return self.queries // self.heads * self.kv_heads

    @property
    def block_matrices(self) -> int:
        """Parameters of a block's products."""
        attention = 2 * self.width * (self.queries + self.keys)
        return attention + 3 * self.width * self.hidden

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return self.block_matrices + 2 * self.width

    @property
    def table(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocabulary * self.width

    @property
    def ends(self) -> int:
        """Parameters outside of blocks: tables and the last norm."""
        return (1 if self.tied else 2) * self.table + self.width

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.block + self.ends

    def scores(self, seq: int) -> float:
        """Operations of a block's attention, forward: two products, half of them masked."""
        return 2 * 2 * seq * self.queries / 2

    def step_operations(self, seq: int) -> float:
        """Operations per token, forward and backward, nothing computed twice: the count for MFU."""
        block = 2 * self.block_matrices + self.scores(seq)
        return 3 * (self.layers * block + 2 * self.table)

    @property
    def residuals(self) -> int:
        """Bytes that a stage keeps of a block for its backward, the smallest set (docs/kernel.md).

        The block's input and the sum between; queries and the attention's output; keys and values;
        gate and up. Norms and the gate's product are computed again. Scores are never kept.
        """
        numbers = 2 * self.width + 2 * self.queries + 2 * self.keys + 2 * self.hidden
        return COMPUTE_BYTES * numbers

    @property
    def plain_residuals(self) -> int:
        """Bytes that a block's backward reads, without a pipeline or once it has begun.

        Beside what `residuals` has, norms' outputs and the gate's product too.
        """
        numbers = 4 * self.width + 2 * self.queries + 2 * self.keys + 3 * self.hidden
        return COMPUTE_BYTES * numbers

    @property
    def ends_of_products(self) -> int:
        """Bytes of what enters attention and MLP, or leaves them: of tensor ranks each has all."""
        return COMPUTE_BYTES * 2 * self.width

    @property
    def crossings(self) -> int:
        """Bytes that I leaves for W beside `ends_of_products`, of inputs and of gradients.

        Of each product its input and its output's gradient.
        """
        inputs = self.queries + self.hidden
        outputs = self.queries + 2 * self.keys + 2 * self.hidden
        return COMPUTE_BYTES * (inputs + outputs)


SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary")

MODELS: dict[str, ModelSizes] = {
    # Meta, "The Llama 3 Herd of Models", table 3.
    "llama-8b": ModelSizes(32, 4096, 32, 8, 14336, 128256),
    "llama-70b": ModelSizes(80, 8192, 64, 8, 28672, 128256),
    "llama-405b": ModelSizes(126, 16384, 128, 8, 53248, 128256),
}

# Of a Hugging Face configuration, by our names.
KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "vocabulary": "vocab_size",
    "head_width": "head_dim",
    "tied": "tie_word_embeddings",
}


def find_model(model: ModelSizes | str | Path) -> ModelSizes:
    """A model by name, or by the path of a ``config.json``.

    Raises:
      ValueError: no such model and no such file, or a file that says too little.
    """
    if isinstance(model, ModelSizes):
        return model
    if isinstance(model, str) and model.lower() in MODELS:
        return MODELS[model.lower()]
    if not isinstance(model, str | Path) or not Path(model).is_file():
        raise ValueError(
            f"model={str(model)!r} is neither a known model nor a file; {known(model, MODELS)}; or "
            f"give the path of a config.json, or a pipeline.planner.ModelSizes"
        )
    return _read(Path(model))


def _read(path: Path) -> ModelSizes:
    try:
        content: Any = read_json(path)
    except ValueError as error:
        raise ValueError(f"model={str(path)!r}: {error}") from error
    kinds: dict[str, Kind] = {theirs: "size" for ours, theirs in KEYS.items() if ours != "tied"}
    if wrong := faults_of(content, kinds | {KEYS["tied"]: "flag"}):
        raise ValueError(f"model={str(path)!r}: {'; '.join(wrong)}")
    content = {"num_key_value_heads": content.get("num_attention_heads"), **content}
    missing = [KEYS[name] for name in SIZES if content.get(KEYS[name]) is None]
    if missing:
        raise ValueError(
            f"model={str(path)!r} lacks {', '.join(missing)}: a Hugging Face config.json has them"
        )
    return ModelSizes(
        **{ours: content[theirs] for ours, theirs in KEYS.items() if theirs in content}
    )
