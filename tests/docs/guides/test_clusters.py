"""Job scripts of the guide start an example on this machine, with the cluster's variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.processes.launch import free_port
from tests.docs.guides.pages import LIMIT, blocks
from tests.docs.pages.reading import ROOT
from tests.processes.test_cluster import FOREIGN

PAGE = "slurm-kubernetes.md"
# Starts a task for each that the job asks for, with what SLURM says to each of them.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # options of srun
for i in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$i SLURM_LOCALID=0 SLURM_STEP_NODELIST=localhost "$@" 2>&1 &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid" || exit 1; done
"""
BASE, SPAN = 65535 - 2**12 + 1, 2**12  # of jax's ports for SLURM


def environment(**given: str) -> dict[str, str]:
    """This process's without any cluster, with one device, and with what is given."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    flags = f"{kept.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, **given}


def manifests() -> dict[str, Any]:
    """Kind -> object of the page's first one of that kind."""
    found: dict[str, Any] = {}
    for block in blocks(PAGE, "yaml"):
        for content in yaml.safe_load_all(block):
            found.setdefault(content["kind"], content)
    return found


def test_the_page_shows_the_script_that_runs() -> None:
    (script,) = blocks(PAGE, "bash")
    assert script == (ROOT / "examples" / "train.sbatch").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_script_for_slurm(tmp_path: Path) -> None:
    script = (ROOT / "examples" / "train.sbatch").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    (tmp_path / "job.sh").write_text(script, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "srun").write_text(SRUN, encoding="utf-8")
    (tmp_path / "srun").chmod(0o755)
    port = next(port for port in iter(free_port, None) if port >= BASE or not _ephemeral())
    job = environment(
        SLURM_SUBMIT_DIR=str(tmp_path),
        STEPS="10",
        SLURM_JOB_ID=str(SPAN + (port - BASE) % SPAN),
        SLURM_NTASKS=str(int(asked["nodes"]) * int(asked["ntasks-per-node"])),
    )
    job["PATH"] = f"{tmp_path}{os.pathsep}{job['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / "job.sh"],
        env=job,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 10: loss") == 1, done.stdout


def _ephemeral() -> bool:
    """True if the machine gives ports that jax takes for SLURM jobs."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return path.exists() and int(path.read_text(encoding="ascii").split()[1]) > BASE + SPAN // 2


def pods(spec: Any, coordinator: str) -> list[tuple[list[str], dict[str, str]]]:
    """The command and the environment of every pod of an indexed Job."""
    (container,) = spec["template"]["spec"]["containers"]
    found = []
    for index in range(spec["parallelism"]):
        own = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        for entry in container["env"]:
            if "value" in entry:
                own[entry["name"]] = entry["value"]
            else:
                path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                own[entry["name"]] = str(index)
        assert own["SHARDPIPE_COORDINATOR"] == f"{coordinator}:8476"
        assert {"containerPort": 8476} in container["ports"]
        found.append((container["command"], own))
    return found


@pytest.mark.slow
def test_the_indexed_job() -> None:
    found = manifests()
    name, spec = found["Job"]["metadata"]["name"], found["Job"]["spec"]
    subdomain = spec["template"]["spec"]["subdomain"]
    port = free_port()
    running = []
    for command, own in pods(spec, f"{name}-0.{subdomain}"):
        own["SHARDPIPE_COORDINATOR"] = f"127.0.0.1:{port}"
        running.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(**own),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=LIMIT)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert ["step 10: loss" in text for text in said] == [True, False]


def test_names_in_the_manifests_fit_each_other() -> None:
    found = manifests()
    job, service = found["Job"], found["Service"]
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    several = found["JobSet"]
    (part,) = several["spec"]["replicatedJobs"]
    name = several["metadata"]["name"]
    inner = part["template"]["spec"]
    for one, first in (
        (spec, f"{job['metadata']['name']}-0.{service['metadata']['name']}"),
        (inner, f"{name}-{part['name']}-0-0.{name}"),
    ):
        places = pods(one, first)
        assert one["completions"] == one["parallelism"] == len(places)
        assert {own["SHARDPIPE_PROCESSES"] for _, own in places} == {str(len(places))}


def test_rights_are_what_jax_asks_for() -> None:
    from jax._src.clusters import k8s_cluster  # private: what it asks is not said elsewhere

    source = Path(k8s_cluster.__file__).read_text(encoding="utf-8")
    asked = set(re.findall(r"_api\.(\w+?)_namespaced_(\w+)\(", source))
    assert asked == {("list", "pod"), ("list", "service"), ("read", "job")}
    rules = manifests()["Role"]["rules"]
    given = {(verb, kind) for rule in rules for verb in rule["verbs"] for kind in rule["resources"]}
    assert {("list", "pods"), ("list", "services"), ("get", "jobs")} <= given
