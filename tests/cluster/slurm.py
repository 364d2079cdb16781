"""SLURM on hosts of this machine: munge, slurmctld on one, slurmd on two, and jobs by sbatch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import hosts, jobs
from tests.cluster.hosts import Host

TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
GRACE = 30  # seconds from a preempted job's SIGTERM to its SIGKILL; jobs save within a few
CONF = """
ClusterName=shardpipe
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-2] CPUs=2 State=UNKNOWN
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=node[1-2] PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """Daemons on a head and two nodes; what runs on them is submitted on the head."""

    def __init__(self, folder: Path, all_hosts: list[Host]) -> None:
        self.head, self.nodes, self.folder = all_hosts[0], all_hosts[1:], folder
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(folder=folder, grace=GRACE), encoding="utf-8")
        (folder / "state").mkdir()
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.environment = {"SLURM_CONF": str(conf), **jobs.ALWAYS}
        munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self.head.start([*munge, f"--socket={folder}/munge.socket"], folder / "munged.out")
        hosts.wait((folder / "munge.socket").exists, "munged")
        self._daemon(self.head, "slurmctld", "-D")
        for node in self.nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.name)
        hosts.wait(lambda: self.said("sinfo", "-h", "-o", "%T %D") == "idle 2", "two nodes")

    def _daemon(self, host: Host, *command: str) -> None:
        host.start(command, self.folder / f"{host.name}.{command[0]}", self.environment)

    def said(self, *command: str) -> str:
        """The output of a command of SLURM on the head."""
        setting = [f"{name}={text}" for name, text in self.environment.items()]
        return self.head.run("env", *setting, *command, check=False).strip()

    def submit(self, script: Path, run: Path, *options: str, **variables: object) -> str:
        """Submit a script in a folder; returns the job's number."""
        words = [f"{name}={value}" for name, value in {**self.environment, **variables}.items()]
        place = [f"--chdir={run}", f"--output={run}/slurm.out", *options, str(script)]
        said = self.head.run("env", "-C", str(run), *words, "sbatch", "--parsable", *place)
        return said.strip().splitlines()[-1]

    def state(self, job: str) -> str:
        found = dict(
            word.split("=", 1)
            for word in self.said("scontrol", "show", "job", job).split()
            if "=" in word
        )
        return f"{found.get('JobState')} {found.get('ExitCode')} {found.get('Restarts')}"

    def until(self, job: str, state: str) -> None:
        """Wait until a job has a state, such as "COMPLETED 0:0 1": that, its code, its restarts."""
        seen = [""]

        def there() -> bool:
            now = self.state(job)
            if not now.startswith("None"):  # SLURM forgets a job five minutes after its end
                seen[0] = now
            return now.startswith(state)

        try:
            hosts.wait(there, f"{job} {state}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {seen[0]}") from error


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """SLURM, as long as the context lasts."""
    hosts.need(TOOLS)
    with hosts.hosts(["head", "node1", "node2"], folder) as all_hosts:
        yield Slurm(folder, all_hosts)


def prepare(folder: Path) -> Path:
    """A folder from which a job of the guide can be submitted."""
    folder.mkdir()
    (folder / "examples").symlink_to(jobs.ROOT / "examples")
    (folder / ".venv").symlink_to(jobs.ROOT / ".venv")
    return folder


def check(run: Path, wanted: dict[int, float], restarts: int) -> str:
    """See that a run made all steps, and gave the losses of one process, however often it began."""
    made = jobs.losses(run)
    assert all(loss == wanted[step] for step, loss in made)
    assert dict(made) == wanted
    again = len(made) - len(wanted)
    text = (run / "slurm.out").read_text(encoding="utf-8", errors="replace")
    assert "0: step " in text
    assert "1: step " not in text  # process 0 alone prints, and each line has its rank
    assert all(f"\n{rank}: " in text for rank in range(4))
    return f"{len(wanted)} losses equal to the last digit, {restarts} restarts, {again} steps again"


def lane(folder: Path) -> Iterator[str]:
    """Jobs of the guide's script: to its end, requeued, preempted, and at the end of its time."""
    steps = 200
    script = jobs.ROOT / "examples" / "train.sbatch"
    wanted = jobs.alone(folder / "alone", steps)
    with slurm(folder) as cluster:
        began = time.monotonic()

        def took() -> str:
            nonlocal began
            before, began = began, time.monotonic()
            return f"{began - before:.0f} s"

        run = prepare(folder / "whole")
        job = cluster.submit(script, run, STEPS=steps)
        cluster.until(job, "COMPLETED 0:0 0")
        yield f"sbatch, 4 tasks on 2 nodes: {check(run, wanted, 0)}; {took()}"

        run = prepare(folder / "requeued")
        job = cluster.submit(script, run, STEPS=steps)
        hosts.wait(lambda: len(jobs.losses(run)) >= 15, "step 15")
        assert not cluster.said("scontrol", "requeue", job)
        cluster.until(job, "COMPLETED 0:0 1")
        yield f"scontrol requeue: {check(run, wanted, 1)}; {took()}"

        for what, held in (("asked by SIGTERM", False), ("killed, as it cannot save", True)):
            run = prepare(folder / what.partition(" ")[0])
            job = cluster.submit(script, run, STEPS=steps)
            hosts.wait(lambda run=run: len(jobs.losses(run)) >= 15, "step 15")
            if held:
                cluster.nodes[1].signal(signal.SIGSTOP, "examples/train_processes.py")
            urgent = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--output=/dev/null"]
            assert cluster.said(*urgent, "--wrap=sleep 5").isdecimal()
            if (
                held
            ):  # SLURM wakes it before SIGTERM; again and again, so that SIGKILL has to follow

                def gone(job: str = job) -> bool:
                    cluster.nodes[1].signal(signal.SIGSTOP, "examples/train_processes.py")
                    return not cluster.state(job).startswith("RUNNING 0:0 0")

                hosts.wait(gone, "the end of a job that cannot save", 2 * GRACE + 60)
            # After a SIGKILL this SLURM asked the restarted job to stop once more, 30 s later.
            cluster.until(job, "COMPLETED 0:0")
            restarts = int(cluster.state(job).rpartition(" ")[2])
            assert restarts >= 1
            assert held == (len(jobs.losses(run)) > steps)  # those since the last checkpoint
            yield f"preempted, {what}: {check(run, wanted, restarts)}; {took()}"
