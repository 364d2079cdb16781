"""bench/gpu.py: which timetables a short run takes."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
from bench import gpu
assert gpu.chosen(None) == gpu.OURS
names = "zb_v, V=2, remat=None", "1f1b, V=1, remat=stage"
print(*(ours.name for ours in gpu.chosen(names)), sep="; ")
print("\\n".join(f"  {ours.name}" for ours in gpu.OURS))
"""


@pytest.mark.slow
def test_timetables_are_chosen_by_the_names_of_the_tables() -> None:
    done = python("-c", CODE)
    assert (done.returncode, done.stderr) == (0, "")
    chosen, _, listed = done.stdout.partition("\n")
    assert chosen == "1f1b, V=1, remat=stage; zb_v, V=2, remat=None"
    refused = python("-m", "bench.gpu", "steps", "--only", "zb_v, V=2")
    assert refused.returncode == 2
    wanted = (
        "error: --only 'zb_v, V=2': no timetable has this name, the nearest is 'zb_v, V=2, "
        f"remat=None'; quote one or more of these names:\n{listed}"
    )
    assert refused.stderr.partition("python -m bench.gpu: ")[2] == wanted
