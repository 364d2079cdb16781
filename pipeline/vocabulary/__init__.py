"""An embedding, a head and a loss that can be split by vocabulary over the stage ranks."""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.base.agreed.vocabulary import CrossEntropy, Table, logits, spoil
    from pipeline.models.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = ["CrossEntropy", "Table", "VocabularyEmbedding", "VocabularyHead", "logits", "spoil"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "pipeline.base.agreed.vocabulary": "CrossEntropy Table logits spoil",
        "pipeline.models.vocabulary": "VocabularyEmbedding VocabularyHead",
    },
)
