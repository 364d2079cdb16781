"""An embedding, a head and a loss that can be split by vocabulary over the stage ranks."""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.base.agreed.vocabulary import CrossEntropy as CrossEntropy
    from pipeline.base.agreed.vocabulary import Table as Table
    from pipeline.base.agreed.vocabulary import logits as logits
    from pipeline.base.agreed.vocabulary import spoil as spoil
    from pipeline.models.vocabulary import VocabularyEmbedding as VocabularyEmbedding
    from pipeline.models.vocabulary import VocabularyHead as VocabularyHead

__getattr__, __dir__, __all__ = exports(__name__)
