"""The place of a process: arguments, then a launcher's environment, then jax's detection."""

from __future__ import annotations

import os
import socket
import sys
import types
from typing import Any

import pytest

from pipeline.processes.cluster import Cluster, find
from pipeline.processes.names import COORDINATOR, PROCESS, PROCESSES

space = types.SimpleNamespace
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
FOREIGN = (
    "PMI_",
    "JOB_",
    "SLURM_",
    "OMPI_",
    "KUBERNETES_",
    "JAX_COORD",
    "JAX_LOCAL",
    "SHARDPIPE_",
    "TPU_",
    "MEGASCALE_",
)


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


def test_devices_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0, 1,2")
    assert find(None, None, None, timeout=1) == Cluster("node003:61540", 6, 5, (0, 1, 2))
    assert find("h:1", 2, 0, timeout=1) == Cluster("h:1", 2, 0, (0, 1, 2))
    for wrong in ("all", "0-3", "1,1", "0,"):
        with pytest.raises(ValueError) as error:
            look("h:1", 2, 0, JAX_LOCAL_DEVICE_IDS=wrong)
        assert str(error.value) == (
            f"JAX_LOCAL_DEVICE_IDS={wrong!r}: must be the numbers of this process's devices on its "
            f"host, with commas between them, such as 0,1,2,3"
        )


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    return cloud_tpu_cluster


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (
            {"TPU_WORKER_HOSTNAMES": "localhost,other", "TPU_WORKER_ID": "1"},
            Cluster("localhost:8482", 2, 1),
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, Cluster()),
        (
            {
                "TPU_WORKER_HOSTNAMES": "a,b",
                "TPU_WORKER_ID": "1",
                "MEGASCALE_COORDINATOR_ADDRESS": "localhost:9000",
                "MEGASCALE_NUM_SLICES": "4",
                "MEGASCALE_SLICE_ID": "2",
            },
            Cluster("localhost:8482", 8, 5),
        ),
    ],
)
def test_a_tpu_pod_under_kubernetes(
    environment: dict[str, str], found: Cluster, tpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu.GceTpuCluster, "is_env_present", classmethod(lambda cls: False))
    monkeypatch.setattr(tpu, "get_tpu_env_value", os.environ.get)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = look(None, None, None)
    assert place == found
    assert place.local_device_ids is None  # all of the host


