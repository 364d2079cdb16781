"""Tests of what is predicted and measured: bytes held and sent, by CPU's and TPU's compilers."""
