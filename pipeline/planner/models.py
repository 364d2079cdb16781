"""The sizes of a decoder, with its numbers of parameters and operations.

Letters: d width, h heads, c width of a head, f hidden columns, e experts, k experts of a token.
Models have RMSNorm, grouped queries or latent attention, SwiGLU or a mixture of experts, and no
biases, as in Llama and Mixtral. Operations are multiplications and additions for one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.base.arguments import is_whole
from pipeline.base.chips import known
from pipeline.base.files import Kind, faults_of, read_json


def _faults(record: Any, least: Mapping[str, int]) -> list[str]:
    """List the sizes of a record that are no integers or too small; optional sizes may be None."""
    return [
        f"{name}={size!r} must be an integer >= {low}"
        for name, low in least.items()
        if not is_whole(size := getattr(record, name), low, numpy=True)
        and not (size is None and name in ("head_width", "query_rank"))
    ]


@dataclass(frozen=True)
class ExpertSizes:
    """The mixture of experts of a decoder's blocks.

    Attributes:
      number: e.
      top_k: k.
      hidden: columns of one expert.
      shared: columns of an MLP that every token passes; 0 for none.
      dense_layers: blocks with an MLP instead of experts. They count in parameters and operations;
        a rank's seconds and bytes assume experts in all blocks.
    """

    number: int
    top_k: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        least = {"number": 1, "top_k": 1, "hidden": 1, "shared": 0, "dense_layers": 0}
        wrong = _faults(self, least)
        if not wrong and self.top_k > self.number:
            wrong = [f"top_k={self.top_k} is more than number={self.number}: give no more"]
        if wrong:
            raise ValueError("ExpertSizes: " + "; ".join(wrong))


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention, like `pipeline.decoders.LatentConfig`.

    Attributes:
      rank: width of the latent of keys and values.
      nope: columns of a head's queries and keys without rotary positions.
      rope: columns of a head's queries and keys with rotary positions.
      value: width of a head's values.
      query_rank: width of the latent of queries; None for a single product.
    """

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        if wrong := _faults(self, dict.fromkeys(vars(self), 1)):
            raise ValueError("LatentSizes: " + "; ".join(wrong))


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder.

    Attributes:
      layers: number of blocks.
      width: d.
      heads: heads of queries.
      kv_heads: heads of keys and values.
      hidden: f, the columns of the gated MLP; with experts, of the MLP in blocks without experts.
      vocabulary: number of words.
      head_width: c; by default d divided by the number of heads.
      tied: whether embedding and head share their table.
      experts: a mixture of experts that replaces the MLP.
      latent: multi-head latent attention; kv_heads and head_width are then not read.
      mtp_modules: modules for multi-token prediction after the blocks. No plan counts them;
        `Plans.notes` names them.
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
        wrong = _faults(self, dict.fromkeys([*SIZES, "head_width"], 1))
        wrong += [
            f"{name}={getattr(self, name)!r} must be a pipeline.planner.{kind.__name__}, or None"
            for name, kind in {"experts": ExpertSizes, "latent": LatentSizes}.items()
            if not isinstance(getattr(self, name), kind | None)
        ]
        wrong += _faults(self, {"mtp_modules": 0})
        if not isinstance(self.tied, bool):
            wrong.append(f"tied={self.tied!r} must be True or False")
        if wrong:
            raise ValueError("ModelSizes: " + "; ".join(wrong))
        dense, needs_width = self._dense_layers, self.head_width is None and self.latent is None
        if self.heads % self.kv_heads:
            text = f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}"
        elif needs_width and self.width % self.heads:
            text = f"width={self.width} is no multiple of heads={self.heads}: give head_width"
        elif dense > self.layers:
            text = f"experts.dense_layers={dense} is more than layers={self.layers}"
        else:
            return
        raise ValueError(f"ModelSizes: {text}")

    # Columns of attention.

    @property
    def queries(self) -> int:
        """Number of columns of the query projection, all heads together: h c."""
        if self.latent is not None:
            return self.heads * (self.latent.nope + self.latent.rope)
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def attended(self) -> int:
        """Number of columns of attention's result, all heads together."""
        return self.queries if self.latent is None else self.heads * self.latent.value

    @property
    def keys(self) -> int:
        """Number of columns of the key projection, all heads together."""
        return self.queries if self.latent else self.queries // self.heads * self.kv_heads

    @property
    def latents(self) -> int:
        """Number of columns between the two products of latent attention."""
        if self.latent is None:
            return 0
        return (self.latent.query_rank or 0) + self.latent.rank + self.latent.rope

    @property
    def projected(self) -> int:
        """Number of columns of queries, keys, values and latents together."""
        values = self.keys if self.latent is None else self.attended
        return self.queries + self.keys + values + self.latents

    # Parameters of a block's products.

    @cached_property
    def attention_matrices(self) -> int:
        """Parameters of attention's products."""
        d, at = self.width, self.latent
        if at is None:
            return 2 * d * (self.queries + self.keys)
        queries = d * self.queries
        if at.query_rank is not None:
            queries = at.query_rank * (d + self.queries)
        keys = d * (at.rank + at.rope) + at.rank * self.heads * (at.nope + at.value)
        return queries + keys + d * self.attended

    @cached_property
    def last_matrix(self) -> int:
        """Parameters of the last product that is computed for a token in a block."""
        experts = self.experts
        return self.width * (self.hidden if experts is None else experts.top_k * experts.hidden)

    @property
    def expert_matrices(self) -> int:
        """Parameters of a block's experts, which the axis `expert` divides."""
        experts = self.experts
        return 0 if experts is None else experts.number * 3 * self.width * experts.hidden

    @cached_property
    def whole_matrices(self) -> int:
        """Number of parameters of a block's products that are not split over the axis `expert`."""
        if self.experts is None:
            return self._dense_matrices
        routed = self.experts.number + 3 * self.experts.shared
        return self.attention_matrices + self.width * routed

    @cached_property
    def active_matrices(self) -> int:
        """Parameters of a block that are multiplied with one token."""
        return self.whole_matrices + (0 if self.experts is None else 3 * self.last_matrix)

    @property
    def _dense_matrices(self) -> int:
        return self.attention_matrices + 3 * self.width * self.hidden

    @property
    def _dense_layers(self) -> int:
        return 0 if self.experts is None else self.experts.dense_layers

    # Parameters and operations of the whole model.

    @cached_property
    def block(self) -> int:
        """Parameters of a block, all experts included."""
        return self.whole_matrices + self.expert_matrices + 2 * self.width

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
        dense, matrices = self._dense_layers, self._dense_matrices + 2 * self.width
        return (self.layers - dense) * self.block + dense * matrices + self.ends

    @property
    def active_parameters(self) -> int:
        """Parameters that are used for one token, tables and norms included."""
        skipped = self.whole_matrices + self.expert_matrices - self.active_matrices
        return self.parameters - (self.layers - self._dense_layers) * skipped

    def scores(self, seq: int) -> float:
        """Return operations of a block's forward attention: two products, half of them masked."""
        return 2 * seq * (self.queries + self.attended) / 2

    def step_operations(self, seq: int) -> float:
        """Return operations per token, forward and backward, without recomputation, for the MFU.

        Only the experts that a token uses are counted.
        """
        dense = self._dense_layers
        products = (self.layers - dense) * self.active_matrices + dense * self._dense_matrices
        return 3 * (2 * products + self.layers * self.scores(seq) + 2 * self.table)


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
        *(61, 7168, 128, 128, 18432, 129280),
        experts=ExpertSizes(256, 8, hidden=2048, shared=2048, dense_layers=3),
        latent=LatentSizes(512, 128, 64, 128, query_rank=1536),
        mtp_modules=1,
    ),
}

