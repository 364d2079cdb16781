"""Searches of users: each is in a page's title or among its key words, where the site finds it.

The search puts pages with the whole query in their titles first (docs/_ext/scorer.js), then pages
with it as a key word (``<!-- search: ... -->``, `indexed` in docs/_ext/contents.py).
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.docs.pages.reading import DOCS, ROOT, name_of
from tests.docs.pages.test_reference import contents  # noqa: F401
from tests.docs.prose import users_pages

SEARCHES = {
    "checkpoints.md": [
        "checkpoint",
        "resume",
        "save and restore",
        "new head",
        "preemption",
        "spot instances",
    ],
    "concepts.md": ["microbatch", "glossary", "bubble fraction"],
    "engines.md": ["profiling", "timeline", "heterogeneous stages", "MPMD"],
    "errors.md": ["error message", "batch not divisible"],
    "generation.md": ["generate", "sampling", "inference"],
    "limits.md": ["versions", "scan body function carry"],
    "losses.md": ["metrics", "batch norm", "contrastive", "CLIP", "label smoothing"],
    "pipeline.md": ["recipes"],
    "schedules.md": ["zero bubble", "uneven", "uneven stages", "load balancing", "virtual stages"],
    "split.md": ["ViT", "existing model", "weight tying", "dropout"],
    "trainers.md": ["tunix", "distillation"],
    "training.md": [
        *("LoRA", "fine-tuning", "freeze", "freeze layers", "gradient accumulation"),
        *("validation", "validation accuracy", "early stopping", "learning rate", "EMA"),
        *("ragged", "data loader", "logging", "throughput", "config file", "MFU"),
    ],
    "weights.md": ["Hugging Face", "safetensors"],
    "guides/accelerators.md": ["GPU", "TPU pod"],
    "guides/debugging-a-hang.md": ["hang", "NaN", "deadlock", "slow compilation", "compile time"],
    "guides/experts.md": ["experts", "Mixtral", "MoE", "expert parallel"],
    "guides/from-another-library.md": ["MaxText", "torch.distributed.pipelining", "PyTorch"],
    "guides/long-sequences.md": [
        "long context",
        "packing",
        "context parallel",
        "sequence parallelism",
    ],
    "guides/memory.md": ["out of memory", "OOM", "remat", "activation checkpointing", "offload"],
    "guides/precision.md": ["bf16", "mixed precision", "loss scale"],
    "guides/processes.md": ["multi-host", "multi-node", "random seed", "reproducibility"],
    "guides/quickstart.md": ["quick start", "install"],
    "guides/slurm-kubernetes.md": ["SLURM", "Kubernetes"],
    "guides/which-mesh.md": ["FSDP", "ZeRO", "tensor parallel", "planner", "device mesh"],
}


@pytest.mark.parametrize("page", SEARCHES)
def test_a_page_has_what_users_search_for(contents: ModuleType, page: str) -> None:  # noqa: F811
    text = (DOCS / page).read_text(encoding="utf-8")
    title = text.partition("\n")[0].lower()
    words = [word.lower() for word in contents.key_words(text)]
    assert len(words) == len(set(words))
    queries = [query.lower() for query in SEARCHES[page]]
    assert [query for query in queries if query not in title and query not in words] == []


def test_every_page_of_users_is_searched_for() -> None:
    others = {"README.md", "alternatives.md"}
    names = {name_of(page) for page in users_pages(ROOT)}
    assert names - others == set(SEARCHES)


def test_key_words_become_entries_of_the_index(contents: ModuleType) -> None:  # noqa: F811
    page = "# A\n\n<!-- search: early stopping,\nLoRA -->\n\nText, <!-- search: no -->.\n"
    assert contents.key_words(page) == ["early stopping", "LoRA"]
    assert contents.indexed(page) == (
        "# A\n\n```{index} ! early stopping, ! LoRA\n```\n\nText, <!-- search: no -->.\n"
    )
