"""Which process this is: arguments, then a launcher's environment, then what jax detects."""

from __future__ import annotations

import os

import pytest

from pipeline.processes.cluster import COORDINATOR, PROCESS, PROCESSES, Cluster, find

LAUNCHED = {COORDINATOR: "127.0.0.1:4000", PROCESSES: "4", PROCESS: "3"}
SLURM = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_NODELIST": "node[003-004,010]",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
FOREIGN = ("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORD", "SHARDPIPE_", "TPU_", "MEGASCALE_")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)


def look(*given: object, **environment: str) -> Cluster:
    return find(*given, timeout=1, environment=environment)  # type: ignore[arg-type]


def test_nothing_speaks_of_others() -> None:
    assert look(None, None, None) == Cluster(coordinator="", count=1, index=0)


def test_one_process_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert look(None, 1, None) == look(None, 1, 0) == Cluster()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert look(None, None, None) == Cluster()


def test_the_launcher_speaks_through_the_environment() -> None:
    assert look(None, None, None, **LAUNCHED) == Cluster("127.0.0.1:4000", 4, 3)


def test_arguments_come_before_the_launcher() -> None:
    assert look("h:1", 5, 4, **LAUNCHED) == Cluster("h:1", 5, 4)
    assert look(None, None, 0, **LAUNCHED) == Cluster("127.0.0.1:4000", 4, 0)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (SLURM, Cluster("node003:61540", 6, 5, (1,))),
        (OPEN_MPI, Cluster("10.96.0.1:62880", 2, 1, (0,))),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "h:7"}, Cluster("h:7", 6, 5, (1,))),
    ],
)
def test_jax_detects_a_cluster(
    environment: dict[str, str], found: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert look(None, None, None) == found
    # Arguments, and then the launcher, come before it.
    assert look("h:1", None, 0).coordinator == "h:1"
    assert look(None, None, None, **LAUNCHED) == Cluster("127.0.0.1:4000", 4, 3)


def test_a_tpu_pod_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.clusters import cloud_tpu_cluster as tpu

    monkeypatch.setattr(tpu, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(tpu.GkeTpuCluster, "is_env_present", classmethod(lambda cls: True))
    monkeypatch.setattr(tpu, "get_tpu_env_value", {}.get)
    monkeypatch.setattr(tpu.GceTpuCluster, "is_env_present", classmethod(lambda cls: False))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,other")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    found = look(None, None, None)
    assert (found.address[0], found.count, found.index) == ("localhost", 2, 1)


def test_an_address_has_a_host_and_a_port() -> None:
    assert Cluster("10.0.0.1:80", 2).address == ("10.0.0.1", 80)
    assert Cluster("[::1]:80", 2).address == ("::1", 80)


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (
            ("h:1", None, 2),
            {},
            (
                "coordinator='h:1', process_id=2, but num_processes unknown, and no SLURM, Open "
                "MPI, Kubernetes or TPU pod that tells; give all three, or start the program with "
                "`python -m pipeline launch`"
            ),
        ),
        (
            (None, 4, None),
            {},
            (
                "num_processes=4, but coordinator and process_id unknown, and no SLURM, Open MPI, "
                "Kubernetes or TPU pod that tells; give all three, or start the program with "
                "`python -m pipeline launch`"
            ),
        ),
        (("h:1", 0, 0), {}, "num_processes=0: must be an integer >= 1"),
        (("h:1", 2, -1), {}, "process_id=-1: must be an integer >= 0"),
        (("h:1", 2, 2), {}, "process_id=2: 2 processes are numbered 0..1; give each its own"),
        *(
            (
                (address, 2, 1),
                {},
                (
                    f"coordinator={address!r}: must be host:port, a name or address of process "
                    f"0's host and a free port there, such as '10.0.0.1:8476'"
                ),
            )
            for address in ("h", ":1", "h:x", "h:0", "h:65536")
        ),
        (
            (None, None, None),
            {**LAUNCHED, PROCESS: "one"},
            "SHARDPIPE_PROCESS='one': must be an integer >= 0, the job's process_id",
        ),
    ],
)
def test_bad_input(given: tuple[object, ...], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        look(*given, **environment)
    assert str(error.value) == message
