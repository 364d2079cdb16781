"""The sizes of a decoder, and what follows from them: parameters, operations, bytes.

Letters: d width, h heads, c width of a head, f hidden columns. RMSNorm, grouped queries or latent
attention, SwiGLU or a mixture of experts, and no biases, as in Llama and Mixtral. Operations are
multiplications and additions, of one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.arguments import is_whole
from pipeline.base.chips import known
from pipeline.base.files import Kind, faults_of, read_json
from pipeline.planner.experts import Dispatched, ExpertSizes, LatentSizes

COMPUTE_BYTES = 2  # of an activation, bfloat16


@dataclass(frozen=True)
class ModelSizes:
    """A decoder.

    Attributes:
      layers: blocks.
      width: d.
      heads: of queries.
      kv_heads: of keys and values.
      hidden: f, of the gated MLP; with experts, of the blocks that have none.
      vocabulary: words.
      head_width: c; d over the heads by default.
      tied: whether embedding and head share their table.
      experts: a mixture of experts in the place of the MLP.
      latent: multi-head latent attention; kv_heads and head_width are not read then.
      mtp_modules: modules for multi-token prediction behind the blocks. No plan counts them; it
        names them beside (`Plans.notes`).
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    head_width: int | None = None
    tied: bool = False
    experts: ExpertSizes | None = None
    latent: LatentSizes | None = None
    mtp_modules: int = 0

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        if self.head_width is not None:
            sizes["head_width"] = self.head_width
        wrong = [
            f"{name}={size!r} must be an integer >= 1"
            for name, size in sizes.items()
            if not is_whole(size, 1, numpy=True)
        ]
        kinds = {"experts": ExpertSizes, "latent": LatentSizes}
        wrong += [
            f"{name}={getattr(self, name)!r} must be a pipeline.planner.{kind.__name__}, or None"
            for name, kind in kinds.items()
            if not isinstance(getattr(self, name), kind | None)
        ]
        if not is_whole(self.mtp_modules, 0, numpy=True):
            wrong.append(f"mtp_modules={self.mtp_modules!r} must be an integer >= 0")
        if not isinstance(self.tied, bool):
            wrong.append(f"tied={self.tied!r} must be True or False")
        if not wrong and self.heads % self.kv_heads:
            wrong = [f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}"]
        if not wrong and self._needs_head_width and self.width % self.heads:
            wrong = [f"width={self.width} is no multiple of heads={self.heads}: give head_width"]
        if not wrong and self.experts is not None and self.experts.dense_layers > self.layers:
            dense = self.experts.dense_layers
            wrong = [f"experts.dense_layers={dense} is more than layers={self.layers}"]
        if wrong:
            raise ValueError("ModelSizes: " + "; ".join(wrong))

    @property
    def _needs_head_width(self) -> bool:
        return self.head_width is None and self.latent is None

    @property
    def queries(self) -> int:
        """Columns of all heads of queries, h c."""
        if self.latent is not None:
            return self.heads * (self.latent.nope + self.latent.rope)
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def attended(self) -> int:
        """Columns that attention gives, of all heads."""
        return self.queries if self.latent is None else self.heads * self.latent.value

    @property
    def keys(self) -> int:
        """Columns of all heads of keys."""
        return self.queries if self.latent else self.queries // self.heads * self.kv_heads

    @property
    def _values(self) -> int:
        """Columns of all heads of values."""
        return self.keys if self.latent is None else self.attended

    @property
    def _latents(self) -> int:
        """Columns between the two products of latent attention."""
        if self.latent is None:
            return 0
        return (self.latent.query_rank or 0) + self.latent.rank + self.latent.rope

    @property
    def attention_matrices(self) -> int:
        """Parameters of attention's products."""
        if self.latent is None:
            return 2 * self.width * (self.queries + self.keys)
        at, d, h = self.latent, self.width, self.heads
        queries = d * self.queries
        if at.query_rank is not None:
            queries = at.query_rank * (d + self.queries)
        keys = d * (at.rank + at.rope) + at.rank * h * (at.nope + at.value)
        return queries + keys + d * self.attended

    @property
    def expert_matrices(self) -> int:
        """Parameters of a block's experts, which lie over the axis `expert`."""
        return 0 if self.experts is None else self.experts.number * self._expert

    @property
    def chosen_matrices(self) -> int:
        """Parameters of the experts that one token passes."""
        return 0 if self.experts is None else self.experts.top_k * self._expert

    @property
    def _expert(self) -> int:
        return 0 if self.experts is None else 3 * self.width * self.experts.hidden

    @property
    def whole_matrices(self) -> int:
        """Parameters of a block's products beside experts, whole on every rank of `expert`."""
        if self.experts is None:
            return self.attention_matrices + 3 * self.width * self.hidden
        routed = self.width * (self.experts.number + 3 * self.experts.shared)
        return self.attention_matrices + routed

    @property
    def block_matrices(self) -> int:
        """Parameters of a block's products, all experts included."""
        return self.whole_matrices + self.expert_matrices

    @property
    def active_matrices(self) -> int:
        """Parameters of a block that one token is multiplied with."""
        return self.whole_matrices + self.chosen_matrices

    @property
    def last_matrix(self) -> int:
        """Parameters of the last product that one token passes in a block."""
        if self.experts is None:
            return self.width * self.hidden
        return self.experts.top_k * self.width * self.experts.hidden

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return self.block_matrices + 2 * self.width

    @property
    def module(self) -> int:
        """Parameters of a module for multi-token prediction: a block, the join, and three norms."""
        return self.block + 2 * self.width**2 + 3 * self.width

    @property
    def table(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocabulary * self.width

    @property
    def ends(self) -> int:
        """Parameters outside of blocks: tables and the last norm."""
        return (1 if self.tied else 2) * self.table + self.width

    @property
    def _dense(self) -> tuple[int, int]:
        """Number of blocks without experts, and parameters of the products of one."""
        matrices = self.attention_matrices + 3 * self.width * self.hidden
        return (0 if self.experts is None else self.experts.dense_layers), matrices

    @property
    def parameters(self) -> int:
        """All of them."""
        dense, matrices = self._dense
        return self.layers * self.block + self.ends - dense * (self.block_matrices - matrices)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes, tables and norms included."""
        dense, _ = self._dense
        return self.parameters - (self.layers - dense) * (
            self.expert_matrices - self.chosen_matrices
        )

    def scores(self, seq: int) -> float:
        """Operations of a block's attention, forward: two products, half of them masked."""
        return 2 * seq * (self.queries + self.attended) / 2

    def step_operations(self, seq: int) -> float:
        """Operations per token, forward and backward, nothing computed twice: the count for MFU.

        Of experts those that a token passes.
        """
        dense, matrices = self._dense
        blocks = (self.layers - dense) * 2 * self.active_matrices + dense * 2 * matrices
        return 3 * (blocks + self.layers * self.scores(seq) + 2 * self.table)

    @property
    def _attention_numbers(self) -> int:
        """Columns of queries, keys, values, what attention gives, and latents."""
        return self.queries + self.attended + self.keys + self._values + self._latents

    @property
    def projected(self) -> int:
        """Bytes of a token in queries, keys, values and latents."""
        return COMPUTE_BYTES * (self._attention_numbers - self.attended)

    @property
    def mlp_share(self) -> tuple[float, float]:
        """Shares of a block computed again if only its MLP and attention's last product are.

        Of the parameters that a token is multiplied with, and of what a block's backward reads.
        """
        kept = self.attention_matrices - self.width * self.attended + self.last_matrix
        read = self.plain_residuals(Dispatched()) / COMPUTE_BYTES
        return 1 - kept / self.active_matrices, 1 - self._attention_numbers / read

    def residuals(self, at: Dispatched) -> float:
        """Bytes of a token that a stage keeps for a block's backward (docs/kernel.md).

        It is the smallest set: the block's input and the sum between; queries and the attention's
        output; keys and values; gate and up. Norms and the gate's product are computed again.
        Scores are never kept. Of experts: every row in the order of experts, its gate and up, and
        what experts gave, which the gradient of the router's weights reads. Of experts that take
        tokens in parts, only the tokens.
        """
        numbers = 2 * self.width + self._attention_numbers
        if self.experts is not None and at.part < 1:
            return COMPUTE_BYTES * (numbers + 2 * self.experts.shared + self.width)
        return COMPUTE_BYTES * (numbers + 2 * self._columns(at) + self._moved(at))

    def plain_residuals(self, at: Dispatched) -> float:
        """Bytes of a token that a block's backward reads, without a pipeline or once it has begun.

        Beside what `residuals` has, norms' outputs and the gate's product too; of experts, tokens
        as they came from other ranks. Of experts that take tokens in parts, one part's rows.
        """
        numbers = 4 * self.width + self._attention_numbers
        shared = 0 if self.experts is None else self.experts.shared
        rows = 3 * (self._columns(at) - shared) + self._moved(at, came=True)
        return COMPUTE_BYTES * (numbers + 3 * shared + at.part * rows)

    def _columns(self, at: Dispatched) -> float:
        """Columns of gate, of all rows of a token."""
        if self.experts is None:
            return self.hidden
        return at.rows(self.experts) * self.experts.hidden + self.experts.shared

    def _moved(self, at: Dispatched, *, came: bool = False) -> float:
        """Numbers of a token's rows of width d: those that experts were given, and gave.

        Args:
          at: the dispatch.
          came: whether what an exchange brought is held too, beside rows in the order of experts.
        """
        if self.experts is None:
            return 0.0
        arrived = at.arrives(self.experts) if came else 0.0
        return self.width * (at.rows(self.experts) + at.given(self.experts) + arrived)

    @property
    def ends_of_products(self) -> int:
        """Bytes of what enters attention and MLP, or leaves them: of tensor ranks each has all."""
        return COMPUTE_BYTES * 2 * self.width

    def crossings(self, at: Dispatched) -> float:
        """Bytes of a token that I leaves for W beside `ends_of_products`, inputs and gradients.

        Of each product its input and its output's gradient; of experts, of all rows.
        """
        columns = self._columns(at)
        inputs = self.attended + self._latents + columns
        outputs = self.queries + self.keys + self._values + self._latents + 2 * columns
        rows = 0.0 if self.experts is None else at.rows(self.experts)
        return COMPUTE_BYTES * (inputs + outputs + 2 * rows * self.width)


SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary")

MODELS: dict[str, ModelSizes] = {
    # Meta, "The Llama 3 Herd of Models", table 3.
    "llama-8b": ModelSizes(32, 4096, 32, 8, 14336, 128256),
    "llama-70b": ModelSizes(80, 8192, 64, 8, 28672, 128256),
    "llama-405b": ModelSizes(126, 16384, 128, 8, 53248, 128256),
    # config.json of Mixtral-8x7B-v0.1, Qwen3-30B-A3B, Qwen3-235B-A22B and DeepSeek-V3.
    "mixtral-8x7b": ModelSizes(
        32, 4096, 32, 8, 14336, 32000, experts=ExpertSizes(8, 2, hidden=14336)
    ),
    "qwen3-30b-a3b": ModelSizes(
        48, 2048, 32, 4, 6144, 151936, 128, experts=ExpertSizes(128, 8, hidden=768)
    ),
    "qwen3-235b-a22b": ModelSizes(
        94, 4096, 64, 4, 12288, 151936, 128, experts=ExpertSizes(128, 8, hidden=1536)
    ),
    "deepseek-v3": ModelSizes(
        61,
        7168,
        128,
        128,
        18432,
        129280,
        experts=ExpertSizes(256, 8, hidden=2048, shared=2048, dense_layers=3),
        latent=LatentSizes(512, 128, 64, 128, query_rank=1536),
        mtp_modules=1,
    ),
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


MODULES = "num_nextn_predict_layers"
# Of experts, keys of which a family has one; and of latent attention.
NUMBERS = ("n_routed_experts", "num_local_experts", "num_experts")
COUNTS = ("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size")
LATENT_KEYS = {
    "rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "query_rank": "q_lora_rank",
}
EXPERT_KINDS: dict[str, Kind] = {
    **dict.fromkeys(NUMBERS, "size"),
    **dict.fromkeys((*COUNTS, MODULES), "count"),
    **dict.fromkeys(LATENT_KEYS.values(), "size"),
    "num_experts_per_tok": "size",
    "moe_intermediate_size": "size",
    "decoder_sparse_step": "size",
    "mlp_only_layers": "list",
}


def _read(path: Path) -> ModelSizes:
    try:
        content: Any = read_json(path)
    except ValueError as error:
        raise ValueError(f"model={str(path)!r}: {error}") from error
    kinds: dict[str, Kind] = {theirs: "size" for ours, theirs in KEYS.items() if ours != "tied"}
    if wrong := faults_of(content, kinds | {KEYS["tied"]: "flag"} | EXPERT_KINDS):
        raise ValueError(f"model={str(path)!r}: {'; '.join(wrong)}")
    content = {"num_key_value_heads": content.get("num_attention_heads"), **content}
    needed = [KEYS[name] for name in SIZES]
    has_experts = any(content.get(key) is not None for key in NUMBERS)
    has_latent = content.get(LATENT_KEYS["rank"]) is not None
    needed += ["num_experts_per_tok"] * has_experts
    needed += [key for name, key in LATENT_KEYS.items() if name != "query_rank"] * has_latent
    if missing := [key for key in needed if content.get(key) is None]:
        raise ValueError(
            f"model={str(path)!r} lacks {', '.join(missing)}: a Hugging Face config.json has them"
        )
    try:
        return ModelSizes(
            **{ours: content[theirs] for ours, theirs in KEYS.items() if theirs in content},
            experts=_experts(content) if has_experts else None,
            latent=_latent(content) if has_latent else None,
            mtp_modules=content.get(MODULES) or 0,
        )
    except ValueError as error:
        raise ValueError(f"model={str(path)!r}: {error}") from error


def _latent(content: Mapping[str, Any]) -> LatentSizes:
    found: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in LATENT_KEYS.items()}
    return LatentSizes(**found)


def _experts(content: Mapping[str, Any]) -> ExpertSizes:
    """The experts of any family's configuration."""
    number = next(content[key] for key in NUMBERS if content.get(key) is not None)
    hidden = content.get("moe_intermediate_size") or content[KEYS["hidden"]]
    shared = content.get("shared_expert_intermediate_size") or 0
    shared += hidden * (content.get("n_shared_experts") or 0)
    step, without = content.get("decoder_sparse_step") or 1, content.get("mlp_only_layers") or []
    layers = range(content[KEYS["layers"]])
    dense = [n for n in layers if n in without or (n + 1) % step]
    first = content.get("first_k_dense_replace") or 0
    return ExpertSizes(
        number, content["num_experts_per_tok"], hidden, shared, max(first, len(dense))
    )
