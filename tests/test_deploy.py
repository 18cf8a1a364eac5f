"""deploy/: the manifests. tests/test_ray.py runs Ray."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import kubernetes_validate
from pytest import mark
import yaml

import egg
import egg_config
from coordinators import free_port
from fakes import SECRET
from recordings import HERE

KUBERNETES = HERE / "deploy" / "kubernetes"
MINOR = int(kubernetes_validate.latest_version().split(".")[1])
KUBECTL = shutil.which("kubectl")


@functools.cache
def manifests(overlay):
    """The resources of an overlay; without kubectl, which applies its patches, those of the base as they are
    written."""
    if not KUBECTL:
        text = "\n---\n".join(path.read_text() for path in sorted((KUBERNETES / "base").glob("*.yaml")))
        return [resource for resource in yaml.safe_load_all(text) if resource["kind"] != "Kustomization"]
    with tempfile.TemporaryDirectory() as at:
        shutil.copytree(KUBERNETES, at, dirs_exist_ok=True)
        pathlib.Path(at, "base", "secret").write_bytes(SECRET)
        done = subprocess.run([KUBECTL, "kustomize", pathlib.Path(at, overlay)], check=True, capture_output=True)
    return list(yaml.safe_load_all(done.stdout))


def pod_and_container(kind, overlay="base"):
    """What an overlay says of the pods of this kind and of their container."""
    workload, = (resource for resource in manifests(overlay) if resource["kind"] == kind)
    pod = workload["spec"]["template"]["spec"]
    container, = pod["containers"]
    return pod, container


OVERLAYS = ["base", "cpu"] if KUBECTL else ["base"]


@mark.parametrize("minor", range(MINOR - 2, MINOR + 1))
@mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_valid(overlay, minor):
    kinds = []
    for resource in manifests(overlay):
        kubernetes_validate.validate(resource, f"1.{minor}", strict=True)
        kinds.append(resource["kind"])
    assert {"StatefulSet", "Deployment", "Service", "NetworkPolicy", "Namespace"} <= set(kinds)


@mark.parametrize("overlay", OVERLAYS)
def test_pods_run_without_rights_and_with_limits(overlay, monkeypatch):
    monkeypatch.setitem(egg.COMMON, "--threads", dict(type=int))             # more cores than here
    for kind, command in ("StatefulSet", "coordinator"), ("Deployment", "worker"):
        pod, container = pod_and_container(kind, overlay)
        limits = container["resources"]["limits"]
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
        assert {"cpu", "memory"} <= limits.keys()
        assert ("nvidia.com/gpu" in limits) == (kind == "Deployment" and overlay == "base")
        assert "secret" not in str(container["args"]).lower()
        assert egg.parsed(container["args"]).function.__name__ == command
    for resource in manifests(overlay):
        for name in resource.get("data", {}) if resource["kind"] == "ConfigMap" else ():
            assert name.startswith("EGG_") and (name[4:] in egg_config.CONSTANTS or name == "EGG_PRESET")


def test_the_probes_tell_whether_a_coordinator_serves(tmp_path):
    """The commands and arguments of the manifests, with the paths and ports of this machine."""
    _, container = pod_and_container("StatefulSet")
    probes = [container[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    port = free_port()
    environ = {**os.environ, "EGG_SECRET": SECRET.decode(), "EGG_PORT": str(port), "EGG_PRESET": "best"}

    def healthy():
        done = [subprocess.run([sys.executable, *command[1:]], cwd=HERE, env=environ, capture_output=True, text=True)
                for command in probes]
        assert all("Traceback" not in one.stderr for one in done)
        return {one.returncode for one in done}

    assert healthy() == {1}
    arguments = [{"/data/ckpt": str(tmp_path / "ckpt"), "8080": "0"}.get(word, word) for word in container["args"]]
    coordinator = subprocess.Popen([sys.executable, "egg.py", *arguments], cwd=HERE, env=environ, text=True,
                                   stdout=subprocess.PIPE)
    try:
        assert f":{port}, step 0" in coordinator.stdout.readline()
        assert healthy() == {0}
        environ["EGG_SECRET"] = "another secret than that"
        assert healthy() == {2}
    finally:
        coordinator.send_signal(signal.SIGTERM)
        coordinator.communicate(timeout=60)
    assert coordinator.returncode == 0 and healthy() == {1}
