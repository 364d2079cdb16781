"""The store of texts of jax's coordination service, as this release of jax has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.processes.launch import free_port

PROGRAM = """
import sys, jax
from pipeline.processes import service
jax.distributed.initialize(sys.argv[1], 1, 0, cluster_detection_method="deactivate")
for topic in ("a/1", "a/2", "ab"):
    service.say(topic, "x")
service.say("a/2", "y", again=True)
print(service.hear("a/1", 1, 60), service.hear("a/3", 1, 0.1), service.said("a/2"))
service.forget("a")
print(service.said("a/1"), service.said("a/2"), service.said("ab"))
"""


@pytest.mark.slow
def test_texts_are_kept_by_topic_and_process_until_they_are_forgotten() -> None:
    command = [sys.executable, "-c", PROGRAM, f"127.0.0.1:{free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "{0: 'x'} {} {0: 'y'}\n{} {} {0: 'x'}\n", done.stderr
