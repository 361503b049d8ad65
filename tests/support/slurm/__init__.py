"""A real Slurm on one machine. Try ``python -m tests.support.slurm``.

::

    laptop ── link ── login ── bridge ─┬─ control (slurmctld, munged)
                      (sshd)           ├─ n1 (slurmd)
                                       ├─ n2 (slurmd)
                                       └─ …

A host is a set of namespaces of the kernel: it has an address, a host name, processes, users and a /tmp of its own.
All but the laptop share the folder of homes, as a cluster's hosts do. The laptop reaches the login node's sshd, and
nothing else. There are two users, ``ada`` and ``bob``; only ``ada`` has a key for the login node. Slurm, munge and
OpenSSH are Debian's own, and find their configuration where it always is.

What Slurm 22.05 does here that matters to who runs something on it:

- There is no accounting: ``sacct`` says so and ends with code 1.
- Processes are tracked by control groups, as on real clusters: Slurm's signals go to the tasks of a step, and at
  its end SIGKILL to whatever is left of it. Without cgroup v1's freezer they are tracked by their parents: each
  process of a step gets its signals, and a daemon outlives its job. ``tracked_by`` says which.
- A node whose slurmd is gone counts as down after `NODE_TIMEOUT`, and its jobs are requeued. The tasks on it run on
  until its slurmd comes back.
- A requeued job waits until the credentials of its former start have expired (`CREDENTIALS_EXPIRE`; two minutes
  unless a site sets it), with the reason ``BeginTime``.
- Memory and processors are what the configuration says, not what this machine has; GPUs are devices that stand in
  for them.
"""

from tests.support.slurm.cluster import SlurmCluster, SlurmJobRow, missing

__all__ = ["SlurmCluster", "SlurmJobRow", "missing"]
