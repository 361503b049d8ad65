"""What is asked of Slurm, and the batch script of an allocation."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.slurm.script import batch_script
from loom.slurm.spec import AllocationSpec, MeshSpec, rest_of_array


def script_of(spec: AllocationSpec, **options: Any) -> str:
    return batch_script(spec, "/home/ada/.loom/slurm", "/home/ada/venv/bin/python", ids="job", **options)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nodes": 0}, "1 node at least"),
        ({"nodes": 2, "gateway_only": True}, "has one node"),
        ({"chain": 0}, "1 allocation at least"),
        ({"name": "a b"}, "no name for an allocation"),
        ({"name": "../mine"}, "no name for an allocation"),
        ({"name": "loom-7"}, "gives itself"),
        ({"venv": "v", "container": "c"}, "give one"),
        ({"time_limit": "soon"}, "'soon' is no time limit"),
        ({"time_limit": "1"}, "the notice of 120 s comes before a time limit of 60 s has begun"),
        ({"options": ("--job-name=x",)}, "use --name"),
        ({"options": ("-o", "file")}, "Loom gives it itself"),
        ({"options": ("--array=0-3",)}, "use --array of Loom's"),
        ({"array": "3-1"}, "'3-1' is no array"),
        ({"array": "0-3%two"}, "is no array: write such as 0-7"),
        ({"array": "0-3", "chain": 2}, "leave --mesh"),
        ({"nodes": 2, "meshes": {"trainers": MeshSpec()}}, "meshes have nodes of their own"),
    ],
)
def test_an_impossible_allocation_is_refused_before_slurm_is_asked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(loom.WrongArguments, match=words):
        AllocationSpec(**wrong)


def test_an_allocations_folder_keeps_what_was_asked_for() -> None:
    spec = AllocationSpec(time_limit="1-0", options=("--exclusive",), meshes={"trainers": MeshSpec(2)})
    newer = spec.to_json().replace("{", '{"of_a_newer_loom": 1,', 1)
    assert AllocationSpec.from_json(newer) == spec


def test_options_are_lines_of_the_script_that_no_shell_changes() -> None:
    spec = AllocationSpec(nodes=2, name="mine", gpus_per_node="8", options=("--constraint=[a|b c]",))
    lines = script_of(spec).splitlines()
    assert "#SBATCH --nodes=2" in lines
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH '--constraint=[a|b c]'" in lines
    assert "#SBATCH --signal=B:USR1@120" in lines
    assert lines[0] == "#!/bin/sh"


def test_a_job_that_grows_an_allocation_without_a_name_of_its_own_is_for_that_one() -> None:
    script = script_of(AllocationSpec(), name="loom-7")
    assert "name=${1:-loom-7}" in script
    assert "#SBATCH --job-name=loom-7" in script


@pytest.mark.parametrize(
    ("array", "others"),
    [("0", None), ("7-7", None), ("0-7", "1-7"), ("0-7%4", "1-7%3"), ("0-6:2,9%1", "1-4%1")],
)
def test_an_array_has_a_first_job_and_others(array: str, others: str | None) -> None:
    assert rest_of_array(array) == others


def test_named_meshes_are_components_of_the_job_each_with_a_step() -> None:
    meshes = {"trainers": MeshSpec(2, gpus_per_node="8"), "generators": MeshSpec(partition="cpu")}
    script = script_of(AllocationSpec(name="mine", partition="gpu", notice=60, meshes=meshes))
    first, second = (part.splitlines() for part in script.split("#SBATCH hetjob\n"))
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --gpus-per-node=8"} <= set(first)
    assert {"#SBATCH --nodes=1", "#SBATCH --partition=cpu"} <= set(second)
    assert not [line for line in second if line.startswith("#SBATCH --gpus-per-node")]
    steps = [line for line in second if line.startswith("step ")]
    assert [line.split(" /")[0] for line in steps] == [f"step --het-group={n} --ntasks={2 - n}" for n in range(2)]
    assert ["--first 0" in steps[0], "--first 2" in steps[1]] == [True, True]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("my mesh", {}), "cannot name a mesh"),
        (("trainers", {"hosts": 2}), "no 'hosts': give nodes, partition"),
        (("trainers", {"nodes": 0}), "1 node at least, not 0"),
    ],
)
def test_an_impossible_mesh_is_refused(given: tuple[str, dict[str, object]], words: str) -> None:
    with pytest.raises(loom.WrongArguments, match=words):
        MeshSpec.of(*given)


@pytest.mark.parametrize(
    ("spec", "launched"),
    [
        (AllocationSpec(name="a"), "/home/ada/venv/bin/python -c"),
        (
            AllocationSpec(name="a", container="/loom.sif"),
            'apptainer exec --nv --bind "$root" /loom.sif',
        ),
        (AllocationSpec(name="a", container="docker://lab/loom:1"), "apptainer exec --nv"),
        (AllocationSpec(name="a", container="lab#loom:1"), "--container-image='lab#loom:1'"),
    ],
)
def test_python_comes_from_the_environment_or_the_image(spec: AllocationSpec, launched: str) -> None:
    assert launched in script_of(spec)


@pytest.mark.parametrize(
    "script",
    [
        script_of(AllocationSpec(name="mine", chain=5)),
        script_of(AllocationSpec(), new=".new-1"),
        script_of(AllocationSpec(name="a", container="it's an image"), arguments=" --grown"),
        script_of(AllocationSpec(meshes={"a": MeshSpec(), "b": MeshSpec(3)}), new=".new-1"),
    ],
)
def test_the_script_is_one_of_sh(script: str) -> None:
    subprocess.run(["sh", "-n"], input=script.encode(), check=True)


def test_a_node_that_finds_no_wheel_of_loom_ends_all_nodes_and_says_why(tmp_path: Path) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "mine"
    for made in (wheels, folder):
        made.mkdir()
    script = script_of(AllocationSpec(name="mine", wheelhouse=str(wheels)))
    (words,) = (shlex.split(line) for line in "".join(script).split("\nstep ")[1:])
    begin = words.index("python3")
    command = [sys.executable, *words[begin + 1 : begin + 4], "-c", "", str(folder)]
    given = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    told = (folder / "notice-7-1").read_text()
    assert told.startswith(f"there is no wheel of monarch-loom in {wheels} on ")
    assert done.stderr == f"error: {told}"
