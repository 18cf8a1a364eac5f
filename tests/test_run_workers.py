"""run-workers.sh under Slurm."""

import os
import pathlib
import shutil
import subprocess

import pytest

import egg_net


# --- Slurm ------------------------------------------------------------------------------------------------------------

FAKE_WORKER = """
import sys
if "--list-devices" in sys.argv:
    sys.exit(print("\\n".join(f"cuda:{i}" for i in range(5))))
with open("log", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.mark.parametrize("tasks, task, gpus", [("1(x4)", 0, [0, 1, 2, 3, 4]), ("2(x4)", 0, [0, 2, 4]),
                                               ("2,1(x3)", 1, [1, 3]), ("8", 6, [])])
def test_tasks_of_a_slurm_step_share_the_gpus_of_a_node(tmp_path, tasks, task, gpus):
    here = pathlib.Path(egg_net.__file__).parent
    (tmp_path / "egg.py").write_text(FAKE_WORKER)
    shutil.copy(here / "run-workers.sh", tmp_path)
    environ = {**os.environ, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_LOCALID": str(task),
               "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3"}
    did = subprocess.run([tmp_path / "run-workers.sh", "--port", "7"], cwd="/", env=environ, timeout=60)
    log = tmp_path / "log"
    assert did.returncode == 0
    lines = sorted(log.read_text().splitlines() if log.exists() else [])
    assert lines == [f"worker 10.1.2.3 --port 7 --gpu {i}" for i in gpus]