# Keys of a Hugging Face configuration, by our names; each family has one of `NUMBERS`.
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
NUMBERS = ("n_routed_experts", "num_local_experts", "num_experts")
LATENT_KEYS = {
    "rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "query_rank": "q_lora_rank",
}
COUNTS = ("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size")
EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
MODULES = "num_nextn_predict_layers"
KINDS: dict[str, Kind] = {
    **dict.fromkeys([*KEYS.values(), *NUMBERS, *LATENT_KEYS.values()], "size"),
    **dict.fromkeys(EXPERTS, "size"),
    **dict.fromkeys((*COUNTS, MODULES), "count"),
    "tie_word_embeddings": "flag",
    "mlp_only_layers": "list",
}


def find_model(model: ModelSizes | str | Path) -> ModelSizes:
    """Return a model by name, or by the path of a ``config.json``."""
    if isinstance(model, ModelSizes):
        return model
    if isinstance(model, str) and model.lower() in MODELS:
        return MODELS[model.lower()]
    named = f"model={str(model)!r}"
    if not isinstance(model, str | Path) or not Path(model).is_file():
        raise ValueError(
            f"{named} is neither a known model nor a file; {known(model, MODELS)}; or give the "
            f"path of a config.json, or a pipeline.planner.ModelSizes"
        )
    try:
        content = read_json(Path(model))
        wrong = faults_of(content, KINDS)
        missing = [] if wrong else _missing(content)
        if not wrong and not missing:
            return _sizes(content)
    except ValueError as error:
        raise ValueError(f"{named}: {error}") from error
    if wrong:
        raise ValueError(f"{named}: {'; '.join(wrong)}")
    raise ValueError(f"{named} lacks {', '.join(missing)}: a Hugging Face config.json has them")


def _missing(content: Mapping[str, Any]) -> list[str]:
    needed = [KEYS[name] for name in SIZES if name != "kv_heads"]
    if any(content.get(key) is not None for key in NUMBERS):
        needed.append("num_experts_per_tok")
    if content.get(LATENT_KEYS["rank"]) is not None:
        needed += [key for name, key in LATENT_KEYS.items() if name != "query_rank"]
    return [key for key in needed if content.get(key) is None]


def _sizes(content: Mapping[str, Any]) -> ModelSizes:
    latent: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in LATENT_KEYS.items()}
    content = {"num_key_value_heads": content["num_attention_heads"], **content}
    return ModelSizes(
        **{ours: content[theirs] for ours, theirs in KEYS.items() if theirs in content},
        experts=_experts(content),
        latent=None if latent["rank"] is None else LatentSizes(**latent),
        mtp_modules=content.get(MODULES) or 0,
    )


def _experts(content: Mapping[str, Any]) -> ExpertSizes | None:
    number = next((content[key] for key in NUMBERS if content.get(key) is not None), None)
    if number is None:
        return None
    hidden = content.get("moe_intermediate_size") or content[KEYS["hidden"]]
    first, number_shared, shared = (content.get(key) or 0 for key in COUNTS)
    step, without = content.get("decoder_sparse_step") or 1, content.get("mlp_only_layers") or []
    dense = [n for n in range(content[KEYS["layers"]]) if n in without or (n + 1) % step]
    shared += hidden * number_shared
    top_k = content["num_experts_per_tok"]
    return ExpertSizes(number, top_k, hidden, shared, max(first, len(dense)))
