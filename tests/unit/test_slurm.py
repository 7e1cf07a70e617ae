"""SLURM: nodes from the environment of a task, and the batch script of a plan."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from small_runs import PPO, plan_of
from typer.testing import CliRunner

from flexrlhf.cli.app import app
from flexrlhf.cli.slurm import node_groups, slurm_script
from flexrlhf.errors import UserError
from flexrlhf.placement.hosts import Hosts, first_host, slurm_hosts

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08,12],login1",
    "SLURM_JOB_ID": "20123",
    "SLURM_NODEID": "2",
}
MIXED = "cluster={nodes: [{count: 2, devices: 4, class: A100-80G}, {count: 1, devices: 8, class: V100-32G}]}"


@pytest.mark.parametrize(
    ("listed", "host"),
    [
        ("gpu[03-05,7],login1", "gpu03"),
        ("gpu[3]", "gpu3"),
        ("a,b", "a"),
        ("node1", "node1"),
        ("rack[1-2]n,x", "rack1n"),
        ("a-b.c,d[1]", "a-b.c"),
    ],
)
def test_the_first_host_of_a_list(listed: str, host: str) -> None:
    assert first_host(listed) == host


def test_a_task_on_each_node_is_a_launcher() -> None:
    assert slurm_hosts(STEP) == Hosts(3, 2, "gpu07:20123")
    assert slurm_hosts(STEP, "a:1") == Hosts(3, 2, "a:1")
    # the first component of a heterogeneous job has node 0, whatever comes first by name
    assert slurm_hosts({**STEP, "SLURM_JOB_NODELIST_HET_GROUP_0": "z1"}).rdzv_endpoint == "z1:20123"
    one = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert slurm_hosts(one) == Hosts()


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "--launcher slurm: SLURM_STEP_ID missing from the environment; start with srun, a task a node"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "12"},
            "srun: 12 tasks on 3 nodes; a task starts all ranks of its node: use --ntasks-per-node=1",
        ),
        (
            {**STEP, "SLURM_STEP_NODELIST": ""},
            "SLURM_STEP_NODELIST: no host in the environment of this task; give --rdzv-endpoint HOST:PORT",
        ),
        (
            {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"},
            "srun: 2 tasks on 1 nodes; a task starts all ranks of its node: use --ntasks-per-node=1, or --launcher "
            "local for this one alone",
        ),
        ({**STEP, "SLURM_NODEID": "x"}, "SLURM_NODEID: 'x' in the environment of a task; srun sets a number"),
    ],
)
def test_a_task_that_cannot_be_one(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        slurm_hosts(environment)
    assert str(caught.value) == sentence


def test_the_environment_chooses_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Hosts(2, 1, "a:1")
    assert Hosts().of_launcher("auto", STEP) == slurm_hosts(STEP)
    assert given.of_launcher("auto", STEP) == given.of_launcher("local", STEP) == given
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert Hosts().of_launcher("auto", alone | {"PMI_SIZE": "1"}) == Hosts()
    many = alone | {"SLURM_STEP_NUM_TASKS": "2"}
    assert (
        Hosts().of_launcher("local", many | {"PMI_SIZE": "2"}) == Hosts() and given.of_launcher("auto", many) == given
    )
    # srun sets the variables of PMI
    assert Hosts().of_launcher("auto", STEP | {"PMI_SIZE": "3"}) == slurm_hosts(STEP)
    for found in ({"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}):
        with pytest.raises(UserError, match="(each of these processes would start all ranks|without MASTER_ADDR)"):
            Hosts().of_launcher("auto", found)
    with pytest.raises(UserError, match="^srun: 2 tasks on 1 nodes"):
        Hosts().of_launcher("auto", many)
    with pytest.raises(UserError, match="--launcher torchrun: RANK and WORLD_SIZE"):
        Hosts().of_launcher("torchrun", {})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    assert Hosts().of_launcher("auto", STEP) == Hosts().of_launcher("torchrun", {}) == Hosts()
    with pytest.raises(UserError, match="--launcher local: another launcher"):
        Hosts().of_launcher("local", {})


def test_nodes_of_a_job_that_srun_does_not_start_are_named() -> None:
    """A batch script that calls the command itself runs it on its first node."""
    one, two = (plan_of(None, 2, f"cluster={{nodes: [{{count: {n}, devices: {2 // n}}}]}}").cluster for n in (1, 2))
    job = {"SLURM_JOB_ID": "5", "SLURM_NNODES": "2"}
    unequal = {"SLURM_JOB_ID": "5", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_ID": "0"}
    idle = "SLURM: the job has 2 nodes, of which this run uses one; start it with srun --ntasks-per-node=1 for more"
    assert Hosts().check_srun("auto", one, job) == idle
    assert Hosts().check_srun("auto", one, unequal) == Hosts().check_srun("auto", two, {}) == ""
    assert Hosts().check_srun("ray", two, job) == Hosts(2, 0, "a:1").check_srun("auto", two, job) == ""
    for environment in (job, unequal):
        with pytest.raises(UserError, match="^SLURM: the job has 2 nodes and cluster.nodes 2, but this process would"):
            Hosts().check_srun("auto", two, environment)


def test_a_script_has_the_nodes_of_the_plan(tmp_path: Path) -> None:
    plan = plan_of(None, 16, MIXED, "placement={actor: {ratio: 0.5}, critic: 0.5, ref: 0.5, reward: 0.5}")
    assert node_groups(plan.cluster) == [(2, 4, "A100-80G"), (1, 8, "V100-32G")]
    lines = slurm_script(plan, "flexrlhf run a.yaml --resume auto", ["time=1:00"], 60).splitlines()
    assert lines[:5] == [
        "#!/bin/bash",
        "#SBATCH --job-name=test",
        "#SBATCH --signal=USR1@60",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    assert lines.count("#SBATCH hetjob") == 1 and lines.count("#SBATCH --time=1:00") == 2
    assert [line for line in lines if "nodes=" in line] == ["#SBATCH --nodes=2", "#SBATCH --nodes=1"]
    assert [line for line in lines if "gpus" in line] == ["#SBATCH --gpus-per-node=4", "#SBATCH --gpus-per-node=8"]
    assert "srun --het-group=0-1 flexrlhf run a.yaml --resume auto" in lines
    alike = slurm_script(plan_of(None, 2, "cluster.device=cpu"), "flexrlhf run a.yaml").splitlines()
    assert "#SBATCH --cpus-per-task=2" in alike and "srun flexrlhf run a.yaml" in alike and "hetjob" not in str(alike)


@pytest.mark.parametrize(
    "directive", ["time=1\n#SBATCH --wrap=evil", "", "--time=1", "comment=a\x1b[2J", "time=1\r--wrap=x", "a b=1"]
)
def test_a_directive_is_one_option(directive: str) -> None:
    plan = plan_of(None, 2, "cluster.device=cpu")
    with pytest.raises(UserError, match="^--directive '.*': expected one option of sbatch, KEY=VALUE, such as"):
        slurm_script(plan, "flexrlhf run a.yaml", [directive])


def test_values_of_directives_stay_inside_their_option() -> None:
    plan = plan_of(None, 2, "cluster.device=cpu")
    lines = slurm_script(plan, "flexrlhf run a.yaml", ["comment=a --wrap=b", "exclusive", "gres=gpu:2"]).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --") and line[10:11] in "ceg"] == [
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --comment='a --wrap=b'",
        "#SBATCH --exclusive",
        "#SBATCH --gres=gpu:2",
    ]


def test_names_of_a_config_end_no_line_of_a_script() -> None:
    label = '[{devices: 2, class: "a\\n#SBATCH --wrap=evil", memory_gb: 8}]'
    plan = plan_of(None, 2, "cluster.device=cpu", f"cluster.nodes={label}")
    lines = slurm_script(plan, "flexrlhf run a.yaml").splitlines()
    assert not [line for line in lines if line.startswith("#SBATCH --wrap")] and any("evil" in line for line in lines)


def test_all_tasks_of_a_script_have_one_secret(tmp_path: Path) -> None:
    """The shell of the batch script makes it; srun passes it on."""
    script = slurm_script(plan_of(None, 2, "cluster.device=cpu"), "env").replace("srun env", "env; exit 0")
    found = []
    for given in ({}, {}, {"FLEXRLHF_TOKEN": "mine"}):
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", **given}
        )
        found += [line for line in done.stdout.splitlines() if line.startswith("FLEXRLHF_TOKEN=")]
    assert [len(each) for each in found] == [79, 79, 19] and found[0] != found[1]


def test_words_of_a_command_stay_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with quotes, blanks, line ends or commands in them, in the script and in the line that names it."""
    monkeypatch.chdir(tmp_path)
    name = "a $(touch evil) \"q'\n.yaml"
    Path(name).write_text(yaml.safe_dump(PPO | {"cluster": {"device": "cpu"}}))
    result = CliRunner().invoke(app, ["slurm", name, "-o", "my $(touch evil).sbatch", "--force"])
    assert result.exit_code == 0 and result.output.endswith("sbatch 'my $(touch evil).sbatch'\n"), result.output
    for program, body in (("srun", 'printf "%s\\0" "$@" > words'), ("scontrol", "")):
        Path(program).write_text(f"#!/bin/sh\n{body}\n")
        Path(program).chmod(0o755)
    subprocess.run(["bash", "my $(touch evil).sbatch"], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert name in Path("words").read_text().split("\0") and not Path("evil").exists()
