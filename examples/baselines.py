"""Losses predicted by counting alone: byte n-grams with add-one smoothing, in nats per byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus import Bytes, Tokens


def unigram(train: Bytes, targets: Tokens) -> float:
    """Cross entropy of targets under the byte frequencies of the train text."""
    counts = np.bincount(train, minlength=256) + 1.0
    return _cross_entropy(counts, targets)


def bigram(train: Bytes, inputs: Tokens, targets: Tokens) -> float:
    """Cross entropy of targets given the byte before, by the pair counts of the train text."""
    pairs = train[:-1].astype(np.int32) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1.0
    return _cross_entropy(counts, (inputs, targets))


def _cross_entropy(counts: NDArray[np.float64], where: Tokens | tuple[Tokens, Tokens]) -> float:
    probabilities = counts / counts.sum(-1, keepdims=True)
    return float(-np.log(probabilities[where]).mean())
