"""The batch script of an allocation. It has no secret: Slurm keeps it, and shows it to administrators.

The script is kept in the allocation's folder, too, from which each allocation of a chain submits the next one.
"""

from __future__ import annotations

import shlex

from loom.slurm.folder import NOTICE, SOON, notice_file
from loom.slurm.spec import AllocationSpec, components, is_for_apptainer, sbatch_lines

_NODE = "import sys; sys.path[:] = [path for path in sys.path if path]; from loom.slurm.node import main; main()"
"""What each node runs. Without the current folder, in which a user's file may be named like a module of Loom's."""

_FROM_WHEELS = f"""\
import glob, os, sys
def fail(why):
    job = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    with open(os.path.join(sys.argv[-1], "{NOTICE}%s-%s" % job), "w") as notice:
        notice.write(why + "\\n")
    sys.exit("error: " + why)
wheels = sorted(glob.glob(sys.argv[1] + "/monarch_loom-*.whl"))
if sys.version_info < (3, 10):
    fail("python3 is %s on %s, and Loom needs 3.10: load a newer one" % (sys.version.split()[0], os.uname()[1]))
if not wheels:
    fail("there is no wheel of monarch-loom in %s on %s" % (sys.argv[1], os.uname()[1]))
sys.path[:] = [wheels[-1]] + [path for path in sys.path if path]
from loom.slurm.wheelhouse import run_from
run_from(sys.argv[1], sys.argv[2:])
"""
"""What any Python of a node runs, with the folder of wheels and the arguments of the environment's Python.

If it cannot, all nodes of the job are told to end, and why.
"""

_SCRIPT = """#!/bin/sh
{options}
# An allocation of Loom. Arguments: its name, and how many allocations are left in its chain.
mask=$(umask)
umask 077
root={root}
name=${{1:-{name}}}
left=${{2:-{chain}}}
folder=$root/$name
{claim}
cd "$folder" || exit 1
grep -qx "$SLURM_JOB_ID" {ids} 2>/dev/null || echo "$SLURM_JOB_ID" >>{ids}
scontrol show node "{nodes}" --oneliner |
    sed -n 's/^NodeName=\\([^ ]*\\) .* NodeAddr=\\([^ ]*\\) .*/\\1 \\2/p' >"nodes-$SLURM_JOB_ID"
if [ "$left" -gt 1 ] && [ ! -s "next-$SLURM_JOB_ID" ]; then
    env -u SLURM_RESTART_COUNT sbatch --parsable --job-name="$name" --dependency="afterany:$SLURM_JOB_ID" \\
        --chdir="${{SLURM_SUBMIT_DIR:-$HOME}}" "$folder/script" "$name" "$((left - 1))" >"next-$SLURM_JOB_ID" &&
        cut -d ';' -f 1 "next-$SLURM_JOB_ID" >>{ids}
fi
cd "${{SLURM_SUBMIT_DIR:-$HOME}}" 2>/dev/null || cd
umask "$mask"
notice=$folder/{notice}
(umask 077 && : >"$notice")
# The nodes read it. A signal to the step would end each process of it at once, before it has saved its state.
trap 'echo {soon} >"$notice"' USR1 TERM
trap : HUP USR2
step() {{
    exec srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --overlap --cpu-bind=none --mem=0 \\
        --output="$folder/log/%N.log" --open-mode=append "$@"
}}
{steps}
code=0
for step in $steps; do
    while :; do
        wait "$step"
        ended=$?
        kill -0 "$step" 2>/dev/null || break  # a signal ends the wait for the step, too
    done
    [ "$code" -ne 0 ] || code=$ended
done
# A preempted job that ends in the time that it is given counts as completed, and would not start again.
if [ ! -s "$notice" ] && scontrol show job "$SLURM_JOB_ID" --oneliner | grep -q ' PreemptTime=[0-9]'; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
exit "$code"
"""

_CLAIM_UNNAMED = """if [ ! -d "$folder" ]; then
    mv -T "$root/{new}" "$folder" 2>/dev/null || [ -d "$folder" ] || exit 1
fi"""


def batch_script(
    spec: AllocationSpec,
    root: str,
    python: str,
    *,
    ids: str,
    name: str | None = None,
    new: str = "",
    arguments: str = "",
) -> str:
    """Return the script of an allocation.

    Args:
        root: the folder of all allocations, absolute.
        python: the interpreter on the nodes, without a container.
        ids: the file of the allocation's folder for the ids of its jobs.
        name: the allocation's; None for the one that is asked for or, without one, that of the job's id.
        new: the name of the folder that the script renames when it knows its job's id; "" for a named one.
        arguments: for `loom.slurm.node`, before the folder.
    """
    name = name or spec.name
    options = sbatch_lines(spec, name or f"loom{new}", f"{root}/slurm-%j.log")
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in options),
        root=shlex.quote(root),
        name=name or "loom-$SLURM_JOB_ID",
        chain=spec.chain,
        ids=ids,
        notice=notice_file("$SLURM_JOB_ID", "${SLURM_RESTART_COUNT:-0}"),
        soon=SOON,
        claim=_CLAIM_UNNAMED.format(new=new) if new else "",
        nodes=_node_list(spec),
        steps=_steps(spec, f"{_launch(spec, python)} -c {shlex.quote(_NODE)}{arguments}"),
    )


def _node_list(spec: AllocationSpec) -> str:
    groups = range(len(spec.meshes))
    if len(groups) < 2:
        return "$SLURM_JOB_NODELIST"
    return ",".join(f"$SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in groups)


def _steps(spec: AllocationSpec, launch: str) -> str:
    """Return the lines that start the steps: one for each component of the job."""
    asked = components(spec)
    if len(asked) < 2:
        return f'step --ntasks="$SLURM_JOB_NUM_NODES" {launch} "$folder" &\nsteps=$!'
    lines, first = ["steps="], 0
    for group, component in enumerate(asked):
        counted = f"--het-group={group} --ntasks={component.nodes}"
        lines += [f'step {counted} {launch} --first {first} "$folder" &', 'steps="$steps $!"']
        first += component.nodes
    return "\n".join(lines)


def _launch(spec: AllocationSpec, python: str) -> str:
    """Return the part of srun's command line that runs Python, in a container if there is one."""
    if spec.wheelhouse is not None:
        return f"python3 -c {shlex.quote(_FROM_WHEELS)} {shlex.quote(spec.wheelhouse)}"
    if spec.container is None:
        return shlex.quote(python)
    image = shlex.quote(spec.container)
    if is_for_apptainer(spec.container):
        return f'apptainer exec --nv --bind "$root" {image} python3'
    return f'--container-image={image} --container-mounts="$root:$root" --container-mount-home python3'