@pytest.mark.parametrize("workers", ["localhost,other,third", "x:0:localhost,y:1:other,z:2:third"])
def test_a_tpu_pod_by_its_metadata(workers: str, tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {
        "agent-worker-number": "2",
        "worker-network-endpoints": workers,
        "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-12'",
    }
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(tpu, "get_metadata", lambda key: (metadata[key], 200))
    assert look(None, None, None) == Cluster("localhost:8482", 3, 2)


class RefusedError(Exception):
    status, reason = 403, "Forbidden"


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pod of an indexed Job with a headless service, and a false interface to ask about it."""
    from jax._src.clusters.k8s_cluster import K8sCluster

    pod = space(
        metadata=space(
            name="train-2-xyz",
            labels={"job-name": "train"},
            owner_references=[space(controller=True, kind="Job")],
        ),
        spec=space(subdomain="localdomain"),
    )
    job = space(metadata=space(name="train", labels={}), spec=space(parallelism=4))
    core = space(
        list_namespaced_pod=lambda namespace, field_selector: space(items=[pod]),
        list_namespaced_service=lambda namespace: space(items=[]),
    )
    batch = space(read_namespaced_job=lambda name, namespace: job)
    kubernetes = types.ModuleType("kubernetes")
    kubernetes.config = space(load_incluster_config=lambda: None)
    kubernetes.client = space(
        CoreV1Api=lambda: core,
        BatchV1Api=lambda: batch,
        exceptions=space(ApiException=RefusedError),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", kubernetes)
    monkeypatch.setattr(K8sCluster, "_namespace", classmethod(lambda cls: "default"))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    for cached in (K8sCluster._pod, K8sCluster._job, K8sCluster._headless_svc):
        cached.cache_clear()
    K8sCluster._controller.cache_clear()
    return space(pod=pod, job=job, core=core, batch=batch)


KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "train-2-xyz",
    "JOB_COMPLETION_INDEX": "2",
}
ALONE = (
    "or give coordinator, num_processes and process_id; where this process is alone, "
    "num_processes=1 or SHARDPIPE_PROCESSES=1"
)
UNTOLD = "jax sees that this process belongs to a cluster, but cannot tell its place: "


def test_a_kubernetes_job(pod: Any) -> None:
    assert look(None, None, None) == Cluster("train-0.localdomain:55527", 4, 2)
    assert look("h:1", None, None) == Cluster("h:1", 4, 2)
    assert look(None, 3, 1) == Cluster("train-0.localdomain:55527", 3, 1)
    assert look(None, 1, None) == Cluster()
    assert look(None, None, None, SHARDPIPE_PROCESSES="1") == Cluster()


def test_a_kubernetes_job_set(pod: Any) -> None:
    pod.job.metadata.labels = {"jobset.sigs.k8s.io/jobset-name": "runs"}
    pod.job.metadata.name = "runs-workers-0"
    assert look(None, None, None) == Cluster("runs-workers-0-0.runs:55527", 4, 2)


def test_given_parts_are_not_asked_of_kubernetes(pod: Any) -> None:
    pod.batch.read_namespaced_job = None  # jax would call it for the number of processes
    pod.core.list_namespaced_pod = None
    assert look("h:1", 4, None) == Cluster("h:1", 4, 2)


def test_kubernetes_does_not_tell(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(namespace: str, field_selector: str) -> None:
        raise RefusedError

    def untold() -> str:
        with pytest.raises(ValueError) as error:
            look(None, None, None)
        text = str(error.value)
        assert text.startswith(UNTOLD)
        assert text.endswith("\nMend that, " + ALONE)
        return text.removeprefix(UNTOLD)

    pod.pod.spec.subdomain = None
    assert untold().startswith("RuntimeError: Pods within a job need a headless service")
    pod.pod.spec.subdomain = "localdomain"
    pod.pod.metadata.owner_references[0].kind = "ReplicaSet"
    text = "RuntimeError: In K8s, cluster automatic bootstrap only supports Job/JobSet."
    assert untold().startswith(text)
    pod.pod.metadata.owner_references[0].kind = "Job"
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    assert 'jobs must be indexed by setting `completionMode: "Indexed"`' in untold()
    from jax._src.clusters.k8s_cluster import K8sCluster

    K8sCluster._pod.cache_clear()
    K8sCluster._controller.cache_clear()
    pod.core.list_namespaced_pod = refuse
    assert untold().startswith("RuntimeError: Kubernetes API Error: 403 - Forbidden")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"JOB_COMPLETION_INDEX": "0"},
            (
                f"JOB_COMPLETION_INDEX=0: this process seems to be one of several, but jax finds "
                f"no others; for Kubernetes install jax[k8s], {ALONE}"
            ),
        ),
        (
            {"PMI_SIZE": "4"},
            (
                f"PMI_SIZE=4: this process seems to be one of several, but jax finds no others; it "
                f"knows no MPI but Open MPI, {ALONE}"
            ),
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            (
                "WORLD_SIZE=2: this process seems to be one of several, but jax finds no others; "
                "torchrun tells jax nothing: num_processes is its WORLD_SIZE, process_id its RANK, "
                "and the port of the coordinator another than MASTER_PORT, which is taken; start "
                f"the program with `python -m pipeline launch`, {ALONE}"
            ),
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
            (
                "SLURM_STEP_NUM_TASKS=4: this process seems to be one of several, but jax finds no "
                f"others; for SLURM it wants SLURM_NTASKS, which `srun --ntasks=N` sets, {ALONE}"
            ),
        ),
        *(
            (
                {name: "2"},
                (
                    f"{name}=2: this process seems to be one of several, but jax finds no others; "
                    f"it does not know this launcher, {ALONE}"
                ),
            )
            for name in ("FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "PMIX_RANK")
        ),
    ],
)
def test_nobody_trains_alone_by_mistake(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        look(None, None, None, **environment)
    assert str(error.value) == message
    assert look(None, 1, None, **environment) == Cluster()
    for name in ("PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        assert look(None, None, None, **{name: "1"}) == Cluster()


def test_open_mpi_5_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        if "orte" not in name:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        look(None, None, None, **os.environ)
    old = (
        "OMPI_COMM_WORLD_SIZE=2: this process seems to be one of several, but jax finds no others; "
        f"for Open MPI 5 it wants a later jax, and mpi4py, {ALONE}"
    )
    new = (
        f"{UNTOLD}RuntimeError: Open MPI 5 or newer requires mpi4py for distributed "
        f"initialization.\nMend that, {ALONE}"
    )
    assert str(error.value) in (old, new)


def test_slurm_that_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_NTASKS": "6(x2)"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        look(None, None, None)
    assert str(error.value) == (
        f"{UNTOLD}ValueError: invalid literal for int() with base 10: '6(x2)'\nMend that, {ALONE}"
    )


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
