"""Tests of the kernel: memory, segments, delayed sends, vocabulary, NaN, state of stages."""
